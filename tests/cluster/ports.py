"""Free ports for the daemons of a cluster, which bind them seconds later."""

from __future__ import annotations

import random
import socket

PORTS = range(20000, 32000)
"""Below Linux's ephemeral ports (32768 and up), one of which any outgoing connection may take meanwhile, and
above those of Ray's workers."""


def find_free_ports(count: int) -> list[int]:
    """Return ``count`` different ports that nobody listens on now."""
    found: list[int] = []
    # Seeded by the system: other processes of the tests choose other ones.
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"fewer than {count} of the ports {PORTS[0]} to {PORTS[-1]} are free")
