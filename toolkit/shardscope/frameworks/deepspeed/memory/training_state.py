"""DeepSpeed ZeRO's training state, as DeepSpeed 0.19 keeps it (Rajbhandari et al. 2020, section 5).

Read off ``deepspeed/runtime``: which optimizer really wraps which stage and precision
(``engine.py: _do_optimizer_sanity_check``), flat buffers and their padding, buckets, gathers and what each of
them copies. Checked against DeepSpeed's own engine in
``tests/unit/frameworks/deepspeed/test_deepspeed_memory.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.core.arrays.arithmetic import ceil_div, holds, largest, looked_up, smallest, where
from shardscope.core.number_format import count, gib
from shardscope.core.precision import FP32, widths
from shardscope.frameworks.deepspeed.communication import cast_elements, reduced_width
from shardscope.frameworks.deepspeed.memory.backward import Kept, peaks, sizes_of
from shardscope.frameworks.deepspeed.memory.counted import Counted, counted, is_late
from shardscope.frameworks.deepspeed.memory.offload import Pieces, offloaded
from shardscope.frameworks.deepspeed.memory.pipeline import in_stages
from shardscope.frameworks.deepspeed.memory.swapping import swapped
from shardscope.frameworks.deepspeed.memory.tensors import FP64, cut_each, cuts_tied_head, tensors_on, working
from shardscope.frameworks.deepspeed.zeropp import check_predicted
from shardscope.memory.activations.head import head_terms, loss_in_force
from shardscope.memory.report import Term, chosen, no_bytes
from shardscope.memory.state.optimizers import flat_state, flat_working
from shardscope.memory.state.stages import Shapes, Stage, StageShape, shapes_of, stage_of
from shardscope.memory.state.training_state import TrainingState

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardscope.core.plan import Plan
    from shardscope.memory.activations.step import StageStep


_IN_TWO_GROUPS = ("adamw_8bit", "adafactor")
"""Client optimizers, whose matrices decay and vectors do not; DeepSpeed's own take all as one group."""
counts_neighbours = True
"""A stage between two others receives from both, and so may hold more than an earlier one of more layers."""
_WHOLE = no_bytes("parameters are whole, so nothing is gathered in forward")


def shapes(plan: Plan) -> Shapes:
    """Stages of DeepSpeed's pipeline module, or the one of the whole model."""
    return shapes_of(plan.architecture, plan.stage_layers)


def stage(plan: Plan, shape: StageShape) -> Stage:
    """The weights of one of them."""
    return stage_of(plan, shape)


def training_state(plan: Plan, stage: Stage) -> TrainingState:
    """What one rank keeps, on the device, on the host and on NVMe."""
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
    moments = flat_state(plan.recipe.optimizer, n.part)
    half, swap = numbers.half, swapped(plan, stage)
    pieces = Pieces(half, n.part, n.group, n.kept, n.largest, moments, swap)
    return offloaded(plan, state, pieces)


class _Numbers(NamedTuple):
    """What all stages count with."""

    counted: Counted
    half: int
    """Bytes of a weight as forward reads it, and of its gradient."""
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
        """Bytes of weights under adapters, which no optimizer sees."""
        return self.half * self.counted.frozen


def group_sizes(plan: Plan) -> tuple[int, ...]:
    """Ranks of each communicator: pipeline neighbours send and receive in one for each pair (torch's
    ``ProcessGroupNCCL``; deepspeed/runtime/pipe/p2p.py)."""
    degrees = plan.degrees
    neighbours = (where(degrees.pp > 1, 2, 1), where(degrees.pp > 2, 2, 1))
    return (degrees.data_parallel, degrees.tp, *neighbours, degrees.ep)


def _in_pipeline(plan: Plan, stage: Stage, n: _Numbers) -> TrainingState:
    """Stage 0 of bf16 in a pipeline: ``BF16_Optimizer``, which cuts main copies and moments like stage 1.

    Gradients are there twice: each micro-batch's, and their sum in a flat buffer of the same type
    (deepspeed/runtime/engine.py, ``_do_optimizer_sanity_check``; bf16_optimizer.py, pipe/engine.py).
    """
    half, c, name = n.half, n.counted, plan.recipe.optimizer
    sums, whole = half * c.flat, half * c.trained
    optimizer = FP32 * c.part + flat_state(name, c.part)
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
            FP32 * c.part + flat_working(plan.recipe.optimizer, c.part),
            lambda: f"{c.part:,} × {FP32} bytes · gradients of this rank's part, cast for the update",
        ),
        gather_forward=_WHOLE,
        find_backward=lambda shape: peaks(c, shape, half, sizes_of(plan, stage), kept),
        group_sizes=group_sizes(plan),
    )


def _whole(plan: Plan, stage: Stage, n: _Numbers) -> TrainingState:
    """Stage 0: ``FP16_Optimizer`` also for bf16, or the optimizer itself for fp32."""
    if holds(plan.degrees.pp > 1) and plan.recipe.precision.startswith("bf16"):
        return _in_pipeline(plan, stage, n)
    trained, name = n.counted.trained, plan.recipe.optimizer
    moments = flat_state(name, trained)
    parameters, gradients = n.half * trained + n.frozen, n.half * trained
    if n.half == FP32:
        optimizer, update, begins = moments, flat_working(plan.recipe.optimizer, n.counted.largest), 0
        words = "the optimizer's own moments: fp32 weights are their own main copies"
    else:
        optimizer = FP32 * trained + moments
        # With FusedAdam fp32 gradients exist one by one and flattened; other optimizers keep main copies one
        # by one (FP16_UnfusedOptimizer), and so their gradients.
        fused = name == "adamw" and plan.on_gpu
        singly = flat_working(plan.recipe.optimizer, n.counted.largest)
        update = (2 if fused else 1) * FP32 * trained + singly
        # FP16_UnfusedOptimizer has zeros of both types.
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
            # Before the first step FP16_Optimizer takes one with gradients of zeros.
            "parameters": Term(parameters, lambda: "weights"),
            "optimizer": Term(
                optimizer + begins,
                lambda: "fp32 main copies, moments and gradients of zeros (DeepSpeed#1445)",
            ),
        },
        group_sizes=group_sizes(plan),
    )


def _flat(plan: Plan, stage: Stage, n: _Numbers) -> TrainingState:
    """Stages 1 and 2: one flat buffer of weights, whose parts are updated by one rank each."""
    layout: Any = plan.layout
    half, c = n.half, n.counted
    optimizer = FP32 * c.part + flat_state(plan.recipe.optimizer, c.part)
    waits = is_late(layout.stage, bool(layout.overlap_comm), n.accumulates)
    in_backward = (plan.degrees.pp == 1) | layout.contiguous_gradients
    bucket = in_backward * half * _bucket(plan, c)
    # Where both do not fit, DeepSpeed flattens on the host.
    both = half * (c.flat + c.trained)
    flattening = where(both + n.frozen > plan.cluster.usable_bytes_per_gpu, half * c.flat, both)
    arch = plan.architecture
    tied = arch.tie_word_embeddings & stage.is_first & stage.is_last
    untied = half * tied * arch.vocab_size * arch.hidden_size
    # Gradients of the part are one buffer, gone once the part is flat, unless another group of weights has
    # its own there: experts, or vectors, which do not decay.
    in_one = plan.recipe.has_adapters or plan.recipe.optimizer not in _IN_TWO_GROUPS
    alone = (plan.degrees.ep == 1) * in_one
    update = largest(
        FP64 * c.experts_piece,
        working(half, c.group, c.piece),
        FP32 * c.group + flat_working(plan.recipe.optimizer, c.group) - half * c.kept * alone,
    )
    held = where(waits, c.trained, c.kept)
    always = n.accumulates & waits

    def kept_words() -> str:
        return f"{c.kept:,} × {half} bytes · whole tensors that the fullest of {n.ranks} partitions touches"

    kept = Kept(
        bucket=bucket,
        # The head's own gradient has its hook first; a tied one only with the embedding's.
        first_hook=always | ((c.tied == 0) & n.trains_all),
        trains_all=n.trains_all,
        forward=bucket * always,
        # Of stage 2's micro-batches before, the own part's gradients wait.
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
        gather_forward=chosen(always, _bucket_term(layout, bucket), _WHOLE),
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
                largest(flattening + n.frozen, n.frozen + untied),
                lambda: (
                    "weights, and the flat buffer they are copied to if there is room; or, before, a head "
                    "that is not yet tied to the embedding"
                ),
            ),
        },
        group_sizes=group_sizes(plan),
    )


def _bucket(plan: Plan, c: Counted) -> Any:
    """Elements of the contiguous bucket, allocated whole however small the model; twice to overlap."""
    layout: Any = plan.layout
    if not layout.contiguous_gradients:
        return smallest(c.trained, layout.reduce_bucket_size)
    return layout.reduce_bucket_size * (2 if layout.overlap_comm else 1)


def _reducing(plan: Plan, n: _Numbers) -> Any:
    """Bytes of buckets and of copies while stages reduce: of contiguous ones a second beside that of the
    backwards, in the type in which gradients are reduced (``reduce_gradients``)."""
    layout: Any = plan.layout
    bucket = _bucket(plan, n.counted)
    if layout.contiguous_gradients:
        buckets = (n.half + reduced_width(layout, plan.recipe)) * bucket
        return (layout.stage == 1) * (buckets + n.half * n.counted.end[1].staging)
    # Flattened, and beside that cast.
    return (layout.stage == 1) * n.half * (1 + cast_elements(layout, plan.recipe)) * bucket


def _bucket_term(layout: Any, bucket: int) -> Term:
    return Term(bucket, lambda: f"{gib(bucket)} GiB (reduce_bucket_size={layout.reduce_bucket_size:,})")


def _cut(plan: Plan, stage: Stage, n: _Numbers) -> TrainingState:
    """Stage 3: every tensor cut over all ranks, gathered when a module needs it."""
    layout: Any = plan.layout
    half, c = n.half, n.counted
    part = c.part
    optimizer = FP32 * part + flat_state(plan.recipe.optimizer, part)
    update = largest(
        FP64 * ceil_div(c.largest, n.ranks),
        (FP32 + (half if half < FP32 else 0)) * c.group,
        FP32 * c.group + flat_working(plan.recipe.optimizer, c.group),
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
                largest(bucket, half * c.widest - (half + FP32) * part) + half * second.at_first,
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
    """Bytes of each number; not always a whole one, for 8-bit moments have scales."""
    return f"{num_bytes / max(1, numbers):.4g}"


# ---- The head under DeepSpeed's AutoTP: cut over tp, but for what transformers' own plan gathers again
#
# AutoTP follows the plan that transformers has for a model: an untied head's logits are gathered, so that
# every rank has the whole vocabulary; a head that is the embedding too stays cut, and DeepSpeed's own loss
# goes over the cut logits (``deepspeed/sequence/cross_entropy.py``, ``_VocabParallelCrossEntropy``).


def logits(step: StageStep) -> tuple[Term, Term]:
    """Logits and loss at the end of forward, and as backward starts."""
    plan, arch = step.plan, step.plan.architecture
    usual = head_terms(plan, step.modules, step.tokens, step.stage.is_last, vocab=arch.vocab_size)
    if not cuts_tied_head(arch) or loss_in_force(plan) != "full":
        return usual
    tp, width = plan.degrees.tp, step.modules.compute
    vocab = ceil_div(arch.vocab_size, tp)
    # Of several sequences the logits without each one's last are a copy.
    shifted = where(plan.recipe.micro_batch_size > 1, width, 0)
    copy = FP32 if width < FP32 else 0
    # The copy in fp32, less its largest, and e to that; then that, its gradient, and the gradient's cast.
    forward = width + shifted + copy + 2 * FP32
    backward = 2 * FP32 + (width if copy else 0) + shifted
    parallel = _terms(step, vocab, forward), _terms(step, vocab, backward)
    return chosen(tp > 1, parallel[0], usual[0]), chosen(tp > 1, parallel[1], usual[1])


def _terms(step: StageStep, vocab: Any, each: Any) -> Term:
    return Term(
        step.stage.is_last * step.tokens * vocab * each,
        lambda: (
            f"{count(step.tokens, 'token')} × {vocab:,} of the vocabulary × {each} bytes · DeepSpeed's "
            "vocabulary-parallel cross entropy"
        ),
    )


# ---- Second partitions of stage 3's weights (ZeRO++'s hpZ, Wang et al. 2023, section 3.2)
#
# Read off ``deepspeed/runtime/zero/partition_parameters.py`` (``_partition_param_sec``) and ``stage3.py``
# (``_post_step``, which forgets those of what was trained) of DeepSpeed 0.19.


class SecondParts(NamedTuple):
    """Elements of one rank's second partitions (hpZ), each tensor cut over ``zero_hpz_partition_size``."""

    trained: Any = 0
    """Of what is not always gathered: from its release in forward until the optimizer has stepped."""
    frozen: Any = 0
    """Of what is frozen, all along."""
    at_first: Any = 0
    """Of all tensors: ``zero.Init`` makes them all."""

    @property
    def all(self) -> Any:
        """Most that there is in a step."""
        return self.trained + self.frozen


def second_parts(plan: Plan) -> SecondParts:
    """Second partitions of one rank; none unless the layout asks for them."""
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
        # Padded for all ranks first, then cut among the fewer.
        return looked_up(lambda number: cut_each(sizes, number), ranks) * ranks // group

    return SecondParts(each(cut), each(tensors.frozen), each((*tensors.trained, *tensors.frozen)))
