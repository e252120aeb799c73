"""Host memory of a rank while something runs, as Linux reports it."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

asks_linux = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="reads /proc/self/status: run it on Linux"
)


@contextmanager
def most_anonymous(every: float = 0.001) -> Iterator[list[int]]:
    """The most bytes of memory that is no file's, over what there was before; the first of the list."""
    found, done = [0], threading.Event()
    # Ranks are forked from a process with much behind it: what it has freed and kept would be used first.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _read_anonymous_bytes()

    def sample_memory() -> None:
        while not done.is_set():
            found[0] = max(found[0], _read_anonymous_bytes() - before)
            time.sleep(every)

    thread = threading.Thread(target=sample_memory)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def _read_anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
