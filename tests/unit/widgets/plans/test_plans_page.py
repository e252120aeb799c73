"""Tests of the Plans tab: toggles of the frameworks that the team knows, and outdated advice."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_runs import wait_until
from tests.requirements import thorough

import shardscope as ss
from shardscope.planner.abilities import TITLES
from shardscope_widgets import Studio
from shardscope_widgets.plans.page import PlansPage

MODEL, GPUS = ss.models["llama-3.1-8b"], ss.Cluster.parse("8xh100-sxm-80gb")


def build_plan(**recipe: Any) -> ss.Plan:
    return ss.Plan(MODEL, GPUS, ss.Recipe(**recipe), ss.Layout.fsdp2())


def read_toggle_states(page: PlansPage) -> dict[str, str]:
    """Return framework name -> value of ``aria-pressed``."""
    return dict(re.findall(r"data-act='(\w+)' aria-pressed='(\w+)'", page.familiar.value))


def is_answered(page: PlansPage) -> bool:
    return page.advice.advice is not None and not page.ask.is_busy


@pytest.fixture
def page() -> Iterator[PlansPage]:
    """Yield a page whose first advice has arrived."""
    plans_page = PlansPage(on_apply=lambda _: None)
    plans_page.set_plan(build_plan())
    assert wait_until(lambda: is_answered(plans_page))
    yield plans_page
    assert wait_until(lambda: not plans_page.ask.is_busy)


@pytest.fixture
def advice_requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Return the ``familiar_with`` argument of each request for advice."""
    original, requests = ss.recommend, []

    def recommend(arch: Any, cluster: Any, recipe: Any, familiar_with: Any = (), **more: Any) -> Any:
        requests.append(tuple(familiar_with))
        return original(arch, cluster, recipe, familiar_with, **more)

    monkeypatch.setattr(ss, "recommend", recommend)
    return requests


@pytest.fixture
def release_advice(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Block advice until the yielded function is called."""
    original, may_continue = ss.recommend, threading.Event()

    def recommend(*question: Any, **more: Any) -> Any:
        assert may_continue.wait(30)
        return original(*question, **more)

    monkeypatch.setattr(ss, "recommend", recommend)
    yield may_continue.set
    may_continue.set()


def test_every_framework_has_a_toggle_that_is_off_by_default(page: PlansPage) -> None:
    assert read_toggle_states(page) == dict.fromkeys(TITLES, "false") and page.familiar.names == ()
    buttons = re.findall(r"<button [^>]*title='([^']+)'>([^<]+)</button>", page.familiar.value)
    assert [title for _, title in buttons] == list(TITLES.values())
    assert all(title in tooltip for tooltip, title in buttons)
    assert "role='group' aria-label='Frameworks your team knows' data-roving" in page.familiar.value


def test_toggling_a_framework_requests_advice_that_prefers_it(
    advice_requests: list[tuple[str, ...]], page: PlansPage
) -> None:
    before = page.advice.advice
    assert before is not None and before.plan is not None and before.plan.layout.framework == "fsdp2"
    page.familiar.press_button("deepspeed")
    assert wait_until(lambda: is_answered(page) and page.advice.advice is not before)
    after = page.advice.advice
    assert after is not None and after.plan is not None and after.plan.layout.framework == "deepspeed"
    assert advice_requests == [(), ("deepspeed",)] and read_toggle_states(page)["deepspeed"] == "true"
    assert not page.about.value and "ss-old" not in page.advice._dom_classes


@thorough()
def test_several_toggles_are_passed_in_a_fixed_order(
    advice_requests: list[tuple[str, ...]], page: PlansPage
) -> None:
    for name in reversed(TITLES):
        page.familiar.press_button(name)
        assert wait_until(lambda: is_answered(page))
    assert advice_requests[-1] == tuple(TITLES), "every framework is a valid argument"
    assert set(read_toggle_states(page).values()) == {"true"}
    page.familiar.press_button("ddp")
    assert wait_until(lambda: is_answered(page))
    assert advice_requests[-1] == tuple(TITLES)[1:] and read_toggle_states(page)["ddp"] == "false"
    assert not page.familiar.error


def test_unknown_framework_name_is_ignored_with_an_error(
    advice_requests: list[tuple[str, ...]], page: PlansPage
) -> None:
    page.familiar.press_button("horovod")
    assert "'horovod' is not an action of this view" in page.familiar.error
    assert page.familiar.names == () and advice_requests == [()]


@thorough()
def test_toggles_during_a_request_are_combined_into_the_next_request(
    advice_requests: list[tuple[str, ...]], release_advice: Callable[[], None]
) -> None:
    applied: list[ss.Plan] = []
    page = PlansPage(on_apply=applied.append)
    page.set_plan(build_plan())
    assert page.ask.is_busy
    page.familiar.press_button("deepspeed")
    page.familiar.press_button("ddp")
    assert not page.about.value, "advice is being computed: no button is shown"
    release_advice()
    assert wait_until(lambda: len(advice_requests) == 2 and is_answered(page))
    assert advice_requests == [(), ("ddp", "deepspeed")], "one request for both toggles"
    assert "ss-old" not in page.advice._dom_classes and not page.about.value
    page.advice.words.press_button("plan")
    assert [plan.layout.framework for plan in applied] == ["deepspeed"]


def test_outdated_advice_is_marked_and_can_be_refreshed(
    page: PlansPage, release_advice: Callable[[], None]
) -> None:
    assert page.ask.button.layout.display == "none", "the advice is current: there is no request to repeat"
    page.familiar.press_button("deepspeed")
    assert not page.about.value, "advice is being computed: no button is shown"
    assert page.ask.button.layout.display == "none"
    assert "ss-old" in page.advice._dom_classes, "the displayed advice is outdated"
    page.set_plan(build_plan(seq_len=2048))
    assert "Llama 3.1 8B on 8 GPUs" in page.about.value
    release_advice()
    assert wait_until(lambda: is_answered(page))
    assert "before an input changed" in page.about.value and page.ask.button.layout.display == ""
    page.ask.button.click()
    assert wait_until(lambda: is_answered(page) and not page.about.value)
    assert page.ask.button.layout.display == "none" and "ss-old" not in page.advice._dom_classes


def test_cancel_also_drops_the_queued_request(
    advice_requests: list[tuple[str, ...]], release_advice: Callable[[], None]
) -> None:
    page = PlansPage(on_apply=lambda _: None)
    page.set_plan(build_plan())
    page.familiar.press_button("deepspeed")
    page.ask.cancel.click()
    release_advice()
    assert wait_until(lambda: not page.ask.is_busy)
    assert advice_requests == [()] and "Cancelled" in page.ask.words.value
    page.ask.button.click()
    assert wait_until(lambda: is_answered(page) and not page.about.value)
    assert advice_requests == [(), ("deepspeed",)]


def test_closing_the_page_drops_the_queued_request(
    advice_requests: list[tuple[str, ...]], release_advice: Callable[[], None]
) -> None:
    page = PlansPage(on_apply=lambda _: None)
    page.set_plan(build_plan())
    page.familiar.press_button("deepspeed")
    page.close()
    page.ask.close()
    release_advice()
    assert wait_until(lambda: not page.ask.is_busy)
    assert advice_requests == [()]


def test_failed_request_keeps_old_advice_marked_and_can_be_retried(
    page: PlansPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_continue = threading.Event()

    def raise_value_error(*_: Any, **__: Any) -> Any:
        assert may_continue.wait(30)
        raise ValueError("a figure is not known")

    with monkeypatch.context() as patched:
        patched.setattr(ss, "recommend", raise_value_error)
        page.familiar.press_button("megatron")
        assert not page.about.value
        may_continue.set()
        assert wait_until(lambda: "a figure is not known" in page.ask.words.value and not page.ask.is_busy)
    assert page.about.value and page.ask.button.layout.display == ""
    assert "ss-old" in page.advice._dom_classes
    page.ask.button.click()
    assert wait_until(lambda: is_answered(page) and not page.about.value)


@thorough()
def test_toggles_do_not_affect_the_search(page: PlansPage, monkeypatch: pytest.MonkeyPatch) -> None:
    ranking = ss.search(MODEL, GPUS, ss.Recipe(), frameworks=["ddp", "fsdp2"])
    searches: list[Any] = []
    monkeypatch.setattr(ss, "search", lambda *question, **_: searches.append(question) or ranking)
    assert page.familiar.layout.display == ""
    page.mode.value = "search"
    assert wait_until(lambda: page.ranking.ranking is ranking and not page.search.is_busy)
    assert page.familiar.layout.display == "none", "the search always covers every framework"
    page.familiar.press_button("ddp")
    assert wait_until(lambda: is_answered(page))
    assert "ss-old" not in page.ranking._dom_classes and not page.about.value
    assert not page.ranking.table.frozen and len(searches) == 1
    page.mode.value = "advice"
    assert page.familiar.layout.display == "" and read_toggle_states(page)["ddp"] == "true"
    assert not page.about.value


@thorough()
def test_toggles_are_kept_when_the_plan_changes(advice_requests: list[tuple[str, ...]]) -> None:
    """The toggles describe the team, not the plan: changing the plan does not reset them."""
    studio = Studio()
    studio.tabs.value = "Plans"
    assert wait_until(lambda: is_answered(studio.plans))
    plan = studio.plan
    studio.plans.familiar.press_button("deepspeed")
    assert studio.plan is plan
    assert wait_until(lambda: is_answered(studio.plans))
    studio.recipe.seq_len.value = "2048"
    assert "before an input changed" in studio.plans.about.value
    studio.plans.ask.button.click()
    assert wait_until(lambda: is_answered(studio.plans))
    assert advice_requests == [(), ("deepspeed",), ("deepspeed",)] and not studio.plans.about.value
    studio.close()


def test_changing_the_plan_requests_advice_unless_it_is_the_advised_one(
    advice_requests: list[tuple[str, ...]], page: PlansPage
) -> None:
    """The current plan is kept if it is the advised one; otherwise a button applies the advised plan."""
    advised = page.advice.advice.plan  # type: ignore[union-attr]
    assert advised is not None and advice_requests == [()]
    page.set_plan(ss.Plan(MODEL, GPUS, ss.Recipe(), ss.Layout.ddp()))
    assert not page.about.value, "the next advice is being computed"
    assert wait_until(lambda: is_answered(page) and len(advice_requests) == 2)
    assert page.advice.answer is not None and page.advice.answer.plan is not None
    assert "Keep the current plan" not in page.advice.words.value
    assert page.advice.words.value.count("data-act='plan'") == 1
    page.set_plan(page.advice.answer.plan)
    assert page.advice.answer.plan is None and "Keep the current plan" in page.advice.words.value
    assert len(advice_requests) == 2 and not page.ask.is_busy, "the advised plan causes no new request"
    assert "ss-old" not in page.advice._dom_classes and not page.about.value


def test_plan_change_during_a_request_is_requested_afterwards(
    advice_requests: list[tuple[str, ...]], release_advice: Callable[[], None]
) -> None:
    page = PlansPage(on_apply=lambda _: None)
    page.set_plan(build_plan())
    page.set_plan(ss.Plan(MODEL, GPUS, ss.Recipe(), ss.Layout.ddp()))
    release_advice()
    assert wait_until(lambda: len(advice_requests) == 2 and is_answered(page))
    assert "ss-old" not in page.advice._dom_classes and not page.about.value


def test_failed_request_for_a_changed_plan_is_not_repeated(
    page: PlansPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[int] = []

    def raise_value_error(*_: Any, **__: Any) -> Any:
        attempts.append(1)
        raise ValueError("a figure is not known")

    monkeypatch.setattr(ss, "recommend", raise_value_error)
    page.set_plan(ss.Plan(MODEL, GPUS, ss.Recipe(), ss.Layout.ddp()))
    assert wait_until(lambda: not page.ask.is_busy and bool(attempts))
    assert len(attempts) == 1 and "for another current plan" in page.about.value
    assert "ss-old" in page.advice._dom_classes and page.ask.button.layout.display == ""
