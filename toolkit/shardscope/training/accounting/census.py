"""What a step's tensors are, by component and phase: counted on one step, for the measured tier of memory.

A dispatch mode sees every tensor that operators make. Whenever more may be alive than a phase has shown yet,
and at its end, those still alive are weighed, each storage once, and told apart: parameters, gradients and
optimizer state by whose they are, gathered parameters by what the framework says it holds and by the
collectives they pass, logits by their vocabulary, and the rest, which is what forward leaves for backward and
what operators have in hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardscope.training.optimizers.gradients import local

if TYPE_CHECKING:
    from shardscope.training.engine import HeldTensors

NEWS = 1.005
"""How much more there may be than was seen until somebody looks: a peak is missed by this share at most, and
a long forward, which grows with every operator, costs some hundred looks."""

_STAGING = ("all_gather", "allgather", "reduce_scatter", "chunk_cat", "split_with_sizes_copy")
"""Operators whose inputs and outputs are staging: what is gathered, and gradients on their way to shards."""

_BUCKETS = "buckets"
"""Kind of storages that a framework made itself and operators only write to: ``bucket_bytes`` counts them."""

_LIBRARY = "communication"
"""Component of storages that no operator made, and operators look at: a library's own copies. gloo clones
what it reduces and scatters (ProcessGroupGloo.cpp); NCCL reads it in place."""

Weighed = dict[str, int]
"""Component -> bytes."""


class Census(TorchDispatchMode):  # type: ignore[misc]
    """Goes around one step; ``begin`` starts a phase, and ``phases`` has the fullest look of each."""

    def __init__(
        self,
        held: Callable[[], HeldTensors],
        *,
        vocab_sizes: Iterable[int],
        bucket_bytes: int = 0,
    ) -> None:
        super().__init__()
        self.phases: dict[str, Weighed] = {}
        self._held = held
        self._buffers = list(held().buffers)
        self._vocab_sizes = frozenset(vocab_sizes)
        self._bucket_bytes = bucket_bytes
        self._phase = "forward"
        self._made: dict[int, tuple[StorageWeakRef, str]] = {}
        self._sizes: dict[int, int] = {}
        self._at_most = 0
        """What is alive if nothing was freed since the last look."""
        for buffer in self._buffers:
            self._remember(local(buffer), "activations")
        self.look("rest")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and remember, without holding them, the tensors that it made."""
        out = function(*args, **(kwargs or {}))
        kind = self._kind_of_unknown(function)
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._remember(local(leaf), kind)
        if any(part in str(function) for part in _STAGING):
            for leaf in tree_leaves((args, kwargs, out)):
                if isinstance(leaf, torch.Tensor):
                    storage = local(leaf).untyped_storage()
                    self._made[storage._cdata] = (StorageWeakRef(storage), "gather_buffers")
        if self._at_most > NEWS * _of_torch(self.phases.get(self._phase, {})):
            self.look(self._phase)
        return out

    def _kind_of_unknown(self, function: Any) -> str | None:
        """What a storage is that ``function`` gives and nobody saw being made; None: it makes its own."""
        returns = getattr(getattr(function, "_schema", None), "returns", ())
        aliases = [found.alias_info for found in returns if found.alias_info is not None]
        if not aliases:
            return None
        if self._bucket_bytes:
            return _BUCKETS
        return None if any(alias.is_write for alias in aliases) else _LIBRARY

    def _remember(self, tensor: torch.Tensor, unknown: str | None) -> None:
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        known = self._made.get(storage._cdata)
        # A view is what it is a view of; only the address of a freed storage may be used again.
        if known is None or known[0].expired():
            kind = unknown or ("logits" if self._is_logits(tensor) else "activations")
            self._made[storage._cdata] = (StorageWeakRef(storage), kind)
            self._sizes[storage._cdata] = 0
        # A framework may fill again what it had emptied.
        self._at_most += max(0, num_bytes - self._sizes.get(storage._cdata, 0))
        self._sizes[storage._cdata] = num_bytes

    def begin(self, phase: str) -> None:
        """What comes next belongs to ``phase``."""
        self._phase = phase

    def look(self, phase: str) -> None:
        """Weigh what is alive; keep it if it is the most that this phase has shown."""
        weighed = self._weigh()
        self._at_most = _of_torch(weighed)
        if self._at_most > _of_torch(self.phases.get(phase, {})):
            self.phases[phase] = weighed

    def _is_logits(self, tensor: torch.Tensor) -> bool:
        """A score for each word and token; the head's weights are as long, not as wide."""
        return tensor.dim() > 1 and tensor.is_floating_point() and tensor.shape[-1] in self._vocab_sizes

    def _weigh(self) -> Weighed:
        held = self._held()
        gradients = [local(gradient) for gradient in held.gradients]
        owned: dict[str, Iterable[torch.Tensor]] = {
            "parameters": map(local, held.parameters),
            "gradients": gradients,
            "optimizer": map(local, held.optimizer),
            "gather_buffers": map(local, held.gathered),
        }
        seen: set[int] = set()
        weighed: Weighed = {}
        for component, tensors in owned.items():
            num_bytes = 0
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if storage._cdata not in seen:
                    seen.add(storage._cdata)
                    num_bytes += storage.nbytes()
            weighed[component] = num_bytes
        weighed["gradients"] += self._unseen_buckets(gradients)
        weighed["activations"] = weighed["logits"] = weighed[_LIBRARY] = 0
        for key, (weak, kind) in list(self._made.items()):
            alive = _alive_bytes(weak)
            if alive is None:
                del self._made[key]
                self._sizes.pop(key, None)
                continue
            self._sizes[key] = alive
            if key not in seen and kind != _BUCKETS:
                weighed[kind] += alive
        return weighed

    def _unseen_buckets(self, gradients: Iterable[torch.Tensor]) -> int:
        """Bytes of a framework's gradient buffers in which no gradient lies just now.

        A gradient that accumulates outside of its buffer is held beside it, so both count.
        """
        if not self._bucket_bytes:
            return 0
        seen: dict[int, int] = {}
        for gradient in gradients:
            storage = gradient.untyped_storage()
            if storage.nbytes() > gradient.numel() * gradient.element_size():
                seen[storage._cdata] = storage.nbytes()
        return max(0, self._bucket_bytes - sum(seen.values()))


def _of_torch(weighed: Weighed) -> int:
    """What operators hold: a library's copies come and go beside it, and no formula is about them."""
    return sum(weighed.values()) - weighed.get(_LIBRARY, 0)


def _alive_bytes(weak: StorageWeakRef) -> int | None:
    """Bytes of a storage now (a framework may have emptied it); None once it is gone."""
    storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
    return None if storage is None else int(storage.nbytes())
