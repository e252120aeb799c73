"""Trial plans of advice: each is evaluated once for its memory and its step time.

If the requested recipe does not fit, the same layout is evaluated with a smaller micro-batch and more
accumulation, with recomputation, and with the chunked loss. None of these changes the loss curve.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.cluster import BEFORE_AMPERE
from shardscope.core.errors import FieldError
from shardscope.core.fixes import without_fix_search
from shardscope.core.layout import Layout, list_divisors
from shardscope.core.plan import Plan
from shardscope.core.serialization import replace_fields
from shardscope.frameworks.accelerate.limits import why_not_started
from shardscope.frameworks.registry import frameworks, is_trained
from shardscope.planner.memory_needs import MemoryNeed, find_shortages
from shardscope.planner.repairs.single_changes import OFFLOADS
from shardscope.prediction.support import list_supported

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.cluster import Cluster
    from shardscope.core.recipe import Loss, Recipe, Recompute
    from shardscope.memory.report import MemoryReport
    from shardscope.timing.report import StepReport

PAYS = 1.10
"""Speedup from which a more complex plan is recommended: predicted times differ from measured ones by about
as much, so that a smaller gain may be none."""

SAFE = 4 / 3
"""Largest slowdown that is accepted to avoid a tight plan: the maximum cost of full recomputation, one more
forward pass compared with one forward and a backward of twice its length."""

WORTH_A_SETTING = 1.02
"""Speedup from which a setting without effort is worth changing: the micro-batch or the recomputation."""

LEAST_GAIN = 1.005
"""Speedup from which the text calls a step faster, and from which an option without cost is set."""

LARGEST_MICRO_BATCH = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluatedPlan:
    """A plan that can run, with its memory report and shortages."""

    plan: Plan
    report: MemoryReport
    short: tuple[MemoryNeed, ...]
    """Kinds of memory that are too small, the GPU first; empty if the plan fits."""

    @property
    def fits(self) -> bool:
        """Return whether every kind of memory of known size is sufficient."""
        return not self.short

    @property
    def moves_activations(self) -> bool:
        """Return whether activations are offloaded to the host."""
        return self.plan.recipe.recompute == "offload"

    @property
    def shortage(self) -> float:
        """Return the largest missing share of any kind of memory, relative to its size; 0 if the plan
        fits."""
        return max((need.short_bytes / max(1, need.room_bytes or 0) for need in self.short), default=0.0)

    @cached_property
    def timed(self) -> StepReport | None:
        """Return the predicted step; None if a required figure is not known."""
        try:
            return self.plan.step()
        except ValueError:
            return None

    @property
    def seconds(self) -> float | None:
        """Return the seconds of one optimizer step; None if not known."""
        return None if self.timed is None else self.timed.seconds


class Outcome(NamedTuple):
    """The trials of one layout."""

    wanted: EvaluatedPlan | None
    """The plan with the requested recipe; None if it cannot run."""
    best: EvaluatedPlan | None
    """The fastest plan that fits, as far as times are known; None if none fits."""
    nearest: EvaluatedPlan | None
    """The plan with the smallest shortage, if none fits."""
    refusal: str | None
    """Why no plan could be created or predicted."""

    @property
    def is_eased(self) -> bool:
        """Return whether the layout fits only with changes to the recipe."""
        return self.best is not None and self.best is not self.wanted


class PlanEvaluator:
    """Trials of layouts for one model, one cluster and one recipe."""

    def __init__(self, architecture: Architecture, cluster: Cluster, recipe: Recipe) -> None:
        self.architecture, self.cluster, self.recipe = architecture, cluster, recipe
        self._outcomes: dict[Layout, Outcome] = {}
        self._with_room: dict[tuple[Layout, Recipe], EvaluatedPlan] = {}
        self.fitting: dict[tuple[Layout, Recipe], EvaluatedPlan] = {}
        """All plans so far that fit."""

    def evaluate_plan(self, layout: Layout, recipe: Recipe) -> EvaluatedPlan | str:
        """Return the plan of a layout, or the error message if it is invalid."""
        try:
            with without_fix_search():
                plan = Plan(self.architecture, self.cluster, recipe, layout)
                report = plan.memory()
                trial = EvaluatedPlan(plan=plan, report=report, short=tuple(find_shortages(plan, report)))
        except FieldError as refusal:
            # Not the fix of a degree: the layout is one of those tried here, and the next ones follow.
            is_layout = refusal.field.startswith("Layout")
            return refusal.without_fix if is_layout else str(refusal)
        except ValueError as refusal:
            return str(refusal)
        if trial.fits:
            self.fitting.setdefault((plan.layout, recipe), trial)
        return trial

    def evaluate_fitting_plan(self, layout: Layout, recipe: Recipe) -> EvaluatedPlan | None:
        """Return the plan of a layout; None if it is invalid or does not fit."""
        trial = self.evaluate_plan(layout, recipe)
        return trial if isinstance(trial, EvaluatedPlan) and trial.fits else None

    def trains_the_same(self, recipe: Recipe) -> bool:
        """Return whether ``recipe`` differs from the requested one only in fields that keep the loss
        curve."""
        # These fields change memory and time but not the gradients of a step, except for rounding.
        eased = ("micro_batch_size", "recompute", "recompute_interval", "loss")
        values = {name: getattr(recipe, name) for name in eased}
        return replace(self.recipe, **values) == recipe

    def evaluate_layout(self, layout: Layout) -> Outcome:
        """Return the outcome of a layout with the requested recipe, otherwise with changes that save
        memory."""
        if layout not in self._outcomes:
            self._outcomes[layout] = self._compute_outcome(layout)
        return self._outcomes[layout]

    def list_outcomes(self) -> list[Outcome]:
        """Return the outcomes of all layouts evaluated so far."""
        return list(self._outcomes.values())

    def _compute_outcome(self, layout: Layout) -> Outcome:
        # 1. The recipe as requested. If it fits easily, nothing else is tried.
        wanted = self.evaluate_plan(layout, self.recipe)
        if isinstance(wanted, EvaluatedPlan) and wanted.fits and not wanted.report.is_tight:
            return Outcome(wanted, wanted, None, None)
        # 2. Easier recipes, one list for each combination of recomputation and loss, from large to small
        # micro-batches.
        runs = [wanted] if isinstance(wanted, EvaluatedPlan) else []
        ladders = list(self._list_easier_recipes(layout))
        if isinstance(wanted, EvaluatedPlan) and is_state_too_large(wanted):
            # No change helps: only the one that saves most is evaluated, for the smallest shortage.
            on_gpu = [ladder for ladder in ladders if ladder and ladder[0].recompute != "offload"]
            ladders = [ladder[-1:] for ladder in on_gpu[-1:]]
        for ladder in ladders:
            for recipe in ladder:
                trial = self.evaluate_plan(layout, recipe)
                if isinstance(trial, str):
                    continue
                runs.append(trial)
                if trial.fits and not trial.report.is_tight:
                    break  # A smaller micro-batch fits as well, and is no faster.
            # With offload the host link decides the time, whatever else changes; but a plan may not be
            # launched with another loss.
            last = runs[-1] if runs and has_offload(layout) else None
            is_enough = last is not None and last.fits and not last.report.is_tight
            if last and is_enough and (last.plan.recipe.loss == self.recipe.loss or is_trained(last.plan)):
                break
        # 3. The fastest of all that fit; otherwise the one with the smallest shortage.
        refusal = wanted if isinstance(wanted, str) else None
        as_wanted = wanted if isinstance(wanted, EvaluatedPlan) else None
        if not runs:
            return Outcome(None, None, None, refusal)
        best = _choose_launched_or_better(runs, self.recipe)
        nearest = None if best else min(runs, key=lambda evaluated: evaluated.shortage)
        return Outcome(as_wanted, best, nearest, refusal)

    def _list_easier_recipes(self, layout: Layout) -> Iterator[list[Recipe]]:
        """Yield lists of recipes with smaller micro-batches: for each recomputation, the default and the
        chunked loss."""
        recipe = self.recipe
        # Divisors keep the number of sequences of a step; gradients of more micro-batches are accumulated.
        sizes = list(reversed(list_divisors(recipe.micro_batch_size)))
        can_offload = self.cluster.host_memory_bytes is not None  # Do not rely on memory of unknown size.
        for recompute in _list_more_recomputation(recipe, layout, can_offload):
            for loss in _list_losses(recipe, layout):
                changed = replace(recipe, recompute=recompute, loss=loss)
                recipes = [replace(changed, micro_batch_size=size) for size in sizes]
                yield [one for one in recipes if one != recipe]

    def with_room(self, evaluated: EvaluatedPlan) -> EvaluatedPlan:
        """Return the same layout with the remaining memory used, not tightly: the smallest micro-batch, with
        any recomputation, that is about as fast as the fastest; ``evaluated`` itself if the gain is
        negligible."""
        key = (evaluated.plan.layout, evaluated.plan.recipe)
        if key not in self._with_room:
            self._with_room[key] = self._find_larger(evaluated)
        return self._with_room[key]

    def with_overlap(self, evaluated: EvaluatedPlan, familiar: Collection[str] = ()) -> EvaluatedPlan:
        """Return the same plan with the options on that overlap collectives with computation, which
        frameworks and a search leave off; ``evaluated`` itself if they gain nothing or make it tight.

        A team that is familiar with Accelerate has to gain more than the prediction error by options that it
        does not start.
        """
        defaults = frameworks[evaluated.plan.layout.framework].defaults()
        options = defaults.find_overlap_options(evaluated.plan)
        if not options:
            return evaluated
        layout = replace_fields(evaluated.plan.layout, options)
        overlapped = self.evaluate_fitting_plan(layout, evaluated.plan.recipe)
        if overlapped is None:
            return evaluated
        loses_accelerate = (
            "accelerate" in familiar
            and why_not_started(evaluated.plan) is None
            and why_not_started(overlapped.plan) is not None
        )
        if not is_faster(overlapped, evaluated, PAYS if loses_accelerate else LEAST_GAIN):
            return evaluated
        becomes_tight = overlapped.report.is_tight and not evaluated.report.is_tight
        return evaluated if becomes_tight else overlapped

    def _find_larger(self, evaluated: EvaluatedPlan) -> EvaluatedPlan:
        best = evaluated
        # The recipe's loss first: the chunked one, which makes room where the vocabulary is large, changes
        # how the model is called, so it must be faster by more than the prediction error.
        for loss in _list_losses(evaluated.plan.recipe, evaluated.plan.layout):
            is_own = loss == evaluated.plan.recipe.loss
            larger = list(self._list_larger(evaluated, loss))
            fastest = find_fastest([evaluated, *larger])
            if fastest is None:
                continue
            if _loosens(fastest, best):
                best = _choose_smallest(larger, fastest, evaluated.plan.recipe)
                continue
            least = WORTH_A_SETTING if is_own else PAYS
            if is_faster(fastest, best, least):
                # A smaller micro-batch that is about as fast has to be worth the change, too.
                worth = [one for one in larger if is_faster(one, best, least)]
                best = _choose_smallest(worth, fastest, evaluated.plan.recipe)
        return best if best is evaluated else self._with_requested_loss(best)

    def _with_requested_loss(self, evaluated: EvaluatedPlan) -> EvaluatedPlan:
        """Return the plan without its chunked loss, if that gains nothing any more: another micro-batch or
        recomputation may have made as much room."""
        recipe = evaluated.plan.recipe
        if recipe.loss == self.recipe.loss:
            return evaluated
        whole = self.evaluate_fitting_plan(evaluated.plan.layout, replace(recipe, loss=self.recipe.loss))
        if whole is None or whole.report.is_tight:
            return evaluated
        only_whole_is_launched = is_trained(whole.plan) and not is_trained(evaluated.plan)
        least = PAYS if only_whole_is_launched else WORTH_A_SETTING
        return evaluated if is_faster(evaluated, whole, least) else whole

    def _list_larger(self, evaluated: EvaluatedPlan, loss: Loss | None) -> Iterator[EvaluatedPlan]:
        """Yield plans with this loss that are not tight: larger micro-batches, or less recomputation."""
        recipe, layout = evaluated.plan.recipe, evaluated.plan.layout
        for again in _list_other_recomputation(recipe, layout):
            other = (
                recipe
                if again == recipe.recompute
                else replace(recipe, recompute=again, recompute_interval=1)
            )
            for size in _list_larger_sizes(evaluated.plan):
                changed = replace(other, micro_batch_size=size, loss=loss)
                # The same size pays only with less recomputation; more of it needs the larger micro-batch
                # that it makes room for.
                is_same_size = size == recipe.micro_batch_size and not _is_less(again, recipe.recompute)
                # The chunked loss alone may be what a tight plan lacks.
                only_loosens = evaluated.report.is_tight and loss != recipe.loss and again == recipe.recompute
                if is_same_size and not only_loosens:
                    continue  # Unchanged, or more recomputation without a larger micro-batch.
                larger = self.evaluate_plan(layout, changed)
                if isinstance(larger, str):  # Such as a number of micro-batches that pipelines do not take.
                    continue
                # Memory grows with the micro-batch, so larger ones do not fit either.
                if not larger.fits or larger.report.is_tight:
                    break
                yield larger


def _loosens(evaluated: EvaluatedPlan, other: EvaluatedPlan) -> bool:
    """Return whether only ``other`` is tight, and neither faster by more than the prediction error nor the
    only one that can be launched."""
    is_looser = other.report.is_tight and not evaluated.report.is_tight
    if not is_looser or is_faster(other, evaluated):
        return False
    return is_trained(evaluated.plan) or not is_trained(other.plan)


def _choose_smallest(runs: Iterable[EvaluatedPlan], fastest: EvaluatedPlan, recipe: Recipe) -> EvaluatedPlan:
    """Return the smallest micro-batch that is about as fast as ``fastest``, preferably with the recomputation
    of ``recipe``, then the one that needs the least memory."""
    # Doubling the micro-batch doubles the activations; a gain below WORTH_A_SETTING is not worth them.
    near = [run for run in (*runs, fastest) if not is_faster(fastest, run, WORTH_A_SETTING)]
    return min(
        near,
        key=lambda run: (
            run.plan.recipe.micro_batch_size,
            run.plan.recipe.recompute != recipe.recompute,
            run.report.peak_bytes,
        ),
    )


def has_offload(layout: Layout) -> bool:
    """Return whether training state is offloaded from the GPU."""
    return any(getattr(layout, field, None) for field in OFFLOADS)


def lacks_bf16(recipe: Recipe, cluster: Cluster) -> bool:
    """Return whether ``recipe`` computes in bf16 on GPUs whose matrix units lack it."""
    return recipe.precision.startswith("bf16") and cluster.gpu.architecture in BEFORE_AMPERE


def is_state_too_large(evaluated: EvaluatedPlan) -> bool:
    """Return whether the state that stays on the GPU between steps does not fit, whatever the batch."""
    return sum(evaluated.report.at("rest").values()) > evaluated.report.usable_bytes


def compute_state_bytes(evaluator: PlanEvaluator) -> int | None:
    """Return the bytes of weights, gradients and optimizer on a rank without sharding; None if there is no
    formula."""
    # DDP on one GPU shards nothing, so that its report has the whole training state.
    cluster = replace(evaluator.cluster, gpus_per_node=1, num_nodes=1)
    recipe = replace(evaluator.recipe, global_batch_size=evaluator.recipe.micro_batch_size)
    alone = PlanEvaluator(evaluator.architecture, cluster, recipe).evaluate_plan(Layout.ddp(), recipe)
    if isinstance(alone, str):
        return None
    snapshots = [components for _, _, components in alone.report.timeline]
    return sum(
        max(snapshot[name] for snapshot in snapshots) for name in ("parameters", "gradients", "optimizer")
    )


def _list_larger_sizes(plan: Plan) -> list[int]:
    """Return the micro-batch sizes that divide the batch of a replica, from the plan's own on."""
    sizes = list_divisors(plan.recipe.global_batch_size // plan.degrees.data_parallel)
    return [size for size in sizes if plan.recipe.micro_batch_size <= size <= LARGEST_MICRO_BATCH]


def _choose_launched_or_better(runs: list[EvaluatedPlan], wanted: Recipe) -> EvaluatedPlan | None:
    """Return the fastest run that can be launched here, unless one that cannot is clearly better."""
    best = _choose_fastest(runs, wanted)
    if best is None or is_trained(best.plan):
        return best
    launched = _choose_fastest([run for run in runs if is_trained(run.plan)], wanted)
    return best if launched is None or is_clearly_better(best, launched) else launched


def is_recipe_refused(plan: Plan) -> bool:
    """Return whether the engine does not train the plan's recipe in its layout, whatever is installed."""
    try:
        with without_fix_search():
            frameworks[plan.layout.framework].limits().check_plan(plan)
    except FieldError as refusal:
        # The fix of a missing package is text: pip install.
        return refusal.field.startswith("Recipe.") and refusal.fix_values is not None
    return False


def is_clearly_better(best: EvaluatedPlan, launched: EvaluatedPlan) -> bool:
    """Return whether a plan is clearly better than one that can be launched here: by more than the prediction
    error, or because only the other one is tight."""
    return is_faster(best, launched) or (launched.report.is_tight and not best.report.is_tight)


def _choose_fastest(runs: list[EvaluatedPlan], wanted: Recipe) -> EvaluatedPlan | None:
    """Return the fastest run, with no change to the recipe ``wanted`` that gains nothing; one that offloads
    activations only if it is clearly faster, or the others are tight."""
    # Offloaded activations need host memory and a fast host link, so they need a clear gain.
    moved = find_fastest(run for run in runs if run.moves_activations)
    on_gpu = [run for run in runs if not run.moves_activations]
    resident = _choose_least_changed(on_gpu, find_fastest(on_gpu), wanted)
    if moved is None or resident is None:
        return moved or resident
    is_looser = (
        resident.report.is_tight and not moved.report.is_tight and not is_faster(resident, moved, SAFE)
    )
    return moved if is_looser or is_faster(moved, resident) else resident


def _choose_least_changed(
    runs: Iterable[EvaluatedPlan], fastest: EvaluatedPlan | None, wanted: Recipe
) -> EvaluatedPlan | None:
    """Return the run with the fewest changes that is about as fast as ``fastest``, and of these the
    leanest."""
    # Tight plans are compared with those of other layouts next, as they are.
    if fastest is None or fastest.seconds is None or fastest.report.is_tight:
        return fastest
    loose = (run for run in runs if run.fits and not run.report.is_tight)
    near = [run for run in loose if not is_faster(fastest, run, WORTH_A_SETTING)]
    return min(
        near,
        key=lambda run: (
            (run.plan.recipe.loss != wanted.loss) + (run.plan.recipe.recompute != wanted.recompute),
            run.report.peak_bytes,
        ),
    )


RECOMPUTED: tuple[Recompute, ...] = ("none", "selective", "full")
"""Kinds of recomputation, the least first; offloaded activations are handled separately."""


def _list_more_recomputation(recipe: Recipe, layout: Layout, moves: bool) -> Iterator[Recompute]:
    yield recipe.recompute
    if recipe.recompute in RECOMPUTED:
        more = RECOMPUTED[RECOMPUTED.index(recipe.recompute) + 1 :]
        yield from _filter_supported(layout, (*more, "offload") if moves else more)


def _list_other_recomputation(recipe: Recipe, layout: Layout) -> Iterator[Recompute]:
    """Yield the recipe's own recomputation, then the others that keep activations on the GPU."""
    yield recipe.recompute
    if recipe.recompute in RECOMPUTED:
        yield from _filter_supported(layout, (value for value in RECOMPUTED if value != recipe.recompute))


def _is_less(again: Recompute, than: Recompute) -> bool:
    return than in RECOMPUTED and RECOMPUTED.index(again) < RECOMPUTED.index(than)


def _filter_supported(layout: Layout, values: Iterable[Recompute]) -> Iterator[Recompute]:
    return (value for value in values if value in list_supported(layout, "recompute"))


def _list_losses(recipe: Recipe, layout: Layout) -> Iterator[Loss | None]:
    yield recipe.loss
    if recipe.loss is None and recipe.kernels is None and "chunked" in list_supported(layout, "loss"):
        yield "chunked"


def find_fastest(runs: Iterable[EvaluatedPlan]) -> EvaluatedPlan | None:
    """Return the fastest run that fits; a plan that is not tight comes first unless it is much slower.

    If times are not known, the first one; None if none fits.
    """
    fitting = [evaluated for evaluated in runs if evaluated.fits]
    if not fitting:
        return None
    # A tight plan may run out of memory, so it must be faster by more than recomputation could cost (SAFE).
    easy = [evaluated for evaluated in fitting if not evaluated.report.is_tight]
    first = min(fitting, key=_known_seconds)
    if not easy:
        return first
    first_easy = min(easy, key=_known_seconds)
    return first if is_faster(first, first_easy, SAFE) else first_easy


def _known_seconds(evaluated: EvaluatedPlan) -> float:
    return float("inf") if evaluated.seconds is None else evaluated.seconds


def is_faster(evaluated: EvaluatedPlan, other: EvaluatedPlan, times: float = PAYS) -> bool:
    """Return whether ``evaluated`` is predicted to be over ``times`` times faster; False if a time is not
    known."""
    if evaluated.seconds is None or other.seconds is None:
        return False
    return evaluated.seconds * times < other.seconds
