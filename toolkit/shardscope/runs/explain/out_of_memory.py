"""Parser of the out-of-memory messages of torch, CUDA and the C library.

torch's message has had three forms: until 2.0 "(GPU 0; 79.10 GiB total capacity; 70.00 GiB already
allocated; 0.40 GiB free; ...)", until 2.2 "total capacty of ... of which ... is free", since then the same
with "capacity" (c10/cuda/CUDACachingAllocator.cpp). Messages of other libraries have no numbers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_UNITS = {"bytes": 1, "byte": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
_AMOUNT = r"(\d+(?:\.\d+)?) (bytes?|[KMGTP]iB)"

_GPU = re.compile(
    r"CUDA out of memory|HIP out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
    r"|Cuda failure(?: \d+)? '?out of memory|cudaErrorMemoryAllocation|CUDA driver error: out of memory"
)
_HOST = re.compile(
    r"DefaultCPUAllocator: (?:can't|not enough)|^MemoryError\b|\[Errno 12\] Cannot allocate memory"
    r"|std::bad_alloc|numpy\.\S*ArrayMemoryError",
    re.MULTILINE,
)
_REQUESTED = re.compile(rf"Tried to allocate (?:more than )?{_AMOUNT}")
_REQUESTED_OF_HOST = re.compile(r"you tried to allocate (\d+) bytes")
_REQUESTED_OF_NUMPY = re.compile(rf"Unable to allocate {_AMOUNT}")
_WHICH = re.compile(r"GPU (\d+)(?:;| has)")
_TOTAL = re.compile(rf"{_AMOUNT} total capacity|total capaci?ty of {_AMOUNT}")
_FREE = re.compile(rf"{_AMOUNT} free|of which {_AMOUNT} is free")
_OTHERS = re.compile(rf"Process \d+ has {_AMOUNT} memory in use")


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """One failed allocation. A field is None if the message does not contain it."""

    memory_kind: Literal["GPU memory", "host memory"]
    requested_bytes: int | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None
    gpu: int | None = None
    """CUDA device index among the GPUs visible to the rank."""
    other_process_bytes: int = 0
    """Bytes of the GPU used by other processes that the message names."""


def parse_shortage(text: str) -> Shortage | None:
    """Return the failed allocation in a traceback or its last line; None if it is another error."""
    # Skip the traceback's source lines: code that handles such errors contains their messages as literals.
    text = "\n".join(line for line in text.splitlines() if not line.startswith("  "))
    matches = list(_GPU.finditer(text))
    if matches:
        # Errors before the last one were handled.
        message = text[matches[-1].start() :][:4096]
        which = _WHICH.search(message)
        return Shortage(
            memory_kind="GPU memory",
            requested_bytes=_find_bytes(_REQUESTED, message),
            free_bytes=_find_bytes(_FREE, message),
            total_bytes=_find_bytes(_TOTAL, message),
            gpu=int(which[1]) if which else None,
            other_process_bytes=sum(_to_bytes(*amount) for amount in _OTHERS.findall(message)),
        )
    if _HOST.search(text):
        requested = _REQUESTED_OF_HOST.search(text)
        num_bytes = int(requested[1]) if requested else _find_bytes(_REQUESTED_OF_NUMPY, text)
        return Shortage(memory_kind="host memory", requested_bytes=num_bytes)
    return None


def _find_bytes(pattern: re.Pattern[str], message: str) -> int | None:
    match = pattern.search(message)
    if match is None:
        return None
    amount, unit = (group for group in match.groups() if group is not None)
    return _to_bytes(amount, unit)


def _to_bytes(amount: str, unit: str) -> int:
    return round(float(amount) * _UNITS[unit])
