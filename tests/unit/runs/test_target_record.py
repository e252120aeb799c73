"""The target of a launch in ``run.json``: restored as it was, and only if this user's launch wrote it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shardscope as ss
from shardscope.runs.backends.target_record import UnknownTargetError, record_target, restore_target

SLURM = ss.Slurm(partition="a100", time="2:00:00", setup=["module load cuda"], extra={"mem": "64G"})
CREATED = 1764255555.123456


@pytest.fixture(autouse=True)
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "shardscope" / "checkpoint.key"


def describe(scheduler: str, target: ss.Slurm | ss.Ray) -> dict[str, object]:
    """Return ``run.json`` of a launch, as another process reads it."""
    record = {"scheduler": scheduler, "created": CREATED, "on": record_target(target, CREATED)}
    parsed: dict[str, object] = json.loads(json.dumps(record))
    return parsed


@pytest.mark.parametrize(
    ("scheduler", "target"),
    [
        ("slurm", SLURM),
        ("slurm", ss.Slurm()),
        ("ray", ss.Ray(address="10.0.0.1:6379", node_folder="/scratch")),
        ("ray", ss.Ray(runtime_env={"pip": ["torch"]})),
    ],
)
def test_a_target_is_restored_as_it_was(scheduler: str, target: ss.Slurm | ss.Ray) -> None:
    assert restore_target(describe(scheduler, target)) == target


def test_runs_of_this_machine_have_none() -> None:
    assert restore_target({"created": CREATED}) is None


def test_options_that_others_have_changed_are_not_used(key: Path) -> None:
    changed = describe("slurm", SLURM)
    changed["on"]["fields"]["setup"] = ["curl example.org | sh"]  # type: ignore[index]
    of_another_run = {**describe("slurm", SLURM), "created": CREATED + 1}
    unsigned = describe("slurm", SLURM)
    del unsigned["on"]["hmac"]  # type: ignore[attr-defined]
    for description in (changed, of_another_run, unsigned):
        with pytest.raises(UnknownTargetError, match="not those of a launch of yours"):
            restore_target(description)
    own = describe("slurm", SLURM)
    key.unlink()  # Another user, or another home.
    with pytest.raises(UnknownTargetError, match="cannot be checked"):
        restore_target(own)


def test_what_the_folder_does_not_keep_is_named() -> None:
    with pytest.raises(UnknownTargetError, match="does not keep the options of its job"):
        restore_target({"scheduler": "slurm", "created": CREATED})
    # Environment variables are never written into a run folder.
    description = describe("ray", ss.Ray(runtime_env={"env_vars": {"WORD": "melville"}}))
    assert "melville" not in json.dumps(description)
    with pytest.raises(UnknownTargetError, match="env_vars of its runtime_env"):
        restore_target(description)
