"""Tests of malformed messages to clickable widgets: they are ignored, and the next valid message works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import shardscope as ss
from shardscope.runs.launch.free_memory import TooLittleFreeError
from shardscope_widgets import AdviceView, RankingView, Studio
from shardscope_widgets.checks.view import ChecksView
from shardscope_widgets.kit.clickable import Clickable
from shardscope_widgets.kit.tabs import Tabs

MALFORMED_MESSAGES: list[Any] = [
    None,
    7,
    [],
    "act",
    {},
    {"act": None},
    {"act": 5},
    {"act": ["apply:0"]},
    {"act": ""},
    {"act": "rm -rf"},
    {"act": "apply:-1"},
    {"act": "apply:99999999999999999999"},
    {"act": "sort:__class__"},
    {"act": "page:1e9"},
    {"act": "<script>"},
    {"act": "x" * 1_000_000},
]
VIEWS: dict[str, Callable[..., Any]] = {"ranking": RankingView, "advice": AdviceView, "checks": ChecksView}


def find_clickables(view: Any) -> list[Clickable]:
    clickables = [view] if isinstance(view, Clickable) else []
    for child in getattr(view, "children", ()):
        clickables += find_clickables(child)
    return clickables


@pytest.mark.parametrize("name", VIEWS)
def test_fault_44_invalid_click_messages_are_ignored(name: str) -> None:
    applied: list[ss.Plan] = []
    clickables = find_clickables(VIEWS[name](on_apply=applied.append))
    assert clickables
    for clickable in clickables:
        before = clickable.value
        for content in MALFORMED_MESSAGES:
            clickable.error = ""
            clickable._handle_custom_msg(content, [])
            assert clickable.error.startswith("Ignored: ") and len(clickable.error) < 200
        assert clickable.value == before
        clickable.value += " "
        assert clickable.error == "", "a new value clears the error of an old message"
    assert applied == []


def test_fault_44_unknown_tab_is_ignored() -> None:
    tabs = Tabs(["Memory", "Time"])
    for state in ({"value": "Nowhere"}, {"value": 5}, {"value": "x" * 1_000_000}, {"names": 7}):
        tabs.set_state(state)
        assert tabs.error.startswith("Ignored: ") and len(tabs.error) < 500
        assert (tabs.value, tabs.names) == ("Memory", ["Memory", "Time"])
    tabs.set_state({"value": "Time"})
    assert (tabs.value, tabs.error) == ("Time", "")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device"), "No space left"),
        (RuntimeError("can't start new thread"), "start new thread"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_fault_45_launch_error_is_shown_at_the_button(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    studio = Studio()

    def raise_error(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(ss, "launch", raise_error)
    studio.launch.button.click()
    assert message in studio.notice.value and "role='alert'" in studio.notice.value
    assert not studio.launch.busy and not studio.launch.button.disabled


def test_launch_anyway_overrides_the_free_memory_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second button is shown beside the message until another message replaces it."""
    studio = Studio()
    force_flags: list[bool] = []

    def launch(*_: object, force: bool, **__: object) -> None:
        force_flags.append(force)
        raise (
            OSError("what comes after")
            if force
            else TooLittleFreeError("launch.plan", "2 GiB", "9 GiB", "wait")
        )

    monkeypatch.setattr(ss, "launch", launch)
    studio.launch.button.click()
    studio.launch.button.click()
    assert "Nearest fix: wait" in studio.notice.value
    studio.notice.press_button("Launch anyway")
    assert force_flags == [False, False, True]
    assert "what comes after" in studio.notice.value
    assert "Launch anyway" not in studio.notice.value
