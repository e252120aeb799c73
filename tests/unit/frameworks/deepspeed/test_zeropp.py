"""ZeRO++'s options: configuration files, secondary partitions, errors for quantized communication."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.requirements import few, thorough

import shardscope as ss
from shardscope.frameworks.deepspeed.files.config import build_deepspeed_config
from shardscope.frameworks.registry import why_not_trained
from shardscope.planner.cpu_trial import build_cpu_trial
from shardscope.runs.launch.free_memory import check_free_memory

LLAMA = ss.models["llama-3.1-8b"]
NODES = ss.Cluster.parse("2x8xh100-sxm-80gb")
QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")


def plan(cluster: ss.Cluster = NODES, recipe: ss.Recipe | None = None, **options: Any) -> ss.Plan:
    return ss.Plan(LLAMA, cluster, recipe or ss.Recipe(global_batch_size=64), ss.Layout.zero(3, **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 2, "zero_hpz_partition_size": 8}, "1 below stage 3.*zero_hpz_partition_size=1"),
        ({"stage": 1, "zero_quantized_gradients": True}, "False below stage 3"),
        ({"stage": 3, "zero_hpz_partition_size": 0}, "zero_hpz_partition_size is 0"),
        ({"stage": 3, "zero_quantized_weights": 1}, "zero_quantized_weights is 1"),
        ({"stage": 3, "zero_hpz_partition_size": 8, "offload_params": "cpu"}, "secondary partitions in host"),
        ({"stage": 3, "mics_shard_size": 8}, r"removed MiCS.*Layout\.fsdp2\(shard="),
        ({"stage": 3, "mics_hierarchical_params_gather": True}, "removed MiCS"),
        ({"stage": 3, "nvme_path": "/mnt/nvme"}, "nvme_path is '/mnt/nvme'.*SHARDSCOPE_NVME_FOLDER names"),
    ],
)
def test_unsupported_zeropp_options_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ss.Layout.zero(**options)


def test_the_group_of_secondary_partitions_divides_the_ranks() -> None:
    with pytest.raises(ValueError, match=r"a divisor of the 16 ranks.*zero_hpz_partition_size=2"):
        plan(zero_hpz_partition_size=3)


def test_zeropp_options_are_written_and_read_back(tmp_path: Path) -> None:
    example = plan(zero_hpz_partition_size=8, **dict.fromkeys(QUANTIZED, True))
    zero = build_deepspeed_config(example)["zero_optimization"]
    assert zero["zero_hpz_partition_size"] == 8 and all(zero[name] is True for name in QUANTIZED)
    assert not set(QUANTIZED) & set(build_deepspeed_config(plan())["zero_optimization"])
    assert ss.Plan.from_json(example.to_json()) == example
    for path in example.export(tmp_path):
        assert path.is_file()
    config = tmp_path / "ds_config.json"
    assert ss.Plan.from_deepspeed(config, architecture=LLAMA, cluster=NODES) == example
    other_config = tmp_path / "alone" / "ds_config.json"
    other_config.parent.mkdir()
    other_config.write_text(json.dumps({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}}))
    layout: Any = ss.Plan.from_deepspeed(other_config, architecture=LLAMA, cluster=NODES).layout
    assert layout.zero_hpz_partition_size == 4 and not layout.zero_quantized_weights


def test_a_file_with_mics_raises(tmp_path: Path) -> None:
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({"zero_optimization": {"stage": 3, "mics_shard_size": 8}}))
    with pytest.raises(ValueError, match=r"mics_shard_size.*removed MiCS"):
        ss.Plan.from_deepspeed(config, architecture=LLAMA, cluster=NODES)


def test_secondary_partitions_are_counted() -> None:
    """Each of eight ranks has an eighth of the bf16 weights, from forward to the optimizer step."""
    without, with_second = plan().memory(), plan(zero_hpz_partition_size=8).memory()
    matrices = LLAMA.num_parameters - 65 * 4096  # norms are persistent, and have none
    for phase in ("forward", "backward", "optimizer"):
        more = with_second.at(phase)["gather_buffers"] - without.at(phase)["gather_buffers"]
        assert more == pytest.approx(2 * matrices / 8, rel=1e-3), phase
    assert with_second.at("rest") == without.at("rest")


def test_frozen_weights_keep_their_secondary_partitions() -> None:
    recipe = ss.Recipe(global_batch_size=64, method="lora")
    without, with_second = (plan(recipe=recipe, zero_hpz_partition_size=size).memory() for size in (1, 8))
    more = with_second.at("rest")["gather_buffers"] - without.at("rest")["gather_buffers"]
    assert more == pytest.approx(2 * LLAMA.num_parameters / 8, rel=1e-3)


def test_all_gathers_within_nodes_are_faster_on_a_slow_network() -> None:
    slow = ss.Cluster.parse("4x8xa100-sxm-80gb")
    recipe = ss.Recipe(global_batch_size=128)
    far, near = (plan(slow, recipe, zero_hpz_partition_size=size).step() for size in (1, 8))
    assert near.seconds < far.seconds


@thorough()
@pytest.mark.parametrize("name", few(QUANTIZED, QUANTIZED[:1]))
def test_quantized_communication_is_not_predicted(name: str) -> None:
    example = plan(**{name: True})
    for predict in (example.memory, example.step, example.rehearse):
        with pytest.raises(ValueError, match=f"{name} is True.*{name}=False"):
            predict()
    devices: Any = [SimpleNamespace(free_bytes=1, total_bytes=1)]
    assert "is not predicted" in check_free_memory(example, devices, needs_peak=True)
    assert why_not_trained(example) is None or "deepspeed" in str(why_not_trained(example))
    on_cpus = ss.Plan(
        ss.Architecture.of_size("2m"),
        ss.Cluster.parse("2xcpu"),
        ss.Recipe(seq_len=32, global_batch_size=2),
        ss.Layout.zero(3, **{name: True}),
    )
    assert "CUDA kernels" in str(why_not_trained(on_cpus)) or "pip install deepspeed" in str(
        why_not_trained(on_cpus)
    )


def test_cpu_trial_on_two_ranks_has_no_zeropp_options() -> None:
    small = build_cpu_trial(plan(zero_hpz_partition_size=8, zero_quantized_weights=True))
    layout: Any = small.plan.layout
    assert layout.zero_hpz_partition_size == 1 and not layout.zero_quantized_weights
    assert "zero_hpz_partition_size 1 instead of 8" in small.differences
