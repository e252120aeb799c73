"""Communication beneath arithmetic: no second of arithmetic covers two."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from planning import plans

import shardscope as ss
from shardscope.core.errors import FieldError
from shardscope.timing.report import StepReport
from shardscope.timing.stages import _Cover, _shares
from shardscope.timing.traffic import Beneath

SLOW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
ARITHMETIC = ("matrices", "attention", "elementwise", "loss", "recomputation")
WINDOWS: tuple[Beneath, ...] = ("forward", "backward", "last_backward", "first_forward", "attention")


def arithmetic_of(report: StepReport) -> float:
    return sum(report.parts[part] for part in ARITHMETIC)


def hidden_of(report: StepReport) -> float:
    """The host's link runs beside the others."""
    return sum(seconds for part, seconds in report.hidden.items() if part != "offload")


@SLOW
@given(plan=plans())
def test_no_more_is_hidden_than_there_is_arithmetic(plan: ss.Plan) -> None:
    try:
        report = plan.step()
    except FieldError as refusal:
        assume(not refusal.field.startswith(("Gpu.", "Cluster.nvme_")))
        raise
    assert hidden_of(report) <= arithmetic_of(report) * (1 + 1e-9)


def test_copies_between_slow_nodes_leave_shards_nothing_to_hide_beneath() -> None:
    recipe = ss.Recipe(seq_len=512, global_batch_size=32)
    cluster = ss.Cluster.parse("8x4xa10-24gb")
    report = ss.Plan(ss.models["llama-3.2-1b"], cluster, recipe, ss.Layout.fsdp2(replicate=2)).step()
    assert hidden_of(report) == pytest.approx(arithmetic_of(report))
    between = next(one for one in report.communication if one.collective == "all_reduce")
    within = next(one for one in report.communication if one.collective == "reduce_scatter")
    assert between.hidden_seconds > 0
    assert within.hidden_seconds == pytest.approx(0, abs=1e-12)


seconds = st.just(0.0) | st.floats(1e-6, 100)


@st.composite
def windows(draw: st.DrawFn) -> tuple[dict[Beneath, float], _Cover, int]:
    """What could hide beneath each window, the windows, and micro-batches."""
    forward, backward, batches = draw(seconds), draw(seconds), draw(st.integers(1, 8))
    ahead, back = (draw(st.floats(0, 1)) * whole for whole in (forward, backward))
    cover = _Cover(forward, backward, backward / batches, forward / batches, ahead + back, ahead)
    asked = draw(st.lists(st.sampled_from(WINDOWS), unique=True))
    return {window: draw(seconds) for window in asked}, cover, batches


@given(windows())
def test_windows_inside_of_others_share_their_room(
    case: tuple[dict[Beneath, float], _Cover, int],
) -> None:
    sums, cover, batches = case
    shares = _shares(sums, cover, batches)
    hidden = {window: shares[window] * sums[window] for window in sums}
    assert all(0 <= share <= 1 for share in shares.values())
    assert all(amount <= getattr(cover, window) + 1e-9 for window, amount in hidden.items())
    assert sum(hidden.values()) <= cover.forward + cover.backward + 1e-9
    for wide, narrow in (("forward", "first_forward"), ("backward", "last_backward")):
        both = hidden.get(wide, 0.0) + hidden.get(narrow, 0.0)  # type: ignore[call-overload]
        assert both <= getattr(cover, wide) + 1e-9
    if len(sums) == 1:
        ((window, amount),) = hidden.items()
        assert amount == pytest.approx(min(sums[window], getattr(cover, window)))


@given(st.lists(windows(), min_size=2, max_size=5))
def test_arrays_of_windows_share_as_each_does(
    cases: list[tuple[dict[Beneath, float], _Cover, int]],
) -> None:
    whole = [{window: sums.get(window, 0.0) for window in WINDOWS} for sums, _, _ in cases]
    together = _shares(
        {window: np.array([sums[window] for sums in whole]) for window in WINDOWS},
        _Cover(*(np.array(column) for column in zip(*(cover for _, cover, _ in cases), strict=True))),
        np.array([batches for _, _, batches in cases]),
    )
    for row, (sums, (_, cover, batches)) in enumerate(zip(whole, cases, strict=True)):
        for window, share in _shares(sums, cover, batches).items():
            assert together[window][row] == pytest.approx(share)
