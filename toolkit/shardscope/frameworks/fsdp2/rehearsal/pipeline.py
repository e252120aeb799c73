"""Rehearsal of FSDP2 with pipeline parallelism: torch's own schedule, one stage at a time.

Receives from other stages complete immediately, without a sender. A stage is always created for all
micro-batches of a step, because torch allocates receive buffers for each of them; only as many micro-batches
are run as affect the peak.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.schedules import get_schedule_class

from shardscope.core.errors import refuse
from shardscope.rehearsal.extent import NUM_STEPS
from shardscope.rehearsal.torch_step import finish_step, set_up_engine

if TYPE_CHECKING:
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


class _Stage(PipelineStage):  # type: ignore[misc]
    """torch's stage with receive buffers for all micro-batches of the plan, however many are run."""

    def __init__(self, *args: Any, tracker: Tracker, num_planned: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tracker = tracker
        self.num_planned = num_planned

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        with self.tracker.labelling("gather_buffers"):
            super()._setup_forward_recv_info(self.num_planned, has_backward)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        with self.tracker.labelling("gather_buffers"):
            super()._setup_backward_recv_info(self.num_planned)
        self.chunks = num_microbatches

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.tracker.phase("forward"):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.tracker.phase("backward"):
            return super().backward_one_chunk(*args, **kwargs)

    def perform_reduce_grad(self, *args: Any, **kwargs: Any) -> Any:
        with self.tracker.phase("backward"):
            return super().perform_reduce_grad(*args, **kwargs)


def play_stage(
    engine: PipelinedEngine, tracker: Tracker, note_progress: NoteProgress, *, built_on_host: bool
) -> RehearsedStage:
    """Run two optimizer steps of one stage and return the memory of the second."""
    plan, number = engine.plan, engine.stage
    trained = set_up_engine(engine, tracker, built_on_host=built_on_host)
    # The most that are ever in flight, and one more to reach the steady state.
    num_micro_batches = min(plan.num_micro_batches, plan.degrees.pp + 1)
    if plan.layout.runs_all_forwards_first:
        num_micro_batches = plan.num_micro_batches
    schedule, stage = _schedule(engine, tracker, num_micro_batches)
    rows = num_micro_batches * plan.recipe.micro_batch_size
    for step in range(NUM_STEPS):
        if step == NUM_STEPS - 1:
            tracker.restart()
        ids = torch.zeros((rows, plan.recipe.seq_len), dtype=torch.int64, device=engine.ctx.device)
        schedule.step(
            *((ids,) if stage.is_first else ()),
            **({"target": ids, "losses": []} if stage.is_last else {}),
            return_outputs=False,
        )
        finish_step(engine, tracker, trained)
    note = f"torch's {type(schedule).__name__}, one stage at a time"
    if num_micro_batches < plan.num_micro_batches:
        note += f"; {num_micro_batches} of {plan.num_micro_batches} micro-batches played"
    return tracker.build_stage(number, plan.stage_layers[number], note=note)


def _schedule(engine: PipelinedEngine, tracker: Tracker, num_micro_batches: int) -> tuple[Any, _Stage]:
    plan, module = engine.plan, engine.chunks[0]
    shape = (plan.recipe.micro_batch_size, plan.recipe.seq_len)
    with tracker.paused(), torch.device(engine.ctx.device):
        # Used for their shapes only: real stages exchange these once, before the first step.
        ids = torch.zeros(shape, dtype=torch.int64)
        hidden = torch.empty(
            (*shape, plan.architecture.hidden_size), dtype=engine.compute_dtype, requires_grad=True
        )
        logits = torch.empty(
            (*shape, plan.architecture.vocab_size), dtype=engine.compute_dtype, requires_grad=True
        )
    stage = _Stage(
        module,
        engine.stage,
        plan.degrees.pp,
        engine.ctx.device,
        input_args=ids if engine.stage == 0 else hidden,
        output_args=logits if engine.stage == plan.degrees.pp - 1 else hidden,
        group=engine.stage_group,
        tracker=tracker,
        num_planned=plan.num_micro_batches,
    )
    model: Any = module.model

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with tracker.phase("forward"):
            mean_loss: torch.Tensor = model.loss_function(
                logits=output, labels=target, vocab_size=plan.architecture.vocab_size
            )
        return mean_loss

    schedule_class = get_schedule_class(engine.schedule_name)
    schedule = schedule_class(stage, num_micro_batches, loss_fn=loss)
    schedule._warmup_p2p = _shapes_are_known
    return schedule, stage


def _shapes_are_known(stages: Any, *_: Any) -> None:
    """Replace torch's agreement between stages on static shapes: they are known here."""
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC
