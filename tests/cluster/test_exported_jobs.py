"""Exported jobs train on two nodes without Shardscope, with the losses of the same plan on one machine; and
``shardscope launch`` submits to both kinds of clusters."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from tests.cluster.test_two_ray_nodes import start_ray
from tests.cluster.two_node_slurm import TwoNodeSlurm
from tests.requirements import every_case, few, needs, skip_without, thorough

import shardscope as ss

needs("transformers")

STEPS = 4
SECONDS = 300.0
FRAMEWORKS = {
    "ddp": (ss.Layout.ddp, "torch"),
    "fsdp2": (ss.Layout.fsdp2, "torch"),
    "zero": (partial(ss.Layout.zero, stage=3), "deepspeed"),
}


def export(framework: str, cluster: str, folder: Path) -> Path:
    make_layout, package = FRAMEWORKS[framework]
    skip_without(package)
    recipe = ss.Recipe(seq_len=64, micro_batch_size=1, global_batch_size=4, precision="fp32")
    plan = ss.Plan(ss.Architecture.of_size("2m"), ss.Cluster.parse(cluster), recipe, make_layout())
    plan.export(folder)
    return folder


def build_environment(**variables: str) -> dict[str, str]:
    """Return an environment with this Python's torchrun, and without this checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    path = f"{Path(sys.executable).parent}:{environment['PATH']}"
    return {**environment, "PATH": path, "OMP_NUM_THREADS": "1", **variables}


def read_losses(output: str) -> list[float]:
    return [float(line.split("loss ")[1].split()[0]) for line in output.splitlines() if "step " in line]


def train_here(framework: str, folder: Path) -> list[float]:
    """Return the losses of the same plan's ``torchrun.sh`` on this machine."""
    command = ["./torchrun.sh", "--steps", str(STEPS)]
    done = subprocess.run(
        command,
        cwd=export(framework, "2xcpu", folder),
        env=build_environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return read_losses(done.stdout)


def find_ranks(folder: Path) -> set[tuple[str, str]]:
    """Return node and rank of each process that runs ``folder``'s script below torchrun."""
    ranks = set()
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder) and "train.py" in " ".join(process.cmdline()):
                environment = process.environ()
                ranks.add((environment.get("SLURMD_NODENAME", ""), environment.get("RANK", "")))
        except psutil.Error:
            continue
    return {(node, rank) for node, rank in ranks if rank}


@thorough()
@pytest.mark.parametrize("framework", few(FRAMEWORKS, ["zero"], every_case))
def test_the_sbatch_file_trains_on_two_nodes_as_on_one_machine(
    framework: str, slurm: TwoNodeSlurm, tmp_path: Path
) -> None:
    folder = export(framework, "2x1xcpu", tmp_path / "nodes")
    job = subprocess.Popen(
        ["sbatch", "--wait", "--output=log.txt", "job.sbatch", "--steps", str(STEPS)],
        cwd=folder,
        env=build_environment(),
    )
    ranks: set[tuple[str, str]] = set()
    deadline = time.monotonic() + SECONDS
    while job.poll() is None:
        ranks |= find_ranks(folder)
        assert time.monotonic() < deadline, (folder / "log.txt").read_text()
        time.sleep(0.1)
    log = (folder / "log.txt").read_text()
    assert job.returncode == 0, log
    assert ranks == {("node1", "0"), ("node2", "1")}
    across = read_losses(log)
    assert len(across) == STEPS
    assert across == pytest.approx(train_here(framework, tmp_path / "machine"), abs=1e-5)


@thorough()
def test_a_node_that_fails_ends_the_sbatch_job(slurm: TwoNodeSlurm, tmp_path: Path) -> None:
    """Rank 0 waited for it in a collective, and the job kept both nodes until its time limit."""
    folder = export("ddp", "2x1xcpu", tmp_path / "nodes")
    (folder / "train.py").write_text(
        "import os, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    raise SystemExit('no memory left')\n"
        f"time.sleep({2 * SECONDS})\n"
    )
    done = subprocess.run(
        ["sbatch", "--wait", "--output=log.txt", "job.sbatch"],
        cwd=folder,
        env=build_environment(),
        capture_output=True,
        timeout=SECONDS,
        check=False,
    )
    log = (folder / "log.txt").read_text()
    assert done.returncode == 1 and "no memory left" in log and "node2: task 1: Exited" in log, log
    assert find_ranks(folder) == set()


@every_case()
def test_the_ray_job_and_the_command_line_train_on_two_ray_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = export("ddp", "2x1xcpu", tmp_path / "nodes")
    monkeypatch.chdir(folder)  # Where the nodes' processes start, as in the --working-dir of a Ray job.
    expected = train_here("ddp", tmp_path / "machine")
    with start_ray() as cluster:
        done = subprocess.run(
            [sys.executable, "ray_nodes.py", "train.py", "--steps", str(STEPS)],
            cwd=folder,
            env=build_environment(RAY_ADDRESS=cluster.address),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        assert cluster.wait_until_empty() == []
        launch_by_command(tmp_path, folder, "--on", "ray", "--address", cluster.address)
        assert cluster.wait_until_empty() == []
    across = read_losses(done.stdout + done.stderr)
    assert len(across) == STEPS
    assert across == pytest.approx(expected, abs=1e-5)


@thorough()
def test_the_command_line_submits_to_slurm_and_waits(slurm: TwoNodeSlurm, tmp_path: Path) -> None:
    folder = export("ddp", "2x1xcpu", tmp_path / "nodes")
    launch_by_command(tmp_path, folder, "--on", "slurm", "--partition", "debug")


def launch_by_command(parent: Path, plan: Path, *target: str) -> None:
    """Launch two steps by ``shardscope launch --wait`` and check that both nodes took part."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "shardscope.cli.main", "launch", str(plan), "--task", "pretrain"),
            *("num_steps=2", "--name", "waited", "--wait", *target),
        ],
        cwd=parent,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 2 of 2, loss" in done.stdout
    run = ss.Run.attach(parent / "runs" / "waited")
    assert run.status == "finished" and {path.name for path in (run.folder / "nodes").iterdir()} == {"0", "1"}
