"""One small adapter for each ``model_type``: the fields that its config.json stands for.

Each adapter gives what the family's own ``configuration_*.py`` and ``modeling_*.py`` in transformers 5 build
parameters from; defaults are theirs, except for sizes, which must be given: a model made of default sizes is
never the model that somebody meant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardscope.core.architecture import MODEL_TYPES
from shardscope.families.common import Fields, HfConfig
from shardscope.families.deepseek import deepseek_v2, deepseek_v3
from shardscope.families.falcon import falcon, starcoder2
from shardscope.families.gemma import gemma, gemma2, gemma3_text
from shardscope.families.glm import glm, glm4
from shardscope.families.gpt import gpt2, gpt_neox, gpt_oss
from shardscope.families.llama import granite, llama, nemotron, olmo2
from shardscope.families.mistral import mistral, mixtral
from shardscope.families.phi import phi, phi3
from shardscope.families.qwen import qwen2, qwen2_moe, qwen3, qwen3_moe

FAMILIES: Mapping[str, Callable[[HfConfig], Fields]] = {
    adapter.__name__: adapter
    for adapter in (
        llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, gemma2, phi3, deepseek_v3, gpt2,
        qwen2_moe, gemma, gemma3_text, phi, deepseek_v2, gpt_neox, gpt_oss, olmo2, granite, glm, glm4,
        falcon, starcoder2, nemotron,
    )
}  # fmt: skip
assert tuple(FAMILIES) == MODEL_TYPES
