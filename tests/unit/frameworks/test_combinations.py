"""Invalid combinations of fields: rejected in the plan, and by the installed framework's own code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import pytest
from framework_subprocess import OwnChecks, own_checks
from random_plans import LLAMA, MOE
from tests.requirements import needs, thorough

import shardscope as ss
from shardscope.core.errors import FieldError
from shardscope.core.plan import Plan
from shardscope.frameworks.deepspeed.files.config import build_deepspeed_config
from shardscope.frameworks.megatron.core_config import build_transformer_config

EIGHT = ss.Cluster.parse("8xh100-sxm-80gb")
BIASED = replace(MOE, model_type="qwen3_moe", attention_output_bias=True, attention_bias=True, qk_norm=True)


def catch_error(
    arch: ss.Architecture, layout: ss.Layout, cluster: ss.Cluster = EIGHT, **recipe: Any
) -> FieldError:
    with pytest.raises(FieldError) as caught:
        Plan(arch, cluster, ss.Recipe(**recipe), layout)
    return caught.value


@pytest.fixture(scope="module")
def megatron_checks() -> Iterator[OwnChecks]:
    with own_checks("megatron.core.transformer.transformer_config", "megatron.core.optimizer") as checks:
        yield checks


@pytest.fixture(scope="module")
def deepspeed_checks() -> Iterator[OwnChecks]:
    with own_checks("deepspeed") as checks:
        yield checks


# ------------------------------------------------------------------------------------------------ Megatron


def test_megatron_distributed_optimizer_needs_adam() -> None:
    error = catch_error(LLAMA, ss.Layout.megatron(), optimizer="sgd")
    assert (error.field, error.fix) == ("Recipe.optimizer", "optimizer='adamw'")
    unsharded = Plan(
        LLAMA, EIGHT, ss.Recipe(optimizer="sgd"), ss.Layout.megatron(distributed_optimizer=False)
    )
    assert unsharded.memory().peak_bytes > 0


@thorough()
def test_megatron_itself_rejects_sgd(megatron_checks: OwnChecks) -> None:
    message = megatron_checks(
        """
import torch
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer

# It would allocate its first tensor on a GPU.
distrib_optimizer.MixedPrecisionOptimizer.__init__ = lambda *_: None
sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
distrib_optimizer.DistributedOptimizer(
    sgd, OptimizerConfig(lr=0.1, optimizer="sgd"), None, None, [SimpleNamespace(ddp_config=None)],
    per_model_buffers={}, data_parallel_group=None, data_parallel_group_gloo=None,
    data_parallel_group_idx=0, distributed_optimizer_instance_id=0,
)
""",
    )
    assert message.startswith("AssertionError: Only Adam and HybridDeviceOptimizer currently supported")


def test_experts_with_biases_cannot_be_sharded_by_megatron() -> None:
    error = catch_error(BIASED, ss.Layout.megatron(tp=2))
    assert (error.field, error.fix) == ("Layout.etp", "etp=1")
    for layout in (ss.Layout.megatron(tp=2, etp=1), ss.Layout.megatron(ep=2)):
        assert Plan(BIASED, EIGHT, ss.Recipe(), layout).memory().peak_bytes > 0


def check_transformer_config(megatron_checks: OwnChecks, plan: Plan, **changes: Any) -> str:
    """Return the error of ``TransformerConfig``, or "ok"; without kernels that need Transformer Engine."""
    config = build_transformer_config(plan) | {
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
    }
    return megatron_checks(
        f"""
from megatron.core.transformer.transformer_config import TransformerConfig

TransformerConfig(**{config | changes!r})
""",
    )


@thorough()
def test_megatron_itself_rejects_biases_in_sharded_experts(megatron_checks: OwnChecks) -> None:
    plan = Plan(BIASED, EIGHT, ss.Recipe(), ss.Layout.megatron(tp=2, etp=1))
    assert check_transformer_config(megatron_checks, plan) == "ok"
    message = check_transformer_config(megatron_checks, plan, expert_tensor_parallel_size=2)
    assert message == "AssertionError: Bias in Moe is only supported when ETP==1"


@thorough()
def test_top_1_routing_uses_softmax_before_top_k(megatron_checks: OwnChecks) -> None:
    assert MOE.mixture_of_experts is not None
    one = replace(MOE, mixture_of_experts=replace(MOE.mixture_of_experts, num_experts_per_tok=1))
    plan = Plan(one, EIGHT, ss.Recipe(), ss.Layout.megatron())
    assert check_transformer_config(megatron_checks, plan) == "ok"
    assert "moe-router-pre-softmax" in check_transformer_config(
        megatron_checks, plan, moe_router_pre_softmax=False
    )


# --------------------------------------------------------------------------------------------------- FSDP2


@pytest.mark.parametrize(
    ("vpp", "batch", "fixed"),
    [(1, 4, 16), (1, 12, 16), (2, 44, 48), (2, 36, 48)],
)
def test_torch_schedules_need_enough_micro_batches(vpp: int, batch: int, fixed: int) -> None:
    """pp 4 leaves two data-parallel ranks of 8; two sequences each are one micro-batch of all."""
    layout = ss.Layout.fsdp2(pp=4, vpp=vpp)
    error = catch_error(LLAMA, layout, micro_batch_size=2, global_batch_size=batch)
    assert (error.field, error.fix) == ("Recipe.global_batch_size", f"global_batch_size={fixed}")
    recipe = ss.Recipe(micro_batch_size=2, global_batch_size=fixed)
    assert Plan(LLAMA, EIGHT, recipe, layout).num_micro_batches == fixed // 4
    assert Plan(LLAMA, EIGHT, ss.Recipe(global_batch_size=8), ss.Layout.fsdp2()).num_micro_batches == 1


@pytest.mark.parametrize("vpp", [1, 2])
def test_torch_itself_rejects_too_few_micro_batches(vpp: int) -> None:
    """With up to 24 micro-batches over 4 stages, a plan raises exactly where torch does."""
    schedules = needs("torch.distributed.pipelining.schedules")
    stage = MagicMock(num_stages=4 * vpp, group_size=4, group_rank=0, stage_index=0, has_backward=False)
    build_schedule = {
        1: lambda number: schedules.Schedule1F1B(stage, number, loss_fn=None),
        2: lambda number: schedules.ScheduleInterleaved1F1B([stage, stage], number, loss_fn=None),
    }[vpp]
    rejected = set()
    for number in range(1, 25):
        recipe, layout = ss.Recipe(global_batch_size=2 * number), ss.Layout.fsdp2(pp=4, vpp=vpp)
        try:
            Plan(LLAMA, EIGHT, recipe, layout)
        except FieldError:
            rejected.add(number)
            with pytest.raises(ValueError, match=r"[Nn]umber of microbatches"):
                build_schedule(number)
        else:
            build_schedule(number)
    assert rejected and len(rejected) < 24


# ----------------------------------------------------------------------------------------------- DeepSpeed


def test_zero_2_with_experts_needs_contiguous_gradients() -> None:
    error = catch_error(MOE, ss.Layout.zero(2, ep=2, contiguous_gradients=False))
    assert (error.field, error.fix) == ("Layout.contiguous_gradients", "contiguous_gradients=True")
    for stage in (0, 1):
        Plan(MOE, EIGHT, ss.Recipe(), ss.Layout.zero(stage, ep=2, contiguous_gradients=False))
    Plan(MOE, EIGHT, ss.Recipe(), ss.Layout.zero(2, contiguous_gradients=False))


def test_an_nvme_buffer_must_fit_a_shard_of_every_tensor() -> None:
    arch, one = ss.models["llama-3.1-8b"], ss.Cluster.parse("h100-sxm-80gb")
    whole = arch.vocab_size * arch.hidden_size
    error = catch_error(arch, ss.Layout.zero(offload_params="nvme", offload_params_buffer_size=10**8), one)
    assert error.field == "Layout.offload_params_buffer_size"
    assert error.fix == f"offload_params_buffer_size={whole}"
    for cluster, size in ((one, whole), (EIGHT, 10**8)):
        plan = Plan(arch, cluster, ss.Recipe(), ss.Layout.zero(offload_params="nvme"))
        config = build_deepspeed_config(plan)["zero_optimization"]["offload_param"]
        assert config["buffer_size"] == size
        exact = replace(plan.layout, offload_params_buffer_size=size)  # type: ignore[call-arg]
        assert replace(plan, layout=exact).memory().host_bytes == plan.memory().host_bytes


def test_an_optimizer_other_than_adam_can_be_offloaded_to_the_host() -> None:
    for optimizer, forced in (("adamw", True), ("sgd", False)):
        plan = Plan(LLAMA, EIGHT, ss.Recipe(optimizer=optimizer), ss.Layout.zero(offload_optimizer="cpu"))  # type: ignore[arg-type]
        assert build_deepspeed_config(plan)["zero_force_ds_cpu_optimizer"] is forced


@thorough()
def test_deepspeed_itself_needs_contiguous_gradients(deepspeed_checks: OwnChecks) -> None:
    message = deepspeed_checks(
        """
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

DeepSpeedZeroOptimizer._configure_moe_settings(
    SimpleNamespace(partition_gradients=True, contiguous_gradients=False)
)
""",
    )
    assert message.startswith(
        "AssertionError: Contiguous Gradients in ZeRO Stage 2 must be set to True for MoE"
    )


@thorough()
def test_deepspeed_itself_rejects_too_small_buffers(deepspeed_checks: OwnChecks) -> None:
    message = deepspeed_checks(
        """
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import AsyncPartitionedParameterSwapper

AsyncPartitionedParameterSwapper.get_buffer(
    SimpleNamespace(available_swap_in_buffers=lambda: 1, elements_per_buffer=100),
    SimpleNamespace(ds_id=0),
    101,
)
""",
    )
    assert message == "AssertionError: More elements 101 than buffer size 100"
