"""Tests of the accuracy tools on small files of rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.accuracy import fitting
from tests.accuracy.__main__ import main
from tests.accuracy.own_rows import append, own_rows
from tests.accuracy.rows import read
from tests.accuracy.scoring import score_memory

import shardscope as ss

GIB = 2**30
ROW: dict[str, Any] = {
    "id": "row-1",
    "source": "a source without a special case",
    "model": "Llama-3.1-8B",
    "framework": "fsdp2",
    "gpu": "H100-SXM-80GB",
    "gpu_mem_gb": 80,
    "n_gpus": 8,
    "seq_len": 4096,
    "micro_batch": 1,
    "global_batch": 8,
    "precision": "bf16 mixed",
    "activation_checkpointing": "none",
    "peak_memory_gib": 47.0,
    "memory_kind": "allocated",
    "tokens_per_s_per_gpu": 5000.0,
    "quality": "A",
    "role": "judge",
    "status": "ok",
}


@pytest.mark.parametrize("kind", ["memory", "time"])
def test_scores_rows_and_reports_unknown_and_invalid_ones(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows without a plan are counted and invalid lines reported; neither aborts the run."""
    file = tmp_path / "rows.jsonl"
    unknown = {**ROW, "id": "row-2", "framework": "no framework of ours"}
    file.write_text(f"{json.dumps(ROW)}\n{json.dumps(unknown)}\nno json\n", encoding="utf-8")
    report = tmp_path / "report.md"
    assert main(["--kind", kind, "--rows", str(file), "--write", str(report)]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1].startswith(f"overall {kind}: 1 sources, 1 of 2 rows")
    assert report.read_text(encoding="utf-8") == printed.out
    assert "line 3" in printed.err


def test_own_rows_are_scored_with_their_plan(tmp_path: Path) -> None:
    """The scorer reads the rows that tests/gpu/test_one_gpu.py writes."""
    recipe = ss.Recipe(seq_len=512, micro_batch_size=4, global_batch_size=8, method="lora", lora_rank=8)
    cluster = ss.Cluster.parse("1xh100-sxm-80gb")
    plan = ss.Plan(ss.Architecture.of_size("120m"), cluster, recipe, ss.Layout.zero(stage=3))
    file = tmp_path / "own.jsonl"
    other_bytes = {"fragmentation": GIB // 2, "runtime": GIB // 4}
    append(file, own_rows(plan, 5 * GIB, other_bytes, date="2026-11-21", versions={"torch": "2.13"}))
    score = score_memory(read([file]))
    assert not score.unmapped
    assert sorted(row.measured / GIB for row in score.scored) == [5, 5.5, 5.75]
    assert all(row.mapped.plan == plan for row in score.scored)


def test_fitting_a_constant_does_not_increase_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    fitting.main(["--rounds", "1", "--only", "matrices.ampere.share"])
    first, *fitted, last = capsys.readouterr().out.splitlines()
    assert len(fitted) == 1 and fitted[0].startswith("matrices.ampere.share = ")
    before, after = (float(line.rpartition(" ")[2]) for line in (first, last))
    assert after <= before
