"""Megatron-core's training state: half-precision weights, fp32 main gradients, fp32 main weights and moments.

A parameter takes 18 bytes without the distributed optimizer, and 6 + 12 / data-parallel ranks with it
(Megatron-LM, docs/source/api-guide/dist_optimizer.md). The vocabulary is padded to a multiple of 128 x tp,
and the distributed optimizer's buffers to equal shards.
"""

from __future__ import annotations

from functools import lru_cache, partial
from math import lcm
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.number_format import format_gib
from shardscope.core.ops import ceil_div, group_equal, map_distinct, maximum, minimum, pick_largest_row, where
from shardscope.core.precision import FP32, num_moments, widths
from shardscope.frameworks.megatron.core_config import MAKE_VOCAB_SIZE_DIVISIBLE_BY, compute_padded_vocab_size
from shardscope.frameworks.megatron.fp8 import SOURCE, compute_weight_copies, count_operand_copies
from shardscope.frameworks.megatron.layout import count_replicas, get_layout
from shardscope.frameworks.megatron.memory import precision_aware
from shardscope.frameworks.megatron.memory.peaks import compute_stage_activations
from shardscope.frameworks.megatron.memory.pipeline import count_chunk_layers
from shardscope.memory.activations.modules.attention import get_attention_widths, resolve_attention
from shardscope.memory.activations.modules.megatron import count_branches
from shardscope.memory.report import Term, sum_parts, zero_term
from shardscope.memory.state.stages import (
    Stage,
    StageShape,
    StageShapes,
    count_layer_shard,
    count_stage_weights,
    find_stage_shapes,
)
from shardscope.memory.state.training_state import PeakCandidate, TrainingState

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.plan import Plan
    from shardscope.memory.activations.modules.saved_tensors import Modules
    from shardscope.memory.report import Component

counts_neighbours = False
branches_on_stages = False
_DUMMIES = (
    "one half-precision gradient of each shape of matrix, returned to autograd while kernels add to the "
    "main gradients (Transformer Engine, get_dummy_wgrad)"
)
_WORD = 128
"""Elements to a multiple of which the distributed optimizer pads its buffers (param_and_grad_buffer.py)."""


def find_shapes(plan: Plan) -> StageShapes:
    """Return the shapes of the pipeline stages, each with the layers of all its model chunks."""
    arch, degrees = plan.architecture, plan.degrees
    if not arch.num_moe_layers:
        return find_stage_shapes(arch, plan.stage_layers)
    chunks = (count_chunk_layers(arch, degrees.pp, degrees.vpp, number) for number in range(degrees.pp))
    return find_stage_shapes(
        arch, plan.stage_layers, tuple(sum(moe for _, moe in layers) for layers in chunks)
    )


def count_weights(plan: Plan, shape: StageShape) -> Stage:
    """Return one stage with its parameter counts: vocabulary padded, experts sharded by their own tp."""
    arch, degrees, layout = plan.architecture, plan.degrees, get_layout(plan)
    weights = count_stage_weights(plan, shape, MAKE_VOCAB_SIZE_DIVISIBLE_BY * degrees.tp)
    if not arch.num_moe_layers:
        return weights
    experts = map_distinct(
        lambda tp, ep: count_layer_shard(arch, True, tp, ep, 1).experts,
        layout.expert_tp,
        degrees.ep,
    )
    return weights._replace(experts=weights.num_moe_layers * experts)


class _Widths(NamedTuple):
    """Bytes per parameter."""

    half: int
    """Of a weight in the compute type."""
    gradient: int
    main: int
    """Of the optimizer's fp32 copy of a weight; 0 if the weights are fp32 themselves."""
    state: int
    """Of the main copy and the moments."""


def _find_widths(plan: Plan) -> _Widths:
    layout, recipe = get_layout(plan), plan.recipe
    half = widths[recipe.precision].compute
    gradient = FP32 if precision_aware.reduces_in_fp32(layout, recipe) else half
    main = FP32 if half < FP32 else 0
    if layout.use_precision_aware_optimizer:
        return _Widths(half, gradient, main, precision_aware.compute_state_width(layout, recipe))
    return _Widths(half, gradient, main, main + num_moments[recipe.optimizer] * FP32)


def compute_training_state(plan: Plan, stage: Stage) -> TrainingState:
    """Return the training state of one rank, with the model sharded by tp, pp and ep."""
    layout = get_layout(plan)
    half, gradient, main, _ = width = _find_widths(plan)
    counts = _count_buffer_elements(plan, stage)
    weights, updated = counts.weights, counts.updated
    gradients = Term(
        weights * gradient,
        lambda: f"{weights:,} × {gradient} bytes · gradients in one contiguous buffer that is never freed",
    )

    # Staging buffers, which are allocated once, and the gradient of the embedding at the end of backward.
    dummies, shared = _count_staging_elements(plan, stage)
    embedding = half * _count_embedding_gradient_elements(plan, stage)
    buffers = (
        (half * dummies, _DUMMIES),
        (half * shared, "buffer for the sequence all-gathered over tp, and for eager attention's scores"),
    )
    gathered = sum_parts(*buffers)

    def find_peaks(stage: Stage, modules: Modules) -> list[PeakCandidate]:
        activations = compute_stage_activations(plan, stage, modules)
        with_embedding = sum_parts((embedding, "half-precision gradient of an embedding"), *buffers)
        # Fractions of a step: the order of the peaks in time.
        return [
            PeakCandidate.from_terms(
                0.33, activations.forward, gathered, gradients, activations.logits_forward, phase="forward"
            ),
            PeakCandidate.from_terms(
                0.34, activations.head, gathered, gradients, activations.logits_backward
            ),
            PeakCandidate.from_terms(0.36, activations.first, gathered, gradients),
            PeakCandidate.from_terms(0.97, activations.last, with_embedding, gradients),
        ]

    # A precision-aware optimizer makes its copies at its first step (te.optimizers.FusedAdam).
    main_copies = 0 if layout.use_precision_aware_optimizer else main * updated
    return TrainingState(
        parameters=_compute_parameters(plan, stage, weights, half),
        gradients=gradients,
        optimizer=_compute_optimizer(plan, counts, width.state),
        initialisation=_compute_initialisation(plan, counts, half, gradient, main_copies),
        optimizer_working=precision_aware.compute_working_memory(
            layout, counts.dense_updated, counts.experts_updated
        )
        if layout.use_precision_aware_optimizer
        else Term(
            FP32 * updated if gradient < FP32 else 0,
            lambda: f"{updated:,} × {FP32} bytes · fp32 copies of this rank's gradients for the update",
        ),
        gather_rest=gathered,
        group_sizes=_list_group_sizes(plan, stage),
        keeps_gradients=True,
        find_peaks=find_peaks,
    )


def _compute_parameters(plan: Plan, stage: Stage, weights: int, half: int) -> Term:
    """Return the weights of one rank and, with fp8, their copies in 8 bits."""
    eight_bit = compute_weight_copies(plan, stage)

    def explain() -> str:
        weights_text = f"{weights:,} parameters of this rank × {half} bytes{_describe_sharding(plan)}"
        if plan.recipe.precision != "fp8-mixed":
            return weights_text
        layouts = (
            "row by row and transposed"
            if count_operand_copies(plan.cluster.gpu) == 2
            else "which need no transposes"
        )
        return (
            f"{weights_text} + {format_gib(eight_bit)} GiB copies of the layers' matrices in 8 bits, "
            f"{layouts}: {SOURCE}"
        )

    return Term(weights * half + eight_bit, explain)


def _compute_optimizer(plan: Plan, counts: _BufferElements, state_width: int) -> Term:
    """Return this rank's shard of the optimizer state, ``state_width`` bytes per parameter."""
    layout, recipe = get_layout(plan), plan.recipe

    def explain() -> str:
        split = (
            f" / {counts.dense_ranks} data- and context-parallel ranks"
            if layout.distributed_optimizer
            else ""
        )
        of_experts = f" + {counts.experts:,} of experts / {counts.expert_ranks}" if counts.experts else ""
        count_text = f"({counts.dense:,}{split}{of_experts}) × {state_width} bytes · "
        if layout.use_precision_aware_optimizer:
            return count_text + precision_aware.describe_state(layout, recipe)
        return (
            f"{count_text}fp32 main copy and {recipe.optimizer} moments "
            f"(distributed_optimizer={layout.distributed_optimizer})"
        )

    return Term(state_width * counts.updated, explain)


class _BufferElements(NamedTuple):
    """Elements of the contiguous buffers of one rank, padding included, and of its shard of the optimizer."""

    dense: int
    experts: int
    dense_ranks: int
    """Ranks over which the optimizer state of dense weights is sharded; 1 without a distributed optimizer."""
    expert_ranks: int
    dense_updated: int
    """Dense weights that this rank updates."""
    experts_updated: int

    @property
    def weights(self) -> int:
        """Elements of all buffers."""
        return self.dense + self.experts

    @property
    def updated(self) -> int:
        """Weights that this rank updates."""
        return self.dense_updated + self.experts_updated


def _count_buffer_elements(plan: Plan, stage: Stage) -> _BufferElements:
    """Return the elements of one rank's buffers, which the distributed optimizer pads and shards."""
    dense_ranks = expert_ranks = 1
    unpadded_dense, unpadded_experts = dense, experts = stage.layers + stage.edges, stage.experts
    if get_layout(plan).distributed_optimizer:
        dense_ranks, expert_ranks = count_replicas(plan)
        dense, experts = _pad_buffer(dense, dense_ranks), _pad_buffer(experts, expert_ranks)
    return _BufferElements(
        dense,
        experts,
        dense_ranks,
        expert_ranks,
        # Padding has no moments: with one rank, the shard is the whole buffer, padding included.
        dense_updated=minimum(ceil_div(dense, dense_ranks), unpadded_dense),
        experts_updated=minimum(ceil_div(experts, expert_ranks), unpadded_experts),
    )


def _count_embedding_gradient_elements(plan: Plan, stage: Stage) -> int:
    """Return the elements of the embedding's gradient, which ``torch.nn.functional.embedding`` allocates.

    All other matrices add to their main gradients in the matmul kernel.
    """
    arch = plan.architecture
    elements = stage.is_first * _count_embedding_elements(plan)
    if arch.tie_word_embeddings:
        # Autograd adds it to the head's gradient out of place, into a third tensor.
        elements = elements * (1 + stage.is_last)
    if arch.position_embedding == "learned":
        elements = maximum(elements, stage.is_first * arch.max_position_embeddings * arch.hidden_size)
    return elements


def _compute_initialisation(
    plan: Plan, counts: _BufferElements, half: int, gradient: int, main_copies: int
) -> dict[Component, Term]:
    """Return the larger of two peak candidates, each (parameter bytes, gradient bytes, main weight bytes).

    The first is while ``DistributedDataParallel`` wraps the modules. The second is once the optimizer has
    copied its weights to fp32 (``Float16OptimizerWithFloat16Params``, ``DistributedOptimizer``), before it
    has any moments: ``main_copies`` bytes.
    """
    layout, degrees = get_layout(plan), plan.degrees
    dense, experts, weights = counts.dense, counts.experts, counts.weights
    # Dense weights move into their buffer first, then experts' weights into theirs
    # (distributed_data_parallel.py, _allocate_buffers_for_parameters). Model chunks follow one another.
    apart = (degrees.ep > 1) & (experts > 0)
    moved, moving = where(apart, experts, weights), weights
    if layout.distributed_optimizer:
        # The peak is at the dense weights if they exceed what the experts' weights and gradients add.
        dense_first = apart & (dense * half > experts * (half + gradient))
        moved, moving = where(dense_first, dense, moved), where(dense_first, dense, moving)
    moved = ceil_div(moved, degrees.vpp)
    # Only the distributed optimizer has a weight buffer: each weight exists twice until it has moved.
    wrapped = ((weights + (moved if layout.distributed_optimizer else 0)) * half, moving * gradient, 0)
    optimized = (weights * half, weights * gradient, main_copies)
    rows = [(sum(candidate), *candidate) for candidate in (wrapped, optimized)]
    _, parameters, gradients, copies = pick_largest_row(rows)
    return {
        "parameters": Term(
            parameters, lambda: "the modules' weights, and the buffer that they are copied to"
        ),
        "gradients": Term(gradients, lambda: "the gradient buffers allocated so far"),
        "optimizer": Term(copies, lambda: "fp32 copies of this rank's weights"),
        "gather_buffers": zero_term("no collective has run"),
    }


def _list_group_sizes(plan: Plan, stage: Stage) -> tuple[int, ...]:
    """Return the size of each process group that this rank is in (megatron/core/parallel_state.py).

    In addition to one group for each parallelism: the model-parallel group, which sums the gradient norm;
    the pair of first and last stage that share an embedding; and with fp8 the group that reduces amax values
    (``get_amax_reduction_group``).
    """
    degrees = plan.degrees
    model_parallel = where((degrees.tp > 1) & (degrees.pp > 1), degrees.tp * degrees.pp, 1)
    shares = plan.architecture.tie_word_embeddings & (degrees.pp > 1) & (stage.is_first | stage.is_last)
    replicas = group_equal(degrees.data_parallel * degrees.cp)
    # The embedding group of first and last stage has two ranks, or one where nothing is shared.
    groups = (replicas, degrees.tp, degrees.pp, degrees.ep, model_parallel, 1 + shares)
    return (*groups, replicas * degrees.tp) if plan.recipe.precision == "fp8-mixed" else groups


def _pad_buffer(numel: int, ranks: int) -> int:
    """Return the elements of a buffer, padded so that the distributed optimizer can shard it evenly.

    The padding of each parameter and bucket is left out: at most 63 elements each, none where sizes are
    multiples of 64, and always negligible.
    """
    multiple = map_distinct(partial(lcm, _WORD), ranks)
    return ceil_div(numel, multiple) * multiple


def _count_embedding_elements(plan: Plan) -> int:
    """Return the elements of the token embedding on one rank."""
    rows = compute_padded_vocab_size(plan.architecture.vocab_size, plan.degrees.tp) // plan.degrees.tp
    return plan.architecture.hidden_size * rows


def _count_staging_elements(plan: Plan, stage: Stage) -> tuple[int, int]:
    """Return the elements of a rank's dummy gradients, and of its buffer for all-gathered sequences."""
    arch, recipe, degrees, layout = plan.architecture, plan.recipe, plan.degrees, get_layout(plan)
    dummies = map_distinct(
        partial(_count_dummy_gradients, arch),
        degrees.tp,
        layout.expert_tp,
        stage.num_layers > stage.num_moe_layers,
        stage.num_moe_layers > 0,
        stage.is_last,
    )
    tokens = group_equal(recipe.micro_batch_size * ceil_div(recipe.seq_len, degrees.cp))
    # The input of a matmul over all tokens: the residual stream, or latent attention's compressed queries or
    # values.
    latent = arch.latent_attention
    ranks = (latent.q_lora_rank or 0, latent.kv_lora_rank) if latent else ()
    widest = max((arch.hidden_size, *ranks))
    scores = 0
    if resolve_attention(plan) == "eager":
        # baddbmm of queries and keys takes a buffer that is never freed (dot_product_attention.py, "mpu").
        rows = recipe.micro_batch_size * ceil_div(arch.num_attention_heads, degrees.tp)
        scores = rows * recipe.seq_len * recipe.seq_len
    # The all-gathered sequence shares that buffer (name "mpu", same dtype; core/utils.py,
    # GlobalMemoryBuffer).
    return dummies, maximum(layout.splits_sequence * tokens * widest, scores)


@lru_cache(maxsize=4096)
def _count_dummy_gradients(
    arch: Architecture, tp: int, expert_tp: int, dense: bool, moe: bool, head: bool
) -> int:
    """Return the total elements of one matrix of each distinct shape on a rank, layers and head."""
    shapes: set[tuple[int, int]] = set()
    if head:
        shapes.add((compute_padded_vocab_size(arch.vocab_size, tp) // tp, arch.hidden_size))
    for is_moe, has_layers in ((False, dense), (True, moe)):
        if has_layers:
            shapes |= _list_matrices(arch, is_moe, tp, expert_tp)
    return sum(rows * columns for rows, columns in shapes)


def _list_matrices(arch: Architecture, moe: bool, tp: int, expert_tp: int) -> set[tuple[int, int]]:
    """Return the distinct (rows, columns) of one layer's weights on one rank, fused as in megatron-core."""
    hidden, width, latent = arch.hidden_size, get_attention_widths(arch), arch.latent_attention
    # The output projection, then the fused QKV or the down and up projections of latent attention.
    matrices = {(hidden, ceil_div(width.output, tp))}
    if latent is None:
        matrices.add((ceil_div(width.inputs, tp), hidden))
    else:
        expanded = arch.num_attention_heads * (latent.qk_nope_head_dim + latent.v_head_dim)
        matrices |= {
            (latent.kv_lora_rank + latent.qk_rope_head_dim, hidden),
            (ceil_div(expanded, tp), latent.kv_lora_rank),
        }
        if latent.q_lora_rank is None:
            matrices.add((ceil_div(width.query, tp), hidden))
        else:
            matrices |= {(latent.q_lora_rank, hidden), (ceil_div(width.query, tp), latent.q_lora_rank)}
    experts = arch.mixture_of_experts
    # Shared experts are sharded by tp like dense MLPs, routed experts by their own etp.
    inners = [(arch.intermediate_size, tp)]
    if moe and experts is not None:
        inners = [
            (experts.moe_intermediate_size, expert_tp),
            (experts.shared_expert_intermediate_size, tp),
        ]
    for inner, ranks in inners:
        if inner:
            matrices |= {
                (ceil_div(count_branches(arch) * inner, ranks), hidden),
                (hidden, ceil_div(inner, ranks)),
            }
    return matrices


def _describe_sharding(plan: Plan) -> str:
    names = [f"{name} {value}" for name in ("tp", "pp", "ep") if (value := getattr(plan.degrees, name)) > 1]
    return f" (after {', '.join(names)})" if names else ""
