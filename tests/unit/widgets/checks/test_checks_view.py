"""Tests of the list of findings without a browser: order, severity, numbers and fix buttons."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from shown_text import strip_tags

import shardscope as ss
from shardscope.core.finding import PlanChange, Question
from shardscope.planner.checks import Finding
from shardscope_widgets.checks.findings import SIGNS, sort_worst_first, summarize_findings, write_change
from shardscope_widgets.checks.view import NOTHING, SEARCHING, ChecksView

PLAN = ss.Plan(ss.models["llama-3.1-8b"], ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(), ss.Layout.fsdp2())


def build_finding(name: str, severity: Any, plan: ss.Plan | None = None) -> Finding:
    return Finding(
        name=name,
        severity=severity,
        why=f"{name} is <bad>: 12.3 %.",
        number=12.3,
        change="set it to 8",
        plan=plan,
    )


FINDINGS = [
    build_finding("a-hint", "hint"),
    build_finding("a-danger", "danger", PLAN),
    build_finding("a-warning", "warning"),
]


def show_findings(*findings: Finding, **options: Any) -> ChecksView:
    view = ChecksView(**options)
    view.show(findings)
    return view


def test_findings_are_sorted_worst_first_and_stable() -> None:
    assert [each.name for each in sort_worst_first([*FINDINGS, build_finding("b-danger", "danger")])] == [
        "a-danger",
        "b-danger",
        "a-warning",
        "a-hint",
    ]


def test_severity_is_shown_as_text_and_symbol() -> None:
    view = show_findings(*FINDINGS)
    rows = re.findall(r"<li class='ss-is-(\w+)'>(.*?)</li>", view.list.value)
    assert [severity for severity, _ in rows] == ["danger", "warning", "hint"]
    for severity, html in rows:
        assert strip_tags(html).startswith(f"{SIGNS[severity]} {severity} ")
    assert len(set(SIGNS.values())) == 3


def test_reason_and_suggested_fix_are_shown_html_escaped() -> None:
    text = strip_tags(show_findings(*FINDINGS).list.value)
    assert "A danger a-danger is <bad>: 12.3 %. Suggested fix: set it to 8" in text
    assert "<bad>" not in show_findings(*FINDINGS).list.value


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ("num_steps=5, or a longer text", "steps 5, or a longer text"),
        ("learning_rate=2e-05, warmup=0.03", "learning rate 2e-05, warm-up 0.03"),
        ("optimizer='adamw_8bit', as before", "optimizer adamw_8bit, as before"),
        ("tp=2 instead of 4", "tensor 2 instead of 4"),
        ("reshard_after_forward=False (stage 2)", "reshard after backward (stage 2)"),
        ("stage=3, communication_data_type='fp32'", "ZeRO stage 3, communication data type fp32"),
        ("Pretrain(profile=True), or code", "Pretrain(profile=True), or code"),
    ],
)
def test_a_fix_has_the_names_of_the_inputs(change: str, shown: str) -> None:
    view = show_findings(replace(FINDINGS[1], change=change))
    assert f"Suggested fix: {shown} Apply" in strip_tags(view.list.value)
    assert f"aria-label='Apply the fix: {shown}'" in view.list.value.replace("&#x27;", "")


def test_the_findings_of_a_task_have_no_python_in_them(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("Call me Ishmael. " * 200)
    recipe = ss.Recipe(seq_len=64, global_batch_size=2)
    plan = ss.Plan(ss.Architecture.of_size("2m"), ss.Cluster.parse("2xcpu"), recipe, ss.Layout.ddp())
    findings = plan.findings(ss.Pretrain(text=text, num_steps=5000))
    (found,) = [each for each in findings if each.name == "text-read-many-times"]
    assert "num_steps=" in str(found), "in a notebook it is what the user types"
    assert "=" not in strip_tags(show_findings(found).list.value)


def test_only_findings_with_a_fix_have_a_labelled_button() -> None:
    applied: list[ss.Plan] = []
    view = show_findings(*FINDINGS, on_apply=applied.append)
    assert re.findall(r"data-act='([^']+)' aria-label='([^']+)'", view.list.value) == [
        ("a-danger", "Apply the fix: set it to 8")
    ]
    view.list.press_button("a-danger")
    assert applied == [PLAN] and view.plan is PLAN


@pytest.mark.parametrize("act", ["a-warning", "gone", ""])
def test_fault_44_a_click_on_a_finding_without_a_fix_does_nothing(act: str) -> None:
    view = show_findings(*FINDINGS, on_apply=lambda _: pytest.fail("applied"))
    view.list.press_button(act)


def test_empty_findings_show_a_message() -> None:
    view = show_findings()
    assert strip_tags(view.list.value) == NOTHING
    view.show(FINDINGS)
    assert NOTHING not in view.list.value


def test_summary_counts_findings_by_severity() -> None:
    assert (
        summarize_findings([*FINDINGS, build_finding("b-danger", "danger")]) == "2 dangers, 1 warning, 1 hint"
    )
    assert summarize_findings([]) == ""


def test_slow_fix_is_searched_on_first_click_and_applied_on_second() -> None:
    html_during_search: list[str] = []
    results: list[PlanChange | None] = [
        PlanChange(("Micro-batch 1 instead of 2", "Recompute selectively"), PLAN),
        None,
    ]

    def search_for_fix() -> PlanChange | None:
        html_during_search.append(view.list.value)
        return results.pop(0)

    applied: list[ss.Plan] = []
    view = show_findings(
        replace(build_finding("a-danger", "danger"), search=search_for_fix),
        build_finding("a-hint", "hint"),
        on_apply=applied.append,
    )
    assert "Find a fix" in strip_tags(view.list.value) and not html_during_search
    view.list.press_button("a-danger")
    assert len(html_during_search) == 1 and SEARCHING in html_during_search[0], (
        "the view shows that it is searching"
    )
    assert "Recompute selectively Apply" in strip_tags(view.list.value)
    assert not applied and SEARCHING not in view.list.value
    view.list.press_button("a-danger")
    assert applied == [PLAN]
    view.show([replace(build_finding("a-danger", "danger"), search=search_for_fix)])
    view.list.press_button("a-danger")
    assert "none was found" in strip_tags(view.list.value) and "<button" not in view.list.value
    view.list.press_button("a-danger")
    assert "is not an action of this view" in view.list.error and applied == [PLAN]


def test_missing_host_memory_is_entered_in_the_finding() -> None:
    cluster = replace(PLAN.cluster, host_memory_bytes=None)
    plan = replace(PLAN, cluster=cluster)
    with_question = replace(
        build_finding("host-memory-not-known", "warning"),
        question=Question(plan=plan, field="host_memory_bytes"),
    )
    applied: list[ss.Plan] = []
    view = show_findings(with_question, on_apply=applied.append)
    assert "data-answer='host-memory-not-known'" in view.list.value
    view.list._handle_custom_msg({"act": "host-memory-not-known", "answer": "1,024"}, [])
    assert [changed.cluster.host_memory_bytes for changed in applied] == [2**40] and view.plan == applied[0]
    for typed in ("", "x", "-3", "nan", "1e99"):
        view.list._handle_custom_msg({"act": "host-memory-not-known", "answer": typed}, [])
        assert "Cluster.host_memory_bytes is" in view.list.error and len(applied) == 1
    for content in ({"act": "host-memory-not-known"}, {"act": "else", "answer": "1"}, {"answer": "1"}, 3):
        view.list._handle_custom_msg(content, [])
        assert "is not an action of this view" in view.list.error and len(applied) == 1
    view_without_question = show_findings(build_finding("a-hint", "hint", PLAN))
    view_without_question.list.submit_text("a-hint", "1")
    assert "is not an action of this view" in view_without_question.list.error


def test_plan_and_task_findings_may_share_a_name() -> None:
    task = object()
    applied: list[object] = []
    view = ChecksView(on_apply=applied.append, on_apply_task=applied.append)
    view.show([build_finding("a", "danger", PLAN), replace(build_finding("a", "danger"), task=task)])
    for act in re.findall(r"data-act='([^']+)'", view.list.value):
        view.list.press_button(act)
    assert applied == [PLAN, task]


DIALECT = re.compile(r"\b(mend\w*|told|nobody|somebody|person|the card)\b", re.IGNORECASE)


def test_texts_around_findings_are_plain_english() -> None:
    with_question = replace(FINDINGS[2], question=Question(plan=PLAN, field="host_memory_bytes"))
    with_search = replace(build_finding("b-danger", "danger"), search=lambda: None)
    for view in (show_findings(), show_findings(*FINDINGS), show_findings(with_question, with_search)):
        assert not DIALECT.findall(view.list.value)


def test_a_number_and_its_unit_stay_on_one_line() -> None:
    tiny = replace(
        build_finding("a-hint", "hint"), why="0.0017 GiB too little, 12 % of 3 GPUs.", change="4 s less"
    )
    html = show_findings(tiny).list.value
    assert "0.0017\N{NO-BREAK SPACE}GiB" in html and "12\N{NO-BREAK SPACE}%" in html
    assert "4\N{NO-BREAK SPACE}s less" in html and "3 GPUs" in html


def test_a_question_is_in_words_without_names_of_fields() -> None:
    layout = ss.Layout.zero(stage=3, offload_optimizer="nvme", offload_params="nvme")
    plan = ss.Plan(ss.models["llama-3.1-70b"], ss.Cluster.parse("1xh100-sxm-80gb"), ss.Recipe(), layout)
    (finding,) = [one for one in plan.findings() if one.question is not None]
    assert write_change(finding) == "Enter the NVMe capacity of each node"
