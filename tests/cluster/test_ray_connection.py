"""The process that connects to Ray for a launch: it ends with what has started it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

from tests.requirements import needs_installed, thorough


@needs_installed("ray")
@thorough()
def test_a_connection_to_a_head_that_never_answers_ends_with_its_launch() -> None:
    with socket.create_server(("127.0.0.2", 0)) as silent:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "shardscope.runs.backends.ray.submission_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdin is not None and process.stdout is not None
        address = f"127.0.0.2:{silent.getsockname()[1]}"
        request = {"address": address, "runtime_env": None, "inspects": False, "pythonpath": None}
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
        try:
            silent.settimeout(120)
            connection, _ = silent.accept()  # It waits for an answer from now on.
            process.stdin.close()
            assert process.wait(60) in (0, 1)
            connection.close()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
