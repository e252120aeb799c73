"""Train a language model with PyTorch's FSDP2: every rank has one shard of parameters, gradients and AdamW.

    ./torchrun.sh --text corpus.txt --checkpoints checkpoints --save trained

Shardscope's ``plan.export(folder)`` wrote this file, ``checkpoints.py`` and ``script_options.py``, which it
imports, and the two that it reads: ``plan.json`` (the plan) and ``config.json`` (transformers' config).

Before a decoder layer runs, its parameters are all-gathered, while the previous layer still computes; then
they are freed, and all-gathered again for backward. Gradients are reduce-scattered. With replicas (HSDP),
ranks with the same shard all-reduce its gradient once a step. Each rank updates its shard.

The losses are those of ``ss.launch(plan, ss.Pretrain(text="corpus.txt"))`` with that task's tokenizer
(``--tokenizer``: the path ``shardscope.training.data.tokenizer.SHIPPED_TOKENIZER``), and with ``--model``
those of ``ss.Finetune("folder", "corpus.txt")``.
"""

import argparse
import functools
import json
import math
import os
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy
import torch
import torch.distributed as dist
from checkpoints import Checkpoints
from script_options import add_options, check_options, save_tokenizer
from tokenizers import Tokenizer
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.checkpoint import checkpoint as recompute
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel

HERE = Path(__file__).parent
WHOLE_BYTES = 2**30  # of fp32 weights; larger models are initialized shard by shard, on no rank as a whole


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


def move_to_meta(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return ``parameter`` without values. A tied one is registered twice, and must stay one object."""
    return parameter if parameter.is_meta else torch.nn.Parameter(parameter.to("meta"))


def build_sharded(plan: SimpleNamespace, checkpoint: str | None, device: torch.device) -> PreTrainedModel:
    """Build the model in shards, with random weights or those of ``checkpoint``."""
    recipe, layout = plan.recipe, plan.layout
    # First on the meta device, without memory: only buffers, such as rotary tables, have values.
    with register_module_parameter_registration_hook(lambda _, name, value: move_to_meta(value)):  # type: ignore[arg-type]
        model = build_model(recipe, None)
    is_whole = checkpoint is not None or 4 * model.num_parameters() <= WHOLE_BYTES
    if is_whole:
        torch.manual_seed(0)  # the same random weights on every rank
        model = build_model(recipe, checkpoint)
    replicas, shards = layout.replicate, dist.get_world_size() // layout.replicate
    mesh = init_device_mesh(device.type, (replicas, shards), mesh_dim_names=("replicate", "shard"))
    mesh = mesh if replicas > 1 else mesh["shard"]  # without replicas one axis
    # Mixed precision: parameters are all-gathered in bf16, and gradients are reduced in fp32.
    half, full = (torch.bfloat16, torch.float32) if recipe.precision == "bf16-mixed" else (None, None)
    precision = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=full)
    # CPU offloading: the shards are in host memory, and the optimizer runs there.
    offload = CPUOffloadPolicy(device.type == "cuda") if layout.offload else OffloadPolicy()
    shard = functools.partial(fully_shard, mesh=mesh, mp_policy=precision, offload_policy=offload)
    # Between forward and backward a layer keeps its shard (True), its full parameters (False), or a larger
    # shard of that many ranks (a number); fully_shard expects True for the number of all ranks.
    reshard = layout.reshard_after_forward if layout.reshard_after_forward != shards else True
    # Each call makes one group of collectives: a decoder layer, and last the embedding, norm and head.
    for layer in find_layers(model):
        shard(layer, reshard_after_forward=reshard)
    shard(model)
    if not is_whole:
        initialize_shards(model, torch.device("cpu") if layout.offload else device, device)
    return model


def initialize_shards(model: PreTrainedModel, home: torch.device, device: torch.device) -> None:
    """Allocate this rank's shards on ``home``, and fill them with random numbers generated on ``device``."""
    # to_empty allocates parameters, but discards the values of buffers and the tie of embedding and head.
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=home)
    model.tie_weights()
    for name, buffer in model.named_buffers():
        buffer.data = buffers[name].to(device)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)  # fully_shard has replaced all parameters
        shard, mesh = parameter.to_local().detach(), parameter.device_mesh["shard"]
        if parameter.ndim < 2 or name.endswith("bias"):
            shard.fill_(0.0 if name.endswith("bias") else 1.0)  # 1: the weight of a norm
            continue
        # Every rank generates all numbers (of stacked experts one matrix at a time), and copies its rows.
        first = -(-len(parameter) // mesh.size()) * mesh.get_local_rank()
        generator = torch.Generator(device=device).manual_seed(zlib.crc32(name.encode()))
        rows = 1 if parameter.ndim == 3 else len(parameter)
        for start in range(0, len(parameter), rows):
            numbers = torch.empty((rows, *parameter.shape[1:]), dtype=parameter.dtype, device=device)
            numbers.normal_(0.0, getattr(model.config, "initializer_range", 0.02), generator=generator)
            low, high = max(first, start), min(first + len(shard), start + rows)
            if low < high:
                shard[low - first : high - first] = numbers[low - start : high - start]


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


def choose_peak_rate(num_parameters: int, checkpoint: str | None) -> float:
    """Return a usual peak learning rate: of pretraining, or of training ``checkpoint`` further."""
    return 2e-5 if checkpoint else 1e-3 if num_parameters < 1e9 else 1e-4


def compute_rate(step: int, peak: float, steps: int, warmup: int) -> float:
    """Return the learning rate of ``step``: a linear warm-up, then half a cosine down to 0."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (1 + math.cos(math.pi * done)) / 2


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    """Train on [micro-batch, sequence, token]. Return the mean loss over all ranks."""
    assert isinstance(model, dist.fsdp.FSDPModule)  # fully_shard has added this class
    total = torch.zeros((), device=batch.device)
    for index, micro in enumerate(batch):
        # Every backward reduce-scatters gradients; replicas all-reduce them in the last one only.
        model.set_is_last_backward(index == len(batch) - 1)
        model.set_requires_all_reduce(index == len(batch) - 1)
        loss = model(input_ids=micro, labels=micro).loss / len(batch)
        loss.backward()
        total += loss.detach().float()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    dist.all_reduce(total)
    return total / dist.get_world_size()


def exit_process() -> None:
    """End the process at once: threads of FSDP2's process groups can abort a closing interpreter."""
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


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
    # gloo communicates tensors in host memory (offloaded shards), NCCL those on GPUs.
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    model = build_sharded(plan, options.model, device).train()
    optimizer = build_optimizer(model, recipe.optimizer)  # its state is sharded as the parameters are
    checkpoints = Checkpoints(options, model, optimizer)

    # Each rank trains on its own part of every batch, and has its own dropout masks.
    seq_len, tokenizer = recipe.seq_len, options.tokenizer or options.model
    tokens = read_tokens(options.text, tokenizer, seq_len, model.config.vocab_size)
    rows = recipe.global_batch_size // world_size
    torch.manual_seed(1 + rank)
    usual = choose_peak_rate(model.num_parameters(), options.model)
    peak = usual if options.learning_rate is None else options.learning_rate
    warmup = math.ceil(0.03 * options.steps) if options.warmup_steps is None else options.warmup_steps
    for step in range(checkpoints.load(), options.steps):
        began = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = compute_rate(step, peak, options.steps, warmup)
        sequences = take_sequences(tokens, (step * world_size + rank) * rows, rows, seq_len)
        batch = sequences.view(-1, recipe.micro_batch_size, seq_len).to(device)
        loss = train_step(model, optimizer, batch).item()
        if rank == 0:
            speed = recipe.global_batch_size * seq_len / (time.perf_counter() - began)
            print(f"step {step + 1} loss {loss:.6f} {speed:,.0f} tokens/s", flush=True)
        checkpoints.save(step + 1)

    # Save: all ranks all-gather the weights, tensor by tensor, into the first rank's host memory.
    if options.save:
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(model, options=whole)
        if model.config.tie_word_embeddings:
            weights.pop("lm_head.weight", None)  # it is the embedding
        if rank == 0:
            model.config.use_cache = True  # off while training
            model.save_pretrained(options.save, state_dict=weights)
            save_tokenizer(options)
    dist.barrier()
    exit_process()


if __name__ == "__main__":
    main()
