"""Texts that nest deeper than Python follows, as generated ones do: read as far as that goes, no crash."""

from __future__ import annotations

import ast

import pytest
from tests.unit.test_fp16_mended import H100
from tests.unit.test_preflight_mends import OLD_CALL

from shardscope.planner.preflight import Finding, findings_in, noted

CHAIN = "a" + ".b" * 1500
HALF = "import torch\nmodel.half()\n"
BACKWARD = "model(batch).backward()\n"


@pytest.mark.parametrize(
    "line",
    [
        f"x = {CHAIN}",
        f"x = {'a' + '.b()' * 600}",
        f"x = {'(' * 80}{'-' * 900}1{')' * 80}",
        f"x = {'-' * 3000}1",
        f"x = {'1 + ' * 3000}1",
        "if a: pass\n" + "elif b: pass\n" * 1200,
        # In the middle of what is looked into.
        f"{CHAIN} = FSDP({CHAIN}, auto_wrap_policy=ModuleWrapPolicy({{Block}}))",
        f"{CHAIN}.clip_grad_norm_(1.0)",
        f"{CHAIN}.half()",
        f"x = torch.bfloat16 if {CHAIN} else torch.float16",
        f"fully_shard({CHAIN})",
        f"policy = MixedPrecisionPolicy(param_dtype={CHAIN})",
        f"loader = DataLoader({CHAIN}, shuffle=True)",
        f"DistributedSampler(data, num_replicas={CHAIN}, rank={CHAIN})",
    ],
)
@pytest.mark.parametrize("plan", [None, H100])
def test_nothing_is_raised(line: str, plan: object) -> None:
    source = f"{HALF}{OLD_CALL}{line}\n{BACKWARD}"
    for finding in findings_in(source, plan):  # type: ignore[arg-type]
        noted(source, finding)


def test_what_is_beside_something_deep_is_still_found() -> None:
    source = f"{HALF}{OLD_CALL.replace('(model,', f'({CHAIN},')}{BACKWARD}"
    found = {finding.name: finding.source for finding in findings_in(source)}
    assert found["fp16-without-loss-scaling"] is None and found["fsdp1"] is None


def test_what_is_deep_gets_no_note() -> None:
    source = f"x = {CHAIN}\n"
    assert ast.parse(source)
    found = Finding(name="bad-line", severity="hint", why="", number=None, change="mend it", line=1)
    assert noted(source, found) is None
    # Lines are Python's own: a form feed ends none.
    assert noted("a = 1\f\n", Finding(**{**vars(found), "line": 2})) is None
