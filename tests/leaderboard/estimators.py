"""The estimators of the leaderboard, their environments and their processes."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.accuracy.rows import ROOT

ADAPTERS = Path(__file__).parent / "adapters"
CPU_INDEX = os.environ.get("TORCH_CPU_INDEX", "https://download.pytorch.org/whl/cpu")


class Estimator(NamedTuple):
    """One estimator and the program that asks it."""

    name: str
    adapter: str
    """Module in ``adapters/``; its docstring says what is called, and how plans become its inputs."""
    requirements: tuple[str, ...] = ()
    """What pip installs into its environment."""
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
    Estimator("calculon", "calculon_llm", ("pandas",), "CALCULON_CHECKOUT"),
)


class Answers(NamedTuple):
    """What an estimator answered."""

    version: str
    values: Mapping[str, Mapping[str, float | str]]
    """Plan -> quantity -> the estimate, or the reason why there is none."""
    refused: Mapping[str, str]
    """Plan -> the reason why it was refused altogether."""

    def find(self, plan: str, quantity: str) -> float | str:
        """Return the estimate, or the reason why there is none."""
        values = self.values.get(plan)
        if values is None:
            return self.refused.get(plan, "its process ended before this row")
        # Few estimators have a figure for the whole device: for others their tensors stand for it.
        other = values.get("tensors") if quantity == "device" else None
        return values.get(quantity, other) or f"estimates no {quantity}"


def ask(estimator: Estimator, plans: Mapping[str, Mapping[str, Any]]) -> Answers:
    """Return the estimator's answers, from a process in its own environment."""
    environment = {**os.environ, "PYTHONPATH": ""}
    if estimator.checkout is not None:
        checkout = str(Path(os.environ[estimator.checkout]).resolve())
        environment |= {
            "PYTHONPATH": checkout,
            estimator.checkout: checkout,
            "CHECKOUT_COMMIT": _read_commit(checkout),
        }
    process = subprocess.run(
        [prepare_environment(estimator.requirements), ADAPTERS / f"{estimator.adapter}.py"],
        input=json.dumps(list(plans.values())),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    # Some packages print when they are imported.
    lines = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    if not lines or process.returncode:
        raise RuntimeError(f"{estimator.name} failed:\n{process.stderr[-2000:]}")
    print(
        f"{estimator.name} {lines[0]['version']}: {sum('values' in line for line in lines)} plans answered",
        flush=True,
    )
    values = {line["id"]: line["values"] for line in lines if "values" in line}
    return Answers(
        lines[0]["version"], values, {line["id"]: line["refused"] for line in lines if "refused" in line}
    )


def prepare_environment(requirements: Sequence[str]) -> Path:
    """Return the Python of an environment with ``requirements``, made in the user's cache once."""
    key = hashlib.sha256("\n".join([sys.version, *requirements]).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "shardscope" / "leaderboard" / key
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
