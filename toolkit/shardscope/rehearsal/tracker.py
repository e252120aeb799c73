"""Tracker of every storage of a rehearsal, from its first operator to its last reference.

Every allocation, resize and release is recorded as an event; labels belong to storages, not to events. Peaks
are computed at the end, so a tensor that is later labelled a gradient counts as one from its allocation.
(torch's own ``MemTracker`` labels immediately: a gradient is a temporary until a hook sees it.)

A real run is measured by training/accounting/census.py, which shares no code with this file: fake storages
have no address, so they are numbered here, and each is watched until it is freed. The census must not slow a
real step down: it keeps weak references by address, and counts only when there may be a new peak.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from types import TracebackType

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from shardscope.memory.report import Component, Phase
from shardscope.rehearsal.patching import patch_attributes
from shardscope.rehearsal.result import RehearsedPeak, RehearsedStage

_PHASE_SPANS: dict[Phase, tuple[float, float, int]] = {
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


class Tracker(TorchDispatchMode):
    """Bytes of all storages by component, at the peak of every part of a step."""

    def __init__(self, logit_widths: Iterable[int] = (), *, separate_host: bool = False) -> None:
        super().__init__()
        self.logit_widths = frozenset(logit_widths)
        self.separate_host = separate_host
        """Whether "cpu" means the host and "cpu:0" the device; otherwise all tensors are the device's."""
        self.host_peak_bytes = 0
        """Peak bytes of host tensors since the last :meth:`restart`."""
        # Storages have numbers of their own: the id or address of one that is freed is used again.
        self._on_host: set[int] = set()
        self._host_bytes = 0
        self._numbers: MutableMapping[torch.UntypedStorage, int] = WeakIdKeyDictionary()
        self._watchers: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes_by_number: dict[int, int] = {}
        self._labels: dict[int, Component] = {}
        self._events: list[tuple[int, int, int]] = []
        self._phases: list[Phase | None] = ["initialisation"]
        self._labelling: list[Component] = []
        self._paused = 0
        self._patches = contextlib.ExitStack()

    # ---- Phases and labels, set by the rehearsal

    @contextlib.contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Assign events inside to this phase; entered again (next micro-batch), the phase continues."""
        self._phases.append(name)
        self._record_mark()
        try:
            yield
        finally:
            # Events between two phases are recorded and belong to neither.
            self._phases.append(None)

    @contextlib.contextmanager
    def label_new_storages(self, component: Component) -> Iterator[None]:
        """Label new storages inside as this component."""
        self._labelling.append(component)
        try:
            yield
        finally:
            self._labelling.pop()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Ignore all storages inside: a real run has them in host memory or not at all."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def label(self, tensors: Iterable[torch.Tensor], component: Component) -> None:
        """Label the tensors' storages for the whole step; storages not seen before are added now."""
        for tensor in tensors:
            for storage in _list_storages(tensor):
                self._labels[self._get_number(storage, self._is_host(tensor))] = component

    def restart(self) -> None:
        """Drop the events of earlier steps: the measured step begins with the storages held now."""
        # Otherwise storages in reference cycles would be held or not depending on the collector's last run.
        gc.collect()
        # Initialization is not repeated in the measured step: its events stay, for the peak of that phase.
        first = next((i for i, phase in enumerate(self._phases) if i and phase != "initialisation"), 1)
        initialisation_events = [event for event in self._events if event[2] < first]
        # The storages that are held now are allocated again, all at once, between the two steps. The event of
        # index -1 separates them from those of initialization (_compute_phase_peaks).
        self._phases.append(None)
        boundary = len(self._phases) - 1
        held_events = [
            (number, size, boundary)
            for number, size in self._sizes_by_number.items()
            if size and number not in self._on_host
        ]
        self.host_peak_bytes = self._host_bytes
        self._events = [*initialisation_events, (-1, 0, -1), *held_events]
        # "rest" has one event, so that what is held between steps is one of the peaks.
        self._phases.append("rest")
        self._record_mark()

    @property
    def held_bytes(self) -> int:
        """Bytes that the device holds at present, all components."""
        return sum(self._sizes_by_number.values()) - self._host_bytes

    # ---- Results

    def compute_peaks(self) -> tuple[RehearsedPeak, ...]:
        """Return the peak of each part of each phase, in the step's order."""
        peaks: list[RehearsedPeak] = []
        for phase, (start, stop, parts) in _PHASE_SPANS.items():
            phase_peaks = self._compute_phase_peaks(phase, parts)
            for index, components in enumerate(phase_peaks):
                fraction = start + (stop - start) * (index + 1) / len(phase_peaks)
                peaks.append(RehearsedPeak(phase=phase, fraction=round(fraction, 4), components=components))
        return tuple(peaks)

    def build_stage(self, number: int, num_layers: int, note: str = "") -> RehearsedStage:
        """Return the recorded peaks as the result of one pipeline stage."""
        return RehearsedStage(
            stage=number,
            num_layers=num_layers,
            peaks=self.compute_peaks(),
            note=note,
            host_bytes=self.host_peak_bytes,
        )

    def _compute_phase_peaks(self, phase: Phase, parts: int) -> list[dict[str, int]]:
        """Return bytes by component at the peak of each of ``parts`` equal parts of a phase's events."""
        # Parts are equal in events, not in time, which fake tensors do not have.
        num_events = sum(index >= 0 and self._phases[index] == phase for _, _, index in self._events)
        if not num_events:
            return []
        parts = min(parts, num_events)
        # Run through all events in order, those of the other phases too: a phase begins with what is alive.
        current: dict[str, int] = {}
        peaks: list[tuple[int, dict[str, int]]] = [(-1, {})] * parts
        total = seen = 0
        for number, delta, index in self._events:
            if index < 0:
                # A new step: the events that follow repeat the storages held at its start.
                current, total = {}, 0
                continue
            component = self._labels.get(number, "activations")
            current[component] = current.get(component, 0) + delta
            total += delta
            if self._phases[index] == phase:
                part = seen * parts // num_events
                seen += 1
                if total > peaks[part][0]:
                    peaks[part] = (total, dict(current))
        return [{name: size for name, size in components.items() if size} for _, components in peaks]

    # ---- Interception of operators and of ``resize_``

    def __enter__(self) -> Tracker:
        # Frameworks empty and refill storages by resize_, which is a method and no operator: FSDP2 frees its
        # all-gathered parameters so (torch 2.13, fully_shard/_fsdp_param.py, free_storage).
        original = torch.UntypedStorage.resize_

        def resize_tracked(storage: torch.UntypedStorage, size: int) -> object:
            result = original(storage, size)
            number = self._numbers.get(storage)
            if number is not None:
                self._record_change(number, storage.size() - self._sizes_by_number[number])
            return result

        self._patches.enter_context(patch_attributes([(torch.UntypedStorage, "resize_", resize_tracked)]))
        self._patches.enter_context(_disable_collector())
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._patches.close()
        super().__exit__(kind, error, traceback)

    def __torch_dispatch__(
        self,
        function: torch._ops.OpOverload[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if any(issubclass(kind, DTensor) for kind in types):
            # DTensor then dispatches the operators on its local tensors, which arrive here.
            return NotImplemented
        if function is torch.ops._c10d_functional.wait_tensor.default:
            # On fake tensors it copies; on real ones it returns its argument.
            return args[0]
        with _disable_fake_cache(args[0]) if function in _TAKES_STORAGE else contextlib.nullcontext():
            out = function(*args, **(kwargs or {}))
        if not self._paused:
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    self.register_new_storages(leaf)
        return out

    def register_new_storages(self, tensor: torch.Tensor) -> None:
        """Count the storages of ``tensor`` that are not counted yet, except on the meta device."""
        if tensor.device.type == "meta":
            return
        for storage in _list_storages(tensor):
            if self._numbers.get(storage) is None:
                self._labels[self._get_number(storage, self._is_host(tensor))] = self._guess_label(tensor)

    def _is_host(self, tensor: torch.Tensor) -> bool:
        return self.separate_host and tensor.device.index is None

    def _guess_label(self, tensor: torch.Tensor) -> Component:
        if self._labelling:
            return self._labelling[-1]
        # Weights of the head have the vocabulary as their first dimension, logits as their last one.
        phase = self._now
        if phase in ("forward", "backward") and tensor.ndim > 1 and tensor.shape[-1] in self.logit_widths:
            return "logits"
        return DEFAULTS[phase]

    @property
    def _now(self) -> Phase:
        return self._phases[-1] or "rest"

    def _get_number(self, storage: torch.UntypedStorage, on_host: bool) -> int:
        """Return the number of a storage; register it if it is new."""
        number = self._numbers.get(storage)
        if number is None:
            number = len(self._labels)
            self._numbers[storage] = number
            if on_host:
                self._on_host.add(number)
            self._labels[number] = DEFAULTS[self._now]
            self._sizes_by_number[number] = 0
            # torch keeps a storage's Python object alive as long as any tensor uses it, so that the callback
            # runs when the memory is freed.
            self._watchers[number] = weakref.ref(storage, partial(self._record_free, number))
            self._record_change(number, storage.size())
        return number

    def _record_free(self, number: int, _: object = None) -> None:
        self._record_change(number, -self._sizes_by_number.pop(number, 0), gone=True)
        self._watchers.pop(number, None)

    def _record_change(self, number: int, delta: int, gone: bool = False) -> None:
        if not gone:
            self._sizes_by_number[number] += delta
        if number in self._on_host:
            self._host_bytes += delta
            self.host_peak_bytes = max(self.host_peak_bytes, self._host_bytes)
        elif delta:
            self._events.append((number, delta, len(self._phases) - 1))

    def _record_mark(self) -> None:
        """Record an event of 0 bytes, so that a phase without allocations has a peak too."""
        self._events.append((-1, 0, len(self._phases) - 1))


@contextlib.contextmanager
def _disable_collector() -> Iterator[None]:
    """Disable Python's cyclic garbage collector, which runs after a number of allocations by the process.

    Storages in reference cycles would be freed at a moment that depends on what the process did before.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_TAKES_STORAGE = frozenset({
    torch.ops.aten.set_.source_Storage,
    torch.ops.aten.set_.source_Storage_storage_offset,
})  # fmt: skip


@contextlib.contextmanager
def _disable_fake_cache(tensor: object) -> Iterator[None]:
    """Disable the fake tensor cache of ``tensor``'s mode, whose keys would keep storages alive."""
    assert isinstance(tensor, FakeTensor)
    mode = tensor.fake_mode
    was_enabled, mode.cache_enabled = mode.cache_enabled, False
    try:
        yield
    finally:
        mode.cache_enabled = was_enabled


def _list_storages(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Return the untyped storages of a tensor, or of the inner tensors of a wrapper (DTensor)."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        parts = [getattr(tensor, name) for name in names]
        return [
            storage for part in parts if isinstance(part, torch.Tensor) for storage in _list_storages(part)
        ]
    return [tensor.untyped_storage()]
