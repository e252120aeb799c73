"""Checkpoints of a training with ``train.py``: every few steps, so that a failure costs only the steps since.

``train.py --checkpoints FOLDER`` writes ``FOLDER/step-100`` and so on, and keeps the last two. The same
command, started again, continues after the newest of them with the same batches and learning rates. All nodes
must see the same folder: the first of the ranks with the same weights writes these, and each rank its shard
of the optimizer's state. Another number of ranks or another ``tp`` cannot read them.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer

NUM_KEPT = 2


def find_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in ``folder``, the newest first."""
    return sorted(folder.glob("step-*"), key=count_steps, reverse=True)


def count_steps(checkpoint: Path) -> int:
    """Return the number of steps that ``checkpoint`` was saved after."""
    return int(checkpoint.name.removeprefix("step-"))


class Checkpoints:
    """The checkpoints of one training, which all ranks write and read together."""

    def __init__(
        self, options: argparse.Namespace, wrapped: DistributedDataParallel, optimizer: MegatronOptimizer
    ) -> None:
        self.folder = Path(options.checkpoints) if options.checkpoints else None
        self.every, self.last = max(1, options.checkpoint_every), options.steps
        self.wrapped = wrapped
        chained = isinstance(optimizer, ChainedOptimizer)
        self.optimizers = optimizer.chained_optimizers if chained else [optimizer]
        self.weights_file = f"weights-{parallel_state.get_tensor_model_parallel_rank()}.pt"

    def load(self) -> int:
        """Load the newest checkpoint. Return the number of steps that are done, 0 without a checkpoint."""
        if self.folder is None:
            return 0
        if dist.get_rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        # Ranks that continued from different steps would wait for each other for ever.
        newest = next(iter(find_checkpoints(self.folder)), None)
        seen: list[tuple[bool, Path | None]] = [(False, None)] * dist.get_world_size()
        dist.all_gather_object(seen, (self.folder.is_dir(), newest))
        if any(found != seen[0] for found in seen):
            raise SystemExit(f"--checkpoints: {self.folder} is not the same folder on all nodes")
        if newest is None:
            return 0
        ranks = len(list(newest.glob("optimizer-*.pt")))
        if ranks != dist.get_world_size():
            raise SystemExit(f"--checkpoints: {newest} is of {ranks} ranks, not of {dist.get_world_size()}")
        weights = torch.load(newest / self.weights_file, map_location="cpu", mmap=True, weights_only=True)
        with torch.no_grad():
            # In place: the optimizer's shards and the buffers of all-gathers are views of these tensors.
            for name, parameter in self.wrapped.module.named_parameters():
                parameter.copy_(weights[name])
        states = torch.load(newest / f"optimizer-{dist.get_rank()}.pt", map_location="cpu", weights_only=True)
        for optimizer, state in zip(self.optimizers, states, strict=True):
            restore_optimizer(optimizer, state)
        if dist.get_rank() == 0:
            print(f"continues after step {count_steps(newest)}, from {newest}", flush=True)
        return count_steps(newest)

    def save(self, steps: int) -> None:
        """Save after every few steps and after the last. A folder has its name when it is complete."""
        if self.folder is None or (steps % self.every and steps != self.last):
            return
        if self.wrapped.ddp_config.overlap_param_gather:
            # The next forward would all-gather the last update.
            self.wrapped.start_param_sync(force_sync=True)
        partial = self.folder / "partial"
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)  # of a run that ended in the middle of a save
            partial.mkdir()
        dist.barrier()
        if parallel_state.get_data_parallel_rank() == 0:
            parameters = self.wrapped.module.named_parameters()
            torch.save(
                {name: parameter.detach() for name, parameter in parameters}, partial / self.weights_file
            )
        states = [collect_state(one) for one in self.optimizers]
        torch.save(states, partial / f"optimizer-{dist.get_rank()}.pt")
        dist.barrier()
        if dist.get_rank() == 0:
            partial.rename(self.folder / f"step-{steps}")
            for old in find_checkpoints(self.folder)[NUM_KEPT:]:
                shutil.rmtree(old)
        dist.barrier()


def collect_state(optimizer: MegatronOptimizer) -> dict[str, object]:
    """Return an optimizer's state on this rank: moments, and the fp32 main weights of bf16 parameters.

    ``DistributedOptimizer.state_dict`` has neither: its own checkpoints collect them from all ranks.
    """
    if not isinstance(optimizer, DistributedOptimizer):
        state: dict[str, object] = optimizer.state_dict()
        return state
    return {
        "optimizer": optimizer.optimizer.state_dict(),
        "main": optimizer.shard_fp32_from_float16_groups,
    }


def restore_optimizer(optimizer: MegatronOptimizer, state: dict[str, object]) -> None:
    """Restore what ``collect_state`` returned."""
    if not isinstance(optimizer, DistributedOptimizer):
        optimizer.load_state_dict(state)
        return
    optimizer.optimizer.load_state_dict(state["optimizer"])
    with torch.no_grad():
        for group, stored in zip(optimizer.shard_fp32_from_float16_groups, state["main"], strict=True):  # type: ignore[call-overload]
            for weights, values in zip(group, stored, strict=True):
                weights.copy_(values)
