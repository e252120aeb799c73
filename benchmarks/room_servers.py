"""The servers of a room: one JupyterLab for all learners, or JupyterHub with a server for each of them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

START_SECONDS = 120.0
HUB_CONFIGURATION = """
c.JupyterHub.bind_url = "http://127.0.0.1:{ports[0]}"
c.JupyterHub.hub_bind_url = "http://127.0.0.1:{ports[1]}"
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{ports[2]}"
c.JupyterHub.db_url = "sqlite:///{folder}/hub.sqlite"
c.JupyterHub.cookie_secret_file = "{folder}/cookie_secret"
c.ConfigurableHTTPProxy.pid_file = "{folder}/proxy.pid"
c.JupyterHub.authenticator_class = "dummy"
c.Authenticator.allow_all = True
c.JupyterHub.spawner_class = "simple"
c.SimpleLocalProcessSpawner.home_dir_template = "{folder}/homes/{{username}}"
c.Spawner.cmd = ["{python}", "-m", "jupyterhub.singleuser"]
c.Spawner.args = ["--allow-root"]
c.Spawner.start_timeout = c.Spawner.http_timeout = {seconds:.0f}
c.JupyterHub.concurrent_spawn_limit = 0
c.JupyterHub.services = [{{"name": "room", "api_token": "{token}"}}]
scopes = ["admin:users", "admin:servers", "access:servers"]
c.JupyterHub.load_roles = [{{"name": "room", "services": ["room"], "scopes": scopes}}]
"""
"""Its ``simple`` spawner starts every learner's server as the user of the hub, in a folder of its own."""


class Seat(NamedTuple):
    """Where one learner's page goes."""

    address: str
    token: str


class Room(NamedTuple):
    """The running servers."""

    name: str
    """Display name, such as "One JupyterLab server"."""
    seats: tuple[Seat, ...]
    server: psutil.Process
    """JupyterLab, or the hub: the parent of the proxy and of each learner's server."""
    has_own_servers: bool
    """Whether each learner has a server of their own."""


@contextmanager
def start_server(folder: Path, num_learners: int) -> Iterator[Room]:
    """Start one JupyterLab on a free port of the loopback interface."""
    token = secrets.token_hex(16)
    options = ("--no-browser", "--ip=127.0.0.1", "--port=0", f"--ServerApp.root_dir={folder}")
    command = [sys.executable, "-m", "jupyterlab", "--allow-root", *options]
    with _start(command, folder, {"JUPYTER_TOKEN": token}) as (process, log):
        pattern = re.compile(r"(http://127\.0\.0\.1:\d+)/lab")
        _wait(lambda: pattern.search(log.read_text()) is not None, process, log)
        found = pattern.search(log.read_text())
        assert found is not None
        seats = (Seat(found.group(1), token),) * num_learners
        yield Room("One JupyterLab server", seats, psutil.Process(process.pid), False)


def find_missing_for_hub() -> str:
    """Return what JupyterHub needs and this machine lacks; empty if nothing."""
    has_package = importlib.util.find_spec("jupyterhub") is not None
    missing = [] if has_package else ["jupyterhub (pip install jupyterhub)"]
    if shutil.which("configurable-http-proxy") is None:
        missing.append("configurable-http-proxy on PATH (npm install configurable-http-proxy)")
    return " and no ".join(missing)


@contextmanager
def start_hub(folder: Path, num_learners: int) -> Iterator[Room]:
    """Start JupyterHub and all learners' servers at once. It needs jupyterhub and configurable-http-proxy."""
    token, names = secrets.token_hex(16), [f"learner{number}" for number in range(num_learners)]
    ports = _find_free_ports(3)
    for name in names:
        (folder / "homes" / name).mkdir(parents=True)
    settings = folder / "jupyterhub_config.py"
    settings.write_text(
        HUB_CONFIGURATION.format(
            folder=folder, ports=ports, python=sys.executable, token=token, seconds=START_SECONDS
        )
    )
    address = f"http://127.0.0.1:{ports[0]}"

    def ask(path: str, method: str) -> object:
        """Return the hub's answer; None if it has no such thing or does not answer yet."""
        request = urllib.request.Request(
            f"{address}/hub/api/{path}", method=method, headers={"Authorization": f"token {token}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=START_SECONDS) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            if error.code not in (404, 503):
                raise RuntimeError(f"{method} {path}: {error.read()[-500:]!r}") from error
            return None
        except OSError:
            return None
        return json.loads(text) if text else {}

    def is_ready(name: str) -> bool:
        user = ask(f"users/{name}", "GET")
        return isinstance(user, dict) and bool(user["servers"].get("", {}).get("ready"))

    command = [sys.executable, "-m", "jupyterhub", "--config", str(settings)]
    with _start(command, folder, {}) as (process, log):
        _wait(lambda: ask("users", "GET") is not None, process, log)
        for name in names:
            ask(f"users/{name}", "POST")
            ask(f"users/{name}/server", "POST")
        for name in names:
            _wait(lambda name=name: is_ready(name), process, log)  # type: ignore[misc]
        seats = tuple(Seat(f"{address}/user/{name}", token) for name in names)
        yield Room("JupyterHub with its simple spawner", seats, psutil.Process(process.pid), True)


@contextmanager
def _start(
    command: list[str], folder: Path, environment: Mapping[str, str]
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Start a server, and end it and all that it started."""
    log = folder / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, cwd=folder, stdout=output, stderr=output
        )
    try:
        yield process, log
    finally:
        below = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        # JupyterHub leaves the learners' servers running, for its next start.
        for each in below:
            with suppress(psutil.NoSuchProcess):
                each.terminate()
        for each in psutil.wait_procs(below, 15)[1]:
            each.kill()


def _wait(is_true: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not is_true():
        if time.monotonic() > deadline or process.poll() is not None:
            raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")
        time.sleep(0.2)


def _find_free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()
