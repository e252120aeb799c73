"""DeepSpeed ZeRO engine: ``deepspeed.initialize``, called directly, on CUDA or CPU ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn import Parameter

from shardscope.frameworks.deepspeed.engine import checkpointing, inspection
from shardscope.frameworks.deepspeed.engine.launching import connect_deepspeed, import_deepspeed
from shardscope.frameworks.deepspeed.files.config import build_deepspeed_config
from shardscope.frameworks.deepspeed.layout import ZeroLayout, get_layout
from shardscope.frameworks.deepspeed.limits import find_nvme_folder
from shardscope.training.accounting import tensors
from shardscope.training.accounting.precision import check_precision_of_copies
from shardscope.training.engine import LOSS_SCALE_POWER, BuildModel, BuildOptimizer, Context, LiveTensors
from shardscope.training.micro_batch_engine import MIXED_TYPES, MicroBatchEngine
from shardscope.training.model.meta_device import build_on_meta
from shardscope.training.optimizers import gradients
from shardscope.training.weights.initial_weights import CPU, InitialWeights, fill_buffers, full_region
from shardscope.training.weights.pretrained import FullTensors

if TYPE_CHECKING:
    import deepspeed

STEPS_TO_GROW = 2000
"""Steps without an overflow until the loss scale doubles; torch's default."""


class DeepSpeedEngine(MicroBatchEngine):
    """DeepSpeed ZeRO engine; the stage says what is partitioned (Rajbhandari et al. 2020).

    Accumulation, clipping, loss scaling and the update are DeepSpeed's own. It does not distinguish ``bf16``
    and ``bf16-mixed``: both have fp32 main weights.
    """

    framework = "deepspeed"
    shards_parameters = True
    _module: deepspeed.DeepSpeedEngine
    zero: torch.optim.Optimizer
    """DeepSpeed's optimizer around ``optimizer``; the same object in stage 0 with fp32 weights."""

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self.held_at_update: dict[str, int] = {}
        """Bytes of the last step: gradients at the end of backward, the others after the update."""
        self._saving_group: dist.ProcessGroup | None = None

    def assemble(self, build_model: BuildModel, build_optimizer: BuildOptimizer | None) -> list[Parameter]:
        """Build DeepSpeed's engine around the model; ``self.optimizer`` is the optimizer that it steps."""
        layout = self.layout
        deepspeed = import_deepspeed(self.ctx.device.type)
        connect_deepspeed("nccl" if self.ctx.device.type == "cuda" else "gloo", self.ctx.rank)
        config = self._build_config()
        model = self._build_model(build_model)
        # Before partitioning: stage 3 replaces the shape of a parameter by (0,).
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._shapes = [parameter.shape for parameter in model.parameters()]
        optimizer = self.create_optimizer(trained, model, build_optimizer)
        if layout.offload_optimizer and type(optimizer) is torch.optim.AdamW:
            optimizer = _build_cpu_adam(optimizer)
        if layout.stage == 3:
            self._partition(model, config)
        self.model = model
        with _undo_initial_step(optimizer):
            self._module, self.zero, *_ = deepspeed.initialize(
                model=self.wrap_model(model), optimizer=optimizer, config=config
            )
        self.optimizer = optimizer
        return trained

    def _build_model(self, build_model: BuildModel) -> torch.nn.Module:
        """Build the model in host memory, or on the meta device if weights are partitioned one by one."""
        if not self._partitions_one_by_one:
            return self.build_on_host(build_model)
        return build_on_meta(lambda: self.build_on_host(build_model))

    @property
    def layout(self) -> ZeroLayout:
        """The plan's layout."""
        return get_layout(self.plan)

    @property
    def _partitions_one_by_one(self) -> bool:
        """Return whether tensors are partitioned as they are read or initialized: no rank has the full model.

        False if the task builds the weights itself.
        """
        weights_follow = self.weights is not None or self.initializes_shards
        # A quantized base needs real weights to quantize.
        return self.layout.stage == 3 and weights_follow and not self.recipe.base_quantization

    def build_with_weights(self, build_model: BuildModel) -> torch.nn.Module:
        return build_model() if self._partitions_one_by_one else super().build_with_weights(build_model)

    def _partition(self, model: torch.nn.Module, config: dict[str, object]) -> None:
        """Replace every parameter by this rank's partition, in the compute type."""
        dtype = self.weights_dtype
        if self._partitions_one_by_one:
            # Files are read into host memory; random numbers are generated on the device, which is faster.
            device = CPU if self.weights is not None else self.ctx.device
            weights = self.initial_weights_of(model, device)
            partition_one_by_one(model, weights, device=device, config=config, dtype=dtype)
            return
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        partition_parameters(model, config)

    def check_built_precision(self, trained: list[Parameter]) -> str:
        return check_precision_of_copies(self.recipe.precision, self.compute_dtype)

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the module for ``deepspeed.initialize``."""
        return model

    @property
    def weights_dtype(self) -> torch.dtype:
        """Compute type of the weights."""
        if self.recipe.precision == "bf16":
            return torch.bfloat16
        return MIXED_TYPES.get(self.recipe.precision, torch.float32)

    def _build_config(self) -> dict[str, object]:
        layout = self.layout
        folder = find_nvme_folder(Path(self.ctx.folder))
        if "nvme" in (layout.offload_optimizer, layout.offload_params):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Swapped tensors are useless once their rank has ended.
            Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=0)
        config = build_deepspeed_config(self.plan, nvme_folder=str(folder))
        config["gradient_clipping"] = self.max_grad_norm or 0.0
        # AdamW is already replaced by DeepSpeed's CPU Adam; other optimizers run on the host unchanged.
        config["zero_force_ds_cpu_optimizer"] = False
        if self.recipe.precision == "fp16-mixed":
            config["fp16"] = {
                "enabled": True,
                "initial_scale_power": LOSS_SCALE_POWER,
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

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        with super().evaluation():
            yield
        if self.layout.stage == 3:
            # Parameters that the recorded order of modules has prefetched for a backward.
            self._module.optimizer.empty_partition_cache()

    def _update_weights(self) -> torch.Tensor:
        with self.accounted_update():
            self._module.step()
        return self._norm

    @contextmanager
    def accounted_update(self) -> Iterator[None]:
        """Measure DeepSpeed's update, which runs inside: gradient norm, and bytes before and after."""
        gradient_bytes = self._count_tensor_bytes()["gradients"]
        # In stage 0 with fp32 weights DeepSpeed returns no norm: clip the reduced gradients here, as torch
        # does.
        norm = self.clip_gradients() if self.zero is self.optimizer else None
        yield
        after = self._count_tensor_bytes()
        self.held_at_update = {**after, "gradients": gradient_bytes}
        self.peak_tensor_bytes = max(self.peak_tensor_bytes, sum(self.held_at_update.values()))
        self.bytes_after_step = after
        if norm is None:
            norm = torch.as_tensor(float(self._module.get_global_grad_norm()), device=self.ctx.device)
        self._norm = norm

    def clip_gradients(self) -> torch.Tensor:
        """Clip fp32 gradients that are reduced and unsharded. Returns their norm."""
        return gradients.clip_gradients(self.model.parameters(), self.ctx.device, None, self.max_grad_norm)

    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self.zero.param_groups:
            group["lr"] = learning_rate

    # ---- checkpoints

    def save(self, path: str | Path) -> None:
        path, only_trained = self._resolve_in_run(path), self.recipe.has_adapters
        checkpointing.save_checkpoint(
            path, self._module, self._describe_position(), only_trained=only_trained
        )

    def begin_save(self, path: str | Path) -> Callable[[], None]:
        if self._saving_group is None:
            self._saving_group = dist.new_group(backend="gloo")
        path, position, only_trained = (
            self._resolve_in_run(path),
            self._describe_position(),
            self.recipe.has_adapters,
        )
        group = self._saving_group
        return checkpointing.AsyncSave(path, self._module, position, group, only_trained=only_trained).wait

    def _describe_position(self) -> dict[str, object]:
        layout = self.layout
        return {
            **super()._describe_position(),
            "stage": layout.stage,
            "tp": layout.tp,
            "pp": layout.pp,
            "ep": layout.ep,
        }

    def load(self, path: str | Path) -> None:
        path = self._resolve_in_run(path)
        self.num_steps_done = checkpointing.load_checkpoint(
            path, self.plan, self._module, self._describe_position()
        )

    def full_tensors(self) -> FullTensors:
        only_trained, main = self.recipe.has_adapters, self.recipe.precision != "bf16"
        return checkpointing.gather_tensors(self._module, main=main, only_trained=only_trained)

    # ---- what it is

    def read_back(self) -> dict[str, object]:
        return inspection.read_back(self.plan, self._module)

    def describe_built(self, found: Mapping[str, object], where: str) -> str:
        return inspection.describe_built(found, where)

    def live_tensors(self) -> LiveTensors:
        return inspection.list_tensors(self._module)

    def _count_tensor_bytes(self) -> dict[str, int]:
        current, device = self.live_tensors(), self.ctx.device
        return {
            "parameters": tensors.count_tensor_bytes(current.parameters, device),
            "gradients": tensors.count_tensor_bytes(current.gradients, device),
            "optimizer": tensors.count_tensor_bytes(current.optimizer, device),
        }


@contextmanager
def _undo_initial_step(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Make DeepSpeed's initial step harmless, which runs inside: no weight decay, and not counted.

    Stage 0 with half-precision weights creates the optimizer state by a step over zero gradients
    (DeepSpeed#1445).
    """
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


def _build_cpu_adam(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Build DeepSpeed's Adam, compiled for this machine's CPU, with the groups of ``optimizer``."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    known = ("params", "lr", "betas", "eps", "weight_decay", "amsgrad", "moe", "name")
    groups = [{name: group[name] for name in known if name in group} for group in optimizer.param_groups]
    cpu_adam: torch.optim.Optimizer = DeepSpeedCPUAdam(groups, adamw_mode=True)
    return cpu_adam


# ---- Initial weights in ZeRO-3: each tensor is partitioned when it is read or initialized


def partition_parameters(model: torch.nn.Module, config: dict[str, object]) -> None:
    """Replace every parameter of ``model`` by this rank's partition.

    The type of swapped partitions is ``config``'s: ``zero.Init`` ignores its ``dtype`` argument on devices
    without fp16 (many CPUs, GPUs before Volta) and uses bf16, so that fp32 weights would come back from NVMe
    rounded (deepspeed/runtime/zero/partition_parameters.py, ``_set_dtype``, 0.19.8).
    """
    from deepspeed import zero

    zero.Init(module=model, config_dict_or_path=config)


def partition_one_by_one(
    model: torch.nn.Module,
    weights: InitialWeights,
    *,
    device: torch.device,
    config: dict[str, object],
    dtype: torch.dtype,
) -> None:
    """Write ``weights`` into ``model``, which is on the meta device, and partition them tensor by tensor.

    ``zero.Init`` iterates over the ``parameters()`` of a finished module and partitions one after the other
    (deepspeed/runtime/zero/partition_parameters.py, ``_convert_to_zero_parameters``). Here that iterator
    writes the values of each parameter, as ``dtype`` on ``device``, just before it is partitioned.
    """
    # One buffer for all tensors: memory freed between partitions, which stay, would be lost to fragmentation.
    buffer = torch.empty(
        max(parameter.numel() for parameter in model.parameters()), dtype=dtype, device=device
    )

    def write_parameters(recurse: bool = True) -> Iterator[Parameter]:
        for name, parameter in model.named_parameters(recurse=recurse):
            tensor = buffer[: parameter.numel()].view(parameter.shape)
            weights.write(name, parameter.shape, full_region(parameter.shape), tensor)
            # Keep the object: the optimizer already has it, and a tied weight is in two modules.
            torch.utils.swap_tensors(parameter, Parameter(tensor, requires_grad=parameter.requires_grad))
            yield parameter

    # An attribute of the object hides the method of its class.
    vars(model)["parameters"] = write_parameters
    try:
        partition_parameters(model, config)
    finally:
        del vars(model)["parameters"]
    fill_buffers(model, weights)
