"""Tests of the run view: charts with their predictions, the slowest rank, GPU metrics, memory and logs."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import pytest
from fake_runs import PLAN, FakeRun, record, wait_until
from tests.requirements import thorough

from shardscope.records.log_search import LogSearch
from shardscope.runs.explain.predicted_metrics import PredictedMetrics
from shardscope_widgets import RunView
from shardscope_widgets.run.figure import RunFigure

EXPECTED = PredictedMetrics(
    peak_memory_bytes=3 * 2**30,
    memory_content="tensors at the peak",
    step_seconds=0.2,
    tokens_per_second=640.0,
    step_source="the calibration of here (2 ranks of cpu, gloo)",
)
TITLES = ["loss", "tokens/s per rank", "memory, GiB", "step time, ms", "gradient norm", "learning rate"]


def make_record(step: int, rank: int = 0, **more: Any) -> dict[str, Any]:
    defaults = {
        "loss": 2.5,
        "tokens_per_second": 600.0,
        "peak_memory_bytes": 2**31,
        "step_seconds": 0.25,
        "grad_norm": 1.0,
        "learning_rate": 1e-3,
        "rss_bytes": 2**33,
    }
    return record(step, rank, **{**defaults, **more}) | {"time": 100.0 + step}


def make_engine_run(records: list[dict[str, Any]]) -> FakeRun:
    run = FakeRun(records)
    run.trains_the_plan, run.num_steps, run.prediction = True, 40, EXPECTED
    return run


def show_finished_run(run: FakeRun) -> RunView:
    """Finish ``run`` and return its view once it has drawn everything."""
    run.status = "finished"
    ended: list[Any] = []
    view = RunView(run, on_end=ended.append)
    assert wait_until(lambda: ended == [run])
    return view


def read_titles(view: RunView) -> list[str]:
    notes = view.figure.widget.layout.annotations
    return [note.text for note in notes if note.text and note.xanchor == "left"]


def read_predictions(view: RunView) -> dict[str, float]:
    """Return the y value of each predicted line by the title of its chart."""
    by_axis = {f"y{number + 1 if number else ''}": title for number, title in enumerate(read_titles(view))}
    # Another thread may be drawing: a shape that has no axis yet does not count.
    shapes = view.figure.widget.layout.shapes
    return {by_axis[shape.yref]: shape.y0 for shape in shapes if shape.yref is not None}


def find_axis(view: RunView, title: str) -> int:
    """Return the number in the names of a chart's axes."""
    return read_titles(view).index(title) + 1


def strip_markup(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


def test_every_metric_has_a_chart_and_every_prediction_a_line() -> None:
    view = show_finished_run(
        make_engine_run(
            [make_record(step, rank, step_seconds=0.2 + rank / 10) for step in range(3) for rank in (0, 1)]
        )
    )
    assert read_titles(view) == TITLES
    assert read_predictions(view) == {"tokens/s per rank": 640.0, "memory, GiB": 3.0, "step time, ms": 200.0}
    notes = [note.text for note in view.figure.widget.layout.annotations]
    assert [note for note in notes if "predicted" in note] == [
        "all ranks · predicted 640",
        "all ranks · predicted 3.00",
        "predicted 200",
    ]
    row = strip_markup(view.table.value).partition("predicted")[2]
    assert row.split()[:5] == ["–", "640", "3.00", "200", "–"]
    assert "the calibration of here" in view.table.value
    layout = view.figure.widget.layout
    for title, level in read_predictions(view).items():
        assert layout[f"yaxis{find_axis(view, title)}"].range[1] > level, (
            "the predicted line is inside the range of the axis"
        )


def test_charts_of_a_plan_exist_before_the_first_value() -> None:
    view = show_finished_run(make_engine_run([]))
    assert [title.partition(",")[0] for title in read_titles(view)] == [
        title.partition(",")[0] for title in TITLES
    ]
    assert len(read_predictions(view)) == 3


def test_user_task_has_its_own_charts_and_no_predictions() -> None:
    records = [record(step, loss=1.0, accuracy=0.5, note="text", flag=True) for step in range(3)]
    view = show_finished_run(FakeRun(records))
    assert read_titles(view) == ["loss", "accuracy"] and read_predictions(view) == {}
    assert "predicted" not in view.table.value and "accuracy" in view.table.value
    assert view.progress.value == "", "the number of steps is unknown"


def test_predictions_appear_once_the_model_matches_the_plan() -> None:
    run = FakeRun([record(0, loss=1.0, step_seconds=0.5)])
    view = RunView(run)
    assert wait_until(lambda: view.figure is not None and read_titles(view) == ["loss", "step time, ms"])
    assert read_predictions(view) == {}
    run.prediction = EXPECTED
    assert wait_until(lambda: read_predictions(view) == {"step time, ms": 200.0})
    run.status = "finished"


def test_number_of_charts_is_bounded_with_a_new_metric_each_step() -> None:
    view = show_finished_run(FakeRun([record(step, **{f"m{step}": 1.0}) for step in range(500)]))
    assert len(view.figure.widget.data) <= 3 and view.table.value.count("<th") <= 70


def test_gpu_charts_are_drawn_only_with_gpu_samples() -> None:
    run = make_engine_run([make_record(step, rank) for step in range(3) for rank in (0, 1)])
    assert not any("GPU" in title for title in read_titles(show_finished_run(run)))
    run.gpu_readings = [
        {
            "time": 100.0 + 30 * count,
            "rank": rank,
            "gpu": rank + 4,
            "utilisation_percent": 97,
            "power_watts": 640.5,
        }
        for count in range(3)
        for rank in (0, 1)
    ]
    view = show_finished_run(run)
    assert read_titles(view) == [*TITLES, "GPU busy, %", "GPU power, W"]
    axis = find_axis(view, "GPU power, W")
    lines = [trace for trace in view.figure.widget.data if trace.yaxis == f"y{axis}"]
    assert [list(line.x) for line in lines] == [[0.0, 0.5, 1.0]] * 2
    assert [list(line.y) for line in lines] == [[640.5] * 3] * 2
    assert "640" in strip_markup(view.table.value)


def test_slowest_rank_is_named_although_it_has_no_curve() -> None:
    seconds = [0.25] * 11 + [0.3]
    run = make_engine_run(
        [make_record(step, rank, step_seconds=seconds[rank]) for step in range(20) for rank in range(12)]
    )
    run.world_size = 12
    view = show_finished_run(run)
    facts = strip_markup(view.facts.value)
    assert "rank 11 slowest of 12 ranks: steps +20 %" in facts
    rows = re.findall(r"rank (\d+)</th>", view.table.value)
    assert rows == [*map(str, range(8)), "11"] and "and 3 more ranks" in view.table.value
    assert len({trace.name for trace in view.figure.widget.data}) == 8


def test_progress_bar_is_accessible_and_remaining_time_is_shown() -> None:
    now = time.time()
    run = make_engine_run([make_record(step) | {"time": now - 10 + step} for step in range(10)])
    view = RunView(run)
    assert wait_until(lambda: "remaining" in view.facts.value)
    assert "aria-valuenow='10'" in view.progress.value
    assert "role='progressbar'" in view.progress.value and "aria-valuemax='40'" in view.progress.value
    match = re.search(r"about (\d+) s remaining", strip_markup(view.facts.value))
    assert match is not None and 28 <= int(match[1]) <= 30
    run.history = tuple({"time": when, "status": "", "reason": ""} for when in (5.0, 305.0))
    run.status = "finished"
    assert wait_until(lambda: "5 minutes total time" in strip_markup(view.facts.value))
    assert "remaining" not in view.facts.value


def test_memory_is_listed_by_component_with_the_prediction() -> None:
    phases = {"backward": {"parameters": 2**20, "activations": 3 * 2**20, "communication": 9}}
    run = make_engine_run([make_record(0)])
    run.recorded = {rank: {"memory": {"device": "cpu", "step": 2, "phases": phases}} for rank in (0, 1)}
    view = show_finished_run(run)
    text = strip_markup(view.memory.html.value)
    assert "Memory by component" in text and "communication" not in text
    assert re.search(r"predicted [\d.]+ [\d.]+ ", text) and "rank 1 4.00 1.00" in text
    assert "% " in text and "predicted" in text
    run.prediction = None
    assert "predicted" not in strip_markup(show_finished_run(run).memory.html.value)


def test_save_and_stop_is_offered_and_stop_stays_enabled() -> None:
    assert RunView(FakeRun([])).save_button.layout.display == "none"
    run = make_engine_run([make_record(0)])
    view = RunView(run)
    assert wait_until(lambda: view.status == "running")
    view.save_button.click()
    assert wait_until(lambda: view.status == "stopping")
    assert view.save_button.disabled and not view.stop_button.disabled
    view.stop_button.click()
    assert wait_until(lambda: view.status == "stopped") and run.pressed_buttons == ["Save and stop", "Stop"]


def test_a_run_with_early_stopping_can_be_stopped_and_keep_the_best() -> None:
    assert RunView(FakeRun([])).finish_button.layout.display == "none"
    run = make_engine_run([make_record(0)])
    run.keeps_best = run.keeps_a_model = True
    view = RunView(run)
    assert view.finish_button.layout.display == ""
    assert view.finish_button.description == "Stop and keep the best"
    assert wait_until(lambda: view.status == "running" and not view.finish_button.disabled)
    view.finish_button.click()
    assert run.pressed_buttons == ["Stop and keep the best"]
    view.refresh()
    assert view.finish_button.disabled and not view.stop_button.disabled, "one request is enough"
    run.status = "finished"


def test_a_run_without_early_stopping_can_be_stopped_and_keep_the_model() -> None:
    run = make_engine_run([make_record(0)])
    run.keeps_a_model, run.num_steps = True, 9
    view = RunView(run)
    assert view.finish_button.layout.display == ""
    assert view.finish_button.description == "Stop and keep the model"
    assert "lowest" not in view.finish_button.tooltip
    assert wait_until(lambda: view.status == "running" and not view.finish_button.disabled)
    view.finish_button.click()
    assert run.pressed_buttons == ["Stop and keep the best"], "what run.finish() is"
    run.status = "finished"
    assert wait_until(lambda: "steps, last kept" in view.facts.value)


@thorough()
def test_save_and_stop_appears_once_a_function_reads_stop_requests() -> None:
    run = FakeRun([record(loss=1.0)])
    view = RunView(run)
    assert wait_until(lambda: view.status == "running")
    assert view.save_button.layout.display == "none"
    run.has_looked = True
    assert wait_until(lambda: view.save_button.layout.display == "")
    assert "ctx.should_stop" in view.save_button.tooltip and not view.save_button.disabled
    run.status = "finished"


def test_log_search_works_during_and_after_the_run() -> None:
    run = FakeRun([])
    run.world_size = 12
    run.write("".join(f"line {number}\n" for number in range(3000)) + "\x1b[31mOops\x1b[0m <b>\n", rank=11)
    view = RunView(run)
    view.logs.whose.value = 11
    assert wait_until(lambda: "<span class='ss-t-red'>Oops</span> &lt;b&gt;" in view.logs.pane.value)
    assert (
        wait_until(lambda: "the last 16 KiB" in view.logs.found.value) and len(view.logs.pane.value) < 40_000
    )
    view.logs.words.value = "line 12"
    assert wait_until(lambda: view.logs.found.value == "111 of 3,001 lines")
    assert "<mark>line 12</mark>99" in view.logs.pane.value
    run.status = "finished"
    assert wait_until(lambda: view.status == "finished")
    view.logs.words.value = "oops"
    assert wait_until(lambda: view.logs.found.value == "1 of 3,001 lines")
    view.logs.words.value = "nowhere"
    assert wait_until(lambda: "no matching line" in view.logs.pane.value)
    view.logs.words.value = ""
    assert wait_until(lambda: "ss-t-red" in view.logs.pane.value)
    view.logs.whose.value = "supervisor"
    assert wait_until(lambda: "no output" in view.logs.pane.value)


def test_another_run_ends_the_search_in_the_log_of_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread reads for a view, so that no part of a large log is read twice."""
    monkeypatch.setattr(LogSearch, "search_next", lambda self: True)  # A log without end.
    others = set(threading.enumerate())

    def list_readers() -> list[str]:
        threads = set(threading.enumerate()) - others
        return [thread.name for thread in threads if thread.name.startswith("shardscope-run-")]

    ended, active = FakeRun([]), FakeRun([record(loss=2.5)])
    ended.status = "finished"
    view = RunView(ended)
    assert wait_until(lambda: view.status == "finished" and not list_readers())
    view.logs.words.value = "oops"
    assert wait_until(lambda: "still searching" in view.logs.found.value)
    assert list_readers() == ["shardscope-run-log"]
    view.show(active)
    assert wait_until(lambda: "2.500" in view.facts.value)
    assert wait_until(lambda: list_readers() == ["shardscope-run-view"])
    view.logs.words.value = "line"
    assert wait_until(lambda: "still searching" in view.logs.found.value)
    assert list_readers() == ["shardscope-run-view"]
    view.close()
    assert wait_until(lambda: not list_readers())


def test_fault_22_page_receives_a_bounded_part_of_the_log() -> None:
    run = FakeRun([])
    run.write(b"\x1b[3" + b"1mx\x1b[32m<" * 2_000_000 + b"\xff\xfe")
    view = RunView(run)
    assert wait_until(lambda: len(view.logs.pane.value) > 1000)
    assert len(view.logs.pane.value) < 250_000
    run.status = "finished"


def test_charts_are_stacked_in_a_narrow_view() -> None:
    figure = RunFigure()
    figure.start_run(2, EXPECTED, 40, ["loss", "step_seconds", "grad_norm"])
    wide = figure.widget.layout.height
    widget = figure.widget
    figure.fit_width(320)
    assert figure.widget is widget and widget.layout.height == 3 * wide
    assert {widget.layout[f"xaxis{number}"].domain for number in ("", 2, 3)} == {(0.0, 1.0)}
    figure.fit_width(836)
    assert widget.layout.height == wide


def test_view_needs_only_the_run_folder(tmp_path: Any) -> None:
    """Note, number of steps and plan come from the folder, not from the Studio that launched the run."""
    run = make_engine_run([make_record(0)])
    run.note = "A rehearsal <of> it"
    view = show_finished_run(run)
    assert "A rehearsal &lt;of&gt; it" in view.error.value
    assert "1 of 40" in strip_markup(view.facts.value)
    assert PLAN.layout.description in strip_markup(view.head.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), "x", None, True])
def test_invalid_first_value_keeps_the_chart_for_later_values(value: Any) -> None:
    view = show_finished_run(
        FakeRun([record(0, step_seconds=value), record(1, step_seconds=0.2), record(2, step_seconds=0.3)])
    )
    assert read_titles(view) == ["step time, ms"]
    (line,) = view.figure.widget.data
    assert [y for y in line.y if y == y] == [200.0, 300.0]


def test_slow_first_step_is_clipped_and_its_value_shown_on_hover() -> None:
    records = [make_record(step, step_seconds=9.0 if step == 0 else 0.25) for step in range(40)]
    view = show_finished_run(make_engine_run(records))
    axis = find_axis(view, "step time, ms")
    line = next(
        trace for trace in view.figure.widget.data if trace.yaxis == f"y{axis}" and trace.name == "rank 0"
    )
    top = view.figure.widget.layout[f"yaxis{axis}"].range[1]
    assert top < 1000 and max(line.y) < top, "the axis fits the other steps, and no line leaves the plot"
    assert line.customdata[0] == 9000 and "customdata" in line.hovertemplate


def test_steps_that_take_over_a_second_are_in_seconds() -> None:
    figure = RunFigure()
    figure.start_run(1, EXPECTED, 40, ["step_seconds"])
    figure.add_records([make_record(step, step_seconds=0.9) for step in range(8)])
    (panel,) = [panel for panel in figure.charts if panel.metric == "step_seconds"]
    assert figure.charts[panel][0] == "ms"
    figure.add_records([make_record(step, step_seconds=2.5) for step in range(8, 20)])
    assert figure.charts[panel] == ("s", 1.0)
    layout = figure.widget.layout
    assert "step time, s" in [note.text for note in layout.annotations]
    (line,) = [trace for trace in figure.widget.data if trace.visible and "s<extra>" in trace.hovertemplate]
    assert line.y[0] == pytest.approx(0.9) and line.y[-1] == pytest.approx(2.5)
    assert line.customdata[-1] == pytest.approx(2.5) and "%{customdata:,.4~r} s" in line.hovertemplate
    # The predicted line and the axis are in the same unit; a faster step later changes nothing.
    assert 0.2 in [shape.y0 for shape in layout.shapes]
    assert layout[line.yaxis.replace("y", "yaxis")].range[1] < 4
    figure.add_records([make_record(step, step_seconds=0.9) for step in range(20, 40)])
    assert figure.charts[panel] == ("s", 1.0)


def test_one_slow_step_does_not_change_the_unit() -> None:
    figure = RunFigure()
    figure.start_run(1, EXPECTED, 40, ["step_seconds"])
    for step, seconds in enumerate((0.3, 4.0, *[0.05] * 30)):
        figure.add_records([make_record(step, step_seconds=seconds)])
    (panel,) = [panel for panel in figure.charts if panel.metric == "step_seconds"]
    assert figure.charts[panel][0] == "ms"


def test_annotations_are_outside_of_the_plots() -> None:
    view = show_finished_run(make_engine_run([make_record(step) for step in range(3)]))
    layout = view.figure.widget.layout
    tops = {round(layout[name].domain[1], 6) for name in list_axes(layout, "yaxis")}
    for note in layout.annotations:
        assert note.yref == "paper" and round(note.y, 6) in tops and note.yanchor == "bottom", note.text


def list_axes(layout: Any, kind: str) -> list[str]:
    return [name for name in layout if name.startswith(kind) and layout[name].visible]


def read_fact_names(view: RunView) -> list[str]:
    return re.findall(r"<span>([^<]*)</span>", view.facts.value)


def test_facts_and_rows_exist_before_the_first_values() -> None:
    run = make_engine_run([])
    view = RunView(run)  # type: ignore[arg-type]
    assert wait_until(lambda: len(read_fact_names(view)) == 5 and view.table.value)
    rows = view.table.value.count("<th scope='row'>")
    run.records += [make_record(step, rank) for step in range(12) for rank in (0, 1)]
    assert wait_until(lambda: "2.500" in view.facts.value)
    assert len(read_fact_names(view)) == 5 and view.table.value.count("<th scope='row'>") == rows
    run.status = "finished"


def read_lines(figure: RunFigure, title: str) -> dict[str, list[float]]:
    """Return the visible lines of the chart ``title`` by their names."""
    number = [panel.metric for panel in figure.panels].index(title)
    slot = figure._slots[figure.panels[number].metric]
    axis = f"y{slot + 1 if slot else ''}"
    return {
        trace.hovertemplate.partition(",")[0]: list(trace.y)
        for trace in figure.widget.data
        if trace.yaxis == axis and trace.visible
    }


def test_values_that_are_equal_on_all_ranks_are_one_line_until_they_differ() -> None:
    figure = RunFigure()
    figure.start_run(3, None, 40, ["loss", "step_seconds"])
    figure.add_records([make_record(0, rank, step_seconds=1.0 + rank) for rank in (0, 1)])
    assert set(read_lines(figure, "loss")) == {"all ranks"}, "of the ranks that have logged"
    # A rank that is a step behind has the same values so far.
    figure.add_records([make_record(1, 0, loss=2.0), make_record(0, 2, step_seconds=1.0)])
    assert read_lines(figure, "loss") == {"all ranks": [2.5, 2.0]}
    assert set(read_lines(figure, "step_seconds")) == {"rank 0", "rank 1", "rank 2"}
    labels = [note.text for note in figure.widget.layout.annotations if note.xanchor == "right"]
    assert labels.count("all ranks") >= 1
    figure.add_records([make_record(1, 1, loss=2.1), make_record(1, 2, loss=2.0)])
    lines = read_lines(figure, "loss")
    assert set(lines) == {"rank 0", "rank 1", "rank 2"} and lines["rank 1"][-1] == pytest.approx(2.1)
    # The next run begins anew.
    figure.start_run(2, None, 40, ["loss"])
    figure.add_records([make_record(0, rank) for rank in (0, 1)])
    assert set(read_lines(figure, "loss")) == {"all ranks"}


def test_ranks_that_were_never_compared_have_lines_of_their_own() -> None:
    figure = RunFigure()
    figure.start_run(2, None, 40, ["loss"])
    figure.add_records([make_record(0, 0), make_record(1, 1)])
    assert set(read_lines(figure, "loss")) == {"rank 0", "rank 1"}


@pytest.mark.parametrize(("world_size", "text"), [(1, ""), (2, "rank 0 rank 1"), (12, "rank 7 of 12 ranks")])
def test_a_legend_says_which_line_is_which_ranks(world_size: int, text: str) -> None:
    run = make_engine_run([make_record(0, rank) for rank in range(world_size)])
    run.world_size = world_size
    view = show_finished_run(run)
    assert strip_markup(view.legend.value).strip().endswith(text) and ("<svg" in view.legend.value) == bool(
        text
    )


def test_a_chart_in_the_place_of_another_runs_has_an_axis_of_its_own() -> None:
    figure = RunFigure()
    figure.start_run(1, None, 10, ["loss", "tokens_per_second"])
    figure.add_records([make_record(step, tokens_per_second=3000.0) for step in range(10)])
    assert figure.widget.layout.yaxis2.range[1] > 3000
    figure.start_run(1, None, None, ["loss", "validation_loss"])
    figure.add_records([make_record(step, validation_loss=1.5 - 0.1 * step) for step in range(10)])
    titles = [panel.title for panel in figure.panels]
    assert titles[:2] == ["loss", "validation loss"]
    assert figure.widget.layout.yaxis2.range is None and figure.widget.layout.yaxis2.autorange


@pytest.mark.parametrize(("value", "least", "most"), [(0.001, 0, 0.00115), (-2.0, -2.3, 0), (0.0, 0, 1)])
def test_a_constant_value_is_not_drawn_as_zero(value: float, least: float, most: float) -> None:
    figure = RunFigure()
    figure.start_run(1)
    records = [{"step": step, "rank": 0, "time": 0.0, "temperature": value} for step in range(5)]
    figure.add_records(records)
    axis = figure.widget.layout.yaxis
    assert axis.range == pytest.approx((least, most)) and axis.autorange is False
    figure.add_records([{"step": 5, "rank": 0, "time": 0.0, "temperature": value + 1}])
    assert axis.range is None and axis.autorange


def test_rounding_of_a_constant_loss_is_no_curve() -> None:
    figure = RunFigure()
    figure.start_run(1)
    values = [7.6255951, 7.6255955, 7.6255951]
    figure.add_records([{"step": n, "rank": 0, "time": 0.0, "loss": value} for n, value in enumerate(values)])
    assert figure.widget.layout.yaxis.range == pytest.approx((0, 1.15 * 7.6255955))


def test_the_step_axis_ends_with_steps_that_are_known_late() -> None:
    figure = RunFigure()
    figure.start_run(1, None, None, ["loss"])
    assert figure.widget.layout.xaxis.range == (0, 40)
    figure.add_records([make_record(step) for step in range(3)])
    figure.show_gpu_samples([{"time": 60.0 * n, "rank": 0, "power_watts": 300.0} for n in range(300)], 0.0)
    figure.set_total_steps(23)
    assert figure.widget.layout.xaxis.range == (0, 23)
    figure.add_records([make_record(step) for step in range(3, 30)])
    figure.set_total_steps(25)
    assert figure.widget.layout.xaxis.range[1] >= 29, "what is drawn stays in the chart"
