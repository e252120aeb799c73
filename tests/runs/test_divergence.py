"""A training that diverges: it stops before a checkpoint of broken weights replaces the last good one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import few, needs, skip_without

torch = needs("torch")
needs("transformers")

from gloo_ranks import on_ranks, tiny_plan  # noqa: E402

from shardscope import Pretrain  # noqa: E402

BROKEN_STEP = 2
CASES = [
    (framework, number) for framework in ("ddp", "fsdp2", "zero") for number in ("the gradient", "the loss")
]


@pytest.mark.parametrize(("framework", "number"), few(CASES, [("ddp", "the gradient")]))
def test_a_step_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint_before_it(
    framework: str, number: str, tmp_path: Path
) -> None:
    if framework == "zero":
        skip_without("deepspeed")

    def train(ctx: Any) -> dict[str, Any]:
        compute = ctx.engine._compute_loss

        def break_loss(micro: Any) -> Any:
            loss = compute(micro)
            if ctx.engine.num_steps_done < BROKEN_STEP:
                return loss
            if number == "the loss":
                return loss * math.nan
            # The loss is a number; the weights are not, after this step's update.
            loss.register_hook(lambda gradient: gradient * math.inf)
            return loss

        ctx.engine._compute_loss = break_loss
        try:
            Pretrain(num_steps=5, save_every=1, keep_last=1)(ctx)
        except RuntimeError as error:
            return {"message": str(error), "steps": [line["step"] for line in ctx.lines if "loss" in line]}
        return {"message": "", "steps": []}

    plan = tiny_plan(framework, 1, layout={"stage": 2} if framework == "zero" else None)
    (result,) = on_ranks(1, plan, train, tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step-00000{BROKEN_STEP}"]
    expected = f"{number} of step {BROKEN_STEP + 1} is not finite. The run stops here"
    assert result["message"].startswith(expected), result
    assert f"from before it, is checkpoints/step-00000{BROKEN_STEP}" in result["message"]
    # The step that broke is in the curves.
    assert result["steps"] == [0, 1, 2]
