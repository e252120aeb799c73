"""What a row's GPUs are beside the catalogue's: relatives with other speeds, NVLink domains, stated links."""

from __future__ import annotations

import re
from dataclasses import replace
from math import gcd

from tests.accuracy.machines import cluster
from tests.accuracy.rows import Row, number, text

import shardscope as ss
from shardscope.cluster import Gpu, Link

_DOMAINS = (("gb200", 72), ("gb300", 72))
"""Chip -> GPUs that one NVLink switch joins, where those are more than a host's: NVL72."""
_TRAY = 4
_PLAIN_DOMAIN = 8


def timed_cluster(row: Row) -> tuple[ss.Cluster, list[str]]:
    """The row's GPUs with the speeds that matter to time. Raises ``UnmappedError`` where none are named."""
    found, assumed = cluster(row)
    name = text(row, "gpu")
    per_node, num_gpus = found.gpus_per_node, found.num_gpus
    domain = next((size for chip, size in _DOMAINS if chip in name), None)
    if domain is not None and number(row, "nodes") is None:
        # Whole trays of four, and as many racks as the GPUs come in: 64 of 72, for 256.
        per_node = num_gpus if num_gpus <= domain else gcd(num_gpus, 64)
        assumed = [*assumed, f"NVLink joins {per_node} GPUs"] if num_gpus > domain else assumed
    gpu = _gpu(name, found.gpu)
    made = replace(ss.Cluster.of(gpu, per_node, num_gpus // per_node), gpu=gpu)
    stated = _network(text(row, "interconnect"), made)
    return (replace(made, inter_node_link=stated) if stated else made), assumed


def _gpu(name: str, gpu: Gpu) -> Gpu:
    """The card by its own datasheet where the catalogue has a relative's."""
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
    if "500w" in name:
        # torchtitan's own words on its H100: 96 GB of HBM2e, 500 W; 2.4 TB/s.
        return replace(gpu, memory_bandwidth_bytes_per_second=2400e9, tdp_watts=500)
    return gpu


def _network(said: str, machines: ss.Cluster) -> Link | None:
    """The stated speed between nodes, for one GPU; None where nothing is stated."""
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
