"""Optimizer bytes against what the optimizers themselves keep over transformers' models, tensor by tensor."""

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


def hidden_matrices(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """What Muon takes: matrices inside the layers."""
    return [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n and p.requires_grad]


def optimizers(name: str, model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """The real optimizers that a recipe names."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if name in ("adamw", "adamw_foreach", "sgd"):
        return [build_optimizer(name, trained)]
    if name == "adafactor":
        # Matrices first, as training.optimizers groups them.
        groups = [[p for p in trained if p.ndim > 1], [p for p in trained if p.ndim == 1]]
        return [torch.optim.Adafactor([{"params": group} for group in groups if group])]
    if name == "muon":
        matrices = hidden_matrices(model)
        rest = [p for p in trained if all(p is not q for q in matrices)]
        return [torch.optim.Muon(matrices), *([torch.optim.AdamW(rest, fused=True)] if rest else [])]
    bnb = needs("bitsandbytes")
    if name == "adamw_8bit":
        manager = bnb.optim.GlobalOptimManager.get_instance()
        manager.initialize()  # It remembers tensors by id, and ids come back.
        manager.register_module_override(model.get_input_embeddings(), "weight", {"optim_bits": 32})
        return [bnb.optim.AdamW8bit(trained)]
    # No managed memory here: the same moments, on the device.
    return [bnb.optim.AdamW(trained)]


def state_bytes(found: list[torch.optim.Optimizer]) -> int:
    """Bytes of every tensor of more than one number, storages shared between states once."""
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


def with_gradients(model: torch.nn.Module) -> torch.nn.Module:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    return model


@pytest.mark.parametrize("name", sorted(set(ALL) - {"lion", "paged_adamw_8bit"}))
@pytest.mark.parametrize("family", MODELS)
def test_an_optimizer_keeps_what_is_predicted(family: str, name: str) -> None:
    model = with_gradients(build_model(MODELS[family]))
    real = optimizers(name, model)
    for optimizer in real:
        optimizer.step()
    assert state_bytes(real) == plan(MODELS[family], name).memory().at("rest")["optimizer"]


@pytest.mark.parametrize("name", ["adamw", "adafactor", "sgd", "muon", "adamw_8bit"])
def test_the_optimizer_of_adapters(name: str) -> None:
    recipe = ss.Recipe(method="lora", lora_rank=64)
    model = with_gradients(add_adapters(build_model(LLAMA), LLAMA, recipe))
    real = optimizers(name, model)
    for optimizer in real:
        optimizer.step()
    predicted = plan(LLAMA, name, method="lora", lora_rank=64).memory().at("rest")["optimizer"]
    assert state_bytes(real) == predicted


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["adafactor", "muon", "sgd", "adamw", "adamw_foreach"])
def test_an_update_needs_what_is_predicted(name: str, precision: str) -> None:
    """Beside the state, at the fullest moment of the second step; numbers of a few bytes are let go."""
    model = build_model(LLAMA).to(torch.bfloat16 if precision == "bf16" else torch.float32)
    real = optimizers(name, with_gradients(model))
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
    # Vectors and the like stay: all others are over 100,000 numbers.
    assert paged.host_bytes + small == 8 * arch.num_parameters
    assert small == 8 * sum(p.numel for p in _vectors(arch))
    assert paged.at("optimizer")["optimizer"] - small == 8 * arch.vocab_size * arch.hidden_size
    assert "managed memory" in paged.worst_stage.at("rest").terms["optimizer"].explain()
    eight = reports["adamw_8bit"].at("rest")["optimizer"]
    assert 2 * arch.num_parameters < eight < 3 * arch.num_parameters
    assert reports["adafactor"].at("rest")["optimizer"] < 0.01 * arch.num_parameters
    assert reports["lion"].components["parameters"] == reports["sgd"].components["parameters"]


class _Size:
    def __init__(self, numel: int) -> None:
        self.numel = numel


def _vectors(arch: Architecture) -> list[_Size]:
    inside = [p for layer in range(arch.num_hidden_layers) for p in arch.layer_shapes(layer)]
    return [_Size(p.shape[0]) for p in inside if len(p.shape) == 1] + [_Size(arch.hidden_size)]


@pytest.mark.parametrize("shape", [(1024, 512), (1000, 24), (40, 8), (4096, 1), (257, 1), (3, 1)])
def test_torchaos_moments(shape: tuple[int, int]) -> None:
    """FSDP2's 8-bit AdamW, whose moments are of the shard's own shape."""
    low_bit = needs("torchao.optim.subclass_8bit")
    adam = needs("torchao.optim.adam")
    weight = torch.zeros(shape if shape[1] > 1 else shape[:1])
    made = adam.AdamW8bit([torch.nn.Parameter(weight)])._new_buffer(weight, True)
    held = made.codes.nbytes + made.scale.nbytes + made.qmap.nbytes if isinstance(
        made, low_bit.OptimState8bit
    ) else made.nbytes  # fmt: skip
    assert 2 * held == compute_tensor_state("adamw_8bit", *shape, 4, library="torchao").state


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("library", ["bitsandbytes", "torchao"])
def test_arrays_give_the_same_bytes(name: str, library: str) -> None:
    rows = np.array([1, 40, 256, 4096, 128_256], dtype=np.int64)
    columns = np.array([1, 512, 1, 4096, 64], dtype=np.int64)
    together = compute_tensor_state(name, rows, columns, 4, hidden=True, library=library)
    for index, (row, column) in enumerate(zip(rows.tolist(), columns.tolist(), strict=True)):
        alone = compute_tensor_state(name, row, column, 4, hidden=True, library=library)
        for ours, theirs in zip(together, alone, strict=True):
            assert np.broadcast_to(ours, rows.shape)[index] == theirs


def test_flat_buffers_have_neither_rows_nor_embeddings() -> None:
    """ZeRO's buffers: 8-bit moments of everything, and an Adafactor that factors nothing."""
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
def test_zero_refuses_what_has_no_flat_buffer_on_the_device(name: str, layout: ss.Layout) -> None:
    with pytest.raises(ValueError, match=f"Recipe.optimizer is '{name}'.*optimizer='adamw'"):
        ss.Plan(
            ss.models["llama-3.1-8b"],
            ss.Cluster.parse("8xh100-sxm-80gb"),
            ss.Recipe(optimizer=name),  # type: ignore[arg-type]
            layout,
        )


def test_adafactor_of_a_vector_needs_two_more() -> None:
    vector = torch.nn.Parameter(torch.ones(1 << 16))
    vector.grad = torch.ones_like(vector)
    optimizer = torch.optim.Adafactor([vector])
    optimizer.step()
    peak = Peak([vector, vector.grad, optimizer.state[vector]["variance"]])
    with peak:
        optimizer.step()
    # Beside it there are a few single numbers.
    assert 0 <= peak.most - compute_flat_working("adafactor", 1 << 16) < 64


def test_frameworks_refuse_what_they_cannot_run() -> None:
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
