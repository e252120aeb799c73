"""Tests of the bytes of NF4 and int8 bases against bitsandbytes on a CPU.

tests/runs/test_saved_tensors.py tests the tensors that their layers save.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.requirements import few, needs

import shardscope as ss
from shardscope.core.architecture import Architecture
from shardscope.memory.state.quantization import compute_nf4_bytes
from shardscope.training.model.lora import add_adapters
from shardscope.training.model.model import build_model

SMALL = Architecture(
    name="small",
    model_type="llama",
    hidden_size=192,
    intermediate_size=320,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=320,
    max_position_embeddings=64,
)
QLORA = ss.Recipe(method="qlora", lora_rank=8, seq_len=32)
NF4_OF_RANK_8 = ss.Recipe(method="lora", quantization="nf4", lora_rank=8, seq_len=32)


def quantize_to_nf4(model: torch.nn.Module, double: bool) -> torch.nn.Module:
    """Quantize every Linear of ``model`` but the head to NF4, as transformers' integration does."""
    bnb = needs("bitsandbytes")
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear) and name != "lm_head":
                linear = bnb.nn.Linear4bit(
                    child.in_features, child.out_features, bias=False, compute_dtype=torch.bfloat16
                )
                linear.weight = bnb.nn.Params4bit(
                    child.weight.data.bfloat16(),
                    requires_grad=False,
                    quant_type="nf4",
                    compress_statistics=double,
                )
                setattr(module, name, linear.to("cpu"))
    return model


def quantize_to_int8(model: torch.nn.Module) -> torch.nn.Module:
    """Quantize every Linear of ``model`` but the head to int8."""
    bnb = needs("bitsandbytes")
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear) and name != "lm_head":
                linear = bnb.nn.Linear8bitLt(
                    child.in_features, child.out_features, bias=False, has_fp16_weights=False
                )
                linear.weight = bnb.nn.Int8Params(child.weight.data, requires_grad=False)
                setattr(module, name, linear.to("cpu"))
    model.is_loaded_in_8bit = True  # type: ignore[assignment]
    return model


def count_weight_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of parameters and their quantization states; shared storages count once."""
    storages: dict[int, int] = {}

    def count(tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()

    for parameter in model.parameters():
        count(parameter)
        count(getattr(parameter, "SCB", None))
        state = getattr(parameter, "quant_state", None)
        for owner in (state, getattr(state, "state2", None)):
            for name in ("absmax", "code", "offset"):
                count(getattr(owner, name, None))
    return sum(storages.values())


@pytest.mark.parametrize(
    "recipe",
    few([QLORA, NF4_OF_RANK_8], [QLORA]),
)
@pytest.mark.parametrize("precision", few(["bf16", "bf16-mixed"], ["bf16-mixed"]))
def test_nf4_base_and_adapter_bytes_equal_bitsandbytes(recipe: ss.Recipe, precision: str) -> None:
    recipe = replace(recipe, precision=precision)  # type: ignore[arg-type]
    # What is not quantised is frozen in half precision; adapters are in fp32 where precision is mixed.
    model = quantize_to_nf4(build_model(SMALL).to(torch.bfloat16), recipe.method == "qlora")
    model = add_adapters(model, SMALL, recipe, in_fp32=precision == "bf16-mixed")
    plan = ss.Plan(SMALL, ss.Cluster.parse("2xcpu"), recipe, ss.Layout.ddp())
    assert count_weight_bytes(model) == plan.memory().components["parameters"]
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    assert trained * 2 == plan.memory().at("rest")["optimizer"]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_int8_base_and_fp32_adapter_bytes_equal_bitsandbytes(precision: Any) -> None:
    recipe = ss.Recipe(method="lora", quantization="int8", lora_rank=8, seq_len=32, precision=precision)
    model = build_model(SMALL)
    if precision == "bf16":
        model = model.to(torch.bfloat16)
    model = add_adapters(quantize_to_int8(model), SMALL, recipe)
    plan = ss.Plan(SMALL, ss.Cluster.parse("2xcpu"), recipe, ss.Layout.ddp())
    assert count_weight_bytes(model) == plan.memory().components["parameters"]
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    assert all(p.dtype == torch.float32 for p in model.parameters() if p.requires_grad)
    assert trained * 2 == plan.memory().at("rest")["optimizer"]
    assert "int8" in plan.memory().explain("parameters")


def test_nf4_bytes_of_arrays_equal_those_of_numbers() -> None:
    numel = np.array([64, 100, 4096 * 4096, 3], dtype=np.int64)
    for double in (True, False):
        together = compute_nf4_bytes(numel, double)
        assert together.tolist() == [compute_nf4_bytes(n, double) for n in numel.tolist()]


def test_qlora_of_70b_has_the_published_size() -> None:
    """Dettmers et al. 2023, section 3: double quantization saves 0.373 bits a weight, about 3 GB for 65B."""
    numel = 8192 * 28672
    saved = 8 * (compute_nf4_bytes(numel, False) - compute_nf4_bytes(numel, True)) / numel
    assert saved == pytest.approx(0.373, abs=0.001)


def test_layouts_without_quantized_training_reject_qlora() -> None:
    gpus = ss.Cluster.parse("8xh100-sxm-80gb")
    for layout in (ss.Layout.zero(), ss.Layout.megatron()):
        with pytest.raises(ValueError, match=f"Recipe.method is 'qlora'.*with {layout.title}"):
            ss.Plan(SMALL, gpus, QLORA, layout)
        with pytest.raises(ValueError, match=f"'(int8|lora)'.*with {layout.title}"):
            ss.Plan(SMALL, gpus, ss.Recipe(method="lora", quantization="int8"), layout)


@pytest.mark.parametrize(("kernels", "kind"), [("liger", "int8"), ("compiled", "int8"), ("compiled", "nf4")])
@pytest.mark.parametrize("layout", [ss.Layout.ddp(), ss.Layout.fsdp2()])
def test_quantized_bases_reject_unsupported_kernels(kernels: Any, kind: Any, layout: ss.Layout) -> None:
    recipe = ss.Recipe(method="lora", quantization=kind, precision="bf16", kernels=kernels)
    with pytest.raises(ValueError, match=f"Recipe.(kernels is '{kernels}'|quantization is 'int8')"):
        ss.Plan(ss.models["llama-3.1-8b"], ss.Cluster.parse("8xh100-sxm-80gb"), recipe, layout)


def test_int8_linears_ignore_autocast() -> None:
    recipe = ss.Recipe(method="lora", quantization="int8", precision="bf16-mixed")
    with pytest.raises(ValueError, match=r"Recipe.quantization is 'int8'.*precision='bf16'"):
        ss.Plan(SMALL, ss.Cluster.parse("8xh100-sxm-80gb"), recipe, ss.Layout.ddp())


@pytest.mark.parametrize(
    ("change", "layout", "said"),
    [
        ({"precision": "bf16"}, {"tp": 2}, r"Layout.tp is 2; allowed: 1 over a base in NF4"),
        ({"precision": "bf16"}, {"offload": "cpu"}, r"Layout.offload is 'cpu'; allowed: None"),
        (
            {"precision": "bf16", "method": "lora", "quantization": "int8"},
            {},
            r"Recipe.quantization is 'int8'",
        ),
    ],
)
def test_fsdp2_rejects_packed_weights_in_partial_shards(
    change: dict[str, Any], layout: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        ss.Plan(
            ss.models["llama-3.1-8b"],
            ss.Cluster.parse("8xh100-sxm-80gb"),
            replace(QLORA, **change),
            ss.Layout.fsdp2(**layout),
        )
