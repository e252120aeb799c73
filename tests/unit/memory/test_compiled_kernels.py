"""Tests of ``kernels="compiled"``: saved activations, peaks, and options that it does not support."""

from __future__ import annotations

from typing import Any

import pytest
from tests.requirements import few, thorough

import shardscope as ss
from shardscope.memory.activations.forward import compute_layer_activations
from shardscope.memory.activations.largest_layer import compute_layer_backward
from shardscope.memory.activations.modules.saved_tensors import Modules

LLAMA = ss.models["llama-3.1-8b"]
EIGHT = ss.Cluster.parse("8xh100-sxm-80gb")
GIB = 2**30


def build_plan(model: str = "llama-3.1-8b", layout: ss.Layout | None = None, **recipe: Any) -> ss.Plan:
    recipe = {"kernels": "compiled", "global_batch_size": 8, "seq_len": 4096, **recipe}
    return ss.Plan(ss.models[model], EIGHT, ss.Recipe(**recipe), layout or ss.Layout.fsdp2())


def test_compiled_llama_activations_equal_the_hand_count() -> None:
    """Per token and layer, 16 hidden widths and 4 grouped ones; eager modules save twice as much."""
    activation_bytes = build_plan(loss="chunked").memory().at("forward")["activations"]
    tokens, h, ffn, kv = 4096, 4096, 14336, 1024
    layer = 2 * (6 * h + 2 * kv + 3 * ffn) + 4 * 32 + 2 * 4
    ends = 8 + (4 * h + 4 + 2 * h) + 2 * h  # ids; the final norm, which is not compiled; the head's input
    assert activation_bytes == tokens * (32 * layer + ends)


@pytest.mark.parametrize("layout", [ss.Layout.fsdp2(), ss.Layout.ddp()], ids=["fsdp2", "ddp"])
@pytest.mark.parametrize("lora", [{}, {"method": "lora", "lora_rank": 16}], ids=["full", "lora"])
@pytest.mark.parametrize(
    "model", few(["llama-3.1-8b", "qwen3-8b", "gemma-3-4b", "glm-4-9b-0414", "olmo-2-7b"], ["llama-3.1-8b"])
)
def test_compiled_layers_save_fewer_activations(model: str, layout: ss.Layout, lora: dict[str, Any]) -> None:
    compiled, eager = (
        build_plan(model, layout, kernels=kernels, **lora).memory()
        for kernels in ("compiled", "transformers")
    )
    assert compiled.at("forward")["activations"] < eager.at("forward")["activations"]
    assert compiled.peak_bytes < eager.peak_bytes
    for name in ("parameters", "gradients", "optimizer"):
        assert compiled.at("rest").get(name) == eager.at("rest").get(name)


def test_compiled_backward_reuses_the_memory_of_a_branch() -> None:
    """Besides the stream's gradient, backward allocates one inner width, or two if no product was saved."""
    modules = Modules(kernels="compiled", autocast=False, compute=2, seq_len=4096)
    stream, inner = 2 * LLAMA.hidden_size, 2 * LLAMA.intermediate_size
    assert compute_layer_backward(LLAMA, False, modules).at_product == stream + inner
    frozen = modules._replace(targets=("q_proj", "v_proj"), adapter_rank=8)
    assert compute_layer_backward(LLAMA, False, frozen).at_product == stream + 2 * inner


def test_recomputed_compiled_layers_save_only_their_input() -> None:
    """The backward kernel of the product uses six inner widths; three are saved without recomputation."""
    modules = Modules(kernels="compiled", autocast=False, compute=2, seq_len=4096)
    stream, inner = 2 * LLAMA.hidden_size, 2 * LLAMA.intermediate_size
    none, full = (compute_layer_activations(LLAMA, False, modules, how, 1, 1) for how in ("none", "full"))
    assert (full.saved, full.recomputed) == (stream, none.saved - stream + 2 * inner)
    saved, recomputed = (
        build_plan(recompute=how, micro_batch_size=4, global_batch_size=32) for how in ("none", "full")
    )
    assert recomputed.memory().peak_bytes < saved.memory().peak_bytes


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("Recipe.recompute", {"recompute": "full", "layout": ss.Layout.ddp()}),
        ("Recipe.recompute", {"recompute": "selective"}),
        ("Recipe.recompute", {"recompute": "offload"}),
        ("Recipe.attention", {"attention": "eager"}),
        ("Recipe.attention", {"attention": "flash"}),
        ("Recipe.dropout", {"dropout": 0.1}),
        ("Recipe.precision", {"precision": "fp32"}),
        ("Recipe.precision", {"precision": "fp8-mixed"}),
        ("Recipe.lora_dropout", {"method": "lora", "lora_rank": 8, "lora_dropout": 0.1}),
        ("Recipe.method", {"method": "qlora", "lora_rank": 8, "layout": ss.Layout.ddp()}),
        ("Layout.tp", {"layout": ss.Layout.fsdp2(tp=2)}),
        ("Recipe.kernels", {"layout": ss.Layout.zero(stage=1)}),
        ("Recipe.kernels", {"layout": ss.Layout.megatron()}),
        ("Recipe.kernels", {"model": "mixtral-8x7b"}),
        ("Recipe.kernels", {"model": "gpt2-xl", "seq_len": 1024}),
        ("Recipe.kernels", {"model": "gemma-2-2b"}),
        ("Recipe.kernels", {"model": "phi-4"}),
    ],
)
def test_unsupported_options_with_compiled_kernels_are_rejected(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as refusal:
        build_plan(**options)
    assert refusal.value.field == field  # type: ignore[attr-defined]


@thorough()
def test_rehearsal_of_compiled_kernels_is_rejected() -> None:
    with pytest.raises(ValueError, match="'compiled'"):
        build_plan().rehearse()
