"""tests/accuracy: files of rows as others write them, with lines that are none; words and no traceback."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tests.accuracy.__main__ import main
from tests.accuracy.rows import MEASURED, default_files, read
from tests.accuracy.scoring import score_memory

ROW = '{"id": "a", "source": "s", "notes": "a line\u2028within"}'


@pytest.mark.parametrize(
    ("content", "ids", "said"),
    [
        (f"{ROW}\n\n", ["a"], []),
        (f"\ufeff{ROW}\r\n", ["a"], []),
        (f'[{ROW},\n{{"id": "b"}}]', ["a", "b"], []),
        (f"{ROW}\nnot json\n", ["a"], ["line 2 is no JSON: Expecting value"]),
        (f'7\n{ROW}\n"x"\n[1]', ["a"], ["line 1 is no JSON object", "line 3 is no", "line 4 is no"]),
        (f"[{ROW}, 7]", ["a"], ["line 2 is no JSON object"]),
        ("[" * 100_000, [], ["line 1 is no JSON"]),
        ('{"id": 1', [], ["line 1 is no JSON"]),
    ],
)
def test_a_line_that_is_no_row_is_named_and_the_others_stay(
    tmp_path: Path, content: str, ids: list[str], said: list[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(content, encoding="utf-8")
    broken: list[str] = []
    assert [row["id"] for row in read([file], broken)] == ids
    assert len(broken) == len(said)
    assert all(words in line for words, line in zip(said, broken, strict=True))
    if said:
        with pytest.raises(ValueError, match="a row is one JSON object"):
            read([file])


def test_bytes_that_are_no_text_are_no_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\xff\xfe\n" + ROW.encode())
    assert main(["--rows", str(file)]) == 0
    assert "rows.jsonl, line 1 is no UTF-8 text" in capsys.readouterr().err
    file.write_bytes(b"\x1f\x8b\x08")
    assert main(["--rows", str(file)]) == 2


def test_a_shuffled_part_of_the_rows_scores_as_these_rows_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of each source fewer than its sample, so that all are scored, in any order and from any file."""
    rows = read(sorted(MEASURED.glob("[!o]*.jsonl")))
    some = random.Random(1).sample([row for row in rows if row.get("peak_memory_gib")], 120)
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, some)), encoding="utf-8")
    before = {row.mapped.row["id"]: row.by_product.error for row in score_memory(some).scored}
    after = {row.mapped.row["id"]: row.by_product.error for row in score_memory(read([file])).scored}
    assert before == after
    assert len(before) > 60
    assert main(["--rows", str(file)]) == 0
    assert f"{len(before)} of " in capsys.readouterr().out.splitlines()[-1]


def test_a_clean_clone_has_rows_of_its_own() -> None:
    assert any(path.parent == MEASURED for path in default_files())


def test_other_sizes_give_other_predictions() -> None:
    """Nothing is remembered of a row: what its fields say is what is predicted."""
    (row, *_) = [r for r in read(sorted(MEASURED.glob("fms*refs.jsonl"))) if r.get("framework") == "single"]
    sizes = [
        score_memory([{**row, "id": f"x{length}", "source": "new", "seq_len": length}]).scored[0].alone.point
        for length in (1024, 2048, 8192)
    ]
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize("size", [10**400, 1e400, -1, float("nan"), 0, 1e30])
def test_a_size_that_is_none_is_no_failure_of_ours(size: float) -> None:
    bloom = read(sorted(MEASURED.glob("bigscience*.jsonl")))
    rows = [{**row, "layers": size, "id": f"y{number}"} for number, row in enumerate(bloom)]
    assert not [why for _, why in score_memory(rows).unmapped if why.startswith("failed")]
