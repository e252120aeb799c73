"""Nodes that differ from each other: versions, clocks, visible GPUs; and a kernel in an allocation."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.cluster.runs import assert_nothing_is_left, make_plan, wait_until_running
from tests.cluster.two_node_slurm import TwoNodeSlurm
from tests.requirements import needs, thorough

import shardscope as ss
from shardscope.runs.backends.peers import LOST_SECONDS

needs("accelerate")


def write_python_of_node(folder: Path, node: int, lines: str, first_import: Path | None = None) -> str:
    """Write a program that starts Python, on one node of a run after ``lines`` of shell. Return its path.

    ``first_import``: a folder that Python imports from before all others, on every node.
    """
    program = folder / "python-of-node"
    first = "" if first_import is None else f"{shlex.quote(str(first_import))}:"
    program.write_text(
        "#!/bin/sh\n"
        f'if [ "$SLURM_NODEID" = {node} ]; then\n{lines}\nfi\n'
        # As ss.Slurm(python=) is another Python, it gets no import path of the notebook's.
        f"export PYTHONPATH={first}$PYTHONPATH:{shlex.quote(os.pathsep.join(filter(None, sys.path)))}\n"
        f'exec {shlex.quote(sys.executable)} "$@"\n'
    )
    program.chmod(0o700)
    return str(program)


@thorough()
def test_fault_79_another_torch_on_a_node(slurm: TwoNodeSlurm, tmp_path: Path) -> None:
    def touch_file(ctx: object) -> None:
        (ctx.folder / f"started-{ctx.rank}").touch()

    # A node on which pip has installed another torch; only its metadata are read before the ranks start.
    metadata = tmp_path / "site" / "torch-2.1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.1.0\n")
    python = write_python_of_node(tmp_path, 1, f"export PYTHONPATH={metadata.parent}")
    run = ss.launch(make_plan("2x1xcpu"), touch_file, folder=tmp_path, on=ss.Slurm(python=python))
    assert run.wait(300) == "failed", (run.status, run.reason, run.error)
    assert "torch 2.1.0 on node 1 (node" in run.reason and "on node 0 (node" in run.reason, run.reason
    assert "install torch==" in run.reason and not list(run.folder.glob("started-*"))
    assert_nothing_is_left(run, slurm)


@thorough()
def test_fault_80_a_clock_that_is_minutes_behind(slurm: TwoNodeSlurm, tmp_path: Path) -> None:
    def fail_on_both(ctx: object) -> None:
        import time

        while not (ctx.folder / "fail").exists():
            ctx.log(value=1.0)
            time.sleep(0.1)
        if ctx.rank == 0:
            time.sleep(1.0)
        raise ValueError(f"rank {ctx.rank} fails")

    # time.time() in all processes of node 0, as if its clock had been set so.
    (tmp_path / "sitecustomize.py").write_text(
        "import time\n_read_clock = time.time\ntime.time = lambda: _read_clock() - 400\n"
    )
    python = write_python_of_node(tmp_path, 0, f"export PYTHONPATH={tmp_path}")
    run = ss.launch(make_plan("2x1xcpu"), fail_on_both, folder=tmp_path, on=ss.Slurm(python=python))
    wait_until_running(run)
    # Neither node takes the other for lost, and no reader the run.
    until = time.monotonic() + LOST_SECONDS + 5
    while time.monotonic() < until:
        assert run.status == "running", (run.status, run.reason)
        time.sleep(0.5)
    assert [node.clock_seconds for node in run.nodes] == [0.0, pytest.approx(400, abs=20)]
    (run.folder / "fail").touch()
    # By the stamps rank 0 failed first, 399 s before the other.
    assert run.wait(60) == "failed" and "rank 1" in run.reason, (run.status, run.reason)
    assert 0 <= ss.runs(tmp_path).to_frame().loc[0, "seconds"] < 400
    assert_nothing_is_left(run, slurm)


@thorough()
def test_fault_81_visible_gpus_are_set_by_the_scheduler(
    slurm: TwoNodeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6,7")  # Of the machine with the notebook.
    seen = tmp_path / "seen"
    lines = f'echo "$CUDA_VISIBLE_DEVICES" > {seen}\nexport CUDA_VISIBLE_DEVICES='
    python = write_python_of_node(tmp_path, 1, lines)
    plan = make_plan("2x1xa100-sxm-80gb")
    run = ss.launch(plan, ss.Pretrain(num_steps=1), folder=tmp_path, on=ss.Slurm(python=python))
    assert run.wait(300) == "failed"
    assert seen.read_text() == "0\n"
    assert "node 1 (node" in run.reason and "shows 0 GPUs to 1 rank" in run.reason, run.reason
    assert_nothing_is_left(run, slurm)


@thorough()
def test_fault_77_a_kernel_inside_an_allocation(slurm: TwoNodeSlurm, tmp_path: Path) -> None:
    program = tmp_path / "kernel.py"
    program.write_text(
        "import os\n"
        "import shardscope as ss\n"
        "from tests.cluster.runs import make_plan\n"
        "assert os.environ['SLURM_JOB_PARTITION'] == 'spare' and 'SLURM_STEP_ID' in os.environ\n"
        "task = ss.Pretrain(num_steps=2)\n"
        f"folder = {str(tmp_path)!r}\n"
        "here = ss.launch(make_plan('2xcpu'), task, folder=folder, name='here')\n"
        "assert here.wait(200) == 'finished', (here.reason, here.error)\n"
        "there = ss.launch(make_plan('2x1xcpu'), task, folder=folder, name='there', on=ss.Slurm())\n"
        "assert there.wait(200) == 'finished', (there.reason, there.error)\n"
    )
    allocation = ("salloc", "--quiet", "--partition=spare", "--nodelist=node3", "--ntasks=1")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [*allocation, "srun", sys.executable, str(program)],
        check=False,
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    runs = {name: ss.Run.attach(tmp_path / name) for name in ("here", "there")}
    assert runs["here"].nodes == [] and len(runs["there"].nodes) == 2
    assert_nothing_is_left(runs["there"], slurm)


FAKE_DRIVER = """
from types import SimpleNamespace


class NVMLError(Exception):
    pass


def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return 4
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetUUID(handle): return f"GPU-{handle}"
def nvmlDeviceGetUtilizationRates(handle): return SimpleNamespace(gpu=50 + handle, memory=0)
def nvmlDeviceGetTemperature(handle, sensor): return 40 + handle
def nvmlDeviceGetPowerUsage(handle): return 300_000
def nvmlDeviceGetMemoryInfo(handle): return SimpleNamespace(total=2**36, free=2**35, used=2**35)
"""


@thorough()
def test_gpus_of_each_node_are_sampled(slurm: TwoNodeSlurm, tmp_path: Path) -> None:
    driver = tmp_path / "driver"
    driver.mkdir()
    (driver / "pynvml.py").write_text(FAKE_DRIVER)
    # Slurm gives each node its GPU 0; the second node's startup file chooses another one.
    python = write_python_of_node(tmp_path, 1, "export CUDA_VISIBLE_DEVICES=3", first_import=driver)
    plan = make_plan("2x1xa100-sxm-80gb")
    run = ss.launch(plan, ss.Pretrain(num_steps=1), folder=tmp_path, on=ss.Slurm(python=python))
    # No rank can use these GPUs, so it fails; until then they are sampled.
    assert run.wait(300) == "failed"
    samples = ss.Run.attach(run.folder).gpu_samples()
    assert {(sample["node"], sample["rank"], sample["gpu"]) for sample in samples} == {(0, 0, 0), (1, 1, 3)}
    assert {(sample["node"], sample["utilisation_percent"]) for sample in samples} == {(0, 50), (1, 53)}
    assert {sample["used_bytes"] for sample in samples} == {2**35}
    assert_nothing_is_left(run, slurm)
