"""Megatron-core's training state: half-precision weights, fp32 main gradients, fp32 main weights and moments.

A parameter takes 18 bytes without the distributed optimizer, and 6 + 12 / data-parallel ranks with it
(Megatron-LM, docs/source/api-guide/dist_optimizer.md). The vocabulary is padded to a multiple of 128 x tp,
and the distributed optimizer's buffers to equal shards.
"""

from __future__ import annotations

from functools import lru_cache, partial
from math import lcm
from typing import TYPE_CHECKING, Any

from shardscope.core.number_format import gib
from shardscope.core.ops import ceil_div, group_equal, map_distinct, maximum, minimum, pick_largest_row, where
from shardscope.core.precision import FP32, num_moments, widths
from shardscope.frameworks.megatron.core_config import MAKE_VOCAB_SIZE_DIVISIBLE_BY, padded_vocab_size
from shardscope.frameworks.megatron.families import check_family
from shardscope.frameworks.megatron.fp8 import SOURCE, copies, weight_copies
from shardscope.frameworks.megatron.memory import precision_aware
from shardscope.frameworks.megatron.memory.activations import stage_activations
from shardscope.frameworks.megatron.memory.replicas import replicas_of
from shardscope.frameworks.megatron.memory.schedule import chunk_layers
from shardscope.memory.activations.modules.attention import get_attention_widths as attention_widths
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
    from shardscope.memory.activations.modules.saved import Modules
    from shardscope.memory.report import Component

_DUMMIES = (
    "one half-precision gradient of each shape of matrix, which autograd is shown while kernels add to the "
    "main gradients (Transformer Engine, get_dummy_wgrad)"
)
_WORD = 128
"""Elements to a multiple of which the distributed optimizer pads its buffers (param_and_grad_buffer.py)."""


def find_shapes(plan: Plan) -> StageShapes:
    """Return the shapes of the pipeline stages, each with the layers of all its model chunks.

    Raises ``ValueError`` for a family that megatron-core has no layers for.
    """
    arch, degrees = plan.architecture, plan.degrees
    check_family(arch)
    if not arch.num_moe_layers:
        return find_stage_shapes(arch, plan.stage_layers)
    chunks = (chunk_layers(arch, degrees.pp, degrees.vpp, number) for number in range(degrees.pp))
    return find_stage_shapes(arch, plan.stage_layers, tuple(sum(moe for _, moe in each) for each in chunks))


def count_weights(plan: Plan, shape: StageShape) -> Stage:
    """Return one stage with its parameter counts: vocabulary padded, experts sharded by their own tp."""
    arch, degrees, layout = plan.architecture, plan.degrees, plan.layout
    found = count_stage_weights(plan, shape, MAKE_VOCAB_SIZE_DIVISIBLE_BY * degrees.tp)
    if not arch.num_moe_layers:
        return found
    experts = map_distinct(
        lambda tp, ep: count_layer_shard(arch, True, tp, ep, 1).experts,
        layout.expert_tp,  # type: ignore[attr-defined]
        degrees.ep,
    )
    return found._replace(experts=found.num_moe_layers * experts)


def compute_training_state(plan: Plan, stage: Stage) -> TrainingState:
    """Return the training state of one rank, with the model sharded by tp, pp and ep."""
    layout: Any = plan.layout
    degrees, recipe = plan.degrees, plan.recipe
    half = widths[recipe.precision].compute
    main = FP32 if half < FP32 else 0
    kept = main + num_moments[recipe.optimizer] * FP32
    if layout.use_precision_aware_optimizer:
        kept = precision_aware.kept_bytes(layout, recipe)
    gradient = FP32 if precision_aware.reduces_in_fp32(layout, recipe) else half
    dense_ranks = expert_ranks = 1
    own_dense, own_experts = dense, experts = stage.layers + stage.edges, stage.experts
    if layout.distributed_optimizer:
        dense_ranks, expert_ranks = replicas_of(plan)
        dense, experts = _padded(dense, dense_ranks), _padded(experts, expert_ranks)
    weights = dense + experts
    # Padding has no moments: with one rank, the shard is the whole buffer, padding included.
    dense_updated = minimum(ceil_div(dense, dense_ranks), own_dense)
    experts_updated = minimum(ceil_div(experts, expert_ranks), own_experts)
    updated = dense_updated + experts_updated
    optimizer = kept * updated
    dummies, shared = _staging(plan, stage)
    eight_bit = weight_copies(plan, stage)
    embedding = stage.is_first * half * _embedding(plan)
    if plan.architecture.tie_word_embeddings:
        # Autograd adds it to the head's gradient out of place, into a third tensor.
        embedding = embedding * (1 + stage.is_last)
    if plan.architecture.position_embedding == "learned":
        positions = plan.architecture.max_position_embeddings * plan.architecture.hidden_size
        embedding = maximum(embedding, stage.is_first * half * positions)

    # Dense weights move into their buffer first, then experts' weights into theirs
    # (distributed_data_parallel.py, _allocate_buffers_for_parameters). Model chunks follow one another.
    apart = (degrees.ep > 1) & (experts > 0)
    moved, moving = where(apart, experts, weights), weights
    if layout.distributed_optimizer:
        dense_first = apart & (dense * half > experts * (half + gradient))
        moved, moving = where(dense_first, dense, moved), where(dense_first, dense, moving)
    moved = ceil_div(moved, degrees.vpp)

    def optimizer_words() -> str:
        split = f" / {dense_ranks} data- and context-parallel ranks" if layout.distributed_optimizer else ""
        of_experts = f" + {experts:,} of experts / {expert_ranks}" if experts else ""
        told = f"({dense:,}{split}{of_experts}) × {kept} bytes · "
        if layout.use_precision_aware_optimizer:
            return told + precision_aware.words(layout, recipe)
        return (
            f"{told}fp32 main copy and {recipe.optimizer} moments "
            f"(distributed_optimizer={layout.distributed_optimizer})"
        )

    def parameter_words() -> str:
        found = f"{weights:,} parameters of this rank × {half} bytes{_cut(plan)}"
        if recipe.precision != "fp8-mixed":
            return found
        kept = "row by row and transposed" if copies(plan.cluster.gpu) == 2 else "which need no transposes"
        return f"{found} + {gib(eight_bit)} GiB copies of the layers' matrices in 8 bits, {kept}: {SOURCE}"

    buffers = (
        (half * dummies, _DUMMIES),
        (half * shared, "buffer for the sequence gathered over tp, and for eager attention's scores"),
    )
    gathered = sum_parts(*buffers)
    gradients = Term(
        weights * gradient,
        lambda: f"{weights:,} × {gradient} bytes · gradients in one contiguous buffer, kept all along",
    )

    # A precision-aware optimizer makes its copies at its first step (te.optimizers.FusedAdam).
    main_copies = 0 if layout.use_precision_aware_optimizer else main * updated

    def peaks(stage: Stage, modules: Modules) -> list[PeakCandidate]:
        found = stage_activations(plan, stage, modules)
        with_embedding = sum_parts((embedding, "half-precision gradient of an embedding"), *buffers)
        return [
            PeakCandidate.from_terms(
                0.33, found.forward, gathered, gradients, found.logits_forward, phase="forward"
            ),
            PeakCandidate.from_terms(0.34, found.head, gathered, gradients, found.logits_backward),
            PeakCandidate.from_terms(0.36, found.first, gathered, gradients),
            PeakCandidate.from_terms(0.97, found.last, with_embedding, gradients),
        ]

    return TrainingState(
        parameters=Term(weights * half + eight_bit, parameter_words),
        gradients=gradients,
        optimizer=Term(optimizer, optimizer_words),
        initialisation=_initialising(
            ((weights + (moved if layout.distributed_optimizer else 0)) * half, moving * gradient, 0),
            (weights * half, weights * gradient, main_copies),
        ),
        optimizer_working=precision_aware.working(layout, dense_updated, experts_updated)
        if layout.use_precision_aware_optimizer
        else Term(
            FP32 * updated if gradient < FP32 else 0,
            lambda: f"{updated:,} × {FP32} bytes · fp32 copies of this rank's gradients for the update",
        ),
        gather_rest=gathered,
        group_sizes=_group_sizes(plan, stage),
        keeps_gradients=True,
        find_peaks=peaks,
    )


def _initialising(wrapped: tuple[Any, ...], optimized: tuple[Any, ...]) -> dict[Component, Term]:
    """Return the larger of two peak candidates, each (parameter bytes, gradient bytes, main weight bytes).

    ``wrapped``: while ``DistributedDataParallel`` wraps the modules. ``optimized``: once the optimizer has
    copied its weights to fp32 (``Float16OptimizerWithFloat16Params``, ``DistributedOptimizer``), before it
    has any moments.
    """
    rows = [(sum(found), *found) for found in (wrapped, optimized)]
    _, parameters, gradients, copies = pick_largest_row(rows)
    return {
        "parameters": Term(parameters, lambda: "the module's own weights, and the buffer that they move to"),
        "gradients": Term(gradients, lambda: "the buffers that have been made by then"),
        "optimizer": Term(copies, lambda: "fp32 copies of this rank's weights"),
        "gather_buffers": zero_term("no collective has run"),
    }


def _group_sizes(plan: Plan, stage: Stage) -> tuple[int, ...]:
    """Return the size of each process group that this rank is in (megatron/core/parallel_state.py).

    In addition to one group for each parallelism: the model-parallel group, which sums the gradient norm;
    the pair of first and last stage that share an embedding; and with fp8 the group that reduces amax values
    (``get_amax_reduction_group``).
    """
    degrees = plan.degrees
    model_parallel = where((degrees.tp > 1) & (degrees.pp > 1), degrees.tp * degrees.pp, 1)
    shares = plan.architecture.tie_word_embeddings & (degrees.pp > 1) & (stage.is_first | stage.is_last)
    replicas = group_equal(degrees.data_parallel * degrees.cp)
    groups = (replicas, degrees.tp, degrees.pp, degrees.ep, model_parallel, 1 + shares)
    return (*groups, replicas * degrees.tp) if plan.recipe.precision == "fp8-mixed" else groups


def _padded(numbers: Any, ranks: Any) -> Any:
    """Return the elements of a buffer, padded so that the distributed optimizer can shard it evenly.

    The padding of each parameter and bucket is left out: at most 63 elements each, none where sizes are
    multiples of 64, and always negligible.
    """
    multiple = map_distinct(partial(lcm, _WORD), ranks)
    return ceil_div(numbers, multiple) * multiple


def _embedding(plan: Plan) -> Any:
    """Return the elements of the token embedding on one rank."""
    rows = padded_vocab_size(plan.architecture.vocab_size, plan.degrees.tp) // plan.degrees.tp
    return plan.architecture.hidden_size * rows


def _staging(plan: Plan, stage: Stage) -> tuple[Any, Any]:
    """Return the elements of a rank's dummy gradients, and of its buffer for all-gathered sequences."""
    arch, recipe, degrees, layout = plan.architecture, plan.recipe, plan.degrees, plan.layout
    dummies = map_distinct(
        partial(_dummy_gradients, arch),
        degrees.tp,
        layout.expert_tp,  # type: ignore[attr-defined]
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
    if recipe.attention == "eager":
        # baddbmm of queries and keys takes a buffer that is never freed (dot_product_attention.py, "mpu").
        rows = recipe.micro_batch_size * ceil_div(arch.num_attention_heads, degrees.tp)
        scores = rows * recipe.seq_len * recipe.seq_len
    # The all-gathered sequence shares that buffer (name "mpu", same dtype; core/utils.py,
    # GlobalMemoryBuffer).
    return dummies, maximum(layout.splits_sequence * tokens * widest, scores)


@lru_cache(maxsize=4096)
def _dummy_gradients(arch: Architecture, tp: int, expert_tp: int, dense: bool, moe: bool, head: bool) -> int:
    """Return the total elements of one matrix of each distinct shape on a rank, layers and head."""
    shapes: set[tuple[int, int]] = set()
    if head:
        shapes.add((padded_vocab_size(arch.vocab_size, tp) // tp, arch.hidden_size))
    for is_moe, is_there in ((False, dense), (True, moe)):
        if is_there:
            shapes |= _matrices(arch, is_moe, tp, expert_tp)
    return sum(rows * columns for rows, columns in shapes)


def _matrices(arch: Architecture, moe: bool, tp: int, expert_tp: int) -> set[tuple[int, int]]:
    """Return the distinct (rows, columns) of one layer's weights on one rank, fused as in megatron-core."""
    hidden, width, latent = arch.hidden_size, attention_widths(arch), arch.latent_attention
    found = {(hidden, ceil_div(width.output, tp))}
    if latent is None:
        found.add((ceil_div(width.inputs, tp), hidden))
    else:
        expanded = arch.num_attention_heads * (latent.qk_nope_head_dim + latent.v_head_dim)
        found |= {
            (latent.kv_lora_rank + latent.qk_rope_head_dim, hidden),
            (ceil_div(expanded, tp), latent.kv_lora_rank),
        }
        if latent.q_lora_rank is None:
            found.add((ceil_div(width.query, tp), hidden))
        else:
            found |= {(latent.q_lora_rank, hidden), (ceil_div(width.query, tp), latent.q_lora_rank)}
    experts = arch.mixture_of_experts
    inners = [(arch.intermediate_size, tp)]
    if moe and experts is not None:
        inners = [
            (experts.moe_intermediate_size, expert_tp),
            (experts.shared_expert_intermediate_size, tp),
        ]
    for inner, cut in inners:
        if inner:
            found |= {(ceil_div(count_branches(arch) * inner, cut), hidden), (hidden, ceil_div(inner, cut))}
    return found


def _cut(plan: Plan) -> str:
    names = [f"{name} {value}" for name in ("tp", "pp", "ep") if (value := getattr(plan.degrees, name)) > 1]
    return f" (after {', '.join(names)})" if names else ""
