"""Accelerate's plugin of FSDP1 in a script, by a click one of version 2 that Accelerate itself takes."""

from __future__ import annotations

import ast
import warnings
from typing import Any

import pytest
from tests.needs import needs
from tests.unit.test_preflight_mends import one

from shardscope.planner.preflight import findings_in

OLD = """
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy

plugin = FullyShardedDataParallelPlugin(
    sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
    backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
    auto_wrap_policy='transformer_based_wrap',
    use_orig_params=True,
    forward_prefetch=False,
    cpu_ram_efficient_loading=True,
    sync_module_states=True,
)
accelerator = Accelerator(fsdp_plugin=plugin)
model, optimizer = accelerator.prepare(model, optimizer)
"""
NEW = """
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2,
    reshard_after_forward=False,
    auto_wrap_policy='transformer_based_wrap',
    cpu_ram_efficient_loading=True,
    state_dict_type="FULL_STATE_DICT",
)
"""


def mended(source: str) -> str | None:
    return one(source, "fsdp1").source


def test_a_plugin_becomes_one_of_version_2() -> None:
    after = mended(OLD)
    assert after is not None and NEW in after
    assert findings_in(after) == []
    names = {finding.name for finding in findings_in(OLD)}
    assert {"fsdp1-shard-grad-op", "fsdp1-use-orig-params", "fsdp1-sync-module-states"} < names
    assert {finding.source for finding in findings_in(OLD)} == {after}


@pytest.mark.parametrize("strategy", ["ShardingStrategy.SHARD_GRAD_OP", '"SHARD_GRAD_OP"', "'full_shard'"])
def test_accelerate_takes_what_a_click_wrote(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = needs("accelerate")
    monkeypatch.setattr("os.environ", {})
    after = mended(OLD.replace("ShardingStrategy.SHARD_GRAD_OP", strategy))
    assert after is not None
    (call,) = [
        node.value
        for node in ast.parse(after).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "plugin"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made: Any = eval(ast.unparse(call), vars(plugins))
    assert made.fsdp_version == 2
    assert made.reshard_after_forward is ("full" in strategy)
    assert made.state_dict_type.name == "FULL_STATE_DICT"


def test_a_plugin_of_version_2_loses_what_that_has_no_use_for() -> None:
    source = OLD.replace("sharding_strategy=ShardingStrategy.SHARD_GRAD_OP", "fsdp_version=2")
    assert "fsdp1" not in {finding.name for finding in findings_in(source)}
    after = one(source, "fsdp1-use-orig-params").source
    assert after is not None and "use_orig_params" not in after and "state_dict_type" not in after
    assert findings_in(after) == []


def test_a_plugin_on_one_line_stays_on_one() -> None:
    line = "plugin = FullyShardedDataParallelPlugin(use_orig_params=True)\n"
    source = OLD[: OLD.index("plugin =")] + line + OLD[OLD.index("accelerator =") :]
    after = mended(source)
    assert after is not None
    assert (
        'plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="FULL_STATE_DICT")\n'
        in after
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("SHARD_GRAD_OP", "HYBRID_SHARD"),
        ("SHARD_GRAD_OP", "NO_SHARD"),
        ("ShardingStrategy.SHARD_GRAD_OP", "strategy"),
        ("forward_prefetch=False", "forward_prefetch=True"),
        ("cpu_ram_efficient_loading=True", "cpu_ram_efficient_loading=False"),
        ("use_orig_params=True", "**options"),
        ("use_orig_params=True", "mixed_precision_policy=policy"),
        ("use_orig_params=True", "ignored_modules=[head]"),
        ("use_orig_params=True", 'state_dict_type="LOCAL_STATE_DICT"'),
        ("use_orig_params=True", "cpu_offload=CPUOffload(offload_params=True)"),
        ("use_orig_params=True", "fsdp_version=version"),
        ("use_orig_params=True,", "use_orig_params=True,  # for the optimizer"),
        ("prepare(model, optimizer)", "prepare(model)"),
        ("prepare(model, optimizer)", "prepare(model, loader)"),
        ("prepare(model, optimizer)", "prepare(model, net, optimizer)"),
        ("'transformer_based_wrap'", "'size_based_wrap', min_num_params=10"),
        ("accelerator =", "plugin.auto_wrap_policy = policy\naccelerator ="),
        ("accelerator =", "with model.no_sync():\n    pass\naccelerator ="),
        ("from accelerate", "import bitsandbytes\nfrom accelerate"),
        (
            "accelerator.prepare(model, optimizer)",
            "accelerator.prepare(model), accelerator.prepare(optimizer)",
        ),
        ("accelerator =", "FullyShardedDataParallelPlugin()\naccelerator ="),
    ],
)
def test_a_plugin_that_the_text_does_not_settle_is_left_to_a_person(before: str, after: str) -> None:
    source = OLD.replace(before, after)
    assert source != OLD
    found = [finding for finding in findings_in(source) if finding.name == "fsdp1-backward-prefetch"]
    assert [finding.source for finding in found] == [None]
