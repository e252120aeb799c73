"""``ss.search``: every layout, micro-batch and recomputation of every framework, evaluated and ranked."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from shardscope.core.architecture import Architecture
from shardscope.core.cluster import Cluster
from shardscope.core.errors import FieldError, check_choice, check_integer, find_nearest, refuse
from shardscope.core.plan import Plan, check_type
from shardscope.core.recipe import Recipe
from shardscope.frameworks.registry import frameworks as known
from shardscope.frameworks.registry import list_layout_names
from shardscope.memory.activations.forward import find_modules
from shardscope.planner.search.candidates import Candidates, group_by_part, list_candidates
from shardscope.planner.search.memory_needs import (
    Needs,
    compute_building_bytes,
    compute_needs,
    find_fitting,
    list_rooms,
)
from shardscope.planner.search.ranking import Ranking, concatenate_needs
from shardscope.planner.search.step_times import compute_step_times
from shardscope.prediction.batch.memory import compute_stage_bytes
from shardscope.prediction.batch.table import Table
from shardscope.prediction.support import check_sequence, check_targets
from shardscope.timing.calibration.selection import select_rates
from shardscope.timing.layers import PEAKS
from shardscope.timing.rates import check_links

if TYPE_CHECKING:
    from numpy.typing import NDArray


Progress = Callable[[str, float], object]
"""A function called with a message and a fraction; an exception that it raises ends the search."""


def search(
    arch: Architecture,
    cluster: Cluster,
    recipe: Recipe,
    frameworks: Sequence[str] | None = None,
    progress: Progress | None = None,
    *,
    headroom_bytes: int = 0,
) -> Ranking:
    """Evaluate all plans of the grid below, and rank them by predicted tokens per second.

    Within 1 % of the fastest the simplest plan is first, and plans that need host memory or NVMe of unknown
    size are last: :class:`Ranking`.

    The grid covers each framework in ``frameworks`` (None: all), over all GPUs of ``cluster``, with the
    global batch of ``recipe``: every degree that divides the GPUs and the dimension that it shards (tensor,
    pipeline, context and expert parallel, replicas of a sharded state), chunks of a pipeline stage
    (Megatron-core: all that divide evenly; FSDP2: powers of two), micro-batches of 1, 2, 4, ... sequences
    that divide the batch, and the recipe's own; no, selective or full recomputation or offloaded activations,
    as the framework supports them, at the recipe's interval. Options of each framework:
    ``reshard_after_forward`` True and False and state in host memory (FSDP2); stages 0 to 3 and the offload
    of optimizer and parameters (DeepSpeed ZeRO; NVMe if the cluster has its speed); sequence parallelism, the
    distributed optimizer and experts with or without tensor parallelism (Megatron-core). Everything else is
    the recipe's, or the framework's default; ``plan.findings()`` reports if one of these is worth changing.
    Invalid plans are left out.

    A plan counts as feasible if ``headroom_bytes`` of each GPU stay free. The memory of all plans is
    computed, and the step of feasible ones; that of others when it is read (:attr:`Ranking.step_seconds`).

    ``progress(message, fraction)`` is called repeatedly and may end the search by raising; the search of
    another recipe starts again from 0. If no layout divides the global batch, ``Ranking.alternative`` is the
    same search with the nearest batch that divides evenly over the GPUs; if no plan fits, with the chunked
    loss, which the grid has only if the recipe requests it. Raises ``ValueError`` for arguments of a wrong
    type, for an unknown figure of the GPU, and for a recipe that no framework could run.
    """
    start = time.perf_counter()
    # 1. Check arguments and figures before the grid is built, which takes seconds for thousands of GPUs.
    names = _check_arguments(arch, cluster, recipe, frameworks, headroom_bytes)
    with _pause_garbage_collection():
        # 2. List the candidates of every framework.
        candidates, refused = _list_all_candidates(names, arch, cluster, recipe, progress)
        # 3. Evaluate and rank them.
        ranking = rank_candidates(
            arch,
            cluster,
            recipe,
            candidates,
            refused=refused,
            headroom_bytes=headroom_bytes,
            progress=progress,
            start=start,
        )
    # 4. If nothing fits, search once more with the nearest recipe that may.
    other = None if ranking.num_feasible else _find_other_recipe(recipe, cluster, is_uneven=not candidates)
    # Without formulas no other recipe has any.
    if other is None or (candidates and not ranking.num_evaluated):
        return ranking

    # In a field of its own: the result of the requested recipe is not replaced.
    def report(message: str, fraction: float) -> None:
        _report_progress(progress, f"Another recipe: {message}", fraction)

    alternative = search(arch, cluster, other, names, report, headroom_bytes=headroom_bytes)
    return replace(ranking, alternative=alternative)


@contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Pause Python's cyclic garbage collector, also if the search ends with an exception.

    A search creates some 100,000 objects, nearly all of which its caches free without it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _check_arguments(
    arch: Architecture,
    cluster: Cluster,
    recipe: Recipe,
    frameworks: Sequence[str] | None,
    headroom_bytes: int,
) -> list[str]:
    """Return the names of the frameworks. Raise ``ValueError`` for arguments that no plan can have."""
    for field, noun, kind in (
        ("arch", arch, Architecture),
        ("cluster", cluster, Cluster),
        ("recipe", recipe, Recipe),
    ):
        check_type(field, noun, kind)
    check_integer("headroom_bytes", headroom_bytes, low=0, high=2**50)
    names = _check_frameworks(frameworks)
    check_targets(arch, recipe)
    check_sequence(arch, recipe)
    check_figures(cluster, recipe)
    return names


def check_figures(cluster: Cluster, recipe: Recipe) -> None:
    """Raise ``ValueError`` if no step can be predicted: a figure of the GPU or of a link is not known."""
    rates = select_rates(cluster)
    rates.get_matmul_rate(PEAKS[recipe.precision])
    rates.get_memory_bandwidth()
    check_links(cluster, rates)


def _list_all_candidates(
    names: list[str], arch: Architecture, cluster: Cluster, recipe: Recipe, progress: Progress | None
) -> tuple[list[Candidates], dict[str, str]]:
    """Return the candidates of every framework, and why a framework has none, by its name."""
    candidates: list[Candidates] = []
    refused: dict[str, str] = {}
    for name in names:
        _report_progress(progress, f"The grid of {known[name].title}", 0.0)
        try:
            offered = list(list_candidates(name, arch, cluster, recipe))
        except FieldError as refusal:
            refused[name] = str(refusal)
            continue
        if not offered:
            refused[name] = _explain_no_candidates(name, arch, cluster, recipe)
        candidates += offered
    return candidates, refused


def rank_candidates(
    arch: Architecture,
    cluster: Cluster,
    recipe: Recipe,
    candidates: list[Candidates],
    *,
    refused: dict[str, str] | None = None,
    headroom_bytes: int = 0,
    progress: Progress | None = None,
    start: float | None = None,
) -> Ranking:
    """Evaluate and rank ``candidates``; ``refused`` has the frameworks without candidates, and the reasons.

    ``start`` is when the search began, by ``time.perf_counter()``.
    """
    start = time.perf_counter() if start is None else start
    refused = {} if refused is None else refused
    total, done = sum(one.num_plans for one in candidates), 0
    rooms = list_rooms(cluster, headroom_bytes)
    memory: dict[int, Needs] = {}
    step_seconds: dict[int, NDArray[np.float64]] = {}
    for indices in group_by_part(candidates):
        table, name = Table(candidates[indices[0]].part), candidates[indices[0]].layout.framework
        # 1. The memory of all plans.
        for _, with_equal in groupby(indices, key=lambda index: candidates[index].recipe.recompute):
            for index in with_equal:
                done += candidates[index].num_plans
                try:
                    memory[index] = compute_needs_of_candidates(table, candidates[index], cluster)
                except FieldError as refusal:
                    # A Plan can be created, but there are no formulas for it.
                    refused[name] = str(refusal)
                    continue
                _report_progress(progress, f"{done:,} of {total:,} plans, {known[name].title}", done / total)
            # What does not depend on recomputation was used, and stays.
            table.drop_unused_results()
        table.clear_results()
        # 2. The step of those that fit: on thousands of GPUs most plans do not.
        group = [index for index in indices if index in memory]
        if not group:
            continue
        fitting = [find_fitting(memory[index].compute_lacks(rooms)) for index in group]
        every_plan = table if np.logical_or.reduce(fitting).all() else None
        del table  # freed before the smaller one of the fitting plans is created
        try:
            computed = compute_step_times(
                [candidates[index] for index in group], fitting, cluster, every_plan
            )
        except FieldError as refusal:
            refused[name] = str(refusal)
            continue
        step_seconds.update(zip(group, computed, strict=True))
    # Back in the order of the candidates, so that the ranking does not depend on the grouping.
    evaluated = sorted(step_seconds)
    needs = [memory[index] for index in evaluated]
    seconds = [step_seconds[index] for index in evaluated]
    evaluated_names = {candidates[index].layout.framework for index in evaluated}
    return Ranking(
        architecture=arch,
        cluster=cluster,
        recipe=recipe,
        peak_bytes=concatenate_needs(needs, "peak"),
        host_bytes=concatenate_needs(needs, "host"),
        nvme_bytes=concatenate_needs(needs, "nvme"),
        building_bytes=concatenate_needs(needs, "building"),
        known_step_seconds=np.concatenate(seconds) if seconds else np.zeros(0),
        headroom_wanted_bytes=headroom_bytes,
        refused={name: why for name, why in refused.items() if name not in evaluated_names},
        candidates=tuple(candidates[index] for index in evaluated),
        seconds=time.perf_counter() - start,
    )


def _find_other_recipe(recipe: Recipe, cluster: Cluster, is_uneven: bool) -> Recipe | None:
    """Return the nearest recipe that may have plans if this one has none; None if there is no such recipe."""
    if not is_uneven:
        # The grid has the recipe's loss. The chunked loss has the same loss curve, without whole logits.
        may_be_cut = recipe.loss is None and recipe.kernels is None
        return replace(recipe, loss="chunked") if may_be_cut else None
    # Without candidates the batch does not divide: take the nearest multiple of the GPUs. The grid has all
    # micro-batches that divide it.
    num_gpus = cluster.num_gpus
    if recipe.global_batch_size % num_gpus == 0:
        return None
    batch = max(1, round(recipe.global_batch_size / num_gpus)) * num_gpus
    return replace(recipe, global_batch_size=batch, micro_batch_size=min(batch, recipe.micro_batch_size))


def compute_needs_of_candidates(table: Table, candidates: Candidates, cluster: Cluster) -> Needs:
    """Return the needs of the candidates' plans, which are those of ``table``, from the formulas of one plan.

    Raises ``ValueError`` if there are no formulas for them.
    """
    recipe, layout = candidates.recipe, candidates.layout
    plans = table.build_plans(cluster, recipe, layout)
    stage_bytes = compute_stage_bytes(plans, find_modules(plans), table.count_weights(plans, layout))
    building = compute_building_bytes(table, cluster, recipe, layout)
    return compute_needs(table, cluster, recipe, layout, stage_bytes, building)


def _check_frameworks(frameworks: Sequence[str] | None) -> list[str]:
    if frameworks is None:
        return list(known)
    if isinstance(frameworks, str) or not isinstance(frameworks, Iterable) or not frameworks:
        meant = find_nearest(frameworks, list(known)) if isinstance(frameworks, str) else next(iter(known))
        refuse("frameworks", frameworks, f"names among {', '.join(known)}, or None for all", f"({meant!r},)")
    layouts = list_layout_names()
    for name in frameworks:
        # A layout may have another name than its framework.
        if isinstance(name, str) and name not in known and name in layouts:
            refuse("frameworks", name, f"names among {', '.join(known)}", repr(layouts[name]))
    return list(dict.fromkeys(check_choice("frameworks", name, list(known)) for name in frameworks))


def _explain_no_candidates(name: str, arch: Architecture, cluster: Cluster, recipe: Recipe) -> str:
    """Return the error message of the framework's default layout, if it is invalid."""
    try:
        Plan(arch, cluster, recipe, known[name].layout_class())
    except ValueError as refusal:
        return str(refusal)
    return "no layout of its grid divides these GPUs and this batch"


def _report_progress(progress: Progress | None, message: str, fraction: float) -> None:
    if progress is not None:
        progress(message, fraction)
