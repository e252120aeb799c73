"""Checkpoints of a training with ``train.py``: every few steps, so that a failure costs only the steps since.

``train.py --checkpoints FOLDER`` writes ``FOLDER/step-100.pt`` and so on, and keeps the last two. The same
command, started again, continues after the newest of them with the same batches, learning rates and random
numbers. All nodes must see the same folder.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist

NUM_KEPT = 2


def find_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in ``folder``, the newest first."""
    return sorted(folder.glob("step-*.pt"), key=count_steps, reverse=True)


def count_steps(checkpoint: Path) -> int:
    """Return the number of steps that ``checkpoint`` was saved after."""
    return int(checkpoint.stem.removeprefix("step-"))


class Checkpoints:
    """The checkpoints of one training. Replicas are equal: rank 0 writes, and all ranks read."""

    def __init__(
        self,
        options: argparse.Namespace,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
    ) -> None:
        self.folder = Path(options.checkpoints) if options.checkpoints else None
        self.every, self.last = max(1, options.checkpoint_every), options.steps
        self.model, self.optimizer, self.scaler = model, optimizer, scaler

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
        # mmap: the ranks of a node share the file's pages instead of reading a copy each.
        state = torch.load(newest, map_location="cpu", mmap=True, weights_only=True)
        self.model.load_state_dict(state["model"], strict=not list_frozen(self.model))
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        restore_random_state(state["random"][dist.get_rank()])
        if dist.get_rank() == 0:
            print(f"continues after step {count_steps(newest)}, from {newest}", flush=True)
        return count_steps(newest)

    def save(self, steps: int) -> None:
        """Save after every few steps and after the last. A file has its name when it is complete."""
        if self.folder is None or (steps % self.every and steps != self.last):
            return
        random = [read_random_state()] * dist.get_world_size()
        dist.all_gather_object(random, random[0])
        if dist.get_rank() == 0:
            frozen = list_frozen(self.model)  # LoRA's base: as it was before the first step
            weights = self.model.state_dict().items()
            state = {
                "model": {name: tensor for name, tensor in weights if name not in frozen},
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
                "random": random,
            }
            partial = self.folder / "partial.pt"
            torch.save(state, partial)
            partial.replace(self.folder / f"step-{steps}.pt")
            for old in find_checkpoints(self.folder)[NUM_KEPT:]:
                old.unlink()
        dist.barrier()


def list_frozen(model: torch.nn.Module) -> set[str]:
    """Return the names of parameters that are not trained."""
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


def read_random_state() -> dict[str, torch.Tensor]:
    """Return this rank's states of random numbers, which dropout uses."""
    on_gpu = torch.cuda.is_initialized()
    return {"cpu": torch.get_rng_state(), **({"cuda": torch.cuda.get_rng_state()} if on_gpu else {})}


def restore_random_state(state: dict[str, torch.Tensor]) -> None:
    """Restore what ``read_random_state`` returned."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
