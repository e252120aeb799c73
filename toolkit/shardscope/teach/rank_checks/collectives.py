"""Collectives that the learner's code calls: counted, and described in a sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NOT_COLLECTIVE = ("barrier", "wait_tensor", "wrap_tensor", "monitored_barrier", "work")
"""Beginnings of operators that send no tensor; functional collectives wait for their result and wrap it."""


class Call(NamedTuple):
    """One collective call."""

    name: str
    """``allreduce``, ``allgather``, ``reduce_scatter``, ``broadcast``, ..."""
    num_bytes: int
    """Bytes of the whole vector: the larger of what goes in and what comes out."""


class CollectiveCounter(TorchDispatchMode):
    """List of the collectives of everything that runs inside it, backward included."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.first_sent: torch.Tensor | None = None
        """The numbers that went into the first collective, as one flat tensor."""

    def __torch_dispatch__(
        self,
        function: torch._ops.OpOverload[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run the operator, and note it if it is a collective."""
        space, _, name = function.name().partition("::")
        is_collective = "c10d" in space and not name.strip("_").startswith(NOT_COLLECTIVE)
        if is_collective and not self.calls:
            # Cloned before the call, which may write into its arguments.
            sent = [leaf.detach().flatten() for leaf in tree_leaves(args) if torch.is_tensor(leaf)]
            self.first_sent = torch.cat(sent).clone() if sent else None
        result = function(*args, **(kwargs or {}))
        if is_collective:
            # Functional collectives return what they receive; others write into their arguments.
            sizes = [
                sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(one) if torch.is_tensor(leaf))
                for one in (*args, result)
            ]
            self.calls.append(Call(_shorten_name(name), max(sizes, default=0)))
        return result


def _shorten_name(name: str) -> str:
    """Return one word for all operators of a collective: ``_allgather_base_`` is ``allgather``."""
    plain = name.partition(".")[0].replace("all_", "all")
    for kind in ("allreduce", "allgather", "reduce_scatter", "alltoall", "broadcast", "reduce", "gather"):
        if kind in plain:
            return kind
    return plain.strip("_")


def describe_calls(calls: Sequence[Call]) -> str:
    """Return the collectives with their numbers and bytes: "3 allreduce (25,344 bytes)"."""
    numbers = Counter(call.name for call in calls)
    parts = []
    for name, number in numbers.items():
        num_bytes = sum(call.num_bytes for call in calls if call.name == name)
        parts.append(f"{number} {name} ({num_bytes:,} bytes)")
    return ", ".join(parts) or "no collective"
