"""Tests of downsampled curves, which keep their extremes, and of the grid of charts at every width."""

from __future__ import annotations

from math import isnan, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardscope_widgets.run.lines import MAX_POINTS, Line, downsample
from shardscope_widgets.run.panels import GPU_PANELS, SLOTS, TRAINING_PANELS, Panel, arrange_grid, list_panels


def test_single_step_spike_survives_downsampling() -> None:
    line = Line()
    for step in range(200_000):
        line.add_point(step, 100.0 if step == 77_777 else -5.0 if step == 123_456 else 1.0)
        assert len(line.x) <= MAX_POINTS
    points = dict(zip(line.x, line.y, strict=True))
    assert points[77_777] == 100.0 and points[123_456] == -5.0
    assert line.x[0] == 0 and line.x[-1] >= 199_000 and line.x == sorted(line.x)


@given(st.lists(st.floats(allow_infinity=False), min_size=3, max_size=120))
def test_downsampling_keeps_the_ends_and_the_extremes(values: list[float]) -> None:
    x = [float(index) for index in range(len(values))]
    kept_x, kept_y = downsample(x, values)
    assert kept_x[0] == 0 and kept_x[-1] == len(values) - 1
    assert kept_x == sorted(set(kept_x)) and len(kept_x) <= len(values) // 2 + 4
    finite = [value for value in values if not isnan(value)]
    if finite:
        assert min(finite) in kept_y and max(finite) in kept_y


def test_non_finite_values_are_gaps() -> None:
    line = Line()
    for value in (1.0, float("inf"), 3.0, nan, -float("inf")):
        line.add_point(0.0, value)
    assert [isnan(value) for value in line.y] == [False, True, False, True, True]
    assert line.find_top() == 3.0


def test_usual_top_ignores_an_outlier_in_the_first_step() -> None:
    line = Line()
    for step in range(100):
        line.add_point(step, 90.0 if step == 0 else 1.0)
    assert line.find_usual_top() == 1.0 and line.find_top() == 90.0
    assert Line().find_usual_top() == Line().find_top() == 0.0


@pytest.mark.parametrize("width", [0, 300, 320, 500, 760, 836, 1400])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 6, 7, 9, SLOTS])
def test_chart_panels_do_not_overlap_and_stay_inside(width: int, count: int) -> None:
    grid = arrange_grid(count, width)
    assert len(grid.positions) == count
    for position in grid.positions:
        assert 0 <= position.x[0] < position.x[1] <= 1 and 0 <= position.y[0] < position.y[1] <= 1
        assert (position.x[1] - position.x[0]) * (width or 836) > 150, "wide enough to be read"
    for number, one in enumerate(grid.positions):
        for other in grid.positions[number + 1 :]:
            is_beside = one.x[1] < other.x[0] or other.x[1] < one.x[0]
            assert is_beside or one.y[0] > other.y[1]


def test_known_metrics_come_before_user_metrics() -> None:
    names = ["accuracy", "power_watts", "rss_bytes", "loss", "a", "b", "c", "step"]
    assert [panel.metric for panel in list_panels(names)] == ["loss", "power_watts", "accuracy", "a", "b"]
    assert len(list_panels([panel.metric for panel in (*TRAINING_PANELS, *GPU_PANELS)])) == 9
    assert [panel.title for panel in list_panels(["seconds_per_step"])] == ["step time, s"]
    names = ["validation_perplexity", "grad_norm", "validation_loss", "loss"]
    assert [panel.metric for panel in list_panels(names)] == ["loss", "validation_loss", "grad_norm"]


def test_panel_formats_numbers() -> None:
    plain = Panel(metric="x", title="x")
    values = (0, 0.000195, 0.5, 12.34, 9_994, 12_345, -3.5, nan, None, True)
    shown = [plain.format(value, 1.0) for value in values]
    assert shown == ["0", "0.000195", "0.5", "12.3", "9,994", "12.3k", "-3.50", "nan", "–", "–"]
