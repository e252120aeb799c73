"""``ss.recommend``: a sequence of questions about model and cluster, and the plan that they lead to.

The simplest plan that fits comes first; a more complex one replaces it only if a clear prediction says so.
There is one answer: a plan of the search over all layouts replaces it only if it is as simple, faster and
leaner, and is the answer where no question leads to a plan. At most two alternatives are added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from shardscope.core.architecture import Architecture
from shardscope.core.cluster import Cluster
from shardscope.core.errors import FieldError, Value, check_choice, find_nearest, refuse
from shardscope.core.number_format import format_share
from shardscope.core.plan import Plan, check_type
from shardscope.core.recipe import Recipe
from shardscope.frameworks.registry import check_trained, list_layout_names
from shardscope.memory.activations.forward import check_known
from shardscope.planner.abilities import TITLES
from shardscope.planner.advice import (
    descriptions,
    last_questions,
    memory_questions,
    size_questions,
)
from shardscope.planner.advice.alternatives import list_alternatives, list_near_plans
from shardscope.planner.advice.plan_evaluator import PAYS, EvaluatedPlan, PlanEvaluator, lacks_bf16
from shardscope.planner.advice.plans_from_search import MAX_ALTERNATIVES, WORTH_ONE_MORE
from shardscope.planner.advice.question_path import Draft, QuestionPath
from shardscope.planner.differences import does_the_same
from shardscope.planner.search.search import Progress

TOKENS_PER_PARAMETER = 20
"""Compute-optimal number of training tokens per parameter (Hoffmann et al. 2022, arXiv:2203.15556)."""

Alternative = tuple[Plan, str]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One question, with the answer for this model on these GPUs."""

    question: str
    """Question text, such as ``Does everything fit on one GPU?``"""
    answer: str
    """Answer text; yes/no questions begin with ``No`` or ``Yes``, then the consequence."""
    number: str
    """Figures behind the answer, with units; empty if the question does not apply."""
    why: str
    """One or two sentences: the purpose of the question, and the cost or saving of the answer."""
    taken: bool
    """Whether the plan has the feature in question."""
    plan: Plan | None = None
    """The plan that the figures belong to; None if there is no single one."""

    def __str__(self) -> str:
        mark = "->" if self.taken else "  "
        number = f" [{self.number}]" if self.number else ""
        return f"{mark} {self.question} {self.answer}{number}\n      {self.why}"


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The recommended plan, the reasons and the alternatives; result of ``ss.recommend``."""

    plan: Plan | None
    """The simplest plan that fits; None if nothing fits. In that case, :attr:`alternatives` has the nearest
    misses and plans that would fit with other settings."""
    path: tuple[Turn, ...]
    """Questions in their order."""
    alternatives: tuple[Alternative, ...]
    """At most two other plans, never the plan on screen, each with a sentence: its gain and cost, or its
    missing memory."""
    why: str
    """The advice in a few sentences."""

    def __str__(self) -> str:
        parts = [self.why, "\n".join(map(str, self.path))]
        if self.alternatives:
            parts.append(
                "\n".join(["Alternatives:", *(f" - {sentence}" for _, sentence in self.alternatives)])
            )
        return "\n\n".join(parts)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the advice as a plain HTML table, without scripts."""
        rows = "".join(
            "<tr>"
            + "".join(
                # Not a style: what the plan has stays marked in viewers that remove styles, such as GitHub's.
                f"<td style='text-align:left'>{f'<b>{escape(text)}</b>' if turn.taken else escape(text)}</td>"
                for text in (turn.question, turn.answer, turn.number)
            )
            + "</tr>"
            for turn in self.path
        )
        head = "".join(
            f"<th style='text-align:left'>{name}</th>" for name in ("question", "answer", "number")
        )
        items = "".join(f"<li>{escape(sentence)}</li>" for _, sentence in self.alternatives)
        alternatives = f"<p>Alternatives:</p><ul>{items}</ul>" if items else ""
        return (
            f"<p>{escape(self.why)}</p><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
            f"{alternatives}"
        )


def recommend(
    architecture: Architecture,
    cluster: Cluster,
    recipe: Recipe,
    familiar_with: Iterable[str] = (),
    *,
    current: Plan | None = None,
    progress: Progress | None = None,
) -> Advice:
    """Recommend a plan to start with for this model on these GPUs, with reasons.

    The questions have the order of :attr:`Advice.path` and are answered by ``plan.memory()`` and
    ``plan.step()``: does everything fit on one GPU at the requested micro-batch (DDP), with a smaller one or
    recomputation, with sharded gradients and optimizer (ZeRO-2), with sharded weights too (FSDP2), with
    tensor or context parallelism inside a node, with offload to the host (ZeRO-3), to NVMe; is the model
    large enough for Megatron-core, does any other layout of a search fit, is there room left, does the model
    have experts, are links slow. The first plan that fits is recommended. A later question replaces it only
    if its plan is predicted to be at least 10 % faster, or needs a tenth less memory and is no slower; where
    size is the reason (over 70B, hundreds of GPUs, experts), unless its plan is at least 10 % slower.

    ``familiar_with``: frameworks that the team already uses, of ``ddp``, ``fsdp2``, ``deepspeed``,
    ``megatron`` and ``accelerate``; it decides between frameworks that do the same about as fast. The
    recipe's micro-batch, recomputation and loss computation may change to make a plan fit, or faster; the
    loss curve stays the same.

    No evaluated plan, and no plan of a search over all layouts, is as simple as the recommended one and
    better: faster and leaner, over 10 % faster and not tight, or, if the recommended one is tight, not tight
    and less than a third slower. None takes one more option or degree, or the next framework by effort, and
    is 1.5 times as fast and leaner or not tight. A plan whose recipe its engine does not train gives way
    to one of the same framework that can be launched, if that is as fast within 10 % and no tighter.

    ``current`` is the plan that the user has on screen; if it fits with room and is as fast within the usual
    prediction error (10 %), the advice is to keep it. A ``current`` for another model, cluster or task is
    ignored.

    ``progress(message, fraction)`` is called before each question, and repeatedly by the search over all
    layouts; it may end the advice by raising, with any error but a ``ValueError``.

    Raises ``ValueError`` for arguments of a wrong type, for a model without formulas, and for unknown names
    in ``familiar_with``. If no plan of a search fits either, there is no error: :attr:`Advice.plan` is None,
    and :attr:`Advice.alternatives` has the nearest misses with the missing memory.
    """
    # 1. Check the arguments here, so that the error names the argument and not a formula that fails later.
    for name, noun, kind in (
        ("architecture", architecture, Architecture),
        ("cluster", cluster, Cluster),
        ("recipe", recipe, Recipe),
    ):
        check_type(name, noun, kind)
    check_known(architecture)
    if current is not None:
        check_type("current", current, Plan)
    # 2. Ask the questions in order. Each one may replace path.current, the plan that they lead to.
    evaluator = PlanEvaluator(architecture, cluster, recipe)
    path = QuestionPath(evaluator, _check_names(familiar_with), _try_current(evaluator, current), progress)
    questions = _list_questions(cluster)
    for number, ask in enumerate(questions):
        path.progress(f"Question {number + 1} of {len(questions)}", number / len(questions))
        ask(path)
    # 3. Write the turns. Only now is it known which of them lead to the final plan.
    best = path.current
    turns = tuple(
        Turn(
            question=draft.question,
            answer=draft.answer,
            number=draft.number,
            why=draft.why,
            taken=draft.taken or bool(best and draft.key and _leads_to(best, draft, path)),
            plan=None if draft.evaluated is None else draft.evaluated.plan,
        )
        for draft in path.drafts
    )
    # Nothing fits: the alternatives are plans with other settings, and the nearest misses.
    if best is None:
        return Advice(
            plan=None,
            path=turns,
            alternatives=_exclude_current(current, list_near_plans(path)),
            why=_explain_misfit(path),
        )
    alternatives = _exclude_current(current, list_alternatives(path))
    return Advice(
        plan=best.plan, path=turns, alternatives=alternatives, why=_explain_advice(path, best, alternatives)
    )


def _exclude_current(current: Plan | None, alternatives: Sequence[Alternative]) -> tuple[Alternative, ...]:
    """Return at most two alternatives, none of which is the plan on screen."""
    different = [one for one in alternatives if current is None or not does_the_same(one[0], current)]
    return tuple(different[:MAX_ALTERNATIVES])


def _try_current(evaluator: PlanEvaluator, current: Plan | None) -> EvaluatedPlan | None:
    """Return the plan on screen if it is for the same model, cluster and training, and fits."""
    # The Studio passes whatever is on screen, which may be for a model or cluster that the user has just
    # changed.
    if current is None or (current.architecture, current.cluster) != (
        evaluator.architecture,
        evaluator.cluster,
    ):
        return None
    if not evaluator.trains_the_same(current.recipe):
        return None
    return evaluator.evaluate_fitting_plan(current.layout, current.recipe)


def _leads_to(best: EvaluatedPlan, draft: Draft, path: QuestionPath) -> bool:
    """Return whether the recommended plan is the one from this question, or has its layout."""
    # The plan on screen and one of a search belong to no rung: they count for the rung with their layout.
    same = draft.evaluated is not None and draft.evaluated.plan.layout == best.plan.layout
    return draft.key == path.rung or (
        path.rung in (last_questions.ON_SCREEN, last_questions.OUTDOES) and same
    )


def _list_questions(cluster: Cluster) -> tuple[Callable[[QuestionPath], None], ...]:
    """Return the questions in their order; some apply to several GPUs only."""
    # With one GPU there is nothing to shard or split, and no link between nodes.
    spread = (
        memory_questions.ask_sharded_optimizer,
        memory_questions.ask_full_sharding,
        memory_questions.ask_split_inside_a_node,
    )
    across = (size_questions.ask_experts, size_questions.ask_links)
    several = cluster.num_gpus > 1
    return (
        memory_questions.ask_what_trains,
        memory_questions.ask_one_gpu,
        *(spread if several else ()),
        memory_questions.ask_offload,
        *((size_questions.ask_megatron,) if several else ()),
        memory_questions.ask_any_layout,
        last_questions.ask_room,
        last_questions.ask_plan_on_screen,
        last_questions.ask_dominating_plan,
        last_questions.ask_launch,
        last_questions.ask_overlap,
        # Their answers describe the plan, so they come after the last question that may replace it.
        *(across if several else ()),
        last_questions.ask_one_setting,
        last_questions.ask_one_script,
        last_questions.ask_team,
    )


def _check_names(familiar_with: Iterable[str]) -> tuple[str, ...]:
    # A layout may have another name than its framework, as in a search.
    layouts = list_layout_names()
    if isinstance(familiar_with, str) or not isinstance(familiar_with, Iterable):
        near = layouts.get(str(familiar_with).lower()) or find_nearest(familiar_with, list(TITLES))
        refuse("familiar_with", familiar_with, f"several of {', '.join(TITLES)}", Value((near,)))
    names = [name.lower() if isinstance(name, str) else name for name in familiar_with]
    for name in names:
        if isinstance(name, str) and name not in TITLES and name in layouts:
            refuse("familiar_with", name, f"names among {', '.join(TITLES)}", Value(layouts[name]))
    return tuple(check_choice("familiar_with", name, TITLES) for name in names)


def _explain_advice(path: QuestionPath, best: EvaluatedPlan, alternatives: Sequence[Alternative]) -> str:
    plan, report = best.plan, best.report
    # First the decision. "The simplest plan that fits" is said only where memory decided, not speed.
    sentences = [f"Start with {descriptions.name_plan(plan)}."]
    if path.rung == path.first_rung:
        sentences = [f"Start with {descriptions.name_plan(plan)}: the simplest plan that fits here."]
    if path.keeps_on_screen:
        sentences = [
            f"Keep the current plan: {descriptions.name_plan(plan)}.",
            "It fits" + _describe_speed(best, alternatives),
        ]
    sentences.append(
        f"It {descriptions.describe_needs(best)}" + (", which is tight." if report.is_tight else ".")
    )
    # Then its speed, and the time of a compute-optimal pretraining: users know days better than tokens per
    # second.
    if best.timed is not None:
        mfu = best.timed.mfu
        share = "" if mfu is None else f", {format_share(mfu)} of the datasheet's peak"
        sentences.append(f"Predicted: {descriptions.describe_speed(best)}{share}.")
        if not plan.recipe.has_adapters:
            tokens = TOKENS_PER_PARAMETER * plan.architecture.num_parameters
            source = f"{TOKENS_PER_PARAMETER} a parameter, Hoffmann et al. 2022"
            budget = f"{descriptions.abbreviate_count(tokens)} tokens ({source})"
            sentences.append(
                f"Pretraining on {budget} would take {descriptions.format_duration(best.timed.days(tokens))}."
            )
    else:
        sentences.append(f"No time is predicted: {descriptions.explain_missing_time(plan)}")
    # Last what may prevent the run: number formats, memory of unknown size, and what this installation
    # launches.
    sentences += _explain_lack_of_bf16(path)
    if descriptions.describe_unknown_memory(best):
        sentences.append(descriptions.describe_unknown_memory(best))
    try:
        check_trained(plan)
    except FieldError as refusal:
        # Without its fix, which may not fit.
        sentences.append(
            "Shardscope plans and exports it; it cannot be launched here, where "
            f"{refusal.field} is limited to {refusal.allowed}."
        )
    sentences.append(_describe_more_complex_plans(path.evaluator, best, alternatives))
    return " ".join(sentences)


def _describe_more_complex_plans(
    evaluator: PlanEvaluator, best: EvaluatedPlan, alternatives: Sequence[Alternative]
) -> str:
    """Return when to use another plan: after a measurement, unless one is predicted to be far faster.

    A gain of :data:`WORTH_ONE_MORE` is no prediction error. Alternatives on other clusters, or that train
    something else, are no faster way to the same.
    """
    for plan, _ in alternatives:
        if plan.cluster != best.plan.cluster or not evaluator.trains_the_same(plan.recipe):
            continue
        other = evaluator.evaluate_plan(plan.layout, plan.recipe)
        if not isinstance(other, EvaluatedPlan) or not other.seconds or not best.seconds:
            continue
        if other.seconds * WORTH_ONE_MORE < best.seconds:
            name = descriptions.name_plan(plan, best.plan.recipe)
            gain = descriptions.compare_speed(other, best)
            return f"The alternative {name} is predicted to be {gain}."
    return "Use a more complex plan only if a measured run shows the need."


def _describe_speed(best: EvaluatedPlan, alternatives: Sequence[Alternative]) -> str:
    if best.seconds is None:
        return "."
    error = f"{100 * (PAYS - 1):.0f} %, our usual prediction error"
    sentence = f", and no layout that the questions lead to is faster by more than {error}."
    here = [
        plan
        for plan, _ in alternatives
        if plan.cluster == best.plan.cluster and plan.recipe.precision == best.plan.recipe.precision
    ]
    if any(plan.step().seconds * PAYS < best.seconds for plan in here):
        sentence += " A layout of the search is: it is among the alternatives."
    return sentence


def _explain_lack_of_bf16(path: QuestionPath) -> list[str]:
    cluster = path.evaluator.cluster
    if not lacks_bf16(path.evaluator.recipe, cluster):
        return []
    return [f"{cluster.gpu.name} has no bf16 in its matrix units: take precision='fp16-mixed'."]


def _explain_misfit(path: QuestionPath) -> str:
    return " ".join([_describe_nearest_miss(path), *_explain_lack_of_bf16(path)])


def _describe_nearest_miss(path: QuestionPath) -> str:
    evaluator = path.evaluator
    # Without a nearest miss no layout was valid at all, so the first refusal is the reason.
    near = [outcome.nearest for outcome in path.seen.values() if outcome.nearest]
    model = f"{evaluator.architecture.name} on {evaluator.cluster}"
    # Only a search has tried all layouts; it has none where a figure of the GPU is not known.
    is_searched = path.ranking is not None
    if not near:
        refusals = [outcome.refusal for outcome in path.seen.values() if outcome.refusal]
        nothing = "No plan of" if is_searched else "None of the layouts tried for"
        return f"{nothing} {model} can be made. {refusals[0] if refusals else ''}".strip()
    nearest = min(near, key=lambda evaluated: evaluated.shortage)
    nothing = "Nothing" if is_searched else "None of the layouts tried"
    return (
        f"{nothing} fits {model} with this recipe. The nearest is {descriptions.name_plan(nearest.plan)}: "
        f"{descriptions.describe_shortage(nearest)}."
    )
