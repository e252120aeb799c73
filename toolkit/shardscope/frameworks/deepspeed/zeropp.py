"""Options of ZeRO++ (Wang et al. 2023): second partitions within a node and quantized communication."""

from __future__ import annotations

from typing import Any

from shardscope.core.errors import refuse

QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")


_NOT_COUNTED = "to be predicted: no formula counts the buffers into which DeepSpeed's kernels quantise"


def check_predicted(layout: Any, why: str = _NOT_COUNTED) -> None:
    """Raise ``ValueError`` with the reason ``why`` for quantized communication."""
    for field in QUANTIZED:
        if getattr(layout, field):
            refuse(f"Layout.{field}", True, f"False {why}", {field: False})


def check_options(layout: Any) -> None:
    """Raise ``ValueError`` for combinations of ZeRO++ options that are not supported."""
    size = layout.zero_hpz_partition_size
    if layout.stage < 3:
        for field, off in (("zero_hpz_partition_size", 1), *((field, False) for field in QUANTIZED)):
            value = getattr(layout, field)
            if value != off:
                refuse(f"Layout.{field}", value, f"{off} below stage 3, which ZeRO++ is for", {field: off})
    if size > 1 and layout.offload_params:
        why = "1 with offload_params: no formula counts second partitions in host memory"
        refuse("Layout.zero_hpz_partition_size", size, why, {"zero_hpz_partition_size": 1})
