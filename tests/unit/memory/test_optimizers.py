"""Tests of predicted optimizer bytes against the real optimizers' state for small transformers models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.operator_peak import Peak
from tests.requirements import needs

import shardscope as ss
from shardscope.core.architecture import Architecture, MixtureOfExperts
from shardscope.memory.state.optimizers import ELEMENTWISE, compute_flat_working, compute_tensor_state
from shardscope.training.model.lora import add_adapters
from shardscope.training.model.model import build_model
from shardscope.training.optimizers.optimizers import build_optimizer

LLAMA = Architecture(
    name="small",
    model_type="llama",
    hidden_size=96,
    intermediate_size=168,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=320,
    max_position_embeddings=64,
)
MIXTRAL = replace(
    LLAMA,
    model_type="mixtral",
    mixture_of_experts=MixtureOfExperts(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=168),
)
TIED = replace(LLAMA, tie_word_embeddings=True)
MODELS = {"llama": LLAMA, "mixtral": MIXTRAL, "tied": TIED}
TWO = ss.Cluster.parse("2xcpu")
ALL = (
    *("adamw", "adamw_foreach", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"),
    *("adafactor", "sgd", "lion", "muon"),
)


def list_hidden_matrices(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters that Muon trains: matrices inside the layers."""
    return [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n and p.requires_grad]


def build_optimizers(name: str, model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Build the real optimizers that a recipe names."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if name in ("adamw", "adamw_foreach", "sgd"):
        return [build_optimizer(name, trained)]
    if name == "adafactor":
        # Matrices first, as training.optimizers groups them.
        groups = [[p for p in trained if p.ndim > 1], [p for p in trained if p.ndim == 1]]
        return [torch.optim.Adafactor([{"params": group} for group in groups if group])]
    if name == "muon":
        matrices = list_hidden_matrices(model)
        rest = [p for p in trained if all(p is not q for q in matrices)]
        return [torch.optim.Muon(matrices), *([torch.optim.AdamW(rest, fused=True)] if rest else [])]
    bnb = needs("bitsandbytes")
    if name == "adamw_8bit":
        manager = bnb.optim.GlobalOptimManager.get_instance()
        manager.initialize()  # It identifies tensors by id(), which Python reuses.
        manager.register_module_override(model.get_input_embeddings(), "weight", {"optim_bits": 32})
        return [bnb.optim.AdamW8bit(trained)]
    # CPUs have no managed memory: the same moments, on the device.
    return [bnb.optim.AdamW(trained)]


def count_state_bytes(found: list[torch.optim.Optimizer]) -> int:
    """Return the bytes of all state tensors of more than one element; shared storages count once."""
    storages = {}
    for optimizer in found:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.numel() > 1:
                    storages[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
    return sum(storages.values())


def plan(arch: Architecture, name: str, **recipe: Any) -> ss.Plan:
    return ss.Plan(
        arch,
        TWO,
        ss.Recipe(seq_len=32, optimizer=name, **recipe),
        ss.Layout.ddp(),  # type: ignore[arg-type]
    )


def set_gradients(model: torch.nn.Module) -> torch.nn.Module:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    return model


@pytest.mark.parametrize("name", sorted(set(ALL) - {"lion", "paged_adamw_8bit"}))
@pytest.mark.parametrize("family", MODELS)
def test_optimizer_state_equals_the_prediction(family: str, name: str) -> None:
    model = set_gradients(build_model(MODELS[family]))
    real = build_optimizers(name, model)
    for optimizer in real:
        optimizer.step()
    assert count_state_bytes(real) == plan(MODELS[family], name).memory().at("rest")["optimizer"]


@pytest.mark.parametrize("name", ["adamw", "adafactor", "sgd", "muon", "adamw_8bit"])
def test_optimizer_state_of_adapters_equals_the_prediction(name: str) -> None:
    recipe = ss.Recipe(method="lora", lora_rank=64)
    model = set_gradients(add_adapters(build_model(LLAMA), LLAMA, recipe))
    real = build_optimizers(name, model)
    for optimizer in real:
        optimizer.step()
    predicted = plan(LLAMA, name, method="lora", lora_rank=64).memory().at("rest")["optimizer"]
    assert count_state_bytes(real) == predicted


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["adafactor", "muon", "sgd", "adamw", "adamw_foreach"])
def test_temporaries_of_an_update_equal_the_prediction(name: str, precision: str) -> None:
    """Measured at the peak of the second step, without the state; scalars are ignored."""
    model = build_model(LLAMA).to(torch.bfloat16 if precision == "bf16" else torch.float32)
    real = build_optimizers(name, set_gradients(model))
    for optimizer in real:
        optimizer.step()
    states = [v for o in real for s in o.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    gradients = [p.grad for p in model.parameters()]
    peak = Peak([*model.parameters(), *gradients, *states])
    with peak:
        for optimizer in real:
            optimizer.step()
    report = plan(LLAMA, name, precision=precision).memory()
    predicted = report.at("optimizer")["optimizer"] - report.at("rest")["optimizer"]
    assert abs(peak.most - predicted) <= 4 * (LLAMA.intermediate_size + LLAMA.vocab_size) + 256


def test_paged_moments_are_counted_on_the_host() -> None:
    gpu = ss.Cluster.parse("h100-sxm-80gb")
    arch = ss.models["llama-3.1-8b"]
    reports = {
        name: ss.Plan(arch, gpu, ss.Recipe(optimizer=name), ss.Layout.ddp()).memory()  # type: ignore[arg-type]
        for name in ALL
    }
    paged, small = reports["paged_adamw"], reports["paged_adamw"].at("rest")["optimizer"]
    # Vectors stay on the GPU: all other tensors have over 100,000 elements.
    assert paged.host_bytes + small == 8 * arch.num_parameters
    assert small == 8 * sum(p.numel for p in _list_vectors(arch))
    assert paged.at("optimizer")["optimizer"] - small == 8 * arch.vocab_size * arch.hidden_size
    assert "managed memory" in paged.worst_stage.at("rest").terms["optimizer"].explain()
    eight = reports["adamw_8bit"].at("rest")["optimizer"]
    assert 2 * arch.num_parameters < eight < 3 * arch.num_parameters
    assert reports["adafactor"].at("rest")["optimizer"] < 0.01 * arch.num_parameters
    assert reports["lion"].components["parameters"] == reports["sgd"].components["parameters"]


class _Size:
    def __init__(self, numel: int) -> None:
        self.numel = numel


def _list_vectors(arch: Architecture) -> list[_Size]:
    inside = [p for layer in range(arch.num_hidden_layers) for p in arch.layer_shapes(layer)]
    return [_Size(p.shape[0]) for p in inside if len(p.shape) == 1] + [_Size(arch.hidden_size)]


@pytest.mark.parametrize("shape", [(1024, 512), (1000, 24), (40, 8), (4096, 1), (257, 1), (3, 1)])
def test_8_bit_moments_of_torchao_equal_the_prediction(shape: tuple[int, int]) -> None:
    """FSDP2's 8-bit AdamW has moments of the shard's shape."""
    low_bit = needs("torchao.optim.subclass_8bit")
    adam = needs("torchao.optim.adam")
    weight = torch.zeros(shape if shape[1] > 1 else shape[:1])
    moments = adam.AdamW8bit([torch.nn.Parameter(weight)])._new_buffer(weight, True)
    num_bytes = moments.codes.nbytes + moments.scale.nbytes + moments.qmap.nbytes if isinstance(
        moments, low_bit.OptimState8bit
    ) else moments.nbytes  # fmt: skip
    assert 2 * num_bytes == compute_tensor_state("adamw_8bit", *shape, 4, library="torchao").state


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("library", ["bitsandbytes", "torchao"])
def test_arrays_of_plans_have_the_same_optimizer_bytes(name: str, library: str) -> None:
    rows = np.array([1, 40, 256, 4096, 128_256], dtype=np.int64)
    columns = np.array([1, 512, 1, 4096, 64], dtype=np.int64)
    together = compute_tensor_state(name, rows, columns, 4, hidden=True, library=library)
    for index, (row, column) in enumerate(zip(rows.tolist(), columns.tolist(), strict=True)):
        alone = compute_tensor_state(name, row, column, 4, hidden=True, library=library)
        for ours, theirs in zip(together, alone, strict=True):
            assert np.broadcast_to(ours, rows.shape)[index] == theirs


def test_zero_quantizes_all_moments_and_factors_none_in_flat_buffers() -> None:
    """ZeRO's optimizers see flat buffers: no embeddings to exclude and no rows to factor."""
    reports = {
        name: ss.Plan(
            ss.models["llama-3.1-8b"],
            ss.Cluster.parse("8xh100-sxm-80gb"),
            ss.Recipe(optimizer=name),
            ss.Layout.zero(),
        ).memory()
        for name in ("adamw", "adamw_8bit", "adafactor", "lion", "sgd")
    }
    part = ss.models["llama-3.1-8b"].num_parameters // 8
    each = {name: report.at("rest")["optimizer"] / part for name, report in reports.items()}
    scales = 2 * 4 / 256
    wanted = {"adamw": 12, "adamw_8bit": 6 + scales, "adafactor": 8, "lion": 8, "sgd": 8}
    assert each == pytest.approx(wanted, rel=1e-4)
    # Adafactor squares the gradient of a sub-group, and copies its second moment.
    assert compute_flat_working("adafactor", 1000) == 8000
    more = reports["adafactor"].at("optimizer")["optimizer"] - reports["lion"].at("optimizer")["optimizer"]
    assert 0 < more <= 2 * 4 * part


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("adafactor", ss.Layout.zero(stage=0)),
        ("adamw_8bit", ss.Layout.zero(stage=0)),
        ("lion", ss.Layout.zero(offload_optimizer="cpu")),
    ],
)
def test_zero_rejects_optimizers_without_flat_buffers_on_the_gpu(name: str, layout: ss.Layout) -> None:
    with pytest.raises(ValueError, match=f"Recipe.optimizer is '{name}'.*optimizer='adamw'"):
        ss.Plan(
            ss.models["llama-3.1-8b"],
            ss.Cluster.parse("8xh100-sxm-80gb"),
            ss.Recipe(optimizer=name),  # type: ignore[arg-type]
            layout,
        )


def test_adafactor_updates_of_a_vector_need_two_more_temporaries() -> None:
    vector = torch.nn.Parameter(torch.ones(1 << 16))
    vector.grad = torch.ones_like(vector)
    optimizer = torch.optim.Adafactor([vector])
    optimizer.step()
    peak = Peak([vector, vector.grad, optimizer.state[vector]["variance"]])
    with peak:
        optimizer.step()
    # The rest is a few scalars.
    assert 0 <= peak.most - compute_flat_working("adafactor", 1 << 16) < 64


def test_frameworks_reject_optimizers_they_do_not_support() -> None:
    gpus = ss.Cluster.parse("8xh100-sxm-80gb")
    for layout, names in (
        (ss.Layout.fsdp2(), {"muon", "adafactor", "paged_adamw"}),
        (ss.Layout.megatron(), {"muon", "adafactor", "paged_adamw", "adamw_8bit"}),
        (ss.Layout.zero(), {"muon", "paged_adamw", "paged_adamw_8bit"}),
    ):
        for name in names:
            with pytest.raises(ValueError, match=f"Recipe.optimizer is '{name}'.*with {layout.title}"):
                ss.Plan(LLAMA, gpus, ss.Recipe(optimizer=name), layout)  # type: ignore[arg-type]
    assert set(ELEMENTWISE) < set(ALL)
