"""Peak candidates of one layer, operator by operator in the order of autograd.

Autograd frees an operator's saved tensors after its backward, and keeps the gradients of all weights so far.
So a layer's peak depends on the framework: in the feed-forward, most saved tensors are alive; at the start of
the layer, most weight gradients are.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.ops import ceil_div
from shardscope.core.precision import FP32
from shardscope.families.parameter_names import list_parameter_names
from shardscope.families.registry import find_family
from shardscope.memory.activations.forward import (
    compute_kept_for_recomputation,
    count_inner_gradients,
    list_kept_by_selective,
    list_saved_tensors,
)
from shardscope.memory.activations.head import compute_norm_after_block
from shardscope.memory.activations.modules.attention import (
    compute_saved_scores,
    compute_scores_in_backward,
    get_attention_widths,
    is_eager,
    passes_mask,
)
from shardscope.memory.activations.modules.experts import (
    compute_shared_saved,
    compute_weighting,
    get_expert_row_widths,
    list_expert_tensors,
)
from shardscope.memory.activations.modules.layer_forward import LayerForward, LayerPeak, NumShards
from shardscope.memory.activations.modules.saved_tensors import Modules
from shardscope.memory.activations.modules.selective_recompute import compute_int8_inputs

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture


class LayerPeaks(NamedTuple):
    """Memory of one layer through a step; bytes per token."""

    forward: int
    """Maximum during the layer's forward."""
    backward: tuple[LayerPeak, ...]
    """Peak candidates during the layer's backward."""
    weights: int
    """Maximum number of its weights with gradients."""
    recomputation: int = 0
    """Maximum while backward recomputes the layer; 0 if it does not. Among ``backward``, too."""


@lru_cache(maxsize=4096)
def compute_layer_peaks(
    arch: Architecture, moe: bool, modules: Modules, recompute: str, tp: int, num_stream_shards: int
) -> LayerPeaks:
    """Return one layer's peak candidates with this recomputation."""
    shards = NumShards(tp, min(tp, arch.num_key_value_heads), num_stream_shards)
    all_saved = shards.sum_on_rank(list_saved_tensors(arch, moe, modules))
    # Bytes that the layer keeps until its backward, as in compute_layer_activations.
    stream = ceil_div(arch.hidden_size * modules.stream, num_stream_shards)
    kept_bytes = all_saved
    if recompute == "full":
        kept_bytes = stream
    elif recompute == "selective":
        kept_bytes = shards.sum_on_rank(list_kept_by_selective(arch, moe, modules))
    elif recompute == "offload" and modules.on_gpu:
        kept_bytes = 0
    if modules.int8_base:
        kept_bytes += compute_int8_inputs(arch, moe, modules, recompute)
    kept_inputs = compute_kept_for_recomputation(arch, moe, modules, recompute, stream)
    layer = _Layer(
        arch,
        moe,
        modules,
        shards,
        all_saved,
        is_offloaded=recompute == "offload" and modules.on_gpu,
        is_recomputed=recompute in ("full", "selective"),
    )
    # Inside of the layer, as if it saved everything: a recomputation does.
    forward = layer.compute_forward()
    backward = layer.list_peaks()
    at_recomputation = 0
    if recompute in ("full", "selective"):
        backward = [peak._replace(activations=peak.activations + kept_inputs) for peak in backward]
        # Recomputation runs with the incoming gradient alive; the first forward saved nothing.
        outside = stream + kept_inputs + layer.compute_waiting_gradients()
        recomputation = [
            peak._replace(activations=peak.activations + outside)
            for peak in layer.list_recomputation(recompute)
        ]
        backward += recomputation
        at_recomputation = max(peak.activations for peak in recomputation)
        forward = kept_bytes + layer.compute_unsaved_forward(recompute)
    elif layer.is_offloaded:
        # transformers' functions refer to the inputs of the layer and of the model, which nothing saves here.
        forward = layer.compute_unsaved_forward(recompute) + 2 * stream
    else:
        forward = max(
            forward, layer.compute_quantized_product(), layer.compute_in_adapter(is_recomputed=False)
        )
    return LayerPeaks(
        max(kept_bytes, forward),
        tuple(backward),
        max(peak.weights_with_gradient for peak in backward),
        at_recomputation,
    )


class _Layer(LayerForward):
    """One layer with the peak candidates of its backward."""

    def list_peaks(self) -> list[LayerPeak]:
        """Return the peak candidates of the layer's backward, from its end to its start."""
        weights = self.weights
        # The feed-forward, or the routed experts. Its norm after the block (Gemma 2) has had its backward.
        alive = self.all_saved - self.norm_after_saved
        if self.moe:
            peaks = self._list_offloaded_experts() if self.is_offloaded else self._list_experts(alive)
        else:
            peaks = self._list_feed_forward(alive)
        norm_after = ceil_div(compute_norm_after_block(self.arch, self.modules), self.shards.sequence)
        if norm_after:
            saved = self._get_alive(self.all_saved, self.norm_saved)
            peaks.insert(0, self._build_peak(saved + self.stream + norm_after, 0))
        # The feed-forward's norm.
        alive -= self.feed_forward_saved
        norm_input = self._get_alive(alive, self.norm_saved)
        peaks.append(self._build_peak(norm_input + self.stream + self.norm_backward, weights.feed_forward))
        # Attention's output projection, after its norm after the block, if any.
        alive -= self.norm_saved
        if self.arch.norms_per_layer == 4:
            alive -= self.norm_saved
        before_attention = weights.feed_forward + weights.output
        num_bytes = (
            self._get_alive(alive, self.attention_output)
            + self.stream
            + self.second_gradient
            + self.attention_output
        )
        peaks.append(self._build_peak(num_bytes, before_attention, weights.output, weights.output))
        # The attention kernel, or its operators one by one.
        num_bytes = self._get_alive(alive, alive - 2 * self.norm_saved) + self._compute_attention()
        if self.is_offloaded:
            num_bytes = self._compute_offloaded_scores() or num_bytes
        peaks.append(self._build_peak(num_bytes + self.stream, before_attention))
        # The norm of the queries, after the backward of values and keys; 0 bytes if there is none.
        peaks.append(self._build_peak(self._compute_query_norm(), weights.everything - weights.query))
        # The projections of query, key and value, and last the layer's first norm.
        num_bytes = self._get_alive(self.norm_saved, self.hidden_row) + self.stream + self.attention_inputs
        peaks.append(self._build_peak(num_bytes, weights.everything, weights.query, weights.query))
        peaks.append(self._build_peak(self.norm_saved + self.stream + self.norm_backward, weights.everything))
        return peaks

    def _build_peak(self, num_bytes: int, done: int, making: int = 0, dequantized: int = 0) -> LayerPeak:
        """Return a candidate with gradients of ``done`` weights; without them if the base is frozen."""
        if not self.trains_base:
            return LayerPeak(num_bytes, dequantized_weights=dequantized)
        experts = self.weights.expert_down + self.weights.expert_up
        # In backward, attention comes after routed experts, shared experts before.
        return LayerPeak(num_bytes, done, making, 0, done - (experts if done >= experts else 0))

    def _list_feed_forward(self, alive: int) -> list[LayerPeak]:
        arch, modules, weights = self.arch, self.modules, self.weights
        inner = ceil_div(arch.intermediate_size * modules.compute, self.shards.tp)
        product = inner * modules.inner_copies(list_parameter_names(arch).down)
        branch_gradients = ceil_div(
            arch.intermediate_size * modules.compute * count_inner_gradients(arch, modules), self.shards.tp
        )
        # With biases, one operator computes all three gradients and frees its input only afterwards.
        current_matrix = weights.down if arch.mlp_bias else 0
        # The down projection's backward: first its input's gradient, then, with the saved product freed, its
        # weight's.
        with_product = self._get_alive(alive, product) + self.stream + self.second_gradient + inner
        without_product = self._get_alive(alive - product, 0) + self.stream + self.second_gradient + inner
        # The product's gradient takes the place of the freed saved product. A fused projection's output
        # returns from the host as a whole.
        needed = self.feed_forward_saved - self.feed_forward_inputs
        needed += inner * (self._has_fused_branches() - arch.gated_mlp)
        at_branches = self._get_alive(alive, needed) + self.stream + branch_gradients
        peaks = [
            self._build_peak(with_product, weights.down, current_matrix, weights.down),
            self._build_peak(without_product, weights.down, weights.down),
            self._build_peak(at_branches, weights.down),
        ]
        # The up projections' backward, one after the other.
        if arch.gated_mlp and modules.kernels != "liger":
            num_bytes = (
                self._get_alive(alive - product - 2 * inner, self.hidden_row + inner)
                + self.stream
                + inner
                + self.hidden_row
            )
            peaks.append(self._build_peak(num_bytes, weights.down + weights.up, weights.up, weights.up))
        elif not arch.gated_mlp:
            num_bytes = (
                self._get_alive(alive - self.feed_forward_saved, 0)
                + self.stream
                + inner
                + 2 * self.hidden_row
            )
            peaks.append(self._build_peak(num_bytes, weights.feed_forward, weights.up, weights.up))
        return peaks

    def _list_experts(self, alive: int) -> list[LayerPeak]:
        arch, modules, weights = self.arch, self.modules, self.weights
        experts = arch.mixture_of_experts
        assert experts is not None
        c, hidden, rows = modules.compute, arch.hidden_size, experts.num_experts_per_tok
        # Grouped matmuls are not autocast: they run in the weights' dtype.
        width = modules.stream
        shared = weights.feed_forward - weights.expert_down - weights.expert_up
        wide = experts.shared_expert_intermediate_size * c
        # With a gate (Qwen2-MoE), shared experts run before the routed ones, and have their backward after.
        is_first = wide > 0 and not find_family(arch).has_shared_expert_gate
        first = self._count_gradients(shared) * (is_first or not wide)
        peaks = []
        if is_first:
            peaks.append(
                self._build_peak(alive + self.stream + 2 * wide, weights.down, dequantized=weights.down)
            )
            alive -= compute_shared_saved(arch, modules)
        weighted = compute_weighting(arch, modules, is_recomputed=self.is_recomputed)
        peaks.append(LayerPeak(alive + self.stream + weighted, first, autocast_weights=first))
        inner = rows * experts.moe_intermediate_size * width
        unweighted = rows * hidden * width
        alive -= unweighted
        down, up = self._count_gradients(weights.expert_down), self._count_gradients(weights.expert_up)
        finished = first + down
        peaks.append(LayerPeak(alive + self.stream + unweighted + inner, finished, 0, down, first))
        peaks.append(
            LayerPeak(
                alive + self.stream + inner * (2 if self.trains_base else 3), finished, autocast_weights=first
            )
        )
        saved = sum(t.bytes_per_token for t in list_expert_tensors(arch, modules) if t.operator == "experts")
        # Gradients of both branches together and of the rows, and the rows themselves.
        both = rows * width * (2 * experts.moe_intermediate_size + 2 * hidden)
        alive += unweighted - saved
        peaks.append(LayerPeak(alive + self.stream + both, finished + up, 0, up, first))
        if wide and not is_first:
            finished = weights.expert_down + weights.expert_up + weights.down
            peaks.append(self._build_peak(alive + self.stream + 2 * wide, finished, dequantized=weights.down))
        return peaks

    def _list_offloaded_experts(self) -> list[LayerPeak]:
        """Return the same candidates if each operator's saved tensors return from the host on their own."""
        arch, modules, weights = self.arch, self.modules, self.weights
        experts = arch.mixture_of_experts
        assert experts is not None
        width = get_expert_row_widths(arch, modules)[0]
        rows = experts.num_experts_per_tok * arch.hidden_size * width
        inner = experts.num_experts_per_tok * experts.moe_intermediate_size * width
        shared = self._count_gradients(weights.feed_forward - weights.expert_down - weights.expert_up)
        down, up = self._count_gradients(weights.expert_down), self._count_gradients(weights.expert_up)
        finished = shared + down
        weighted = compute_weighting(arch, modules, is_recomputed=False)
        # At the product: it multiplies both halves of the up projection's output, one of them activated.
        # With the whole output, the activated half and three gradients there are six tensors.
        peaks = [
            LayerPeak(self.stream + rows + weighted, shared, autocast_weights=shared),
            LayerPeak(self.stream + rows + (1 + self.trains_base) * inner, finished, 0, down, shared),
            LayerPeak(self.stream + 6 * inner, finished, autocast_weights=shared),
            LayerPeak(self.stream + 2 * inner + (1 + self.trains_base) * rows, finished + up, 0, up, shared),
        ]
        if experts.shared_expert_intermediate_size:
            product = experts.shared_expert_intermediate_size * modules.compute
            peaks.insert(0, self._build_peak(self.stream + 5 * product, weights.down, 0, weights.down))
        return peaks

    def _compute_offloaded_scores(self) -> int:
        """Return the bytes in the softmax's backward if its output returns from the host; 0 if fused.

        The output, its gradient and the result, all in fp32; and the gradient of the values.
        """
        arch, modules = self.arch, self.modules
        if not compute_saved_scores(arch, modules) or find_family(arch).has_attention_sinks:
            return 0
        scores = 3 * FP32 * arch.num_attention_heads * modules.seq_len
        return ceil_div(scores, self.shards.tp) + self.attention_output

    def _compute_query_norm(self) -> int:
        """Return the bytes in the backward of the queries' norm, if it runs as plain operations in fp32.

        At the square's gradient: five tensors besides the saved one. Also the gradients of the residual
        stream and of the projections' input.
        """
        arch, modules = self.arch, self.modules
        if not arch.qk_norm or arch.norm != "rmsnorm" or modules.kernels != "transformers":
            return 0
        query = ceil_div(get_attention_widths(arch).query * FP32, self.shards.tp)
        alive = self._get_alive(self.norm_saved + self.hidden_row, 0)
        return alive + 6 * query + self.stream + max(self.stream, self.hidden_row)

    def _compute_attention(self) -> int:
        """Return the bytes of gradients inside attention: of its operands and output, or of the scores."""
        arch, modules = self.arch, self.modules
        c, width = modules.compute, get_attention_widths(arch)
        num_scores = arch.num_attention_heads * modules.seq_len
        if compute_saved_scores(arch, modules):
            # The dropped probabilities are freed once their gradient exists, and make room for the softmax's.
            scores = num_scores * (1 if modules.dropout else 2) * FP32
            if is_eager(arch, modules):
                scores = compute_scores_in_backward(arch, modules, num_scores)
            # By then the values and the projection's input are freed, and the values' gradient exists.
            gradients = scores - width.output * c * modules.inner_copies(list_parameter_names(arch).output)
        else:
            inputs = 3 * width.query if passes_mask(arch, modules) else width.inputs
            gradients = (width.output + inputs) * c
        return ceil_div(gradients, self.shards.tp)
