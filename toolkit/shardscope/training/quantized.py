"""A frozen base in NF4 or int8 through bitsandbytes: ``Recipe.quantization``, and ``method="qlora"``.

Every Linear inside the decoder layers is replaced, as transformers' own integration does it; embeddings,
norms, the head, routers and fused experts stay. int8 has no threshold for outliers
(``llm_int8_threshold=0``).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from shardscope.training.recompute import decoder_layers


def quantize_base(model: torch.nn.Module, recipe: Any, *, sharded: bool, compute: torch.dtype) -> None:
    """Replace the Linears of ``model``'s layers, in place.

    ``sharded``: packed weights are stored as bf16, which ``fully_shard`` cuts like any others (accelerate
    1.15, ``utils/fsdp_utils.py``). ``compute`` is the type that products run in.
    """
    from transformers.pytorch_utils import Conv1D

    kind = recipe.base_quantization
    for layer in decoder_layers(model):
        for parent in list(layer.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, torch.nn.Linear | Conv1D):
                    plain = _as_linear(child)
                    made = _in_int8(plain) if kind == "int8" else _in_nf4(plain, recipe, sharded, compute)
                    setattr(parent, name, made)
    # peft asks which of its layers go over these.
    setattr(model, "is_loaded_in_8bit" if kind == "int8" else "is_loaded_in_4bit", True)


def _as_linear(module: Any) -> Any:
    """GPT-2's Conv1D holds its matrix the other way round."""
    if isinstance(module, torch.nn.Linear):
        return module
    inner, outer = module.weight.shape
    found = torch.nn.Linear(inner, outer, bias=module.bias is not None, device="meta")
    found.weight = torch.nn.Parameter(module.weight.detach().t().contiguous(), requires_grad=False)
    found.bias = module.bias
    return found


def _in_nf4(plain: Any, recipe: Any, sharded: bool, compute: torch.dtype) -> torch.nn.Module:
    bnb: Any = import_module("bitsandbytes")

    storage = torch.bfloat16 if sharded else torch.uint8
    double = recipe.method == "qlora"
    packed = bnb.nn.Linear4bit(
        plain.in_features,
        plain.out_features,
        bias=False,
        compute_dtype=compute,
        compress_statistics=double,
        quant_type="nf4",
        quant_storage=storage,
        device="meta",
    )
    packed.weight = bnb.nn.Params4bit(
        plain.weight.detach(),
        requires_grad=False,
        quant_type="nf4",
        compress_statistics=double,
        quant_storage=storage,
        module=packed,
    )
    packed.bias = plain.bias
    found: torch.nn.Module = packed.to(plain.weight.device)
    return found


def _in_int8(plain: Any) -> torch.nn.Module:
    bnb: Any = import_module("bitsandbytes")

    packed = bnb.nn.Linear8bitLt(
        plain.in_features, plain.out_features, bias=False, has_fp16_weights=False, device="meta"
    )
    packed.weight = bnb.nn.Int8Params(plain.weight.detach(), requires_grad=False)
    packed.bias = plain.bias
    found: torch.nn.Module = packed.to(plain.weight.device)
    return found


def scales(model: torch.nn.Module) -> list[torch.Tensor]:
    """What unpacks the base, and is no parameter: scales, codes and offsets of every quantised Linear."""
    found: list[torch.Tensor] = []
    for module in model.modules():
        # NF4's are the module's; int8's the weight's, until the first forward gives them to the module.
        state: Any = getattr(module, "quant_state", None)
        for owner in (state, getattr(state, "state2", None)):
            found += [getattr(owner, name, None) for name in ("absmax", "code", "offset")]
        for owner in (getattr(module, "weight", None), getattr(module, "state", None)):
            found.append(getattr(owner, "SCB", None))
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]
