"""Exported files in the hands of those that read them: accelerate, DeepSpeed, transformers, megatron-core."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import shardscope as ss
from requirements import needs
from shardscope.export.files import list_files
from shardscope.frameworks.deepspeed.files import config_keys
from shardscope.frameworks.megatron.engine.launching import stand_in_for_triton_kernels
from shardscope.frameworks.megatron.files.arguments import build_arguments
from shardscope.frameworks.megatron.files.read import READ

needs("accelerate")
needs("transformers")

EIGHT = ss.Cluster.parse("8xh100-sxm-80gb")
MANY = ss.Cluster.parse("4x8xh100-sxm-80gb")
LLAMA = ss.models["llama-3.1-8b"]

PLANS: dict[str, ss.Plan] = {
    "ddp": ss.Plan(LLAMA, EIGHT, ss.Recipe(micro_batch_size=2), ss.Layout.ddp()),
    "cpu": ss.Plan(
        ss.Architecture.of_size("2m"), ss.Cluster.parse("2xcpu"), ss.Recipe(seq_len=64), ss.Layout.ddp()
    ),
    "one": ss.Plan(LLAMA, ss.Cluster.parse("h100-sxm-80gb"), ss.Recipe(precision="bf16"), ss.Layout.ddp()),
    "fsdp2": ss.Plan(
        LLAMA,
        EIGHT,
        ss.Recipe(recompute="full", precision="fp16-mixed"),
        ss.Layout.fsdp2(reshard_after_forward=False, offload="cpu"),
    ),
    "hsdp": ss.Plan(LLAMA, MANY, ss.Recipe(), ss.Layout.fsdp2(replicate=2, tp=2, cp=2)),
    "zero-3": ss.Plan(
        LLAMA, MANY, ss.Recipe(), ss.Layout.zero(3, offload_params="nvme", offload_optimizer="nvme")
    ),
    "zero-2": ss.Plan(LLAMA, EIGHT, ss.Recipe(precision="fp16-mixed"), ss.Layout.zero(2, tp=2)),
    "zero-0": ss.Plan(LLAMA, EIGHT, ss.Recipe(precision="fp32"), ss.Layout.zero(0)),
    "megatron": ss.Plan(
        ss.models["llama-3.1-70b"], MANY, ss.Recipe(recompute="full"), ss.Layout.megatron(tp=4, pp=4, vpp=2)
    ),
    "experts": ss.Plan(
        ss.models["deepseek-v3"],
        ss.Cluster.parse("64x8xh100-sxm-80gb"),
        ss.Recipe(global_batch_size=2048, loss="fused", recompute="selective"),
        ss.Layout.megatron(
            tp=2, pp=1, ep=32, etp=1, use_precision_aware_optimizer=True, exp_avg_dtype="bf16"
        ),
    ),
}


@pytest.fixture(params=PLANS)
def exported_plan(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A plan, and the folder with its export, which is the working folder of the test."""
    plan = PLANS[request.param]
    plan.export(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    return plan, tmp_path


def find_file(folder: Path, name: str) -> Path:
    if not (folder / name).exists():
        pytest.skip(f"this plan has no {name}, as its FILES.md says: other plans of this file run the test")
    return folder / name


def test_accelerate_loads_its_yaml(exported_plan: Any) -> None:
    plan, folder = exported_plan
    from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

    found = load_config_from_file(str(find_file(folder, "accelerate_config.yaml")))
    assert isinstance(found, ClusterConfig)
    assert found.num_processes == plan.world_size
    assert found.num_machines == plan.cluster.num_nodes


def test_accelerate_launch_builds_the_plan_from_its_yaml(
    exported_plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Return the environment that its launcher gives to ranks, and the plugins that they make of that."""
    plan, folder = exported_plan
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    config = find_file(folder, "accelerate_config.yaml")
    arguments = launch_command_parser().parse_args(["--config_file", str(config), "script.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    assert arguments.num_processes == plan.world_size
    assert bool(arguments.use_cpu) is not plan.on_gpu
    layout: Any = plan.layout
    if arguments.use_deepspeed:
        # As launch_command does with what it loaded.
        arguments.deepspeed_fields_from_accelerate_config = "deepspeed_config_file,zero3_init_flag"
        _, environment = prepare_deepspeed_cmd_env(arguments)
        assert environment["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == "ds_config.json"
        assert environment["ACCELERATE_DEEPSPEED_ZERO3_INIT"] == str(layout.stage == 3).lower()
        return
    environment = prepare_multi_gpu_env(arguments)
    precision = {"bf16-mixed": "bf16", "fp16-mixed": "fp16", "bf16": "no"}[plan.recipe.precision]
    assert environment["ACCELERATE_MIXED_PRECISION"] == precision
    assert bool(arguments.use_fsdp) is (plan.layout.framework == "fsdp2")
    if not arguments.use_fsdp:
        return
    for name, value in environment.items():
        if name.startswith(("FSDP_", "PARALLELISM_")):
            monkeypatch.setenv(name, value)
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.parallelism_config import ParallelismConfig

    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is layout.reshard_after_forward
    assert type(plugin.cpu_offload).__name__ == (
        "CPUOffloadPolicy" if layout.offload == "cpu" else type(plugin.cpu_offload).__name__
    )
    assert bool(plugin.cpu_offload) is (layout.offload == "cpu") or layout.offload is None
    assert plugin.activation_checkpointing is (plan.recipe.recompute == "full")
    if arguments.use_parallelism_config:
        mesh = ParallelismConfig()
        degrees = plan.degrees
        assert (mesh.dp_replicate_size, mesh.dp_shard_size) == (degrees.replicate, degrees.shard)
        assert (mesh.tp_size, mesh.cp_size) == (degrees.tp, degrees.cp)
        assert mesh.total_size == plan.world_size
    else:
        assert plan.degrees.shard == plan.world_size


def test_deepspeed_accepts_its_json(exported_plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, folder = exported_plan
    needs("deepspeed")
    from deepspeed.runtime.config import DeepSpeedConfig

    ranks = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: plan.degrees.data_parallel)
    monkeypatch.setattr("deepspeed.runtime.config.dist", ranks)
    found = DeepSpeedConfig(str(find_file(folder, "ds_config.json")))
    layout: Any = plan.layout
    assert found.train_batch_size == plan.recipe.global_batch_size
    assert found.train_micro_batch_size_per_gpu == plan.recipe.micro_batch_size
    assert found.gradient_accumulation_steps == plan.num_micro_batches
    assert found.float16_config.enabled is (plan.recipe.precision == "fp16-mixed")
    assert found.bfloat16_config.enabled is (plan.recipe.precision == "bf16-mixed")
    zero = found.zero_config
    assert zero.stage == layout.stage
    assert zero.reduce_bucket_size == layout.reduce_bucket_size
    for section, device in (
        (zero.offload_optimizer, layout.offload_optimizer),
        (zero.offload_param, layout.offload_params),
    ):
        where = section.device if section else None
        assert getattr(where, "value", where) == device
    if layout.stage == 3:
        assert zero.prefetch_bucket_size == layout.prefetched_elements
        assert zero.param_persistence_threshold == layout.stage3_param_persistence_threshold


def test_every_exported_deepspeed_key_is_known_to_deepspeed() -> None:
    """Every key of DeepSpeed's own classes is one that a plan holds, or one that is listed as left out."""
    needs("deepspeed")
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    sections = {keys: {*known, *others} for keys, known, others in config_keys.SECTIONS}
    for keys, kind in (
        (("zero_optimization",), DeepSpeedZeroConfig),
        (("zero_optimization", "offload_optimizer"), DeepSpeedZeroOffloadOptimizerConfig),
        (("zero_optimization", "offload_param"), DeepSpeedZeroOffloadParamConfig),
        (("fp16",), DeepSpeedFP16Config),
        (("bf16",), DeepSpeedBF16Config),
    ):
        fields: Any = kind.model_fields
        theirs = {field.alias or name for name, field in fields.items()}
        assert theirs <= sections[keys], theirs - sections[keys]
        # MiCS and LoCo left with 0.19, and older DeepSpeeds have them.
        gone = {"mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"}
        invented = sections[keys] - theirs - set(fields) - gone
        assert not invented, invented


def test_transformers_accepts_the_exported_arguments(
    exported_plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, folder = exported_plan
    from transformers import HfArgumentParser, TrainingArguments

    path = find_file(folder, "training_arguments.yaml")
    if plan.layout.framework == "deepspeed":
        needs("deepspeed")
    parser: Any = HfArgumentParser(TrainingArguments)  # type: ignore[arg-type]
    # Half precision of a GPU's plan is refused where there is no GPU: what is under test is the file.
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    (found,) = parser.parse_yaml_file(str(path), allow_extra_keys=False)
    assert found.per_device_train_batch_size == plan.recipe.micro_batch_size
    assert found.gradient_accumulation_steps == plan.num_micro_batches
    assert found.use_cpu is not plan.on_gpu
    assert found.fp16 is (plan.recipe.precision == "fp16-mixed")
    if plan.layout.framework == "fsdp2":
        layout: Any = plan.layout
        assert found.fsdp is True
        assert found.fsdp_plugin_args["fsdp_version"] == 2
        assert found.fsdp_plugin_args["reshard_after_forward"] is layout.reshard_after_forward
        assert found.fsdp_plugin_args.get("cpu_offload", False) is (layout.offload == "cpu")
        assert found.fsdp_plugin_args["activation_checkpointing"] is (plan.recipe.recompute == "full")
    if plan.layout.framework == "deepspeed":
        assert found.deepspeed_plugin is not None
        assert found.deepspeed_plugin.zero_stage == plan.layout.stage  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["fsdp2", "hsdp"])
def test_torch_accepts_the_exported_fully_shard_arguments(name: str) -> None:
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    plan = PLANS[name]
    text = next(file.text for file in list_files(plan) if file.name == "fsdp2_arguments.json")
    record = json.loads(text)
    types = {key: getattr(torch, kind) for key, kind in record["MixedPrecisionPolicy"].items()}
    policy = MixedPrecisionPolicy(**types)
    assert policy.reduce_dtype is torch.float32
    if record["CPUOffloadPolicy"]:
        assert CPUOffloadPolicy(**record["CPUOffloadPolicy"]).pin_memory is True
    # Over ranks of cp parameters are sharded and gradients reduced too.
    mesh = {
        "fsdp2": "mesh['shard']",
        "hsdp": "mesh['replicate', 'shard', 'cp'], with 'shard' and 'cp' flattened to one axis",
    }
    assert record["fully_shard"]["mesh"] == mesh[name]
    product = 1
    for size in record["init_device_mesh"]["mesh_shape"]:
        product *= size
    assert product == plan.world_size
    assert len(record["init_device_mesh"]["mesh_dim_names"]) == len(record["init_device_mesh"]["mesh_shape"])


# ------------------------------------------------------------------------------------------------ Megatron

FLAGS: dict[str, Callable[[str], Any] | None] = {
    "num-layers": int, "hidden-size": int, "ffn-hidden-size": int, "num-attention-heads": int,
    "kv-channels": int, "group-query-attention": None, "num-query-groups": int,
    "max-position-embeddings": int, "position-embedding-type": str, "normalization": str,
    "make-vocab-size-divisible-by": int, "vocab-size": int, "swiglu": None,
    "untie-embeddings-and-output-weights": None, "disable-bias-linear": None, "add-qkv-bias": None,
    "qk-layernorm": None, "multi-latent-attention": None, "q-lora-rank": int, "kv-lora-rank": int,
    "qk-head-dim": int, "qk-pos-emb-head-dim": int, "v-head-dim": int, "rope-type": str,
    "num-experts": int, "moe-router-topk": int, "moe-ffn-hidden-size": int, "moe-layer-freq": str,
    "moe-token-dispatcher-type": str, "moe-shared-expert-intermediate-size": int,
    "moe-router-pre-softmax": None, "moe-grouped-gemm": None, "moe-expert-capacity-factor": float,
    "tensor-model-parallel-size": int, "pipeline-model-parallel-size": int, "context-parallel-size": int,
    "num-virtual-stages-per-pipeline-rank": int, "expert-model-parallel-size": int,
    "num-layers-per-virtual-pipeline-stage": int, "optimizer-cpu-offload": None,
    "expert-tensor-parallel-size": int, "sequence-parallel": None, "use-distributed-optimizer": None,
    "account-for-embedding-in-pipeline-split": None, "account-for-loss-in-pipeline-split": None,
    "decoder-first-pipeline-num-layers": int, "decoder-last-pipeline-num-layers": int,
    "overlap-grad-reduce": None, "overlap-param-gather": None, "tp-comm-overlap": None,
    "use-precision-aware-optimizer": None, "exp-avg-dtype": str, "exp-avg-sq-dtype": str,
    "seq-length": int, "micro-batch-size": int, "global-batch-size": int, "optimizer": str,
    "hidden-dropout": float, "attention-dropout": float, "fp16": None, "bf16": None, "fp8-format": str,
    "fp4-format": str,
    "accumulate-allreduce-grads-in-fp32": None, "grad-reduce-in-bf16": None, "attention-backend": str,
    "cross-entropy-loss-fusion": None, "cross-entropy-fusion-impl": str, "recompute-granularity": str,
    "recompute-method": str, "recompute-num-layers": int, "recompute-activations": None,
    "use-flash-attn": None, "use-megatron-fsdp": None, "use-custom-fsdp": None, "use-torch-fsdp2": None,
    "pipeline-model-parallel-layout": str, "cpu-offloading-num-layers": int,
    "use-rotary-position-embeddings": None,
}  # fmt: skip
"""Every flag that an export writes or a reader takes, with its type; None: store_true, or store_false for
``disable-bias-linear``. Read off Megatron-LM's megatron/training/arguments.py (commit 000c4ac2 of 2025): no
package has that file."""
WRITTEN_OUT = frozenset({
    "group-query-attention", "max-position-embeddings", "position-embedding-type", "vocab-size", "swiglu",
    "make-vocab-size-divisible-by", "untie-embeddings-and-output-weights", "multi-latent-attention",
    "num-experts", "num-virtual-stages-per-pipeline-rank", "seq-length", "micro-batch-size",
    "num-layers-per-virtual-pipeline-stage",
    "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers",
    "global-batch-size", "accumulate-allreduce-grads-in-fp32", "grad-reduce-in-bf16",
    "recompute-activations", "use-flash-attn", "use-rotary-position-embeddings",
    "use-custom-fsdp", "use-torch-fsdp2",
})  # fmt: skip
"""Those that stand in that file alone; Megatron-LM makes the others from megatron-core's dataclasses since
0.16 (megatron/training/argument_utils.py, ArgumentGroupFactory)."""
CHOICES = {
    "position-embedding-type": ("learned_absolute", "rope", "mrope", "relative", "none"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "moe-token-dispatcher-type": ("allgather", "alltoall", "flex"),
    "exp-avg-dtype": ("fp32", "fp16", "bf16", "fp8"),
    "exp-avg-sq-dtype": ("fp32", "fp16", "bf16", "fp8"),
    "fp8-format": ("e4m3", "hybrid"),
    "attention-backend": ("flash", "fused", "unfused", "local", "auto"),
    "cross-entropy-fusion-impl": ("native", "te"),
    "recompute-granularity": ("full", "selective"),
    "recompute-method": ("uniform", "block"),
    "rope-type": ("rope", "yarn"),
}


def parse_megatron_arguments(plan: ss.Plan) -> dict[str, Any]:
    """Parse the exported flags by an argparse parser that has those flags and no others."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for name, kind in FLAGS.items():
        if kind is None:
            parser.add_argument(f"--{name}", action="store_true", default=argparse.SUPPRESS)
        else:
            parser.add_argument(f"--{name}", type=kind, choices=CHOICES.get(name), default=argparse.SUPPRESS)
    text = next(file.text for file in list_files(plan) if file.name == "megatron_arguments.txt")
    words = [word for line in text.splitlines() if not line.startswith("#") for word in line.split()]
    return vars(parser.parse_args(words))


def test_exported_megatron_flags_exist_in_its_source() -> None:
    assert set(READ) == set(FLAGS)


def test_megatron_core_has_a_field_for_each_flag() -> None:
    """Each flag is a field's name, ``no-`` or ``disable-`` one that is true, or what its metadata says."""
    needs("megatron")
    stand_in_for_triton_kernels()
    from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
    from megatron.core.optimizer.optimizer_config import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    kinds: Any = (MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    made = set()
    for field in (field for kind in kinds for field in dataclasses.fields(kind)):
        name = field.name.replace("_", "-")
        plain = [f"--no-{name}", f"--disable-{name}"] if field.default is True else [f"--{name}"]
        made.update(field.metadata.get("argparse_meta", {}).get("arg_names", plain))
    unknown = {flag for flag in FLAGS if f"--{flag}" not in made} - WRITTEN_OUT
    assert not unknown, unknown


@pytest.mark.parametrize("name", ["megatron", "experts"])
def test_megatron_core_accepts_the_exported_values(name: str) -> None:
    """Megatron-LM maps each flag to the field of that name (core_transformer_config_from_args)."""
    needs("megatron")
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    plan = PLANS[name]
    flags = parse_megatron_arguments(plan)
    assert set(flags) == {flag.replace("-", "_") for flag in build_arguments(plan)}
    kind = MLATransformerConfig if "multi_latent_attention" in flags else TransformerConfig
    names = {field.name for field in dataclasses.fields(kind)}
    given = {flag: value for flag, value in flags.items() if flag in names}
    given["add_bias_linear"] = "disable_bias_linear" not in flags
    given["gated_linear_unit"] = "swiglu" in flags
    given["virtual_pipeline_model_parallel_size"] = flags.get("num_virtual_stages_per_pipeline_rank")
    given["num_moe_experts"] = flags.get("num_experts")
    if "moe_layer_freq" in flags:
        given["moe_layer_freq"] = eval(flags["moe_layer_freq"])  # as _eval_pattern does
    import torch

    config = kind(pipeline_dtype=torch.bfloat16, params_dtype=torch.bfloat16, **given)
    assert isinstance(config, ModelParallelConfig)
    arch, degrees = plan.architecture, plan.degrees
    assert config.num_layers == arch.num_hidden_layers
    assert config.num_query_groups == (
        arch.num_key_value_heads if "num_query_groups" in flags else config.num_attention_heads
    )
    assert config.tensor_model_parallel_size == degrees.tp
    assert config.pipeline_model_parallel_size == degrees.pp
    assert config.expert_model_parallel_size == degrees.ep
    if arch.mixture_of_experts:
        assert config.moe_layer_freq == [int(arch.is_moe_layer(i)) for i in range(arch.num_hidden_layers)]


def test_every_family_that_megatron_supports_exports_known_flags() -> None:
    for arch in ss.models.values():
        try:
            plan = ss.Plan(arch, EIGHT, ss.Recipe(seq_len=512), ss.Layout.megatron())
        except ValueError:  # A family without Megatron-core layers.
            continue
        if any(file.name == "megatron_arguments.txt" for file in list_files(plan)):
            assert parse_megatron_arguments(plan)["hidden_size"] == arch.hidden_size
