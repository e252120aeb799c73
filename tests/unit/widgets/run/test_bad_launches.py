"""Launches that cannot be, pressed in the Studio: each is said in words at its button, and nothing is left.

The toolkit's own refusals are in tests/runs/test_launch.py and test_free_memory.py.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from pretended_gpus import GIB, TOTAL, pretend_cards
from tests.needs import needs_installed

import shardscope as ss
from shardscope.records.files import append_line
from shardscope.runs.launch import launch as launch_module
from shardscope.runs.launch.launch import max_cpu_ranks
from shardscope_widgets import RunView, Studio

pytestmark = needs_installed("torch")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the notebook is. No supervisor comes up: what is launched stays at its beginning."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch_module, "_start_supervisor", lambda *_: None)
    return tmp_path


@pytest.fixture
def studio(here: Path) -> Iterator[Studio]:
    made = Studio()
    yield made
    for run in ss.runs(here / "runs") if (here / "runs").is_dir() else ():
        end(run)
    made.close()


def end(run: ss.Run) -> None:
    append_line(run.folder / "status.jsonl", {"time": 1.0, "status": "stopped", "reason": "by the test"})


def said(studio: Studio) -> str:
    """Return the words about the button, and those of the notice under the head."""
    return unescape(re.sub("<[^>]+>", "", studio.launch.note.value + studio.notice.value))


def test_fault_23_unwritable_run_folder_is_reported(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc takes no folder from anybody, root included."""
    monkeypatch.chdir("/proc")
    studio.launch.button.click()
    assert re.search(
        r"The run folder /proc/runs.*cannot be written: .*Nearest fix: a writable folder=", said(studio)
    )
    assert "role='alert'" in studio.notice.value
    assert not studio.launch.button.disabled and studio.run is None


def test_fault_23_file_named_runs_and_full_disk_are_reported(
    studio: Studio, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "runs").touch()
    studio.launch.button.click()
    assert "is a file" in said(studio)
    (here / "runs").unlink()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(launch_module, "write_task", full)
        studio.launch.button.click()
    assert "No space left on device" in said(studio)
    assert not (here / "runs").exists(), "the name is free, and so is the room"


def test_fault_23_full_disk_after_the_launch_still_shows_the_run(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ss.Run, "note", property(lambda _: "", full))
    studio.launch.button.click()
    assert studio.run is not None and studio.run_view.run is studio.run
    assert "A run is active" in said(studio)


def test_fault_24_deleted_run_folder_is_shown_as_lost(studio: Studio) -> None:
    studio.launch.button.click()
    run = studio.run
    assert run is not None and studio.launch.button.disabled
    shutil.rmtree(run.folder)
    view = RunView(run)
    view.refresh()
    assert view.status == "lost" and "its folder is gone" in view.head.value
    view.close()


@pytest.mark.parametrize("count", ["0", "-1", "1e9", "two", ""])
def test_fault_18_invalid_gpu_count_disables_the_launch(studio: Studio, count: str) -> None:
    plan = studio.plan
    studio.cluster.count.value = count
    errors = " ".join(row.message for row in studio.cluster.rows.values())
    assert "allowed: " in errors and studio.launch.button.disabled
    assert "Correct the input marked in red" in said(studio)
    assert studio.plan is plan


def test_fault_18_more_gpus_or_ranks_than_the_machine_has(studio: Studio, here: Path) -> None:
    """More GPUs than here are rehearsed on CPU ranks, and the button says so; more CPU ranks are refused."""
    assert studio.launch.button.description == "Try a tiny model on 2 CPU ranks"
    ranks = max_cpu_ranks() + 1
    cluster, recipe = ss.Cluster.parse(f"{ranks}xcpu"), ss.Recipe(seq_len=64, global_batch_size=ranks)
    studio.apply(ss.Plan(ss.Architecture.of_size("2m"), cluster, recipe, ss.Layout.ddp()))
    assert studio.launch.button.description == f"Launch on {ranks} CPU ranks"
    studio.launch.button.click()
    assert f"plan.world_size is {ranks}" in said(studio) and f"1 to {ranks - 1}" in said(studio)
    assert not (here / "runs").exists()


def test_fault_16_launches_in_the_same_second_get_distinct_names(studio: Studio, here: Path) -> None:
    second = Studio()
    studio.launch.button.click()
    second.launch.button.click()
    assert studio.run is not None and second.run is not None
    assert studio.run.name != second.run.name and len(ss.runs(here / "runs")) == 2
    end(second.run)
    second.close()


def on_gpus(monkeypatch: pytest.MonkeyPatch, free: list[int], users: Any = None) -> Studio:
    pretend_cards(monkeypatch, free, users)
    made = Studio()
    made.cluster.use_machine.click()
    made.architecture.name.value = "llama-3.2-1b"
    assert made.launch.button.description == "Launch on 2 GPUs"
    return made


def test_second_launch_names_the_run_that_uses_the_gpus(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = on_gpus(monkeypatch, [TOTAL, TOTAL])
    first.launch.button.click()
    assert first.run is not None and first.run.gpus == [0, 1], said(first)
    holds = f"the run {first.run.name} is starting on GPU 0, 1: run.stop() ends it"
    # Its memory is still free: launched, and said above the charts.
    second = on_gpus(monkeypatch, [TOTAL, TOTAL])
    second.launch.button.click()
    assert second.run is not None and second.run.note == holds
    end(second.run)
    # Its memory is taken: refused, unless a second button is pressed.
    third = on_gpus(monkeypatch, [2 * GIB, 2 * GIB], [(42, 77 * GIB)])
    third.launch.button.click()
    assert third.run is None and holds in said(third) and "2.00 of 79.6 GiB free" in said(third)
    third.notice.press_button("Launch anyway")
    assert third.run is not None and "GPU 0 has 2.00 of 79.6 GiB free" in third.run.note
    for each in (first, second, third):
        assert each.run is not None
        end(each.run)
        each.close()


def test_fault_07_new_studio_opens_an_active_run(studio: Studio) -> None:
    studio.launch.button.click()
    run = studio.run
    assert run is not None and studio.run_view.run is run, "a run that is launched is opened"
    other = Studio()
    other.tabs.value = "Runs"
    assert run.name in other.runs.table.value and "data-status='starting'" in other.runs.table.value
    other.runs.table.press_button("open:../somewhere")
    assert other.run_view.run is None and "is not an action of this view" in other.runs.table.error
    other.runs.table.press_button(re.search("open:[0-9a-f]+", other.runs.table.value)[0])  # type: ignore[index]
    assert other.run_view.run is not None and other.run_view.run.folder == run.folder
    end(run)
    other.close()
