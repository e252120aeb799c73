"""Tests of the search in logs of any size, also while they grow."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

from tests.requirements import thorough

from shardscope.records.log_search import MAX_LINE, MAX_MATCHES, LogSearch


def search_to_end(search: LogSearch) -> LogSearch:
    while search.search_next():
        pass
    return search


def test_finds_lines_with_their_numbers_in_a_growing_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("one\nLoss 2.5\nthree\n")
    search = search_to_end(LogSearch(log, "loss"))
    assert list(search.matches) == [(2, "Loss 2.5")]
    with log.open("a") as file:
        file.write("the loss is ")
        file.flush()
        assert search.num_matches == search_to_end(search).num_matches == 1, (
            "an incomplete line does not match yet"
        )
        file.write("3\n")
    assert list(search_to_end(search).matches) == [(2, "Loss 2.5"), (4, "the loss is 3")]
    log.write_text("loss\n")
    assert list(search_to_end(search).matches) == [(1, "loss")], "a replaced log is read from its start"


def test_color_codes_and_progress_bars_are_not_searched(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"\x1b[31mWAR\x1b[0mNING: x\n 10%|#  |\r 20%|## |\r100%|###|\n\xff\xfe ok\n")
    assert list(search_to_end(LogSearch(log, "warning")).matches) == [(1, "WARNING: x")]
    assert list(search_to_end(LogSearch(log, "20%")).matches) == []
    assert list(search_to_end(LogSearch(log, "100%")).matches) == [(2, "100%|###|")]
    assert [line for line, _ in search_to_end(LogSearch(log, "ok")).matches] == [3]


def test_search_is_literal_and_case_insensitive(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("a.c\nabc\nSTRASSE und straße\nÜBER\n", encoding="utf-8")
    assert [n for n, _ in search_to_end(LogSearch(log, "a.c")).matches] == [1]
    assert [n for n, _ in search_to_end(LogSearch(log, "straße")).matches] == [3]
    assert [n for n, _ in search_to_end(LogSearch(log, "über")).matches] == [4]


@thorough()
def test_fault_22_large_log_is_searched_in_pieces_with_bounded_memory(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        for block in range(10):
            file.write(b"".join(b"%08d found\n" % line for line in range(50_000)))
            file.write(b"x" * 3_000_000 + (b" needle " if block == 7 else b""))
    search, num_pieces, more = LogSearch(log, "found"), 0, True
    while more:
        more, num_pieces = search.search_next(), num_pieces + 1
    assert search.num_matches == 500_000 and len(search.matches) == MAX_MATCHES and num_pieces > 3
    needle = search_to_end(LogSearch(log, "needle"))
    assert needle.num_matches == 1 and len(needle.matches[0][1]) < MAX_LINE + 10


def test_very_long_line_is_split(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        for _ in range(20):
            file.write(b"y" * 2**20)
    tracemalloc.start()
    search = search_to_end(LogSearch(log, "y"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**26 and search.num_matches >= 2


def test_a_missing_log_has_no_lines(tmp_path: Path) -> None:
    search = LogSearch(tmp_path / "none", "x")
    assert not search.search_next() and search.num_lines == 0
