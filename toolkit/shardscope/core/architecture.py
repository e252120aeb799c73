"""Model architecture: exact parameter counts and model FLOPs, in closed form and without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple, Self, overload

import numpy as np
import numpy.typing as npt

from shardscope.core.errors import (
    Value,
    add_article,
    check_choice,
    check_flag,
    check_integer,
    check_mapping,
    check_printable,
    refuse,
)
from shardscope.core.fixes import refuse_unknown_keywords
from shardscope.core.layer_parts import LatentAttention, MixtureOfExperts
from shardscope.core.serialization import Serializable, read_parts
from shardscope.core.size_limits import LIMITS, check_size, check_size_field
from shardscope.families import parameter_shapes
from shardscope.families.parameter_shapes import LAYER_GROUPS, Parameter
from shardscope.families.registry import FAMILIES, find_family
from shardscope.families.rules import check_family

__all__ = ["LIMITS", "MODEL_TYPES", "Architecture", "LatentAttention", "MixtureOfExperts"]

MODEL_TYPES = tuple(FAMILIES)
"""Hugging Face's ``model_type`` values whose layers are known exactly."""

TokenArray = npt.NDArray[np.int64] | npt.NDArray[np.float64]
Tokens = int | TokenArray


@refuse_unknown_keywords
@dataclass(frozen=True, kw_only=True)
class Architecture(Serializable):
    """The shape of a decoder-only language model, with the field names of Hugging Face configs.

    Create one with :meth:`from_hf`, :meth:`of_size` or ``ss.models[name]``. Every field is validated alone
    and against the others. Raises ``ValueError`` with the field, the value, what is allowed and the fix.
    """

    name: str
    """Display name."""
    model_type: str
    """Hugging Face's family name, one of :data:`MODEL_TYPES`; sets how parameters are named and fused."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Inner width of a dense layer's MLP."""
    num_hidden_layers: int
    """Decoder layers."""
    num_attention_heads: int
    """Query heads."""
    num_key_value_heads: int
    """Key and value heads; fewer than the query heads with grouped-query attention."""
    head_dim: int
    """Width of one head; with latent attention, of its rotary part, as in transformers."""
    vocab_size: int
    """Rows of the embedding, padding rows included."""
    max_position_embeddings: int
    """Longest supported sequence, in tokens."""
    tie_word_embeddings: bool = False
    """Whether ``lm_head`` shares the embedding's weight, which is then counted once."""
    attention_bias: bool = False
    """Whether the query, key and value projections have biases (q_a and kv_a with latent attention)."""
    attention_output_bias: bool = False
    """Whether the attention's output projection has a bias."""
    mlp_bias: bool = False
    """Whether the MLP's projections have biases."""
    gated_mlp: bool = True
    """Whether the MLP multiplies two up-projections (SwiGLU, GeGLU): three matrices instead of two."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Type of all norms; ``layernorm`` has a bias in addition to its weight."""
    norms_per_layer: int = 2
    """Norms of width hidden_size in each layer: 2, 1 if attention and MLP share one (Phi-2, Falcon-7B), or 4
    if their outputs are normalized too (Gemma 2 and 3, GLM-4)."""
    parallel_residual: bool = False
    """Whether attention and MLP run in parallel on the same input (GPT-NeoX, Falcon, Phi-2)."""
    new_decoder_architecture: bool = False
    """Falcon's grouped-query attention (40B and later): keys and values are repeated for all queries."""
    qk_norm: bool = False
    """Whether queries and keys are normalized: over head_dim with one weight for all heads (Qwen 3), or over
    all heads together (OLMo 2)."""
    position_embedding: Literal["rope", "learned", "alibi"] = "rope"
    """``learned`` positions are parameters and limit the sequence length; ``alibi`` is used by Falcon-RW."""
    sliding_window: int | None = None
    """Tokens in the attention window, the current one included; None: all layers use full attention."""
    sliding_window_layers: int = 0
    """Number of layers with sliding-window attention."""
    mixture_of_experts: MixtureOfExperts | None = None
    """The routed experts; None for a dense model."""
    latent_attention: LatentAttention | None = None
    """Multi-head latent attention (DeepSeek-V3); None for ordinary attention."""

    def __post_init__(self) -> None:
        check_printable("Architecture.name", self.name, Value("my-model"))
        check_choice("Architecture.model_type", self.model_type, MODEL_TYPES)
        # Each field alone first: the checks of combinations below assume valid numbers.
        for field in (
            "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings",
        ):  # fmt: skip
            check_size_field("Architecture", self, field)
        for field in (
            "tie_word_embeddings", "attention_bias", "attention_output_bias", "mlp_bias", "gated_mlp",
            "qk_norm", "parallel_residual", "new_decoder_architecture",
        ):  # fmt: skip
            check_flag(f"Architecture.{field}", getattr(self, field))
        check_choice("Architecture.norm", self.norm, ("rmsnorm", "layernorm"))
        check_choice("Architecture.norms_per_layer", self.norms_per_layer, (2, 1, 4))
        self._check_window()
        self._check_heads()
        self._check_parts()
        check_family(self)

    def _check_window(self) -> None:
        layers = self.num_hidden_layers
        check_integer("Architecture.sliding_window_layers", self.sliding_window_layers, low=0, high=layers)
        if self.sliding_window is not None:
            check_size("Architecture.sliding_window", self.sliding_window, "max_position_embeddings")
        elif self.sliding_window_layers:
            allowed = "a whole number of tokens while sliding_window_layers is not 0"
            refuse("Architecture.sliding_window", None, allowed, {"sliding_window_layers": 0})

    def _check_heads(self) -> None:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        # Each key/value head serves an equal group of query heads (transformers 5.24, modeling_llama.py,
        # LlamaAttention.num_key_value_groups).
        if heads % kv_heads:
            fix = max(d for d in range(1, min(kv_heads, heads) + 1) if heads % d == 0)
            allowed = f"a divisor of num_attention_heads={heads}"
            refuse("Architecture.num_key_value_heads", kv_heads, allowed, {"num_key_value_heads": fix})

    def _check_parts(self) -> None:
        for field, kind in (("mixture_of_experts", MixtureOfExperts), ("latent_attention", LatentAttention)):
            value = getattr(self, field)
            if value is not None and not isinstance(value, kind):
                refuse(f"Architecture.{field}", value, f"None or {add_article(kind.__name__)}", Value(None))
        moe = self.mixture_of_experts
        if moe is None:
            return
        layers = self.num_hidden_layers
        check_integer("MixtureOfExperts.first_k_dense_replace", moe.first_k_dense_replace, low=0, high=layers)

    # ---------------------------------------------------------------------------------- constructors

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Self:
        """Create one from ``to_dict``'s output. Raises ``ValueError`` for unknown, missing or bad values."""
        check_mapping(cls.__name__, data)
        # The data does not name its class; only UnknownFamily has the field ``config_json``.
        if cls is Architecture and "config_json" in data:
            from shardscope.families.unknown import UnknownFamily  # circular import

            return UnknownFamily.from_dict(data)  # type: ignore[return-value]
        kinds = {"mixture_of_experts": MixtureOfExperts, "latent_attention": LatentAttention}
        return super().from_dict(read_parts(data, kinds))

    @classmethod
    def from_hf(
        cls, config: str | Path | Mapping[str, object], *, rehearse_only: bool = False
    ) -> Architecture:
        """Read a Hugging Face ``config.json``.

        ``config`` is a path to the file, its folder, its contents as a dict, or a Hub id ("org/name"; the
        download needs ``pip install "shardscope[train]"``, and weights are never downloaded). Of a multimodal
        checkpoint's file it is the language model, if that is of a known family: ``Finetune`` trains that
        alone. Missing keys take the family's defaults in transformers. Raises ``ValueError`` for missing or
        out-of-range sizes, an unknown ``model_type``, and a file that is not a JSON object, has duplicate
        keys, or exceeds 1 MB.

        ``rehearse_only=True`` accepts any ``model_type`` of the installed transformers (``train`` extra).
        Plans of families without formulas support ``plan.rehearse()`` but not ``plan.memory()``.
        """
        from shardscope.families import hf_config  # circular import

        check_flag("rehearse_only", rehearse_only)
        return hf_config.read_architecture(config, rehearse_only)

    @classmethod
    def of_size(cls, size: str) -> Architecture:
        """Create a Llama-shaped decoder of ``size`` parameters within 3 %: "2m", "350m", "1.3b", "1t".

        Raises ``ValueError`` for other text and for sizes outside 1m to 10t.
        """
        from shardscope.core import model_of_size  # circular import

        return model_of_size.build_model_of_size(size)

    # -------------------------------------------------------------------------------------- parameters

    def is_moe_layer(self, layer_index: int) -> bool:
        """Return whether decoder layer ``layer_index`` (from 0) has routed experts instead of a dense MLP."""
        self._check_layer(layer_index)
        moe = self.mixture_of_experts
        # first_k_dense_replace as in DeepseekV3DecoderLayer; mlp_only_layers and decoder_sparse_step as in
        # Qwen3MoeDecoderLayer (transformers 5.24).
        return (
            moe is not None
            and layer_index >= moe.first_k_dense_replace
            and layer_index not in moe.mlp_only_layers
            and (layer_index + 1) % moe.decoder_sparse_step == 0
        )

    @cached_property
    def num_moe_layers(self) -> int:
        """Decoder layers with routed experts."""
        if self.mixture_of_experts is None:
            return 0
        return sum(self.is_moe_layer(index) for index in range(self.num_hidden_layers))

    def layer_shapes(self, layer_index: int) -> tuple[Parameter, ...]:
        """Return ``(group, name, shape)`` of one decoder layer's parameters, with transformers' names."""
        return self._get_layer(self.is_moe_layer(layer_index))

    @cached_property
    def outer_shapes(self) -> tuple[Parameter, ...]:
        """``(group, name, shape)`` of each parameter outside the decoder layers; tied weights appear once."""
        return parameter_shapes.list_outer_parameters(self)

    def layer_parameters(self, layer_index: int) -> Mapping[str, int]:
        """Return the parameter counts of one decoder layer by non-empty group (:data:`LAYER_GROUPS`)."""
        return self._get_layer_counts(self.is_moe_layer(layer_index)).everything

    def layer_matrix_parameters(self, layer_index: int) -> Mapping[str, int]:
        """Return :meth:`layer_parameters` of matrices only, which tensor parallelism shards."""
        return self._get_layer_counts(self.is_moe_layer(layer_index)).matrices

    @cached_property
    def lora_shapes(self) -> tuple[tuple[str, tuple[int, int]], ...]:
        """Distinct ``(target, (out_features, in_features))`` of all Linears that LoRA can wrap."""
        kinds = dict.fromkeys(self.is_moe_layer(index) for index in range(self.num_hidden_layers))
        return tuple(dict.fromkeys(linear for moe in kinds for linear in self._list_linears(moe)))

    def layer_linears(self, layer_index: int) -> tuple[tuple[str, tuple[int, int]], ...]:
        """Return ``(target, (out_features, in_features))`` of one layer's Linears that LoRA can wrap."""
        return self._list_linears(self.is_moe_layer(layer_index))

    @cached_property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding."""
        return self.vocab_size * self.hidden_size

    @cached_property
    def position_embedding_parameters(self) -> int:
        """Parameters of learned positions; 0 for other position embeddings."""
        return self.max_position_embeddings * self.hidden_size if self.position_embedding == "learned" else 0

    @cached_property
    def final_norm_parameters(self) -> int:
        """Parameters of the norm before ``lm_head``."""
        return sum(math.prod(p.shape) for p in self.outer_shapes if p.group == "norm")

    @cached_property
    def lm_head_parameters(self) -> int:
        """Parameters of the output projection, without its matrix if that is tied to the embedding."""
        return sum(math.prod(p.shape) for p in self.outer_shapes if p.group == "lm_head")

    @cached_property
    def parameter_groups(self) -> Mapping[str, int]:
        """Read-only parameter counts by non-empty group; they sum to :attr:`num_parameters`."""
        groups = {
            "embedding": self.embedding_parameters,
            "position_embedding": self.position_embedding_parameters,
            **dict.fromkeys(LAYER_GROUPS, 0),
            "lm_head": self.lm_head_parameters,
        }
        moe_layers = self.num_moe_layers
        for moe, layers in ((False, self.num_hidden_layers - moe_layers), (True, moe_layers)):
            if layers:
                for group, count in self._get_layer_counts(moe).everything.items():
                    groups[group] += layers * count
        groups["norm"] += self.final_norm_parameters
        return MappingProxyType({group: count for group, count in groups.items() if count})

    @cached_property
    def num_parameters(self) -> int:
        """``sum(p.numel() for p in model.parameters())`` in transformers: no buffers, tied weights once."""
        return sum(self.parameter_groups.values())

    @cached_property
    def num_active_parameters(self) -> int:
        """Parameters that one token uses: all but the routed experts that it is not sent to."""
        moe, experts = self.mixture_of_experts, self.parameter_groups.get("experts", 0)
        if moe is None:
            return self.num_parameters
        # The router and shared experts run for every token; routed experts all have the same size.
        return self.num_parameters - experts // moe.num_experts * (moe.num_experts - moe.num_experts_per_tok)

    # ------------------------------------------------------------------------------------------ FLOPs

    @cached_property
    def matrix_parameters_per_token(self) -> int:
        """Parameters of all matmuls of one token: ``lm_head`` even if tied, no embedding lookups."""
        moe_layers, total = self.num_moe_layers, self.vocab_size * self.hidden_size
        for moe, layers in ((False, self.num_hidden_layers - moe_layers), (True, moe_layers)):
            if layers:
                for group, count in self._get_layer_counts(moe).matrices.items():
                    # A token is multiplied by its top-k experts only.
                    if group == "experts" and self.mixture_of_experts is not None:
                        experts = self.mixture_of_experts
                        count = count // experts.num_experts * experts.num_experts_per_tok
                    total += layers * count
        return total

    @overload
    def flops_per_token(self, seq_len: int, causal: bool = True) -> float: ...
    @overload
    def flops_per_token(self, seq_len: TokenArray, causal: bool = True) -> npt.NDArray[np.float64]: ...
    def flops_per_token(self, seq_len: Tokens, causal: bool = True) -> float | npt.NDArray[np.float64]:
        """Return the forward and backward model FLOPs of one token in a sequence of ``seq_len`` tokens.

        ``seq_len`` may be an array; the result has its shape. Matrices: 6 per parameter and token, 2 forward
        and 4 backward (Kaplan et al. 2020, arXiv:2001.08361, section 2.1). Attention scores: 6 x keys x heads
        x (qk_head_dim + v_head_dim) in each layer. When both widths are equal, that is PaLM's 12 L H Q T
        (arXiv:2204.02311, appendix B) and the attention term of Narayanan et al. 2021 (arXiv:2104.04473,
        equation 3). Those count all keys of the sequence (``causal=False``); a causal mask halves them. A
        sliding window limits the keys per query. Recomputation, norms, biases, softmax and the embedding
        lookup are not counted.

        Raises ``ValueError`` unless ``seq_len`` is a whole number of tokens from 1 to 2**40.
        """
        check_flag("causal", causal)
        tokens = _check_tokens(seq_len)
        latent = self.latent_attention
        # Two matmuls per key: scores over the width of a query, then their product with the values.
        width = latent.qk_head_dim + latent.v_head_dim if latent else 2 * self.head_dim
        sliding = self.sliding_window_layers
        keys = (self.num_hidden_layers - sliding) * (tokens / 2 if causal else tokens)
        if sliding:
            window = np.minimum(tokens, float(self.sliding_window or 0))
            # The first `window` tokens attend to all tokens up to themselves, later ones to a full window.
            keys = keys + sliding * (window - window * window / (2 * tokens) if causal else window)
        flops = 6.0 * self.matrix_parameters_per_token + 6.0 * self.num_attention_heads * width * keys
        return flops if isinstance(seq_len, np.ndarray) else float(flops)

    # --------------------------------------------------------------------------------------- internals

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Cached: the architecture is a cache key of every formula, and hashing thirty fields is slow.
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def __reduce__(self) -> tuple[object, ...]:
        # Only the fields: cached properties contain MappingProxyType, which pickle and copy reject.
        return type(self).from_dict, (self.to_dict(),)

    def _get_layer(self, moe: bool) -> tuple[Parameter, ...]:
        return self._moe_layer if moe else self._dense_layer

    @cached_property
    def _moe_layer(self) -> tuple[Parameter, ...]:
        return parameter_shapes.list_layer_parameters(self, True)

    @cached_property
    def _dense_layer(self) -> tuple[Parameter, ...]:
        return parameter_shapes.list_layer_parameters(self, False)

    def _get_layer_counts(self, moe: bool) -> _ParameterCounts:
        return self._moe_layer_counts if moe else self._dense_layer_counts

    @cached_property
    def _moe_layer_counts(self) -> _ParameterCounts:
        return _count_by_group(self._get_layer(True))

    @cached_property
    def _dense_layer_counts(self) -> _ParameterCounts:
        return _count_by_group(self._get_layer(False))

    def _list_linears(self, moe: bool) -> tuple[tuple[str, tuple[int, int]], ...]:
        conv1d = find_family(self).projections == "conv1d"
        targets = (parameter_shapes.get_lora_target(parameter, conv1d) for parameter in self._get_layer(moe))
        return tuple(target for target in targets if target is not None)

    def _check_layer(self, layer_index: int) -> None:
        if type(layer_index) is not int or not 0 <= layer_index < self.num_hidden_layers:
            check_integer("layer_index", layer_index, low=0, high=self.num_hidden_layers - 1)


class _ParameterCounts(NamedTuple):
    """Parameter counts of one decoder layer, by group."""

    everything: Mapping[str, int]
    matrices: Mapping[str, int]


def _count_by_group(parameters: tuple[Parameter, ...]) -> _ParameterCounts:
    everything: dict[str, int] = {}
    matrices: dict[str, int] = {}
    for parameter in parameters:
        size = math.prod(parameter.shape)
        everything[parameter.group] = everything.get(parameter.group, 0) + size
        if not parameter_shapes.is_vector(parameter):
            matrices[parameter.group] = matrices.get(parameter.group, 0) + size
    return _ParameterCounts(MappingProxyType(everything), MappingProxyType(matrices))


def _check_tokens(seq_len: object) -> float | npt.NDArray[np.float64]:
    """Return ``seq_len`` in floating point, so that squares of long sequences do not overflow."""
    if not isinstance(seq_len, np.ndarray):
        return float(check_integer("seq_len", seq_len, low=1, high=2**40))
    is_number = seq_len.dtype.kind in "iuf" and seq_len.size
    if not is_number or not np.all((seq_len >= 1) & (seq_len <= 2**40)):
        refuse("seq_len", seq_len, f"numbers of tokens from 1 to {2**40:,}", "np.array([4096])")
    return seq_len.astype(np.float64)
