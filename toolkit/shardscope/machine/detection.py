"""What GPUs this machine has, asked of NVML: no CUDA context, no torch."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from shardscope.catalog import entries, gpus, links
from shardscope.core.cluster import Cluster, Gpu
from shardscope.machine.host import host_cores, host_memory_bytes

Found = TypeVar("Found")

GENERATIONS = {4: "pascal", 5: "volta", 6: "turing", 7: "ampere", 8: "ada", 9: "hopper", 10: "blackwell"}
"""NVML_DEVICE_ARCH_* in nvml.h."""


def detect() -> Cluster:
    """See :meth:`shardscope.core.cluster.Cluster.detect`."""
    found = nvidia_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not found:
        return Cluster.of(gpus["cpu"], min(2, host_cores()))
    (name, count), *_ = Counter(gpu.name for gpu in found).most_common(1)
    gpu = next(gpu for gpu in found if gpu.name == name)
    cluster = Cluster.of(gpu, count)
    pcie = next((known.link for known in found if known.name == name and known.link in links), None)
    host_link = cluster.host_link if name in gpus or pcie is None else links[pcie]
    return dataclasses.replace(cluster, host_link=host_link, host_memory_bytes=host_memory_bytes())


@dataclass(frozen=True, kw_only=True)
class GpuNow:
    """What one card has at this moment, as the driver counts it."""

    index: int
    """In bus order, of all cards of this machine."""
    total_bytes: int
    free_bytes: int
    processes: tuple[tuple[int, int | None], ...]
    """(pid, bytes) of who computes on it; None where the driver does not tell, as in containers."""


def gpus_now() -> list[GpuNow]:
    """What is free now on the cards that CUDA would see in this process, in its order; none without a driver.

    No CUDA context is made: the driver's library answers.
    """
    return _asked(os.environ.get("CUDA_VISIBLE_DEVICES"), _now)


def nvidia_gpus(visible: str | None) -> list[Gpu]:
    """The GPUs that CUDA would see under ``visible``; none without a driver."""
    return _asked(visible, lambda pynvml, handle, _: _gpu(pynvml, handle))


def _asked(visible: str | None, ask: Callable[[Any, Any, int], Found]) -> list[Found]:
    """What ``ask`` finds out about each visible card, given NVML, its handle and its index."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError, OSError):  # no driver, or one without a card
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        uuids = [_text(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        return [ask(pynvml, handles[index], index) for index in visible_indices(visible, uuids)]
    except pynvml.NVMLError:  # a card that fell off the bus, a container without permission
        return []
    finally:
        pynvml.nvmlShutdown()


def visible_indices(visible: str | None, uuids: list[str]) -> list[int]:
    """Which of ``uuids`` ``CUDA_VISIBLE_DEVICES`` leaves: everything after the first wrong entry is ignored.

    Indices and UUID prefixes, as torch.cuda._parse_visible_devices reads them; a repeated entry leaves none.
    Indices are taken in bus order, CUDA_DEVICE_ORDER=PCI_BUS_ID; among equal GPUs the order does not matter.
    """
    if visible is None:
        return list(range(len(uuids)))
    if visible.startswith("GPU-"):
        named = list(itertools.takewhile(lambda entry: entry.startswith("GPU-"), visible.split(",")))
        chosen = _up_to_a_wrong_one(_only(entry, uuids) for entry in named)
        return [] if _repeats(named) or _repeats(chosen) else chosen
    chosen = _up_to_a_wrong_one(_leading_number(entry.strip()) for entry in visible.split(","))
    return [] if _repeats(chosen) else list(itertools.takewhile(lambda index: index < len(uuids), chosen))


def _up_to_a_wrong_one(indices: Iterable[int]) -> list[int]:
    return list(itertools.takewhile(lambda index: index >= 0, indices))


def _repeats(told: Sequence[object]) -> bool:
    return len(set(told)) < len(told)


def _only(prefix: str, uuids: list[str]) -> int:
    found = [index for index, uuid in enumerate(uuids) if uuid.startswith(prefix)]
    return found[0] if len(found) == 1 else -1


def _leading_number(entry: str) -> int:
    number = re.match(r"\+?(\d+)", entry, re.A)
    return int(number[1]) if number else -1


def _now(pynvml: Any, handle: Any, index: int) -> GpuNow:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    running = ask_quietly(pynvml, "nvmlDeviceGetComputeRunningProcesses", handle) or ()
    return GpuNow(
        index=index,
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        processes=tuple((int(process.pid), process.usedGpuMemory) for process in running),
    )


def _gpu(pynvml: Any, handle: Any) -> Gpu:
    name = _text(pynvml.nvmlDeviceGetName(handle))
    memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    for known, entry in entries("gpus").items():
        # The same name is sold with other memory, and a slice or a virtual GPU keeps the card's name.
        if name in entry["nvml_names"] and abs(memory / gpus[known].memory_bytes - 1) < 0.1:
            return gpus[known]
    return Gpu(
        name=re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-") or "unknown-gpu",
        vendor="nvidia",
        architecture=GENERATIONS.get(ask_quietly(pynvml, "nvmlDeviceGetArchitecture", handle)),
        memory_bytes=memory,
        usable_bytes=memory - _reserved(pynvml, handle, memory),
        link=_pcie(pynvml, handle),
        tdp_watts=_watts(ask_quietly(pynvml, "nvmlDeviceGetPowerManagementDefaultLimit", handle)),
    )


def ask_quietly(pynvml: Any, function: str, *arguments: Any) -> Any:
    """The answer, or None where the card or the library has none."""
    try:
        return getattr(pynvml, function)(*arguments)
    except (pynvml.NVMLError, AttributeError):
        return None


def _reserved(pynvml: Any, handle: Any, memory: int) -> int:
    try:
        reserved = int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).reserved)
    except (pynvml.NVMLError, AttributeError, TypeError):
        return 0
    return reserved if 0 <= reserved < memory // 2 else 0


def _pcie(pynvml: Any, handle: Any) -> str | None:
    generation = ask_quietly(pynvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle)
    width = ask_quietly(pynvml, "nvmlDeviceGetMaxPcieLinkWidth", handle)
    name = f"pcie-{generation}-x{width}"
    return name if name in links else None


def _watts(milliwatts: int | None) -> float | None:
    return milliwatts / 1000 if milliwatts and milliwatts >= 1000 else None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
