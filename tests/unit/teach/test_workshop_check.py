"""Tests of the check of a learner's machine: each thing that is missing is named with its fix."""

from __future__ import annotations

import importlib.metadata
import shutil
import socket
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.requirements import skip_without, thorough

from shardscope.teach import workshop_check
from shardscope.teach.workshop_check import Check, CheckTable, check_machine, check_run, execute_notebook

Usage = namedtuple("Usage", "total used free")
REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has enough of all, whatever runs here."""
    monkeypatch.setattr(workshop_check, "count_cores", lambda: 4)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**40, 0, 2**40))
    monkeypatch.setattr(workshop_check, "_check_jupyterlab", lambda: Check(name="lab", ok=True, found=""))


def find_failed(table: CheckTable) -> dict[str, Check]:
    return {check.name: check for check in table.checks if not check.ok}


def break_cores(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(workshop_check, "count_cores", lambda: 1)


def break_disk(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shutil, "disk_usage", lambda path: Usage(2**30, 2**30, 0))


def break_system(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("sys.platform", "darwin")


def break_ports(patch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    patch.setattr(socket, "create_connection", refuse)


def break_versions(patch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version
    patch.setattr(
        importlib.metadata, "version", lambda name: "0.1" if name == "ipywidgets" else version(name)
    )


def break_installation(patch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> str:
        if name == "anywidget":
            raise importlib.metadata.PackageNotFoundError(name)
        return "999"

    patch.setattr(importlib.metadata, "version", find)


def break_frameworks(patch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> str:
        if name in ("deepspeed", "megatron-core"):
            raise importlib.metadata.PackageNotFoundError(name)
        return "999"

    patch.setattr(importlib.metadata, "version", find)


def test_a_machine_that_has_all_is_ready(tmp_path: Path) -> None:
    for package in ("torch", "jupyter_client", "deepspeed", "megatron"):
        skip_without(package)
    table = check_machine(tmp_path)
    memory = {check.name for check in table.checks if check.name.endswith("free memory")}
    assert set(find_failed(table)) <= memory, str(table)
    assert table.verdict.startswith("This machine is ready") or memory & set(find_failed(table))


@pytest.mark.parametrize(
    ("break_it", "name", "fix"),
    [
        (break_cores, "2 cores", "--cpus=2"),
        (break_disk, "folder of runs", "ended runs"),
        (break_disk, "shared memory (/dev/shm)", "--shm-size"),
        (break_system, "Linux", "WSL 2"),
        (break_ports, "ports of this machine", "127.0.0.1"),
        (break_versions, "ipywidgets", 'pip install "ipywidgets>='),
        (break_installation, "anywidget", "make env"),
        # Notebooks 05 to 08 train with them.
        (break_frameworks, "deepspeed", "megatron"),
        (break_frameworks, "megatron-core", "deepspeed"),
    ],
)
def test_what_is_missing_is_named_with_its_fix(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    break_it: Callable[[pytest.MonkeyPatch], None],
    name: str,
    fix: str,
) -> None:
    break_it(monkeypatch)
    table = check_machine(tmp_path)
    assert not table and name in table.verdict
    check = find_failed(table)[name]
    assert fix in check.fix and check.found
    assert f"fix: {check.fix}" in str(table) and "FAILED" in str(table)
    assert "<b>failed</b>" in table._repr_html_()


def test_a_folder_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "answers").write_text("a file in the place of the folder")
    (tmp_path / "shared").write_text("")
    assert "home folder" in find_failed(check_machine(tmp_path))["folder of answers"].fix
    monkeypatch.setenv("SHARDSCOPE_ANSWERS", str(tmp_path / "shared"))
    assert "SHARDSCOPE_ANSWERS" in find_failed(check_machine(tmp_path))["folder of answers"].fix


def test_a_launch_that_raises_is_a_failed_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.platform", "win32")
    table = check_run(tmp_path)
    assert not table and "needs Linux" in table.checks[0].found


@thorough()
def test_the_notebook_prints_its_tables(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for package in ("torch", "jupyter_client"):
        skip_without(package)
    notebook = tmp_path / "check.ipynb"
    shutil.copy(REPOSITORY / "notebooks" / "91_workshop_check.ipynb", notebook)
    execute_notebook(notebook)
    printed = capsys.readouterr().out
    assert "ports of this machine" in printed
    assert "a run on two ranks  3 steps" in printed
