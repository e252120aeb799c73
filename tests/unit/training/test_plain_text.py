"""Tests of structured files, which are rejected as text: a model would learn their syntax."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

import shardscope as ss
from shardscope.core.errors import FieldError

CHAT = {"messages": [{"role": "user", "content": "Call me Ishmael."}]}


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".JSONL"])
def test_structured_files_are_refused_by_name(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"chat{suffix}"
    file.write_text("anything at all")
    with pytest.raises(FieldError, match="Finetune\\(data=") as refused:
        ss.Pretrain(num_steps=1, text=file)
    assert refused.value.field == "Pretrain.text" and file.name in refused.value.summary


@pytest.mark.parametrize(
    "data",
    [
        json.dumps(CHAT).encode() + b"\n" + json.dumps(CHAT).encode(),
        b"\xef\xbb\xbf\n" + json.dumps(CHAT).encode(),
        json.dumps([CHAT, CHAT], indent=2).encode(),
        gzip.compress(b"Call me Ishmael."),
        b"PAR1\x00\x00PAR1",
    ],
    ids=["json lines", "byte-order mark", "json document", "gzip", "parquet"],
)
def test_structured_data_is_refused_whatever_its_name(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "chat.txt"
    file.write_bytes(data)
    with pytest.raises(FieldError, match="plain UTF-8 text"):
        ss.Pretrain(num_steps=1, text=file)


@pytest.mark.parametrize(
    "text",
    [
        "Call me Ishmael.",
        "[Chapter 1]\n\nCall me Ishmael.",
        "{curly} words\nand more",
        "12\nwhales",
        "",
        "a,b\nc,d",
    ],
)
def test_prose_is_text(tmp_path: Path, text: str) -> None:
    file = tmp_path / "book.txt"
    file.write_text(text)
    assert ss.Pretrain(num_steps=1, text=file).text == file


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"Call me\n\xff Ishmael.", "line 2"),
        ("Call me Ishmael.".encode("utf-16-le"), "UTF-16LE"),
        (None, "a text file"),
    ],
    ids=["empty", "not UTF-8", "UTF-16 without a mark", "deleted"],
)
def test_a_text_that_cannot_be_read_is_refused_before_a_rank_starts(
    content: bytes | None, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "book.txt"
    file.write_bytes(content or b"")
    recipe = ss.Recipe(seq_len=64, global_batch_size=2)
    plan = ss.Plan(ss.Architecture.of_size("2m"), ss.Cluster.parse("2xcpu"), recipe, ss.Layout.ddp())
    with pytest.raises(FieldError, match=words) as refused:
        task = ss.Pretrain(num_steps=1, text=file)
        if content is None:
            file.unlink()
        task.check_launch(plan, tmp_path, None)
    assert refused.value.field == "Pretrain.text" and refused.value.fix
