"""One optimizer step, checkpoints and accounting, which DDP and FSDP2 share; wrapping is theirs alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Parameter

from shardscope.frameworks.engine import BuildModel, BuildOptimizer, Context, Engine, HeldTensors
from shardscope.frameworks.registry import check_trained
from shardscope.memory.head import loss_in_force
from shardscope.training import accounting, checkpoint, gradients, lora, micro_batches, optimizers, pretrained
from shardscope.training.compiled import compile_layers
from shardscope.training.loss import apply_chunked_loss
from shardscope.training.memory_watch import MemoryWatch
from shardscope.training.quantized import quantize_base
from shardscope.training.recompute import apply_recompute

MIXED_TYPES = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
"""What matrices are multiplied in when fp32 originals are kept."""

SHORT_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class TorchEngine(Engine):
    """The parts of an engine that plain PyTorch gives; a subclass wraps the model and knows its own rules."""

    model: torch.nn.Module
    """The model under its framework's wrapper: its parameter names are the checkpoint's."""
    optimizer: torch.optim.Optimizer

    shards_parameters = False
    """Whether the framework cuts parameters, which then must be of a type that it can cut."""

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self.recipe = self.plan.recipe
        self._scaler: torch.amp.GradScaler | None = None
        self._watch: MemoryWatch | None = None
        self._saving_group: Any = None

    # ---- what a framework says for itself

    @abstractmethod
    def wrap(self, build_model: BuildModel) -> torch.nn.Module:
        """Build the model and put it under the framework; set ``self.model``; return what is called."""

    @abstractmethod
    def what_it_is(self) -> dict[str, Any]:
        """What was really made, read back from the objects themselves; ``RuntimeError`` if not the plan's."""

    @abstractmethod
    def in_words(self, found: Mapping[str, Any], where: str) -> str:
        """What :meth:`what_it_is` found, as one plain sentence; ``where`` is "(gloo, cpu)" or its like."""

    @abstractmethod
    def reduce_on(self, last: bool) -> AbstractContextManager[None]:
        """Around one micro-batch: whether its backward is the step's last."""

    @property
    @abstractmethod
    def shard_group(self) -> Any | None:
        """The process group over which parameters are sharded; None if each rank holds them whole."""

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The type that autocast computes in; None where the framework casts by itself, or nothing does."""
        return None

    @property
    def compute_dtype(self) -> torch.dtype:
        """What matrices are multiplied in."""
        return self.autocast_dtype or next(self.model.parameters()).dtype

    # ---- Engine

    def setup(self, build_model: BuildModel, build_optimizer: BuildOptimizer | None = None) -> None:
        if dist.get_world_size() != self.plan.world_size:
            raise RuntimeError(
                f"the plan is for {self.plan.world_size} ranks, and this run has {dist.get_world_size()}"
            )
        check_trained(self.plan)
        trained = self.make(build_model, build_optimizer)
        self._module.train()
        found = self.what_it_is()
        # dist.get_backend() tells what was asked for; this is the library that sends this device's tensors.
        backend = dist.group.WORLD._get_backend(self.ctx.device).name()
        compute = SHORT_NAMES.get(self.compute_dtype, _name(self.compute_dtype))
        words = self.in_words(found, f"({backend}, {self.ctx.device.type})")
        record = {
            "sentence": f"{words}, {compute} compute",
            "framework": self.framework,
            "device": str(self.ctx.device),
            "backend": backend,
            "world_size": dist.get_world_size(),
            "precision": self.recipe.precision,
            "recompute": self.recipe.recompute,
            "optimizer": type(self.optimizer).__name__,
            "num_trained_tensors": len(trained),
            "num_trained_parameters": sum(parameter.numel() for parameter in trained),
            "parameter_dtypes": sorted({_name(p.dtype) for p in self.model.parameters()}),
            "parameter_bytes": accounting.module_bytes(self.model),
            **found,
        }
        self.ctx.record("engine", record)

    def make(self, build_model: BuildModel, build_optimizer: BuildOptimizer | None) -> list[Parameter]:
        """Wrap the model and make its optimizer, what scales its losses too; the parameters that train."""
        self._module = self.wrap(build_model)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        # Taken now: while a layer runs, a framework may have put gathered parameters in their place.
        self._parameters = list(self.model.parameters())
        self.optimizer = self.optimizer_over(trained, self.model, build_optimizer)
        if self.recipe.precision == "fp16-mixed":
            # 2^16, torch's default, overflows the first steps of every model; the scaler finds its own scale.
            self._scaler = torch.amp.GradScaler(self.ctx.device.type, init_scale=2.0**12)
        return trained

    def optimizer_over(
        self, trained: list[Parameter], model: torch.nn.Module, build_optimizer: BuildOptimizer | None
    ) -> torch.optim.Optimizer:
        """The task's own optimizer, or the recipe's."""
        if build_optimizer is not None:
            return build_optimizer(trained)
        name, rate, decay = self.recipe.optimizer, self.learning_rate, self.weight_decay
        return optimizers.build_optimizer(name, trained, rate, decay, model)

    def step(self, batch: Mapping[str, torch.Tensor]) -> float:
        self._watch = self._watch or MemoryWatch(self)
        with self._watch.step():
            return self._step(batch, self._watch)

    def held_tensors(self) -> HeldTensors:
        return HeldTensors(
            parameters=self._parameters,
            gradients=[p.grad for p in self._parameters if p.grad is not None],
            optimizer=accounting.optimizer_tensors(self.optimizer),
            gathered=self.gathered_tensors(),
            buffers=self.model.buffers(),
        )

    def gathered_tensors(self) -> Iterable[torch.Tensor]:
        """Whole parameters that the framework gathered and holds beside its shards, emptied ones included."""
        return ()

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

    def save(self, path: str | Path) -> None:
        adapted = self.recipe.has_adapters
        checkpoint.save(self._in_run(path), self.model, self.optimizer, self._position(), adapted)

    def begin_save(self, path: str | Path) -> Callable[[], None]:
        if self._saving_group is None:
            self._saving_group = dist.new_group(backend="gloo")
        adapted, position = self.recipe.has_adapters, self._position()
        group = self._saving_group
        return checkpoint.begin(self._in_run(path), self.model, self.optimizer, position, adapted, group)

    def _position(self) -> dict[str, Any]:
        return {
            "framework": self.framework,
            "world_size": dist.get_world_size(),
            "num_steps_done": self.num_steps_done,
            "scaler": self._scaler.state_dict() if self._scaler else None,
        }

    def load(self, path: str | Path) -> None:
        position = checkpoint.load(self._in_run(path), self.model, self.optimizer, self.recipe.has_adapters)
        self.num_steps_done = int(position["num_steps_done"])
        if self._scaler and position["scaler"]:
            self._scaler.load_state_dict(position["scaler"])

    def export(self, path: str | Path) -> None:
        pretrained.write_pretrained(self._in_run(path), self.model, self.whole_tensors())

    def whole_tensors(self) -> pretrained.WholeTensors:
        """What :meth:`export` writes: adapters alone where they train, else all weights."""
        return pretrained.whole_parameters(self.model, self.ctx.device, self.recipe.has_adapters)

    def memory(self) -> dict[str, int]:
        return {**self._accounted(), **accounting.device_bytes(self.ctx.device)}

    def gradient_bytes(self) -> int:
        """Bytes of gradients held now."""
        return accounting.gradient_bytes(self.model)

    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    # ---- shared by the subclasses

    def build_on_host(self, build_model: BuildModel) -> torch.nn.Module:
        """The model in host memory, the same on every rank, in the recipe's precision, with its adapters."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = build_model()
            if loss_in_force(self.plan) == "chunked":
                apply_chunked_loss(model)
            if self.recipe.has_adapters:
                model = self._adapted(model)
            elif self.recipe.precision == "bf16":
                model = model.to(torch.bfloat16)
        apply_recompute(model, self.recipe.recompute, self.recipe.recompute_interval)
        if self.plan.kernels == "compiled":
            compile_layers(model, self.ctx.device.type)
        return model

    def _adapted(self, model: torch.nn.Module) -> torch.nn.Module:
        """Adapters over ``model``, which is frozen in the type of products: it has no fp32 original."""
        recipe, is_mixed = self.recipe, self.recipe.precision in MIXED_TYPES
        kind = {**MIXED_TYPES, "bf16": torch.bfloat16}.get(recipe.precision, torch.float32)
        # Tables of angles stay in fp32 where a mixed recipe's base does not, as from_pretrained leaves them.
        model = (
            model._apply(lambda t: t.to(kind) if isinstance(t, Parameter) else t)
            if is_mixed
            else model.to(kind)
        )
        if recipe.base_quantization:
            quantize_base(model, recipe, sharded=self.shards_parameters, compute=kind)
        model = lora.add_adapters(model, self.plan.architecture, recipe, in_fp32=is_mixed)
        if recipe.precision == "bf16" and not recipe.base_quantization:
            # Over a base on meta peft makes adapters in fp32.
            model = model.to(kind)
        return model

    def _in_run(self, path: str | Path) -> Path:
        """``path``, from the run folder if it is relative: the ranks' own folder means nothing to anybody."""
        return Path(self.ctx.folder) / Path(path).expanduser()

    def _loss(self, micro: dict[str, torch.Tensor]) -> torch.Tensor:
        kind = self.autocast_dtype
        casting = torch.autocast(self.ctx.device.type, dtype=kind) if kind else nullcontext()
        with casting:
            output = self._module(**micro)
        loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output.loss
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        """Differentiate one micro-batch's share of the loss."""
        (self._scaler.scale(loss) if self._scaler else loss).backward()

    def _update(self) -> torch.Tensor:
        """Clip, step and free; the gradient's norm, still on the device."""
        if self._scaler:
            self._scaler.unscale_(self.optimizer)
        norm = self.clip_gradients()
        if self._scaler:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        else:
            self.optimizer.step()
        held = self._accounted()
        self.peak_accounted_bytes = max(self.peak_accounted_bytes, sum(held.values()))
        # Freed here, not before the next backward: the plan counts no gradients during forward.
        self.optimizer.zero_grad(set_to_none=True)
        self.held_after_step = {**held, "gradients": self.gradient_bytes()}
        return norm

    def clip_gradients(self) -> torch.Tensor:
        """Scale gradients down to ``max_grad_norm``; the whole model's norm before that, on the device."""
        return gradients.clip(self.model.parameters(), self.ctx.device, self.shard_group, self.max_grad_norm)

    def _accounted(self) -> dict[str, int]:
        """Bytes of the tensors that this rank holds, by walking them."""
        return {
            "parameters": accounting.module_bytes(self.model),
            "gradients": self.gradient_bytes(),
            "optimizer": accounting.optimizer_bytes(self.optimizer),
        }


def _name(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")
