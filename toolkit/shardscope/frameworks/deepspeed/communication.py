"""DeepSpeed's communication options: gradient reduction type, and ZeRO++.

``communication_data_type``: DeepSpeed 0.19 casts a half-precision bucket before the reduction and rounds the
sum back once: in stage 0 ``DeepSpeedEngine.allreduce_bucket`` (deepspeed/runtime/engine.py), in stages 1 and
2 ``allreduce_bucket`` (deepspeed/runtime/zero/stage_1_and_2.py). In stage 3 the bucket itself has that type
(``_setup_for_real_optimizer``, deepspeed/runtime/zero/stage3.py), and the reduced partitions are rounded
(``__avg_scatter_grads``).

ZeRO++ (Wang et al. 2023): secondary partitions within a node, and quantized communication.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.errors import check_choice, refuse
from shardscope.core.precision import FP32, widths

if TYPE_CHECKING:
    from shardscope.core.recipe import Recipe
    from shardscope.frameworks.deepspeed.layout import ZeroLayout

_FIELD = "Layout.communication_data_type"
QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
_NOT_COUNTED = "to be predicted: no formula counts the buffers into which DeepSpeed's kernels quantize"


def check_communication(layout: ZeroLayout) -> None:
    """Raise ``ValueError`` for other types, for layouts that ignore it, and if no formula counts the cast."""
    check_choice(_FIELD, layout.communication_data_type, (None, "fp32"))
    if layout.communication_data_type is None:
        return
    why = ""
    if layout.zero_quantized_gradients:
        why = "None with zero_quantized_gradients, which send 4 bits"
    elif layout.ep > 1 and layout.stage in (1, 2):
        why = "None with ep > 1 in stages 1 and 2: no formula counts the cast of the experts' own buckets"
    if why:
        refuse(_FIELD, layout.communication_data_type, why, {"communication_data_type": None})


def casts(layout: ZeroLayout, recipe: Recipe) -> bool:
    """Return whether gradients are cast for the reduction: fp32 gradients are not."""
    return layout.communication_data_type == "fp32" and widths[recipe.precision].compute < FP32


def reduced_width(layout: ZeroLayout, recipe: Recipe) -> int:
    """Return the bytes of a gradient in the reduction type."""
    return FP32 if casts(layout, recipe) else widths[recipe.precision].compute


def cast_elements(layout: ZeroLayout, recipe: Recipe) -> int:
    """Return the size of a cast gradient in uncast elements; 0 if there is no cast."""
    return FP32 // widths[recipe.precision].compute if casts(layout, recipe) else 0


def check_not_quantized(layout: ZeroLayout, why: str = _NOT_COUNTED) -> None:
    """Raise ``ValueError`` with the reason ``why`` for quantized communication."""
    for field in QUANTIZED:
        if getattr(layout, field):
            refuse(f"Layout.{field}", True, f"False {why}", {field: False})


def check_zeropp(layout: ZeroLayout) -> None:
    """Raise ``ValueError`` for combinations of ZeRO++ options that are not supported."""
    size = layout.zero_hpz_partition_size
    if layout.stage < 3:
        for field, off in (("zero_hpz_partition_size", 1), *((field, False) for field in QUANTIZED)):
            value = getattr(layout, field)
            if value != off:
                refuse(f"Layout.{field}", value, f"{off} below stage 3, which ZeRO++ is for", {field: off})
    if size > 1 and layout.offload_params:
        why = "1 with offload_params: no formula counts secondary partitions in host memory"
        refuse("Layout.zero_hpz_partition_size", size, why, {"zero_hpz_partition_size": 1})
