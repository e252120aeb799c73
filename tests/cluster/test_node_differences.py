"""Nodes that differ: another version of a package."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from tests.cluster.runs import assert_nothing_is_left, make_plan
from tests.cluster.two_node_slurm import TwoNodeSlurm
from tests.requirements import needs, thorough

import shardscope as ss

needs("accelerate")


def write_python_of_node(folder: Path, node: int, lines: str) -> str:
    """Write a program that starts Python, on one node of a run after ``lines`` of shell. Return its path."""
    program = folder / "python-of-node"
    program.write_text(
        "#!/bin/sh\n"
        f'if [ "$SLURM_NODEID" = {node} ]; then\n{lines}\nfi\n'
        # As ss.Slurm(python=) is another Python, it gets no import path of the notebook's.
        f"export PYTHONPATH=$PYTHONPATH:{shlex.quote(os.pathsep.join(filter(None, sys.path)))}\n"
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
