"""A real JupyterLab and a real Chromium on this machine, for tests and benchmarks."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
NOTEBOOKS = REPOSITORY / "notebooks"
NOT_COPIED = shutil.ignore_patterns("runs", ".ipynb_checkpoints")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
START_SECONDS = 90
NUM_PORTS = 3
"""Ports that are tried: between its choice and its use a port may be taken by another test."""


@dataclass(frozen=True)
class Lab:
    """A running JupyterLab whose working folder holds a copy of the notebooks."""

    url: str
    token: str
    folder: Path

    def notebook_url(self, name: str) -> str:
        """Return the address that opens a notebook in a workspace of its own."""
        return f"{self.url}/lab/workspaces/{secrets.token_hex(4)}/tree/{name}?token={self.token}"

    def kernels(self) -> list[str]:
        """Return the ids of the running kernels."""
        with self._request("kernels") as answer:
            return [kernel["id"] for kernel in json.load(answer)]

    def restore(self) -> None:
        """End all kernels; restore the working folder, and the settings, such as the theme."""
        with self._request("sessions") as answer:
            sessions = [session["id"] for session in json.load(answer)]
        for session in sessions:
            self._request(f"sessions/{session}", method="DELETE", seconds=30).close()
        shutil.rmtree(self.folder.parent / "settings", ignore_errors=True)
        # Not the folder itself, in which the server works.
        for entry in self.folder.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        shutil.copytree(NOTEBOOKS, self.folder, ignore=NOT_COPIED, dirs_exist_ok=True)

    def _request(self, path: str, method: str = "GET", seconds: float = 30) -> Any:
        request = urllib.request.Request(
            f"{self.url}/api/{path}", headers={"Authorization": f"token {self.token}"}, method=method
        )
        return urllib.request.urlopen(request, timeout=seconds)


@contextmanager
def running_chromium() -> Iterator[Any]:
    """Run the system's Chromium, driven by playwright."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_FLAGS)
        yield chromium
        chromium.close()


@contextmanager
def running_lab(home: Path, base_url: str = "/") -> Iterator[Lab]:
    """Run JupyterLab on a free loopback port, with its own settings and state in ``home``.

    ``base_url`` is the path under which it is served, such as JupyterHub's ``/user/name/``.
    """
    folder = home / "notebooks"
    shutil.copytree(NOTEBOOKS, folder, ignore=NOT_COPIED)
    token = secrets.token_hex(16)
    for attempt in range(NUM_PORTS):
        port = find_free_port()
        lab = Lab(f"http://127.0.0.1:{port}{base_url.rstrip('/')}", token, folder)
        server = _start_server(lab, home, port, base_url)
        try:
            # The port may have been taken before the server has listened.
            is_up = _wait_until_up(lab, server)
            if not is_up and server.poll() is not None and attempt < NUM_PORTS - 1:
                continue
            if not is_up:
                log = (home / "lab.log").read_text(errors="replace")
                raise RuntimeError(f"JupyterLab did not come up:\n{log[-4000:]}")
            yield lab
            return
        finally:
            server.terminate()
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait(10)


def _start_server(lab: Lab, home: Path, port: int, base_url: str) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
    }
    with (home / "lab.log").open("wb") as log:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "jupyterlab",
                "--allow-root",
                "--no-browser",
                "--ip=127.0.0.1",
                f"--port={port}",
                "--ServerApp.port_retries=0",
                f"--IdentityProvider.token={lab.token}",
                f"--ServerApp.root_dir={lab.folder}",
                f"--ServerApp.base_url={base_url}",
                "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=lab.folder,
            start_new_session=True,
        )


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_up(lab: Lab, server: subprocess.Popen[bytes]) -> bool:
    """Return whether the server answers; it has ended, or has not answered in time, if not."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            lab.kernels()
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
        else:
            return True
    return False
