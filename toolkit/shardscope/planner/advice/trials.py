"""Plans tried for advice: each is asked once what it needs and how long its step takes.

Where the recipe as it is wanted does not fit, what a person tries next in the same layout: a smaller
micro-batch, which more accumulation makes up for, layers computed again in backward, the loss in chunks.
None of these changes what is learnt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.cluster import BEFORE_AMPERE
from shardscope.core.fixes import as_it_is
from shardscope.core.layout import Layout, divisors
from shardscope.core.plan import Plan
from shardscope.planner.capacity import Place, shortages
from shardscope.planner.repairs.changes import OFFLOADS
from shardscope.prediction.support import supported

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.cluster import Cluster
    from shardscope.core.recipe import Loss, Recipe, Recompute
    from shardscope.memory.report import MemoryReport
    from shardscope.timing.report import StepReport

PAYS = 1.10
"""How many times faster something less simple must be predicted to be before it is advised: predictions of
time are about that far from what is measured, and a smaller gain may be none."""

SAFE = 4 / 3
"""How many times slower a plan may be for not being tight: what full recomputation costs at the most, a
forward pass more beside a forward and a backward of twice its length."""

WORTH_A_SETTING = 1.02
"""The same for a setting that costs nobody anything: the micro-batch, or layers not computed again."""

LARGEST_MICRO_BATCH = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class Tried:
    """A plan that can run, what it needs, and what of that there is not."""

    plan: Plan
    report: MemoryReport
    short: tuple[Place, ...]
    """Where there is too little, the card first; empty: it fits."""

    @property
    def fits(self) -> bool:
        """Whether everything has room that is known."""
        return not self.short

    @property
    def moves_activations(self) -> bool:
        """Whether activations go to the host and come back."""
        return self.plan.recipe.recompute == "offload"

    @property
    def shortage(self) -> float:
        """How far from fitting: the largest part that is missing of any kind of memory, of what there is."""
        return max((place.short_bytes / max(1, place.room_bytes or 0) for place in self.short), default=0.0)

    @cached_property
    def timed(self) -> StepReport | None:
        """The predicted step; None where a figure that decides it is not known."""
        try:
            return self.plan.step()
        except ValueError:
            return None

    @property
    def seconds(self) -> float | None:
        """Of one optimizer step; None where that cannot be told."""
        return None if self.timed is None else self.timed.seconds


class Outcome(NamedTuple):
    """What became of one layout."""

    wanted: Tried | None
    """With the recipe as it is; None where that cannot run."""
    best: Tried | None
    """What fits: the fastest, as far as times are known; None where nothing does."""
    nearest: Tried | None
    """What lacks least, where nothing fits."""
    refusal: str | None
    """Why no plan could be made or predicted at all."""

    @property
    def is_eased(self) -> bool:
        """Whether it fits, but not as wanted."""
        return self.best is not None and self.best is not self.wanted


class Bench:
    """One model, one cluster and one recipe, on which layouts are tried."""

    def __init__(self, architecture: Architecture, cluster: Cluster, recipe: Recipe) -> None:
        self.architecture, self.cluster, self.recipe = architecture, cluster, recipe
        self._outcomes: dict[Layout, Outcome] = {}
        self._with_room: dict[tuple[Layout, Recipe], Tried] = {}
        self.fitting: dict[tuple[Layout, Recipe], Tried] = {}
        """Every plan so far that fits."""

    def tried(self, layout: Layout, recipe: Recipe) -> Tried | str:
        """The plan of a layout, or why there is none."""
        try:
            with as_it_is():
                plan = Plan(self.architecture, self.cluster, recipe, layout)
                report = plan.memory()
                found = Tried(plan=plan, report=report, short=tuple(shortages(plan, report)))
        except ValueError as refusal:
            return str(refusal)
        if found.fits:
            self.fitting.setdefault((plan.layout, recipe), found)
        return found

    def trains_the_same(self, recipe: Recipe) -> bool:
        """Whether ``recipe`` differs from the wanted one only in what leaves the loss curve as it is."""
        eased = ("micro_batch_size", "recompute", "recompute_interval", "loss")
        own = {name: getattr(recipe, name) for name in eased}
        return replace(self.recipe, **own) == recipe

    def outcome(self, layout: Layout) -> Outcome:
        """The layout as wanted, or else with what eases it."""
        if layout not in self._outcomes:
            self._outcomes[layout] = self._found(layout)
        return self._outcomes[layout]

    def outcomes(self) -> list[Outcome]:
        """Of all layouts that were asked for so far."""
        return list(self._outcomes.values())

    def _found(self, layout: Layout) -> Outcome:
        wanted = self.tried(layout, self.recipe)
        if isinstance(wanted, Tried) and wanted.fits and not wanted.report.is_tight:
            return Outcome(wanted, wanted, None, None)
        runs = [wanted] if isinstance(wanted, Tried) else []
        ladders = list(self._eased(layout))
        if isinstance(wanted, Tried) and state_is_too_much(wanted):
            # No easing helps: the one that saves most tells how much is missing at the least.
            on_the_card = [ladder for ladder in ladders if ladder and ladder[0].recompute != "offload"]
            ladders = [ladder[-1:] for ladder in on_the_card[-1:]]
        for ladder in ladders:
            for recipe in ladder:
                found = self.tried(layout, recipe)
                if isinstance(found, str):
                    continue
                runs.append(found)
                if found.fits and not found.report.is_tight:
                    break  # A still smaller micro-batch fits as well, and is no faster.
            if offloads(layout) and runs and runs[-1].fits and not runs[-1].report.is_tight:
                break  # What crosses the host link decides the time, not how the rest is eased.
        refusal = wanted if isinstance(wanted, str) else None
        as_wanted = wanted if isinstance(wanted, Tried) else None
        if not runs:
            return Outcome(None, None, None, refusal)
        best = _fastest_way(runs)
        nearest = None if best else min(runs, key=lambda tried: tried.shortage)
        return Outcome(as_wanted, best, nearest, refusal)

    def _eased(self, layout: Layout) -> Iterator[list[Recipe]]:
        """Ladders of smaller micro-batches: without and with recomputation, the loss whole and in chunks."""
        recipe = self.recipe
        sizes = list(reversed(divisors(recipe.micro_batch_size)))
        moves = self.cluster.host_memory_bytes is not None  # Nobody plans on memory that may not be there.
        for again in _more_recomputed(recipe, layout, moves):
            for loss in _losses(recipe, layout):
                changed = replace(recipe, recompute=again, loss=loss)
                found = [replace(changed, micro_batch_size=size) for size in sizes]
                yield [one for one in found if one != recipe]

    def with_room(self, tried: Tried) -> Tried:
        """The same layout with what room there is used: the fastest of larger micro-batches, with less
        recomputation and with more, that is not tight; ``tried`` itself where that gains next to nothing."""
        key = (tried.plan.layout, tried.plan.recipe)
        if key not in self._with_room:
            self._with_room[key] = self._roomier(tried)
        return self._with_room[key]

    def _roomier(self, tried: Tried) -> Tried:
        recipe, layout = tried.plan.recipe, tried.plan.layout
        found = [tried]
        for again in _other_recomputed(recipe, layout):
            other = (
                recipe
                if again == recipe.recompute
                else replace(recipe, recompute=again, recompute_interval=1)
            )
            for size in _powers_of_two(recipe.micro_batch_size, recipe.global_batch_size):
                changed = replace(other, micro_batch_size=size)
                if size == recipe.micro_batch_size and not _is_less(again, recipe.recompute):
                    continue  # As it is, or more computed again that makes room for nothing.
                larger = self.tried(layout, changed)
                if isinstance(larger, str) or not larger.fits or larger.report.is_tight:
                    break
                found.append(larger)
        best = fastest(found)
        return best if best and is_faster(best, tried, WORTH_A_SETTING) else tried


def offloads(layout: Layout) -> bool:
    """Whether training state is kept outside of the GPU."""
    return any(getattr(layout, field, None) for field in OFFLOADS)


def lacks_bf16(plan: Plan) -> bool:
    """Whether it computes in bf16 on cards whose matrix units do not have it."""
    return plan.recipe.precision.startswith("bf16") and plan.cluster.gpu.architecture in BEFORE_AMPERE


def state_is_too_much(tried: Tried) -> bool:
    """Whether what stays on the card between two steps has no room there, whatever the batch is."""
    return sum(tried.report.at("rest").values()) > tried.report.usable_bytes


def state_bytes(bench: Bench) -> int | None:
    """Weights, gradients and optimizer of a rank that holds everything; None where there is no formula."""
    cluster = replace(bench.cluster, gpus_per_node=1, num_nodes=1)
    recipe = replace(bench.recipe, global_batch_size=bench.recipe.micro_batch_size)
    alone = Bench(bench.architecture, cluster, recipe).tried(Layout.ddp(), recipe)
    if isinstance(alone, str):
        return None
    instants = [components for _, _, components in alone.report.timeline]
    return sum(max(each[name] for each in instants) for name in ("parameters", "gradients", "optimizer"))


def _powers_of_two(size: int, global_batch_size: int) -> Iterator[int]:
    """Micro-batches from ``size`` on, each twice as large."""
    while size <= min(LARGEST_MICRO_BATCH, global_batch_size):
        yield size
        size *= 2


def _fastest_way(runs: list[Tried]) -> Tried | None:
    """The fastest; one that moves activations to the host only where that pays, or alone fits well."""
    moved = fastest(run for run in runs if run.moves_activations)
    kept = fastest(run for run in runs if not run.moves_activations)
    if moved is None or kept is None:
        return moved or kept
    is_looser = kept.report.is_tight and not moved.report.is_tight and not is_faster(kept, moved, SAFE)
    return moved if is_looser or is_faster(moved, kept) else kept


RECOMPUTED: tuple[Recompute, ...] = ("none", "selective", "full")
"""How much is computed again in backward, the least first; offloaded activations are another matter."""


def _more_recomputed(recipe: Recipe, layout: Layout, moves: bool) -> Iterator[Recompute]:
    yield recipe.recompute
    if recipe.recompute in RECOMPUTED:
        more = RECOMPUTED[RECOMPUTED.index(recipe.recompute) + 1 :]
        yield from _recomputed(layout, (*more, "offload") if moves else more)


def _other_recomputed(recipe: Recipe, layout: Layout) -> Iterator[Recompute]:
    """As it is, then every other that keeps activations on the GPU."""
    yield recipe.recompute
    if recipe.recompute in RECOMPUTED:
        yield from _recomputed(layout, (value for value in RECOMPUTED if value != recipe.recompute))


def _is_less(again: Recompute, than: Recompute) -> bool:
    return than in RECOMPUTED and RECOMPUTED.index(again) < RECOMPUTED.index(than)


def _recomputed(layout: Layout, values: Iterable[Recompute]) -> Iterator[Recompute]:
    return (value for value in values if value in supported(layout, "recompute"))


def _losses(recipe: Recipe, layout: Layout) -> Iterator[Loss | None]:
    yield recipe.loss
    if recipe.loss is None and recipe.kernels is None and "chunked" in supported(layout, "loss"):
        yield "chunked"


def fastest(runs: Iterable[Tried]) -> Tried | None:
    """Of those that fit the fastest; one that is not tight comes first unless that costs too much.

    Where times are not known, the first; None where none fits.
    """
    fitting = [tried for tried in runs if tried.fits]
    if not fitting:
        return None
    easy = [tried for tried in fitting if not tried.report.is_tight]
    first = min(fitting, key=_known_seconds)
    if not easy:
        return first
    first_easy = min(easy, key=_known_seconds)
    return first if is_faster(first, first_easy, SAFE) else first_easy


def _known_seconds(tried: Tried) -> float:
    return float("inf") if tried.seconds is None else tried.seconds


def is_faster(tried: Tried, other: Tried, times: float = PAYS) -> bool:
    """Whether ``tried`` is predicted to be that many times faster; False where a time is not known."""
    if tried.seconds is None or other.seconds is None:
        return False
    return tried.seconds * times < other.seconds
