"""Tests of reading users' configuration files, and of errors with line and key for invalid ones."""

from __future__ import annotations

import json
import re
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.requirements import examples, needs

import shardscope as ss
from shardscope.core.errors import FieldError
from shardscope.frameworks.deepspeed.files import config_keys
from shardscope.frameworks.deepspeed.layout import ZeroLayout

needs("accelerate")  # which brings PyYAML

LLAMA = ss.models["llama-3.1-8b"]
EIGHT = ss.Cluster.parse("8xh100-sxm-80gb")

FSDP = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_version: 2
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
"""A file that ``accelerate config`` has written."""

ZERO: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none"},
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "sub_group_size": 1e9,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
"""The example of transformers' documentation."""

MEGATRON = """\
--num-layers 32 \\
--hidden-size 4096   # as a person writes it
--ffn-hidden-size 14336
--num-attention-heads 32
--group-query-attention
--num-query-groups 8
--seq-length 8192 --max-position-embeddings 131072
--position-embedding-type rope
--normalization RMSNorm
--swiglu
--disable-bias-linear
--untie-embeddings-and-output-weights
--vocab-size 128256
--tensor-model-parallel-size 2
--pipeline-model-parallel-size 2
--sequence-parallel
--use-distributed-optimizer
--micro-batch-size 1
--global-batch-size 32
--hidden-dropout 0.0 --attention-dropout 0.0
--bf16
--lr 3e-4
"""


def from_fsdp(folder: Path, text: str = FSDP, **given: Any) -> ss.Plan:
    (folder / "config.yaml").write_text(text)
    arguments: dict[str, Any] = {"architecture": LLAMA, "cluster": EIGHT, **given}
    return ss.Plan.from_accelerate(folder / "config.yaml", **arguments)


def from_zero(folder: Path, values: Any, **given: Any) -> ss.Plan:
    text = values if isinstance(values, str) else json.dumps(values, indent=2)
    (folder / "zero.json").write_text(text)
    arguments: dict[str, Any] = {"architecture": LLAMA, "cluster": EIGHT, **given}
    return ss.Plan.from_deepspeed(folder / "zero.json", **arguments)


def from_megatron(folder: Path, text: str = MEGATRON, **given: Any) -> ss.Plan:
    (folder / "args.txt").write_text(text)
    return ss.Plan.from_megatron(folder / "args.txt", **{"cluster": EIGHT, **given})


# ------------------------------------------------------------------------------------- files of users


def test_reads_the_output_of_accelerate_config(tmp_path: Path) -> None:
    plan = from_fsdp(tmp_path, recipe=ss.Recipe(seq_len=2048))
    assert plan.layout == ss.Layout.fsdp2(reshard_after_forward=False)
    assert plan.recipe == ss.Recipe(seq_len=2048, recompute="full", precision="bf16-mixed")


@pytest.mark.parametrize("key", ["tp", "cp", "dp_replicate"])
def test_missing_shard_size_is_accelerates_default(key: str, tmp_path: Path) -> None:
    """It is 1, and accelerate stops unless the product is the number of processes."""
    from accelerate import ParallelismConfig

    assert ParallelismConfig(**{f"{key}_size": 2}).total_size == 2
    mesh = f"parallelism_config:\n  parallelism_config_{key}_size: "
    with pytest.raises(FieldError, match=r"line 25, .*dp_shard_size is None; allowed: 4.*Nearest fix: 4"):
        from_fsdp(tmp_path, f"{FSDP}{mesh}2\n")
    if key == "cp":
        assert from_fsdp(tmp_path, f"{FSDP}{mesh}8\n").layout.cp == 8


def test_sub_groups_of_size_0_are_those_of_size_1(tmp_path: Path) -> None:
    """DeepSpeed ends a sub-group at the first parameter that reaches the size; axolotl's files have 0."""
    zero = {**ZERO["zero_optimization"], "sub_group_size": 0, "max_live_parameters": 0}
    zero.pop("stage3_max_live_parameters", None)
    layout = from_zero(tmp_path, {**ZERO, "zero_optimization": zero}).layout
    assert isinstance(layout, ZeroLayout)
    assert (layout.sub_group_size, layout.stage3_max_live_parameters) == (1, 0)


def test_reads_deepspeeds_other_options_of_tensor_parallelism(tmp_path: Path) -> None:
    """DeepSpeed's own examples split fused matrices by partition_config: that is not a misspelt key."""
    specs = {"use_default_specs": False, "layer_specs": []}
    options = {"autotp_size": 2, "partition_config": specs, "tp_overlap_comm": False}
    with pytest.warns(UserWarning, match=r"without partition_config, which can change memory"):
        plan = from_zero(tmp_path, {"zero_optimization": {"stage": 2}, "tensor_parallel": options})
    assert plan.layout.tp == 2


def test_knows_all_keys_of_deepspeeds_sections() -> None:
    needs("deepspeed")
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    for keys, model in (("zero_optimization", DeepSpeedZeroConfig), ("tensor_parallel", TPTrainingConfig)):
        sections = {path: {*planned, *others} for path, planned, others in config_keys.SECTIONS}
        names = {field.alias or name for name, field in model.model_fields.items()}
        assert names <= sections[keys,]


@pytest.mark.parametrize("text", ["base_model: x\nfsdp_config:\n  offload_params: true\n", "stage: sft\n"])
def test_yaml_of_another_tool_is_named_as_such(text: str, tmp_path: Path) -> None:
    with pytest.raises(FieldError, match=r"no key of accelerate config.*accelerate launch --config_file"):
        from_fsdp(tmp_path, text)


def test_reads_accelerate_parallelism_config(tmp_path: Path) -> None:
    sizes = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 4}
    mesh = "parallelism_config:\n" + "".join(f"  {key}: {size}\n" for key, size in sizes.items())
    assert from_fsdp(tmp_path, FSDP + mesh).layout.replicate == 2  # type: ignore[attr-defined]
    wrong = mesh.replace("4", "3")
    with pytest.raises(ValueError, match=r"config.yaml, line 27, parallelism_config.*dp_shard_size"):
        from_fsdp(tmp_path, FSDP + wrong)


def test_reads_deepspeed_options_of_an_accelerate_config(tmp_path: Path) -> None:
    text = (
        "distributed_type: DEEPSPEED\nmixed_precision: fp16\nnum_processes: 8\ndeepspeed_config:\n"
        "  zero_stage: 2\n  offload_optimizer_device: cpu\n  gradient_accumulation_steps: 4\n"
    )
    plan = from_fsdp(tmp_path, text, recipe=ss.Recipe(micro_batch_size=2))
    assert plan.layout == ss.Layout.zero(2, offload_optimizer="cpu")
    assert plan.num_micro_batches == 4
    assert plan.recipe.precision == "fp16-mixed"


def test_accelerate_asks_for_the_offload_of_parameters_in_stage_2_too(tmp_path: Path) -> None:
    """``accelerate config`` does (commands/config/cluster.py); DeepSpeed ignores it below stage 3."""
    text = "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n  zero_stage: 2\n"
    text += "  offload_optimizer_device: cpu\n  offload_param_device: cpu\n  gradient_clipping: auto\n"
    with pytest.warns(UserWarning) as caught:
        assert from_fsdp(tmp_path, text).layout == ss.Layout.zero(2, offload_optimizer="cpu")
    (warning,) = caught
    message = str(warning.message)
    assert "deepspeed_config.offload_param_device (line 6)" in message
    assert "DeepSpeed ignores it below stage 3" in message and "not understood" not in message
    assert warning.filename == __file__
    stage_3 = from_fsdp(tmp_path, text.replace("zero_stage: 2", "zero_stage: 3"))
    assert stage_3.layout.offload_params == "cpu"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kind", "fix"),
    [
        ("MULTI_XPU", "'MULTI_GPU'"),
        ("multi-gpu", "'MULTI_GPU'"),
        ("fsdp", "'FSDP'"),
        ("MEGATRON_LM", "ss.Plan.from_megatron with the arguments of Megatron-LM"),
    ],
)
def test_other_distributed_types_raise_with_the_type_that_is_meant(
    kind: str, fix: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"line 1, distributed_type is '{kind}'.*Nearest fix: {fix}\.$"):
        from_fsdp(tmp_path, f"distributed_type: {kind}\n")


def test_reads_the_example_of_ulysses_of_trl(tmp_path: Path) -> None:
    text = "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n  zero_stage: 3\n"
    text += (
        "  seq_parallel_communication_data_type: bf16\nparallelism_config:\n  parallelism_config_sp_size: 2\n"
    )
    effect = r"Predictions are without parallelism_config, which can change memory or step time$"
    with pytest.warns(UserWarning, match=rf"seq_parallel\w+ \(line 5\)\. {effect}"):
        assert from_fsdp(tmp_path, text).layout == ss.Layout.zero(3)


def test_values_of_accelerates_files_that_change_nothing_are_not_warned_of(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_fsdp(tmp_path, FSDP.replace("'no'", "no") + "main_process_port: null\n")
    with pytest.warns(UserWarning, match="same_network") as caught:
        from_fsdp(tmp_path, FSDP.replace("same_network: true", "same_network: false"))
    assert caught[0].filename == __file__


def test_gradient_accumulation_steps_may_be_auto(tmp_path: Path) -> None:
    text = "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n"
    text += "  zero_stage: 2\n  gradient_accumulation_steps: auto\n"
    assert from_fsdp(tmp_path, text).recipe.global_batch_size == ss.Recipe().global_batch_size


@pytest.mark.parametrize(
    ("kind", "section", "key"),
    [
        ("DEEPSPEED", "parallelism_config", "parallelism_config_sp_size"),
        ("MULTI_GPU", "parallelism_config", "parallelism_config_tp_size"),
        ("MULTI_GPU", "fsdp_config", "fsdp_version"),
        ("FSDP", "deepspeed_config", "zero_stage"),
    ],
)
def test_sections_of_another_distributed_type_are_named(
    kind: str, section: str, key: str, tmp_path: Path
) -> None:
    text = f"distributed_type: {kind}\nmixed_precision: bf16\n{section}:\n  {key}: 2\n"
    text += "fsdp_config:\n  fsdp_version: 2\n" if kind == "FSDP" else ""
    with pytest.warns(UserWarning, match=rf"{section} \(line 3\)"):
        from_fsdp(tmp_path, text)


@pytest.mark.parametrize(
    ("strategy", "fix"),
    [
        ("fsdp_version: 1\n  fsdp_reshard_after_forward: SHARD_GRAD_OP", "reshard_after_forward: false"),
        ("fsdp_sharding_strategy: 2", "reshard_after_forward: false"),
        ("fsdp_sharding_strategy: '3'", "distributed_type: MULTI_GPU"),
        (
            "fsdp_sharding_strategy: hybrid_shard_zero2",
            "dp_replicate_size and fsdp_reshard_after_forward: false",
        ),
        ("fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP", "reshard_after_forward: true"),
    ],
)
def test_fsdp1_raises_with_the_options_of_fsdp2(strategy: str, fix: str, tmp_path: Path) -> None:
    text = f"distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config:\n  {strategy}\n"
    with pytest.raises(ValueError, match=rf"line \d, fsdp_config.*Nearest fix: .*{fix}\.$"):
        from_fsdp(tmp_path, text)


def test_a_strategy_of_fsdp1_in_a_file_of_fsdp2_is_named(tmp_path: Path) -> None:
    text = FSDP.replace("fsdp_version: 2", "fsdp_version: 2\n  fsdp_sharding_strategy: FULL_SHARD")
    with pytest.raises(ValueError, match=r"fsdp_sharding_strategy is 'FULL_SHARD'; allowed: nothing"):
        from_fsdp(tmp_path, text)


@pytest.mark.parametrize(
    ("policy", "units"),
    [("", "the whole model"), ("NO_WRAP", "the whole model"), ("SIZE_BASED_WRAP", "other units")],
)
def test_warns_if_accelerate_does_not_shard_each_layer(policy: str, units: str, tmp_path: Path) -> None:
    line = "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
    text = FSDP.replace(line, line.replace("TRANSFORMER_BASED_WRAP", policy) if policy else "")
    with pytest.warns(UserWarning, match=rf"fsdp_auto_wrap_policy is .*shards {units}") as warned:
        from_fsdp(tmp_path, text)
    assert warned[0].filename == __file__


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("fp16: true", "fp16 is True.*Nearest fix: mixed_precision: fp16"),
        ("compute_environment: AMAZON_SAGEMAKER", "AMAZON_SAGEMAKER.*LOCAL_MACHINE"),
        ("ec2_instance_type: ml.p4d", "ec2_instance_type.*Nearest fix: leave it out"),
    ],
)
def test_old_and_other_accelerate_files_are_named(line: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=expected):
        from_fsdp(tmp_path, f"{line}\ndistributed_type: MULTI_GPU\n")


@pytest.mark.parametrize("kind", ["NO", "no", "'NO'"])
def test_an_unquoted_no_is_the_type_of_one_process(kind: str, tmp_path: Path) -> None:
    """YAML reads it as false, with which ``accelerate launch`` starts one process, as with 'NO'."""
    one = ss.Cluster.parse("h100-sxm-80gb")
    assert from_fsdp(tmp_path, f"distributed_type: {kind}\n", cluster=one).layout == ss.Layout.ddp()
    with pytest.raises(ValueError, match=r"line 1, distributed_type is 'NO'.*8 ranks.*fix: 'MULTI_GPU'"):
        from_fsdp(tmp_path, f"distributed_type: {kind}\n")


@pytest.mark.parametrize(
    ("options", "is_warned_of"),
    [("dynamo_backend: 'NO'", False), ("dynamo_mode: default", False), ("dynamo_backend: EAGER", True)],
)
def test_a_compiler_is_warned_of_if_there_is_one(options: str, is_warned_of: bool, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from_fsdp(tmp_path, f"{FSDP}dynamo_config:\n  {options}\n")
    assert ["dynamo_config (line 25)" in str(warning.message) for warning in caught] == [True] * is_warned_of


def test_a_file_of_another_tool_lacks_a_distributed_type(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"distributed_type is None; allowed: NO, MULTI_GPU"):
        from_fsdp(tmp_path, "output_dir: out\nfp16: false\n")
    with pytest.raises(ValueError, match="distributed_type is None"):
        from_fsdp(tmp_path, json.dumps({**ZERO, "fp16": {"enabled": "auto"}}))
    with pytest.raises(ValueError, match=r"line 1, distribted_type.*Nearest fix: 'distributed_type'"):
        from_fsdp(tmp_path, "distribted_type: FSDP\n")


def test_missing_options_have_accelerates_defaults(tmp_path: Path) -> None:
    """``mixed_precision`` is "no", unless the recipe has one; one process is no plan of eight ranks."""
    multi = "distributed_type: MULTI_GPU\n"
    assert from_fsdp(tmp_path, multi).recipe.precision == "fp32"
    assert from_fsdp(tmp_path, multi, recipe=ss.Recipe(precision="bf16")).recipe.precision == "bf16"
    with pytest.raises(ValueError, match=r"line 1, distributed_type is 'NO'.*8 ranks.*fix: 'MULTI_GPU'"):
        from_fsdp(tmp_path, "distributed_type: 'NO'\nnum_processes: 8\n")
    assert from_fsdp(tmp_path, "distributed_type: 'NO'\n", cluster=ss.Cluster.parse("h100-sxm-80gb"))


def test_a_deepspeed_config_file_is_found_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accelerate opens it from there; an export's is in the folder of the file."""
    (tmp_path / "ds.json").write_text('{"train_batch_size": 64, "zero_optimization": {"stage": 1}}')
    (tmp_path / "configs").mkdir()
    monkeypatch.chdir(tmp_path)
    text = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"
    assert from_fsdp(tmp_path / "configs", text).layout == ss.Layout.zero(1)
    (tmp_path / "configs" / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    with pytest.raises(ValueError, match=r"ds\.json differ, and accelerate opens that of its current folder"):
        from_fsdp(tmp_path / "configs", text)


@pytest.mark.parametrize(
    ("fp16", "bf16", "precision"),
    [
        (True, "auto", "fp16-mixed"),
        ("auto", True, "bf16-mixed"),
        ("auto", False, "fp32"),
        ("auto", "auto", "fp32"),
        (False, False, "fp32"),
    ],
)
def test_an_enabled_precision_counts_beside_auto(
    fp16: object, bf16: object, precision: str, tmp_path: Path
) -> None:
    """The Trainer replaces "auto" by its own argument, here fp32."""
    values = {"fp16": {"enabled": fp16}, "bf16": {"enabled": bf16}, "train_batch_size": 8}
    plan = from_zero(tmp_path, values, recipe=ss.Recipe(precision="fp32"))
    assert plan.recipe.precision == precision


def test_missing_deepspeed_config_file_is_named_in_the_fix(tmp_path: Path) -> None:
    text = (
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: configs/zero2_mine.json\n"
    )
    with pytest.raises(FieldError, match=r"line 3, .*Nearest fix: .*zero2_mine\.json"):
        from_fsdp(tmp_path, text)


def test_options_beside_a_deepspeed_config_file(tmp_path: Path) -> None:
    """Accelerate stops at options that belong in DeepSpeed's JSON; other unread keys are named."""
    (tmp_path / "ds.json").write_text('{"train_batch_size": 64, "zero_optimization": {"stage": 3}}')
    start = "distributed_type: DEEPSPEED\n"
    section = "deepspeed_config:\n  deepspeed_config_file: ds.json\n  zero3_init_flag: true\n"
    assert from_fsdp(tmp_path, start + section).layout == ss.Layout.zero(3)
    for option, line in (("  zero_stage: 2\n", 5), ("mixed_precision: fp16\n", 5)):
        with pytest.raises(ValueError, match=rf"line {line}, .*ds\.json"):
            from_fsdp(tmp_path, start + section + option)
    with pytest.warns(UserWarning, match=r"dynamo_config \(line 5\)"):
        from_fsdp(tmp_path, start + section + "dynamo_config:\n  dynamo_backend: INDUCTOR\n")


def test_resolves_auto_values_as_the_trainer_does(tmp_path: Path) -> None:
    recipe = ss.Recipe(precision="bf16")
    with pytest.warns(UserWarning, match=r"not understood.*optimizer.params \(line 7\)"):
        plan = from_zero(tmp_path, ZERO, recipe=recipe)
    assert plan.recipe == recipe
    assert plan.layout == ss.Layout.zero(
        3,
        offload_optimizer="cpu",
        overlap_comm=True,
        reduce_bucket_size=LLAMA.hidden_size**2,
        stage3_prefetch_bucket_size=int(0.9 * LLAMA.hidden_size**2),
        stage3_param_persistence_threshold=10 * LLAMA.hidden_size,
    )


@pytest.mark.parametrize(
    ("batches", "micro", "total"),
    [
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, 2, 64),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 2}, 4, 64),
        ({"train_batch_size": 64}, 8, 64),
        ({"train_micro_batch_size_per_gpu": 2}, 2, 16),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, 2, 48),
        ({"gradient_accumulation_steps": 3}, 1, 24),
        ({}, 1, 64),
    ],
)
def test_deepspeed_batch_sizes_follow_from_each_other(
    batches: dict[str, int], micro: int, total: int, tmp_path: Path
) -> None:
    plan = from_zero(tmp_path, {**batches, "zero_optimization": {"stage": 1}})
    assert (plan.recipe.micro_batch_size, plan.recipe.global_batch_size) == (micro, total)


COMMENTED = """\
{ # DeepSpeed reads Hjson
  "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu",},}, // "stage": 2 }
  /* "fp16": {"enabled": true},
  */ "bf16": {"enabled": true},
  "wandb": {"enabled": true, "team": "https://a#b, ]"},
}
"""


def test_reads_comments_and_trailing_commas_as_deepspeed_does(tmp_path: Path) -> None:
    """Accelerate opens the same file as strict JSON, and stops."""
    with pytest.warns(UserWarning) as caught:
        plan = from_zero(tmp_path, COMMENTED)
    assert plan.layout == ss.Layout.zero(3, offload_optimizer="cpu")
    assert plan.recipe.precision == "bf16-mixed"
    messages = [str(warning.message) for warning in caught]
    assert messages[0].startswith(
        "zero.json has comments or trailing commas: deepspeed.initialize reads them"
    )
    assert messages[1].endswith("not in the plan: wandb (line 5)")
    text = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: zero.json\n"
    with pytest.raises(ValueError, match=r"zero.json, line 1, column 3: Expecting property name"):
        from_fsdp(tmp_path, text)


def test_reads_keys_that_serve_as_comments(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = {"_comment": "ours", "//": "note", "comment": ["a", "b"], "zero_optimization": {"stage": 2}}
        assert from_zero(tmp_path, values).layout == ss.Layout.zero(2)


def test_keys_without_stage3_are_the_same_as_with_it(tmp_path: Path) -> None:
    """As in Axolotl's files; DeepSpeed rejects a file with both."""
    numbers = {"max_live_parameters": 0, "max_reuse_distance": 7, "prefetch_bucket_size": 8}
    section = {"stage": 3, **numbers, "param_persistence_threshold": "auto"}
    layout = from_zero(tmp_path, {"zero_optimization": section}).layout
    options = {f"stage3_{name}": number for name, number in numbers.items()}
    assert layout == ss.Layout.zero(3, **options, stage3_param_persistence_threshold=10 * LLAMA.hidden_size)
    with pytest.warns(UserWarning, match=r"plan: zero_optimization.gather_16bit\w+ \(line 4\)$"):
        from_zero(tmp_path, {"zero_optimization": {"stage": 3, "gather_16bit_weights_on_model_save": True}})
    with pytest.raises(ValueError, match=r"line 4, zero_optimization.max_live_parameters: this key"):
        section = {"stage3_max_live_parameters": 0, "max_live_parameters": 0}
        from_zero(tmp_path, {"zero_optimization": section})


def test_names_only_the_unread_options_that_differ_from_defaults(tmp_path: Path) -> None:
    """A warning of twelve keys that most files repeat hid the one that halves the optimizer's memory."""
    values: dict[str, Any] = {
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2},
        "bf16": {"enabled": "auto", "bf16_master_weights_and_grads": True},
        "zero_optimization": {"stage": 2, "reduce_scatter": True, "allgather_partitions": True},
        "gradient_clipping": "auto",
        "wall_clock_breakdown": False,
    }
    with pytest.warns(UserWarning) as caught:
        from_zero(tmp_path, values)
    unread = "zero.json: not understood, and so not in the plan: bf16.bf16_master_weights_and_grads (line 10)"
    effect = "Predictions are without bf16_master_weights_and_grads, which can change memory or step time"
    assert [str(warning.message) for warning in caught] == [f"{unread}. {effect}"]
    with pytest.warns(UserWarning, match=r"plan: fp16.loss_scale \(line 4\)"):
        from_zero(tmp_path, {"fp16": {"enabled": True, "loss_scale": 128}})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_zero(tmp_path, {"fp16": {"enabled": False, "loss_scale": 128}})


DISABLED: tuple[dict[str, Any], ...] = (
    *(
        {name: {"enabled": False, "dtype": "bfloat16"}}
        for name in ("flops_profiler", "torch_autocast", "hybrid_engine", "data_efficiency", "wandb")
    ),
    {"activation_checkpointing": {}},
    {"activation_checkpointing": {"partition_activations": False, "number_checkpoints": 4}},
    {"compile": {"deepcompile": False}},
    {"sequence_parallel_size": 1},
    {"zero_optimization": {"stage": 2, "use_multi_rank_bucket_allreduce": True}},
    {"zero_optimization": {"stage": 3, "stage3_module_granularity_threshold": 0}},
    {"zero_optimization": {"stage": 3, "stage3_use_all_reduce_for_fetch_params": False}},
    {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": False}}},
    {"bf16": {"enabled": True, "bf16_optimizer_states": False}},
)


@pytest.mark.parametrize("values", DISABLED, ids=str)
def test_disabled_options_are_not_warned_of(values: dict[str, Any], tmp_path: Path) -> None:
    """They were, as ones that can change memory or step time."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_zero(tmp_path, values)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("torch_autocast", {"torch_autocast": {"enabled": True}}),
        ("activation_checkpointing", {"activation_checkpointing": {"cpu_checkpointing": True}}),
        ("compile", {"compile": {"deepcompile": True}}),
        ("sequence_parallel_size", {"sequence_parallel_size": 2}),
        ("leaf_module", {"zero_optimization": {"stage": 3, "leaf_module": {"classes": ["Experts"]}}}),
        (
            "module_granularity_threshold",
            {"zero_optimization": {"stage": 3, "module_granularity_threshold": 5}},
        ),
    ],
)
def test_enabled_options_are_warned_of(name: str, values: dict[str, Any], tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=rf"Predictions are without {name}, which can change memory"):
        from_zero(tmp_path, values)


@pytest.mark.parametrize(
    "values",
    [
        {"amp": {"enabled": False}},
        {"eigenvalue": {"enabled": False}},
        {"curriculum_learning": {"enabled": False}},
        {"compression_training": {}},
        {"sparse_gradients": False},
    ],
    ids=str,
)
def test_keys_that_deepspeed_has_removed_are_warned_of_as_such(
    values: dict[str, Any], tmp_path: Path
) -> None:
    """They cost nothing if disabled, but DeepSpeed stops at them."""
    (name,) = values
    with pytest.warns(UserWarning) as caught:
        from_zero(tmp_path, values)
    (warning,) = caught
    assert re.search(rf"DeepSpeed 0.19.8 has removed .*: {name} \(line 2\)", str(warning.message))
    assert warning.filename == __file__


def test_switched_and_removed_sections_are_those_of_deepspeed() -> None:
    needs("deepspeed")
    from deepspeed.runtime import config
    from deepspeed.runtime.config import DeepSpeedConfig

    known = {*config_keys.TOP_LEVEL, *config_keys.TOP_LEVEL_NOT_IN_PLAN}
    assert {*config_keys.REMOVED_SECTIONS} == known & {*config._REMOVED_TOP_LEVEL_CONFIG_KEYS}
    empty = {name: {} for name in config_keys.SWITCHED if name not in config_keys.REMOVED_SECTIONS}
    read = DeepSpeedConfig({"train_batch_size": 1, **empty})
    for section in (read.flops_profiler_config, read.hybrid_engine, read.expert_parallel_config):
        assert not section.enabled
    assert not read.autotuning_config.enabled and not read.monitor_config.enabled
    assert not read.torch_autocast_enabled and not read.data_efficiency_enabled


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_offload_of_parameters_below_stage_3_is_warned_of(
    stage: int, device: str, tmp_path: Path
) -> None:
    """DeepSpeed accepts and ignores it, as it does in the files of ``accelerate config``."""
    section = {"device": device, "pin_memory": False, "nvme_path": "/nvme", "buffer_count": 7}
    values = {"stage": stage, "offload_optimizer": {"device": "cpu"}, "offload_param": section}
    if stage == 0:
        del values["offload_optimizer"]
    with pytest.warns(
        UserWarning, match=r"zero_optimization.offload_param \(line \d\) .*DeepSpeed ignores"
    ) as caught:
        layout = from_zero(tmp_path, {"zero_optimization": values}).layout
    assert (layout.stage, layout.offload_params) == (stage, None)  # type: ignore[attr-defined]
    assert layout.pin_memory  # type: ignore[attr-defined]
    assert "not understood" not in str(caught[0].message)
    with pytest.warns(
        UserWarning, match=r"zero_optimization.cpu_offload_param \(line 4\) .*DeepSpeed ignores"
    ):
        from_zero(tmp_path, {"zero_optimization": {"stage": stage, "cpu_offload_param": True}})


def test_an_ignored_offload_is_told_apart_from_options_that_are_not_read(tmp_path: Path) -> None:
    section = {"stage": 2, "offload_param": {"device": "cpu"}}
    with pytest.warns(UserWarning) as caught:
        from_zero(tmp_path, {"fp16": {"enabled": True, "loss_scale": 128}, "zero_optimization": section})
    (warning,) = caught
    unread, _, ignored = str(warning.message).partition(". ")
    assert "not understood" in unread and "loss_scale" in unread and "offload_param" not in unread
    assert "DeepSpeed ignores it below stage 3" in ignored and "offload_param" in ignored


def test_errors_name_the_key_that_is_in_the_file(tmp_path: Path) -> None:
    for key in ("prefetch_bucket_size", "stage3_prefetch_bucket_size"):
        with pytest.raises(ValueError, match=rf"line 4, zero_optimization\.{key} is 'big'"):
            from_zero(tmp_path, {"zero_optimization": {"stage": 3, key: "big"}})


def test_the_older_name_of_bf16_is_read(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = from_zero(tmp_path, {"bfloat16": {"enabled": True}})
    assert plan.recipe.precision == "bf16-mixed"
    with pytest.raises(ValueError, match=r"line 3, bfloat16\.enabled is 'yes'"):
        from_zero(tmp_path, {"bfloat16": {"enabled": "yes"}})
    # DeepSpeed ignores it with the newer one.
    with pytest.warns(UserWarning, match=r"bfloat16 \(line 2\)$"):
        plan = from_zero(tmp_path, {"bfloat16": {"enabled": True}, "bf16": {"enabled": False}})
    assert plan.recipe.precision == "fp32"


def test_unread_options_that_change_memory_or_time_are_named(tmp_path: Path) -> None:
    effect = "Predictions are without {}, which can change memory or step time$"
    with pytest.warns(UserWarning, match=r"--lr \(line 22\), .*" + effect.format("mtp-num-layers")):
        from_megatron(tmp_path, MEGATRON + "--mtp-num-layers 1 --transformer-impl transformer_engine")
    text = FSDP.replace("fsdp_version: 2", "fsdp_version: 2\n  fsdp_activation_checkpointing_offload: true")
    with pytest.warns(UserWarning, match=effect.format("fsdp_activation_checkpointing_offload")):
        from_fsdp(tmp_path, text)


def test_every_costly_key_is_a_key_that_is_in_no_plan() -> None:
    from shardscope.frameworks.accelerate import read as accelerate
    from shardscope.frameworks.megatron.files import read as megatron

    assert {name for _, _, unread in config_keys.SECTIONS for name in unread} >= config_keys.COSTLY_KEYS
    others = {*accelerate.OTHER_TOP_LEVEL, *accelerate.OTHER_FSDP, *accelerate.OTHER_PARALLEL}
    assert {*others, *accelerate.SECTIONS} >= accelerate.COSTLY_KEYS
    assert not megatron.COSTLY & set(megatron.READ)


def test_short_names_and_defaults_are_those_of_deepspeed() -> None:
    needs("deepspeed")
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig

    fields = DeepSpeedZeroConfig.model_fields
    aliases = {name: field.alias for name, field in fields.items() if field.alias is not None}
    assert aliases == {name.removeprefix("stage3_"): name for name in config_keys.SHORT_NAMES}
    for keys, model in (
        (("zero_optimization",), DeepSpeedZeroConfig),
        (("zero_optimization", "offload_optimizer"), DeepSpeedZeroOffloadOptimizerConfig),
        (("fp16",), DeepSpeedFP16Config),
        (("bf16",), DeepSpeedBF16Config),
    ):
        defaults = model().model_dump(by_alias=True)
        assert config_keys.DEFAULTS[keys] == {name: defaults[name] for name in config_keys.DEFAULTS[keys]}


def test_missing_options_have_deepspeed_defaults(tmp_path: Path) -> None:
    plan = from_zero(tmp_path, {"zero_optimization": {"stage": 3, "offload_param": {}}})
    assert plan.recipe.precision == "fp32"
    assert plan.layout.offload_params is None  # type: ignore[attr-defined]
    with_options = from_zero(
        tmp_path, {"zero_optimization": {"stage": 3, "offload_param": {"pin_memory": True}}}
    )
    assert with_options.layout.offload_params is None  # type: ignore[attr-defined]
    pinned = from_zero(tmp_path, {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}})
    assert pinned.layout.pin_memory  # type: ignore[attr-defined]
    assert from_zero(tmp_path, {}).layout.stage == 0  # type: ignore[attr-defined]


def test_reads_deprecated_cpu_offload_flags(tmp_path: Path) -> None:
    plan = from_zero(tmp_path, {"zero_optimization": {"stage": 2, "cpu_offload": True}})
    current = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    assert plan.layout == from_zero(tmp_path, {"zero_optimization": current}).layout
    assert plan.layout.offload_optimizer == "cpu"  # type: ignore[attr-defined]
    params = {"zero_optimization": {"stage": 3, "cpu_offload_param": True, "cpu_offload": False}}
    plan = from_zero(tmp_path, params)
    assert plan.layout.offload_params == "cpu"  # type: ignore[attr-defined]
    assert plan.layout.offload_optimizer is None  # type: ignore[attr-defined]
    with pytest.raises(
        ValueError, match=r"zero_optimization.cpu_offload is True; allowed: only one of the two"
    ):
        from_zero(tmp_path, {"zero_optimization": {**current, "cpu_offload": True}})


def test_reads_layers_per_virtual_pipeline_stage(tmp_path: Path) -> None:
    flag = "--num-layers-per-virtual-pipeline-stage"
    plan = from_megatron(tmp_path, MEGATRON.replace("--lr 3e-4", f"{flag} 4"))
    assert plan.layout == ss.Layout.megatron(tp=2, pp=2, vpp=4)


def test_megatron_turns_sequence_parallelism_off_without_tensor_parallelism(tmp_path: Path) -> None:
    """As in Megatron-LM's own example of Llama 3 8B, which sets the flag with one tensor-parallel rank."""
    one = MEGATRON.replace("--tensor-model-parallel-size 2", "--tensor-model-parallel-size 1")
    assert from_megatron(tmp_path, one.replace("--lr 3e-4", "")).layout == ss.Layout.megatron(pp=2)


@pytest.mark.parametrize(
    ("frequency", "is_read"),
    [
        ("", True),
        ("--moe-layer-freq 1", True),
        ("--moe-layer-freq '([1]*32)'", True),
        ("--moe-layer-freq [1]*30+[1,1]", True),
        ("--moe-layer-freq 2", False),
    ],
)
def test_every_layer_has_experts_by_megatrons_default(frequency: str, is_read: bool, tmp_path: Path) -> None:
    """Megatron-LM's example of Mixtral 8x7B has no --moe-layer-freq, whose default is 1."""
    mixtral = ss.models["mixtral-8x7b"]
    text = MEGATRON.replace("--vocab-size 128256", "--num-experts 8 --moe-router-topk 2").replace(
        "131072", "32768"
    )
    text = text.replace("--tensor-model-parallel-size 2", "--expert-model-parallel-size 4")
    text = text.replace("--lr 3e-4", frequency)
    if is_read:
        plan = from_megatron(tmp_path, text, architecture=mixtral)
        assert plan.layout == ss.Layout.megatron(pp=2, ep=4)
        return
    with pytest.raises(ValueError, match=r"moe-layer-freq is '\(\[1\]\*1\+\[0\]\*1.*\[1\]\*32"):
        from_megatron(tmp_path, text, architecture=mixtral)


def test_reads_nvidias_flags_of_latent_attention_and_experts(tmp_path: Path) -> None:
    """Those of DeepSeek-V3: Megatron-LM ignores the width of heads, and reads lists without brackets."""
    plan = ss.Plan(
        ss.models["deepseek-v2-lite"], EIGHT, ss.Recipe(global_batch_size=64), ss.Layout.megatron(ep=8)
    )
    plan.export(tmp_path)
    text = (tmp_path / "megatron_arguments.txt").read_text()
    changed = re.sub(r"--kv-channels \d+", "--kv-channels 128", text)
    changed = re.sub(r"--moe-layer-freq \(?'?\(?([^\s()']+)\)?'?", r"--moe-layer-freq \1", changed)
    assert changed != text
    changed += "\n--moe-router-pre-softmax\n"
    folder = tmp_path / "alone"
    folder.mkdir()
    assert from_megatron(folder, changed, architecture=plan.architecture).layout == plan.layout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--weight-decay 0.1 --weight-decay 0.01", ""),
        ("--use-distributed-optimizer --seq-length 8192", ""),
        ("--seq-length 2048", r"seq-length is 2048; allowed: given once: it has been 8192 before"),
    ],
)
def test_megatron_flag_that_is_given_twice(flags: str, message: str, tmp_path: Path) -> None:
    """As scripts do that add the flags of several lists. argparse takes the last of two."""
    text = MEGATRON.replace("--lr 3e-4", f"--lr 3e-4 {flags}")
    if message:
        with pytest.raises(FieldError, match=message):
            from_megatron(tmp_path, text, architecture=LLAMA)
        return
    assert from_megatron(tmp_path, text, architecture=LLAMA) == from_megatron(tmp_path, architecture=LLAMA)


@pytest.mark.parametrize(("is_grouped", "ep"), [(True, 4), (False, 4), (False, 8)])
def test_experts_that_run_one_after_the_other_are_warned_of(
    is_grouped: bool, ep: int, tmp_path: Path
) -> None:
    text = MEGATRON.replace("--vocab-size 128256", "--num-experts 8 --moe-router-topk 2").replace(
        "131072", "32768"
    )
    text = text.replace("--tensor-model-parallel-size 2", f"--expert-model-parallel-size {ep}")
    text = text.replace("--lr 3e-4", "--moe-grouped-gemm" if is_grouped else "")
    text = text.replace("--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from_megatron(tmp_path, text, architecture=ss.models["mixtral-8x7b"])
    messages = [str(one.message) for one in caught if "moe-grouped-gemm" in str(one.message)]
    # A rank with one expert has nothing to group.
    assert len(messages) == (0 if is_grouped or ep == 8 else 1)


def test_reads_a_whole_command_of_megatron(tmp_path: Path) -> None:
    """A pasted command was taken for the name of a file."""
    expected = from_megatron(tmp_path, MEGATRON.replace("--lr 3e-4", "")).layout
    arguments = (
        re.sub("#.*|--lr 3e-4", "", MEGATRON).replace("\\\n", " ").replace("\n", " \\\n  ").rstrip(" \\\n")
    )
    command = f"torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py \\\n  {arguments}"
    given: dict[str, Any] = {"cluster": EIGHT, "architecture": LLAMA}
    assert ss.Plan.from_megatron(command, **given).layout == expected
    assert ss.Plan.from_megatron(command.replace("\\\n", "").split(), **given).layout == expected
    # Copied from an editor of Windows.
    assert ss.Plan.from_megatron(command.replace("\n", "\r\n"), **given).layout == expected
    with pytest.raises(ValueError, match="the arguments: No closing quotation"):
        ss.Plan.from_megatron(f"{command} --data-path 'a b", **given)
    with pytest.raises(
        ValueError, match=r"line 1, 'export': this is not a flag.*Nearest fix: the arguments alone"
    ):
        from_megatron(tmp_path, f"export CUDA_DEVICE_MAX_CONNECTIONS=1\n{MEGATRON}")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("--num-query-groups 8", "--num-query-groups 4"),
        ("--ffn-hidden-size 14336", "--ffn-hidden-size 11008"),
        ("--vocab-size 128256", "--vocab-size 32000"),
        ("--lr 3e-4", "--kv-channels 64"),
    ],
)
def test_megatron_flags_that_contradict_the_architecture_raise(
    before: str, after: str, tmp_path: Path
) -> None:
    """The plan had the architecture's numbers, and the flag was lost without a word."""
    flag = after.split()[0].removeprefix("--")
    with pytest.raises(ValueError, match=rf"line \d+, {flag} is \d+; allowed: \d+, as llama-3.1-8b has"):
        from_megatron(tmp_path, MEGATRON.replace(before, after), architecture=LLAMA)
    tokenizer = MEGATRON.replace("--lr 3e-4", "").replace("128256", "128000").replace("131072", "8192")
    assert from_megatron(tmp_path, tokenizer, architecture=LLAMA).architecture is LLAMA
    with pytest.raises(ValueError, match=r"group-query-attention is None.*fix: --group-query-attention\.$"):
        from_megatron(tmp_path, MEGATRON.replace("--group-query-attention\n", ""), architecture=LLAMA)


GPT2 = """\
--num-layers 12 --hidden-size 768 --num-attention-heads 12 --vocab-size 50257
--seq-length 1024 --max-position-embeddings 1024
--micro-batch-size 1 --global-batch-size 32 --bf16
"""
"""The flags that Megatron-LM's example of GPT-3 175B has, with the sizes of GPT-2."""


@pytest.mark.parametrize(
    ("text", "model", "expected"),
    [
        (
            GPT2.replace("embeddings 1024", "embeddings 32768"),
            "gpt2",
            r"max-position-embeddings is 32768; allowed: 1024, as gpt2 has.* --max-position-embeddings 1024",
        ),
        (
            f"{GPT2} --position-embedding-type rope",
            "gpt2",
            r"position-embedding-type is 'rope'; allowed: 'learned_absolute'.*type learned_absolute",
        ),
        (
            MEGATRON.replace("type rope", "type learned_absolute"),
            "llama-3.1-8b",
            r"line 8, position-embedding-type is 'learned_absolute'; allowed: 'rope'.*type rope",
        ),
        (
            MEGATRON.replace("--position-embedding-type rope", ""),
            "llama-3.1-8b",
            r"position-embedding-type is None; allowed: 'rope'.*default is 'learned_absolute'",
        ),
        (
            MEGATRON.replace("--ffn-hidden-size 14336", ""),
            "llama-3.1-8b",
            r"ffn-hidden-size is None; allowed: 14336.*default is 10880",
        ),
        (
            MEGATRON.replace("--num-query-groups 8", ""),
            "llama-3.1-8b",
            r"num-query-groups is None; allowed: 8.*default is 1",
        ),
        (
            f"{GPT2} --use-rotary-position-embeddings",
            "gpt2",
            "line 4, use-rotary-position.*fix: leave it out",
        ),
        (f"{GPT2} --disable-bias-linear", "gpt2", "disable-bias-linear is True"),
        (f"{GPT2} --normalization RMSNorm", "gpt2", "normalization is 'RMSNorm'; allowed: 'LayerNorm'"),
    ],
)
def test_megatron_flags_of_another_model_than_the_architecture_raise(
    text: str, model: str, expected: str, tmp_path: Path
) -> None:
    """Learned positions are parameters, 24 M in the first case. Missing flags have Megatron-LM's defaults."""
    with pytest.raises(ValueError, match=rf"args.txt, .*{expected}"):
        from_megatron(tmp_path, text, architecture=ss.models[model])


def test_defaults_of_megatron_are_those_of_its_own_gpt(tmp_path: Path) -> None:
    """LayerNorm, learned positions, and biases of queries and keys, since all linear layers have them."""
    plan = from_megatron(tmp_path, GPT2, architecture=ss.models["gpt2"])
    assert plan.layout == ss.Layout.megatron(distributed_optimizer=False)
    written_out = (
        f"{GPT2} --normalization LayerNorm --position-embedding-type learned_absolute --add-qkv-bias"
    )
    assert from_megatron(tmp_path, written_out, architecture=ss.models["gpt2"]) == plan


def test_the_older_flag_of_rotary_positions_is_read(tmp_path: Path) -> None:
    text = MEGATRON.replace("--position-embedding-type rope", "--use-rotary-position-embeddings")
    text = text.replace("--lr 3e-4", "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert from_megatron(tmp_path, text, architecture=LLAMA).architecture is LLAMA
        assert replace(from_megatron(tmp_path, text).architecture, name=LLAMA.name) == LLAMA


@pytest.mark.parametrize("architecture", [LLAMA, None])
def test_warns_of_another_padding_of_the_vocabulary(architecture: Any, tmp_path: Path) -> None:
    """Padded to a multiple of 128 x tp, as the plan counts it, it has 128,256 rows with tp=2."""
    text = MEGATRON.replace("--lr 3e-4", "--make-vocab-size-divisible-by {}")
    with pytest.warns(UserWarning, match=r"line 22, make-vocab-size-divisible-by is 4096.*131,072.*128,256"):
        from_megatron(tmp_path, text.format(4096), architecture=architecture)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for divisor in (1, 128):
            from_megatron(tmp_path, text.format(divisor), architecture=architecture)
    with pytest.raises(ValueError, match="line 22, make-vocab-size-divisible-by is 'x'"):
        from_megatron(tmp_path, text.format("x"), architecture=architecture)


def test_a_missing_architecture_raises_with_the_catalogues_model_of_these_sizes(tmp_path: Path) -> None:
    """The fix for Megatron-LM's example of Mixtral was Llama 3.1 8B, which the next error refused."""
    experts = MEGATRON.replace("--vocab-size 128256", "--num-experts 8 --moe-router-topk 2")
    with pytest.raises(
        ValueError, match=r'without --num-experts.*fix: architecture=ss.models\["mixtral-8x7b"\]'
    ):
        from_megatron(tmp_path, experts)
    with pytest.raises(
        ValueError, match=r'--vocab-size is None.*fix: architecture=ss.models\["llama-3.1-8b"\]'
    ):
        from_megatron(tmp_path, MEGATRON.replace("--vocab-size 128256", ""))


@pytest.mark.parametrize(
    ("flag", "meant"), [("global_batch_size", "global-batch-size"), ("seq-len", "seq-length")]
)
def test_misspelled_megatron_flags_are_not_defaults(flag: str, meant: str, tmp_path: Path) -> None:
    text = MEGATRON.replace(f"--{meant}", f"--{flag}")
    with pytest.raises(ValueError, match=rf"--{flag}: this flag is '{flag}'.*Nearest fix: --{meant}\.$"):
        from_megatron(tmp_path, text)


def test_reads_arguments_of_megatron_scripts(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"not understood.*--lr \(line 22\)"):
        plan = from_megatron(tmp_path)
    assert plan.layout == ss.Layout.megatron(tp=2, pp=2)
    assert plan.recipe == ss.Recipe(seq_len=8192, global_batch_size=32)
    assert replace(plan.architecture, name=LLAMA.name) == LLAMA
    with pytest.warns(UserWarning, match="--lr"):
        assert from_megatron(tmp_path, architecture=LLAMA).architecture is LLAMA
    arguments = MEGATRON.replace("# as a person writes it", "").replace("\\", "").replace("--lr 3e-4", "")
    assert ss.Plan.from_megatron(arguments, cluster=EIGHT, architecture=LLAMA).layout == plan.layout
    assert ss.Plan.from_megatron(arguments.split(), cluster=EIGHT, architecture=LLAMA).layout == plan.layout


@pytest.mark.parametrize(
    ("framework", "name", "before", "after", "is_now"),
    [
        (
            "fsdp2",
            "accelerate_config.yaml",
            "reshard_after_forward: true",
            "reshard_after_forward: false",
            {"reshard_after_forward": False},
        ),
        (
            "fsdp2",
            "accelerate_config.yaml",
            "offload_params: false",
            "offload_params: true",
            {"offload": "cpu"},
        ),
        ("zero", "ds_config.json", '"stage": 3', '"stage": 2', {"stage": 2}),
        (
            "zero",
            "ds_config.json",
            '"reduce_bucket_size": 500000000',
            '"reduce_bucket_size": 5e7',
            {"reduce_bucket_size": 50_000_000},
        ),
        (
            "megatron",
            "megatron_arguments.txt",
            "--tensor-model-parallel-size 1",
            "--tensor-model-parallel-size 2",
            {"tp": 2},
        ),
        (
            "megatron",
            "megatron_arguments.txt",
            "--use-distributed-optimizer\n",
            "",
            {"distributed_optimizer": False},
        ),
    ],
)
def test_edited_config_files_have_priority_over_plan_json(
    framework: str, name: str, before: str, after: str, is_now: dict[str, Any], tmp_path: Path
) -> None:
    needs("transformers")
    layout = {"fsdp2": ss.Layout.fsdp2, "zero": ss.Layout.zero, "megatron": ss.Layout.megatron}[framework]()
    plan = ss.Plan(LLAMA, EIGHT, ss.Recipe(), layout)
    plan.export(tmp_path)
    text = (tmp_path / name).read_text()
    assert before in text
    (tmp_path / name).write_text(text.replace(before, after))
    read = ss.Plan.from_megatron if framework == "megatron" else ss.Plan.from_deepspeed
    read = ss.Plan.from_accelerate if framework == "fsdp2" else read
    parsed = read(tmp_path / name)
    sequence = {"sequence_parallel": False} if is_now == {"tp": 2} else {}
    assert parsed == replace(plan, layout=replace(plan.layout, **is_now, **sequence))


# ------------------------------------------------------------------------------------------ invalid files


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("fsdp_version: 2", "fsdp_version: 1", r"line 13, fsdp_config.fsdp_version.*FSDP1"),
        (
            "fsdp_version: 2",
            "fsdp_version: 2\n  fsdp_sharding_strategy: SHARD_GRAD_OP",
            "Nearest fix: leave it out",
        ),
        (
            "fsdp_version: 2",
            "fsdp_version: 2\n  fsdp_sharding_strategy: FULL_SHARD",
            "reshard_after_forward: true",
        ),
        ("fsdp_version: 2", "fsdp_vresion: 2", r"line 13, fsdp_config.fsdp_vresion.*'fsdp_version'"),
        ("num_processes: 8", "num_processes: 4", r"line 18, num_processes is 4; allowed: 8"),
        ("num_processes: 8", "num_processes: eight", r"line 18, num_processes is 'eight'"),
        ("num_processes: 8", "num_proceses: 8", r"line 18, num_proceses.*'num_processes'"),
        (
            "num_processes: 8",
            "num_processes: 8\nnum_processes: 8",
            r"line 19: duplicate key 'num_processes'",
        ),
        ("distributed_type: FSDP", "distributed_type: TPU", r"line 3, distributed_type is 'TPU'"),
        ("distributed_type: FSDP\n", "", r"distributed_type is None"),
        ("mixed_precision: bf16", "mixed_precision: {a: b}", r"line 16, mixed_precision"),
        ("mixed_precision: bf16", "mixed_precision: int4", r"line 16, mixed_precision is 'int4'"),
        ("mixed_precision: bf16", "mixed_precision: [bf16", r"line \d+, column \d+"),
        (
            "fsdp_offload_params: false",
            "fsdp_offload_params: maybe",
            r"line 10, .*fsdp_offload_params is 'maybe'",
        ),
        (
            "fsdp_reshard_after_forward: false",
            "fsdp_reshard_after_forward: 4",
            r"line 11, .*is 4; allowed: true or false",
        ),
        ("use_cpu: false", "use_cpu: true", r"line 24, use_cpu"),
        ("debug: false", "debug: &a {b: 1}\nmachines: *a", r"alias|machines"),
        ("tpu_env: []", "tpu_env: !!python/object:os.system x", r"line 21, tpu_env"),
    ],
)
def test_fault_35_invalid_accelerate_configs_raise_with_line_and_key(
    before: str, after: str, expected: str, tmp_path: Path
) -> None:
    assert before in FSDP
    with pytest.raises(ValueError, match=rf"(?s)config.yaml.*{expected}"):
        from_fsdp(tmp_path, FSDP.replace(before, after))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{\n  "zero_optimization": {\n    "stage": 4\n  }\n}', r"line 3, zero_optimization.stage.*4"),
        ('{\n  "zero_optimization": {\n    "stage": "3"\n  }\n}', r"line 3, zero_optimization.stage"),
        ('{\n  "zero_optimization": {\n    "stag": 3\n  }\n}', r"line 3, zero_optimization.stag.*'stage'"),
        ('{\n  "zero_optimisation": {}\n}', r"line 2, zero_optimisation.*'zero_optimization'"),
        ('{\n  "zero_optimization": 3\n}', r"line 2, zero_optimization is 3"),
        (
            '{\n  "train_batch_size": 8,\n  "train_batch_size": 8\n}',
            r"line 3, train_batch_size: duplicate key",
        ),
        # Python's parser names the next key's place, from 3.13 on the comma's.
        ('{\n  "train_batch_size": 8,,\n}', r"line (3, column 1|2, column 24)"),
        ('{\n  "train_batch_size": 8 # comment "\n  "bf16": {}\n}', r"line 3, column 3"),
        ('{\n  "train_batch_size": 7\n}', r"line 2, train_batch_size is 7"),
        ('{\n  "bf16": {"enabled": true},\n  "fp16": {"enabled": true}\n}', r"line 2, bf16.enabled"),
        ('{\n  "optimizer": {"type": "OneBitAdam"}\n}', r"line 2, optimizer.type is 'OneBitAdam'"),
        ('{\n  "bf16": {"enabled": "yes"}\n}', r"line 2, bf16.enabled is 'yes'"),
        ('{"zero_optimization": {"stage": 3,\n"sub_group_size": "auto"}}', r"line 2, .*sub_group_size"),
        (
            '{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": true},\n'
            '"offload_optimizer": {"device": "cpu",\n "pin_memory": false}}}',
            r"pin_memory",
        ),
        ("[]", "one JSON object"),
        ("", r"line 1, column 1"),
        ("[" * 100_000, "nested too deeply|column"),
    ],
)
def test_fault_35_invalid_deepspeed_configs_raise_with_line_and_key(
    text: str, expected: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"(?s)zero.json.*({expected})"):
        from_zero(tmp_path, text)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("--hidden-size 4096", "--hiden-size 4096", r"line 2, --hiden-size.*--hidden-size"),
        ("--num-layers 32 \\", "--num-layers many", r"line 1, num-layers is 'many'"),
        ("--num-layers 32 \\", "--num-layers", r"line 1, --num-layers.*one value"),
        (
            "--num-layers 32 \\",
            "--num-layers 32\n--num-layers 31",
            r"line 2, --num-layers is 31; allowed: given once",
        ),
        ("--num-layers 32 \\", "num-layers 32", r"line 1, 'num-layers'"),
        ("--swiglu", "--swiglu yes", r"line 10, --swiglu"),
        ("--swiglu", "", "architecture"),
        ("--bf16", "--bf16 --fp16", r"line 21, bf16"),
        (
            "--tensor-model-parallel-size 2",
            "--tensor-model-parallel-size 3",
            r"line 14, tensor-model-parallel-size",
        ),
        ("--global-batch-size 32", "", "global-batch-size"),
        ("--attention-dropout 0.0", "--attention-dropout 0.1", r"line 20, attention-dropout"),
        ("--lr 3e-4", "--lr '3", r"line 22"),
        ("--lr 3e-4", "--num-layers-per-virtual-pipeline-stage 5", r"line 22, num-layers-per.*16 layers"),
        (
            "--lr 3e-4",
            "--num-layers-per-virtual-pipeline-stage 4 --num-virtual-stages-per-pipeline-rank 4",
            r"line 22, num-layers-per.*not set with --num-virtual",
        ),
        ("--lr 3e-4", "--optimizer-cpu-offload", r"line 22, optimizer-cpu-offload.*nothing"),
        # A flag of Megatron-LM, which was named as a misspelled --fp8-format.
        ("--lr 3e-4", "--fp4-format e2m1", r"line 22, fp4-format.*'e2m1'.*nothing: .*4 bits"),
        (
            "--tensor-model-parallel-size",
            "--tensor-model-parallel",
            r"line 14.*fix: --tensor-model-parallel-size",
        ),
        (
            "--tensor-model-parallel-size",
            "--model-parallel-size",
            r"line 14.*fix: --tensor-model-parallel-size",
        ),
        ("--lr 3e-4", "--checkpoint-activations", r"line 22.*fix: --recompute-granularity full"),
        ("--lr 3e-4", "--use-megatron-fsdp", r"line 22, use-megatron-fsdp.*Layout.fsdp2"),
        (
            "--lr 3e-4",
            "--pipeline-model-parallel-layout Et*16|t*16L",
            r"line 22, pipeline-model-parallel-layout",
        ),
        ("--lr 3e-4", "--num-experts 8", r"which is without --num-experts"),
        ("--lr 3e-4", "--account-for-loss-in-pipeline-split", r"line 22, account-for-loss"),
        ("--lr 3e-4", "--decoder-last-pipeline-num-layers 9", r"line 22, decoder-last.*leave it out"),
    ],
)
def test_fault_35_invalid_megatron_arguments_raise_with_line_and_flag(
    before: str, after: str, expected: str, tmp_path: Path
) -> None:
    assert before in MEGATRON
    with pytest.raises(ValueError, match=rf"(?s)({expected})"):
        from_megatron(tmp_path, MEGATRON.replace(before, after))


@pytest.mark.parametrize(
    ("layers", "pp", "first", "last", "refused"),
    [
        (32, 4, 8, 8, None),  # An equal split, written out.
        (30, 4, 7, 7, None),  # What counting embedding and loss as layers gives.
        (9, 4, 2, 1, None),
        (9, 4, None, 1, "first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 1"),
        (9, 4, None, None, "first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 1"),
        (9, 4, 1, 2, "2, 3, 3, 1"),
        (32, 1, 2, 1, "leave it out"),
    ],
)
def test_layers_of_the_first_and_last_stage_are_those_of_the_plan(
    layers: int, pp: int, first: int | None, last: int | None, refused: str | None, tmp_path: Path
) -> None:
    flags = {"decoder-first-pipeline-num-layers": first, "decoder-last-pipeline-num-layers": last}
    written = " ".join(f"--{flag} {size}" for flag, size in flags.items() if size is not None)
    text = MEGATRON.replace("num-layers 32", f"num-layers {layers}").replace("--lr 3e-4", written)
    text = text.replace("pipeline-model-parallel-size 2", f"pipeline-model-parallel-size {pp}")
    if refused is None:
        assert sum(from_megatron(tmp_path, text).stage_layers) == layers
        return
    with pytest.raises(ValueError, match=refused):
        from_megatron(tmp_path, text)


ODD = ("", "null", "-1", "0", "1e400", "1.5", "true", '"x"', "[]", "{}", "9" * 20, '"auto"', ".nan")
DAMAGE = st.tuples(st.floats(0, 0.999), st.sampled_from((*ODD, "cut", *"{}[]:-\n &*!#x7")))


@settings(deadline=None, max_examples=examples(300))
@given(kind=st.sampled_from(("yaml", "json", "args")), damage=st.lists(DAMAGE, max_size=4))
def test_fault_35_randomly_damaged_files_raise_value_error(
    kind: str, damage: list[tuple[float, str]]
) -> None:
    text, read = {
        "yaml": (FSDP, from_fsdp),
        "json": (json.dumps(ZERO, indent=2), from_zero),
        "args": (MEGATRON, from_megatron),
    }[kind]
    for position, change in damage:
        lines = text.split("\n")
        number = int(position * len(lines))
        if change == "cut":
            del lines[number]
        elif change in ODD:
            lines[number] = re.sub(r"(?<=[: ])\S+$", change, lines[number])
        else:
            column = int(position * 1000) % (len(lines[number]) + 1)
            lines[number] = lines[number][:column] + change + lines[number][column:]
        text = "\n".join(lines)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plan = read(Path(folder), text)
        except ValueError as error:
            assert str(error)
        else:
            assert plan.world_size == EIGHT.num_gpus


def test_arguments_of_another_model_raise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"line 1, num-layers is 32; allowed: 80, as llama-3.1-70b"):
        from_megatron(tmp_path, architecture=ss.models["llama-3.1-70b"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a":' * 900 + "1" + "}" * 900, "line 1: nested too deeply"),
        ("[" * 900_000, "line 1: nested too deeply"),
        ('{\n"a": "' + '\\"' * 400_000, "line 2"),
        ("{" + ", ".join(f'"k\\u00e9{number}": 1' for number in range(40_000)) + "}", "this key"),
    ],
)
def test_fault_35_deeply_nested_and_huge_json_raises_within_5_seconds(
    text: str, expected: str, tmp_path: Path
) -> None:
    (tmp_path / "zero.json").write_text(text)
    before = time.process_time()
    with pytest.raises(ValueError, match=expected):
        ss.Plan.from_deepspeed(tmp_path / "zero.json")
    assert time.process_time() - before < 5


def test_fault_35_a_yaml_alias_bomb_raises_within_1_second(tmp_path: Path) -> None:
    """Each line has nine aliases of the line above: ten lines expand to 3.5 billion words."""
    lines = ["a0: &a0 [" + ", ".join(["word"] * 9) + "]"]
    lines += [f"a{n}: &a{n} [" + ", ".join([f"*a{n - 1}"] * 9) + "]" for n in range(1, 10)]
    before = time.process_time()
    with pytest.raises(ValueError, match=r"config\.yaml, line 1: an alias; allowed: the value itself"):
        from_fsdp(tmp_path, "\n".join(lines))
    assert time.process_time() - before < 1


@pytest.mark.parametrize("read", [ss.Plan.from_accelerate, ss.Plan.from_deepspeed, ss.Plan.from_megatron])
def test_rejects_missing_binary_and_huge_files(read: Callable[..., ss.Plan], tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "large").write_text("#" * 2_000_000)
    for file in (tmp_path / "missing", tmp_path, tmp_path / "binary", tmp_path / "large", "", None, 3):
        with pytest.raises(ValueError):
            read(file, architecture=LLAMA, cluster=EIGHT)


def test_missing_architecture_or_cluster_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"architecture is None.*zero.json has none"):
        from_zero(tmp_path, {}, architecture=None)
    with pytest.raises(ValueError, match="cluster is None"):
        from_fsdp(tmp_path, cluster=None)
    with pytest.raises(ValueError, match="cluster is '8xh100'; allowed: a Cluster or None"):
        from_fsdp(tmp_path, cluster="8xh100")
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(ValueError, match=r"plan.json is not a valid plan"):
        from_zero(tmp_path, {}, architecture=None)


def test_a_deepspeed_export_of_an_older_version_keeps_its_recipe(tmp_path: Path) -> None:
    plan = ss.Plan(
        ss.models["llama-3.2-1b"], ss.Cluster.parse("2xcpu"), ss.Recipe(seq_len=512), ss.Layout.zero(stage=2)
    )
    config = next(path for path in plan.export(tmp_path) if path.name == "ds_config.json")
    text = config.read_text()
    assert '"recipe"' in text
    (tmp_path / "plan.json").unlink(missing_ok=True)
    config.write_text(text.replace('"recipe"', '"not_said_here"'))
    read = ss.Plan.from_deepspeed(config, architecture=plan.architecture, cluster=plan.cluster)
    assert read.recipe.seq_len == 512
