"""Settings of all tests: none reads or writes this user's calibrations or key."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest
from hypothesis import settings
from tests.requirements import THOROUGH, skip_unsampled

# The same examples of property tests everywhere; --hypothesis-profile=default draws new ones.
settings.register_profile("same", settings.get_profile("ci"), max_examples=100 if THOROUGH else 20)

FOLDER = pytest.StashKey[str]()
LONGEST = (
    "test_main_job.py",
    "test_validation.py",
    "test_exported_resume.py",
    "test_retries.py",
    "test_resume.py",
    "test_live_profile.py",
    "test_two_nodes.py",
)
"""Files that take longest, in seconds for each of their few cases."""


def pytest_configure(config: pytest.Config) -> None:
    """Set environment variables, so that kernels, supervisors and ranks that tests start inherit them."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        # Workers share the cores: threads of one worker's torch would spin while another's compute.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    config.stash[FOLDER] = tempfile.mkdtemp(prefix="shardscope-tests-")
    os.environ["SHARDSCOPE_DATA_HOME"] = config.stash[FOLDER]
    # The key of this user's checkpoints.
    os.environ["XDG_STATE_HOME"] = config.stash[FOLDER]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test` runs a sample of the cases of large parametrized tests, and the longest files first.

    A worker takes whole files: one that began a long file last would keep the others waiting.
    """
    skip_unsampled(items)
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Nothing is left behind."""
    shutil.rmtree(config.stash[FOLDER], ignore_errors=True)
