"""What every engine is: one framework really training one plan, on CUDA or CPU ranks.

This file imports no torch, so the launcher and the tests may name engines without paying for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from shardscope.training.weights.stored_weights import StoredWeights

BuildModel = Callable[[], "torch.nn.Module"]
"""Makes the model, untouched by any framework. Called once per rank, under a seed that all ranks share.

Its ``forward(**batch)`` returns the mean loss over labelled tokens, or an object with such a ``.loss``."""

BuildOptimizer = Callable[["list[torch.nn.Parameter]"], "torch.optim.Optimizer"]
"""Makes the optimizer over the trainable parameters that the framework left on this rank."""


class Context(Protocol):
    """What an engine needs of a rank's context; the process group is up before an engine is made."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def plan(self) -> Any: ...
    @property
    def folder(self) -> Path: ...
    def log(self, step: int | None = None, **metrics: Any) -> None: ...
    def record(self, name: str, mapping: Mapping[str, Any]) -> None: ...


def _nothing() -> None:
    """Wait for a checkpoint that is whole."""


@dataclass(frozen=True, kw_only=True)
class HeldTensors:
    """What an engine holds on this rank at this moment, by whose it is; a storage may come more than once."""

    parameters: Iterable[torch.Tensor]
    """This rank's own, shards where the framework shards."""
    gradients: Iterable[torch.Tensor]
    optimizer: Iterable[torch.Tensor]
    """Moments and main copies."""
    gathered: Iterable[torch.Tensor] = ()
    """Whole parameters held beside their shards, emptied ones included."""
    buffers: Iterable[torch.Tensor] = ()
    """The module's own, which no optimizer touches."""


class Engine(ABC):
    """One framework, one plan, this rank.

    ``setup`` makes the model and checks afterwards what it really made: it writes that into the run folder as
    ``engine`` and raises ``RuntimeError`` where it contradicts the plan.
    """

    framework: str = ""
    """The name that ``Layout.framework`` has for it."""
    seed: int = 0
    """Seed of the initial weights, the same on every rank. Set it before ``setup``."""
    fresh_weights: bool = False
    """Whether ``build_model`` makes a decoder whose weights are random anyway. Set it before ``setup``.

    Engines that shard may then draw them shard by shard from ``seed``, and never hold the model whole. If
    False, the weights that ``build_model`` gives are kept exactly, and each rank builds them in host memory.
    """
    weights: StoredWeights | None = None
    """Where the weights of the decoder that ``build_model`` makes are read from, in the place of its own. Set
    it before ``setup``.

    A rank reads what it keeps: with stages its layers; where parameters are sharded no rank ever holds the
    whole model. Adapters over it are drawn from ``seed``.
    """
    frozen_base: Mapping[str, Any] | None = None
    """What adapters are over, in a few words: a checkpoint has it beside them, for it holds no base. Set it
    before ``setup``."""
    max_grad_norm: float | None = 1.0
    """Every step scales the gradient of the whole model down to this norm; None: never. Set it before
    ``setup``: some frameworks are told then."""
    learning_rate: float = 3e-4
    """Of the optimizer that ``setup`` makes itself, until ``set_learning_rate``. Set it before ``setup``."""
    weight_decay: float = 0.1
    """The same of its decoupled decay, on matrices only."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.plan = ctx.plan
        self.num_steps_done = 0
        """Optimizer steps taken so far, those before the loaded checkpoint included."""
        self.grad_norm = float("nan")
        """Norm of the whole model's gradient in the last step, before clipping."""
        self.held_after_step: dict[str, int] = {}
        """Bytes of parameters, gradients and optimizer as the last step left them."""
        self.peak_accounted_bytes = 0
        """Most bytes of the three seen together, right after an optimizer step."""

    @property
    def data_rank(self) -> int:
        """Which share of each global batch is this rank's; a tensor or pipeline group has one share."""
        return self.ctx.rank

    @property
    def num_data_ranks(self) -> int:
        """Into how many shares a global batch is cut."""
        return self.ctx.world_size

    @abstractmethod
    def setup(self, build_model: BuildModel, build_optimizer: BuildOptimizer | None = None) -> None:
        """Build, shard, check and record. Raises ``ValueError`` before any work for what it cannot run.

        Without ``build_optimizer`` the engine makes the recipe's, of ``learning_rate`` and ``weight_decay``.
        The model's weights stay as ``build_model`` made them, unless ``fresh_weights`` or ``weights`` is set.
        Steps clip gradients to ``max_grad_norm``, with an optimizer of one's own too.
        """

    @abstractmethod
    def step(self, batch: Mapping[str, torch.Tensor]) -> float:
        """Take one optimizer step on this rank's share of a global batch.

        Before the optimizer's step the gradient of the whole model is clipped to ``max_grad_norm``, 1.0
        unless it was set; ``grad_norm`` says how long it was.

        ``batch`` has ``input_ids`` and ``labels`` of shape ``[num_micro_batches * micro_batch_size,
        seq_len]``; labels are aligned with inputs (the model shifts them) and -100 is not trained on.
        A module of one's own may take other tensors of as many rows: labels that have not the shape of
        ``input_ids`` are not shifted, and all but -100 count. Returns the mean loss over all labels of all
        ranks.
        """

    @abstractmethod
    def save(self, path: str | Path) -> None:
        """Write a checkpoint folder, all ranks together: aside first, renamed when it is whole.

        A relative ``path`` is one in the run folder (``ctx.folder``); an older checkpoint there is replaced.
        In it are the weights (of LoRA the adapters), the optimizer's state, the number of steps done and
        where each rank's random numbers stand.
        """

    def begin_save(self, path: str | Path) -> Callable[[], None]:
        """Start what :meth:`save` does; what comes back waits, on all ranks, until it is done.

        Steps may be taken meanwhile, another checkpoint not be begun. Engines whose framework cannot write
        beside training write here, and there is nothing to wait for.
        """
        self.save(path)
        return _nothing

    @abstractmethod
    def load(self, path: str | Path) -> None:
        """Continue from a checkpoint of the same model that ``save`` wrote in a run folder of this user.

        All ranks together, after ``setup``. A relative ``path`` is one in this run's own folder
        (``ctx.folder``). The number of ranks, and DDP or FSDP2, may differ from those that saved. Raises
        ``FileNotFoundError`` if there is no whole checkpoint, ``PermissionError`` if it is another user's,
        ``ValueError`` if it asks for more than tensors, plain values and the classes of its format, and no
        manifest proves that a launch of this user saved it.
        """

    @abstractmethod
    def export(self, path: str | Path) -> None:
        """Write the model's weights as a folder that ``transformers`` opens, all ranks together.

        After ``setup``. ``config.json`` and ``model.safetensors``, where it is large in several files with an
        index, which ``AutoModelForCausalLM.from_pretrained`` reads; of adapters peft's own format. Weights
        have the type that the engine keeps: fp32 but for a pure bf16 recipe. Aside first, renamed when it is
        whole; a relative ``path`` is one in the run folder, and an older export there is replaced.
        """

    @abstractmethod
    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds now: ``parameters``, ``gradients``, ``optimizer``, the device's own."""

    def held_tensors(self) -> HeldTensors | None:
        """The tensors behind :meth:`memory`, for the census of a step; None where no engine can tell them."""
        return None

    @property
    def bucket_bytes(self) -> int:
        """Bytes of buffers that the framework keeps for gradients, whether or not gradients lie in them."""
        return 0

    @abstractmethod
    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the rate of the next step."""
