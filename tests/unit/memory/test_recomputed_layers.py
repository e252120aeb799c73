"""Tests of which layers are recomputed: memory and time count those that the engine wraps."""

from __future__ import annotations

import pytest

import shardscope as ss
from shardscope.frameworks.registry import frameworks
from shardscope.memory.state.stages import count_recomputed_by_kind


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v2-lite", "llama-3.1-8b", "mixtral-8x7b"])
@pytest.mark.parametrize("interval", [1, 2, 3, 4, 7])
def test_every_nth_layer_of_a_stage_is_recomputed(name: str, interval: int) -> None:
    """As ``apply_recompute`` wraps them: layers 0, interval, 2 x interval, ... of the model."""
    arch = ss.models[name]
    recipe = ss.Recipe(recompute="full", recompute_interval=interval, global_batch_size=8)
    plan = ss.Plan(arch, ss.Cluster.parse("8xh100-sxm-80gb"), recipe, ss.Layout.fsdp2())
    model = frameworks["fsdp2"].memory_model()
    (shape,) = model.find_shapes(plan).kinds
    wrapped = [arch.is_moe_layer(index) for index in range(0, arch.num_hidden_layers, interval)]
    for moe, _, recomputed in count_recomputed_by_kind(arch, model.count_weights(plan, shape), interval):
        assert recomputed == wrapped.count(moe)
