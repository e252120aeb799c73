"""A run that the disk has no room for is refused before it starts."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

import shardscope as ss
from shardscope.core.errors import FieldError
from shardscope.training.tasks.disk_space import SPARE_BYTES, check_disk_space, compute_written_bytes

ARCHITECTURE = ss.Architecture.of_size("100m")


def make_plan(layout: ss.Layout | None = None, **fields: object) -> ss.Plan:
    recipe = ss.Recipe(seq_len=64, global_batch_size=4, **fields)  # type: ignore[arg-type]
    return ss.Plan(ARCHITECTURE, ss.Cluster.parse("2xcpu"), recipe, layout or ss.Layout.ddp())


def test_bytes_are_those_of_weights_and_adam() -> None:
    weights = 4 * ARCHITECTURE.num_parameters
    task = ss.Pretrain(num_steps=4, export=True, save_every=2)
    for layout in (ss.Layout.ddp(), ss.Layout.fsdp2(), ss.Layout.zero(3)):
        written = compute_written_bytes(task, make_plan(layout, precision="fp32"))
        # Weights and two moments, all in 32 bits; two checkpoints are kept while the third is written.
        assert written == (weights, 3 * weights, 3)
    # Mixed precision keeps its weights in 32 bits, and exports these.
    assert compute_written_bytes(task, make_plan(precision="bf16-mixed")) == (weights, 3 * weights, 3)
    adapters = compute_written_bytes(task, make_plan(precision="fp32", method="lora"))
    assert 0 < adapters.export < weights / 10 and adapters.checkpoint == 3 * adapters.export
    assert compute_written_bytes(ss.Pretrain(num_steps=4), make_plan()).total == 0


@pytest.mark.parametrize("missing", [0, 1])
def test_a_run_that_does_not_fit_is_refused(
    missing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, task = make_plan(), ss.Pretrain(num_steps=4, export=True, save_every=2)
    needed = compute_written_bytes(task, plan).total + SPARE_BYTES
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed - missing))
    if not missing:
        check_disk_space(task, plan, tmp_path / "not" / "there")
        return
    with pytest.raises(FieldError) as refused:
        ss.launch(plan, task, folder=tmp_path / "runs")
    assert refused.value.field == "launch.folder" and "3 checkpoints of " in str(refused.value)
    # The sum was larger than its parts, and on small disks equal to what is free.
    assert "and 16.8 MB of metrics and logs" in str(refused.value)
    assert not (tmp_path / "runs").exists()
