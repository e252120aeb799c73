"""Memory of ZeRO with offloading to the host or to NVMe, on the device and on the host.

Ren et al. 2021 (ZeRO-Offload), Rajbhandari et al. 2021 (ZeRO-Infinity); buffers as
``deepspeed/runtime/zero`` and ``deepspeed/runtime/swap_tensor`` allocate them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.core.number_format import gib
from shardscope.core.ops import ceil_div, maximum, where
from shardscope.core.precision import FP32
from shardscope.frameworks.deepspeed.layout import largest_tensor
from shardscope.frameworks.deepspeed.memory.counted import is_late
from shardscope.frameworks.deepspeed.memory.swapping import Swapped, aligned
from shardscope.memory.report import Term, choose_term, zero_term

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.activations.backward import PeakCandidate, PeakTerms, StageBackward
    from shardscope.memory.state.training_state import TrainingState

PARAMS_BUFFER_ELEMENTS = 100_000_000
"""DeepSpeed's default for ``buffer_size`` of ``offload_param`` (deepspeed/runtime/zero/offload_config.py)."""


class Pieces(NamedTuple):
    """Element counts of one rank that offloading depends on."""

    half: int
    """Bytes of a weight and of its gradient."""
    part: int
    """Weights that this rank updates."""
    group: int
    """Weights that are updated together: in stages 1 and 2 all, with separate experts; in stage 3 a
    sub-group."""
    kept: int
    """Gradients that this rank keeps: whole tensors in stages 1 and 2."""
    largest: int
    """Largest tensor, unpartitioned."""
    moments: int
    """Bytes of the optimizer's moments."""
    swapped: Swapped | None
    """Stage 3's swapping to NVMe, in bytes; None without it."""


def offloaded(plan: Plan, state: TrainingState, pieces: Pieces) -> TrainingState:
    """Return ``state`` with its offloaded parts moved to the host or to NVMe.

    On CPU ranks offloading to the host moves nothing, but its buffers are allocated.
    """
    layout: Any = plan.layout
    if layout.offload_optimizer == "cpu" and not plan.on_gpu:
        state = _beside(plan, state, pieces)
    elif layout.offload_optimizer:
        state = _optimizer(plan, state, pieces)
    if layout.offload_params == "nvme" or (layout.offload_params and plan.on_gpu):
        state = _parameters(plan, state, pieces)
    return state


def _optimizer(plan: Plan, state: TrainingState, p: Pieces) -> TrainingState:
    layout: Any = plan.layout
    main = FP32 * p.part
    host: Any = 0
    nvme: Any = 0
    gradients = zero_term("copied to the host as they are reduced")
    if layout.offload_optimizer == "cpu":
        # fp32 main copies, moments, and the fp32 gradients that DeepSpeedCPUAdam reads (pinned).
        host = main + p.moments + FP32 * p.part
    else:
        # Main copies, moments and gradients are files; a buffer pool holds the sub-group being updated.
        assert p.swapped is not None
        nvme, host = p.swapped.state_files, p.swapped.state_host
    extra: Any = 0
    rest, stay = None, False
    on_device: Any = None
    if layout.stage == 3:
        # grad_partitions_flat_buffer, in the gradients' own type, pinned.
        host = host + p.half * p.part
        gradients = zero_term("reduced gradients wait in pinned host memory (offload_optimizer)")
        if p.swapped is not None:
            on_device = p.swapped.state_device
            gradients = Term(
                on_device,
                lambda: (
                    f"{gib(on_device)} GiB of fp32 gradients that are no files: under a mebibyte, or not "
                    "a whole number of kibibytes (runtime/swap_tensor/optimizer_utils.py)"
                ),
            )
    else:
        accumulates = plan.num_micro_batches > 1
        # The updated weights for the GPU, a staging tensor in each direction, and stage 2's accumulated
        # gradients; stage 1 accumulates on the GPU.
        host = host + p.half * (p.part + p.largest) + p.half * p.kept * accumulates * (layout.stage == 2)
        extra = p.half * p.largest
        rest = Term(extra, lambda: f"{gib(extra)} GiB for one gradient on its way to the host")
        stay = is_late(layout.stage, bool(layout.overlap_comm), accumulates)
    place = "in host memory" if layout.offload_optimizer == "cpu" else "on NVMe"
    initialisation = {
        name: term for name, term in state.initialisation.items() if name not in ("optimizer", "gradients")
    }
    if layout.stage < 3:
        # The staging buffer for gradients is allocated after the weights are flattened.
        initialisation["gather_buffers"] = zero_term("none while weights are flattened")
    find = state.find_backward
    assert find is not None

    def moved(shape: StageBackward) -> list[PeakCandidate]:
        """Return the peak candidates of backward without the gradients that are on the host."""
        if layout.stage == 3:
            return [_written(peak, p.half * p.part) for peak in find(shape)]
        return [_moved(peak, extra, stay, gradients) for peak in find(shape)]

    return state._replace(
        gradients=choose_term(stay, state.gradients, gradients),
        gradients_reduced=gradients if on_device is not None else zero_term("on the host"),
        gradients_stay=False,
        optimizer=zero_term(f"{place} (offload_optimizer), updated there"),
        optimizer_working=zero_term("the update runs on the host (DeepSpeedCPUAdam)"),
        initialisation=initialisation,
        gather_rest=state.gather_rest or rest,
        gather_forward=_plus(state.gather_forward, extra) if layout.stage < 3 else state.gather_forward,
        find_backward=moved,
        host_bytes=state.host_bytes + host,
        nvme_bytes=state.nvme_bytes + nvme,
    )


def _beside(plan: Plan, state: TrainingState, p: Pieces) -> TrainingState:
    """Return ``state`` of CPU ranks, with the offloading optimizer's buffers in the rank's own memory."""
    layout: Any = plan.layout
    if layout.stage == 3:
        moved, host = state, p.moments + 2 * FP32 * p.part
    else:
        moved = _optimizer(plan, state, p)
        host = moved.host_bytes

    def words() -> str:
        return f"{gib(host)} GiB in the rank's own memory: what offload_optimizer keeps on a host"

    working = zero_term("this optimizer step updates in place")
    if plan.recipe.optimizer == "adamw":
        working = Term(
            2 * FP32 * p.group,
            lambda: f"{p.group:,} × {2 * FP32} bytes · torch's own AdamW: a root, divided",
        )
    return moved._replace(optimizer=Term(host, words), optimizer_working=working, host_bytes=0)


def _written(peak: PeakCandidate, buffer: Any) -> PeakCandidate:
    """Return a peak candidate of stage 3 with its gradient buffer on the host.

    Only fp32 gradients that cannot be files stay on the device.
    """
    waiting = maximum(0, peak.gradients - buffer)

    def terms() -> PeakTerms:
        words = f"{gib(waiting)} GiB of fp32 gradients that are no files, reduced so far"
        return peak.find_terms()._replace(gradients=Term(waiting, lambda: words))

    return replace(peak, gradients=waiting, find_terms=terms)


def _moved(peak: PeakCandidate, extra: Any, stay: Any, gradients: Term) -> PeakCandidate:
    """Return a peak candidate with a staging gradient, and without the gradients that are on the host."""

    def terms() -> PeakTerms:
        found = peak.find_terms()
        return found._replace(
            gather=_plus(found.gather, extra), gradients=choose_term(stay, found.gradients, gradients)
        )

    kept = where(stay, peak.gradients, gradients[0])
    return replace(peak, gather=peak.gather + extra, gradients=kept, find_terms=terms)


def params_buffer_elements(plan: Plan) -> Any:
    """Return ``buffer_size`` of ``offload_param``, in elements.

    The default is DeepSpeed's, or the largest partition of a tensor if that is larger.
    """
    layout: Any = plan.layout
    if layout.offload_params_buffer_size is not None:
        return layout.offload_params_buffer_size
    part = ceil_div(largest_tensor(plan.architecture), plan.degrees.data_parallel)
    return maximum(PARAMS_BUFFER_ELEMENTS, part)


def _parameters(plan: Plan, state: TrainingState, p: Pieces) -> TrainingState:
    layout: Any = plan.layout
    weights = state.parameters.num_bytes
    if layout.offload_params == "cpu":
        # param_groups_fp16_flat_cpu_memory, pinned.
        return state._replace(
            parameters=zero_term("in host memory (offload_params), gathered when used"),
            host_bytes=state.host_bytes + weights,
        )
    assert p.swapped is not None
    buffer = aligned(params_buffer_elements(plan), p.half)
    return state._replace(
        parameters=zero_term("on NVMe or in host memory (offload_params), gathered when used"),
        host_bytes=state.host_bytes + p.swapped.weight_host + layout.num_params_buffers * buffer,
        nvme_bytes=state.nvme_bytes + p.swapped.weight_files,
    )


def _plus(term: Term, extra: Any) -> Term:
    return Term(
        term.num_bytes + extra, lambda: f"{term.explain()} + {gib(extra)} GiB for a gradient to the host"
    )
