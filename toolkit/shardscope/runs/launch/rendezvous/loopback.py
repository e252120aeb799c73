"""Loopback interface, over which the ranks of one machine connect to each other."""

from __future__ import annotations

import os
import socket

ADDRESS = "127.0.0.1"
CONNECT_SECONDS = 5.0


def check_loopback() -> None:
    """Raise ``OSError``, with the fix, if this machine cannot connect to itself.

    gloo and NCCL would wait for such connections for minutes. Nothing is checked if the user has chosen
    another interface (``GLOO_SOCKET_IFNAME``).
    """
    if os.environ.get("GLOO_SOCKET_IFNAME", "lo") != "lo":
        return
    with socket.socket() as listening, socket.socket() as calling:
        calling.settimeout(CONNECT_SECONDS)
        try:
            listening.bind((ADDRESS, 0))
            listening.listen()
            calling.connect(listening.getsockname())
        except OSError as error:
            raise OSError(
                f"this machine cannot connect to itself at {ADDRESS} ({error}), but its ranks must: the "
                "loopback interface is down, or a firewall drops its packets. Nearest fix, as root: "
                "ip link set lo up"
            ) from error
