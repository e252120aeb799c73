"""Tests of the samples of a run view: the first, the best and the latest answer of each prompt."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from fake_runs import FakeRun, record, wait_until

from shardscope.records.samples import append_samples, read_samples
from shardscope_widgets import RunView


def add(run: FakeRun, step: int, text: str, prompt: str = "Who?", *, is_complete: bool = True) -> None:
    sample: Any = {"step": step, "prompt": prompt, "text": text, "is_complete": is_complete}
    append_samples(run.folder, [sample])


def list_cells(html: str) -> list[str]:
    cells = re.findall("<t[hd].*?</t[hd]>", html)
    return [re.sub("<[^>]*>", "", cell.replace("<div", ", <div")) for cell in cells]


@pytest.mark.parametrize("trains_the_plan", [True, False])
def test_the_view_shows_the_first_the_best_and_the_latest_answers_while_training(
    trains_the_plan: bool,
) -> None:
    run = FakeRun([record(step=0, validation_loss=0.1)])
    # The view counts the steps of our own loop from 1, and those of a user's code as they are logged.
    run.trains_the_plan = trains_the_plan
    run.task_fields = {"samples": ["Who?"]}
    view = RunView(run)  # type: ignore[arg-type]
    assert list_cells(view.samples.html.value) == ["Before training", "Who?", "not generated yet"]
    # Cut within a character of several tokens.
    add(run, 0, "I am <b>not</b> sure\ufffd", is_complete=False)
    expected = ["Before training, validation loss 0.100", "Who?", "I am &lt;b&gt;not&lt;/b&gt; sure …"]
    assert wait_until(lambda: list_cells(view.samples.html.value) == expected)
    # The loss of the initial weights is the lowest, but they are never the best.
    for step, loss, text in ((0, 3.0, "a mate"), (1, 2.0, "Ahab"), (2, 2.5, "")):
        run.records.append(record(step=step, validation_loss=loss))
        add(run, step + 1, text)
    heads = [
        expected[0],
        "After 2 steps · best, validation loss 2.000",
        "After 3 steps, validation loss 2.500",
    ]
    answers = ["Ahab", "an empty answer"]
    assert wait_until(lambda: list_cells(view.samples.html.value) == [*heads, "Who?", expected[2], *answers])
    run.records.append(record(step=3, validation_loss=1.5))
    add(run, 4, "Captain Ahab")
    assert wait_until(lambda: "After 4 steps · <b>best</b>" in view.samples.html.value)
    assert list_cells(view.samples.html.value)[-2:] == [expected[2], "Captain Ahab"]
    run.status = "finished"


def test_a_task_without_prompts_has_no_samples() -> None:
    run = FakeRun([record(loss=1.0)])
    run.task_fields = {"num_steps": 3}
    view = RunView(run)  # type: ignore[arg-type]
    assert wait_until(lambda: view.status == "running") and not view.samples.html.value
    run.status = "finished"


def test_lines_that_are_no_samples_are_left_out_and_texts_are_plain() -> None:
    run = FakeRun([])
    lines: list[Any] = [
        *({}, [], "x", {"step": -1, "prompt": "a", "text": "b"}, {"step": True, "prompt": "a", "text": "b"}),
        *({"step": 1, "prompt": None, "text": "b"}, {"step": 1, "prompt": "a", "text": ["b"]}),
        {"step": 1, "prompt": "a\x1b[31m", "text": "b\x00\nc", "is_complete": 1, "more": {}},
    ]
    (run.folder / "samples.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + "{")
    assert read_samples(run.folder) == [{"step": 1, "prompt": "a", "text": "b\nc", "is_complete": False}]
