"""A base in NF4 under ``fully_shard`` on two CPU ranks: bitsandbytes' own Linears, peft's adapters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from gloo_ranks import StandInContext, on_ranks, tiny_plan
from tests.requirements import needs, thorough
from tests.unit.memory.test_quantization import SMALL

import shardscope as ss
from shardscope.frameworks.fsdp2.memory.groups import compute_groups
from shardscope.frameworks.fsdp2.memory.training_state import count_weights, find_shapes

pytestmark = thorough()


def train(double: bool, mixed: bool) -> tuple[Any, ...]:
    """The loss of the whole model and of its shards, and the bytes that a rank keeps and gathers."""
    import bitsandbytes as bnb
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from shardscope.training.model.lora import add_adapters
    from shardscope.training.model.model import build_model

    torch.manual_seed(0)
    model = build_model(SMALL).to(torch.bfloat16)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear) and name != "lm_head":
                linear = bnb.nn.Linear4bit(
                    child.in_features,
                    child.out_features,
                    bias=False,
                    compute_dtype=torch.bfloat16,
                    quant_type="nf4",
                    compress_statistics=double,
                    quant_storage=torch.bfloat16,
                )
                linear.weight = bnb.nn.Params4bit(
                    child.weight.data,
                    requires_grad=False,
                    quant_type="nf4",
                    compress_statistics=double,
                    quant_storage=torch.bfloat16,
                    module=linear,
                )
                setattr(module, name, linear.to("cpu"))
    recipe = ss.Recipe(method="lora", quantization="nf4", precision="bf16", lora_rank=6)
    model = add_adapters(model, SMALL, recipe, in_fp32=mixed)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    ids = torch.arange(32).reshape(1, 32) % SMALL.vocab_size
    whole = model(input_ids=ids, labels=ids).loss.item()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    layers = model.base_model.model.model.layers
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    cut = model(input_ids=ids, labels=ids).loss
    cut.backward()
    kept = sum(p.to_local().untyped_storage().nbytes() for p in model.parameters())
    scales = {}
    for module in model.modules():
        state = getattr(module, "quant_state", None)
        for owner in (state, getattr(state, "state2", None)):
            for name in ("absmax", "code", "offset"):
                tensor = getattr(owner, name, None)
                if tensor is not None:
                    scales[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    # What is gathered is in bf16, adapters too.
    padded = sum(
        parameter._sharded_param_data.numel() * 2
        for parameter in layers[0]._get_fsdp_state()._fsdp_param_group.fsdp_params
    )
    trained = sum(p.grad is not None for p in model.parameters())
    return whole, cut.item(), kept + sum(scales.values()), 2 * padded, trained


def all_cases(ctx: StandInContext) -> dict[str, Any]:
    return {
        f"{method} {precision}": train(double=method == "qlora", mixed=precision == "bf16-mixed")
        for method in ("lora", "qlora")
        for precision in ("bf16", "bf16-mixed")
    }


@pytest.fixture(scope="module")
def trained_on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train every case in one process group; return the results of rank 0."""
    needs("bitsandbytes")
    ranks: list[dict[str, Any]] = on_ranks(
        2, tiny_plan("fsdp2", 2), all_cases, tmp_path_factory.mktemp("nf4")
    )
    return ranks[0]


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed"])
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_nf4_weights_are_sharded_and_their_scales_are_not(
    method: Any, precision: Any, trained_on_two_ranks: dict[str, Any]
) -> None:
    whole, cut, kept, gathered, trained = trained_on_two_ranks[f"{method} {precision}"]
    assert whole == pytest.approx(cut, rel=1e-3)
    assert trained == 2 * 4 * SMALL.num_hidden_layers
    recipe = ss.Recipe(method=method, precision=precision, lora_rank=6, seq_len=32)
    if method == "lora":
        recipe = replace(recipe, quantization="nf4")
    plan = ss.Plan(SMALL, ss.Cluster.parse("2xcpu"), recipe, ss.Layout.fsdp2())
    assert kept == plan.memory().components["parameters"]
    assert gathered == compute_groups(plan, count_weights(plan, find_shapes(plan).kinds[0])).dense.parameters
