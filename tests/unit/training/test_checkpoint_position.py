"""Tests of a checkpoint's position.json: its format is checked before a framework's library opens it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.requirements import needs

needs("torch")

from shardscope import Architecture, Cluster, Layout, Plan, Recipe  # noqa: E402
from shardscope.training.checkpoints.manifest import MANIFEST_FILE  # noqa: E402
from shardscope.training.checkpoints.position import describe_position, read_position, write_position  # noqa: E402


def make_plan(layout: Layout) -> Plan:
    recipe = Recipe(seq_len=64, global_batch_size=4, precision="fp32")
    return Plan(Architecture.of_size("2m"), Cluster.parse("2xcpu"), recipe, layout)


def make_engine(plan: Plan, **fields: Any) -> Any:
    framework = plan.layout.framework
    values = {"num_steps_done": 2, "seed": 5, "frozen_base": None, **fields}
    others = {"validation_state": None, "stream_positions": None, "data_source": None}
    return SimpleNamespace(framework=framework, plan=plan, **{**others, **values})


LAYOUTS = {
    "ddp": Layout.ddp(),
    "fsdp2": Layout.fsdp2(),
    "zero-1": Layout.zero(stage=1),
    "megatron": Layout.megatron(),
}
SHARED = {("ddp", "fsdp2"), ("fsdp2", "ddp")}


@pytest.mark.parametrize("saved", LAYOUTS)
@pytest.mark.parametrize("read", LAYOUTS)
def test_a_checkpoint_of_another_format_is_refused(saved: str, read: str, tmp_path: Path) -> None:
    before, now = make_plan(LAYOUTS[saved]), make_plan(LAYOUTS[read])
    write_position(tmp_path, describe_position(make_engine(before)))
    if saved == read or (saved, read) in SHARED:
        assert read_position(tmp_path, now)["num_steps_done"] == 2
        return
    with pytest.raises(ValueError, match="this one was saved by") as refused:
        read_position(tmp_path, now)
    words = str(refused.value)
    assert before.layout.title.split()[0] in words and now.layout.title.split()[0] in words


def test_an_adapter_checkpoint_identifies_its_base(tmp_path: Path) -> None:
    plan = make_plan(LAYOUTS["ddp"])
    assert "frozen_base" not in describe_position(make_engine(plan))
    write_position(tmp_path, describe_position(make_engine(plan, frozen_base={"seed": 5})))
    found = read_position(tmp_path, plan)
    assert (found["frozen_base"], found["seed"]) == ({"seed": 5}, 5)


def test_a_checkpoint_of_an_older_version_is_read(tmp_path: Path) -> None:
    plan = make_plan(LAYOUTS["ddp"])
    old = {"framework": "ddp", "world_size": 2, "num_steps_done": 7}
    write_position(tmp_path, old)
    assert read_position(tmp_path, plan) == old


def test_an_incomplete_checkpoint_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"it has no position\.json"):
        read_position(tmp_path, make_plan(LAYOUTS["ddp"]))


def test_fault_50_a_checkpoint_that_cannot_be_signed_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(LAYOUTS["ddp"])
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/no/such/folder")
    write_position(tmp_path, describe_position(make_engine(plan)))
    assert read_position(tmp_path, plan)["num_steps_done"] == 2
    assert not (tmp_path / MANIFEST_FILE).exists()
    words = capsys.readouterr().out
    assert "not signed" in words and "/proc/no/such/folder/" in words
