"""Step time of publishers' own code, which no plan expresses, modelled from its source; nothing is fitted."""

from __future__ import annotations

import re

from tests.accuracy.row_plans import Mapped
from tests.accuracy.rows import join_fields

from shardscope.memory.state.quantization import measure_layer_linears
from shardscope.timing.calibration.selection import select_rates
from shardscope.timing.report import StepReport

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
_FLEX = re.compile(r"qwen3[-_ ]?30b|deepseek[-_ ]?v3")
"""Models whose recipes take DeepEP or HybridEP (``moe_flex_dispatcher_backend`` of Megatron-Bridge's
scripts/performance/configs: qwen3_workload_base_configs.py, deepseek_workload_base_configs.py)."""


def compute_own_code_seconds(mapped: Mapped, report: StepReport) -> float:
    """Compute the seconds that the publisher's code adds to a step of its plan; negative if it saves time."""
    if "zero2_over_gptq" in mapped.own_code:
        return _compute_unpacking_seconds(mapped)
    if sends_once_to_a_node(mapped):
        return _sent_once(mapped, report)
    return 0.0


def _compute_unpacking_seconds(mapped: Mapped) -> float:
    plan = mapped.plan
    rates = select_rates(plan.cluster)
    numel, _, _ = measure_layer_linears(plan.architecture, False, "nf4_double")
    moved = (_UNPACKED_BYTES - _PLANNED_BYTES) * numel / rates.get_memory_bandwidth()
    started = _MATRICES * _KERNELS * rates.kernel_seconds
    return plan.num_micro_batches * plan.architecture.num_hidden_layers * (moved + started)


def sends_once_to_a_node(mapped: Mapped) -> bool:
    """Return whether a token is sent once to each node with its experts, instead of once per expert."""
    text = join_fields(mapped.row, "source", "model")
    return "megatron-bridge" in text and bool(_FLEX.search(join_fields(mapped.row, "model")))


def _sent_once(mapped: Mapped, report: StepReport) -> float:
    """DeepSeek-V3 (arXiv:2412.19437), section 3.2.2: over the network once a node, then over NVLink.

    With k experts a token, evenly over n nodes, k (n - 1) / n copies would cross; (n - 1) (1 - (1 - 1/n)^k)
    nodes have to be reached. All copies but a rank's own then travel inside.
    """
    plan = mapped.plan
    experts, inside = plan.architecture.mixture_of_experts, plan.cluster.gpus_per_node
    ep, rates = plan.degrees.ep, select_rates(plan.cluster)
    if experts is None or ep * plan.degrees.tp <= inside:
        return 0.0
    members = inside // plan.degrees.tp
    nodes, top = ep // members, experts.num_experts_per_tok
    copies = top * (nodes - 1) / nodes
    reached = (nodes - 1) * (1 - (1 - 1 / nodes) ** top)
    across = copies / rates.between.bytes_per_second
    once = max(
        reached / rates.between.bytes_per_second,
        top * (members - 1) / members / rates.inside.bytes_per_second,
    )
    return report.parts["expert_parallel"] * (min(1.0, once / across) - 1)
