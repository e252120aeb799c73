"""Tests of closing views: a closed view leaves nothing in the kernel, and a run outlives its views."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_runs import FakeRun, record, wait_until
from ipywidgets import Widget
from ipywidgets.widgets.widget import _instances
from tests.faults import includes_slow_tests
from tests.requirements import few
from tests.weights_folders import write_folder

import shardscope as ss
from shardscope_widgets import (
    AdviceView,
    FinetuneView,
    MemoryView,
    RankingView,
    RunView,
    ScheduleView,
    StepView,
    Studio,
)
from shardscope_widgets.run.runs_view import RunsView

PLAN = ss.Plan(
    ss.models["gpt2"], ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(seq_len=512), ss.Layout.fsdp2()
)

WEIGHTS = "llama"
"""Folder of a small model."""


def make_run_view() -> RunView:
    return RunView(FakeRun([record(loss=1.0)]))


def make_runs_view() -> RunsView:
    """Return a list of runs in which an active run is open."""
    view = RunsView()
    view.open(FakeRun([record(loss=1.0)]))  # type: ignore[arg-type]
    return view


def make_finetune_view() -> FinetuneView:
    """Return a view with a plan and an active run."""
    view = FinetuneView(WEIGHTS, "text.txt")
    assert view.plan is not None
    view.outcome.watch(FakeRun([record(loss=1.0)]))  # type: ignore[arg-type]
    return view


def make_studio() -> Studio:
    """Return a Studio after showing each tab, except those that start a background search."""
    view = Studio()
    for framework in ("megatron", "deepspeed"):  # The inputs of the first one are not shown when it closes.
        view.layout_picker.framework.value = framework
    for tab in ("Time", "Checks", "Runs", "Trace", "Memory"):
        view.tabs.value = tab
    return view


VIEWS: dict[str, tuple[Callable[[], Any], int]] = {
    "memory": (lambda: MemoryView(PLAN), 2),
    "time": (lambda: StepView(PLAN), 2),
    "schedule": (lambda: ScheduleView(PLAN), 2),
    "ranking": (RankingView, 10),
    "advice": (AdviceView, 10),
    "finetune": (make_finetune_view, 2),
    "run": (make_run_view, 2),
    "runs": (make_runs_view, 2),
    "studio": (make_studio, 1),
}
"""Name -> factory, and the number of views that `make test` creates: a hundred take a minute."""


@pytest.mark.parametrize("name", few(VIEWS, ["studio", "finetune"]))
def test_fault_43_closed_views_leave_no_widgets_or_threads(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / WEIGHTS)
    (tmp_path / "text.txt").write_text("Call me Ishmael.")
    make, count = VIEWS[name]
    threads = set(threading.enumerate())  # Threads of earlier tests may end meanwhile.
    make().close()  # Creates the widgets that views share, which stay registered.
    gc.collect()
    registered = len(_instances)
    alive = []
    for _ in range(100 if includes_slow_tests() else count):
        view = make()
        alive.append(weakref.ref(view))
        assert len(_instances) > registered
        view.close()
        del view
    assert wait_until(lambda: threads.issuperset(threading.enumerate())), threading.enumerate()
    gc.collect()
    assert len(_instances) == registered
    assert not [ref for ref in alive if ref() is not None]


def test_fault_26_opening_and_closing_views_does_not_affect_the_run() -> None:
    run = FakeRun([record(loss=1.0)])
    first, second = RunView(run), RunView(run)
    assert wait_until(lambda: first.num_steps == second.num_steps == 1)
    first.close()
    run.records.append(record(step=1, loss=0.5))
    assert wait_until(lambda: second.num_steps == 2)
    assert run.status == "running", "closing a view does not stop the run"
    third = RunView(run)
    assert wait_until(lambda: third.num_steps == 2), "a later view shows all steps"
    third.stop_button.click()
    assert wait_until(lambda: second.status == third.status == "stopped")


def test_fault_42_a_thousand_updates_per_second_cause_few_redraws() -> None:
    run = FakeRun([record(loss=9.0)])
    view = RunView(run)
    assert wait_until(lambda: "9.000" in view.table.value)
    batch_sizes: list[int] = []
    add_records = view.figure.add_records

    def count_records(records: list[dict[str, Any]]) -> None:
        batch_sizes.append(len(records))
        add_records(records)

    view.figure.add_records = count_records
    began = time.monotonic()
    for step in range(1, 1001):
        run.records.append(record(step=step, loss=float(step)))
        time.sleep(max(0.0, began + step / 1000 - time.monotonic()))
    assert wait_until(lambda: sum(batch_sizes) == 1000), batch_sizes
    run.status = "finished"
    assert view.num_steps == 1001 and len(batch_sizes) <= 4 * (time.monotonic() - began) + 2, batch_sizes
    assert wait_until(lambda: "1,000.000" in view.table.value), "the last value is shown"


def test_closing_a_view_keeps_the_widgets_that_others_share() -> None:
    """A page that is reloaded looks up the widgets that views share."""
    remaining, closed = MemoryView(PLAN), MemoryView(PLAN)
    closed.close()
    waiting, seen = [remaining], {remaining.model_id}
    while waiting:
        widget = waiting.pop()
        assert widget.comm is not None, widget
        values = [getattr(widget, name) for name in widget.keys]
        parts = [part for value in values for part in (value if isinstance(value, list | tuple) else [value])]
        new = [part for part in parts if isinstance(part, Widget) and part._model_id not in seen]
        seen.update(part._model_id for part in new)
        waiting += new
    remaining.close()
