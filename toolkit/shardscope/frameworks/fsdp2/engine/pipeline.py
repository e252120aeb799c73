"""FSDP2 engine with pipeline parallelism: sharded stages under ``torch.distributed.pipelining``.

The schedule is 1F1B, interleaved with several chunks per stage (Narayanan et al. 2021, section 2.2), or
GPipe. A stage's gradients are reduced once, when the schedule has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

from shardscope.core.layout import split_layers_evenly
from shardscope.frameworks.fsdp2.engine.engine import Fsdp2Engine, choose_tokens_of_shards
from shardscope.frameworks.fsdp2.layout import get_layout
from shardscope.training import micro_batches
from shardscope.training.accounting.memory_watch import MemoryWatch
from shardscope.training.engine import LOSS_SCALE_POWER, BuildModel, BuildOptimizer
from shardscope.training.generation import broadcast_tokens, run_stages
from shardscope.training.model.pipeline_stages import copy_shallow, extract_stage
from shardscope.training.optimizers.gradients import local_shard
from shardscope.training.weights import pretrained
from shardscope.training.weights.stage_tensors import StageTensor, send_stages_to_rank_0

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import _PipelineSchedule
    from transformers import PretrainedConfig, PreTrainedModel

InPhase = Callable[[Literal["forward", "backward"]], AbstractContextManager[None]]
"""Returns the context of a phase."""
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


class PipelinedEngine(Fsdp2Engine):
    """FSDP2 engine of one pipeline stage.

    ``model`` has the stage's layers, under the whole model's names; the schedule calls ``chunks``, which
    share its modules.
    """

    chunks: tuple[StageModule, ...] = ()
    _config: PretrainedConfig
    """Config of the whole model."""
    _is_tied = False
    _schedule: _PipelineSchedule | None = None
    """torch's schedule, for micro-batches of ``_schedule_shape``."""
    _schedule_shape: tuple[int, ...] | None = None

    @property
    def stage(self) -> int:
        """Index of this rank's pipeline stage, from 0."""
        assert self.stage_mesh is not None, "make_mesh() creates it with pp > 1"
        index: int = self.stage_mesh.get_local_rank()
        return index

    @property
    def stage_group(self) -> ProcessGroup:
        """Ranks of all stages, one each, that have this rank's position in its stage."""
        assert self.stage_mesh is not None, "make_mesh() creates it with pp > 1"
        return self.stage_mesh.get_group()

    @property
    def chunk_numbers(self) -> tuple[int, ...]:
        """Indices of this rank's model chunks: every pp-th."""
        degrees = self.plan.degrees
        return tuple(range(self.stage, degrees.pp * degrees.vpp, degrees.pp))

    @property
    def chunk_layers(self) -> tuple[range, ...]:
        """Layer indices of each of this rank's chunks."""
        degrees = self.plan.degrees
        sizes = split_layers_evenly(self.plan.architecture.num_hidden_layers, degrees.pp * degrees.vpp)
        return tuple(range(sum(sizes[:number]), sum(sizes[: number + 1])) for number in self.chunk_numbers)

    # ---- building the stage

    def build_on_host(self, build_model: BuildModel) -> torch.nn.Module:
        def build_stage() -> torch.nn.Module:
            # check_pipeline admits transformers' causal language models only.
            model = cast("PreTrainedModel", build_model())
            self._is_tied, self._config = bool(model.config.tie_word_embeddings), model.config
            layers = [number for chunk in self.chunk_layers for number in chunk]
            stage = extract_stage(model, layers, is_first=self.stage == 0, is_last=self._has_last)
            # Checkpoints record which tensors each rank has (training/checkpoints).
            vars(stage)["in_stages"] = True
            return stage

        # Every k-th layer of the stage is recomputed, so the stage is built before those layers are chosen.
        return super().build_on_host(build_stage)

    @property
    def _has_last(self) -> bool:
        return bool(self.stage == self.plan.degrees.pp - 1)

    def list_roots(self, model: torch.nn.Module) -> list[torch.nn.Module]:
        last = self.plan.degrees.pp * self.plan.degrees.vpp - 1
        self.chunks = tuple(
            StageModule(
                extract_stage(model, layers, is_first=number == 0, is_last=number == last),
                is_first=number == 0,
                is_last=number == last,
                tp_mesh=self.tp_mesh,
            )
            for number, layers in zip(self.chunk_numbers, self.chunk_layers, strict=True)
        )
        return list(self.chunks)

    def assemble(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer | None
    ) -> list[torch.nn.Parameter]:
        trained = super().assemble(build_model, build_optimizer)
        # setup() calls train() of the whole stage, which is no parent of the chunks' own modules.
        for chunk in self.chunks:
            chunk.train()
        self._tied_group = self._make_tied_group() if self._is_tied else None
        tied = self._tied_parameter() if self._is_tied else None
        if tied is not None:
            # Initial weights are seeded by parameter name, so the two copies would differ.
            dist.broadcast(local_shard(tied.detach()), group=self._tied_group, group_src=0)
        if self._scaler is not None:
            self._scaler = _StagesScaler(self.stage_group, self.ctx.device)
        return trained

    def _make_tied_group(self) -> ProcessGroup | None:
        """Return this rank's group of first-stage and last-stage rank with the same embedding shard.

        None on the stages between them. Creates the groups of all pairs, so every rank must call it.
        """
        pp, ranks_per_stage = self.plan.degrees.pp, self.ctx.world_size // self.plan.degrees.pp
        pairs = [[rank, (pp - 1) * ranks_per_stage + rank] for rank in range(ranks_per_stage)]
        groups = [dist.new_group(pair) for pair in pairs]
        return groups[self.ctx.rank % ranks_per_stage] if self.stage in (0, pp - 1) else None

    # ---- a step

    def _run_step(self, batch: Mapping[str, torch.Tensor], watch: MemoryWatch) -> float:
        micro_batches.check_staged_batch(batch)
        micros = micro_batches.split_batch(batch, self.plan.num_micro_batches)
        loss_weights = micro_batches.LossWeights(micros)
        # Compute all weights first: an error in the middle of a schedule would leave other stages hanging.
        weights = [loss_weights[index] for index in range(len(micros))]
        device = self.ctx.device
        losses = _Losses(weights, self._scaler, device)
        schedule = self._prepare_schedule(micros[0]["input_ids"].shape, losses, watch.phase)
        # The schedule splits the whole batch again, into the same micro-batches.
        device_batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        with loss_parallel() if self.tp_mesh is not None else nullcontext():
            schedule.step(
                *((device_batch["input_ids"],) if self.stage == 0 else ()),
                target=device_batch["labels"] if self._has_last else None,
                return_outputs=False,
            )
        # Ranks of other stages add zero. Asynchronous: the number is needed only after the optimizer.
        summing = dist.all_reduce(losses.total, async_op=True)
        self._sum_tied_gradients()
        with watch.phase("optimizer"):
            norm = self._update_weights()
        summing.wait()
        self.num_steps_done += 1
        # One rank in pp has the last stage, so the sum is over world_size / pp data-parallel losses.
        mean = losses.total * self.plan.degrees.pp / dist.get_world_size()
        numbers: list[float] = torch.stack([mean, norm]).tolist()
        loss, self.grad_norm = numbers
        return loss

    def _evaluate(self, batch: Mapping[str, torch.Tensor]) -> float:
        micro_batches.check_staged_batch(batch)
        micros, weights = micro_batches.split_for_evaluation(batch, self.plan.num_micro_batches)
        losses = _Losses(weights, None, self.ctx.device)
        schedule = self._prepare_schedule(micros[0]["input_ids"].shape, losses, lambda _: nullcontext())
        # Labels of empty micro-batches have changed; the schedule splits the whole batch again.
        ids, labels = (
            torch.cat([micro[name] for micro in micros]).to(self.ctx.device)
            for name in ("input_ids", "labels")
        )
        schedule.eval(
            *((ids,) if self.stage == 0 else ()),
            target=labels if self._has_last else None,
            return_outputs=False,
        )
        dist.all_reduce(losses.total)
        return float(losses.total * self.plan.degrees.pp / dist.get_world_size())

    def _predict_next(self, input_ids: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        degrees, (rows, width) = self.plan.degrees, input_ids.shape
        shape = (rows, width // degrees.tp, self.plan.architecture.hidden_size)
        hidden = torch.empty(shape, dtype=self.compute_dtype, device=self.ctx.device)
        chunks = dict(zip(self.chunk_numbers, self.chunks, strict=True))
        logits = run_stages(chunks, degrees.pp * degrees.vpp, input_ids, hidden, self.stage_group)
        tokens = None if logits is None else choose_tokens_of_shards(logits, last)
        return broadcast_tokens(tokens, rows, self.ctx.device, self.stage_group)

    @property
    def schedule_name(self) -> str:
        """Name of the plan's schedule in torch."""
        layout = get_layout(self.plan)
        return f"Interleaved{layout.pipeline_schedule}" if layout.vpp > 1 else layout.pipeline_schedule

    def _prepare_schedule(self, shape: torch.Size, losses: _Losses, in_phase: InPhase) -> _PipelineSchedule:
        """Return torch's schedule for micro-batches of ``shape``; it is rebuilt when the shape changes."""
        if self._schedule is None or self._schedule_shape != tuple(shape):
            self._schedule_shape = tuple(shape)
            self._stages = [
                _Stage(chunk, number, self, shape)
                for chunk, number in zip(self.chunks, self.chunk_numbers, strict=True)
            ]
            schedule_class = get_schedule_class(self.schedule_name)
            # scale_grads would divide by the number of micro-batches, as the losses' weights already do.
            self._schedule = schedule_class(
                self._stages if len(self._stages) > 1 else self._stages[0],
                self.plan.num_micro_batches,
                loss_fn=self._compute_stage_loss,
                scale_grads=False,
            )
        self._losses = losses
        for stage in self._stages:
            stage.in_phase = in_phase
        return self._schedule

    def _compute_stage_loss(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the weighted loss of one micro-batch; the schedule calls this on the last stage."""
        model = cast("PreTrainedModel", self.chunks[-1].model)
        vocab_size = self.plan.architecture.vocab_size
        loss: torch.Tensor = model.loss_function(logits=output, labels=labels, vocab_size=vocab_size)
        # With a sharded vocabulary the loss is a DTensor, replicated on each tensor-parallel rank.
        return self._losses.add(loss.to_local() if isinstance(loss, DTensor) else loss)

    def _sum_tied_gradients(self) -> None:
        """Sum the gradients of a tied head and embedding, which are copies on different stages."""
        tied = self._tied_parameter() if self._is_tied else None
        if tied is not None:
            assert tied.grad is not None, "the schedule has run every backward"
            dist.all_reduce(local_shard(tied.grad), group=self._tied_group)

    def norm_copies(self, parameter: torch.nn.Parameter) -> int:
        copies = self.part_copies(parameter)
        # The embedding and its copy in the head have the same summed gradient: it counts once in the norm.
        return 2 * copies if self._is_tied and id(parameter) == id(self._tied_parameter()) else copies

    def _tied_parameter(self) -> torch.nn.Parameter | None:
        """Return the embedding on the first stage, its copy in the head on the last, None on others."""
        name = {0: EMBEDDING, self.plan.degrees.pp - 1: HEAD}.get(self.stage)
        return dict(self.model.named_parameters())[name] if name else None

    # ---- checkpoints and exports

    def _describe_position(self) -> dict[str, object]:
        return {**super()._describe_position(), "in_stages": True}

    def export(self, path: str | Path) -> None:
        # A stage's config has the layer types of its own layers; the exported one is the whole model's.
        model = cast("PreTrainedModel", copy_shallow(self.model))
        model.config = self._config
        pretrained.write_pretrained(self._resolve_in_run(path), model, self.full_tensors())

    def full_tensors(self) -> pretrained.FullTensors:
        # transformers stores a tied weight once, under the embedding's name.
        stage_tensors = [
            StageTensor(name, tuple(parameter.shape), parameter.dtype, partial(self._gather_full, parameter))
            for name, parameter in self.model.named_parameters()
            if not (self._is_tied and name == HEAD)
        ]
        pp, device = self.plan.degrees.pp, self.ctx.device
        return send_stages_to_rank_0(stage_tensors, stage=self.stage, num_stages=pp, device=device)

    def _gather_full(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """All-gather ``parameter``; NCCL cannot communicate offloaded shards, which are in host memory."""
        shard = parameter.detach().to(self.ctx.device)
        assert isinstance(shard, DTensor), "_shard_model() shards every parameter"
        return shard.full_tensor()

    # ---- reading back

    @property
    def roots(self) -> tuple[torch.nn.Module, ...]:
        return self.chunks

    def read_back(self) -> dict[str, object]:
        record = super().read_back()
        pp, vpp = self.plan.degrees.pp, self.plan.degrees.vpp
        if dist.get_world_size(self.stage_group) != pp:
            raise RuntimeError(
                f"the plan says pp={pp}, and the group of stages has {dist.get_world_size(self.stage_group)}"
            )
        # Layers keep their numbers in the whole model: model.layers.<number>.<module>.
        names = [name for name, _ in self.model.named_parameters()]
        layers = sorted({int(name.split(".")[2]) for name in names if ".layers." in name})
        planned = self.plan.stage_layers[self.stage]
        if len(layers) != planned:
            raise RuntimeError(f"stage {self.stage} should have {planned} layers, and has {len(layers)}")
        expected = self.plan.architecture.num_parameters
        if self._is_tied:  # The first and the last stage have a copy each.
            expected += self.plan.architecture.vocab_size * self.plan.architecture.hidden_size
        if record["num_parameters"] != expected:
            raise RuntimeError(
                f"the stages have {record['num_parameters']:,} weights, and the plan has {expected:,}"
            )
        return {
            **record,
            "pp": pp,
            "vpp": vpp,
            "stage": self.stage,
            "layers": layers,
            "chunks": [list(numbers) for numbers in self.chunk_layers],
            "schedule": self.schedule_name,
        }

    def describe_built(self, record: Mapping[str, object], where: str) -> str:
        pp, vpp = self.plan.degrees.pp, self.plan.degrees.vpp
        chunks = f" in {vpp} chunks" if vpp > 1 else ""
        layers = ", ".join(str(number) for chunk in self.chunk_layers for number in chunk)
        return (
            f"{super().describe_built(record, where)}; pipeline stage {self.stage + 1} of {pp} with "
            f"layers {layers}{chunks}, {self.schedule_name}"
        )


class _Losses:
    """Weighted losses of one step's micro-batches, which the schedule computes in order."""

    def __init__(
        self, weights: list[float], scaler: torch.amp.GradScaler | None, device: torch.device
    ) -> None:
        self.total = torch.zeros((), device=device)
        self._weights, self._scaler, self._next = weights, scaler, 0

    def add(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the weighted, scaled loss of the next micro-batch, and add it to the total."""
        part = loss * self._weights[self._next]
        self._next += 1
        self.total += part.detach().float()
        return self._scaler.scale(part) if self._scaler else part


class PhasedStage(PipelineStage):
    """torch's stage, which runs forward and backward of each micro-batch inside :attr:`in_phase`."""

    in_phase: InPhase
    """Returns the context of a phase: the engine measures memory in it, a rehearsal tracks it."""

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[torch.Tensor, ...],
        kwargs: dict[str, object] | None = None,
        save_forward_output: bool = True,
    ) -> object:
        with self.in_phase("forward"):
            output: object = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: torch.Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        with self.in_phase("backward"):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        # FSDP2's reduce-scatters of all micro-batches, which torch runs after the last backward.
        # It runs them at the end of an evaluation as well.
        if self.has_backward:
            with self.in_phase("backward"):
                super().perform_reduce_grad(grad_scale_factor)


class _Stage(PhasedStage):
    """Stage of one model chunk, with static shapes of what stages exchange."""

    def __init__(self, chunk: StageModule, number: int, engine: PipelinedEngine, shape: torch.Size) -> None:
        degrees, arch = engine.plan.degrees, engine.plan.architecture
        rows, seq_len = shape
        dtype = engine.compute_dtype
        # Given examples of input and output, torch infers no shapes by running the stages once, which would
        # all-gather parameters and send metadata (torch 2.13, stage.py, PipelineStage: static mode).
        ids = torch.empty(shape, dtype=torch.int64, device="meta")
        # Tensor-parallel ranks send local shards of the sequence.
        hidden = torch.empty(
            (rows, seq_len // degrees.tp, arch.hidden_size), dtype=dtype, device="meta", requires_grad=True
        )
        logits = torch.empty((rows, seq_len, arch.vocab_size), dtype=dtype, device="meta", requires_grad=True)
        super().__init__(
            chunk,
            number,
            degrees.pp * degrees.vpp,
            engine.ctx.device,
            input_args=ids if chunk.is_first else hidden,
            output_args=logits if chunk.is_last else hidden,
            group=engine.stage_group,
        )


class _StagesScaler(torch.amp.GradScaler):
    """fp16 gradient scaler shared by all stages: an overflow on one stage skips the step on all."""

    def __init__(self, stages: ProcessGroup, device: torch.device) -> None:
        super().__init__(device.type, init_scale=2.0**LOSS_SCALE_POWER)
        self._stages_group = stages
        # torch creates the scale at the first loss, which only the last stage computes.
        self.scale(torch.zeros((), device=device))

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)
        # step() skips the update if any of these is 1.
        for found_inf in self._found_inf_per_device(optimizer).values():
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=self._stages_group)


# ---- Pipeline stages of a transformers model, for ``torch.distributed.pipelining``
#
# Each stage has some of the model's decoder layers, the first one the embedding, and the last one the final
# norm and the head. Stages send hidden states to each other; the schedule computes the loss.


class StageModule(torch.nn.Module):
    """Pipeline stage of a transformers model: token ids or hidden states in, hidden states or logits out.

    With tensor parallelism (``tp_mesh``) hidden states are sharded along the sequence, and each rank sends
    its local shard: stages exchange plain tensors, not DTensors.
    """

    def __init__(
        self, part: torch.nn.Module, *, is_first: bool, is_last: bool, tp_mesh: DeviceMesh | None = None
    ) -> None:
        super().__init__()
        self.model = part
        self.is_first, self.is_last = is_first, is_last
        self._tp_mesh = tp_mesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the stage: (batch, sequence[, hidden]) in, (batch, sequence, hidden or vocabulary) out."""
        if self._tp_mesh is not None and not self.is_first:
            x = DTensor.from_local(x, self._tp_mesh, [Shard(1)], run_check=False)
        inputs = {"input_ids": x} if self.is_first else {"inputs_embeds": x}
        # The last stage runs the causal language model's own forward, which may scale its logits.
        module = self.model if self.is_last else self.model.get_submodule("model")
        output = module(**inputs, use_cache=False)
        states: torch.Tensor = output.logits if self.is_last else output.last_hidden_state
        # P2P operations send plain tensors: each tensor-parallel rank its shard of the sequence.
        if isinstance(states, DTensor) and not self.is_last:
            return states.redistribute(placements=[Shard(1)]).to_local()
        return states
