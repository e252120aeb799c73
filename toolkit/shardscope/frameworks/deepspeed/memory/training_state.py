"""DeepSpeed ZeRO's training state, as of DeepSpeed 0.19 (Rajbhandari et al. 2020, section 5).

Source: ``deepspeed/runtime``. It covers the optimizer that wraps each stage and precision
(``engine.py: _do_optimizer_sanity_check``), flat buffers and their padding, buckets, all-gathers and the
copies that each of them makes. Compared with DeepSpeed's own engine in
``tests/unit/frameworks/deepspeed/test_deepspeed_memory.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.core.number_format import count, gib
from shardscope.core.ops import all_true, ceil_div, map_distinct, maximum, minimum, where
from shardscope.core.precision import FP32, widths
from shardscope.frameworks.deepspeed.communication import cast_elements, reduced_width
from shardscope.frameworks.deepspeed.memory.backward import Kept, peaks, sizes_of
from shardscope.frameworks.deepspeed.memory.counted import Counted, counted, is_late
from shardscope.frameworks.deepspeed.memory.offload import Pieces, offloaded
from shardscope.frameworks.deepspeed.memory.pipeline import in_stages
from shardscope.frameworks.deepspeed.memory.swapping import swapped
from shardscope.frameworks.deepspeed.memory.tensors import FP64, cut_each, cuts_tied_head, tensors_on, working
from shardscope.frameworks.deepspeed.zeropp import check_predicted
from shardscope.memory.activations.head import compute_logits_terms, resolve_loss
from shardscope.memory.report import Term, choose_term, zero_term
from shardscope.memory.state.optimizers import compute_flat_state, compute_flat_working
from shardscope.memory.state.stages import (
    Stage,
    StageShape,
    StageShapes,
    count_stage_weights,
    find_stage_shapes,
)
from shardscope.memory.state.training_state import TrainingState

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardscope.core.plan import Plan
    from shardscope.memory.activations.step import TransformersActivations


_IN_TWO_GROUPS = ("adamw_8bit", "adafactor")
"""Client optimizers, with separate groups for matrices, with weight decay, and vectors, without; DeepSpeed's
own optimizers have one group."""
counts_neighbours = True
"""Whether a stage's memory depends on the stages around it: a middle stage receives from both sides, and so
may need more than an earlier stage with more layers."""
_WHOLE = zero_term("parameters are whole, so nothing is gathered in forward")


def find_shapes(plan: Plan) -> StageShapes:
    """Return the stage shapes of DeepSpeed's pipeline module, or the one shape of the whole model."""
    return find_stage_shapes(plan.architecture, plan.stage_layers)


def count_weights(plan: Plan, shape: StageShape) -> Stage:
    """Return the weights of one stage."""
    return count_stage_weights(plan, shape)


def compute_training_state(plan: Plan, stage: Stage) -> TrainingState:
    """Return one rank's training state on the device, on the host and on NVMe, in bytes."""
    layout: Any = plan.layout
    check_predicted(layout)
    numbers = _Numbers.of(plan, stage)
    state = (_whole, _flat, _flat, _cut)[layout.stage](plan, stage, numbers)
    if layout.stage < 3:
        state = state._replace(find_logits=logits)
    state = in_stages(plan, stage, state, _reducing(plan, numbers))
    if not (layout.offload_optimizer or layout.offload_params):
        return state
    n = numbers.counted
    moments = compute_flat_state(plan.recipe.optimizer, n.part)
    half, swap = numbers.half, swapped(plan, stage)
    pieces = Pieces(half, n.part, n.group, n.kept, n.largest, moments, swap)
    return offloaded(plan, state, pieces)


class _Numbers(NamedTuple):
    """Sizes that the formulas of all ZeRO stages use."""

    counted: Counted
    half: int
    """Bytes of a weight in the compute type, and of its gradient."""
    ranks: int
    accumulates: bool
    trains_all: bool

    @classmethod
    def of(cls, plan: Plan, stage: Stage) -> _Numbers:
        return cls(
            counted=counted(plan, stage),
            half=widths[plan.recipe.precision].compute,
            ranks=plan.degrees.data_parallel,
            accumulates=plan.num_micro_batches > 1,
            trains_all=not plan.recipe.has_adapters,
        )

    @property
    def frozen(self) -> int:
        """Bytes of frozen weights under adapters, which have no optimizer state."""
        return self.half * self.counted.frozen


def group_sizes(plan: Plan) -> tuple[int, ...]:
    """Return the number of ranks of each communicator.

    Adjacent pipeline stages have one communicator per pair (torch's ``ProcessGroupNCCL``;
    deepspeed/runtime/pipe/p2p.py).
    """
    degrees = plan.degrees
    neighbours = (where(degrees.pp > 1, 2, 1), where(degrees.pp > 2, 2, 1))
    return (degrees.data_parallel, degrees.tp, *neighbours, degrees.ep)


def _in_pipeline(plan: Plan, stage: Stage, n: _Numbers) -> TrainingState:
    """Return the state of stage 0 in bf16 with pp > 1: ``BF16_Optimizer``, partitioned like stage 1.

    Main copies and moments are partitioned. Gradients exist twice: each micro-batch's, and their sum in a
    flat buffer of the same type (deepspeed/runtime/engine.py, ``_do_optimizer_sanity_check``;
    bf16_optimizer.py, pipe/engine.py).
    """
    half, c, name = n.half, n.counted, plan.recipe.optimizer
    sums, whole = half * c.flat, half * c.trained
    optimizer = FP32 * c.part + compute_flat_state(name, c.part)
    kept = Kept(waiting=sums, before=sums + n.accumulates * whole, trains_all=n.trains_all)
    flat = f"in the flat buffer, padded to 2 × ranks, × {half} bytes"

    def main_words() -> str:
        each = _each(optimizer, c.part)
        return f"{c.trained:,} / {n.ranks} ranks = {c.part:,} × {each} bytes: fp32 main copy and {name} state"

    return TrainingState(
        parameters=_parameters_term(n, sums + n.frozen, lambda: f"{c.flat:,} {flat}"),
        gradients=Term(
            sums + whole, lambda: f"{c.flat:,} sums {flat} + {c.trained:,} × {half} bytes of a micro-batch"
        ),
        gradients_rest=Term(sums, lambda: f"{c.flat:,} sums {flat}"),
        optimizer=Term(optimizer, main_words),
        optimizer_working=Term(
            FP32 * c.part + compute_flat_working(plan.recipe.optimizer, c.part),
            lambda: f"{c.part:,} × {FP32} bytes · gradients of this rank's part, cast for the update",
        ),
        gather_forward=_WHOLE,
        find_backward=lambda shape: peaks(c, shape, half, sizes_of(plan, stage), kept),
        group_sizes=group_sizes(plan),
    )


def _whole(plan: Plan, stage: Stage, n: _Numbers) -> TrainingState:
    """Return the state of stage 0: ``FP16_Optimizer``, also for bf16, or the optimizer itself for fp32."""
    if all_true(plan.degrees.pp > 1) and plan.recipe.precision.startswith("bf16"):
        return _in_pipeline(plan, stage, n)
    trained, name = n.counted.trained, plan.recipe.optimizer
    moments = compute_flat_state(name, trained)
    parameters, gradients = n.half * trained + n.frozen, n.half * trained
    if n.half == FP32:
        optimizer, update, begins = moments, compute_flat_working(plan.recipe.optimizer, n.counted.largest), 0
        words = "the optimizer's own moments: fp32 weights are their own main copies"
    else:
        optimizer = FP32 * trained + moments
        # With FusedAdam fp32 gradients exist both separately and flattened; other optimizers have separate
        # main copies (FP16_UnfusedOptimizer), and so separate gradients only.
        fused = name == "adamw" and plan.on_gpu
        singly = compute_flat_working(plan.recipe.optimizer, n.counted.largest)
        update = (2 if fused else 1) * FP32 * trained + singly
        # FP16_UnfusedOptimizer allocates zero gradients of both types.
        begins = (FP32 if fused else FP32 + n.half) * trained + singly
        words = "FP16_Optimizer's fp32 main copies and moments, for bf16 too"
    kept = Kept(before=n.accumulates * gradients, trains_all=n.trains_all)
    return TrainingState(
        parameters=_parameters_term(n, parameters, lambda: f"{trained:,} on every rank × {n.half} bytes"),
        gradients=Term(gradients, lambda: f"{trained:,} on every rank × {n.half} bytes of gradients"),
        optimizer=Term(optimizer, lambda: f"{trained:,} on every rank · {words} ({name})"),
        gather_forward=_WHOLE,
        find_backward=lambda shape: peaks(n.counted, shape, n.half, sizes_of(plan, stage), kept),
        optimizer_working=Term(
            update,
            lambda: f"{gib(update)} GiB fp32 gradients (FP16_Optimizer.step makes them singly, then flat)",
        ),
        initialisation={
            # FP16_Optimizer runs a step with zero gradients before the first real one.
            "parameters": Term(parameters, lambda: "weights"),
            "optimizer": Term(
                optimizer + begins,
                lambda: "fp32 main copies, moments and gradients of zeros (DeepSpeed#1445)",
            ),
        },
        group_sizes=group_sizes(plan),
    )


def _flat(plan: Plan, stage: Stage, n: _Numbers) -> TrainingState:
    """Return the state of stages 1 and 2: flat buffers of weights, each rank updating its partition."""
    layout: Any = plan.layout
    half, c = n.half, n.counted
    optimizer = FP32 * c.part + compute_flat_state(plan.recipe.optimizer, c.part)
    waits = is_late(layout.stage, bool(layout.overlap_comm), n.accumulates)
    in_backward = (plan.degrees.pp == 1) | layout.contiguous_gradients
    bucket = in_backward * half * _bucket(plan, c)
    # If weights and flat buffer do not both fit on the GPU, DeepSpeed flattens on the host.
    both = half * (c.flat + c.trained)
    flattening = where(both + n.frozen > plan.cluster.usable_bytes_per_gpu, half * c.flat, both)
    arch = plan.architecture
    tied = arch.tie_word_embeddings & stage.is_first & stage.is_last
    untied = half * tied * arch.vocab_size * arch.hidden_size
    # The kept gradients are freed once the partition is flattened, unless there is another parameter group:
    # experts, or vectors without weight decay.
    in_one = plan.recipe.has_adapters or plan.recipe.optimizer not in _IN_TWO_GROUPS
    alone = (plan.degrees.ep == 1) * in_one
    update = maximum(
        FP64 * c.experts_piece,
        working(half, c.group, c.piece),
        FP32 * c.group + compute_flat_working(plan.recipe.optimizer, c.group) - half * c.kept * alone,
    )
    held = where(waits, c.trained, c.kept)
    always = n.accumulates & waits

    def kept_words() -> str:
        return f"{c.kept:,} × {half} bytes · whole tensors that the fullest of {n.ranks} partitions touches"

    kept = Kept(
        bucket=bucket,
        # An untied head's hook runs first; a tied head's only with the embedding's gradient.
        first_hook=always | ((c.tied == 0) & n.trains_all),
        trains_all=n.trains_all,
        forward=bucket * always,
        # Stage 2 keeps its own partition's gradients of earlier micro-batches.
        waiting=where(waits, 0, half * c.kept * n.accumulates),
        before=half * held * n.accumulates,
    )
    return TrainingState(
        parameters=_parameters_term(
            n,
            half * c.flat + n.frozen,
            lambda: f"{c.flat:,} in the flat buffer, padded to 2 × ranks, × {half} bytes",
        ),
        gradients=Term(
            half * held,
            lambda: (
                f"{held:,} × {half} bytes of gradients, whole until backward has ended (ZeRO-1)"
                if waits
                else kept_words()
            ),
        ),
        gradients_reduced=Term(half * c.kept, kept_words),
        optimizer=Term(
            optimizer,
            lambda: (
                f"{c.trained:,} / {n.ranks} ranks = {c.part:,} × {_each(optimizer, c.part)} bytes: fp32 main "
                f"copy and {plan.recipe.optimizer} state (ZeRO-{layout.stage})"
            ),
        ),
        gather_forward=choose_term(always, _bucket_term(layout, bucket), _WHOLE),
        find_backward=lambda shape: peaks(c, shape, half, sizes_of(plan, stage), kept),
        optimizer_working=Term(
            update,
            lambda: (
                f"{gib(update)} GiB: fp32 gradients of the partition beside the {half}-byte ones, or the "
                "norm's fp64 copy of the largest piece"
            ),
        ),
        initialisation={
            "parameters": Term(
                maximum(flattening + n.frozen, n.frozen + untied),
                lambda: (
                    "weights, and the flat buffer they are copied to if there is room; or, before, a head "
                    "that is not yet tied to the embedding"
                ),
            ),
        },
        group_sizes=group_sizes(plan),
    )


def _bucket(plan: Plan, c: Counted) -> Any:
    """Return the elements of the bucket.

    A contiguous bucket is allocated in full, however small the model; twice with ``overlap_comm``.
    """
    layout: Any = plan.layout
    if not layout.contiguous_gradients:
        return minimum(c.trained, layout.reduce_bucket_size)
    return layout.reduce_bucket_size * (2 if layout.overlap_comm else 1)


def _reducing(plan: Plan, n: _Numbers) -> Any:
    """Return the bytes of buckets and copies while a pipeline stage reduces its gradients.

    With contiguous gradients there is a second bucket besides backward's, in the reduction type
    (``reduce_gradients``).
    """
    layout: Any = plan.layout
    bucket = _bucket(plan, n.counted)
    if layout.contiguous_gradients:
        buckets = (n.half + reduced_width(layout, plan.recipe)) * bucket
        return (layout.stage == 1) * (buckets + n.half * n.counted.end[1].staging)
    # A flattened copy, and its cast.
    return (layout.stage == 1) * n.half * (1 + cast_elements(layout, plan.recipe)) * bucket


def _bucket_term(layout: Any, bucket: int) -> Term:
    return Term(bucket, lambda: f"{gib(bucket)} GiB (reduce_bucket_size={layout.reduce_bucket_size:,})")


def _cut(plan: Plan, stage: Stage, n: _Numbers) -> TrainingState:
    """Return the state of stage 3: every tensor is partitioned, and all-gathered when a module needs it."""
    layout: Any = plan.layout
    half, c = n.half, n.counted
    part = c.part
    optimizer = FP32 * part + compute_flat_state(plan.recipe.optimizer, part)
    update = maximum(
        FP64 * ceil_div(c.largest, n.ranks),
        (FP32 + (half if half < FP32 else 0)) * c.group,
        FP32 * c.group + compute_flat_working(plan.recipe.optimizer, c.group),
    )
    width = reduced_width(layout, plan.recipe)
    bucket = width * layout.reduce_bucket_size if layout.contiguous_gradients else 0
    second = second_parts(plan)

    def staging(elements: int, when: str, seconds: Any = second.all) -> Term:
        def words() -> str:
            again = f" + at most {gib(half * seconds)} GiB of second partitions (hpZ)"
            return (
                f"{gib(bucket)} GiB bucket (reduce_bucket_size={layout.reduce_bucket_size:,}) + {elements:,} "
                f"elements × {half} bytes gathered {when} "
                f"(stage3_max_reuse_distance={layout.stage3_max_reuse_distance:,}, "
                f"stage3_prefetch_bucket_size={layout.prefetched_elements:,})"
                f"{again if layout.zero_hpz_partition_size > 1 else ''}"
            )

        return Term(bucket + half * (elements + seconds), words)

    kept = Kept(
        bucket=bucket + half * second.all,
        trains_all=n.trains_all,
        forward=bucket + half * (c.forward + second.all),
        waiting=half * part,
        before=half * part,
        gathers=True,
    )
    return TrainingState(
        parameters=Term(
            half * (part + c.frozen),
            lambda: f"{part + c.frozen:,} = each tensor / {n.ranks} ranks, rounded up, × {half} bytes",
        ),
        gradients=Term(
            half * part, lambda: f"{part:,} × {half} bytes · a buffer that is kept, each tensor / ranks"
        ),
        gradients_stay=True,
        optimizer=Term(
            optimizer,
            lambda: (
                f"{part:,} × {_each(optimizer, part)} bytes: fp32 main copy and {plan.recipe.optimizer} "
                "state, each tensor / ranks"
            ),
        ),
        gather_rest=staging(c.rest, "and never released", second.frozen),
        gather_update=staging(c.rest, "and never released"),
        gather_forward=staging(c.forward, "when forward ends"),
        find_backward=lambda shape: peaks(c, shape, half, sizes_of(plan, stage), kept),
        optimizer_working=Term(
            update,
            lambda: (
                f"{gib(update)} GiB gradients of a sub-group of {c.group:,} (sub_group_size), flat and fp32, "
                "or the norm's fp64 copy of the largest part"
            ),
        ),
        initialisation={
            "optimizer": Term(FP32 * part, lambda: "fp32 main copies; moments come with the first step"),
            "gather_buffers": Term(
                maximum(bucket, half * c.widest - (half + FP32) * part) + half * second.at_first,
                lambda: f"the bucket, or before all of these a tensor of {c.widest:,} elements to be cut",
            ),
        },
        group_sizes=group_sizes(plan),
    )


def _parameters_term(n: _Numbers, num_bytes: int, words: Callable[[], str]) -> Term:
    def with_frozen() -> str:
        return words() + (f" + {gib(n.frozen)} GiB frozen" if n.frozen else "")

    return Term(num_bytes, with_frozen)


def _each(num_bytes: int, numbers: int) -> str:
    """Return the bytes per element as text; not always an integer, since 8-bit moments have scales."""
    return f"{num_bytes / max(1, numbers):.4g}"


# ---- The head with DeepSpeed's AutoTP: sharded over tp, unless transformers' plan all-gathers its logits
#
# AutoTP follows transformers' tensor-parallel plan: an untied head's logits are all-gathered, so that every
# rank has the whole vocabulary; a tied head stays sharded, and DeepSpeed's own loss is computed from sharded
# logits (``deepspeed/sequence/cross_entropy.py``, ``_VocabParallelCrossEntropy``).


def logits(step: TransformersActivations) -> tuple[Term, Term]:
    """Return the logits and loss at the end of forward, and at the start of backward. Bytes."""
    plan, arch = step.plan, step.plan.architecture
    usual = compute_logits_terms(plan, step.modules, step.tokens, step.stage.is_last, vocab=arch.vocab_size)
    if not cuts_tied_head(arch) or resolve_loss(plan) != "full":
        return usual
    tp, width = plan.degrees.tp, step.modules.compute
    vocab = ceil_div(arch.vocab_size, tp)
    # With several sequences, dropping each one's last logits makes a copy.
    shifted = where(plan.recipe.micro_batch_size > 1, width, 0)
    copy = FP32 if width < FP32 else 0
    # Forward: the fp32 copy, the logits minus their maximum and their exponential. Backward: the softmax, its
    # gradient and the gradient's cast.
    forward = width + shifted + copy + 2 * FP32
    backward = 2 * FP32 + (width if copy else 0) + shifted
    parallel = _terms(step, vocab, forward), _terms(step, vocab, backward)
    return choose_term(tp > 1, parallel[0], usual[0]), choose_term(tp > 1, parallel[1], usual[1])


def _terms(step: TransformersActivations, vocab: Any, each: Any) -> Term:
    return Term(
        step.stage.is_last * step.tokens * vocab * each,
        lambda: (
            f"{count(step.tokens, 'token')} × {vocab:,} of the vocabulary × {each} bytes · DeepSpeed's "
            "vocabulary-parallel cross entropy"
        ),
    )


# ---- Second partitions of stage 3's weights (ZeRO++'s hpZ, Wang et al. 2023, section 3.2)
#
# Source: ``deepspeed/runtime/zero/partition_parameters.py`` (``_partition_param_sec``) and ``stage3.py``
# (``_post_step``, which drops the second partitions of trained weights) of DeepSpeed 0.19.


class SecondParts(NamedTuple):
    """Elements of one rank's second partitions (hpZ), over ``zero_hpz_partition_size`` ranks."""

    trained: Any = 0
    """Trained, not persistent weights: from the release in forward until the optimizer step."""
    frozen: Any = 0
    """Frozen weights, permanently."""
    at_first: Any = 0
    """All weights, as created by ``zero.Init``."""

    @property
    def all(self) -> Any:
        """Maximum in a step."""
        return self.trained + self.frozen


def second_parts(plan: Plan) -> SecondParts:
    """Return the second partitions of one rank; zeros unless the layout enables them."""
    layout: Any = plan.layout
    group = layout.zero_hpz_partition_size
    if group == 1:
        return SecondParts()
    arch, ranks = plan.architecture, plan.degrees.data_parallel
    adapted = plan.recipe if plan.recipe.has_adapters else None
    moe = arch.num_moe_layers
    tensors = tensors_on(arch, adapted, 1, 1, arch.num_hidden_layers - moe, moe, 1, 1)
    threshold = layout.stage3_param_persistence_threshold
    cut = tuple(size for size in tensors.trained if size > threshold)

    def each(sizes: tuple[int, ...]) -> Any:
        # Padded for all ranks first, then partitioned over the smaller group.
        return map_distinct(lambda number: cut_each(sizes, number), ranks) * ranks // group

    return SecondParts(each(cut), each(tensors.frozen), each((*tensors.trained, *tensors.frozen)))
