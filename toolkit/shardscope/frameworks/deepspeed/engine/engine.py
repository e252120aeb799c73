"""DeepSpeed ZeRO engine: ``deepspeed.initialize``, called directly, on CUDA or CPU ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Parameter

from shardscope.frameworks.deepspeed.engine import checkpointing, inspection
from shardscope.frameworks.deepspeed.engine.launching import connect, import_deepspeed
from shardscope.frameworks.deepspeed.files.config import deepspeed_config
from shardscope.frameworks.deepspeed.limits import nvme_folder
from shardscope.training.accounting import tensors
from shardscope.training.accounting.precision import check_precision_of_copies
from shardscope.training.engine import BuildModel, BuildOptimizer, Context, LiveTensors
from shardscope.training.micro_batch_engine import MIXED_TYPES, MicroBatchEngine
from shardscope.training.model.on_meta import build_on_meta
from shardscope.training.optimizers import gradients
from shardscope.training.weights.initial_weights import CPU, InitialWeights, fill_buffers, full_region
from shardscope.training.weights.pretrained import FullTensors

FIRST_LOSS_SCALE_POWER = 12
"""Exponent of the initial fp16 loss scale, 2^12 as in the other engines; an overflow halves the scale."""
STEPS_TO_GROW = 2000
"""Steps without an overflow until the loss scale doubles; torch's default."""


class DeepSpeedEngine(MicroBatchEngine):
    """Optimizer, gradients and parameters in parts, as the stage says (Rajbhandari et al. 2020).

    Accumulation, clipping, loss scaling and the update are DeepSpeed's own. ``bf16`` and ``bf16-mixed`` are
    one here: DeepSpeed keeps fp32 main copies beside half weights in both.
    """

    framework = "deepspeed"
    shards_parameters = True

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self.held_at_update: dict[str, int] = {}
        """Bytes of the last step: gradients when backward had ended, the others after the update."""
        self._saving_group: Any = None

    def assemble(self, build_model: BuildModel, build_optimizer: BuildOptimizer | None) -> list[Parameter]:
        """DeepSpeed's engine around the model; ``self.optimizer`` is what updates inside of it."""
        layout: Any = self.plan.layout
        deepspeed = import_deepspeed(self.ctx.device.type)
        connect(deepspeed, "nccl" if self.ctx.device.type == "cuda" else "gloo", self.ctx.rank)
        config = self._config()
        model = self._model(build_model)
        # Asked for by shape: stage 3 is about to take shapes away.
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._shapes = [parameter.shape for parameter in model.parameters()]
        optimizer = self.create_optimizer(trained, model, build_optimizer)
        if layout.offload_optimizer and type(optimizer) is torch.optim.AdamW:
            optimizer = _on_host(optimizer)
        if layout.stage == 3:
            self._cut(deepspeed, model, config)
        self.model = model
        with _not_counted(optimizer):
            self._module, self.zero, *_ = deepspeed.initialize(
                model=self.module_of(model), optimizer=optimizer, config=config
            )
        self.optimizer = optimizer
        return trained

    def _model(self, build_model: BuildModel) -> torch.nn.Module:
        """The model in host memory, or of stage 3 without memory where its weights are still to come."""
        if not self._cuts_as_made:
            return self.build_on_host(build_model)
        return build_on_meta(lambda: self.build_on_host(build_model))

    @property
    def _cuts_as_made(self) -> bool:
        """Whether no rank ever has more than its part: of a model whose weights a task made itself it has."""
        layout: Any = self.plan.layout
        none_yet = self.weights is not None or self.initializes_shards
        # A quantized base needs real weights to quantize.
        return layout.stage == 3 and none_yet and not self.recipe.base_quantization

    def build_with_weights(self, build_model: BuildModel) -> torch.nn.Module:
        return build_model() if self._cuts_as_made else super().build_with_weights(build_model)

    def _cut(self, deepspeed: Any, model: torch.nn.Module, config: dict[str, Any]) -> None:
        """Leave of every parameter this rank's part, in the type that forward reads."""
        kind = self.half_type
        if self._cuts_as_made:
            # Files are read into the host's memory, and numbers drawn where that is fastest.
            device = CPU if self.weights is not None else self.ctx.device
            weights = self.initial_weights_of(model, device)
            cut_as_made(deepspeed, model, weights, device=device, config=config, kind=kind)
            return
        for parameter in model.parameters():
            parameter.data = parameter.data.to(kind)
        cut(deepspeed, model, config)

    def built_precision(self, trained: list[Parameter]) -> str:
        return check_precision_of_copies(self.recipe.precision, self.compute_dtype)

    def module_of(self, model: torch.nn.Module) -> torch.nn.Module:
        """What DeepSpeed is given of the model that was built."""
        return model

    @property
    def half_type(self) -> torch.dtype:
        """Compute type of the weights."""
        if self.recipe.precision == "bf16":
            return torch.bfloat16
        return MIXED_TYPES.get(self.recipe.precision, torch.float32)

    def _config(self) -> dict[str, Any]:
        layout: Any = self.plan.layout
        folder = nvme_folder(Path(self.ctx.folder))
        if "nvme" in (layout.offload_optimizer, layout.offload_params):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Swapped files are useless once their rank has ended.
            Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=0)
        config = deepspeed_config(self.plan, nvme_folder=str(folder))
        config["gradient_clipping"] = self.max_grad_norm or 0.0
        # Adam is replaced by DeepSpeed's own; other optimizers run on the host unchanged.
        config["zero_force_ds_cpu_optimizer"] = False
        if "fp16" in config:
            config["fp16"] |= {
                "initial_scale_power": FIRST_LOSS_SCALE_POWER,
                "loss_scale_window": STEPS_TO_GROW,
                "hysteresis": 1,
            }
        return config

    # ---- a step

    def backward(self, loss: torch.Tensor) -> None:
        # The micro-batches' losses are already weighted by their number of labels.
        self._module.backward(loss, scale_wrt_gas=False)

    @contextmanager
    def gradient_sync(self, last: bool) -> Iterator[None]:
        yield
        if not last:
            # Only counts the micro-batch: DeepSpeed updates at the last one.
            self._module.step()

    def _update_weights(self) -> torch.Tensor:
        with self.accounted_update():
            self._module.step()
        return self._norm

    @contextmanager
    def accounted_update(self) -> Iterator[None]:
        """Around DeepSpeed's own update: the norm, and the bytes before and after."""
        gradients_held = tensors.tensor_bytes(self.live_tensors().gradients)
        # Plain fp32: DeepSpeed keeps no norm, and clips what is reduced by now as torch does.
        norm = self.clip() if self.zero is self.optimizer else None
        yield
        after = self._count_tensor_bytes()
        self.held_at_update = {**after, "gradients": gradients_held}
        self.peak_tensor_bytes = max(self.peak_tensor_bytes, sum(self.held_at_update.values()))
        self.bytes_after_step = after
        if norm is None:
            norm = torch.as_tensor(float(self._module.get_global_grad_norm()), device=self.ctx.device)
        self._norm = norm

    def clip(self) -> torch.Tensor:
        """Clip fp32 gradients that are reduced and unsharded. Returns their norm."""
        return gradients.clip_gradients(self.model.parameters(), self.ctx.device, None, self.max_grad_norm)

    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self.zero.param_groups:
            group["lr"] = learning_rate

    # ---- checkpoints

    def save(self, path: str | Path) -> None:
        checkpointing.save(
            self._resolve_in_run(path), self._module, self._describe_position(), self.recipe.has_adapters
        )

    def begin_save(self, path: str | Path) -> Callable[[], None]:
        if self._saving_group is None:
            self._saving_group = dist.new_group(backend="gloo")
        path, position, adapted = (
            self._resolve_in_run(path),
            self._describe_position(),
            self.recipe.has_adapters,
        )
        return checkpointing.Writing(path, self._module, position, adapted, self._saving_group).wait

    def _describe_position(self) -> dict[str, Any]:
        layout: Any = self.plan.layout
        return {
            **super()._describe_position(),
            "stage": layout.stage,
            "tp": layout.tp,
            "pp": layout.pp,
            "ep": layout.ep,
        }

    def load(self, path: str | Path) -> None:
        position = checkpointing.load(
            self._resolve_in_run(path), self.plan, self._module, self._describe_position()
        )
        self.num_steps_done = int(position["num_steps_done"])

    def full_tensors(self) -> FullTensors:
        adapted, main = self.recipe.has_adapters, self.recipe.precision != "bf16"
        return checkpointing.full_tensors(self._module, main=main, only_trained=adapted)

    # ---- what it is

    def read_back(self) -> dict[str, Any]:
        return inspection.read_back(self.plan, self._module)

    def describe_built(self, found_: Mapping[str, Any], where: str) -> str:
        return inspection.describe_built(found_, where)

    def live_tensors(self) -> LiveTensors:
        return inspection.live_tensors(self._module)

    def _count_tensor_bytes(self) -> dict[str, int]:
        held = self.live_tensors()
        return {
            "parameters": tensors.tensor_bytes(held.parameters),
            "gradients": tensors.tensor_bytes(held.gradients),
            "optimizer": tensors.tensor_bytes(held.optimizer),
        }


@contextmanager
def _not_counted(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Stage 0 of half weights makes moments by a step over zeros (DeepSpeed#1445): here that step decays
    nothing, and the first real step is the first."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    yield
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].zero_()
        elif "step" in state:
            state["step"] = 0


def _on_host(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return DeepSpeed's Adam, compiled for this machine's CPU, with the groups of ``optimizer``."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    known = ("params", "lr", "betas", "eps", "weight_decay", "amsgrad", "moe", "name")
    groups = [{name: group[name] for name in known if name in group} for group in optimizer.param_groups]
    made: torch.optim.Optimizer = DeepSpeedCPUAdam(groups, adamw_mode=True)
    return made


# ---- Initial weights in ZeRO-3: each tensor is partitioned when it is read or initialized


def cut(deepspeed: Any, model: torch.nn.Module, config: dict[str, Any]) -> None:
    """Leave of every parameter of ``model`` this rank's part.

    The type in which parts swap is ``config``'s. ``zero.Init`` does not keep to a ``dtype`` that it is given:
    where the device has no fp16 (many CPUs, GPUs before Volta) it takes bf16, and fp32 weights come back
    from NVMe rounded (deepspeed/runtime/zero/partition_parameters.py, ``_set_dtype``, 0.19.8).
    """
    deepspeed.zero.Init(module=model, config_dict_or_path=config)


def cut_as_made(
    deepspeed: Any,
    model: torch.nn.Module,
    weights: InitialWeights,
    *,
    device: torch.device,
    config: dict[str, Any],
    kind: torch.dtype,
) -> None:
    """Give ``model``, whose parameters are on meta, its ``weights`` in parts, of type ``kind``.

    ``zero.Init`` of a module that is there goes through its ``parameters()`` and cuts one after the other
    (deepspeed/runtime/zero/partition_parameters.py, ``_convert_to_zero_parameters``): here each gets its
    values, on ``device``, when it is asked for.
    """
    # One for all: memory that is freed between parts which stay would not be given back, nor be used again.
    longest = torch.empty(
        max(parameter.numel() for parameter in model.parameters()), dtype=kind, device=device
    )

    def read(recurse: bool = True) -> Iterator[Parameter]:
        for name, parameter in model.named_parameters(recurse=recurse):
            whole = longest[: parameter.numel()].view(parameter.shape)
            weights.write(name, parameter.shape, full_region(parameter.shape), whole)
            # The same object, for the optimizer has it already and a tied weight is in two modules.
            torch.utils.swap_tensors(parameter, Parameter(whole, requires_grad=parameter.requires_grad))
            yield parameter

    model.parameters = read
    try:
        cut(deepspeed, model, config)
    finally:
        del model.parameters
    fill_buffers(model, weights)
