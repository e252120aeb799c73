"""Tests of the advice view without a browser: decision path, numbers, buttons and support table."""

from __future__ import annotations

import re
import threading
from html import unescape
from typing import Any

import pytest
from fake_runs import wait_until
from shown_text import strip_tags

import shardscope as ss
from shardscope.core.number_format import format_gib
from shardscope.planner.abilities import COLUMNS, compute_abilities
from shardscope.planner.advice.advice import Advice, Turn
from shardscope_widgets import AdviceView


def build_plan(layout: ss.Layout | None = None, cluster: str = "8xh100-sxm-80gb", **recipe: Any) -> ss.Plan:
    return ss.Plan(
        ss.models["llama-3.1-8b"], ss.Cluster.parse(cluster), ss.Recipe(**recipe), layout or ss.Layout.fsdp2()
    )


PLAN, OTHER = build_plan(recompute="selective"), build_plan(ss.Layout.zero(stage=2), recompute="full")


def build_advice(**changed: Any) -> Advice:
    turns = (
        Turn(question="Does it fit on one GPU?", answer="No: <20> GiB too little.", number="needs 99.9 GiB",
             why="The simplest.", taken=False),
        Turn(question="With everything split?", answer="Yes: FSDP2.", number="needs 54.0 GiB", why="Gathers.",
             taken=True, plan=PLAN),
    )  # fmt: skip
    fields: dict[str, Any] = {
        "plan": PLAN,
        "path": turns,
        "alternatives": ((OTHER, "DeepSpeed ZeRO-2: <the same>, 1 % slower."),),
        "why": "Start with FSDP2. It is the simplest that fits.",
    }
    return Advice(**{**fields, **changed})


def read_turns(view: AdviceView) -> list[tuple[str, str]]:
    """Return the CSS class and the text of each decision, in order."""
    return [
        (kind, strip_tags(html))
        for kind, html in re.findall(r"<li class='([^']+)'>(.*?)</li>", view.words.value)
    ]


def test_decision_path_is_shown_in_order_with_numbers() -> None:
    first, second = read_turns(AdviceView(build_advice()))
    assert first == (
        "ss-passed",
        "not taken: Does it fit on one GPU? No: <20> GiB too little. needs 99.9 GiB The simplest.",
    )
    assert second[0] == "ss-taken" and second[1].startswith("taken: With everything split? Yes: FSDP2.")


def test_taken_decisions_are_marked_in_text_not_only_by_colour() -> None:
    turns = read_turns(AdviceView(build_advice()))
    assert [text.partition(":")[0] for _, text in turns] == ["not taken", "taken"]


def test_buttons_apply_the_recommendation_and_each_alternative() -> None:
    applied: list[ss.Plan] = []
    view = AdviceView(build_advice(), on_apply=applied.append)
    for act in re.findall(r"data-act='([^']+)'", view.words.value):
        view.words.press_button(act)
    assert applied == [PLAN, OTHER]
    assert view.plan is OTHER


def test_a_view_alone_in_a_cell_shows_what_was_applied() -> None:
    view = AdviceView(build_advice())
    assert "Start with FSDP2" in strip_tags(view.words.value)
    view.words.press_button("plan")
    assert view.plan == PLAN and "Keep the current plan: FSDP2" in strip_tags(view.words.value)


@pytest.mark.parametrize("act", ["1", "-1", "x", "", "99999999999999999999", "plan"])
def test_click_on_a_removed_button_is_ignored(act: str) -> None:
    view = AdviceView(build_advice(plan=None), on_apply=lambda _: pytest.fail("applied"))
    view.words.press_button(act)
    assert view.plan is None


def test_nearest_plans_are_shown_when_nothing_fits() -> None:
    view = AdviceView(build_advice(plan=None, why="Nothing fits. 20 GiB are missing."))
    assert "data-act='plan'" not in view.words.value
    assert "Nothing fits. 20 GiB are missing." in strip_tags(view.words.value)
    assert "Nearest plans" in strip_tags(view.words.value)


def test_there_is_one_recommendation_and_at_most_two_alternatives() -> None:
    plans = [build_plan(ss.Layout.megatron(tp=tp)) for tp in (2, 4, 8)]
    view = AdviceView(build_advice(alternatives=tuple((plan, f"{plan.layout}.") for plan in plans)))
    assert view.words.value.count("data-act='plan'") == 1 and "search" not in strip_tags(view.words.value)
    assert re.findall(r"data-act='(\d)'", view.words.value) == ["0", "1"]
    view.words.press_button("2")
    assert view.plan is None and "is not an action of this view" in view.words.error


def test_current_plan_is_kept_if_it_is_the_recommended_one() -> None:
    view = AdviceView(build_advice())
    view.mark(build_plan(recompute="selective"))
    assert "Keep the current plan: FSDP2" in strip_tags(view.words.value)
    assert "data-act='plan'" not in view.words.value
    view.words.press_button("plan")
    assert view.plan is None and "is not an action of this view" in view.words.error
    view.mark(build_plan(ss.Layout.ddp()))
    assert "Start with FSDP2." in strip_tags(view.words.value) and "data-act='plan'" in view.words.value
    assert "does not fit" in strip_tags(view.words.value)


def test_a_current_plan_that_only_lacks_overlap_is_not_the_recommended_one() -> None:
    """It has the same memory: the view said to keep it, next to the faster step of the recommended plan."""
    waiting, faster = (
        build_plan(ss.Layout.megatron(tp=2, overlap_grad_reduce=on, overlap_param_gather=on))
        for on in (False, True)
    )
    view = AdviceView(build_advice(plan=faster, why="Start with Megatron-core (tp 2). It fits."))
    view.mark(waiting)
    text = strip_tags(view.words.value)
    assert "Start with Megatron-core" in text and "the same memory" in text and "% faster" in text
    assert "data-act='plan'" in view.words.value
    view.mark(faster)
    assert "Keep the current plan" in strip_tags(view.words.value)


def test_memory_and_speed_are_compared_with_the_current_plan() -> None:
    current, advised = build_plan(recompute="full"), build_plan()
    view = AdviceView(build_advice(plan=advised))
    view.mark(current)
    text = strip_tags(view.words.value)
    more = advised.memory().peak_bytes - current.memory().peak_bytes
    faster = current.step().seconds / advised.step().seconds - 1
    assert more > 0 and faster > 0
    assert f"{format_gib(more)} GiB more" in text and f"{100 * faster:.0f} % faster" in text


def test_decisions_and_support_table_are_collapsed_and_keyed() -> None:
    html = AdviceView(build_advice()).words.value
    assert re.findall(r"<details class='ss-fold' data-key='(\w+)'>", html) == ["why", "support"]
    assert "<summary>Why: 2 decisions</summary>" in html and "<details open" not in html


def test_decisions_are_open_in_a_saved_picture() -> None:
    """On paper a fold cannot be opened."""
    html = AdviceView(build_advice())._repr_mimebundle_()["text/html"]
    assert re.findall(r"<details( open)?", html) == [" open", ""]


def test_standalone_view_requests_advice_and_repeats_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[Any] = []

    def recommend(*question: Any, current: Any, progress: Any) -> Advice:
        requests.append(question)
        return build_advice()

    monkeypatch.setattr(ss, "recommend", recommend)
    view, answered = AdviceView(), threading.Event()
    assert view.work.button.layout.display == "none", "there is no earlier request to repeat"
    question = PLAN.architecture, PLAN.cluster, PLAN.recipe
    view.ask(*question, familiar_with=["fsdp2"], on_found=answered.set)
    assert wait_until(lambda: view.advice is not None and not view.work.is_busy) and answered.is_set()
    view.work.button.click()
    assert wait_until(lambda: len(requests) == 2 and not view.work.is_busy)
    assert requests == [(*question, ["fsdp2"])] * 2 and view.work.button.layout.display == ""


def test_support_table_equals_the_computed_abilities() -> None:
    table, html = compute_abilities(), AdviceView(build_advice()).words.value
    body = html.partition("<tbody>")[2]
    rows = re.findall(r"<tr><th scope='row' title='[^']*'>([^<]+)</th>(.*?)</tr>", body)
    assert [unescape(title) for title, _ in rows] == [column.title for column in COLUMNS.values()]
    for (_, cells), key in zip(rows, COLUMNS, strict=True):
        marks = re.findall(r"aria-label='(yes|no)'>(.)<", cells)
        expected = [("yes", "✓") if row[key].supported else ("no", "–") for row in table.cells.values()]
        assert marks == expected
    assert strip_tags(html).count("trains here") == sum(
        "trains here" in way for way in table.ergonomics.values()
    )


def test_every_decision_of_real_advice_is_shown() -> None:
    advice = ss.recommend(PLAN.architecture, PLAN.cluster, ss.Recipe())
    view = AdviceView(advice)
    text = strip_tags(view.words.value)
    for turn in advice.path:
        assert " ".join(turn.question.split()) in text and turn.number in text
    assert [kind for kind, _ in read_turns(view)] == [
        "ss-taken" if turn.taken else "ss-passed" for turn in advice.path
    ]


def test_a_tight_recommendation_is_named_tight_with_what_to_do() -> None:
    cluster, model = ss.Cluster.parse("8xh100-sxm-80gb"), ss.models["qwen3-30b-a3b"]
    advice = ss.recommend(model, cluster, ss.Recipe())
    assert advice.plan is not None and advice.plan.memory().is_tight
    shown = strip_tags(AdviceView(advice).words.value)
    assert "79.1 of 79.1 GiB, tight" in shown
    assert "May run out of memory" in shown and "Checks can search for a plan with more room" in shown
    assert all("also tight" in text for plan, text in advice.alternatives if plan.memory().is_tight)
    kept = AdviceView(advice)
    kept.mark(advice.plan)
    assert "Keep the current plan" in kept.words.value and "May run out of memory" in kept.words.value
    assert "ss-tight" not in AdviceView(build_advice()).words.value


def test_a_recommendation_names_the_memory_that_is_not_known() -> None:
    cluster, model = ss.Cluster.parse("8xh100-sxm-80gb"), ss.models["llama-3.1-405b"]
    shown = strip_tags(AdviceView(ss.recommend(model, cluster, ss.Recipe())).words.value)
    assert "Needs 6,048 GiB on NVMe on each node" in shown


def test_buttons_of_alternatives_are_named_by_their_lines() -> None:
    """Screen readers said "Apply FSDP2" of compiled modules, with FSDP2 as the current plan."""
    compiled = build_plan(kernels="compiled")
    words = "Compile the modules, all else as it is: 21 % faster."
    view = AdviceView(build_advice(alternatives=((compiled, words),)))
    assert re.findall("aria-label='(Apply.*?)'", view.words.value)[1:] == [
        "Apply: Compile the modules, all else as it is"
    ]
    conditional = "With 2 nodes instead of 1: FSDP2 (tp 2)"
    view = AdviceView(build_advice(alternatives=((compiled, f"{conditional}; needs 31.5 of 39.4 GiB."),)))
    assert f"aria-label='Apply: {conditional}'" in view.words.value
    view._handle_action("0")
    assert f"Applied: {conditional}." in strip_tags(view.words.value)


def test_a_view_alone_in_a_cell_says_which_plan_was_applied() -> None:
    """The line of the plan vanished without a word when its button was pressed."""
    faster = build_plan(ss.Layout.zero(stage=2))
    view = AdviceView(build_advice(alternatives=((faster, "DeepSpeed ZeRO-2: faster."),)))
    assert "Applied" not in strip_tags(view.words.value)
    view._handle_action("0")
    assert view.plan == faster
    assert "Applied: DeepSpeed ZeRO-2." in strip_tags(view.words.value)
    view._handle_action("plan")
    assert "Applied: FSDP2" in strip_tags(view.words.value)
    # The Studio's own notice says it there.
    inside = AdviceView(build_advice(), on_apply=lambda _: None)
    inside._handle_action("plan")
    assert "Applied" not in strip_tags(inside.words.value)


def test_a_tight_recommendation_names_the_alternative_with_more_room() -> None:
    tight = build_plan(seq_len=7168)
    roomy = build_plan(seq_len=7168, recompute="selective")
    assert tight.memory().is_tight and not roomy.memory().is_tight
    view = AdviceView(build_advice(plan=tight, alternatives=((roomy, "less memory."),)))
    assert "apply FSDP2, selective recomputation: it has more room" in strip_tags(view.words.value)


def test_missing_nvme_bandwidth_is_named_by_its_input() -> None:
    layout = ss.Layout.zero(stage=3, offload_optimizer="nvme", offload_params="cpu")
    advice = ss.recommend(ss.models["llama-3.1-70b"], ss.Cluster.parse("8xa100-sxm-40gb"), ss.Recipe())
    assert advice.plan is not None and advice.plan.layout == layout
    shown = strip_tags(AdviceView(advice).words.value)
    assert "GPUs, More options, NVMe" in shown
    assert "nvme_bandwidth" not in shown and "dataclasses" not in shown
