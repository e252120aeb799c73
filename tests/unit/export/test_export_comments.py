"""Tests of plan fields in comments of exported files, which are read if there is no plan.json."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import shardscope as ss

CLUSTER = ss.Cluster.parse("8xh100-sxm-80gb")
MIXTRAL = ss.models["mixtral-8x7b"]


def export_arguments_without_plan(plan: ss.Plan, folder: Path) -> Path:
    plan.export(folder)
    (folder / "plan.json").unlink()
    return folder / "megatron_arguments.txt"


def test_megatron_arguments_keep_fields_without_a_flag(tmp_path: Path) -> None:
    recipe = ss.Recipe(precision="bf16", expert_imbalance=1.5, global_batch_size=8)
    plan = ss.Plan(MIXTRAL, CLUSTER, recipe, ss.Layout.megatron(ep=8))
    file = export_arguments_without_plan(plan, tmp_path)
    assert ss.Plan.from_megatron(file, architecture=MIXTRAL, cluster=CLUSTER) == plan
    recipe = ss.Recipe(global_batch_size=8)
    other = ss.Plan.from_megatron(file, architecture=MIXTRAL, cluster=CLUSTER, recipe=recipe)
    assert other.recipe.expert_imbalance == recipe.expert_imbalance, "the caller's recipe has priority"


def test_an_unknown_field_in_a_comment_raises_with_its_line(tmp_path: Path) -> None:
    recipe = ss.Recipe(expert_imbalance=1.5, global_batch_size=8)
    file = export_arguments_without_plan(
        ss.Plan(MIXTRAL, CLUSTER, recipe, ss.Layout.megatron(ep=8)), tmp_path
    )
    file.write_text(re.sub("#: expert_imbalance =", "#: expert_balance =", file.read_text()))
    with pytest.raises(
        ValueError, match=r"line \d+, a plan field in a comment: its name is 'expert_balance'"
    ):
        ss.Plan.from_megatron(file, architecture=MIXTRAL, cluster=CLUSTER)


def test_a_value_in_a_comment_that_is_not_json_raises_with_its_line(tmp_path: Path) -> None:
    recipe = ss.Recipe(expert_imbalance=1.5, global_batch_size=8)
    file = export_arguments_without_plan(
        ss.Plan(MIXTRAL, CLUSTER, recipe, ss.Layout.megatron(ep=8)), tmp_path
    )
    file.write_text(re.sub("#: expert_imbalance = .*", "#: expert_imbalance = 1.5x", file.read_text()))
    with pytest.raises(ValueError, match=r"line \d+, .* expert_imbalance: '1.5x' is not JSON"):
        ss.Plan.from_megatron(file, architecture=MIXTRAL, cluster=CLUSTER)
