"""Test of the scale of adapter updates, in the model that trains."""

from __future__ import annotations

import pytest
from tests.requirements import needs

import shardscope as ss

needs("torch")
needs("peft")


@pytest.mark.parametrize(
    ("options", "scale"),
    [({}, 2.0), ({"lora_alpha": 4.0}, 0.25), ({"lora_alpha": 4.0, "use_rslora": True}, 1.0)],
)
def test_updates_are_scaled_by_alpha_and_rank(options: dict[str, object], scale: float) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from shardscope.training.model.lora import add_adapters

    architecture = ss.Architecture.of_size("2m")
    recipe = ss.Recipe(method="lora", lora_rank=16, seq_len=16, **options)  # type: ignore[arg-type]
    small = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    torch.manual_seed(0)
    model = add_adapters(LlamaForCausalLM(small), architecture, recipe)
    linear = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    torch.nn.init.normal_(linear.lora_B["default"].weight)
    inputs = torch.randn(3, 16)
    update = linear.lora_B["default"](linear.lora_A["default"](inputs))
    torch.testing.assert_close(linear(inputs), linear.base_layer(inputs) + scale * update)
