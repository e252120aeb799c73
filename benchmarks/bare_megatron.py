"""A plain Megatron-core script, as who knows it writes it; ``torchrun bare_megatron.py job.json``.

The yardstick of ``python -m benchmarks``: data-parallel ranks with the distributed optimizer. Of Shardscope
it takes the one thing that has nothing to do with training: what stands in for CUDA on CPU ranks, around
both sides. The weights are transformers' under the same seed, so that both sides are one job.
"""

import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from shardscope.frameworks.megatron.real_cpu import cpu_ranks


def weights(config):
    """transformers' fresh weights under GPTModel's names; q, k and v of each group lie together."""
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
        parts = [state[f"{old}.self_attn.{name}_proj.weight"].view(groups, -1, wide) for name in "qkv"]
        found |= {
            f"{new}.self_attention.linear_qkv.weight": torch.cat(parts, 1).view(-1, wide),
            f"{new}.self_attention.linear_proj.weight": state[f"{old}.self_attn.o_proj.weight"],
            f"{new}.mlp.linear_fc1.weight": torch.cat(
                [state[f"{old}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
            ),
            f"{new}.mlp.linear_fc2.weight": state[f"{old}.mlp.down_proj.weight"],
            f"{new}.input_layernorm.weight": state[f"{old}.input_layernorm.weight"],
            f"{new}.pre_mlp_layernorm.weight": state[f"{old}.post_attention_layernorm.weight"],
        }
    return found


def main(job):
    """Train; rank 0 prints when each step ended."""
    sizes = job["config"]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    text = Path(job["text"]).read_text(encoding="utf-8")
    ids = np.asarray(Tokenizer.from_file(job["tokenizer"]).encode(text).ids, dtype=np.int32)
    num_windows = len(ids) // job["seq_len"]
    windows = ids[: num_windows * job["seq_len"]].reshape(num_windows, job["seq_len"])
    order = np.random.default_rng([0, 0]).permutation(num_windows)

    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=sizes["num_hidden_layers"],
        hidden_size=sizes["hidden_size"],
        ffn_hidden_size=sizes["intermediate_size"],
        num_attention_heads=sizes["num_attention_heads"],
        num_query_groups=sizes["num_key_value_heads"],
        kv_channels=sizes["head_dim"],
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        sizes["vocab_size"],
        job["seq_len"],
        position_embedding_type="rope",
        share_embeddings_and_output_weights=sizes["tie_word_embeddings"],
    )
    model.load_state_dict(weights(sizes), strict=False)
    model.train()
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    ddp = DistributedDataParallel(config, options, model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=job["learning_rate"],
            weight_decay=0.1,
            adam_beta1=0.9,
            adam_beta2=0.95,
            params_dtype=torch.float32,
            use_distributed_optimizer=True,
            clip_grad=1.0,
        ),
        [ddp],
        use_gloo_process_groups=False,
    )
    positions = torch.arange(job["seq_len"]).expand(job["rows"], -1)
    for step in range(job["num_steps"]):
        cosine = 0.1 + 0.9 * (1 + math.cos(math.pi * step / job["num_steps"])) / 2
        for group in optimizer.param_groups:
            group["lr"] = job["learning_rate"] * cosine
            group["weight_decay"] = 0.1 * group["wd_mult"]
        first = (step * world_size + rank) * job["rows"]
        batch = torch.from_numpy(windows[order[first : first + job["rows"]]].astype(np.int64))
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        losses = ddp(batch, positions, None, labels=batch.roll(-1, 1))
        loss = losses[:, :-1].mean()
        loss.backward()
        finalize_model_grads([ddp])
        optimizer.step()
        if rank == 0:
            print(json.dumps({"time": time.time()}), flush=True)
    mean = loss.detach()
    dist.all_reduce(mean)
    if rank == 0:
        print(json.dumps({"loss": mean.item() / world_size}), flush=True)


dist.init_process_group("gloo")
with cpu_ranks():
    main(json.loads(Path(sys.argv[1]).read_text()))
dist.destroy_process_group()
