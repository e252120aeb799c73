"""Launching from a real Jupyter kernel: interrupt and restart."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from run_helpers import seconds_until
from tests.needs import needs

from shardscope.runs.run import Run

jupyter_client = needs("jupyter_client")
pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("bounded_time", "nothing_left")]

CELL = """
import sys
sys.path.insert(0, {tests!r})
from run_helpers import make_plan
from shardscope.runs.launch import launch

class Schedule:
    scale = 2

def train(ctx):
    import time
    for step in range(10_000):
        ctx.log(loss=Schedule.scale * step)
        time.sleep(0.1)

run = launch(make_plan(), train, name={name!r}, folder={folder!r}, outlive_kernel={outlive})
"""


def test_fault_06_07_interrupt_and_restart(tmp_path: Path) -> None:
    """An interrupt reaches the kernel's process group, not the run; a restart ends the leased run only."""
    manager, client = jupyter_client.manager.start_new_kernel(kernel_name="python3")
    try:
        for name, outlive in (("leased", False), ("outlives", True)):
            cell = CELL.format(
                tests=str(Path(__file__).parent), name=name, folder=str(tmp_path), outlive=outlive
            )
            reply = client.execute_interactive(cell, timeout=60)
            assert reply["content"]["status"] == "ok", reply
        leased, outlives = Run.attach(tmp_path / "leased"), Run.attach(tmp_path / "outlives")
        seconds_until(lambda: leased.metrics() and outlives.metrics(), 60)
        client.execute("run.wait()")
        time.sleep(0.5)
        manager.interrupt_kernel()
        assert client.get_shell_msg(timeout=20)["content"]["ename"] == "KeyboardInterrupt"
        time.sleep(0.5)
        assert leased.status == outlives.status == "running"
        manager.restart_kernel(now=True)
        assert leased.wait(10) == "stopped" and "kernel" in leased.reason
        client.wait_for_ready(timeout=60)
        attach = f"import shardscope as ss; ss.Run.attach({str(outlives.folder)!r}).stop()"
        assert client.execute_interactive(attach, timeout=60)["content"]["status"] == "ok"
        assert outlives.wait(10) == "stopped"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
