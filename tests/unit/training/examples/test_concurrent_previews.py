"""A cell and the form of a fine-tune read the same data at the same time, each in its thread."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.requirements import needs
from tests.weights_folders import write_folder

import shardscope as ss

needs("transformers")
needs("datasets")


def test_previews_in_several_threads_are_all_made(tmp_path: Path) -> None:
    folder, data = write_folder(tmp_path / "small"), tmp_path / "rows.jsonl"
    rows = [{"prompt": f"Who is number {number}?", "completion": "Ahab."} for number in range(20)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with ThreadPoolExecutor(4) as pool:
        previews = list(pool.map(lambda _: ss.Finetune(folder, data).preview(), range(24)))
    assert {preview.num_rows for preview in previews} == {20}
