"""FSDP2 layouts that a search evaluates."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Literal

from shardscope.core.layout import Degrees, check_context, check_heads, check_layers, list_divisors
from shardscope.frameworks.fsdp2.layout import Fsdp2Layout
from shardscope.frameworks.search_grid import (
    SEQUENCES_AT_ONCE,
    Grid,
    combine_degrees,
    filter_rows,
    filter_valid,
)

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.cluster import Cluster
    from shardscope.core.recipe import Recipe


def build_grids(arch: Architecture, cluster: Cluster, recipe: Recipe) -> list[Grid]:
    """Return the grids of all valid layouts for ``cluster``.

    The degrees tp, pp, cp and replicate are divisors of the number of GPUs, vpp is a power of two. There is
    one grid for each ``reshard_after_forward`` and, on GPUs, for each ``offload``.
    """
    ranks, plain = list_divisors(cluster.num_gpus), Fsdp2Layout()
    chunks = [1 << power for power in range(arch.num_hidden_layers.bit_length())]
    pipelines = [(pp, vpp) for pp in ranks for vpp in (chunks if pp > 1 else (1,))]
    columns = combine_degrees(
        cluster,
        recipe,
        {
            ("tp",): filter_valid(lambda tp: check_heads(arch, tp), ranks),
            ("cp",): filter_valid(lambda cp: check_context(recipe, cp), ranks),
            ("pp", "vpp"): filter_valid(lambda sizes: check_layers(arch, *sizes), pipelines),
            ("replicate",): ranks,
        },
    )
    # The schedule depends on the number of micro-batches only: check it with one sequence in each.
    single = replace(recipe, micro_batch_size=1)
    columns = filter_rows(
        columns,
        ("pp", "vpp", SEQUENCES_AT_ONCE),
        lambda row: plain.check_schedule(
            single, Degrees(data_parallel=row[SEQUENCES_AT_ONCE], pp=row["pp"], vpp=row["vpp"])
        ),
    )
    offload_targets: tuple[Literal["cpu"] | None, ...] = (
        (None, "cpu") if cluster.gpu.vendor != "cpu" else (None,)
    )
    return [
        Grid(layout=Fsdp2Layout(reshard_after_forward=reshard, offload=offload), columns=columns)
        for reshard, offload in product((True, False), offload_targets)
    ]
