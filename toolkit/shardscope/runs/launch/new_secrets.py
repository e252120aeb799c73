"""Transfer of secrets that a task puts into ``os.environ`` to the supervisor, which masks them in logs.

They are sent through a pipe that the launcher and the ranks inherit, so they are never on disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys

from shardscope.records.redaction import known_secrets, learn_secret, secret_values

PART_CHARACTERS = 300
"""Maximum length of a line's secret; a longer secret is split and each part masked by itself. Writes of at
most PIPE_BUF bytes are atomic (pipe(7)), and JSON needs up to twelve bytes per character."""


def send_new_secrets(pipe: int) -> None:
    """Install a hook that writes secrets set in the environment to ``pipe``, in this process and its forks.

    Python raises an audit event for ``os.environ[...] = ...`` and ``os.putenv``; variables that a native
    library sets are not seen.
    """
    os.set_inheritable(pipe, False)  # Programs started by the task do not need it.
    os.set_blocking(pipe, False)  # A killed or stopped supervisor must not block the task.

    def send_from_event(event: str, arguments: tuple[object, ...]) -> None:
        if event == "os.putenv":
            with contextlib.suppress(Exception):
                name, value = (os.fsdecode(item) for item in arguments if isinstance(item, str | bytes))
                for secret in secret_values({name: value}):
                    _send_secret(pipe, secret)

    sys.addaudithook(send_from_event)


def _send_secret(pipe: int, secret: str) -> None:
    starts = range(0, max(1, len(secret) - PART_CHARACTERS), PART_CHARACTERS)
    parts = [secret[start : start + PART_CHARACTERS] for start in starts]
    if len(secret) > PART_CHARACTERS:
        parts.append(secret[-PART_CHARACTERS:])  # A full-length part: a short rest would not be masked.
    for part in parts:
        learn_secret(part)  # In this process as well: the variable may be deleted again.
        os.write(pipe, json.dumps(part).encode() + b"\n")


class SecretReceiver:
    """The supervisor's end of the pipe."""

    def __init__(self) -> None:
        self._pipe, self._for_launcher = os.pipe()
        os.set_blocking(self._pipe, False)
        self._rest = b""

    @property
    def for_launcher(self) -> int:
        """The write end, inherited by the launcher; :meth:`close_write_end` closes it here."""
        return self._for_launcher

    def close_write_end(self) -> None:
        """Close the write end in this process, once the launcher has inherited it."""
        os.close(self._for_launcher)

    def read_secrets(self) -> list[str]:
        """Return all known secrets, including those sent so far."""
        with contextlib.suppress(OSError):  # BlockingIOError: the pipe is empty and still open.
            while data := os.read(self._pipe, 2**16):
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    with contextlib.suppress(ValueError):
                        learn_secret(str(json.loads(line)))
        return known_secrets()
