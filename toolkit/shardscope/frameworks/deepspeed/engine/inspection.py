"""Checks of DeepSpeed's engine against the plan, and the tensors that it has on this rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardscope.core.number_format import format_count
from shardscope.core.ops import ceil_div
from shardscope.frameworks.deepspeed.layout import QUANTIZED, casts_gradients, get_layout, get_reduction_width
from shardscope.training.accounting.tensors import count_tensor_bytes
from shardscope.training.engine import LiveTensors

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    from shardscope.core.plan import Plan

PARTITIONED = {
    0: "every rank has all weights, gradients and optimizer state",
    1: "optimizer state is partitioned",
    2: "gradients and optimizer state are partitioned",
    3: "weights, gradients and optimizer state are partitioned",
}
OFFLOADED = {"cpu": "in host memory", "nvme": "on NVMe"}


def list_tensors(engine: DeepSpeedEngine) -> LiveTensors:
    """Return the parameters, gradients and optimizer state of this rank, on any device."""
    stage = engine.zero_optimization_stage()
    if stage == 0:
        return _list_stage_0(engine)
    return _list_stage_3(engine) if stage == 3 else _list_stage_1_and_2(engine)


def _list_stage_0(engine: DeepSpeedEngine) -> LiveTensors:
    """Return stage 0's tensors: all on every rank, with fp32 main weights of half-precision weights."""
    optimizer, parameters = engine.optimizer, list(engine.module.parameters())
    main = (getattr(optimizer, "fp32_groups_flat", ()), getattr(optimizer, "fp32_groups", ()))
    return LiveTensors(
        parameters=[parameter.data for parameter in parameters],
        gradients=[parameter.grad for parameter in parameters if parameter.grad is not None],
        optimizer=[*_flatten(main), *_list_moments(optimizer)],
        buffers=engine.module.buffers(),
    )


def _list_stage_1_and_2(engine: DeepSpeedEngine) -> LiveTensors:
    """Return the tensors of stages 1 and 2: flat weights, and the partition's main weights and moments."""
    optimizer, parameters = engine.optimizer, list(engine.module.parameters())
    main = list(optimizer.single_partition_of_fp32_groups)
    offloaded: list[torch.Tensor] = []
    if optimizer.cpu_offload:
        offloaded += [part.grad for part in main if part.grad is not None]
        offloaded += optimizer.param_buffer_of_bit16_for_cpu_offload_groups
        offloaded += [
            optimizer.temp_grad_buffer_for_cpu_offload,
            *_flatten(optimizer.accumulated_grads_in_cpu),
        ]
    waiting = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return LiveTensors(
        parameters=[parameter.data for parameter in parameters],
        gradients=[*waiting, *_flatten(optimizer.averaged_gradients)],
        optimizer=[*main, *offloaded, *_list_moments(optimizer)],
        gathered=[optimizer.temp_grad_buffer_for_gpu_offload] if optimizer.cpu_offload else (),
        buffers=engine.module.buffers(),
    )


def _list_stage_3(engine: DeepSpeedEngine) -> LiveTensors:
    """Return stage 3's tensors: this rank's partition of each; all-gathered ones are separate."""
    optimizer, parameters = engine.optimizer, list(engine.module.parameters())
    gradients = optimizer.grad_partitions_flat_buffer
    main = [part for part in optimizer.fp32_partitioned_groups_flat if part.numel()]
    offloaded = [part.grad for part in main if optimizer.offload_optimizer and part.grad is not None]
    return LiveTensors(
        parameters=[parameter.ds_tensor.data for parameter in parameters],
        gradients=[gradients] if gradients is not None else [],
        optimizer=[*main, *offloaded, *_list_moments(optimizer)],
        gathered=[
            *(p.data for p in parameters if p.numel()),
            *_list_buckets(optimizer),
            *_list_secondary(parameters),
        ],
        buffers=engine.module.buffers(),
    )


def _list_secondary(parameters: Iterable[torch.nn.Parameter]) -> Iterable[torch.Tensor]:
    """Return the secondary partitions (hpZ) of the parameters that currently have one."""
    secondary = (getattr(parameter, "ds_secondary_tensor", None) for parameter in parameters)
    return [tensor.data for tensor in secondary if tensor is not None]


def _list_moments(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    """Yield the optimizer state tensors of each weight, without step counters."""
    inner = getattr(optimizer, "optimizer", optimizer)
    for state in inner.state.values():
        yield from (tensor for tensor in _flatten(state) if tensor.numel() > 1)


def _list_buckets(optimizer: DeepSpeedZeroOptimizer_Stage3) -> Iterable[torch.Tensor]:
    """Yield the buffers in which gradients are reduced."""
    for bucket in optimizer.ipg_buckets.values():
        yield from _flatten(bucket.buffer)


def _flatten(nested: object) -> Iterable[torch.Tensor]:
    """Yield the tensors in nested lists and dictionaries."""
    if isinstance(nested, torch.Tensor):
        yield nested
    elif isinstance(nested, Mapping):
        for value in nested.values():
            yield from _flatten(value)
    elif isinstance(nested, list | tuple):
        for value in nested:
            yield from _flatten(value)


def read_back(plan: Plan, engine: DeepSpeedEngine) -> dict[str, object]:
    """Return the run's record of DeepSpeed's engine. Raises ``RuntimeError`` if it differs from the plan."""
    layout = get_layout(plan)
    # Data parallelism and the optimizer's class: DeepSpeed chooses it by the stage.
    stage = engine.zero_optimization_stage()
    _check_equal("stage", stage, layout.stage)
    ranks = dist.get_world_size(engine.seq_data_parallel_group)
    _check_equal("data-parallel ranks", ranks, plan.degrees.data_parallel)
    optimizer = engine.optimizer
    wrapper = type(optimizer).__name__
    if stage:
        expected = "DeepSpeedZeroOptimizer_Stage3" if stage == 3 else "DeepSpeedZeroOptimizer"
        _check_equal("optimizer", wrapper, expected)
    if stage in (1, 2):
        _check_equal("partitioned gradients", bool(optimizer.partition_gradients), stage == 2)
    # Offloading.
    devices = _find_offload_devices(engine)
    _check_equal("offload_optimizer", devices["optimizer"], layout.offload_optimizer)
    _check_equal("offload_params", devices["params"], layout.offload_params)
    parameters = dict(engine.module.named_parameters())
    if devices["params"] == "nvme":
        # zero.Init may choose another type than the weights', which then come back rounded.
        dtypes = {p.nvme_swapper.dtype for p in parameters.values()}
        _check_equal("type of the parameters on NVMe", dtypes, {p.dtype for p in parameters.values()})
    # ZeRO++.
    secondary = {getattr(p, "ds_secondary_tensor_group_size", ranks) for p in parameters.values()}
    if layout.zero_hpz_partition_size > 1:
        _check_equal("zero_hpz_partition_size", secondary, {layout.zero_hpz_partition_size})
    for field in QUANTIZED:
        _check_equal(field, getattr(engine, field)(), getattr(layout, field))
    # In stage 0 the engine itself reduces gradients.
    reduce_dtype = (optimizer if stage else engine).communication_data_type
    _check_equal(
        "bytes of a reduced gradient", reduce_dtype.itemsize, get_reduction_width(layout, plan.recipe)
    )
    # Sizes before partitioning: a parameter of stage 3 itself has no elements.
    sizes = {name: getattr(p, "ds_numel", p.numel()) for name, p in parameters.items()}
    updated = _count_updated_weights(engine, ranks)
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    current = list_tensors(engine)
    return {
        "stage": stage,
        "data_parallel": ranks,
        "module": type(engine).__name__,
        "zero_optimizer": wrapper,
        "offload_optimizer": devices["optimizer"],
        "offload_params": devices["params"],
        "num_parameters": sum(sizes.values()),
        "num_parameter_tensors": len(sizes),
        "num_trained_parameters": sum(sizes[name] for name in trained),
        "num_weights_updated_here": updated,
        "parameter_bytes": count_tensor_bytes(current.parameters),
        "optimizer_bytes": count_tensor_bytes(current.optimizer),
        "zero_hpz_partition_size": layout.zero_hpz_partition_size,
        **{field: getattr(layout, field) for field in QUANTIZED if getattr(layout, field)},
        "sums_in_fp32": casts_gradients(layout, plan.recipe),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "gradient_clipping": engine.gradient_clipping(),
    }


def describe_built(record: Mapping[str, object], where: str) -> str:
    """Describe the result of :func:`read_back` in a sentence."""
    stage, data_parallel, hpz = (
        record[field] for field in ("stage", "data_parallel", "zero_hpz_partition_size")
    )
    assert isinstance(stage, int) and isinstance(data_parallel, int) and isinstance(hpz, int)
    ranks = format_count(data_parallel, "rank")
    of_stage = " of its stage" if "pipeline_stage" in record else ""
    state = f"{PARTITIONED[stage]} over {ranks}" if stage else f"{PARTITIONED[0]}{of_stage}, {ranks}"
    options = [
        f"{what} {OFFLOADED[str(device)]}"
        for what, device in (
            ("optimizer state", record["offload_optimizer"]),
            ("weights", record["offload_params"]),
        )
        if device
    ]
    if hpz > 1:
        group = format_count(hpz, "rank")
        options.append(f"a secondary partition of the weights over {group} (hpZ)")
    if record["sums_in_fp32"]:
        options.append("gradients summed in fp32")
    return f"DeepSpeed ZeRO-{stage}: {state} {where}" + "".join(f", {option}" for option in options)


def _find_offload_devices(engine: DeepSpeedEngine) -> dict[str, str | None]:
    """Return where optimizer state and weights are, None: on the ranks' own device."""
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


def _count_updated_weights(engine: DeepSpeedEngine, ranks: int) -> int:
    """Return the number of weights that this rank updates, padding included.

    Raises ``RuntimeError`` if they are not partitioned as the stage says.
    """
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    parameters = dict(engine.module.named_parameters())
    if stage == 0:
        return sum(parameter.numel() for parameter in parameters.values() if parameter.requires_grad)
    if stage in (1, 2):
        partitions = [part.numel() for part in optimizer.single_partition_of_fp32_groups]
        # Experts are partitioned over fewer ranks: those that have the same experts.
        for flat, partition, group in zip(
            optimizer.bit16_groups_flat, partitions, optimizer.real_dp_process_group, strict=True
        ):
            _check_equal("weights of all partitions", partition * dist.get_world_size(group), flat.numel())
        return sum(partitions)
    full = [name for name, parameter in parameters.items() if not hasattr(parameter, "ds_tensor")]
    if full:
        raise RuntimeError(
            f"the plan says ZeRO-3, and {len(full)} of {len(parameters)} parameters are not partitioned: "
            f"{', '.join(full[:3])}"
        )
    for name, parameter in parameters.items():
        # ds_numel stays while the partition itself is in a file on NVMe.
        planned = ceil_div(parameter.ds_numel, ranks)
        _check_equal(f"weights of {name} on a rank", parameter.ds_tensor.ds_numel, planned)
    return sum(int(p.ds_tensor.ds_numel) for p in parameters.values() if p.requires_grad)


def _check_equal(what: str, built: object, planned: object) -> None:
    if built != planned:
        raise RuntimeError(f"the plan's {what}: {planned!r}; DeepSpeed built: {built!r}")
