"""The recommendation for the current plan (apply the advised plan or keep this one), and alternatives."""

from __future__ import annotations

from dataclasses import dataclass

import shardscope as ss
from shardscope.core.number_format import format_gib, format_rate
from shardscope.planner.advice import descriptions
from shardscope.planner.advice.advice import Advice
from shardscope.planner.advice.descriptions import name_plan
from shardscope.planner.advice.plan_evaluator import SAFE
from shardscope.planner.differences import does_the_same
from shardscope.planner.memory_needs import fits
from shardscope.planner.verdict import assess_plan
from shardscope.timing.report import format_seconds
from shardscope_widgets.kit.display_names import explain_missing_time, name_rate_unit
from shardscope_widgets.kit.numbers import format_short

MAX_ALTERNATIVES = 2
_TRAINING = ("method", "quantization", "precision", "optimizer", "global_batch_size")
"""Recipe fields in which an alternative may train something else."""


@dataclass(frozen=True)
class Alternative:
    """Another plan, with its benefits and costs."""

    index: int
    """Its index in ``advice.alternatives``."""
    plan: ss.Plan
    words: str

    @property
    def name(self) -> str:
        """Return the words before the benefits, such as ``Compile the modules, all else as it is``."""
        # A plan behind a condition: "If a base in 4 bits is enough: DDP, QLoRA; needs 18.6 GiB".
        conditional, needs, _ = self.words.partition("; needs ")
        if needs:
            return conditional
        name, colon, _ = self.words.partition(": ")
        return name if colon else name_plan(self.plan)


@dataclass(frozen=True)
class Answer:
    """The recommendation for the current plan."""

    sentence: str
    figures: str
    """Memory, time and rate of the recommended plan; if nothing fits, what is missing."""
    change: str
    """The difference from the current plan; empty if that is the recommended one."""
    caution: str
    """What to do about a recommended plan that is tight; empty if it is not."""
    why: str
    """The reasons, in a few sentences."""
    plan: ss.Plan | None
    """The plan to apply; None to keep the current plan, or if nothing fits."""
    alternatives: tuple[Alternative, ...]


def build_answer(advice: Advice, on_screen: ss.Plan | None) -> Answer:
    """Return the recommendation and the alternatives of ``advice``, relative to the current plan."""
    # The first sentence names the plan; the reasons follow it.
    sentence, _, why = advice.why.partition(". ")
    sentence = sentence.rstrip(".") + "."
    if advice.plan is not None and (missing := descriptions.explain_missing_time(advice.plan)):
        why = why.replace(missing, explain_missing_time(advice.plan))
    candidates = [
        Alternative(index, plan, words)
        for index, (plan, words) in enumerate(advice.alternatives)
        # The advice may have been requested for a previous plan.
        if on_screen is None or not does_the_same(plan, on_screen)
    ]
    alternatives = tuple(candidates[:MAX_ALTERNATIVES])
    if advice.plan is None:
        return Answer(sentence, why, "", "", "", None, alternatives)
    caution = describe_tightness(advice.plan, alternatives)
    if on_screen is not None and does_the_same(advice.plan, on_screen):
        return Answer(
            f"Keep the current plan: {name_plan(on_screen)}.",
            describe_figures(on_screen),
            "",
            caution,
            why,
            None,
            alternatives,
        )
    change = "" if on_screen is None else describe_difference(advice.plan, on_screen)
    return Answer(sentence, describe_figures(advice.plan), change, caution, why, advice.plan, alternatives)


def describe_figures(plan: ss.Plan) -> str:
    """Return ``54.0 of 79.1 GiB, 4.13 s per step, 7.93k tokens/s per GPU``."""
    report = plan.memory()
    tight = ", tight" if report.verdict == "tight" else ""
    memory = f"{format_gib(report.peak_bytes)} of {format_gib(report.usable_bytes)} GiB{tight}"
    # A GPU without known rates still has a memory prediction.
    if _predict_seconds(plan) is None:
        return f"{memory}, no time is predicted"
    step = plan.step()
    rate = format_short(step.tokens_per_second_per_gpu)
    unit = name_rate_unit(plan.cluster)
    return f"{memory}, {format_seconds(step.seconds)} per step, {rate} tokens/s per {unit}"


def describe_tightness(plan: ss.Plan, alternatives: tuple[Alternative, ...]) -> str:
    """Return why the recommended ``plan`` is tight, and what to do, or what it needs of unknown memory.

    Empty if it fits with room.
    """
    report = plan.memory()
    verdict = assess_plan(plan, report)
    if verdict.state == "unknown":
        return verdict.reason
    if report.verdict != "tight":
        return ""
    warning = verdict.reason
    # The same rule as for the advice: a plan with room is worth less than a third more time.
    seconds = _predict_seconds(plan)
    for alternative in alternatives:
        other = alternative.plan
        its = _predict_seconds(other)
        # Only a plan that trains the same: others are alternatives under a condition, such as 8-bit moments.
        same = other.cluster == plan.cluster and all(
            getattr(other.recipe, name) == getattr(plan.recipe, name) for name in _TRAINING
        )
        if same and seconds and its and its < SAFE * seconds and other.memory().verdict == "fits":
            return f"{warning} If this one does, apply {name_plan(other, plan.recipe)}: it has more room."
    return f"{warning} Launch a few steps first; Checks can search for a plan with more room."


def describe_difference(plan: ss.Plan, current: ss.Plan) -> str:
    """Return ``Compared with the current plan: 5.6 GiB less, 13 % slower.``."""
    if not fits(current, current.memory()):
        return "The current plan does not fit."
    more = plan.memory().peak_bytes - current.memory().peak_bytes
    sentence = (
        "the same memory" if more == 0 else f"{format_gib(abs(more))} GiB {'more' if more > 0 else 'less'}"
    )
    mine, its = _predict_seconds(plan), _predict_seconds(current)
    if mine is not None and its is not None:
        sentence += f", {_describe_speedup(its / mine)}"
    return f"Compared with the current plan: {sentence}."


def _describe_speedup(speedup: float) -> str:
    if abs(speedup - 1) < 0.005:
        return "about the same speed"
    if speedup > 2 or speedup < 0.5:
        factor = max(speedup, 1 / speedup)
        return f"about {format_rate(factor)}x {'faster' if speedup > 1 else 'slower'}"
    return f"{100 * (speedup - 1):.0f} % faster" if speedup > 1 else f"{100 * (1 / speedup - 1):.0f} % slower"


def _predict_seconds(plan: ss.Plan) -> float | None:
    try:
        return plan.step().seconds
    except ValueError:  # A GPU whose rates are unknown.
        return None
