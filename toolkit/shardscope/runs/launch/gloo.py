"""gloo's process groups with one thread each; with torch's two, ranks abort now and then.

Both threads of a group write the name of the collective that they ended last into one ``std::string``,
without a lock (``ProcessGroupGloo::runLoop``, torch 2.13). Names of more than 15 characters, as coalesced
gathers have, lie on the heap: one thread frees the text that the other is writing, and a later ``malloc``
aborts the rank. Two collectives in flight in one group are enough: torch's ring attention does that.

A group is handed out once all its ranks have theirs. A rank that leaves a new group at once closes its
connections, and a slower rank, woken only then, raises "Connection closed by peer" while it still connects.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroupGloo, Store, distributed_c10d
from torch.distributed.constants import default_pg_timeout
from torch.distributed.elastic.utils.store import barrier


class _Serial(type):
    """Makes and recognises ProcessGroupGloo's own objects: torch asks for their class by name."""

    def __call__(cls, store: Store, rank: int, size: int, timeout: timedelta = default_pg_timeout) -> Any:
        options = ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = _devices()
        options._threads = 1
        group = ProcessGroupGloo(store, rank, size, options)
        barrier(store, size, "shardscope/connected", timeout.total_seconds())
        return group

    def __getattr__(cls, name: str) -> Any:
        return getattr(ProcessGroupGloo, name)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, ProcessGroupGloo)


class SerialGloo(metaclass=_Serial):
    """``ProcessGroupGloo`` as ``torch.distributed`` calls it; collectives end in the order they began in."""


def use_one_thread() -> None:
    """From now on every gloo group of ``init_process_group`` and ``new_group`` in this process has one."""
    distributed_c10d.ProcessGroupGloo = SerialGloo


def _devices() -> list[Any]:
    """Those of the interfaces that ``GLOO_SOCKET_IFNAME`` names, or torch's default, as torch takes them."""
    named = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if not named:
        return [ProcessGroupGloo.create_default_device()]
    return [ProcessGroupGloo.create_device(interface=name) for name in named]
