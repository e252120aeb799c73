"""ZeRO-1 and ZeRO-2: training state in flat buffers, and when and how gradient buckets are reduced.

It repeats ``DeepSpeedZeroOptimizer`` (deepspeed/runtime/zero/stage_1_and_2.py, DeepSpeed 0.19). Stage 2
reduces a full ipg bucket during backward; stage 1 reduces all of them after it, unless ``overlap_comm`` is
on.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardscope.core.number_format import format_gib
from shardscope.core.ops import ceil_div, maximum, minimum, where
from shardscope.core.precision import FP32, widths
from shardscope.frameworks.deepspeed.layout import get_layout
from shardscope.frameworks.deepspeed.memory.activation_sizes import find_logits, list_activation_sizes
from shardscope.frameworks.deepspeed.memory.ipg_bucket import (
    FlatGradient,
    ReductionOptions,
    count_reduction_copies,
    place_gradients,
)
from shardscope.frameworks.deepspeed.memory.partition_parameters import (
    FP64,
    RankTensors,
    list_stage_tensors,
    split_by_decay,
)
from shardscope.frameworks.deepspeed.memory.peaks import find_backward_peaks
from shardscope.frameworks.deepspeed.memory.phases import BackwardPart, PhaseElements, ZeroBuffers
from shardscope.memory.report import Term, choose_term, zero_term
from shardscope.memory.state.optimizers import compute_flat_state, compute_flat_working
from shardscope.memory.state.stages import count_stage_weights, find_stage_shapes
from shardscope.memory.state.training_state import TrainingState

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardscope.core.plan import Plan
    from shardscope.frameworks.deepspeed.layout import ZeroLayout
    from shardscope.frameworks.deepspeed.memory.element_counts import ElementCounts, RankCounts
    from shardscope.memory.state.stages import Stage

_TWO_GROUPS = ("adamw_8bit", "adafactor")
"""Client optimizers, with separate groups for matrices, with weight decay, and vectors, without; DeepSpeed's
own optimizers have one group."""
NOT_PARTITIONED = zero_term("parameters are not partitioned, so nothing is all-gathered in forward")


# ---- Training state


def compute_stage_1_or_2_state(plan: Plan, stage: Stage, rank: RankCounts, in_pipeline: int) -> TrainingState:
    """Return the state of stages 1 and 2: flat buffers of weights, each rank updating its partition.

    ``in_pipeline``: bytes of the pipeline's buffers during backward.
    """
    layout, recipe = get_layout(plan), plan.recipe
    half, counts = rank.half, rank.counts
    # fp32 main copies and moments of this rank's partition (single_partition_of_fp32_groups).
    optimizer = FP32 * counts.partition + compute_flat_state(recipe.optimizer, counts.partition)
    # The bucket. A pipeline without contiguous gradients has none in backward: it reduces after the schedule.
    reduces_late = is_reduced_late(layout.stage, bool(layout.overlap_comm), rank.accumulates)
    in_backward = (plan.degrees.pp == 1) | is_contiguous(layout)
    bucket = in_backward * half * count_bucket_elements(plan, counts) * is_contiguous(layout)
    # With late reduction all gradients exist until backward has ended; else only the own partition's.
    gradients = where(reduces_late, counts.trained, counts.own_gradients)
    always_has_bucket = rank.accumulates & reduces_late

    def explain_own_gradients() -> str:
        return (
            f"{counts.own_gradients:,} × {half} bytes · whole tensors that overlap the largest of "
            f"{rank.ranks} partitions"
        )

    buffers = ZeroBuffers(
        bucket=bucket,
        # An untied head's hook runs first; a tied head's only with the embedding's gradient.
        head_is_first=always_has_bucket | ((counts.tied_head == 0) & rank.trains_all),
        trains_all=rank.trains_all,
        after_forward=bucket * always_has_bucket,
        # Stage 2 accumulates only its own partition's gradients of earlier micro-batches.
        earlier_gradients=where(reduces_late, 0, half * counts.own_gradients * rank.accumulates),
        gradients_at_loss=half * gradients * rank.accumulates,
        in_pipeline=in_pipeline,
    )
    return TrainingState(
        parameters=rank.add_frozen(
            half * counts.flat_buffers,
            lambda: f"{counts.flat_buffers:,} in the flat buffer, padded to 2 × ranks, × {half} bytes",
        ),
        gradients=Term(
            half * gradients,
            lambda: (
                f"{gradients:,} × {half} bytes of gradients, partitioned when backward has ended (ZeRO-1)"
                if reduces_late
                else explain_own_gradients()
            ),
        ),
        gradients_reduced=Term(half * counts.own_gradients, explain_own_gradients),
        optimizer=Term(
            optimizer,
            lambda: (
                f"{counts.trained:,} / {rank.ranks} ranks = {counts.partition:,} × "
                f"{rank.format_width(optimizer, counts.partition)} bytes: fp32 main copy and "
                f"{recipe.optimizer} state (ZeRO-{layout.stage})"
            ),
        ),
        gather_forward=choose_term(
            always_has_bucket,
            Term(
                bucket, lambda: f"{format_gib(bucket)} GiB (reduce_bucket_size={layout.reduce_bucket_size:,})"
            ),
            NOT_PARTITIONED,
        ),
        group_sizes=rank.group_sizes,
        find_logits=find_logits,
        find_backward_peaks=lambda backward: find_backward_peaks(
            counts, backward, half, list_activation_sizes(plan, stage, backward.modules), buffers
        ),
        optimizer_working=_compute_working_memory(plan, rank),
        initialisation={"parameters": _compute_initialisation(plan, stage, rank)},
    )


def _compute_working_memory(plan: Plan, rank: RankCounts) -> Term:
    """Return the temporaries of the optimizer step, in addition to the gradients that exist at its start."""
    half, counts, recipe = rank.half, rank.counts, plan.recipe
    # The accumulated gradients are freed once the partition is flattened, unless there is another parameter
    # group: experts, or vectors without weight decay.
    has_one_group = (plan.degrees.ep == 1) * (recipe.has_adapters or recipe.optimizer not in _TWO_GROUPS)
    update = maximum(
        FP64 * counts.largest_expert_slice,
        compute_flattening_bytes(half, counts.update_group, counts.largest_slice),
        FP32 * counts.update_group
        + compute_flat_working(recipe.optimizer, counts.update_group)
        - half * counts.own_gradients * has_one_group,
    )
    return Term(
        update,
        lambda: (
            f"{format_gib(update)} GiB: fp32 gradients of the partition in addition to the {half}-byte "
            "ones, or the norm's fp64 copy of the largest slice"
        ),
    )


def _compute_initialisation(plan: Plan, stage: Stage, rank: RankCounts) -> Term:
    """Return the parameters' peak before the optimizer exists."""
    half, counts, arch = rank.half, rank.counts, plan.architecture
    # DeepSpeed fills the flat buffer on the host if weights and buffer do not fit on the GPU together.
    weights_and_flat = half * (counts.flat_buffers + counts.trained)
    flattening = where(
        weights_and_flat + rank.frozen_bytes > plan.cluster.usable_bytes_per_gpu,
        half * counts.flat_buffers,
        weights_and_flat,
    )
    # Before that, a head that is to be tied still has its own weight.
    has_tied_head = arch.tie_word_embeddings & stage.is_first & stage.is_last
    untied_head = half * has_tied_head * arch.vocab_size * arch.hidden_size
    return Term(
        maximum(flattening + rank.frozen_bytes, rank.frozen_bytes + untied_head),
        lambda: (
            "weights, and the flat buffer they are copied to if there is room; or, before, a head "
            "that is not yet tied to the embedding"
        ),
    )


def is_contiguous(layout: ZeroLayout) -> bool:
    """Return whether gradients are copied into a contiguous bucket: always if the optimizer is offloaded."""
    return layout.contiguous_gradients or layout.offload_optimizer is not None


def is_reduced_late(stage: int, overlaps: bool, accumulates: bool) -> bool:
    """Return whether gradients are not partitioned until backward has ended, in stage 1 only.

    Without ``overlap_comm`` stage 1 reduces after backward; with it, only if micro-batches accumulate.
    """
    return stage == 1 and (accumulates if overlaps else True)


def count_bucket_elements(plan: Plan, counts: ElementCounts) -> int:
    """Return the elements of the ipg bucket.

    A contiguous bucket is allocated in full, however small the model; twice with ``overlap_comm``.
    """
    layout = get_layout(plan)
    if not is_contiguous(layout):
        return minimum(counts.trained, layout.reduce_bucket_size)
    return layout.reduce_bucket_size * (2 if layout.overlap_comm else 1)


def compute_flattening_bytes(half: int, partition: int, largest_slice: int) -> int:
    """Return the bytes in addition to accumulated gradients when the optimizer step starts.

    A slice is in fp64 for its norm, or the flat partition exists in both types.
    """
    return maximum(FP64 * largest_slice, (FP32 + (half if half < FP32 else 0)) * partition)


# ---- Flat buffers and their partitions


class FlatPartition(NamedTuple):
    """Equal partitions of the flat buffers, on the rank with the most memory."""

    flat_buffers: int
    """Elements of the buffers, each padded to twice the ranks (``nccl_start_alignment_factor``)."""
    sizes: tuple[int, int]
    """Elements of one rank's partition of each buffer: of matrices, and of vectors."""
    overlapping: int
    """Elements of all tensors that overlap the rank's partitions: their gradients are not sliced."""
    largest_slice: int
    """Elements of the largest slice of a tensor in the partitions."""
    rank: int
    """Rank with the most memory at the start of the optimizer step."""

    @property
    def elements(self) -> int:
        """Elements of one rank's partitions."""
        return sum(self.sizes)


@lru_cache(maxsize=4096)
def partition_flat_buffers(
    sizes: tuple[int, ...], num_ranks: int, half: int, is_vector: tuple[bool, ...] = ()
) -> FlatPartition:
    """Partition the optimizer's flat buffers of tensors with ``sizes``.

    Each parameter group has one buffer: matrices, with weight decay, and vectors, without.
    ``copy_grads_in_partition`` keeps the gradients of all tensors that overlap a partition, and the norm of
    each slice is in double precision, so ranks differ. ``half`` is the size of a gradient in bytes.
    """
    overlapping, slices = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    partitions: list[int] = []
    for group in split_by_decay(sizes, is_vector):
        partitions.append(ceil_div(sum(group), 2 * num_ranks) * 2)
        if group:
            _add_overlaps(np.array(group, np.int64), partitions[-1], overlapping, slices)
    elements = sum(partitions)
    flattening = np.maximum(FP64 * slices, compute_flattening_bytes(half, elements, 0))
    rank = int(np.argmax(half * overlapping + flattening))
    return FlatPartition(
        elements * num_ranks,
        (partitions[0], partitions[1]),
        int(overlapping[rank]),
        int(slices[rank]),
        rank,
    )


def _add_overlaps(
    group: NDArray[np.int64], partition: int, overlapping: NDArray[np.int64], slices: NDArray[np.int64]
) -> None:
    """Add the tensors that overlap each rank's partition to ``overlapping``, and update its largest slice."""
    ends = np.cumsum(group)
    starts = ends - group
    first, last = starts // partition, (ends - 1) // partition
    # Elements of tensors that start to overlap at a rank, minus those that no longer do.
    change, inside = np.zeros((2, len(overlapping) + 1), np.int64)
    np.add.at(change, first, group)
    np.subtract.at(change, last + 1, group)
    overlapping += np.cumsum(change)[:-1]
    np.maximum.at(slices, first, np.minimum(ends, (first + 1) * partition) - starts)
    np.maximum.at(slices, last, ends - np.maximum(starts, last * partition))
    # Between the first and the last rank of a tensor, complete partitions belong to it.
    is_long = last > first
    np.add.at(inside, first[is_long] + 1, 1)
    np.subtract.at(inside, last[is_long], 1)
    np.maximum(slices, (np.cumsum(inside)[:-1] > 0) * partition, out=slices)


def find_peak_rank(plan: Plan) -> int:
    """Return the rank with the most accumulated gradients, for a plan without pipeline stages."""
    if get_layout(plan).stage not in (1, 2):
        return 0
    stage = count_stage_weights(plan, find_stage_shapes(plan.architecture, plan.stage_layers).kinds[0])
    tensors = list_stage_tensors(plan, stage)
    half = widths[plan.recipe.precision].compute
    return partition_flat_buffers(tensors.trained, plan.degrees.data_parallel, half, tensors.is_vector).rank


# ---- Reductions


@lru_cache(maxsize=1024)
def reduce_in_backward(
    tensors: RankTensors, options: ReductionOptions, tied_head: int, earlier_gradients: int = 0
) -> tuple[BackwardPart, ...]:
    """Return the parts of a backward that reduces full buckets on the way; the last is the final reduction.

    A full bucket is sliced by destination rank, and slices for more than one rank are flattened, so copied,
    for the reduction. ``tied_head`` is the number of elements of a tied head, whose gradient stays until the
    embedding's exists. ``earlier_gradients`` is the number of all elements if gradients of earlier
    micro-batches stay in place until the bucket takes them, else 0.
    """
    return _BackwardReduction(tensors, options, tied_head, earlier_gradients).run()


class _BackwardReduction:
    """Bucket and gradients of one rank during a backward that reduces full buckets on the way."""

    def __init__(
        self, tensors: RankTensors, options: ReductionOptions, tied_head: int, earlier_gradients: int
    ) -> None:
        self._tensors, self._options = tensors, options
        self._tied_head, self._earlier_gradients = tied_head, earlier_gradients
        self._gradients = place_gradients(tensors.trained, tensors.is_vector, options.partitions)
        self._order = iter(tensors.gradient_order)
        self._bucket: list[FlatGradient] = []
        self._bucket_elements = self._accumulated = 0
        # Gradients that are larger than the bucket stay autograd's tensors until they are reduced; in stage 1
        # those of other ranks are never freed.
        self._outside_bucket = self._never_freed = 0
        # Reduced gradients that are freed at the next reduction.
        self._reduced_before = 0

    def run(self) -> tuple[BackwardPart, ...]:
        """Run all parts of backward and the final reduction."""
        parts = [self._run_part(number, count) for number, count in enumerate(self._tensors.trained_per_part)]
        # The final reduction takes what is left in the bucket
        # (overlapping_partition_gradients_reduce_epilogue).
        copies = count_reduction_copies(self._bucket, self._options) if self._bucket else 0
        last = PhaseElements(self._outside_bucket - self._reduced_before + copies, self._accumulated)
        if not self._options.is_contiguous:
            return (*parts, BackwardPart(last, last))
        # A gradient larger than the bucket stays until it has been copied.
        copied = PhaseElements(self._outside_bucket, self._options.accumulated)
        return (*parts, BackwardPart(last, max(last, copied, key=_get_total)))

    def _run_part(self, number: int, count: int) -> BackwardPart:
        """Run one part of backward, with ``count`` gradients: head and norm, one layer, or the embedding."""
        tensors = self._tensors
        tied_gradient = self._tied_head if number else 0
        first = peak = before_attention = self._build_phase(tied_gradient)
        feed_forward: list[PhaseElements] = []
        attention_output = PhaseElements(0, 0)
        at_logits: PhaseElements | None = None
        # Gradients in the order of backward; ``remaining`` counts down to the part's last one.
        for remaining in range(count, 0, -1):
            if remaining == tensors.num_attention:
                before_attention = self._build_phase(tied_gradient)
            if not number and remaining == 1:
                # The final norm comes after the head, whose gradient is tied, reduced or in the bucket.
                first = self._build_phase(self._tied_head)
            index = next(self._order)
            size = tensors.trained[index]
            phase = self._build_phase(tied_gradient + size)
            if self._tied_head and not index:
                # Both gradients of a tied embedding and their sum are alive; then only the sum is.
                phase, tied_gradient = phase._replace(staging=phase.staging + size), 0
            if not number and remaining > 1:
                at_logits = max(at_logits or phase, phase, key=_get_total)
            # A gradient that does not fit reduces the bucket first. It exists by then, or is part of that of
            # earlier micro-batches.
            if self._bucket and self._bucket_elements + size > self._options.bucket_size:
                new = tied_gradient + size * (self._earlier_gradients == 0)
                phase = max(phase, *self._reduce_bucket(new), key=_get_total)
            peak = max(peak, phase, key=_get_total)
            if tensors.is_feed_forward and tensors.is_feed_forward[index]:
                feed_forward.append(phase)
            if tensors.num_attention - 1 <= remaining <= tensors.num_attention:
                # Attention's last two tensors in forward, with its output projection's matrix.
                attention_output = max(attention_output, phase, key=_get_total)
            self._add_to_bucket(index)
            if size > self._options.bucket_size and self._options.is_contiguous:
                # A gradient for the host is a copy, not a view of autograd's tensor.
                clone = (self._options.norm_width > 0) * size
                peak = max(peak, self._build_phase(tied_gradient + clone), key=_get_total)
        if not number and self._tied_head:
            peak = max(peak, first, key=_get_total)
        return BackwardPart(first, peak, before_attention, tuple(feed_forward), attention_output, at_logits)

    def _build_phase(self, elements: int) -> PhaseElements:
        """Return a phase with ``elements`` in addition to unreduced and accumulated gradients."""
        return PhaseElements(elements + self._outside_bucket, self._accumulated + self._earlier_gradients)

    def _reduce_bucket(self, elements: int) -> tuple[PhaseElements, PhaseElements]:
        """Empty the bucket. Return the phases with its copies, and with its gradients accumulated."""
        options, has_own = self._options, self._options.has_own(self._bucket)
        self._outside_bucket -= self._reduced_before
        with_copies = self._build_phase(elements + count_reduction_copies(self._bucket, options))
        if not options.is_contiguous:
            own = sum(gradient.size for gradient in self._bucket if options.is_own(gradient))
            if options.partitions_gradients:
                # Those of the own partition stay autograd's tensors.
                self._accumulated += own
                self._reduced_before = self._bucket_elements - own if options.frees_late else 0
                self._outside_bucket = self._reduced_before
            reduced = self._build_phase(elements)
            self._bucket, self._bucket_elements = [], 0
            return with_copies, reduced
        self._accumulated = options.accumulated if self._accumulated or has_own else 0
        reduced = self._build_phase(elements)
        if not (options.partitions_gradients or has_own):
            self._never_freed = self._outside_bucket
        self._bucket, self._bucket_elements, self._outside_bucket = [], 0, self._never_freed
        return with_copies, reduced

    def _add_to_bucket(self, index: int) -> None:
        """Copy a gradient into the bucket, and free the earlier micro-batches' one."""
        size = self._tensors.trained[index]
        self._bucket.append(self._gradients[index])
        self._bucket_elements += size
        self._earlier_gradients -= size * (self._earlier_gradients > 0)
        if not self._options.is_contiguous:
            self._outside_bucket += size
        elif size > self._options.bucket_size:
            self._outside_bucket = self._never_freed + size


def _get_total(phase: PhaseElements) -> int:
    return phase.total
