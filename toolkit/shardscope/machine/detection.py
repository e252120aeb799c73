"""Detection of this machine's GPUs through NVML, without a CUDA context and without torch."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from shardscope.catalog import gpus, links, load_table
from shardscope.core.cluster import Cluster, Gpu
from shardscope.machine.host import host_cores, host_memory_bytes

Found = TypeVar("Found")

GENERATIONS = {4: "pascal", 5: "volta", 6: "turing", 7: "ampere", 8: "ada", 9: "hopper", 10: "blackwell"}
"""GPU generations by NVML_DEVICE_ARCH_* (nvml.h)."""


def detect() -> Cluster:
    """Describe this machine; see :meth:`shardscope.core.cluster.Cluster.detect`."""
    found = nvidia_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not found:
        return Cluster.of(gpus["cpu"], min(2, host_cores()))
    # A plan needs equal ranks: take the most frequent GPU type.
    (name, count), *_ = Counter(gpu.name for gpu in found).most_common(1)
    gpu = next(gpu for gpu in found if gpu.name == name)
    cluster = Cluster.of(gpu, count)
    # The catalogue knows the host link of its own GPUs; for others, use the PCIe link that NVML reports.
    pcie = next((known.link for known in found if known.name == name and known.link in links), None)
    host_link = cluster.host_link if name in gpus or pcie is None else links[pcie]
    return dataclasses.replace(cluster, host_link=host_link, host_memory_bytes=host_memory_bytes())


@dataclass(frozen=True, kw_only=True)
class GpuNow:
    """Current memory and processes of one GPU, as reported by the driver."""

    index: int
    """Index in PCI bus order, among all GPUs of this machine."""
    total_bytes: int
    free_bytes: int
    processes: tuple[tuple[int, int | None], ...]
    """(pid, bytes) of each compute process; None if the driver does not report bytes, as in containers."""


def gpus_now() -> list[GpuNow]:
    """Return the current state of the GPUs visible to CUDA in this process, in CUDA's order.

    It queries NVML and creates no CUDA context. The list is empty without a driver.
    """
    return _asked(os.environ.get("CUDA_VISIBLE_DEVICES"), _now)


def nvidia_gpus(visible: str | None) -> list[Gpu]:
    """Return the GPUs that CUDA sees with CUDA_VISIBLE_DEVICES=``visible``; empty without a driver."""
    return _asked(visible, lambda pynvml, handle, _: _gpu(pynvml, handle))


def _asked(visible: str | None, ask: Callable[[Any, Any, int], Found]) -> list[Found]:
    """Return ``ask(pynvml, handle, index)`` of each visible GPU; empty without pynvml or driver."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError, OSError):  # no driver, or a driver without GPUs
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        uuids = [_text(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        return [ask(pynvml, handles[index], index) for index in visible_indices(visible, uuids)]
    except pynvml.NVMLError:  # a GPU that fell off the bus, a container without permission
        return []
    finally:
        pynvml.nvmlShutdown()


def visible_indices(visible: str | None, uuids: list[str]) -> list[int]:
    """Return the indices into ``uuids`` that ``CUDA_VISIBLE_DEVICES=visible`` selects.

    Entries are indices or UUID prefixes, parsed like torch.cuda._parse_visible_devices: all after the first
    invalid entry are ignored, and a duplicate entry selects none. Indices are in PCI bus order
    (CUDA_DEVICE_ORDER=PCI_BUS_ID); among equal GPUs the order does not matter.
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
    for known, entry in load_table("gpus").items():
        # Compare memory too: GPUs of one name exist with other memory sizes, and MIG slices and virtual GPUs
        # have the name of the whole GPU.
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
    """Return the result of an NVML function, or None if the GPU or the library does not support it."""
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
