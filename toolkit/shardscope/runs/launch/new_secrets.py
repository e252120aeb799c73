"""Secrets that a task puts into ``os.environ``, which the supervisor learns so as to mask them in logs.

They go through a pipe that the launcher and the ranks inherit, so they are in memory only.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

from shardscope.records.redaction import known_secrets, learn_secret, secret_values

PART_CHARACTERS = 300
"""Of a longer secret each part is masked for itself: a line of at most PIPE_BUF bytes is written as a whole
(pipe(7)), also where JSON needs twelve for a character."""


def send_new_secrets(pipe: int) -> None:
    """Write to ``pipe`` from now on what this process, and those forked from it, put into the environment.

    Python reports that as an audit event, for ``os.environ[...] = ...`` and ``os.putenv`` alike; what a
    native library sets by itself is not seen.
    """
    os.set_inheritable(pipe, False)  # Programs that a task starts need no such thing.
    os.set_blocking(pipe, False)  # A supervisor that was killed or halted holds nobody up.

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.putenv":
            with contextlib.suppress(Exception):
                name, value = map(os.fsdecode, arguments)
                for secret in secret_values({name: value}):
                    _send(pipe, secret)

    sys.addaudithook(hear)


def _send(pipe: int, secret: str) -> None:
    starts = range(0, max(1, len(secret) - PART_CHARACTERS), PART_CHARACTERS)
    parts = [secret[start : start + PART_CHARACTERS] for start in starts]
    if len(secret) > PART_CHARACTERS:
        parts.append(secret[-PART_CHARACTERS:])  # Never too short to be one.
    for part in parts:
        learn_secret(part)  # Here as well: it may be taken out of the environment again.
        os.write(pipe, json.dumps(part).encode() + b"\n")


class SecretReceiver:
    """The supervisor's end of that pipe."""

    def __init__(self) -> None:
        self._pipe, self._for_launcher = os.pipe()
        os.set_blocking(self._pipe, False)
        self._rest = b""

    @property
    def for_launcher(self) -> int:
        """The end that the launcher inherits; :meth:`keep_reading_end` closes it here."""
        return self._for_launcher

    def keep_reading_end(self) -> None:
        """Close the other end, once the launcher has it."""
        os.close(self._for_launcher)

    def secrets(self) -> list[str]:
        """Return all known secrets, those that were sent up to now included."""
        with contextlib.suppress(OSError):  # Nothing new, and somebody holds the other end.
            while data := os.read(self._pipe, 2**16):
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    with contextlib.suppress(ValueError):
                        learn_secret(str(json.loads(line)))
        return known_secrets()
