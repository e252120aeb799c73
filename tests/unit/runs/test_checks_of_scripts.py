"""Checks of the user's script or function: each finding has its line, a reason and what to write instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.requirements import few, needs

import shardscope as ss
from shardscope.frameworks.fsdp2.old_names import REPLACEMENTS, STRATEGIES
from shardscope.planner.checks import SEVERITIES
from shardscope.runs.checks.findings import check_script

PLAN = ss.Plan(
    ss.models["llama-3.1-8b"], ss.Cluster.parse("2x8xh100-sxm-80gb"), ss.Recipe(), ss.Layout.fsdp2()
)

OLD = """
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, MixedPrecision, CPUOffload, BackwardPrefetch
from torch.distributed.fsdp import StateDictType, FullStateDictConfig
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

policy = MixedPrecision(param_dtype=torch.bfloat16)
model = FSDP(
    model,
    sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
    auto_wrap_policy=transformer_auto_wrap_policy,
    mixed_precision=policy,
    backward_prefetch=BackwardPrefetch.BACKWARD_POST,
    use_orig_params=True,
    limit_all_gathers=True,
    sync_module_states=True,
)
with model.no_sync():
    model(batch).backward()
model.clip_grad_norm_(1.0)
optim_state = FSDP.optim_state_dict(model, optimizer)
with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
    torch.save(model.state_dict(), "model.pt")
"""

NEW = """
import torch
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.utils.data import DataLoader, DistributedSampler

policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model.model.layers:
    fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=policy)
sampler = DistributedSampler(data, num_replicas=16, rank=rank)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for batch in DataLoader(data, sampler=sampler):
        model(batch).loss.backward()
        optimizer.zero_grad()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
"""


def by_name(source: str, plan: ss.Plan | None = None) -> dict[str, Any]:
    return {finding.name: finding for finding in check_script(source, plan)}


def find_line(source: str, text: str) -> int:
    return next(number for number, line in enumerate(source.splitlines(), 1) if text in line)


# ---- FSDP1


def test_every_use_of_fsdp1_is_reported_with_line_and_replacement() -> None:
    findings = {(one.name, one.line): one for one in check_script(OLD)}
    for name, text, change in (
        ("fsdp1", "model = FSDP(", "fully_shard(layer)"),
        ("fsdp1-shard-grad-op", "SHARD_GRAD_OP", "reshard_after_forward=False"),
        ("fsdp1-auto-wrap-policy", "auto_wrap_policy=", "fully_shard(layer)"),
        ("fsdp1-backward-prefetch", "backward_prefetch=", "nothing"),
        ("fsdp1-backward-post", "BACKWARD_POST", "set_modules_to_backward_prefetch"),
        ("fsdp1-use-orig-params", "use_orig_params", "nothing"),
        ("fsdp1-limit-all-gathers", "limit_all_gathers", "nothing"),
        ("fsdp1-sync-module-states", "sync_module_states", "broadcast_from_rank0"),
        ("fsdp1-no-sync", "no_sync", "set_requires_gradient_sync"),
        ("fsdp1-clip-grad-norm", "clip_grad_norm_", "torch.nn.utils.clip_grad_norm_"),
        ("fsdp1-state-dict-type", "FSDP.state_dict_type", "get_model_state_dict"),
        ("fsdp1-full-state-dict-config", "FSDP.state_dict_type", "StateDictOptions"),
        ("checkpoint-gathered-on-one-rank", "StateDictType.FULL_STATE_DICT", "torch.distributed.checkpoint"),
    ):
        finding = findings[name, find_line(OLD, text)]
        assert change in finding.change and finding.why.startswith(f"Line {finding.line}: "), name
    severities = [SEVERITIES.index(finding.severity) for finding in check_script(OLD)]
    assert severities == sorted(severities)


def test_mixed_precision_and_optimizer_state_of_fsdp1_are_warnings() -> None:
    findings = by_name(OLD)
    precision, state = findings["fsdp1-mixed-precision"], findings["fsdp1-optimizer-state"]
    assert {precision.severity, state.severity} == {"warning"}
    assert precision.line == find_line(OLD, "MixedPrecision(")
    assert "every fully_shard call" in precision.change and "loaded in fp32" in precision.change
    assert state.line == find_line(OLD, "FSDP.optim_state_dict")
    assert "after fully_shard" in state.change and "set_optimizer_state_dict" in state.change
    own = by_name("model = FullyShardedDataParallel(model)\ntorch.save(optimizer.state_dict(), path)\n")
    assert own["fsdp1-optimizer-state"].line == 2


def test_repeated_uses_are_listed_separately() -> None:
    source = OLD + "with model.no_sync():\n    pass\nwith model.no_sync():\n    pass\n"
    lines = [one.line for one in check_script(source) if one.name == "fsdp1-no-sync"]
    assert len(lines) == 3 and lines == sorted(set(lines))


def test_code_of_fsdp2_has_no_findings() -> None:
    assert by_name(NEW, PLAN) == {}


def test_no_sync_of_ddp_is_not_reported() -> None:
    source = "from torch.nn.parallel import DistributedDataParallel\nwith model.no_sync():\n    pass\n"
    assert by_name(source) == {}


def test_every_replaced_name_exists_in_torchs_fsdp1() -> None:
    needs("torch")
    import inspect

    from torch.distributed import fsdp
    from torch.distributed.fsdp import FullyShardedDataParallel, wrap

    known = set(inspect.signature(FullyShardedDataParallel.__init__).parameters)
    known |= set(dir(FullyShardedDataParallel)) | set(dir(fsdp)) | set(dir(wrap))
    known.add("ShardedGradScaler")
    assert not set(REPLACEMENTS) - known
    assert set(STRATEGIES) == set(fsdp.ShardingStrategy.__members__)
    numbers = {strategy.name: strategy.value for strategy in fsdp.ShardingStrategy}
    assert [numbers[name] for name in STRATEGIES] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "source",
    [
        "args = TrainingArguments(fsdp='shard_grad_op auto_wrap')\n",
        "args = TrainingArguments(fsdp=['shard_grad_op', 'offload'])\n",
        "plugin = FullyShardedDataParallelPlugin(sharding_strategy='SHARD_GRAD_OP')\n",
        "strategy = ShardingStrategy.SHARD_GRAD_OP\n",
    ],
)
def test_sharding_strategies_are_reported_with_their_replacement(source: str) -> None:
    finding = by_name(source, PLAN)["fsdp1-shard-grad-op"]
    assert finding.line == 1 and "reshard_after_forward=False" in finding.change
    assert by_name("args = TrainingArguments(fsdp=True)\n", PLAN) == {}


def test_accelerates_fsdp_plugin_is_checked() -> None:
    source = "plugin = FullyShardedDataParallelPlugin(use_orig_params=True, cpu_offload=True)\n"
    assert set(by_name(source)) == {"fsdp1", "fsdp1-use-orig-params"}
    assert by_name("plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=True)\n") == {}
    # As in Accelerate's own example of FSDP2.
    sharded = "FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type='SHARDED_STATE_DICT')\n"
    assert by_name(sharded) == {}


def test_an_accelerate_configuration_is_checked() -> None:
    config = """
distributed_type: FSDP
fsdp_config:
  fsdp_version: 1
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_use_orig_params: true
"""
    findings = by_name(config, PLAN)
    assert {name: one.line for name, one in findings.items()} == {
        "fsdp1": 4,
        "fsdp1-full-shard": 5,
        "fsdp1-backward-prefetch": 6,
        "fsdp1-state-dict-type": 7,
        "fsdp1-use-orig-params": 8,
    }
    assert "FSDP1" not in findings["fsdp1-state-dict-type"].why, "FSDP2 has it, too"
    by_number = by_name("fsdp_config:\n  fsdp_sharding_strategy: 2\n")
    assert set(by_number) == {"fsdp1", "fsdp1-shard-grad-op"}
    new = "fsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: true\n"
    assert by_name(new) == {}


# ---- data


def test_a_data_loader_without_a_sampler_is_reported() -> None:
    source = "from torch.utils.data import DataLoader\nloader = DataLoader(data, shuffle=True)\n"
    finding = by_name(source, PLAN)["ranks-read-the-same-data"]
    assert (finding.severity, finding.line, finding.number) == ("danger", 2, 16)
    assert "ranks-read-the-same-data" in by_name(source)
    alone = ss.Plan(PLAN.architecture, ss.Cluster.parse("h100-sxm-80gb"), ss.Recipe(), ss.Layout.ddp())
    assert by_name(source, alone) == {}
    assert by_name(source + "loader = accelerator.prepare(loader)\n", PLAN) == {}


def test_a_sampler_over_ranks_of_one_replica_is_reported() -> None:
    source = (
        "sampler = DistributedSampler(data, num_replicas=ctx.world_size, rank=ctx.rank)\n"
        "sampler.set_epoch(0)\nloader = DataLoader(data, sampler=sampler)\n"
    )
    layout = ss.Layout.fsdp2(tp=4)
    plan = ss.Plan(PLAN.architecture, PLAN.cluster, ss.Recipe(), layout)
    finding = by_name(source, plan)["sampler-over-all-ranks"]
    assert finding.number == 4 and "num_replicas=4" in finding.change
    assert by_name(source, PLAN) == {}


def test_a_sampler_without_set_epoch_is_reported() -> None:
    source = "sampler = DistributedSampler(data)\n"
    assert set(by_name(source)) == {"same-order-every-epoch"}
    assert by_name("sampler = DistributedSampler(data, shuffle=False)\n") == {}


NAME = "ranks-read-the-same-data"
HEAD = """
import os, random, torch, numpy as np, torch.distributed as dist, torch.multiprocessing as mp
from itertools import islice
from torch.utils.data import DataLoader, Dataset, IterableDataset, random_split
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("nccl")
"""

SAME = {
    "a rank for the device alone": """
rank = dist.get_rank()
torch.cuda.set_device(rank)
loader = DataLoader(ds, batch_size=4, shuffle=True)
model = DDP(model.to(rank), device_ids=[rank], output_device=rank)
for batch in loader:
    loss = model(batch.to(rank)); loss.backward(); opt.step()
""",
    "a rank of the environment for the device": """
local_rank = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
device = torch.device(f"cuda:{local_rank}")
ds = load_dataset("text", split="train").map(tokenize)
loader = DataLoader(ds, batch_size=4, collate_fn=lambda rows: stack(rows, device=device))
for step, batch in enumerate(loader):
    batch = {name: value.to(device) for name, value in batch.items()}
    out = model(**batch)
""",
    "a rank for who prints and saves": """
rank = dist.get_rank()
world_size = dist.get_world_size()
loader = DataLoader(ds, batch_size=32 // world_size, num_workers=4 if rank == 0 else 2)
for step, batch in enumerate(tqdm(loader, disable=rank != 0, position=rank, desc=f"rank {rank}")):
    loss = model(batch)
    if rank == 0 and step % 10 == 0:
        print(f"[{rank}] {step}: {loss}")
    if not rank and args.local_rank in (-1, 0):
        torch.save(model.state_dict(), f"model_{rank}.pt")
    logger.info("rank %d of %d", rank, world_size)
""",
    "a Trainer of one's own": """
class Trainer:
    def __init__(self, model, train_data, gpu_id):
        self.gpu_id = gpu_id
        self.train_data = train_data
        self.model = DDP(model.to(gpu_id), device_ids=[gpu_id])
    def run(self):
        for source, targets in self.train_data:
            source, targets = source.to(self.gpu_id), targets.to(self.gpu_id)
            self.step(source, targets)
def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
def main(rank, world_size):
    setup(rank, world_size)
    data = DataLoader(Texts(), batch_size=32, shuffle=True)
    Trainer(model, data, rank).run()
mp.spawn(main, args=(8,), nprocs=8)
""",
    "a rank that waits for the download": """
class Texts(Dataset):
    def __init__(self, path):
        if dist.get_rank() == 0:
            download(path)
        dist.barrier()
        self.rows = read(path)
    def __getitem__(self, index):
        return self.rows[index]
loader = DataLoader(Texts("text"), shuffle=True)
""",
    "a rank of an adapter, and a share of a batch": """
config = LoraConfig(r=8, lora_rank=16)
lora_rank = 16
batch_per_rank = 64 // dist.get_world_size()
loader = DataLoader(ds, batch_size=batch_per_rank)
first = rows[:batch_per_rank]
""",
    "prepare of the model alone": """
accelerator = Accelerator()
loader = DataLoader(ds, batch_size=4)
scheduler = get_scheduler(optimizer, len(loader))
model, optimizer, scheduler, criterion = accelerator.prepare(model, optimizer, scheduler, criterion)
model.prepare_inputs_for_generation()
""",
    "a sampler that is imported and not used": """
from torch.utils.data.distributed import DistributedSampler
loader = DataLoader(ds, shuffle=True)
""",
    "samplers that know no rank": """
from torch.utils.data import RandomSampler
sampler = RandomSampler(ds)
loader = DataLoader(ds, sampler=sampler)
""",
    "no sampler, in words": "loader = DataLoader(ds, sampler=None, batch_sampler=None)\n",
    "files in shards that all ranks read": """
from torch.distributed.tensor import Shard
placements = [Shard(0)]
for shard in shards:
    rows += read(shard)
ds = Rows(rows).to_iterable_dataset(num_shards=64)
loader = DataLoader(ds)
""",
}

DEALT = {
    "a sampler": "loader = DataLoader(ds, sampler=DistributedSampler(ds))\n",
    "a sampler of the training alone": """
from torch.utils.data.distributed import DistributedSampler as Deal
train = DataLoader(ds, sampler=Deal(ds))
test = DataLoader(test_ds, batch_size=4)
""",
    "a sampler where there are ranks": """
sampler = DistributedSampler(ds) if dist.is_initialized() else RandomSampler(ds)
loader = DataLoader(ds, sampler=sampler)
""",
    "a sampler of one's own": "loader = DataLoader(ds, 4, False, EveryOther(ds))\n",
    "a batch sampler of one's own": "loader = DataLoader(ds, batch_sampler=ByLength(ds))\n",
    "options with a sampler": """
options = {"batch_size": 4}
options.update({"sampler": ByLength(ds)})
loader = DataLoader(ds, **options)
""",
    "prepare": """
train_dl = DataLoader(ds)
model, opt, train_dl = accelerator.prepare(model, opt, train_dl)
""",
    "prepare of what the script names otherwise": """
def make():
    return DataLoader(ds)
source = make()
model, source = accelerator.prepare(model, source)
""",
    "prepare of whatever there is": "loader = DataLoader(ds)\nparts = accelerator.prepare(*parts)\n",
    "prepare of a loader by itself": "loader = accelerator.prepare_data_loader(DataLoader(ds))\n",
    "Fabric": "loader = fabric.setup_dataloaders(DataLoader(ds))\n",
    "Lightning": "from lightning import Trainer\nTrainer(devices=8).fit(model, DataLoader(ds))\n",
    "Lightning's module": """
import lightning as L
class Model(L.LightningModule):
    def train_dataloader(self):
        return DataLoader(ds)
""",
    "datasets' shard": """
ds = load_dataset("text").shard(num_shards=dist.get_world_size(), index=dist.get_rank())
loader = DataLoader(ds)
""",
    "datasets' split": """
from datasets.distributed import split_dataset_by_node
loader = DataLoader(split_dataset_by_node(ds, rank=rank, world_size=8))
""",
    "webdataset": "loader = DataLoader(wds.WebDataset(urls, nodesplitter=wds.split_by_node))\n",
    "every eighth": "ids = ids[dist.get_rank()::dist.get_world_size()]\nloader = DataLoader(ids)\n",
    "a slice, in steps": """
me = dist.get_rank()
share = len(rows) // 8
start = me * share
loader = DataLoader(Rows(rows[start:start + share]))
""",
    "a slice in a function": """
def part_of(rows, index, count):
    return rows[index::count]
loader = DataLoader(part_of(rows, dist.get_rank(), 8))
""",
    "a rank that spawn calls by another name": """
def work(i, n):
    loader = DataLoader(Rows(rows[i::n]))
mp.spawn(work, args=(8,), nprocs=8)
""",
    "a dataset that is told the rank": "loader = DataLoader(Stream(files, rank=rank, world_size=8))\n",
    "a dataset that is told by position": "loader = DataLoader(Stream(files, dist.get_rank(), 8), 4)\n",
    "a dataset that asks for the rank": """
class Stream(IterableDataset):
    def __init__(self, files):
        self.files, self.offset = files, dist.get_rank()
    def __iter__(self):
        for row in islice(read(self.files), self.offset, None, dist.get_world_size()):
            yield row
ds = Stream(files)
loader = DataLoader(ds)
""",
    "a dataset that is given who knows": """
args.rank = int(os.environ["RANK"])
loader = DataLoader(build_dataset(args), shuffle=True)
""",
    "a dataset whose attribute it is": "ds.rank = dist.get_rank()\nloader = DataLoader(ds)\n",
    "a file of each rank": """
path = f"part-{os.environ.get('RANK', 0)}.bin"
loader = DataLoader(Rows(np.memmap(path)))
""",
    "files in a condition": """
files = []
for i, name in enumerate(sorted(names)):
    if i % world_size != rank:
        continue
    files.append(name)
loader = DataLoader(Rows(files))
""",
    "not in a condition": """
kept = [row for i, row in enumerate(rows) if not (i % 8 == int(os.environ["RANK"]))]
loader = DataLoader(kept)
""",
    "two texts, in a line": "loader = DataLoader(Rows(first if rank == 0 else second))\n",
    "a split by a rank's seed": """
parts = random_split(ds, [0.5, 0.5], generator=torch.Generator().manual_seed(rank))
loader = DataLoader(parts[0])
""",
    "a generator of a rank": """
g = torch.Generator()
g.manual_seed(dist.get_rank())
loader = DataLoader(ds, shuffle=True, generator=g)
""",
    "a rank's seed": """
seed = args.seed + dist.get_rank()
torch.manual_seed(seed)
loader = DataLoader(ds, shuffle=True)
""",
    "accelerate's seeds": "set_seed(7, device_specific=True)\nloader = DataLoader(ds, shuffle=True)\n",
    "batches in turn": """
loader = DataLoader(ds)
for batch in tqdm(islice(loader, rank, None, world_size)):
    model(batch)
""",
    "batches cut after the loader": """
loader = DataLoader(ds, batch_size=64)
for batch in loader:
    batch = batch[rank * 8:(rank + 1) * 8].to(device)
""",
    "batches in chunks": """
for batch in DataLoader(ds, batch_size=64):
    x = batch["ids"].chunk(world_size)[dist.get_rank()]
""",
    "batches cut by another module": """
loader = DataLoader(ds, batch_size=64)
for batch in loader:
    x = share_of(batch, rank, world_size)
""",
    "batches narrowed": """
for x, y in DataLoader(ds, batch_size=64):
    x = x.narrow(0, rank * 8, 8)
""",
    "rows that rank 0 deals": """
dist.scatter_object_list(mine, everything, src=0)
loader = DataLoader(mine[0])
""",
    "a mesh's rank": """
place = mesh["dp"].get_local_rank()
loader = DataLoader(rows[place::8])
""",
}


@pytest.mark.parametrize("body", SAME.values(), ids=SAME)
def test_a_rank_that_selects_no_data_does_not_suppress_the_finding(body: str) -> None:
    assert NAME in by_name(HEAD + body, PLAN)


@pytest.mark.parametrize("body", DEALT.values(), ids=DEALT)
def test_scripts_that_shard_their_data_are_not_reported(body: str) -> None:
    assert NAME not in by_name(HEAD + body, PLAN)
    assert NAME not in by_name(HEAD + body + SAME["a rank for the device alone"]), "of all loaders"


def test_model_parallel_ranks_may_read_the_same_data() -> None:
    eight = ss.Cluster.parse("8xh100-sxm-80gb")
    together = ss.Plan(PLAN.architecture, eight, ss.Recipe(), ss.Layout.fsdp2(tp=8))
    assert together.degrees.data_parallel == 1
    assert NAME not in by_name("loader = DataLoader(ds)\n", together)


@pytest.mark.parametrize(
    "source",
    [
        "x = " + "1 + " * 3000 + "rank\nloader = DataLoader(x)\n",
        "def f(a):\n    return f(a)\nb = f(b)\nloader = DataLoader(f(b))\n",
        "loader = DataLoader()\n(a, *b), c[0] = loader, rank\n",
        "(lambda: DataLoader(ds))()()\nmp.spawn()\nmp.spawn(f)\naccelerator.prepare()\n",
        "class A:\n    DataLoader(x, *rows, **options)\n    async def f(self): pass\n",
    ],
)
def test_unusual_syntax_is_parsed_completely(source: str) -> None:
    check_script(source, PLAN)


# ---- fp16


def test_fp16_without_loss_scaling_is_reported() -> None:
    source = "model = model.to(torch.float16)\nloss = model(batch)\nloss.backward()\n"
    finding = by_name(source)["fp16-without-loss-scaling"]
    assert (finding.severity, finding.line, finding.number) == ("danger", 1, 2.0**-24)
    assert by_name("scaler = torch.amp.GradScaler()\n" + source) == {}
    assert by_name(source.replace("float16", "bfloat16")) == {}


HALVED = "model = model.to(torch.float16)\naccelerator.backward(loss)\n"


@pytest.mark.parametrize(
    "source",
    [
        "accelerator = Accelerator()\n" + HALVED,
        "from accelerate import Accelerator\n" + HALVED,
        "accelerator = Accelerator(mixed_precision='no')\n" + HALVED,
        "accelerator = Accelerator(mixed_precision='bf16', fsdp_plugin=plugin)\n" + HALVED,
        "accelerator = Accelerator(True, 1)\nmodel.half()\naccelerator.backward(loss)\n",
        "from torch.amp import GradScaler, autocast\n" + HALVED,
        "from torch import float16\nmodel.to(float16)\nloss.backward()\n",
        "model = load(name, torch_dtype=torch.half)\nloss.backward()\n",
        "class Trainer:\n    def step(self):\n        loss.backward()\nTrainer(model.half()).step()\n",
    ],
)
def test_every_form_of_unscaled_fp16_is_reported(source: str) -> None:
    assert "fp16-without-loss-scaling" in by_name(source)


@pytest.mark.parametrize(
    "source",
    [
        "accelerator = Accelerator(mixed_precision='fp16')\n" + HALVED,
        "accelerator = Accelerator(True, 1, 'fp16')\n" + HALVED,
        "accelerator = Accelerator(mixed_precision=args.precision)\n" + HALVED,
        "accelerator = Accelerator(**options)\n" + HALVED,
        "accelerator = Accelerator(deepspeed_plugin=plugin)\n" + HALVED,
        "accelerator = Accelerator()\nif accelerator.mixed_precision == 'fp16':\n    vae.half()\n" + HALVED,
        "from accelerate import Accelerator\ndef step(accelerator: Accelerator):\n    pass\n" + HALVED,
        "def train(model, scaler):\n    scaler.scale(loss).backward()\nmodel.half()\n",
        "loss_scale = 1024\nmodel.half()\n(loss * loss_scale).backward()\n",
        "from transformers import Trainer\nTrainer(model.half())\nloss.backward()\n",
        "engine, *_ = deepspeed.initialize(model=model.half())\nengine.backward(loss)\n",
        "half = size // 2\nx = rows[:half]\nloss.backward()\n",
        "np.save(path, rows.astype(np.float16))\nloss.backward()\n",
        "if weight.dtype == torch.float16:\n    raise TypeError\nloss.backward()\n",
        "config = BitsAndBytesConfig(bnb_4bit_compute_dtype=torch.float16)\nloss.backward()\n",
        "loss.backward()\ntorch.save({name: value.half() for name, value in weights}, path)\n",
        "kind = torch.bfloat16 if has_it() else torch.float16\nloss.backward()\n",
    ],
)
def test_scaled_fp16_and_other_precisions_are_not_reported(source: str) -> None:
    assert "fp16-without-loss-scaling" not in by_name(source)


def test_converting_to_fp16_after_training_is_not_reported() -> None:
    assert by_name("def train():\n    loss.backward()\n    model.half()\n    evaluate(model)\n") == {}


# ---- checkpoints


INIT = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"


def test_a_full_state_dict_on_every_rank_is_reported() -> None:
    source = "options = StateDictOptions(full_state_dict=True)\n"
    finding = by_name(source, PLAN)["checkpoint-gathered-on-every-rank"]
    assert finding.severity == "danger" and "cpu_offload=True" in finding.change
    assert finding.number == PLAN.architecture.num_parameters * 4 / 2**30
    with_optimizer = by_name(source + "get_optimizer_state_dict(model, optimizer)\n", PLAN)
    assert with_optimizer["checkpoint-gathered-on-every-rank"].number == 3 * finding.number
    old = "config = FullStateDictConfig(offload_to_cpu=True)\nkind = StateDictType.FULL_STATE_DICT\n"
    assert by_name(old)["checkpoint-gathered-on-every-rank"].line == 2


def test_a_full_state_dict_on_rank_0_is_a_hint() -> None:
    source = "options = StateDictOptions(full_state_dict=True, cpu_offload=True)\n"
    finding = by_name(source, PLAN)["checkpoint-gathered-on-one-rank"]
    assert finding.severity == "hint" and "torch.distributed.checkpoint.save" in finding.change
    large = ss.Plan(
        ss.models["llama-3.1-405b"], ss.Cluster.parse("64x8xh100-sxm-80gb"), ss.Recipe(global_batch_size=512),
        ss.Layout.fsdp2(),
    )  # fmt: skip
    source += "get_optimizer_state_dict(model, optimizer)\n"
    assert by_name(source, large)["checkpoint-gathered-on-one-rank"].severity == "danger"
    loading = "StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)\n"
    assert by_name(loading) == {} and by_name("StateDictOptions()\n") == {}


@pytest.mark.parametrize(
    "save",
    [
        "torch.save(model.state_dict(), path)\n",
        "model.save_pretrained(path)\n",
        "if step % 100 == 0:\n    torch.save(model.state_dict(), path)\n",
        "def save():\n    torch.save(model.state_dict(), path)\nsave()\n",
        "def save():\n    torch.save(x, path)\nif rank == 0:\n    save()\nsave()\n",
    ],
)
def test_a_file_written_by_every_rank_is_reported(save: str) -> None:
    finding = by_name(INIT + save)["every-rank-saves"]
    assert finding.line == find_line(INIT + save, "torch.save(" if "torch" in save else "save_pretrained")
    assert "get_rank() == 0" in finding.change
    assert by_name(save) == {}, "one process"


@pytest.mark.parametrize(
    "save",
    [
        "if dist.get_rank() == 0:\n    torch.save(model.state_dict(), path)\n",
        "if accelerator.is_main_process:\n    torch.save(model.state_dict(), path)\n",
        "def save():\n    torch.save(x, path)\nif rank == 0:\n    save()\n",
        "def save(rank):\n    if rank != 0:\n        return\n    torch.save(x, path)\nsave(rank)\n",
        "@on_main_process\ndef save():\n    torch.save(x, path)\n",
        "torch.save(x, f'part-{rank}.pt')\n",
        "def save(n):\n    torch.save(x, f'{n}.pt')\nsave(parallel_state.get_data_parallel_rank())\n",
        "dcp.save(state, checkpoint_id=path)\n",
        "model.save_pretrained(path, is_main_process=main, save_function=accelerator.save)\n",
    ],
)
def test_a_file_written_by_one_rank_is_not_reported(save: str) -> None:
    assert "every-rank-saves" not in by_name(INIT + save)


# ---- devices and ranks


@pytest.mark.parametrize(
    "line",
    [
        "device = torch.device('cuda:0')\n",
        "model.to('cuda:1')\n",
        "model.cuda(0)\n",
        "torch.cuda.set_device(0)\n",
        "model = DistributedDataParallel(model, device_ids=[0])\n",
        "state = torch.load(path, map_location='cuda:0')\n",
    ],
)
def test_a_hard_coded_device_is_reported(line: str) -> None:
    finding = by_name(INIT + line)["device-hard-coded"]
    assert finding.line == 3 and "LOCAL_RANK" in finding.change
    assert by_name(line.replace("DistributedDataParallel", "wrap")) == {}, "one process may use GPU 0"


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.set_device(local_rank)\n",
        "device = torch.device(f'cuda:{local_rank}')\n",
        "device = torch.device('cuda', local_rank)\n",
        "model = DistributedDataParallel(model, device_ids=[rank])\n",
        "print('cuda:0 is busy')\n",
        "model = DistributedDataParallel(model, device_ids=[])\n",
    ],
)
def test_a_device_selected_by_rank_is_not_reported(line: str) -> None:
    assert not {"device-hard-coded", "device-never-set"} & set(by_name(INIT + line))


@pytest.mark.parametrize(
    "line",
    [
        "dist.init_process_group('nccl', rank=0, world_size=2)\n",
        "sampler = DistributedSampler(data, num_replicas=8, rank=0, shuffle=False)\n",
        "import os\nos.environ['RANK'] = '0'\n",
        "os.environ['CUDA_VISIBLE_DEVICES'] = '0,1'\n",
    ],
)
def test_a_hard_coded_rank_is_reported(line: str) -> None:
    finding = by_name(line)["rank-hard-coded"]
    assert finding.severity == "danger" and "get_rank" in finding.change
    assert "rank-hard-coded" not in by_name("dist.init_process_group('nccl', rank=rank, world_size=-1)\n")


def test_a_missing_set_device_is_reported() -> None:
    source = "import torch\ndist.init_process_group()\nmodel.cuda()\n"
    assert by_name(source)["device-never-set"].line == 2
    assert "device-never-set" in by_name("dist.init_process_group('nccl')\n")
    for fine in (
        "dist.init_process_group('gloo')\nmodel.cuda()\n",
        "dist.init_process_group(device_id=device)\nmodel.cuda()\n",
        source + "torch.cuda.set_device(index)\n",
        source.replace(".cuda()", ".to(rank)"),
        "dist.init_process_group()\n",
    ):
        assert "device-never-set" not in by_name(fine), fine


# ---- gradients


LOOP = "for batch in rows:\n    model(batch).backward()\n    optimizer.step()\n"


@pytest.mark.parametrize("source", [LOOP, "def step(batch):\n    loss.backward()\n    self.opt.step()\n"])
def test_a_missing_zero_grad_is_reported(source: str) -> None:
    finding = by_name(source)["gradients-never-zeroed"]
    assert finding.severity == "danger" and finding.line == 3 and "zero_grad" in finding.change


@pytest.mark.parametrize(
    "source",
    [
        LOOP + "    optimizer.zero_grad(set_to_none=True)\n",
        LOOP + "    for p in model.parameters():\n        p.grad = None\n",
        LOOP.replace("optimizer", "engine"),
        LOOP.replace("optimizer", "scheduler"),
        "loss.backward()\noptimizer.step()\n",
    ],
)
def test_zeroed_gradients_and_single_steps_are_not_reported(source: str) -> None:
    assert "gradients-never-zeroed" not in by_name(source)


# ---- all


def test_the_source_of_a_task_function_is_checked() -> None:
    def task(ctx: Any) -> None:
        from torch.utils.data import DataLoader

        for batch in DataLoader([1, 2, 3]):
            ctx.engine.step(batch)

    names = {finding.name for finding in PLAN.findings(task)}
    assert NAME in names
    assert NAME not in {finding.name for finding in PLAN.findings(ss.Pretrain())}


@pytest.mark.parametrize(
    "layout",
    [ss.Layout.ddp(), ss.Layout.fsdp2(replicate=2), ss.Layout.zero(), ss.Layout.megatron(tp=2)],
    ids=lambda layout: layout.description,
)
def test_our_exported_scripts_have_no_findings(layout: ss.Layout, tmp_path: Path) -> None:
    needs("transformers")
    plan = ss.Plan(ss.models["llama-3.2-1b"], ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(), layout)
    scripts = [path for path in plan.export(tmp_path) if path.suffix == ".py"]
    assert scripts
    findings = [one for path in scripts for one in check_script(path.read_text(encoding="utf-8"), plan)]
    assert [finding.name for finding in findings if finding.severity != "hint"] == []


@pytest.mark.parametrize("source", ["", "def f(:\n", "%matplotlib inline\nFSDP(model)\n", "\x00", "é" * 100])
def test_text_that_is_not_python_has_no_findings(source: str) -> None:
    assert check_script(source, PLAN) == []


def test_a_source_that_is_not_text_raises_value_error() -> None:
    with pytest.raises(ValueError, match="source"):
        check_script(7)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="characters"):
        check_script("x" * (2**20 + 1))


CHAIN = "a" + ".b" * 1500


DEEP_LINES = [
    f"x = {CHAIN}",
    f"x = {'(' * 80}{'-' * 900}1{')' * 80}",
    f"x = {'1 + ' * 3000}1",
    "if a: pass\n" + "elif b: pass\n" * 1200,
    f"{CHAIN} = FullyShardedDataParallel({CHAIN}, auto_wrap_policy=policy)",
    f"{CHAIN}.half()",
    f"x = torch.bfloat16 if {CHAIN} else torch.float16",
    f"loader = DataLoader({CHAIN}, shuffle=True)",
    f"DistributedSampler(data, num_replicas={CHAIN}, rank={CHAIN})",
]


@pytest.mark.parametrize("line", few(DEEP_LINES, DEEP_LINES[:2]))
@pytest.mark.parametrize("plan", [PLAN])
def test_text_nested_beyond_pythons_recursion_limit_raises_nothing(line: str, plan: ss.Plan | None) -> None:
    check_script(f"model.half()\nFullyShardedDataParallel(model)\n{line}\nloss.backward()\n", plan)
