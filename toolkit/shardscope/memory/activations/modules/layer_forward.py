"""Tensors of one layer by operator, and the maximum of its forward and of its recomputation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.ops import ceil_div
from shardscope.core.precision import FP32, HALF
from shardscope.families.parameter_names import list_parameter_names
from shardscope.families.registry import find_family
from shardscope.memory.activations.forward import (
    compute_kept_masks,
    list_kept_by_selective,
    list_saved_tensors,
)
from shardscope.memory.activations.head import compute_final_norm
from shardscope.memory.activations.modules.attention import (
    compute_saved_scores,
    compute_scores_in_forward,
    get_attention_widths,
)
from shardscope.memory.activations.modules.experts import (
    get_expert_row_widths,
    list_expert_tensors,
)
from shardscope.memory.activations.modules.saved_tensors import Modules, SavedTensor, list_stream_readers
from shardscope.memory.state.stages import count_layer_weights

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture


class LayerPeak(NamedTuple):
    """One peak candidate inside a layer's backward or its recomputation."""

    activations: int
    """Bytes per token: the layer's saved tensors still alive, and gradients of activations."""
    weights_with_gradient: int = 0
    """Number of the layer's weights whose gradients exist, including the one being computed."""
    current_matrix: int = 0
    """Number of weights of the matrix whose gradient is being computed."""
    current_experts: int = 0
    """Number of routed experts' weights whose gradient is being computed."""
    autocast_weights: int = 0
    """The part of ``weights_with_gradient`` that autocast copies: all but routed experts."""
    dequantized_weights: int = 0
    """Number of weights of the matrix in its matmul's backward; a quantized base dequantizes it."""


class NumShards(NamedTuple):
    """Number of shards of the saved tensors, by kind of sharding."""

    tp: int
    key_value_heads: int
    sequence: int
    whole: int = 1

    def sum_on_rank(self, tensors: Iterable[SavedTensor]) -> int:
        """Return the bytes per token of ``tensors`` on one rank."""
        return sum(ceil_div(tensor.bytes_per_token, getattr(self, tensor.cut_by)) for tensor in tensors)


class LayerForward:
    """One layer's tensors, in groups that backward frees together, and the maximum of its forward."""

    def __init__(
        self,
        arch: Architecture,
        moe: bool,
        modules: Modules,
        shards: NumShards,
        all_saved: int,
        *,
        is_offloaded: bool = False,
        is_recomputed: bool = False,
    ) -> None:
        self.arch, self.moe, self.modules, self.shards = arch, moe, modules, shards
        self.is_offloaded, self.is_recomputed = is_offloaded, is_recomputed
        """Saved tensors are on the host and return operator by operator (training/model/recompute)."""
        self.all_saved = all_saved
        c, hidden = modules.compute, arch.hidden_size
        self.stream = ceil_div(hidden * modules.stream, shards.sequence)
        self.weights = count_layer_weights(arch, moe, shards.tp)
        self.hidden_row = hidden * c
        # A second gradient in the compute dtype besides the stream's: autocast casts it from a wider stream,
        # or a norm after the block creates it.
        splits = shards.sequence > 1  # and all-gathers the gradient of the scattered output
        wider = modules.stream > c
        has_norm_after = arch.norms_per_layer == 4 or find_family(arch).is_post_norm
        self.second_gradient = self.hidden_row if wider or has_norm_after or splits else 0
        self.norm_backward = ceil_div(compute_final_norm(arch, modules), shards.sequence)
        # The first entry of each family's list is that of all norms.
        norms = shards.sum_on_rank([list_saved_tensors(arch, moe, modules)[0]])
        self.norm_saved = norms // max(2, arch.norms_per_layer)
        if arch.parallel_residual:
            self.norm_saved = 0
        self.norm_after_saved = self.norm_saved if has_norm_after else 0
        readers = list_stream_readers(arch)[1]
        inputs = (
            0
            if arch.parallel_residual and arch.norms_per_layer == 1
            else self.modules.stream_copies(*readers)
        )
        self.feed_forward_inputs = inputs * self.hidden_row
        self.feed_forward_saved = ceil_div(self._compute_mlp_saved(), shards.tp) + self.feed_forward_inputs
        # A layer with routed experts has all of its feed-forward in that list, shared experts included.
        if moe:
            self.feed_forward_saved = shards.sum_on_rank(list_expert_tensors(arch, modules))
        self.trains_base = modules.trained
        width = get_attention_widths(arch)
        self.attention_output = ceil_div(width.output * c, shards.tp)
        self.attention_inputs = ceil_div(width.inputs * c, shards.tp)

    def _get_alive(self, alive: int, needed: int) -> int:
        """Return the saved tensors still alive; with offloading, only the operator's own (``needed``)."""
        return needed if self.is_offloaded else alive

    def _compute_mlp_saved(self) -> int:
        tensors = list_saved_tensors(self.arch, self.moe, self.modules)
        return sum(tensor.bytes_per_token for tensor in tensors if tensor.operator == "mlp")

    def _has_fused_branches(self) -> bool:
        """Return whether one projection computes gate and up, of whose output both are views."""
        return self.modules.kernels == "transformers" and (
            list_parameter_names(self.arch).fused_gate_up is not None
        )

    def _count_gradients(self, weights: int) -> int:
        return weights if self.trains_base else 0

    def compute_forward(self) -> int:
        """Return the maximum bytes during the layer's forward, saved tensors included."""
        return max(self.all_saved, self._compute_scores_forward(), self._compute_experts_forward())

    def list_recomputation(self, recompute: str) -> list[LayerPeak]:
        """Return the peak candidates of the recomputed forward, without gradients and what is kept for it."""
        arch, modules, weights = self.arch, self.modules, self.weights
        names, targets = list_parameter_names(arch), modules.targets or ()
        forward = self.compute_forward()
        if self.moe or self.trains_base or modules.int8_base or modules.kernels == "compiled":
            recomputation = max(forward, self.compute_in_adapter(is_recomputed=True))
            return [LayerPeak(recomputation, dequantized_weights=0 if self.moe else weights.up)]
        # Before the up projection, the feed-forward has saved its gate and its activation, if these are
        # modules of their own.
        inner = ceil_div(arch.intermediate_size * modules.compute, self.shards.tp)
        before_down = self.all_saved - self.norm_after_saved - self._compute_saved_by_down()
        before_up = before_down - inner
        if not arch.gated_mlp or self._has_fused_branches():
            before_up = before_down - (self.feed_forward_saved - self.feed_forward_inputs)
            before_up += inner * modules.inner_copies(names.down)
        output = inner * (1 + self._has_fused_branches())
        # The residual stream, unless the norm has saved it; the norm's output, if only copies of it are
        # saved; and the output of the down projection's adapter, kept until the layer's backward is done.
        is_copied = (modules.recasts or modules.adapter_dropout) and not modules.keeps_frozen_inputs
        alive = (modules.stream < FP32) * self.stream + is_copied * self.hidden_row
        if recompute == "selective" and names.down in targets and not modules.quantized:
            alive += self.hidden_row
        peaks = [
            LayerPeak(forward),
            # The base's matmul of the up projection.
            LayerPeak(before_up + output + alive, dequantized_weights=weights.up),
        ]
        if names.down in targets:
            # The base's matmul of the down projection, with the product as its input; then its adapter.
            num_bytes = before_down + inner + self.hidden_row + alive
            peaks.append(LayerPeak(num_bytes, dequantized_weights=weights.down))
            peaks.append(LayerPeak(self.compute_in_adapter(is_recomputed=True)))
        if (names.fused_gate_up or names.up) in targets:
            # At the scaling of its adapter's output: with the input, the result, and the base's output.
            cast_input = modules.recasts * arch.hidden_size * FP32
            peaks.append(LayerPeak(before_up + 3 * output + alive + cast_input))
        return peaks

    def _compute_saved_by_down(self) -> int:
        """Return the bytes that the down projection and its adapter save: inputs and dropout masks."""
        arch, modules = self.arch, self.modules
        down = list_parameter_names(arch).down
        copies = modules.compute * modules.inner_copies(down)
        if modules.adapter_dropout and down in (modules.targets or ()):
            copies += 1 if modules.on_gpu else FP32 if modules.autocast else modules.compute
            copies += modules.compute * modules.keeps_frozen_inputs
        return ceil_div(arch.intermediate_size * copies, self.shards.tp)

    def compute_in_adapter(self, *, is_recomputed: bool) -> int:
        """Return the bytes when the down projection's adapter reads its input: the product and its copies.

        peft casts the input to the adapter's fp32, of which dropout creates another copy, before autocast's
        own copy (``tuners/lora/layer.py``). In addition: the outputs of the projection and of the norm, and
        the residual stream, unless these are saved anyway. A recomputation (``is_recomputed``) stops
        before the adapter's output and its scaling; and the layer's input is already saved. DeepSpeed's own
        linear function has computed the adapter's output by then.
        """
        arch, modules = self.arch, self.modules
        if self.moe or list_parameter_names(arch).down not in (modules.targets or ()):
            return 0
        copied = (modules.recasts or modules.adapter_dropout) and not modules.keeps_frozen_inputs
        inner = arch.intermediate_size * (
            copied * modules.compute + modules.recasts * FP32 * (1 + modules.adapter_dropout)
        )
        passes_dropped = modules.recasts and modules.adapter_dropout
        rows = 1 + copied + (0 if is_recomputed or passes_dropped else 2)
        rows += is_recomputed and modules.keeps_frozen_inputs
        # The residual stream at this point, at the layer's input and at the model's input.
        streams = (modules.stream < FP32) * (1 if is_recomputed else 3)
        outputs = rows * self.hidden_row + streams * self.stream
        return self.all_saved - self.norm_after_saved + ceil_div(inner, self.shards.tp) + outputs

    def compute_waiting_gradients(self) -> int:
        """Return the bytes of gradients in the layer before backward unpacks the first saved tensor.

        This is the gradient of the adapter's unscaled output; or of the down projection's input, if the
        frozen quantized base saves nothing.
        """
        if self.moe:
            return 0
        if list_parameter_names(self.arch).down in (self.modules.targets or ()):
            return self.hidden_row
        if not self.modules.quantized:
            return 0
        return ceil_div(self.arch.intermediate_size * self.modules.compute, self.shards.tp)

    def compute_quantized_product(self) -> int:
        """Return the bytes at the quantized base's down projection, without the dequantized matrix.

        These are its unsaved input and its output; for int8 the input in 16 and 8 bits. In addition: the
        norm's output, and the residual stream at this point, at the layer's and at the model's input. Norms
        have saved these very tensors in fp32, except the model's input: the first layer's norm saves nothing.
        """
        arch, modules = self.arch, self.modules
        if not modules.quantized or self.moe:
            return 0
        inner, c = arch.intermediate_size, modules.compute
        num_bytes = self.all_saved - self.norm_after_saved + self.hidden_row
        if not modules.stream_copies(*list_stream_readers(arch)[1]):
            num_bytes += self.hidden_row
        num_bytes += self.stream * (3 if modules.stream < FP32 else 1)
        if modules.int8_base:
            return num_bytes + inner * (HALF + 1)
        passing = inner * c * (1 - modules.inner_copies(list_parameter_names(arch).down))
        return num_bytes + passing + inner * FP32 * (modules.normed > c)

    def _compute_scores_forward(self) -> int:
        """Return the bytes of unfused attention in forward, before the feed-forward saves anything."""
        arch, modules = self.arch, self.modules
        saved = compute_saved_scores(arch, modules)
        if not saved:
            return 0
        num_scores = arch.num_attention_heads * modules.seq_len
        saved_so_far = (
            self.all_saved - self.feed_forward_saved - self.norm_saved * (2 if self.norm_after_saved else 1)
        )
        scores: int = ceil_div(compute_scores_in_forward(arch, modules, num_scores) - saved, self.shards.tp)
        return compute_kept_masks(arch, modules, "full") + saved_so_far + scores

    def _compute_experts_forward(self) -> int:
        """Return the bytes when expert rows are weighted and reordered, their inputs still alive."""
        experts = self.arch.mixture_of_experts
        if not self.moe or experts is None:
            return 0
        width, weighted = get_expert_row_widths(self.arch, self.modules)
        rows = experts.num_experts_per_tok * self.arch.hidden_size
        return self.all_saved + rows * (2 * weighted + (0 if self.trains_base else width))

    def compute_unsaved_forward(self, recompute: str) -> int:
        """Return the maximum bytes of the layer's forward while autograd saves nothing of it."""
        experts, tp = self.arch.mixture_of_experts, self.shards.tp
        if self.moe and experts is not None:
            width, weighted = get_expert_row_widths(self.arch, self.modules)
            # Rows in, rows out, weighted rows, and rows in token order.
            inner = 2 * experts.num_experts_per_tok * self.arch.hidden_size * (width + weighted)
        else:
            branches = self._count_branches() + self._count_adapter_outputs() * (recompute == "offload")
            inner = ceil_div(branches * self.arch.intermediate_size * self.modules.compute, tp)
            if recompute == "selective":
                # The outputs of the down projection and its adapter are saved, but not computed yet.
                inner -= self.hidden_row * (
                    1 + (list_parameter_names(self.arch).down in (self.modules.targets or ()))
                )
        return self.stream + self.hidden_row + max(inner, self._compute_unsaved_scores(recompute))

    def _count_branches(self) -> int:
        """Return how many intermediate-size tensors exist at once in the feed-forward's forward."""
        if not self.arch.gated_mlp:
            return 2
        # Both halves of a fused projection's output stay until the product exists.
        return 3 + self._has_fused_branches()

    def _count_adapter_outputs(self) -> int:
        """Return how many more there are at the sum of the up projection's and its adapter's outputs."""
        names, targets = list_parameter_names(self.arch), self.modules.targets or ()
        if self._has_fused_branches():
            return 2 * (names.fused_gate_up in targets)
        return int(self.arch.gated_mlp and names.up in targets)

    def _compute_unsaved_scores(self, recompute: str) -> int:
        """Return unfused attention's bytes, less what is kept of later operators and of the scores."""
        if not compute_saved_scores(self.arch, self.modules):
            return 0
        num_scores = self.arch.num_attention_heads * self.modules.seq_len
        scores: int = compute_scores_in_forward(self.arch, self.modules, num_scores)
        later = 0
        if recompute == "selective":
            kept_tensors = list_kept_by_selective(self.arch, self.moe, self.modules)
            later = self.shards.sum_on_rank(
                [tensor for tensor in kept_tensors if tensor.operator in ("mlp", "experts")]
            )
            if not find_family(self.arch).has_attention_sinks:  # which make three more of the kept product
                scores -= num_scores * self.modules.compute
        return ceil_div(scores, self.shards.tp) - later
