"""Train a language model with DeepSpeed's ZeRO: optimizer state, gradients and parameters in partitions.

    ./torchrun.sh --text corpus.txt --checkpoints checkpoints --save trained

Shardscope's ``plan.export(folder)`` wrote this file, ``checkpoints.py`` and ``script_options.py``, which it
imports, and the three that it reads: ``plan.json`` (batch, recomputation), ``ds_config.json`` (stage,
offloading, precision, buckets) and ``config.json`` (the model's transformers config).

Each rank updates its partition of the weights, and so keeps only that partition of the optimizer state
(stage 1), of the gradients too (stage 2), and of the parameters too (stage 3), which are then all-gathered
module by module as they run. Stage 0 partitions nothing. Offloaded state is in host memory or on NVMe.
``deepspeed.initialize`` wraps model and optimizer in an engine, which accumulates, clips and steps by itself.

The losses are those of ``ss.launch(plan, ss.Pretrain(text="corpus.txt"))`` with that task's tokenizer
(``--tokenizer``: the path ``shardscope.training.data.tokenizer.SHIPPED_TOKENIZER``), and with ``--model``
those of ``ss.Finetune("folder", "corpus.txt")``; but not of random weights above 1 GiB in stage
3, which DeepSpeed partitions while transformers initializes them.
"""

import argparse
import functools
import json
import math
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import numpy
import torch
import torch.distributed as dist
from checkpoints import Checkpoints
from script_options import add_options, check_options, save_tokenizer
from tokenizers import Tokenizer
from torch.utils.checkpoint import checkpoint as recompute
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.integrations import HfDeepSpeedConfig

HERE = Path(__file__).parent
WHOLE_BYTES = 2**30  # of fp32 weights; larger models are partitioned while they are initialized


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
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # of the launcher `deepspeed`
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


def build_model(config: PretrainedConfig, recipe: SimpleNamespace, checkpoint: str | None) -> PreTrainedModel:
    """Build the model on the host, with random weights from the current seed or those of ``checkpoint``."""
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


def build_engine(plan: SimpleNamespace, checkpoint: str | None) -> deepspeed.DeepSpeedEngine:
    """Build the model and its optimizer, and DeepSpeed's engine around them."""
    ds_config = json.loads((HERE / "ds_config.json").read_text(encoding="utf-8"))
    zero, config = ds_config["zero_optimization"], read_config(checkpoint)
    sizes = (math.prod(shape) for shape in list_sizes(config).values() if isinstance(shape, tuple))
    is_whole = zero["stage"] < 3 or 4 * sum(sizes) <= WHOLE_BYTES

    # While this object exists, transformers builds models inside zero.Init, which partitions each tensor as
    # soon as it is created (transformers/integrations/deepspeed.py, is_deepspeed_zero3_enabled).
    partitions_at_init = None if is_whole else HfDeepSpeedConfig(ds_config)
    torch.manual_seed(0)  # the same random weights on every rank
    model = build_model(config, plan.recipe, checkpoint).train()
    optimizer = build_optimizer(model, on_host="offload_optimizer" in zero)
    if zero["stage"] == 3 and is_whole:
        # Cast before zero.Init, which would choose a dtype by the device.
        kind = torch.bfloat16 if "bf16" in ds_config else torch.float32
        for parameter in model.parameters():
            parameter.data = parameter.data.to(kind)
        deepspeed.zero.Init(module=model, config_dict_or_path=ds_config)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config)[0]
    # In stage 0 with half precision DeepSpeed allocates the moments by a step with zero gradients
    # (FP16_Optimizer.initialize_optimizer_states), which must not count for bias correction.
    for state in optimizer.state.values():
        state["step"] = 0 * state["step"]
    del partitions_at_init
    return engine


def build_optimizer(model: torch.nn.Module, on_host: bool) -> torch.optim.Optimizer:
    """Build the plan's AdamW, on the host DeepSpeed's own. Vectors (norms, biases) have no weight decay."""
    # In stage 3 a parameter's own shape is (0,); ds_shape is the shape before partitioning.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    axes = {parameter: len(getattr(parameter, "ds_shape", parameter.shape)) for parameter in trained}
    groups = [
        {"params": [parameter for parameter in axes if axes[parameter] >= 2], "weight_decay": 0.1},
        {"params": [parameter for parameter in axes if axes[parameter] < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]  # DeepSpeed rejects empty groups
    if on_host:
        # Its first start on a machine compiles it, for minutes. One that is killed meanwhile leaves a file
        # "lock" in ~/.cache/torch_extensions/*/cpu_adam, for which later starts wait: delete it.
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        cpu_adam: torch.optim.Optimizer = DeepSpeedCPUAdam(groups, lr=0.0, betas=(0.9, 0.95))
        return cpu_adam
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)


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


def train_step(engine: deepspeed.DeepSpeedEngine, batch: torch.Tensor) -> torch.Tensor:
    """Train on [micro-batch, sequence, token]. Return the mean loss over all ranks."""
    total = torch.zeros((), device=batch.device)
    for micro in batch:
        loss = engine(input_ids=micro, labels=micro).loss
        # The engine divides the loss by the number of micro-batches, and updates after the last of them.
        engine.backward(loss)
        engine.step()
        total += loss.detach().float() / len(batch)
    dist.all_reduce(total)
    return total / dist.get_world_size()


def save_weights(engine: deepspeed.DeepSpeedEngine, folder: str) -> None:
    """All-gather the weights tensor by tensor into the first rank's host memory, and write them."""
    weights = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            if dist.get_rank() == 0:
                weights[name] = parameter.detach().cpu().clone()
    if dist.get_rank() == 0:
        engine.module.config.use_cache = True  # off while training
        engine.module.save_pretrained(folder, state_dict=weights)


def exit_process() -> None:
    """End the process at once: threads of DeepSpeed's process groups can abort a closing interpreter."""
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
    else:
        # Otherwise DeepSpeed first compiles its shared-memory all-reduce (deepspeed/comm/torch.py).
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed("nccl" if on_gpu else "gloo")

    engine = build_engine(plan, options.model)
    checkpoints = Checkpoints(options, engine)

    # Each rank trains on its own part of every batch, and has its own dropout masks.
    seq_len, tokenizer = recipe.seq_len, options.tokenizer or options.model
    tokens = read_tokens(options.text, tokenizer, seq_len, engine.module.config.vocab_size)
    rows = recipe.global_batch_size // world_size
    torch.manual_seed(1 + rank)

    # In stage 3 numel() counts no elements of a partitioned parameter.
    parameters = list(engine.module.parameters())
    num_parameters = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters)
    usual = choose_peak_rate(num_parameters, options.model)
    peak = usual if options.learning_rate is None else options.learning_rate
    warmup = math.ceil(0.03 * options.steps) if options.warmup_steps is None else options.warmup_steps
    for step in range(checkpoints.load(), options.steps):
        began = time.perf_counter()
        for group in engine.optimizer.param_groups:
            group["lr"] = compute_rate(step, peak, options.steps, warmup)
        sequences = take_sequences(tokens, (step * world_size + rank) * rows, rows, seq_len)
        batch = sequences.view(-1, recipe.micro_batch_size, seq_len).to(device)
        loss = train_step(engine, batch).item()
        if rank == 0:
            speed = recipe.global_batch_size * seq_len / (time.perf_counter() - began)
            print(f"step {step + 1} loss {loss:.6f} {speed:,.0f} tokens/s", flush=True)
        checkpoints.save(step + 1)

    if options.save:
        save_weights(engine, options.save)
        save_tokenizer(options)
    dist.barrier()
    exit_process()


if __name__ == "__main__":
    main()
