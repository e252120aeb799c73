"""First weights under ZeRO-3: each tensor is cut as it is read or drawn, so that no rank has them all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import Parameter

from shardscope.training.weights.initial_weights import InitialWeights, all_of, fill_buffers


def cut(deepspeed: Any, model: torch.nn.Module, config: dict[str, Any]) -> None:
    """Leave of every parameter of ``model`` this rank's part.

    The type in which parts swap is ``config``'s. ``zero.Init`` does not keep to a ``dtype`` that it is given:
    where the device has no fp16 (many CPUs, GPUs before Volta) it takes bf16, and fp32 weights come back
    from NVMe rounded (deepspeed/runtime/zero/partition_parameters.py, ``_set_dtype``, 0.19.8).
    """
    deepspeed.zero.Init(module=model, config_dict_or_path=config)


def cut_as_made(
    deepspeed: Any,
    model: torch.nn.Module,
    weights: InitialWeights,
    *,
    device: torch.device,
    config: dict[str, Any],
    kind: torch.dtype,
) -> None:
    """Give ``model``, whose parameters are on meta, its ``weights`` in parts, of type ``kind``.

    ``zero.Init`` of a module that is there goes through its ``parameters()`` and cuts one after the other
    (deepspeed/runtime/zero/partition_parameters.py, ``_convert_to_zero_parameters``): here each gets its
    values, on ``device``, when it is asked for.
    """
    # One for all: memory that is freed between parts which stay would not be given back, nor be used again.
    longest = torch.empty(
        max(parameter.numel() for parameter in model.parameters()), dtype=kind, device=device
    )

    def read(recurse: bool = True) -> Iterator[Parameter]:
        for name, parameter in model.named_parameters(recurse=recurse):
            whole = longest[: parameter.numel()].view(parameter.shape)
            weights.write(name, parameter.shape, all_of(parameter.shape), whole)
            # The same object, for the optimizer has it already and a tied weight is in two modules.
            torch.utils.swap_tensors(parameter, Parameter(whole, requires_grad=parameter.requires_grad))
            yield parameter

    model.parameters = read
    try:
        cut(deepspeed, model, config)
    finally:
        del model.parameters
    fill_buffers(model, weights)
