"""What a script of FSDP1 does beside its call, and a click must neither break nor change."""

from __future__ import annotations

import pytest
from tests.unit.test_moved_names import indented
from tests.unit.test_preflight_mends import one

IMPORTS = """import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
"""
CALL = "model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))\n"
MAKER = "def make(model):\n    return torch.optim.AdamW(model.parameters())\n"
TORCHS = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
OF_SELF = CALL.replace("model", "self.model")
OWN = "self.optimizer = build(model)\n"
COUNTER = "def count(model):\n    return sum(p.numel() for p in model.parameters())\n"
LOW = CALL.replace("}))", "}), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))")
OFFLOADED = CALL.replace("}))", "}), cpu_offload=CPUOffload(offload_params=True))")


@pytest.mark.parametrize(
    "source",
    [
        f"{CALL}optimizer = torch.optim.AdamW(model.parameters())\n",
        f"{MAKER}{CALL}optimizer = make(model)\n",
        f"{COUNTER}print(count(model))\n{CALL}",
        f"def run(optimizer):\n    optimizer = wrapped(optimizer)\n{CALL}",
        f"norm = torch.nn.BatchNorm1d(8)\n{CALL}",
        LOW,
        OFFLOADED,
        f"class Run:\n    def wrap(self):\n{indented(indented(OF_SELF))}",
        f"if sharded:\n{indented(CALL)}{TORCHS}\n",
        f"if __name__ == '__main__':\n{indented(CALL)}    norm = {TORCHS}\n",
    ],
)
def test_what_is_no_hindrance(source: str) -> None:
    assert one(IMPORTS + source, "fsdp1").source is not None


@pytest.mark.parametrize(
    "source",
    [
        # An optimizer of parameters that are replaced afterwards would train nothing.
        f"optimizer = build(model)\n{CALL}",
        f"trainer.opt = build(model)\n{CALL}",
        f"all_of_it = [create_optimizer(model)]\n{CALL}",
        f"{MAKER}made = make(model)\n{CALL}",
        f"optimizer = build(model)\ndef wrap():\n    global model\n{indented(CALL)}",
        f"class Run:\n    def __init__(self, model):\n{indented(indented(OWN + CALL))}",
        f"from torch.optim import AdamW\n{MAKER.replace('torch.optim.', '')}made = make(model)\n{CALL}",
        # Optimizers that know no DTensors.
        f"import bitsandbytes as bnb\n{CALL}",
        f"from apex.optimizers import FusedAdam\n{CALL}",
        # Weights that FSDP1 makes, or that are copied.
        f"with torch.device('meta'):\n    model = Net()\n{CALL}",
        f"with init_empty_weights():\n    model = Net()\n{CALL}",
        f"{CALL}mean = copy.deepcopy(model)\n",
        f"{CALL}model._fsdp_wrapped_module.generate(ids)\n",
        # Layers that lie in one another, and types that FSDP1 leaves alone.
        CALL.replace("Block", "torch.nn.Sequential"),
        f"norm = torch.nn.BatchNorm1d(8)\n{LOW}",
        f"model = parallelize_module(model, mesh, {{}})\n{CALL}",
        f"{CALL}model.register_comm_hook(state, hook)\n",
        # A part of a model.
        CALL.replace("model", "model.decoder"),
        f"class Net(torch.nn.Module):\n    def wrap(self):\n{indented(indented(OF_SELF))}",
        # Norms that are DTensors, or plain by a condition, or of more than one model, or on the CPU.
        f"if sharded:\n{indented(CALL)}norm = {TORCHS}\n",
        f"{CALL}norm = {TORCHS.replace('model', 'other')}\n",
        f"{CALL}norm = {TORCHS.replace('model.', '*')}\n",
        f"{OFFLOADED}model.clip_grad_norm_(1.0)\n",
    ],
)
def test_what_fsdp2_would_do_otherwise_is_left_to_a_person(source: str) -> None:
    assert one(IMPORTS + source, "fsdp1").source is None


def test_a_class_of_another_library_is_left_to_a_person() -> None:
    head = "from fairscale.nn import FullyShardedDataParallel as FSDP\n"
    assert one(f"{head}{CALL}", "fsdp1").source is None


@pytest.mark.parametrize(
    ("line", "after"),
    [
        ("model.clip_grad_norm_(1.0)", "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"),
        (
            "print(f'{model.clip_grad_norm_(1.0):.3f}')",
            "print(f'{torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor():.3f}')",
        ),
        (
            "norm = model.clip_grad_norm_(max_norm=1.0)",
            "norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0).full_tensor()",
        ),
        (TORCHS, TORCHS),
        (f"norm = {TORCHS}", f"norm = {TORCHS}.full_tensor()"),
        (f"if __name__ == '__main__':\n    norm = {TORCHS}", f"    norm = {TORCHS}.full_tensor()"),
    ],
)
def test_a_norm_that_is_read_is_a_plain_tensor(line: str, after: str) -> None:
    found = one(f"{IMPORTS}{CALL}{line}\n", "fsdp1").source
    assert found is not None and found.endswith(f"\n{after}\n")


@pytest.mark.parametrize(
    "head",
    [
        IMPORTS.replace("import torch\n", "def other():\n    import torch\n"),
        IMPORTS.replace("import torch\n", "import mine as torch\n"),
        IMPORTS.replace("import torch\n", ""),
        f"{IMPORTS}torch = None\n",
    ],
)
def test_norms_stay_where_torch_has_no_name(head: str) -> None:
    assert one(f"{head}{CALL}model.clip_grad_norm_(1.0)\n", "fsdp1").source is None
