"""GPUs as NVML would list them, where there are none."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

GIB = 2**30
TOTAL = 85_520_809_984


class NvmlError(Exception):
    pass


def pretend_cards(monkeypatch: pytest.MonkeyPatch, free: list[int], users: list[Any] | None = None) -> None:
    """H100s with so many bytes free; on the first, processes as (pid, bytes)."""

    def get_memory_info(handle: int, version: object = None) -> SimpleNamespace:
        return SimpleNamespace(total=TOTAL, free=free[handle], reserved=2**29)

    def list_processes(handle: int) -> list[SimpleNamespace]:
        found = users if handle == 0 and users else []
        return [SimpleNamespace(pid=pid, usedGpuMemory=num_bytes) for pid, num_bytes in found]

    fake = SimpleNamespace(
        NVMLError=NvmlError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlMemory_v2=2,
        nvmlDeviceGetCount=lambda: len(free),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
        nvmlDeviceGetName=lambda _: "NVIDIA H100 80GB HBM3",
        nvmlDeviceGetMemoryInfo=get_memory_info,
        nvmlDeviceGetComputeRunningProcesses=list_processes,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
