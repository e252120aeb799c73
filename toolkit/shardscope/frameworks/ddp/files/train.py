"""Train a language model with PyTorch's DistributedDataParallel (DDP): a whole replica on every rank.

    torchrun --nproc-per-node 8 train.py --text corpus.txt

Shardscope's ``plan.export(folder)`` wrote this file and the two that it reads: ``plan.json`` (batch,
precision, recomputation, LoRA) and ``config.json`` (the model's transformers config). It imports torch,
transformers and tokenizers, and peft for LoRA, and nothing of Shardscope.

Every rank builds the same model and trains it on other sequences. Before each optimizer step the gradients
are averaged over all ranks, so replicas stay equal. DDP all-reduces them in buckets, overlapped with the rest
of the backward pass; with several micro-batches in a step it does so in the last one only.

The losses are those of ``ss.launch(plan, ss.Pretrain(text="corpus.txt"))`` with that task's tokenizer
(``--tokenizer``: the path ``shardscope.training.data.tokenizer.SHIPPED_TOKENIZER``), and with ``--model``
those of ``ss.Finetune(weights="folder", text="corpus.txt")``.
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
from typing import Any

import numpy
import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
MAX_GRAD_NORM = 1.0
MIXED = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
"""Types of matmuls in mixed precision; otherwise they have the type of the parameters."""


def read_json(name: str) -> dict[str, Any]:
    """Read a JSON file in the folder of this script."""
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
    parser.add_argument("--save", help="a folder for the trained weights, as transformers or peft opens it")
    return parser.parse_args()


def read_config(source: str | None) -> Any:
    """Return the plan's transformers config, or that of the checkpoint ``source`` of the same sizes."""
    values = read_json("config.json")
    planned = AutoConfig.for_model(**values)
    if source is None:
        return planned
    # These options are the plan's; a checkpoint keeps its own epsilons, activation and rotary base.
    planned_options = ("drop", "router", "attn_implementation")
    changes = {name: value for name, value in values.items() if any(part in name for part in planned_options)}
    config = AutoConfig.from_pretrained(source, **changes)
    sizes, planned_sizes = list_sizes(config), list_sizes(planned)
    for name in {**planned_sizes, **sizes}:
        if sizes.get(name) != planned_sizes.get(name):
            why = f"its {name} is {sizes.get(name)}, and the plan's {planned_sizes.get(name)}"
            raise SystemExit(f"--model: {why}: export a plan for this model (ss.Architecture.from_hf)")
    return config


def list_sizes(config: Any) -> dict[str, Any]:
    """Return the shapes of a config's parameters by name, and the number of experts per token."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return {**shapes, "num_experts_per_tok": getattr(config, "num_experts_per_tok", None)}


def build_model(recipe: dict[str, Any], source: str | None) -> torch.nn.Module:
    """Build the model on the host: random weights from the current seed, or the checkpoint ``source``."""
    config = read_config(source)
    kind = torch.bfloat16 if recipe["precision"] == "bf16" else torch.float32
    if source:
        model = AutoModelForCausalLM.from_pretrained(source, config=config, dtype=kind)
    else:
        # Initialize in fp32, whatever the parameters' type. Buffers stay in fp32: rotary tables need it.
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(kind)
    model.config.use_cache = False
    if recipe["method"] == "lora":
        model = add_adapters(model, recipe, seeded_by_name=source is not None)
    if recipe["recompute"] == "full":
        # Save only the input of a layer, and run its forward again in the backward pass.
        for layer in find_layers(model)[:: recipe["recompute_interval"]]:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    return model


def find_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the decoder layers, whose class transformers lists as one not to split over devices."""
    return [module for module in model.modules() if type(module).__name__ in model._no_split_modules]


def add_adapters(model: torch.nn.Module, recipe: dict[str, Any], *, seeded_by_name: bool) -> torch.nn.Module:
    """Freeze ``model`` and add LoRA adapters; in mixed precision the frozen base is in half precision."""
    from peft import LoraConfig, get_peft_model

    trained_kind = next(model.parameters()).dtype
    for parameter in model.parameters():
        parameter.data = parameter.data.to(MIXED.get(recipe["precision"], trained_kind))
    attention = {
        name.split(".")[-1]
        for name, module in find_layers(model)[0].named_modules()
        if "att" in name.split(".")[0] and getattr(getattr(module, "weight", None), "ndim", 0) == 2
    }
    rank = recipe["lora_rank"] or 16
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=recipe["lora_dropout"],
        target_modules=recipe["lora_targets"] or sorted(attention),
    )
    model = get_peft_model(model, config, autocast_adapter_dtype=False)
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
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim >= 2], "weight_decay": 0.1},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    kind = {"foreach": True} if name == "adamw_foreach" else {"fused": True}
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), **kind)


def read_tokens(text: str, tokenizer: str | None, seq_len: int, vocab_size: int) -> torch.Tensor:
    """Tokenize a text file, repeated until it fills one sequence; without a tokenizer a token is a byte."""
    data = Path(text).read_bytes()
    end = None
    if not tokenizer:
        ids = list(data)
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


def choose_peak_rate(num_parameters: int, source: str | None, has_adapters: bool = False) -> float:
    """Return a usual peak learning rate: of pretraining, or of training the checkpoint ``source`` further."""
    if source:
        return 2e-4 if has_adapters else 2e-5
    return 1e-3 if num_parameters < 1e9 else 1e-4


def compute_rate(step: int, peak: float, steps: int, warmup: int) -> float:
    """Return the learning rate of ``step``: a linear warm-up, then half a cosine down to a tenth."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


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
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), MAX_GRAD_NORM)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    dist.all_reduce(total)
    return total / dist.get_world_size()


def main() -> None:
    """Train as planned, and print each step's loss."""
    options, plan = read_options(), read_json("plan.json")
    recipe, cluster = plan["recipe"], plan["cluster"]
    planned = cluster["gpus_per_node"] * cluster["num_nodes"]

    # Connect the ranks. torchrun and accelerate launch set these environment variables.
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size != planned:
        raise SystemExit(f"the plan has {planned} ranks, and {world_size} were started")
    on_gpu = cluster["gpu"]["vendor"] != "cpu"
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")

    # The same seed on every rank, so that replicas start equal. Gradients are views of DDP's buckets.
    torch.manual_seed(0)
    model = build_model(recipe, options.model).to(device).train()
    ddp = DistributedDataParallel(
        model, device_ids=[device] if on_gpu else None, gradient_as_bucket_view=True
    )
    optimizer = build_optimizer(model, recipe["optimizer"])
    compute = MIXED.get(recipe["precision"])
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**12, enabled=compute == torch.float16)

    # Each rank trains on its own part of every batch, and has its own dropout masks.
    seq_len, micro_batch_size = recipe["seq_len"], recipe["micro_batch_size"]
    tokenizer = options.tokenizer or options.model
    tokens = read_tokens(options.text, tokenizer, seq_len, model.config.vocab_size)
    rows = recipe["global_batch_size"] // world_size
    torch.manual_seed(1 + rank)

    # Train.
    usual = choose_peak_rate(model.num_parameters(), options.model, recipe["method"] == "lora")
    peak = usual if options.learning_rate is None else options.learning_rate
    warmup = min(100, options.steps // 10) if options.warmup_steps is None else options.warmup_steps
    for step in range(options.steps):
        began = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = compute_rate(step, peak, options.steps, warmup)
        sequences = take_sequences(tokens, (step * world_size + rank) * rows, rows, seq_len)
        micro_batches = sequences.view(-1, micro_batch_size, seq_len).to(device)
        loss = train_step(ddp, optimizer, scaler, micro_batches, compute).item()
        if rank == 0:
            speed = recipe["global_batch_size"] * seq_len / (time.perf_counter() - began)
            print(f"step {step + 1} loss {loss:.6f} {speed:,.0f} tokens/s", flush=True)

    # Save. Replicas are equal, so the first rank's is enough.
    if options.save and rank == 0:
        model.config.use_cache = True  # off while training
        model.save_pretrained(options.save)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
