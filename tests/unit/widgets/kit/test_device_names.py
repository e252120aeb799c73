"""Texts on screen about CPU ranks: none of them calls a CPU rank a GPU."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from calibrations import make_calibration

import shardscope as ss
from shardscope.planner.verdict import assess_plan
from shardscope.timing.calibration.store import store_calibration
from shardscope_widgets.kit.chart import Chart
from shardscope_widgets.kit.display_names import name_model
from shardscope_widgets.kit.saved.static_picture import find_texts_and_charts
from shardscope_widgets.kit.view import View
from shardscope_widgets.memory.repairs import describe_no_fit
from shardscope_widgets.pickers import ClusterPicker
from shardscope_widgets.plans.advice_choice import describe_figures
from shardscope_widgets.plans.ranking_view import RankingView
from shardscope_widgets.studio.head import render_headline, render_rates
from shardscope_widgets.time.rows import build_shown_step
from shardscope_widgets.time.view import StepView

CPU = ss.Cluster.parse("2xcpu")


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ss.Plan:
    """A plan on CPU ranks of a calibrated machine, so that it has rates."""
    monkeypatch.setenv("SHARDSCOPE_DATA_HOME", str(tmp_path / "data"))
    store_calibration(make_calibration())
    recipe = ss.Recipe(seq_len=64, global_batch_size=4, precision="fp32")
    return ss.Plan(ss.Architecture.of_size("2m"), CPU, recipe, ss.Layout.fsdp2())


def read_screen(view: View) -> str:
    """Return all that ``view`` shows, tooltips and chart titles included."""
    return "".join(
        json.dumps(part.to_plotly_json(), default=str) if isinstance(part, Chart) else part.value
        for part in find_texts_and_charts(view)
    )


def test_rates_of_cpu_ranks_are_per_rank(plan: ss.Plan) -> None:
    rates = render_rates(build_shown_step(plan))
    assert "tokens/s per rank" in rates and "GPU" not in rates
    assert describe_figures(plan).endswith("tokens/s per rank")
    assert "GPU" not in render_headline(plan, plan.memory(), assess_plan(plan))


def test_cpu_ranks_have_no_dashes_for_numbers_that_do_not_exist(
    plan: ss.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = render_rates(build_shown_step(plan))
    assert "–" not in rates and "per M tokens" not in rates
    monkeypatch.setenv("SHARDSCOPE_DATA_HOME", str(tmp_path / "uncalibrated"))
    assert render_rates(build_shown_step(plan)) == ""
    # The reason for a GPU's missing price is worth a dash.
    gpu = ss.Plan(
        ss.models["llama-3.2-1b"], ss.Cluster.parse("1xh100-sxm-80gb"), ss.Recipe(), ss.Layout.ddp()
    )
    assert render_rates(build_shown_step(gpu)).count("<b>") == 3


def test_names_of_folders_are_not_rewritten() -> None:
    assert name_model(ss.models["llama-3.1-8b"]) == "Llama 3.1 8B"
    assert (
        name_model(replace(ss.models["smollm2-135m"], name="smollm2-135m-instruct"))
        == "smollm2-135m-instruct"
    )


def test_the_step_report_of_cpu_ranks_names_no_gpu(plan: ss.Plan) -> None:
    report = plan.step()
    assert "tokens/s per rank" in repr(report) and "GPU" not in repr(report)
    assert "tokens/s per rank" in report._repr_html_() and "GPU" not in report._repr_html_()


def test_time_view_of_cpu_ranks_names_no_gpu(plan: ss.Plan) -> None:
    text = read_screen(StepView(plan, machine=CPU))
    assert "TFLOP/s per rank" in text and "Of all CPU ranks together." in text and "GPU" not in text


def test_search_over_cpu_ranks_names_no_gpu(plan: ss.Plan) -> None:
    ranking = ss.search(plan.architecture, CPU, plan.recipe)
    # Transformer Engine's kernels do need a GPU: the reason why such a layout is not launched here.
    text = re.sub(r"need(<br>|\s)a GPU", "", read_screen(RankingView(ranking)))
    assert "tokens/s per rank" in text and "peak memory of a CPU rank, GiB" in text and "GPU" not in text


def test_count_of_cpu_ranks_is_labelled_ranks() -> None:
    picker = ClusterPicker("8xh100-sxm-80gb")
    assert picker._counts.name.value == "GPUs"
    picker.set_value(CPU)
    assert picker._counts.name.value == "Ranks"


def test_more_cpu_ranks_are_no_fix_for_too_little_memory(plan: ss.Plan) -> None:
    assert describe_no_fit(plan) == "No combination of changes fits on 2 CPU ranks: use a smaller model."
