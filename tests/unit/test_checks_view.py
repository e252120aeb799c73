"""The list of checks without a browser: order, severity in words, numbers, and the button that mends."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from typing import Any

import pytest

import shardscope as ss
from shardscope.planner.preflight import Finding
from shardscope.planner.preflight.question import Question
from shardscope.planner.several import Way
from shardscope_widgets.checks.view import LOOKING, NOTHING, SIGNS, ChecksView, summary, worst_first

PLAN = ss.Plan(ss.models["llama-3.1-8b"], ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(), ss.Layout.fsdp2())


def finding(name: str, severity: Any, plan: ss.Plan | None = None) -> Finding:
    return Finding(
        name=name,
        severity=severity,
        why=f"{name} is <bad>: 12.3 %.",
        number=12.3,
        change="set it to 8",
        plan=plan,
    )


FOUND = [finding("a-hint", "hint"), finding("a-danger", "danger", PLAN), finding("a-warning", "warning")]


def words(html: str) -> str:
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))).strip()


def shown(*found: Finding, **given: Any) -> ChecksView:
    view = ChecksView(**given)
    view.show(found)
    return view


def test_the_worst_come_first_and_equals_stay_as_found() -> None:
    assert [each.name for each in worst_first([*FOUND, finding("b-danger", "danger")])] == [
        "a-danger",
        "b-danger",
        "a-warning",
        "a-hint",
    ]


def test_severity_is_said_in_words_and_shape() -> None:
    view = shown(*FOUND)
    rows = re.findall(r"<li class='ss-is-(\w+)'>(.*?)</li>", view.list.value)
    assert [severity for severity, _ in rows] == ["danger", "warning", "hint"]
    for severity, html in rows:
        assert words(html).startswith(f"{SIGNS[severity]} {severity} ")
    assert len(set(SIGNS.values())) == 3


def test_why_number_and_change_are_told_and_nothing_is_markup() -> None:
    told = words(shown(*FOUND).list.value)
    assert "A danger a-danger is <bad>: 12.3 %. set it to 8" in told
    assert "<bad>" not in shown(*FOUND).list.value


def test_only_what_a_plan_mends_has_a_button() -> None:
    applied: list[ss.Plan] = []
    view = shown(*FOUND, on_apply=applied.append)
    assert re.findall(r"data-act='([^']+)'", view.list.value) == ["a-danger"]
    view.list.press("a-danger")
    assert applied == [PLAN] and view.plan is PLAN


@pytest.mark.parametrize("act", ["a-warning", "gone", ""])
def test_fault_44_a_click_on_what_mends_nothing_does_nothing(act: str) -> None:
    view = shown(*FOUND, on_apply=lambda _: pytest.fail("applied"))
    view.list.press(act)


def test_nothing_found_is_said() -> None:
    view = shown()
    assert words(view.list.value) == NOTHING
    view.show(FOUND)
    assert NOTHING not in view.list.value


def test_the_summary_counts_each_kind() -> None:
    assert summary([*FOUND, finding("b-danger", "danger")]) == "2 dangers, 1 warning, 1 hint"
    assert summary([]) == ""


def test_what_takes_long_is_looked_for_by_a_click_and_applied_by_the_next() -> None:
    asked: list[str] = []
    found: list[Way | None] = [Way(("Micro-batch 1 instead of 2", "Recompute selectively"), PLAN), None]

    def way() -> Way | None:
        asked.append(view.list.value)
        return found.pop(0)

    applied: list[ss.Plan] = []
    view = shown(replace(finding("a-danger", "danger"), way=way), finding("a-hint", "hint"))
    view._on_apply = applied.append
    assert "Find" in words(view.list.value) and not asked
    view.list.press("a-danger")
    assert len(asked) == 1 and LOOKING in asked[0], "the page says so meanwhile"
    assert "Micro-batch 1 instead of 2, Recompute selectively Apply" in words(view.list.value)
    assert not applied and LOOKING not in view.list.value
    view.list.press("a-danger")
    assert applied == [PLAN]
    view.show([replace(finding("a-danger", "danger"), way=way)])
    view.list.press("a-danger")
    assert "set it to 8: none was found" in words(view.list.value) and "<button" not in view.list.value
    view.list.press("a-danger")
    assert "means nothing here" in view.list.error and applied == [PLAN]


def test_what_only_a_person_knows_is_asked_for_in_place() -> None:
    cluster = replace(PLAN.cluster, host_memory_bytes=None)
    plan = replace(PLAN, cluster=cluster)
    asked = replace(
        finding("host-memory-not-known", "warning"), question=Question(plan=plan, field="host_memory_bytes")
    )
    applied: list[ss.Plan] = []
    view = shown(asked, on_apply=applied.append)
    assert "data-answer='host-memory-not-known'" in view.list.value
    view.list._handle_custom_msg({"act": "host-memory-not-known", "answer": "1,024"}, [])
    assert [one.cluster.host_memory_bytes for one in applied] == [2**40] and view.plan == applied[0]
    for typed in ("", "x", "-3", "nan", "1e99"):
        view.list._handle_custom_msg({"act": "host-memory-not-known", "answer": typed}, [])
        assert "Cluster.host_memory_bytes is" in view.list.error and len(applied) == 1
    for content in ({"act": "host-memory-not-known"}, {"act": "else", "answer": "1"}, {"answer": "1"}, 3):
        view.list._handle_custom_msg(content, [])
        assert "means nothing here" in view.list.error and len(applied) == 1
    unasked = shown(finding("a-hint", "hint", PLAN))
    unasked.list.answer("a-hint", "1")
    assert "means nothing here" in unasked.list.error
