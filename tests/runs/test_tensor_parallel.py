"""The plan that cuts transformers' modules, with numbers: two gloo ranks compute what one model does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardscope.frameworks.fsdp2.limits import CUT_FAMILIES

SCRIPT = Path(__file__).with_name("tensor_parallel_ranks.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    store = tmp_path_factory.mktemp("ranks") / "store"
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(rank), store],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said[0][1][-2000:]
    answer: dict[str, dict[str, Any]] = json.loads(said[0][0].splitlines()[-1])
    return answer


@pytest.mark.parametrize("family", CUT_FAMILIES)
def test_two_ranks_compute_what_the_whole_model_does(found: dict[str, dict[str, Any]], family: str) -> None:
    one = found[family]
    assert one["parts"] == pytest.approx(one["whole"], rel=1e-6)
    assert one["worst_gradient"] < 1e-5
    # Embedding, head and the projections of both layers, biases among them.
    assert one["cut"] >= 15
