"""ZeRO rehearsed: DeepSpeed's own engine over fake tensors, one rank of any number.

``deepspeed.initialize``, ``engine.backward`` and ``engine.step`` are DeepSpeed's, its partitions, buckets and
gathers too. Only what reads a number off a tensor, and what is compiled for CUDA, has a stand-in
(``fake_device.py``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from shardscope.frameworks.deepspeed.config import deepspeed_config
from shardscope.frameworks.deepspeed.fake_device import FakeDevice, import_deepspeed
from shardscope.frameworks.deepspeed.fake_files import FakeFiles, fake_files
from shardscope.frameworks.deepspeed.tensors import fullest_rank
from shardscope.frameworks.deepspeed.zeropp import check_predicted
from shardscope.memory.arithmetic import ceil_div
from shardscope.memory.head import loss_in_force
from shardscope.rehearsal.low_bits import quantile_maps
from shardscope.rehearsal.result import RehearsedStage
from shardscope.rehearsal.world import fake_ranks, fake_tensors, real_numbers
from shardscope.training.lora import add_adapters
from shardscope.training.loss import apply_chunked_loss
from shardscope.training.model import DROPOUTS, WITHOUT_SDPA, config_values
from shardscope.training.optimizers import build_optimizer
from shardscope.training.recompute import apply_recompute
from shardscope.validation import one_of, refuse

if TYPE_CHECKING:
    from shardscope.memory.report import Component
    from shardscope.plan import Plan
    from shardscope.rehearsal.tracker import Tracker

NUM_STEPS = 2
"""The first makes the optimizer's state, and ZeRO-3 records in which order modules come; the second, which
counts, prefetches by it, as all others do."""
MAX_MICRO_BATCHES = 2
_TYPES = {"fp32": torch.float32, "fp16-mixed": torch.float16}


def rehearse(plan: Plan, note_progress: Callable[[str, float], None]) -> list[RehearsedStage]:
    """The one stage of ``plan``. Raises ``ValueError`` for what is not rehearsed yet."""
    check_plan(plan)
    note_progress("importing DeepSpeed", 0.05)
    deepspeed = import_deepspeed()
    tp, vocab = plan.degrees.tp, plan.architecture.vocab_size
    # Ranks of tp lie next to each other.
    rank = tp * fullest_rank(plan)
    apart = _moves_to_host(plan)
    with (
        fake_ranks(plan.world_size, rank),
        FakeDevice(deepspeed, plan.world_size, rank, host_apart=apart) as device,
        fake_tensors(
            plan.on_gpu,
            {vocab, ceil_div(vocab, tp)},
            host_apart=apart,
            has_flash=plan.cluster.gpu.has_flash_attention,
        ) as tracker,
        device.numbers(),
        fake_files() as files,
        _labelled(tracker, plan),
    ):
        return [_play(plan, deepspeed, tracker, note_progress, device.name, files)]


def _moves_to_host(plan: Plan) -> bool:
    """Whether anything is offloaded; on CPU ranks the host's memory is the rank's own."""
    layout: Any = plan.layout
    places = {layout.offload_optimizer, layout.offload_params}
    away = "cpu" in places or plan.recipe.recompute == "offload"
    return "nvme" in places or bool(plan.on_gpu and away)


_NOT_REHEARSED = {
    "pp": "DeepSpeed's pipeline runs a PipelineModule of its own, not transformers' modules",
    "ep": "DeepSpeed's experts are its own MoE layers, not transformers' modules",
}


AUTOTP_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "granite")
"""Families that AutoTP cuts by the plan that transformers has for them. It refuses plans with experts and
with fused projections (Phi-3), and GPT-2 has none."""


def check_plan(plan: Plan) -> None:
    """Raise ``ValueError`` for what DeepSpeed's engine alone does not play on fake tensors."""
    layout: Any = plan.layout
    for field, why in _NOT_REHEARSED.items():
        if getattr(layout, field) > 1:
            refuse(f"Layout.{field}", getattr(layout, field), f"1 in a rehearsal: {why}", f"{field}=1")
    check_predicted(layout, "to be rehearsed: DeepSpeed quantises in CUDA kernels")
    if layout.tp > 1 and plan.architecture.model_type not in AUTOTP_FAMILIES:
        refuse(
            "Architecture.model_type",
            plan.architecture.model_type,
            f"{', '.join(AUTOTP_FAMILIES)} with tp > 1: DeepSpeed's AutoTP takes no others' modules",
            "tp=1",
        )
    # FlashAttention's, Liger's and torch.compile's kernels are made for real tensors on a GPU.
    one_of("Recipe.kernels", plan.kernels, ("transformers",))
    one_of("Recipe.loss", loss_in_force(plan), ("full", "chunked"))
    one_of("Recipe.attention", plan.recipe.attention, (None, "sdpa", "eager"))
    if loss_in_force(plan) == "chunked" and layout.stage == 3:
        refuse(
            "Recipe.loss",
            "chunked",
            "'full' in a rehearsal of stage 3, which gathers a weight when its own module runs: in a chunked "
            "loss the head's does not",
            "loss='full'",
        )


def _play(
    plan: Plan,
    deepspeed: Any,
    tracker: Tracker,
    note_progress: Callable[[str, float], None],
    device: str,
    files: FakeFiles,
) -> RehearsedStage:
    num_micro_batches = min(plan.num_micro_batches, MAX_MICRO_BATCHES)
    config = deepspeed_config(plan, nvme_folder=files.folder)
    config["gradient_accumulation_steps"] = num_micro_batches
    config.pop("train_batch_size", None)
    note_progress("building the model", 0.1)
    with tracker.labelling("parameters"), torch.device(device):
        model = _model(plan, deepspeed, config, tracker)
    note_progress("deepspeed.initialize", 0.2)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    client = None
    if plan.recipe.optimizer in _CLIENTS:
        with quantile_maps() if plan.recipe.optimizer == "adamw_8bit" else contextlib.nullcontext():
            client = build_optimizer(plan.recipe.optimizer, trained)
    else:
        config["optimizer"] = _optimizer(plan)
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, model_parameters=_in_groups(trained), optimizer=client, config=config
    )
    _label_state(tracker, engine, optimizer)
    shape = (plan.recipe.micro_batch_size, plan.recipe.seq_len)
    for step in range(NUM_STEPS):
        if step == NUM_STEPS - 1:
            tracker.restart()
        for index in range(num_micro_batches):
            done = 0.3 + 0.65 * (step * num_micro_batches + index) / (NUM_STEPS * num_micro_batches)
            note_progress(f"step {step + 1} of {NUM_STEPS}", done)
            with tracker.phase("forward"):
                ids = torch.zeros(shape, dtype=torch.int64, device=device)
                loss = engine(input_ids=ids, labels=ids).loss
            with tracker.phase("backward"):
                engine.backward(loss)
            del loss
            if plan.layout.stage < 2:  # type: ignore[attr-defined]
                tracker.label((p.grad for p in trained if p.grad is not None), "gradients")
            # Between micro-batches it only counts them.
            is_update = index == num_micro_batches - 1
            with tracker.phase("optimizer") if is_update else contextlib.nullcontext():
                engine.step()
            _label_state(tracker, engine, optimizer)
    what = type(optimizer).__name__
    note = f"DeepSpeed {deepspeed.__version__}'s {what}"
    if plan.num_micro_batches > num_micro_batches:
        note += f"; {num_micro_batches} of {plan.num_micro_batches} micro-batches, the others are alike"
    stage = tracker.stage(0, plan.architecture.num_hidden_layers, note=note)
    return replace(stage, nvme_bytes=files.num_bytes)


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


def _model(plan: Plan, deepspeed: Any, config: dict[str, Any], tracker: Tracker) -> torch.nn.Module:
    """The plan's model in the type that DeepSpeed computes in; in stage 3 partitioned while it is made."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = _TYPES.get(plan.recipe.precision, torch.bfloat16)
    arch = plan.architecture
    eager = arch.model_type in WITHOUT_SDPA or plan.recipe.attention == "eager"
    attention = "eager" if eager else "sdpa"
    known = AutoConfig.for_model(arch.model_type).to_dict()
    # GPT-2's probabilities are 0.1 by themselves, and then masks stay.
    dropouts = {name: plan.recipe.dropout for name in DROPOUTS if name in known}
    values = AutoConfig.for_model(arch.model_type, **(config_values(arch) | dropouts))
    cuts = config["zero_optimization"]["stage"] == 3
    # transformers' modules of experts do not come up inside zero.Init: theirs are made whole and cut then.
    inside = cuts and arch.mixture_of_experts is None
    with (
        deepspeed.zero.Init(config_dict_or_path=config) if inside else contextlib.nullcontext(),
        # AutoTP moves to the device what it has cut, of a model that was made on the host.
        tracker.paused() if (cuts and not inside) or plan.degrees.tp > 1 else contextlib.nullcontext(),
        _fresh_weights_unset(),
    ):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(
            values, attn_implementation=attention, dtype=kind
        )
    if cuts and not inside:
        deepspeed.zero.Init(module=model, config_dict_or_path=config)
    made = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())
    assert made == arch.num_parameters, (made, arch.num_parameters)
    if plan.recipe.method != "full":
        model = add_adapters(model, plan.architecture, plan.recipe)
    apply_recompute(model, plan.recipe.recompute, plan.recipe.recompute_interval)
    if loss_in_force(plan) == "chunked":
        apply_chunked_loss(_inner(model))
    model.train()
    return model


def _inner(model: Any) -> torch.nn.Module:
    """transformers' model, of which peft's is a wrapper."""
    found: torch.nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
    return found


def _label_state(tracker: Tracker, engine: Any, optimizer: Any) -> None:
    """Name what lives through steps: flat weights, fp32 main copies and moments."""
    flat = getattr(optimizer, "lp_param_buffer", None)
    # In stage 3 what a parameter holds is gathered, if it holds anything.
    whole: Component = "parameters" if flat is None else "gather_buffers"
    tracker.label((p.data for p in engine.module.parameters() if p.numel()), whole)
    for name in ("bit16_groups_flat", "fp16_groups_flat"):
        tracker.label(getattr(optimizer, name, ()), "parameters")
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
    names = [name for name in dir(torch.nn.init) if name.endswith("_") and not name.startswith("_")]
    before = {name: getattr(torch.nn.init, name) for name in names}
    for name in names:
        setattr(torch.nn.init, name, lambda tensor, *_, **__: tensor)
    try:
        yield
    finally:
        for name, was in before.items():
            setattr(torch.nn.init, name, was)


_STAGING = {
    "deepspeed.runtime.engine:DeepSpeedEngine": ("allreduce_gradients", "buffered_allreduce_fallback"),
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer": (
        "setup_buckets",
        "reduce_ipg_grads",
        "reduce_independent_p_g_buckets_and_remove_grads",
    ),
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3": (
        "reduce_independent_p_g_buckets_and_remove_grads",
        "independent_gradient_partition_epilogue",
    ),
    "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator": (
        "fetch_sub_module",
        "release_sub_module",
    ),
}
"""What these methods make is staging for a collective: buckets, flattened copies, gathered parameters."""


@contextlib.contextmanager
def _labelled(tracker: Tracker, plan: Plan) -> Iterator[None]:
    """DeepSpeed's methods say what they make."""
    import importlib

    found: list[tuple[Any, str, Any]] = []

    def patch(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = owner.__dict__[name]
        found.append((owner, name, original))
        setattr(owner, name, functools.wraps(original)(make(original)))

    def labelling(component: Any) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            def method(*args: Any, **kwargs: Any) -> Any:
                with tracker.labelling(component):
                    return original(*args, **kwargs)

            return method

        return make

    def waiting(original: Any) -> Any:
        """Autograd made this whole gradient; it waits to be reduced and dropped."""

        def method(self: Any, param: Any, *args: Any) -> Any:
            if param.grad is not None:
                tracker.label([param.grad], "gather_buffers")
            return original(self, param, *args)

        return method

    def kept(original: Any) -> Any:
        """Reduced gradients of the own partition, copied out of the bucket."""

        def method(self: Any, *args: Any) -> Any:
            answer = original(self, *args)
            if self.grads_in_partition is not None:
                tracker.label([self.grads_in_partition], "gradients")
            return answer

        return method

    for place, names in _STAGING.items():
        module, _, name = place.partition(":")
        owner = getattr(importlib.import_module(module), name)
        for method in names:
            patch(owner, method, labelling("gather_buffers"))
    engine = importlib.import_module("deepspeed.runtime.engine").DeepSpeedEngine

    def reduced(original: Any) -> Any:
        """Whole gradients, until they are reduced when backward has ended."""

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            tracker.label((p.grad for p in self.module.parameters() if p.grad is not None), "gradients")
            return original(self, *args, **kwargs)

        return method

    def of_real_numbers(original: Any) -> Any:
        def method(*args: Any, **kwargs: Any) -> Any:
            with real_numbers(tracker):
                return original(*args, **kwargs)

        return method

    def moved(original: Any) -> Any:
        """Cut matrices are on the device; so is all that is not cut, now."""

        def method(self: Any, model: Any, *args: Any) -> Any:
            answer = original(self, model, *args)
            tracker.label((parameter.data for parameter in model.parameters()), "parameters")
            return answer

        return method

    if plan.degrees.tp > 1:
        patch(engine, "_apply_autotp_partitioning", moved)
    patch(importlib.import_module("deepspeed.comm.torch").TorchBackend, "init_device_mesh", of_real_numbers)
    zero_12 = _owner("stage_1_and_2", "DeepSpeedZeroOptimizer")
    patch(zero_12, "copy_grads_in_partition", kept)
    patch(zero_12, "setup_buckets", labelling("gather_buffers"))
    stage: int = plan.layout.stage  # type: ignore[attr-defined]
    if stage < 2:
        patch(engine, "allreduce_gradients", reduced)
    if stage == 2:
        patch(zero_12, "process_gradients", waiting)
    if stage == 3:
        zero_3 = _owner("stage3", "DeepSpeedZeroOptimizer_Stage3")
        patch(zero_3, "reduce_ready_partitions_and_remove_grads", waiting)
    try:
        yield
    finally:
        for owner, name, original in reversed(found):
            setattr(owner, name, original)


def _owner(module: str, name: str) -> Any:
    import importlib

    return getattr(importlib.import_module(f"deepspeed.runtime.zero.{module}"), name)
