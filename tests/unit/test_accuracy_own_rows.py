"""tests/accuracy/own_rows.py: what a run on a GPU writes is what the scorer takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.accuracy.__main__ import main
from tests.accuracy.kinds import GIB, kind
from tests.accuracy.mapping import mapped
from tests.accuracy.own_rows import append, own_rows
from tests.accuracy.own_writing import own_report
from tests.accuracy.rows import MEASURED, read
from tests.accuracy.scoring import score_memory

import shardscope as ss

RECIPE: dict[str, Any] = {"seq_len": 512, "micro_batch_size": 4, "global_batch_size": 8}
LAYOUTS = {"ddp": ss.Layout.ddp(), "fsdp2": ss.Layout.fsdp2(), "deepspeed": ss.Layout.zero(stage=3)}


def plan(framework: str, **changes: Any) -> ss.Plan:
    """What tests/gpu/test_one_gpu.py trains: a model that no catalogue has."""
    recipe = ss.Recipe(**{**RECIPE, **changes})
    cluster = ss.Cluster.parse("1xh100-sxm-80gb")
    return ss.Plan(ss.Architecture.of_size("120m"), cluster, recipe, LAYOUTS[framework])


def rows_of(made: ss.Plan, allocated: int, **beside: int) -> list[dict[str, Any]]:
    return own_rows(made, allocated, beside, date="2026-11-21", versions={"torch": "2.13"}, step_seconds=0.25)


@pytest.mark.parametrize("framework", list(LAYOUTS))
@pytest.mark.parametrize("changes", [{}, {"method": "lora", "lora_rank": 8}], ids=["full", "lora"])
def test_a_made_run_is_scored_by_its_own_plan(
    framework: str, changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = plan(framework, **changes)
    file = tmp_path / "own.jsonl"
    append(file, rows_of(made, 5 * GIB, fragmentation=GIB // 2, runtime=GIB // 4))
    score = score_memory(read([file]))
    assert score.unmapped == ()
    by_kind = {kind(row.mapped.row): row for row in score.scored}
    measured = {name: row.measured / GIB for name, row in by_kind.items()}
    assert measured == {"allocated": 5, "reserved": 5.5, "nvidia-smi": 5.75}
    assert all(row.mapped.plan == made and row.mapped.own_code == () for row in score.scored)
    assert by_kind["nvidia-smi"].predicted.point == made.memory().peak_bytes
    assert len(score.fits) == 1
    assert main(["--rows", str(file)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("overall memory: 1 sources, 3 of 3 rows, ")
    assert "120m" in own_report(score)


def test_rows_have_the_fields_of_published_ones() -> None:
    (row,) = rows_of(plan("ddp"), 5 * GIB)
    published = read(sorted(MEASURED.glob("torchtitan*.jsonl")))[0]
    names = {"source", "table", "model", "seq_len", "gpu", "gpu_mem_gb", "n_gpus", "framework", "micro_batch"}
    names |= {"global_batch", "precision", "activation_checkpointing", "peak_memory_gib", "memory_kind", "id"}
    assert names | {"quality", "status", "role"} <= row.keys() & (published.keys() | {"table"})
    assert json.loads(json.dumps(row)) == row


def test_a_run_that_is_measured_again_takes_the_place_of_its_rows(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    append(file, rows_of(plan("ddp"), 5 * GIB, fragmentation=1))
    append(file, rows_of(plan("fsdp2"), 4 * GIB))
    append(file, rows_of(plan("ddp"), 6 * GIB, fragmentation=1))
    assert sorted(row["peak_memory_gib"] for row in read([file])) == pytest.approx([4, 6, 6])


def test_a_plan_in_a_row_of_others_is_no_plan() -> None:
    """Only our own rows may bring their plan; what is wrong in one is said, not raised."""
    (row,) = rows_of(plan("ddp"), 5 * GIB)
    theirs = {**row, "source": "somebody else", "model": "Llama-3.1-8B", "precision": "bf16", "lora": None}
    assert mapped(theirs).plan.architecture.name == "llama-3.1-8b"
    broken = {**row, "plan": {**row["plan"], "recipe": {**row["plan"]["recipe"], "seq_len": 0}}}
    score = score_memory([broken])
    assert not score.scored
    assert "Recipe.seq_len" in score.unmapped[0][1]


def test_the_test_that_runs_on_a_gpu_writes_such_rows() -> None:
    """It cannot run here; what it calls is what is tested here."""
    text = (Path(__file__).parents[1] / "gpu" / "test_one_gpu.py").read_text(encoding="utf-8")
    assert "own_rows(" in text
    assert "append(OWN, rows)" in text
