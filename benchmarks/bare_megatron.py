"""A plain Megatron-core script, as who knows it writes it; ``torchrun bare_megatron.py job.json``.

The yardstick of ``python -m benchmarks``: data-parallel ranks with the distributed optimizer. Of Shardscope
it takes the one thing that has nothing to do with training: what stands in for CUDA on CPU ranks, around both
sides. The weights are transformers' under the same seed, so that both sides are one job.
"""

import megatron.core.distributed as mcore
import torch
import torch.distributed as dist
from bare_gpt import gpt_sizes, gpt_weights
from bare_job import batches, cosine, job, say_loss, say_step_ended
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from shardscope.frameworks.megatron.real_cpu import cpu_ranks

NORM = {"normalization": "RMSNorm", "layernorm_epsilon": 1e-6}
MLP = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "add_bias_linear": False}
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
ADAM = {"lr": job["learning_rate"], "weight_decay": 0.1, "adam_beta2": 0.95, "clip_grad": 1.0}


def main():
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(**gpt_sizes(), **NORM, **MLP, **NO_DROPOUT)
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    sizes = (job["config"]["vocab_size"], job["seq_len"])
    ends = {"share_embeddings_and_output_weights": job["config"]["tie_word_embeddings"]}
    model = GPTModel(config, spec, *sizes, position_embedding_type="rope", **ends).train()
    model.load_state_dict(gpt_weights(), strict=False)
    options = mcore.DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    ddp = mcore.DistributedDataParallel(config, options, model)
    adam = OptimizerConfig(**ADAM, params_dtype=torch.float32, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(adam, [ddp], use_gloo_process_groups=False)
    positions = torch.arange(job["seq_len"]).expand(job["rows"], -1)
    for step, batch in enumerate(batches()):
        for group in optimizer.param_groups:
            group |= {"lr": job["learning_rate"] * cosine(step), "weight_decay": 0.1 * group["wd_mult"]}
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        loss = ddp(batch, positions, None, labels=batch.roll(-1, 1))[:, :-1].mean()
        loss.backward()
        mcore.finalize_model_grads([ddp])
        optimizer.step()
        say_step_ended()
    say_loss(loss)


dist.init_process_group("gloo")
with cpu_ranks():
    main()
dist.destroy_process_group()
