"""One loss curve: the fast rows of the parity table, on ranks that fork from one process.

``make parity`` launches all rows as real runs; here the same work runs under a stand-in for the launcher.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.requirements import few, needs, skip_without

torch = needs("torch")
needs("transformers")

from gloo_ranks import StandInContext, on_ranks  # noqa: E402
from tests.parity import rank_training  # noqa: E402
from tests.parity.comparison import Curve, Outcome, compare  # noqa: E402
from tests.parity.launches import judge_refusal  # noqa: E402
from tests.parity.report import format_document, format_line  # noqa: E402
from tests.parity.table import ROWS, Row  # noqa: E402

from shardscope.frameworks.engines import before_fork  # noqa: E402
from shardscope.frameworks.registry import why_not_trained  # noqa: E402

FAST = [row for row in ROWS if row.fast]
ON_TWO_RANKS = [row for row in FAST if row.num_ranks <= 2]
SEED = 1
"""Another than ``make parity``'s."""
NUM_STEPS = 8
"""Past the warm-up."""


def at_three_percent_more(step: int) -> float:
    return 1.03 * rank_training.rate_at(step)


def train_curve(ctx: StandInContext) -> dict[str, Any]:
    # On the ranks alone: a rehearsal in this process would have to import Megatron-core in its own way.
    before_fork(ctx.plan, "cpu")
    return _run_task(rank_training.Curve(SEED, NUM_STEPS), ctx)


def wrong_curve(ctx: StandInContext) -> dict[str, Any]:
    return _run_task(rank_training.Curve(SEED, NUM_STEPS, at_three_percent_more), ctx)


def reference_curve(ctx: StandInContext) -> dict[str, Any]:
    return _run_task(rank_training.SingleProcess(SEED, NUM_STEPS), ctx)


def _run_task(task: Any, ctx: StandInContext) -> dict[str, Any]:
    task(ctx)
    return {"lines": [{**line, "rank": ctx.rank} for line in ctx.lines], "records": ctx.records}


@pytest.fixture(scope="module")
def reference_curves(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that trains the single process of a row, once for all rows that share it."""
    known: dict[str, Curve] = {}

    def find_curve(row: Row) -> Curve:
        if row.name not in known:
            folder = tmp_path_factory.mktemp(row.family)
            known[row.name] = _make_curve(on_ranks(1, row.plan(), reference_curve, folder))
        return known[row.name]

    return find_curve


def _make_curve(results: list[dict[str, Any]]) -> Curve:
    return Curve.of([line for result in results for line in result["lines"]], len(results))


def find_outcome(row: Row, reference: Any, folder: Path, body: Any = train_curve) -> Outcome:
    results = on_ranks(row.num_ranks, row.plan(), body, folder)
    records = {rank: result["records"] for rank, result in enumerate(results)}
    return compare(row, row.plan(), reference(row.reference), _make_curve(results), records)


@pytest.mark.parametrize("row", few(FAST, ON_TWO_RANKS), ids=lambda row: row.name)
def test_the_loss_curve_equals_the_single_processs(
    row: Row, reference_curves: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, gradient norms, and bytes held when the optimizer stepped."""
    for module in row.modules:
        skip_without(module.partition(".")[0])
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    outcome = find_outcome(row, reference_curves, tmp_path)
    assert outcome.verdict == "same", outcome.why
    assert outcome.holds, format_line(outcome)
    assert row.framework_name in outcome.sentence.lower().replace("-", ""), outcome.sentence


def test_a_learning_rate_that_is_three_percent_off_is_detected(reference_curves: Any, tmp_path: Path) -> None:
    """The tolerance is far below what a small mistake makes of the curve."""
    outcome = find_outcome(
        Row(name="", num_ranks=1, framework="ddp"), reference_curves, tmp_path, wrong_curve
    )
    assert outcome.verdict == "differs" and not outcome.holds
    assert outcome.loss_difference > 10 * 1e-4


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_is_trained_or_has_a_reason(row: Row) -> None:
    """Before any rank starts: a row that is stopped on CPU ranks is refused in the words of the table."""
    refusal = why_not_trained(row.plan())
    if row.stopped_on_cpu:
        assert refusal is not None and row.stopped_on_cpu in refusal
    elif refusal is not None:
        assert judge_refusal(row, refusal, "").verdict == "not here", refusal


def make_curve(*, losses: list[float], norms: list[float] | None = None, num_ranks: int = 1) -> Curve:
    return Curve(losses=[losses] * num_ranks, norms=[norms or [1.0] * len(losses)] * num_ranks)


def test_deviations_fail_a_row() -> None:
    """Each of: a step off, a norm off, no number, bytes off, a rank that stopped, a flat single process."""
    row = ROWS[0]
    plan = row.plan()
    planned = plan.memory().at("optimizer")
    held = {name: planned[name] for name in ("parameters", "gradients", "optimizer")}
    right = make_curve(losses=[6.0, 5.0, 4.0])
    records: dict[int, Any] = {
        rank: {"engine": {"sentence": "DDP"}, "parity": {"held": held}} for rank in (0, 1)
    }

    def compare_curves(own: Curve, reference: Curve = right, records: Any = records) -> Outcome:
        return compare(row, plan, reference, own, records)

    assert compare_curves(make_curve(losses=[6.0, 5.00009, 4.0], num_ranks=2)).holds
    assert (
        compare_curves(make_curve(losses=[6.0, 5.0002, 4.0], num_ranks=2)).why == "loss 2.0e-04 off at step 2"
    )
    one_rank_off = Curve(losses=[[6.0, 5.0, 4.0], [6.0, 5.0, 4.1]], norms=[[1.0] * 3] * 2)
    assert compare_curves(one_rank_off).verdict == "differs"
    assert (
        "norm" in compare_curves(make_curve(losses=[6.0, 5.0, 4.0], norms=[1.0, 2.0, 1.0], num_ranks=2)).why
    )
    assert not compare_curves(make_curve(losses=[6.0, float("nan"), 4.0], num_ranks=2)).holds
    assert compare_curves(make_curve(losses=[6.0, 5.0], num_ranks=2)).verdict == "failed"
    flat = make_curve(losses=[6.0, 6.0, 6.0])
    assert "learns nothing" in compare_curves(make_curve(losses=[6.0] * 3, num_ranks=2), flat).why
    fuller = {**records, 1: {"engine": {}, "parity": {"held": {**held, "gradients": held["gradients"] + 4}}}}
    off = compare_curves(make_curve(losses=[6.0, 5.0, 4.0], num_ranks=2), records=fuller)
    assert off.verdict == "same" and not off.holds
    assert "gradients 854,276 held, 854,272 planned" in format_line(off)
    text = format_document(
        [off, judge_refusal(row, "Layout.cp is 2; allowed: 1", "Layout.cp is 2")], device="x", versions="y"
    )
    assert "1 of 2 rows equal" in text and "refused: Layout.cp is 2; allowed: 1" in text
