"""Required memory of many plans: the computation of ``planner/memory_needs.py``, over arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardscope.core.layout import Degrees
from shardscope.core.ops import map_distinct
from shardscope.core.plan import Plan
from shardscope.frameworks.registry import frameworks
from shardscope.memory.activations.forward import find_modules
from shardscope.planner.memory_needs import WHILE_BUILT
from shardscope.prediction.batch.memory import OffloadedBytes, StageBytes, compute_offloaded_bytes
from shardscope.prediction.batch.object_batch import build_batch
from shardscope.prediction.batch.table import Table

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardscope.core.cluster import Cluster
    from shardscope.core.layout import Layout
    from shardscope.core.recipe import Recipe


class Needs(NamedTuple):
    """Required bytes of each plan, shape ``(num_plans,)``: GPU memory of the worst rank, others of the node
    that needs most."""

    peak: NDArray[np.int64]
    host: NDArray[np.int64]
    nvme: NDArray[np.int64]
    building: NDArray[np.int64]
    """Host memory while the model is built."""

    def compute_lacks(self, rooms: Mapping[str, int]) -> dict[str, NDArray[np.int64]]:
        """Return the missing bytes of each kind of memory in ``rooms``; 0 or less: none."""
        needed = {
            "GPU memory": self.peak,
            "host memory": self.host,
            "NVMe": self.nvme,
            WHILE_BUILT: self.building,
        }
        return {name: needed[name] - room for name, room in rooms.items()}


def list_rooms(cluster: Cluster, headroom_bytes: int) -> dict[str, int]:
    """Return the available bytes of each kind of memory of known size.

    ``headroom_bytes`` of each GPU stay free.
    """
    sizes = {
        "GPU memory": cluster.usable_bytes_per_gpu - headroom_bytes,
        "host memory": cluster.host_memory_bytes,
        "NVMe": cluster.nvme_bytes,
        WHILE_BUILT: cluster.host_memory_bytes,
    }
    return {name: room for name, room in sizes.items() if room is not None}


def find_fitting(lacks: Mapping[str, NDArray[np.int64]]) -> NDArray[np.bool_]:
    """Return the mask of the plans that lack nothing, shape ``(num_plans,)``.

    Memory of unknown size, which ``lacks`` does not have, cannot be short.
    """
    fitting: NDArray[np.bool_] = np.logical_and.reduce([short <= 0 for short in lacks.values()])
    return fitting


def compute_needs(
    table: Table,
    cluster: Cluster,
    recipe: Recipe,
    layout: Layout,
    stage_bytes: StageBytes,
    building: NDArray[np.int64],
) -> Needs:
    """Return the needs of the plans of ``table``, from the bytes of the ranks of its stages."""
    # GPU memory: the worst stage of each plan.
    peak = table.find_largest(table.rows.expand(stage_bytes.peak, np.int64))
    if not (recipe.recompute == "offload" and _shares_nodes(table, cluster)):
        return _build_needs(table, cluster, recipe, stage_bytes.offloaded, peak, building)
    # The number of micro-batches in flight depends on the stage, and a node has several stages.
    table = table.of_every_stage
    plans = table.build_plans(cluster, recipe, layout)
    offloaded = compute_offloaded_bytes(plans, find_modules(plans), table.count_weights(plans, layout))
    return _build_needs(table, cluster, recipe, offloaded, peak, building)


def _build_needs(
    table: Table,
    cluster: Cluster,
    recipe: Recipe,
    offloaded: OffloadedBytes,
    peak: NDArray[np.int64],
    building: NDArray[np.int64],
) -> Needs:
    """Return the needs of each plan, given the peak of its worst rank and the bytes of its stages' ranks."""
    nvme = (
        _sum_over_node(table, cluster, table.rows.expand(offloaded.nvme, np.int64))
        if _is_some(offloaded.nvme)
        else None
    )
    nothing = np.zeros(table.num_plans, np.int64)
    if not _is_some(offloaded.host):
        return Needs(peak, nothing, nothing if nvme is None else nvme, building)
    host = table.rows.expand(offloaded.host, np.int64)
    if recipe.optimizer.startswith("paged"):
        # Only the pages of managed memory that do not fit on the GPU are in host memory.
        paged = table.find_largest(table.rows.expand(offloaded.host_state, np.int64))
        evicted = np.maximum(0, np.minimum(paged, peak + paged - cluster.usable_bytes_per_gpu))
        host = np.maximum(0, host - (paged - evicted)[table.owners])
    # CPU ranks: what the reports call GPU memory is host memory too, if the plan needs any beside it.
    if cluster.gpu.memory_is_shared:
        uses = table.find_largest(host) > 0
        host = host + (uses * peak)[table.owners]
    return Needs(peak, _sum_over_node(table, cluster, host), nothing if nvme is None else nvme, building)


def _is_some(num_bytes: NDArray[np.int64] | int) -> bool:
    return not isinstance(num_bytes, int) or num_bytes > 0


def _shares_nodes(table: Table, cluster: Cluster) -> bool:
    """Return whether a node has ranks of several stages."""
    sizes = (cluster.num_gpus // len(shapes.kind_of) for shapes in table.pipelines)
    return any(size % cluster.gpus_per_node for size in sizes)


def _sum_over_node(table: Table, cluster: Cluster, by_row: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bytes on the fullest node. Pipeline stages are the outermost degree, so that consecutive
    ranks share a node."""
    per_node = cluster.gpus_per_node
    # Start with the case that all ranks of a node are of the largest stage; correct pipelines below.
    node_bytes: NDArray[np.int64] = table.find_largest(by_row) * per_node
    if not node_bytes.any():
        return node_bytes
    for number, shapes in enumerate(table.pipelines):
        per_stage = cluster.num_gpus // len(shapes.kind_of)
        if per_stage % per_node == 0:
            continue
        plans = np.flatnonzero(table.pipeline_of == number)
        # Sums over consecutive ranks are differences of the cumulative sum, for all nodes and plans at once.
        stages = by_row[table.find_stage_rows(plans, shapes.kind_of)]
        sums = np.cumsum(np.repeat(stages, per_stage, axis=1), axis=1)
        firsts = np.arange(0, cluster.num_gpus, per_node)
        lasts = np.minimum(firsts + per_node, cluster.num_gpus) - 1
        before = np.where(firsts > 0, sums[:, firsts - 1], 0)
        node_bytes[plans] = (sums[:, lasts] - before).max(axis=1)
    return node_bytes


def compute_building_bytes(
    table: Table, cluster: Cluster, recipe: Recipe, layout: Layout
) -> NDArray[np.int64]:
    """Return the host memory of a node while all its ranks build or load the model, shape
    ``(num_plans,)``."""
    host_bytes = table.host_memory.get(layout)
    if host_bytes is None:
        host_bytes = table.host_memory[layout] = _compute_building_bytes(table, cluster, recipe, layout)
    return host_bytes


def _compute_building_bytes(
    table: Table, cluster: Cluster, recipe: Recipe, layout: Layout
) -> NDArray[np.int64]:
    model = frameworks[layout.framework].building_model()
    # Building depends only on the degrees that split the model, so evaluate distinct combinations once.
    names = [name for name in ("tp", "pp", "ep") if name in table.columns]

    def compute_host_bytes(*numbers: int) -> int:
        degrees = dict(zip(names, numbers, strict=False))
        spread = Degrees(data_parallel=1, **degrees)
        plan = build_batch(
            Plan,
            None,
            architecture=table.architecture,
            cluster=cluster,
            recipe=recipe,
            layout=build_batch(type(layout), layout, **degrees),
            degrees=spread,
            stage_layers=tuple(layout.stage_layers(table.architecture, spread)),
        )
        return model.compute_host_memory(plan).num_bytes

    on_a_rank = (
        map_distinct(compute_host_bytes, *(table.get_number(name) for name in names))
        if names
        else compute_host_bytes()
    )
    on_a_node = table.rows.expand(on_a_rank, np.int64) * cluster.gpus_per_node
    return table.order_by_plan(table.split_by_position(on_a_node)[0])
