"""A fine-tune that keeps nothing of the weights that it trains says so before it is launched."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import needs
from tests.weights_folders import write_chat_folder

import shardscope as ss

needs("transformers")
needs("datasets")

ROWS = [{"prompt": "Who?", "completion": "Ahab"}] * 8
KEPT: list[dict[str, Any]] = [
    {"export": True},
    {"save_checkpoint": True},
    {"save_every": 5},
    {"validation": 0.25, "early_stopping": 2},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_folder(tmp_path_factory.mktemp("weights") / "small")


def make_plan(folder: Path) -> ss.Plan:
    recipe = ss.Recipe(seq_len=32, global_batch_size=2, precision="fp32")
    return ss.Plan(ss.Architecture.from_hf(folder), ss.Cluster.parse("2xcpu"), recipe, ss.Layout.ddp())


def test_weights_that_are_lost_are_a_finding_whose_fix_exports_them(folder: Path) -> None:
    plan, task = make_plan(folder), ss.Finetune(folder, ROWS)
    (finding,) = [one for one in plan.findings(task) if one.name == "trained-weights-not-kept"]
    assert isinstance(finding.task, ss.Finetune) and finding.task.export
    for fields in KEPT:
        found = plan.findings(ss.Finetune(folder, ROWS, **fields))
        assert "trained-weights-not-kept" not in [one.name for one in found], fields
    assert "trained-weights-not-kept" not in [one.name for one in plan.findings(ss.Pretrain())]


def test_a_launch_warns_that_the_weights_are_lost(folder: Path, tmp_path: Path) -> None:
    plan = make_plan(folder)
    with pytest.warns(RuntimeWarning, match=r"lost.*Finetune\.export"):
        ss.Finetune(folder, ROWS).check_launch(plan, tmp_path, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for fields in KEPT:
            ss.Finetune(folder, ROWS, **fields).check_launch(plan, tmp_path, None)
