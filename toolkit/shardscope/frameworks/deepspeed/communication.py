"""The type in which gradients are summed over ranks (``communication_data_type``), and when that is a cast.

DeepSpeed 0.19 casts a bucket of half precision on its way and rounds the sum back once: in stage 0
``DeepSpeedEngine.allreduce_bucket`` (deepspeed/runtime/engine.py), in stages 1 and 2 ``allreduce_bucket``
(deepspeed/runtime/zero/stage_1_and_2.py). In stage 3 the bucket itself has that type
(``_setup_for_real_optimizer``, deepspeed/runtime/zero/stage3.py), and the reduced parts are rounded
(``__avg_scatter_grads``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.core.errors import one_of, refuse
from shardscope.core.precision import FP32, widths

if TYPE_CHECKING:
    from shardscope.core.recipe import Recipe

_FIELD = "Layout.communication_data_type"


def check_communication(layout: Any) -> None:
    """Raise ``ValueError`` for another type, where it means nothing, and where no formula counts the cast."""
    one_of(_FIELD, layout.communication_data_type, (None, "fp32"))
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
    """Whether gradients are cast to be reduced: fp32 ones are summed in fp32 anyway."""
    return layout.communication_data_type == "fp32" and widths[recipe.precision].compute < FP32


def reduced_width(layout: Any, recipe: Recipe) -> int:
    """Bytes of a gradient on its way."""
    return FP32 if casts(layout, recipe) else widths[recipe.precision].compute


def cast_elements(layout: Any, recipe: Recipe) -> int:
    """How many gradients weigh as much as one that is cast; 0: none is."""
    return FP32 // widths[recipe.precision].compute if casts(layout, recipe) else 0
