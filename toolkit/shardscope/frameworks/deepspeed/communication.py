"""Gradient reduction type of DeepSpeed (``communication_data_type``), and when it requires a cast.

DeepSpeed 0.19 casts a half-precision bucket before the reduction and rounds the sum back once: in stage 0
``DeepSpeedEngine.allreduce_bucket`` (deepspeed/runtime/engine.py), in stages 1 and 2 ``allreduce_bucket``
(deepspeed/runtime/zero/stage_1_and_2.py). In stage 3 the bucket itself has that type
(``_setup_for_real_optimizer``, deepspeed/runtime/zero/stage3.py), and the reduced partitions are rounded
(``__avg_scatter_grads``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.core.errors import check_choice, refuse
from shardscope.core.precision import FP32, widths

if TYPE_CHECKING:
    from shardscope.core.recipe import Recipe

_FIELD = "Layout.communication_data_type"


def check_communication(layout: Any) -> None:
    """Raise ``ValueError`` for other types, for layouts that ignore it, and if no formula counts the cast."""
    check_choice(_FIELD, layout.communication_data_type, (None, "fp32"))
    if layout.communication_data_type is None:
        return
    why = ""
    if layout.zero_quantized_gradients:
        why = "None with zero_quantized_gradients, which send 4 bits"
    elif layout.ep > 1 and layout.stage in (1, 2):
        why = "None with ep > 1 in stages 1 and 2: no formula counts what is cast of experts' own buckets"
    if why:
        refuse(_FIELD, layout.communication_data_type, why, {"communication_data_type": None})


def casts(layout: Any, recipe: Recipe) -> bool:
    """Return whether gradients are cast for the reduction: fp32 gradients are not."""
    return layout.communication_data_type == "fp32" and widths[recipe.precision].compute < FP32


def reduced_width(layout: Any, recipe: Recipe) -> int:
    """Return the bytes of a gradient in the reduction type."""
    return FP32 if casts(layout, recipe) else widths[recipe.precision].compute


def cast_elements(layout: Any, recipe: Recipe) -> int:
    """Return the size of a cast gradient in uncast elements; 0 if there is no cast."""
    return FP32 // widths[recipe.precision].compute if casts(layout, recipe) else 0
