"""torch's key-value store, listening on this machine only.

``TCPStore`` listens on every interface, whatever host it is given, and anyone who reaches its port can read
and write what the ranks agree on. It does take a socket that is listening already.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

ADDRESS = "127.0.0.1"
BACKEND = "shardscope-loopback"
"""The name under which torch elastic finds the rendezvous below."""
TIMEOUT_SECONDS = 600
"""What torch's own static rendezvous takes."""


def serve_store(port: int, world_size: int) -> TCPStore:
    """A store that serves this process and its ranks. Raises ``OSError`` if the port is taken."""
    listening = socket.socket()
    try:
        # As torch does: the connections of a run that just ended must not keep the port.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((ADDRESS, port))
        listening.listen()
    except OSError:
        listening.close()
        raise
    return TCPStore(
        ADDRESS,
        port,
        world_size,
        is_master=True,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listening.detach(),  # The store closes it.
    )


class LoopbackRendezvous(StaticTCPRendezvous):  # type: ignore[misc]
    """torch's static rendezvous of one node, over that store."""

    def next_rendezvous(self) -> Any:
        if not self._store:  # type: ignore[has-type]
            self._store = serve_store(self.master_port, self.world_size)
        return super().next_rendezvous()

    def get_backend(self) -> str:
        return BACKEND


def register_rendezvous() -> None:
    """Make :data:`BACKEND` known to torch elastic in this process."""
    rendezvous_handler_registry.register(BACKEND, _rendezvous)


def _rendezvous(parameters: RendezvousParameters) -> LoopbackRendezvous:
    address, port = parse_rendezvous_endpoint(parameters.endpoint, -1)
    return LoopbackRendezvous(
        address, port, 0, parameters.max_nodes, parameters.run_id, timeout=TIMEOUT_SECONDS
    )
