"""Tests of warnings: they name the line of the user's code."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path

import pytest

from shardscope.core.errors import refuse, warn_user


@pytest.mark.parametrize("kind", [str, Path])
def test_a_long_path_keeps_the_name_of_its_file(kind: type) -> None:
    path = kind(
        "/mnt/shared-filesystem/projects/language-models/2026-11/experiments/fineweb/train-00012.parquet"
    )
    with pytest.raises(
        ValueError, match=r"^Task\.data is .*/mnt/.*\.\.\..*/train-00012\.parquet'\)?; allowed: a file"
    ):
        refuse("Task.data", path, "a file", "the file's path")


def test_a_warning_in_a_thread_of_ours_does_not_name_the_standard_library() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_user("here")
        thread = threading.Thread(target=warn_user, args=("in a thread",))
        thread.start()
        thread.join()
    assert [str(one.message) for one in caught] == ["here", "in a thread"]
    assert caught[0].filename == __file__ and "threading" not in caught[1].filename
