"""Peak candidates of one layer, operator by operator in the order of autograd.

Autograd frees an operator's saved tensors after its backward, and keeps the gradients of all weights so far.
So a layer's peak depends on the framework: in the feed-forward, most saved tensors are alive; at the start of
the layer, most weight gradients are.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.ops import ceil_div
from shardscope.core.precision import FP32, HALF
from shardscope.families.parameter_names import names_of
from shardscope.families.registry import family_of
from shardscope.memory.activations.forward import (
    compute_kept_for_recomputation,
    compute_kept_masks,
    list_kept_by_selective,
    list_saved_tensors,
)
from shardscope.memory.activations.head import compute_final_norm
from shardscope.memory.activations.modules.attention import (
    compute_saved_scores,
    get_attention_widths,
    is_eager,
    passes_mask,
)
from shardscope.memory.activations.modules.experts import list_expert_tensors
from shardscope.memory.activations.modules.saved import Modules, SavedTensor, list_stream_readers
from shardscope.memory.activations.modules.selective import compute_int8_inputs
from shardscope.memory.state.stages import list_rank_shapes

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture


class LayerPeak(NamedTuple):
    """One peak candidate inside a layer's backward."""

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


class _NumShards(NamedTuple):
    """Number of shards of a rank's tensors, by kind of sharding."""

    tp: int
    key_value_heads: int
    sequence: int
    whole: int = 1

    def part(self, tensors: tuple[SavedTensor, ...] | list[SavedTensor]) -> int:
        return sum(ceil_div(tensor.bytes_per_token, getattr(self, tensor.cut_by)) for tensor in tensors)


class LayerPeaks(NamedTuple):
    """Memory of one layer through a step; bytes per token."""

    forward: int
    """Maximum during the layer's forward."""
    backward: tuple[LayerPeak, ...]
    """Peak candidates during the layer's backward."""
    weights: int
    """Maximum number of its weights with gradients."""


@lru_cache(maxsize=4096)
def compute_layer_peaks(
    arch: Architecture, moe: bool, modules: Modules, recompute: str, tp: int, cut: int
) -> LayerPeaks:
    """Return one layer's peak candidates with this recomputation; the residual stream has ``cut`` shards.

    If only some layers have a sliding window, those of the kind that saves more.
    """
    parts = _NumShards(tp, min(tp, arch.num_key_value_heads), cut)
    everything = parts.part(list_saved_tensors(arch, moe, modules))
    stream = ceil_div(arch.hidden_size * modules.stream, cut)
    kept = everything
    if recompute == "full":
        kept = stream
    elif recompute == "selective":
        kept = parts.part(list_kept_by_selective(arch, moe, modules))
    elif recompute == "offload" and modules.on_gpu:
        kept = 0
    kept += compute_int8_inputs(arch, moe, modules, recompute)
    kept_inputs = compute_kept_for_recomputation(arch, moe, modules, recompute, stream)
    layer = _Layer(arch, moe, modules, parts, everything, away=recompute == "offload" and modules.on_gpu)
    forward = layer.forward()
    backward = layer.backward()
    if recompute in ("full", "selective"):
        backward = [peak._replace(activations=peak.activations + kept_inputs) for peak in backward]
        # Recomputation runs with the incoming gradient alive; the first forward saved nothing.
        waiting = layer.waiting_for_recomputation()
        again = max(forward, layer.in_adapter(again=True))
        backward.append(
            LayerPeak(
                stream + kept_inputs + again + waiting, dequantized_weights=0 if moe else layer.weights.up
            )
        )
        forward = kept + layer.in_passing(recompute)
    elif layer.away:
        forward = layer.in_passing(recompute)
    else:
        forward = max(forward, layer.product_of_few_bits(), layer.in_adapter(again=False))
    return LayerPeaks(
        max(kept, forward), tuple(backward), max(peak.weights_with_gradient for peak in backward)
    )


class _Layer:
    """One layer's tensors, in groups that backward frees together."""

    def __init__(
        self,
        arch: Architecture,
        moe: bool,
        modules: Modules,
        parts: _NumShards,
        everything: int,
        *,
        away: bool = False,
    ) -> None:
        self.arch, self.moe, self.modules, self.parts = arch, moe, modules, parts
        self.away = away
        """Saved tensors are on the host and return operator by operator (training/model/recompute)."""
        self.everything = everything
        c, hidden = modules.compute, arch.hidden_size
        self.stream = ceil_div(hidden * modules.stream, parts.sequence)
        self.weights = count_layer_weights(arch, moe, parts.tp)
        self.row = hidden * c
        # A second gradient in the compute dtype besides the stream's: autocast casts it from a wider stream,
        # or a norm after the block creates it.
        splits = parts.sequence > 1  # and all-gathers the gradient of the scattered output
        wider = modules.stream > c
        self.cast = self.row if wider or arch.norms_per_layer == 4 or splits else 0
        self.norm = ceil_div(compute_final_norm(arch, modules), parts.sequence)
        norms = parts.part([list_saved_tensors(arch, moe, modules)[0]])
        self.own_norm = norms // max(2, arch.norms_per_layer)
        if arch.parallel_residual:
            self.own_norm = 0
        self.behind = self.own_norm if arch.norms_per_layer == 4 else 0
        readers = list_stream_readers(arch)[1]
        inputs = (
            0
            if arch.parallel_residual and arch.norms_per_layer == 1
            else self.modules.stream_copies(*readers)
        )
        self.mlp = ceil_div(self._inner(), parts.tp) + inputs * self.row
        if moe:
            self.mlp = parts.part(list_expert_tensors(arch, modules))
        self.trained = modules.trained
        width = get_attention_widths(arch)
        self.output = ceil_div(width.output * c, parts.tp)
        self.query = ceil_div(width.inputs * c, parts.tp)

    def _here(self, left: int, needed: int) -> int:
        """Return the saved tensors still alive; with offloading, only the operator's own (``needed``)."""
        return needed if self.away else left

    def _inner(self) -> int:
        tensors = list_saved_tensors(self.arch, self.moe, self.modules)
        return sum(tensor.bytes_per_token for tensor in tensors if tensor.operator == "mlp")

    def done(self, weights: int) -> int:
        return weights if self.trained else 0

    def forward(self) -> int:
        """Return the maximum bytes during the layer's forward, saved tensors included."""
        return max(self.everything, self._scores_forward(), self._experts_forward())

    def in_adapter(self, *, again: bool) -> int:
        """Return the bytes when the down projection's adapter reads its input: the product and its copies.

        peft casts the input to the adapter's fp32, of which dropout creates another copy, before autocast's
        own copy (``tuners/lora/layer.py``). In addition: the outputs of the projection and of the norm, and
        the residual stream, unless these are saved anyway. A recomputation (``again``) stops before the
        adapter's output and its scaling; and the layer's input is already saved.
        """
        arch, modules = self.arch, self.modules
        if self.moe or names_of(arch).down not in (modules.targets or ()):
            return 0
        copied = modules.recasts or modules.adapter_dropout
        inner = arch.intermediate_size * (
            copied * modules.compute + modules.recasts * FP32 * (1 + modules.adapter_dropout)
        )
        passes_dropped = modules.recasts and modules.adapter_dropout
        rows = 1 + copied + (0 if again or passes_dropped else 2)
        # The residual stream at this point, at the layer's input and at the model's input.
        streams = (modules.stream < FP32) * (1 if again else 3)
        kept_inputs = rows * self.row + streams * self.stream
        held: int = self.everything + ceil_div(inner, self.parts.tp) + kept_inputs
        return held

    def waiting_for_recomputation(self) -> int:
        """Return the bytes of gradients in the layer before backward unpacks the first saved tensor.

        This is the gradient of the adapter's unscaled output; or of the down projection's input, if the
        frozen quantized base saves nothing.
        """
        if self.moe:
            return 0
        if names_of(self.arch).down in (self.modules.targets or ()):
            return self.row
        if not self.modules.quantized:
            return 0
        waiting: int = ceil_div(self.arch.intermediate_size * self.modules.compute, self.parts.tp)
        return waiting

    def product_of_few_bits(self) -> int:
        """Return the bytes at the quantized base's down projection, without the dequantized matrix.

        These are its unsaved input and its output; for int8 the input in 16 and 8 bits. In addition: the
        norm's output, and the residual stream at this point, at the layer's and at the model's input, unless
        norms have saved these very tensors in fp32.
        """
        arch, modules = self.arch, self.modules
        if not modules.quantized or self.moe:
            return 0
        inner, c = arch.intermediate_size, modules.compute
        held = self.everything + self.row
        if not modules.stream_copies(*list_stream_readers(arch)[1]):
            held += self.row
        if modules.stream < FP32:
            held += 3 * self.stream
        if modules.int8_base:
            return held + inner * (HALF + 1)
        passing = inner * c * (1 - modules.inner_copies(names_of(arch).down))
        return held + passing + inner * FP32 * (modules.normed > c)

    def _scores_forward(self) -> int:
        """Return the bytes of unfused attention in forward, before the feed-forward saves anything."""
        arch, modules = self.arch, self.modules
        saved = compute_saved_scores(arch, modules)
        if not saved:
            return 0
        each = arch.num_attention_heads * modules.seq_len
        until = self.everything - self.mlp - self.own_norm * (2 if self.behind else 1)
        scores: int = ceil_div(compute_scores_in_forward(arch, modules, each) - saved, self.parts.tp)
        held: int = compute_kept_masks(arch, modules, "full") + until + scores
        return held

    def _experts_forward(self) -> int:
        """Return the bytes when expert rows are weighted and reordered, their inputs still alive."""
        experts = self.arch.mixture_of_experts
        if not self.moe or experts is None:
            return 0
        width, weighted = get_expert_row_widths(self.arch, self.modules)
        rows = experts.num_experts_per_tok * self.arch.hidden_size
        return self.everything + rows * (2 * weighted + (0 if self.trained else width))

    def in_passing(self, recompute: str) -> int:
        """Return the maximum bytes of the layer's forward while autograd saves nothing of it."""
        experts, tp = self.arch.mixture_of_experts, self.parts.tp
        if self.moe and experts is not None:
            width, weighted = get_expert_row_widths(self.arch, self.modules)
            # Rows in, rows out, weighted rows, and rows in token order.
            inner = 2 * experts.num_experts_per_tok * self.arch.hidden_size * (width + weighted)
        else:
            branches = 3 if self.arch.gated_mlp else 2
            inner = ceil_div(branches * self.arch.intermediate_size * self.modules.compute, tp)
            if recompute == "selective":
                # The outputs of the down projection and its adapter are saved, but not computed yet.
                inner -= self.row * (1 + (names_of(self.arch).down in (self.modules.targets or ())))
        held: int = self.stream + self.row + max(inner, self._scores_in_passing(recompute))
        return held

    def _scores_in_passing(self, recompute: str) -> int:
        """Return unfused attention's bytes, less what is kept of later operators and of the scores."""
        if not compute_saved_scores(self.arch, self.modules):
            return 0
        each = self.arch.num_attention_heads * self.modules.seq_len
        scores: int = compute_scores_in_forward(self.arch, self.modules, each)
        later = 0
        if recompute == "selective":
            kept = list_kept_by_selective(self.arch, self.moe, self.modules)
            later = self.parts.part([one for one in kept if one.operator in ("mlp", "experts")])
            if not family_of(self.arch).has_attention_sinks:  # which make three more of the kept product
                scores -= each * self.modules.compute
        on_rank: int = ceil_div(scores, self.parts.tp) - later
        return on_rank

    def backward(self) -> list[LayerPeak]:
        """Return the peak candidates of the layer's backward, from its end to its start."""
        weights = self.weights
        left = self.everything - self.behind
        found = self._experts(left) if self.moe else self._feed_forward(left)
        left -= self.mlp
        here = self._here(left, self.own_norm)
        found.append(self._at(here + self.stream + self.norm, weights.feed_forward))
        left -= self.own_norm
        if self.behind:
            left -= self.own_norm
        before_core = weights.feed_forward + weights.output
        held = self._here(left, self.output) + self.stream + self.cast + self.output
        found.append(self._at(held, before_core, weights.output, weights.output))
        held = self._here(left, left - 2 * self.own_norm) + self.stream
        found.append(self._at(held + self._core(), before_core))
        held = self._here(self.own_norm, self.row) + self.stream + self.query
        found.append(self._at(held, weights.everything, weights.query, weights.query))
        found.append(self._at(self.own_norm + self.stream + self.norm, weights.everything))
        return found

    def _at(self, held: int, done: int, making: int = 0, dequantized: int = 0) -> LayerPeak:
        """Return a candidate with gradients of ``done`` weights; without them if the base is frozen."""
        if not self.trained:
            return LayerPeak(held, dequantized_weights=dequantized)
        experts = self.weights.expert_down + self.weights.expert_up
        # In backward, attention comes after routed experts, shared experts before.
        return LayerPeak(held, done, making, 0, done - (experts if done >= experts else 0))

    def _feed_forward(self, left: int) -> list[LayerPeak]:
        arch, modules, weights = self.arch, self.modules, self.weights
        inner = ceil_div(arch.intermediate_size * modules.compute, self.parts.tp)
        product = inner * modules.inner_copies(names_of(arch).down)
        taken = ceil_div(
            arch.intermediate_size * modules.compute * count_inner_gradients(arch, modules), self.parts.tp
        )
        # With biases, one operator computes all three gradients and frees its input only afterwards.
        at_once = weights.down if arch.mlp_bias else 0
        whole = self._here(left, product) + self.stream + self.cast + inner
        gone = self._here(left - product, 0) + self.stream + self.cast + inner
        # The product's gradient takes the place of the freed saved product.
        parted = self._here(left, self.mlp - inner if arch.gated_mlp else self.mlp) + self.stream + taken
        found = [
            self._at(whole, weights.down, at_once, weights.down),
            self._at(gone, weights.down, weights.down),
            self._at(parted, weights.down),
        ]
        if arch.gated_mlp and modules.kernels != "liger":
            held = self._here(left - product - 2 * inner, self.row + inner) + self.stream + inner + self.row
            found.append(self._at(held, weights.down + weights.up, weights.up, weights.up))
        elif not arch.gated_mlp:
            held = self._here(left - self.mlp, 0) + self.stream + inner + 2 * self.row
            found.append(self._at(held, weights.feed_forward, weights.up, weights.up))
        return found

    def _experts(self, left: int) -> list[LayerPeak]:
        arch, modules, weights = self.arch, self.modules, self.weights
        experts = arch.mixture_of_experts
        assert experts is not None
        left = self._here(left, self.mlp)
        c, hidden, rows = modules.compute, arch.hidden_size, experts.num_experts_per_tok
        # Grouped matmuls are not autocast: they run in the weights' dtype.
        width = modules.stream
        shared = weights.feed_forward - weights.expert_down - weights.expert_up
        first = self.done(shared)
        found = []
        if experts.shared_expert_intermediate_size:
            wide = experts.shared_expert_intermediate_size * c
            found.append(self._at(left + self.stream + 2 * wide, weights.down, dequantized=weights.down))
            left -= (3 + modules.inner_copies("down_proj")) * wide
        # Gradients of the weighted rows, of their sum and of the router weights, in the router's dtype; a
        # cast.
        weight = get_expert_row_widths(arch, modules)[1]
        weighted = rows * hidden * (3 * weight + (width if width < weight else 0))
        found.append(LayerPeak(left + self.stream + weighted, first, autocast_weights=first))
        inner = rows * experts.moe_intermediate_size * width
        unweighted = rows * hidden * width
        left -= unweighted
        down, up = self.done(weights.expert_down), self.done(weights.expert_up)
        made = first + down
        found.append(LayerPeak(left + self.stream + unweighted + inner, made, 0, down, first))
        found.append(
            LayerPeak(left + self.stream + inner * (2 if self.trained else 3), made, autocast_weights=first)
        )
        saved = sum(t.bytes_per_token for t in list_expert_tensors(arch, modules) if t.operator == "experts")
        # Gradients of both branches together and of the rows, and the rows themselves.
        both = rows * width * (2 * experts.moe_intermediate_size + 2 * hidden)
        found.append(LayerPeak(left + unweighted - saved + self.stream + both, made + up, 0, up, first))
        return found

    def _core(self) -> int:
        """Return the bytes of gradients inside attention: of its operands and output, or of the scores."""
        arch, modules = self.arch, self.modules
        c, width = modules.compute, get_attention_widths(arch)
        each = arch.num_attention_heads * modules.seq_len
        if compute_saved_scores(arch, modules):
            # The dropped probabilities are freed once their gradient exists, and make room for the softmax's.
            scores = each * (1 if modules.dropout else 2) * FP32
            if is_eager(arch, modules):
                scores = compute_scores_in_backward(arch, modules, each)
            # By then the values and the projection's input are freed, and the values' gradient exists.
            found = scores - width.output * c * modules.inner_copies(names_of(arch).output)
        else:
            inputs = 3 * width.query if passes_mask(arch, modules) else width.inputs
            found = (width.output + inputs) * c
        on_rank: int = ceil_div(found, self.parts.tp)
        return on_rank


def get_expert_row_widths(arch: Architecture, modules: Modules) -> tuple[int, int]:
    """Return bytes per element of expert rows, and of weighted rows: most routers' weights are fp32.

    Grouped matmuls are not autocast: they run in the weights' dtype.
    """
    width = modules.stream
    return width, width if family_of(arch).casts_router_weights else FP32


def compute_scores_in_forward(arch: Architecture, modules: Modules, each: int) -> int:
    """Return bytes of scores alive at once in forward, saved ones included."""
    c = modules.compute
    if family_of(arch).has_attention_sinks:
        return 3 * each * modules.stream
    return each * (c + FP32 + (c if family_of(arch).has_softcapping else 0) + (c if c < FP32 else 0))


def compute_scores_in_backward(arch: Architecture, modules: Modules, each: int) -> int:
    """Return bytes of gradients of probabilities and softmax, less the freed cast of the probabilities."""
    if family_of(arch).has_attention_sinks:
        # The softmax's gradient, and its copy with the sink's column, to which the maximum's gradient is
        # added.
        return 2 * each * modules.stream
    return each * (modules.compute + FP32)


# ---- Weights of one layer's matrices, in groups that get gradients together


class Weights(NamedTuple):
    """Number of weights of one layer's matrices on one rank, in groups that get gradients together."""

    down: int
    up: int
    """The largest matrix that reads the feed-forward's input."""
    feed_forward: int
    """The whole feed-forward, without its norm."""
    output: int
    query: int
    """The largest matrix that reads attention's input."""
    everything: int
    expert_down: int
    expert_up: int


@lru_cache(maxsize=4096)
def count_layer_weights(arch: Architecture, moe: bool, tp: int) -> Weights:
    """Return the :class:`Weights` of one layer on one of ``tp`` ranks."""
    names = names_of(arch)
    shapes = list_rank_shapes(arch, moe, tp, 1)

    def numbers(*groups: str) -> int:
        return sum(s.copies * s.rows * s.columns for s in shapes if s.group in groups)

    def of(module: str, group: str) -> int:
        found = [s.copies * s.rows * s.columns for s in shapes if s.group == group and f".{module}" in s.name]
        return max(found, default=0)

    feed_forward = numbers("mlp", "experts", "shared_experts", "router")
    own = "shared_experts" if moe else "mlp"
    inputs = [s.rows * s.columns for s in shapes if s.group == own and f".{names.down}." not in s.name]
    attention = [
        s.rows * s.columns for s in shapes if s.group == "attention" and f".{names.output}." not in s.name
    ]
    return Weights(
        down=of(f"{names.down}.", own),
        up=max(inputs, default=0),
        feed_forward=feed_forward,
        output=of(f"{names.output}.", "attention"),
        query=max(attention, default=0),
        everything=sum(s.copies * s.rows * s.columns for s in shapes),
        expert_down=of("down_proj", "experts"),
        expert_up=of("gate_up_proj", "experts"),
    )


def count_inner_gradients(arch: Architecture, modules: Modules) -> int:
    """Return how many intermediate-size gradients are alive at once, less the freed saved product."""
    if not arch.gated_mlp:
        product = modules.inner_copies(names_of(arch).down)
        activation = family_of(arch).activation
        if activation == "gelu_new":
            # CUDA's autocast computes its cube in fp32, and so the gradients of both factors.
            return (6 if modules.autocast and modules.on_gpu else 3) - product
        # One kernel: the gradients of its output and input. The squared ReLU has two more.
        return (4 if activation == "relu2" else 2) - product
    if modules.kernels == "liger":
        # Both branches' gradients overwrite the branches (liger-kernel, ops/swiglu.py).
        return 1
    if modules.kernels == "compiled":
        # One kernel computes both branches' gradients, and one of them overwrites its branch: buffers donated
        # to a compiled backward are reused (torch/_inductor/ir.py, DonatedBuffer).
        return 1 if modules.inner_copies("down_proj") else 2
    return 2 if modules.inner_copies("down_proj") else 3
