"""Tests of tensors that transformers' modules save, against ``memory/activations/modules``.

Counted are storages that live after forward and did not before, in bytes for one token of one layer: the
difference between three layers and two, and between three sequences and two, so that embeddings, heads and
tables that all layers share drop out. A part that does not grow with tokens is copies of weights (autocast).
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from families import FAMILIES, NARROW_VALUES, SCALES_QUERIES, architecture
from tests.requirements import few, needs, sample, skip_from_torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardscope.core.architecture import MODEL_TYPES, Architecture
from shardscope.core.precision import FP32
from shardscope.core.recipe import Recipe
from shardscope.families.registry import find_family, list_families_with
from shardscope.memory.activations.forward import (
    compute_layer_activations,
    list_kept_by_selective,
    list_saved_tensors,
)
from shardscope.memory.activations.modules.attention import has_one_key_head
from shardscope.memory.activations.modules.dora import DORA_FAMILIES, compute_dora_vectors
from shardscope.memory.activations.modules.first_layer import list_unsaved_in_first_layer
from shardscope.memory.activations.modules.saved_tensors import Modules, SavedTensor
from shardscope.memory.activations.weight_casts import compute_weight_casts
from shardscope.memory.state.lora import find_adapter_targets
from shardscope.training.document_masks import add_document_mask
from shardscope.training.model.lora import add_adapters
from shardscope.training.model.model import build_model
from shardscope.training.model.recompute import apply_recompute

add_adapters_of = add_adapters
SEQ_LEN = 32
RANK = 4
MODES = ("bf16", "autocast", "fp32")


def make_modules(arch: Architecture, mode: str, recipe: Recipe) -> Modules:
    return Modules(
        kernels="transformers",
        autocast=mode == "autocast",
        compute=4 if mode == "fp32" else 2,
        seq_len=SEQ_LEN,
        targets=find_adapter_targets(arch, recipe) if recipe.has_adapters else None,
        adapter_rank=recipe.adapter_rank if recipe.has_adapters else 0,
        on_gpu=False,
        dropout=recipe.dropout,
        attention=recipe.attention,
        adapter_dropout=recipe.lora_dropout > 0,
        uses_dora=recipe.use_dora,
        masks_documents=recipe.packing,
    )


class Alive(TorchDispatchMode):
    """Follows every tensor that operators make, without keeping it alive."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int, str]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                # A view of a storage keeps the label of what made it; an address is used again.
                if storage._cdata not in self.made or self.made[storage._cdata][0].expired():
                    label = f"{function} {tuple(leaf.shape)} {leaf.dtype}"
                    self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes(), label)
        return out

    def count_bytes(self, without: set[int]) -> Counter[str]:
        """Return the bytes of tensors that still live, by operator, shape and type."""
        living: Counter[str] = Counter()
        for key, (weak, num_bytes, label) in self.made.items():
            if not weak.expired() and key not in without:
                living[label] += num_bytes
        return living


def kept_bytes(
    arch: Architecture, mode: str, recipe: Recipe, *, input_needs_gradient: bool = False
) -> list[int]:
    """Return the bytes that forward leaves, weights excluded: with two sequences, and with three."""
    kept = record_kept(arch, mode, recipe, input_needs_gradient=input_needs_gradient)
    return [one.total() for one in kept]


def record_kept(
    arch: Architecture, mode: str, recipe: Recipe, *, input_needs_gradient: bool = False
) -> list[Counter[str]]:
    """Return the same by the operator that made each tensor."""
    torch.manual_seed(0)
    model = build_model(arch, recipe.dropout, recipe.attention)
    if mode == "bf16" or (mode == "autocast" and recipe.has_adapters):
        model = model.to(torch.bfloat16)
    if recipe.has_adapters:
        # What never updates has no fp32 original; adapters have one under autocast.
        model = add_adapters_of(model, arch, recipe, in_fp32=mode == "autocast")
    apply_recompute(model, recipe.recompute, recipe.recompute_interval)
    model.train()
    if input_needs_gradient:
        model.enable_input_require_grads()
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    results = []
    for rows in (2, 3):
        ids = torch.randint(1, arch.vocab_size, (rows, SEQ_LEN))
        casting = torch.autocast("cpu", torch.bfloat16) if mode == "autocast" else contextlib.nullcontext()
        alive = Alive()
        with alive, casting:
            dtype = torch.float32 if mode == "fp32" else torch.bfloat16
            out = model(**add_document_mask({"input_ids": ids, "labels": ids}, recipe, dtype))
        results.append(alive.count_bytes(weights))
        del out
    return results


class Measured(NamedTuple):
    per_token: float
    constant: int


def one_layer(family: str, mode: str, recipe: Recipe) -> Measured:
    two, three = (kept_bytes(architecture(family, layers), mode, recipe) for layers in (2, 3))
    layer = [more - fewer for fewer, more in zip(two, three, strict=True)]
    per_row = layer[1] - layer[0]
    return Measured(per_row / SEQ_LEN, layer[0] - 2 * per_row)


def sum_bytes_per_token(tensors: Sequence[SavedTensor]) -> int:
    return sum(tensor.bytes_per_token for tensor in tensors)


def assert_saves(family: str, mode: str, recipe: Recipe, listed: Sequence[SavedTensor]) -> Measured:
    """Assert that a layer's forward leaves as many bytes per token as are ``listed``."""
    if has_one_key_head(architecture(family, 2)):
        skip_from_torch("2.14", "fuses attention with one key head on CPUs")
    measured = one_layer(family, mode, recipe)
    same = measured.per_token == sum_bytes_per_token(listed)
    assert same, describe_difference(family, mode, recipe, listed)
    return measured


def describe_difference(family: str, mode: str, recipe: Recipe, listed: Sequence[SavedTensor]) -> str:
    """Return what a layer really keeps, and what is listed, tensor by tensor: one of them is missing."""
    two, three = (record_kept(architecture(family, layers), mode, recipe)[0] for layers in (2, 3))
    kept = {label: num_bytes / (2 * SEQ_LEN) for label, num_bytes in (three - two).most_common()}
    lines = [f"bytes per token that a layer of {family} keeps in {mode}: {sum(kept.values()):.0f}"]
    lines += [f"{num_bytes:9.0f} {label}" for label, num_bytes in kept.items()]
    lines.append(f"and that memory/activations/modules lists: {sum_bytes_per_token(listed)}")
    ordered = sorted(listed, key=lambda tensor: -tensor.bytes_per_token)
    lines += [f"{tensor.bytes_per_token:9} {tensor.operator}, {tensor.cut_by}" for tensor in ordered]
    return "\n".join(lines)


def is_moe(family: str) -> bool:
    return "mixture_of_experts" in FAMILIES[family]


FULL = Recipe()
LORA = Recipe(method="lora", lora_rank=RANK)
PAIRS = [(family, mode) for family in FAMILIES for mode in MODES]
TURNS = [(family, MODES[turn % 3]) for turn, family in enumerate(FAMILIES)]
"""Every family in one mode."""
PLAIN = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "seed_oss"),
    *("smollm3", "olmo3", "olmo3 in windows", "ministral3"),
)
ALL_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TARGETS = (("q_proj", "down_proj"), ("gate_proj", "up_proj", "down_proj"))


def test_every_family_has_a_small_model() -> None:
    assert {architecture(family, 2).model_type for family in FAMILIES} == set(MODEL_TYPES)


@sample(24)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_saves_the_listed_tensors(family: str, mode: str) -> None:
    arch = architecture(family, 2)
    predicted = make_modules(arch, mode, FULL)
    measured = assert_saves(family, mode, FULL, list_saved_tensors(arch, is_moe(family), predicted))
    # Beside the copies that autocast makes of matrices there are a few of vectors and of the router.
    assert abs(measured.constant - compute_weight_casts(arch, is_moe(family), predicted)) <= 20_000


@sample(8)
@pytest.mark.parametrize(("family", "mode"), few(PAIRS, TURNS))
def test_a_layer_with_adapters_saves_the_listed_tensors(family: str, mode: str) -> None:
    arch = architecture(family, 2)
    predicted = make_modules(arch, mode, LORA)
    assert_saves(family, mode, LORA, list_saved_tensors(arch, is_moe(family), predicted))


@pytest.mark.parametrize(
    "targets", few([(None,), *((one,) for one in TARGETS), (ALL_PROJECTIONS,)], [(ALL_PROJECTIONS,)])
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", few(DORA_FAMILIES, ["qwen2"]))
def test_a_layer_with_dora_saves_the_listed_tensors(
    family: str, mode: str, targets: tuple[str, ...] | None
) -> None:
    arch, recipe = architecture(family, 2), replace(LORA, use_dora=True, lora_targets=targets)
    predicted = make_modules(arch, mode, recipe)
    measured = assert_saves(family, mode, recipe, list_saved_tensors(arch, False, predicted))
    casts = compute_weight_casts(arch, False, predicted)
    scale = predicted.seq_len * FP32 if family in SCALES_QUERIES else 0
    assert 0 <= measured.constant - casts - compute_dora_vectors(arch, predicted, "none") <= scale


@sample(6)
@pytest.mark.parametrize(("family", "mode"), few(PAIRS, TURNS))
def test_the_first_layer_saves_less_while_embeddings_are_frozen(family: str, mode: str) -> None:
    assert_the_first_layer_lacks_what_the_list_says(family, mode, LORA)


def assert_the_first_layer_lacks_what_the_list_says(family: str, mode: str, recipe: Recipe) -> None:
    arch = architecture(family, 2)
    without, with_gradient = (
        kept_bytes(arch, mode, recipe, input_needs_gradient=needed) for needed in (False, True)
    )
    difference = [more - fewer for fewer, more in zip(without, with_gradient, strict=True)]
    here = make_modules(arch, mode, recipe)
    unsaved = sum_bytes_per_token(list_unsaved_in_first_layer(arch, here))
    # The embedding that was made to need a gradient stays too, where it is not itself what the norm keeps.
    is_saved = find_family(arch).is_post_norm and not here.recasts
    upcast = here.stream < 4 and arch.norm == "rmsnorm" and not is_saved
    stays = upcast or arch.model_type in ("granite", "gpt2")
    assert (difference[1] - difference[0]) / SEQ_LEN == unsaved + stays * arch.hidden_size * here.stream


@sample(3)
@pytest.mark.parametrize(
    "targets", [("o_proj",), ("v_proj",), ("up_proj",), ("gate_proj",), ("down_proj",)], ids="".join
)
@pytest.mark.parametrize("mode", few(["bf16", "fp32"], ["bf16"]))
@pytest.mark.parametrize("family", ["llama", "qwen3", "granite"])
def test_the_first_layer_saves_nothing_before_its_first_adapter(
    family: str, mode: str, targets: tuple[str, ...]
) -> None:
    assert_the_first_layer_lacks_what_the_list_says(family, mode, replace(LORA, lora_targets=targets))


@sample(6)
@pytest.mark.parametrize("adapters", few([False, True], [False]))
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - NARROW_VALUES))
def test_selective_recomputation_saves_matmuls_and_attention(family: str, adapters: bool) -> None:
    arch = architecture(family, 2)
    recipe = replace(LORA if adapters else FULL, recompute="selective")
    # With DeepSeek's narrower values a CPU rank has no fused attention; a GPU has one all
    # the same, and the list is a GPU's.
    listed = list_kept_by_selective(arch, is_moe(family), make_modules(arch, "bf16", recipe))
    assert_saves(family, "bf16", recipe, listed)


@sample(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
def test_full_recomputation_saves_the_input_of_a_layer(family: str, mode: str) -> None:
    arch = architecture(family, 2)
    recipe = replace(FULL, recompute="full")
    measured = one_layer(family, mode, recipe)
    assert measured.per_token == arch.hidden_size * make_modules(arch, mode, recipe).stream


@pytest.mark.parametrize("recipe", [FULL, LORA], ids=["full", "lora"])
def test_layers_with_and_without_sliding_window_attention(recipe: Recipe) -> None:
    """Gemma 3's third layer of three attends to everything, and keeps no mask."""
    counted = []
    for layers in (2, 3):
        arch = replace(architecture("gemma3_text", layers), sliding_window=16, sliding_window_layers=1)
        counted.append(kept_bytes(replace(arch, sliding_window_layers=layers - 1), "bf16", recipe))
    (two, more_of_two), (three, more_of_three) = counted
    windowed = (more_of_three - more_of_two - three + two) / SEQ_LEN
    arch = replace(architecture("gemma3_text", 4), sliding_window=16, sliding_window_layers=3)
    here = make_modules(arch, "bf16", recipe)
    assert windowed == sum_bytes_per_token(list_saved_tensors(arch, False, here._replace(windowed=True)))
    assert one_layer("gemma3_text", "bf16", recipe).per_token == sum_bytes_per_token(
        list_saved_tensors(arch, False, here._replace(windowed=False))
    )
    of_a_layer = [
        compute_layer_activations(arch, False, here._replace(windowed=windowed), "none", 1, 1).saved
        for windowed in (True, False, None)
    ]
    assert 4 * of_a_layer[2] == 3 * of_a_layer[0] + of_a_layer[1] + (-of_a_layer[0] * 3 - of_a_layer[1]) % 4


@pytest.mark.parametrize(
    "recipe",
    [FULL, LORA, replace(FULL, attention="eager"), replace(FULL, recompute="selective")],
    ids=["full", "lora", "eager", "selective"],
)
@pytest.mark.parametrize("mode", MODES)
def test_a_layer_without_rotary_embedding_saves_as_much_as_one_with_it(mode: str, recipe: Recipe) -> None:
    """SmolLM3's fourth layer is the first without: what it adds to three layers."""
    three, four = (kept_bytes(architecture("smollm3", layers), mode, recipe) for layers in (3, 4))
    (at_three, more_at_three), (at_four, more_at_four) = three, four
    fourth = (more_at_four - more_at_three - at_four + at_three) / SEQ_LEN
    assert fourth == one_layer("smollm3", mode, recipe).per_token


PACKABLE = list_families_with("document_masks")
PACKED = [name for name in FAMILIES if architecture(name, 2).model_type in PACKABLE and "window" not in name]


@sample(15)
@pytest.mark.parametrize(
    "recipe", [FULL, LORA, replace(FULL, recompute="full")], ids=["full", "lora", "again"]
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", PACKED)
def test_a_mask_of_documents_is_no_tensor_of_a_layer(family: str, mode: str, recipe: Recipe) -> None:
    """All layers save one mask, which drops out of the difference between three layers and two."""
    arch, recipe = architecture(family, 2), replace(recipe, packing=True)
    modules = make_modules(arch, mode, recipe)
    measured = one_layer(family, mode, recipe)
    of_a_layer = compute_layer_activations(arch, is_moe(family), modules, recipe.recompute, 1, 1)
    assert 0 <= measured.per_token - of_a_layer.saved <= (FP32 if family in SCALES_QUERIES else 0)


@sample(3)
@pytest.mark.parametrize("recipe", [FULL, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", few(PLAIN, ("llama", "qwen3_moe")))
def test_eager_attention_saves_the_listed_tensors(family: str, mode: str, recipe: Recipe) -> None:
    arch, recipe = architecture(family, 2), replace(recipe, attention="eager")
    listed = list_saved_tensors(arch, is_moe(family), make_modules(arch, mode, recipe))
    assert_saves(family, mode, recipe, listed)


@pytest.mark.parametrize("recipe", [FULL, LORA], ids=["full", "lora"])
def test_eager_attention_with_selective_recomputation(recipe: Recipe) -> None:
    recipe = replace(recipe, recompute="selective", attention="eager")
    arch = architecture("llama", 2)
    listed = list_kept_by_selective(arch, False, make_modules(arch, "bf16", recipe))
    assert_saves("llama", "bf16", recipe, listed)


@sample(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3", "smollm3", "olmo3", "gpt2"])
def test_dropout_saves_its_masks(family: str, mode: str) -> None:
    """A CPU rank then has no fused attention either: scores, their mask and the product of both."""
    arch, recipe = architecture(family, 2), replace(FULL, dropout=0.25)
    listed = list_saved_tensors(arch, is_moe(family), make_modules(arch, mode, recipe))
    assert_saves(family, mode, recipe, listed)


@pytest.mark.parametrize("recipe", [FULL, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("mode", MODES)
def test_dropout_in_eager_attention_saves_its_masks(mode: str, recipe: Recipe) -> None:
    arch, recipe = architecture("llama", 2), replace(recipe, dropout=0.25, attention="eager")
    assert_saves("llama", mode, recipe, list_saved_tensors(arch, False, make_modules(arch, mode, recipe)))


@sample(3)
@pytest.mark.parametrize("targets", [None, ("q_proj", "down_proj"), ("v_proj", "gate_proj", "up_proj")])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", few(["llama", "qwen2"], ["qwen2"]))
def test_adapters_with_dropout_save_an_input_each(
    family: str, mode: str, targets: tuple[str, ...] | None
) -> None:
    arch, recipe = architecture(family, 2), replace(LORA, lora_targets=targets, lora_dropout=0.25)
    assert_saves(family, mode, recipe, list_saved_tensors(arch, False, make_modules(arch, mode, recipe)))


@sample(6)
@pytest.mark.parametrize("mode", few(["bf16", "fp32"], ["bf16"]))
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_with_dropout_save_their_dropped_input_only(family: str, mode: str) -> None:
    """Every family's output projection, and the inputs that it has beside Llama's."""
    arch, recipe = architecture(family, 2), replace(LORA, lora_dropout=0.25)
    listed = list_saved_tensors(arch, is_moe(family), make_modules(arch, mode, recipe))
    assert_saves(family, mode, recipe, listed)


@pytest.mark.parametrize("family", few(["falcon of groups and one norm", "qwen2_moe", "phi"], ["phi"]))
def test_adapters_with_dropout_on_every_projection(family: str) -> None:
    arch = architecture(family, 2)
    targets = tuple(dict.fromkeys(name for i in range(2) for name, _ in arch.layer_linears(i)))
    recipe = replace(LORA, lora_targets=targets, lora_dropout=0.25)
    listed = list_saved_tensors(arch, is_moe(family), make_modules(arch, "bf16", recipe))
    assert_saves(family, "bf16", recipe, listed)


@sample(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
def test_offloaded_activations_are_copied_to_the_host_once(family: str, mode: str) -> None:
    """On a CPU the host's memory is the same: as much as without, and not a copy for each use."""
    arch = architecture(family, 2)
    listed = list_saved_tensors(arch, is_moe(family), make_modules(arch, mode, FULL))
    assert_saves(family, mode, replace(FULL, recompute="offload"), listed)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_with_recompute_interval_2_every_second_layer_is_recomputed(recompute: str) -> None:
    recipe = replace(FULL, recompute=recompute, recompute_interval=2)
    two, four = (kept_bytes(architecture("llama", layers), "bf16", recipe) for layers in (2, 4))
    arch = architecture("llama", 2)
    plan_modules = make_modules(arch, "bf16", FULL)
    kept = arch.hidden_size * 2
    if recompute == "selective":
        kept = sum_bytes_per_token(list_kept_by_selective(arch, False, plan_modules))
    per_token = sum_bytes_per_token(list_saved_tensors(arch, False, plan_modules)) + kept
    assert [more - fewer for fewer, more in zip(two, four, strict=True)] == [
        rows * SEQ_LEN * per_token for rows in (2, 3)
    ]


def test_offloading_changes_no_gradient() -> None:
    arch = architecture("llama", 3)
    ids = torch.randint(1, arch.vocab_size, (2, SEQ_LEN))
    results = []
    for recompute in ("none", "offload"):
        torch.manual_seed(0)
        model = build_model(arch)
        assert apply_recompute(model, recompute, 2) == (2 if recompute == "offload" else 0)
        model(input_ids=ids, labels=ids).loss.backward()
        results.append([p.grad for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("targets", [None, *TARGETS])
@pytest.mark.parametrize("mode", ["bf16", "autocast"])
@pytest.mark.parametrize("family", few(["llama", "qwen3", "qwen2"], ["qwen2"]))
def test_a_layer_with_an_nf4_base_saves_the_listed_tensors(
    monkeypatch: pytest.MonkeyPatch, family: str, mode: str, targets: tuple[str, ...] | None
) -> None:
    """bitsandbytes' own Linears on a CPU, with peft's adapters."""
    bnb = needs("bitsandbytes")

    def with_nf4(model: Any, *others: Any, **options: Any) -> Any:
        for layer in [module for module in model.modules() if isinstance(module, torch.nn.Linear)]:
            if layer is not model.lm_head:
                layer.weight = bnb.nn.Params4bit(
                    layer.weight.data.bfloat16(), requires_grad=False, quant_type="nf4"
                )
                layer.__class__ = bnb.nn.Linear4bit
                layer.compute_dtype, layer.compute_type_is_set = torch.bfloat16, False
                layer.quant_state, layer.quant_storage = None, torch.uint8
                layer.support_avx512bf16_for_cpu = False
                layer.to("cpu")
        return add_adapters(model, *others, **options)

    monkeypatch.setattr(sys.modules[__name__], "add_adapters_of", with_nf4)
    recipe = Recipe(method="qlora", lora_rank=RANK, lora_targets=targets)
    arch = architecture(family, 2)
    predicted = make_modules(arch, mode, recipe)._replace(quantized=True)
    measured = assert_saves(family, mode, recipe, list_saved_tensors(arch, False, predicted))
    assert measured.constant == compute_weight_casts(arch, False, predicted)


@pytest.mark.parametrize("targets", [None, *TARGETS])
@pytest.mark.parametrize("mode", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("family", "dropout"), few([("llama", 0.0), ("qwen3", 0.0), ("qwen2", 0.25)], [("qwen2", 0.25)])
)
def test_a_layer_with_an_int8_base_saves_the_listed_tensors(
    monkeypatch: pytest.MonkeyPatch, family: str, dropout: float, mode: str, targets: tuple[str, ...] | None
) -> None:
    """bitsandbytes' own Linears on a CPU, which keep the same tensors there, with peft's adapters."""
    bnb = needs("bitsandbytes")

    def with_int8(model: Any, *others: Any, **options: Any) -> Any:
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, torch.nn.Linear) and child is not model.lm_head:
                    bias = child.bias
                    layer = bnb.nn.Linear8bitLt(
                        child.in_features, child.out_features, bias is not None, has_fp16_weights=False
                    )
                    layer.weight = bnb.nn.Int8Params(child.weight.data, requires_grad=False)
                    layer.bias = bias
                    setattr(module, name, layer.to("cpu"))
        model.is_loaded_in_8bit = True
        return add_adapters(model, *others, **options)

    monkeypatch.setattr(sys.modules[__name__], "add_adapters_of", with_int8)
    recipe = Recipe(
        method="lora", quantization="int8", lora_rank=RANK, lora_targets=targets, lora_dropout=dropout
    )
    arch = architecture(family, 2)
    predicted = make_modules(arch, mode, recipe)._replace(quantized=True, int8_base=True)
    measured = assert_saves(family, mode, recipe, list_saved_tensors(arch, False, predicted))
    assert compute_weight_casts(arch, False, predicted) == 0
    # The scales, of which forward makes a view: part of the weights, counted with them.
    assert measured.constant == sum(4 * out for _, (out, _) in arch.layer_linears(0))


def test_saved_tensors_of_llama_equal_a_hand_count() -> None:
    """Counted by autograd's own hooks this time, and written out once."""
    counted = []
    for layers in (2, 3):
        arch = architecture("llama", layers)
        model = build_model(arch).to(torch.bfloat16)
        weights = {p.untyped_storage()._cdata for p in model.parameters()}
        storages: dict[int, Any] = {}

        def keep_storage(tensor: Any, into: dict[int, Any] = storages) -> Any:
            into[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
            return tensor

        ids = torch.randint(1, arch.vocab_size, (2, SEQ_LEN))
        with torch.autograd.graph.saved_tensors_hooks(keep_storage, lambda tensor: tensor):
            out = model(input_ids=ids, labels=ids)
        counted.append(sum(s.nbytes() for key, s in storages.items() if key not in weights))
        del out
    h, ffn, heads, kv = arch.hidden_size, arch.intermediate_size, 6, 2
    by_hand = 2 * (4 * h + 4 + 2 * h + 2 * h) + 2 * 2 * heads * 32 + 2 * 2 * kv * 32 + 4 * heads + 8 * ffn
    assert counted[1] - counted[0] == 2 * SEQ_LEN * by_hand
    assert sum_bytes_per_token(list_saved_tensors(arch, False, make_modules(arch, "bf16", FULL))) == by_hand
