"""DeepSpeed engine with pipeline parallelism: its ``PipelineEngine`` over stages of a transformers model.

The schedule is 1F1B; gradients are reduced once, at its end (deepspeed/runtime/pipe/engine.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, cast

import torch
import torch.distributed as dist

from shardscope.frameworks.deepspeed.engine import checkpointing
from shardscope.frameworks.deepspeed.engine.engine import DeepSpeedEngine
from shardscope.training import micro_batches
from shardscope.training.accounting.memory_watch import MemoryWatch
from shardscope.training.engine import BuildModel, BuildOptimizer
from shardscope.training.generation import broadcast_tokens, choose_tokens, run_stages
from shardscope.training.model.pipeline_stages import copy_shallow, extract_stage
from shardscope.training.optimizers.gradients import clip_gradients
from shardscope.training.weights import pretrained
from shardscope.training.weights.initial_weights import build_initialized
from shardscope.training.weights.stage_tensors import StageTensor, send_stages_to_rank_0

if TYPE_CHECKING:
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from transformers import PretrainedConfig, PreTrainedModel

P = ParamSpec("P")
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


class PipelinedEngine(DeepSpeedEngine):
    """DeepSpeed engine of one pipeline stage; ``model`` has its layers, under the whole model's names."""

    _module: PipelineEngine
    _is_tied = False
    _full_config: PretrainedConfig
    """Config of the whole model."""

    @property
    def stage(self) -> int:
        """Index of this rank's pipeline stage, from 0."""
        return self.ctx.rank // self.num_data_ranks

    @property
    def data_rank(self) -> int:
        return self.ctx.rank % self.num_data_ranks

    @property
    def num_data_ranks(self) -> int:
        return int(self.plan.degrees.data_parallel)

    @property
    def _is_last(self) -> bool:
        return bool(self.stage == self.plan.degrees.pp - 1)

    # ---- what is built

    def build_on_host(self, build_model: BuildModel) -> torch.nn.Module:
        def build_stage() -> torch.nn.Module:
            # check_pipeline admits transformers' causal language models only.
            model = cast("PreTrainedModel", build_model())
            self._is_tied = bool(model.config.tie_word_embeddings)
            self._full_config = model.config
            first = sum(self.plan.stage_layers[: self.stage])
            layers = range(first, first + self.plan.stage_layers[self.stage])
            return extract_stage(model, layers, is_first=self.stage == 0, is_last=self._is_last)

        # Every k-th layer of the stage is recomputed, so the stage is built before those layers are chosen.
        return super().build_on_host(build_stage)

    def build_with_weights(self, build_model: BuildModel) -> torch.nn.Module:
        if self.initializes_shards:
            return build_initialized(build_model, self.initial_weights_of)
        return super().build_with_weights(build_model)

    _shape: torch.Size | None = None
    """Shape of the last step's micro-batches."""

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        from shardscope.frameworks.deepspeed.engine.pipeline_module import StagedModule

        return StagedModule(
            model,
            self._compute_stage_loss,
            stage=self.stage,
            num_stages=self.plan.degrees.pp,
            is_tied=self._is_tied,
            tied=self._find_tied_module(model),
        )

    def _find_tied_module(self, model: torch.nn.Module) -> torch.nn.Module | None:
        """Return the embedding on the first stage, its copy in the head on the last, None on others."""
        if self.stage == 0:
            return model.get_submodule("model.embed_tokens")
        return model.get_submodule("lm_head") if self._is_last else None

    def assemble(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer | None
    ) -> list[torch.nn.Parameter]:
        trained = super().assemble(build_model, build_optimizer)
        from deepspeed.runtime.pipe import schedule

        # DeepSpeed runs a schedule of instructions, and looks up the method of each in this table.
        methods = self._module._INSTRUCTION_MAP
        update = self.accounted_update()(methods[schedule.OptimizerStep])
        self._module._INSTRUCTION_MAP = {
            **methods,
            schedule.ForwardPass: self._with_phase("forward", methods[schedule.ForwardPass]),
            schedule.BackwardPass: self._with_phase("backward", methods[schedule.BackwardPass]),
            schedule.ReduceGrads: self._with_phase("backward", methods[schedule.ReduceGrads]),
            schedule.OptimizerStep: self._with_phase("optimizer", update),
        }
        return trained

    # ---- a step

    def _run_step(self, batch: Mapping[str, torch.Tensor], watch: MemoryWatch) -> float:
        micro_batches.check_staged_batch(batch)
        micros = micro_batches.split_batch(batch, self.plan.num_micro_batches)
        weights = micro_batches.LossWeights(micros)
        # Compute all weights first: an error in the middle of a schedule would leave other stages hanging.
        self._loss_weights = iter([weights[index] for index in range(len(micros))])
        loss = self._module.train_batch(self._feed(micros))
        self.num_steps_done += 1
        numbers: list[float] = torch.stack([loss.float(), self._norm]).tolist()
        mean, self.grad_norm = numbers
        return mean

    def _evaluate(self, batch: Mapping[str, torch.Tensor]) -> float:
        micro_batches.check_staged_batch(batch)
        micros, weights = micro_batches.split_for_evaluation(batch, self.plan.num_micro_batches)
        self._loss_weights = iter(weights)
        return float(self._module.eval_batch(self._feed(micros)))

    def _predict_next(self, input_ids: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        shape = (*input_ids.shape, self.plan.architecture.hidden_size)
        hidden = torch.empty(shape, dtype=self.weights_dtype, device=self.ctx.device)
        group = self._module.grid.get_pipe_parallel_group()
        chunks = {self.stage: self._module.module}
        logits = run_stages(chunks, int(self.plan.degrees.pp), input_ids, hidden, group)
        tokens = None if logits is None else choose_tokens(logits, last)
        return broadcast_tokens(tokens, len(input_ids), self.ctx.device, group)

    def _feed(self, micros: list[dict[str, torch.Tensor]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Return DeepSpeed's iterator of inputs and labels, after fitting its buffers to their shape."""
        shape = micros[0]["input_ids"].shape
        if shape != self._shape:
            # DeepSpeed allocates its buffers, and sends the next stage their shapes, only once.
            self._module.reset_activation_shape()
            self._shape = shape
        return iter([(micro["input_ids"], micro["labels"]) for micro in micros])

    def _compute_stage_loss(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of the next micro-batch, weighted by its number of labels.

        The factor undoes DeepSpeed's division by the number of micro-batches.
        """
        loss_function = self.model.loss_function
        assert callable(loss_function)  # a method of transformers' causal language models
        loss: torch.Tensor = loss_function(
            logits=output, labels=labels, vocab_size=self.plan.architecture.vocab_size
        )
        return loss * (next(self._loss_weights) * self.plan.num_micro_batches)

    def _with_phase(self, phase: str, method: Callable[P, None]) -> Callable[P, None]:
        """Wrap the method of a schedule's instruction, which belongs to ``phase`` of the memory watch."""

        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            assert self._watch is not None, "step() creates it before the schedule runs"
            # An evaluation, without gradients, is no phase of a step.
            with self._watch.phase(phase) if torch.is_grad_enabled() else nullcontext():
                method(*args, **kwargs)

        return run

    def clip_gradients(self) -> torch.Tensor:
        """Clip by the norm over all stages.

        DeepSpeed's norm of fp32 gradients is one stage's (runtime/utils.py, ``clip_grad_norm_``).
        """
        group = self._module.grid.get_pipe_parallel_group()
        return clip_gradients(
            self.model.parameters(), self.ctx.device, group, self.max_grad_norm, self._count_copies
        )

    def _count_copies(self, parameter: torch.nn.Parameter) -> int:
        """Return on how many stages a parameter is: a tied embedding is on the first and on the last."""
        tied = self._find_tied_module(self.model) if self._is_tied else None
        return 2 if tied is not None and tied.weight is parameter else 1

    # ---- what leaves the run

    def export(self, path: str | Path) -> None:
        # The stage's own config lists only its layers.
        model = cast("PreTrainedModel", copy_shallow(self.model))
        model.config = self._full_config
        pretrained.write_pretrained(self._resolve_in_run(path), model, self.full_tensors())

    def full_tensors(self) -> pretrained.FullTensors:
        main = self.recipe.precision != "bf16"
        gather = checkpointing.build_gather(self._module, main=main, device=self.ctx.device)
        stage_tensors = [
            StageTensor(
                name,
                tuple(parameter.shape),
                torch.float32 if main else parameter.dtype,
                partial(gather, parameter),
            )
            for name, parameter in self.model.named_parameters()
            if not (self._is_tied and name == HEAD)
        ]
        pp, device = self.plan.degrees.pp, self.ctx.device
        return send_stages_to_rank_0(stage_tensors, stage=self.stage, num_stages=pp, device=device)

    # ---- what it is

    def read_back(self) -> dict[str, object]:
        record = super().read_back()
        grid, pp = self._module.grid, self.plan.degrees.pp
        if (grid.pipe_parallel_size, self._module.stage_id) != (pp, self.stage):
            raise RuntimeError(
                f"the plan says stage {self.stage} of pp={pp}, and DeepSpeed built stage "
                f"{self._module.stage_id} of {grid.pipe_parallel_size}"
            )
        layers = _list_layers(self._module.module)
        planned = self.plan.stage_layers[self.stage]
        if len(layers) != planned:
            raise RuntimeError(f"stage {self.stage} should have {planned} layers, and has {len(layers)}")
        total = torch.tensor(record["num_parameters"], device=self.ctx.device)
        dist.all_reduce(total)
        arch = self.plan.architecture
        expected = arch.num_parameters + self._is_tied * arch.vocab_size * arch.hidden_size
        if int(total) != expected * self.num_data_ranks:
            raise RuntimeError(
                f"the stages have {int(total) // self.num_data_ranks:,} weights, the plan {expected:,}"
            )
        schedule = type(self._module._train_schedule()).__name__
        return {**record, "pp": pp, "pipeline_stage": self.stage, "layers": layers, "schedule": schedule}

    def describe_built(self, found: Mapping[str, object], where: str) -> str:
        layers = ", ".join(map(str, _list_layers(self._module.module)))
        stage = f"pipeline stage {self.stage + 1} of {found['pp']} with layers {layers}, 1F1B"
        return f"{super().describe_built(found, where)}; {stage}"


def _list_layers(module: torch.nn.Module) -> list[int]:
    """Return the whole model's indices of the decoder layers that have parameters in ``module``."""
    names = (name.partition(".layers.")[2] for name, _ in module.named_parameters())
    return sorted({int(name.partition(".")[0]) for name in names if name})
