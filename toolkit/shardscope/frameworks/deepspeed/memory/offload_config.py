"""Memory of ZeRO with ``offload_optimizer`` and ``offload_param``: on the device, on the host and on NVMe.

Ren et al. 2021 (ZeRO-Offload), Rajbhandari et al. 2021 (ZeRO-Infinity); the options are those of
deepspeed/runtime/zero/offload_config.py (DeepSpeed 0.19), the buffers as ``deepspeed/runtime/zero`` and
``deepspeed/runtime/swap_tensor`` allocate them.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.number_format import format_gib
from shardscope.core.ops import ceil_div, map_distinct, maximum, where
from shardscope.core.precision import FP32
from shardscope.frameworks.deepspeed.layout import find_largest_tensor, get_layout
from shardscope.frameworks.deepspeed.memory.partition_parameters import list_tensors
from shardscope.frameworks.deepspeed.memory.partitioned_optimizer_swapper import count_optimizer_bytes
from shardscope.frameworks.deepspeed.memory.partitioned_param_swapper import (
    NvmeOptions,
    align_bytes,
    count_parameter_bytes,
    get_nvme_options,
)
from shardscope.frameworks.deepspeed.memory.zero_optimizer_stage_1_and_2 import is_reduced_late
from shardscope.memory.report import Term, choose_term, zero_term
from shardscope.memory.state.lora import Adapters, find_adapters
from shardscope.memory.state.optimizers import compute_flat_state

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.plan import Plan
    from shardscope.frameworks.deepspeed.memory.element_counts import RankCounts
    from shardscope.memory.activations.stage_activations import StageBackward
    from shardscope.memory.state.stages import Stage
    from shardscope.memory.state.training_state import PeakCandidate, PeakTerms, TrainingState

PARAMS_BUFFER_ELEMENTS = 100_000_000
"""DeepSpeed's default for ``buffer_size`` of ``offload_param`` (deepspeed/runtime/zero/offload_config.py)."""


def offload_state(plan: Plan, stage: Stage, state: TrainingState, rank: RankCounts) -> TrainingState:
    """Return ``state`` with its offloaded parts moved to the host or to NVMe.

    On CPU ranks offloading to the host moves nothing, but its buffers are allocated.
    """
    layout = get_layout(plan)
    nvme = (
        count_nvme_bytes(plan, stage) if "nvme" in (layout.offload_optimizer, layout.offload_params) else None
    )
    if layout.offload_optimizer == "cpu" and not plan.on_gpu:
        state = _keep_optimizer_on_cpu_rank(plan, state, rank)
    elif layout.offload_optimizer:
        state = _offload_optimizer(plan, state, rank, nvme)
    if layout.offload_params == "nvme" or (layout.offload_params and plan.on_gpu):
        state = _offload_params(plan, state, rank, nvme)
    return state


# ---- offload_optimizer


class _OffloadedGradients(NamedTuple):
    """Gradients under ``offload_optimizer``: what is left of them on the device, and the host's copies."""

    host_bytes: int
    after_backward: Term
    """On the device when backward has ended."""
    at_update: Term
    """On the device when the optimizer step starts."""
    staging: int = 0
    """Device buffer for one gradient on its way to the host, in bytes."""
    stays_on_device: bool = False
    """Whether all gradients are on the device until backward ends."""


def _offload_optimizer(
    plan: Plan, state: TrainingState, rank: RankCounts, nvme: NvmeBytes | None
) -> TrainingState:
    """Return ``state`` with the optimizer's state, its update and the gradients off the device."""
    layout, counts = get_layout(plan), rank.counts
    moments = compute_flat_state(plan.recipe.optimizer, counts.partition)
    nvme_bytes = 0
    if nvme is not None and layout.offload_optimizer == "nvme":
        # Main copies, moments and gradients are files; a buffer pool holds the sub-group being updated.
        nvme_bytes = nvme.optimizer_files + nvme.gradient_files
        host_bytes = nvme.optimizer_host
    else:
        # fp32 main copies, moments, and the fp32 gradients that DeepSpeedCPUAdam reads (pinned).
        host_bytes = FP32 * counts.partition + moments + FP32 * counts.partition
    if layout.stage == 3:
        gradients = _offload_partitioned_gradients(rank, nvme)
    else:
        gradients = _offload_flat_gradients(plan, rank)

    # What stages 1 and 2 have on the device besides gradients: the staging buffer, allocated after the
    # weights are flattened.
    initialisation = {
        name: term for name, term in state.initialisation.items() if name not in ("optimizer", "gradients")
    }
    gather_rest, gather_forward = state.gather_rest, state.gather_forward
    if layout.stage < 3:
        staging = gradients.staging
        initialisation["gather_buffers"] = zero_term("none while weights are flattened")
        gather_forward = _add_staging_term(gather_forward, staging)
        gather_rest = gather_rest or Term(
            staging, lambda: f"{format_gib(staging)} GiB for one gradient on its way to the host"
        )

    find_device_peaks = state.find_backward_peaks
    assert find_device_peaks is not None

    def find_peaks(backward: StageBackward) -> list[PeakCandidate]:
        """Return the peak candidates of backward without the gradients that are on the host."""
        peaks = find_device_peaks(backward)
        if layout.stage == 3:
            return [_remove_gradient_buffer(peak, rank.half * counts.partition) for peak in peaks]
        return [
            _add_staging(peak, gradients.staging, gradients.stays_on_device, gradients.after_backward)
            for peak in peaks
        ]

    location = "in host memory" if layout.offload_optimizer == "cpu" else "on NVMe"
    return state._replace(
        gradients=choose_term(gradients.stays_on_device, state.gradients, gradients.after_backward),
        gradients_reduced=gradients.at_update,
        keeps_gradients=False,
        optimizer=zero_term(f"{location} (offload_optimizer), updated there"),
        optimizer_working=zero_term("the update runs on the host (DeepSpeedCPUAdam)"),
        initialisation=initialisation,
        gather_rest=gather_rest,
        gather_forward=gather_forward,
        find_backward_peaks=find_peaks,
        host_bytes=state.host_bytes + host_bytes + gradients.host_bytes,
        nvme_bytes=state.nvme_bytes + nvme_bytes,
    )


def _offload_partitioned_gradients(rank: RankCounts, nvme: NvmeBytes | None) -> _OffloadedGradients:
    """Return the gradients of stage 3, whose partitions are copied to the host as they are reduced."""
    # grad_partitions_flat_buffer, in the gradients' own type, pinned.
    host_bytes = rank.half * rank.counts.partition
    if nvme is None:
        return _OffloadedGradients(
            host_bytes,
            zero_term("reduced gradients are in pinned host memory (offload_optimizer)"),
            zero_term("on the host"),
        )
    unswapped_bytes = nvme.unswapped_gradients
    unswapped = Term(
        unswapped_bytes,
        lambda: (
            f"{format_gib(unswapped_bytes)} GiB of fp32 gradients that are not swapped: under a "
            "mebibyte, or not a multiple of a kibibyte (runtime/swap_tensor/optimizer_utils.py)"
        ),
    )
    return _OffloadedGradients(host_bytes, unswapped, unswapped)


def _offload_flat_gradients(plan: Plan, rank: RankCounts) -> _OffloadedGradients:
    """Return the gradients of stages 1 and 2, which pass through a staging buffer one by one."""
    layout, half, counts = get_layout(plan), rank.half, rank.counts
    # The updated weights for the GPU, a staging tensor in each direction, and stage 2's accumulated
    # gradients; stage 1 accumulates on the GPU.
    accumulated = half * counts.own_gradients * rank.accumulates * (layout.stage == 2)
    return _OffloadedGradients(
        half * (counts.partition + counts.largest_trained) + accumulated,
        zero_term("copied to the host as they are reduced"),
        zero_term("on the host"),
        staging=half * counts.largest_trained,
        stays_on_device=is_reduced_late(layout.stage, bool(layout.overlap_comm), rank.accumulates),
    )


def _keep_optimizer_on_cpu_rank(plan: Plan, state: TrainingState, rank: RankCounts) -> TrainingState:
    """Return ``state`` of CPU ranks, with the offloading optimizer's buffers in the rank's own memory."""
    counts = rank.counts
    # Stage 3 keeps its gradient buffer where it is, so only main copies, moments and the fp32 gradients that
    # the optimizer reads are new.
    if get_layout(plan).stage == 3:
        optimizer_bytes = (
            compute_flat_state(plan.recipe.optimizer, counts.partition) + 2 * FP32 * counts.partition
        )
    else:
        state = _offload_optimizer(plan, state, rank, None)
        optimizer_bytes = state.host_bytes
    # torch's AdamW has temporaries, the other optimizers have none.
    working = zero_term("this optimizer step updates in place")
    if plan.recipe.optimizer == "adamw":
        working = Term(
            2 * FP32 * counts.update_group,
            lambda: (
                f"{counts.update_group:,} × {2 * FP32} bytes · torch's AdamW: the root of the second moment, "
                "and the same divided"
            ),
        )
    return state._replace(
        optimizer=Term(
            optimizer_bytes,
            lambda: (
                f"{format_gib(optimizer_bytes)} GiB in the rank's own memory: what offload_optimizer keeps "
                "on a host"
            ),
        ),
        optimizer_working=working,
        host_bytes=0,
    )


def _remove_gradient_buffer(peak: PeakCandidate, buffer_bytes: int) -> PeakCandidate:
    """Return a peak candidate of stage 3 with its gradient buffer on the host.

    Only fp32 gradients that cannot be swapped out stay on the device.
    """
    unswapped = maximum(0, peak.gradients - buffer_bytes)

    def find_terms() -> PeakTerms:
        explanation = f"{format_gib(unswapped)} GiB of fp32 gradients that are not swapped, reduced so far"
        return peak.find_terms()._replace(gradients=Term(unswapped, lambda: explanation))

    return peak.replace_buffers(peak.gather, unswapped, find_terms)


def _add_staging(peak: PeakCandidate, staging: int, stays_on_device: bool, gradients: Term) -> PeakCandidate:
    """Return a peak candidate with a staging gradient, and without the gradients that are on the host."""

    def find_terms() -> PeakTerms:
        terms = peak.find_terms()
        return terms._replace(
            gather=_add_staging_term(terms.gather, staging),
            gradients=choose_term(stays_on_device, terms.gradients, gradients),
        )

    gradient_bytes = where(stays_on_device, peak.gradients, gradients.num_bytes)
    return peak.replace_buffers(peak.gather + staging, gradient_bytes, find_terms)


def _add_staging_term(term: Term, staging: int) -> Term:
    return Term(
        term.num_bytes + staging,
        lambda: f"{term.explain()} + {format_gib(staging)} GiB for a gradient to the host",
    )


# ---- offload_param


def count_params_buffer_elements(plan: Plan) -> int:
    """Return ``buffer_size`` of ``offload_param``, in elements.

    The default is DeepSpeed's, or the largest partition of a tensor if that is larger.
    """
    layout = get_layout(plan)
    if layout.offload_params_buffer_size is not None:
        return layout.offload_params_buffer_size
    largest_partition = ceil_div(find_largest_tensor(plan.architecture), plan.degrees.data_parallel)
    return maximum(PARAMS_BUFFER_ELEMENTS, largest_partition)


def _offload_params(
    plan: Plan, state: TrainingState, rank: RankCounts, nvme: NvmeBytes | None
) -> TrainingState:
    layout = get_layout(plan)
    if layout.offload_params == "cpu":
        # param_groups_fp16_flat_cpu_memory, pinned.
        return state._replace(
            parameters=zero_term("in host memory (offload_params), all-gathered when used"),
            host_bytes=state.host_bytes + state.parameters.num_bytes,
        )
    assert nvme is not None
    buffer_bytes = align_bytes(count_params_buffer_elements(plan), rank.half)
    return state._replace(
        parameters=zero_term("on NVMe or in host memory (offload_params), all-gathered when used"),
        host_bytes=state.host_bytes + nvme.params_host + layout.num_params_buffers * buffer_bytes,
        nvme_bytes=state.nvme_bytes + nvme.params_files,
    )


# ---- NVMe


class NvmeBytes(NamedTuple):
    """Bytes of swapped tensors on one rank, without the buffers for weights."""

    params_files: int
    params_host: int
    optimizer_files: int
    """Main copies and moments in files."""
    gradient_files: int
    """fp32 gradients in files."""
    optimizer_host: int
    """Host buffers of these, and sub-groups that are too small for files."""
    unswapped_gradients: int
    """fp32 gradients that cannot be files: they stay on the device until their sub-group is updated."""


def count_nvme_bytes(plan: Plan, stage: Stage) -> NvmeBytes:
    """Return one rank's bytes on NVMe and of its buffers in memory."""
    layout, recipe, moe_layers = get_layout(plan), plan.recipe, stage.num_moe_layers
    count = partial(
        _count_nvme_bytes,
        plan.architecture,
        find_adapters(plan.architecture, recipe),
        get_nvme_options(layout, recipe),
        compute_flat_state(recipe.optimizer, 1),
        layout.offload_optimizer_buffer_count,
    )
    dense_layers = stage.num_layers - moe_layers
    return map_distinct(count, plan.degrees.data_parallel, dense_layers, moe_layers)


@lru_cache(maxsize=1024)
def _count_nvme_bytes(
    arch: Architecture,
    adapters: Adapters | None,
    options: NvmeOptions,
    moment_bytes: int,
    num_buffers: int,
    ranks: int,
    dense_layers: int,
    moe_layers: int,
) -> NvmeBytes:
    tensors = list_tensors(arch, adapters, 1, 1, dense_layers, moe_layers, 1, 1)
    # A head has its own tensor, and so its own file, until it is tied to the embedding. Models with experts
    # are partitioned after they are built (transformers' expert modules cannot be built inside zero.Init).
    tied_head = tensors.used[:1] if arch.tie_word_embeddings and arch.mixture_of_experts is None else ()
    params, optimizer = (0, 0), (0, 0, 0, 0)
    if options.swaps_params:
        params = count_parameter_bytes(tensors, tied_head, ranks, options)
    if options.swaps_optimizer:
        optimizer = count_optimizer_bytes(tensors, ranks, moment_bytes, num_buffers, options)
    return NvmeBytes(*params, *optimizer)
