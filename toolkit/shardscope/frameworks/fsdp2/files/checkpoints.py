"""Checkpoints of a training with ``train.py``: every few steps, so that a failure costs only the steps since.

``train.py --checkpoints FOLDER`` writes ``FOLDER/step-100`` and so on with ``torch.distributed.checkpoint``,
and keeps the last two. The same command, started again, continues after the newest of them with the same
batches, learning rates and random numbers. All nodes must see the same folder: each rank writes its shards.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

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
        self, options: argparse.Namespace, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self.folder = Path(options.checkpoints) if options.checkpoints else None
        self.every, self.last = max(1, options.checkpoint_every), options.steps
        self.model, self.optimizer = model, optimizer

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
        # dcp.load writes into the tensors of this state: shards of parameters, moments and random states.
        state = self.collect_state()
        dcp.load(state, checkpoint_id=newest)
        model_state, optimizer_state = state["model"], state["optimizer"]
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=model_state,  # type: ignore[arg-type]
            optim_state_dict=optimizer_state,  # type: ignore[arg-type]
        )
        torch.set_rng_state(state[f"cpu-{dist.get_rank()}"])  # type: ignore[arg-type]
        if torch.cuda.is_initialized():
            torch.cuda.set_rng_state(state[f"cuda-{dist.get_rank()}"])  # type: ignore[arg-type]
        if dist.get_rank() == 0:
            print(f"continues after step {count_steps(newest)}, from {newest}", flush=True)
        return count_steps(newest)

    def save(self, steps: int) -> None:
        """Save after every few steps and after the last. A folder has its name when it is complete."""
        if self.folder is None or (steps % self.every and steps != self.last):
            return
        partial = self.folder / "partial"
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)  # of a run that ended in the middle of a save
        dist.barrier()
        dcp.save(self.collect_state(), checkpoint_id=partial)
        if dist.get_rank() == 0:
            partial.rename(self.folder / f"step-{steps}")
            for old in find_checkpoints(self.folder)[NUM_KEPT:]:
                shutil.rmtree(old)
        dist.barrier()

    def collect_state(self) -> dict[str, object]:
        """Return this rank's part of the state: its shards, and its random states, which dropout uses."""
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        rank = dist.get_rank()
        state = {"model": model_state, "optimizer": optimizer_state, f"cpu-{rank}": torch.get_rng_state()}
        if torch.cuda.is_initialized():
            state[f"cuda-{rank}"] = torch.cuda.get_rng_state()
        return state
