"""Streamed examples: each rank's share, the order, and where a resumed run continues."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import needs, sample, thorough
from tests.weights_folders import write_folder

needs("transformers")
needs("datasets")

import shardscope as ss  # noqa: E402
from shardscope.core.errors import FieldError  # noqa: E402
from shardscope.training.data.weights_tokenizer import WeightsTokenizer  # noqa: E402
from shardscope.training.examples import streamed_batches  # noqa: E402
from shardscope.training.examples.encoding import Encoder  # noqa: E402
from shardscope.training.examples.formats import recognize_format  # noqa: E402
from shardscope.training.examples.rows import open_rows  # noqa: E402
from shardscope.training.examples.streamed_batches import StreamedExamples, StreamReader  # noqa: E402
from shardscope.training.examples.streamed_rows import read_first_rows  # noqa: E402
from shardscope.training.weights.weights_folder import WeightsFolder  # noqa: E402

NUM_ROWS = 47


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("weights") / "small", max_position_embeddings=2048)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_batches, "BLOCK_ROWS", 10)


def row(number: int) -> dict[str, str]:
    return {"prompt": f"Number {number}?", "completion": f" It is {number}."}


def write_rows(path: Path, numbers: range) -> Path:
    path.write_text("".join(f"{json.dumps(row(number))}\n" for number in numbers))
    return path


def open_reader(
    folder: Path, source: Path, rank: int = 0, num_ranks: int = 1, **options: Any
) -> StreamReader:
    fields: dict[str, Any] = {"seq_len": 64, "bad_rows": "refuse", "packs": False, "seed": 3, **options}
    encoder = Encoder(WeightsTokenizer(WeightsFolder(folder, "weights")).load(), "completions")
    format = recognize_format("data", ["prompt", "completion"], None)
    return StreamReader(
        StreamedExamples(
            field="Finetune.data",
            source=source,
            format=format,
            encoder=encoder,
            rank=rank,
            num_ranks=num_ranks,
            **fields,
        )
    )


def read(reader: StreamReader, number: int) -> list[tuple[tuple[int, ...], ...]]:
    """Return the next samples, each as the token ids of its examples."""
    samples = [reader.next_sample() for _ in range(number)]
    return [tuple(tuple(ids.tolist()) for ids, _ in sample) for sample in samples]


def encode_rows(folder: Path, numbers: range) -> Iterator[tuple[int, ...]]:
    tokenizer = WeightsTokenizer(WeightsFolder(folder, "weights")).load()
    encoder, format = Encoder(tokenizer, "completions"), recognize_format("data", list(row(0)), None)
    from shardscope.training.examples.formats import read_example

    for number in numbers:
        yield tuple(encoder.encode(read_example(format, row(number))).ids)


@pytest.mark.parametrize("num_files", [1, 2])
def test_the_ranks_read_each_row_once_in_a_pass(folder: Path, tmp_path: Path, num_files: int) -> None:
    cuts = [0, *([20] if num_files == 2 else []), NUM_ROWS]
    for index, (first, end) in enumerate(pairwise(cuts)):
        write_rows(tmp_path / f"{index}.jsonl", range(first, end))
    # One file: the ranks take turns. Two: each reads its own.
    shares = [24, 23] if num_files == 1 else [20, 27]
    first_pass, second_pass = [], []
    for rank, share in enumerate(shares):
        reader = open_reader(folder, tmp_path, rank, 2)
        one, other = read(reader, share), read(reader, share)
        assert sorted(one) == sorted(other) and one != other, "each pass is shuffled in another way"
        first_pass += one
        second_pass += other
    expected = sorted((ids,) for ids in encode_rows(folder, range(NUM_ROWS)))
    assert sorted(first_pass) == sorted(second_pass) == expected


@thorough()
def test_memory_of_a_reader_does_not_grow_with_the_data(folder: Path, tmp_path: Path) -> None:
    import psutil

    num_rows, text = 500, "The whale is white. " * 5000
    source = tmp_path / "large.jsonl"
    with source.open("w") as file:
        for number in range(num_rows):
            file.write(json.dumps({"prompt": f"Number {number}?", "completion": text}) + "\n")
    reader = open_reader(folder, source)
    held = []
    for _ in range(num_rows // 20):
        read(reader, 20)
        held.append(psutil.Process().memory_info().rss)
    # A block of rows and the reader's own buffers are filled by then.
    growth = max(held) - held[len(held) // 3]
    assert source.stat().st_size > 40 * 2**20 and growth < source.stat().st_size / 4, held


@pytest.mark.parametrize("suffix", ["csv", "parquet", "arrow folder"])
def test_other_files_are_streamed_as_jsonl_is(folder: Path, tmp_path: Path, suffix: str) -> None:
    source = write_rows(tmp_path / "rows.jsonl", range(NUM_ROWS))
    expected = read(open_reader(folder, source), NUM_ROWS)
    rows: Any = open_rows("data", source).rows  # type: ignore[attr-defined]
    other = tmp_path / f"rows.{suffix}"
    {"csv": rows.to_csv, "parquet": rows.to_parquet, "arrow folder": rows.save_to_disk}[suffix](str(other))
    assert read(open_reader(folder, other), NUM_ROWS) == expected


@sample(1)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_reader_of_several_files_resumes_between_them(folder: Path, tmp_path: Path, suffix: str) -> None:
    files = tmp_path / "files"
    files.mkdir()
    for index in range(4):
        source = write_rows(tmp_path / f"{index}.jsonl", range(13 * index, 13 * index + 13))
        rows: Any = open_rows("data", source).rows  # type: ignore[attr-defined]
        {"jsonl": rows.to_json, "parquet": rows.to_parquet}[suffix](str(files / f"{index}.{suffix}"))
    reader = open_reader(folder, files, 1, 2)
    samples, positions = list[Any](), [reader.describe_position()]
    for _ in range(40):
        samples += read(reader, 1)
        positions.append(reader.describe_position())
    assert len(set(samples)) == 26
    for done in range(0, 38, 3):
        resumed = open_reader(folder, files, 1, 2)
        resumed.resume(positions[done], done)
        assert read(resumed, 2) == samples[done : done + 2], done


@sample(1)
@pytest.mark.parametrize("packs", [False, True])
def test_a_resumed_reader_continues_with_the_next_sample(folder: Path, tmp_path: Path, packs: bool) -> None:
    source = write_rows(tmp_path / "rows.jsonl", range(NUM_ROWS))
    reader = open_reader(folder, source, 1, 2, packs=packs)
    samples, positions = [], [reader.describe_position()]
    for _ in range(60):  # Over blocks and passes.
        samples += read(reader, 1)
        # As a checkpoint stores it.
        positions.append(json.loads(json.dumps(reader.describe_position())))
    assert packs == any(len(sample) > 1 for sample in samples)
    for done in (0, 1, 2, 3, 9, 10, 11, 22, 23, 24, 31, 46, 47, 57):
        resumed = open_reader(folder, source, 1, 2, packs=packs)
        resumed.resume(positions[done], done)
        assert read(resumed, 3) == (samples + read(reader, 0))[done : done + 3], done
        assert resumed.num_samples == 3, "no sample before it was read again"


def test_without_a_position_the_samples_before_are_read_again(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_rows(tmp_path / "rows.jsonl", range(NUM_ROWS))
    samples = read(open_reader(folder, source), 30)
    of_two_ranks = open_reader(folder, source, 1, 2).describe_position()
    for position in (None, "damaged", {"epoch": -1}, of_two_ranks):
        reader = open_reader(folder, source)
        reader.resume(position, 25)
        assert read(reader, 5) == samples[25:]
        assert "reading the first 25 samples of the stream again" in capsys.readouterr().out


def test_a_malformed_row_is_named_by_its_number_or_skipped(folder: Path, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", range(NUM_ROWS))
    lines = source.read_text().splitlines()
    lines[35] = json.dumps({"prompt": "Number 35?", "completion": ""})
    source.write_text("\n".join(lines))
    # Row 36 is the eighteenth of the second rank's.
    with pytest.raises(FieldError, match=r"line 36 of rows\.jsonl is malformed"):
        read(open_reader(folder, source, 1, 2), 23)
    assert len(set(read(open_reader(folder, source, 0, 2), 24))) == 24
    skipping = open_reader(folder, source, 1, 2, bad_rows="skip")
    assert len(set(read(skipping, 22))) == 22 and skipping.counts.num_bad_rows == 1
    source.write_text("\n".join([*lines[:40], "{", *lines[41:]]))
    with pytest.raises(FieldError, match=r"a JSON object on each line; line 41 is \{"):
        read(open_reader(folder, source, bad_rows="skip"), NUM_ROWS)


def test_a_stream_without_a_row_to_train_on_is_refused(folder: Path, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", range(1))
    with pytest.raises(FieldError, match="a row for each of 2 ranks"):
        open_reader(folder, source, 1, 2).next_sample()
    for bad_rows in ("refuse", "skip", "skip_truncated"):
        with pytest.raises(FieldError, match=r"Line 1 of rows\.jsonl: seq_len=2 cuts off its completion"):
            open_reader(folder, source, seq_len=2, bad_rows=bad_rows).next_sample()


@pytest.mark.parametrize("num_files", [1, 2])
def test_a_row_without_loss_is_refused_when_it_is_met_or_left_out(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], num_files: int
) -> None:
    for index in range(num_files):
        source = write_rows(tmp_path / f"{index}.jsonl", range(NUM_ROWS))
    lines = source.read_text().splitlines()
    lines[35] = json.dumps({"prompt": "whale " * 100, "completion": " Yes."})
    source.write_text("\n".join(["", *lines]))
    # One file: row 36, in line 37, is the eighteenth of the second rank's. Two: the second file is its own.
    num_before, num_left = (10, 22) if num_files == 1 else (30, NUM_ROWS - 1)
    refusing = open_reader(folder, tmp_path, 1, 2)
    read(refusing, num_before)
    with pytest.raises(FieldError, match=rf"Line 37 of {source.name}: seq_len=64 cuts off its completion"):
        refusing.next_sample()
    for bad_rows in ("skip", "skip_truncated"):
        reader = open_reader(folder, tmp_path, 1, 2, bad_rows=bad_rows)
        assert len(set(read(reader, num_left))) == num_left and reader.counts.num_rows_without_loss == 1
        assert f"are left out, such as line 37 of {source.name}: " in capsys.readouterr().out


def test_a_row_of_a_ranks_own_file_is_named_beside_an_empty_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").touch()
    for name in ("1", "2"):
        source = write_rows(tmp_path / f"{name}.jsonl", range(NUM_ROWS))
    bad = json.dumps({"prompt": "Number 2?", "completion": ""})
    source.write_text("\n".join([*source.read_text().splitlines()[:2], bad]))
    with pytest.raises(FieldError, match=r"line 3 of 2\.jsonl is malformed"):
        read(open_reader(folder, tmp_path, 1, 2), 3)


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "txt"])
@pytest.mark.parametrize(("encoding", "name"), [("latin-1", "WINDOWS-1252"), ("utf-16", "UTF-16")])
def test_another_encoding_in_a_stream_is_refused_with_file_and_line(
    folder: Path, tmp_path: Path, suffix: str, encoding: str, name: str
) -> None:
    write = {"jsonl": write_rows, "csv": write_table, "txt": write_table}[suffix]
    write(tmp_path / f"a.{suffix}", range(30))
    source = write(tmp_path / f"b.{suffix}", range(30))
    source.write_bytes((source.read_text() + source.read_text().replace("It", "Él")).encode(encoding))
    line = 1 if encoding == "utf-16" else 31 + 2 * (suffix != "jsonl")
    # A long path is cut in the message; the fix has the file.
    with pytest.raises(FieldError, match=rf"UTF-8: byte 0x.. in line {line} .*b\.{suffix}") as caught:
        read_first_rows("Finetune.data", tmp_path)
    assert caught.value.fix.startswith(f"iconv -f {name} -t UTF-8 b.{suffix} > b-utf8.{suffix}")


def write_table(path: Path, numbers: range) -> Path:
    """Write the rows as CSV."""
    path.write_text(
        "prompt,completion\n" + "".join(f"Number {number}?,It is {number}.\n" for number in numbers)
    )
    return path


def test_a_preview_reads_the_first_rows_only(folder: Path, tmp_path: Path) -> None:
    # datasets parses 10 MiB at a time.
    source = tmp_path / "rows.jsonl"
    line = json.dumps({**row(7), "note": "x" * 4000})
    source.write_text("\n".join([*[line] * 4000, "{ the last line is damaged"]))
    task = ss.Finetune(folder, source, streaming=True, num_steps=5)
    preview = task.preview(2, seq_len=64)
    assert preview.num_rows == 2000 and len(preview.rows) == 2
    assert preview.sentences[0].startswith("The first 2,000 rows, format prompt-completion")
    assert "tokens in them" in preview.sentences[1]
    plan = ss.Plan(
        ss.Architecture.from_hf(folder),
        ss.Cluster.parse("2xcpu"),
        ss.Recipe(seq_len=64, precision="fp32"),
        ss.Layout.ddp(),
    )
    task.check(plan)
    choices = task.choices(plan)
    assert choices.num_steps == 5 and "num_epochs" not in [choice.field for choice in choices]


@pytest.mark.parametrize(
    ("data", "options", "field", "allowed"),
    [
        ("rows.jsonl", {}, "num_steps", "a number of steps with streaming=True"),
        ("rows.jsonl", {"num_epochs": 2}, "num_steps", "how many rows an epoch has is not known"),
        ("rows.jsonl", {"num_steps": 5, "validation": 0.1}, "validation", "another data source"),
        ([row(1)], {"num_steps": 5}, "data", "its rows are in memory"),
        (None, {"num_steps": 5}, "streaming", "False with a text file"),
        ("rows.jsonl", {"num_steps": 5, "streaming": 1}, "streaming", "True or False"),
    ],
)
def test_a_source_that_cannot_be_streamed_is_refused(
    folder: Path, tmp_path: Path, data: Any, options: dict[str, Any], field: str, allowed: str
) -> None:
    source = write_rows(tmp_path / data, range(3)) if isinstance(data, str) else data
    with pytest.raises(FieldError) as caught:
        ss.Finetune(folder, source, **{"streaming": True, **options})
    assert caught.value.field == f"Finetune.{field}" and allowed in str(caught.value)
    assert caught.value.fix
