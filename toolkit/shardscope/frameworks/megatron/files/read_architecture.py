"""Architecture from Megatron-LM's flags: checked against a known one, or read as a Llama."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shardscope.catalog import models
from shardscope.core.architecture import Architecture
from shardscope.core.errors import refuse, warn_user
from shardscope.core.ops import ceil_div
from shardscope.core.recipe import Recipe
from shardscope.frameworks.formats.documents import Document
from shardscope.frameworks.formats.sidecar_files import FileFields, PlanParts, locate_errors
from shardscope.frameworks.megatron.core_config import MAKE_VOCAB_SIZE_DIVISIBLE_BY, compute_padded_vocab_size
from shardscope.frameworks.megatron.files.arguments import build_architecture_flags, render_layer_pattern

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

SHAPE = (
    *("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "kv-channels", "vocab-size"),
    *("max-position-embeddings", "position-embedding-type", "normalization", "make-vocab-size-divisible-by"),
    *("group-query-attention", "num-query-groups", "swiglu", "disable-bias-linear", "add-qkv-bias"),
    *("qk-layernorm", "untie-embeddings-and-output-weights", "multi-latent-attention", "q-lora-rank"),
    *("kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim", "rope-type", "num-experts"),
    *("moe-router-topk", "moe-ffn-hidden-size", "moe-layer-freq", "moe-token-dispatcher-type"),
    *("moe-shared-expert-intermediate-size", "moe-router-pre-softmax", "moe-grouped-gemm"),
)
"""Flags that describe the architecture."""
ROTARY = "use-rotary-position-embeddings"
"""Older flag for ``--position-embedding-type rope``."""
SIZES = {
    "num_hidden_layers": "num-layers",
    "hidden_size": "hidden-size",
    "intermediate_size": "ffn-hidden-size",
    "num_attention_heads": "num-attention-heads",
    "num_key_value_heads": "num-query-groups",
    "head_dim": "kv-channels",
    "vocab_size": "vocab-size",
    "max_position_embeddings": "max-position-embeddings",
}
"""Architecture field -> the flag with its number."""
NEEDED = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


def check_positions(document: Document, recipe: Recipe, flag_values: FileFields) -> None:
    """Raise ``ValueError`` if the sequence exceeds the positions (validate_args asserts it always)."""
    limit = document.read_number("max-position-embeddings", low=1)
    if limit is not None and recipe.seq_len > limit:
        with locate_errors(document, flag_values):
            allowed = f"at most max_position_embeddings={limit}, as Megatron-LM asserts"
            refuse("Recipe.seq_len", recipe.seq_len, allowed, f"--seq-length {limit}")


def read_sizes(document: Document, parts: PlanParts) -> FileFields:
    """Return architecture field -> (flag, number), for errors that name the flag.

    With a known architecture the numbers are not validated here: :func:`read_architecture` compares them.
    """
    known = parts.architecture is not None
    return {
        field: ((flag,), document.get(flag) if known else document.read_number(flag, low=1))
        for field, flag in SIZES.items()
    }


def read_architecture(document: Document, parts: PlanParts, flag_values: FileFields) -> Architecture:
    """Return the known architecture if the flags agree with it, else the Llama that they describe."""
    if parts.architecture is None:
        return _build_llama(document, flag_values)
    # Compare each flag of the shape with the one that an export of the architecture would write.
    shape = build_architecture_flags(parts.architecture)
    # validate_args sets the type to rope then, whatever it is.
    is_rotary = document.get(ROTARY) is True
    if is_rotary and shape["position-embedding-type"] != "rope":
        allowed = f"nothing: {parts.architecture.name} has no rotary positions"
        document.refuse((ROTARY,), allowed, "leave it out")
    for flag in SHAPE:
        if flag == "position-embedding-type" and is_rotary:
            continue
        value, planned_value = document.get(flag), shape.get(flag, _MISSING)
        if flag == "moe-layer-freq" and planned_value is not _MISSING:
            value = _expand_layer_freq(value, parts.architecture)
        # Megatron-LM ignores it then; so does it for the width of heads with latent attention, which has its
        # own (megatron-core, multi_latent_attention.py).
        if flag == "num-query-groups" and not document.get("group-query-attention"):
            continue
        # The order of softmax and top-k, which is in NVIDIA's arguments of DeepSeek-V3, changes no size.
        if flag == "moe-router-pre-softmax" and value is True and "num-experts" in shape:
            continue
        if flag == "kv-channels" and parts.architecture.latent_attention is not None and parts.layout is None:
            continue
        default = _find_default(flag, document, parts.architecture) if value is None else None
        if value is None and (planned_value is _MISSING or (flag in _OPTIONAL_FLAGS and default is None)):
            continue
        # An export writes None for a flag without a value, which the document has as True.
        expected = True if planned_value is None else planned_value
        if expected == (default if value is None else value):
            continue
        is_free = _may_differ(flag, parts.architecture) or (
            flag == "vocab-size" and _is_unpadded(value, expected)
        )
        if not (is_free and parts.layout is None):
            name = parts.architecture.name
            if expected is _MISSING:
                refuse(document.locate(flag), value, f"nothing: {name} has no such part", "leave it out")
            fix = f"--{flag}" if expected is True else f"--{flag} {expected}"
            allowed = f"{expected!r}, as {name} has"
            if default is not None:
                allowed += f"; Megatron-LM's default is {default!r}"
            refuse(document.locate(flag), value, allowed, fix)
    return parts.architecture


def _find_default(flag: str, document: Document, architecture: Architecture) -> object:
    """Return what Megatron-LM takes for a missing flag of the shape; None: nothing, or no part of the model.

    Source: megatron/training/arguments.py. Of biases, ``validate_args`` and megatron-core's attention.py.
    """
    if flag == "normalization":
        return "LayerNorm"
    if flag == "position-embedding-type":
        return "learned_absolute"
    if flag == "add-qkv-bias":
        return None if document.get("disable-bias-linear") else True
    if flag == "num-query-groups":
        return 1
    # Experts have a width of their own, and latent attention has sizes of heads of its own.
    if flag == "ffn-hidden-size" and architecture.mixture_of_experts is None:
        width = architecture.hidden_size
        return int(4 * width * 2 / 3 / 64) * 64 if document.get("swiglu") else 4 * width
    if flag == "kv-channels" and architecture.latent_attention is None:
        return architecture.hidden_size // architecture.num_attention_heads
    return None


def check_padding(document: Document, plan: Plan) -> None:
    """Warn of an embedding padded to another number of rows than the plan's."""
    flag = "make-vocab-size-divisible-by"
    divisor = document.read_number(flag, low=1)
    if divisor in (None, MAKE_VOCAB_SIZE_DIVISIBLE_BY):
        return
    tp = plan.degrees.tp
    vocab_size = document.read_number("vocab-size", low=1) or plan.architecture.vocab_size
    num_rows = ceil_div(vocab_size, divisor * tp) * divisor * tp
    planned_rows = compute_padded_vocab_size(plan.architecture.vocab_size, tp)
    if num_rows != planned_rows:
        warn_user(
            f"{document.locate(flag)} is {divisor}: Megatron-LM pads the embedding to {num_rows:,} rows with "
            f"tp={tp}; the plan has {planned_rows:,}, as with {MAKE_VOCAB_SIZE_DIVISIBLE_BY}.",
            UserWarning,
        )


def check_grouped_experts(document: Document, plan: Plan) -> None:
    """Warn of experts that Megatron-LM runs one after the other (``SequentialMLP``), its default."""
    experts = plan.architecture.mixture_of_experts
    has_several = experts is not None and experts.num_experts > plan.degrees.ep
    if has_several and not document.get("moe-grouped-gemm"):
        warn_user(
            f"{document.locate('moe-grouped-gemm')} is missing: Megatron-LM then computes one expert "
            "after the other. Memory and step time are predicted for all experts of a rank at once.",
            UserWarning,
        )


def _expand_layer_freq(value: object, architecture: Architecture) -> object:
    """Return the pattern of layers for ``--moe-layer-freq``: N, one with experts in N, or a Python list.

    Other values are returned unchanged. The default is 1 (megatron/training/arguments.py, ``moe_freq_type``).
    """
    if isinstance(value, str) and _LAYER_PATTERN.fullmatch(text := value.replace(" ", "").strip("()")):
        layers: list[bool] = []
        for items, _, count in _LAYER_RUN.findall(text):
            run = [item != "0" for item in items.split(",")]
            layers += run * min(int(count or 1), architecture.num_hidden_layers + 1)
        return render_layer_pattern(layers)
    interval = 1 if value is None else value
    if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
        return value
    return render_layer_pattern(index % interval == 0 for index in range(architecture.num_hidden_layers))


_MISSING = object()
_OPTIONAL_FLAGS = frozenset({
    "vocab-size", "make-vocab-size-divisible-by", "max-position-embeddings", "ffn-hidden-size", "kv-channels",
    "moe-token-dispatcher-type", "moe-ffn-hidden-size", "moe-grouped-gemm", "rope-type",
})  # fmt: skip
"""Flags that a user's command line may omit in favor of a tokenizer or another flag."""
_FREE_FLAGS = frozenset({
    "make-vocab-size-divisible-by", "moe-token-dispatcher-type", "moe-grouped-gemm", "rope-type",
})  # fmt: skip
"""Flags that may differ from the architecture's: :func:`check_padding` warns of the first one's effect."""
_LAYER_RUN = re.compile(r"\[([01](?:,[01])*)\](\*(\d{1,6}))?")
_LAYER_PATTERN = re.compile(rf"{_LAYER_RUN.pattern}(?:\+{_LAYER_RUN.pattern})*")
"""A sum of lists of layers, dense (0) and with experts (1): ``[0]*3+[1]*58``, with or without brackets."""
_PADDING = 0.02
"""Largest share of an embedding that is padding: tokenizers of Qwen 2.5 have 151,665 entries of 152,064."""


def _may_differ(flag: str, architecture: Architecture) -> bool:
    """Return whether a flag may differ from the architecture's.

    Rotary positions may be fewer in training, or scaled; learned ones are parameters.
    """
    if flag == "max-position-embeddings":
        return architecture.position_embedding == "rope"
    return flag in _FREE_FLAGS


def _is_unpadded(value: object, vocab_size: object) -> bool:
    """Return whether ``value`` is a tokenizer's own size, which the architecture's embedding exceeds."""
    if not isinstance(value, int) or not isinstance(vocab_size, int):
        return False
    return vocab_size * (1 - _PADDING) <= value <= vocab_size


def _suggest_architecture(document: Document) -> str:
    """Return the argument with the nearest model of the catalogue, or else with a Llama."""
    sizes = {field: document.get(flag) for field, flag in SIZES.items() if document.get(flag) is not None}
    experts = document.get("num-experts")
    num_equal: dict[str, int] = {"llama-3.1-8b": 0}
    for name, model in models.items():
        equal = {field for field, size in sizes.items() if getattr(model, field) == size}
        num_experts = model.mixture_of_experts.num_experts if model.mixture_of_experts else None
        if equal >= {"num_hidden_layers", "hidden_size"} and num_experts == experts:
            num_equal[name] = len(equal)
    return f'architecture=ss.models["{max(num_equal, key=num_equal.__getitem__)}"]'


def _build_llama(document: Document, flag_values: FileFields) -> Architecture:
    """Build a dense decoder with SwiGLU, RMSNorm and rotary positions, without biases, from the flags."""
    fix = _suggest_architecture(document)
    # A flag without a value is True in the document.
    of_llama = {
        "swiglu": True,
        "disable-bias-linear": True,
        "normalization": "RMSNorm",
        "position-embedding-type": "rope",
        **dict.fromkeys(("num-experts", "multi-latent-attention", "add-qkv-bias", "qk-layernorm")),
    }
    for flag, value in of_llama.items():
        is_rotary = flag == "position-embedding-type" and document.get(ROTARY) is True
        if document.get(flag) != value and not is_rotary:
            wanted = "" if value is True else f" {value}"
            has = f"has --{flag}{wanted}" if value else f"is without --{flag}"
            allowed = (
                f"an Architecture: flags alone are read as a Llama, which {has}, and there is no plan.json "
                "in their folder"
            )
            refuse("architecture", None, allowed, fix)
    sizes = {field: document.read_number(flag, low=1) for field, flag in SIZES.items()}
    for field in NEEDED:
        if sizes[field] is None:
            where = f"{document.name}, --{SIZES[field]}"
            refuse(where, None, "a number, or architecture=...", fix)
    numbers = {field: size for field, size in sizes.items() if size is not None}
    # Megatron-LM's defaults (megatron/training/arguments.py): without --group-query-attention every head has
    # its own keys and values, with it --num-query-groups is 1; heads divide the hidden size.
    heads = numbers["num_attention_heads"]
    is_grouped = document.get("group-query-attention")
    with locate_errors(document, flag_values):
        return Architecture(
            name=document.name,
            model_type="llama",
            tie_word_embeddings=not document.get("untie-embeddings-and-output-weights"),
            num_hidden_layers=numbers["num_hidden_layers"],
            hidden_size=numbers["hidden_size"],
            intermediate_size=numbers["intermediate_size"],
            num_attention_heads=heads,
            num_key_value_heads=numbers.get("num_key_value_heads", 1) if is_grouped else heads,
            head_dim=numbers.get("head_dim", numbers["hidden_size"] // heads),
            vocab_size=numbers["vocab_size"],
            max_position_embeddings=numbers.get("max_position_embeddings", 4096),
        )
