"""``slurm``: a real Slurm of two nodes, one for all tests of this folder."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.cluster.runs import losses, make_plan
from tests.cluster.two_node_slurm import INSTALL, TwoNodeSlurm, find_missing
from tests.requirements import skip_without

import shardscope as ss

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


@pytest.fixture(scope="session")
def train_here(tmp_path_factory: pytest.TempPathFactory) -> Callable[[ss.Layout, int], list[float]]:
    """Return the losses of a Pretrain of some steps under a layout on two ranks of this machine.

    Each is trained once for all tests and their processes.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent

    def train(layout: ss.Layout, num_steps: int) -> list[float]:
        name = f"{layout.framework}-{num_steps}"
        with (folder / f"{name}.json").open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if text := file.read():
                return list(json.loads(text))
            task = ss.Pretrain(num_steps=num_steps)
            run = ss.launch(make_plan("2xcpu", layout), task, folder=folder, name=f"machine-{name}")
            run.wait(240)
            trained = losses(run)
            json.dump(trained, file)
            return trained

    return train
