"""Train a language model with PyTorch's DistributedDataParallel (DDP): a whole replica on every rank.

    ./torchrun.sh --text corpus.txt --checkpoints checkpoints --save trained

Shardscope's ``plan.export(folder)`` wrote this file, ``checkpoints.py`` and ``script_options.py``, which it
imports, and the two that it reads: ``plan.json`` (batch, precision, recomputation, LoRA) and ``config.json``
(the model's transformers config). It imports torch, transformers and tokenizers, and peft for LoRA, and
nothing of Shardscope.

Every rank builds the same model and trains it on other sequences. Before each optimizer step the gradients
are averaged over all ranks, so replicas stay equal. DDP all-reduces them in buckets, overlapped with the rest
of the backward pass; with several micro-batches in a step it does so in the last one only.

The losses are those of ``ss.launch(plan, ss.Pretrain(text="corpus.txt"))`` with that task's tokenizer
(``--tokenizer``: the path ``shardscope.training.data.tokenizer.SHIPPED_TOKENIZER``), and with ``--model``
those of ``ss.Finetune("folder", "corpus.txt")``.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import time
import zlib
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy
import torch
import torch.distributed as dist
from checkpoints import Checkpoints
from script_options import add_options, check_options, save_tokenizer
from tokenizers import Tokenizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as recompute
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel

if TYPE_CHECKING:
    from peft import PeftModel

HERE = Path(__file__).parent
MIXED = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
"""Types of matmuls in mixed precision; otherwise they have the type of the parameters."""


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
    """Return the plan's transformers config, or that of ``checkpoint``, which must have the same sizes."""
    values = json.loads((HERE / "config.json").read_text(encoding="utf-8"))
    planned: PretrainedConfig = AutoConfig.for_model(**values)
    if checkpoint is None:
        return planned
    # A checkpoint keeps its own epsilons, activation and rotary base; these are the plan's.
    forced = ("drop", "router", "attn_implementation")
    overrides = {name: value for name, value in values.items() if any(word in name for word in forced)}
    config: PretrainedConfig = AutoConfig.from_pretrained(checkpoint, **overrides)
    sizes, planned_sizes = list_sizes(config), list_sizes(planned)
    for name in {**planned_sizes, **sizes}:
        if sizes.get(name) != planned_sizes.get(name):
            why = f"its {name} is {sizes.get(name)}, and the plan's {planned_sizes.get(name)}"
            raise SystemExit(f"--model: {why}: export a plan for this model (ss.Architecture.from_hf)")
    return config


def list_sizes(config: PretrainedConfig) -> dict[str, object]:
    """Return the shapes of a config's parameters by name, and the number of experts per token."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return {**shapes, "num_experts_per_tok": getattr(config, "num_experts_per_tok", None)}


def build_model(recipe: SimpleNamespace, checkpoint: str | None) -> PreTrainedModel:
    """Build the model on the host, with random weights from the current seed or those of ``checkpoint``."""
    config = read_config(checkpoint)
    kind = torch.bfloat16 if recipe.precision == "bf16" else torch.float32
    if checkpoint:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, config=config, dtype=kind)
    else:
        # Initialize in fp32, whatever the parameters' type. Buffers stay in fp32: rotary tables need it.
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(kind)
    model.config.use_cache = False
    if recipe.recompute == "full":
        # Save only the input of a layer, and run its forward again in the backward pass.
        for layer in find_layers(model)[:: recipe.recompute_interval]:
            layer.forward = functools.partial(recompute, layer.forward, use_reentrant=False)
    return model


def find_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the decoder layers, whose class transformers lists as one not to split over devices."""
    return [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]


def add_adapters(base: PreTrainedModel, recipe: SimpleNamespace, *, seeded_by_name: bool) -> PeftModel:
    """Freeze ``base`` and add LoRA adapters; in mixed precision the frozen base is in half precision."""
    from peft import LoraConfig, get_peft_model

    trained_kind = next(base.parameters()).dtype
    for parameter in base.parameters():
        parameter.data = parameter.data.to(MIXED.get(recipe.precision, trained_kind))
    attention = {
        name.split(".")[-1]
        for name, module in find_layers(base)[0].named_modules()
        if "att" in name.split(".")[0] and getattr(getattr(module, "weight", None), "ndim", 0) == 2
    }
    rank = recipe.lora_rank or 16
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=2 * rank if recipe.lora_alpha is None else recipe.lora_alpha,
        use_rslora=recipe.use_rslora,
        use_dora=recipe.use_dora,
        lora_dropout=recipe.lora_dropout,
        target_modules=recipe.lora_targets or sorted(attention),
    )
    # autocast_adapter_dtype would make them fp32, also where the base is trained in bf16.
    model = get_peft_model(base, config, autocast_adapter_dtype=False)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(trained_kind)
        if seeded_by_name and "lora_A" in name:
            # peft's own kaiming_uniform_(a=sqrt(5)), with a seed that depends on the name only.
            bound, generator = parameter.shape[-1] ** -0.5, torch.Generator()
            parameter.data.uniform_(-bound, bound, generator=generator.manual_seed(zlib.crc32(name.encode())))
    return model


def build_optimizer(model: torch.nn.Module, name: str) -> torch.optim.Optimizer:
    """Build the plan's AdamW. Vectors (norms, biases) have no weight decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    foreach = name == "adamw_foreach"
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), foreach=foreach, fused=not foreach)


def read_tokens(text: str, tokenizer: str | None, seq_len: int, vocab_size: int) -> torch.Tensor:
    """Tokenize a text file, repeated until it fills one sequence; without a tokenizer a token is a byte."""
    data = Path(text).read_bytes()
    if not tokenizer:
        ids, end = list(data), None
    elif tokenizer.endswith(".json"):
        file = Tokenizer.from_file(tokenizer)
        ids, end = file.encode(data.decode("utf-8")).ids, file.token_to_id("<|endoftext|>")
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


def choose_peak_rate(num_parameters: int, checkpoint: str | None, has_adapters: bool = False) -> float:
    """Return a usual peak learning rate: of pretraining, or of training ``checkpoint`` further."""
    if checkpoint:
        return 2e-4 if has_adapters else 2e-5
    return 1e-3 if num_parameters < 1e9 else 1e-4


def compute_rate(step: int, peak: float, steps: int, warmup: int) -> float:
    """Return the learning rate of ``step``: a linear warm-up, then half a cosine down to 0."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (1 + math.cos(math.pi * done)) / 2


def train_step(
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    micro_batches: torch.Tensor,
    compute: torch.dtype | None,
) -> torch.Tensor:
    """Train on one batch, [micro-batch, sequence, token]. Return the mean loss over all ranks."""
    total = torch.zeros((), device=micro_batches.device)
    for index, micro in enumerate(micro_batches):
        # Gradients of all micro-batches accumulate on the rank; only the last backward all-reduces them.
        is_last = index == len(micro_batches) - 1
        with nullcontext() if is_last else ddp.no_sync():
            # Mixed precision: matmuls run in half precision, parameters and gradients are fp32.
            with torch.autocast(micro.device.type, dtype=compute) if compute else nullcontext():
                loss = ddp(input_ids=micro, labels=micro).loss / len(micro_batches)
            scaler.scale(loss).backward()
        total += loss.detach().float()
    # The scaler is active in fp16 only, where small gradients would underflow to zero.
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), max_norm=1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    dist.all_reduce(total)
    return total / dist.get_world_size()


def main() -> None:
    """Train as planned, and print each step's loss."""
    options, plan = check_options(read_options()), read_plan()
    recipe, cluster = plan.recipe, plan.cluster
    planned = cluster.gpus_per_node * cluster.num_nodes

    # Connect the ranks. torchrun and accelerate launch set these environment variables.
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "0"))
    if world_size != planned:
        raise SystemExit(f"the plan has {planned} ranks, and {world_size} were started: see FILES.md")
    if options.save and rank == 0:
        Path(options.save).mkdir(parents=True, exist_ok=True)  # fails now, not after the training
    on_gpu = cluster.gpu.vendor != "cpu"
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")

    # The same seed on every rank, so that replicas start equal. Gradients are views of DDP's buckets.
    torch.manual_seed(0)
    base = build_model(recipe, options.model)
    has_adapters, is_stored = recipe.method == "lora", options.model is not None
    model = add_adapters(base, recipe, seeded_by_name=is_stored) if has_adapters else base
    replica: torch.nn.Module = model.train()
    ddp = DistributedDataParallel(
        replica.to(device), device_ids=[device] if on_gpu else None, gradient_as_bucket_view=True
    )
    optimizer = build_optimizer(model, recipe.optimizer)
    compute = MIXED.get(recipe.precision)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**12, enabled=compute == torch.float16)
    checkpoints = Checkpoints(options, model, optimizer, scaler)

    # Each rank trains on its own part of every batch, and has its own dropout masks.
    seq_len, tokenizer = recipe.seq_len, options.tokenizer or options.model
    tokens = read_tokens(options.text, tokenizer, seq_len, base.config.vocab_size)
    rows = recipe.global_batch_size // world_size
    torch.manual_seed(1 + rank)

    usual = choose_peak_rate(base.num_parameters(), options.model, has_adapters)
    peak = usual if options.learning_rate is None else options.learning_rate
    warmup = math.ceil(0.03 * options.steps) if options.warmup_steps is None else options.warmup_steps
    for step in range(checkpoints.load(), options.steps):
        began = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = compute_rate(step, peak, options.steps, warmup)
        sequences = take_sequences(tokens, (step * world_size + rank) * rows, rows, seq_len)
        micro_batches = sequences.view(-1, recipe.micro_batch_size, seq_len).to(device)
        loss = train_step(ddp, optimizer, scaler, micro_batches, compute).item()
        if rank == 0:
            speed = recipe.global_batch_size * seq_len / (time.perf_counter() - began)
            print(f"step {step + 1} loss {loss:.6f} {speed:,.0f} tokens/s", flush=True)
        checkpoints.save(step + 1)

    # Save. Replicas are equal, so the first rank's is enough.
    if options.save and rank == 0:
        base.config.use_cache = True  # off while training
        model.save_pretrained(options.save)
        save_tokenizer(options)
    dist.barrier()
    # First the replica, whose reducer also holds the group: freed after it, it would close gloo's
    # connections while it has the interpreter's lock, which a thread of gloo may wait for.
    del ddp
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
