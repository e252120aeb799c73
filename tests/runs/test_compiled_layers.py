"""Tests of tensors that compiled decoder layers save, read from inductor's graphs.

Everything of ``torch.compile`` runs but the making of kernels: the cut is made by then. On fake tensors,
which take CUDA's operators without a GPU (rehearsal/gpu_operators.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from families import SCALES_QUERIES, architecture
from functorch.compile import make_boxed_func
from tests.requirements import few, thorough
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import FakeTensorMode

from shardscope.core.architecture import Architecture
from shardscope.core.precision import FP32
from shardscope.core.recipe import Recipe
from shardscope.memory.activations.forward import list_saved_tensors
from shardscope.memory.activations.modules.compiled_layers import COMPILED_FAMILIES
from shardscope.memory.activations.modules.first_layer import list_unsaved_in_first_layer
from shardscope.memory.activations.modules.saved_tensors import Modules
from shardscope.memory.activations.weight_casts import compute_weight_casts
from shardscope.memory.state.lora import find_adapter_targets
from shardscope.rehearsal.fake_world import replace_converted_parameters, transformers_as_on_real_tensors
from shardscope.rehearsal.gpu_operators import gpu_operators
from shardscope.training.model.lora import add_adapters
from shardscope.training.model.model import build_model
from shardscope.training.model.recompute import apply_recompute, list_decoder_layers

pytestmark = thorough()

ROWS, SEQ_LEN, RANK = 2, 32, 4
TOKENS = ROWS * SEQ_LEN
VIEWS = frozenset({
    *("view", "permute", "transpose", "unsqueeze", "slice", "reshape", "expand"),
    *("split", "split_with_sizes"),
})  # fmt: skip
WINDOWED = ("mistral with a window", "gemma3_text in windows")
FULL = Recipe()


def make_model(family: str) -> Architecture:
    """Heads of a width that flash attention takes as it is."""
    return replace(architecture(family, 2), head_dim=32)


def make_modules(arch: Architecture, mode: str, recipe: Recipe, on_gpu: bool = True) -> Modules:
    return Modules(
        kernels="compiled",
        autocast=mode == "autocast",
        compute=4 if mode == "fp32" else 2,
        seq_len=SEQ_LEN,
        targets=find_adapter_targets(arch, recipe) if recipe.has_adapters else None,
        adapter_rank=RANK if recipe.has_adapters else 0,
        on_gpu=on_gpu,
    )


@contextlib.contextmanager
def without_memory(on_gpu: bool) -> Iterator[None]:
    """A rehearsal's tensors without its tracker: nothing compiles while a dispatch mode looks on."""
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        replace_converted_parameters(),
        transformers_as_on_real_tensors(),
        gpu_operators() if on_gpu else contextlib.nullcontext(),
    ):
        yield


def in_a_frame(forward: Any) -> Any:
    """``functools.partial``, which recomputation leaves, has no frame that could be compiled."""

    def call_forward(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return call_forward


def forward_graphs(arch: Architecture, mode: str, recipe: Recipe, on_gpu: bool) -> list[Any]:
    """Each compiled layer's forward; layers that are alike share one."""
    graphs: list[Any] = []

    def keep_graph(graph: Any, _: Any, **options: Any) -> Any:
        if not options.get("is_backward"):
            graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    casting = torch.autocast("cpu", torch.bfloat16) if mode == "autocast" else contextlib.nullcontext()
    with without_memory(on_gpu):
        model = build_model(arch)
        if mode == "bf16" or recipe.has_adapters:
            model = model.to(torch.bfloat16)
        if recipe.has_adapters:
            model = add_adapters(model, arch, recipe, in_fp32=mode == "autocast")
        model.train()
        apply_recompute(model, recipe.recompute)
        for layer in list_decoder_layers(model):
            layer.forward = in_a_frame(layer.forward)
            layer.compile(
                backend=lambda graph, inputs: compile_fx(graph, inputs, inner_compile=keep_graph),
                fullgraph=True,
                dynamic=False,
            )
        with casting:
            model(input_ids=torch.zeros(ROWS, SEQ_LEN, dtype=torch.int64))
    torch._dynamo.reset()
    return graphs


def looked_at(node: Any) -> Any:
    """Return the node whose storage a view keeps alive; for parts of a split, that of the whole."""
    while node.op == "call_function":
        name = node.target.__name__.split(".")[0]
        list_parts = node.args[0].target if name == "getitem" else None
        if name not in VIEWS and getattr(list_parts, "__name__", "").split(".")[0] not in VIEWS:
            break
        node = node.args[0]
    return node


def kept_bytes(graph: Any) -> int:
    """Bytes of the storages that forward hands to backward: the layer's input, and what is no input."""
    layer_output, *saved = next(node for node in graph.graph.nodes if node.op == "output").args[0]
    storages = {}
    for node in saved:
        node = looked_at(node)
        value = node.meta["val"]
        is_table = node.op == "placeholder" and value.shape != layer_output.meta["val"].shape
        is_seed = value.dtype in (torch.uint64, torch.uint8) or not value.shape  # of a dropout that is off
        if not is_table and not is_seed:
            storages[node] = value.numel() * value.element_size()
    return sum(storages.values())


def count_listed_bytes(arch: Architecture, here: Modules) -> int:
    per_token = sum(tensor.bytes_per_token for tensor in list_saved_tensors(arch, False, here))
    return TOKENS * per_token + compute_weight_casts(arch, False, here)


@pytest.mark.parametrize(
    ("family", "mode"),
    few(
        [
            *((family, "bf16") for family in (*COMPILED_FAMILIES, *WINDOWED)),
            *((family, "autocast") for family in ("llama", "qwen3", "gemma3_text", "olmo2", *WINDOWED[:1])),
        ],
        [("qwen3", "bf16"), ("gemma3_text in windows", "bf16"), ("glm4", "bf16"), ("olmo2", "autocast")],
    ),
)
def test_a_compiled_layer_saves_the_listed_tensors(family: str, mode: str) -> None:
    arch = make_model(family)
    listed = count_listed_bytes(arch, make_modules(arch, mode, FULL))
    scale = TOKENS * FP32 if family in SCALES_QUERIES else 0
    assert 0 <= kept_bytes(forward_graphs(arch, mode, FULL, True)[-1]) - listed <= scale


@pytest.mark.parametrize("mode", few(["bf16", "autocast"], []))
def test_a_compiled_layer_without_rotary_embedding_saves_the_listed_tensors(mode: str) -> None:
    """SmolLM3's fourth layer is the first without."""
    arch = replace(make_model("smollm3"), num_hidden_layers=4)
    expected = count_listed_bytes(arch, make_modules(arch, mode, FULL))
    assert [kept_bytes(graph) for graph in forward_graphs(arch, mode, FULL, True)] == 4 * [expected]


@pytest.mark.parametrize(
    ("family", "targets", "mode"),
    few(
        [
            (family, targets, mode)
            for family, targets in (
                ("qwen3", None),
                ("qwen3", ("q_proj", "down_proj")),
                ("qwen3", ("gate_proj", "up_proj")),
                ("gemma3_text", None),
            )
            for mode in ("bf16", "autocast")
        ],
        [("qwen3", None, "bf16"), ("qwen3", ("gate_proj", "up_proj"), "autocast")],
    ),
)
def test_frozen_projections_with_adapters_save_no_inputs(
    family: str, targets: tuple[str, ...] | None, mode: str
) -> None:
    arch = make_model(family)
    recipe = Recipe(method="lora", lora_rank=RANK, lora_targets=targets)
    here = make_modules(arch, mode, recipe)
    first, last = forward_graphs(arch, mode, recipe, True)
    assert kept_bytes(last) == count_listed_bytes(arch, here)
    unsaved = sum(tensor.bytes_per_token for tensor in list_unsaved_in_first_layer(arch, here))
    assert kept_bytes(last) - kept_bytes(first) >= TOKENS * unsaved > 0
    if mode == "bf16" and targets is None:  # else also what lies before the first adapter, and cast weights
        assert kept_bytes(last) - kept_bytes(first) == TOKENS * unsaved


@pytest.mark.parametrize("family", few(["llama", "gemma3_text"], ["llama"]))
def test_a_recomputed_layer_saves_only_its_input(family: str) -> None:
    arch = make_model(family)
    found = forward_graphs(arch, "bf16", replace(FULL, recompute="full"), True)[-1]
    assert kept_bytes(found) == TOKENS * 2 * arch.hidden_size


@pytest.mark.parametrize("on_gpu", few([True, False], [True]))
def test_a_compiled_fp32_layer_with_multi_head_attention_saves_the_listed_tensors(on_gpu: bool) -> None:
    arch = replace(make_model("llama"), num_key_value_heads=6)
    found = kept_bytes(forward_graphs(arch, "fp32", FULL, on_gpu)[-1])
    assert found == count_listed_bytes(arch, make_modules(arch, "fp32", FULL, on_gpu))


def test_saved_tensors_of_a_compiled_llama_equal_a_hand_count() -> None:
    arch = make_model("llama")
    h, ffn, heads, kv = arch.hidden_size, arch.intermediate_size, 6 * 32, 2 * 32
    products_and_attention = 2 * (h + ffn + ffn) + 2 * (2 * heads + 2 * kv) + 4 * 6
    read_by_products = 2 * (h + h + ffn)
    by_hand = 2 * h + 2 * 4 + products_and_attention + read_by_products
    assert kept_bytes(forward_graphs(arch, "bf16", FULL, True)[-1]) == TOKENS * by_hand
    assert count_listed_bytes(arch, make_modules(arch, "bf16", FULL)) == TOKENS * by_hand
