"""bitsandbytes and torchao on fake tensors: replacements of code that reads a tensor's values or class."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch

from shardscope.rehearsal.patching import Patch, patch_attributes

if TYPE_CHECKING:
    import bitsandbytes as bnb

    MatMul4BitForward = Callable[
        [
            torch.autograd.function.FunctionCtx,
            torch.Tensor,
            torch.Tensor,
            torch.Tensor | None,
            torch.Tensor | None,
            bnb.functional.QuantState,
        ],
        torch.Tensor,
    ]

P = ParamSpec("P")
AnyTensor = TypeVar("AnyTensor", bound="torch.Tensor")
UNSEEN_NUMBER = 1.0
"""Value of ``item()`` on fake tensors, for an optimizer's norms and step counts: no size depends on it."""


@contextlib.contextmanager
def quantized_weights() -> Iterator[None]:
    """Let bitsandbytes' Linears take fake weights while modules are built."""
    import bitsandbytes as bnb

    stand_ins: list[Patch] = [
        # A process-wide cache of tables (bitsandbytes 0.50, functional.py): no fake tensor may remain in it.
        (bnb.functional, "name2qmap", {}),
        *((owner, "Params4bit", _make_params4bit) for owner in (bnb.nn, bnb.nn.modules)),
        *((owner, "Int8Params", _make_int8_params) for owner in (bnb.nn, bnb.nn.modules)),
    ]
    with patch_attributes(stand_ins), fake_quantile_maps():
        yield


@contextlib.contextmanager
def quantized_operators(*, on_gpu: bool) -> Iterator[None]:
    """Let quantized matmuls run as a GPU dispatches them (``on_gpu``) while the step runs."""
    import bitsandbytes as bnb
    from bitsandbytes.autograd import _functions

    stand_ins: list[Patch] = [
        (bnb.nn.modules, "fix_4bit_weight_quant_state_from_module", _restore_quant_state),
        (_functions.MatMul4Bit, "forward", _wrap_matmul_4bit(_functions.MatMul4Bit.forward)),
    ]
    if on_gpu:
        stand_ins.append((bnb, "matmul", _matmul_int8))
    with patch_attributes(stand_ins):
        yield


@contextlib.contextmanager
def fake_optimizer_updates() -> Iterator[None]:
    """Let an optimizer step run on fake tensors: constant ``item()``, no compiled update (torchao)."""
    with patch_attributes(
        [(torch.Tensor, "item", lambda tensor: UNSEEN_NUMBER), (torch, "compile", _skip_compiled)]
    ):
        yield


@contextlib.contextmanager
def fake_quantile_maps() -> Iterator[None]:
    """Replace the table that bitsandbytes' optimizers compute by an uninitialized one of the same size."""
    import bitsandbytes as bnb

    def make_map(signed: bool = True, max_exponent_bits: int = 7, total_bits: int = 8) -> torch.Tensor:
        return torch.empty(2**total_bits)

    with patch_attributes([(bnb.functional, "create_dynamic_map", make_map)]):
        yield


def _skip_compiled(function: object, **options: object) -> Callable[P, None]:
    """Return a function that does nothing, in place of what ``torch.compile`` returns."""

    def do_nothing(*args: P.args, **kwargs: P.kwargs) -> None:
        pass

    return do_nothing


def _make_params4bit(
    data: torch.Tensor,
    requires_grad: bool = False,
    *,
    module: bnb.nn.modules.Linear4bit,
    compress_statistics: bool,
    quant_type: str,
    quant_storage: torch.dtype,
    **other_options: object,
) -> torch.nn.Parameter:
    """Return a ``Params4bit`` stand-in, quantized at once: a subclass made of a fake tensor is not fake."""
    import bitsandbytes as bnb

    if data.device.type == "meta":
        # The weight of the module's constructor, replaced later by the model's own.
        return torch.nn.Parameter(data, requires_grad=requires_grad)
    packed, state = bnb.functional.quantize_4bit(
        data,
        blocksize=64,
        compress_statistics=compress_statistics,
        quant_type=quant_type,
        quant_storage=quant_storage,
    )
    module.quant_state = state
    return _with_attributes(
        torch.nn.Parameter(packed, requires_grad=requires_grad),
        quant_state=state,
        compress_statistics=compress_statistics,
        quant_type=quant_type,
        quant_storage=quant_storage,
        bnb_quantized=True,
    )


def _make_int8_params(
    data: torch.Tensor, requires_grad: bool = False, has_fp16_weights: bool = False
) -> torch.nn.Parameter:
    """Return an ``Int8Params`` stand-in, quantized at once as in :func:`_make_params4bit`."""
    if data.device.type == "meta":
        return torch.nn.Parameter(data, requires_grad=requires_grad)
    import bitsandbytes as bnb

    # In fp16, as Int8Params does (bitsandbytes 0.50, nn/modules.py, Int8Params._quantize).
    codes, scales, _ = bnb.functional.int8_vectorwise_quant(data.to(torch.float16))
    parameter = torch.nn.Parameter(codes, requires_grad=requires_grad)
    return _with_attributes(parameter, CB=codes, SCB=scales, has_fp16_weights=False)


def _with_attributes(parameter: AnyTensor, **attributes: object) -> AnyTensor:
    """Set bitsandbytes' own attributes, which a plain tensor does not declare."""
    for name, value in attributes.items():
        setattr(parameter, name, value)
    return parameter


def _restore_quant_state(module: bnb.nn.modules.Linear4bit) -> None:
    """Restore the quantization state only: upstream also converts plain parameters to ``Params4bit``."""
    _with_attributes(module.weight, quant_state=module.quant_state)


def _wrap_matmul_4bit(forward: MatMul4BitForward) -> MatMul4BitForward:
    """Hold the dequantized matrix during the matmul, as backends/cuda do except for a few tokens."""
    import bitsandbytes as bnb

    def multiply(
        ctx: torch.autograd.function.FunctionCtx,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor | None,
        bias: torch.Tensor | None,
        quant_state: bnb.functional.QuantState,
    ) -> torch.Tensor:
        matrix = bnb.functional.dequantize_4bit(b, quant_state)
        product = forward(ctx, a, b, out, bias, quant_state)
        del matrix
        return product

    return multiply


def _matmul_int8(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    state: bnb.autograd._functions.MatmulLtState | None = None,
    threshold: float = 0.0,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply as bitsandbytes does on a GPU; on CPU tensors it takes another path."""
    # bitsandbytes 0.50, autograd/_functions.py, matmul: MatMul8bitFp on CPUs, which saves other tensors.
    functions = import_module("bitsandbytes.autograd._functions")
    product: torch.Tensor = functions.MatMul8bitLt.apply(a, b, out, bias, state)
    return product
