"""The button that merges a run's adapters: where it is shown, its progress, its result and its errors."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_runs import wait_until
from written_runs import write_run

import shardscope as ss
from shardscope_widgets import ChatView, RunView
from shardscope_widgets.run import model_panel
from shardscope_widgets.run.model_panel import ModelPanel, has_adapters


class FakeMerge:
    """A merge that goes on until it is allowed to end."""

    def __init__(self) -> None:
        self.allowed = threading.Event()
        self.started: list[ss.Run] = []
        self.is_cancelled = False
        self.error: Exception | None = None

    def __call__(self, run: ss.Run, out: None, report: Any) -> Path:
        self.started.append(run)
        try:
            while not self.allowed.wait(0.02):
                report("writing", 0.7)
        except BaseException:
            self.is_cancelled = True
            raise
        if self.error is not None:
            raise self.error
        write_merged(run)
        return run.folder / "merged"


@pytest.fixture
def merge(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMerge]:
    fake = FakeMerge()
    monkeypatch.setattr(model_panel, "merge_with_progress", fake)
    yield fake
    fake.allowed.set()


def write_adapter_run(parent: Path, status: str = "finished", name: str = "a<b>") -> ss.Run:
    folder = write_run(name, status, parent=parent, task=ss.Pretrain(num_steps=20, export=True))
    description = json.loads((folder / "run.json").read_text())
    description["base"] = {"weights": "/secret-place/<i>llama", "sample": "s"}
    (folder / "run.json").write_text(json.dumps(description))
    (folder / "export").mkdir()
    (folder / "export" / "adapter_config.json").write_text("{}")
    return ss.Run.attach(folder)


def write_merged(run: ss.Run) -> None:
    (run.folder / "merged").mkdir()
    (run.folder / "merged" / "config.json").write_text("{}")


def find_panel(view: RunView) -> ModelPanel:
    assert wait_until(lambda: bool(view.model_place.children))
    (panel,) = view.model_place.children
    assert isinstance(panel, ModelPanel)
    return panel


def test_the_run_view_merges_without_blocking_and_shows_the_path(tmp_path: Path, merge: FakeMerge) -> None:
    view = RunView(write_adapter_run(tmp_path))
    panel = find_panel(view)
    words = panel.work.words.value
    assert "LoRA adapters over &lt;i&gt;llama" in words and "secret-place" not in words
    panel.work.button.click()  # Returns although the merge is not allowed to end.
    assert wait_until(lambda: "writing" in panel.work.words.value and panel.work.progress.value == 0.7)
    assert panel.work.button.disabled
    merge.allowed.set()
    assert wait_until(lambda: not panel.work.is_busy)
    words = panel.work.words.value
    assert "a&lt;b&gt;/merged" in words and "<b>" not in words
    assert words.count("data-copy=") == 2 and "convert_hf_to_gguf.py" in words and "not tested" in words
    view.close()


def test_an_earlier_merge_is_shown_at_once(tmp_path: Path) -> None:
    run = write_adapter_run(tmp_path)
    write_merged(run)
    panel = ModelPanel(run)
    assert "a&lt;b&gt;/merged" in panel.work.words.value and not panel.work.button.disabled
    panel.close()


def test_an_error_is_shown_and_the_button_works_again(tmp_path: Path, merge: FakeMerge) -> None:
    panel = ModelPanel(write_adapter_run(tmp_path))
    merge.error = ValueError("the base <b>has changed</b>")
    merge.allowed.set()
    panel.work.button.click()
    assert wait_until(lambda: "role='alert'" in panel.work.words.value)
    assert "the base &lt;b&gt;has changed" in panel.work.words.value
    assert wait_until(lambda: not panel.work.is_busy) and not panel.work.button.disabled
    panel.close()


def test_cancel_and_closing_end_the_merge(tmp_path: Path, merge: FakeMerge) -> None:
    panel = ModelPanel(write_adapter_run(tmp_path))
    panel.work.button.click()
    assert wait_until(lambda: bool(merge.started))
    panel.work.cancel.click()
    assert wait_until(lambda: "Cancelled" in panel.work.words.value) and merge.is_cancelled
    merge.is_cancelled = False
    assert wait_until(lambda: not panel.work.is_busy)
    panel.work.button.click()
    assert wait_until(lambda: len(merge.started) == 2)
    panel.close()
    assert wait_until(lambda: merge.is_cancelled)


def test_a_merge_goes_on_while_the_view_shows_another_run(tmp_path: Path, merge: FakeMerge) -> None:
    first, second = write_adapter_run(tmp_path, name="first"), write_adapter_run(tmp_path, name="second")
    view = RunView(first)
    panel = find_panel(view)
    panel.work.button.click()
    assert wait_until(lambda: bool(merge.started))
    view.show(second)
    assert find_panel(view).run is second
    view.show(first)
    assert find_panel(view) is panel and panel.work.is_busy and not merge.is_cancelled
    view.show(second)
    view.close()
    assert wait_until(lambda: merge.is_cancelled)


@pytest.mark.parametrize("status", ["running", "failed", "finished"])
def test_only_an_ended_run_with_adapters_has_the_button(status: str, tmp_path: Path) -> None:
    run = write_adapter_run(tmp_path, status)
    assert has_adapters(run) == (status != "running")
    (run.folder / "export" / "adapter_config.json").unlink()
    assert not has_adapters(run)
    assert not has_adapters(ss.Run.attach(write_run("bare", parent=tmp_path)))


def test_the_chat_has_the_button_as_well(tmp_path: Path) -> None:
    view = ChatView(write_adapter_run(tmp_path))
    assert any(isinstance(part, ModelPanel) for part in view.children)
    view.close()
