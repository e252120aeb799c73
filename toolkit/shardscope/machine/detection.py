"""Detection of this machine's GPUs through NVML, without a CUDA context and without torch."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TypeVar

from shardscope.catalog import gpus, links, load_table
from shardscope.core.cluster import Cluster, Gpu
from shardscope.machine.host import count_cores, get_host_memory_bytes

T = TypeVar("T")

GENERATIONS = {
    (6, 0): "pascal",
    (7, 0): "volta",
    (7, 5): "turing",
    (8, 0): "ampere",
    (8, 9): "ada",
    (9, 0): "hopper",
    (10, 0): "blackwell",
    (10, 3): "blackwell-ultra",
    (11, 0): "blackwell-thor",
    (12, 0): "blackwell-rtx",
}
"""GPU generations by the compute capability that they begin with
(CUDA C++ Programming Guide, "Compute Capabilities")."""


def detect_cluster() -> Cluster:
    """Return this machine's GPUs or CPU ranks; see :meth:`shardscope.core.cluster.Cluster.detect`."""
    visible_gpus = list_nvidia_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not visible_gpus:
        return Cluster.of(gpus["cpu"], min(2, count_cores()))
    # A plan needs equal ranks: take the most frequent GPU type.
    (name, count), *_ = Counter(gpu.name for gpu in visible_gpus).most_common(1)
    gpu = next(gpu for gpu in visible_gpus if gpu.name == name)
    cluster = Cluster.of(gpu, count)
    # The catalogue knows the host link of its own GPUs; for others, use the PCIe link that NVML reports.
    pcie = next((gpu.link for gpu in visible_gpus if gpu.name == name and gpu.link in links), None)
    host_link = cluster.host_link if name in gpus or pcie is None else links[pcie]
    return dataclasses.replace(cluster, host_link=host_link, host_memory_bytes=get_host_memory_bytes())


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """Current memory and processes of one GPU, as reported by the driver."""

    index: int
    """Index in PCI bus order, among all GPUs of this machine."""
    total_bytes: int
    free_bytes: int
    processes: tuple[tuple[int, int | None], ...]
    """(pid, bytes) of each compute process; None if the driver does not report bytes, as in containers."""


def read_gpu_states() -> list[GpuState]:
    """Return the current state of the GPUs visible to CUDA in this process, in CUDA's order.

    It queries NVML and creates no CUDA context. The list is empty without a driver.
    """
    return _query_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), _read_state)


def list_visible_indices() -> list[int]:
    """Return the driver's indices of the GPUs visible to CUDA in this process, in CUDA's order."""
    return _query_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), lambda _pynvml, _handle, index: index)


def list_nvidia_gpus(visible: str | None) -> list[Gpu]:
    """Return the GPUs that CUDA sees with CUDA_VISIBLE_DEVICES=``visible``; empty without a driver."""
    return _query_gpus(visible, lambda pynvml, handle, _: _describe_gpu(pynvml, handle))


def _query_gpus(visible: str | None, query: Callable[[ModuleType, object, int], T]) -> list[T]:
    """Return ``query(pynvml, handle, index)`` of each visible GPU; empty without pynvml or driver."""
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
        uuids = [_decode(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        return [query(pynvml, handles[index], index) for index in parse_visible_devices(visible, uuids)]
    except pynvml.NVMLError:  # a GPU that fell off the bus, a container without permission
        return []
    finally:
        # NVML counts initializations, so that other users in this process keep theirs (NVML API reference,
        # nvmlShutdown).
        pynvml.nvmlShutdown()


def parse_visible_devices(visible: str | None, uuids: list[str]) -> list[int]:
    """Return the indices into ``uuids`` that ``CUDA_VISIBLE_DEVICES=visible`` selects.

    Entries are indices or UUID prefixes, parsed like torch.cuda._parse_visible_devices: all after the first
    invalid entry are ignored, and a duplicate entry selects none. Indices are in PCI bus order
    (CUDA_DEVICE_ORDER=PCI_BUS_ID); among equal GPUs the order does not matter.
    """
    if visible is None:
        return list(range(len(uuids)))
    if visible.startswith("GPU-"):
        prefixes = list(itertools.takewhile(lambda entry: entry.startswith("GPU-"), visible.split(",")))
        indices = _drop_after_invalid(_find_unique(prefix, uuids) for prefix in prefixes)
        return [] if _has_duplicates(prefixes) or _has_duplicates(indices) else indices
    indices = _drop_after_invalid(_parse_leading_number(entry.strip()) for entry in visible.split(","))
    if _has_duplicates(indices):
        return []
    # torch 2.13, cuda/__init__.py, _device_count_nvml: the list ends at the first index without a GPU.
    return list(itertools.takewhile(lambda index: index < len(uuids), indices))


def select_visible_devices(visible: str | None, positions: Iterable[int]) -> str:
    """Return the CUDA_VISIBLE_DEVICES of the GPUs at ``positions`` among those that ``visible`` selects."""
    entries = None if visible is None else visible.split(",")
    return ",".join(str(position) if entries is None else entries[position] for position in positions)


def _drop_after_invalid(indices: Iterable[int]) -> list[int]:
    """Return the indices before the first invalid one, which is -1."""
    return list(itertools.takewhile(lambda index: index >= 0, indices))


def _has_duplicates(values: Sequence[object]) -> bool:
    return len(set(values)) < len(values)


def _find_unique(prefix: str, uuids: list[str]) -> int:
    """Return the index of the only UUID that starts with ``prefix``; -1 if there is none or several."""
    matches = [index for index, uuid in enumerate(uuids) if uuid.startswith(prefix)]
    return matches[0] if len(matches) == 1 else -1


def _parse_leading_number(entry: str) -> int:
    """Return the number that ``entry`` starts with; -1 if it starts with none."""
    number = re.match(r"\+?(\d+)", entry, re.A)
    return int(number[1]) if number else -1


def _read_state(pynvml: ModuleType, handle: object, index: int) -> GpuState:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    running = query_nvml(pynvml, lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle)) or ()
    return GpuState(
        index=index,
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        processes=tuple((int(process.pid), process.usedGpuMemory) for process in running),
    )


def _describe_gpu(pynvml: ModuleType, handle: object) -> Gpu:
    """Return the catalogue's entry of the GPU, or a ``Gpu`` with the driver's figures."""
    name = _decode(pynvml.nvmlDeviceGetName(handle))
    memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    for known, entry in load_table("gpus").items():
        # Compare memory too: GPUs of one name exist with other memory sizes, and MIG slices and virtual GPUs
        # have the name of the whole GPU.
        if name in entry["driver_names"] and abs(memory / gpus[known].memory_bytes - 1) < 0.1:
            return gpus[known]
    capability = query_nvml(pynvml, lambda: pynvml.nvmlDeviceGetCudaComputeCapability(handle))
    return Gpu(
        name=re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-") or "unknown-gpu",
        vendor="nvidia",
        architecture=None if capability is None else _find_generation(capability),
        memory_bytes=memory,
        usable_bytes=memory - _read_reserved_bytes(pynvml, handle, memory),
        link=_find_pcie_link(pynvml, handle),
        tdp_watts=_read_power_limit(pynvml, handle),
    )


def _find_generation(capability: Sequence[int]) -> str | None:
    """Return the generation of a compute capability, (major, minor); None before the first one known."""
    begun = [known for known in GENERATIONS if known <= tuple(capability)]
    return GENERATIONS[max(begun)] if begun else None


def query_nvml(pynvml: ModuleType, query: Callable[[], T]) -> T | None:
    """Return ``query()``, or None if the GPU or the library does not support its NVML function."""
    try:
        return query()
    except (pynvml.NVMLError, AttributeError):
        return None


def _read_reserved_bytes(pynvml: ModuleType, handle: object, memory: int) -> int:
    # Only version 2 of the structure has the reserve (nvml.h, nvmlMemory_v2_t). Older drivers lack the
    # function, and older pynvml the argument.
    try:
        reserved = int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).reserved)
    except (pynvml.NVMLError, AttributeError, TypeError):
        return 0
    return reserved if 0 <= reserved < memory // 2 else 0


def _find_pcie_link(pynvml: ModuleType, handle: object) -> str | None:
    generation = query_nvml(pynvml, lambda: pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))
    width = query_nvml(pynvml, lambda: pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle))
    name = f"pcie-{generation}-x{width}"
    return name if name in links else None


def _read_power_limit(pynvml: ModuleType, handle: object) -> float | None:
    """Return the default power limit in watts; None if unknown or below 1 W, which ``Gpu`` rejects."""
    milliwatts = query_nvml(pynvml, lambda: pynvml.nvmlDeviceGetPowerManagementDefaultLimit(handle))
    return milliwatts / 1000 if milliwatts and milliwatts >= 1000 else None


def _decode(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
