"""Views refuse what they cannot show."""

from __future__ import annotations

import gc
import sys

import pytest

import shardscope_widgets


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "Plan") for name in ("MemoryView", "StepView", "GuidedView", "RooflineView")),
        *((name, "Plan") for name in ("ScheduleView", "ShardingView")),
        *((name, "Run") for name in ("RunView", "ChatView")),
        ("RankingView", "Ranking"),
        ("AdviceView", "Advice"),
    ],
)
def test_another_object_is_refused_with_what_a_view_shows(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignored: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    view = getattr(shardscope_widgets, name)
    with pytest.raises(ValueError, match=rf"{name} {kind.lower()} is 'runs/mine'.*{kind}.*ss\."):
        view("runs/mine")
    gc.collect()
    assert not ignored
