"""Tests of stored files of earlier versions, which are still read, and of the stored public signatures.

``tests/fixtures/make_formats.py`` wrote the files once; they are not written again when a format changes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.unit import public_signatures

import shardscope as ss
from shardscope.runs.resume import why_not_resumable
from shardscope.timing.calibration.files import FOLDER_VARIABLE
from shardscope.timing.calibration.store import MachineRecord
from shardscope.training.checkpoints.choice import find_newest_checkpoint

FORMATS = Path(__file__).parents[2] / "fixtures" / "formats"
PLANS = sorted((FORMATS / "plans").glob("*.json"), key=str)
RUNS = {"fsdp2": ("finished", 24), "zero": ("stopped", None), "megatron": ("stopped", None)}


def list_differences(stored: Any, read: Any, path: str = "") -> list[str]:
    """Return the fields of ``stored`` that differ in ``read``, which may have more fields."""
    if isinstance(stored, Mapping) and isinstance(read, Mapping):
        return [
            text for key in stored for text in list_differences(stored[key], read.get(key), f"{path}.{key}")
        ]
    return [] if stored == read else [f"{path}: {stored!r} became {read!r}"]


@pytest.fixture(params=RUNS)
def stored_run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / str(request.param)
    shutil.copytree(FORMATS / "stored_runs" / str(request.param), folder)
    folder.chmod(0o700)
    return folder


def test_stored_plans_cover_every_framework() -> None:
    assert [path.stem for path in PLANS] == ["ddp", "fsdp2", "megatron", "zero"]


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_stored_plans_keep_every_field(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    plan = ss.Plan.from_json(text)
    assert list_differences(json.loads(text), json.loads(plan.to_json())) == []
    assert plan.memory().peak_bytes > 0


def test_stored_runs_attach_with_metrics_logs_and_checkpoint(stored_run: Path) -> None:
    run = ss.Run.attach(stored_run)
    status, num_steps = RUNS[stored_run.name]
    assert run.status == status and run.reason
    assert isinstance(run.plan, ss.Plan) and run.world_size == 2
    lines = [line for line in run.metrics() if line["rank"] == 0]
    assert [line["step"] for line in lines] == list(range(len(lines))) and len(lines) >= 6
    assert num_steps in (None, len(lines))
    assert all(line["loss"] > 0 for line in lines)
    assert run.memory().peak_bytes > 0
    assert "step 1 of" in run.logs(0)
    assert set(run.engine_reports()) == {0, 1}
    assert find_newest_checkpoint(stored_run) is not None


def test_stored_runs_report_how_to_resume_them(stored_run: Path) -> None:
    """Stored checkpoints have no manifest: the button cannot resume them, but the message has the path."""
    reason = str(why_not_resumable(ss.Run.attach(stored_run)))
    if RUNS[stored_run.name][0] == "stopped":
        assert (
            "it has no manifest.json" in reason and f"resume='{find_newest_checkpoint(stored_run)}'" in reason
        )
    else:
        assert "finished" in reason


def test_stored_trace_has_both_ranks() -> None:
    trace = ss.Trace.load(FORMATS / "stored_runs" / "fsdp2" / "traces")
    assert trace.duration_seconds > 0
    assert trace.ranks == [0, 1]


def test_stored_calibration_is_used_for_cpu_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.accuracy.same_numbers import use_stored_calibration

    record = MachineRecord.from_json((FORMATS / "example-host--cpu.json").read_text(encoding="utf-8"))
    assert len(record.calibrations) == 1 and record.steps[0].run == "fsdp2"
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    plan = ss.Run.attach(FORMATS / "stored_runs" / "fsdp2").plan
    with pytest.raises(ValueError, match="calibrat"):
        plan.step()
    use_stored_calibration(tmp_path)
    assert "2 ranks of cpu" in plan.step().calibration


def test_public_signatures_equal_the_stored_ones() -> None:
    stored = public_signatures.STORED.read_text(encoding="utf-8").splitlines()
    current = public_signatures.describe_interface().splitlines()
    removed, added = (
        [one for one in stored if one not in current],
        [one for one in current if one not in stored],
    )
    assert not (removed or added), (
        "the public interface changed; if that is meant: python -m tests.unit.public_signatures --write\n"
        + "\n".join([*(f"- {one}" for one in removed), *(f"+ {one}" for one in added)])
    )
