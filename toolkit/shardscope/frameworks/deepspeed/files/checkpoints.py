"""Checkpoints of a training with ``train.py``: every few steps, so that a failure costs only the steps since.

``train.py --checkpoints FOLDER`` writes ``FOLDER/step-100`` and so on in DeepSpeed's own format, and keeps
the last two. The same command, started again, continues after the newest of them, which ``FOLDER/latest``
names, with the same batches, learning rates and random numbers. All nodes must see the same folder: each rank
writes its partitions. Another number of ranks or another stage cannot read them.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

NUM_KEPT = 2
LATEST = "latest"
"""File with the name of the newest complete checkpoint, as DeepSpeed reads it."""


def count_steps(name: str) -> int:
    """Return the number of steps that the checkpoint ``name`` was saved after."""
    return int(name.removeprefix("step-"))


class Checkpoints:
    """The checkpoints of one training, which all ranks write and read together."""

    def __init__(self, options: argparse.Namespace, engine: deepspeed.DeepSpeedEngine) -> None:
        self.folder = Path(options.checkpoints) if options.checkpoints else None
        self.every, self.last, self.engine = max(1, options.checkpoint_every), options.steps, engine

    def load(self) -> int:
        """Load the newest checkpoint. Return the number of steps that are done, 0 without a checkpoint."""
        if self.folder is None:
            return 0
        if dist.get_rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        # Ranks that continued from different steps would wait for each other for ever.
        latest = self.folder / LATEST
        newest = latest.read_text(encoding="utf-8").strip() if latest.is_file() else None
        seen: list[tuple[bool, str | None]] = [(False, None)] * dist.get_world_size()
        dist.all_gather_object(seen, (self.folder.is_dir(), newest))
        if any(found != seen[0] for found in seen):
            raise SystemExit(f"--checkpoints: {self.folder} is not the same folder on all nodes")
        if newest is None:
            return 0
        self.engine.load_checkpoint(str(self.folder), tag=newest)
        state = torch.load(self.find_random_file(newest, dist.get_rank()), weights_only=True)
        torch.set_rng_state(state["cpu"])
        if "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"])
        if dist.get_rank() == 0:
            print(f"continues after step {count_steps(newest)}, from {self.folder / newest}", flush=True)
        return count_steps(newest)

    def save(self, steps: int) -> None:
        """Save after every few steps and after the last."""
        if self.folder is None or (steps % self.every and steps != self.last):
            return
        name = f"step-{steps}"
        if dist.get_rank() == 0:
            shutil.rmtree(
                self.folder / name, ignore_errors=True
            )  # of a run that ended in the middle of a save
            (self.folder / name).mkdir()
        dist.barrier()
        # Dropout uses random numbers, whose state is not in DeepSpeed's files.
        state = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state()
        torch.save(state, self.find_random_file(name, dist.get_rank()))
        # DeepSpeed would write the file "latest" while other ranks still save.
        self.engine.save_checkpoint(str(self.folder), tag=name, save_latest=False)
        dist.barrier()
        if dist.get_rank() == 0:
            partial = self.folder / "latest.partial"
            partial.write_text(name, encoding="utf-8")
            partial.replace(self.folder / LATEST)
            kept = sorted((path.name for path in self.folder.glob("step-*")), key=count_steps, reverse=True)
            # A later one is of a run that ended in the middle of its save.
            for old in [one for one in kept if count_steps(one) <= steps][NUM_KEPT:]:
                shutil.rmtree(self.folder / old)
        dist.barrier()

    def find_random_file(self, name: str, rank: int) -> Path:
        """Return the file with a rank's random states in the checkpoint ``name``."""
        assert self.folder is not None
        return self.folder / name / f"random-{rank}.pt"
