"""Bytes of a step's live tensors by component and phase: the measured tier of memory reports.

A dispatch mode sees every tensor that operators create. Whenever more bytes may be alive than the phase has
shown so far, and at its end, the live storages are summed, each once, by component. Parameters, gradients
and optimizer state are identified by their owner, all-gathered parameters by the framework's own report and
by the collectives they pass through, and logits by the vocabulary size. The rest are activations: tensors
saved for backward and operators' temporaries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardscope.training.optimizers.gradients import local_shard

if TYPE_CHECKING:
    from shardscope.training.engine import LiveTensors

GROWTH_FACTOR = 1.005
"""Growth of live bytes, as a factor, that triggers a new count: peaks are underestimated by at most this
share, and a long forward, in which memory grows with every operator, costs some hundred counts."""

_STAGING = ("all_gather", "allgather", "reduce_scatter", "chunk_cat", "split_with_sizes_copy")
"""Operators whose tensors are staging buffers: all-gathered parameters, gradients to be scattered."""

_BUCKETS = "buckets"
"""Kind of storages that the framework allocated and operators only write to, as in ``bucket_bytes``."""

_LIBRARY = "communication"
"""Component of storages that no operator created but operators read: copies made inside a library. gloo
clones the inputs of its reductions (ProcessGroupGloo.cpp); NCCL reads them in place."""

BytesByComponent = dict[str, int]
"""Component -> bytes."""


class Census(TorchDispatchMode):
    """Count of one step's bytes: ``begin`` starts a phase, ``phases`` has the largest count of each."""

    def __init__(
        self,
        list_live_tensors: Callable[[], LiveTensors],
        *,
        device: torch.device,
        vocab_sizes: Iterable[int],
        bucket_bytes: int = 0,
    ) -> None:
        super().__init__()
        self.phases: dict[str, BytesByComponent] = {}
        self._list_live_tensors = list_live_tensors
        self._device_type = device.type
        self._buffers = list(list_live_tensors().buffers)
        self._vocab_sizes = frozenset(vocab_sizes)
        self._bucket_bytes = bucket_bytes
        self._phase = "forward"
        self._created: dict[int, tuple[StorageWeakRef, str]] = {}
        self._sizes: dict[int, int] = {}
        self._upper_bound = 0
        """Upper bound of live bytes: assumes that nothing was freed since the last count."""
        for buffer in self._buffers:
            self._register(local_shard(buffer), "activations")
        self.update_peak("rest")

    def __torch_dispatch__(
        self,
        function: torch._ops.OpOverload[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run the operator and remember weak references to the storages that it created."""
        out = function(*args, **(kwargs or {}))
        kind = self._classify_unknown(function)
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._register(local_shard(leaf), kind)
        # Storages that pass through these collectives are gather buffers, also those that were registered
        # with another kind when they were allocated.
        if any(part in str(function) for part in _STAGING):
            for leaf in tree_leaves((args, kwargs, out)):
                if isinstance(leaf, torch.Tensor) and leaf.device.type == self._device_type:
                    storage = local_shard(leaf).untyped_storage()
                    self._created[storage._cdata] = (StorageWeakRef(storage), "gather_buffers")
        if self._upper_bound > GROWTH_FACTOR * _sum_tensor_bytes(self.phases.get(self._phase, {})):
            self.update_peak(self._phase)
        return out

    def _classify_unknown(self, function: torch._ops.OpOverload[..., object]) -> str | None:
        """Return the kind of unknown storages that ``function`` returns; None if it allocates its outputs."""
        # By the operator's schema: outputs that alias an input are not allocated by it. An unknown storage
        # among them came from outside of all operators, from the framework's C++ or from a library.
        returned_values = getattr(getattr(function, "_schema", None), "returns", ())
        aliases = [value.alias_info for value in returned_values if value.alias_info is not None]
        if not aliases:
            return None
        if self._bucket_bytes:
            return _BUCKETS
        return None if any(alias.is_write for alias in aliases) else _LIBRARY

    def _register(self, tensor: torch.Tensor, unknown: str | None) -> None:
        storage = tensor.untyped_storage()
        if storage.device.type != self._device_type:  # Offloaded to the host, or a batch on its way.
            return
        num_bytes = storage.nbytes()
        known = self._created.get(storage._cdata)
        # A view keeps the kind of its base; an address is reused only after its storage was freed.
        if known is None or known[0].expired():
            kind = unknown or ("logits" if self._is_logits(tensor) else "activations")
            self._created[storage._cdata] = (StorageWeakRef(storage), kind)
            self._sizes[storage._cdata] = 0
        # A framework may resize a storage to zero and later allocate it again (FSDP2's all-gathers).
        self._upper_bound += max(0, num_bytes - self._sizes.get(storage._cdata, 0))
        self._sizes[storage._cdata] = num_bytes

    def begin_phase(self, phase: str) -> None:
        """Start ``phase``, to which all later operators are attributed."""
        self._phase = phase

    def update_peak(self, phase: str) -> None:
        """Count the live bytes; keep the count if it is the largest of ``phase`` so far."""
        by_component = self._sum_by_component()
        self._upper_bound = _sum_tensor_bytes(by_component)
        if self._upper_bound > _sum_tensor_bytes(self.phases.get(phase, {})):
            self.phases[phase] = by_component

    def _is_logits(self, tensor: torch.Tensor) -> bool:
        """Return whether the last dimension is the vocabulary; for the head's weights it is the first."""
        return tensor.dim() > 1 and tensor.is_floating_point() and tensor.shape[-1] in self._vocab_sizes

    def _sum_by_component(self) -> BytesByComponent:
        # What has an owner counts under its owner, each storage once.
        live_tensors = self._list_live_tensors()
        gradients = [local_shard(gradient) for gradient in live_tensors.gradients]
        owned: dict[str, Iterable[torch.Tensor]] = {
            "parameters": map(local_shard, live_tensors.parameters),
            "gradients": gradients,
            "optimizer": map(local_shard, live_tensors.optimizer),
            "gather_buffers": map(local_shard, live_tensors.gathered),
        }
        seen: set[int] = set()
        by_component: BytesByComponent = {}
        for component, tensors in owned.items():
            num_bytes = 0
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if storage.device.type == self._device_type and storage._cdata not in seen:
                    seen.add(storage._cdata)
                    num_bytes += storage.nbytes()
            by_component[component] = num_bytes
        # Buckets are memory of gradients from the start, also before the first backward fills them.
        by_component["gradients"] += self._count_unseen_bucket_bytes(gradients)
        by_component["activations"] = by_component["logits"] = by_component[_LIBRARY] = 0
        # The rest of the live storages, by the kind with which they were registered. Forget the freed ones:
        # other storages will have their addresses.
        for key, (reference, kind) in list(self._created.items()):
            num_live_bytes = _read_live_bytes(reference)
            if num_live_bytes is None:
                del self._created[key]
                self._sizes.pop(key, None)
                continue
            self._sizes[key] = num_live_bytes
            if key not in seen and kind != _BUCKETS:
                by_component[kind] += num_live_bytes
        return by_component

    def _count_unseen_bucket_bytes(self, gradients: Iterable[torch.Tensor]) -> int:
        """Return the bytes of the framework's gradient buckets in which no gradient is stored at present.

        A gradient that accumulates outside of its bucket occupies memory in addition to it: both count.
        """
        if not self._bucket_bytes:
            return 0
        # A storage larger than its gradient is a bucket that several gradients are views of.
        seen: dict[int, int] = {}
        for gradient in gradients:
            storage = gradient.untyped_storage()
            if storage.nbytes() > gradient.numel() * gradient.element_size():
                seen[storage._cdata] = storage.nbytes()
        return max(0, self._bucket_bytes - sum(seen.values()))


def _sum_tensor_bytes(by_component: BytesByComponent) -> int:
    """Return the bytes that operators hold: libraries' transient copies have no formula and are excluded."""
    return sum(by_component.values()) - by_component.get(_LIBRARY, 0)


def _read_live_bytes(reference: StorageWeakRef) -> int | None:
    """Return the current bytes of a storage (0 if a framework resized it to zero); None once it is freed."""
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return None if storage is None else int(storage.nbytes())
