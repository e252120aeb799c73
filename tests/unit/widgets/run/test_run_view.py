"""Tests of the run view with unusual metrics and logs: it keeps updating, and Stop stays enabled."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from fake_runs import FakeRun, record, wait_until
from tests.requirements import sample

from shardscope_widgets import RunView
from shardscope_widgets.run.figure import RunFigure
from shardscope_widgets.run.lines import MAX_POINTS


@sample(2)
@pytest.mark.parametrize("loss", [None, "n/a", float("nan"), float("inf"), True, [1]])
def test_fault_45_invalid_loss_keeps_the_view_and_stop_working(loss: Any) -> None:
    invalid_record = record(loss=loss, tokens_per_second=loss, peak_memory_bytes=loss)
    run = FakeRun([invalid_record, record(step=None, loss=1.0)])
    view = RunView(run)
    assert wait_until(lambda: view.status == "running")
    assert not view.stop_button.disabled
    run.records.append(record(step=1, loss=2.5))
    assert wait_until(lambda: "2.500" in view.facts.value)
    view.stop_button.click()
    assert wait_until(lambda: view.status == "stopped")


def test_a_run_of_another_machine_can_be_stopped_while_it_counts_as_lost() -> None:
    run = FakeRun([])
    run.status, run.is_on_this_machine = "lost", False
    view = RunView(run)
    assert wait_until(lambda: view.status == "lost" and not view.stop_button.disabled)
    view.stop_button.click()
    assert run.pressed_buttons == ["Stop"] and view.stop_button.disabled


def test_a_run_whose_processes_are_gone_cannot_be_stopped() -> None:
    run = FakeRun([])
    run.status = "lost"
    view = RunView(run)
    assert wait_until(lambda: view.status == "lost") and view.stop_button.disabled


def test_fault_60_view_shows_the_share_of_metric_lines_read() -> None:
    run = FakeRun([record(loss=2.5)])
    view = RunView(run)
    assert wait_until(lambda: "2.500" in view.facts.value) and "lines are shown" not in view.facts.value
    run.follower.num_skipped_bytes = 3
    run.records.append(record(step=1, loss=2.25))
    assert wait_until(lambda: "2.250" in view.facts.value and "25 %" in view.facts.value)
    assert "of the logged lines are shown" in view.facts.value
    run.status = "finished"


def test_fault_45_on_end_is_called_once_although_the_last_refresh_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[Any] = []
    run = FakeRun([record(loss=1.0)])
    view = RunView(run, on_end=ended.append)
    assert wait_until(lambda: view.status == "running")
    monkeypatch.setattr(view, "_show_numbers", lambda *_: 1 / 0)
    run.records.append(record(step=1, loss=1.0))
    run.status = "finished"
    assert wait_until(lambda: ended == [run])
    assert "run cannot be shown" in view.error.value


def test_a_run_that_is_shown_again_is_watched_once() -> None:
    ended: list[Any] = []
    run = FakeRun([record(loss=1.0)])
    view = RunView(on_end=ended.append)
    before = set(threading.enumerate())
    for _ in range(4):
        view.show(run)
        assert wait_until(lambda: "1.000" in view.facts.value)
    assert wait_until(lambda: len(set(threading.enumerate()) - before) == 1)
    run.status = "finished"
    assert wait_until(lambda: set(threading.enumerate()) <= before)
    assert ended == [run]


def test_a_page_that_is_written_at_once_has_the_run(tmp_path: Path) -> None:
    """A script calls it before the view's thread has read anything: the page had no chart and no numbers."""
    run = FakeRun([record(step=step, loss=3.5 - step) for step in range(3)])
    run.status = "finished"
    page = RunView(run).to_html(tmp_path / "run.html").read_text(encoding="utf-8")
    assert "1.500" in page and "finished" in page


def test_rank_output_is_shown_without_any_metrics() -> None:
    run = FakeRun([])
    view = RunView(run)
    run.write("<b>hello</b>")
    assert wait_until(lambda: "&lt;b&gt;hello&lt;/b&gt;" in view.logs.pane.value)
    run.status = "finished"


def test_new_reason_is_shown_without_a_status_change() -> None:
    run = FakeRun([record(loss=1.0)])
    view = RunView(run)  # type: ignore[arg-type]
    assert wait_until(lambda: "because" in view.head.value)
    run.reason = "no step for 61 s; rank 1: wait (my.py:7)"
    assert wait_until(lambda: "no step for 61 s" in view.head.value)
    run.status = "stopped"


def test_a_hang_is_a_warning_and_ends_the_remaining_time() -> None:
    run = FakeRun([record(step=step, loss=1.0) | {"time": float(step)} for step in range(9)])
    run.num_steps, run.trains_the_plan = 40, True
    view = RunView(run)  # type: ignore[arg-type]
    assert wait_until(lambda: "<b>about " in view.facts.value) and "ss-tight" not in view.head.value
    run.is_hanging, run.reason = True, "no step for 61 s; rank 1: wait (my.py:7)"
    assert wait_until(lambda: "ss-run-reason ss-tight" in view.head.value)
    assert "▲</span> running" in view.head.value
    assert wait_until(lambda: "<b>–</b> <span>remaining" in view.facts.value)
    run.is_hanging, run.status = False, "failed"
    assert wait_until(lambda: "ss-tight" not in view.head.value and "ss-run-reason" in view.head.value)


@pytest.mark.parametrize("status", ["running", "stopping", "stopped"])
def test_the_fix_of_a_checkpoint_that_was_not_saved_is_not_cut(status: str) -> None:
    run = FakeRun([record(loss=1.0)])
    run.status, run.reason = (
        status,
        "step-000040 could not be saved: no space; step-000020 is kept. Nearest fix",
    )
    view = RunView(run)  # type: ignore[arg-type]
    assert wait_until(lambda: "could not be saved" in view.head.value)
    (line,) = (part for part in view.head.value.split("<div ") if ">step-000040 could" in part)
    assert "ss-clipped" not in line
    run.status = "stopped"


def test_a_view_without_a_run_has_no_button_to_stop_it() -> None:
    assert "ss-off" in RunView().stop_button._dom_classes


def test_profiler_messages_are_removed_from_the_log() -> None:
    run = FakeRun([])
    view = RunView(run)
    run.write("step 1\nUSDT:2026-11-21 Handler.cpp:52] profiler_start\nstep 2\nERROR: kept")
    assert wait_until(lambda: "step 2" in view.logs.pane.value)
    assert "step 1\nstep 2\nERROR: kept" in view.logs.pane.value
    run.status = "finished"


def test_number_of_points_is_bounded_and_both_ends_are_kept() -> None:
    run = FakeRun([record(step=step, loss=float(step)) for step in range(5 * MAX_POINTS)])
    view = RunView(run)
    assert wait_until(lambda: view.num_steps == 5 * MAX_POINTS)
    # The view's thread adds the trace first and sets its points after that.
    assert wait_until(lambda: len(view.figure.widget.data) == 1 and len(view.figure.widget.data[0].x) > 0)
    line = view.figure.widget.data[0]
    assert MAX_POINTS // 2 <= len(line.x) <= MAX_POINTS
    assert line.x[0] == 0 and line.x[-1] > 4.9 * MAX_POINTS
    run.status = "finished"


@pytest.mark.parametrize("is_own", [True, False])
def test_steps_of_our_loop_count_from_1_and_others_as_logged(is_own: bool) -> None:
    run = FakeRun([record(step=step, loss=1.0 + step) for step in range(40)])
    run.trains_the_plan = is_own
    view, last = RunView(run), 40 if is_own else 39
    assert wait_until(lambda: len(view.figure.widget.data) == 1 and len(view.figure.widget.data[0].x) > 0)
    assert view.figure.widget.data[0].x[-1] == last
    assert wait_until(lambda: f"<td>{last}</td>" in view.table.value)
    run.status = "finished"


def test_second_run_starts_with_empty_curves() -> None:
    first, second = FakeRun([record(loss=1.0)]), FakeRun([])
    view = RunView(first)
    assert wait_until(lambda: view.num_steps == 1)
    figure = view.figure
    view.show(second)
    assert wait_until(lambda: view.num_steps == 0)
    assert view.figure is figure and len(view.figure.widget.data[0].x) == 0
    first.status = second.status = "finished"


@pytest.mark.parametrize(
    ("total", "ends"),
    [(40, [40, 80, 160]), (102, [40, 80, 102]), (4000, [40, 80, 160]), (None, [40, 80, 160])],
)
def test_step_axis_doubles_up_to_the_last_step(total: int | None, ends: list[int]) -> None:
    figure = RunFigure()
    figure.start_run(1, None, total)
    axis_ends = []
    for step in (0, 41, 100):
        figure.add_records([{"step": step, "rank": 0, "loss": 1.0}])
        axis_ends.append(figure.widget.layout.xaxis.range[1])
    assert axis_ends == ends


def test_axes_have_no_labels_before_the_first_value() -> None:
    figure = RunFigure()
    figure.start_run(2, None, 40, ["loss"])
    figure.add_records([{"step": 0, "rank": 0, "loss": 7.6}])
    assert figure.widget.layout.yaxis.showticklabels
    assert figure.widget.data[0].mode == "lines+markers", "a line of one point cannot be seen"
    figure.start_run(2, None, 40, ["loss"])
    assert not figure.widget.layout.yaxis.showticklabels


def test_view_masks_secrets_before_the_supervisor_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The content of the log pane is saved with the notebook."""
    monkeypatch.setenv("MY_API_KEY", "supersecretvalue1234")
    run = FakeRun([])
    view = RunView(run)  # type: ignore[arg-type]
    run.write("the key is supersecretvalue1234\n")
    assert wait_until(lambda: "the key is ****" in view.logs.pane.value)
    view.logs.words.value = "the key"
    assert wait_until(lambda: "mark" in view.logs.pane.value)
    assert "supersecret" not in str(view.logs.get_state()) + str(view.logs.pane.get_state())
    run.status = "finished"
    view.close()


def test_log_is_read_again_after_a_secret_was_masked() -> None:
    """A kernel that did not launch the run does not know its secrets: it depends on the masked file."""
    run = FakeRun([])
    view = RunView(run)  # type: ignore[arg-type]
    run.write("the key is supersecretvalue1234\n")
    assert wait_until(lambda: "supersecret" in view.logs.pane.value)
    run.write(f"the key is {'*' * 20}\n")
    assert wait_until(lambda: "supersecret" not in view.logs.pane.value)
    run.status = "finished"
    view.close()
