"""Tracker of every storage of a rehearsal, from its first operator to its last reference.

Every allocation, resize and release is recorded as an event; labels belong to storages, not to events. Peaks
are computed at the end, so a tensor that is later labelled a gradient counts as one from its allocation.
(torch's own ``MemTracker`` labels immediately: a gradient is a temporary until a hook sees it.)
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from shardscope.memory.report import Component, Phase
from shardscope.rehearsal.result import RehearsedMoment, RehearsedStage

_PLACES: dict[Phase, tuple[float, float, int]] = {
    "initialisation": (0.0, 0.0, 1),
    "rest": (0.0, 0.0, 1),
    "forward": (0.02, 0.34, 4),
    "backward": (0.34, 0.97, 8),
    "optimizer": (0.98, 1.0, 1),
}
"""Begin and end of each phase as fractions of a step, and its number of parts, each with its own peak."""


DEFAULTS: dict[Phase, Component] = {
    "initialisation": "parameters",
    "rest": "activations",
    "forward": "activations",
    "backward": "activations",
    "optimizer": "optimizer",
}
"""Default label of new storages in each phase."""


class Tracker(TorchDispatchMode):  # type: ignore[misc]
    """Bytes of all storages by component, at the peak of every part of a step."""

    def __init__(self, logit_widths: Iterable[int] = (), *, host_apart: bool = False) -> None:
        super().__init__()
        self.logit_widths = frozenset(logit_widths)
        self.host_apart = host_apart
        """Whether "cpu" means the host and "cpu:0" the device; otherwise all tensors are the device's."""
        self.host_peak_bytes = 0
        """Peak bytes of host tensors since the last :meth:`restart`."""
        self._on_host: set[int] = set()
        self._host_bytes = 0
        self._numbers = WeakIdKeyDictionary()
        self._watchers: dict[int, weakref.ref[Any]] = {}
        self._held: dict[int, int] = {}
        self._labels: dict[int, Component] = {}
        self._events: list[tuple[int, int, int]] = []
        self._phases: list[Phase | None] = ["initialisation"]
        self._labelling: list[Component] = []
        self._paused = 0
        self._resize: Any = None

    # ---- Phases and labels, set by the rehearsal

    @contextlib.contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Assign events inside to this phase; entered again (next micro-batch), the phase continues."""
        self._phases.append(name)
        self._mark()
        try:
            yield
        finally:
            # Events between two phases are recorded and belong to neither.
            self._phases.append(None)

    @contextlib.contextmanager
    def labelling(self, component: Component) -> Iterator[None]:
        """Label new storages inside as this component."""
        self._labelling.append(component)
        try:
            yield
        finally:
            self._labelling.pop()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore all storages inside: a real run has them in host memory or not at all."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def label(self, tensors: Iterable[Any], component: Component) -> None:
        """Label the tensors' storages for the whole step; storages not seen before are added now."""
        for tensor in tensors:
            for storage in _storages(tensor):
                self._labels[self._number(storage, self._is_host(tensor))] = component

    def restart(self) -> None:
        """Drop the events of earlier steps: the measured step begins with the storages held now."""
        # Otherwise storages in reference cycles would be held or not depending on the collector's last run.
        gc.collect()
        first = next((i for i, phase in enumerate(self._phases) if i and phase != "initialisation"), 1)
        kept = [event for event in self._events if event[2] < first]
        self._phases.append(None)
        here = len(self._phases) - 1
        held = [
            (number, size, here)
            for number, size in self._held.items()
            if size and number not in self._on_host
        ]
        self.host_peak_bytes = self._host_bytes
        self._events = [*kept, (-1, 0, -1), *held]
        self._phases.append("rest")
        self._mark()

    @property
    def held_bytes(self) -> int:
        """Bytes that the device holds at present, all components."""
        return sum(self._held.values()) - self._host_bytes

    # ---- Results

    def moments(self) -> tuple[RehearsedMoment, ...]:
        """Return the peak of each part of each phase, in the step's order."""
        found: list[RehearsedMoment] = []
        for phase, (start, stop, parts) in _PLACES.items():
            peaks = self._peaks(phase, parts)
            for index, components in enumerate(peaks):
                fraction = start + (stop - start) * (index + 1) / len(peaks)
                found.append(RehearsedMoment(phase=phase, fraction=round(fraction, 4), components=components))
        return tuple(found)

    def stage(self, number: int, num_layers: int, note: str = "") -> RehearsedStage:
        """Return the recorded peaks as the result of one pipeline stage."""
        return RehearsedStage(
            stage=number,
            num_layers=num_layers,
            moments=self.moments(),
            note=note,
            host_bytes=self.host_peak_bytes,
        )

    def _peaks(self, phase: Phase, parts: int) -> list[dict[str, int]]:
        """Return bytes by component at the peak of each of ``parts`` equal parts of a phase's events."""
        mine = sum(index >= 0 and self._phases[index] == phase for _, _, index in self._events)
        if not mine:
            return []
        parts = min(parts, mine)
        now: dict[str, int] = {}
        best: list[tuple[int, dict[str, int]]] = [(-1, {})] * parts
        total = seen = 0
        for number, delta, index in self._events:
            if index < 0:
                # A new step: the events that follow repeat the storages held at its start.
                now, total = {}, 0
                continue
            label = self._labels.get(number, "activations")
            now[label] = now.get(label, 0) + delta
            total += delta
            if self._phases[index] == phase:
                part = seen * parts // mine
                seen += 1
                if total > best[part][0]:
                    best[part] = (total, dict(now))
        return [{name: size for name, size in components.items() if size} for _, components in best]

    # ---- Interception of operators and of ``resize_``

    def __enter__(self) -> Tracker:
        resize = self._resize = torch.UntypedStorage.resize_
        tracker = self

        def followed(storage: Any, size: int) -> Any:
            answer = resize(storage, size)
            number = tracker._numbers.get(storage)
            if number is not None:
                tracker._change(number, storage.size() - tracker._held[number])
            return answer

        torch.UntypedStorage.resize_ = followed
        super().__enter__()
        return self

    def __exit__(self, *problem: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*problem)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # DTensor then dispatches the operators on its local tensors, which arrive here.
            return NotImplemented
        if function is torch.ops._c10d_functional.wait_tensor.default:
            # On fake tensors it copies; on real ones it returns its argument.
            return args[0]
        with _unremembered(args[0]) if function in _TAKES_STORAGE else contextlib.nullcontext():
            out = function(*args, **(kwargs or {}))
        if not self._paused:
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    self._see(leaf)
        return out

    def _see(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "meta":
            return
        for storage in _storages(tensor):
            if self._numbers.get(storage) is None:
                self._labels[self._number(storage, self._is_host(tensor))] = self._guess(tensor)

    def _is_host(self, tensor: Any) -> bool:
        return self.host_apart and tensor.device.index is None

    def _guess(self, tensor: torch.Tensor) -> Component:
        if self._labelling:
            return self._labelling[-1]
        phase = self._now
        if phase in ("forward", "backward") and tensor.ndim > 1 and tensor.shape[-1] in self.logit_widths:
            return "logits"
        return DEFAULTS[phase]

    @property
    def _now(self) -> Phase:
        return self._phases[-1] or "rest"

    def _number(self, storage: Any, on_host: bool) -> int:
        """Return the number of a storage; register it if it is new."""
        number: int | None = self._numbers.get(storage)
        if number is None:
            number = len(self._labels)
            self._numbers[storage] = number
            if on_host:
                self._on_host.add(number)
            self._labels[number] = DEFAULTS[self._now]
            self._held[number] = 0
            self._watchers[number] = weakref.ref(storage, partial(self._gone, number))
            self._change(number, storage.size())
        return number

    def _gone(self, number: int, _: object = None) -> None:
        self._change(number, -self._held.pop(number, 0), gone=True)
        self._watchers.pop(number, None)

    def _change(self, number: int, delta: int, gone: bool = False) -> None:
        if not gone:
            self._held[number] += delta
        if number in self._on_host:
            self._host_bytes += delta
            self.host_peak_bytes = max(self.host_peak_bytes, self._host_bytes)
        elif delta:
            self._events.append((number, delta, len(self._phases) - 1))

    def _mark(self) -> None:
        """Record an event of 0 bytes, so that a phase without allocations has a peak too."""
        self._events.append((-1, 0, len(self._phases) - 1))


_TAKES_STORAGE = frozenset({
    torch.ops.aten.set_.source_Storage,
    torch.ops.aten.set_.source_Storage_storage_offset,
})  # fmt: skip


@contextlib.contextmanager
def _unremembered(tensor: Any) -> Iterator[None]:
    """Disable the fake tensor cache of ``tensor``'s mode, whose keys would keep storages alive."""
    mode = tensor.fake_mode
    before, mode.cache_enabled = mode.cache_enabled, False
    try:
        yield
    finally:
        mode.cache_enabled = before


def _storages(tensor: Any) -> list[Any]:
    """Return the untyped storages of a tensor, or of the inner tensors of a wrapper (DTensor)."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        parts = [getattr(tensor, name) for name in names]
        return [storage for part in parts if isinstance(part, torch.Tensor) for storage in _storages(part)]
    return [tensor.untyped_storage()]
