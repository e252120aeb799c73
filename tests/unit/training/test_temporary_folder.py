"""Folders that are renamed when they are complete."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from tests.requirements import needs

needs("torch")

from shardscope.training.checkpoints import temporary_folder  # noqa: E402
from shardscope.training.checkpoints.temporary_folder import replace_on_all_nodes  # noqa: E402


def raise_own(error: OSError | None) -> None:
    """Do what the collective does on a rank that is alone."""
    if error is not None:
        raise error


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(temporary_folder, "writes_folder", lambda: True)


def test_a_folder_that_cannot_be_replaced_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best checkpoint before had a hidden name then, and the next one deleted it."""
    path, temporary = write_folders(tmp_path)
    rename = Path.rename

    def rename_others(source: Path, target: Path) -> Path:
        if source == temporary:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename_others)
        with pytest.raises(OSError, match="Input/output"):
            replace_on_all_nodes(temporary, path, raise_own)
    assert (path / "weights").read_text() == "good"
    replace_on_all_nodes(temporary, path, raise_own)
    assert (path / "weights").read_text() == "new" and len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_another_node_cannot_replace_is_kept(tmp_path: Path) -> None:
    """This node then had its part of the new best checkpoint, and the other one its part of the old one."""
    path, temporary = write_folders(tmp_path)

    def raise_of_other_node(_: OSError | None) -> None:
        raise temporary_folder.OtherRankError("other ranks could not write their part")

    with pytest.raises(temporary_folder.OtherRankError):
        replace_on_all_nodes(temporary, path, raise_of_other_node)
    assert (path / "weights").read_text() == "good" and (temporary / "weights").read_text() == "new"
    assert len(list(tmp_path.iterdir())) == 2


def test_the_older_folder_is_deleted_if_other_ranks_are_lost(tmp_path: Path) -> None:
    """It kept a hidden name and was never deleted: one more checkpoint on the disk of a failed run."""
    path, temporary = write_folders(tmp_path)

    def lose_other_ranks(_: OSError | None) -> None:
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError, match="closed"):
        replace_on_all_nodes(temporary, path, lose_other_ranks)
    assert (path / "weights").read_text() == "new" and len(list(tmp_path.iterdir())) == 1


def write_folders(parent: Path) -> tuple[Path, Path]:
    """Return a complete folder and the temporary one that is to replace it."""
    path, temporary = parent / "best", parent / ".best.partial"
    for folder, text in ((path, "good"), (temporary, "new")):
        folder.mkdir()
        (folder / "weights").write_text(text)
    return path, temporary
