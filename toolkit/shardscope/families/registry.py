"""All model families by ``model_type``, and the record of an architecture's family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

from shardscope.families.common import HfConfig
from shardscope.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from shardscope.families.falcon import FALCON, STARCODER2
from shardscope.families.family import Family, Support
from shardscope.families.gemma import GEMMA, GEMMA2, GEMMA3_TEXT
from shardscope.families.glm import GLM, GLM4, GLM4_MOE, GLM4_MOE_LITE
from shardscope.families.gpt import GPT2, GPT_NEOX, GPT_OSS
from shardscope.families.llama import GRANITE, LLAMA, NEMOTRON, OLMO2, OLMO3, SEED_OSS, SMOLLM3
from shardscope.families.mistral import MINISTRAL3, MISTRAL, MIXTRAL
from shardscope.families.phi import PHI, PHI3
from shardscope.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, GEMMA2, PHI3, DEEPSEEK_V3, GPT2,
        QWEN2_MOE, GEMMA, GEMMA3_TEXT, PHI, DEEPSEEK_V2, GPT_NEOX, GPT_OSS, OLMO2, GRANITE, GLM, GLM4,
        FALCON, STARCODER2, NEMOTRON, SEED_OSS, SMOLLM3, OLMO3, GLM4_MOE, MINISTRAL3,
        GLM4_MOE_LITE,
    )
}  # fmt: skip
"""Every family whose layers are known exactly, by ``model_type``."""

_LISTING = (
    LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, GEMMA, GEMMA2, GEMMA3_TEXT, GRANITE, SEED_OSS, PHI3,
    GLM, GLM4, OLMO2, DEEPSEEK_V2, DEEPSEEK_V3, GPT2, GPT_NEOX, GPT_OSS, QWEN2_MOE, PHI, FALCON, STARCODER2,
    NEMOTRON,
)  # fmt: skip
"""Order of the families in error messages, Llama and the most similar ones first; all others follow."""

_LISTED_FIRST: Mapping[Support, tuple[Family, ...]] = {
    "dropout": (GPT2,),
    "megatron_weights": (LLAMA, MISTRAL, QWEN2, QWEN3, GPT2),
    "compiled_layers": (LLAMA, MISTRAL, QWEN2, QWEN3, GRANITE),
}
"""Families that the list of a feature begins with."""


def _has_no_adapter(config: HfConfig) -> NoReturn:
    raise LookupError(f"no adapter reads a config.json of {config.get('model_type')!r}")


_UNKNOWN = Family(
    model_type="unknown", read=_has_no_adapter, unlike_megatron_core="layers that only transformers knows"
)


def find_family(arch: Architecture) -> Family:
    """Return the record of an architecture's family; without formulas, one that supports nothing."""
    return FAMILIES.get(arch.model_type, _UNKNOWN)


def get_family(model_type: object) -> Family:
    """Return the record of a ``model_type``; without formulas, one that supports nothing."""
    return FAMILIES.get(model_type, _UNKNOWN) if isinstance(model_type, str) else _UNKNOWN


def list_families_with(support: Support) -> tuple[str, ...]:
    """Return the names of the families that support something, in the order in which messages list them."""
    first = _LISTED_FIRST.get(support, ())
    ordered = dict.fromkeys((*first, *_LISTING, *FAMILIES.values()))
    return tuple(family.model_type for family in ordered if support in family.supports)
