"""Names that a click carries from where FSDP1's policy is made to where the layers are sharded."""

from __future__ import annotations

import pytest
from tests.unit.test_preflight_mends import one

IMPORTS = """import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
"""
POLICY = "policy = ModuleWrapPolicy({Block})\n"
PRECISION = "precision = MixedPrecision(param_dtype=dtype)\n"
CALL = "model = FSDP(model, auto_wrap_policy=policy)\n"
AT_ONCE = "model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))\n"


def indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


@pytest.mark.parametrize(
    "source",
    [
        f"class Block:\n    pass\n{POLICY}{CALL}",
        f"from mine import Block\n{POLICY}def main(model):\n{indented(CALL)}",
        f"Block = kind_of(model)\n{POLICY}{CALL}",
        f"def main(model, Block):\n{indented(POLICY + CALL)}",
        # Where it is said in the call itself, it is read where it was.
        f"def main(model, Block):\n    Block = wrapped(Block)\n{indented(AT_ONCE)}",
    ],
)
def test_a_class_that_is_one_thing_is_carried_over(source: str) -> None:
    after = one(IMPORTS + source, "fsdp1").source
    assert after is not None and "isinstance(module, Block)" in after


@pytest.mark.parametrize(
    "source",
    [
        f"class Block:\n    pass\n{POLICY}Block = None\n{CALL}",
        f"from mine import Block\n{POLICY}def main(model, Block):\n{indented(CALL)}",
        f"{POLICY}def main(model, Block):\n{indented(CALL)}",
        f"try:\n    from a import Block\nexcept ImportError:\n    from b import Block\n{POLICY}{CALL}",
        f"for Block in kinds:\n    pass\n{POLICY}{CALL}",
        f"import mine\n{POLICY.replace('Block', 'mine.Block')}mine.Block = other\n{CALL}",
        # What the list of layers would read otherwise.
        f"import module\n{POLICY.replace('Block', 'module.Block')}{CALL}",
        f"class Run:\n    from mine import Block\n{indented(POLICY + CALL)}",
    ],
)
def test_a_class_that_may_be_another_is_left_to_a_person(source: str) -> None:
    assert one(IMPORTS + source, "fsdp1").source is None


BOTH = AT_ONCE.replace("({Block})", "({Block}), mixed_precision=precision")


@pytest.mark.parametrize(
    ("source", "is_carried"),
    [
        (f"dtype = torch.bfloat16\n{PRECISION}{BOTH}", True),
        (f"dtype = torch.bfloat16\n{PRECISION}dtype = torch.float32\n{BOTH}", False),
        (f"{PRECISION}def main(model, dtype):\n{indented(BOTH)}", False),
        (f"{PRECISION.replace('dtype)', 'kind(args))')}{BOTH}", False),
    ],
)
def test_a_type_is_carried_over_where_it_is_one_thing(source: str, is_carried: bool) -> None:
    assert (one(IMPORTS + source, "fsdp1").source is not None) == is_carried
