"""A row's GPUs -> Cluster."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from tests.accuracy.rows import Row, join_fields, read_number, read_status
from tests.accuracy.unmapped_rows import UnmappedError

import shardscope as ss
from shardscope.core.cluster import Gpu

GIB = 2**30
_SAME_CHIP = {
    "h800": "h100",
    "a800": "a100",
    "gb300": "b300",
    "gh200": "gh200",
    "l40": "l40s",
}
"""Cards sold under another name with the same chip and memory: only their bandwidths differ."""
_GENERATION = {
    "rtx-30": "rtx-3090-24gb",
    "rtx-a6": "rtx-3090-24gb",
    "rtx-a5": "rtx-3090-24gb",
    "rtx-40": "rtx-4090-24gb",
    "rtx-50": "rtx-5090-32gb",
}
"""Of one generation the largest card: contexts and kernels are the same, the memory is what the row says."""
_PROFESSIONAL = {"rtx-a6000": 48.0, "rtx-a5000": 24.0}
_CHIP = re.compile(
    r"\b(?:geforce-)?((?:rtx-?)?(?:pro-?|a)?\d{4}(?:-?(?:ti|super|d|ada))*|gb?[hb]?\d{3}|[a-z]{1,2}\d{2,3}[a-z]?"
    r"|mi\d{3}x?|t4|l4|l40s?)(?=\b|-|\d?gb)"
)
_WORDS_PER_GPU = re.compile(r"^(\d+)\s*[x×*]\s*")
_TOP_SHARE = 1.6
"""No chip has more than this times its largest memory in the catalogue: "GH200 480GB" is its host's."""


def read_cluster(row: Row) -> tuple[ss.Cluster, list[str]]:
    """Return the GPUs that the row names, and what had to be assumed about them.

    Raises ``UnmappedError`` where none is named, or an unknown one.
    """
    name = join_fields(row, "gpu")
    if not name:
        raise UnmappedError("GPU not stated")
    num_gpus = _num_gpus(row, name)
    if num_gpus is None:
        raise UnmappedError("number of GPUs not stated")
    nodes = read_number(row, "nodes") or (num_gpus // 8 if num_gpus % 8 == 0 else 1)
    if num_gpus % nodes:
        nodes = 1
    gpu, assumed = _read_gpu(row, _WORDS_PER_GPU.sub("", name))
    return ss.Cluster.of(gpu, num_gpus // nodes, nodes), assumed


def _num_gpus(row: Row, name: str) -> int | None:
    """The GPUs of the run: stated, in front of the card's name, or the product of all degrees."""
    stated = read_number(row, "n_gpus")
    if stated:
        return stated
    if found := _WORDS_PER_GPU.match(name):
        return int(found[1]) * (read_number(row, "nodes") or 1)
    if re.search(r"\bsingle\b|\b(?:1|one)[- ](?:gpu|device|card)", join_fields(row, "framework")):
        return 1
    if read_number(row, "dp"):
        return math.prod(read_number(row, key) or 1 for key in ("dp", "tp", "pp", "cp"))
    return None


def _read_gpu(row: Row, name: str) -> tuple[Gpu, list[str]]:
    name = re.sub(r"[_ ]+", "-", name)
    match = _CHIP.search(name)
    if not match:
        raise UnmappedError(f"GPU {row['gpu']!r} is not in the catalogue")
    chip = match[1]
    if re.search(r"\bmig\b|\b[1-7]g\.\d", name):
        raise UnmappedError("part of a GPU (MIG)")
    if re.fullmatch(r"[345]0\d0.*|a[56]000|rtx\d.*", chip):
        chip = "rtx-" + chip.removeprefix("rtx")
    memory_gb = _memory_gb(row, name)
    if chip == "mi250x" and memory_gb and memory_gb > 64:
        raise UnmappedError("a card of two dies, which are two devices: ranks not stated")
    for kind in (chip, _SAME_CHIP.get(chip, chip)):
        cards = {
            key: gpu for key, gpu in ss.gpus.items() if kind in key.split("-") or key.startswith(f"{kind}-")
        }
        if cards:
            return _with_memory(row, chip, name, cards, memory_gb)
    largest = _GENERATION.get(chip[:6])
    if largest and re.fullmatch(r"rtx-(?:[345]0\d0(?:-?(?:ti|super|d))*|a[56]000)", chip):
        memory_gb = memory_gb or _PROFESSIONAL.get(chip)
        if memory_gb is None:
            raise UnmappedError(f"GPU {row['gpu']!r} is not in the catalogue, and its memory is not stated")
        return _resize_memory(ss.gpus[largest], memory_gb), [f"{row['gpu']}: {largest} with its own memory"]
    raise UnmappedError(f"GPU {row['gpu']!r} is not in the catalogue")


def _memory_gb(row: Row, name: str) -> float | None:
    stated = row.get("gpu_mem_gb")
    if isinstance(stated, int | float) and not isinstance(stated, bool) and stated > 0:
        return float(stated)
    printed = re.search(r"(?<![a-z\d])(\d+)-?gi?b?\b", name)
    return float(printed[1]) if printed else None


def _with_memory(
    row: Row, chip: str, name: str, cards: dict[str, Gpu], memory_gb: float | None
) -> tuple[Gpu, list[str]]:
    top = max(gpu.memory_bytes for gpu in cards.values()) / GIB
    if memory_gb is not None and memory_gb > _TOP_SHARE * top:
        memory_gb = None
    formed = {
        key: gpu
        for key, gpu in cards.items()
        if any(part in name for part in ("pcie", "nvl", "sxm") if part in key)
    }
    if memory_gb is None:
        chosen = list((formed or cards).values())
        peak = row.get("peak_memory_gib")
        # What a card held, it has room for.
        held = peak if isinstance(peak, int | float) and peak > 0 else 0
        first = next((gpu for gpu in chosen if gpu.usable_bytes >= held * GIB), chosen[-1])
        several = len({gpu.memory_bytes for gpu in cards.values()}) > 1
        if several and read_status(row) == "oom":
            raise UnmappedError("memory of the card that was not enough is not stated")
        return first, [f"memory of {chip} not stated: {first.memory_bytes // GIB} GB"] if several else []
    nearest = min(cards.values(), key=lambda gpu: abs(gpu.memory_bytes / GIB - memory_gb))
    same = [gpu for gpu in formed.values() if gpu.memory_bytes == nearest.memory_bytes]
    if abs(nearest.memory_bytes / GIB - memory_gb) <= 0.015 * memory_gb:
        return (same or [nearest])[0], []
    if len(cards) == 1 and abs(nearest.memory_bytes / GIB - memory_gb) <= 0.07 * memory_gb:
        # One card, whose memory data sheets, drivers and clouds round each in their own way.
        return nearest, []
    return _resize_memory(nearest, memory_gb), []


def _resize_memory(gpu: Gpu, memory_gb: float) -> Gpu:
    """Return the same chip with other memory (H100 with 96 GB): the driver leaves the same share of it."""
    memory = int(memory_gb * GIB)
    return replace(
        gpu,
        name=f"{gpu.name}-with-{memory_gb:g}gb",
        memory_bytes=memory,
        usable_bytes=int(memory * (gpu.usable_bytes / gpu.memory_bytes)),
    )
