"""FSDP2 under ``torch.distributed.pipelining`` rehearsed: torch's own 1F1B schedule, one stage at a time.

What other stages would send is received at once from nobody. A stage is always made for all micro-batches of
a step, for torch allocates what it receives for each of them; only as many are played as change anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining._utils import InferenceMode

from shardscope.frameworks.fsdp2.engine import Fsdp2Engine
from shardscope.frameworks.fsdp2.pipeline import StageModule
from shardscope.rehearsal.torch_step import NUM_STEPS, finish_step, prepare

if TYPE_CHECKING:
    from shardscope.frameworks.engine import BuildModel, Context
    from shardscope.rehearsal.result import RehearsedStage
    from shardscope.rehearsal.torch_step import NoteProgress
    from shardscope.rehearsal.tracker import Tracker


class PipelinedEngine(Fsdp2Engine):
    """The engine on the ranks of one pipeline stage: it shards that stage's part of the model."""

    stage_group: Any = None

    def __init__(self, ctx: Context, stage: int) -> None:
        super().__init__(ctx)
        self.stage = stage

    def make_mesh(self) -> Any:
        sizes = (self.plan.degrees.pp, *self._planned_mesh)
        names = ("pp", *(("replicate",) if len(sizes) > 2 else ()), "shard")
        whole = init_device_mesh(self.ctx.device.type, sizes, mesh_dim_names=names)
        self.stage_group = whole["pp"].get_group()
        return whole[names[1:]]

    def build_on_host(self, build_model: BuildModel) -> torch.nn.Module:
        layers = self.plan.stage_layers

        def build_stage() -> torch.nn.Module:
            return StageModule(
                build_model(),
                first_layer=sum(layers[: self.stage]),
                num_layers=layers[self.stage],
                is_first=self.stage == 0,
                is_last=self.stage == len(layers) - 1,
            )

        # Every k-th layer of the stage is recomputed, so the model is cut before any is chosen.
        return super().build_on_host(build_stage)


class _Stage(PipelineStage):  # type: ignore[misc]
    """Receives for all micro-batches of the plan's step, whatever number of them is played."""

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
    """Two optimizer steps of one stage, of which the second counts."""
    plan, number = engine.plan, engine.stage
    trained = prepare(engine, tracker, built_on_host=built_on_host)
    # As many as are ever in flight, and one that another gives way to.
    num_micro_batches = min(plan.num_micro_batches, plan.degrees.pp + 1)
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
    note = "torch's Schedule1F1B, one stage at a time"
    if num_micro_batches < plan.num_micro_batches:
        note += f"; {num_micro_batches} of {plan.num_micro_batches} micro-batches played"
    return tracker.stage(number, plan.stage_layers[number], note=note)


def _schedule(engine: PipelinedEngine, tracker: Tracker, num_micro_batches: int) -> tuple[Any, _Stage]:
    plan, module = engine.plan, engine._module
    shape = (plan.recipe.micro_batch_size, plan.recipe.seq_len)
    with tracker.paused(), torch.device(engine.ctx.device):
        # Shapes only: a real stage sends and receives them once, before the first step.
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
            found: torch.Tensor = model.loss_function(
                logits=output, labels=target, vocab_size=plan.architecture.vocab_size
            )
        return found

    schedule = Schedule1F1B(stage, num_micro_batches, loss_fn=loss)
    schedule._warmup_p2p = _shapes_are_known
    return schedule, stage


def _shapes_are_known(stages: Any, *_: Any) -> None:
    """In place of a vote between stages whether all of them know their shapes."""
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC
