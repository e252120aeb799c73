"""FSDP1's calls by hand, by size and over nodes, its blocks and its saves, as clicks rewrite them."""

from __future__ import annotations

import pytest
from tests.unit.test_preflight_mends import one

from shardscope.frameworks.fsdp2.own_code.sharded_saves import written_in_parts
from shardscope.own_code.script import Script
from shardscope.planner.preflight import findings_in

IMPORTS = """
import functools
import torch
import torch.distributed as dist
from contextlib import nullcontext
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullStateDictConfig, ShardedStateDictConfig
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, ModuleWrapPolicy
from mine import Model, Block
"""

BY_HAND = f"""{IMPORTS}
def main():
    model = Model()
    for index, layer in enumerate(model.layers):
        model.layers[index] = FSDP(layer)
    model = FSDP(model)
    train(model)
"""


def mended(source: str) -> str | None:
    return one(source, "fsdp1").source


def lines(source: str | None) -> list[str]:
    assert source is not None
    return [line.strip() for line in source.splitlines()]


# ---- layer by layer


def test_each_call_by_hand_is_one_of_fully_shard() -> None:
    after = mended(BY_HAND)
    assert {"model.layers[index] = fully_shard(layer)", "fully_shard(model)"} <= set(lines(after))
    assert findings_in(after or "") == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("model.layers[index] = FSDP(layer)", "model.layers[index] = fully_shard(layer)"),
        ("model.layers[index] = FSDP(layer)", "setattr(model, str(index), fully_shard(layer))"),
        (
            "    model.layers[index] = FSDP(layer)",
            "    model.layers[index].up = fully_shard(model.layers[index].up)",
        ),
    ],
)
def test_a_layer_may_be_put_back_in_any_way(before: str, after: str) -> None:
    source = BY_HAND.replace(before, after.replace("fully_shard", "FSDP"))
    assert after.strip() in lines(mended(source))


def test_layers_in_a_list_are_understood() -> None:
    loop = BY_HAND[BY_HAND.index("    for index") : BY_HAND.index("    model = FSDP")]
    listed = "    model.layers = torch.nn.ModuleList([FSDP(layer) for layer in model.layers])\n"
    after = mended(BY_HAND.replace(loop, listed))
    assert listed.strip().replace("FSDP", "fully_shard") in lines(after)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # Something that is in no model, or comes too late, or from elsewhere.
        ("enumerate(model.layers)", "enumerate(layers)"),
        ("= FSDP(layer)", "= FSDP(other)"),
        ("= FSDP(layer)", "= FSDP(model)"),
        ("    train(model)", "    train(FSDP(model.head))"),
        (
            "def main():\n    model = Model()\n",
            "model = Model()\ndef wrap(model):\n    FSDP(model.a)\ndef main():\n",
        ),
        # FSDP1 refuses the first of these itself; each mesh makes groups of its own.
        ("model = FSDP(model)", "model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))"),
        ("FSDP(layer)", "FSDP(layer, auto_wrap_policy=ModuleWrapPolicy({Block}))"),
        (
            "FSDP(layer)",
            "FSDP(layer, sharding_strategy=ShardingStrategy.HYBRID_SHARD, "
            "device_id=torch.cuda.current_device()"
            ")",
        ),
        ("FSDP(layer)", "FSDP(layer, **options)"),
        ("FSDP(layer)", "FSDP(build(layer))"),
        ("FSDP(layer)", "FSDP(  # mine\n            layer)"),
    ],
)
def test_calls_that_are_no_layers_of_the_model_are_left_to_a_person(before: str, after: str) -> None:
    source = BY_HAND.replace(before, after)
    assert source != BY_HAND
    assert mended(source) is None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # Parameters that something else reads, and an optimizer that was made before by whoever calls.
        ("    train(model)", "    square = sum(p.grad.pow(2).sum() for p in model.parameters())"),
        ("    train(model)", "    loss = sum(p.pow(2).sum() for p in model.parameters())"),
        ("    train(model)", "    for p in model.parameters():\n        p.add_(1)"),
        ("    train(model)", "    decayed = [p for p in model.parameters() if p.dim() >= 2]"),
        ("    train(model)", "    average.update(model.parameters())"),
        (
            "    train(model)",
            "    return model\ndef run():\n    optimizer = SGD(model.parameters())\n    model = main()",
        ),
    ],
)
def test_parameters_that_are_no_optimizers_alone_are_left_to_a_person(before: str, after: str) -> None:
    assert mended(BY_HAND.replace(before, after)) is None


@pytest.mark.parametrize(
    "line",
    [
        "    optimizer = torch.optim.AdamW([{'params': list(model.parameters()), 'lr': 1e-3}])",
        "    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)",
        "    print(sum(p.numel() for p in model.parameters() if p.requires_grad))",
        "    for name, p in model.named_parameters():\n        p.requires_grad = 'head' in name",
        "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    ],
)
def test_parameters_that_are_counted_or_optimized_are_plain(line: str) -> None:
    assert mended(BY_HAND.replace("    train(model)", line)) is not None


@pytest.mark.parametrize("line", ["gpu = setup()", "gpu, other = setup()", "gpu: int = setup()"])
def test_what_is_asked_for_beside_its_value_stays(line: str) -> None:
    """``setup()`` may do more than tell the device."""
    before = f"    {line}\n    torch.cuda.set_device(gpu)\n    model = FSDP(device_id=gpu, "
    source = WHOLE.replace("    model = FSDP(model,", before + "*[model],").replace("*[model],", "")
    source = source.replace("FSDP(device_id=gpu, ", "FSDP(model, device_id=gpu,")
    assert line in lines(mended(source))


def test_a_device_that_a_function_is_given_is_no_line() -> None:
    source = WHOLE.replace("def main()", "def main(rank)").replace(
        "FSDP(model,", "FSDP(model, device_id=rank,"
    )
    assert "def main(rank):" in lines(mended(source))


@pytest.mark.parametrize(
    ("policy", "imports", "is_mended"),
    [
        ("param_dtype=torch.bfloat16", "", True),
        ("param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16", "", False),
        ("param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16", "from transformers import Llama\n", True),
        ("param_dtype=torch.bfloat16", "from torchvision.models import resnet50\n", False),
    ],
)
def test_buffers_and_batch_norms_that_fsdp1_casts_or_not(policy: str, imports: str, is_mended: bool) -> None:
    source = imports + "from torch.distributed.fsdp import MixedPrecision\n" + BY_HAND
    source = source.replace("FSDP(model)", f"FSDP(model, mixed_precision=MixedPrecision({policy}))")
    assert (mended(source) is not None) == is_mended


# ---- what is said of the whole model

WHOLE = f"""{IMPORTS}
def main():
    torch.cuda.set_device(0)
    model = Model()
    strategy = ShardingStrategy.HYBRID_SHARD
    model = FSDP(model, sharding_strategy=strategy, auto_wrap_policy=ModuleWrapPolicy({{Block}}))
    train(model)
"""


def test_a_strategy_over_nodes_is_a_mesh() -> None:
    after = mended(WHOLE)
    (options,) = [line for line in lines(after) if line.startswith("fsdp2_options")]
    assert options == (
        'fsdp2_options = dict(mesh=init_device_mesh("cuda", (torch.distributed.get_world_size() // '
        'torch.cuda.device_count(), torch.cuda.device_count()), mesh_dim_names=("replicate", "shard")))'
    )
    assert "from torch.distributed.device_mesh import init_device_mesh" in lines(after)
    assert "HYBRID_SHARD" not in (after or "")
    without_gradients = mended(WHOLE.replace("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"))
    assert 'mesh_dim_names=("replicate", "shard")), reshard_after_forward=False)' in (without_gradients or "")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("    torch.cuda.set_device(0)\n", ""),
        ("import torch\n", "import torch as t\n"),
        ("    strategy = ", "    strategy = choose() or "),
        ("    strategy = ", "    if big:\n        strategy = "),
    ],
)
def test_a_strategy_that_the_text_does_not_settle_is_left_to_a_person(before: str, after: str) -> None:
    source = WHOLE.replace(before, after)
    assert source != WHOLE
    assert mended(source) is None


# ---- units by size

BY_SIZE = f"""{IMPORTS}
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(4096, 4096)

def main(rank):
    model = Net().to(rank)
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=20_000_000)
    model = FSDP(model, auto_wrap_policy=policy)
"""


def test_units_by_size_are_picked_as_fsdp1_picks_them() -> None:
    after = lines(mended(BY_SIZE))
    start = after.index("for fsdp2_layer in reversed(list(model.modules())[1:]):")
    assert after[start + 1 : start + 5] == [
        "fsdp2_size = sum(one.numel() for one in fsdp2_layer.parameters() if not isinstance(one, DTensor))",
        "if fsdp2_size >= 20_000_000 and not isinstance(fsdp2_layer, (torch.nn.ModuleList, "
        "torch.nn.ModuleDict, NonDynamicallyQuantizableLinear)):",
        "fully_shard(fsdp2_layer)",
        "fully_shard(model)",
    ]
    assert "from torch.distributed.tensor import DTensor" in after
    assert "fsdp2_size >= int(1e8) and" in (mended(BY_SIZE.replace("20_000_000", "int(1e8)")) or "")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("20_000_000", "100"),
        ("20_000_000", "args.least"),
        ("=20_000_000", "=20_000_000, force_leaf_modules={Block}"),
        ("        self.up =", "        self.up.weight = shared\n        self.up ="),
        ("        self.up =", "        self.head = use(self.up.weight)\n        self.up ="),
        ("model = Net()", "model = Model()"),
        ("    policy =", "    model = other(model)\n    policy ="),
        ("    policy =", "    fsdp2_size = 1\n    policy ="),
        ("import torch\n", "import torch as t\n"),
    ],
)
def test_units_by_size_that_the_text_does_not_settle_are_left_to_a_person(before: str, after: str) -> None:
    source = BY_SIZE.replace(before, after)
    assert source != BY_SIZE
    assert mended(source) is None


# ---- blocks

SHARDED = """    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict()}
        save(
          state,
            path)
"""


def with_lines(block: str) -> str:
    return BY_HAND.replace("    train(model)\n", block)


def test_a_state_in_parts_needs_no_block() -> None:
    after = mended(with_lines(SHARDED))
    assert after is not None
    assert after.endswith(
        '    state = {"model": model.state_dict()}\n    save(\n      state,\n        path)\n'
    )
    told = "    FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig())\n"
    after = mended(with_lines(f"{told}    model.load_state_dict(read())\n"))
    assert after is not None and after.endswith("fully_shard(model)\n    model.load_state_dict(read())\n")


SYNC = """    for index, batch in enumerate(batches):
        with {block}:
            model(batch).backward()
        step()
"""


@pytest.mark.parametrize(
    ("block", "syncs"),
    [
        ("model.no_sync()", "False"),
        ("model.no_sync() if index % 4 else nullcontext()", "not index % 4"),
        ("contextlib.nullcontext() if last or done else model.no_sync()", "bool(last or done)"),
    ],
)
def test_sums_are_left_out_by_a_call(block: str, syncs: str) -> None:
    after = mended(with_lines(SYNC.format(block=block)))
    assert after is not None
    assert after.endswith(
        f"        model.set_requires_gradient_sync({syncs})\n"
        "        model(batch).backward()\n"
        "        model.set_requires_gradient_sync(True)\n"
        "        step()\n"
    )
    assert one(with_lines(SYNC.format(block=block)), "fsdp1-no-sync").source == after
    noted = SYNC.replace("backward()", "backward()  # apart").format(block=block)
    assert "# apart\n        model.set_requires_gradient_sync(True)\n" in (mended(with_lines(noted)) or "")


@pytest.mark.parametrize(
    "block",
    [
        SHARDED.replace("SHARDED_STATE_DICT", "LOCAL_STATE_DICT"),
        SHARDED.replace("DICT)", "DICT, ShardedStateDictConfig(offload_to_cpu=True))"),
        SHARDED.replace("(model,", "(other,"),
        SHARDED.replace("DICT):", "DICT):  # in parts"),
        SHARDED.replace("path)", 'path, """of\nmine""")'),
        SHARDED.replace("FSDP.state", "module.state"),
        f"{SHARDED}    other = optimizer.state_dict()\n",
        "    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT): save(model.state_dict())\n",
        "    if small:\n        FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)\n"
        "    save(model.state_dict())\n",
        "    save(model.state_dict())\n"
        "    FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)\n",
        "    FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)  # in parts\n",
        SYNC.format(block="other.no_sync()"),
        SYNC.format(block="model.no_sync() if index else other"),
        SYNC.format(block="model.no_sync() as nothing"),
        SYNC.format(block="model.no_sync()").replace("backward()", "backward()\n            continue"),
        SYNC.format(block="model.no_sync(), other"),
        # Of DDP's model, or of another's.
        f"{SYNC.format(block='model.no_sync()')}    model = other\n",
        f"def teach(model):\n{SYNC.format(block='model.no_sync()')}",
        "    if apart:\n        with model.no_sync():\n            try:\n                step()\n"
        "            finally:\n                pass\n",
        "    try:\n        with model.no_sync():\n            step()\n    except ValueError:\n        pass\n",
        "    with model.no_sync():\n        @torch.no_grad()\n        def step():\n            pass\n",
    ],
)
def test_a_block_that_the_text_does_not_settle_is_left_to_a_person(block: str) -> None:
    assert mended(with_lines("    train(model)\n")) is not None
    assert mended(with_lines(block)) is None


# ---- states that are whole by default


def test_a_state_is_whole_by_default() -> None:
    after = mended(with_lines("    state = model.state_dict()\n"))
    assert "state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))" in lines(
        after
    )


@pytest.mark.parametrize(
    "line",
    [
        "    state = model.state_dict(prefix='a')\n",
        "    state = other.state_dict()\n",
        "    save(model.state_dict())\n",
        "    state = model.state_dict()  # whole\n    hook(FSDP.state_dict_type)\n",
        "    state = torch.compile(model).state_dict()\n",
        "def keep(model):\n    state = model.state_dict()\n",
    ],
)
def test_a_state_that_may_be_another_is_left_to_a_person(line: str) -> None:
    assert mended(with_lines(line)) is None


# ---- saves

SAVED = """
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

def save(model, path):
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(state, f"{path}/last.pt")
"""
GATHERED = "checkpoint-gathered-on-one-rank"


def test_a_gathered_checkpoint_is_written_in_parts() -> None:
    after = one(SAVED, GATHERED).source
    assert after is not None
    assert after.endswith(
        "    state = get_model_state_dict(model)\n"
        '    checkpoint.save(state, checkpoint_id=f"{path}/last.pt")\n'
    )
    assert findings_in(after) == []


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("    if dist", "    print(path)\n    if dist", "checkpoint.save(state,"),
        ("dist.get_rank() == 0", "args.rank == 0", "checkpoint.save(state,"),
        ("    if dist.get_rank() == 0:\n        torch", "    torch", "checkpoint.save(state,"),
        (
            "torch.save(state",
            'torch.save({"model": state, "step": 1}',
            'checkpoint.save({"model": state, "step": 1},',
        ),
        ('last.pt")', 'last.pt")\n        print(path)', "checkpoint.save(state,"),
        ('f"{path}/last.pt"', "path", "checkpoint.save(state, checkpoint_id=path)"),
        ("def save", "checkpoint = 1\ndef save", "torch_checkpoint.save(state,"),
    ],
)
def test_however_it_is_written(before: str, after: str, expected: str) -> None:
    source = SAVED.replace(before, after)
    found = one(source, GATHERED).source
    assert source != SAVED and found is not None
    assert expected in found and "torch.save(" not in found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("cpu_offload=True", "cpu_offload=True, strict=False"),
        ("full_state_dict=True", "full_state_dict=whole"),
        ("    if dist", "    print(len(state))\n    if dist"),
        ("dist.get_rank() == 0", "local_rank == 0"),
        ("dist.get_rank() == 0", "step % 100 == 0"),
        ('last.pt")', 'last.pt")\n    else:\n        pass'),
        ("        torch.save", "        path = join(path)\n        torch.save"),
        ("torch.save(state", "torch.save(clean(state)"),
        ("torch.save(state", "pickle.save(state"),
        ('last.pt")', 'last.pt", pickle_module=mine)'),
        ('last.pt")', 'last.pt")\n    torch.load(path)'),
        ("        torch.save", "        # whole\n        torch.save"),
        # The order, the place and the ranks that come there.
        ("        torch.save", "        shutil.rmtree(path)\n        torch.save"),
        ('last.pt")', 'last.pt")\n        shutil.copyfile(path, best)'),
        ("    if dist", "    if path is None:\n        return\n    if dist"),
        ('f"{path}/last.pt"', 'f"{path}/rank{rank}.pt"'),
        ('f"{path}/last.pt"', 'f"{path}/{time.time()}.pt"'),
        ('f"{path}/last.pt"', "buffer"),
        ('f"{path}/last.pt")', '"last.pt")\n        os.replace("last.pt", "best.pt")'),
        ("torch.save(state", 'torch.save({"model": state, "best": best}'),
        ("torch.save(state", 'torch.save({"model": state, "step": count()}'),
        ("import torch\n", "import torch as t\n"),
    ],
)
def test_a_save_that_the_text_does_not_settle_is_left_to_a_person(before: str, after: str) -> None:
    source = SAVED.replace(before, after)
    assert source != SAVED
    assert written_in_parts(Script(source=source)) is None


# ---- one unit


def test_a_whole_model_of_fsdp1_has_a_unit_for_each_layer() -> None:
    llama = BY_HAND.replace("from mine import Model, Block", "from transformers import LlamaForCausalLM")
    llama = llama.replace("Model()", "LlamaForCausalLM.from_pretrained(name)").replace(
        "    train(model)\n", ""
    )
    start, end = llama.index("    for index"), llama.index("    model = FSDP")
    whole = llama[:start] + llama[end:]
    after = one(whole, "whole-model-as-one-unit").source
    assert lines(after)[-4:] == [
        "for fsdp2_layer in model.modules():",
        "if isinstance(fsdp2_layer, GradientCheckpointingLayer):",
        "fully_shard(fsdp2_layer)",
        "fully_shard(model)",
    ]
    assert findings_in(after or "") == []
    unknown = whole.replace("LlamaForCausalLM.from_pretrained(name)", "build()")
    assert one(unknown, "whole-model-as-one-unit").source is None
