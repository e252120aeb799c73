"""Rows in memory: lists of dicts, frames and ``datasets`` objects whose cells or columns are irregular."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy
import pytest
from tests.requirements import needs
from tests.weights_folders import write_folder

import shardscope as ss
from shardscope.core.errors import FieldError
from shardscope.training.examples.formats import read_example, recognize_format
from shardscope.training.examples.rows import Rows, describe_source, open_rows, resolve_source

needs("datasets")

FIELD = "Finetune.data"
GOOD = {"question": "Who?", "answer": "Ahab"}


def read_all(source: object) -> list[str]:
    """Return the answer of each row, or why it is malformed."""
    rows = open_rows(FIELD, resolve_source(FIELD, source))
    format = recognize_format(FIELD, rows.column_names, rows=rows)
    return [read_one(rows, format, index) for index in range(len(rows))]


def read_one(rows: Rows, format: Any, index: int) -> str:
    try:
        return read_example(format, rows[index]).messages[-1]["content"]
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "How many?", "answer": 3}, "answer is int"),
        ({"question": "How many?", "answer": float("nan")}, "answer is missing"),
        ({"question": "How many?", "answer": numpy.float32("nan")}, "answer is missing"),
        ({"question": "How many?"}, "answer is missing"),
        ({"question": "How many?", "answer": "cut \ud83d"}, "answer has \\ud83d, one half of a character"),
    ],
)
@pytest.mark.parametrize("as_frame", [False, True])
def test_a_cell_of_another_type_is_one_malformed_row(
    row: dict[str, object], reason: str, as_frame: bool
) -> None:
    import pandas

    rows = [GOOD, row, GOOD]
    answers = read_all(pandas.DataFrame(rows, dtype=object) if as_frame else rows)
    assert answers[0] == answers[2] == "Ahab" and answers[1].startswith(reason)


@pytest.mark.parametrize("bad_rows", ["refuse", "skip"])
def test_rows_that_are_all_empty_are_refused(bad_rows: Any, tmp_path: Path) -> None:
    needs("transformers")
    task = ss.Finetune(write_folder(tmp_path / "small"), [{"text": ""}] * 20, bad_rows=bad_rows)
    with pytest.raises(FieldError, match="text is empty"):
        task.preview()


@pytest.mark.parametrize("turn", [{"role": "assistant", "content": "Ahab"}, {"from": "gpt", "value": "Ahab"}])
def test_a_column_of_conversations_is_no_list_of_rows(turn: dict[str, str]) -> None:
    user = {"role": "user", "content": "Who?"} if "role" in turn else {"from": "human", "value": "Who?"}
    rows = [{"id": number, "dialog": [user, turn], "documents": [{"text": "A page"}]} for number in range(2)]
    for data in (rows, rows[:1]):
        with pytest.raises(FieldError, match=r'Nearest fix: columns=\{"messages": "dialog"\}'):
            read_all(data)


def test_keys_that_are_the_same_text_are_one_column() -> None:
    with pytest.raises(FieldError, match="data with the columns 1'; "):
        read_all([{1: "a"}, {"1": "b"}])


def test_rows_without_columns_are_no_rows() -> None:
    with pytest.raises(FieldError, match="data with at least one row"):
        read_all([{}, {}])


def test_bytes_are_no_text() -> None:
    assert read_all([GOOD, {**GOOD, "answer": b"Ahab"}])[1].startswith("answer is bytes")


def test_columns_of_a_list_are_those_of_all_its_dicts() -> None:
    rows = open_rows(FIELD, [GOOD, {**GOOD, "system": "You are Ishmael."}])
    assert rows.column_names == ["question", "answer", "system"]
    format = recognize_format(FIELD, rows.column_names)
    assert [len(read_example(format, rows[index]).messages) for index in (0, 1)] == [2, 3]


def test_open_rows_are_a_source_that_can_be_sent_to_ranks() -> None:
    rows = open_rows(FIELD, [GOOD, {"question": 1}])
    assert resolve_source(FIELD, rows) is open_rows(FIELD, rows) is rows
    assert describe_source(rows) == "a list of 2 rows"
    assert read_all(pickle.loads(pickle.dumps(rows)))[0] == "Ahab"


def test_messages_in_numpys_arrays_are_read(tmp_path: Path) -> None:
    import pandas

    chat = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ahab"}]
    path = tmp_path / "chats.parquet"
    pandas.DataFrame({"messages": [chat]}).to_parquet(path)
    frame = pandas.read_parquet(path)
    assert read_all(frame) == read_all(frame.to_dict("records")) == ["Ahab"]


@pytest.mark.parametrize("format", [{"type": "pandas"}, {"columns": ["answer"]}])
def test_the_output_format_of_a_data_set_does_not_matter(format: dict[str, Any]) -> None:
    import datasets

    assert read_all(datasets.Dataset.from_list([GOOD] * 2).with_format(**format)) == ["Ahab"] * 2


def test_a_frame_with_two_columns_of_a_name_is_refused() -> None:
    import pandas

    frame = pandas.DataFrame([["a", "b", "c"]], columns=["question", "question", "answer"])
    with pytest.raises(FieldError, match=r"two columns 'question'.*duplicated"):
        read_all(frame)


@pytest.mark.parametrize(
    ("source", "value", "fix"),
    [
        ((GOOD,), "tuple", "list(data)"),
        (iter([GOOD]), "list_iterator", "list(data)"),
        ({"question": ["Who?"], "answer": ["Ahab"]}, "dict", "pandas.DataFrame(data)"),
        ([GOOD, None], "a list with NoneType as item 2", "a list of dicts only"),
        (["Call me Ishmael."], "a list with str as item 1", '[{"text": text} for text in data]'),
        (["a.jsonl", "b.jsonl"], "a list with str as item 1", "a folder with these files"),
    ],
)
def test_objects_that_are_no_rows_are_refused_with_what_makes_rows_of_them(
    source: object, value: str, fix: str
) -> None:
    with pytest.raises(FieldError) as refused:
        resolve_source(FIELD, source)
    assert f"is '{value}';" in str(refused.value) and refused.value.fix == fix
