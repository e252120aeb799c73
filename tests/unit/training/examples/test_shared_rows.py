"""Rows of the validation data that are trained on as well are counted before a launch, in the preview."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.requirements import needs
from tests.weights_folders import write_folder

import shardscope as ss
from shardscope.records.json_files import read_json
from shardscope.training.data.batches import split_rows
from shardscope.training.data.weights_tokenizer import WeightsTokenizer
from shardscope.training.examples.encoding import Encoder
from shardscope.training.examples.source_record import COUNTS
from shardscope.training.tasks import finetune_rows
from shardscope.training.tasks.finetune_rows import FinetuneRows
from shardscope.training.tasks.finetune_tokens import VALIDATION_TOKENS, write_tokens
from shardscope.training.weights.weights_folder import WeightsFolder

needs("transformers")
needs("datasets")

ROWS = [{"prompt": f"Who is number {number}?", "completion": "Ahab."} for number in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("weights") / "small")


def test_a_preview_counts_validation_rows_that_are_trained_on(folder: Path) -> None:
    # The same rows in another format.
    shared = [{"instruction": row["prompt"], "output": row["completion"]} for row in ROWS[:3]]
    others = [{"instruction": "Who else?", "output": "Ishmael."}]
    preview = ss.Finetune(folder, ROWS, validation=shared + others).preview()
    assert preview.num_shared_rows == 3 and "trained on as well: 3." in str(preview)


def test_repeated_rows_are_shared_by_a_fraction_for_validation(folder: Path) -> None:
    assert ss.Finetune(folder, ROWS, validation=0.2).preview().num_shared_rows == 0
    # Each of the eight rows for validation has a second copy, which is for training unless drawn as well.
    assert ss.Finetune(folder, ROWS * 2, validation=0.1).preview().num_shared_rows in range(4, 9)


def test_a_run_records_how_many_validation_examples_are_trained_on(folder: Path, tmp_path: Path) -> None:
    rows = FinetuneRows(
        task="Finetune",
        data=ROWS,
        validation=[*ROWS[:3], {"prompt": "Who else?", "completion": "Ishmael."}],
        columns=None,
        objective="sft",
        bad_rows="refuse",
        streaming=False,
        seed=0,
    )
    encoder = Encoder(WeightsTokenizer(WeightsFolder(folder, "weights")).load(), "completions")
    write_tokens(rows, encoder, ss.Recipe(seq_len=64), tmp_path)
    counts = read_json(tmp_path / VALIDATION_TOKENS / COUNTS)
    assert counts is not None and (counts["num_shared_examples"], counts["num_examples"]) == (3, 4)


def test_a_validation_share_of_bad_rows_only_is_refused_as_such(folder: Path, tmp_path: Path) -> None:
    drawn = split_rows(10, 0.1, seed=0)[1]
    data = [{**row, "completion": "" if index in drawn else "Ahab."} for index, row in enumerate(ROWS[:10])]
    rows = FinetuneRows(
        task="Finetune",
        data=data,
        validation=0.1,
        columns=None,
        objective="sft",
        bad_rows="skip",
        streaming=False,
        seed=0,
    )
    encoder = Encoder(WeightsTokenizer(WeightsFolder(folder, "weights")).load(), "completions")
    with pytest.raises(ValueError, match=r"Finetune\.validation.* 1 row of 10.*completion is empty"):
        write_tokens(rows, encoder, ss.Recipe(seq_len=64), tmp_path)


def test_preview_names_files_that_are_not_read(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name in ("train.jsonl", "dev-ops.jsonl"):
        (data / name).write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert "dev-ops.jsonl" in str(ss.Finetune(folder, data).preview())
    (data / "dev-ops.jsonl").rename(data / "operations.jsonl")
    assert "Not read" not in str(ss.Finetune(folder, data).preview())


def test_without_validation_data_nothing_is_shared(folder: Path) -> None:
    preview = ss.Finetune(folder, ROWS).preview()
    assert preview.num_shared_rows == 0 and "validation" not in str(preview)


def test_large_data_are_not_compared_in_a_preview(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finetune_rows, "MAX_COMPARED_ROWS", 30)
    preview = ss.Finetune(folder, ROWS, validation=ROWS[:2]).preview()
    assert preview.num_shared_rows is None and "validation" not in str(preview)
