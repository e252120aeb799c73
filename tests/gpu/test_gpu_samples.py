"""Tests of NVML samples of a real GPU during a run, and of its free memory."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import shardscope as ss
from shardscope.runs.watch.free_memory import read_free_memory
from shardscope_widgets import RunView

pytestmark = pytest.mark.gpu


def test_a_run_keeps_how_its_card_was_and_is_named_on_it(
    one_gpu: ss.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = ss.Plan(
        ss.Architecture.of_size("120m"),
        one_gpu,
        ss.Recipe(seq_len=512, micro_batch_size=4, global_batch_size=8),
        ss.Layout.ddp(),
    )
    run = ss.launch(plan, ss.Pretrain(num_steps=400), name="watched")
    try:
        while run.status in ("starting", "running") and len(run.gpu_samples()) < 3:
            run.wait(timeout=0.5)
        place = next(card for card in read_free_memory() if card.name == f"GPU {run.gpus[0]}")
        assert 0 < place.free_bytes < place.total_bytes
        print(f"\non it: {place.users}")  # Containers hide who it is.
    finally:
        run.stop()
        run.wait(timeout=30)
    samples = run.gpu_samples()
    assert len(samples) >= 3 and {sample["gpu"] for sample in samples} == {run.gpus[0]}
    for sample in samples:
        assert 0 <= sample.get("utilisation_percent", 0) <= 100
        assert 5 < sample.get("temperature_celsius", 40) < 120
        assert 5 < sample.get("power_watts", 100) < 3000
        assert 0 < sample.get("used_bytes", 1) <= place.total_bytes
    view = RunView(run)
    deadline = time.monotonic() + 30
    while view._is_watching and time.monotonic() < deadline:
        time.sleep(0.1)
    drawn = {panel.metric for panel in view.figure.panels}
    assert drawn >= {"utilisation_percent", "temperature_celsius", "power_watts"} & set(samples[-1])
    view.close()
