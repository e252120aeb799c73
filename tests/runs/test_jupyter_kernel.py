"""Launching from a real Jupyter kernel: interrupt, restart, and the Stop button."""

from __future__ import annotations

import ast
import os
import site
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_helpers import seconds_until
from tests.requirements import needs

from shardscope.runs.run import Run

jupyter_client = needs("jupyter_client")
pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("bounded_time", "nothing_left")]

CELL = """
import sys
sys.path.insert(0, {tests!r})
from run_helpers import make_plan
from shardscope.runs.launch.launch import launch

class Schedule:
    scale = 2

def train(ctx):
    import time
    for step in range(10_000):
        ctx.log(loss=Schedule.scale * step)
        time.sleep(0.1)

run = launch(make_plan(), train, name={name!r}, folder={folder!r}, outlive_kernel={outlive})
"""


KERNELS = ("", "6.31", "7.1", "7.3", "7.4")
"""Versions of ipykernel; the first is the one that is installed."""

STOP = """
import shardscope as ss
from shardscope_widgets import RunView
view = RunView(ss.Run.attach({folder!r}))
button = view.stop_button.comm.comm_id
"""


@pytest.fixture(params=KERNELS, ids=lambda version: version or "installed")
def ipykernel_version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def kernel_python(ipykernel_version: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with that version of ipykernel and everything else that is installed here."""
    if not ipykernel_version:
        return sys.executable
    if os.environ.get("SHARDSCOPE_KERNELS") != "all":
        pytest.skip("needs ipykernel of another version; `make test-kernels` runs it")
    folder = tmp_path_factory.mktemp(f"ipykernel-{ipykernel_version}")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    wanted = [f"ipykernel=={ipykernel_version}.*", "nest-asyncio"]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages)]
    subprocess.run([*pip, *wanted], check=True)
    # After its own: what is not in it is found where these tests run.
    paths = "".join(f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages())
    (packages / "beside.pth").write_text(paths)
    return str(folder / "bin" / "python")


@pytest.fixture
def kernel(kernel_python: str) -> Iterator[tuple[Any, Any]]:
    """A kernel of that Python, and a client of it."""
    manager = jupyter_client.KernelManager()
    argv = [kernel_python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    manager._kernel_spec = jupyter_client.kernelspec.KernelSpec(argv=argv, language="python")
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def run_cell(client: Any, code: str, **expressions: str) -> dict[str, Any]:
    """Run a cell to its end; what the expressions are then."""
    reply = client.execute_interactive(code, timeout=60, user_expressions=expressions)["content"]
    assert reply["status"] == "ok", reply
    return {
        name: ast.literal_eval(found["data"]["text/plain"])
        for name, found in reply["user_expressions"].items()
    }


def wait_for_output(client: Any, cell: str) -> None:
    """Wait until the cell of that message has printed something: until then it may not have begun."""
    while True:
        message = client.get_iopub_msg(timeout=60)
        if message["msg_type"] == "stream" and message["parent_header"].get("msg_id") == cell:
            return


def test_fault_06_07_28_interrupt_restart_and_the_stop_button(
    kernel: tuple[Any, Any], ipykernel_version: str, kernel_python: str, tmp_path: Path
) -> None:
    """An interrupt reaches the kernel's process group, not the run; a restart ends the leased run only.

    Then the button of a view that attaches: a click is a message from the page to the kernel.
    """
    manager, client = kernel
    found = run_cell(client, "import ipykernel, sys", it="ipykernel.__version__", where="sys.executable")
    assert found["it"].startswith(ipykernel_version) and found["where"] == kernel_python
    for name, outlive in (("leased", False), ("outlives", True)):
        run_cell(
            client,
            CELL.format(tests=str(Path(__file__).parent), name=name, folder=str(tmp_path), outlive=outlive),
        )
    leased, outlives = Run.attach(tmp_path / "leased"), Run.attach(tmp_path / "outlives")
    # The supervisor may see the ranks at work some moments after their first words.
    seconds_until(lambda: all(run.metrics() and run.status == "running" for run in (leased, outlives)), 60)
    cell = client.execute("print('waits', flush=True); run.wait()")
    wait_for_output(client, cell)
    time.sleep(0.2)
    manager.interrupt_kernel()
    assert client.get_shell_msg(timeout=20)["content"]["ename"] == "KeyboardInterrupt"
    time.sleep(0.5)
    assert leased.status == outlives.status == "running"
    manager.restart_kernel(now=True)
    assert leased.wait(10) == "stopped" and "kernel" in leased.reason
    client.wait_for_ready(timeout=60)
    button = run_cell(client, STOP.format(folder=str(outlives.folder)), button="button")["button"]
    click = {"comm_id": button, "data": {"method": "custom", "content": {"event": "click"}}}
    client.shell_channel.send(client.session.msg("comm_msg", click))
    assert outlives.wait(10) == "stopped"
