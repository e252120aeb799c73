"""Short programs against a framework's own code, each in a process of its own that imports nothing again.

One process imports the framework and forks for every program, with which dies what it leaves behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.requirements import skip_without

SECONDS_PER_PROGRAM = 120

_SERVER = """
import importlib, json, os, signal, sys
from types import SimpleNamespace

answers = os.dup(1)
os.dup2(2, 1)
for module in sys.argv[1:]:
    importlib.import_module(module)
for line in sys.stdin:
    child = os.fork()
    if not child:
        signal.alarm(SECONDS)
        try:
            exec(json.loads(line), {"SimpleNamespace": SimpleNamespace})
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        else:
            said = "ok"
        os.write(answers, (json.dumps(said) + "\\n").encode())
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        os.write(answers, b"null\\n")
""".replace("SECONDS", str(SECONDS_PER_PROGRAM))


class OwnChecks:
    """Asks one framework what it says of a program."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __call__(self, code: str) -> str:
        """Return what ``code`` raises, as "Type: message", or "ok"."""
        process = self._process
        assert process.stdin and process.stdout
        process.stdin.write(json.dumps(code) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        assert answer and answer != "null\n", "the process of the framework's own check was killed"
        return str(json.loads(answer))


@contextmanager
def own_checks(*modules: str) -> Iterator[OwnChecks]:
    """The framework of ``modules``, imported once."""
    skip_without(modules[0].partition(".")[0])
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _SERVER, *modules],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
    ) as process:
        yield OwnChecks(process)
        # It has nothing to tidy up, and DeepSpeed's way out takes seconds.
        process.kill()
