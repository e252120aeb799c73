"""Checks of DeepSpeed's engine against the plan, and the tensors that it has on this rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardscope.core.number_format import count
from shardscope.frameworks.deepspeed.communication import QUANTIZED, casts, reduced_width
from shardscope.training.accounting.tensors import tensor_bytes
from shardscope.training.engine import LiveTensors

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

SHARED = {
    0: "every rank has all weights, gradients and optimizer state",
    1: "optimizer state is shared out",
    2: "gradients and optimizer state are shared out",
    3: "weights, gradients and optimizer state are shared out",
}
PLACES = {"cpu": "in host memory", "nvme": "on NVMe"}


def live_tensors(engine: Any) -> LiveTensors:
    """Return the parameters, gradients and optimizer state of this rank, on any device."""
    return (_whole, _flat, _flat, _cut)[engine.zero_optimization_stage()](engine)


def _whole(engine: Any) -> LiveTensors:
    """Return stage 0's tensors: all on every rank, with fp32 main copies of half-precision weights."""
    optimizer, parameters = engine.optimizer, list(engine.module.parameters())
    main = (getattr(optimizer, "fp32_groups_flat", ()), getattr(optimizer, "fp32_groups", ()))
    return LiveTensors(
        parameters=[parameter.data for parameter in parameters],
        gradients=[parameter.grad for parameter in parameters if parameter.grad is not None],
        optimizer=[*_tensors(main), *_moments(optimizer)],
        buffers=engine.module.buffers(),
    )


def _flat(engine: Any) -> LiveTensors:
    """Return stage 1's and 2's tensors: flat weights, and the partition's main copies and moments."""
    optimizer, parameters = engine.optimizer, list(engine.module.parameters())
    main = list(optimizer.single_partition_of_fp32_groups)
    away: list[torch.Tensor] = []
    if optimizer.cpu_offload:
        away += [part.grad for part in main if part.grad is not None]
        away += optimizer.param_buffer_of_bit16_for_cpu_offload_groups
        away += [optimizer.temp_grad_buffer_for_cpu_offload, *_tensors(optimizer.accumulated_grads_in_cpu)]
    waiting = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return LiveTensors(
        parameters=[parameter.data for parameter in parameters],
        gradients=[*waiting, *_tensors(optimizer.averaged_gradients)],
        optimizer=[*main, *away, *_moments(optimizer)],
        gathered=[optimizer.temp_grad_buffer_for_gpu_offload] if optimizer.cpu_offload else (),
        buffers=engine.module.buffers(),
    )


def _cut(engine: Any) -> LiveTensors:
    """Return stage 3's tensors: this rank's partition of each; all-gathered ones are separate."""
    optimizer, parameters = engine.optimizer, list(engine.module.parameters())
    gradients = optimizer.grad_partitions_flat_buffer
    main = [part for part in optimizer.fp32_partitioned_groups_flat if part.numel()]
    away = [part.grad for part in main if optimizer.offload_optimizer and part.grad is not None]
    return LiveTensors(
        parameters=[parameter.ds_tensor.data for parameter in parameters],
        gradients=[gradients] if gradients is not None else [],
        optimizer=[*main, *away, *_moments(optimizer)],
        gathered=[*(p.data for p in parameters if p.numel()), *_buckets(optimizer), *_second(parameters)],
        buffers=engine.module.buffers(),
    )


def _second(parameters: Iterable[Any]) -> Iterable[torch.Tensor]:
    """Return the second partitions (hpZ) of the parameters that currently have one."""
    held = (getattr(parameter, "ds_secondary_tensor", None) for parameter in parameters)
    return [tensor.data for tensor in held if tensor is not None]


def _moments(optimizer: Any) -> Iterable[torch.Tensor]:
    """Yield the optimizer state tensors of each weight, without step counters."""
    inner = getattr(optimizer, "optimizer", optimizer)
    for state in inner.state.values():
        yield from (found for found in _tensors(state) if found.numel() > 1)


def _buckets(optimizer: Any) -> Iterable[torch.Tensor]:
    for bucket in optimizer.ipg_buckets.values():
        yield from _tensors(bucket.buffer)


def _tensors(nested: Any) -> Iterable[torch.Tensor]:
    """Yield the tensors in nested lists and dictionaries."""
    if isinstance(nested, torch.Tensor):
        yield nested
    elif isinstance(nested, Mapping):
        for value in nested.values():
            yield from _tensors(value)
    elif isinstance(nested, list | tuple):
        for value in nested:
            yield from _tensors(value)


def read_back(plan: Plan, engine: Any) -> dict[str, Any]:
    """The record of a run; ``RuntimeError`` where DeepSpeed made another thing than the plan says."""
    layout: Any = plan.layout
    stage = engine.zero_optimization_stage()
    _agree("stage", stage, layout.stage)
    ranks = dist.get_world_size(engine.seq_data_parallel_group)
    _agree("data-parallel ranks", ranks, plan.degrees.data_parallel)
    optimizer = engine.optimizer
    wrapper = type(optimizer).__name__
    if stage:
        expected = "DeepSpeedZeroOptimizer_Stage3" if stage == 3 else "DeepSpeedZeroOptimizer"
        _agree("optimizer", wrapper, expected)
    if stage in (1, 2):
        _agree("gradients in parts", bool(optimizer.partition_gradients), stage == 2)
    places = _places(engine)
    _agree("place of the optimizer", places["optimizer"], layout.offload_optimizer)
    _agree("place of the parameters", places["params"], layout.offload_params)
    parameters = dict(engine.module.named_parameters())
    if places["params"] == "nvme":
        kinds = {p.nvme_swapper.dtype for p in parameters.values()}
        _agree("type of the parameters on NVMe", kinds, {p.dtype for p in parameters.values()})
    near = {getattr(p, "ds_secondary_tensor_group_size", ranks) for p in parameters.values()}
    if layout.zero_hpz_partition_size > 1:
        _agree("zero_hpz_partition_size", near, {layout.zero_hpz_partition_size})
    for field in QUANTIZED:
        _agree(field, getattr(engine, field)(), getattr(layout, field))
    # Without ZeRO the engine itself reduces.
    summed = (optimizer if stage else engine).communication_data_type
    _agree("bytes of a gradient on its way", summed.itemsize, reduced_width(layout, plan.recipe))
    sizes = {name: getattr(p, "ds_numel", p.numel()) for name, p in parameters.items()}
    here = _weights_here(stage, optimizer, parameters, ranks)
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    held = live_tensors(engine)
    return {
        "stage": stage,
        "data_parallel": ranks,
        "module": type(engine).__name__,
        "zero_optimizer": wrapper,
        "offload_optimizer": places["optimizer"],
        "offload_params": places["params"],
        "num_parameters": sum(sizes.values()),
        "num_parameter_tensors": len(sizes),
        "num_trained_parameters": sum(sizes[name] for name in trained),
        "num_weights_updated_here": here,
        "parameter_bytes": tensor_bytes(held.parameters),
        "optimizer_bytes": tensor_bytes(held.optimizer),
        "zero_hpz_partition_size": layout.zero_hpz_partition_size,
        **{field: getattr(layout, field) for field in QUANTIZED if getattr(layout, field)},
        "sums_in_fp32": casts(layout, plan.recipe),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "gradient_clipping": engine.gradient_clipping(),
    }


def describe_built(found: Mapping[str, Any], where: str) -> str:
    """One plain sentence of it."""
    stage, ranks = found["stage"], count(found["data_parallel"], "rank")
    here = " of its stage" if "pipeline_stage" in found else ""
    shared = f"{SHARED[stage]} over {ranks}" if stage else f"{SHARED[0]}{here}, {ranks}"
    away = [
        f"{what} {PLACES[place]}"
        for what, place in (
            ("optimizer state", found["offload_optimizer"]),
            ("weights", found["offload_params"]),
        )
        if place
    ]
    if found["zero_hpz_partition_size"] > 1:
        away.append(f"weights a second time over {count(found['zero_hpz_partition_size'], 'rank')} (hpZ)")
    if found["sums_in_fp32"]:
        away.append("gradients summed in fp32")
    return f"DeepSpeed ZeRO-{stage}: {shared} {where}" + "".join(f", {part}" for part in away)


def _places(engine: Any) -> dict[str, str | None]:
    """Where optimizer state and weights really are, if not on the ranks' own device."""
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    state = params = None
    if stage in (1, 2):
        state = "cpu" if optimizer.cpu_offload else None
    if stage == 3:
        if optimizer.offload_optimizer:
            state = "nvme" if optimizer.swap_optimizer else "cpu"
        if optimizer.offload_param:
            params = "nvme" if optimizer.params_in_nvme_and_cpu else "cpu"
    return {"optimizer": state, "params": params}


def _weights_here(stage: int, optimizer: Any, parameters: Mapping[str, Any], ranks: int) -> int:
    """Weights that this rank updates, padding included; ``RuntimeError`` where parts are no parts."""
    if stage == 0:
        return sum(parameter.numel() for parameter in parameters.values() if parameter.requires_grad)
    if stage in (1, 2):
        parts = [part.numel() for part in optimizer.single_partition_of_fp32_groups]
        # Experts that others have too are cut among fewer ranks.
        for flat, part, group in zip(
            optimizer.bit16_groups_flat, parts, optimizer.real_dp_process_group, strict=True
        ):
            _agree("weights of all parts", part * dist.get_world_size(group), flat.numel())
        return sum(parts)
    whole = [name for name, parameter in parameters.items() if not hasattr(parameter, "ds_tensor")]
    if whole:
        raise RuntimeError(
            f"the plan says ZeRO-3, and {len(whole)} of {len(parameters)} parameters are whole: "
            f"{', '.join(whole[:3])}"
        )
    for name, parameter in parameters.items():
        # Of one that swaps to NVMe the numbers are in a file; its size stays.
        each = -(-parameter.ds_numel // ranks)
        _agree(f"weights of {name} on a rank", parameter.ds_tensor.ds_numel, each)
    return sum(int(p.ds_tensor.ds_numel) for p in parameters.values() if p.requires_grad)


def _agree(what: str, found: object, planned: object) -> None:
    if found != planned:
        raise RuntimeError(f"the plan's {what}: {planned!r}; DeepSpeed made: {found!r}")
