"""Tests of casts of plain bf16 recipes: parameters are cast, tables of the forward are not."""

from __future__ import annotations

from tests.requirements import needs

torch = needs("torch")
needs("transformers")

from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from shardscope.training.micro_batch_engine import cast_parameters  # noqa: E402


def test_rotary_tables_stay_in_fp32() -> None:
    """A bf16 frequency is off by up to 1 in 512, and an angle of long texts by more than half a turn."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, tie_word_embeddings=True, **sizes))
    before = model.model.rotary_emb.inv_freq.clone()
    cast_parameters(model, torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.model.rotary_emb.inv_freq, before)
    off = 32_000 * (before - before.bfloat16().float()).abs().max()
    assert off > torch.pi
