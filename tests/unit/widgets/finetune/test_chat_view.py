"""Tests of the view of a chat: two models answer side by side; texts are escaped; Stop and Clear."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fake_runs import FakeRun, wait_until
from ipywidgets.widgets.widget import _instances

from shardscope_widgets import ChatView
from shardscope_widgets.kit.saved.static_picture import draw_picture

TIMEOUT_SECONDS = 10


class FakeChat:
    """A chat that answers with the given pieces, each when it is allowed to."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces, self.allowed = pieces, threading.Semaphore(0)
        self.texts: list[str] = []
        self.is_closed, self.num_resets, self.is_stopped = False, 0, False

    def send(self, text: str) -> Iterator[str]:
        self.texts.append(text)
        self.is_stopped = False
        for piece in self.pieces:
            assert self.allowed.acquire(timeout=TIMEOUT_SECONDS)
            if self.is_stopped:
                return
            if piece == "fail":
                raise RuntimeError("no <memory> left")
            yield piece

    def stop(self) -> None:
        self.is_stopped = True
        self.allowed.release()

    def reset(self) -> None:
        self.num_resets += 1
        self.stop()

    def close(self) -> None:
        self.is_closed = True
        self.stop()


class ChattingRun(FakeRun):
    recorded_base = {"weights": "/models/<base>"}  # noqa: RUF012

    def __init__(self, *answers: list[str]) -> None:
        super().__init__([])
        self.model: Any = self.folder
        self.chats = dict(zip((True, False), map(FakeChat, answers), strict=True))

    def chat(self, *, base: bool = False) -> FakeChat:
        return self.chats[base]


def show(run: ChattingRun) -> tuple[ChatView, Any, Any]:
    view = ChatView(run)  # type: ignore[arg-type]
    return view, *(column.pane for column in view.columns)


def type_and_send(view: ChatView, text: str) -> None:
    """Send the message of the browser."""
    view.box._handle_custom_msg({"send": text}, [])


def test_both_models_answer_side_by_side_and_texts_are_escaped() -> None:
    run = ChattingRun(["Par", "is"], ["<img src=x onerror=alert(1)>", " &"])
    view, base, tuned = show(run)
    assert "&lt;base&gt;" in view.columns[0].heading.value
    type_and_send(view, "<b>capital?</b>")
    assert wait_until(lambda: run.chats[True].texts == run.chats[False].texts == ["<b>capital?</b>"])
    assert wait_until(lambda: "loading the model" in base.value)
    assert view.box.busy and not view.stop_button.disabled
    run.chats[True].allowed.release()
    assert wait_until(lambda: base.value.endswith("Par"))  # While the other one has no text yet.
    type_and_send(view, "too early")
    for chat in run.chats.values():
        chat.allowed.release(2)
    assert wait_until(lambda: not view.box.busy and view.stop_button.disabled)
    assert "Paris" in base.value and "&lt;b&gt;capital?&lt;/b&gt;" in base.value
    assert "&lt;img src=x onerror=alert(1)&gt; &amp;" in tuned.value
    assert "<img" not in tuned.value and "too early" not in base.value and view.stop_button.disabled
    assert "Paris" in draw_picture(view) and "<img" not in draw_picture(view)
    type_and_send(view, "again")
    assert wait_until(lambda: run.chats[True].texts == ["<b>capital?</b>", "again"])
    assert base.value.index("Paris") < base.value.index("again")
    view.close()


def test_stop_keeps_what_was_answered_and_clear_forgets_it() -> None:
    run = ChattingRun(["one ", "two"], ["eins ", "zwei"])
    view, base, tuned = show(run)
    type_and_send(view, "count")
    for chat in run.chats.values():
        chat.allowed.release()
    assert wait_until(lambda: base.value.endswith("one ") and tuned.value.endswith("eins "))
    view.stop_button.click()
    assert wait_until(lambda: not view.box.busy and view.stop_button.disabled)
    assert "one" in base.value and "two" not in base.value and "zwei" not in tuned.value
    type_and_send(view, "count")
    assert wait_until(lambda: len(run.chats[True].texts) == len(run.chats[False].texts) == 2)
    view.clear_button.click()
    assert wait_until(lambda: not view.box.busy and view.stop_button.disabled)
    assert base.value == tuned.value == "" and run.chats[True].num_resets == 1
    view.close()


def test_an_empty_answer_says_so() -> None:
    run = ChattingRun(["\n"], ["fine"])
    view, base, tuned = show(run)
    type_and_send(view, "hello")
    for chat in run.chats.values():
        chat.allowed.release()
    assert wait_until(lambda: not view.box.busy and view.stop_button.disabled)
    assert "an empty answer" in base.value and "empty" not in tuned.value
    run.chats[True].pieces = ["late"]
    type_and_send(view, "hello?")
    assert wait_until(lambda: len(run.chats[True].texts) == 2)
    view.stop_button.click()
    assert wait_until(lambda: not view.box.busy and view.stop_button.disabled)
    assert "stopped before an answer" in base.value
    view.close()


def test_an_error_is_shown_where_the_answer_would_be() -> None:
    run = ChattingRun(["fail"], ["fine"])
    view, base, tuned = show(run)
    type_and_send(view, "hello")
    for chat in run.chats.values():
        chat.allowed.release()
    assert wait_until(lambda: not view.box.busy and view.stop_button.disabled)
    assert "role='alert'>no &lt;memory&gt; left" in base.value and "fine" in tuned.value
    view.close()


def test_closing_while_both_answer_ends_their_processes_and_leaves_no_widgets() -> None:
    threads = set(threading.enumerate())
    show(ChattingRun([], []))[0].close()  # Creates the widgets that views share, which stay registered.
    gc.collect()
    registered = len(_instances)
    run = ChattingRun(["one"], ["eins"])
    view, *_ = show(run)
    assert len(_instances) > registered
    type_and_send(view, "count")
    assert wait_until(lambda: len(run.chats[True].texts) == len(run.chats[False].texts) == 1)
    view.close()
    assert all(chat.is_closed for chat in run.chats.values())
    assert wait_until(lambda: threads.issuperset(threading.enumerate()))
    del view, _
    gc.collect()
    assert len(_instances) == registered


@pytest.mark.parametrize(
    "message", [{"send": ""}, {"send": " \n"}, {"send": 1}, {"send": "x" * 200_000}, "x", {}]
)
def test_messages_that_are_no_text_are_ignored(message: Any) -> None:
    run = ChattingRun([], [])
    view, *_ = show(run)
    view.box._handle_custom_msg(message, [])
    assert run.chats[True].texts == [] and not view.box.busy
    view.close()


def test_a_run_without_a_model_cannot_be_asked() -> None:
    run = ChattingRun([], [])
    run.model = None
    view, *_ = show(run)
    type_and_send(view, "hello")
    assert view.box.disabled and "export=True" in view.hint.value and run.chats[True].texts == []
    view.close()
