"""Files with unreadable lines, other encodings and numbers: what is refused, where, and what is skipped."""

from __future__ import annotations

import ast
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import needs

from shardscope.core.errors import FieldError
from shardscope.training.examples.column_names import list_text_columns
from shardscope.training.examples.file_rows import FileRows
from shardscope.training.examples.folder_files import describe_unread_files
from shardscope.training.examples.formats import read_example, recognize_format
from shardscope.training.examples.rows import load_files, open_rows, resolve_source
from shardscope.training.examples.source_record import hash_path
from shardscope.training.examples.streamed_rows import read_first_rows
from shardscope.training.tasks.finetune_rows import FinetuneRows

needs("datasets")

GOOD = '{"prompt": "Who?", "completion": "Ahab"}\n'
FIELD = "Finetune.data"


def write(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding=encoding)
    return path


def open_all(path: Path, bad_rows: str = "refuse") -> FileRows:
    rows = FinetuneRows(
        task="Finetune",
        data=path,
        validation=None,
        columns=None,
        objective="sft",
        bad_rows=bad_rows,  # type: ignore[arg-type]
        streaming=False,
        seed=0,
    ).open()
    assert isinstance(rows, FileRows)
    return rows


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_files_are_read_without_a_request(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    hosts: list[object] = []

    def refuse_address(host: object, *_: object, **__: object) -> list[Any]:
        hosts.append(host)
        raise OSError("no network")

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", refuse_address)
    rows = open_all(write(tmp_path / name, GOOD if name == "a.jsonl" else "prompt,completion\nWho?,Ahab\n"))
    assert len(rows) == 1 and not hosts and not datasets.config.HF_HUB_OFFLINE


HALF_PAIR = r'{"prompt": "x", "completion": "cut \ud83d"}'


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        # Of the two prompts the second one was ignored.
        ("prompt,completion,prompt\nWho?,Ahab,What?\n", "2 named 'prompt'.*rename or remove one"),
        ("sep=;\r\nprompt;completion\r\nWho?;Ahab\r\n", "'sep=;' there is a mark.*remove the first line"),
        ("sep=,\nprompt,completion\nWho?,Ahab\n", "'sep=,' there"),
    ],
)
def test_a_header_without_different_names_is_refused(
    text: str, message: str, streaming: bool, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.csv", text)
    with pytest.raises(FieldError, match=message):
        read_first_rows(FIELD, path) if streaming else open_all(path)
    with pytest.raises(FieldError, match=message):
        open_all(path, "skip")


@pytest.mark.parametrize("line", ['{"prompt": "x", "comp\n', "[1]\n", "7\n", f"{HALF_PAIR}\n"])
def test_an_unreadable_line_is_refused_or_an_empty_row(line: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", GOOD * 2 + line + GOOD)
    with pytest.raises(FieldError, match="line 3"):
        open_all(path)
    rows = open_all(path, "skip")
    assert [rows[index]["completion"] for index in range(len(rows))] == ["Ahab", "Ahab", None, "Ahab"]
    assert rows.describe_place(2) == "line 3 of a.jsonl"


def test_a_line_with_too_many_fields_is_refused_or_an_empty_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "prompt,completion\nWho?,Ahab\nWhat?,a,b,c\nWhere?,sea\n")
    with pytest.raises(FieldError, match="line 3"):
        open_all(path)
    rows = open_all(path, "skip")
    assert [rows[index]["completion"] for index in range(len(rows))] == ["Ahab", None, "sea"]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        # pandas says "line 3" and "line 5": it counts rows, and a cell of two lines is part of one.
        ('"two\nlines",x\nWhat?,a,b\n', "row in line 4 has 3.*repair or remove line 4"),
        ('"two\nlines",x\n  \n\nWhat?,a,b\n', "row in line 6 has 3"),
        # pandas takes the first column of these as an index, so that prompts are lost and answers move.
        ("Who, me?,Ahab\nWhat?,x\n", "row in line 2 has 3.*repair or remove line 2.*quotes"),
        ("Who?,Ahab,\nWhat?,x,y\n", "every row has more, the one in line 2 has 3.*name for the first column"),
        (
            "7,Who?,Ahab\n3,What?,x\n",
            "every row has more.*name for the first column to the header, or quotes",
        ),
        ("Who?,Ahab,\nWhat?,x\n", "row in line 2 has 3.*repair or remove line 2"),
        (
            "0,Who?,Ahab\n1,What?,x,y\n",
            "at most 3 cells, as the header and the row number have; .* line 3 has 4",
        ),
        ("Who?,Ahab,\nWhat?,x,y,\n", "as the header and the delimiter at the end have; .* line 3 has 4"),
        # Without its quote the last row would have fewer cells than the others.
        ('0,Who?,Ahab\n1,"What?,x\n', "in the row in line 3 is not"),
        ('Who?,Ahab\n"What?,x\nWhere?,sea\n', "in the row in line 3 is not.*2 lines"),
    ],
)
def test_the_line_of_a_table_that_cannot_be_read_is_named(
    text: str, message: str, streaming: bool, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.csv", "prompt,completion\n" + text)
    with pytest.raises(FieldError, match=message):
        read_first_rows(FIELD, path) if streaming else open_all(path)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("suffix", "first", "second", "message"),
    [
        (
            "csv",
            "prompt,completion\na,b\n",
            "q,a\nc,d\n",
            "a.csv has prompt and completion, and b.csv q and a",
        ),
        ("jsonl", GOOD, '{"q": "c", "a": "d"}\n', "a.jsonl has prompt and completion, and b.jsonl q and a"),
    ],
)
def test_a_file_with_other_columns_than_the_first_is_named(
    suffix: str, first: str, second: str, message: str, streaming: bool, tmp_path: Path
) -> None:
    write(tmp_path / f"a.{suffix}", first)
    write(tmp_path / f"b.{suffix}", second)
    with pytest.raises(FieldError, match=message) as error:
        read_first_rows(FIELD, tmp_path) if streaming else open_all(tmp_path)
    assert "rename the columns" in str(error.value)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("first", "second"), [(",", ";"), (";", ","), ("\t", ",")])
def test_a_file_with_another_delimiter_than_the_first_is_named(
    first: str, second: str, streaming: bool, tmp_path: Path
) -> None:
    """Its columns have the right names, so that nothing is there to rename."""
    for name, delimiter in (("a.csv", first), ("b.csv", second)):
        write(tmp_path / name, f"prompt{delimiter}completion\nWho?{delimiter}Ahab\n")
    with pytest.raises(FieldError) as error:
        read_first_rows(FIELD, tmp_path) if streaming else open_all(tmp_path)
    assert f"a.csv has {first!r}, and b.csv {second!r}" in str(error.value)
    assert f"save b.csv with {first!r} as its delimiter" in str(error.value)
    assert "rename" not in str(error.value)


def test_a_first_file_with_an_index_is_named_by_the_column_of_messages(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", ",prompt,completion\n0,Who?,Ahab\n")
    write(tmp_path / "b.csv", "prompt,completion\nWho?,Ahab\n")
    with pytest.raises(FieldError, match="has Unnamed: 0, prompt and completion, and b") as error:
        open_all(tmp_path)
    assert error.value.fix == "remove the column without a name from a.csv, or train on one of the files"


def test_a_file_with_other_columns_is_named_when_unreadable_lines_are_skipped(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", GOOD + "{\n[1]\n")
    other = write(tmp_path / "b.jsonl", '{"q": "c", "a": "d"}\n')
    with pytest.raises(
        FieldError, match=r"a\.jsonl has prompt and completion, and b\.jsonl q and a"
    ) as error:
        open_all(tmp_path, "skip")
    # Of the user's file, not of its readable copy. Long paths keep their end.
    assert str(error.value).startswith(f"{FIELD} is '")
    assert f"/{tmp_path.name}/{other.name}'; allowed" in str(error.value)


def test_a_quote_that_is_never_closed_is_refused_with_skip_too(tmp_path: Path) -> None:
    """All rows after it would be lost as one cell."""
    path = write(tmp_path / "a.csv", 'prompt,completion\nWho,me?,x\nWho?,"Ahab\nWhat?,x\nWhere?,sea')
    with pytest.raises(FieldError, match="in the row in line 3 is not"):
        open_all(path, "skip")


def test_a_first_row_with_too_many_cells_is_an_empty_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "prompt,completion\nWho, me?,Ahab\nWhat?,x\n")
    rows = open_all(path, "skip")
    assert [rows[index]["completion"] for index in range(len(rows))] == [None, "x"]


NUMBERED = ("0,Who?,Ahab\n1,What?,x\n", '"1","Who?","Ahab"\n"2","What?","x"\n')
"""Rows with row numbers that have no column: ``to_csv(index_label=False)``, and R's ``write.table``."""
ENDING = "Who?,Ahab,\nWhat?,x,\n"


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("text", [*NUMBERED, ENDING])
def test_a_cell_that_every_row_has_beside_its_columns_is_dropped(
    text: str, streaming: bool, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.csv", "prompt,completion\n" + text)
    rows = read_first_rows(FIELD, path) if streaming else open_all(path)
    expected = [{"prompt": "Who?", "completion": "Ahab"}, {"prompt": "What?", "completion": "x"}]
    assert [rows[index] for index in range(len(rows))] == expected
    assert rows.describe_place(1) == "line 3 of a.csv"


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        (NUMBERED[0] + "2,a,b,c\n3,Where?,sea\n", ["Ahab", "x", None, "sea"]),
        ("0,a,b,c\n1,Where?,sea\n", [None, "sea"]),
        (ENDING + "a,b,c,\n", ["Ahab", "x", None]),
    ],
)
def test_with_row_numbers_only_the_unreadable_rows_are_skipped(
    text: str, answers: list[str | None], tmp_path: Path
) -> None:
    rows = open_all(write(tmp_path / "a.csv", "prompt,completion\n" + text), "skip")
    assert [rows[index]["completion"] for index in range(len(rows))] == answers


def test_a_table_whose_rows_are_all_too_wide_is_refused_with_skip_too(tmp_path: Path) -> None:
    """No row would be left."""
    path = write(tmp_path / "a.csv", "prompt,completion\nx7,Who?,Ahab\nx8,What?,x\n")
    with pytest.raises(FieldError, match=r"every row has more.*add a name for the first column"):
        open_all(path, "skip")


def test_files_with_and_without_an_extra_cell_are_read_together(tmp_path: Path) -> None:
    write(tmp_path / "numbered" / "a.csv", "prompt,completion\n" + NUMBERED[0])
    write(tmp_path / "ending" / "a.csv", "prompt,completion\n" + ENDING)
    for folder in ("numbered", "ending"):
        write(tmp_path / folder / "b.csv", "prompt,completion\nWhere?,sea\n")
        rows = open_all(tmp_path / folder)
        assert [rows[index]["completion"] for index in range(len(rows))] == ["Ahab", "x", "sea"]
    write(tmp_path / "numbered" / "c.csv", "prompt,completion\n" + ENDING)
    with pytest.raises(FieldError, match="others end them with a delimiter"):
        open_all(tmp_path / "numbered")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        ",prompt,completion\n0,Who?,Ahab\n",  # pandas' to_csv with its index, the default.
        "prompt,completion,\nWho?,Ahab,\n",
        "\n  \nprompt,completion\n\nWho?,Ahab\n",
        " Prompt , Completion \nWho?,Ahab\n",
    ],
)
def test_columns_without_a_name_and_blank_lines_do_not_matter(
    text: str, streaming: bool, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.csv", text)
    rows = read_first_rows(FIELD, path) if streaming else open_all(path)
    format = recognize_format(FIELD, rows.column_names)
    assert [message["content"] for message in read_example(format, rows[0]).messages] == ["Who?", "Ahab"]
    assert rows.describe_place(0) == f"line {len(text.splitlines())} of a.csv"


@pytest.mark.parametrize(
    "header", [["Nr", "Frage", "Antwort"], ["Unnamed: 0", "user_id", "Frage", "Antwort"]]
)
def test_a_suggested_mapping_leaves_out_numbers_of_rows(header: list[str]) -> None:
    with pytest.raises(FieldError) as error:
        recognize_format(FIELD, header)
    assert 'columns={"prompt": "Frage", "completion": "Antwort"}' in str(error.value)


@pytest.mark.parametrize("name", ["id", "UUID", "guid", "row_uuid", "questionId", "userID", "itemGuid"])
def test_a_suggested_mapping_of_one_column_besides_numbers_is_text(name: str) -> None:
    with pytest.raises(FieldError) as error:
        recognize_format(FIELD, [name, "Frage"])
    assert error.value.fix == 'columns={"text": "Frage"}'


def test_words_that_end_as_a_number_of_rows_are_columns_of_text() -> None:
    assert list_text_columns(["grid", "Covid", "valid", "IDEA", "id"]) == ["grid", "Covid", "valid", "IDEA"]
    assert list_text_columns(["id", "nr"]) == ["id", "nr"]


def test_the_place_in_a_broken_line_is_its_character(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", GOOD + '{"prompt": "x", "completion": "y"\n')
    with pytest.raises(FieldError, match=r"line 2 is .*Expecting ',' delimiter, at character 34"):
        open_all(path)


def test_half_a_surrogate_pair_is_named_and_a_whole_one_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", GOOD + HALF_PAIR.replace("ud83d", "ud83d\\ude00") + "\n")
    assert open_all(path)[1]["completion"] == "cut \U0001f600"
    path = write(tmp_path / "a.jsonl", GOOD + HALF_PAIR.replace("ud83d", "uD83d") + "\n")
    with pytest.raises(FieldError, match=r"line 2 is .*one half of a character.*remove \\uD83d from line 2"):
        open_all(path)
    path = write(tmp_path / "a.json", f"[{HALF_PAIR}]")
    with pytest.raises(FieldError, match=r"one half of a character.*remove \\ud83d"):
        open_all(path)


def test_rows_inside_of_one_object_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", f'{{"version": 1, "data": [{GOOD}]}}')
    rows = open_all(path)
    with pytest.raises(FieldError, match='Nearest fix: the rows alone, which are the list in "data"'):
        recognize_format(FIELD, rows.column_names, rows=rows)


def test_places_count_lines_of_files(tmp_path: Path) -> None:
    write(tmp_path / "data" / "a.jsonl", GOOD * 2 + "\n\n" + GOOD)
    write(tmp_path / "data" / "b.jsonl", "\n" + GOOD)
    rows = open_all(tmp_path / "data")
    assert [rows.describe_place(index) for index in range(4)] == [
        "line 1 of a.jsonl",
        "line 2 of a.jsonl",
        "line 5 of a.jsonl",
        "line 2 of b.jsonl",
    ]
    table = write(tmp_path / "a.csv", 'prompt,completion\n"two\nlines",x\nWho?,Ahab\n')
    assert [open_all(table).describe_place(index) for index in (0, 1)] == [
        "line 2 of a.csv",
        "line 4 of a.csv",
    ]


def test_answers_of_digits_are_text(tmp_path: Path) -> None:
    rows = open_rows(FIELD, write(tmp_path / "a.csv", "prompt,completion\n1+1,2\nagent,007\nwho,None\nx,\n"))
    assert [rows[index]["completion"] for index in range(4)] == ["2", "007", "None", None]
    rows = open_rows(FIELD, write(tmp_path / "a.tsv", "prompt\tcompletion\n1+1\t2\n"))
    assert rows[0]["completion"] == "2"


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("name", "delimiter"), [("a.csv", ";"), ("a.csv", "\t"), ("a.csv", "|"), ("a.tsv", ",")]
)
def test_cells_are_divided_as_in_the_header(
    name: str, delimiter: str, streaming: bool, tmp_path: Path
) -> None:
    """Spreadsheets write semicolons where a comma is the decimal point."""
    lines = [("prompt", "completion"), ("Who?", "Ahab"), ('"1; 2, or|3?"', "7"), ('"two\nlines"', "x")]
    text = "".join(f"{delimiter.join(line)}\n" for line in lines)
    path = write(tmp_path / name, text)
    rows = list(load_files(FIELD, [path], streaming=streaming))  # type: ignore[call-overload]
    assert [row["prompt"] for row in rows] == ["Who?", "1; 2, or|3?", "two\nlines"]
    assert [row["completion"] for row in rows] == ["Ahab", "7", "x"]
    assert open_all(path).describe_place(2) == f"line 4 of {name}"
    # The copy without an unreadable line is divided in the same way.
    damaged = write(tmp_path / "bad" / name, text + delimiter.join("abc") + "\n")
    assert len(open_all(damaged, "skip")) == 4


def test_a_column_of_text_may_contain_other_delimiters(tmp_path: Path) -> None:
    rows = open_rows(FIELD, write(tmp_path / "a.csv", "text\nCall me; Ishmael\n"))
    assert rows[0]["text"] == "Call me; Ishmael"


def test_another_encoding_is_refused_with_its_line(tmp_path: Path) -> None:
    other = '{"prompt": "é", "completion": "ü"}\n'
    path = write(tmp_path / "a.jsonl", GOOD * 2 + other, "latin-1")
    for bad_rows in ("refuse", "skip"):
        with pytest.raises(FieldError, match=r"UTF-8.*line 3.*iconv"):
            open_all(path, bad_rows)
    for name, encoding in (
        ("marked.jsonl", "utf-16"),
        ("unmarked.csv", "utf-16-le"),
        ("big.tsv", "utf-16-be"),
    ):
        other = write(tmp_path / name, "prompt,completion\n", encoding)
        with pytest.raises(FieldError, match=r"UTF-8.*line 1.*iconv -f UTF-16(LE|BE)? -t UTF-8"):
            open_all(other)
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(GOOD.encode() + "é".encode()[:1])
    with pytest.raises(FieldError, match=r"UTF-8.*line 2"):
        open_all(cut)
    with_mark = open_all(write(tmp_path / "b.jsonl", GOOD * 2, "utf-8-sig"))
    assert with_mark[0]["prompt"] == "Who?"


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("name", "text"),
    [("a.jsonl", "\n \n"), ("a.csv", "prompt,completion\n\n"), ("a.tsv", ""), ("a.json", "[\n]\n")],
)
def test_a_file_without_a_row_is_refused_as_such(
    name: str, text: str, streaming: bool, tmp_path: Path
) -> None:
    path = write(tmp_path / name, text)
    with pytest.raises(FieldError, match="at least one row") as caught:
        load_files(FIELD, [path], streaming=streaming)
    assert caught.value.fix == "a file that has rows"


@pytest.mark.parametrize("streaming", [False, True])
def test_a_part_without_rows_is_no_error_of_a_folder(streaming: bool, tmp_path: Path) -> None:
    """Spark and other writers leave empty parts."""
    import pandas

    parts = [tmp_path / f"part-{number}.parquet" for number in range(3)]
    for part, words in zip(parts, ([], ["sea", "whale"], []), strict=True):
        pandas.DataFrame({"text": pandas.Series(words, dtype=str)}).to_parquet(part)
    rows = load_files(FIELD, parts, streaming=streaming)
    assert [row["text"] for row in rows] == ["sea", "whale"]  # type: ignore[attr-defined]
    with pytest.raises(FieldError, match="at least one row"):
        load_files(FIELD, parts[:1], streaming=streaming)


def test_a_cell_of_any_length_is_read(tmp_path: Path) -> None:
    """The csv module refuses cells above 128 KiB by itself."""
    table = f"prompt,completion\n{'x' * 200_000},Ahab\nWhat?,a,b,c\nWhere?,sea\n"
    path = write(tmp_path / "a.csv", table)
    with pytest.raises(FieldError, match="line 3"):
        open_all(path)
    rows = open_all(path, "skip")
    assert [rows[index]["completion"] for index in range(len(rows))] == ["Ahab", None, "sea"]
    assert rows.describe_place(2) == "line 4 of a.csv"


def test_of_the_files_of_a_data_set_those_for_training_are_read(tmp_path: Path) -> None:
    """A folder as the Hub has it: a card, and files that are named after the splits."""
    write(tmp_path / "README.md", "# Whales\n")
    data = tmp_path / "data"
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001", "validation"):
        write(data / f"{name}.jsonl", GOOD)
    write(data / "README.md", "# Whales\n")
    assert [path.name[:7] for path in open_all(data).files] == ["train-0"] * 2
    before = hash_path(data)
    write(data / "test-00000-of-00001.jsonl", GOOD * 2)
    assert hash_path(data) == before
    unread = describe_unread_files(data)
    assert "test-00000-of-00001.jsonl" in unread and "validation.jsonl" in unread
    assert "train-00000" not in unread and "README" not in unread
    # The card alone is no text to train on.
    with pytest.raises(FieldError, match=f"Nearest fix: {data}"):
        open_all(tmp_path)
    # Without a name for training all files are data.
    others = tmp_path / "others"
    for name in ("test", "valuables", "trains"):
        write(others / f"{name}.jsonl", GOOD)
    assert len(open_all(others)) == 3
    assert describe_unread_files(others) == ""


def test_hidden_files_of_a_folder_are_no_data(tmp_path: Path) -> None:
    """The file that macOS puts beside each one on a USB stick was refused, as text in UTF-16."""
    write(tmp_path / "a.jsonl", GOOD)
    (tmp_path / "._a.jsonl").write_bytes(b"\x00\x05\x16\x07\x00")
    assert [path.name for path in open_all(tmp_path).files] == ["a.jsonl"]


@pytest.mark.parametrize("streaming", [False, True])
def test_the_byte_order_mark_of_a_text_is_no_character_of_it(streaming: bool, tmp_path: Path) -> None:
    paths = [write(tmp_path / name, "Call me Ishmael.", "utf-8-sig") for name in ("a.txt", "b.txt")]
    rows: Any = load_files("Finetune.data", paths, streaming=streaming)
    assert [row["text"] for row in rows] == ["Call me Ishmael."] * 2


def test_files_of_subfolders_are_named_as_not_read(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", GOOD)
    write(tmp_path / "more" / "rows.jsonl", GOOD)
    write(tmp_path / "pictures" / "whale.png", "no data")
    assert len(open_all(tmp_path).files) == 1
    unread = describe_unread_files(tmp_path)
    assert "more/" in unread and "pictures" not in unread


def test_a_subfolder_that_cannot_be_listed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as lost+found at the root of a disk. Root, as whom the tests may run, can list every folder."""

    def refuse_locked(list_folder: Any) -> Any:
        def list_unless_locked(path: Any = ".") -> Any:
            if not isinstance(path, int) and Path(path).name == "lost+found":
                raise PermissionError(13, "Permission denied", str(path))
            return list_folder(path)

        return list_unless_locked

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, refuse_locked(getattr(os, name)))
    (tmp_path / "lost+found").mkdir()
    write(tmp_path / "more" / "rows.jsonl", GOOD)
    # Without a file in the folder itself, the error suggests a subfolder with some.
    with pytest.raises(FieldError, match=f"Nearest fix: {tmp_path / 'more'}"):
        open_all(tmp_path)
    write(tmp_path / "rows.jsonl", GOOD)
    assert len(open_all(tmp_path)) == 1
    unread = describe_unread_files(tmp_path)
    assert "more/" in unread and "lost" not in unread


def test_a_saved_dictionary_of_data_sets_is_refused_with_the_one_for_training(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list([{"prompt": "Who?", "completion": "Ahab"}])
    splits = datasets.DatasetDict({"test": rows, "train": rows})
    splits.save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(FieldError, match=f"Nearest fix: {tmp_path / 'saved' / 'train'}"):
        open_all(tmp_path / "saved")
    assert len(open_rows(FIELD, tmp_path / "saved" / "train")) == 1
    with pytest.raises(FieldError, match="train"):
        resolve_source(FIELD, splits)


@pytest.mark.parametrize(
    "header",
    [
        *("Who is Ahab?,A captain.", "Two and two,4", f"{'word ' * 20}end,Yes", "Call me Ishmael."),
        # Names that read like a row.
        *("How do you feel today?,Why?", "country,2020,2021"),
        # Chinese and Japanese have no spaces.
        *("亚哈是谁？,他是船长。", "エイハブは誰ですか？,船長", "好极了！"),
    ],
)
def test_a_header_that_may_be_a_row_has_the_fixes_of_both(tmp_path: Path, header: str) -> None:
    fix, (first, *others) = find_fix_of_columns(tmp_path, header), header.split(",")
    roles = f'{{"prompt": "{first}", "completion": "{others[0]}"}}' if others else f'{{"text": "{first}"}}'
    assert fix.startswith(f"columns={roles} if the first line of the file, '")
    sample = ["text", "prompt,completion", "prompt,completion,column_3"][len(others)]
    assert fix.endswith(
        f"if it is a row, which is not trained on, a line with names, such as {sample}, above it."
    )


@pytest.mark.parametrize(
    "header",
    [
        *(
            "Frage,Antwort",
            "0,1",
            "q1,a1",
            "Why?,How?",
            "Question text,Answer (no. 1)",
            "id,0,1",
            "问题,回答",
        ),
        # What ``DataFrame(rows).to_csv()`` writes: the column of the index has no name.
        *(",0,1", "Unnamed: 0,0,1", ",How do you feel today?,Why?", ",country,2020,2021"),
    ],
)
def test_a_header_of_names_has_no_fix_of_a_row(tmp_path: Path, header: str) -> None:
    fix = find_fix_of_columns(tmp_path, header)
    assert fix.startswith("columns=") and "first line" not in fix


def test_fixes_of_headers_are_those_of_csv_files_and_short(tmp_path: Path) -> None:
    import pandas

    path = tmp_path / "rows.jsonl"
    path.write_text('{"Who is Ahab?": "text", "A captain.": "text"}\n')
    for source in (path, pandas.DataFrame({"Who is Ahab?": ["text"], "Two and two": ["4"], "4": ["text"]})):
        with pytest.raises(FieldError) as error:
            recognize_rows(source)
        assert error.value.fix.startswith("columns=") and "first line" not in error.value.fix
    # A document as the first cell.
    assert len(find_fix_of_columns(tmp_path, f"{'word ' * 60_000}end,Yes")) < 2000


@pytest.mark.parametrize(
    "header",
    [
        '"Customer question\n(verbatim)","Agent reply\n(final)"',
        f'"{"What did the customer ask? " * 10}",Reply',
        '"The ""first"" question?",Reply',
    ],
)
def test_the_mapping_for_a_header_of_a_spreadsheet_can_be_pasted(header: str, tmp_path: Path) -> None:
    """Excel's header cells have line breaks, and Google Forms' whole questions."""
    path = write(tmp_path / "rows.csv", f"{header}\nWho?,Ahab\n")
    rows = open_all(path)
    with pytest.raises(FieldError) as error:
        recognize_format(FIELD, rows.column_names, rows=rows)
    mapping, _, other = error.value.fix.removeprefix("columns=").partition("} if the first line")
    assert "if it is a row" in other
    format = recognize_format(FIELD, rows.column_names, ast.literal_eval(f"{mapping}}}"), rows=rows)
    assert [message["content"] for message in read_example(format, rows[0]).messages] == ["Who?", "Ahab"]


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("a.csv", "Who is he?,Ahab.,sea,1851"),
        ("a.csv", "1,Who is he?,Ahab."),
        ("a.csv", "Who is he?;Ahab.;sea"),
        ("a.tsv", "Who is he?\tAhab."),
    ],
)
def test_the_header_for_a_file_without_one_can_be_pasted(name: str, row: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, f"{row}\n{row}\n")
    with pytest.raises(FieldError) as error:
        recognize_rows(path)
    header = error.value.fix.partition("a line with names, such as ")[2].removesuffix(", above it")
    rows = open_all(write(path, f"{header}\n{row}\n{row}\n"))
    example = read_example(recognize_format(FIELD, rows.column_names, rows=rows), rows[1])
    assert [message["content"] for message in example.messages] == ["Who is he?", "Ahab."]
    assert len(rows) == 2 and all(column.strip(".") for column in rows.column_names)


def find_fix_of_columns(folder: Path, header: str) -> str:
    (folder / "rows.csv").write_text(f"{header}\n{','.join('text' for _ in header.split(','))}\n")
    with pytest.raises(FieldError) as error:
        recognize_rows(folder / "rows.csv")
    return f"{error.value.fix}."


def recognize_rows(source: object) -> None:
    rows = open_rows(FIELD, source)
    recognize_format(FIELD, rows.column_names, rows=rows)
