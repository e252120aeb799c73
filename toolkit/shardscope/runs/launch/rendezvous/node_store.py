"""Rendezvous of the ranks of several nodes: a ``TCPStore`` that the launcher of node 0 serves.

It listens on node 0's address only, on a port that was free. ``TCPStore`` has no authentication
(torch/csrc/distributed/c10d/TCPStore.cpp, torch 2.13): every host that reaches this address and port can read
and write the ranks' rendezvous data. ``local_store.py`` has the rendezvous within one machine, which needs no
port.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from shardscope.records.folder import NodeFolder
from shardscope.records.json_files import read_json, write_json
from shardscope.runs.launch.commands import NUM_SLOTS, PollTable
from shardscope.runs.launch.rendezvous.local_store import TIMEOUT_SECONDS, RendezvousFiles

BACKEND = "shardscope-nodes"
"""Name of the rendezvous backend registered with torch elastic."""
POLL_SECONDS = 0.1
NUM_DONE = "shardscope/nodes-done"


class Endpoint(NamedTuple):
    """Address and port of a run's store."""

    address: str
    port: int


class NodeRendezvous:
    """Rendezvous of several nodes: the store of all ranks, and the files that the ranks of one node share.

    It has the methods of :class:`RendezvousFiles`, so ranks use both in the same way.
    """

    def __init__(self, folder: NodeFolder, temporary: Path) -> None:
        """Serve the store on node 0, or wait until node 0 does. Raises ``OSError``, ``TimeoutError``."""
        self._local = RendezvousFiles(temporary)
        self._num_nodes = folder.num_nodes
        self._server = _serve_store(folder) if folder.node == 0 else None
        self.endpoint = _wait_for_endpoint(folder)

    def connect(self) -> Store:
        """Return a new client of the store."""
        timeout = timedelta(seconds=TIMEOUT_SECONDS)
        return TCPStore(*self.endpoint, timeout=timeout, wait_for_workers=False)

    def open_poll_table(self) -> PollTable:
        """Return this rank's view of the decisions at each poll, on which all nodes agree."""
        store = self.connect()

        def agree_with_nodes(poll: int, size: int) -> int:
            # Called by the first rank of a node at each poll; the first node decides.
            decided = int(store.compare_set(f"shardscope/poll/{poll}", "", str(size)))
            store.delete_key(f"shardscope/poll/{poll - NUM_SLOTS}")
            return decided

        return self._local.open_poll_table(agree_with_nodes)

    def wait_for_nodes(self) -> None:
        """On node 0, serve the store until the task has returned on every node; on others, return at once.

        Until then other nodes' ranks may read it. If one never returns, this node's supervisor ends this
        process.
        """
        store = self.connect()
        store.add(NUM_DONE, 1)
        while self._server is not None and store.add(NUM_DONE, 0) < self._num_nodes:
            time.sleep(POLL_SECONDS)


def _serve_store(folder: NodeFolder) -> TCPStore:
    """Serve the store on this node's own address and a free port, and write both. Raises ``OSError``."""
    address = str((read_json(folder.node_json) or {}).get("address"))
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # Without a socket of ours TCPStore would listen on all interfaces.
    listening = socket.socket(family)
    listening.bind((address, 0))
    listening.listen()
    port = int(listening.getsockname()[1])
    store = TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
        master_listen_fd=listening.detach(),
    )
    write_json(folder.rendezvous, {"address": address, "port": port}, as_is=("address",))
    return store


def _wait_for_endpoint(folder: NodeFolder) -> Endpoint:
    path = folder.create_peer(0).rendezvous
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while (record := read_json(path)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"node 0 wrote no {path.name} within {TIMEOUT_SECONDS} s.")
        time.sleep(POLL_SECONDS)
    address, port = record.get("address"), record.get("port")
    assert isinstance(address, str) and isinstance(port, int)
    return Endpoint(address, port)


class AgentRendezvous(StaticTCPRendezvous):
    """torch's static rendezvous of one agent per node, on the store that the launcher of node 0 serves."""

    @property
    def use_agent_store(self) -> bool:
        """Always False: ranks get the store from :class:`NodeRendezvous`."""
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        if not self._store:
            self._store = TCPStore(
                self.master_addr, self.master_port, timeout=self.timeout, wait_for_workers=False
            )
        return RendezvousInfo(
            # Not the store's own namespace: the ranks use that.
            PrefixStore("shardscope/agents", self._store),
            self.rank,
            self.world_size,
            RendezvousStoreInfo(self.master_addr, self.master_port),
        )

    def get_backend(self) -> str:
        return BACKEND


def register_rendezvous(node: int) -> None:
    """Register :data:`BACKEND` with torch elastic in this process, which is the agent of ``node``."""

    def make_rendezvous(parameters: RendezvousParameters) -> AgentRendezvous:
        address, port = parse_rendezvous_endpoint(parameters.endpoint, -1)
        nodes = parameters.max_nodes
        return AgentRendezvous(address, port, node, nodes, parameters.run_id, timeout=TIMEOUT_SECONDS)

    rendezvous_handler_registry.register(BACKEND, make_rendezvous)
