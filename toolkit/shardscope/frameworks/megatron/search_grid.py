"""Search grid of Megatron-core layouts."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from shardscope.core.layout import Degrees, check_context, check_experts, check_heads, list_divisors
from shardscope.frameworks.megatron.families import check_family
from shardscope.frameworks.megatron.layout import MegatronLayout
from shardscope.frameworks.megatron.pipeline_split import can_split_pipeline
from shardscope.frameworks.search_grid import (
    DATA_PARALLEL,
    MICRO_BATCH_SIZE,
    SEQUENCES_AT_ONCE,
    Columns,
    Grid,
    combine_degrees,
    filter_rows,
    filter_valid,
    select_rows,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from shardscope.core.architecture import Architecture
    from shardscope.core.cluster import Cluster
    from shardscope.core.recipe import Recipe


def build_grids(arch: Architecture, cluster: Cluster, recipe: Recipe) -> list[Grid]:
    """Return the grids of all valid tp, pp, cp and ep, with every vpp that splits the layers.

    There is one grid for each combination of sequence parallelism, distributed optimizer, and experts sharded
    by tp or not. Dtypes of gradients and moments keep their defaults. A rank without replicas shards nothing:
    its plans have the distributed optimizer, the default, and are not listed a second time without it.
    """
    check_family(arch)
    # The columns of degrees are the same for all grids; each filters them by its own options.
    every = _combine_degrees(arch, cluster, recipe)
    grids = []
    for sequence, expert_tp in product((None, False), (None, 1)):
        if expert_tp is not None and not arch.num_moe_layers:
            continue
        layout = MegatronLayout(sequence_parallel=sequence, etp=expert_tp)
        # With tp 1 these options equal their default, None.
        is_default = sequence is None and expert_tp is None
        columns = _filter_for_layout(
            arch, cluster, recipe, layout, every if is_default else select_rows(every, every["tp"] > 1)
        )
        plain = replace(layout, distributed_optimizer=False)
        # Only AdamW has a distributed optimizer.
        if recipe.optimizer != "adamw":
            grids.append(Grid(layout=plain, columns=columns))
            continue
        has_replicas = _find_replicas(layout, columns)
        # The two halves are shared by the grids, so that no plan's results are computed twice.
        for selected, layouts in ((has_replicas, (layout, plain)), (~has_replicas, (layout,))):
            rows = select_rows(columns, selected)
            grids += [Grid(layout=each, columns=rows) for each in layouts]
    return grids


def _find_replicas(layout: MegatronLayout, columns: Columns) -> NDArray[np.bool_]:
    """Return for each row whether any weights, dense or of experts, are replicated (``count_replicas``)."""
    dense, expert_tp = columns[DATA_PARALLEL] * columns["cp"], layout.etp or columns["tp"]
    experts = dense * columns["tp"] // (columns["ep"] * expert_tp)
    return (dense > 1) | ((columns["ep"] > 1) & (experts > 1))


def _combine_degrees(arch: Architecture, cluster: Cluster, recipe: Recipe) -> Columns:
    """Return the columns that do not depend on how sequences and experts are sharded."""
    # Embedding and loss may count as a layer each, so a chunk has at least one of ``layers + 2``.
    ranks, layers = list_divisors(cluster.num_gpus), arch.num_hidden_layers

    def check_cp(cp: int) -> None:
        check_context(recipe, cp)
        MegatronLayout(cp=cp).check_attention(cluster, recipe)

    pipelines = [
        (pp, vpp)
        for pp in ranks
        for vpp in range(1, (layers + 2) // pp + 1 if pp > 1 else 2)
        if pp == 1 or can_split_pipeline(layers, pp, vpp)
    ]
    columns = combine_degrees(
        cluster,
        recipe,
        {
            ("tp",): filter_valid(lambda tp: check_heads(arch, tp, True), ranks),
            ("cp",): filter_valid(check_cp, ranks),
            ("pp", "vpp"): pipelines,
            ("ep",): filter_valid(lambda ep: check_experts(arch, ep, ep), ranks),
        },
        within_data_parallel=("ep",),
    )
    # The interleaved schedule needs a multiple of pp micro-batches. Their number depends on the sequences per
    # micro-batch over all ranks only, so one check serves all rows that have the same.
    plain, single = MegatronLayout(), replace(recipe, micro_batch_size=1)
    return filter_rows(
        columns,
        ("pp", "vpp", SEQUENCES_AT_ONCE),
        lambda row: plain.check_micro_batches(
            single, Degrees(data_parallel=row[SEQUENCES_AT_ONCE], pp=row["pp"], vpp=row["vpp"])
        ),
    )


def _filter_for_layout(
    arch: Architecture, cluster: Cluster, recipe: Recipe, layout: MegatronLayout, columns: Columns
) -> Columns:
    """Return the rows that are valid with the options of ``layout``: sequence, fp8 shapes, experts."""
    columns = filter_rows(
        columns,
        ("tp", "cp"),
        lambda row: replace(layout, tp=row["tp"], cp=row["cp"]).check_sequence(arch, recipe),
    )
    if recipe.precision == "fp8-mixed":
        columns = filter_rows(
            columns,
            ("tp", "cp", MICRO_BATCH_SIZE),
            lambda row: replace(layout, tp=row["tp"], cp=row["cp"]).check_fp8(
                arch, cluster, replace(recipe, micro_batch_size=row[MICRO_BATCH_SIZE])
            ),
        )
    # Experts are sharded over the data-, context- and tensor-parallel ranks that etp leaves.
    return filter_rows(
        columns,
        ("ep", DATA_PARALLEL, "cp", "tp"),
        lambda row: check_experts(
            arch,
            row["ep"],
            row[DATA_PARALLEL] * row["cp"] * row["tp"] // (layout.etp or row["tp"]),
        ),
    )
