"""The last questions: room that is left, one script for several frameworks, what the team knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.frameworks.accelerate.carried import CARRIED, TITLE
from shardscope.frameworks.accelerate.plugins import why_not_started
from shardscope.frameworks.registry import frameworks
from shardscope.planner.advising import words
from shardscope.planner.advising.bench import WORTH_A_SETTING
from shardscope.planner.advising.path import figures

if TYPE_CHECKING:
    from shardscope.planner.advising.path import Path


def room(path: Path) -> None:
    """Whether a larger micro-batch, or other recomputation, makes use of what is left of the card."""
    current = path.current
    if current is None:
        return
    question = f"Is there room left on each {words.rank(current.plan.cluster)}?"
    why = (
        "Larger micro-batches and less recomputation keep the arithmetic busier, and more recomputation can "
        "make room for a larger micro-batch that is worth it; the step's batch stays."
    )
    used = 100 * current.report.peak_bytes / current.report.usable_bytes
    larger = path.bench.with_room(current)
    if current.report.is_tight and larger is current:
        answer = "No: it is tight, and of runs that need over 80 % of their card some run out of it."
        path.told("", question, answer, f"{used:.0f} % of it is used", why, current)
        return
    if current.seconds is None:
        answer = "Yes; what a larger micro-batch gains, no known time says."
        path.told("", question, answer, f"{used:.0f} % of it is used", why, current)
        return
    if larger is current:
        gain = f"{100 * (WORTH_A_SETTING - 1):.0f} %"
        answer = f"Yes, but no other micro-batch or recomputation is predicted to be {gain} faster."
        path.told("", question, answer, f"{used:.0f} % of it is used", why, current)
        return
    then = 100 * larger.report.peak_bytes / larger.report.usable_bytes
    gained = words.compared(larger, current)
    yes = "Not as it is, but there can be" if current.report.is_tight else "Yes"
    answer = f"{yes}: {words.eased(larger, current.plan.recipe)}, {gained}."
    path.told("", question, answer, f"{used:.0f} % of it is used, {then:.0f} % then", why, larger, taken=True)
    path.take(path.rung, larger)


def one_script(path: Path) -> None:
    """Accelerate, where one script must switch between frameworks."""
    question = "Must one script run under several frameworks?"
    why = f"{TITLE} wraps the others: one script, and a configuration file that says which of them runs."
    current = path.current
    if current is None:
        return
    layout = current.plan.layout
    number = f"{TITLE} starts {', '.join(frameworks[name].title for name in CARRIED)}"
    refusal = why_not_started(current.plan)
    knows = "accelerate" in path.familiar
    if refusal is not None:
        answer = f"{TITLE} does not start this plan; {layout.title} does, directly. {refusal}"
    elif knows:
        answer = f"The team runs {TITLE}: it starts this plan through {layout.title}."
    else:
        answer = f"If so, {TITLE} starts this plan through {layout.title}."
    path.told("", question, answer, number, why, current, taken=knows and refusal is None)


def what_the_team_knows(path: Path) -> None:
    """Whether the plan is one that the team already runs well, and what keeping to that would cost."""
    known = [name for name in path.familiar if name in frameworks]
    current = path.current
    if current is None or not known:
        return
    titles = words.listed([frameworks[name].title for name in known])
    question = f"Is it what the team runs well ({titles})?"
    why = "A framework that a team knows saves weeks; between two that do the same it decides."
    if current.plan.layout.framework in known:
        path.told("", question, "Yes.", figures(current), why, current, taken=True)
        return
    own = [
        outcome.best
        for outcome in path.bench.outcomes()
        if outcome.best and outcome.best.plan.layout.framework in known
    ]
    timed = [tried for tried in own if tried.seconds is not None]
    if not own:
        path.told("", question, "No: what the team knows does not fit here.", "", why)
        return
    nearest = min(timed, key=lambda tried: tried.seconds or 0.0, default=own[0])
    name = words.named(nearest.plan, path.bench.recipe)
    if nearest.seconds is None or current.seconds is None:
        path.told("", question, f"No; {name} would fit.", words.needs(nearest), why, nearest)
        return
    beside = words.compared(nearest, current)
    answer = f"No; {name} would fit, {beside}: weigh that against learning another framework."
    path.told("", question, answer, f"{words.needs(nearest)}; {words.pace(nearest.timed)}", why, nearest)
