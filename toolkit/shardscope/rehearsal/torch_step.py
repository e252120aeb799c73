"""Rehearsal of DDP's and FSDP2's engines: two optimizer steps of one rank on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from shardscope.rehearsal.extent import MAX_MICRO_BATCHES, NUM_STEPS
from shardscope.rehearsal.quantization import (
    fake_optimizer_updates,
    fake_quantile_maps,
    quantized_operators,
    quantized_weights,
)
from shardscope.rehearsal.result import RehearsedStage
from shardscope.training.accounting.tensors import list_optimizer_tensors
from shardscope.training.document_masks import add_document_mask
from shardscope.training.model.model import build_model
from shardscope.training.model.quantization import list_scales
from shardscope.training.optimizers import gradients, optimizers

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.rehearsal.tracker import Tracker
    from shardscope.training.torch_engine import TorchEngine

NoteProgress = Callable[[str, float], None]


class FakeContext:
    """Minimal stand-in for a rank's context, without a run."""

    def __init__(self, plan: Plan, device: str = "cpu") -> None:
        self.plan = plan
        self.rank = 0
        self.world_size = plan.world_size
        self.device = torch.device(device)
        self.folder = Path()

    def log(self, step: int | None = None, **metrics: object) -> None:
        """Ignore metrics: fake tensors have no values."""

    def record(self, name: str, mapping: Mapping[str, object]) -> None:
        """Ignore records: there is no run folder."""


def rehearse_engine(
    engine: TorchEngine, tracker: Tracker, note_progress: NoteProgress, *, built_on_host: bool = False
) -> RehearsedStage:
    """Wrap the plan's model, run two optimizer steps and return the memory of the second one.

    With ``built_on_host`` the model is wrapped in host memory, and only the tensors that remain afterwards
    count as device memory.
    """
    plan = engine.plan
    note_progress("building the model", 0.1)
    trained = set_up_engine(engine, tracker, built_on_host=built_on_host)
    with quantized_operators(on_gpu=plan.on_gpu) if plan.recipe.base_quantization else nullcontext():
        for step in range(NUM_STEPS):
            # Measure the last step: the first one also creates the optimizer state.
            if step == NUM_STEPS - 1:
                tracker.restart()
            _run_step(engine, tracker, note_progress, trained, step)
    note_progress("computing peaks", 0.95)
    return tracker.build_stage(
        0,
        plan.architecture.num_hidden_layers,
        note=_describe_differences(plan, sharded=engine.shards_parameters),
    )


def _run_step(
    engine: TorchEngine,
    tracker: Tracker,
    note_progress: NoteProgress,
    trained: list[torch.nn.Parameter],
    step: int,
) -> None:
    plan = engine.plan
    num_micro_batches = min(plan.num_micro_batches, MAX_MICRO_BATCHES)
    for index in range(num_micro_batches):
        done = 0.3 + 0.6 * (step * num_micro_batches + index) / (NUM_STEPS * num_micro_batches)
        note_progress(f"step {step + 1} of {NUM_STEPS}", done)
        is_last = index == num_micro_batches - 1
        _run_micro_batch(engine, tracker, plan, is_last=is_last, weight=1 / num_micro_batches)
        # After every micro-batch, because a framework may replace gradients when it accumulates.
        tracker.label((p.grad for p in trained if p.grad is not None), "gradients")
    finish_step(engine, tracker, trained)


def set_up_engine(engine: TorchEngine, tracker: Tracker, *, built_on_host: bool) -> list[torch.nn.Parameter]:
    """Wrap the plan's model, build its optimizer and return the trainable parameters."""
    # Random weights, as Pretrain sets it: a large model is then initialized shard by shard.
    plan = engine.plan
    engine.fresh_weights = True
    weights_context = quantized_weights() if plan.recipe.base_quantization else nullcontext()
    tracking_context = tracker.pause() if built_on_host else nullcontext()
    with tracking_context, torch.device(engine.ctx.device), weights_context:
        module = engine._module = engine.wrap(
            lambda: build_model(plan.architecture, plan.recipe.dropout, plan.recipe.attention)
        )
    module.train()
    tracker.label(engine.model.parameters(), "parameters")
    tracker.label(engine.model.buffers(), "parameters")
    if plan.recipe.base_quantization:
        tracker.label(list_scales(engine.model), "parameters")
    trained = [parameter for parameter in engine.model.parameters() if parameter.requires_grad]
    # bitsandbytes has 8-bit state for plain tensors; DTensors take torchao's (training/optimizers).
    are_plain = not any(isinstance(parameter, DTensor) for parameter in trained)
    is_quantized_state = plan.recipe.optimizer == "adamw_8bit" and are_plain
    with fake_quantile_maps() if is_quantized_state else nullcontext():
        optimizer = engine.optimizer = optimizers.build_optimizer(
            plan.recipe.optimizer, trained, model=engine.model
        )
    if plan.on_gpu and plan.recipe.optimizer == "sgd" and are_plain and not tracker.separate_host:
        for group in optimizer.param_groups:
            # torch's own default for plain tensors on CUDA (torch 2.13, optim/optimizer.py,
            # _default_to_fused_or_foreach): its temporaries are as large as all gradients together.
            group["foreach"] = True
    return trained


def finish_step(engine: TorchEngine, tracker: Tracker, trained: list[torch.nn.Parameter]) -> None:
    """Finish the step after the last backward: clip gradients, run the optimizer, free the gradients."""
    optimizer = engine.optimizer
    tracker.label((p.grad for p in trained if p.grad is not None), "gradients")
    # The norm is computed and nothing is clipped: clipping works in place and allocates nothing more.
    with tracker.phase("optimizer"):
        gradients.clip_gradients(engine.model.parameters(), engine.ctx.device, engine.shard_group, None)
        with fake_optimizer_updates():
            optimizer.step()
        tracker.label(list_optimizer_tensors(optimizer), "optimizer")
        optimizer.zero_grad(set_to_none=True)


def _run_micro_batch(
    engine: TorchEngine, tracker: Tracker, plan: Plan, *, is_last: bool, weight: float
) -> None:
    shape = (plan.recipe.micro_batch_size, plan.recipe.seq_len)
    with engine.gradient_sync(last=is_last):
        with tracker.phase("forward"):
            # Values do not matter: no operator's shape or memory depends on them.
            ids = torch.zeros(shape, dtype=torch.int64, device=engine.ctx.device)
            batch = {"input_ids": ids, "labels": torch.zeros_like(ids)}
            inputs = add_document_mask(batch, plan.recipe, engine.compute_dtype)
            loss = engine._compute_loss(inputs) * weight
        with tracker.phase("backward"):
            loss.backward()


def _describe_differences(plan: Plan, *, sharded: bool = False) -> str:
    notes = []
    if plan.num_micro_batches > MAX_MICRO_BATCHES:
        number = plan.num_micro_batches
        notes.append(f"{MAX_MICRO_BATCHES} of the plan's {number} micro-batches; the rest repeat the second")
    if plan.recipe.optimizer == "adamw_8bit" and sharded:
        notes.append("torchao's update is compiled and does not run: only its state is counted")
    return "; ".join(notes)
