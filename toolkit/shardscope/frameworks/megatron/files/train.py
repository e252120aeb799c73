"""Train a Llama-like model with Megatron-core: tensor-parallel matrices and a distributed optimizer.

    torchrun --nproc-per-node 8 train.py --text corpus.txt

Shardscope's ``plan.export(folder)`` wrote this file and the two that it reads: ``plan.json`` (batch,
precision, recomputation, parallelism) and ``config.json`` (the model's transformers config). It imports
megatron.core, torch, transformers and tokenizers, and nothing of Shardscope.

``tp`` neighbouring ranks work on the same sequences: each has some columns or rows of every matrix, and
between matrices a part of the sequence. Over the other ranks gradients are averaged in Megatron's buffers,
and with the distributed optimizer each of them keeps and updates its own part of the optimizer's state.
Weights come from a transformers model, which the ranks of a node build in turns in host memory, and are saved
as one.

The losses are those of ``ss.launch(plan, ss.Pretrain(text="corpus.txt"))`` with that task's tokenizer
(``--tokenizer``: the path ``shardscope.training.data.tokenizer.SHIPPED_TOKENIZER``), and with ``--model``
those of ``ss.Finetune(weights="folder", text="corpus.txt")``.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import math
import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
MAX_GRAD_NORM = 1.0
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Megatron-core's own constants of scaled rotary angles."""
LAYER = {
    "input_layernorm": (["input_layernorm"], "whole"),
    "pre_mlp_layernorm": (["post_attention_layernorm"], "whole"),
    "self_attention.linear_qkv": (["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "heads"),
    "self_attention.linear_proj": (["self_attn.o_proj"], "whole"),
    "self_attention.q_layernorm": (["self_attn.q_norm"], "whole"),
    "self_attention.k_layernorm": (["self_attn.k_norm"], "whole"),
    "mlp.linear_fc1": (["mlp.gate_proj", "mlp.up_proj"], "gated"),
    "mlp.linear_fc2": (["mlp.down_proj"], "whole"),
}
"""Modules of a layer: Megatron-core's name, those of transformers, and how these are joined."""


def read_json(name: str) -> dict[str, Any]:
    """Read one of the files beside this one."""
    values: dict[str, Any] = json.loads((HERE / name).read_text(encoding="utf-8"))
    return values


def read_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps")
    parser.add_argument("--learning-rate", type=float, help="the peak; its default suits the model's size")
    parser.add_argument("--warmup-steps", type=int, help="default: a tenth of --steps, at most 100")
    parser.add_argument("--text", default=__file__, help="a UTF-8 file to train on; default: this script")
    parser.add_argument("--tokenizer", help="a tokenizer.json, or transformers' name; default: --model's")
    parser.add_argument("--model", help="a transformers checkpoint to start from; default: random weights")
    parser.add_argument("--save", help="a folder for the trained weights, as transformers opens it")
    return parser.parse_args()


def read_config(source: str | None) -> Any:
    """Return the plan's transformers config, or that of the checkpoint ``source`` of the same sizes."""
    values = read_json("config.json")
    planned = AutoConfig.for_model(**values)
    if source is None:
        return planned
    # A checkpoint keeps its own epsilons, activation and rotary base; these are the plan's.
    forced = ("drop", "router", "attn_implementation")
    kept = {name: value for name, value in values.items() if any(word in name for word in forced)}
    config = AutoConfig.from_pretrained(source, **kept)
    own, wanted = list_sizes(config), list_sizes(planned)
    for name in {**wanted, **own}:
        if own.get(name) != wanted.get(name):
            why = f"its {name} is {own.get(name)}, and the plan's {wanted.get(name)}"
            raise SystemExit(f"--model: {why}: export a plan for this model (ss.Architecture.from_hf)")
    rope = config.rope_parameters
    is_llama3 = {name: rope.get(name) for name in LLAMA3} == LLAMA3
    if config.hidden_act != "silu" or not (rope["rope_type"] == "default" or is_llama3):
        raise SystemExit(f"--model: Megatron-core has silu and rotary angles of llama3 or none, not {config}")
    return config


def list_sizes(config: Any) -> dict[str, Any]:
    """Return the shapes of a config's parameters by name, and how many experts a token has."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return {**shapes, "num_experts_per_tok": getattr(config, "num_experts_per_tok", None)}


class Norm(torch.nn.RMSNorm):  # type: ignore[misc]
    """torch's norm. The mark has gradients summed over ranks that see other parts of the sequence."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


class FusedAttention(DotProductAttention):  # type: ignore[misc]
    """Causal attention in torch's fused kernels, which keep no scores."""

    def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> torch.Tensor:
        """Attend from and to tensors of [token, row, head, width]."""
        # Contiguous: values are a view of the whole product, all of which they would keep for backward.
        query, key, value = (part.contiguous().permute(1, 2, 0, 3) for part in (query, key, value))
        attended = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=True
        )
        return attended.permute(2, 0, 1, 3).flatten(2)


def build_model(plan: dict[str, Any], source: Any, config: TransformerConfig) -> torch.nn.Module:
    """Build this rank's part of the model that transformers' config ``source`` describes, without weights."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
        attention = layer.submodules.self_attention.submodules
        if plan["recipe"]["attention"] != "eager":
            attention.core_attention = FusedAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = Norm
    rope = source.rope_parameters
    model = GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=block.layer_specs, layer_norm=Norm),
        vocab_size=pad(source.vocab_size, 128 * config.tensor_model_parallel_size),
        max_sequence_length=plan["recipe"]["seq_len"],
        position_embedding_type="rope",
        rotary_base=rope["rope_theta"],
        rope_scaling=rope["rope_type"] == "llama3",
        rope_scaling_factor=rope.get("factor", 8.0),
        share_embeddings_and_output_weights=source.tie_word_embeddings,
    )
    model.output_layer.register_forward_hook(functools.partial(mute_padding, source.vocab_size))
    return model.to(config.params_dtype)


def pad(size: int, multiple: int) -> int:
    """Round ``size`` up."""
    return -(-size // multiple) * multiple


def mute_padding(vocab_size: int, module: Any, inputs: Any, output: Any) -> tuple[torch.Tensor, Any]:
    """Give rows that only pad the vocabulary no share in the loss."""
    logits, bias = output
    width = logits.shape[-1]
    first = parallel_state.get_tensor_model_parallel_rank() * width
    padding = torch.arange(first, first + width, device=logits.device) >= vocab_size
    return logits.masked_fill(padding, torch.finfo(logits.dtype).min), bias


def core_config(plan: dict[str, Any], source: Any) -> TransformerConfig:
    """Return the plan and the transformers config ``source`` in Megatron-core's words."""
    layout, recipe, arch = plan["layout"], plan["recipe"], plan["architecture"]
    tp, sequence = layout["tp"], layout["sequence_parallel"]
    window, kinds = getattr(source, "sliding_window", None), getattr(source, "layer_types", None)
    if window and recipe["seq_len"] > window and (kinds is None or "sliding_attention" in kinds):
        raise SystemExit(f"--model: it attends to {window} tokens, and Megatron-core to the whole sequence")
    half = recipe["precision"] in ("bf16", "bf16-mixed")
    methods = ("init_method", "output_layer_init_method", "embedding_init_method")  # weights are loaded
    return TransformerConfig(
        num_layers=source.num_hidden_layers,
        hidden_size=source.hidden_size,
        ffn_hidden_size=source.intermediate_size,
        num_attention_heads=source.num_attention_heads,
        num_query_groups=source.num_key_value_heads,
        kv_channels=arch["head_dim"],
        normalization="RMSNorm",
        layernorm_epsilon=source.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=True,
        add_bias_linear=False,
        add_qkv_bias=arch["attention_bias"],
        qk_layernorm=arch["qk_norm"],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1 if sequence is None else sequence,
        params_dtype=torch.bfloat16 if half else torch.float32,
        bf16=half,
        **RECOMPUTE[recipe["recompute"]],
        **dict.fromkeys(methods, lambda tensor: tensor),
    )


def map_weights(own: Collection[str], num_layers: int) -> Iterator[tuple[str, list[str], str]]:
    """Yield each parameter's name, the transformers tensors that it is made of, and how they are joined."""
    yield "embedding.word_embeddings.weight", ["model.embed_tokens.weight"], "padded"
    yield "decoder.final_layernorm.weight", ["model.norm.weight"], "whole"
    if "output_layer.weight" in own:  # otherwise it is the embedding
        yield "output_layer.weight", ["lm_head.weight"], "padded"
    for number in range(num_layers):
        for name, (parts, how) in LAYER.items():
            for leaf in ("weight", "bias"):
                theirs = [f"model.layers.{number}.{part}.{leaf}" for part in parts]
                if (ours := f"decoder.layers.{number}.{name}.{leaf}") in own:
                    yield ours, theirs, how


def load_weights(model: torch.nn.Module, source: Any, checkpoint: str | None) -> None:
    """Copy this rank's parts out of a transformers model: of random weights, or of ``checkpoint``."""
    torch.manual_seed(0)
    if checkpoint:
        whole = AutoModelForCausalLM.from_pretrained(checkpoint, config=source, dtype=torch.float32)
    else:
        whole = AutoModelForCausalLM.from_config(source, dtype=torch.float32)
    state, own = whole.state_dict(), dict(model.named_parameters())
    group = parallel_state.get_tensor_model_parallel_group()
    for name, theirs, how in map_weights(own, source.num_hidden_layers):
        tensors, parameter = [state[one] for one in theirs], own[name]
        if how == "padded":
            rows = pad(len(tensors[0]), 128 * group.size()) - len(tensors[0])
            tensors = [torch.nn.functional.pad(tensors[0], (0, 0, 0, rows))]
        if how == "heads":  # queries, keys and values of each key-value head lie together
            by_head = [one.unflatten(0, (source.num_key_value_heads, -1)) for one in tensors]
            tensors = [torch.cat(by_head, dim=1).flatten(0, 1)]
        if getattr(parameter, "tensor_model_parallel", False):
            axis = parameter.partition_dim
            tensors = [one.chunk(group.size(), dim=axis)[group.rank()] for one in tensors]
        parameter.data.copy_(torch.cat(tensors))


def save_weights(model: torch.nn.Module, source: Any, folder: str) -> None:
    """Join the parts of tensor-parallel ranks, tensor by tensor, and write them as transformers' model."""
    weights: dict[str, torch.Tensor] = {}
    own = dict(model.named_parameters())
    group = parallel_state.get_tensor_model_parallel_group()
    for name, theirs, how in map_weights(own, source.num_hidden_layers):
        parts = [own[name].detach()]
        if getattr(own[name], "tensor_model_parallel", False):
            parts = [torch.empty_like(own[name]) for _ in range(group.size())]
            dist.all_gather(parts, own[name].detach().contiguous(), group=group)
        axis = max(0, getattr(own[name], "partition_dim", 0))
        # Each rank has a part of the gate and a part of what it gates.
        count = 2 if how == "gated" else 1
        strips = zip(*(part.chunk(count, dim=axis) for part in parts), strict=True)
        tensors = [torch.cat(strip, dim=axis) for strip in strips]
        if how == "padded":
            tensors = [tensors[0][: source.vocab_size]]
        if how == "heads":
            groups = tensors[0].unflatten(0, (source.num_key_value_heads, -1))
            width = groups.shape[1] // (source.num_attention_heads // source.num_key_value_heads + 2)
            sizes = [groups.shape[1] - 2 * width, width, width]
            tensors = [one.flatten(0, 1) for one in groups.split(sizes, dim=1)]
        if dist.get_rank() == 0:
            weights |= dict(zip(theirs, (one.cpu().contiguous() for one in tensors), strict=True))
    if dist.get_rank() == 0:
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(source)
        whole.config.use_cache = True  # off while training
        whole.save_pretrained(folder, state_dict=weights)


def build_optimizer(layout: dict[str, Any], chunk: Any, config: TransformerConfig) -> Any:
    """Build Megatron-core's Adam over a model in gradient buffers; of bf16 weights it keeps fp32 copies."""
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=0.0,  # set at every step
            weight_decay=0.1,
            adam_beta1=0.9,
            adam_beta2=0.95,
            params_dtype=config.params_dtype,
            bf16=config.bf16,
            use_distributed_optimizer=layout["distributed_optimizer"],
            overlap_param_gather=layout["overlap_param_gather"],
            clip_grad=MAX_GRAD_NORM,
        ),
        [chunk],
        use_gloo_process_groups=False,
    )
    for group in optimizer.param_groups:  # vectors (norms, biases) are not decayed
        group["weight_decay"] = 0.1 * group["wd_mult"]
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if layout["overlap_grad_reduce"]:
        config.no_sync_func = chunk.no_sync
    return optimizer


def read_tokens(text: str, tokenizer: str | None, seq_len: int, vocab_size: int) -> torch.Tensor:
    """Tokenize a text file, repeated until it fills one sequence; without a tokenizer a token is a byte."""
    data = Path(text).read_bytes()
    end = None
    if not tokenizer:
        ids = list(data)
    elif tokenizer.endswith(".json"):
        own = Tokenizer.from_file(tokenizer)
        ids, end = own.encode(data.decode("utf-8")).ids, own.token_to_id("<|endoftext|>")
    else:
        hub = AutoTokenizer.from_pretrained(tokenizer)
        ids, end = hub(data.decode("utf-8"), add_special_tokens=False)["input_ids"], hub.eos_token_id
    ids = ids if end is None else [*ids, end]
    if max(ids) >= vocab_size:
        raise SystemExit(f"token {max(ids)} is not in a vocabulary of {vocab_size}")
    return torch.tensor(ids * -(-seq_len // len(ids)))


def take_sequences(tokens: torch.Tensor, first: int, rows: int, seq_len: int) -> torch.Tensor:
    """Return sequences ``first`` to ``first + rows`` of training. Each epoch has every window of the text."""
    windows = len(tokens) // seq_len
    epochs = range(first // windows, (first + rows - 1) // windows + 1)
    orders = [numpy.random.default_rng([0, epoch]).permutation(windows) for epoch in epochs]
    numbers = torch.from_numpy(numpy.concatenate(orders))[first - epochs[0] * windows :][:rows]
    return tokens[seq_len * numbers[:, None] + torch.arange(seq_len)]


def choose_peak_rate(num_parameters: int, source: str | None) -> float:
    """Return a usual peak learning rate: of pretraining, or of training the checkpoint ``source`` further."""
    if source:
        return 2e-5
    return 1e-3 if num_parameters < 1e9 else 1e-4


def compute_rate(step: int, peak: float, steps: int, warmup: int) -> float:
    """Return the learning rate of ``step``: a linear warm-up, then half a cosine down to a tenth."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


def train_step(chunk: Any, optimizer: Any, batch: torch.Tensor) -> torch.Tensor:
    """Train on [micro-batch, sequence, token]. Return the mean loss over all ranks."""
    total = torch.zeros((), device=batch.device)

    def compute_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        mean = losses[:, :-1].float().mean()  # the last token of a sequence has no next one
        total.add_(mean.detach() / len(batch))
        return mean, {}

    def forward(micro_batches: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
        tokens = next(micro_batches)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return model(tokens, positions, None, labels=tokens.roll(-1, dims=1)), compute_loss

    chunk.zero_grad_buffer()
    optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(batch),
        model=chunk,
        num_microbatches=len(batch),
        seq_length=batch.shape[2],
        micro_batch_size=batch.shape[1],
        forward_only=False,
    )
    optimizer.step()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def main() -> None:
    """Train as planned, and print each step's loss."""
    options, plan = read_options(), read_json("plan.json")
    recipe, layout, cluster = plan["recipe"], plan["layout"], plan["cluster"]
    planned = cluster["gpus_per_node"] * cluster["num_nodes"]

    # Meet the other ranks. torchrun and accelerate launch tell each process its number by variables.
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size != planned:
        raise SystemExit(f"the plan is for {planned} ranks, and these are {world_size}")
    on_gpu = cluster["gpu"]["vendor"] != "cpu"
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    # Ranks wait for others that read the model.
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=datetime.timedelta(hours=6))
    parallel_state.initialize_model_parallel(layout["tp"], create_gloo_process_groups=False)

    # Build this rank's part of the model; one rank of a node at a time holds the whole one.
    model_parallel_cuda_manual_seed(0)
    source = read_config(options.model)
    config = core_config(plan, source)
    model = build_model(plan, source, config)
    for turn in range(cluster["gpus_per_node"]):
        if turn == int(os.environ["LOCAL_RANK"]):
            load_weights(model, source, options.model)
        dist.barrier()

    # Put it into buffers, in which gradients are reduced and weights gathered, and build the optimizer.
    in_fp32 = layout["grad_reduce_in_fp32"]
    buffers = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True if in_fp32 is None else in_fp32,
        use_distributed_optimizer=layout["distributed_optimizer"],
        overlap_grad_reduce=layout["overlap_grad_reduce"],
        overlap_param_gather=layout["overlap_param_gather"],
    )
    chunk = DistributedDataParallel(config, buffers, model.to(device).train())
    optimizer = build_optimizer(layout, chunk, config)

    # Each group of tensor-parallel ranks takes its own share of every batch.
    seq_len, micro_batch_size = recipe["seq_len"], recipe["micro_batch_size"]
    tokenizer = options.tokenizer or options.model
    tokens = read_tokens(options.text, tokenizer, seq_len, source.vocab_size)
    data_rank, data_ranks = rank // layout["tp"], world_size // layout["tp"]
    rows = recipe["global_batch_size"] // data_ranks

    # Train.
    num_parameters = sum(parameter.numel() for parameter in model.parameters()) * layout["tp"]
    usual = choose_peak_rate(num_parameters, options.model)
    peak = usual if options.learning_rate is None else options.learning_rate
    warmup = min(100, options.steps // 10) if options.warmup_steps is None else options.warmup_steps
    for step in range(options.steps):
        began = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = compute_rate(step, peak, options.steps, warmup)
        sequences = take_sequences(tokens, (step * data_ranks + data_rank) * rows, rows, seq_len)
        batch = sequences.view(-1, micro_batch_size, seq_len).to(device)
        loss = train_step(chunk, optimizer, batch).item()
        if rank == 0:
            speed = recipe["global_batch_size"] * seq_len / (time.perf_counter() - began)
            print(f"step {step + 1} loss {loss:.6f} {speed:,.0f} tokens/s", flush=True)

    # Save, all ranks together, after what the next forward would gather.
    if options.save:
        if layout["overlap_param_gather"]:
            chunk.start_param_sync(force_sync=True)
        save_weights(model, source, options.save)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
