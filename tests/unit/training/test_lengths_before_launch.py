"""Rows and texts that are too long or too short for ``seq_len`` are refused before a rank starts."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import needs
from tests.weights_folders import write_chat_folder

import shardscope as ss
from shardscope.core.errors import FieldError

needs("transformers")
needs("datasets")

SHORT = {"prompt": "Who?", "completion": "Ahab"}
LONG = {"prompt": "whale " * 60, "completion": "Yes"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_folder(tmp_path_factory.mktemp("weights") / "small", max_position_embeddings=256)


def check_launch(folder: Path, data: Any, runs_folder: Path, seq_len: int = 32, **fields: Any) -> None:
    recipe = ss.Recipe(seq_len=seq_len, global_batch_size=2, precision="fp32")
    plan = ss.Plan(ss.Architecture.from_hf(folder), ss.Cluster.parse("2xcpu"), recipe, ss.Layout.ddp())
    ss.Finetune(folder, data, num_steps=1, **fields).check_launch(plan, runs_folder, None)


def test_a_prompt_longer_than_the_sequence_is_refused_with_the_length_that_keeps_it(
    folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(FieldError, match=r"Row 2: seq_len=32 .*keeps it, or .*bad_rows='skip'") as refused:
        check_launch(folder, [SHORT, LONG, SHORT], tmp_path)
    assert refused.value.field == "Finetune.data"
    suggested = int(refused.value.fix.partition("seq_len=")[2].partition(")")[0])
    check_launch(folder, [SHORT, LONG, SHORT], tmp_path, suggested)


def test_the_suggested_length_keeps_as_many_rows_as_the_model_can_read(folder: Path, tmp_path: Path) -> None:
    longest = {"prompt": "whale " * 2000, "completion": "Yes"}
    with pytest.raises(FieldError, match=r"Recipe\(seq_len=256\), which keeps 2 of them"):
        check_launch(folder, [SHORT, LONG, longest, LONG], tmp_path)


def test_rows_that_the_task_leaves_out_or_learns_all_of_are_no_reason_to_refuse(
    folder: Path, tmp_path: Path
) -> None:
    check_launch(folder, [SHORT, LONG], tmp_path, bad_rows="skip_truncated")
    check_launch(folder, [SHORT, LONG], tmp_path, loss_on="all")
    with pytest.raises(FieldError, match="1 row without"):
        check_launch(folder, [LONG], tmp_path, bad_rows="skip")


def test_validation_rows_are_checked_as_well(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FieldError, match=r"^Finetune\.validation is .*Row 2"):
        check_launch(folder, [SHORT], tmp_path, validation=[SHORT, LONG])


def test_fewer_prompts_for_samples_than_requested_are_reported(folder: Path, tmp_path: Path) -> None:
    other = {"prompt": "Whom?", "completion": "The whale"}
    with pytest.warns(RuntimeWarning, match=r"Finetune\.samples is 3, and 2 will be answered"):
        check_launch(folder, [SHORT] * 600 + [other], tmp_path, samples=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_launch(folder, [SHORT] * 600 + [other], tmp_path, samples=2, export=True)


def test_a_text_shorter_than_a_sequence_is_refused(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("Call me Ishmael. " * 6)
    with pytest.raises(FieldError, match=r"tokens of the text\. Nearest fix: seq_len=(\d+)") as refused:
        check_launch(folder, text, tmp_path, 128)
    assert refused.value.field == "Recipe.seq_len"
    num_tokens = int(refused.value.fix.partition("=")[2].partition(",")[0])
    check_launch(folder, text, tmp_path, num_tokens)
    # With a part of it for validation there are two windows.
    with pytest.raises(FieldError, match=r"^Finetune\.validation is 0\.1"):
        check_launch(folder, text, tmp_path, num_tokens, validation=0.1)
    check_launch(folder, text, tmp_path, num_tokens // 2, validation=0.1)


def test_a_sample_that_leaves_no_room_for_an_answer_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FieldError, match=r"^Finetune\.samples is .a prompt of \d+ tokens.*seq_len=32"):
        check_launch(folder, [SHORT], tmp_path, samples=["Who?", "whale " * 60])
    # Of rows, those with shorter prompts are taken.
    check_launch(folder, [SHORT, LONG], tmp_path, samples=2, bad_rows="skip")
    with pytest.raises(FieldError, match=r"^Finetune\.samples is 1; .*no row has one shorter") as refused:
        check_launch(folder, [LONG], tmp_path, samples=1, loss_on="all")
    assert refused.value.fix_values is not None
    check_launch(folder, [LONG], tmp_path, loss_on="all", **refused.value.fix_values)
