"""A cell and the form of a fine-tune read the same data at the same time, each in its thread."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.requirements import needs
from tests.weights_folders import write_folder

import shardscope as ss
from shardscope.machine.hub import HubProblem
from shardscope.training.examples import rows as data_rows

needs("transformers")
needs("datasets")


def test_two_reads_without_the_hub_leave_datasets_online(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    problem = HubProblem("the Hub cannot be reached", "the network", is_unreachable=True)
    monkeypatch.setattr(data_rows, "find_hub_problem", lambda *_: problem)
    seen = list[bool]()

    def load(*_: object, **__: object) -> None:
        time.sleep(0.2)  # Until the other thread waits.
        seen.append(datasets.config.HF_HUB_OFFLINE)

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: data_rows.load_hub("Finetune.data", "acme/rows", streaming=False), range(2)))
    assert seen == [True, True] and not datasets.config.HF_HUB_OFFLINE


def test_previews_in_several_threads_are_all_made(tmp_path: Path) -> None:
    folder, data = write_folder(tmp_path / "small"), tmp_path / "rows.jsonl"
    rows = [{"prompt": f"Who is number {number}?", "completion": "Ahab."} for number in range(20)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with ThreadPoolExecutor(4) as pool:
        previews = list(pool.map(lambda _: ss.Finetune(folder, data).preview(), range(24)))
    assert {preview.num_rows for preview in previews} == {20}
