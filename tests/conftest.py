"""What all tests share: none of them reads or writes what this user's machine was measured to do."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest

FOLDER = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """In the environment, so that kernels, supervisors and ranks that tests start inherit it."""
    config.stash[FOLDER] = tempfile.mkdtemp(prefix="shardscope-tests-")
    os.environ["SHARDSCOPE_DATA_HOME"] = config.stash[FOLDER]


def pytest_unconfigure(config: pytest.Config) -> None:
    """Nothing is left behind."""
    shutil.rmtree(config.stash[FOLDER], ignore_errors=True)
