"""DeepSpeed ZeRO layouts that a search evaluates."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from shardscope.core.layout import OptionValue, check_experts, check_heads, check_layers, list_divisors
from shardscope.core.serialization import replace_fields
from shardscope.frameworks.deepspeed.layout import ZeroLayout
from shardscope.frameworks.search_grid import (
    DATA_PARALLEL,
    Columns,
    DegreeFilter,
    Grid,
    combine_degrees,
    filter_rows,
    filter_valid,
    is_valid,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardscope.core.architecture import Architecture
    from shardscope.core.cluster import Cluster
    from shardscope.core.recipe import Recipe


def build_grids(arch: Architecture, cluster: Cluster, recipe: Recipe) -> list[Grid]:
    """Return the grids of every ZeRO stage and offload target, with all tp, pp and ep that they support.

    Buckets and thresholds keep DeepSpeed's defaults; NVMe is included if the cluster has an NVMe bandwidth.
    """
    columns, degree_filter = _build_columns(arch, cluster, recipe), DegreeFilter()
    return [
        Grid(
            layout=layout,
            # A layout is valid or not whatever the size of its degrees above 1.
            columns=degree_filter.select(columns, partial(replace_fields, layout)),
            check=lambda layout, recipe: layout.compute_degrees(arch, cluster, recipe),
        )
        for layout in _list_layouts(cluster)
    ]


def _list_layouts(cluster: Cluster) -> Iterator[ZeroLayout]:
    """Yield the valid combinations of a ZeRO stage and offload targets."""
    targets: list[OptionValue] = [None]
    # CPU ranks share the host's memory, so offloading to it saves none.
    if cluster.gpu.vendor != "cpu":
        targets.append("cpu")
    if cluster.nvme_bandwidth_bytes_per_second is not None:
        targets.append("nvme")
    for stage, optimizer, params in product(range(4), targets, targets):
        options = {"stage": stage, "offload_optimizer": optimizer, "offload_params": params}
        if is_valid(_create_layout, options):
            yield _create_layout(options)


def _create_layout(options: Mapping[str, OptionValue]) -> ZeroLayout:
    return replace_fields(ZeroLayout(), options)


def _build_columns(arch: Architecture, cluster: Cluster, recipe: Recipe) -> Columns:
    """Return the valid combinations of degrees and micro-batch sizes."""
    ranks = list_divisors(cluster.num_gpus)

    def check_tp(tp: int) -> None:
        check_heads(arch, tp)
        # Stage 0, because the default, 3, has no tensor parallelism; AutoTP's own limits depend on no stage.
        ZeroLayout(stage=0, tp=tp).check_auto_tp(arch, recipe)

    columns = combine_degrees(
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
        columns, ("ep", DATA_PARALLEL), lambda row: check_experts(arch, row["ep"], row[DATA_PARALLEL])
    )
