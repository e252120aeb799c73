"""Base class of the DDP and FSDP2 engines: torch's optimizers, gradient scaler and checkpoints."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import Parameter

from shardscope.training.accounting import tensors
from shardscope.training.checkpoints import checkpoint
from shardscope.training.engine import LOSS_SCALE_POWER, BuildModel, BuildOptimizer, Context, LiveTensors
from shardscope.training.micro_batch_engine import MicroBatchEngine
from shardscope.training.model import quantization
from shardscope.training.optimizers import gradients
from shardscope.training.weights import pretrained


class TorchEngine(MicroBatchEngine):
    """An engine over torch's own wrappers, optimizers and checkpoints; a subclass wraps the model."""

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self._scaler: torch.amp.GradScaler | None = None
        self._saving_group: dist.ProcessGroup | None = None

    # ---- implemented by each framework

    @abstractmethod
    def wrap(self, build_model: BuildModel) -> torch.nn.Module:
        """Build and wrap the model, and set ``self.model``. Return the callable wrapper."""

    @property
    @abstractmethod
    def shard_group(self) -> dist.ProcessGroup | None:
        """Process group over which parameters are sharded; None if they are replicated."""

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """Dtype of autocast; None if the framework casts by itself or nothing is cast."""
        return None

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.autocast_dtype or super().compute_dtype

    # ---- Engine

    def live_tensors(self) -> LiveTensors:
        return LiveTensors(
            parameters=[*self._parameters, *self._scales],
            gradients=[p.grad for p in self._parameters if p.grad is not None],
            optimizer=tensors.list_optimizer_tensors(self.optimizer),
            gathered=self.gathered_tensors(),
            buffers=self.model.buffers(),
        )

    def gathered_tensors(self) -> Iterable[torch.Tensor]:
        """Return the framework's all-gathered parameters, including those with a freed storage."""
        return ()

    def save(self, path: str | Path) -> None:
        adapted = self.recipe.has_adapters
        checkpoint.save(
            self._resolve_in_run(path), self.model, self.optimizer, self._describe_position(), adapted
        )

    def begin_save(self, path: str | Path) -> Callable[[], None]:
        # The thread that saves needs a group of its own: collectives of two threads in one group could be
        # matched with each other.
        if self._saving_group is None:
            self._saving_group = dist.new_group(backend="gloo")
        adapted, position = self.recipe.has_adapters, self._describe_position()
        group = self._saving_group
        return checkpoint.begin_save(
            self._resolve_in_run(path), self.model, self.optimizer, position, adapted, group
        )

    def load(self, path: str | Path) -> None:
        position = checkpoint.load(self._resolve_in_run(path), self.plan, self.model, self.optimizer)
        self.num_steps_done = int(position["num_steps_done"])
        scaler_state = position.get("scaler")
        if self._scaler and scaler_state:
            self._scaler.load_state_dict(scaler_state)

    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    # ---- shared by the subclasses

    def assemble(self, build_model: BuildModel, build_optimizer: BuildOptimizer | None) -> list[Parameter]:
        self._module = self.wrap(build_model)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        # Keep the lists: while a layer runs, a framework may replace its parameters by all-gathered ones, and
        # iterating over all modules in each step is slow.
        self._parameters = list(self.model.parameters())
        self._scales = quantization.list_scales(self.model)
        self.optimizer = self.create_optimizer(trained, self.model, build_optimizer)
        if self.recipe.precision == "fp16-mixed":
            self._scaler = torch.amp.GradScaler(self.ctx.device.type, init_scale=2.0**LOSS_SCALE_POWER)
        return trained

    def _describe_position(self) -> dict[str, object]:
        return {
            **super()._describe_position(),
            "scaler": self._scaler.state_dict() if self._scaler else None,
            "optimizer": checkpoint.get_optimizer_class_name(self.optimizer),
        }

    def full_tensors(self) -> pretrained.FullTensors:
        return pretrained.gather_parameters(self.model, self.ctx.device, self.recipe.has_adapters)

    def gradient_bytes(self) -> int:
        """Return the current bytes of gradients on this rank's device."""
        return tensors.count_tensor_bytes(
            (p.grad for p in self._parameters if p.grad is not None), self.ctx.device
        )

    def _compute_loss(self, micro: dict[str, torch.Tensor]) -> torch.Tensor:
        with self._autocast():
            return super()._compute_loss(micro)

    def _compute_logits(self, **inputs: torch.Tensor | bool) -> torch.Tensor:
        with self._autocast():
            return super()._compute_logits(**inputs)

    def _autocast(self) -> AbstractContextManager[object]:
        dtype = self.autocast_dtype
        return torch.autocast(self.ctx.device.type, dtype=dtype) if dtype else nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        (self._scaler.scale(loss) if self._scaler else loss).backward()

    def _update_weights(self) -> torch.Tensor:
        # Norm and clipping are those of the unscaled gradients.
        if self._scaler:
            self._scaler.unscale_(self.optimizer)
        norm = self.clip_gradients()
        if self._scaler:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        else:
            self.optimizer.step()
        # Count while gradients and optimizer state both exist.
        tensor_bytes = self._count_tensor_bytes()
        self.peak_tensor_bytes = max(self.peak_tensor_bytes, sum(tensor_bytes.values()))
        # Free gradients here, not before the next backward: the plan counts none during forward.
        self.optimizer.zero_grad(set_to_none=True)
        self.bytes_after_step = {**tensor_bytes, "gradients": self.gradient_bytes()}
        return norm

    def clip_gradients(self) -> torch.Tensor:
        """Clip gradients to ``max_grad_norm``. Return the whole model's norm before that, on the device."""
        return gradients.clip_gradients(
            self._parameters, self.ctx.device, self.shard_group, self.max_grad_norm
        )

    def _count_tensor_bytes(self) -> dict[str, int]:
        return {
            "parameters": tensors.count_tensor_bytes([*self._parameters, *self._scales], self.ctx.device),
            "gradients": self.gradient_bytes(),
            "optimizer": tensors.count_optimizer_bytes(self.optimizer, self.ctx.device),
        }
