"""The reason for which the ranks wait, from their record to the supervisor's message."""

from __future__ import annotations

import errno
import os

import pytest

from shardscope.records import json_files
from shardscope.records.folder import RunFolder
from shardscope.records.json_files import write_json
from shardscope.runs.watch.periodic_checks import PeriodicChecks
from shardscope.training.tasks.final_export import WAITS, note_for_supervisor


def test_a_full_disk_does_not_hide_why_the_ranks_wait(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason was in a file that is replaced, for which a full disk has no room: nothing was shown."""

    def find_no_space(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_json(folder.rank(0), {"pid": 1, "ready": True})
    checks = PeriodicChecks(folder, 1, print)
    monkeypatch.setattr(json_files, "write_json", find_no_space)
    note_for_supervisor(folder.path, WAITS, "the disk is full")
    assert checks.check(1.0, is_running=True) == "the disk is full" and checks.run_hangs
    # A reader may see half of a record that is overwritten in place.
    content = folder.rank(0).read_bytes()
    folder.rank(0).write_bytes(content[:-5])
    assert checks.check(1.0, is_running=True) is None and checks.run_hangs
    folder.rank(0).write_bytes(content)
    note_for_supervisor(folder.path, WAITS, "")
    assert checks.check(1.0, is_running=True) == "the trained weights are written" and not checks.run_hangs
