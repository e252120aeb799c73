"""The estimators of the leaderboard, their environments and their processes."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.accuracy.rows import ROOT

ADAPTERS = Path(__file__).parent / "adapters"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardscope" / "leaderboard"
"""Environments and answers."""
CPU_INDEX = os.environ.get("TORCH_CPU_INDEX", "https://download.pytorch.org/whl/cpu")


class Estimator(NamedTuple):
    """One estimator and the adapter that runs it."""

    name: str
    adapter: str
    """Module in ``adapters/``; its docstring names the function and how plans become its inputs."""
    requirements: tuple[str, ...] = ()
    """Packages that pip installs into its environment."""
    checkout: str | None = None
    """Environment variable that names a clone of its repository; None: it is on PyPI."""

    @property
    def text(self) -> str:
        """Return the adapter's docstring in one line."""
        module = ast.parse((ADAPTERS / f"{self.adapter}.py").read_text(encoding="utf-8"))
        return " ".join((ast.get_docstring(module) or "").split())


ESTIMATORS = (
    Estimator(
        "accelerate", "accelerate_memory", ("torch==2.13.0", "transformers==5.24.0", "accelerate==1.15.0")
    ),
    Estimator("FSDPMemTracker", "fsdp2_tracker", ("torch==2.13.0", "transformers==5.24.0")),
    Estimator("DeepSpeed", "deepspeed_states", ("torch==2.13.0", "deepspeed==0.19.8")),
    # Its other requirements fetch configs from the Hub, by a huggingface-hub of 2023.
    Estimator(
        "llm-analysis",
        "llm_analysis_training",
        ("--no-deps", "llm-analysis==0.2.2", "fire==0.5.0", "six", "termcolor"),
    ),
    Estimator(
        "SimuMax", "simumax_perf", ("numpy", "pandas", "matplotlib", "sympy", "graphviz"), "SIMUMAX_CHECKOUT"
    ),
    Estimator("calculon", "calculon_llm", ("pandas", "psutil"), "CALCULON_CHECKOUT"),
)


class Answers(NamedTuple):
    """Estimates of one estimator, and the reasons for missing ones."""

    version: str
    values: Mapping[str, Mapping[str, float | str]]
    """Plan -> quantity -> the estimate, or the reason why there is none."""
    refused: Mapping[str, str]
    """Plan -> the reason why the estimator cannot express it."""

    def find(self, plan: str, quantity: str) -> float | str:
        """Return the estimate, or the reason why there is none."""
        values = self.values.get(plan)
        if values is None:
            return self.refused.get(plan, "its process ended before this row")
        # Few estimators have a figure for the whole device: for others their tensors stand for it.
        other = values.get("tensors") if quantity == "device" else None
        return values.get(quantity, other) or f"estimates no {quantity}"


def ask(estimator: Estimator, plans: Mapping[str, Mapping[str, Any]]) -> Answers:
    """Return the estimator's answers, from a process in its own environment.

    Answers are stored in the user's cache as they come, so that a run that was ended goes on where it was;
    another version of the adapter, its requirements or its checkout asks again.
    """
    environment = {**os.environ, "PYTHONPATH": ""}
    if estimator.checkout is not None:
        checkout = str(Path(os.environ[estimator.checkout]).resolve())
        environment |= {
            "PYTHONPATH": checkout,
            estimator.checkout: checkout,
            "CHECKOUT_COMMIT": _read_commit(checkout),
        }
    adapter = ADAPTERS / f"{estimator.adapter}.py"
    sources = [path.read_text(encoding="utf-8") for path in (adapter, ADAPTERS / "protocol.py")]
    key = _hash([*sources, *estimator.requirements, environment.get("CHECKOUT_COMMIT", "")])
    stored = CACHE / "answers" / f"{estimator.adapter}-{key}.jsonl"
    stored.parent.mkdir(parents=True, exist_ok=True)
    hashes = {name: _hash([json.dumps(plan, sort_keys=True)]) for name, plan in plans.items()}
    known = _read_stored(stored)
    missing = [plan for name, plan in plans.items() if hashes[name] not in known or "version" not in known]
    if missing:
        _ask_and_store(estimator, missing, hashes, environment, stored)
        known = _read_stored(stored)
    lines = [known[hashes[name]] for name in plans if hashes[name] in known]
    values = {line["id"]: line["values"] for line in lines if "values" in line}
    refused = {line["id"]: line["refused"] for line in lines if "refused" in line}
    version = str(known["version"]["version"])
    print(f"{estimator.name} {version}: {len(values)} plans answered", flush=True)
    return Answers(version, values, refused)


def _ask_and_store(
    estimator: Estimator,
    plans: Sequence[Mapping[str, Any]],
    hashes: Mapping[str, str],
    environment: Mapping[str, str],
    stored: Path,
) -> None:
    command = [prepare_environment(estimator.requirements), ADAPTERS / f"{estimator.adapter}.py"]
    with tempfile.TemporaryFile("w+") as messages, stored.open("a", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=messages,
            text=True,
            env=environment,
        )
        assert process.stdin is not None and process.stdout is not None
        # A process that has ended already is reported below, with its messages.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(plans))
            process.stdin.close()
        for text in process.stdout:
            # Some packages print when they are imported.
            if text.startswith("{"):
                line = json.loads(text)
                key = "version" if "version" in line else hashes[line["id"]]
                print(json.dumps({"key": key, **line}), file=file, flush=True)
        if process.wait():
            messages.seek(0)
            raise RuntimeError(f"{estimator.name} failed:\n{messages.read()[-2000:]}")


def _read_stored(path: Path) -> dict[str, dict[str, Any]]:
    """Return the stored lines by their keys; the last one may have been cut off."""
    lines: dict[str, dict[str, Any]] = {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError):
            line = json.loads(text)
            lines[line["key"]] = line
    return lines


def _hash(texts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def prepare_environment(requirements: Sequence[str]) -> Path:
    """Return the Python of an environment with ``requirements``, made in the user's cache once."""
    key = hashlib.sha256("\n".join([sys.version, *requirements]).encode()).hexdigest()[:12]
    folder = CACHE / key
    python, ready = folder / "bin" / "python", folder / ".ready"
    if ready.is_file():
        return python
    venv.create(folder, clear=True, with_pip=True)
    if requirements:
        install = [python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints-cpu.txt", *requirements]
        # As the Makefile does: PyTorch's own index of CPU builds where pip finds none by itself.
        if subprocess.run(install, check=False).returncode:
            subprocess.run([*install, "--extra-index-url", CPU_INDEX], check=True)
    ready.touch()
    return python


def _read_commit(checkout: str) -> str:
    command = ["git", "-C", checkout, "rev-parse", "--short=9", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
