"""The memory of the first steps by phase: the allocator's peaks on a GPU, the census of tensors anywhere."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from shardscope.records.folder import RunFolder
from shardscope.training.accounting import tensors
from shardscope.training.accounting.census import Census
from shardscope.training.engine import Engine, HeldTensors

WATCHED_STEPS = (0, 2)
"""Of an engine's steps: the third is as all others will be (in the second DDP still makes its buckets anew),
and the first stands for runs that end before. Both run a little slower."""
MAX_HISTORY = 200_000
"""Allocations that a snapshot's history keeps."""


class MemoryWatch:
    """One engine's. ``step`` goes around a step, ``mark`` at the end of each of its phases."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._device = engine.ctx.device
        self._num_steps = 0
        self._watches = False
        self._census: Census | None = None
        self._peaks: dict[str, int] = {}
        self._initialisation = tensors.peak_allocated(self._device)
        self._baseline = tensors.device_bytes(self._device).get("rss")

    @contextmanager
    def step(self) -> Iterator[None]:
        """Watch this step if it is one of the first; record afterwards what it showed."""
        self._watches = self._num_steps in WATCHED_STEPS
        self._num_steps += 1
        if not self._watches:
            yield
            return
        engine = self._engine
        self._peaks = {}
        tensors.reset_peak(self._device)
        # Compiled graphs run no operators that could be seen; the allocator's peaks remain.
        if engine.plan.kernels != "compiled" and engine.held_tensors() is not None:
            self._census = Census(
                lambda: _held(engine), vocab_sizes=_vocab_sizes(engine), bucket_bytes=engine.bucket_bytes
            )
        try:
            with self._census or nullcontext():
                yield
        finally:
            census, self._census = self._census, None
        engine.ctx.record("memory", self._record(census))

    def begin(self, phase: str) -> None:
        """What comes next belongs to ``phase``."""
        if self._census is not None:
            self._census.begin(phase)

    def mark(self, phase: str) -> None:
        """``phase`` ends here."""
        if not self._watches:
            return
        if self._census is not None:
            self._census.look(phase)
        if self._device.type == "cuda":
            self._peaks[phase] = max(self._peaks.get(phase, 0), torch.cuda.max_memory_allocated(self._device))
            tensors.reset_peak(self._device)

    def _record(self, census: Census | None) -> dict[str, Any]:
        found: dict[str, Any] = {
            "device": self._device.type,
            "step": self._engine.num_steps_done - 1,
            "phases": census.phases if census else {},
        }
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            reserved = torch.cuda.memory_reserved(self._device)
            found |= {
                "allocated_peaks": {"initialisation": self._initialisation, **self._peaks},
                "reserved": torch.cuda.max_memory_reserved(self._device),
                # Other processes of this card are in it: what is not this process's allocator's.
                "outside_allocator": max(0, total - free - reserved),
                "total": total,
            }
        else:
            found["rss_before_steps"] = self._baseline
        return found


def _held(engine: Engine) -> HeldTensors:
    held = engine.held_tensors()
    assert held is not None
    return held


def _vocab_sizes(engine: Engine) -> set[int]:
    vocab = engine.plan.architecture.vocab_size
    return {vocab, -(-vocab // engine.plan.degrees.tp)}


class Snapshot:
    """``torch.cuda.memory``'s own snapshot of the next steps, for its viewer; written into the run folder."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx
        self._steps_left = 0

    def start(self, num_steps: int) -> None:
        """Keep the history of allocations from now on; CPU ranks have none, and a line in the log says so."""
        if self._ctx.device.type != "cuda":
            print("no memory snapshot: CPU ranks have no caching allocator to ask", flush=True)
            return
        if self._steps_left == 0:
            torch.cuda.memory._record_memory_history(max_entries=MAX_HISTORY)
        self._steps_left = max(self._steps_left, num_steps)

    def step(self) -> None:
        """One training step is over."""
        if self._steps_left == 0:
            return
        self._steps_left -= 1
        if self._steps_left == 0:
            self.end()

    def end(self) -> None:
        """Write what there is, and stop keeping more."""
        path = RunFolder(self._ctx.folder).memory_snapshot(self._ctx.rank)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            # Plain lists, dicts, numbers and text: what an unpickler that refuses every global can read.
            pickle.dump(torch.cuda.memory._snapshot(), file)
        part.rename(path)
        torch.cuda.memory._record_memory_history(enabled=None)
        self._steps_left = 0
        print(f"memory snapshot: {path.relative_to(self._ctx.folder)}", flush=True)

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        if self._steps_left:
            self.end()
