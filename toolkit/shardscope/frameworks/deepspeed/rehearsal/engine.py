"""Shared setup of ZeRO and pipeline rehearsals: a rank's world, its model and DeepSpeed's engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from shardscope.core.ops import ceil_div
from shardscope.families.registry import family_of
from shardscope.frameworks.deepspeed.files.config import NVME_FOLDER, deepspeed_config
from shardscope.frameworks.deepspeed.rehearsal.experts import in_groups_of_experts, routed, spread
from shardscope.frameworks.deepspeed.rehearsal.fake_device import FakeDevice
from shardscope.frameworks.deepspeed.rehearsal.labels import labelled
from shardscope.memory.activations.head import resolve_loss
from shardscope.rehearsal.fake_world import fake_ranks, fake_tensors
from shardscope.rehearsal.quantization import fake_quantile_maps
from shardscope.training.model.lora import add_adapters
from shardscope.training.model.loss import apply_chunked_loss
from shardscope.training.model.model import DROPOUTS, config_values
from shardscope.training.model.recompute import apply_recompute
from shardscope.training.optimizers.optimizers import build_optimizer

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.report import Component
    from shardscope.rehearsal.tracker import Tracker

NUM_STEPS = 2
"""The first makes the optimizer's state, and ZeRO-3 records in which order modules come; the second, which
counts, prefetches by it, as all others do."""
_TYPES = {"fp32": torch.float32, "fp16-mixed": torch.float16}


@contextlib.contextmanager
def stage_world(plan: Plan, deepspeed: Any, rank: int) -> Iterator[tuple[Tracker, str]]:
    """Be ``rank`` of the plan's: what follows its tensors, and the name of its device."""
    tp, vocab = plan.degrees.tp, plan.architecture.vocab_size
    apart = _moves_to_host(plan)
    with (
        fake_ranks(plan.world_size, rank),
        FakeDevice(deepspeed, plan.world_size, rank, separate_host=apart) as device,
        fake_tensors(
            plan.on_gpu,
            {vocab, ceil_div(vocab, tp)},
            separate_host=apart,
            has_flash=plan.cluster.gpu.has_flash_attention,
        ) as tracker,
        device.numbers(),
        labelled(tracker, plan),
        routed(plan),
    ):
        yield tracker, device.name


def _moves_to_host(plan: Plan) -> bool:
    """Whether anything is offloaded; on CPU ranks the host's memory is the rank's own."""
    layout: Any = plan.layout
    places = {layout.offload_optimizer, layout.offload_params}
    away = "cpu" in places or plan.recipe.recompute == "offload"
    return "nvme" in places or bool(plan.on_gpu and away)


def config_of(plan: Plan, num_micro_batches: int, nvme_folder: str = NVME_FOLDER) -> dict[str, Any]:
    """DeepSpeed's, of as many micro-batches as are played."""
    config = deepspeed_config(plan, nvme_folder=nvme_folder)
    config["gradient_accumulation_steps"] = num_micro_batches
    config.pop("train_batch_size", None)
    return config


def initialised(
    plan: Plan, deepspeed: Any, model: torch.nn.Module, config: dict[str, Any]
) -> tuple[Any, Any]:
    """DeepSpeed's engine around ``model``, and what updates inside of it."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    client = None
    if plan.recipe.optimizer in _CLIENTS:
        with fake_quantile_maps() if plan.recipe.optimizer == "adamw_8bit" else contextlib.nullcontext():
            client = build_optimizer(plan.recipe.optimizer, trained)
        if plan.degrees.ep > 1:
            from shardscope.frameworks.deepspeed.engine.experts_module import expert_groups

            expert_groups(client)
    else:
        config["optimizer"] = _optimizer(plan)
    groups = _in_groups(trained)
    if plan.degrees.ep > 1:
        groups = in_groups_of_experts(groups)
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, model_parameters=groups, optimizer=client, config=config
    )
    return engine, optimizer


def _in_groups(trained: list[torch.nn.Parameter]) -> list[Any]:
    """Matrices apart from vectors, which do not decay: each group is flattened and updated by itself."""
    # Stage 3 has cut tensors by now, and taken their shapes away.
    dimensions = [len(getattr(parameter, "ds_shape", parameter.shape)) for parameter in trained]
    vectors = [one for one, number in zip(trained, dimensions, strict=True) if number < 2]
    if not vectors:
        return trained
    matrices = [one for one, number in zip(trained, dimensions, strict=True) if number >= 2]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


_CLIENTS = ("adamw_8bit", "adafactor")
"""Optimizers that are no names to DeepSpeed: made outside, it runs them over its flat buffers."""


def _optimizer(plan: Plan) -> dict[str, Any]:
    """DeepSpeed's FusedAdam and FusedLion on a GPU, torch's own optimizers elsewhere and otherwise."""
    if plan.recipe.optimizer == "lion":
        return {"type": "Lion", "params": {"lr": 1e-4}}
    if plan.recipe.optimizer == "sgd":
        return {"type": "SGD", "params": {"lr": 1e-4, "momentum": 0.9}}
    if plan.on_gpu:
        return {"type": "AdamW", "params": {"lr": 1e-4}}
    return {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True, "fused": True}}


def model_of(plan: Plan, deepspeed: Any, config: dict[str, Any], tracker: Tracker) -> torch.nn.Module:
    """The plan's model in the type that DeepSpeed computes in; in stage 3 partitioned while it is made."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = _TYPES.get(plan.recipe.precision, torch.bfloat16)
    arch = plan.architecture
    eager = not family_of(arch).has_sdpa or plan.recipe.attention == "eager"
    attention = "eager" if eager else "sdpa"
    known = AutoConfig.for_model(arch.model_type).to_dict()
    # GPT-2's probabilities are 0.1 by themselves, and then masks stay.
    dropouts = {name: plan.recipe.dropout for name in DROPOUTS if name in known}
    values = AutoConfig.for_model(arch.model_type, **(config_values(arch) | dropouts))
    cuts = config["zero_optimization"]["stage"] == 3
    # transformers' modules of experts do not come up inside zero.Init: theirs are made whole and cut then.
    inside = cuts and arch.mixture_of_experts is None
    apart = (cuts and not inside) or plan.degrees.tp > 1 or plan.degrees.ep > 1
    with (
        deepspeed.zero.Init(config_dict_or_path=config) if inside else contextlib.nullcontext(),
        # AutoTP moves to the device what it has cut, of a model that was made on the host.
        tracker.paused() if apart else contextlib.nullcontext(),
        _fresh_weights_unset(),
    ):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(
            values, attn_implementation=attention, dtype=kind
        )
    if cuts and not inside:
        deepspeed.zero.Init(module=model, config_dict_or_path=config)
    made = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())
    assert made == arch.num_parameters, (made, arch.num_parameters)
    if plan.degrees.ep > 1:
        spread(plan, model, tracker)
    if plan.recipe.method != "full":
        model = add_adapters(model, plan.architecture, plan.recipe)
    apply_recompute(model, plan.recipe.recompute, plan.recipe.recompute_interval)
    if resolve_loss(plan) == "chunked":
        apply_chunked_loss(_inner(model))
    model.train()
    return model


def _inner(model: Any) -> torch.nn.Module:
    """Return transformers' model, without peft's wrapper."""
    found: torch.nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
    return found


def label_state(tracker: Tracker, engine: Any, optimizer: Any) -> None:
    """Name what lives through steps: flat weights, fp32 main copies and moments."""
    flat = getattr(optimizer, "lp_param_buffer", None)
    # In stage 3 what a parameter holds is gathered, if it holds anything.
    whole: Component = "parameters" if flat is None else "gather_buffers"
    tracker.label((p.data for p in engine.module.parameters() if p.numel()), whole)
    for name in ("bit16_groups_flat", "fp16_groups_flat", "bf16_groups_flat"):
        tracker.label(getattr(optimizer, name, ()), "parameters")
    tracker.label(getattr(optimizer, "fp32_groups_gradients_flat", ()), "gradients")
    tracker.label(getattr(optimizer, "fp32_groups_flat_partition", ()), "optimizer")
    if flat is not None:
        tracker.label([flat], "parameters")
    passing = getattr(optimizer, "temp_grad_buffer_for_gpu_offload", None)
    if passing is not None:
        # A gradient on its way to the host.
        tracker.label([passing], "gather_buffers")
    buffer = getattr(optimizer, "grad_partitions_flat_buffer", None)
    if buffer is not None:
        tracker.label([buffer], "gradients")
    for bucket in getattr(optimizer, "ipg_buckets", {}).values():
        made = bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer]
        tracker.label((buffer for buffer in made if buffer is not None), "gather_buffers")
    for name in ("single_partition_of_fp32_groups", "fp32_groups_flat", "fp32_partitioned_groups_flat"):
        main = getattr(optimizer, name, None)
        if main is not None:
            tracker.label(main, "optimizer")
    inner = getattr(optimizer, "optimizer", optimizer)
    values = (value for state in inner.state.values() for value in state.values())
    tracker.label((value for value in values if isinstance(value, torch.Tensor)), "optimizer")


@contextlib.contextmanager
def _fresh_weights_unset() -> Iterator[None]:
    """No numbers are drawn for weights that hold none."""
    # Keeps the functions that it finds when it is first imported: not these here.
    import transformers.initialization  # noqa: F401

    names = [name for name in dir(torch.nn.init) if name.endswith("_") and not name.startswith("_")]
    before = {name: getattr(torch.nn.init, name) for name in names}
    for name in names:
        setattr(torch.nn.init, name, lambda tensor, *_, **__: tensor)
    try:
        yield
    finally:
        for name, was in before.items():
            setattr(torch.nn.init, name, was)
