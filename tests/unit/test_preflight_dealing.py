"""Ranks that read the same data: told where nothing deals them any, and nowhere else."""

from __future__ import annotations

import pytest

import shardscope as ss
from shardscope.planner.preflight import findings_in

PLAN = ss.Plan(ss.models["llama-3.1-8b"], ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(), ss.Layout.fsdp2())
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
    "two texts": """
if rank == 0:
    files = first
else:
    files = second
loader = DataLoader(Rows(files))
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


def names_in(source: str, plan: ss.Plan | None = PLAN) -> set[str]:
    return {finding.name for finding in findings_in(source, plan)}


@pytest.mark.parametrize("body", SAME.values(), ids=SAME)
def test_a_rank_that_deals_no_data_is_no_excuse(body: str) -> None:
    assert NAME in names_in(HEAD + body)


@pytest.mark.parametrize("body", DEALT.values(), ids=DEALT)
def test_whoever_deals_is_not_accused(body: str) -> None:
    assert NAME not in names_in(HEAD + body)
    assert NAME not in names_in(HEAD + body + SAME["a rank for the device alone"], None), "of all loaders"


def test_ranks_that_work_on_one_sequence_read_the_same() -> None:
    together = ss.Plan(PLAN.architecture, PLAN.cluster, ss.Recipe(), ss.Layout.fsdp2(tp=8))
    assert together.degrees.data_parallel == 1
    assert NAME not in names_in("loader = DataLoader(ds)\n", together)


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
def test_odd_code_is_read_to_its_end(source: str) -> None:
    findings_in(source, PLAN)
