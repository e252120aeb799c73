"""The last questions: remaining memory, the plan on screen, overlap, one script, the team's frameworks, and
one more setting."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.cluster import name_device
from shardscope.core.number_format import format_gib, join_list
from shardscope.frameworks.accelerate.limits import why_not_started
from shardscope.frameworks.accelerate.plugin_fields import PLUGIN_FIELDS, TITLE
from shardscope.frameworks.registry import frameworks, is_trained
from shardscope.memory.overheads.libraries import TIGHT_PERCENT
from shardscope.planner.advice import descriptions
from shardscope.planner.advice.plan_evaluator import LEAST_GAIN, PAYS, WORTH_A_SETTING, is_recipe_refused
from shardscope.planner.advice.plans_from_search import WORTH_ONE_MORE, find_better, find_launched_as_good
from shardscope.planner.advice.question_path import describe_figures
from shardscope.planner.advice.simplicity import is_dominating
from shardscope.planner.repairs.savings import find_savings
from shardscope.planner.verdict import assess_plan

if TYPE_CHECKING:
    from shardscope.planner.advice.plan_evaluator import EvaluatedPlan
    from shardscope.planner.advice.question_path import QuestionPath


def ask_room(path: QuestionPath) -> None:
    """Ask whether a larger micro-batch, or other recomputation, uses the remaining GPU memory."""
    current = path.current
    if current is None:
        return
    device = name_device(current.plan.cluster)
    question = f"Is there room left on each {device}?"
    why = (
        "Larger micro-batches and less recomputation keep the arithmetic busier, and more recomputation can "
        "make room for a larger micro-batch that is worth it; the step's batch stays."
    )
    # with_room() tries larger micro-batches with every kind of recomputation, and returns the plan itself if
    # none pays.
    used = 100 * current.report.peak_bytes / current.report.usable_bytes
    larger = path.evaluator.with_room(current)
    # Three cases have an answer without a change: tight, no predicted time, and nothing worth it.
    if current.report.is_tight and larger is current:
        answer = (
            f"No: it is tight, and of runs that need over {TIGHT_PERCENT} % of their {device}'s memory some "
            "run out of it."
        )
        path.record_turn("", question, answer, f"{used:.0f} % of it is used", why, current)
        return
    if current.seconds is None:
        answer = "Yes; the gain of a larger micro-batch is not known, because no time is predicted."
        path.record_turn("", question, answer, f"{used:.0f} % of it is used", why, current)
        return
    if larger is current:
        gain = f"{100 * (WORTH_A_SETTING - 1):.0f} %"
        answer = f"Yes, but no other micro-batch or recomputation is predicted to be {gain} faster."
        path.record_turn("", question, answer, f"{used:.0f} % of it is used", why, current)
        return
    # The larger plan replaces the current one, and its rung stays: it is the same kind of sharding.
    then = 100 * larger.report.peak_bytes / larger.report.usable_bytes
    gained = descriptions.compare_speed(larger, current)
    yes = "Not as it is, but there can be" if current.report.is_tight else "Yes"
    answer = f"{yes}: {descriptions.describe_recipe_changes(larger, current.plan.recipe)}, {gained}."
    path.record_turn(
        "", question, answer, f"{used:.0f} % of it is used, {then:.0f} % then", why, larger, taken=True
    )
    path.set_current(path.rung, larger)


ON_SCREEN, OUTDOES = "on_screen", "outdoes"
"""Keys of the turns that replace the plan that the questions led to."""


def ask_plan_on_screen(path: QuestionPath) -> None:
    """Ask whether the plan on screen is as good: if so, there is no reason to change it."""
    mine, current = path.on_screen, path.current
    if mine is None:
        return
    question = "Does the plan on screen do as well?"
    why = (
        "A predicted difference that is no larger than our usual prediction error is no reason to change a "
        "plan that fits with room."
    )
    # Compared with the plan as it would be advised: ask_overlap() comes later.
    best = None if current is None else path.evaluator.with_overlap(current, path.familiar)
    # The same plan, or the only one that fits: keep it without a comparison.
    if current is None or best is None or mine.plan == best.plan:
        path.keeps_on_screen = True
        path.set_current(ON_SCREEN, mine)
        path.record_turn(ON_SCREEN, question, "Yes.", describe_figures(mine), why, mine, taken=True)
        return
    comparison = path.compare_plans(mine, best)
    if best is not current:
        comparison += ", whose collectives overlap"
    # Dominance counts even within the prediction error: two differences of one sign are more than noise in
    # one.
    if is_dominating(mine, best, path.evaluator.recipe, path.familiar) or _is_as_good(path, mine, best):
        path.keeps_on_screen = True
        path.set_current(ON_SCREEN, mine)
        answer = f"Yes: {path.name_plan(mine)}, {comparison}."
        path.record_turn(ON_SCREEN, question, answer, describe_figures(mine), why, mine, taken=True)
    else:
        path.record_turn(
            "", question, f"No: {path.name_plan(mine)}, {comparison}.", describe_figures(mine), why, mine
        )


def _is_as_good(path: QuestionPath, mine: EvaluatedPlan, current: EvaluatedPlan) -> bool:
    """Return whether the plan on screen fits with room, is as fast within the prediction error, as familiar
    and can be launched."""
    if mine.seconds is None or current.seconds is None or assess_plan(mine.plan).state != "fits":
        return False
    # Neither unfamiliarity nor a launch that is not possible here may come in through the plan on screen.
    knows = mine.plan.layout.framework in path.familiar or current.plan.layout.framework not in path.familiar
    runs = is_trained(mine.plan) or not is_trained(current.plan)
    return knows and runs and mine.seconds <= PAYS * current.seconds


def ask_dominating_plan(path: QuestionPath) -> None:
    """Ask whether a plan that is about as simple, evaluated here or found by a search, is better: faster with
    less memory, clearly faster, or not tight."""
    first = path.current
    # Repeat, because a better plan may have a better one itself. Each round is faster, or the first one that
    # is not tight, so it ends.
    while path.current is not None:
        better = _find_dominating(path, path.current)
        if better is None:
            break
        # A search keeps the recipe's loss, with which the plan may be tight or its micro-batch small.
        path.set_current(OUTDOES, path.evaluator.with_room(better))
    current = path.current
    if current is None or first is None or current is first:
        return
    path.keeps_on_screen = False
    more = current.report.peak_bytes - first.report.peak_bytes
    memory = f"with {format_gib(abs(more))} GiB {'more' if more > 0 else 'less'}"
    if first.report.is_tight and not current.report.is_tight:
        memory += ", and it is not tight"
    path.record_turn(
        OUTDOES,
        "Is a plan that is about as simple better?",
        f"Yes: {path.name_plan(current)}, {path.compare_plans(current, first)}, {memory}.",
        describe_figures(current),
        "A search over all layouts is compared with the questions. A plan that is as simple is better if it "
        f"is faster and needs less memory, if it is over {100 * (PAYS - 1):.0f} % faster and not tight, or "
        "if only the other one is tight. Each further option or degree, or the next framework by effort, is "
        f"worth it if the step is {WORTH_ONE_MORE:g} times as fast.",
        current,
        taken=True,
    )


def ask_launch(path: QuestionPath) -> None:
    """Ask whether the framework's engine trains the recipe in this layout; if not, a plan that can be
    launched and is about as good replaces it."""
    current = path.current
    # A package that is missing here may be installed where the plan will run.
    if current is None or path.keeps_on_screen or not is_recipe_refused(current.plan):
        return
    launched = find_launched_as_good(path.evaluator, path.ranking, current, path.familiar)
    if launched is None:
        return
    path.set_current(OUTDOES, launched)
    loose = ", which is not tight" if current.report.is_tight and not launched.report.is_tight else ""
    path.record_turn(
        OUTDOES,
        "Can it be launched here?",
        f"No, but {path.name_plan(launched)}{loose} can, {path.compare_plans(launched, current)}.",
        describe_figures(launched),
        "A plan that Shardscope plans but does not train has to be clearly faster, or fit where no other "
        "does.",
        launched,
        taken=True,
    )


def _find_dominating(path: QuestionPath, current: EvaluatedPlan) -> EvaluatedPlan | None:
    evaluator, familiar = path.evaluator, path.familiar
    # The plans that are evaluated already cost nothing. The search over all layouts takes seconds, and comes
    # last.
    evaluated = [*evaluator.fitting.values(), *([path.on_screen] if path.on_screen else [])]
    candidates = [
        one
        for one in evaluated
        if evaluator.trains_the_same(one.plan.recipe)
        and is_dominating(one, current, evaluator.recipe, familiar)
        and (one is path.on_screen or is_trained(one.plan) or not is_trained(current.plan))
    ]
    if candidates:
        return min(candidates, key=lambda one: one.seconds or 0.0)
    return None if path.ranking is None else find_better(evaluator, path.ranking, current, familiar)


def ask_one_script(path: QuestionPath) -> None:
    """Ask whether one script must switch between frameworks, which Accelerate does."""
    question = "Must one script run under several frameworks?"
    why = f"{TITLE} wraps the others: one script, and a configuration file that says which of them runs."
    current = path.current
    if current is None:
        return
    layout = current.plan.layout
    number = f"{TITLE} starts {', '.join(frameworks[name].title for name in PLUGIN_FIELDS)}"
    # Whether Accelerate starts a plan has one answer, for advice, scripts and exported files: its own limits.
    refusal = why_not_started(current.plan)
    knows = "accelerate" in path.familiar
    if refusal is not None:
        answer = f"{TITLE} does not start this plan; {layout.title} does, directly. {refusal}"
    elif knows:
        answer = f"The team runs {TITLE}: it starts this plan through {layout.title}."
    else:
        answer = f"If so, {TITLE} starts this plan through {layout.title}."
    path.record_turn("", question, answer, number, why, current, taken=knows and refusal is None)


def ask_team(path: QuestionPath) -> None:
    """Ask whether the team already uses the plan's framework, and report the cost of keeping to a known
    one."""
    # Accelerate is a launcher, not a framework with layouts: ask_one_script deals with it.
    known = [name for name in path.familiar if name in frameworks]
    current = path.current
    if current is None or not known:
        return
    titles = join_list([frameworks[name].title for name in known])
    question = f"Is it what the team runs well ({titles})?"
    why = "A framework that a team knows saves weeks; between two that do the same it decides."
    if current.plan.layout.framework in known:
        path.record_turn("", question, "Yes.", describe_figures(current), why, current, taken=True)
        return
    # Compare with what was evaluated on the way; a framework that the questions did not try has no figures.
    familiar_plans = [
        outcome.best
        for outcome in path.evaluator.list_outcomes()
        if outcome.best and outcome.best.plan.layout.framework in known
    ]
    # The fastest of these plans, so that the cost of staying with a familiar framework is not overstated.
    timed = [evaluated for evaluated in familiar_plans if evaluated.seconds is not None]
    if not familiar_plans:
        path.record_turn("", question, "No: what the team knows does not fit here.", "", why)
        return
    nearest = min(timed, key=lambda evaluated: evaluated.seconds or 0.0, default=familiar_plans[0])
    name = descriptions.name_plan(nearest.plan, path.evaluator.recipe)
    if nearest.seconds is None or current.seconds is None:
        path.record_turn(
            "", question, f"No; {name} would fit.", descriptions.describe_needs(nearest), why, nearest
        )
        return
    comparison = descriptions.compare_speed(nearest, current)
    answer = f"No; {name} would fit, {comparison}: weigh that against learning another framework."
    path.record_turn(
        "",
        question,
        answer,
        f"{descriptions.describe_needs(nearest)}; {descriptions.describe_speed(nearest)}",
        why,
        nearest,
    )


def ask_overlap(path: QuestionPath) -> None:
    """Ask whether options that overlap collectives with computation make the plan faster, and set them."""
    current = path.current
    if current is None or current.seconds is None or path.keeps_on_screen:
        return
    overlapped = path.evaluator.with_overlap(current, path.familiar)
    if overlapped is current:
        return
    before, after = current.plan.layout, overlapped.plan.layout
    names = join_list([
        f"{name}={getattr(after, name)!r}"
        for name in after.__dataclass_fields__
        if getattr(after, name) != getattr(before, name)
    ])  # fmt: skip
    path.record_turn(
        "",
        "Can gradients and weights travel while it computes?",
        f"Yes: with {names}, {descriptions.compare_speed(overlapped, current)}.",
        describe_figures(overlapped),
        f"{current.plan.layout.title} waits for them by default; layout and training stay as they are.",
        overlapped,
        taken=True,
    )
    path.set_current(path.rung, overlapped)


def ask_one_setting(path: QuestionPath) -> None:
    """Ask whether one setting saves time and memory and leaves layout and training unchanged.

    The Memory view offers the same settings: without them, the advice would differ from it.
    """
    current = path.current
    if current is None or current.seconds is None:
        return
    seconds = current.seconds
    path.settings = [
        saving
        for saving in find_savings(current.plan, current.report)
        if LEAST_GAIN * (seconds + saving.seconds_lost) < seconds
    ]
    question = "Does one more setting make it faster, with less memory?"
    why = (
        "Other kernels, offloaded activations, or another way to compute the loss leave layout and training "
        "as they are."
    )
    if not path.settings:
        path.record_turn("", question, "No.", "", why)
        return
    changes = [
        f"{saving.change} ({descriptions.compare_seconds(seconds + saving.seconds_lost, seconds)}"
        + (")" if is_trained(saving.plan) or not is_trained(current.plan) else "; cannot be launched here)")
        for saving in path.settings
    ]
    path.record_turn("", question, f"Yes: {join_list(changes)}.", describe_figures(current), why, current)
