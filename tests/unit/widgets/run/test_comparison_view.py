"""Tests of the comparison of two runs: their curves, and messages about values that cannot be drawn."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from written_runs import PLAN, write_run

import shardscope as ss
from shardscope.runs.explain.compare import Curve, Runs
from shardscope_widgets.run.comparison import ComparisonView
from shardscope_widgets.run.runs_table import format_time


class FakeComparison:
    """A fake comparison of the runs a and b with given curves."""

    def __init__(
        self,
        *losses: Mapping[int, float],
        paces: tuple[Mapping[int, float], ...] = ({}, {}),
        **predicted: float,
    ) -> None:
        self.losses, self.paces, self.predicted = losses, paces, predicted
        self.runs: list[ss.Run] = []
        self.plan_differences: list[str] = []
        self.task_differences: list[str] = []

    def loss_curves(self) -> list[Curve]:
        return [Curve(run=name, points=points) for name, points in zip("ab", self.losses, strict=True)]

    def pace_curves(self) -> tuple[str, list[Curve]]:
        curves = zip("ab", self.paces, strict=True)
        return "tokens/s", [
            Curve(run=name, points=points, predicted=self.predicted.get(name)) for name, points in curves
        ]


def show_pair(*losses: Mapping[int, float], **more: Any) -> ComparisonView:
    view = ComparisonView()
    view.show(FakeComparison(*losses, **more))  # type: ignore[arg-type]
    return view


def test_both_losses_share_one_axis() -> None:
    view = show_pair({0: 5.0, 1: 4.0}, {0: 3.0, 1: 2.5}, paces=({0: 100.0}, {0: 90.0}), a=120.0)
    upper = [trace for trace in view.chart.data if trace.yaxis == "y"]
    assert [trace.name for trace in upper] == ["a", "b"] and list(upper[0].y) == [5.0, 4.0]
    assert upper[0].line.dash != upper[1].line.dash, "colour is not the only difference"
    [level] = view.chart.layout.shapes
    assert (level.y0, level.yref) == (120.0, "y2")
    assert "predicted 120" in [note.text for note in view.chart.layout.annotations]
    assert view.chart.layout.yaxis.type == "linear"


def test_numbers_have_the_units_of_the_list_and_of_a_run(tmp_path: Path) -> None:
    plan = replace(PLAN, recipe=replace(PLAN.recipe, method="lora"))
    runs = [ss.Run.attach(write_run(name, parent=tmp_path, plan=plan)) for name in ("first", "second")]
    view = ComparisonView()
    view.show(Runs(runs).compare("first", "second"))
    head, _, body = view.table.value.partition("<tbody>")
    rows = {
        label: unescape(re.sub("<[^>]+>", " ", cells)).split()
        for label, cells in re.findall(r"<th scope='row'>(.*?)</th>(.*?)</tr>", body)
    }
    assert "2 CPU ranks, DDP, LoRA" in body and "2xcpu" not in body
    assert rows["started"][:3] == format_time(runs[0].created).split()
    assert rows["step time"][1] in ("ms", "s") and rows["last loss"][0].count(".") == 1
    assert not any("GiB" in label or "seconds" in label for label in rows)
    # Each heading shows its line in the charts, which need no legend that could lie over a title.
    assert head.count("ss-line-swatch") == 2 and "first" in head
    assert view.chart.layout.showlegend is False
    assert "Plan settings that differ: none." in view.table.value


def test_runs_of_different_speed_have_one_unit(tmp_path: Path) -> None:
    folders = [write_run(name, parent=tmp_path) for name in ("fast", "slow")]
    description = json.loads((folders[1] / "run.json").read_text())
    (folders[1] / "run.json").write_text(json.dumps({**description, "predicted": {"step_seconds": 21.0}}))
    view = ComparisonView()
    view.show(Runs([ss.Run.attach(folder) for folder in folders]).compare("fast", "slow"))
    [row] = re.findall(r"<th scope='row'>predicted time</th>(.*?)</tr>", view.table.value)
    units = {text.split()[-1] for text in re.findall(r"<td>(.*?)</td>", row)}
    assert len(units) == 1, "a fast and a slow run compare at a glance"


def test_diverging_loss_switches_to_a_logarithmic_axis() -> None:
    view = show_pair(
        {step: 5.0 - step / 20 for step in range(60)}, {step: math.exp(step) for step in range(60)}
    )
    assert view.chart.layout.yaxis.type == "log"
    assert "loss, logarithmic" in [note.text for note in view.chart.layout.annotations]
    view.show(FakeComparison({0: 5.0, 1: 4.0}, {0: 3.0}))  # type: ignore[arg-type]
    assert view.chart.layout.yaxis.type == "linear", "the next comparison has an axis of its own"


def test_non_finite_and_missing_values_are_reported() -> None:
    view = show_pair({step: math.nan if step in (3, 4) else 5.0 for step in range(8)}, {0: math.inf})
    text = unescape(view.table.value)
    assert "2 of 8 logged steps, first at 3" in text
    assert "1 of 1 logged steps, first at 0" in text
    assert "Neither run logged tokens/s." in text
    assert list(view.chart.data[0].y)[3:5] == [None, None], "a gap"
    assert "b logged no loss." in show_pair({0: 1.0}, {}).table.value


def test_long_runs_are_downsampled_and_keep_spikes() -> None:
    long = {step: 2.0 + (step % 7) / 10 for step in range(0, 300_000, 3)}
    long[150_300] = 90.0
    trace = show_pair(long, {0: 2.0}).chart.data[0]
    assert len(trace.y) <= 400 and max(trace.y) == 90.0


def test_svg_has_both_charts() -> None:
    svg = show_pair({0: 5.0, 1: 4.0}, {0: 3.0, 1: 2.5}, paces=({0: 1.0}, {0: 2.0})).chart.to_svg()
    assert ElementTree.fromstring(svg) is not None and "loss" in svg and "tokens/s" in svg
