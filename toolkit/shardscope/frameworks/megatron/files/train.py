"""Train a Llama-like model with Megatron-core: tensor-parallel matrices and a distributed optimizer.

    ./train.sh --text corpus.txt --checkpoints checkpoints --save trained

Shardscope's ``plan.export(folder)`` wrote this file, ``megatron_model.py``, which builds the model,
``checkpoints.py``, ``script_options.py``, and the two that they read: ``plan.json`` (batch, precision,
recomputation, parallelism) and ``config.json`` (the model's transformers config). They import
megatron.core, torch, transformers and tokenizers, and nothing of Shardscope.

``tp`` consecutive ranks work on the same sequences: each has some columns or rows of every matrix, and
between matrices a shard of the sequence. Over the other ranks gradients are averaged in Megatron-core's
buffers, and with the distributed optimizer each of them keeps and updates its own shard of the optimizer's
state. Weights come from a transformers model, which the ranks of a node build in turns in host memory, and
are saved as one at the end.

The losses are those of ``ss.launch(plan, ss.Pretrain(text="corpus.txt"))`` with that task's tokenizer
(``--tokenizer``: the path ``shardscope.training.data.tokenizer.SHIPPED_TOKENIZER``), and with ``--model``
those of ``ss.Finetune("folder", "corpus.txt")``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy
import torch
import torch.distributed as dist
from checkpoints import Checkpoints
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron_model import build_config, build_model, load_weights, save_weights
from script_options import add_options, check_options, save_tokenizer
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

HERE = Path(__file__).parent


def read_plan() -> SimpleNamespace:
    """Read ``plan.json``; its keys are attributes, ``plan.recipe.seq_len``."""
    text = (HERE / "plan.json").read_text(encoding="utf-8")
    plan: SimpleNamespace = json.loads(text, object_hook=lambda values: SimpleNamespace(**values))
    return plan


def read_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps")
    parser.add_argument("--learning-rate", type=float, help="the peak; its default suits the model's size")
    parser.add_argument("--warmup-steps", type=int, help="default: 3 %% of --steps")
    parser.add_argument("--text", default=__file__, help="a UTF-8 file to train on; default: this script")
    parser.add_argument("--tokenizer", help="a tokenizer.json, or transformers' name; default: --model's")
    parser.add_argument("--model", help="a transformers checkpoint to start from; default: random weights")
    add_options(parser)
    return parser.parse_args()


def read_config(checkpoint: str | None) -> PretrainedConfig:
    """Return the plan's transformers config, or that of ``checkpoint``, which must have the same shapes."""
    values = json.loads((HERE / "config.json").read_text(encoding="utf-8"))
    planned = AutoConfig.for_model(**values)
    if checkpoint is None:
        return planned
    # A checkpoint keeps its own epsilons, activation and rotary base; these are the plan's.
    forced = ("drop", "router", "attn_implementation")
    overrides = {name: value for name, value in values.items() if any(word in name for word in forced)}
    config: PretrainedConfig = AutoConfig.from_pretrained(checkpoint, **overrides)
    shapes, planned_shapes = list_shapes(config), list_shapes(planned)
    for name in {**planned_shapes, **shapes}:
        if shapes.get(name) != planned_shapes.get(name):
            why = f"its {name} is {shapes.get(name)}, and the plan's {planned_shapes.get(name)}"
            raise SystemExit(f"--model: {why}: export a plan for this model (ss.Architecture.from_hf)")
    return config


def list_shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a config's parameters, by name."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def wrap_model(
    plan: SimpleNamespace, config: TransformerConfig, model: torch.nn.Module
) -> DistributedDataParallel:
    """Move gradients into contiguous buffers, in which they are reduced and updated weights all-gathered."""
    layout = plan.layout
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=layout.grad_reduce_in_fp32 is not False,
        use_distributed_optimizer=layout.distributed_optimizer,
        overlap_grad_reduce=layout.overlap_grad_reduce,
        overlap_param_gather=layout.overlap_param_gather,
    )
    wrapped = DistributedDataParallel(config, options, model)
    config.finalize_model_grads_func = finalize_model_grads
    if layout.overlap_grad_reduce:
        config.no_sync_func = wrapped.no_sync  # until the last micro-batch
    return wrapped


def build_optimizer(
    plan: SimpleNamespace, config: TransformerConfig, wrapped: DistributedDataParallel
) -> MegatronOptimizer:
    """Build Megatron-core's AdamW, which clips too; for bf16 weights it keeps fp32 main weights."""
    options = OptimizerConfig(
        optimizer="adam",
        lr=0.0,  # set at every step
        weight_decay=0.1,
        adam_beta1=0.9,
        adam_beta2=0.95,
        params_dtype=config.params_dtype,
        bf16=config.bf16,
        use_distributed_optimizer=plan.layout.distributed_optimizer,
        overlap_param_gather=plan.layout.overlap_param_gather,
        clip_grad=1.0,
    )
    optimizer = get_megatron_optimizer(options, [wrapped], use_gloo_process_groups=False)
    for group in optimizer.param_groups:  # vectors (norms, biases) are not decayed
        group["weight_decay"] = 0.1 * group["wd_mult"]
    config.grad_scale_func = optimizer.scale_loss
    return optimizer


def read_tokens(text: str, tokenizer: str | None, seq_len: int, vocab_size: int) -> torch.Tensor:
    """Tokenize a text file, repeated until it fills one sequence; without a tokenizer a token is a byte."""
    data = Path(text).read_bytes()
    end = None
    if not tokenizer:
        ids = list(data)
    elif tokenizer.endswith(".json"):
        fast = Tokenizer.from_file(tokenizer)
        ids, end = fast.encode(data.decode("utf-8")).ids, fast.token_to_id("<|endoftext|>")
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
    """Return the learning rate of ``step``: a linear warm-up, then half a cosine down to 0."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (1 + math.cos(math.pi * done)) / 2


def train_step(
    wrapped: DistributedDataParallel, optimizer: MegatronOptimizer, batch: torch.Tensor
) -> torch.Tensor:
    """Train on [micro-batch, sequence, token]. Return the mean loss over all ranks."""
    total = torch.zeros((), device=batch.device)

    def compute_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mean = losses[:, :-1].float().mean()  # the last token of a sequence has no next one
        total.add_(mean.detach() / len(batch))
        return mean, {}

    def forward(
        micro_batches: Iterator[torch.Tensor], model: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]]:
        tokens = next(micro_batches)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return model(tokens, positions, None, labels=tokens.roll(-1, dims=1)), compute_loss

    wrapped.zero_grad_buffer()
    optimizer.zero_grad()
    # Run all micro-batches forward and backward; gradients are reduced after the last.
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(batch),
        model=wrapped,
        num_microbatches=len(batch),
        seq_length=batch.shape[2],
        micro_batch_size=batch.shape[1],
        forward_only=False,
    )
    optimizer.step()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def exit_process() -> None:
    """End the process at once: threads of Megatron-core's process groups can abort a closing interpreter."""
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    """Train as planned, and print each step's loss."""
    options, plan = check_options(read_options()), read_plan()
    recipe, cluster, tp = plan.recipe, plan.cluster, plan.layout.tp

    # Meet the other ranks. torchrun and accelerate launch pass each process its rank in variables.
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "0"))
    local_rank, planned = int(os.environ.get("LOCAL_RANK", "0")), cluster.gpus_per_node * cluster.num_nodes
    if world_size != planned:
        raise SystemExit(f"the plan has {planned} ranks, and {world_size} were started: see FILES.md")
    if options.save and rank == 0:
        Path(options.save).mkdir(parents=True, exist_ok=True)  # fails now, not after the training
    on_gpu = cluster.gpu.vendor != "cpu"
    device = torch.device(f"cuda:{local_rank}" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    # Long: ranks wait for others that load weights.
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=datetime.timedelta(hours=6))
    parallel_state.initialize_model_parallel(tp, create_gloo_process_groups=False)

    # Build this rank's shard of the model. The whole one fills host memory: one rank of a node at a time.
    model_parallel_cuda_manual_seed(0)
    source = read_config(options.model)
    config = build_config(plan, source)
    model = build_model(source, config, recipe.seq_len)
    for turn in range(cluster.gpus_per_node):
        if turn == local_rank:
            load_weights(model, source, options.model)
        dist.barrier()
    wrapped = wrap_model(plan, config, model.to(device).train())
    optimizer = build_optimizer(plan, config, wrapped)
    checkpoints = Checkpoints(options, wrapped, optimizer)

    # Each group of tensor-parallel ranks takes its own share of every batch.
    tokens = read_tokens(options.text, options.tokenizer or options.model, recipe.seq_len, source.vocab_size)
    data_rank, data_ranks = rank // tp, world_size // tp
    rows = recipe.global_batch_size // data_ranks

    # Train.
    peak, warmup = options.learning_rate, options.warmup_steps
    if peak is None:
        num_parameters = sum(parameter.numel() for parameter in model.parameters()) * tp
        peak = choose_peak_rate(num_parameters, options.model)
    if warmup is None:
        warmup = math.ceil(0.03 * options.steps)
    for step in range(checkpoints.load(), options.steps):
        began = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = compute_rate(step, peak, options.steps, warmup)
        sequences = take_sequences(tokens, (step * data_ranks + data_rank) * rows, rows, recipe.seq_len)
        batch = sequences.view(-1, recipe.micro_batch_size, recipe.seq_len).to(device)
        loss = train_step(wrapped, optimizer, batch).item()
        if rank == 0:
            speed = recipe.global_batch_size * recipe.seq_len / (time.perf_counter() - began)
            print(f"step {step + 1} loss {loss:.6f} {speed:,.0f} tokens/s", flush=True)
        checkpoints.save(step + 1)

    # Save, all ranks together.
    if options.save:
        if plan.layout.overlap_param_gather:
            wrapped.start_param_sync(
                force_sync=True
            )  # the last update, which the next forward would all-gather
        save_weights(model, source, options.save)
        save_tokenizer(options)
    dist.barrier()
    exit_process()


if __name__ == "__main__":
    main()
