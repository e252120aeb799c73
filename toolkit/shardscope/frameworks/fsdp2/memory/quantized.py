"""Memory of an NF4 base under ``fully_shard``: bitsandbytes' packed weights are sharded like any tensor.

They are stored in the group's compute type (``bnb_4bit_quant_storage``, which accelerate requires for sharded
weights: 1.15, ``utils/fsdp_utils.py``), so they are all-gathered without a cast, unlike fp32 adapters
(``FSDPParam.init_dtype_attrs``). One stored element of two bytes packs four weights, one of four bytes eight;
the packed tensor has one column. The scales are not parameters: every rank keeps them unsharded.
``fully_shard`` replaces a quantized Linear's weight by a plain parameter, which bitsandbytes converts back to
a ``Params4bit`` (``fix_4bit_weight_quant_state_from_module`` in ``nn/modules.py``); for int8 it does not.
Measured on two CPU ranks in ``tests/runs/test_fsdp2_nf4.py``.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING

from shardscope.core.errors import refuse
from shardscope.core.ops import ceil_div, map_distinct
from shardscope.core.precision import widths
from shardscope.families.parameter_shapes import find_first_layer
from shardscope.memory.state.quantization import check_kernels, compute_nf4_bytes
from shardscope.memory.state.stages import count_layers_by_kind, list_rank_shapes

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.plan import Plan
    from shardscope.core.recipe import Recipe
    from shardscope.frameworks.fsdp2.layout import Fsdp2Layout
    from shardscope.memory.state.stages import Stage


@lru_cache(maxsize=1024)
def _list_linears(arch: Architecture, moe: bool) -> tuple[tuple[int, int], ...]:
    """Return (rows, columns) of every quantized matrix of one layer."""
    # bitsandbytes replaces Linears: norms, routed experts (stacked parameters) and routers stay as they are.
    targets = {target for target, _ in arch.layer_linears(find_first_layer(arch, moe))}
    return tuple(
        (shape.rows, shape.columns)
        for shape in list_rank_shapes(arch, moe, 1, 1)
        if shape.columns > 1 and shape.group != "experts" and shape.name.split(".")[-2] in targets
    )


@lru_cache(maxsize=4096)
def count_saved_elements(arch: Architecture, moe: bool, width: int, ranks: int) -> int:
    """Return by how many stored elements quantization shrinks one rank's shard of one layer, with padding.

    ``width`` is the size of a stored element in bytes; each byte packs two weights.
    """
    # Unquantized, a matrix is sharded by rows; quantized, it is one column of packed elements.
    return sum(
        ceil_div(rows, ranks) * columns - ceil_div((rows * columns + 1) // (2 * width), ranks)
        for rows, columns in _list_linears(arch, moe)
    )


def count_base_shard(plan: Plan, stage: Stage, ranks: int) -> int:
    """Return the stored elements of the base model on the fullest of ``ranks`` ranks of a stage.

    All-gathers have as many from every rank. Without adapters the base is what trains.
    """
    if plan.recipe.base_quantization is None:
        return stage.shard
    width, saved = widths[plan.recipe.precision].compute, 0
    for moe, num_layers in count_layers_by_kind(plan.architecture, stage):
        count_saved = partial(count_saved_elements, plan.architecture, moe, width)
        saved = saved + num_layers * map_distinct(count_saved, ranks)
    return stage.shard - saved


def compute_scales(plan: Plan, stage: Stage) -> int:
    """Return the bytes of a stage's quantization scales, which are unsharded on every rank."""
    is_double, scales = plan.recipe.method == "qlora", 0
    for moe, num_layers in count_layers_by_kind(plan.architecture, stage):
        numels = [rows * columns for rows, columns in _list_linears(plan.architecture, moe)]
        # All of a quantized tensor's bytes but the packed weights, two in a byte.
        in_layer = sum(compute_nf4_bytes(numel, is_double) - ceil_div(numel, 2) for numel in numels)
        scales = scales + num_layers * in_layer
    return scales


def check_quantized(recipe: Recipe, layout: Fsdp2Layout) -> None:
    """Raise ``ValueError`` for options whose memory with a quantized base was never measured.

    They are unsupported kernels, tp > 1 and offloading to the host.
    """
    if recipe.base_quantization is None:
        return
    check_kernels(recipe)
    for field, plain in (("tp", 1), ("offload", None)):
        value = getattr(layout, field)
        if value != plain:
            refuse(f"Layout.{field}", value, f"{plain} over a base in NF4", {field: plain})
