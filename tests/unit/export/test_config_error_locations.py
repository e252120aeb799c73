"""Tests of the file, line and option that errors about configuration files name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import needs

import shardscope as ss
from shardscope.core.errors import FieldError

needs("accelerate")  # which brings PyYAML

LLAMA = ss.models["llama-3.1-8b"]
CLUSTER = ss.Cluster.parse("2x8xh100-sxm-80gb")

FSDP = """\
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_tp_size: 1
mixed_precision: bf16
num_processes: 16
"""
ZERO = """\
{
  "zero_optimization": {
    "stage": 2,
    "offload_optimizer": {
      "device": "cpu"
    }
  },
  "train_batch_size": 64
}
"""
MEGATRON = """\
--num-layers 32
--hidden-size 4096
--ffn-hidden-size 14336
--num-attention-heads 32
--group-query-attention
--num-query-groups 8
--seq-length 8192
--max-position-embeddings 131072
--position-embedding-type rope
--normalization RMSNorm
--swiglu
--disable-bias-linear
--untie-embeddings-and-output-weights
--vocab-size 128256
--tensor-model-parallel-size 2
--pipeline-model-parallel-size 2
--context-parallel-size 1
--use-distributed-optimizer
--micro-batch-size 1
--global-batch-size 32
--hidden-dropout 0.0
--attention-dropout 0.0
--bf16
"""
Read = Callable[..., ss.Plan]
FILES: dict[str, tuple[str, str, Read]] = {
    "fsdp": ("config.yaml", FSDP, ss.Plan.from_accelerate),
    "zero": ("zero.json", ZERO, ss.Plan.from_deepspeed),
    "megatron": ("args.txt", MEGATRON, ss.Plan.from_megatron),
}


def read_error_message(kind: str, before: str, after: str, folder: Path, **arguments: Any) -> str:
    name, text, read = FILES[kind]
    assert before in text
    (folder / name).write_text(text.replace(before, after))
    with pytest.raises(FieldError) as caught:
        read(folder / name, **arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "before", "after", "said"),
    [
        (
            "megatron",
            "--pipeline-model-parallel-size 2",
            "--pipeline-model-parallel-size 3",
            "args.txt, line 15, tensor-model-parallel-size and line 16, pipeline-model-parallel-size: "
            "Layout tp x pp x cp is '2 x 3 x 1 = 6'; allowed: a divisor of the world size, 16 ranks",
        ),
        (
            "fsdp",
            "replicate_size: 2",
            "replicate_size: 3",
            "config.yaml, line 5, parallelism_config.parallelism_config_dp_replicate_size: "
            "Layout replicate x tp x pp x cp is '3 x 1 x 1 x 1 = 3'",
        ),
        (
            "fsdp",
            "tp_size: 1",
            "dp_shard_size: 5",
            "config.yaml, line 6, parallelism_config.parallelism_config_dp_shard_size and "
            "line 5, parallelism_config.parallelism_config_dp_replicate_size: Layout.shard is 5; allowed: 8",
        ),
        (
            "megatron",
            "--context-parallel-size 1",
            "--context-parallel-size 3",
            "args.txt, line 17, context-parallel-size and line 7, seq-length: Layout.cp is 3",
        ),
        (
            "megatron",
            "--tensor-model-parallel-size 2",
            "--tensor-model-parallel-size 3",
            "args.txt, line 15, tensor-model-parallel-size and line 4, num-attention-heads: Layout.tp is 3",
        ),
        (
            "megatron",
            "--num-query-groups 8",
            "--num-query-groups 5",
            "args.txt, line 6, num-query-groups and line 4, num-attention-heads: "
            "Architecture.num_key_value_heads is 5",
        ),
        (
            "megatron",
            "--bf16",
            "--moe-expert-capacity-factor much",
            "args.txt, line 23, moe-expert-capacity-factor: Recipe.expert_capacity_factor is 'much'",
        ),
        (
            "megatron",
            "--seq-length 8192",
            "--seq-length 4096000",
            "args.txt, line 7, seq-length and line 8, max-position-embeddings: Recipe.seq_len is 4096000; "
            "allowed: at most max_position_embeddings=131072, as Megatron-LM asserts. "
            "Nearest fix: --seq-length 131072.",
        ),
        (
            "zero",
            '"device": "cpu"',
            '"device": "nvme"',
            "zero.json, line 5, zero_optimization.offload_optimizer.device and line 3, "
            "zero_optimization.stage: Layout.offload_optimizer is 'nvme'",
        ),
        (
            "zero",
            '"offload_optimizer": {\n      "device": "cpu"\n    }',
            '"cpu_offload": true\n  },\n  "optimizer": {\n    "type": "Lion"',
            "zero.json, line 7, optimizer.type and line 4, zero_optimization.cpu_offload: "
            "Recipe.optimizer is 'lion'",
        ),
    ],
)
def test_errors_about_several_options_name_each_line(
    kind: str, before: str, after: str, said: str, tmp_path: Path
) -> None:
    arguments = {} if kind == "megatron" else {"architecture": LLAMA}
    assert read_error_message(kind, before, after, tmp_path, cluster=CLUSTER, **arguments).startswith(said)


@pytest.mark.parametrize(
    ("kind", "before", "after", "location"),
    [
        ("fsdp", "fsdp_version: 2", "fsdp_version: two", "line 3, fsdp_config.fsdp_version"),
        ("fsdp", "num_processes: 16", "num_processes: many", "line 8, num_processes"),
        ("fsdp", "mixed_precision: bf16", "mixed_precision: bf61", "line 7, mixed_precision"),
        ("fsdp", "tp_size: 1", "tp_size: x", "line 6, parallelism_config.parallelism_config_tp_size"),
        ("zero", '"stage": 2', '"stage": 7', "line 3, zero_optimization.stage"),
        ("zero", '"train_batch_size": 64', '"train_batch_size": "x"', "line 8, train_batch_size"),
        ("megatron", "parallel-size 2", "parallel-size two", "line 15, tensor-model-parallel-size"),
        ("megatron", "--num-layers 32", "--num-layers x", "line 1, num-layers"),
        ("megatron", "--global-batch-size 32", "--global-batch-size 0", "line 20, global-batch-size"),
    ],
)
def test_invalid_values_are_reported_before_missing_ones(
    kind: str, before: str, after: str, location: str, tmp_path: Path
) -> None:
    assert f", {location}" in read_error_message(kind, before, after, tmp_path)


@pytest.mark.parametrize("kind", FILES)
def test_missing_cluster_or_architecture_is_reported(kind: str, tmp_path: Path) -> None:
    assert re.match("(cluster|architecture) is None", read_error_message(kind, "", "", tmp_path))


def test_invalid_plan_fields_in_comments_are_reported_with_their_line(tmp_path: Path) -> None:
    plan = ss.Plan(LLAMA, CLUSTER, ss.Recipe(method="lora"), ss.Layout.fsdp2())
    plan.export(tmp_path)
    (tmp_path / "plan.json").unlink()
    file = tmp_path / "accelerate_config.yaml"
    text = file.read_text()
    line = next(n for n, each in enumerate(text.splitlines(), start=1) if 'method = "lora"' in each)
    for broken in ('method = "x"', 'methd = "lora"'):
        file.write_text(text.replace('method = "lora"', broken))
        with pytest.raises(ValueError, match=rf"accelerate_config.yaml, line {line}, .*{broken[:4]}"):
            ss.Plan.from_accelerate(file, architecture=LLAMA, cluster=CLUSTER)


@pytest.mark.parametrize(
    ("before", "after", "key", "message"),
    [
        ('"seq_len": 4096', '"seq_len": "x"', "recipe.seq_len", "Recipe.seq_len is 'x'"),
        ('"layout"', '"layot"', "layot", "Plan key is 'layot'"),
        ('"pp": 2', '"pp": 3', "layout.pp", "Layout tp x pp x cp is '2 x 3 x 1 = 6'"),
        ('"hidden_size"', '"hiden_size"', "architecture.hiden_size", "Architecture key is 'hiden_size'"),
        ('"vendor": "nvidia"', '"vendor": "x"', "cluster.gpu.vendor", "Gpu.vendor is 'x'"),
        ('"num_nodes": 2', '"num_nodes": 0', "cluster.num_nodes", "Cluster.num_nodes is 0"),
        ('"version": 1', '"version": 9', "version", " is 9"),
        ('"pp": 2', '"pp": 2, "pp": 2', "pp", "duplicate key 'pp'"),
        ('"framework": "megatron"', '"framework": "x"', "layout.framework", "Layout.framework is 'x'"),
    ],
)
def test_invalid_plan_json_is_reported_with_line_and_key(
    before: str, after: str, key: str, message: str, tmp_path: Path
) -> None:
    plan = ss.Plan(LLAMA, CLUSTER, ss.Recipe(), ss.Layout.megatron(tp=2, pp=2))
    plan.export(tmp_path)
    text = (tmp_path / "plan.json").read_text()
    assert before in text
    broken = text.replace(before, after, 1)
    line = text[: text.index(before)].count("\n") + 1
    with pytest.raises(ValueError) as caught:
        ss.Plan.from_json(broken)
    assert f"line {line}, {key}" in str(caught.value) and message in str(caught.value)
    (tmp_path / "plan.json").write_text(broken)
    with pytest.raises(ValueError, match=rf"plan\.json is not a valid plan: .*line {line}, {key}"):
        ss.Plan.from_megatron(tmp_path / "megatron_arguments.txt")


def test_errors_name_the_path_of_a_nested_field() -> None:
    text = ss.Plan(LLAMA, CLUSTER, ss.Recipe(), ss.Layout.fsdp2()).to_json()
    before, link, after = re.split(r'("inter_node_link": \{\s+"name": )"[^"]+"', text)
    line = before.count("\n") + 2
    with pytest.raises(FieldError, match=rf"line {line}, cluster.inter_node_link.name: Link.name is ''"):
        ss.Plan.from_json(f'{before}{link}""{after}')


def test_errors_in_single_line_json_name_no_line() -> None:
    text = ss.Recipe().to_json().replace("\n", "").replace("4096", '"x"')
    with pytest.raises(FieldError, match=r"^Recipe JSON, seq_len: Recipe.seq_len is 'x'"):
        ss.Recipe.from_json(text)
