"""``slurm``: a real Slurm of two nodes, one for all tests of this folder."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cluster.two_node_slurm import INSTALL, TwoNodeSlurm, find_missing
from tests.requirements import skip_without

SECONDS_PER_TEST = int(os.environ.get("SHARDSCOPE_CLUSTER_SECONDS", "420"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[TwoNodeSlurm]:
    missing = find_missing()
    if missing:
        pytest.skip(f"Slurm is not installed ({missing} missing): {INSTALL}")
    for package in ("torch", "submitit"):
        skip_without(package)
    cluster = TwoNodeSlurm()
    try:
        cluster.start()
        yield cluster
    finally:
        left = cluster.stop()
    assert left == []


@pytest.fixture
def slurm(cluster: TwoNodeSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[TwoNodeSlurm]:
    """The cluster, for one test that is bounded in time and leaves no job."""

    def too_long(*_: object) -> None:
        raise TimeoutError(f"the test took more than {SECONDS_PER_TEST} s")

    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(SECONDS_PER_TEST)
    try:
        yield cluster
        assert cluster.wait_until_empty() == [], "jobs are left in the queue"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        # The next test shall not wait for what a failed one has left.
        for job in cluster.list_jobs():
            cluster.run("scancel", job.split()[0])
