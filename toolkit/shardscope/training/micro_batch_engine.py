"""A step over micro-batches of a module that returns its loss, and what a run is told of it.

What DDP, FSDP2 and DeepSpeed share; how the model is wrapped and its weights updated is each one's own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Parameter

from shardscope.frameworks.registry import check_trained
from shardscope.memory.activations.head import loss_in_force
from shardscope.memory.overheads.building import is_drawn_in_parts
from shardscope.training import micro_batches
from shardscope.training.accounting import tensors
from shardscope.training.accounting.memory_watch import MemoryWatch
from shardscope.training.accounting.precision_found import check_copied, check_precision
from shardscope.training.checkpoints.position import position_of
from shardscope.training.engine import BuildModel, BuildOptimizer, Context, Engine
from shardscope.training.model import lora, quantized
from shardscope.training.model.compiled import check_compiled, compile_layers
from shardscope.training.model.loss import apply_chunked_loss
from shardscope.training.model.on_meta import build_on_meta
from shardscope.training.model.recompute import apply_recompute, check_recompute
from shardscope.training.optimizers import optimizers
from shardscope.training.weights import pretrained
from shardscope.training.weights.initial_weights import (
    CPU,
    FreshWeights,
    InitialWeights,
    build_filled,
    draw_adapters,
)
from shardscope.training.weights.stored_weights import WithAdapters

MIXED_TYPES = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
"""What matrices are multiplied in when fp32 originals are kept."""

SHORT_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class MicroBatchEngine(Engine):
    """An engine whose micro-batches go one by one through a module; a subclass makes that and updates it."""

    model: torch.nn.Module
    """The model under its framework's wrapper: its parameter names are the checkpoint's."""
    optimizer: torch.optim.Optimizer
    _module: torch.nn.Module
    """What is called."""

    shards_parameters = False
    """Whether the framework cuts parameters, which then must be of a type that it can cut."""

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self.recipe = self.plan.recipe
        self._watch: MemoryWatch | None = None

    # ---- what a framework says for itself

    @abstractmethod
    def make(self, build_model: BuildModel, build_optimizer: BuildOptimizer | None) -> list[Parameter]:
        """Make ``self.model``, what is called of it and its optimizer; the parameters that train."""

    @abstractmethod
    def what_it_is(self) -> dict[str, Any]:
        """What was really made, read back from the objects themselves; ``RuntimeError`` if not the plan's."""

    @abstractmethod
    def in_words(self, found: Mapping[str, Any], where: str) -> str:
        """What :meth:`what_it_is` found, as one plain sentence; ``where`` is "(gloo, cpu)" or its like."""

    @abstractmethod
    def reduce_on(self, last: bool) -> AbstractContextManager[None]:
        """Around one micro-batch: whether its backward is the step's last."""

    @abstractmethod
    def backward(self, loss: torch.Tensor) -> None:
        """Differentiate one micro-batch's share of the loss."""

    @abstractmethod
    def _update(self) -> torch.Tensor:
        """Clip, step and free; the gradient's norm, still on the device."""

    @abstractmethod
    def whole_tensors(self) -> pretrained.WholeTensors:
        """What :meth:`export` writes: adapters alone where they train, else all weights."""

    @abstractmethod
    def _accounted(self) -> dict[str, int]:
        """Bytes of the tensors that this rank holds, by walking them."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """What matrices are multiplied in."""
        return next(self.model.parameters()).dtype

    def precision_found(self, trained: list[Parameter]) -> str:
        """The recipe's name of what was made; ``RuntimeError`` if the recipe has another."""
        if self.recipe.base_quantization:
            # Adapters over it are fp32 by either name.
            return check_copied(self.recipe.precision, self.compute_dtype)
        return check_precision(self.recipe.precision, (p.dtype for p in trained), self.compute_dtype)

    # ---- Engine

    def setup(self, build_model: BuildModel, build_optimizer: BuildOptimizer | None = None) -> None:
        if dist.get_world_size() != self.plan.world_size:
            raise RuntimeError(
                f"the plan is for {self.plan.world_size} ranks, and this run has {dist.get_world_size()}"
            )
        check_trained(self.plan)
        trained = self.make(build_model, build_optimizer)
        if self.weights is not None:
            self.weights.close()
        self._module.train()
        # Where parts are all that is left of a parameter, the framework counts what trains.
        found = {**self._adapters_found(trained), **self.what_it_is()}
        # dist.get_backend() tells what was asked for; this is the library that sends this device's tensors.
        backend = dist.group.WORLD._get_backend(self.ctx.device).name()
        compute = SHORT_NAMES.get(self.compute_dtype, _name(self.compute_dtype))
        words = self.in_words(found, f"({backend}, {self.ctx.device.type})")
        if self.recipe.has_adapters:
            words = f"{words}, {lora.in_words(found)}"
        record = {
            "sentence": f"{words}, {compute} compute",
            "framework": self.framework,
            "device": str(self.ctx.device),
            "backend": backend,
            "world_size": dist.get_world_size(),
            "precision": self.precision_found(trained),
            **check_recompute(self.model, self.recipe.recompute, self.recipe.recompute_interval),
            **check_compiled(self.model, planned=self.plan.kernels == "compiled"),
            "optimizer": type(self.optimizer).__name__,
            "num_trained_tensors": len(trained),
            "parameter_dtypes": sorted({_name(p.dtype) for p in self.model.parameters()}),
            "parameter_bytes": tensors.module_bytes(self.model) + found.get("base_scale_bytes", 0),
            **found,
        }
        self.ctx.record("engine", record)

    def step(self, batch: Mapping[str, torch.Tensor]) -> float:
        self._watch = self._watch or MemoryWatch(self)
        with self._watch.step():
            return self._step(batch, self._watch)

    def export(self, path: str | Path) -> None:
        pretrained.write_pretrained(self._in_run(path), self.model, self.whole_tensors())

    def memory(self) -> dict[str, int]:
        return {**self._accounted(), **tensors.device_bytes(self.ctx.device)}

    # ---- shared by the subclasses

    def _step(self, batch: Mapping[str, torch.Tensor], watch: MemoryWatch) -> float:
        device = self.ctx.device
        micros = micro_batches.split(batch, self.plan.num_micro_batches)
        weights = micro_batches.LossWeights(micros)
        total = torch.zeros((), device=device)
        for index, micro in enumerate(micros):
            with self.reduce_on(last=index == len(micros) - 1):
                watch.begin("forward")
                there = {name: tensor.to(device, non_blocking=True) for name, tensor in micro.items()}
                part = self._loss(there) * weights[index]
                watch.mark("forward")
                watch.begin("backward")
                self.backward(part)
                watch.mark("backward")
            total += part.detach().float()
        # Summed, and divided here: gloo has no average. The optimizer's update hides it.
        summing = dist.all_reduce(total, async_op=True)
        watch.begin("optimizer")
        norm = self._update()
        watch.mark("optimizer")
        summing.wait()
        self.num_steps_done += 1
        # The one place of a step at which the host waits for the device.
        numbers: list[float] = torch.stack([total / dist.get_world_size(), norm]).tolist()
        loss, self.grad_norm = numbers
        return loss

    def optimizer_over(
        self, trained: list[Parameter], model: torch.nn.Module, build_optimizer: BuildOptimizer | None
    ) -> torch.optim.Optimizer:
        """The task's own optimizer, or the recipe's."""
        if build_optimizer is not None:
            return build_optimizer(trained)
        name, rate, decay = self.recipe.optimizer, self.learning_rate, self.weight_decay
        return optimizers.build_optimizer(name, trained, rate, decay, model)

    def build_on_host(self, build_model: BuildModel) -> torch.nn.Module:
        """The model in host memory, the same on every rank, in the recipe's precision, with its adapters."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = self.built(build_model)
            if loss_in_force(self.plan) == "chunked":
                apply_chunked_loss(model)
            if self.recipe.has_adapters:
                model = self._adapted(model)
                if self.weights is not None:
                    draw_adapters(model, self.seed)
            elif self.recipe.precision == "bf16":
                cast_parameters(model, torch.bfloat16)
        apply_recompute(model, self.recipe.recompute, self.recipe.recompute_interval)
        if self.plan.kernels == "compiled":
            compile_layers(model, self.ctx.device.type)
        return model

    def built(self, build_model: BuildModel) -> torch.nn.Module:
        """The task's model, or this rank's part of it, with the weights that it begins from."""
        if self._packs_as_made:
            return build_on_meta(build_model)
        return build_model() if self.weights is None else build_filled(build_model, self.first_weights)

    @property
    def _packs_as_made(self) -> bool:
        """Whether the numbers of a base in few bits are still to come, and no more of them than is packed."""
        none_yet = self.weights is not None or self.is_drawn_in_parts
        return none_yet and self.recipe.base_quantization is not None

    @property
    def is_drawn_in_parts(self) -> bool:
        """Whether its weights are random ones, too many for every rank to make them all."""
        return self.fresh_weights and self.weights is None and is_drawn_in_parts(self.plan)

    def first_weights(self, model: torch.nn.Module, device: torch.device = CPU) -> InitialWeights:
        """What gives ``model``, made without memory, its weights; random ones are drawn on ``device``."""
        if self.weights is None:
            return FreshWeights(model, seed=self.seed, device=device)
        return WithAdapters(self.weights, model, self.seed)

    def _adapters_found(self, trained: list[Parameter]) -> dict[str, Any]:
        """What trains, and what a frozen base really is; ``RuntimeError`` if it is not the recipe's."""
        base = quantized.check_base(self.model, self.recipe, sharded=self.shards_parameters)
        number = sum(parameter.numel() for parameter in trained)
        return {"num_trained_parameters": number, **base}

    def _adapted(self, model: torch.nn.Module) -> torch.nn.Module:
        """Adapters over ``model``, which is frozen in the type of products: it has no fp32 original."""
        recipe, is_mixed = self.recipe, self.recipe.precision in MIXED_TYPES
        kind = {**MIXED_TYPES, "bf16": torch.bfloat16}.get(recipe.precision, torch.float32)
        cast_parameters(model, kind)
        if recipe.base_quantization:
            weights = self.first_weights(model) if self._packs_as_made else None
            sharded = self.shards_parameters
            quantized.quantize_base(model, recipe, sharded=sharded, compute=kind, weights=weights)
        model = lora.add_adapters(model, self.plan.architecture, recipe, in_fp32=is_mixed)
        if recipe.precision == "bf16" and not recipe.base_quantization:
            # Over a base on meta peft makes adapters in fp32.
            cast_parameters(model, kind)
        return model

    def _in_run(self, path: str | Path) -> Path:
        """``path``, from the run folder if it is relative: the ranks' own folder means nothing to anybody."""
        return Path(self.ctx.folder) / Path(path).expanduser()

    def _position(self) -> dict[str, Any]:
        """Where training is, for a checkpoint."""
        return {**position_of(self), "world_size": dist.get_world_size()}

    def _loss(self, micro: dict[str, torch.Tensor]) -> torch.Tensor:
        output = self._module(**micro)
        loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output.loss
        return loss


def cast_parameters(model: torch.nn.Module, kind: torch.dtype) -> None:
    """Keep the parameters of ``model`` in ``kind``, and its buffers as they are.

    A table of a rotation's angles in bf16 is off by whole turns after some hundred tokens; from_pretrained
    leaves it in fp32. Of what a task quantised itself the bytes are no numbers.
    """

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        is_number = isinstance(tensor, Parameter) and tensor.is_floating_point()
        return tensor.to(kind) if is_number and not quantized.is_packed(tensor) else tensor

    model._apply(cast)


def _name(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")
