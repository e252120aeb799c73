"""A Llama-like transformers model as Megatron-core's ``GPTModel``: its config, its modules and its weights.

``train.py`` in this folder imports it. Megatron-core has other names for the config's options, stacks
matrices that read the same input (queries, keys and values; gate and up), and shards each over the
tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from transformers import AutoModelForCausalLM, PretrainedConfig

RECOMPUTE: dict[str, dict[str, object]] = {
    "none": {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Constants of Llama 3's scaled rotary angles, which Megatron-core does not take as options."""
LAYER = {
    "input_layernorm": ["input_layernorm"],
    "pre_mlp_layernorm": ["post_attention_layernorm"],
    "self_attention.linear_qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "self_attention.linear_proj": ["self_attn.o_proj"],
    "self_attention.q_layernorm": ["self_attn.q_norm"],
    "self_attention.k_layernorm": ["self_attn.k_norm"],
    "mlp.linear_fc1": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.linear_fc2": ["mlp.down_proj"],
}
"""Modules of a layer: Megatron-core's name, and transformers' names of the matrices stacked in it."""


def build_config(plan: SimpleNamespace, source: PretrainedConfig) -> TransformerConfig:
    """Return Megatron-core's config of the plan and of the transformers config ``source``."""
    check_config(source, plan.recipe.seq_len)
    tp, sequence_parallel = plan.layout.tp, plan.layout.sequence_parallel
    # Megatron-core does not distinguish the two: it keeps fp32 main weights in both.
    in_bf16 = plan.recipe.precision in ("bf16-mixed", "bf16")
    # All weights are loaded. Initialization stays on: it marks tensor-parallel parameters.
    methods = ("init_method", "output_layer_init_method", "embedding_init_method")
    return TransformerConfig(
        num_layers=source.num_hidden_layers,
        hidden_size=source.hidden_size,
        ffn_hidden_size=source.intermediate_size,
        num_attention_heads=source.num_attention_heads,
        num_query_groups=source.num_key_value_heads,
        kv_channels=plan.architecture.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=source.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=True,
        add_bias_linear=False,
        add_qkv_bias=plan.architecture.attention_bias,
        qk_layernorm=plan.architecture.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1 if sequence_parallel is None else sequence_parallel,
        params_dtype=torch.bfloat16 if in_bf16 else torch.float32,
        bf16=in_bf16,
        **RECOMPUTE[plan.recipe.recompute],
        **dict.fromkeys(methods, lambda tensor: tensor),
    )


def check_config(source: PretrainedConfig, seq_len: int) -> None:
    """End the script if Megatron-core would compute another model than transformers does."""
    rope, window = source.rope_parameters, getattr(source, "sliding_window", None)
    is_llama3 = {name: rope.get(name) for name in LLAMA3} == LLAMA3
    if source.hidden_act != "silu" or not (rope["rope_type"] == "default" or is_llama3):
        raise SystemExit(f"--model: Megatron-core has silu and rotary angles of llama3 or none, not {source}")
    has_windows = "sliding_attention" in (getattr(source, "layer_types", None) or ["sliding_attention"])
    if window and has_windows and seq_len > window:
        raise SystemExit(f"--model: it attends to {window} tokens, and Megatron-core to the whole sequence")


class Norm(torch.nn.RMSNorm):
    """torch's RMSNorm, marked so that Megatron-core sums its gradient over the shards of a sequence."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined,unused-ignore]


class FusedAttention(DotProductAttention):  # type: ignore[misc]
    """Causal attention in torch's fused kernels; Megatron-core's own writes all scores to memory."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
    ) -> torch.Tensor:
        """Attend. Inputs are (tokens, rows, heads, width), the output (tokens, rows, heads x width)."""
        # Contiguous: values are a view of the stacked product, which would be saved whole for backward.
        query, key, value = (tensor.contiguous().permute(1, 2, 0, 3) for tensor in (query, key, value))
        attended = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=True
        )
        return attended.permute(2, 0, 1, 3).flatten(2)


def build_model(source: PretrainedConfig, config: TransformerConfig, seq_len: int) -> torch.nn.Module:
    """Build this rank's shard of the model, with weights that are not set yet."""
    # Megatron-core's local modules: Transformer Engine's and Apex's, its defaults, need CUDA extensions.
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = FusedAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = Norm
    rope = source.rope_parameters
    model: torch.nn.Module = GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=block.layer_specs, layer_norm=Norm),
        vocab_size=source.vocab_size,
        max_sequence_length=seq_len,
        position_embedding_type="rope",
        rotary_base=rope["rope_theta"],
        rope_scaling=rope["rope_type"] == "llama3",
        rope_scaling_factor=rope.get("factor", 8.0),
        share_embeddings_and_output_weights=source.tie_word_embeddings,
    )
    return model.to(config.params_dtype)


def map_weights(names: Collection[str], num_layers: int) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each parameter of ``names``, and of the transformers tensors stacked in it."""
    table = {
        "embedding.word_embeddings.weight": ["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": ["model.norm.weight"],
        "output_layer.weight": ["lm_head.weight"],  # absent where it is the embedding's
    }
    for number in range(num_layers):
        for module, sources in LAYER.items():
            for leaf in ("weight", "bias"):
                stacked = [f"model.layers.{number}.{source}.{leaf}" for source in sources]
                table[f"decoder.layers.{number}.{module}.{leaf}"] = stacked
    yield from ((name, stacked) for name, stacked in table.items() if name in names)


def load_weights(model: torch.nn.Module, source: PretrainedConfig, checkpoint: str | None) -> None:
    """Copy this rank's shards of a transformers model: of random weights, or of ``checkpoint``."""
    torch.manual_seed(0)
    if checkpoint:
        transformers_model = AutoModelForCausalLM.from_pretrained(
            checkpoint, config=source, dtype=torch.float32
        )
    else:
        transformers_model = AutoModelForCausalLM.from_config(source, dtype=torch.float32)
    weights, parameters = transformers_model.state_dict(), dict(model.named_parameters())
    group = parallel_state.get_tensor_model_parallel_group()
    for name, stacked in map_weights(parameters, source.num_hidden_layers):
        tensors, parameter = [weights[one] for one in stacked], parameters[name]
        if "linear_qkv" in name:
            # Rows by key-value head: its queries, its key and its value lie together, so that shards have
            # whole heads.
            by_head = [one.unflatten(0, (source.num_key_value_heads, -1)) for one in tensors]
            tensors = [torch.cat(by_head, dim=1).flatten(0, 1)]
        if getattr(parameter, "tensor_model_parallel", False):
            # Gate and up are sharded one by one: each rank has a shard of both.
            axis = getattr(parameter, "partition_dim", 0)
            tensors = [one.chunk(group.size(), axis)[group.rank()] for one in tensors]
        parameter.data.copy_(torch.cat(tensors))


def save_weights(model: torch.nn.Module, source: PretrainedConfig, folder: str) -> None:
    """All-gather the shards, parameter by parameter, and write them as a transformers model."""
    weights: dict[str, torch.Tensor] = {}
    parameters = dict(model.named_parameters())
    group = parallel_state.get_tensor_model_parallel_group()
    heads = source.num_key_value_heads
    for name, stacked in map_weights(parameters, source.num_hidden_layers):
        parameter, axis = parameters[name].detach().contiguous(), 0
        shards = [parameter]
        if getattr(parameters[name], "tensor_model_parallel", False):
            shards = [torch.empty_like(parameter) for _ in range(group.size())]
            dist.all_gather(shards, parameter, group=group)
            axis = getattr(parameters[name], "partition_dim", 0)
        # The opposite of load_weights: first what was sharded one by one, then the heads.
        count = 2 if "linear_fc1" in name else 1
        strips = zip(*(shard.chunk(count, axis) for shard in shards), strict=True)
        tensors = [torch.cat(strip, axis) for strip in strips]
        if "linear_qkv" in name:
            by_head = tensors[0].unflatten(0, (heads, -1))
            width = by_head.shape[1] // (source.num_attention_heads // heads + 2)
            sizes = [by_head.shape[1] - 2 * width, width, width]
            tensors = [one.flatten(0, 1) for one in by_head.split(sizes, dim=1)]
        if dist.get_rank() == 0:
            weights |= dict(zip(stacked, (one.cpu().contiguous() for one in tensors), strict=True))
    if dist.get_rank() == 0:
        with torch.device("meta"):
            transformers_model = AutoModelForCausalLM.from_config(source)
        transformers_model.config.use_cache = True  # off while training
        transformers_model.save_pretrained(folder, state_dict=weights)
