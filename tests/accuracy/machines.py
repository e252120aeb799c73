"""A row's GPUs -> Cluster."""

from __future__ import annotations

import re
from dataclasses import replace

from tests.accuracy.rows import Row, number, text
from tests.accuracy.unmapped import UnmappedError

import shardscope as ss
from shardscope.cluster import Gpu

GIB = 2**30
# Cards sold under another name with the same chip and memory: their bandwidths differ, their bytes do not.
_SAME_MEMORY = {"h800": "h100", "a800": "a100", "h20": "h100"}
_CHIP = re.compile(
    r"\b((?:rtx[- ]?(?:pro[- ]?)?\d{4}(?:[- ]ada)?)|[a-z]{1,2}\d{2,3}[a-z]?|mi\d{3}x?|t4|l4|l40s?)\b"
)


def cluster(row: Row) -> ss.Cluster:
    """The GPUs that the row names. Raises ``UnmappedError`` where none is named, or an unknown one."""
    name, num_gpus = text(row, "gpu"), number(row, "n_gpus")
    if not name:
        raise UnmappedError("GPU not stated")
    if num_gpus is None:
        raise UnmappedError("number of GPUs not stated")
    nodes = number(row, "nodes") or (num_gpus // 8 if num_gpus % 8 == 0 else 1)
    if num_gpus % nodes:
        nodes = 1
    return ss.Cluster.of(_gpu(name, number(row, "gpu_mem_gb")), num_gpus // nodes, nodes)


def _gpu(name: str, memory_gb: int | None) -> Gpu:
    match = _CHIP.search(name.replace("_", "-"))
    if not match:
        raise UnmappedError(f"GPU {name!r} is not in the catalogue")
    chip = re.sub(r"[- ]", "-", match[1])
    printed = re.search(r"(\d+) ?g", name)
    memory_gb = memory_gb or (int(printed[1]) if printed else None)
    for kind in (chip, _SAME_MEMORY.get(chip, chip)):
        cards = {
            key: gpu for key, gpu in ss.gpus.items() if kind in re.split(r"[-]", key) or key.startswith(kind)
        }
        if not cards:
            continue
        if memory_gb is None:
            return next(iter(cards.values()))
        nearest = min(cards.values(), key=lambda gpu: abs(gpu.memory_bytes / GIB - memory_gb))
        if abs(nearest.memory_bytes / GIB - memory_gb) <= 0.015 * memory_gb:
            return nearest
        # The same chip with other memory (H100 with 96 GB): the driver leaves the same share of it.
        memory = memory_gb * GIB
        usable = int(memory * (nearest.usable_bytes / nearest.memory_bytes))
        return replace(
            nearest, name=f"{nearest.name}-with-{memory_gb}gb", memory_bytes=memory, usable_bytes=usable
        )
    raise UnmappedError(f"GPU {name!r} is not in the catalogue")
