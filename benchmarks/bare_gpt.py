"""A Llama's sizes and fresh weights under Megatron-core's names: its script begins where the others do."""

import torch
from bare_job import job
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
}
"""TransformerConfig's fields, and LlamaConfig's."""


def gpt_sizes():
    return {field: job["config"][name] for field, name in SIZES.items()}


def gpt_weights():
    """The state of a GPTModel; q, k and v of each group of heads lie together."""
    config = job["config"]
    torch.manual_seed(0)
    state = LlamaForCausalLM(LlamaConfig(**config)).state_dict()
    groups, wide = config["num_key_value_heads"], config["hidden_size"]
    found = {
        "embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": state["model.norm.weight"],
        "output_layer.weight": state["lm_head.weight"],
    }
    for layer in range(config["num_hidden_layers"]):
        old, new = f"model.layers.{layer}", f"decoder.layers.{layer}"
        heads = [state[f"{old}.self_attn.{name}_proj.weight"].view(groups, -1, wide) for name in "qkv"]
        gated = [state[f"{old}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
        found |= {
            f"{new}.self_attention.linear_qkv.weight": torch.cat(heads, 1).view(-1, wide),
            f"{new}.self_attention.linear_proj.weight": state[f"{old}.self_attn.o_proj.weight"],
            f"{new}.mlp.linear_fc1.weight": torch.cat(gated),
            f"{new}.mlp.linear_fc2.weight": state[f"{old}.mlp.down_proj.weight"],
            f"{new}.input_layernorm.weight": state[f"{old}.input_layernorm.weight"],
            f"{new}.pre_mlp_layernorm.weight": state[f"{old}.post_attention_layernorm.weight"],
        }
    return found
