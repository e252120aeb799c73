"""Mapping between the parameters of transformers and those of Megatron's ``GPTModel``.

Transformers names are those of ``model.state_dict()``. Megatron names are those of its local modules
(``get_gpt_layer_local_spec``); ``weights/load.py`` translates Transformer Engine's names. Imports no torch,
so that a plan can be rejected before any rank starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from shardscope.core.errors import refuse
from shardscope.families.parameter_names import list_norm_names, list_parameter_names
from shardscope.families.registry import find_family, list_families_with
from shardscope.frameworks.megatron.families import check_family

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture

MAPPED_FAMILIES = list_families_with("megatron_weights")
"""Families whose weights can be loaded into a ``GPTModel`` and exported again."""

Sharding = Literal["whole", "rows", "columns", "vocabulary", "qkv", "gated"]
"""How tensor parallelism shards a Megatron parameter, and how transformers parameters are fused into it.

``whole``: replicated on every rank. ``rows``, ``columns``: sharded evenly in the first or second dimension.
``vocabulary``: padded with zeros to a multiple of 128 x tp rows, then sharded by rows. ``qkv``: queries, keys
and values are interleaved by key-value head, then sharded by rows. ``gated``: gate and up are each sharded by
rows, and a rank holds its gate shard stacked on its up shard.
"""


class ParameterMapping(NamedTuple):
    """One Megatron parameter and the transformers parameters that it is built from."""

    megatron: str
    """Megatron's name, relative to the layer or to the expert."""
    hf: tuple[str, ...]
    """Transformers names in order, relative to the layer. A single ``qkv`` or ``gated`` name is fused too."""
    sharding: Sharding
    transposed: bool = False
    """Whether transformers stores it (in, out), as GPT-2's Conv1D does."""


def check_mapped(arch: Architecture) -> None:
    """Raise ``ValueError`` for a model without a weight mapping, naming an engine that trains it."""
    check_family(arch)
    if arch.model_type not in MAPPED_FAMILIES:
        refuse(
            "Architecture.model_type",
            arch.model_type,
            f"{', '.join(map(repr, MAPPED_FAMILIES))} to train with Megatron-core: there is no "
            "mapping of this family's weights to its GPTModel",
            {"layout": "fsdp2"},
        )
    if arch.attention_output_bias != arch.mlp_bias:
        refuse(
            "Architecture.mlp_bias",
            arch.mlp_bias,
            f"{arch.attention_output_bias} like attention_output_bias to train with Megatron-core: its "
            "add_bias_linear gives both a bias, or neither",
            {"layout": "fsdp2"},
        )


def get_layer_prefix(arch: Architecture, layer: int) -> str:
    """Return the prefix of a layer's parameter names in transformers, such as ``model.layers.3.``."""
    return f"{list_parameter_names(arch).layers}.{layer}."


def list_outer_mappings(arch: Architecture, *, embedding: bool, head: bool) -> list[ParameterMapping]:
    """Return the parameters outside the decoder layers of a model chunk.

    ``embedding``: whether the chunk has the embedding. ``head``: whether it has the final norm and the head.
    A tied head is listed only without the embedding: Megatron keeps a copy of it on the last stage.
    """
    names = list_parameter_names(arch)
    mappings: list[ParameterMapping] = []
    if embedding:
        mappings.append(
            ParameterMapping("embedding.word_embeddings.weight", (f"{names.embedding}.weight",), "vocabulary")
        )
        if arch.position_embedding == "learned":
            mappings.append(
                ParameterMapping("embedding.position_embeddings.weight", ("transformer.wpe.weight",), "whole")
            )
    if head:
        mappings += _list_norm_mappings(arch, "decoder.final_layernorm", names.final_norm)
        source = f"{names.embedding}.weight" if arch.tie_word_embeddings else "lm_head.weight"
        if not (arch.tie_word_embeddings and embedding):
            mappings.append(ParameterMapping("output_layer.weight", (source,), "vocabulary"))
    return mappings


def list_layer_mappings(arch: Architecture, layer: int) -> list[ParameterMapping]:
    """Return the parameters of one decoder layer (counted from 0), without its experts."""
    is_conv1d = find_family(arch).projections == "conv1d"
    attention = _list_gpt2_attention_mappings() if is_conv1d else _list_attention_mappings(arch)
    if arch.is_moe_layer(layer):
        mlp = [
            ParameterMapping("mlp.router.weight", (f"{list_parameter_names(arch).router}.weight",), "whole")
        ]
    else:
        mlp = _list_gpt2_mlp_mappings() if is_conv1d else _list_mlp_mappings(arch)
    first, second = list_norm_names(arch)
    norms = _list_norm_mappings(arch, "input_layernorm", first) + _list_norm_mappings(
        arch, "pre_mlp_layernorm", second
    )
    return [*norms, *attention, *mlp]


def list_expert_mappings() -> list[ParameterMapping]:
    """Return the parameters of one routed expert; transformers stacks all experts of a layer."""
    return [
        ParameterMapping("linear_fc1.weight", ("mlp.experts.gate_up_proj",), "gated"),
        ParameterMapping("linear_fc2.weight", ("mlp.experts.down_proj",), "columns"),
    ]


def _list_norm_mappings(arch: Architecture, megatron: str, hf: str) -> list[ParameterMapping]:
    kinds = ("weight", "bias") if arch.norm == "layernorm" else ("weight",)
    return [ParameterMapping(f"{megatron}.{kind}", (f"{hf}.{kind}",), "whole") for kind in kinds]


def _list_attention_mappings(arch: Architecture) -> list[ParameterMapping]:
    product, output = "self_attention.linear_qkv", "self_attention.linear_proj"
    kinds = ("weight", "bias") if arch.attention_bias else ("weight",)
    mappings = [
        ParameterMapping(f"{product}.{kind}", tuple(f"self_attn.{name}_proj.{kind}" for name in "qkv"), "qkv")
        for kind in kinds
    ]
    mappings.append(ParameterMapping(f"{output}.weight", ("self_attn.o_proj.weight",), "columns"))
    if arch.attention_output_bias:
        mappings.append(ParameterMapping(f"{output}.bias", ("self_attn.o_proj.bias",), "whole"))
    if arch.qk_norm:
        for name in "qk":
            mappings += _list_norm_mappings(
                arch, f"self_attention.{name}_layernorm", f"self_attn.{name}_norm"
            )
    return mappings


def _list_mlp_mappings(arch: Architecture) -> list[ParameterMapping]:
    mappings = []
    for kind in ("weight", "bias") if arch.mlp_bias else ("weight",):
        mappings.append(
            ParameterMapping(
                f"mlp.linear_fc1.{kind}", (f"mlp.gate_proj.{kind}", f"mlp.up_proj.{kind}"), "gated"
            )
        )
        down: Sharding = "columns" if kind == "weight" else "whole"
        mappings.append(ParameterMapping(f"mlp.linear_fc2.{kind}", (f"mlp.down_proj.{kind}",), down))
    return mappings


def _list_gpt2_attention_mappings() -> list[ParameterMapping]:
    product, output = "self_attention.linear_qkv", "self_attention.linear_proj"
    return [
        ParameterMapping(f"{product}.weight", ("attn.c_attn.weight",), "qkv", transposed=True),
        ParameterMapping(f"{product}.bias", ("attn.c_attn.bias",), "qkv"),
        ParameterMapping(f"{output}.weight", ("attn.c_proj.weight",), "columns", transposed=True),
        ParameterMapping(f"{output}.bias", ("attn.c_proj.bias",), "whole"),
    ]


def _list_gpt2_mlp_mappings() -> list[ParameterMapping]:
    return [
        ParameterMapping("mlp.linear_fc1.weight", ("mlp.c_fc.weight",), "rows", transposed=True),
        ParameterMapping("mlp.linear_fc1.bias", ("mlp.c_fc.bias",), "rows"),
        ParameterMapping("mlp.linear_fc2.weight", ("mlp.c_proj.weight",), "columns", transposed=True),
        ParameterMapping("mlp.linear_fc2.bias", ("mlp.c_proj.bias",), "whole"),
    ]
