"""gloo process groups with one thread each: torch's default of two sometimes aborts a rank.

Both threads of a group write the name of the last finished collective into one ``std::string`` without a lock
(``ProcessGroupGloo::runLoop``, torch 2.13). Names of more than 15 characters, such as those of coalesced
all-gathers, are on the heap: one thread frees the text that the other is writing, and a later ``malloc``
aborts the rank. Two collectives in flight in one group are enough; torch's ring attention has that.

A new group is returned only when all of its ranks are connected. Otherwise a rank that destroys it at once
closes its connections, and a slower rank that is still connecting raises "Connection closed by peer".
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from torch.distributed import ProcessGroupGloo, Store, distributed_c10d
from torch.distributed.constants import default_pg_timeout
from torch.distributed.elastic.utils.store import barrier


class _SerialMeta(type):
    """Metaclass that creates real ProcessGroupGloo objects: torch looks the class up by name.

    A subclass would not do: torch tests ``isinstance(backend, ProcessGroupGloo)`` by that name (torch 2.13,
    distributed_c10d.py), and a group that comes back from C++ is of the base class.
    """

    def __call__(
        cls, store: Store, rank: int, size: int, timeout: timedelta = default_pg_timeout, **others: object
    ) -> ProcessGroupGloo:
        # torch's stub (torch 2.13, _C/_distributed_c10d.pyi) has neither this class nor this constructor.
        options = vars(ProcessGroupGloo)["_Options"]()
        options._timeout = timeout
        options._devices = _make_devices()
        options._threads = 1
        # torch 2.14 passes enable_reconfigure too. Its other constructor, of options, has it as an attribute.
        for name, value in others.items():
            setattr(options, name, value)
        group = ProcessGroupGloo(store, rank, size, options)
        # A barrier's key can be used once (elastic/utils/store.py). Each group's store has its own prefix
        # (distributed_c10d.py, _new_process_group_helper).
        barrier(store, size, "shardscope/connected", timeout.total_seconds())
        return group

    def __getattr__(cls, name: str) -> object:
        attribute: object = getattr(ProcessGroupGloo, name)
        return attribute

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, ProcessGroupGloo)


class SerialGloo(metaclass=_SerialMeta):
    """Replacement for ``ProcessGroupGloo`` in ``torch.distributed`` whose groups have a single thread."""


def use_one_thread() -> None:
    """Make ``init_process_group`` and ``new_group`` create gloo groups with one thread in this process."""
    vars(distributed_c10d)["ProcessGroupGloo"] = SerialGloo


def _make_devices() -> list[ProcessGroupGloo.Device]:
    """Return gloo devices for the interfaces in ``GLOO_SOCKET_IFNAME``, or torch's default device."""
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if not interfaces:
        return [ProcessGroupGloo.create_default_device()]
    devices = []
    for name in interfaces:
        try:
            devices.append(ProcessGroupGloo.create_device(interface=name))
        except RuntimeError:
            known = ", ".join(sorted(known for _, known in socket.if_nameindex()))
            raise ValueError(
                f"The environment variable GLOO_SOCKET_IFNAME is {name!r}; allowed: a network interface of "
                f"this machine that has an address: {known}. Nearest fix: unset it."
            ) from None  # gloo's text names its source file, which looks like a lost peer.
    return devices
