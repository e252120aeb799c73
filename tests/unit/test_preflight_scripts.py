"""Findings about a person's own code: FSDP1's names and patterns, wrapping, data, fp16."""

from __future__ import annotations

from typing import Any

import pytest
from tests.needs import needs

import shardscope as ss
from shardscope.frameworks.fsdp2.old_names import REPLACED, STRATEGIES, translated
from shardscope.planner.preflight import SEVERITIES, findings_in

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
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
"""


def by_name(source: str, plan: ss.Plan | None = None) -> dict[str, Any]:
    return {finding.name: finding for finding in findings_in(source, plan)}


def line_of(source: str, text: str) -> int:
    return next(number for number, line in enumerate(source.splitlines(), 1) if text in line)


def test_every_pattern_of_fsdp1_is_told_with_its_line_and_what_replaces_it() -> None:
    found = by_name(OLD)
    for name, text in {
        "fsdp1": "model = FSDP(",
        "fsdp1-shard-grad-op": "SHARD_GRAD_OP",
        "fsdp1-auto-wrap-policy": "auto_wrap_policy=",
        "fsdp1-mixed-precision": "mixed_precision=",
        "fsdp1-backward-prefetch": "BACKWARD_POST",
        "fsdp1-backward-post": "BACKWARD_POST",
        "fsdp1-use-orig-params": "use_orig_params",
        "fsdp1-limit-all-gathers": "limit_all_gathers",
        "fsdp1-sync-module-states": "sync_module_states",
        "fsdp1-no-sync": "no_sync",
        "fsdp1-clip-grad-norm": "clip_grad_norm_",
        "fsdp1-state-dict-type": "FSDP.state_dict_type",
        "checkpoint-gathered-on-one-rank": "StateDictType.FULL_STATE_DICT",
        "policy-reduces-in-half-precision": "MixedPrecision(",
    }.items():
        assert name in found, (name, list(found))
        assert found[name].line == line_of(OLD, text), name
        assert found[name].change
    assert "reshard_after_forward=False" in found["fsdp1-shard-grad-op"].change
    assert "set_requires_gradient_sync" in found["fsdp1-no-sync"].change
    severities = [SEVERITIES.index(finding.severity) for finding in findings_in(OLD)]
    assert severities == sorted(severities)


def test_code_of_fsdp2_has_none_of_it() -> None:
    assert by_name(NEW, PLAN) == {}


def test_ddp_may_have_no_sync() -> None:
    source = "from torch.nn.parallel import DistributedDataParallel\nwith model.no_sync():\n    pass\n"
    assert by_name(source) == {}


def test_every_replacement_is_a_name_of_fsdp1_that_torch_has() -> None:
    needs("torch")
    import inspect

    from torch.distributed import fsdp
    from torch.distributed.fsdp import FullyShardedDataParallel, wrap

    known = set(inspect.signature(FullyShardedDataParallel.__init__).parameters)
    known |= set(dir(FullyShardedDataParallel)) | set(dir(fsdp)) | set(dir(wrap))
    known.add("ShardedGradScaler")
    assert not set(REPLACED) - known
    assert set(STRATEGIES) == set(fsdp.ShardingStrategy.__members__)
    numbers = {strategy.name: strategy.value for strategy in fsdp.ShardingStrategy}
    assert [numbers[name] for name in STRATEGIES] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("name", "reshards", "replicate"),
    [("FULL_SHARD", True, 1), ("SHARD_GRAD_OP", False, 1), ("HYBRID_SHARD", True, 2)],
)
def test_strategies_become_layouts(name: str, reshards: bool, replicate: int) -> None:
    layout = translated(name, PLAN.cluster)
    assert layout is not None
    assert (layout.reshard_after_forward, layout.replicate) == (reshards, replicate)
    found = by_name(f"strategy = ShardingStrategy.{name}", PLAN)[f"fsdp1-{name.lower().replace('_', '-')}"]
    assert found.plan is not None and found.plan.layout == layout
    assert found.number == found.plan.memory().peak_bytes / 2**30


@pytest.mark.parametrize(
    "source",
    [
        "args = TrainingArguments(fsdp='shard_grad_op auto_wrap')\n",
        "args = TrainingArguments(fsdp=['shard_grad_op', 'offload'])\n",
        "plugin = FullyShardedDataParallelPlugin(sharding_strategy='SHARD_GRAD_OP')\n",
    ],
)
def test_strategies_named_as_text(source: str) -> None:
    found = by_name(source, PLAN)["fsdp1-shard-grad-op"]
    assert found.line == 1 and "reshard_after_forward=False" in found.change
    assert by_name("args = TrainingArguments(fsdp=True)\n", PLAN) == {}


def test_no_shard_is_ddp() -> None:
    assert translated("NO_SHARD", PLAN.cluster) is None
    found = by_name("strategy = ShardingStrategy.NO_SHARD", PLAN)["fsdp1-no-shard"]
    assert found.plan is not None and found.plan.layout == ss.Layout.ddp()
    with pytest.raises(ValueError, match="SHARD_GRAD_OP"):
        translated("SHARD_GRAD", PLAN.cluster)


def test_an_accelerate_configuration() -> None:
    config = """
distributed_type: FSDP
fsdp_config:
  fsdp_version: 1
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_auto_wrap_policy: NO_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_use_orig_params: true
"""
    found = by_name(config, PLAN)
    assert set(found) == {
        "fsdp1",
        "fsdp1-full-shard",
        "whole-model-as-one-unit",
        "fsdp1-backward-prefetch",
        "checkpoint-gathered-on-one-rank",
        "fsdp1-use-orig-params",
    }
    assert found["fsdp1-full-shard"].line == 5
    # fp32 weights and both moments of 8.03e9 parameters.
    whole = PLAN.architecture.num_parameters * 12 / 2**30
    assert found["checkpoint-gathered-on-one-rank"].number == whole
    by_number = by_name("fsdp_config:\n  fsdp_sharding_strategy: 2\n")
    assert set(by_number) == {"fsdp1", "fsdp1-shard-grad-op"}
    new = "fsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: true\n"
    assert by_name(new) == {}


# ----------------------------------------------------------------------------------------- wrapping


@pytest.mark.parametrize(
    "source",
    [
        "from torch.distributed.fsdp import fully_shard\nfully_shard(model)\n",
        "from torch.distributed.fsdp import FullyShardedDataParallel as F\nmodel = F(model)\n",
    ],
)
def test_a_whole_model_as_one_unit(source: str) -> None:
    found = by_name(source, PLAN)["whole-model-as-one-unit"]
    assert found.severity == "danger" and found.line == 2
    assert found.number == PLAN.architecture.num_parameters * 2 / 2**30
    assert "fully_shard(layer)" in found.change


FSDP1 = "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
FSDP2 = "from torch.distributed.fsdp import fully_shard\n"


@pytest.mark.parametrize(
    "source",
    [
        FSDP2 + "ds = ds.map(tokenize)\nfully_shard(model)\n",
        FSDP2 + "model.apply(init_weights)\nfully_shard(model)\n",
        FSDP2 + "def init(m):\n    m.reset()\nmodel.apply(init)\nfully_shard(model)\n",
        FSDP2 + "model.apply(lambda m: m.reset())\nfully_shard(model)\n",
        FSDP2 + "from textwrap import wrap\nprint(wrap(text))\nfully_shard(model)\n",
        FSDP2 + "import textwrap\nprint(textwrap.wrap(text))\nfully_shard(model)\n",
        FSDP1 + "model.apply(init_weights)\nmodel = FSDP(model)\nassert isinstance(model, FSDP)\n",
        FSDP1 + "model = FSDP(model, auto_wrap_policy=None)\nrows = list(map(tokenize, rows))\n",
        FSDP1 + "def save(model: FSDP):\n    FSDP.state_dict_type(model, kind)\nmodel = FSDP(model)\n",
        # What is recomputed by itself is not gathered by itself.
        FSDP1 + "model.apply(lambda m: checkpoint_wrapper(m))\nmodel = FSDP(model)\n",
    ],
)
def test_what_wraps_no_layer_is_no_excuse(source: str) -> None:
    assert "whole-model-as-one-unit" in by_name(source, PLAN)


@pytest.mark.parametrize(
    "source",
    [
        FSDP2 + "list(map(fully_shard, model.layers))\nfully_shard(model)\n",
        FSDP2 + "[fully_shard(layer) for layer in model.layers]\n",
        FSDP2 + "model.apply(lambda m: fully_shard(m) if is_layer(m) else None)\n",
        FSDP2 + "def cut(m):\n    if is_layer(m):\n        fully_shard(m)\nmodel.apply(cut)\n",
        FSDP2 + "class A:\n    def cut(self, m):\n        fully_shard(m)\n    def go(self):\n"
        "        self.model.apply(self.cut)\n",
        FSDP2 + "cut = partial(fully_shard, mesh=mesh)\nfor m in layers:\n    cut(m)\nfully_shard(model)\n",
        FSDP2 + "cut = fully_shard\nfor m in layers:\n    cut(m)\nfully_shard(model)\n",
        FSDP2 + "fully_shard(model.encoder)\nfully_shard(model)\n",
        FSDP1 + "from torch.distributed.fsdp.wrap import wrap\nlayer = wrap(layer)\nmodel = FSDP(model)\n",
        FSDP1 + "from torch.distributed.fsdp import wrap\nm = wrap.wrap(m)\nmodel = FSDP(model)\n",
        FSDP1 + "from torch.distributed.fsdp.wrap import enable_wrap\n"
        "with enable_wrap(wrapper_cls=FSDP):\n    model = FSDP(build())\n",
        FSDP1 + "model = FSDP(model, None, None, None, policy)\n",
        FSDP1 + "model = FSDP(model, **options)\n",
    ],
)
def test_layers_that_are_wrapped_some_other_way(source: str) -> None:
    assert "whole-model-as-one-unit" not in by_name(source, PLAN)


@pytest.mark.parametrize(
    "source",
    [
        "from torch.distributed.fsdp import fully_shard\nfor m in model.modules():\n    fully_shard(m)\n",
        "policy = partial(size_based_auto_wrap_policy, min_num_params=int(1e4))\n",
        "fsdp_config:\n  fsdp_min_num_params: 10000\n",
    ],
)
def test_units_that_are_too_fine(source: str) -> None:
    assert by_name(source, PLAN)["wrapped-too-finely"].number in (10_000, 291 - 3)


@pytest.mark.parametrize(
    "source",
    [
        "for m in model.modules():\n    if is_layer(m):\n        fully_shard(m)\nfully_shard(model)\n",
        "policy = partial(size_based_auto_wrap_policy, min_num_params=int(1e8))\n",
        "policy = partial(size_based_auto_wrap_policy, min_num_params=1e400)\n",
        "policy = partial(size_based_auto_wrap_policy, min_num_params=max(1000, size))\n",
        "policy = partial(prune_small_layers, min_num_params=1000)\n",
        "model = FullyShardedDataParallel(model, auto_wrap_policy=policy)\n",
        "for layer in model.layers:\n    fully_shard(layer)\nfully_shard(model)\n",
        "def cut(m):\n    fully_shard(m)\nfor m in model.layers:\n    cut(m)\ncut(model)\n",
        "def cut(m):\n    fully_shard(m)\nmodel.on_each_layer(cut)\n",
    ],
)
def test_units_that_are_right(source: str) -> None:
    assert not {"whole-model-as-one-unit", "wrapped-too-finely"} & set(by_name(source, PLAN))


# ------------------------------------------------------------------------------------ data and fp16


def test_a_loader_that_gives_every_rank_the_same() -> None:
    source = "from torch.utils.data import DataLoader\nloader = DataLoader(data, shuffle=True)\n"
    found = by_name(source, PLAN)["ranks-read-the-same-data"]
    assert (found.severity, found.line, found.number) == ("danger", 2, 16)
    assert "ranks-read-the-same-data" in by_name(source)
    alone = ss.Plan(PLAN.architecture, ss.Cluster.parse("h100-sxm-80gb"), ss.Recipe(), ss.Layout.ddp())
    assert by_name(source, alone) == {}
    assert by_name(source + "loader = accelerator.prepare(loader)\n", PLAN) == {}


def test_a_sampler_that_deals_to_ranks_that_work_together() -> None:
    source = (
        "sampler = DistributedSampler(data, num_replicas=ctx.world_size, rank=ctx.rank)\n"
        "sampler.set_epoch(0)\nloader = DataLoader(data, sampler=sampler)\n"
    )
    layout = ss.Layout.fsdp2(tp=4)
    plan = ss.Plan(PLAN.architecture, PLAN.cluster, ss.Recipe(), layout)
    found = by_name(source, plan)["sampler-over-all-ranks"]
    assert found.number == 4 and "num_replicas=4" in found.change
    assert by_name(source, PLAN) == {}


def test_a_sampler_that_is_never_told_the_epoch() -> None:
    source = "sampler = DistributedSampler(data)\n"
    assert set(by_name(source)) == {"same-order-every-epoch"}
    assert by_name("sampler = DistributedSampler(data, shuffle=False)\n") == {}


def test_fp16_without_loss_scaling() -> None:
    source = "model = model.to(torch.float16)\nloss = model(batch)\nloss.backward()\n"
    found = by_name(source)["fp16-without-loss-scaling"]
    assert (found.severity, found.line, found.number) == ("danger", 1, 2.0**-24)
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
def test_fp16_that_nothing_scales(source: str) -> None:
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
def test_fp16_that_is_scaled_or_is_none(source: str) -> None:
    assert "fp16-without-loss-scaling" not in by_name(source)


def test_a_function_is_read_when_it_is_the_task() -> None:
    def task(ctx: Any) -> None:
        from torch.utils.data import DataLoader

        for batch in DataLoader([1, 2, 3]):
            ctx.engine.step(batch)

    names = {finding.name for finding in PLAN.findings(task)}
    assert "ranks-read-the-same-data" in names
    assert "ranks-read-the-same-data" not in {finding.name for finding in PLAN.findings(ss.Pretrain())}


@pytest.mark.parametrize("source", ["", "def f(:\n", "%matplotlib inline\nFSDP(model)\n", "\x00", "é" * 100])
def test_what_is_no_script_finds_nothing(source: str) -> None:
    assert findings_in(source, PLAN) == []


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match="source"):
        findings_in(7)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="characters"):
        findings_in("x" * (2**20 + 1))
