"""Sizes of activations that ZeRO's peak candidates need (``peaks.py``), as transformers' modules run."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.number_format import format_count
from shardscope.core.ops import ceil_div, map_distinct, where
from shardscope.core.precision import FP32
from shardscope.families.parameter_names import list_mlp_inputs, list_parameter_names
from shardscope.families.registry import find_family
from shardscope.frameworks.deepspeed.memory.partition_parameters import shards_tied_head
from shardscope.memory.activations.forward import compute_layer_activations, compute_unsaved_at_start
from shardscope.memory.activations.head import compute_logits_terms, resolve_loss
from shardscope.memory.activations.largest_layer import compute_layer_backward
from shardscope.memory.activations.modules.attention import compute_saved_scores, list_windows
from shardscope.memory.activations.modules.experts import get_expert_row_widths
from shardscope.memory.report import Term, choose_term

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.plan import Plan
    from shardscope.memory.activations.modules.saved_tensors import Modules
    from shardscope.memory.activations.stage_activations import TransformersActivations
    from shardscope.memory.state.stages import Stage


class ActivationSizes(NamedTuple):
    """Sizes on one rank that only some peak candidates of backward need, in bytes unless noted."""

    logits: int
    """Gradient of the logits in the compute type; 0 if the logits are never materialized whole."""
    first_norm: int
    """Input and gradients in a layer's first norm, the last in backward, with the residual stream's."""
    freed: tuple[int, ...]
    """Bytes of a dense layer that are freed, compared to the backward of its activation product, when each
    matrix of its feed-forward gets its gradient."""
    product: int
    """Activation product of a dense feed-forward, the input of its down projection."""
    down_projection: int
    """Elements of the down projection, whose gradient is computed while the product is still alive."""
    adapts_down: bool
    """Whether an adapter has its gradient before the feed-forward's maximum: that of the down projection."""
    adapts_before_scores: bool
    """Whether an adapter has its gradient before attention's scores: any but those of queries, keys and
    values."""
    adapter_inputs: int
    """Gradients of the stream and of the adapters' inputs in a dense layer, on top of its saved tensors; 0
    unless the feed-forward's first matrices have adapters and the down projection has none."""
    unsaved: int
    """Tensors that the first layer with adapters does not save when it is recomputed."""
    windowed: bool | None
    """Whether these are the sizes of layers with a sliding window or without one; None: of all layers."""
    num_layers: int
    """Number of layers of the stage."""
    num_moe_layers: int
    """Number of these with routed experts; they come last."""
    has_scores: bool
    """Whether attention scores are materialized."""
    fetches_one_by_one: bool
    """Whether offloaded activations are fetched one by one: only transformers' modules are modelled so; for
    others all are counted at once."""
    attention: int
    """Saved tensors of one layer before its feed-forward."""
    leaf_rows: int
    """Rows that the routed experts of a ZeRO-3 leaf have read, which exist while the last of their gradients
    is computed; 0 for other layers: the hook of each matrix reduces its gradient when the rows are freed."""
    interval: int
    """One of this many layers is recomputed or offloaded; 1: all or none."""


def list_activation_sizes(plan: Plan, stage: Stage, modules: Modules) -> list[ActivationSizes]:
    """Return the sizes of ``stage``: with a sliding window and without, if layers differ in that."""
    windows = list_windows(plan.architecture, modules)
    return [_compute_sizes(plan, stage, modules.with_window(windowed)) for windowed in windows]


def _compute_sizes(plan: Plan, stage: Stage, modules: Modules) -> ActivationSizes:
    """Return the sizes of ``stage``, operator by operator, as transformers' modules run."""
    arch = plan.architecture
    recipe, tp = plan.recipe, plan.degrees.tp
    names, targets = list_parameter_names(arch), set(modules.targets or ())
    tokens = recipe.micro_batch_size * recipe.seq_len
    vocab = ceil_div(arch.vocab_size, tp if shards_tied_head(arch) else 1)
    has_whole_logits = resolve_loss(plan) == "full"
    layer = compute_layer_backward(arch, False, modules)
    feed_forward, inner = layer.at_product - layer.stream_gradient, arch.intermediate_size * modules.compute
    # What the feed-forward has freed at the gradient of its down, up and gate projection.
    if arch.gated_mlp:
        has_fused_gate_up = names.fused_gate_up is not None
        freed_later = (2 * inner,) if has_fused_gate_up else (inner, 3 * inner)
    else:
        freed_later = (inner,)
    freed = tuple(ceil_div(tokens * (feed_forward + inputs), tp) for inputs in (0, *freed_later))
    # The norm's input, and x^2's gradient in plain operations: of those four and what they start from.
    stream = arch.hidden_size * modules.stream
    in_norm = 3 * stream
    if arch.norm == "rmsnorm" and modules.kernels == "transformers":
        in_norm = 6 * arch.hidden_size * FP32
    layer_input = stream if recipe.recompute == "full" else 0
    recomputes = recipe.recompute in ("full", "selective")
    adapter_inputs = stream + 2 * arch.hidden_size * modules.compute
    return ActivationSizes(
        logits=tokens * vocab * modules.compute * has_whole_logits * stage.is_last,
        first_norm=tokens * (stream + in_norm + layer_input),
        freed=freed,
        product=ceil_div(tokens * inner, tp),
        down_projection=ceil_div(arch.intermediate_size * arch.hidden_size, tp),
        adapts_down=names.down in targets,
        adapts_before_scores=not targets.isdisjoint((names.down, names.output, *list_mlp_inputs(arch))),
        adapter_inputs=tokens * adapter_inputs * _adapts_only_mlp_inputs(arch, modules),
        windowed=modules.windowed,
        num_layers=stage.num_layers,
        num_moe_layers=stage.num_moe_layers,
        has_scores=compute_saved_scores(arch, modules) > 0,
        fetches_one_by_one=_fetches_one_by_one(plan, modules),
        attention=tokens * map_distinct(lambda tp: _compute_attention_bytes(arch, modules, tp), tp),
        leaf_rows=ceil_div(tokens * _compute_leaf_rows(arch, modules), tp),
        interval=recipe.recompute_interval if recipe.recompute != "none" else 1,
        unsaved=tokens * map_distinct(lambda tp: compute_unsaved_at_start(arch, modules, tp, 1), tp)
        if recomputes
        else 0,
    )


def _compute_leaf_rows(arch: Architecture, modules: Modules) -> int:
    experts = arch.mixture_of_experts
    if experts is None or not modules.trained or not find_family(arch).is_zero3_leaf:
        return 0
    return experts.num_experts_per_tok * arch.hidden_size * get_expert_row_widths(arch, modules)[0]


def _adapts_only_mlp_inputs(arch: Architecture, modules: Modules) -> bool:
    if modules.targets is None or list_parameter_names(arch).down in modules.targets:
        return False
    return not set(modules.targets).isdisjoint(list_mlp_inputs(arch))


def _fetches_one_by_one(plan: Plan, modules: Modules) -> bool:
    """Return whether offloaded activations are modelled one by one: those of transformers' modules."""
    return plan.recipe.recompute == "offload" and plan.on_gpu and modules.kernels == "transformers"


def _compute_attention_bytes(arch: Architecture, modules: Modules, tp: int) -> int:
    """Return the bytes per token saved by attention and by the norms before it, half of a layer's norms."""
    layer = compute_layer_activations(arch, arch.num_moe_layers > 0, modules, "none", tp, 1)
    return layer.attention + layer.norms // 2


def find_logits(step: TransformersActivations) -> tuple[Term, Term]:
    """Return the logits and loss at the end of forward, and at the start of backward. Bytes.

    AutoTP follows transformers' tensor-parallel plan: an untied head's logits are all-gathered, so that every
    rank has the whole vocabulary; a tied head stays sharded, and DeepSpeed's own loss uses sharded logits
    (``deepspeed/sequence/cross_entropy.py``, ``_VocabParallelCrossEntropy``).
    """
    plan, arch = step.plan, step.plan.architecture
    replicated = compute_logits_terms(
        plan, step.modules, step.tokens, step.stage.is_last, vocab=arch.vocab_size
    )
    if not shards_tied_head(arch) or resolve_loss(plan) != "full":
        return replicated
    tp, width = plan.degrees.tp, step.modules.compute
    vocab = ceil_div(arch.vocab_size, tp)
    # With several sequences, dropping each one's last logits makes a copy.
    shifted = where(plan.recipe.micro_batch_size > 1, width, 0)
    fp32_copy, gradient_cast = (FP32, width) if width < FP32 else (0, 0)
    # Forward: the fp32 copy, the logits minus their maximum and their exponential. Backward: the softmax, its
    # gradient and the gradient's cast.
    forward = width + shifted + fp32_copy + 2 * FP32
    backward = 2 * FP32 + gradient_cast + shifted

    def compute_sharded(bytes_per_logit: int) -> Term:
        return Term(
            step.stage.is_last * step.tokens * vocab * bytes_per_logit,
            lambda: (
                f"{format_count(step.tokens, 'token')} × {vocab:,} of the vocabulary × {bytes_per_logit} "
                "bytes · DeepSpeed's vocabulary-parallel cross entropy"
            ),
        )

    at_end, at_start = replicated
    return choose_term(tp > 1, compute_sharded(forward), at_end), choose_term(
        tp > 1, compute_sharded(backward), at_start
    )
