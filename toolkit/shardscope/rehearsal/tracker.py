"""Follows every storage of a rehearsal from its first operator to its last reference.

Every allocation, resize and release becomes one event; labels belong to storages, not to events. Peaks are
found afterwards, so a tensor that turns out to be a gradient was one from its first byte on. (torch's own
``MemTracker`` labels as it goes, and so calls a gradient a temporary until a hook has seen it.)
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
"""Where a phase begins and ends in a step, and into how many parts it is cut, each with its own peak."""


DEFAULTS: dict[Phase, Component] = {
    "initialisation": "parameters",
    "rest": "activations",
    "forward": "activations",
    "backward": "activations",
    "optimizer": "optimizer",
}
"""What a new storage is taken for in each phase, where nothing else is said."""


class Tracker(TorchDispatchMode):  # type: ignore[misc]
    """Bytes of all storages by component, at the peak of every part of a step."""

    def __init__(self, logit_widths: Iterable[int] = (), *, host_apart: bool = False) -> None:
        super().__init__()
        self.logit_widths = frozenset(logit_widths)
        self.host_apart = host_apart
        """Tensors of "cpu" are the host's and those of "cpu:0" the device's; else all are the device's."""
        self.host_peak_bytes = 0
        """Most that the host has held since the last :meth:`restart`."""
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

    # ---- what a rehearsal says

    @contextlib.contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """What runs inside belongs to this phase; entered again (micro-batches) it goes on."""
        self._phases.append(name)
        self._mark()
        try:
            yield
        finally:
            # What is released between two phases is seen, and is no moment of either.
            self._phases.append(None)

    @contextlib.contextmanager
    def labelling(self, component: Component) -> Iterator[None]:
        """New storages inside are this component."""
        self._labelling.append(component)
        try:
            yield
        finally:
            self._labelling.pop()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing inside is seen: it happens in host memory, or not at all on a real device."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def label(self, tensors: Iterable[Any], component: Component) -> None:
        """These storages are, and have always been, this component; unseen ones come in now."""
        for tensor in tensors:
            for storage in _storages(tensor):
                self._labels[self._number(storage, self._is_host(tensor))] = component

    def restart(self) -> None:
        """Forget the steps before: what is held now is where the step that counts begins."""
        # What only cycles still hold would be the host's or not by when the collector last ran.
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
        """Bytes that the device holds now, whatever they are."""
        return sum(self._held.values()) - self._host_bytes

    # ---- what it finds

    def moments(self) -> tuple[RehearsedMoment, ...]:
        """The peak of each part of each phase, in the order of a step."""
        found: list[RehearsedMoment] = []
        for phase, (start, stop, parts) in _PLACES.items():
            peaks = self._peaks(phase, parts)
            for index, components in enumerate(peaks):
                fraction = start + (stop - start) * (index + 1) / len(peaks)
                found.append(RehearsedMoment(phase=phase, fraction=round(fraction, 4), components=components))
        return tuple(found)

    def stage(self, number: int, num_layers: int, note: str = "") -> RehearsedStage:
        """What was seen, as one pipeline stage's answer."""
        return RehearsedStage(
            stage=number,
            num_layers=num_layers,
            moments=self.moments(),
            note=note,
            host_bytes=self.host_peak_bytes,
        )

    def _peaks(self, phase: Phase, parts: int) -> list[dict[str, int]]:
        """Bytes by component at the largest instant of each equal part of a phase's events."""
        mine = sum(index >= 0 and self._phases[index] == phase for _, _, index in self._events)
        if not mine:
            return []
        parts = min(parts, mine)
        now: dict[str, int] = {}
        best: list[tuple[int, dict[str, int]]] = [(-1, {})] * parts
        total = seen = 0
        for number, delta, index in self._events:
            if index < 0:
                # A new step: what is held is told again, event by event.
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

    # ---- how it sees

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
            # DTensor first becomes the operators on its local tensors, which come back here.
            return NotImplemented
        if function is torch.ops._c10d_functional.wait_tensor.default:
            # On fake tensors it would be a copy; on real ones it returns what it waited for.
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
        """The number of a storage, given when it is first seen."""
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
        """An event of no bytes, so that a phase in which nothing is made still has its moment."""
        self._events.append((-1, 0, len(self._phases) - 1))


_TAKES_STORAGE = frozenset({
    torch.ops.aten.set_.source_Storage,
    torch.ops.aten.set_.source_Storage_storage_offset,
})  # fmt: skip


@contextlib.contextmanager
def _unremembered(tensor: Any) -> Iterator[None]:
    """Without fake tensors' cache of answers, whose keys would hold the storages they were asked about."""
    mode = tensor.fake_mode
    before, mode.cache_enabled = mode.cache_enabled, False
    try:
        yield
    finally:
        mode.cache_enabled = before


def _storages(tensor: Any) -> list[Any]:
    """The untyped storages under a tensor, or under the tensors that a wrapper (DTensor) holds."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        parts = [getattr(tensor, name) for name in names]
        return [storage for part in parts if isinstance(part, torch.Tensor) for storage in _storages(part)]
    return [tensor.untyped_storage()]
