"""Tests that messages which read all slices are answered in a thread, so that the kernel's loop goes on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import pytest

from shardscope.timing.report import format_seconds
from shardscope.trace.summary.summary import TraceSummary
from shardscope_widgets.kit.background_calls import BackgroundCalls
from shardscope_widgets.trace import TraceView
from shardscope_widgets.trace import view as view_module
from shardscope_widgets.trace.view import NOT_ANALYSED

FIXTURE = Path(__file__).parents[3] / "fixtures" / "trace_2_ranks"
WIDGET = "application/vnd.jupyter.widget-view+json"


async def wait_until(is_done: Callable[[], object]) -> None:
    for _ in range(3000):
        if is_done():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen within 30 s")


def record_thread(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, threads: dict[str, str]) -> None:
    """Note the thread in which a method of ``owner`` is called."""
    plain = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        threads[name] = threading.current_thread().name
        return plain(*args, **options)

    monkeypatch.setattr(owner, name, call)


def test_slow_messages_are_answered_in_a_thread_and_shown_in_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    view = TraceView(FIXTURE)
    here = threading.current_thread().name
    threads: dict[str, str] = {}
    sent: list[dict[str, Any]] = []
    for owner, name in [
        (view._context, "find_connections"),
        (view._tiler, "sum_by_name"),
        (view._tiler, "sum_area"),
        (view._tiler, "choose_representative"),
    ]:
        record_thread(monkeypatch, owner, name, threads)

    def send(content: dict[str, Any], buffers: object = None) -> None:
        sent.append(content)
        threads[content["type"]] = threading.current_thread().name

    monkeypatch.setattr(view, "send", send)
    view.observe(lambda change: threads.update(selected=threading.current_thread().name), "selected")
    end = view.trace.duration_ns_total

    async def ask() -> None:
        view.search = "addmm"
        for content in [
            {"type": "totals", "id": 1, "t0_ns": 0, "t1_ns": end},
            {"type": "area", "id": 2, "t0_ns": 0, "t1_ns": end, "tracks": [0]},
            {"type": "select", "id": 3, "index": 5},
            {"type": "pick", "id": 4, "index": 5, "count": 2},
            {"type": "find", "id": 5, "direction": 1},
            {"type": "download", "id": 6},
        ]:
            view._handle_custom_msg(content, [])
        await wait_until(lambda: len(sent) == 4)
        view._highlight_path_later(view.trace.critical_path())
        await wait_until(lambda: view._path_number == 1)

    asyncio.run(ask())
    assert [content["type"] for content in sent] == ["totals", "area", "found", "download"]
    computed = {threads.pop(name) for name in ("find_connections", "sum_by_name", "sum_area")}
    assert here not in computed | {threads.pop("choose_representative")}
    assert set(threads.values()) == {here}
    assert view.selected is not None and view._path is not None


def test_matches_that_are_requested_quickly_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """N pressed several times before the first answer is shown, and once back."""
    view = TraceView(FIXTURE)
    view.search = "addmm"
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(view, "send", lambda content, buffers=None: sent.append(content))

    async def ask() -> None:
        for number, direction in enumerate((1, 1, 1, -1)):
            view._handle_custom_msg({"type": "find", "id": number, "direction": direction}, [])
        time.sleep(0.5)  # the loop is busy: nothing is shown meanwhile
        await wait_until(lambda: len(sent) == 4)

    asyncio.run(ask())
    assert [content["position"] for content in sent] == [1, 2, 3, 2]


def test_an_error_in_the_thread_is_raised_in_the_loop() -> None:
    errors: list[dict[str, Any]] = []

    def fail() -> Callable[[], None]:
        raise ValueError("no such slice")

    async def ask() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        calls = BackgroundCalls("test")
        calls.run(fail)
        done = threading.Event()
        calls.run(lambda: done.set)
        await wait_until(done.is_set)

    asyncio.run(ask())
    assert str(errors[0]["exception"]) == "no such slice"


def test_without_a_loop_calls_are_made_at_once() -> None:
    done: list[int] = []
    BackgroundCalls("test").run(lambda: lambda: done.append(1))
    assert done == [1]


def test_sentences_of_a_large_trace_come_after_the_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """While they are computed, the kernel answers the view's messages; the saved picture gets them later."""
    monkeypatch.setattr(view_module, "MAX_ANALYSED_AT_ONCE", 0)
    published: list[tuple[dict[str, Any], dict[str, Any]]] = []
    monkeypatch.setattr(
        "IPython.display.publish_display_data", lambda data, **options: published.append((data, options))
    )
    view = TraceView(FIXTURE)
    may_finish = threading.Event()
    summarize = view.trace.summary

    def summarize_late() -> TraceSummary:
        assert may_finish.wait(30)
        return summarize()

    monkeypatch.setattr(view.trace, "summary", summarize_late)
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(view, "send", lambda content, buffers=None: sent.append(content))

    async def show() -> None:
        view._ipython_display_()
        (live, _), (static, _) = published
        assert WIDGET in live and NOT_ANALYSED in static["text/html"]
        view._handle_custom_msg({"type": "select", "id": 1, "index": 5}, [])
        await wait_until(lambda: view.selected is not None)
        assert len(published) == 2
        may_finish.set()
        await wait_until(lambda: len(published) == 3)

    asyncio.run(show())
    static, options = published[2]
    assert options["update"] and options["transient"] == published[1][1]["transient"]
    html = static["text/html"]
    assert str(escape(summarize().sentences[0])) in html and "<svg" in html and NOT_ANALYSED not in html
    assert sent[-1]["type"] == "picture" and sent[-1]["picture"] == html, "for a page that was loaded anew"
    # Displayed again, it has them at once.
    view._ipython_display_()
    assert published[-1][0]["text/html"] == html
    view.close()


def test_a_summary_that_fails_is_said_in_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_module, "MAX_ANALYSED_AT_ONCE", 0)
    published: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "IPython.display.publish_display_data", lambda data, **options: published.append(data)
    )
    view = TraceView(FIXTURE)

    def fail() -> TraceSummary:
        raise ValueError("no <steps>")

    monkeypatch.setattr(view.trace, "summary", fail)

    async def show() -> None:
        view._ipython_display_()
        await wait_until(lambda: len(published) == 3)

    asyncio.run(show())
    assert "No summary: no &lt;steps&gt;" in published[2]["text/html"] and "<svg" in published[2]["text/html"]
    view.close()


def test_a_notebook_saved_before_the_analysis_says_so_and_has_the_tracks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its kernel may end meanwhile: nothing that is saved says that work goes on."""
    monkeypatch.setattr(view_module, "MAX_ANALYSED_AT_ONCE", 0)
    published: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "IPython.display.publish_display_data", lambda data, **options: published.append(data)
    )
    view = TraceView(FIXTURE)
    may_finish = threading.Event()
    summarize = view.trace.summary
    monkeypatch.setattr(view.trace, "summary", lambda: may_finish.wait(30) and summarize())

    async def show() -> None:
        view._ipython_display_()

    asyncio.run(show())  # the loop is closed before the analysis ends, as that of a kernel
    html = published[-1]["text/html"]
    num_slices, duration = len(view.trace), format_seconds(view.trace.duration_seconds)
    assert f"<li>2 ranks, {num_slices:,} slices in {duration}.</li>" in html
    assert "not finished when the notebook was saved. Run the cell again" in html
    assert "<svg" in html and html.count("<path") > 1 and "…</li>" not in html
    may_finish.set()
    view.close()
