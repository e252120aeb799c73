"""One loss curve on real GPUs: each engine alone on one, and the whole table where there are several."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.parity.launches import run_rows
from tests.parity.report import format_line
from tests.parity.table import ONE_GPU_ROWS, ROWS, Row

import shardscope as ss

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("row", (*ONE_GPU_ROWS, *ROWS), ids=lambda row: row.name)
def test_a_row_is_the_single_process_on_gpus(row: Row, one_gpu: ss.Cluster, tmp_path: Path) -> None:
    here = ss.Cluster.detect()
    if row.num_ranks > here.num_gpus:
        pytest.skip(
            f"needs {row.num_ranks} GPUs, and here are {here.num_gpus}: run it on a machine that has them"
        )
    (outcome,) = run_rows([row], folder=tmp_path, here=here)
    if outcome.verdict == "not here":
        pytest.skip(f"{outcome.why} Or install what is missing, or run all of tests/gpu, also in 16 bits")
    assert outcome.holds, format_line(outcome)
