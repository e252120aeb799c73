"""``ss.calibrate()`` on the GPUs of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardscope as ss
from shardscope.timing.calibration.curves import COLLECTIVES
from shardscope.timing.calibration.selection import select_rates

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_gpu")]


def test_this_machines_gpus_are_measured_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDSCOPE_DATA_HOME", str(tmp_path))
    here = ss.Cluster.detect()
    one = ss.calibrate(seconds=20)
    assert (one.gpu, one.num_ranks, one.backend) == (here.gpu.name, here.num_gpus, "nccl")
    assert {copy.direction for copy in one.host_copies} == {"to_gpu", "to_host"}
    assert {call.collective for call in one.collectives} == (set(COLLECTIVES) if here.num_gpus > 1 else set())
    rates = select_rates(here)
    assert rates.source == one.source
    for precision, peak in here.gpu.peak_flops.items():
        if any(product.precision == precision for product in one.matrix_products):
            assert 0.1 * peak < rates.get_matmul_rate(precision).flops_per_second < 1.1 * peak
    bandwidth = here.gpu.memory_bandwidth_bytes_per_second
    assert bandwidth is None or 0.3 * bandwidth < rates.get_memory_bandwidth() < 1.1 * bandwidth
