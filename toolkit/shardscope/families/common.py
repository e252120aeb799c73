"""Reader of one config.json: keys with their allowed ranges, and fields that many families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypedDict

from shardscope.core.errors import Value, check_flag, check_integer, refuse
from shardscope.core.size_limits import LIMITS


class Fields(TypedDict, total=False):
    """Fields of an ``Architecture`` except ``name`` and ``model_type``, as its ``from_dict`` reads them."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    gated_mlp: bool
    norm: Literal["rmsnorm", "layernorm"]
    norms_per_layer: int
    parallel_residual: bool
    new_decoder_architecture: bool
    qk_norm: bool
    position_embedding: Literal["rope", "learned", "alibi"]
    sliding_window: int | None
    sliding_window_layers: int
    mixture_of_experts: Mapping[str, object]
    latent_attention: Mapping[str, object]


class HfConfig:
    """Keys of one config.json; null is the same as a missing key, as in transformers."""

    def __init__(self, data: Mapping[str, object]) -> None:
        self.data = data

    def get(self, *keys: str, default: object = None) -> object:
        """Return the value of the first key present (later ones are aliases), else ``default``."""
        return next((self.data[key] for key in keys if self.data.get(key) is not None), default)

    def read_size(self, *keys: str, limit: str, default: int | None = None) -> int:
        """Return a size. Raises ``ValueError`` if it is out of range or missing without a ``default``."""
        low, high = LIMITS[limit]
        present = [key for key in keys if self.data.get(key) is not None]
        key = present[0] if present else None
        for alias in present[1:]:
            # transformers takes the last one set, so that the order of the keys would decide.
            if self.data[alias] != self.data[present[0]]:
                refuse(
                    f"config.json {alias}",
                    self.data[alias],
                    f"the same as {key}={self.data[present[0]]!r}, its other name",
                    f"remove one of {key!r} and {alias!r}",
                )
        if key is None and default is None:
            refuse(
                f"config.json {keys[0]}",
                None,
                f"a whole number from {low:,} to {high:,}",
                f"add the key {keys[0]!r}",
            )
        value = default if key is None else self.data[key]
        return check_integer(f"config.json {key or keys[0]}", value, low=low, high=high)

    def read_flag(self, key: str, default: bool) -> bool:
        """Return a boolean. Raises ``ValueError`` for other values."""
        return check_flag(f"config.json {key}", self.get(key, default=default))


def read_sizes(
    config: HfConfig,
    *,
    kv_heads: int | None,
    positions: int,
    heads: int | None = None,
    vocabulary: int | None = None,
) -> Fields:
    """Return the sizes with common key names, by the given defaults.

    ``kv_heads`` None: as many as query heads by default; ``heads`` and ``vocabulary`` None: required keys.
    """
    hidden = config.read_size("hidden_size", limit="hidden_size")
    heads = config.read_size("num_attention_heads", limit="num_attention_heads", default=heads)
    # A missing key takes the class's default, but null means one key/value head for each query head
    # (transformers 5.24, e.g. configuration_mistral.py, __post_init__).
    is_null = config.data.get("num_key_value_heads", heads) is None
    default_kv = heads if kv_heads is None or is_null else kv_heads
    return {
        "hidden_size": hidden,
        "intermediate_size": config.read_size("intermediate_size", limit="intermediate_size"),
        "num_hidden_layers": config.read_size("num_hidden_layers", limit="num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": config.read_size(
            "num_key_value_heads", limit="num_key_value_heads", default=default_kv
        ),
        "head_dim": config.read_size("head_dim", limit="head_dim", default=max(1, hidden // heads)),
        "vocab_size": config.read_size("vocab_size", limit="vocab_size", default=vocabulary),
        "max_position_embeddings": config.read_size(
            "max_position_embeddings", limit="max_position_embeddings", default=positions
        ),
        "tie_word_embeddings": config.read_flag("tie_word_embeddings", False),
    }


def check_even_heads(fields: Fields) -> None:
    """Raise ``ValueError``, as transformers does, unless the heads divide hidden_size.

    Source: LlamaConfig, Gemma2Config, GPT2Attention.
    """
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    if hidden % heads:
        refuse("config.json hidden_size", hidden, f"a multiple of num_attention_heads={heads}",
               Value(max(1, round(hidden / heads)) * heads))  # fmt: skip


def read_window(
    config: HfConfig, fields: Fields, *, default: int | None, layers: Callable[[int], int]
) -> Fields:
    """Return ``fields`` with the sliding window: its tokens and number of layers.

    ``default`` are its tokens if the key is missing; null disables the window. ``layers`` returns the number
    of layers with a window for a number of layers, if the config has no ``layer_types``.
    """
    # data.get instead of get: null disables the window, while a missing key takes the default.
    if config.data.get("sliding_window", default) is None:
        return fields
    tokens = config.read_size("sliding_window", limit="max_position_embeddings", default=default)
    types = config.get("layer_types")
    total = fields["num_hidden_layers"]
    count = layers(total)
    # A list of layer types in the file overrides the class's rule, which only fills in a missing list
    # (transformers 5.24, e.g. configuration_qwen2.py, __post_init__).
    if isinstance(types, list | tuple):
        count = sum(kind == "sliding_attention" for kind in types[:total])
    return {**fields, "sliding_window": tokens if count else None, "sliding_window_layers": count}


def read_bias(config: HfConfig, default: bool = False) -> Fields:
    """Return bias fields of families whose ``attention_bias`` is that of all four projections."""
    has_bias = config.read_flag("attention_bias", default)
    return {"attention_bias": has_bias, "attention_output_bias": has_bias}


def reject_flag(config: HfConfig, key: str, why: str) -> None:
    """Raise ``ValueError`` for a flag that makes the model something other than a causal decoder."""
    if config.read_flag(key, False):
        refuse(
            f"config.json {key}",
            True,
            f"False, because {why}",
            Value(False),
        )
