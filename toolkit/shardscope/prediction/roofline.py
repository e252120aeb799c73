"""The operators of one layer of a plan on the roofline of its GPU (Williams et al. 2009)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardscope.frameworks.registry import frameworks
from shardscope.memory.activations.forward import find_modules
from shardscope.timing.calibration.selection import select_rates
from shardscope.timing.layers import HALF_PEAKS, PEAKS
from shardscope.timing.operators import OperatorCost, list_layer_operators
from shardscope.timing.stages import prepare_layers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardscope.core.plan import Plan


@dataclass(frozen=True, kw_only=True)
class LayerRoofline:
    """Operators of one layer's forward on one rank, and what its GPU attains at their intensity."""

    plan: Plan
    peaks: Mapping[str, float]
    """FLOP/s of each dtype that the layer multiplies in, the matmuls' first; of the datasheet, if known."""
    bytes_per_second: float
    """Bandwidth of the GPU's memory; of the datasheet, if known."""
    has_experts: bool
    operators: tuple[OperatorCost, ...]
    rest_seconds: float
    """Seconds of the rest of the layer's forward: memory-bound operators, adapters, and waiting for kernel
    launches."""

    def compute_attainable(self, operator: OperatorCost) -> float:
        """Return the FLOP/s that the GPU attains at an operator's intensity."""
        peak = self.peaks[operator.precision]
        return min(peak, operator.flops / operator.num_bytes * self.bytes_per_second)

    def find_ridge(self, precision: str) -> float:
        """Return the FLOP per byte from which a dtype's peak bounds an operator, and not memory."""
        return self.peaks[precision] / self.bytes_per_second


def compute_roofline(plan: Plan) -> LayerRoofline:
    """Return the operators of a layer, one with routed experts if the model has any.

    Raises ``ValueError`` for a figure of the GPU that is not known.
    """
    work = prepare_layers(
        plan,
        find_modules(plan),
        select_rates(plan.cluster),
        frameworks[plan.layout.framework].timing_model(),
    )
    gpu, recipe, has_experts = plan.cluster.gpu, plan.recipe, plan.architecture.num_moe_layers > 0
    operators = list_layer_operators(work, has_experts)
    # The matmuls' dtype first. Experts may have another one (``LayerWork.expert_precision``).
    dtypes = (PEAKS[recipe.precision], HALF_PEAKS[recipe.precision], *(one.precision for one in operators))
    peaks = {
        name: gpu.peak_flops.get(name) or work.rates.get_matmul_rate(name).flops_per_second
        for name in dict.fromkeys(dtypes)
    }
    layer = work.compute_layer(has_experts)
    return LayerRoofline(
        plan=plan,
        peaks=peaks,
        bytes_per_second=gpu.memory_bandwidth_bytes_per_second or work.rates.get_memory_bandwidth(),
        has_experts=has_experts,
        operators=tuple(operators),
        rest_seconds=max(0.0, layer.forward - sum(one.seconds for one in operators)),
    )


def change_batch(plan: Plan, micro_batch_size: int, seq_len: int) -> Plan:
    """Return the plan with other micro-batches and as many of them in a step.

    Raises ``ValueError`` if it cannot run them, as with a sequence longer than the model's positions.
    """
    batch = plan.num_micro_batches * micro_batch_size * plan.degrees.data_parallel
    recipe = replace(plan.recipe, micro_batch_size=micro_batch_size, global_batch_size=batch, seq_len=seq_len)
    return replace(plan, recipe=recipe)
