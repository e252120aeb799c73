"""Commands and import paths of child processes that run a module of this Python."""

from __future__ import annotations

import os
import sys


def build_module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs ``module`` with this Python."""
    # -P: a signal.py in the notebook's folder must not shadow the standard library's.
    return [sys.executable, "-P", "-m", module, *arguments]


def build_import_path() -> str:
    """Return a PYTHONPATH with which a child imports the same modules as this process.

    A notebook may have changed ``sys.path``.
    """
    return os.pathsep.join(filter(None, sys.path))
