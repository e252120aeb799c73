"""Rehearsal of DeepSpeed's ``PipelineEngine`` and its 1F1B schedule on fake tensors, one stage at a time.

Receives complete at once, without a sender, with a known shape. Only as many micro-batches run as affect the
peak.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from shardscope.frameworks.deepspeed.rehearsal.engine import (
    NUM_STEPS,
    build_config,
    build_model,
    build_world,
    initialize_engine,
    label_state,
)
from shardscope.training.model.pipeline_stages import extract_stage

if TYPE_CHECKING:
    from deepspeed.runtime.pipe.engine import PipelineEngine

    from shardscope.core.plan import Plan
    from shardscope.memory.report import Phase
    from shardscope.rehearsal.result import RehearsedStage
    from shardscope.rehearsal.tracker import Tracker

_PHASES: dict[str, Phase] = {
    "ForwardPass": "forward",
    "BackwardPass": "backward",
    "ReduceTiedGrads": "backward",
    "ReduceGrads": "backward",
    "OptimizerStep": "optimizer",
}
"""Phase of DeepSpeed's instructions; the others only move data."""


def rehearse_stages(
    plan: Plan, deepspeed: ModuleType, note_progress: Callable[[str, float], None]
) -> list[RehearsedStage]:
    """Rehearse every stage of ``plan``, each on its first rank."""
    pp = plan.degrees.pp
    stages = []
    for number in range(pp):
        note_progress(f"stage {number}", 0.1 + 0.9 * number / pp)
        with build_world(plan, deepspeed, number * (plan.world_size // pp)) as (tracker, device):
            stages.append(_StageRehearsal(plan, deepspeed, tracker, device, number).run())
    return stages


class _StageRehearsal:
    """Rehearsal of one pipeline stage, on its first rank."""

    def __init__(self, plan: Plan, deepspeed: ModuleType, tracker: Tracker, device: str, number: int) -> None:
        self.plan, self.deepspeed, self.tracker = plan, deepspeed, tracker
        self.device, self.number = device, number
        # The maximum in flight, and one more to reach the steady state.
        self.num_micro_batches = min(plan.num_micro_batches, plan.degrees.pp + 1)

    def run(self) -> RehearsedStage:
        """Run two optimizer steps and report the second."""
        plan, tracker = self.plan, self.tracker
        engine, optimizer = self._build_engine()
        label_state(tracker, engine, optimizer)
        for step in range(NUM_STEPS):
            # Only the last step is reported: see NUM_STEPS.
            if step == NUM_STEPS - 1:
                tracker.restart()
            ids = torch.zeros(
                (plan.recipe.micro_batch_size, plan.recipe.seq_len), dtype=torch.int64, device=self.device
            )
            engine.train_batch(iter([(ids, ids)] * self.num_micro_batches))
            label_state(tracker, engine, optimizer)
        note = f"DeepSpeed {self.deepspeed.__version__}'s PipelineEngine, one stage at a time"
        if self.num_micro_batches < plan.num_micro_batches:
            note += f"; {self.num_micro_batches} of {plan.num_micro_batches} micro-batches played"
        return tracker.build_stage(self.number, plan.stage_layers[self.number], note=note)

    def _build_engine(self) -> tuple[PipelineEngine, torch.optim.Optimizer]:
        config = build_config(self.plan, self.num_micro_batches)
        engine, optimizer = initialize_engine(self.plan, self.deepspeed, self._build_module(config), config)
        engine._recv_tensor_meta = self._allocate_received(engine)
        # DeepSpeed runs a schedule of instructions, and looks up the method of each in this table.
        engine._INSTRUCTION_MAP = {
            kind: self.tracker.phase(_PHASES[kind.__name__])(run) if kind.__name__ in _PHASES else run
            for kind, run in engine._INSTRUCTION_MAP.items()
        }
        return engine, optimizer

    def _build_module(self, config: dict[str, object]) -> torch.nn.Module:
        """Build the stage's part of the model; only its weights are allocated on the device."""
        from shardscope.frameworks.deepspeed.engine.pipeline_module import StagedModule

        plan, pp, number = self.plan, self.plan.degrees.pp, self.number
        # Every rank builds the full model on the host (memory/building.py), and moves its own stage.
        with self.tracker.pause(), torch.device(self.device):
            model = build_model(plan, self.deepspeed, config, self.tracker)
        first = sum(plan.stage_layers[:number])
        layers = range(first, first + plan.stage_layers[number])
        part = extract_stage(model, layers, is_first=number == 0, is_last=number == pp - 1)
        with self.tracker.label_new_storages("parameters"):
            for parameter in part.parameters():
                parameter.data = torch.empty_like(parameter.data)
        del model
        # Both ends of the pipeline have a copy of a tied embedding: as the embedding, and as the head.
        tied: torch.nn.Module | None = None
        if number in (0, pp - 1):
            tied = part.get_submodule("model.embed_tokens" if number == 0 else "lm_head")
        loss_function = part.loss_function
        assert callable(loss_function)  # a method of transformers' causal language models

        def compute_loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            vocab_size = plan.architecture.vocab_size
            loss: torch.Tensor = loss_function(logits=output, labels=labels, vocab_size=vocab_size)
            return loss

        return StagedModule(
            part.train(),
            compute_loss,
            stage=number,
            num_stages=pp,
            is_tied=plan.architecture.tie_word_embeddings,
            tied=tied,
        )

    def _allocate_received(self, engine: PipelineEngine) -> Callable[[int], object]:
        """Replace the message that announces the shape and dtype of received tensors."""
        plan = self.plan
        shape = [plan.recipe.micro_batch_size, plan.recipe.seq_len, plan.architecture.hidden_size]
        dtype = next(engine.module.parameters()).dtype

        def allocate(_: int) -> object:
            with self.tracker.label_new_storages("gather_buffers"):
                return engine._allocate_or_extend_buffers(0, shape, dtype)

        return allocate
