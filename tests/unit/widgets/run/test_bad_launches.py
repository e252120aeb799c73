"""Tests of failing launches in the Studio: each shows an error at the button and leaves nothing behind.

The toolkit's own errors are tested in tests/runs/test_launch.py and test_free_memory.py.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from fake_gpus import GIB, TOTAL, pretend_cards
from tests.requirements import needs_installed, sample

import shardscope as ss
from shardscope.records.json_files import append_line
from shardscope.runs.backends import this_machine
from shardscope.runs.backends.this_machine import max_cpu_ranks
from shardscope.runs.launch import launch as launch_module
from shardscope_widgets import RunView, Studio

pytestmark = needs_installed("torch")


@pytest.fixture
def work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The notebook's folder. No supervisor is started, so that a launched run stays in its first status."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(this_machine, "start_supervisor", lambda *_: None)
    return tmp_path


@pytest.fixture
def studio(work_folder: Path) -> Iterator[Studio]:
    studio = Studio()
    yield studio
    for run in ss.runs(work_folder / "runs") if (work_folder / "runs").is_dir() else ():
        mark_stopped(run)
    studio.close()


def mark_stopped(run: ss.Run) -> None:
    append_line(run.folder / "status.jsonl", {"time": 1.0, "status": "stopped", "reason": "by the test"})


def read_messages(studio: Studio) -> str:
    """Return the text of the launch note and of the notice under the head."""
    return unescape(re.sub("<[^>]+>", "", studio.launch.note.value + studio.notice.value))


def test_fault_23_unwritable_run_folder_is_reported(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    """No user can create a folder in /proc, not even root."""
    monkeypatch.chdir("/proc")
    studio.launch.button.click()
    assert re.search(
        r"The run folder /proc/runs.*cannot be written: .*Nearest fix: a writable folder=",
        read_messages(studio),
    )
    assert "role='alert'" in studio.notice.value
    assert not studio.launch.button.disabled and studio.run is None


def test_fault_23_file_named_runs_and_full_disk_are_reported(
    studio: Studio, work_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (work_folder / "runs").touch()
    studio.launch.button.click()
    assert "is a file" in read_messages(studio)
    (work_folder / "runs").unlink()

    def raise_disk_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(launch_module, "write_task", raise_disk_full)
        studio.launch.button.click()
    assert "No space left on device" in read_messages(studio)
    assert not (work_folder / "runs").exists(), "the partial run folder is removed"


def test_fault_23_full_disk_after_the_launch_still_shows_the_run(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_disk_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ss.Run, "note", property(lambda _: "", raise_disk_full))
    studio.launch.button.click()
    assert studio.run is not None and studio.run_view.run is studio.run
    assert "A run is active" in read_messages(studio)


def test_fault_24_deleted_run_folder_is_shown_as_lost(studio: Studio) -> None:
    studio.launch.button.click()
    run = studio.run
    assert run is not None and studio.launch.button.disabled
    shutil.rmtree(run.folder)
    view = RunView(run)
    view.refresh()
    assert view.status == "lost" and "its folder is gone" in view.head.value
    view.close()


@sample(2)
@pytest.mark.parametrize("count", ["0", "-1", "1e9", "two", ""])
def test_fault_18_invalid_gpu_count_disables_the_launch(studio: Studio, count: str) -> None:
    plan = studio.plan
    studio.cluster.count.value = count
    errors = " ".join(row.message for row in studio.cluster.rows.values())
    assert "allowed: " in errors and studio.launch.button.disabled
    assert "Correct the input marked in red" in read_messages(studio)
    assert studio.plan is plan


def test_fault_18_more_gpus_or_ranks_than_the_machine_has(studio: Studio, work_folder: Path) -> None:
    """For too many GPUs the button offers a trial on CPU ranks; too many CPU ranks raise an error."""
    assert studio.launch.button.description == "Try a tiny model on 2 CPU ranks"
    ranks = max_cpu_ranks() + 1
    cluster, recipe = ss.Cluster.parse(f"{ranks}xcpu"), ss.Recipe(seq_len=64, global_batch_size=ranks)
    studio.apply(ss.Plan(ss.Architecture.of_size("2m"), cluster, recipe, ss.Layout.ddp()))
    assert studio.launch.button.description == f"Launch on {ranks} CPU ranks"
    studio.launch.button.click()
    assert f"plan.world_size is {ranks}" in read_messages(studio) and f"1 to {ranks - 1}" in read_messages(
        studio
    )
    assert not (work_folder / "runs").exists()


def test_fault_16_launches_in_the_same_second_get_distinct_names(studio: Studio, work_folder: Path) -> None:
    second = Studio()
    studio.launch.button.click()
    second.launch.button.click()
    assert studio.run is not None and second.run is not None
    assert studio.run.name != second.run.name and len(ss.runs(work_folder / "runs")) == 2
    mark_stopped(second.run)
    second.close()


def open_studio_on_gpus(monkeypatch: pytest.MonkeyPatch, free: list[int], users: Any = None) -> Studio:
    pretend_cards(monkeypatch, free, users)
    studio = Studio()
    studio.cluster.use_machine.click()
    studio.architecture.name.value = "llama-3.2-1b"
    assert studio.launch.button.description == "Launch on 2 GPUs"
    return studio


def test_second_launch_names_the_run_that_uses_the_gpus(
    work_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_studio_on_gpus(monkeypatch, [TOTAL, TOTAL])
    first.launch.button.click()
    assert first.run is not None and first.run.gpus == [0, 1], read_messages(first)
    gpu_user = f"the run {first.run.name} is starting on GPU 0, 1: run.stop() ends it"
    # The memory is still free: the run is launched, with a note above the charts.
    second = open_studio_on_gpus(monkeypatch, [TOTAL, TOTAL])
    second.launch.button.click()
    assert second.run is not None and second.run.note == gpu_user
    mark_stopped(second.run)
    # The memory is in use: the launch fails unless a second button is pressed.
    third = open_studio_on_gpus(monkeypatch, [2 * GIB, 2 * GIB], [(42, 77 * GIB)])
    third.launch.button.click()
    assert (
        third.run is None
        and gpu_user in read_messages(third)
        and "2.00 of 79.6 GiB free" in read_messages(third)
    )
    third.notice.press_button("Launch anyway")
    assert third.run is not None and "GPU 0 has 2.00 of 79.6 GiB free" in third.run.note
    for studio in (first, second, third):
        assert studio.run is not None
        mark_stopped(studio.run)
        studio.close()


def test_fault_07_new_studio_opens_an_active_run(studio: Studio) -> None:
    studio.launch.button.click()
    run = studio.run
    assert run is not None and studio.run_view.run is run, "a launched run is opened"
    other = Studio()
    other.tabs.value = "Runs"
    assert run.name in other.runs.table.value and "data-status='starting'" in other.runs.table.value
    other.runs.table.press_button("open:../somewhere")
    assert other.run_view.run is None and "is not an action of this view" in other.runs.table.error
    other.runs.table.press_button(re.search("open:[0-9a-f]+", other.runs.table.value)[0])  # type: ignore[index]
    assert other.run_view.run is not None and other.run_view.run.folder == run.folder
    mark_stopped(run)
    other.close()
