"""A calibration by hand, of a machine whose speeds are known, for tests that measure nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import shardscope as ss
from shardscope.machine.host import count_cores
from shardscope.timing.calibration.curves import Calibration
from shardscope.timing.calibration.files import get_machine_name
from shardscope.timing.collectives import compute_transfer_seconds
from shardscope.timing.rates import LinkRate, look_up_rates
from shardscope.timing.traffic import Transfer

FLOPS = 5e10
HALF_SIZE = 40.0
KERNEL_SECONDS = 4e-6
MEMORY_BYTES_PER_SECOND = 8e9
ATTENTION_FORWARD = 2e10
ATTENTION_BACKWARD = 1.5e10
HALF_KEYS = 128.0
LINK_BYTES_PER_SECOND = 1.5e9
LINK_LATENCY_SECONDS = 3e-5


def make_matmul(size: int, precision: str = "fp32", flops: float = FLOPS) -> dict[str, Any]:
    """Return a measured square matmul, with the time of MatrixRate.seconds."""
    seconds = 2 * (size**3 + HALF_SIZE * 3 * size**2) / flops
    return {"precision": precision, "rows": size, "inner": size, "columns": size, "seconds": seconds}


def make_attention(seq_len: int) -> dict[str, Any]:
    """Return a measured causal attention of 8 heads of 64, with the time of the step's formula."""
    flops = 2.0 * 8 * seq_len**2 * 64 * (1 + HALF_KEYS / seq_len)
    return {
        "precision": "fp32",
        "seq_len": seq_len,
        "num_heads": 8,
        "head_dim": 64,
        "forward_seconds": flops / ATTENTION_FORWARD,
        "backward_seconds": 2.5 * flops / ATTENTION_BACKWARD,
    }


def make_collective(name: str, num_bytes: int, cluster: ss.Cluster) -> dict[str, Any]:
    """Return a measured collective, with the time of timing/collectives.py over a known link."""
    link = LinkRate("a link", LINK_BYTES_PER_SECOND, LINK_LATENCY_SECONDS)
    rates = replace(look_up_rates(cluster), inside=link)
    transfer = Transfer("gathers", name, num_bytes, cluster.num_gpus, 1, 1)  # type: ignore[arg-type]
    took = float(compute_transfer_seconds(transfer, cluster.gpus_per_node, rates))
    return {"collective": name, "num_bytes": num_bytes, "seconds": took}


def make_calibration(cluster: str = "2xcpu", **changes: Any) -> Calibration:
    """Build a calibration as ``ss.calibrate`` returns it for ``cluster``, with ``changes`` to its fields."""
    parsed = ss.Cluster.parse(cluster)
    ranks = parsed.num_gpus
    data: dict[str, Any] = {
        "machine": get_machine_name(),
        "processor": "a processor of tests",
        "num_cores": count_cores(),
        "gpu": parsed.gpu.name,
        "num_ranks": ranks,
        "threads_per_rank": 1,
        "backend": "gloo" if parsed.gpu.name == "cpu" else "nccl",
        "torch_version": "2.13.0",
        "measured_at": "2026-11-21T13:00:00+00:00",
        "measuring_seconds": 12.5,
        "load": 0.1,
        "kernel_seconds": KERNEL_SECONDS,
        "host_updates_per_second": 2e8,
        "matrix_products": [
            make_matmul(size, precision)
            for precision in ("fp32", "bf16")
            for size in (128, 256, 512, 1024, 2048)
        ],
        "attention": [make_attention(seq_len) for seq_len in (64, 256, 1024)],
        "memory_passes": [
            {"num_bytes": size, "seconds": KERNEL_SECONDS + size / MEMORY_BYTES_PER_SECOND}
            for size in (2**16, 2**20, 2**24, 2**27)
        ],
        "host_copies": [],
        "collectives": [
            make_collective(name, size, parsed)
            for name in ("all_reduce", "all_gather", "reduce_scatter")
            for size in (2**14, 2**18, 2**22, 2**26)
        ] if ranks > 1 else [],
    }  # fmt: skip
    return Calibration.from_dict(data | changes)
