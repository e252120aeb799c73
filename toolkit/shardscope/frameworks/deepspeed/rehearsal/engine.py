"""Shared setup of ZeRO and pipeline rehearsals: a rank's world, its model and DeepSpeed's engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from shardscope.core.ops import ceil_div
from shardscope.frameworks.deepspeed.files.config import NVME_FOLDER, build_deepspeed_config
from shardscope.frameworks.deepspeed.layout import get_layout
from shardscope.frameworks.deepspeed.rehearsal.experts import (
    replace_moe_layers,
    separate_expert_groups,
    set_expert_capacity,
)
from shardscope.frameworks.deepspeed.rehearsal.fake_device import FakeDevice
from shardscope.frameworks.deepspeed.rehearsal.labels import label_allocations
from shardscope.memory.activations.head import resolve_loss
from shardscope.rehearsal.fake_world import fake_ranks, fake_tensors
from shardscope.rehearsal.patching import Patch, patch_attributes
from shardscope.rehearsal.quantization import fake_quantile_maps
from shardscope.training.accounting.tensors import list_optimizer_tensors
from shardscope.training.model.lora import add_adapters
from shardscope.training.model.loss import apply_chunked_loss
from shardscope.training.model.model import build_model_config, choose_attention
from shardscope.training.model.recompute import apply_recompute
from shardscope.training.optimizers.optimizers import build_optimizer

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    from shardscope.core.plan import Plan
    from shardscope.memory.report import Component
    from shardscope.rehearsal.tracker import Tracker

ParameterGroup = dict[str, object]
"""Parameter group of a torch optimizer."""
NUM_STEPS = 2
"""The first step creates the optimizer state, and ZeRO-3 records the order of modules; the second, which is
reported, prefetches by it, as all later steps do."""
_DTYPES = {"fp32": torch.float32, "fp16-mixed": torch.float16}


@contextlib.contextmanager
def build_world(plan: Plan, deepspeed: ModuleType, rank: int) -> Iterator[tuple[Tracker, str]]:
    """Run as ``rank`` of the plan's world. Yield the tracker of its tensors and the name of its device."""
    tp, vocab = plan.degrees.tp, plan.architecture.vocab_size
    separate_host = _moves_to_host(plan)
    with (
        fake_ranks(plan.world_size, rank),
        FakeDevice(deepspeed, plan.world_size, rank, separate_host=separate_host) as device,
        fake_tensors(
            plan.on_gpu,
            {vocab, ceil_div(vocab, tp)},
            separate_host=separate_host,
            has_flash=plan.cluster.gpu.has_flash_attention,
        ) as tracker,
        device.fake_values(),
        label_allocations(tracker, plan),
        set_expert_capacity(plan),
    ):
        yield tracker, device.name


def _moves_to_host(plan: Plan) -> bool:
    """Return whether anything is offloaded: on CPU ranks offloading to the host changes nothing."""
    layout = get_layout(plan)
    devices = {layout.offload_optimizer, layout.offload_params}
    uses_host = "cpu" in devices or plan.recipe.recompute == "offload"
    return "nvme" in devices or bool(plan.on_gpu and uses_host)


def build_config(plan: Plan, num_micro_batches: int, nvme_folder: str = NVME_FOLDER) -> dict[str, object]:
    """Return DeepSpeed's configuration with the number of rehearsed micro-batches."""
    config = build_deepspeed_config(plan, nvme_folder=nvme_folder)
    config["gradient_accumulation_steps"] = num_micro_batches
    config.pop("train_batch_size", None)
    return config


def initialize_engine(
    plan: Plan, deepspeed: ModuleType, model: torch.nn.Module, config: dict[str, object]
) -> tuple[DeepSpeedEngine, torch.optim.Optimizer]:
    """Return DeepSpeed's engine around ``model``, and its (ZeRO) optimizer."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    client = None
    if plan.recipe.optimizer in _CLIENTS:
        with fake_quantile_maps() if plan.recipe.optimizer == "adamw_8bit" else contextlib.nullcontext():
            client = build_optimizer(plan.recipe.optimizer, trained)
        if plan.degrees.ep > 1:
            from shardscope.frameworks.deepspeed.engine.experts_module import separate_experts

            separate_experts(client)
    else:
        config["optimizer"] = _build_optimizer_config(plan)
    groups = _group_by_decay(trained)
    if plan.degrees.ep > 1:
        groups = separate_expert_groups(groups)
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, model_parameters=groups, optimizer=client, config=config
    )
    return engine, optimizer


def _group_by_decay(trained: list[torch.nn.Parameter]) -> list[ParameterGroup]:
    """Return groups of matrices and of vectors, which do not decay: DeepSpeed flattens each group."""
    # In stage 3 the parameters are already partitioned; ds_shape is their full shape.
    dimensions = [len(getattr(parameter, "ds_shape", parameter.shape)) for parameter in trained]
    vectors = [parameter for parameter, number in zip(trained, dimensions, strict=True) if number < 2]
    matrices = [parameter for parameter, number in zip(trained, dimensions, strict=True) if number >= 2]
    if not vectors:
        return [{"params": matrices}]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


_CLIENTS = ("adamw_8bit", "adafactor")
"""Optimizers that DeepSpeed's configuration cannot name: it runs an object of torch's on its flat buffers."""


def _build_optimizer_config(plan: Plan) -> dict[str, object]:
    """Return the optimizer section: DeepSpeed's FusedAdam and FusedLion on GPUs, else torch's optimizers."""
    if plan.recipe.optimizer == "lion":
        return {"type": "Lion", "params": {"lr": 1e-4}}
    if plan.recipe.optimizer == "sgd":
        return {"type": "SGD", "params": {"lr": 1e-4, "momentum": 0.9}}
    if plan.on_gpu:
        return {"type": "AdamW", "params": {"lr": 1e-4}}
    return {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True, "fused": True}}


def build_model(
    plan: Plan, deepspeed: ModuleType, config: dict[str, object], tracker: Tracker
) -> torch.nn.Module:
    """Build the plan's model in the compute type; stage 3 partitions each tensor when it is created."""
    from transformers import AutoModelForCausalLM

    dtype = _DTYPES.get(plan.recipe.precision, torch.bfloat16)
    arch = plan.architecture
    attention = choose_attention(arch, "eager" if plan.recipe.attention == "eager" else None)
    # GPT-2's default probabilities are 0.1, which would save dropout masks.
    values = build_model_config(arch, plan.recipe.dropout)
    partitions = get_layout(plan).stage == 3
    # transformers' modules of experts cannot be built inside zero.Init: partition them afterwards.
    inside_init = partitions and arch.mixture_of_experts is None
    built_on_host = (partitions and not inside_init) or plan.degrees.tp > 1 or plan.degrees.ep > 1
    with (
        deepspeed.zero.Init(config_dict_or_path=config) if inside_init else contextlib.nullcontext(),
        # A model built on the host takes no device memory: AutoTP moves only shards to the device.
        tracker.pause() if built_on_host else contextlib.nullcontext(),
        _skip_initialization(),
    ):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(
            values, attn_implementation=attention, dtype=dtype
        )
        if built_on_host:
            # transformers creates the router of DeepSeek-V2 in fp32; the training casts it, too.
            model = model.to(dtype)
    if partitions and not inside_init:
        deepspeed.zero.Init(module=model, config_dict_or_path=config)
    num_built = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())
    assert num_built == arch.num_parameters, (num_built, arch.num_parameters)
    if plan.degrees.ep > 1:
        replace_moe_layers(plan, model, tracker)
    if plan.recipe.method != "full":
        model = add_adapters(model, plan.architecture, plan.recipe)
    apply_recompute(model, plan.recipe.recompute, plan.recipe.recompute_interval)
    if resolve_loss(plan) == "chunked":
        apply_chunked_loss(_unwrap_peft(model))
    model.train()
    return model


def _unwrap_peft(model: torch.nn.Module) -> torch.nn.Module:
    """Return transformers' model, without peft's wrapper."""
    get_base_model = getattr(model, "get_base_model", None)
    base: torch.nn.Module = model if get_base_model is None else get_base_model()
    return base


def label_state(tracker: Tracker, engine: DeepSpeedEngine, optimizer: torch.optim.Optimizer) -> None:
    """Label the tensors that live across steps: flat weights, fp32 main weights, moments and buckets."""
    # Weights. Stage 3 has a flat buffer of partitions, and the data of a parameter is all-gathered, if any.
    flat = getattr(optimizer, "lp_param_buffer", None)
    full: Component = "parameters" if flat is None else "gather_buffers"
    tracker.label((p.data for p in engine.module.parameters() if p.numel()), full)
    for name in ("bit16_groups_flat", "fp16_groups_flat", "bf16_groups_flat"):
        tracker.label(getattr(optimizer, name, ()), "parameters")
    if flat is not None:
        tracker.label([flat], "parameters")
    # Gradients, and the buffers of their reduction and offloading.
    tracker.label(getattr(optimizer, "fp32_groups_gradients_flat", ()), "gradients")
    staging = getattr(optimizer, "temp_grad_buffer_for_gpu_offload", None)
    if staging is not None:
        tracker.label([staging], "gather_buffers")
    buffer = getattr(optimizer, "grad_partitions_flat_buffer", None)
    if buffer is not None:
        tracker.label([buffer], "gradients")
    for bucket in getattr(optimizer, "ipg_buckets", {}).values():
        buffers = bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer]
        tracker.label((buffer for buffer in buffers if buffer is not None), "gather_buffers")
    # Main weights and moments.
    tracker.label(getattr(optimizer, "fp32_groups_flat_partition", ()), "optimizer")
    for name in ("single_partition_of_fp32_groups", "fp32_groups_flat", "fp32_partitioned_groups_flat"):
        main = getattr(optimizer, name, None)
        if main is not None:
            tracker.label(main, "optimizer")
    tracker.label(list_optimizer_tensors(getattr(optimizer, "optimizer", optimizer)), "optimizer")


@contextlib.contextmanager
def _skip_initialization() -> Iterator[None]:
    """Replace the initialization of torch and of transformers by no-ops: fake tensors have no values."""
    # transformers keeps the functions that it finds at its import, so import it before they are replaced.
    from transformers import PreTrainedModel

    patches: list[Patch] = [
        (torch.nn.init, name, lambda tensor, *_, **__: tensor)
        for name in dir(torch.nn.init)
        if name.endswith("_") and not name.startswith("_")
    ]
    # Values that a family computes, such as Qwen3.5's A_log, do not fit the partitions of stage 3:
    # from_pretrained under DeepSpeed does not initialize, either (transformers 5.24, no_init_weights).
    patches.append((PreTrainedModel, "initialize_weights", lambda *_, **__: None))
    with patch_attributes(patches):
        yield
