"""ZeRO-3's parameter coordinator: which parameters are all-gathered at each module call.

DeepSpeed records a trace of the module calls in the first step; from then on it prefetches by that trace and
keeps parameters that will be reused soon. This module makes the same decisions from the parameters' sizes. It
repeats ``PartitionedParameterCoordinator``, with its names
(deepspeed/runtime/zero/partitioned_param_coordinator.py, DeepSpeed 0.19).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from shardscope.frameworks.deepspeed.memory.parameter_offload import trace_modules
from shardscope.frameworks.deepspeed.memory.partitioned_param_swapper import (
    AsyncPartitionedParameterSwapper,
    NvmeOptions,
)

if TYPE_CHECKING:
    from shardscope.frameworks.deepspeed.memory.parameter_offload import (
        ModuleCall,
        ModuleTrace,
        TracedModel,
        TracedModule,
    )
    from shardscope.frameworks.deepspeed.memory.partitioned_param_swapper import SwapFailure


class Stage3Options(NamedTuple):
    """Options of ZeRO-3, sizes in elements."""

    param_persistence_threshold: int
    prefetch_bucket_size: int
    max_live_parameters: int
    max_reuse_distance: int
    reduce_bucket_size: int
    contiguous_gradients: bool = True
    """Whether gradients are copied into the bucket until they are reduced."""
    offloads_partitions: bool = False
    """Whether partitions are on the host or on NVMe: then even a single rank has to fetch parameters."""
    nvme: NvmeOptions | None = None
    """NVMe swapping options; None without swapping."""
    norm_width: int = 0
    """Size of an fp64 element in gradient elements, if reduced gradients are offloaded with their norm in
    double precision; 0 if they stay on the device."""
    reads_gradients_back: bool = False
    """Whether a reduced partition is copied back from the host for its norm."""
    main_copy_width: int = 0
    """Size of an fp32 element in gradient elements, if reduced gradients are cast to fp32 before they are
    copied to the host; 0 without offload, and for gradients that are in fp32."""
    cast_width: int = 0
    """Size of an element of the reduction type in gradient elements; 0 if gradients are not cast."""


@lru_cache(maxsize=1024)
def find_first_failure(
    model: TracedModel, ranks: int, recompute_interval: int, options: Stage3Options
) -> SwapFailure | None:
    """Return the first assertion that swapping parameters fails in one step; None if there is none.

    ``simulate_step`` (zero_optimizer_stage3.py) without the sizes of what is in memory: fetches and releases
    alone, up to the failure. It is asked for one number of buffers after another.
    """
    trace = trace_modules(model, recompute_interval)
    coordinator = PartitionedParameterCoordinator(trace, ranks, options)
    swapper = coordinator.swapper
    if swapper is None:
        return None
    for events in (*trace.forward, *trace.backward):
        for kind, module in events:
            if kind == "release":
                coordinator.release_sub_module(module)
            elif kind != "gradients":
                coordinator.fetch_sub_module(module, saves_views=False, in_recomputation=kind == "recompute")
                if swapper.failure is not None:
                    return swapper.failure
            elif module.call.is_leaf:
                # A leaf is released by the hook of its last gradient.
                coordinator.release_sub_module(module)
    return None


class PartitionedParameterCoordinator:
    """All-gathered parameters of one rank, sizes in elements."""

    def __init__(self, trace: ModuleTrace, ranks: int, options: Stage3Options) -> None:
        # Sizes and options, then the trace.
        self.options, self.ranks = options, ranks
        self.sizes = trace.sizes
        self.gathers = ranks > 1 or options.offloads_partitions
        """Whether parameters have to be fetched at all: a single rank without offloading has all of them."""
        # Each parameter is padded to a multiple of the ranks, all-gathered alone or coalesced.
        self.gathered_sizes = [-(-size // ranks) * ranks if self.gathers else 0 for size in self.sizes]
        self.persistent = [size <= options.param_persistence_threshold for size in self.sizes]
        self.swapper: AsyncPartitionedParameterSwapper | None = None
        if options.nvme is not None and options.nvme.swaps_params:
            partitions = [-(-size // ranks) for size in self.sizes]
            self.swapper = AsyncPartitionedParameterSwapper(
                partitions, trace.trained, self.persistent, options.nvme
            )
        self.fetches = trace.fetches
        self.num_popped = 0
        """Entries of ``fetches.queue`` that were fetched or skipped so far."""
        # By parameter: the number of its uses that are over.
        self.uses_over = [0] * len(self.sizes)
        self.recursive_uses_over = [0] * len(self.sizes)
        # What is all-gathered or on its way.
        self.available = {index for index, persists in enumerate(self.persistent) if persists}
        self.most_recent_step_fetched_for = [-1] * len(self.sizes)
        self.step_id = self.num_available_params = 0
        self.live = self.persistent_elements = sum(self.gathered_sizes[index] for index in self.available)
        """Elements all-gathered now, with flat buffers and pending fetches; and those never released."""
        self.peak = self.live
        """Maximum of ``live`` since a caller last reset it to ``live``."""
        self.all_gathered = 0
        """Elements of all all-gathers so far."""
        self.copied_out = 0
        """The part of them that is copied out of a flat buffer for several parameters."""
        self.inflight_params: dict[int, list[int]] = {}
        """Parameters with a pending all-gather, and all parameters of that coalesced all-gather."""
        self.inflight_elements = 0
        # What outlives its release: parameters of a recomputation, and views that autograd has saved.
        self.recompute_params: set[int] = set()
        """Frozen parameters that a recomputation has fetched: they are released only after the backward of
        the module in which the recomputation started, the owner (``update_recompute_parameters``)."""
        self.entered_module: ModuleCall | None = None
        self.recompute_owner: ModuleCall | None = None
        self.viewed: set[int] = set()
        """Parameters that autograd has saved a view of: their memory outlives their release."""
        self.released_views: set[int] = set()
        """Released parameters whose memory is still allocated because of such a view."""

    def fetch_sub_module(
        self, module: TracedModule, *, saves_views: bool, in_recomputation: bool = False
    ) -> None:
        """All-gather a module's parameters, and prefetch those of the next modules.

        ``saves_views``: autograd saves views of its parameters in this forward. ``in_recomputation``: this is
        a forward that activation checkpointing runs in backward.
        """
        if not in_recomputation:
            self.entered_module = module.call
        elif self.recompute_owner is None:
            self.recompute_owner = self.entered_module
        self._fetch_params(module.params)
        if in_recomputation and not module.call.trained:
            self.recompute_params.update(module.params)
        if saves_views and module.call.has_backward and self.gathers:
            self.viewed.update(module.params[view] for view in module.call.saved_views)

    def release_sub_module(self, module: TracedModule) -> None:
        """Release a module's parameters after its forward or backward, and those of its recomputation."""
        for index in module.params:
            self.release_param(index, module.call.is_leaf)
        self.release_recompute_params(module.call)

    def release_recompute_params(self, call: ModuleCall) -> None:
        """Release the parameters that a recomputation fetched, when the owner's backward is done."""
        if call is not self.recompute_owner:
            return
        params, self.recompute_owner, self.recompute_params = self.recompute_params, None, set()
        for index in params:
            if index in self.available and not self.persistent[index]:
                self._partition_param(index)

    def free_view(self, index: int) -> None:
        """Free autograd's view of a weight, after the backward of its matmul."""
        self.viewed.discard(index)
        if index in self.released_views:
            self.released_views.discard(index)
            self.live -= self.gathered_sizes[index]

    def _fetch_params(self, params: tuple[int, ...]) -> None:
        # All-gather what no prefetch has started to, then wait for all of the module's parameters.
        missing = [i for i in params if i not in self.available and i not in self.inflight_params]
        if missing:
            self._all_gather_params(missing)
        for index in params:
            if index in self.inflight_params:
                self._wait_for_param(index)
        # Pop the module's parameters off the queue, unless earlier prefetches have popped them.
        not_fetched = sum(self.most_recent_step_fetched_for[index] < self.step_id for index in params)
        queue = self.fetches.queue
        for step, popped in queue[self.num_popped : self.num_popped + not_fetched]:
            self.most_recent_step_fetched_for[popped] = step
        self.num_popped = min(self.num_popped + not_fetched, len(queue))
        self._prefetch_params()
        self.step_id += 1

    def _prefetch_params(self) -> None:
        """Start one all-gather of the next parameters in the queue, up to both limits."""
        max_elements = min(
            self.options.max_live_parameters - self.num_available_params, self.options.prefetch_bucket_size
        )
        params: list[int] = []
        elements = 0
        queue, on_nvme = self.fetches.queue, () if self.swapper is None else self.swapper.on_nvme
        while self.num_popped < len(queue) and elements < max_elements:
            step, index = queue[self.num_popped]
            if index in on_nvme:
                # Swapping in is asynchronous: prefetching stops here, to preserve the order of fetches.
                break
            self.num_popped += 1
            # A use that prefetching has skipped keeps the parameter from being released before it.
            self.most_recent_step_fetched_for[index] = max(self.most_recent_step_fetched_for[index], step)
            if index in self.available or index in self.inflight_params or index in params:
                continue
            params.append(index)
            elements += self.sizes[index]
        if params:
            self._all_gather_params(params)
        if self.options.prefetch_bucket_size:
            self._prefetch_nvme_param_partitions()

    def _prefetch_nvme_param_partitions(self) -> None:
        """Swap in upcoming partitions from NVMe, up to twice the elements of pending all-gathers."""
        if self.swapper is None or not self.swapper.on_nvme:
            return
        # DeepSpeed's own factor: reads stay ahead of all-gathers by as much as these take, with the parameter
        # that exceeds it as the last one (__prefetch_nvme_param_partitions).
        before, first = self.fetches.elements_before, self.num_popped
        end = int(before.searchsorted(before[first] + 2 * self.inflight_elements, side="right"))
        upcoming = self.fetches.params[first:end]
        num_buffers = max(0, self.swapper.available_swap_in_buffers)
        swap_in_params = upcoming[self.swapper.is_on_nvme[upcoming]][:num_buffers].tolist()
        self.swapper.swap_in(swap_in_params)

    def _all_gather_params(self, params: list[int]) -> None:
        """Start one all-gather, into a flat buffer if there are several parameters."""
        if self.swapper is not None:
            self.swapper.swap_in(params)
        for index in params:
            self.inflight_params[index] = params
            self.inflight_elements += self.sizes[index]
            self.num_available_params += self.sizes[index]
            self.live += self.gathered_sizes[index]
            self.all_gathered += self.gathered_sizes[index]
            if len(params) > 1 and self.ranks > 1:
                self.copied_out += self.gathered_sizes[index]
        self.peak = max(self.peak, self.live)

    def _wait_for_param(self, index: int) -> None:
        """Wait for a parameter's all-gather.

        A coalesced all-gather is copied out of its flat buffer, which is freed when its last parameter is
        used.
        """
        params = self.inflight_params.pop(index)
        self.inflight_elements -= self.sizes[index]
        is_coalesced = len(params) > 1 and self.ranks > 1
        elements = sum(self.gathered_sizes[member] for member in params) if is_coalesced else 0
        if index not in self.available:
            self.available.update(params)
            self.live += elements
            self.peak = max(self.peak, self.live)
        if is_coalesced and all(self.inflight_params.get(member) is not params for member in params):
            self.live -= elements

    def find_next_use(self, index: int, *, recursive: bool = False) -> int | None:
        """Return the next fetch that uses the parameter; None if there is none in this step."""
        steps = (self.fetches.recursive_uses if recursive else self.fetches.uses)[index]
        uses_over = self.recursive_uses_over if recursive else self.uses_over
        position = uses_over[index]
        while position < len(steps) and steps[position] < self.step_id:
            position += 1
        uses_over[index] = position
        return steps[position] if position < len(steps) else None

    def release_param(self, index: int, is_leaf: bool) -> None:
        """Release a parameter, unless it persists or is reused within ``max_reuse_distance``."""
        if self.persistent[index] or index not in self.available:
            return
        # A prefetch has already counted on it for a later module.
        if self.most_recent_step_fetched_for[index] > self.step_id:
            return
        if index in self.recompute_params and self.recompute_owner is not None:
            return
        # Keep it if its next use is near (__params_to_release, max_reuse_dist_in_numel).
        next_use = self.find_next_use(index, recursive=is_leaf)
        traversed = self.fetches.traversed_recursively if is_leaf else self.fetches.traversed
        if next_use is not None:
            distance = traversed[next_use] - traversed[self.step_id]
            if distance < self.options.max_reuse_distance:
                return
        self._partition_param(index)

    def _partition_param(self, index: int) -> None:
        """Free a parameter's all-gathered memory, unless a view of autograd keeps it allocated."""
        self.available.discard(index)
        if self.swapper is not None:
            self.swapper.remove_partition_and_release_buffers(index)
        self.num_available_params -= self.sizes[index]
        if index in self.viewed:
            self.viewed.discard(index)
            self.released_views.add(index)
        else:
            self.live -= self.gathered_sizes[index]
