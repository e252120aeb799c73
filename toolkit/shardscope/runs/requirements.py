"""Requirements of training and measuring: Linux, and the packages of the ``train`` extra."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

from shardscope.machine.processes import explain_missing_linux


def check_train_extra(task: str, modules: Iterable[str]) -> None:
    """Check that ``task`` ("Launching") is possible here.

    Raises ``ValueError`` on another system than Linux, ``ImportError`` if one of ``modules`` is missing.
    """
    reason = explain_missing_linux(task)
    if reason is not None:
        raise ValueError(reason)
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        needed = ", ".join(missing)
        raise ImportError(f'{task} needs {needed}: pip install "shardscope[train]". Planning works without.')
