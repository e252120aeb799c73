"""Base class of the DDP, FSDP2 and DeepSpeed engines: a step over micro-batches, and the run's record of it.

Subclasses wrap the model and update its weights.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import Parameter

from shardscope.frameworks.registry import check_trained
from shardscope.memory.activations.head import resolve_loss
from shardscope.memory.overheads.building import is_initialized_sharded
from shardscope.training import micro_batches
from shardscope.training.accounting import tensors
from shardscope.training.accounting.memory_watch import MemoryWatch
from shardscope.training.accounting.precision import check_precision, check_precision_of_copies
from shardscope.training.checkpoints.position import describe_position
from shardscope.training.document_masks import add_document_mask
from shardscope.training.engine import BuildModel, BuildOptimizer, Context, Engine
from shardscope.training.generation import choose_tokens
from shardscope.training.model import lora, quantization
from shardscope.training.model.compile_layers import check_compiled, compile_layers
from shardscope.training.model.loss import apply_chunked_loss
from shardscope.training.model.meta_device import build_on_meta
from shardscope.training.model.recompute import apply_recompute, check_recompute
from shardscope.training.optimizers import optimizers
from shardscope.training.preferences.dpo import disabled_adapters, sum_log_probabilities
from shardscope.training.preferences.pairs import LABELS, REFERENCE
from shardscope.training.ranges import name_layers
from shardscope.training.weights import pretrained
from shardscope.training.weights.initial_weights import (
    CPU,
    FreshWeights,
    InitialWeights,
    build_initialized,
    initialize_adapters,
)
from shardscope.training.weights.stored_weights import WithAdapters

MIXED_TYPES = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
"""Compute dtype of the precisions that keep fp32 master weights."""

SHORT_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class MicroBatchEngine(Engine):
    """Engine that runs micro-batches through a module one by one; subclasses build and update it."""

    model: torch.nn.Module
    """The model inside its framework's wrapper; checkpoints use its parameter names."""
    optimizer: torch.optim.Optimizer
    _module: torch.nn.Module
    """The callable wrapper."""

    shards_parameters = False
    """Whether the framework shards parameters, which limits their storage type."""

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self.recipe = self.plan.recipe
        self._watch: MemoryWatch | None = None

    # ---- implemented by each framework

    @abstractmethod
    def assemble(self, build_model: BuildModel, build_optimizer: BuildOptimizer | None) -> list[Parameter]:
        """Build the model, its callable wrapper and the optimizer. Return the trainable parameters."""

    @abstractmethod
    def read_back(self) -> dict[str, object]:
        """Read back what was built. Raises ``RuntimeError`` if it differs from the plan."""

    @abstractmethod
    def describe_built(self, record: Mapping[str, object], where: str) -> str:
        """Describe the result of :meth:`read_back` in a sentence; ``where`` is like "(gloo, cpu)"."""

    @abstractmethod
    def gradient_sync(self, last: bool) -> AbstractContextManager[None]:
        """Return a context for one micro-batch that reduces gradients only in the ``last`` backward."""

    @abstractmethod
    def backward(self, loss: torch.Tensor) -> None:
        """Run backward for the weighted loss of one micro-batch."""

    @abstractmethod
    def _update_weights(self) -> torch.Tensor:
        """Clip gradients, step the optimizer and free gradients. Return the norm, still on the device."""

    @abstractmethod
    def full_tensors(self) -> pretrained.FullTensors:
        """Return the full tensors for :meth:`export`: only adapters if they train, else all weights."""

    @abstractmethod
    def _count_tensor_bytes(self) -> dict[str, int]:
        """Return the bytes of this rank's tensors on its device by kind, summed over the tensors."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of matmuls."""
        return next(self.model.parameters()).dtype

    def check_built_precision(self, trained: list[Parameter]) -> str:
        """Return the precision that was built. Raises ``RuntimeError`` if it differs from the recipe's."""
        if self.recipe.base_quantization:
            # Adapters over a quantized base are fp32 in either precision, so they do not tell which it is.
            return check_precision_of_copies(self.recipe.precision, self.compute_dtype)
        return check_precision(self.recipe.precision, (p.dtype for p in trained), self.compute_dtype)

    # ---- Engine

    def setup(self, build_model: BuildModel, build_optimizer: BuildOptimizer | None = None) -> None:
        if dist.get_world_size() != self.plan.world_size:
            raise RuntimeError(
                f"the plan is for {self.plan.world_size} ranks, and this run has {dist.get_world_size()}"
            )
        check_trained(self.plan)
        trained = self.assemble(build_model, build_optimizer)
        if self.weights is not None:
            self.weights.close()
        self._module.train()
        quantization.keep_packing(self.model)
        base = quantization.check_base(self.model, self.recipe, sharded=self.shards_parameters)
        # read_back() comes last: a framework that shards counts the full trainable parameters itself.
        built: dict[str, object] = {
            "num_trained_parameters": sum(parameter.numel() for parameter in trained),
            **(base or {}),
            **self.read_back(),
        }
        # dist.get_backend() returns the requested name; this is the backend actually used for this device.
        world = dist.group.WORLD
        assert world is not None
        backend = world._get_backend(self.ctx.device).name()
        compute = SHORT_NAMES.get(self.compute_dtype, _short_name(self.compute_dtype))
        sentence = self.describe_built(built, f"({backend}, {self.ctx.device.type})")
        if self.recipe.has_adapters:
            num_trained = built["num_trained_parameters"]
            assert isinstance(num_trained, int)
            sentence = f"{sentence}, {lora.describe_adapters(num_trained, base)}"
        # The checks below raise for a model that is not the planned one, before the first step.
        record: dict[str, object] = {
            "sentence": f"{sentence}, {compute} compute",
            "framework": self.framework,
            "device": str(self.ctx.device),
            "backend": backend,
            "world_size": dist.get_world_size(),
            "precision": self.check_built_precision(trained),
            **check_recompute(self.model, self.recipe.recompute, self.recipe.recompute_interval),
            **check_compiled(self.model, planned=self.plan.kernels == "compiled"),
            "optimizer": type(self.optimizer).__name__,
            "num_trained_tensors": len(trained),
            "parameter_dtypes": sorted({_short_name(p.dtype) for p in self.model.parameters()}),
            "parameter_bytes": tensors.count_parameter_bytes(self.model)
            + (base["base_scale_bytes"] if base else 0),
            **built,
        }
        self.ctx.record("engine", record)

    def step(self, batch: Mapping[str, torch.Tensor]) -> float:
        self._watch = self._watch or MemoryWatch(self)
        with self._watch.measure_step():
            return self._run_step(batch, self._watch)

    def evaluate(self, batch: Mapping[str, torch.Tensor]) -> float:
        batch = self._add_reference(batch)
        with self.evaluation():
            return self._evaluate(batch)

    def compute_log_probabilities(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the log-probability of each row's labels, without dropout and gradients.

        ``batch`` is one of ``PairBatches``. Called by all ranks together, each with as many rows.
        """
        with self.evaluation():
            return torch.cat(
                [
                    self._compute_log_probabilities(micro)
                    for micro in micro_batches.split_batch(batch, self.plan.num_micro_batches)
                ]
            )

    def predict_next(self, input_ids: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        # Compiled layers would be compiled again for each shape, up to a limit that steps share.
        with self.evaluation(), torch.compiler.set_stance("force_eager"):
            return self._predict_next(input_ids.to(self.ctx.device), last.to(self.ctx.device)).cpu()

    def export(self, path: str | Path) -> None:
        pretrained.write_pretrained(self._resolve_in_run(path), self.model, self.full_tensors())

    def list_layers(self) -> Mapping[str, torch.nn.Module]:
        return name_layers(self.model) if hasattr(self, "model") else {}

    def memory(self) -> dict[str, int]:
        return {**self._count_tensor_bytes(), **tensors.read_device_bytes(self.ctx.device)}

    # ---- shared by the subclasses

    def _run_step(self, batch: Mapping[str, torch.Tensor], watch: MemoryWatch) -> float:
        device = self.ctx.device
        with watch.phase("forward") if self.objective else nullcontext():
            batch = self._add_reference(batch)
        micros = micro_batches.split_batch(batch, self.plan.num_micro_batches)
        weights = micro_batches.LossWeights(micros)
        # Summed on the device: reading each micro-batch's loss would synchronize host and device.
        total = torch.zeros((), device=device)
        for index, micro in enumerate(micros):
            with self.gradient_sync(last=index == len(micros) - 1):
                with watch.phase("forward"):
                    on_device = self._prepare_inputs(micro)
                    loss_share = self._compute_loss(on_device) * weights[index]
                with watch.phase("backward"):
                    self.backward(loss_share)
                # A mask of documents must not stay for the optimizer's phase.
                del on_device
            total += loss_share.detach().float()
        # gloo has no average, so sum here and divide below. The all-reduce overlaps with the optimizer step.
        loss_reduction = dist.all_reduce(total, async_op=True)
        with watch.phase("optimizer"):
            norm = self._update_weights()
        loss_reduction.wait()
        self.num_steps_done += 1
        # The only synchronization of host and device in a step.
        numbers: list[float] = torch.stack([total / dist.get_world_size(), norm]).tolist()
        loss, self.grad_norm = numbers
        if self.objective is not None:
            self.step_metrics = self.objective.take_metrics().rewards
        return loss

    def _add_reference(self, batch: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return ``batch``, for DPO with the reference's log-probabilities of its rows."""
        if self.objective is None or REFERENCE in batch:
            return batch
        # All micro-batches before the first backward: frameworks order forwards and backwards of a step.
        with disabled_adapters(self.model):
            return {**batch, REFERENCE: self.compute_log_probabilities(batch)}

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Disable gradients and dropout inside."""
        # Before anything runs: the watch reads the peak of the initialization when it is created.
        self._watch = self._watch or MemoryWatch(self)
        self._module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self._module.train()

    def _evaluate(self, batch: Mapping[str, torch.Tensor]) -> float:
        device = self.ctx.device
        micros, weights = micro_batches.split_for_evaluation(batch, self.plan.num_micro_batches)
        total = torch.zeros((), device=device)
        for micro, weight in zip(micros, weights, strict=True):
            total += self._compute_loss(self._prepare_inputs(micro)).float() * weight
        dist.all_reduce(total)
        return float(total / dist.get_world_size())

    def _predict_next(self, input_ids: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        if resolve_loss(self.plan) == "chunked":
            # Only the logits that count, as such a model never has all: those of every row's last position.
            logits = self._compute_logits(input_ids=input_ids, logits_to_keep=last)
            return choose_tokens(logits, torch.arange(len(last), device=last.device))
        return choose_tokens(self._compute_logits(input_ids=input_ids, use_cache=False), last)

    def _compute_logits(self, **inputs: torch.Tensor | bool) -> torch.Tensor:
        logits: torch.Tensor = self._module(**inputs).logits
        return logits

    def create_optimizer(
        self, trained: list[Parameter], model: torch.nn.Module, build_optimizer: BuildOptimizer | None
    ) -> torch.optim.Optimizer:
        """Build the task's own optimizer, or the recipe's."""
        if build_optimizer is not None:
            return build_optimizer(trained)
        return optimizers.build_optimizer(
            self.recipe.optimizer, trained, self.learning_rate, self.weight_decay, model
        )

    def build_on_host(self, build_model: BuildModel) -> torch.nn.Module:
        """Build the model with adapters in host memory, identical on all ranks, in the recipe's precision."""
        # Identical weights on all ranks, without changing the generator from which the task's own random
        # numbers come.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = self.build_with_weights(build_model)
            # Before adapters are added: peft's wrapper calls the base model's forward.
            if resolve_loss(self.plan) == "chunked":
                apply_chunked_loss(model)
            if self.recipe.has_adapters:
                model = self._add_adapters(model)
                if self.weights is not None:
                    # With the values that WithAdapters gives to engines that initialize shard by shard.
                    initialize_adapters(model, self.seed)
                    lora.reset_magnitudes(model)
            elif self.recipe.precision == "bf16":
                cast_parameters(model, torch.bfloat16)
        # compile_layers compiles the forward that recomputes, so it comes last.
        apply_recompute(model, self.recipe.recompute, self.recipe.recompute_interval)
        if self.plan.kernels == "compiled":
            compile_layers(model, self.ctx.device.type)
        return model

    def build_with_weights(self, build_model: BuildModel) -> torch.nn.Module:
        """Build the task's model, or this rank's part of it, with its initial weights."""
        if self._quantizes_on_meta:
            return build_on_meta(build_model)
        return (
            build_model() if self.weights is None else build_initialized(build_model, self.initial_weights_of)
        )

    @property
    def _quantizes_on_meta(self) -> bool:
        """Return whether a quantized base is built on meta, and its weights are quantized one by one."""
        initialized_later = self.weights is not None or self.initializes_shards
        return initialized_later and self.recipe.base_quantization is not None

    @property
    def initializes_shards(self) -> bool:
        """Return whether weights are initialized randomly shard by shard: too large for every rank."""
        return self.fresh_weights and self.weights is None and is_initialized_sharded(self.plan)

    def initial_weights_of(self, model: torch.nn.Module, device: torch.device = CPU) -> InitialWeights:
        """Return the source of a meta ``model``'s weights; random ones are generated on ``device``."""
        if self.weights is None:
            return FreshWeights(model, seed=self.seed, device=device)
        return WithAdapters(self.weights, model, self.seed)

    def _add_adapters(self, model: torch.nn.Module) -> torch.nn.Module:
        """Add adapters to ``model``, which is frozen in the compute dtype, without fp32 master weights."""
        recipe, is_mixed = self.recipe, self.recipe.precision in MIXED_TYPES
        dtype = {**MIXED_TYPES, "bf16": torch.bfloat16}.get(recipe.precision, torch.float32)
        cast_parameters(model, dtype)
        if recipe.base_quantization:
            weights = self.initial_weights_of(model) if self._quantizes_on_meta else None
            sharded = self.shards_parameters
            quantization.quantize_base(model, recipe, sharded=sharded, compute=dtype, weights=weights)
        model = lora.add_adapters(model, self.plan.architecture, recipe, in_fp32=is_mixed)
        if recipe.precision == "bf16" and not recipe.base_quantization:
            # If the base is on the meta device, peft creates the adapters in fp32.
            cast_parameters(model, dtype)
        return model

    def _describe_position(self) -> dict[str, object]:
        """Return the position of the training for a checkpoint."""
        return {**describe_position(self), "world_size": dist.get_world_size()}

    def _prepare_inputs(self, micro: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a micro-batch on the device, with the mask of its documents if the recipe packs them."""
        on_device = {name: tensor.to(self.ctx.device, non_blocking=True) for name, tensor in micro.items()}
        return add_document_mask(on_device, self.recipe, self.compute_dtype)

    def _compute_log_probabilities(self, micro: Mapping[str, torch.Tensor]) -> torch.Tensor:
        device = self.ctx.device
        logits = self._compute_logits(input_ids=micro["input_ids"].to(device), use_cache=False)
        return sum_log_probabilities(logits, micro[LABELS].to(device))

    def _compute_loss(self, micro: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.objective is not None:
            logits = self._compute_logits(input_ids=micro["input_ids"], use_cache=False)
            return self.objective.compute_loss(logits, micro)
        output = self._module(**micro)
        loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output.loss
        return loss


def cast_parameters(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters of ``model`` to ``dtype`` in place, but not its buffers or quantized weights.

    Rotary angles in bf16 are wrong by whole turns after a few hundred tokens; from_pretrained keeps those
    buffers in fp32 as well. The bytes of quantized weights are packed codes, which a cast would destroy.
    """

    def cast_tensor(tensor: torch.Tensor) -> torch.Tensor:
        is_weight = isinstance(tensor, Parameter) and tensor.is_floating_point()
        return tensor.to(dtype) if is_weight and not quantization.is_quantized(tensor) else tensor

    model._apply(cast_tensor)


def _short_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
