"""What DeepSpeed really made, read back from its own objects, and the tensors that it holds on this rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from shardscope.frameworks.engine import HeldTensors
from shardscope.memory.words import count
from shardscope.training.accounting import tensor_bytes

if TYPE_CHECKING:
    from shardscope.plan import Plan


def held_tensors(engine: Any) -> HeldTensors:
    """Parameters, gradients and optimizer state of this rank, wherever they lie in memory."""
    stage = engine.zero_optimization_stage()
    return (_whole, _flat, _flat, _cut)[stage](engine)


def _whole(engine: Any) -> HeldTensors:
    """Stage 0: every rank has everything; of half weights fp32 main copies beside them."""
    optimizer, parameters = engine.optimizer, list(engine.module.parameters())
    main = [
        *_tensors(getattr(optimizer, "fp32_groups_flat", ())),
        *_tensors(getattr(optimizer, "fp32_groups", ())),
    ]
    return HeldTensors(
        parameters=[parameter.data for parameter in parameters],
        gradients=[parameter.grad for parameter in parameters if parameter.grad is not None],
        optimizer=[*main, *_moments(optimizer)],
        buffers=engine.module.buffers(),
    )


def _flat(engine: Any) -> HeldTensors:
    """Stages 1 and 2: flat weights on every rank, main copies and moments of this rank's part."""
    optimizer, parameters = engine.optimizer, list(engine.module.parameters())
    main = list(optimizer.single_partition_of_fp32_groups)
    away: list[torch.Tensor] = []
    if optimizer.cpu_offload:
        away += [part.grad for part in main if part.grad is not None]
        away += optimizer.param_buffer_of_bit16_for_cpu_offload_groups
        away += [optimizer.temp_grad_buffer_for_cpu_offload, *_tensors(optimizer.accumulated_grads_in_cpu)]
    waiting = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return HeldTensors(
        parameters=[parameter.data for parameter in parameters],
        gradients=[*waiting, *_tensors(optimizer.averaged_gradients)],
        optimizer=[*main, *away, *_moments(optimizer)],
        gathered=[optimizer.temp_grad_buffer_for_gpu_offload] if optimizer.cpu_offload else (),
        buffers=engine.module.buffers(),
    )


def _cut(engine: Any) -> HeldTensors:
    """Stage 3: this rank's part of every tensor; what is gathered lies beside."""
    optimizer, parameters = engine.optimizer, list(engine.module.parameters())
    gradients = optimizer.grad_partitions_flat_buffer
    main = [part for part in optimizer.fp32_partitioned_groups_flat if part.numel()]
    away = [part.grad for part in main if optimizer.offload_optimizer and part.grad is not None]
    return HeldTensors(
        parameters=[parameter.ds_tensor.data for parameter in parameters],
        gradients=[gradients] if gradients is not None else [],
        optimizer=[*main, *away, *_moments(optimizer)],
        gathered=[*(p.data for p in parameters if p.numel()), *_buckets(optimizer)],
        buffers=engine.module.buffers(),
    )


def _moments(optimizer: Any) -> Iterable[torch.Tensor]:
    inner = getattr(optimizer, "optimizer", optimizer)
    for state in inner.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.numel() > 1)


def _buckets(optimizer: Any) -> Iterable[torch.Tensor]:
    for bucket in optimizer.ipg_buckets.values():
        yield from _tensors(bucket.buffer)


def _tensors(nested: Any) -> Iterable[torch.Tensor]:
    """The tensors in lists and dictionaries inside of each other."""
    if isinstance(nested, torch.Tensor):
        yield nested
    elif isinstance(nested, Mapping):
        for value in nested.values():
            yield from _tensors(value)
    elif isinstance(nested, list | tuple):
        for value in nested:
            yield from _tensors(value)


def what_it_is(plan: Plan, engine: Any) -> dict[str, Any]:
    return {"stage": engine.zero_optimization_stage(), "what": type(engine.optimizer).__name__, "inner": type(getattr(engine.optimizer, "optimizer", None)).__name__}


def in_words(found: Mapping[str, Any], where: str) -> str:
    return str(found)
