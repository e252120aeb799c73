"""torch's key-value store for the ranks of one machine, which no other user of the machine can reach.

``TCPStore`` has no authentication (torch/csrc/distributed/c10d/TCPStore.cpp, torch 2.13): everybody who
connects to its port reads and writes what the ranks agree on, and on the loopback interface that is every
local user. So no process of a run serves one. Ranks meet in a ``FileStore`` whose file is private memory of
the launcher, which they inherit; torch elastic's agent, alone in its process, has a ``HashStore``.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

from torch.distributed import FileStore, HashStore, PrefixStore, Store
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from shardscope.records.private_file import open_private_file
from shardscope.runs.launch.commands import PollTable

BACKEND = "shardscope-local"
"""The name under which torch elastic finds the rendezvous below."""
TIMEOUT_SECONDS = 600
"""What torch's own static rendezvous takes."""


class MeetingPlace:
    """What the ranks of one machine share; made by the process that they are forked from."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is used where there is no anonymous memory. Raises ``OSError``."""
        # Both descriptors stay open as long as this process and the ranks: the paths lead to them.
        _, self._store_path = open_private_file(folder)
        table, self._table_path = open_private_file(folder)
        PollTable.make_room(table)

    def connect(self) -> Store:
        """Return a new client of the ranks' store."""
        # Without a number of workers no client deletes the file (FileStore.cpp, ~FileStore).
        store = FileStore(self._store_path)
        store.set_timeout(timedelta(seconds=TIMEOUT_SECONDS))
        return store

    def open_poll_table(self) -> PollTable:
        """Return this rank's view of what was agreed on at each look for commands."""
        return PollTable(self._table_path)


def use_for_env_rendezvous(place: MeetingPlace) -> None:
    """Make ``init_process_group`` of ``env://`` in this rank meet in ``place`` instead of a ``TCPStore``.

    Frameworks use the group that is up; this is for code that ends that group and makes another one. torch
    keeps its handlers in ``_rendezvous_handlers`` (torch/distributed/rendezvous.py, torch 2.13) and refuses
    to register a scheme twice. A variable that such code changed means other processes than these ranks:
    then torch's own handler serves it.
    """
    # The package has a function of the same name: "import ... as" would find that.
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    of_torch = handlers["env"]
    ours = _group_variables()
    number = itertools.count()

    def meet(url: str, **options: Any) -> Iterator[tuple[Store, int, int]]:
        asked = {name: int(values[0]) for name, values in parse_qs(urlparse(url).query).items()}
        world_size = asked.get("world_size", int(os.environ["WORLD_SIZE"]))
        if _group_variables() != ours or world_size != int(os.environ["WORLD_SIZE"]):
            yield from of_torch(url, **options)
            return
        # Every group has keys of its own: those of the one before are still there.
        store = PrefixStore(f"shardscope/env/{next(number)}", place.connect())
        yield store, asked.get("rank", int(os.environ["RANK"])), world_size

    handlers["env"] = meet


def _group_variables() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")}


class LocalRendezvous(StaticTCPRendezvous):  # type: ignore[misc]
    """torch's static rendezvous, of one agent that talks to nobody.

    The address and the port only name the run for frameworks that read ``MASTER_ADDR`` and ``MASTER_PORT``.
    """

    @property
    def use_agent_store(self) -> bool:
        """False: the agent serves no store that ranks could connect to."""
        return False

    def next_rendezvous(self) -> Any:
        if not self._store:  # type: ignore[has-type]
            self._store = HashStore()
        return super().next_rendezvous()

    def get_backend(self) -> str:
        return BACKEND


def register_rendezvous() -> None:
    """Make :data:`BACKEND` known to torch elastic in this process."""
    rendezvous_handler_registry.register(BACKEND, _rendezvous)


def _rendezvous(parameters: RendezvousParameters) -> LocalRendezvous:
    address, port = parse_rendezvous_endpoint(parameters.endpoint, -1)
    return LocalRendezvous(address, port, 0, parameters.max_nodes, parameters.run_id, timeout=TIMEOUT_SECONDS)
