"""Folders that are renamed when they are complete."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from tests.requirements import needs

needs("torch")

from shardscope.training.checkpoints.temporary_folder import replace_folder  # noqa: E402


def test_a_folder_that_cannot_be_replaced_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best checkpoint before had a hidden name then, and the next one deleted it."""
    path, temporary = tmp_path / "best", tmp_path / ".best.partial"
    for folder, text in ((path, "good"), (temporary, "new")):
        folder.mkdir()
        (folder / "weights").write_text(text)
    rename = Path.rename

    def rename_others(source: Path, target: Path) -> Path:
        if source == temporary:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", rename_others)
    with pytest.raises(OSError, match="Input/output"):
        replace_folder(temporary, path)
    assert (path / "weights").read_text() == "good"
    monkeypatch.undo()
    replace_folder(temporary, path)
    assert (path / "weights").read_text() == "new" and len(list(tmp_path.iterdir())) == 1
