"""Rehearsal of DDP's and FSDP2's engines: two optimizer steps of one rank on fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from shardscope.memory.report import Phase
from shardscope.rehearsal.extent import MAX_MICRO_BATCHES, NUM_STEPS
from shardscope.rehearsal.low_bits import low_bit_operators, packed_weights, quantile_maps, updates_on_fakes
from shardscope.rehearsal.result import RehearsedStage
from shardscope.training.model.model import build_model
from shardscope.training.model.quantized import scales
from shardscope.training.optimizers import gradients, optimizers
from shardscope.training.optimizers.gradients import local

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

    def log(self, step: int | None = None, **metrics: Any) -> None:
        """Ignore metrics: fake tensors have no values."""

    def record(self, name: str, mapping: Mapping[str, Any]) -> None:
        """Ignore records: there is no run folder."""


def play(
    engine: TorchEngine, tracker: Tracker, note_progress: NoteProgress, *, built_on_host: bool = False
) -> RehearsedStage:
    """Wrap the plan's model, run two optimizer steps and return the memory of the second one.

    ``built_on_host``: tensors created while wrapping are host memory; only the resulting ones are the
    device's.
    """
    plan = engine.plan
    note_progress("building the model", 0.1)
    trained = prepare(engine, tracker, built_on_host=built_on_host)
    with low_bit_operators(on_gpu=plan.on_gpu) if plan.recipe.base_quantization else nullcontext():
        for step in range(NUM_STEPS):
            if step == NUM_STEPS - 1:
                tracker.restart()
            _step(engine, tracker, note_progress, trained, step)
    note_progress("adding up", 0.95)
    return tracker.stage(
        0, plan.architecture.num_hidden_layers, note=_note(plan, sharded=engine.shards_parameters)
    )


def _step(
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
        last = index == num_micro_batches - 1
        _micro_batch(engine, tracker, plan, last=last, weight=1 / num_micro_batches)
        tracker.label((p.grad for p in trained if p.grad is not None), "gradients")
    finish_step(engine, tracker, trained)


def prepare(engine: TorchEngine, tracker: Tracker, *, built_on_host: bool) -> list[torch.nn.Parameter]:
    """Wrap the plan's model, build its optimizer and return the trainable parameters."""
    plan = engine.plan
    engine.fresh_weights = True
    packed = packed_weights() if plan.recipe.base_quantization else nullcontext()
    quietly = tracker.paused() if built_on_host else nullcontext()
    with quietly, torch.device(engine.ctx.device), packed:
        module = engine._module = engine.wrap(
            lambda: build_model(plan.architecture, plan.recipe.dropout, plan.recipe.attention)
        )
    module.train()
    tracker.label(engine.model.parameters(), "parameters")
    tracker.label(engine.model.buffers(), "parameters")
    if plan.recipe.base_quantization:
        tracker.label(scales(engine.model), "parameters")
    trained = [parameter for parameter in engine.model.parameters() if parameter.requires_grad]
    are_plain = not any(isinstance(parameter, DTensor) for parameter in trained)
    low_bits = plan.recipe.optimizer == "adamw_8bit" and are_plain
    with quantile_maps() if low_bits else nullcontext():
        optimizer = engine.optimizer = optimizers.build_optimizer(
            plan.recipe.optimizer, trained, model=engine.model
        )
    if plan.on_gpu and plan.recipe.optimizer == "sgd" and are_plain and not tracker.host_apart:
        for group in optimizer.param_groups:
            # torch's own default on CUDA.
            group["foreach"] = True
    return trained


def finish_step(engine: TorchEngine, tracker: Tracker, trained: list[torch.nn.Parameter]) -> None:
    """Finish the step after the last backward: clip gradients, run the optimizer, free the gradients."""
    optimizer = engine.optimizer
    tracker.label((p.grad for p in trained if p.grad is not None), "gradients")
    with tracker.phase("optimizer"):
        gradients.clip(engine.model.parameters(), engine.ctx.device, engine.shard_group, None)
        with updates_on_fakes():
            optimizer.step()
        values = (value for state in optimizer.state.values() for value in state.values())
        tracker.label((value for value in values if isinstance(value, torch.Tensor)), "optimizer")
        optimizer.zero_grad(set_to_none=True)


def _micro_batch(engine: TorchEngine, tracker: Tracker, plan: Plan, *, last: bool, weight: float) -> None:
    shape = (plan.recipe.micro_batch_size, plan.recipe.seq_len)
    with engine.reduce_on(last=last):
        with tracker.phase("forward"):
            ids = torch.zeros(shape, dtype=torch.int64, device=engine.ctx.device)
            batch = {"input_ids": ids, "labels": torch.zeros_like(ids)}
            loss = engine._loss(batch) * weight
        with tracker.phase("backward"):
            loss.backward()


def _note(plan: Plan, *, sharded: bool = False) -> str:
    notes = []
    if plan.num_micro_batches > MAX_MICRO_BATCHES:
        played = f"{MAX_MICRO_BATCHES} of the plan's {plan.num_micro_batches} micro-batches"
        notes.append(f"{played}, the others are alike")
    if plan.recipe.optimizer == "adamw_8bit" and sharded:
        notes.append("torchao's update is compiled, and is not played: only what it keeps")
    return "; ".join(notes)


def labelled_methods(
    tracker: Tracker, owner: type, names: tuple[str, ...], before: Callable[[Any], None] | None = None
) -> contextlib.AbstractContextManager[None]:
    """Label tensors that ``owner``'s methods create as gather buffers; ``before`` gets the object first."""

    @contextlib.contextmanager
    def lasting():  # type: ignore[no-untyped-def]
        originals = {name: getattr(owner, name) for name in names}

        def wrapped(original: Any) -> Any:
            def method(self: Any, *args: Any, **kwargs: Any) -> Any:
                if before is not None:
                    before(self)
                with tracker.labelling("gather_buffers"):
                    return original(self, *args, **kwargs)

            return method

        for name, original in originals.items():
            setattr(owner, name, wrapped(original))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(owner, name, original)

    return lasting()


__all__ = ["FakeContext", "NoteProgress", "Phase", "labelled_methods", "local", "play"]
