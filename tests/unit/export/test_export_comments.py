"""What a format has no words for stands in its file, and is read back where no plan.json lies beside it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import shardscope as ss

CLUSTER = ss.Cluster.parse("8xh100-sxm-80gb")
MIXTRAL = ss.models["mixtral-8x7b"]


def arguments_alone(plan: ss.Plan, folder: Path) -> Path:
    plan.export(folder)
    (folder / "plan.json").unlink()
    return folder / "megatron_arguments.txt"


def test_megatron_s_arguments_keep_what_they_have_no_flag_for(tmp_path: Path) -> None:
    recipe = ss.Recipe(precision="bf16", expert_imbalance=1.5, global_batch_size=8)
    plan = ss.Plan(MIXTRAL, CLUSTER, recipe, ss.Layout.megatron(ep=8))
    file = arguments_alone(plan, tmp_path)
    assert ss.Plan.from_megatron(file, architecture=MIXTRAL, cluster=CLUSTER) == plan
    given = ss.Recipe(global_batch_size=8)
    found = ss.Plan.from_megatron(file, architecture=MIXTRAL, cluster=CLUSTER, recipe=given)
    assert found.recipe.expert_imbalance == given.expert_imbalance, "what a caller says counts"


def test_a_comment_that_names_no_field_is_refused_by_name(tmp_path: Path) -> None:
    recipe = ss.Recipe(expert_imbalance=1.5, global_batch_size=8)
    file = arguments_alone(ss.Plan(MIXTRAL, CLUSTER, recipe, ss.Layout.megatron(ep=8)), tmp_path)
    file.write_text(re.sub("expert_imbalance=", "expert_balance=", file.read_text()))
    with pytest.raises(
        ValueError, match=r"the comment of fields that the format lacks: this field is 'expert_balance'"
    ):
        ss.Plan.from_megatron(file, architecture=MIXTRAL, cluster=CLUSTER)
