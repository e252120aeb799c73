"""Memory of the first steps by phase: the caching allocator's peaks on GPUs, the tensor census everywhere."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from shardscope.records.folder import RunFolder
from shardscope.training.accounting import tensors
from shardscope.training.accounting.census import Census
from shardscope.training.engine import Context, Engine, LiveTensors
from shardscope.training.ranges import name_range

WATCHED_STEPS = (0, 2)
"""Measured steps, from 0. The third is representative (in the second DDP still rebuilds its buckets); the
first serves runs that end earlier. Measured steps run a little slower."""
MAX_HISTORY = 200_000
"""Maximum number of allocations in a snapshot's history."""


class MemoryWatch:
    """Memory measurement of one engine: ``measure_step`` wraps a step, ``phase`` each of its phases."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._device = engine.ctx.device
        self._num_steps = 0
        self._is_measured = False
        self._census: Census | None = None
        self._peaks: dict[str, int] = {}
        self._initialisation_peak = tensors.read_peak_allocated(self._device)
        self._baseline = tensors.read_device_bytes(self._device).get("rss")

    @contextmanager
    def measure_step(self) -> Iterator[None]:
        """Measure this step if it is in :data:`WATCHED_STEPS`, and record the result in the run folder."""
        self._is_measured = self._num_steps in WATCHED_STEPS
        self._num_steps += 1
        if not self._is_measured:
            yield
            return
        # Restart the allocator's peak, so that it is this step's and not that of building the model.
        engine = self._engine
        self._peaks = {}
        tensors.reset_peak(self._device)
        # A dispatch mode sees no operators inside compiled graphs; only the allocator's peaks remain.
        if engine.plan.kernels != "compiled" and engine.live_tensors() is not None:
            self._census = Census(
                lambda: _list_live_tensors(engine),
                device=self._device,
                vocab_sizes=_list_vocab_sizes(engine),
                bucket_bytes=engine.bucket_bytes,
            )
        try:
            with self._census or nullcontext():
                yield
        finally:
            census, self._census = self._census, None
        engine.ctx.record("memory", self._describe_peaks(census))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the operators inside as one phase, and name them in recordings.

        After an error the phase stays open: the step has failed.
        """
        if self._census is not None:
            self._census.begin_phase(name)
        with name_range(name):
            yield
        if self._is_measured:
            self._store_peaks(name)

    def _store_peaks(self, phase: str) -> None:
        if self._census is not None:
            self._census.update_peak(phase)
        # The allocator has one peak for all phases: take it at the end of each, and start again.
        if self._device.type == "cuda":
            self._peaks[phase] = max(self._peaks.get(phase, 0), torch.cuda.max_memory_allocated(self._device))
            tensors.reset_peak(self._device)

    def _describe_peaks(self, census: Census | None) -> dict[str, object]:
        record: dict[str, object] = {
            "device": self._device.type,
            "step": self._engine.num_steps_done - 1,
            "phases": census.phases if census else {},
        }
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            reserved = torch.cuda.memory_reserved(self._device)
            record |= {
                "allocated_peaks": {"initialisation": self._initialisation_peak, **self._peaks},
                "reserved": torch.cuda.max_memory_reserved(self._device),
                # All memory outside this process's allocator, that of the GPU's other processes included.
                "outside_allocator": max(0, total - free - reserved),
                "total": total,
            }
        else:
            record["rss_before_steps"] = self._baseline
        return record


def _list_live_tensors(engine: Engine) -> LiveTensors:
    live_tensors = engine.live_tensors()
    assert live_tensors is not None
    return live_tensors


def _list_vocab_sizes(engine: Engine) -> set[int]:
    # The logits of a tensor-parallel rank are as wide as its shard of the vocabulary.
    vocab = engine.plan.architecture.vocab_size
    return {vocab, -(-vocab // engine.plan.degrees.tp)}


class Snapshot:
    """Snapshot of the next steps for ``torch.cuda.memory``'s viewer, written into the run folder."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._steps_left = 0

    def start(self, num_steps: int) -> None:
        """Record allocations for ``num_steps`` steps; on CPU ranks, only print a line to the log."""
        if self._ctx.device.type != "cuda":
            print("no memory snapshot: only GPU ranks have torch's caching allocator", flush=True)
            return
        if self._steps_left == 0:
            torch.cuda.memory._record_memory_history(max_entries=MAX_HISTORY)
        self._steps_left = max(self._steps_left, num_steps)

    def count_step(self) -> None:
        """Count one finished training step; write the snapshot after the last one."""
        if self._steps_left == 0:
            return
        self._steps_left -= 1
        if self._steps_left == 0:
            self.end()

    def end(self) -> None:
        """Write the snapshot and stop recording."""
        path = RunFolder(self._ctx.folder).memory_snapshot(self._ctx.rank)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        # Renamed when it is complete: the notebook may look for it while it is written.
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            # Only lists, dicts, numbers and strings: readable by an unpickler that rejects every global.
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
