"""Frozen base quantized to NF4 or int8 with bitsandbytes: ``Recipe.quantization`` and ``method="qlora"``.

All Linears inside the decoder layers are replaced, as in transformers' own integration; embeddings, norms,
the head, routers and fused experts are not quantized. int8 has no outlier threshold
(``llm_int8_threshold=0``).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, TypedDict

import torch

from shardscope.training.accounting.tensors import count_tensor_bytes
from shardscope.training.model.recompute import list_decoder_layers
from shardscope.training.optimizers.gradients import local_shard
from shardscope.training.weights.initial_weights import InitialWeights, fill_buffers, full_region

if TYPE_CHECKING:
    from bitsandbytes.nn.modules import Linear4bit, Linear8bitLt
    from transformers.pytorch_utils import Conv1D

    from shardscope.core.recipe import Recipe


class BaseRecord(TypedDict):
    """Quantization of a frozen base, for the run's record."""

    base_quantization: str
    """"nf4" or "int8"."""
    base_double_quantization: bool
    """Whether NF4's scales are quantized too (Dettmers et al. 2023, arXiv:2305.14314, section 3)."""
    base_stored_as: str
    """Dtype of the parameters that hold the packed weights."""
    base_scale_bytes: int
    num_quantized_linears: int


def quantize_base(
    model: torch.nn.Module,
    recipe: Recipe,
    *,
    sharded: bool,
    compute: torch.dtype,
    weights: InitialWeights | None = None,
) -> None:
    """Replace the Linears of ``model``'s layers in place, except those that the task has quantized itself.

    ``compute`` is the dtype of matmuls. With ``sharded``, packed weights are stored as that dtype, so that
    ``fully_shard`` shards them like other parameters and all-gathers them without a cast (accelerate 1.15,
    ``utils/fsdp_utils.py``). ``weights`` initializes a model on the meta device, one Linear at a time: only
    quantized weights and the unquantized rest are in memory together.
    """
    from bitsandbytes.nn.modules import Linear4bit, Linear8bitLt
    from transformers.pytorch_utils import Conv1D

    quantization = recipe.base_quantization
    initializer = None if weights is None else _MetaInitializer(model, weights)
    for layer in list_decoder_layers(model):
        for parent in list(layer.modules()):
            for name, child in list(parent.named_children()):
                # Both are subclasses of Linear, and quantized already.
                if isinstance(child, Linear4bit | Linear8bitLt):
                    continue
                if isinstance(child, torch.nn.Linear | Conv1D):
                    if initializer is not None:
                        initializer.initialize_linear(child)
                    plain = _convert_to_linear(child)
                    quantized = (
                        _quantize_int8(plain)
                        if quantization == "int8"
                        else _quantize_nf4(plain, recipe, sharded, compute)
                    )
                    setattr(parent, name, quantized)
    if initializer is not None:
        initializer.initialize_rest(model)
    # peft reads these attributes to choose its LoRA layer classes.
    setattr(model, "is_loaded_in_8bit" if quantization == "int8" else "is_loaded_in_4bit", True)


class _MetaInitializer:
    """Initializer of a meta model; all Linears use the same memory, one after the other."""

    def __init__(self, model: torch.nn.Module, weights: InitialWeights) -> None:
        self._weights = weights
        self._names = {module: name for name, module in model.named_modules()}
        largest = max(parameter.numel() for parameter in model.parameters())
        self._buffer = torch.empty(largest, dtype=next(model.parameters()).dtype)

    def initialize_linear(self, linear: torch.nn.Module) -> None:
        """Initialize a Linear. Its weight is valid until the next call, its bias permanently."""
        for name, parameter in linear.named_parameters(recurse=False):
            into = self._buffer[: parameter.numel()].view(parameter.shape)
            if name == "bias":
                into = torch.empty_like(into)
            self._write_values(f"{self._names[linear]}.{name}", into)
            setattr(linear, name, torch.nn.Parameter(into, requires_grad=False))

    def initialize_rest(self, model: torch.nn.Module) -> None:
        """Initialize all other parameters and the stored buffers."""
        made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            if parameter.is_meta:
                into = torch.empty(parameter.shape, dtype=parameter.dtype)
                self._write_values(name, into)
                made[parameter] = torch.nn.Parameter(into, parameter.requires_grad)
        # A tied weight belongs to two modules, which get the same object. Not swap_tensors: it fails on fake
        # tensors, which have weak references.
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter in made:
                    setattr(module, name, made[parameter])
        fill_buffers(model, self._weights)

    def _write_values(self, name: str, into: torch.Tensor) -> None:
        with torch.no_grad():
            self._weights.write(name, into.shape, full_region(into.shape), into)


def _convert_to_linear(module: torch.nn.Linear | Conv1D) -> torch.nn.Linear:
    """Return ``module`` as a Linear; GPT-2's Conv1D stores the transposed weight."""
    if isinstance(module, torch.nn.Linear):
        return module
    inner, outer = module.weight.shape
    linear = torch.nn.Linear(inner, outer, bias=module.bias is not None, device="meta")
    linear.weight = torch.nn.Parameter(module.weight.detach().t().contiguous(), requires_grad=False)
    linear.bias = module.bias
    return linear


def _quantize_nf4(
    plain: torch.nn.Linear, recipe: Recipe, sharded: bool, compute: torch.dtype
) -> torch.nn.Module:
    # bitsandbytes does not annotate its constructors; imported by name, its module is untyped as a whole.
    bnb = import_module("bitsandbytes")
    storage = compute if sharded else torch.uint8
    double = recipe.method == "qlora"
    module = bnb.nn.Linear4bit(
        plain.in_features,
        plain.out_features,
        bias=False,
        compute_dtype=compute,
        compress_statistics=double,
        quant_type="nf4",
        quant_storage=storage,
        device="meta",
    )
    module.weight = bnb.nn.Params4bit(
        plain.weight.detach(),
        requires_grad=False,
        quant_type="nf4",
        compress_statistics=double,
        quant_storage=storage,
        module=module,
    )
    module.bias = plain.bias
    # Linear4bit quantizes its weight when it is moved, to the same device too.
    quantized: torch.nn.Module = module.to(plain.weight.device)
    return quantized


def _quantize_int8(plain: torch.nn.Linear) -> torch.nn.Module:
    bnb = import_module("bitsandbytes")
    packed = bnb.nn.Linear8bitLt(
        plain.in_features, plain.out_features, bias=False, has_fp16_weights=False, device="meta"
    )
    packed.weight = bnb.nn.Int8Params(plain.weight.detach(), requires_grad=False)
    packed.bias = plain.bias
    packed.forward = functools.partial(_run_on_rows, packed.forward)
    module: torch.nn.Module = packed.to(plain.weight.device)
    return module


def _run_on_rows(forward: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """Run an int8 Linear on a tensor of any number of dimensions.

    bitsandbytes itself takes three at most (0.50, ``MatMul8bitLt.forward``); latent attention has four.
    """
    if tensor.ndim <= 3:
        return forward(tensor)
    rows = forward(tensor.flatten(0, -2))
    return rows.view(*tensor.shape[:-1], rows.shape[-1])


def is_quantized(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a quantized weight, which a cast would corrupt."""
    return any(getattr(tensor, name, None) is not None for name in ("quant_state", "SCB"))


def keep_packing(model: torch.nn.Module) -> None:
    """Make NF4 Linears keep the order of their packed weights in forwards without gradients.

    On CPUs with AVX512-BF16 bitsandbytes repacks the weights in place for its inference kernel (0.50,
    ``Linear4bit.forward``, where ``training`` is False). Under FSDP2 they are a group's gathered copy, so the
    next all-gather restores the old order under a state that says the new one.
    """
    for linear in _find_quantized_linears(model):
        if hasattr(linear, "support_avx512bf16_for_cpu"):
            linear.support_avx512bf16_for_cpu = False


def check_base(model: torch.nn.Module, recipe: Recipe, *, sharded: bool) -> BaseRecord | None:
    """Read back how the base is quantized; None if it is not. Raises ``RuntimeError`` if not as planned.

    A task's own ``build_model`` may quantize (``from_pretrained`` with a ``BitsAndBytesConfig``), but it must
    match the recipe.
    """
    linears = _find_quantized_linears(model)
    planned = recipe.base_quantization
    if not linears:
        if planned:
            raise RuntimeError(
                f"the plan's base is quantized to {planned}, and no Linear of the model is quantized"
            )
        return None
    (quantization, double, storage), *other_kinds = sorted({_read_kind(linear) for linear in linears})
    if other_kinds:
        raise RuntimeError(
            f"the base is quantized in {1 + len(other_kinds)} ways: {quantization}, {other_kinds[0][0]}"
        )
    planned_kind = (planned, recipe.method == "qlora")
    if (quantization, double) != planned_kind:
        raise RuntimeError(
            f"the plan's base is {_describe_kind(*planned_kind)}, and that of build_model is "
            f"{_describe_kind(quantization, double)}"
        )
    unquantized = _list_unquantized_linears(model)
    if unquantized:
        raise RuntimeError(
            f"the plan's base is quantized to {planned}, and {len(unquantized)} Linears of its layers are "
            f"not: {', '.join(unquantized[:3])}"
        )
    # Packed codes must not be cast: they have to be stored in the dtype of the frozen norms, in which
    # fully_shard all-gathers the group.
    frozen = (p.dtype for p in model.parameters() if not p.requires_grad and p.ndim == 1)
    gathered = next(frozen, None)
    if sharded and gathered is not None and storage != str(gathered):
        raise RuntimeError(
            f"the quantized weights are stored as {storage}, which an all-gather in {gathered} would cast: "
            f"build them with bnb_4bit_quant_storage={gathered}"
        )
    return {
        "base_quantization": quantization,
        "base_double_quantization": double,
        "base_stored_as": storage.removeprefix("torch."),
        "base_scale_bytes": count_tensor_bytes(list_scales(model)),
        "num_quantized_linears": len(linears),
    }


def _describe_kind(quantization: str | None, double: bool) -> str:
    if quantization is None:
        return "not quantized"
    return f"quantized to {quantization}{' with double quantization' if double else ''}"


def _find_quantized_linears(model: torch.nn.Module) -> list[Linear4bit | Linear8bitLt]:
    # If bitsandbytes was never imported, there are no such modules; the import would take seconds.
    if "bitsandbytes" not in sys.modules:
        return []
    from bitsandbytes.nn.modules import Linear4bit, Linear8bitLt

    # peft has LoRA layers with the same class names, so compare the classes themselves.
    return [module for module in model.modules() if isinstance(module, Linear4bit | Linear8bitLt)]


def _list_unquantized_linears(model: torch.nn.Module) -> list[str]:
    quantized = set(_find_quantized_linears(model))
    return [
        name
        for layer in list_decoder_layers(model)
        for name, module in layer.named_modules()
        if isinstance(module, torch.nn.Linear) and module not in quantized and "lora_" not in name
    ]


def _read_kind(linear: Linear4bit | Linear8bitLt) -> tuple[str, bool, str]:
    """Return (quantization type, whether the scales are quantized too, storage dtype)."""
    state = getattr(linear, "quant_state", None)
    if state is None:
        return "int8", False, str(local_shard(linear.weight).dtype)
    return str(state.quant_type), bool(state.nested), str(local_shard(linear.weight).dtype)


def list_scales(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the non-parameter tensors of quantized Linears: scales, codes and offsets."""
    attributes: list[object] = []
    for module in model.modules():
        # NF4 keeps them in the module; int8 in the weight, until the first forward moves them to the module.
        state = getattr(module, "quant_state", None)
        for owner in (state, getattr(state, "state2", None)):
            attributes += [getattr(owner, name, None) for name in ("absmax", "code", "offset")]
        for owner in (getattr(module, "weight", None), getattr(module, "state", None)):
            attributes.append(getattr(owner, "SCB", None))
    return [tensor for tensor in attributes if isinstance(tensor, torch.Tensor)]
