"""One answer for the plan on screen: apply the advised plan or keep this one, and alternatives."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import shardscope as ss
from shardscope.frameworks.registry import why_not_trained
from shardscope.memory.words import gib
from shardscope.planner.advice import Advice
from shardscope.planner.advising.words import named
from shardscope.planner.room import beside_the_card, fits
from shardscope.timing.report import seconds_words
from shardscope_widgets.kit.numbers import short
from shardscope_widgets.plans.ranking_rows import is_same

MAX_ALTERNATIVES = 2


@dataclass(frozen=True)
class Alternative:
    """Another plan, with what it gains and costs."""

    index: int
    """Its place in ``advice.alternatives``."""
    plan: ss.Plan
    words: str


@dataclass(frozen=True)
class Answer:
    """The recommendation for the plan on screen."""

    sentence: str
    figures: str
    """Memory, time and rate of the recommended plan; where nothing fits, what is missing."""
    change: str
    """The difference to the plan on screen; empty if that is the recommended one."""
    why: str
    """The reasons, in a few sentences."""
    plan: ss.Plan | None
    """The plan to apply; None to keep the plan on screen, or where nothing fits."""
    alternatives: tuple[Alternative, ...]


def answer(advice: Advice, on_screen: ss.Plan | None, familiar_with: Collection[str] = ()) -> Answer:
    """Return one recommendation, and at most two alternatives that it does not outdo.

    A framework of ``familiar_with`` is not given up for the plan on screen in a framework that is not.
    """
    sentence, _, why = advice.why.partition(". ")
    sentence = sentence.rstrip(".") + "."
    if advice.plan is None:
        return Answer(sentence, why, "", "", None, _alternatives(advice, None))
    current = on_screen if on_screen is not None and _is_asked_about(advice, on_screen) else None
    if current is not None and (
        is_same(advice.plan, current) or _is_kept(current, advice.plan, familiar_with)
    ):
        if not is_same(advice.plan, current):
            why = (
                f"The questions lead to {named(advice.plan)}: {figures(advice.plan)}. "
                "The plan on screen is faster or needs less memory, and is worse in neither."
            )
        keep = f"Keep the plan on screen: {named(current)}."
        return Answer(keep, figures(current), "", why, None, _alternatives(advice, current))
    change = "" if current is None else difference(advice.plan, current)
    others = [
        one for one in _alternatives(advice, advice.plan) if current is None or not is_same(one.plan, current)
    ]
    return Answer(sentence, figures(advice.plan), change, why, advice.plan, tuple(others))


def _is_kept(current: ss.Plan, advised: ss.Plan, familiar_with: Collection[str]) -> bool:
    known, new = current.layout.framework in familiar_with, advised.layout.framework in familiar_with
    return outdoes(current, advised) and (known or not new)


def outdoes(one: ss.Plan, other: ss.Plan) -> bool:
    """Return whether ``one`` needs no more memory and time than ``other``, and is launched if that is."""
    if not fits(one, one.memory()) or one.memory().peak_bytes > other.memory().peak_bytes:
        return False
    if any(place.room_bytes is None for place in beside_the_card(one, one.memory())):
        return False
    if why_not_trained(one) is not None and why_not_trained(other) is None:
        return False
    mine, its = _seconds(one), _seconds(other)
    return mine is not None and its is not None and mine <= its


def figures(plan: ss.Plan) -> str:
    """Return ``54.0 of 79.1 GiB, 4.13 s a step, 7.93k tokens/s per GPU``."""
    report = plan.memory()
    words = f"{gib(report.peak_bytes)} of {gib(report.usable_bytes)} GiB"
    if _seconds(plan) is None:
        return words
    step = plan.step()
    rate = short(step.tokens_per_second_per_gpu)
    return f"{words}, {seconds_words(step.seconds)} a step, {rate} tokens/s per GPU"


def difference(plan: ss.Plan, current: ss.Plan) -> str:
    """Return ``Compared with the plan on screen: 5.6 GiB less, 13 % slower.``."""
    if not fits(current, current.memory()):
        return "The plan on screen does not fit."
    more = plan.memory().peak_bytes - current.memory().peak_bytes
    words = "the same memory" if more == 0 else f"{gib(abs(more))} GiB {'more' if more > 0 else 'less'}"
    mine, its = _seconds(plan), _seconds(current)
    if mine is not None and its is not None:
        words += f", {_compared(its / mine)}"
    return f"Compared with the plan on screen: {words}."


def _compared(speedup: float) -> str:
    if abs(speedup - 1) < 0.005:
        return "about as fast"
    if speedup > 2 or speedup < 0.5:
        factor = max(speedup, 1 / speedup)
        return f"about {factor:.2g}x {'faster' if speedup > 1 else 'slower'}"
    return f"{100 * (speedup - 1):.0f} % faster" if speedup > 1 else f"{100 * (1 / speedup - 1):.0f} % slower"


def _alternatives(advice: Advice, base: ss.Plan | None) -> tuple[Alternative, ...]:
    found = []
    for index, (plan, words) in enumerate(advice.alternatives):
        # A plan for other hardware or another recipe is no rival of the recommended one.
        is_rival = (
            base is not None and plan.cluster == base.cluster and plan.recipe.method == base.recipe.method
        )
        if base is not None and is_rival and (is_same(plan, base) or outdoes(base, plan)):
            continue
        found.append(Alternative(index, plan, words))
    return tuple(found[:MAX_ALTERNATIVES])


def _is_asked_about(advice: Advice, plan: ss.Plan) -> bool:
    """Return whether the advice is for the model and cluster of ``plan``."""
    asked = advice.plan or next((turn.plan for turn in advice.path if turn.plan is not None), None)
    return asked is not None and asked.architecture == plan.architecture and asked.cluster == plan.cluster


def _seconds(plan: ss.Plan) -> float | None:
    try:
        return plan.step().seconds
    except ValueError:  # A GPU whose rates are not known.
        return None
