"""bitsandbytes and torchao on fake tensors: replacements of code that reads a tensor's values or class."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from shardscope.rehearsal.replacing import replaced

UNSEEN_NUMBER = 1.0
"""Value of ``item()`` on fake tensors, for an optimizer's norms and step counts: no size depends on it."""


@contextlib.contextmanager
def packed_weights() -> Iterator[None]:
    """Let bitsandbytes' Linears take fake weights while modules are built."""
    import bitsandbytes as bnb

    stand_ins: list[tuple[Any, str, Any]] = [
        # A process-wide cache of tables, in which no fake tensor may remain.
        (bnb.functional, "name2qmap", {}),
        *((owner, "Params4bit", _nf4) for owner in (bnb.nn, bnb.nn.modules)),
        *((owner, "Int8Params", _int8) for owner in (bnb.nn, bnb.nn.modules)),
    ]
    with replaced(stand_ins), quantile_maps():
        yield


@contextlib.contextmanager
def low_bit_operators(*, on_gpu: bool) -> Iterator[None]:
    """Let quantized matmuls run as a GPU dispatches them (``on_gpu``) while the step runs."""
    import bitsandbytes as bnb
    from bitsandbytes.autograd import _functions

    stand_ins: list[tuple[Any, str, Any]] = [
        (bnb.nn.modules, "fix_4bit_weight_quant_state_from_module", _remember_state),
        (_functions.MatMul4Bit, "forward", _with_whole_matrix(_functions.MatMul4Bit.forward)),
    ]
    if on_gpu:
        stand_ins.append((bnb, "matmul", _int8_product(_functions)))
    with replaced(stand_ins):
        yield


@contextlib.contextmanager
def updates_on_fakes() -> Iterator[None]:
    """Let an optimizer step run on fake tensors: constant ``item()``, no compiled update (torchao)."""
    with replaced([(torch.Tensor, "item", lambda tensor: UNSEEN_NUMBER), (torch, "compile", _not_played)]):
        yield


@contextlib.contextmanager
def quantile_maps() -> Iterator[None]:
    """Replace the table that bitsandbytes' optimizers compute by an uninitialized one of the same size."""
    import bitsandbytes as bnb

    def table(signed: bool = True, max_exponent_bits: int = 7, total_bits: int = 8) -> torch.Tensor:
        return torch.empty(2**total_bits)

    with replaced([(bnb.functional, "create_dynamic_map", table)]):
        yield


def _not_played(function: Any, **options: Any) -> Any:
    return lambda *args, **kwargs: None


def _nf4(data: torch.Tensor, requires_grad: bool = False, module: Any = None, **options: Any) -> Any:
    """Return a ``Params4bit`` stand-in, quantized at once: a subclass made of a fake tensor is not fake."""
    import bitsandbytes as bnb

    kinds = {name: options[name] for name in ("compress_statistics", "quant_type", "quant_storage")}
    if data.device.type == "meta":
        # The weight of the module's constructor, replaced later by the model's own.
        return torch.nn.Parameter(data, requires_grad=requires_grad)
    packed, state = bnb.functional.quantize_4bit(data, blocksize=64, **kinds)
    parameter: Any = torch.nn.Parameter(packed, requires_grad=requires_grad)
    parameter.quant_state = module.quant_state = state
    for name, value in kinds.items():
        setattr(parameter, name, value)
    parameter.bnb_quantized = True
    return parameter


def _int8(data: torch.Tensor, requires_grad: bool = False, has_fp16_weights: bool = False) -> Any:
    """Return an ``Int8Params`` stand-in, quantized at once as in :func:`_nf4`."""
    if data.device.type == "meta":
        return torch.nn.Parameter(data, requires_grad=requires_grad)
    import bitsandbytes as bnb

    codes, scales, _ = bnb.functional.int8_vectorwise_quant(data.to(torch.float16))
    parameter: Any = torch.nn.Parameter(codes, requires_grad=requires_grad)
    parameter.CB, parameter.SCB, parameter.has_fp16_weights = codes, scales, False
    return parameter


def _remember_state(module: Any) -> None:
    """Restore the quantization state only: upstream also converts plain parameters to ``Params4bit``."""
    module.weight.quant_state = module.quant_state


def _with_whole_matrix(forward: Any) -> Any:
    """Hold the dequantized matrix during the matmul, as backends/cuda do except for a few tokens."""
    import bitsandbytes as bnb

    def product(ctx: Any, a: Any, b: Any, out: Any, bias: Any, quant_state: Any) -> Any:
        matrix = bnb.functional.dequantize_4bit(b, quant_state)
        found = forward(ctx, a, b, out, bias, quant_state)
        del matrix
        return found

    return product


def _int8_product(functions: Any) -> Any:
    def product(a: Any, b: Any, out: Any = None, state: Any = None, threshold: float = 0.0, bias: Any = None):  # type: ignore[no-untyped-def]
        return functions.MatMul8bitLt.apply(a, b, out, bias, state)

    return product
