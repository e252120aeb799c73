"""DeepSpeed ZeRO's training state (Rajbhandari et al. 2020, section 5; Rajbhandari et al. 2021 for NVMe).

Half-precision parameters and gradients, fp32 main copies and moments; what is split grows with the stage.
Bucket sizes are DeepSpeed's own defaults (deepspeed/runtime/zero/config.py), in elements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.memory.arithmetic import ceil_div, smallest
from shardscope.memory.precision import FP32, num_moments, widths
from shardscope.memory.report import Term, no_bytes
from shardscope.memory.stages import Stage, stages_of
from shardscope.memory.state import TrainingState
from shardscope.memory.words import gib

if TYPE_CHECKING:
    from shardscope.plan import Plan

REDUCE_BUCKET_SIZE = 500_000_000
STAGE3_PREFETCH_BUCKET_SIZE = 50_000_000
STAGE3_MAX_LIVE_PARAMETERS = 1_000_000_000
SUB_GROUP_SIZE = 1_000_000_000


def stages(plan: Plan) -> list[Stage]:
    """Stages of DeepSpeed's pipeline module, or the one of the whole model."""
    return stages_of(plan)


def training_state(plan: Plan, stage: Stage) -> TrainingState:
    """What one rank keeps, on the device, on the host and on NVMe."""
    layout: Any = plan.layout
    degrees, recipe = plan.degrees, plan.recipe
    zero, ranks = layout.stage, degrees.data_parallel
    half = widths[recipe.precision].compute
    # DeepSpeed keeps an fp32 main copy beside half-precision weights; fp32 weights are their own.
    main = FP32 if half < FP32 else 0
    kept = main + num_moments[recipe.optimizer] * FP32
    trained, weights = stage.trainable, stage.base + stage.adapters
    trained_experts = 0 if stage.adapters else stage.experts
    # An expert has fewer replicas than a dense weight: ep of them were spent on other experts.
    expert_ranks = max(1, ranks // degrees.ep)

    def part(amount: int, experts: int, from_stage: int) -> int:
        if zero < from_stage:
            return amount
        held: int = ceil_div(amount - experts, ranks) + ceil_div(experts, expert_ranks)
        return held

    def share(amount: int, experts: int, from_stage: int) -> str:
        if zero < from_stage:
            return f"{amount:,} on every rank"
        if not experts or degrees.ep == 1:
            return f"{amount:,} / {ranks} ranks"
        return f"({amount - experts:,} / {ranks} ranks + {experts:,} of experts / {expert_ranks})"

    parameters = half * part(weights, stage.experts, 3)
    gradients = half * part(trained, trained_experts, 2)
    if zero == 0 and half < FP32:
        # BF16_Optimizer accumulates an fp32 copy of every gradient beside the half-precision ones.
        gradients += FP32 * trained
    updated = part(trained, trained_experts, 1)
    optimizer = kept * updated
    working = 0 if zero == 0 or not main else FP32 * smallest(updated, SUB_GROUP_SIZE)

    host = nvme = 0
    parameter_place = _place(plan, layout.offload_params)
    optimizer_place = _place(plan, layout.offload_optimizer)
    if parameter_place:
        host, nvme = _moved(parameters, parameter_place, host, nvme)
    if optimizer_place:
        # The CPU optimizer reads fp32 gradients that wait in pinned host memory.
        host, nvme = _moved(optimizer, optimizer_place, host + FP32 * updated, nvme)
    return TrainingState(
        parameters=_device_term(
            parameters,
            parameter_place,
            lambda: f"{share(weights, stage.experts, 3)} × {half} bytes of parameters (ZeRO-{zero})",
        ),
        gradients=Term(
            0 if optimizer_place else gradients,
            lambda: (
                "copied to the host as they are reduced"
                if optimizer_place
                else f"{share(trained, trained_experts, 2)} × {half} bytes of gradients (ZeRO-{zero})"
                + (" + an fp32 copy (BF16_Optimizer)" if zero == 0 and half < FP32 else "")
            ),
        ),
        optimizer=_device_term(
            optimizer,
            optimizer_place,
            lambda: (
                f"{share(trained, trained_experts, 1)} × {kept} bytes · fp32 main copy and "
                f"{recipe.optimizer} moments (ZeRO-{zero})"
            ),
        ),
        gather_forward=_live(stage, zero, half, plan),
        gather_backward=_staging(stage, zero, half),
        optimizer_working=no_bytes("the optimizer runs on the host")
        if optimizer_place
        else Term(working, lambda: f"{gib(working)} GiB fp32 gradients of one sub-group"),
        group_sizes=(ranks, degrees.tp, degrees.pp, degrees.ep),
        host_bytes=host,
        nvme_bytes=nvme,
    )


def _place(plan: Plan, wanted: str | None) -> str | None:
    """Where offloaded state goes; on CPU ranks the host's memory is the rank's own: nothing moves."""
    return None if wanted == "cpu" and not plan.on_gpu else wanted


def _moved(num_bytes: int, place: str, host: int, nvme: int) -> tuple[int, int]:
    return (host + num_bytes, nvme) if place == "cpu" else (host, nvme + num_bytes)


def _device_term(num_bytes: int, place: str | None, words: Any) -> Term:
    if place is None:
        return Term(num_bytes, words)
    return no_bytes("in host memory (offload to CPU)" if place == "cpu" else "on NVMe (offload)")


def _live(stage: Stage, zero: int, half: int, plan: Plan) -> Term:
    """At the end of forward: what ZeRO-3 still has gathered."""
    if zero < 3:
        return no_bytes("parameters are whole, so nothing is gathered in forward")
    weights = stage.base
    live = smallest(weights, STAGE3_MAX_LIVE_PARAMETERS) + smallest(weights, STAGE3_PREFETCH_BUCKET_SIZE)
    return Term(
        half * live,
        lambda: (
            f"{live:,} live and prefetched parameters × {half} bytes "
            f"(stage3_max_live_parameters={STAGE3_MAX_LIVE_PARAMETERS:,}, "
            f"stage3_prefetch_bucket_size={STAGE3_PREFETCH_BUCKET_SIZE:,})"
        ),
    )


def _staging(stage: Stage, zero: int, half: int) -> Term:
    """At the end of backward: the reduction bucket, and what ZeRO-3 has gathered."""
    if zero == 0:
        bucket = smallest(stage.trainable, REDUCE_BUCKET_SIZE)
        return Term(half * bucket, lambda: f"{bucket:,} gradients × {half} bytes in the all-reduce bucket")
    # Stages 1 and 2 allocate the contiguous bucket whole, however small the model.
    bucket = REDUCE_BUCKET_SIZE if zero < 3 else smallest(stage.trainable, REDUCE_BUCKET_SIZE)
    live = smallest(stage.base, STAGE3_MAX_LIVE_PARAMETERS) if zero == 3 else 0
    return Term(
        half * (bucket + live),
        lambda: (
            f"{bucket:,} gradients × {half} bytes (reduce_bucket_size={REDUCE_BUCKET_SIZE:,})"
            + (f" + {live:,} live parameters × {half} bytes" if live else "")
        ),
    )
