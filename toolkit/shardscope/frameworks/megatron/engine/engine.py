"""Training engine on megatron-core's ``GPTModel``, schedules, gradient buffers and optimizer."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardscope.core.errors import refuse
from shardscope.frameworks.megatron.engine import checkpointing
from shardscope.frameworks.megatron.engine import model as engine_model
from shardscope.frameworks.megatron.engine import step as engine_step
from shardscope.frameworks.megatron.engine.cpu_ranks import cpu_ranks
from shardscope.frameworks.megatron.engine.inspection import describe_built, read_back
from shardscope.frameworks.megatron.engine.optimizer_numbers import read_optimizer_numbers
from shardscope.frameworks.megatron.weights.export import export_hf
from shardscope.frameworks.megatron.weights.load import load_hf, mute_padding
from shardscope.frameworks.registry import check_trained
from shardscope.training.accounting import tensors
from shardscope.training.accounting.memory_watch import MemoryWatch
from shardscope.training.accounting.precision import check_precision_of_copies
from shardscope.training.checkpoints.position import describe_position
from shardscope.training.engine import BuildModel, BuildOptimizer, Context, Engine, LiveTensors
from shardscope.training.model.meta_device import build_on_meta
from shardscope.training.ranges import name_layers
from shardscope.training.weights.stored_weights import TensorsByName

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
    from transformers import PretrainedConfig

    from shardscope.frameworks.megatron.weights.conversion import TensorSource

SHORT_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class MegatronEngine(Engine):
    """Training of a transformers model as megatron-core's ``GPTModel``.

    The model of ``build_model`` gives weights and config; the ``GPTModel`` trains with the same weights.
    Every rank builds the transformers model once in host memory and keeps only its shards. From stored
    weights a rank reads only its own shards, tensor by tensor.
    """

    framework = "megatron"
    model: torch.nn.Module
    """This rank's model chunks, without wrappers."""

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self._chunks: list[DistributedDataParallel] = []
        self._watch: MemoryWatch | None = None
        self._saving: checkpointing.AsyncSave | None = None

    @property
    def data_rank(self) -> int:
        """Data-parallel rank; tp varies fastest over the global ranks and pp slowest ("tp-cp-ep-dp-pp")."""
        degrees = self.plan.degrees
        return int(self.ctx.rank // (degrees.tp * degrees.cp) % degrees.data_parallel)

    @property
    def num_data_ranks(self) -> int:
        return int(self.plan.degrees.data_parallel)

    # ---- Engine

    def setup(self, build_model: BuildModel, build_optimizer: BuildOptimizer | None = None) -> None:
        plan, recipe = self.plan, self.plan.recipe
        if dist.get_world_size() != plan.world_size:
            raise RuntimeError(
                f"the plan is for {plan.world_size} ranks, and this run has {dist.get_world_size()}"
            )
        check_trained(plan)
        source = self._build_source(build_model)
        # Groups first: layers take their tensor-parallel sizes from them.
        with self._on_device():
            engine_model.init_model_parallel(plan)
            weights = self._build_chunks(source)
            # Buffers and optimizer are megatron-core's own; a torch optimizer gives only its numbers.
            numbers = read_optimizer_numbers(
                recipe.optimizer,
                list(self.model.parameters()),
                build_optimizer,
                self.learning_rate,
                self.weight_decay,
            )
            self._chunks = engine_model.wrap_chunks(plan, self._config, list(self.model.children()))
            self.optimizer = engine_model.build_optimizer(
                plan, self._config, self._chunks, numbers, self.max_grad_norm
            )
            # With the optimizer, so that its fp32 main weights are not rounded to 16 bits.
            load_hf(self._chunks, weights, plan.architecture, self.optimizer)
            mute_padding(self._chunks, plan.architecture)
            # Free the whole model in host memory before training.
            del source, weights
            if self.weights is not None:
                self.weights.close()
            inspection = read_back(plan, self._chunks, self.optimizer, self.data_rank)
        device, world = self.ctx.device, dist.group.WORLD
        assert world is not None, "the launcher initialized it"
        backend = world._get_backend(device).name()
        where, trained = f"({backend}, {device.type})", list(self.model.parameters())
        record = {
            "sentence": f"{describe_built(inspection, where)}, {SHORT_NAMES[trained[0].dtype]} compute",
            "framework": self.framework,
            "device": str(device),
            "backend": backend,
            "world_size": dist.get_world_size(),
            "precision": check_precision_of_copies(recipe.precision, trained[0].dtype),
            "num_trained_tensors": len(trained),
            "num_trained_parameters": sum(parameter.numel() for parameter in trained),
            "parameter_dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in trained}),
            "parameter_bytes": self.memory()["parameters"],
            **inspection,
        }
        self.ctx.record("engine", record)

    def step(self, batch: Mapping[str, torch.Tensor]) -> float:
        watch = self._watch = self._watch or MemoryWatch(self)
        with watch.measure_step(), self._on_device(), engine_step.watch_phases(watch):
            for chunk in self._chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            loss = engine_step.forward_backward(
                self._chunks, batch, self.plan.num_micro_batches, self.ctx.device
            )
            with watch.phase("optimizer"):
                _, norm, _ = self.optimizer.step()
            self.num_steps_done += 1
            # All ranks poll at the same step: renaming the finished checkpoint is collective.
            if self._saving is not None and not self._saving.is_done:
                self._saving.poll()
            # A step that overflowed fp16 is skipped, and has no norm.
            self.grad_norm = float("nan") if norm is None else float(norm)
            mean = float(loss())
        # Outside of _on_device: redirecting CUDA calls to the CPU makes tensor access three times as slow.
        self.bytes_after_step = self._count_tensor_bytes()
        self.peak_tensor_bytes = max(self.peak_tensor_bytes, sum(self.bytes_after_step.values()))
        return mean

    def evaluate(self, batch: Mapping[str, torch.Tensor]) -> float:
        with self._evaluation():
            loss = engine_step.forward_backward(
                self._chunks, batch, self.plan.num_micro_batches, self.ctx.device, forward_only=True
            )
            return float(loss())

    def predict_next(self, input_ids: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        device = self.ctx.device
        with self._evaluation():
            return engine_step.predict_next(
                self._chunks, self.plan, input_ids.to(device), last.to(device)
            ).cpu()

    @contextlib.contextmanager
    def _evaluation(self) -> Iterator[None]:
        """Disable gradients and dropout inside."""
        # Before anything runs: the watch reads the peak of the initialization when it is created.
        self._watch = self._watch or MemoryWatch(self)
        for chunk in self._chunks:
            chunk.eval()
        with self._on_device(), torch.no_grad():
            yield
        for chunk in self._chunks:
            chunk.train()

    def save(self, path: str | Path) -> None:
        with self._on_device():
            checkpointing.save_checkpoint(
                self._resolve_in_run(path), self._chunks, self.optimizer, describe_position(self)
            )

    def begin_save(self, path: str | Path) -> Callable[[], None]:
        path, position = self._resolve_in_run(path), describe_position(self)
        with self._on_device():
            saving = checkpointing.AsyncSave(path, self._chunks, self.optimizer, position)
        self._saving = saving

        def wait() -> None:
            with self._on_device():
                saving.wait()

        return wait

    def load(self, path: str | Path) -> None:
        with self._on_device():
            self.num_steps_done = checkpointing.load_checkpoint(
                self._resolve_in_run(path), self.plan, self._chunks, self.optimizer
            )

    def export(self, path: str | Path) -> None:
        # Megatron-core keeps fp32 main weights for every 16-bit recipe; pure bf16 exports bf16 weights.
        main = None if self.plan.recipe.precision == "bf16" else self.optimizer
        with self._on_device():
            export_hf(self._chunks, self.plan.architecture, self._hf_config, self._resolve_in_run(path), main)

    def list_layers(self) -> Mapping[str, torch.nn.Module]:
        chunks = self.model.children() if hasattr(self, "model") else ()
        return {name: layer for chunk in chunks for name, layer in name_layers(chunk).items()}

    def memory(self) -> dict[str, int]:
        return {**self._count_tensor_bytes(), **tensors.read_device_bytes(self.ctx.device)}

    def live_tensors(self) -> LiveTensors:
        from megatron.core import parallel_state

        return LiveTensors(
            parameters=list(self.model.parameters()),
            gradients=[buffer.grad_data for buffer in self._grad_buffers()],
            optimizer=self._optimizer_tensors(),
            gathered=list(parallel_state.get_global_memory_buffer().buffer.values()),
            buffers=list(self.model.buffers()),
        )

    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    # ---- Parts of the engine

    def _build_source(self, build_model: BuildModel) -> torch.nn.Module:
        """Build the transformers model under ``seed``. Raises ``ValueError`` for another family."""
        arch = self.plan.architecture
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            source = build_model() if self.weights is None else build_on_meta(build_model)
        hf_config: PretrainedConfig | None = getattr(source, "config", None)
        if hf_config is None or getattr(hf_config, "model_type", None) != arch.model_type:
            refuse(
                "build_model",
                type(source).__name__,
                f"a model of transformers of the plan's family, {arch.model_type!r}, whose weights go into "
                "Megatron-core's GPTModel",
                "layout=Layout.fsdp2(), which trains any module",
            )
        self._hf_config = hf_config
        return source

    def _build_chunks(self, source: torch.nn.Module) -> Mapping[str, TensorSource]:
        """Build the model chunks with weights not yet set, and return the weights to load into them."""
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        plan, hf_config = self.plan, self._hf_config
        # Layers fork the tracker's states when they are built (tensor_parallel/layers.py).
        with torch.random.fork_rng(devices=[]):
            model_parallel_cuda_manual_seed(self.seed)
        self._config = engine_model.build_config(plan, hf_config)
        chunks = engine_model.build_chunks(plan, self._config, hf_config)
        self.model = torch.nn.ModuleList(chunks).to(self.ctx.device).train()
        return source.state_dict() if self.weights is None else TensorsByName(self.weights)

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        """Run megatron-core unchanged on CUDA; on CPU ranks redirect its CUDA calls to the CPU."""
        with cpu_ranks() if self.ctx.device.type == "cpu" else compile_if_possible():
            yield

    def _grad_buffers(self) -> Iterator[_ParamAndGradBuffer]:
        for chunk in self._chunks:
            yield from (*chunk.buffers, *chunk.expert_parallel_buffers)

    def _optimizer_tensors(self) -> list[torch.Tensor]:
        """Return the moments, the fp32 main weights, and the fp32 copies of 16-bit gradients."""
        # The inner optimizer updates main weights, or in fp32 views of the model's own: skip those.
        model_tensors = (*self.model.parameters(), *(buffer.grad_data for buffer in self._grad_buffers()))
        known = {tensor.untyped_storage().data_ptr() for tensor in model_tensors}
        state: list[torch.Tensor] = []
        for single in engine_model.flatten_optimizers(self.optimizer):
            if single.optimizer is None:
                continue
            updated = [p for group in single.optimizer.param_groups for p in group["params"]]
            copies = [*updated, *(p.grad for p in updated if p.grad is not None)]
            state += [tensor for tensor in copies if tensor.untyped_storage().data_ptr() not in known]
            # Step counters, one element for a tensor of any size, are in no formula.
            state += [t for t in tensors.list_optimizer_tensors(single.optimizer) if t.dim() > 0]
        return state

    def _count_tensor_bytes(self) -> dict[str, int]:
        """Return the bytes of this rank's tensors by kind, summed over the tensors."""
        current = self.live_tensors()
        return {
            "parameters": tensors.count_tensor_bytes(current.parameters),
            "gradients": tensors.count_tensor_bytes(current.gradients),
            "optimizer": tensors.count_tensor_bytes(current.optimizer),
        }


# ---- megatron-core's compiled functions (``jit_fuser``) on CUDA ranks without a compiler


COMPILERS = ("gcc", "clang")
"""Compilers that Triton builds its launchers with, unless ``CC`` is set (triton/runtime/build.py)."""


def compile_if_possible() -> contextlib.AbstractContextManager[object]:
    """Return a context that runs compiled functions eagerly if Triton or its C compiler is missing."""
    return contextlib.nullcontext() if can_compile() else torch.compiler.set_stance("force_eager")


@cache
def can_compile() -> bool:
    """Return whether torch.compile can build CUDA kernels here."""
    from torch.utils._triton import has_triton

    compiler = os.environ.get("CC")
    return has_triton() and any(shutil.which(name) for name in ((compiler,) if compiler else COMPILERS))
