"""Rendezvous store for the ranks of one machine that no other user of the machine can access.

``TCPStore`` has no authentication (torch/csrc/distributed/c10d/TCPStore.cpp, torch 2.13): every process that
connects to its port can read and write the ranks' data, and every local user can connect to the loopback
interface. So no process of a run serves one. Ranks use a ``FileStore`` whose file is anonymous memory of the
launcher, which they inherit; torch elastic's agent, a single process, uses a ``HashStore``.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Protocol
from urllib.parse import parse_qs, urlparse

from torch.distributed import FileStore, HashStore, PrefixStore, Store
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from shardscope.records.private_file import open_private_file
from shardscope.runs.launch.commands import PollTable

BACKEND = "shardscope-local"
"""Name of the rendezvous backend registered with torch elastic."""
TIMEOUT_SECONDS = 600
"""Timeout of torch's own static rendezvous."""


class RendezvousFiles:
    """The files shared by the ranks of one machine, created by the process from which they fork."""

    def __init__(self, folder: Path) -> None:
        """Create the files, in ``folder`` if the system has no anonymous memory. Raises ``OSError``."""
        # Both descriptors stay open in this process and in the ranks: the paths refer to them.
        _, self._store_path = open_private_file(folder)
        table, self._table_path = open_private_file(folder)
        PollTable.allocate(table)

    def connect(self) -> Store:
        """Return a new client of the ranks' store."""
        # Without a world size no client deletes the file (FileStore.cpp, ~FileStore).
        store = FileStore(self._store_path)
        store.set_timeout(timedelta(seconds=TIMEOUT_SECONDS))
        return store

    def open_poll_table(self, agree_with_nodes: Callable[[int, int], int] | None = None) -> PollTable:
        """Return this rank's view of the decisions at each poll for commands."""
        return PollTable(self._table_path, agree_with_nodes)

    def wait_for_nodes(self) -> None:
        """Return: there is one node. ``NodeRendezvous`` waits."""


class Rendezvous(Protocol):
    """Rendezvous of a run's ranks: :class:`RendezvousFiles`, or ``NodeRendezvous`` on several nodes."""

    def connect(self) -> Store:
        """Return a new client of the ranks' store."""

    def open_poll_table(self) -> PollTable:
        """Return this rank's view of the decisions at each poll for commands."""

    def wait_for_nodes(self) -> None:
        """Wait until the task has returned on every node, if this process serves the store."""


def use_for_env_rendezvous(files: Rendezvous) -> None:
    """Make ``init_process_group`` with ``env://`` use ``files`` in this rank instead of a ``TCPStore``.

    Frameworks use the existing group; this is for code that destroys it and initializes another one. torch
    keeps its handlers in ``_rendezvous_handlers`` (torch/distributed/rendezvous.py, torch 2.13) and does not
    allow registering a scheme twice. If the code has changed one of the variables, it means a group of other
    processes than these ranks, and torch's own handler is used.
    """
    # importlib, because the package has a function of the same name that "import ... as" would return.
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    torch_handler = handlers["env"]
    # The values at the start of the rank, which stand for the group of all ranks.
    variables = _read_group_variables()
    number = itertools.count()

    def rendezvous_locally(url: str, **options: object) -> Iterator[tuple[Store, int, int]]:
        # torch puts rank and world size into the query (rendezvous.py, _rendezvous_helper), unless unknown.
        query = {name: int(values[0]) for name, values in parse_qs(urlparse(url).query).items()}
        world_size = query.get("world_size", int(os.environ["WORLD_SIZE"]))
        if _read_group_variables() != variables or world_size != int(os.environ["WORLD_SIZE"]):
            yield from torch_handler(url, **options)
            return
        # Each group needs its own key prefix: the keys of the previous group still exist.
        store = PrefixStore(f"shardscope/env/{next(number)}", files.connect())
        yield store, query.get("rank", int(os.environ["RANK"])), world_size

    handlers["env"] = rendezvous_locally


def _read_group_variables() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")}


class LocalRendezvous(StaticTCPRendezvous):
    """torch's static rendezvous for a single agent, without network communication.

    Address and port are only values for frameworks that read ``MASTER_ADDR`` and ``MASTER_PORT``.
    """

    @property
    def use_agent_store(self) -> bool:
        """Always False: the agent serves no store to its ranks."""
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        if not self._store:
            self._store = HashStore()
        return super().next_rendezvous()

    def get_backend(self) -> str:
        return BACKEND


def register_rendezvous() -> None:
    """Register :data:`BACKEND` with torch elastic in this process."""
    rendezvous_handler_registry.register(BACKEND, _make_rendezvous)


def _make_rendezvous(parameters: RendezvousParameters) -> LocalRendezvous:
    address, port = parse_rendezvous_endpoint(parameters.endpoint, -1)
    return LocalRendezvous(address, port, 0, parameters.max_nodes, parameters.run_id, timeout=TIMEOUT_SECONDS)
