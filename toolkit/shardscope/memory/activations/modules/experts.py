"""Saved tensors of a dropless mixture of experts in transformers 5, with routed and shared experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.precision import FP32
from shardscope.families.registry import find_family
from shardscope.memory.activations.modules.saved_tensors import INT64, Modules, SavedTensor

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture


def list_expert_tensors(arch: Architecture, modules: Modules) -> list[SavedTensor]:
    """Return the tensors saved by router, routed and shared experts, with evenly routed tokens."""
    experts = arch.mixture_of_experts
    if experts is None:
        raise AssertionError("an expert layer of an architecture without experts")
    c, hidden, top_k = modules.compute, arch.hidden_size, experts.num_experts_per_tok
    shared = experts.shared_expert_intermediate_size
    # Grouped matmuls are not autocast: they run in the weights' dtype, like the residual stream.
    width = modules.stream
    # Frozen experts need no inputs; the unweighted output is saved for the router weights' gradient.
    routed = 2 * hidden * width if modules.trained else hidden * width
    # gpt-oss clamps its gate, and multiplies it by its sigmoid in separate operators.
    copies = (6 if find_family(arch).has_clamped_experts else 3) + modules.trained
    inner = copies * experts.moe_intermediate_size * width
    readers = ("router",) + (("gate_proj", "up_proj") if shared else ())
    gated = find_family(arch).has_shared_expert_gate
    readers += ("shared_expert_gate",) if gated else ()
    tensors = [
        SavedTensor("norms", modules.stream_copies(*readers) * hidden * c, "sequence"),
        SavedTensor("experts", top_k * routed, "sequence"),
        SavedTensor("experts", top_k * inner, "tp"),
        SavedTensor("experts", _compute_router(arch, modules), "sequence"),
    ]
    if shared:
        copies = 3 + modules.inner_copies("down_proj")
        tensors.append(SavedTensor("mlp", copies * shared * c, "tp"))
    if gated:
        # The shared expert's output and its sigmoid gate.
        tensors.append(SavedTensor("experts", (hidden + 1) * c, "sequence"))
    return tensors


def _compute_router(arch: Architecture, modules: Modules) -> int:
    """Return bytes of expert scores, top-k weights and indices, and the sort of tokens by expert."""
    experts = arch.mixture_of_experts
    assert experts is not None
    count, top_k, c = experts.num_experts, experts.num_experts_per_tok, modules.compute
    # int64 indices: of the top-k experts, and of the sort of tokens by expert.
    indices = 4 * INT64 * top_k
    reads, router = modules.saves_input("router"), find_family(arch).router
    if router == "softmax_of_top_k":
        # The sorted expert indices gather the biases, which get gradients.
        return 2 * top_k * c + indices + INT64 * top_k * modules.trained
    if router == "softmax_upcast":
        upcast = arch.hidden_size * FP32 if reads and not modules.autocast and c < FP32 else 0
        return count * FP32 + top_k * FP32 + indices + upcast
    if router == "softmax_cast":
        return count * FP32 + top_k * c + indices
    if router == "sigmoid":
        score = c if modules.autocast else FP32
        upcast = arch.hidden_size * FP32 if reads and not modules.autocast and c < FP32 else 0
        return count * score + score + 2 * top_k * score + indices + upcast
    return count * FP32 + FP32 + 2 * top_k * FP32 + indices


def get_expert_row_widths(arch: Architecture, modules: Modules) -> tuple[int, int]:
    """Return bytes per element of expert rows, and of weighted rows: most routers' weights are fp32.

    Grouped matmuls are not autocast: they run in the weights' dtype.
    """
    width = modules.stream
    return width, width if find_family(arch).casts_router_weights else FP32


def compute_weighting(arch: Architecture, modules: Modules, *, is_recomputed: bool) -> int:
    """Return bytes per token in the backward of the weighting of expert rows, besides the stream gradient.

    The gradients of the weighted rows, of their sum and of the router weights, in the router's dtype; and a
    cast of them if the rows are narrower. A recomputation that goes on after the experts, to shared ones,
    has freed the rows before the cast: torch's checkpoint forgets a tensor when it is unpacked. The shared
    experts, or their gate, have created a gradient of the input; it takes the place of the norm's output if
    that was saved for them alone.
    """
    experts = arch.mixture_of_experts
    assert experts is not None
    width, weighted = get_expert_row_widths(arch, modules)
    has_shared = experts.shared_expert_intermediate_size > 0
    has_cast = width < weighted and not (has_shared and is_recomputed)
    rows = experts.num_experts_per_tok * arch.hidden_size * (3 * weighted + width * has_cast)
    has_gradient = has_shared and (find_family(arch).has_shared_expert_gate or not modules.trained)
    return rows + arch.hidden_size * modules.compute * has_gradient


def compute_shared_saved(arch: Architecture, modules: Modules) -> int:
    """Return bytes per token that shared experts save, whose backward comes before the routed ones'."""
    experts = arch.mixture_of_experts
    if experts is None:
        return 0
    copies = 3 + modules.inner_copies("down_proj")
    return copies * experts.shared_expert_intermediate_size * modules.compute
