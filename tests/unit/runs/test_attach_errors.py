"""``Run.attach`` of a folder that is no run: the error has the runs nearby and the nearest one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from written_runs import write_run

import shardscope as ss
from shardscope.core.errors import FieldError


@pytest.mark.parametrize("typed", ["llama-firts", "runs/llama-firts", "elsewhere/llama-firts"])
def test_a_mistyped_name_has_the_run_with_a_similar_name_as_its_fix(
    typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("llama-first", "qwen")):
        write_run(name, number=number)
    with pytest.raises(FieldError, match=r"does not exist.*qwen") as refused:
        ss.Run.attach(typed)
    assert ss.Run.attach(refused.value.fix).name == "llama-first"


@pytest.mark.parametrize("folder", ["runs/llama", Path("runs"), None, 3])
def test_a_run_is_not_created_from_its_folder_but_attached_to(folder: Any) -> None:
    with pytest.raises(FieldError, match=r"ss.Run.attach"):
        ss.Run(folder)


def test_without_a_similar_name_the_newest_run_is_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("first", "second")):
        write_run(name, number=number)
    for typed in ("nowhere", "runs"):
        with pytest.raises(FieldError, match="first") as refused:
            ss.Run.attach(typed)
        assert ss.Run.attach(refused.value.fix).name == "second"


def test_of_many_runs_the_newest_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(22):
        write_run(f"r{number:02}", number=number, num_done=1)
    with pytest.raises(FieldError, match=r"runs nearby: 17 older, \S+/r17, .*/r21\. Nearest fix"):
        ss.Run.attach("nowhere")
    with pytest.raises(FieldError, match=r"it contains: 2 older, r02, .*, r21\. Nearest fix"):
        ss.Run.attach("runs")


def test_the_newest_runs_of_several_folders_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(6):
        write_run(f"old{number}", number=number, num_done=1)
        write_run(f"new{number}", parent=tmp_path / "exp", number=number + 10, num_done=1)
    with pytest.raises(FieldError, match=r"7 older, \S+/new1, .*/new5\. Nearest fix: \S+/new5"):
        ss.Run.attach("exp/zzz")


def test_without_any_run_the_error_says_where_a_run_has_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FieldError, match=r"does not exist.*Nearest fix: .*run\.folder"):
        ss.Run.attach("nowhere")


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0,
    reason="needs root, to become another user: run it with sudo",
)
def test_a_run_that_only_its_owner_can_read_names_the_owner_and_the_fix() -> None:
    """It was "Permission denied" with the path of the run."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # pytest's folders are its user's alone.
        parent = Path(name)
        parent.chmod(0o755)
        write_run("mine", parent=parent)
        (parent / "mine").chmod(0o700)
        os.seteuid(65534)
        try:
            with pytest.raises(PermissionError, match=f"belongs to {parent.owner()}.*chmod"):
                ss.Run.attach(parent / "mine")
        finally:
            os.seteuid(0)
