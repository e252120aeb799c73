"""ZeRO-3: training state in partitions, and a step's all-gathers and gradient reductions.

It repeats ``DeepSpeedZeroOptimizer_Stage3`` (deepspeed/runtime/zero/stage3.py, DeepSpeed 0.19). The
coordinator (``partitioned_param_coordinator.py``) decides which parameters are all-gathered when. Gradients
are copied to the ipg bucket, and reduced when it is full.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.number_format import format_gib
from shardscope.core.ops import ceil_div, maximum
from shardscope.core.precision import FP32
from shardscope.frameworks.deepspeed.layout import get_layout, get_reduction_width
from shardscope.frameworks.deepspeed.memory.activation_sizes import list_activation_sizes
from shardscope.frameworks.deepspeed.memory.ipg_bucket import BucketCounts
from shardscope.frameworks.deepspeed.memory.parameter_offload import trace_modules
from shardscope.frameworks.deepspeed.memory.partition_parameters import FP64, count_secondary_partitions
from shardscope.frameworks.deepspeed.memory.partitioned_optimizer_swapper import (
    NORM_ELEMENTS,
    PartitionedOptimizerSwapper,
)
from shardscope.frameworks.deepspeed.memory.partitioned_param_coordinator import (
    PartitionedParameterCoordinator,
    Stage3Options,
)
from shardscope.frameworks.deepspeed.memory.peaks import find_backward_peaks
from shardscope.frameworks.deepspeed.memory.phases import BackwardPart, PhaseElements, ZeroBuffers
from shardscope.memory.report import Term
from shardscope.memory.state.optimizers import compute_flat_state, compute_flat_working
from shardscope.memory.state.training_state import TrainingState

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.frameworks.deepspeed.memory.element_counts import RankCounts
    from shardscope.frameworks.deepspeed.memory.parameter_offload import (
        HookEvent,
        ModuleTrace,
        TracedModel,
        TracedModule,
    )
    from shardscope.frameworks.deepspeed.memory.partitioned_param_swapper import SwapFailure
    from shardscope.memory.state.stages import Stage


# ---- Training state


def compute_stage_3_state(plan: Plan, stage: Stage, rank: RankCounts) -> TrainingState:
    """Return the state of stage 3: every tensor is partitioned, and all-gathered when a module needs it."""
    layout = get_layout(plan)
    half, counts = rank.half, rank.counts
    partition = counts.partition
    # fp32 main copies and moments of this rank's partitions (_create_fp32_partitions).
    optimizer = FP32 * partition + compute_flat_state(plan.recipe.optimizer, partition)
    # The bucket is allocated once, in the reduction type, if gradients are contiguous.
    bucket_width = get_reduction_width(layout, plan.recipe)
    bucket = bucket_width * layout.reduce_bucket_size if layout.contiguous_gradients else 0
    secondary = count_secondary_partitions(plan)

    def build_staging(elements: int, when: str, secondary_elements: int = secondary.in_step) -> Term:
        def explain() -> str:
            hpz = f" + at most {format_gib(half * secondary_elements)} GiB of secondary partitions (hpZ)"
            return (
                f"{format_gib(bucket)} GiB bucket (reduce_bucket_size={layout.reduce_bucket_size:,}) + "
                f"{elements:,} elements × {half} bytes all-gathered {when} "
                f"(stage3_max_reuse_distance={layout.stage3_max_reuse_distance:,}, "
                f"stage3_prefetch_bucket_size={layout.prefetched_elements:,})"
                f"{hpz if layout.zero_hpz_partition_size > 1 else ''}"
            )

        return Term(bucket + half * (elements + secondary_elements), explain)

    # In backward the peak candidates add the all-gathered parameters phase by phase; these stay throughout.
    buffers = ZeroBuffers(
        bucket=bucket + half * secondary.in_step,
        trains_all=rank.trains_all,
        after_forward=bucket + half * (counts.after_forward + secondary.in_step),
        earlier_gradients=half * partition,
        gradients_at_loss=half * partition,
        gathers_in_forward=True,
    )
    return TrainingState(
        parameters=Term(
            half * (partition + counts.frozen),
            lambda: (
                f"{partition + counts.frozen:,} = each tensor / {rank.ranks} ranks, rounded up, × {half} "
                "bytes"
            ),
        ),
        # grad_partitions_flat_buffer is allocated once.
        gradients=Term(
            half * partition,
            lambda: f"{partition:,} × {half} bytes · a permanent buffer, each tensor / ranks",
        ),
        keeps_gradients=True,
        optimizer=Term(
            optimizer,
            lambda: (
                f"{partition:,} × {rank.format_width(optimizer, partition)} bytes: fp32 main copy and "
                f"{plan.recipe.optimizer} state, each tensor / ranks"
            ),
        ),
        gather_rest=build_staging(counts.persistent, "and never released", secondary.frozen),
        gather_update=build_staging(counts.persistent, "and never released"),
        gather_forward=build_staging(counts.after_forward, "when forward ends"),
        group_sizes=rank.group_sizes,
        find_backward_peaks=lambda backward: find_backward_peaks(
            counts, backward, half, list_activation_sizes(plan, stage, backward.modules), buffers
        ),
        optimizer_working=_compute_working_memory(plan, rank),
        initialisation={
            "optimizer": Term(
                FP32 * partition, lambda: "fp32 main copies; the first step allocates the optimizer state"
            ),
            # While zero.Init partitions a tensor, the gradients' buffer and the main copies, which are in the
            # sum of this phase, do not exist yet: subtract them.
            "gather_buffers": Term(
                maximum(bucket, half * counts.largest_tensor - (half + FP32) * partition)
                + half * secondary.at_init,
                lambda: (
                    f"the bucket, or before it a tensor of {counts.largest_tensor:,} elements that zero.Init "
                    "partitions"
                ),
            ),
        },
    )


def _compute_working_memory(plan: Plan, rank: RankCounts) -> Term:
    """Return the temporaries of the optimizer step."""
    half, counts = rank.half, rank.counts
    # One after the other: the norm's fp64 copy of the largest partition; a sub-group's gradients, flat and in
    # fp32; the update of a sub-group.
    update = maximum(
        FP64 * ceil_div(counts.largest_trained, rank.ranks),
        (FP32 + (half if half < FP32 else 0)) * counts.update_group,
        FP32 * counts.update_group + compute_flat_working(plan.recipe.optimizer, counts.update_group),
    )
    return Term(
        update,
        lambda: (
            f"{format_gib(update)} GiB gradients of a sub-group of {counts.update_group:,} "
            "(sub_group_size), flat and fp32, or the norm's fp64 copy of the largest partition"
        ),
    )


# ---- One step


class Stage3Traffic(NamedTuple):
    """Elements that one micro-batch moves, each in forward and in backward, and the buckets of its gradients.

    Reads from NVMe and writes to it are of the rank's own partitions.
    """

    all_gathered: tuple[int, int] = (0, 0)
    """Elements of the all-gathers that start."""
    copied_out: tuple[int, int] = (0, 0)
    """The part of them that is copied out of a flat buffer, as several parameters share one all-gather."""
    read_from_nvme: tuple[int, int] = (0, 0)
    written_to_nvme: int = 0
    """Elements that the optimizer step writes to NVMe."""


class Stage3Step(NamedTuple):
    """Elements of all-gathered parameters, unsharded gradients and reduction copies in one step."""

    persistent: int
    """Persistent parameters, which are never released."""
    after_forward: int
    """Elements at the end of forward."""
    backward: tuple[BackwardPart, ...]
    """Parts of backward; the last one is the final reduction."""
    in_forward: tuple[tuple[int, int], ...]
    """(layers passed, maximum elements) in forward; entries below a later maximum are left out."""
    traffic: Stage3Traffic
    buckets: BucketCounts
    failure: SwapFailure | None = None
    """Assertion that DeepSpeed fails in this step; None if there is none."""


@lru_cache(maxsize=1024)
def simulate_step(
    model: TracedModel, ranks: int, recompute_interval: int, options: Stage3Options
) -> Stage3Step:
    """Simulate one step over the modules of ``model`` on one of ``ranks``.

    Every ``recompute_interval``-th layer, starting with the first, is recomputed in backward; 0 recomputes
    none.
    """
    return _StepSimulation(trace_modules(model, recompute_interval), ranks, options).run()


class _StepSimulation:
    """Coordinator, ipg bucket (``IPGBucketZ3``) and swapper of one rank during one step."""

    def __init__(self, trace: ModuleTrace, ranks: int, options: Stage3Options) -> None:
        self.trace, self.ranks, self.options = trace, ranks, options
        self.sizes, self.tied_head, self.trains_all = trace.sizes, trace.tied_head, trace.trains_all
        self.coordinator = PartitionedParameterCoordinator(trace, ranks, options)
        self.optimizer_swapper: PartitionedOptimizerSwapper | None = None
        if options.nvme is not None and options.nvme.swaps_optimizer:
            partitions = [-(-size // ranks) for size in self.sizes]
            self.optimizer_swapper = PartitionedOptimizerSwapper(partitions, options.nvme.half)
        self.bucket_elements = self.num_in_bucket = self.largest_partition = self.num_buckets = 0
        self.outside_bucket = 0
        """Elements of unreduced gradients that are not copied to the bucket: they stay autograd's tensors."""

    @property
    def gathered(self) -> int:
        """Elements of all-gathered parameters, and of unreduced gradients outside of the bucket."""
        return self.coordinator.live + self.outside_bucket

    def run(self) -> Stage3Step:
        """Simulate the step and return its phases."""
        # Forward: the maxima in each part, with the number of layers whose activations are saved by then.
        in_forward: list[tuple[int, int]] = []
        num_layers = self.trace.num_layers
        for number, events in enumerate(self.trace.forward):
            before, behind = self._run_forward_part(events, number)
            in_forward.append((max(0, min(number - 1, num_layers)), max(before, behind)))
            in_forward.append((min(number, num_layers), behind))
        after_forward, moved_in_forward = self.coordinator.live, self._count_moved()
        # Backward. Gradients stay in the bucket from one part to the next.
        parts = [self._run_backward_part(events, number) for number, events in enumerate(self.trace.backward)]
        # The final reduction starts in the hook of the last gradient.
        gathered = self.gathered
        copies = self._reduce_ipg_bucket() if self.trains_all else self._move_partitions_to_host()
        reduction = self._build_phase(gathered + copies)
        swapper = self.coordinator.swapper
        moved = zip(moved_in_forward, self._count_moved(), strict=True)
        all_gathered, copied_out, read = ((forward, both - forward) for forward, both in moved)
        written = swapper.written_elements if swapper is not None else 0
        return Stage3Step(
            self.coordinator.persistent_elements,
            after_forward,
            (*parts, BackwardPart(reduction, reduction)),
            _drop_below_later(in_forward),
            Stage3Traffic(all_gathered, copied_out, read, written),
            BucketCounts(self.num_buckets + (self.bucket_elements > 0), self.bucket_elements),
            swapper.failure if swapper is not None else None,
        )

    def _count_moved(self) -> tuple[int, int, int]:
        """Return the elements all-gathered, copied out of flat buffers and read from NVMe so far."""
        swapper = self.coordinator.swapper
        read = swapper.read_elements if swapper is not None else 0
        return self.coordinator.all_gathered, self.coordinator.copied_out, read

    def _run_forward_part(self, events: list[HookEvent], number: int) -> tuple[int, int]:
        """Run one part of forward. Return the maximum elements before and from its last matmul.

        Before a layer's last matmul all of its saved tensors exist.
        """
        coordinator = self.coordinator
        last = max(at for at, (kind, module) in enumerate(events) if kind == "fetch" and module.params)
        saves_views = not self.trace.is_recomputed(number - 1)
        coordinator.peak, before = coordinator.live, 0
        for at, (kind, module) in enumerate(events):
            if at == last:
                before, coordinator.peak = coordinator.peak, coordinator.live
            if kind == "release":
                coordinator.release_sub_module(module)
            else:
                coordinator.fetch_sub_module(module, saves_views=saves_views)
        return before, coordinator.peak

    def _run_backward_part(self, events: list[HookEvent], number: int) -> BackwardPart:
        """Run one part of backward: head and norm, one layer, or the embedding."""
        coordinator = self.coordinator
        # A tied head's gradient stays allocated until the embedding has its own.
        tied_gradient = self.tied_head if number and self.trains_all else 0
        feed_forward: list[PhaseElements] = []
        first_gradient: PhaseElements | None = None
        before_attention: PhaseElements | None = None
        peak = attention_output = PhaseElements(0, 0)
        at_logits: PhaseElements | None = None
        at_experts: PhaseElements | None = None
        after_down: PhaseElements | None = None
        # Whether the feed-forward is done; attention's first gradient ends this phase.
        is_after_feed_forward = False
        for kind, module in events:
            # Hooks before and after a module: all-gathers and releases, without a new gradient.
            if kind != "gradients":
                if kind == "fetch" and module.all_params and feed_forward and after_down is None:
                    # The activation's backward is over: the last matrix is released, and a plain activation,
                    # a module without parameters, has prefetched.
                    after_down = self._build_phase(self.gathered + tied_gradient)
                coordinator.peak = coordinator.live
                if kind == "release":
                    coordinator.release_sub_module(module)
                else:
                    is_recomputation = kind == "recompute"
                    coordinator.fetch_sub_module(
                        module, saves_views=is_recomputation, in_recomputation=is_recomputation
                    )
                peak = self._raise_peak(peak, coordinator.peak + self.outside_bucket + tied_gradient)
                continue
            call = module.call
            if not number and at_logits is None:
                # The head's gradients exist together; they are reduced after the logits' gradient is freed.
                new = sum(self.sizes[index] for index in module.params) if call.trained else 0
                at_logits = self._raise_peak(peak, self.gathered + new)
            # The part's first gradient; in the head's part the norm's, which comes last.
            if first_gradient is None or not number:
                head_gradient = tied_gradient if number else self._count_head_gradient(module)
                first_gradient = self._build_phase(self.gathered + head_gradient)
            # A leaf's gradients are reduced when all of them exist (leaf_module_config.py).
            if call.is_leaf:
                after_down = first_gradient
                leaf_peak, reduction_peak = self._run_leaf_backward(module, feed_forward, tied_gradient)
                peak = self._raise_peak(peak, tied_gradient + leaf_peak)
                attention_output = self._raise_peak(attention_output, tied_gradient + reduction_peak)
                is_after_feed_forward = True
                continue
            if call.is_experts and at_experts is None:
                at_experts = self._build_phase(self.gathered + tied_gradient)
            if call.in_attention and before_attention is None:
                before_attention = self._build_phase(self.gathered + tied_gradient)
            # Other modules: each gradient is reduced by its own hook.
            for index in module.params:
                elements = self._run_gradient_hook(index, call.trained) + tied_gradient
                peak = self._raise_peak(peak, elements)
                if call.is_feed_forward:
                    feed_forward.append(self._build_phase(elements))
                elif is_after_feed_forward:
                    attention_output = self._raise_peak(attention_output, elements)
            if call.is_experts and after_down is None and not call.has_vector_pairs:
                # Both matrices stay all-gathered until the module's end.
                after_down = self._build_phase(self.gathered + tied_gradient)
            is_after_feed_forward = call.is_feed_forward or (is_after_feed_forward and not call.in_attention)
        if first_gradient is None:
            first_gradient = self._build_phase(self.gathered + tied_gradient)
        return BackwardPart(
            first_gradient,
            peak,
            before_attention,
            tuple(feed_forward),
            attention_output,
            at_logits,
            at_experts,
            after_down,
        )

    def _build_phase(self, staging: int) -> PhaseElements:
        """Return a phase with ``staging`` elements and the gradients that cannot be swapped out."""
        swapper = self.optimizer_swapper
        return PhaseElements(staging, 0 if swapper is None else swapper.unswapped_gradients)

    def _raise_peak(self, peak: PhaseElements, staging: int) -> PhaseElements:
        """Return the larger one of ``peak`` and the current phase with ``staging`` elements."""
        current = self._build_phase(staging)
        return current if current.total > peak.total else peak

    def _count_head_gradient(self, module: TracedModule) -> int:
        """Return the elements of a tied head's gradient after the head's backward."""
        return 0 if 0 in module.params or not self.trains_all else self.tied_head

    def _run_leaf_backward(
        self, module: TracedModule, feed_forward: list[PhaseElements], tied_gradient: int
    ) -> tuple[int, int]:
        """Return the maxima of a leaf's backward and of reducing its gradients one by one; release it."""
        params, trained = module.params, module.call.trained
        unreduced = sum(self.sizes[index] for index in params) if trained else 0
        shared_experts = module.call.saved_views[-1] + 1
        # The routed experts' backward comes first, starting at their last matmul, then shared experts'.
        shared = sum(self.sizes[index] for index in params[shared_experts:]) if trained else 0
        self.coordinator.free_view(params[shared_experts - 1])
        peak = self.gathered + unreduced - shared
        feed_forward.append(self._build_phase(peak + tied_gradient))
        self.coordinator.free_view(params[shared_experts - 2])
        peak = max(peak, self.gathered + unreduced)
        reduction_peak = 0
        for index in params if unreduced else ():
            gathered = self.gathered
            reduction_peak = max(reduction_peak, gathered + unreduced + self._add_to_ipg_bucket(index))
            unreduced -= self.sizes[index]
        for index in params:
            self.coordinator.release_param(index, is_leaf=True)
        self.coordinator.release_recompute_params(module.call)
        return max(peak, reduction_peak), reduction_peak

    def _run_gradient_hook(self, index: int, trained: bool) -> int:
        """Return the most elements, besides the bucket, while a gradient is computed and copied into it."""
        elements = self.gathered + (self.sizes[index] if trained else 0)
        is_complete = trained and self.coordinator.find_next_use(index) is None
        if is_complete:
            copies = self._add_to_ipg_bucket(index)
            # The caller counts the first of a tied embedding's two gradients. Here both and their sum are
            # alive, and only the sum is reduced.
            both = self.tied_head if not index else 0
            elements += max(both, copies - both)
        self.coordinator.free_view(index)
        return elements

    def _add_to_ipg_bucket(self, index: int) -> int:
        """Add a gradient to the bucket. Return the elements copied if a full bucket was reduced first.

        See ``reduce_independent_p_g_buckets_and_remove_grads`` and ``__add_grad_to_ipg_bucket``.
        """
        bucket_size, size, copies = self.options.reduce_bucket_size, self.sizes[index], 0
        # A gradient that does not fit reduces the bucket first.
        if self.bucket_elements and self.bucket_elements + size > bucket_size:
            copies = self._reduce_ipg_bucket()
            self.bucket_elements = self.num_in_bucket = self.outside_bucket = 0
            self.num_buckets += 1
        self.bucket_elements += size
        self.num_in_bucket += 1
        if self.optimizer_swapper is not None:
            self.optimizer_swapper.add_gradient(index)
        self.largest_partition = max(self.largest_partition, -(-size // self.ranks))
        # A gradient larger than the bucket, and any without a contiguous bucket, stays autograd's tensor.
        if size > bucket_size:
            self.outside_bucket = size
        elif not self.options.contiguous_gradients:
            self.outside_bucket = self.bucket_elements
        return copies

    def _reduce_ipg_bucket(self) -> int:
        """Return the elements copied to reduce the bucket.

        Several gradients are copied into an interleaved buffer; a single one that divides evenly is not. With
        ``communication_data_type`` the bucket and this copy have that type, and a gradient too large for the
        bucket is cast separately. The reduced partitions are cast back before the copy is freed
        (``__avg_scatter_grads``).
        """
        is_copied = self.num_in_bucket > 1 or self.bucket_elements % self.ranks != 0
        on_the_way, cast_width = self._move_partitions_to_host(), self.options.cast_width
        if not cast_width:
            return self.bucket_elements * is_copied + on_the_way
        partitions = -(-self.bucket_elements // self.ranks)
        num_copies = is_copied + (self.outside_bucket > 0)
        return partitions + max(cast_width * num_copies * self.bucket_elements, on_the_way)

    def _move_partitions_to_host(self) -> int:
        """Return the temporary elements while reduced partitions are copied to the host or to files.

        The norm of each partition for the host is computed in double precision, ``NORM_ELEMENTS`` at a time
        (``_constant_buffered_norm2``). Then all of the partition is cast to fp32 on the device
        (``_offload_grad_partition_at_boundary``), which is more from twice as many elements on.
        """
        partition, self.largest_partition = self.largest_partition, 0
        norm = self.options.norm_width * min(partition, NORM_ELEMENTS)
        norm = max(norm, self.options.main_copy_width * partition)
        swapped = 0 if self.optimizer_swapper is None else self.optimizer_swapper.swap_out_gradients()
        return self.options.reads_gradients_back * partition + norm + swapped


def _drop_below_later(maxima: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the (layers passed, elements) entries that are larger than every later one, last to first."""
    entries: list[tuple[int, int]] = []
    for num_passed, elements in reversed(maxima):
        if not entries or elements > entries[-1][1]:
            entries.append((num_passed, elements))
    return tuple(entries)
