"""Environment of the processes that open a trained model."""

from __future__ import annotations

import os

from shardscope.machine.python_process import build_import_path


def build_child_environment() -> dict[str, str]:
    """Return this process's environment, in which nothing is downloaded and the same modules are found."""
    return {
        # Threads that wait give their core away instead of spinning: two chats, side by side on two busy
        # cores, were eight times as slow without it.
        "OMP_WAIT_POLICY": "PASSIVE",
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": build_import_path(),
    }
