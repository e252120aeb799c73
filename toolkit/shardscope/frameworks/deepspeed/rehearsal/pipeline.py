"""DeepSpeed's pipeline rehearsed: its ``PipelineEngine`` and 1F1B over fake tensors, one stage at a time.

What other stages would send is received at once from nobody, and what would tell its shape is known. Only as
many micro-batches are played as change anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from shardscope.frameworks.deepspeed.rehearsal.engine import (
    NUM_STEPS,
    config_of,
    initialised,
    label_state,
    model_of,
    stage_world,
)
from shardscope.training.model.parts import extract_stage

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.rehearsal.result import RehearsedStage
    from shardscope.rehearsal.tracker import Tracker

_PHASES = {
    "ForwardPass": "forward",
    "BackwardPass": "backward",
    "ReduceTiedGrads": "backward",
    "ReduceGrads": "backward",
    "OptimizerStep": "optimizer",
}
"""Of DeepSpeed's instructions; the others move data."""


def stages(plan: Plan, deepspeed: Any, note_progress: Callable[[str, float], None]) -> list[RehearsedStage]:
    """Rehearse every stage of ``plan``, each on its first rank."""
    pp = plan.degrees.pp
    found = []
    for number in range(pp):
        note_progress(f"stage {number}", 0.1 + 0.9 * number / pp)
        with stage_world(plan, deepspeed, number * (plan.world_size // pp)) as (tracker, device):
            found.append(_Stage(plan, deepspeed, tracker, device, number).play())
    return found


class _Stage:
    """The rank that is first of a stage's."""

    def __init__(self, plan: Plan, deepspeed: Any, tracker: Tracker, device: str, number: int) -> None:
        self.plan, self.deepspeed, self.tracker = plan, deepspeed, tracker
        self.device, self.number = device, number
        # The most that are ever in flight, and one more to reach the steady state.
        self.num_micro_batches = min(plan.num_micro_batches, plan.degrees.pp + 1)

    def play(self) -> RehearsedStage:
        """Two optimizer steps, of which the second counts."""
        plan, tracker = self.plan, self.tracker
        engine, optimizer = self._engine()
        label_state(tracker, engine, optimizer)
        for step in range(NUM_STEPS):
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

    def _engine(self) -> tuple[Any, Any]:
        config = config_of(self.plan, self.num_micro_batches)
        engine, optimizer = initialised(self.plan, self.deepspeed, self._module(config), config)
        engine._recv_tensor_meta = self._receives(engine)
        engine._INSTRUCTION_MAP = {
            kind: self._in_phase(_PHASES[kind.__name__], run) if kind.__name__ in _PHASES else run
            for kind, run in engine._INSTRUCTION_MAP.items()
        }
        return engine, optimizer

    def _module(self, config: dict[str, Any]) -> torch.nn.Module:
        """The stage's part of the model, whose weights are all that the device holds of it."""
        from shardscope.frameworks.deepspeed.engine.pipeline_module import StagedModule

        plan, pp, number = self.plan, self.plan.degrees.pp, self.number
        with self.tracker.paused(), torch.device(self.device):
            model: Any = model_of(plan, self.deepspeed, config, self.tracker)
        before = sum(plan.stage_layers[:number])
        layers = range(before, before + plan.stage_layers[number])
        part: Any = extract_stage(model, layers, is_first=number == 0, is_last=number == pp - 1)
        with self.tracker.labelling("parameters"):
            for parameter in part.parameters():
                parameter.data = torch.empty_like(parameter.data)
        del model
        ends = {0: part.model.embed_tokens, pp - 1: part.lm_head}

        def loss_of(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            vocab_size = plan.architecture.vocab_size
            loss: torch.Tensor = part.loss_function(logits=output, labels=labels, vocab_size=vocab_size)
            return loss

        return StagedModule(
            part.train(),
            loss_of,
            stage=number,
            num_stages=pp,
            is_tied=plan.architecture.tie_word_embeddings,
            tied=ends.get(number),
        )

    def _receives(self, engine: Any) -> Callable[[int], Any]:
        """In place of a message that tells shape and type of what comes."""
        plan = self.plan
        shape = [plan.recipe.micro_batch_size, plan.recipe.seq_len, plan.architecture.hidden_size]
        kind = next(engine.module.parameters()).dtype

        def made(_: int) -> Any:
            with self.tracker.labelling("gather_buffers"):
                return engine._allocate_or_extend_buffers(0, shape, kind)

        return made

    def _in_phase(self, phase: Any, run: Callable[..., None]) -> Callable[..., None]:
        def played(engine: Any, **options: Any) -> None:
            with self.tracker.phase(phase):
                run(engine, **options)

        return played
