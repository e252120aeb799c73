"""Seconds of what ran beside the modules that a plan names, by its published code; nothing is fitted."""

from __future__ import annotations

from tests.accuracy.mapping import Mapped

from shardscope.memory.quantization import layer_linears
from shardscope.timing.calibration import rates_for

_PLANNED_BYTES = 3 * 2.5
"""What a plan in NF4 moves for one number in three passes: half a byte is read, two are written."""
_UNPACKED_BYTES = 2 * 16.5
"""AutoGPTQ 0.5.1, nn_modules/qlinear/qlinear_cuda_old.py, ``forward``, for one number: a shift to int32
(reads half a byte, writes four), the cast to int8 (4 + 1), the mask (1 + 1), less the zeros (1 + 1), times
the scales (1 + 2). Forward and its recomputation do so; backward finds what autograd kept."""
_KERNELS = 2 * 11
"""The same, of one matrix: shift, cast, mask and sum of the zeros; shift, cast, mask, difference and product
of the weights; the input's cast and the bias."""
_MATRICES = 5
"""modeling_qwen.py: c_attn, c_proj, w1, w2 and the MLP's c_proj."""


def beside_seconds(mapped: Mapped) -> float:
    """Seconds that the row's own code adds to a step of its plan."""
    if "zero2_over_gptq" not in mapped.own_code:
        return 0.0
    plan = mapped.plan
    rates = rates_for(plan.cluster)
    numel, _, _ = layer_linears(plan.architecture, False, "nf4_double")
    moved = (_UNPACKED_BYTES - _PLANNED_BYTES) * numel / rates.memory()
    started = _MATRICES * _KERNELS * rates.kernel_seconds
    return plan.num_micro_batches * plan.architecture.num_hidden_layers * (moved + started)
