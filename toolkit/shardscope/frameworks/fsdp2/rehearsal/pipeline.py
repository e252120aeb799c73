"""Rehearsal of FSDP2 with pipeline parallelism: torch's own schedule, one stage at a time.

Receives from other stages complete immediately, without a sender. A stage is always created for all
micro-batches of a step, because torch allocates receive buffers for each of them; only as many micro-batches
are run as affect the peak.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.schedules import get_schedule_class

from shardscope.core.errors import refuse
from shardscope.frameworks.fsdp2.engine.pipeline import PhasedStage
from shardscope.rehearsal.extent import NUM_STEPS
from shardscope.rehearsal.torch_step import finish_step, set_up_engine

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import _PipelineSchedule
    from transformers import PreTrainedModel

    from shardscope.core.plan import Plan
    from shardscope.frameworks.fsdp2.engine.pipeline import PipelinedEngine
    from shardscope.rehearsal.result import RehearsedStage
    from shardscope.rehearsal.torch_step import NoteProgress
    from shardscope.rehearsal.tracker import Tracker


def check_staged(plan: Plan) -> None:
    """Raise ``ValueError`` for pipeline plans that can be trained but not rehearsed one stage at a time."""
    degrees = plan.degrees
    if degrees.vpp > 1:
        refuse("Layout.vpp", degrees.vpp, "1 in a rehearsal: stages are rehearsed one at a time", {"vpp": 1})
    if degrees.tp > 1:
        why = "1 with pp > 1 in a rehearsal: tensors between stages are not sharded"
        refuse("Layout.tp", degrees.tp, why, {"tp": 1})


class _Stage(PhasedStage):
    """The engine's stage with receive buffers for all micro-batches of the plan, however many are run."""

    tracker: Tracker
    num_planned: int
    """Number of micro-batches of the plan."""

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        with self.tracker.label_new_storages("gather_buffers"):
            super()._setup_forward_recv_info(self.num_planned, has_backward)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        with self.tracker.label_new_storages("gather_buffers"):
            super()._setup_backward_recv_info(self.num_planned)
        # torch stores the number of micro-batches that it got, and checks their indices against it.
        self.chunks = num_microbatches


def rehearse_pipeline_stage(
    engine: PipelinedEngine, tracker: Tracker, note_progress: NoteProgress, *, built_on_host: bool
) -> RehearsedStage:
    """Run two optimizer steps of one stage and return the memory of the second."""
    plan, number = engine.plan, engine.stage
    trained = set_up_engine(engine, tracker, built_on_host=built_on_host)
    # 1F1B has at most pp micro-batches in flight; one more reaches the steady state. GPipe has all.
    num_micro_batches = min(plan.num_micro_batches, plan.degrees.pp + 1)
    if plan.layout.runs_all_forwards_first:
        num_micro_batches = plan.num_micro_batches
    schedule, stage = _create_schedule(engine, tracker, num_micro_batches)
    rows = num_micro_batches * plan.recipe.micro_batch_size
    for step in range(NUM_STEPS):
        note_progress(f"step {step + 1} of {NUM_STEPS}", (step + 0.5) / (NUM_STEPS + 1))
        # The first step also creates the optimizer's state and the receive buffers.
        if step == NUM_STEPS - 1:
            tracker.restart()
        ids = torch.zeros((rows, plan.recipe.seq_len), dtype=torch.int64, device=engine.ctx.device)
        schedule.step(
            *((ids,) if stage.is_first else ()),
            target=ids if stage.is_last else None,
            losses=[] if stage.is_last else None,
            return_outputs=False,
        )
        finish_step(engine, tracker, trained)
    note = f"torch's {type(schedule).__name__}, one stage at a time"
    if num_micro_batches < plan.num_micro_batches:
        note += f"; {num_micro_batches} of {plan.num_micro_batches} micro-batches run"
    return tracker.build_stage(number, plan.stage_layers[number], note=note)


def _create_schedule(
    engine: PipelinedEngine, tracker: Tracker, num_micro_batches: int
) -> tuple[_PipelineSchedule, _Stage]:
    """Return torch's schedule of the plan and this rank's stage in it."""
    plan, module = engine.plan, engine.chunks[0]
    shape = (plan.recipe.micro_batch_size, plan.recipe.seq_len)
    dtype = engine.compute_dtype
    with tracker.pause(), torch.device(engine.ctx.device):
        # Used for their shapes only: real stages exchange these once, before the first step.
        ids = torch.zeros(shape, dtype=torch.int64)
        hidden = torch.empty((*shape, plan.architecture.hidden_size), dtype=dtype, requires_grad=True)
        logits = torch.empty((*shape, plan.architecture.vocab_size), dtype=dtype, requires_grad=True)
    stage = _Stage(
        module,
        engine.stage,
        plan.degrees.pp,
        engine.ctx.device,
        input_args=ids if engine.stage == 0 else hidden,
        output_args=logits if engine.stage == plan.degrees.pp - 1 else hidden,
        group=engine.stage_group,
    )
    stage.tracker, stage.in_phase = tracker, tracker.phase
    stage.num_planned = plan.num_micro_batches
    model = cast("PreTrainedModel", module.model)

    # The schedule calls it after the stage's forward, so outside of that phase.
    def compute_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with tracker.phase("forward"):
            loss: torch.Tensor = model.loss_function(
                logits=output, labels=target, vocab_size=plan.architecture.vocab_size
            )
        return loss

    schedule_class = get_schedule_class(engine.schedule_name)
    schedule: _PipelineSchedule = schedule_class(stage, num_micro_batches, loss_fn=compute_loss)
    # Set on the schedule, which would receive the other stages' votes from ranks that are not there.
    vars(schedule)["_warmup_p2p"] = _use_static_shapes
    return schedule, stage


def _use_static_shapes(stages: Iterable[PipelineStage], has_backward: bool, p2p_done: bool) -> None:
    """Replace ``_PipelineSchedule._warmup_p2p``, in which stages agree on static shapes: they are given."""
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC
