"""Engine interface: the training of one plan with one framework, on CUDA or CPU ranks.

This module imports no torch, so that the launcher and tests can import it quickly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from shardscope.machine.user_folders import expand_home

if TYPE_CHECKING:
    import torch

    from shardscope.core.plan import Plan
    from shardscope.training.preferences.dpo import Dpo
    from shardscope.training.weights.stored_weights import StoredWeights

BuildModel = Callable[[], "torch.nn.Module"]
"""Builds the unwrapped model. Called once per rank, with the same seed on all ranks.

The model's ``forward(**batch)`` returns the mean loss over labelled tokens, or an object with a ``.loss``."""

BuildOptimizer = Callable[["list[torch.nn.Parameter]"], "torch.optim.Optimizer"]
"""Builds the optimizer from the trainable parameters (shards, if the framework shards) of this rank."""

LOSS_SCALE_POWER = 12
"""Exponent of the initial fp16 loss scale, in every engine. 2^16, the default of torch and DeepSpeed,
overflows in the first steps, and Megatron-LM's 2^32 in about the first twenty. The scale adapts anyway."""


class Context(Protocol):
    """The part of a rank's context that an engine needs. The process group is initialized before."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def folder(self) -> Path: ...
    def log(self, step: int | None = None, **metrics: object) -> None: ...
    def record(self, name: str, mapping: Mapping[str, object]) -> None: ...


class StepProfile(Protocol):
    """A profile of some training steps: a context manager that counts them."""

    def __enter__(self) -> StepProfile: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None: ...
    def step(self) -> None: ...
    @property
    def written(self) -> bool:
        """Return whether the trace is on disk."""


class TrainingContext(Context, Protocol):
    """The part of a rank's context that a task and the training loop need."""

    @property
    def engine(self) -> Engine: ...
    def poll(self) -> tuple[bool, list[dict[str, object]]]:
        """Return whether a stop was requested, and the other new commands."""

    @property
    def stops_without_checkpoint(self) -> bool:
        """Return whether a stop without a checkpoint was requested; the supervisor then ends the ranks."""

    def record_steps(
        self, steps: int, *, warmup: int, skip: int, recording: int, options: Mapping[str, bool]
    ) -> StepProfile:
        """Return a profile that skips ``skip`` steps, warms up for ``warmup`` and records ``steps``.

        ``recording`` is its number, ``options`` those of ``torch.profiler.profile``.
        """


def _wait_for_nothing() -> None:
    """Return at once: the checkpoint was complete before :meth:`Engine.begin_save` returned."""


@dataclass(frozen=True, kw_only=True)
class LiveTensors:
    """Current tensors of an engine on this rank, by kind; a storage may occur more than once."""

    parameters: Iterable[torch.Tensor]
    """Parameters of this rank (shards, if the framework shards)."""
    gradients: Iterable[torch.Tensor]
    optimizer: Iterable[torch.Tensor]
    """Optimizer moments and master weights."""
    gathered: Iterable[torch.Tensor] = ()
    """All-gathered (full) parameters, including those whose storage was freed."""
    buffers: Iterable[torch.Tensor] = ()
    """Buffers of the module."""


class Engine(ABC):
    """Training of one plan with one framework on this rank.

    ``setup`` builds the model, reads back what was built, writes that into the run folder as ``engine`` and
    raises ``RuntimeError`` if it contradicts the plan.
    """

    framework: str = ""
    """Name of the framework, as in ``Layout.framework``."""
    seed: int = 0
    """Seed of the initial weights, the same on every rank. Set it before ``setup``."""
    fresh_weights: bool = False
    """Whether the weights of ``build_model`` are random anyway. Set it before ``setup``.

    Engines that shard may then initialize them shard by shard from ``seed``, without ever holding the full
    model. If False, the weights of ``build_model`` are kept exactly: each rank builds them in host memory.
    """
    weights: StoredWeights | None = None
    """Stored weights that replace those of ``build_model``. Set it before ``setup``.

    A rank reads only what it keeps (its pipeline stage's layers, or its shards): no rank holds the full
    model. Adapters are initialized from ``seed``.
    """
    frozen_base: Mapping[str, object] | None = None
    """Identification of the frozen base of adapters, saved with each checkpoint, which does not contain the
    base. Set it before ``setup``."""
    objective: Dpo | None = None
    """Loss over pairs of rows in place of the model's own; batches are those of ``PairBatches`` then. Set it
    before ``setup``. Only engines whose ranks each have the logits of whole rows support it."""
    validation_state: Mapping[str, object] | None = None
    """State of early stopping, saved with each checkpoint so that a resumed run continues it."""
    stream_positions: Sequence[object] | None = None
    """Position of each data rank in streamed data, saved with each checkpoint."""
    data_source: Mapping[str, object] | None = None
    """Name and SHA-256 of the data, saved with each checkpoint; only rank 0 knows them."""
    max_grad_norm: float | None = 1.0
    """Maximum norm of the whole model's gradient, to which every step clips; None: no clipping. Set it before
    ``setup``: some frameworks are configured there."""
    learning_rate: float = 3e-4
    """Initial rate of the optimizer that ``setup`` builds itself. Set it before ``setup``."""
    weight_decay: float = 0.1
    """Decoupled weight decay of that optimizer, on matrices only. Set it before ``setup``."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.plan = ctx.plan
        self.num_steps_done = 0
        """Number of optimizer steps so far, including those before a loaded checkpoint."""
        self.grad_norm = float("nan")
        """Norm of the whole model's gradient in the last step, before clipping."""
        self.step_metrics: dict[str, float] = {}
        """The objective's own metrics of the last step, the same on all ranks."""
        self.bytes_after_step: dict[str, int] = {}
        """Bytes of parameters, gradients and optimizer after the last step."""
        self.peak_tensor_bytes = 0
        """Maximum sum of the three, right after an optimizer step."""

    @property
    def data_rank(self) -> int:
        """Data-parallel rank, the index of this rank's share of a global batch."""
        return self.ctx.rank

    @property
    def num_data_ranks(self) -> int:
        """Number of data-parallel ranks, the shares of a global batch."""
        return self.ctx.world_size

    @abstractmethod
    def setup(self, build_model: BuildModel, build_optimizer: BuildOptimizer | None = None) -> None:
        """Build, shard, check and record the model. Raises ``ValueError`` first for an unsupported plan.

        Without ``build_optimizer`` the engine builds the recipe's optimizer with ``learning_rate`` and
        ``weight_decay``. The model's weights stay as ``build_model`` made them, unless ``fresh_weights`` or
        ``weights`` is set. Steps clip gradients to ``max_grad_norm``, also with the user's own optimizer.
        """

    @abstractmethod
    def step(self, batch: Mapping[str, torch.Tensor]) -> float:
        """Take one optimizer step on this rank's share of a global batch.

        Before the optimizer's step the gradient of the whole model is clipped to ``max_grad_norm`` (default
        1.0); ``grad_norm`` is the norm before that.

        ``batch`` has ``input_ids`` and ``labels`` of shape ``[num_micro_batches * micro_batch_size,
        seq_len]``; labels are aligned with inputs (the model shifts them), and -100 is ignored. The user's
        own module may take other tensors with as many rows: labels of another shape than ``input_ids`` are
        not shifted, and all but -100 count. Return the mean loss over all labels of all ranks.
        """

    @abstractmethod
    def evaluate(self, batch: Mapping[str, torch.Tensor]) -> float:
        """Return the mean loss over all labels of all ranks, without dropout and gradients.

        ``batch`` is this rank's share of a global batch, as for :meth:`step`, but micro-batches may have no
        labels. Weights, optimizer and random states stay as they are, and the model is in train mode again.
        """

    @abstractmethod
    def predict_next(self, input_ids: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Return the most likely token after position ``last`` of each row, without dropout and gradients.

        ``input_ids`` has at most ``micro_batch_size`` rows and ``seq_len`` tokens, the same shape on all
        ranks, which call this together; tokens after ``last`` are padding. Ranks with the same ``data_rank``
        pass the same rows and get the same tokens, in host memory. Weights, optimizer and random states stay
        as they are, and the model is in train mode again.
        """

    @abstractmethod
    def save(self, path: str | Path) -> None:
        """Write a checkpoint folder, all ranks together: under a temporary name, renamed when it is complete.

        A relative ``path`` is resolved against the run folder (``ctx.folder``); an older checkpoint there is
        replaced. It contains the weights (with LoRA only the adapters), the optimizer state, the number of
        steps and each rank's random number generator states.
        """

    def begin_save(self, path: str | Path) -> Callable[[], None]:
        """Start to save asynchronously. Return a function that waits, on all ranks, until it is complete.

        Steps may run in the meantime, but no other save. Engines whose framework cannot save asynchronously
        save here, and the returned function does nothing.
        """
        self.save(path)
        return _wait_for_nothing

    @abstractmethod
    def load(self, path: str | Path) -> None:
        """Load a checkpoint of the same model that ``save`` wrote in a run folder of this user.

        Call it on all ranks together, after ``setup``. A relative ``path`` is resolved against this run's
        folder (``ctx.folder``). The number of ranks may differ, except with DeepSpeed, and DDP and FSDP2 load
        each other's. Raises ``FileNotFoundError`` if there is no complete checkpoint, ``PermissionError`` if
        it belongs to another user, ``ValueError`` if it is of another format or, with DeepSpeed, of other
        degrees or another stage, and if its pickles contain more than tensors, plain values and the classes
        of its format, and no manifest proves that a launch of this user saved it.
        """

    @abstractmethod
    def export(self, path: str | Path) -> None:
        """Write the model's weights as a Hugging Face checkpoint, all ranks together, after ``setup``.

        The folder has ``config.json`` and ``model.safetensors`` (several files with an index if it is large),
        which ``AutoModelForCausalLM.from_pretrained`` reads; adapters are in peft's format. Weights have the
        engine's parameter type: fp32, except for a pure bf16 recipe. The folder has a temporary name until it
        is complete. A relative ``path`` is resolved against the run folder; an older export is replaced.
        """

    @abstractmethod
    def memory(self) -> dict[str, int]:
        """Return this rank's current bytes: ``parameters``, ``gradients``, ``optimizer``, device totals.

        On a GPU without what is offloaded to the host.
        """

    def list_layers(self) -> Mapping[str, torch.nn.Module]:
        """Return the model's repeated layers by name, such as "layers.3"; empty before ``setup``."""
        return {}

    def live_tensors(self) -> LiveTensors | None:
        """Return the tensors behind :meth:`memory`, for the census of a step; None if not supported."""
        return None

    @property
    def bucket_bytes(self) -> int:
        """Bytes of the framework's gradient buckets, in use or not."""
        return 0

    @abstractmethod
    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the next step."""

    def _resolve_in_run(self, path: str | Path) -> Path:
        """Return ``path``, resolved against the run folder, not the ranks' working folder."""
        return Path(self.ctx.folder) / expand_home(path)
