"""Names of models on screen are spelt as their makers spell them."""

from __future__ import annotations

import pytest

import shardscope as ss
from shardscope_widgets.kit.display_names import name_model


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("llama-3.1-8b", "Llama 3.1 8B"),
        ("smollm3-3b", "SmolLM3 3B"),
        ("olmo-3-7b", "OLMo 3 7B"),
        ("glm-4.5-air", "GLM 4.5 Air"),
        ("glm-4.7-flash", "GLM 4.7 Flash"),
        ("ministral-3-8b", "Ministral 3 8B"),
        ("starcoder2-7b", "StarCoder2 7B"),
        ("gpt-neox-20b", "GPT NeoX 20B"),
    ],
)
def test_models_are_spelt_as_their_makers_spell_them(name: str, shown: str) -> None:
    assert name_model(ss.models[name]) == shown
