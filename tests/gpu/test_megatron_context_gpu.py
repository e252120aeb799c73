"""Megatron-core over sequences in parts with Transformer Engine's own attention, on two real GPUs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from tests.parity import rank_training
from tests.parity.comparison import HELD, Curve
from tests.parity.launches import SECONDS_PER_ROW, train_single_process
from tests.parity.table import ROWS
from tests.requirements import needs_installed

import shardscope as ss

pytestmark = [pytest.mark.gpu, needs_installed("megatron")]
CLOSE = 0.05
"""Losses in 16 bits beside those of a single process in 32, over twenty steps."""


def test_parts_of_sequences_train_under_transformer_engine(one_gpu: ss.Cluster, tmp_path: Path) -> None:
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip(
            'needs transformer_engine: pip install --no-build-isolation "transformer_engine[pytorch]"'
        )
    here = ss.Cluster.detect()
    if here.num_gpus < 2:
        pytest.skip(f"needs 2 GPUs, and here is {here.num_gpus}: run it on a machine that has them")
    (row,) = (row for row in ROWS if row.name == "megatron cp2")
    plan = row.plan(here, precision="bf16-mixed")
    reference = train_single_process(row.reference, tmp_path, here, 0, rank_training.NUM_STEPS)
    run = ss.launch(plan, rank_training.Curve(0), folder=tmp_path, name="cp2")
    assert run.wait(SECONDS_PER_ROW) == "finished", run.error or run.reason
    own = Curve.of(run.metrics(), row.num_ranks)
    assert own.losses[0] == own.losses[1] == pytest.approx(reference.losses[0], abs=CLOSE)
    records: list[Any] = list(run.engine_reports().values())
    for record in records:
        assert record["engine"]["core_attention"] == ["TEDotProductAttention"]
        assert record["engine"]["context_parallel"] == 2
        assert record["engine"]["attention_off_by"] < CLOSE
    planned = plan.memory().at("optimizer")
    held = {name: max(record["parity"]["held"][name] for record in records) for name in HELD}
    assert held == {name: planned[name] for name in HELD}
