"""The plan that cuts transformers' modules, with numbers: two gloo ranks compute what one model does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.requirements import needs, thorough

torch = needs("torch")
needs("transformers")

from gloo_ranks import StandInContext, on_ranks, tiny_plan  # noqa: E402

import shardscope as ss  # noqa: E402
from shardscope.frameworks.fsdp2.limits import TENSOR_PARALLEL_FAMILIES  # noqa: E402

pytestmark = thorough()

FAMILY_FIELDS: dict[str, dict[str, Any]] = {
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": True},
    "seed_oss": {"attention_bias": True},
    "smollm3": {"tie_word_embeddings": True, "num_hidden_layers": 4},
    "ministral3": {"tie_word_embeddings": True},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {
        "tie_word_embeddings": True,
        "norms_per_layer": 4,
        "sliding_window": 8,
        "sliding_window_layers": 1,
    },
    "gemma3_text": {
        "tie_word_embeddings": True,
        "norms_per_layer": 4,
        "qk_norm": True,
        "sliding_window": 8,
        "sliding_window_layers": 1,
    },
    "starcoder2": {
        "norm": "layernorm",
        "gated_mlp": False,
        "attention_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
    },
}


def compare(family: str) -> dict[str, Any]:
    """Return the loss of the whole model and of its two parts, and their gradients' largest difference."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel

    from shardscope.frameworks.fsdp2.engine.tensor_parallel import apply_tensor_parallel
    from shardscope.training.model.model import build_model

    sizes: dict[str, Any] = {
        "vocab_size": 1013,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": False,
        **FAMILY_FIELDS.get(family, {}),
    }
    arch = replace(ss.Architecture.of_size("2m"), model_type=family, **sizes)
    torch.manual_seed(3)
    model = build_model(arch)
    model.train()
    ids = torch.randint(arch.vocab_size, (2, 32), generator=torch.Generator().manual_seed(5))
    whole = model(input_ids=ids, labels=ids).loss
    whole.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    apply_tensor_parallel(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    cut = sum(isinstance(p, DTensor) and p.to_local().numel() < p.numel() for p in model.parameters())
    with loss_parallel():
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    worst = 0.0
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.full_tensor()
        worst = max(worst, float((gradient - expected[name]).abs().max() / expected[name].abs().max()))
    return {"whole": whole.item(), "parts": loss.full_tensor().item(), "worst_gradient": worst, "cut": cut}


def compare_every_family(ctx: StandInContext) -> dict[str, dict[str, Any]]:
    return {family: compare(family) for family in TENSOR_PARALLEL_FAMILIES}


@pytest.fixture(scope="module")
def family_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    ranks: list[dict[str, dict[str, Any]]] = on_ranks(
        2, tiny_plan("fsdp2", 2), compare_every_family, tmp_path_factory.mktemp("ranks")
    )
    return ranks[0]


@pytest.mark.parametrize("family", TENSOR_PARALLEL_FAMILIES)
def test_two_tensor_parallel_ranks_compute_the_same_as_one(
    family_results: dict[str, dict[str, Any]], family: str
) -> None:
    one = family_results[family]
    assert one["parts"] == pytest.approx(one["whole"], rel=1e-6)
    assert one["worst_gradient"] < 1e-5
    # Embedding, head and the projections of both layers, biases among them.
    assert one["cut"] >= 15
