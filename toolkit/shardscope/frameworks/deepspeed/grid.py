"""DeepSpeed ZeRO layouts that a search evaluates."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from shardscope.core.layout import check_experts, check_heads, check_layers, list_divisors
from shardscope.frameworks.deepspeed.layout import ZeroLayout
from shardscope.frameworks.grid import (
    DATA_PARALLEL,
    Columns,
    Grid,
    Row,
    combine_degrees,
    filter_rows,
    filter_valid,
    is_valid,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardscope.core.architecture import Architecture
    from shardscope.core.cluster import Cluster
    from shardscope.core.recipe import Recipe


def build_grids(arch: Architecture, cluster: Cluster, recipe: Recipe) -> list[Grid]:
    """Return the grids of every ZeRO stage and offload target, with all tp, pp and ep that they support.

    Buckets and thresholds keep DeepSpeed's defaults; NVMe is included if the cluster has an NVMe bandwidth.
    """
    columns = _columns(arch, cluster, recipe)
    found = []
    for layout in _options(cluster):

        def check_fields(row: Row, layout: ZeroLayout = layout) -> None:
            replace(layout, tp=row["tp"], pp=row["pp"], ep=row["ep"])

        found.append(
            Grid(
                layout=layout,
                columns=filter_rows(columns, ("tp", "pp", "ep"), check_fields),
                check=lambda layout, recipe: layout.compute_degrees(arch, cluster, recipe),
            )
        )
    return found


def _options(cluster: Cluster) -> Iterator[ZeroLayout]:
    places: list[Any] = [None]
    if cluster.gpu.vendor != "cpu":
        places.append("cpu")
    if cluster.nvme_bandwidth_bytes_per_second is not None:
        places.append("nvme")
    for stage, optimizer, params in product(range(4), places, places):
        options = {"stage": stage, "offload_optimizer": optimizer, "offload_params": params}
        if is_valid(lambda options: ZeroLayout(**options), options):
            yield ZeroLayout(**options)


def _columns(arch: Architecture, cluster: Cluster, recipe: Recipe) -> Columns:
    ranks = list_divisors(cluster.num_gpus)

    def check_tp(tp: int) -> None:
        check_heads(arch, tp)
        ZeroLayout(stage=0, tp=tp).check_auto_tp(arch, recipe)

    found = combine_degrees(
        cluster,
        recipe,
        {
            ("tp",): filter_valid(check_tp, ranks),
            ("pp",): filter_valid(lambda pp: check_layers(arch, pp), ranks),
            ("ep",): filter_valid(lambda ep: check_experts(arch, ep, ep), ranks),
        },
        within_data_parallel=("ep",),
    )
    return filter_rows(
        found, ("ep", DATA_PARALLEL), lambda row: check_experts(arch, row["ep"], row[DATA_PARALLEL])
    )
