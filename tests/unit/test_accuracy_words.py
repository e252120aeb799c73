"""tests/accuracy: names of models and cards, and words about optimizers, recomputation and offload."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.accuracy.frameworks import zero_stages
from tests.accuracy.machines import cluster
from tests.accuracy.model_names import by_name
from tests.accuracy.rows import status
from tests.accuracy.unmapped import UnmappedError
from tests.accuracy.words import moved, optimizer, recomputation

import shardscope as ss


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("meta-llama/Llama-2-7b-hf", "llama-2-7b"),
        ("LLaMA 2 7B", "llama-2-7b"),
        ("llama_3_8b", "llama-3-8b"),
        ("LLAMA3.1_405B", "llama-3.1-405b"),
        ("Llama-3 (8B)", "llama-3-8b"),
        ("Llama 405B", "llama-3.1-405b"),
        ("Llama3-3B", "llama-3.2-3b"),
        ("LLaMA-33B", "llama-33b"),
        ("pythia-12b-deduped", "pythia-12b"),
        ("unsloth/Meta-Llama-3.1-8B-bnb-4bit", "llama-3.1-8b"),
        ("Qwen2.5 7B Instruct", "qwen2.5-7b"),
        ("Qwen2-72B", "qwen2.5-72b"),
        ("Qwen3_30B_a3B", "qwen3-30b-a3b"),
        ("Qwen3-235B", "qwen3-235b-a22b"),
        ("Qwen/Qwen-1_8B-Chat", "qwen-1.8b"),
        ("mistral-7b-v0.1", "mistral-7b"),
        ("Mixtral 8x22B", "mixtral-8x22b"),
        ("DeepSeek-V3 671B", "deepseek-v3"),
        ("Phi-3-mini-4k-instruct", "phi-3-mini"),
        ("allenai/OLMo-2-1124-7B", "olmo-2-7b"),
        ("glm-4-9b-0414", "glm-4-9b-0414"),
        ("GPT-2 1.5B", "gpt2-xl"),
        ("GPT-3 175B", "gpt-3-175b"),
        ("GPT 39.1B", "megatron-gpt-39.1b"),
        ("GPT-1T", "megatron-gpt-1008b"),
        ("MT-NLG 530B", "megatron-gpt-529.6b"),
        ("gpt3-13b", "gpt-3-13b"),
        ("GPT-3 (175B)", "gpt-3-175b"),
        ("GPT-2 8.3B", "megatron-gpt-8.3b"),
        ("1T GPT", "megatron-gpt-1008b"),
    ],
)
def test_models_have_many_names(name: str, found: str) -> None:
    known = by_name(name)
    assert known is not None
    assert known.name == found


@pytest.mark.parametrize("name", ["GPT-J 6B", "Qwen2.5-VL-7B", "Llama-70B", "opt-13b", "7B", "gpt-4", ""])
def test_other_models_are_not_taken_for_known_ones(name: str) -> None:
    assert by_name(name) is None


def test_every_model_of_the_catalogue_is_found_in_every_spelling() -> None:
    for key in ss.models:
        for name in (key, key.upper(), key.replace("-", " "), key.replace("-", "_"), f"owner/{key}-hf"):
            known = by_name(name)
            assert known is not None, name
            assert known.name == key


@pytest.mark.parametrize(
    ("words", "stage"),
    [
        ("ZeRO-DP stage 1", 1),
        ("zero_optimizer_stage_2", 2),
        ("ds_z3_config", 3),
        ("ZeRO (Pos+g)", 2),
        ("Z2", 2),
    ],
)
def test_zero_stages_have_many_spellings(words: str, stage: int) -> None:
    assert zero_stages({"framework": words}) == {stage}


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ("AdamW", ("adamw", False)),
        ("adamw_torch", ("adamw_foreach", True)),
        ("FusedAdam (apex)", ("adamw", True)),
        ("Adam (β1=0.9, β2=0.95)", ("adamw", False)),
        ("8-bit AdamW (bitsandbytes)", ("adamw_8bit", True)),
        ("PagedAdamW8bit", ("paged_adamw_8bit", True)),
        ("paged_adamw_32bit", ("paged_adamw", True)),
        ("SGD with momentum", ("sgd", True)),
        ("AdamW + Muon", ("muon", True)),
        ("AdamW, lr 2e-5, weight decay 0.1", ("adamw", False)),
        ("AdamW, fused=True", ("adamw", True)),
    ],
)
def test_optimizers_are_read(stated: str, expected: tuple[str, bool]) -> None:
    assert optimizer({"optimizer": stated}, "ddp", "adamw") == expected


@pytest.mark.parametrize(
    "stated",
    [
        "BAdam",
        "GaLore AdamW 8bit",
        "Adam-mini",
        "1-bit Adam",
        "lion_8bit",
        "AdamW with bf16 states",
        "adalomo",
    ],
)
def test_a_name_that_contains_a_known_optimizers_is_another(stated: str) -> None:
    with pytest.raises(UnmappedError, match=re.escape(stated)):
        optimizer({"optimizer": stated}, "ddp", "adamw")


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        (True, {"recompute": "full"}),
        ("gradient checkpointing", {"recompute": "full"}),
        ("full (uniform, 1 layer)", {"recompute": "full"}),
        ("every other layer", {"recompute": "full", "recompute_interval": 2}),
        ("offloaded to CPU", {"recompute": "offload"}),
        ("none (flash attention)", {}),
        ("not used", {}),
        ("block, 8 layers", None),
        ("unsloth", None),
        ("full + CPU offload", None),
        ("mlp only", None),
    ],
)
def test_recomputation_is_read_or_refused(stated: object, expected: dict[str, Any] | None) -> None:
    if expected is None:
        with pytest.raises(UnmappedError):
            recomputation(stated, "megatron")
    else:
        assert recomputation(stated, "megatron") == expected


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        (None, set()),
        ("none", set()),
        (False, set()),
        ("optimizer states to CPU", {"optimizer"}),
        ("params + optimizer", {"optimizer", "params"}),
        ("fsdp cpu offload", {"all"}),
        (True, {"all"}),
        ("NVMe", {"nvme"}),
        ("activation offloading", {"activations"}),
    ],
)
def test_what_is_offloaded_is_read(stated: object, expected: set[str]) -> None:
    assert moved({"offload": stated}) == expected


@pytest.mark.parametrize(
    ("gpu", "memory", "found"),
    [
        ("NVIDIA H100 80GB HBM3", None, "h100-sxm-80gb"),
        ("H100 PCIe", 80, "h100-pcie-80gb"),
        ("AMD Instinct MI300X", None, "mi300x-192gb"),
        ("GeForce RTX 4090", None, "rtx-4090-24gb"),
        ("3090", None, "rtx-3090-24gb"),
        ("A10G", None, "a10g-24gb"),
        ("B200", 192, "b200-sxm-180gb"),
        ("GH200 480GB", None, "gh200-96gb"),
        ("Tesla V100-SXM2-16GB", None, "v100-sxm-32gb-with-16gb"),
        ("RTX 4080", 16, "rtx-4090-24gb-with-16gb"),
        ("RTX A6000", None, "rtx-3090-24gb-with-48gb"),
        ("8xA100 80GB", None, "a100-sxm-80gb"),
    ],
)
def test_cards_have_many_names(gpu: str, memory: int | None, found: str) -> None:
    assert cluster({"gpu": gpu, "gpu_mem_gb": memory, "n_gpus": 8})[0].gpu.name == found


@pytest.mark.parametrize("gpu", ["Gaudi2", "P100", "RTX 2080 Ti", "Ascend 910B", "RTX 4080"])
def test_other_cards_are_refused(gpu: str) -> None:
    with pytest.raises(UnmappedError, match="is not in the catalogue"):
        cluster({"gpu": gpu, "n_gpus": 1})


def test_a_part_of_a_card_is_no_card() -> None:
    with pytest.raises(UnmappedError, match="part of a card"):
        cluster({"gpu": "A100 MIG 3g.40gb", "n_gpus": 1})


def test_memory_that_is_not_stated_is_at_least_what_was_held() -> None:
    small, words = cluster({"gpu": "A100", "n_gpus": 1, "peak_memory_gib": 30})
    large, _ = cluster({"gpu": "A100", "n_gpus": 1, "peak_memory_gib": 60})
    assert (small.gpu.name, large.gpu.name) == ("a100-sxm-40gb", "a100-sxm-80gb")
    assert words == ["memory of a100 not stated: 40 GB"]
    with pytest.raises(UnmappedError, match="that was not enough is not stated"):
        cluster({"gpu": "A100", "n_gpus": 1, "status": "oom"})


def test_runs_have_statuses_in_many_words() -> None:
    assert [
        status({"status": words}) for words in ("OOM", "CUDA out of memory", "Success", "oom_or_failed")
    ] == [
        "oom",
        "oom",
        "ok",
        None,
    ]


def test_a_card_of_one_gpu_needs_no_number() -> None:
    alone, _ = cluster({"gpu": "L4", "framework": "single GPU"})
    product, _ = cluster({"gpu": "H100-80GB", "framework": "megatron", "dp": 2, "tp": 4, "pp": 2})
    assert (alone.num_gpus, product.num_gpus) == (1, 16)
