"""GPUs of rows that differ from the catalogue's: other speeds, NVLink domains, stated links."""

from __future__ import annotations

import re
from dataclasses import replace
from math import gcd

from tests.accuracy.machines import read_cluster
from tests.accuracy.rows import Row, join_fields, read_number

import shardscope as ss
from shardscope.core.cluster import Gpu, Link

_DOMAINS = (("gb200", 72), ("gb300", 72))
"""Chip -> GPUs that one NVLink switch joins, where those are more than a host's: NVL72."""
_NETWORKS = {
    # BLOOM (arXiv:2211.05100), section 3.4.1: four Omni-Path links of 100 Gb/s in each node of eight.
    "bloom": "400 Gb/s a node",
}
"""Networks that a source describes elsewhere than in its tables."""
_NVLINKS = {
    # The same section: GPUs of a node are joined by four NVLinks, of 25 GB/s each way.
    "bloom": Link(name="nvlink-3-x4", bandwidth_bytes_per_second=100e9, latency_seconds=3.4e-6),
}
"""Links inside a node that a source describes."""


def timed_cluster(row: Row) -> tuple[ss.Cluster, list[str]]:
    """The row's GPUs with the speeds that matter to time. Raises ``UnmappedError`` where none are named."""
    found, assumed = read_cluster(row)
    name = join_fields(row, "gpu")
    per_node, num_gpus = found.gpus_per_node, found.num_gpus
    domain = next((size for chip, size in _DOMAINS if chip in name), None)
    if domain is not None and read_number(row, "nodes") is None:
        # Whole trays of four, and as many racks as the GPUs come in: 64 of 72, for 256.
        per_node = num_gpus if num_gpus <= domain else gcd(num_gpus, 64)
        assumed = [*assumed, f"NVLink joins {per_node} GPUs"] if num_gpus > domain else assumed
    gpu = _correct_gpu(name, found.gpu, "torchtitan" in join_fields(row, "source"))
    # Links are those of the catalogue's card: of another name it knows none.
    known = ss.gpus["h100-sxm-80gb"] if gpu.name.startswith("h100-sxm") else ss.gpus.get(found.gpu.name, gpu)
    made = replace(ss.Cluster.of(known, per_node, num_gpus // per_node), gpu=gpu)
    elsewhere = next((words for name, words in _NETWORKS.items() if name in join_fields(row, "source")), "")
    stated = _read_network(join_fields(row, "interconnect") or elsewhere, made)
    if stated:
        made = replace(made, inter_node_link=stated)
    inside = next((link for name, link in _NVLINKS.items() if name in join_fields(row, "source")), None)
    return (replace(made, intra_node_link=inside) if inside else made), assumed


def _correct_gpu(name: str, gpu: Gpu, is_torchtitan: bool) -> Gpu:
    """Return the GPU by its own datasheet where the catalogue has a related model's."""
    if "gb300" in name:
        # GB300 NVL72 (nvidia.com/en-us/data-center/gb300-nvl72), a 72nd: FP8 10 and BF16 5 PFLOP/s with
        # sparsity, 1,400 W; HGX's B300 has nine tenths of it.
        peaks = {**gpu.peak_flops, "bf16": 2500e12, "fp16": 2500e12, "fp8": 5000e12, "tf32": 1250e12}
        return replace(
            gpu,
            name="gb300-288gb",
            peak_flops=peaks,
            memory_bandwidth_bytes_per_second=8000e9,
            tdp_watts=1400,
            price_per_hour_usd=None,
            price_date=None,
        )
    if "500w" in name or (is_torchtitan and "h100" in name and "h100-sxm" not in gpu.name):
        # torchtitan's own words (benchmarks/llama3_h100_202412_torchtitan.md): an SXM chip with 96 GB of
        # HBM2e at 2.4 TB/s, held at 500 W.
        return replace(
            ss.gpus["h100-sxm-80gb"],
            name="h100-sxm-96gb-500w",
            memory_bytes=gpu.memory_bytes,
            usable_bytes=gpu.usable_bytes,
            memory_bandwidth_bytes_per_second=2400e9,
            tdp_watts=500,
            price_per_hour_usd=None,
            price_date=None,
        )
    return gpu


def _read_network(said: str, machines: ss.Cluster) -> Link | None:
    """Return the stated speed between nodes, for one GPU; None if none is stated."""
    found = re.search(r"(\d+(?:\.\d+)?)\s*gb(?:ps|it/s|/s)", said)
    if not found:
        return None
    gigabits = float(found[1])
    if re.search(r"node[- ]node|per node|a node", said):
        gigabits /= machines.gpus_per_node
    known = machines.inter_node_link
    bandwidth = gigabits * 1e9 / 8
    if abs(bandwidth / known.bandwidth_bytes_per_second - 1) < 0.01:
        return known
    return replace(known, name=f"network-{gigabits:g}g", bandwidth_bytes_per_second=bandwidth)
