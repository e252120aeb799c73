"""The plans whose exported scripts are run beside the engines: one table, by what is exported."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from finetuned_models import MODELS
from gloo_ranks import tiny_llama, tiny_plan
from tests.requirements import THOROUGH

import shardscope as ss
from shardscope.core.layer_parts import MixtureOfExperts
from shardscope.frameworks.formats.train_file import build_config


def make_llama(*, layers: int = 2, tied: bool = False) -> ss.Architecture:
    return replace(tiny_llama(tie_word_embeddings=tied), num_hidden_layers=layers)


def make_mixtral() -> ss.Architecture:
    experts = MixtureOfExperts(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128)
    return replace(tiny_llama(), model_type="mixtral", mixture_of_experts=experts)


TWO: dict[str, dict[str, Any]] = {
    "ddp": {"num_micro_batches": 2},
    "ddp bf16": {"precision": "bf16-mixed"},
    "ddp full fp16": {"precision": "fp16-mixed", "recompute": "full", "recompute_interval": 2},
    "fsdp2": {"num_micro_batches": 2},
    "zero-1": {"layout": {"stage": 1}},
    "zero-3": {"layout": {"stage": 3}, "num_micro_batches": 2},
    "fsdp2 full": {"recompute": "full", "recompute_interval": 2},
    "fsdp2 hsdp": {"layout": {"replicate": 2}, "optimizer": "adamw_foreach"},
    "fsdp2 offload bf16": {
        "layout": {"offload": "cpu", "reshard_after_forward": False},
        "precision": "bf16",
    },
    "ddp lora": {"method": "lora", "lora_rank": 4},
    "fsdp2 drawn": {"architecture": make_llama(layers=3, tied=True)},
    "fsdp2 experts drawn": {"architecture": make_mixtral()},
}
"""On two ranks, by a name that begins with the framework's."""
TWO |= {
    "megatron tp": {"layout": {"tp": 2}, "architecture": make_llama(tied=True), "num_micro_batches": 2},
    "megatron qwen2": {
        "layout": {"sequence_parallel": False, "tp": 2},
        "architecture": replace(tiny_llama(), model_type="qwen2", attention_bias=True),
    },
    "megatron dp bf16": {"precision": "bf16-mixed", "recompute": "full"},
    "megatron dp overlapped": {
        "layout": {"overlap_grad_reduce": True, "overlap_param_gather": True},
        "architecture": make_llama(layers=4, tied=True),
        "num_micro_batches": 2,
    },
}
TWO |= {
    "zero-0": {"layout": {"stage": 0}, "num_micro_batches": 2},
    "zero-0 bf16": {"layout": {"stage": 0}, "precision": "bf16-mixed"},
    "zero-2 bf16 full": {"layout": {"stage": 2}, "precision": "bf16", "recompute": "full"},
    "zero-3 bf16 in fp32": {
        "layout": {"stage": 3, "communication_data_type": "fp32"},
        "precision": "bf16-mixed",
    },
}
STORED = {
    "ddp from gpt2": "gpt2",
    "ddp lora from llama bf16": "llama",
    "fsdp2 from qwen3 bf16": "tied",
    "megatron from qwen3": "tied",
    "zero-3 from mixtral": "mixtral",
}
"""Those that begin from a model's files, and which of ``finetuned_models``."""
TWO |= {
    "ddp from gpt2": {},
    "ddp lora from llama bf16": {"method": "lora", "lora_rank": 4, "precision": "bf16-mixed"},
    "fsdp2 from qwen3 bf16": {"precision": "bf16-mixed"},
    "zero-3 from mixtral": {"layout": {"stage": 3}},
    "megatron from qwen3": {"layout": {"tp": 2}},
}
TWO |= {
    name: {**TWO[name], "architecture": ss.Architecture.from_hf(MODELS[model])}
    for name, model in STORED.items()
}
FOUR: dict[str, dict[str, Any]] = {
    "fsdp2 hsdp over four": {
        "layout": {"replicate": 2, "reshard_after_forward": 2},
        "precision": "bf16-mixed",
        "num_micro_batches": 2,
    },
    "megatron qwen3 whole optimizer": {
        "layout": {"tp": 2, "distributed_optimizer": False},
        "architecture": replace(tiny_llama(), model_type="qwen3", qk_norm=True),
    },
}
"""On four."""
MORE = {
    *("ddp", "ddp bf16", "ddp full fp16", "ddp lora", "ddp lora from llama bf16"),
    *("fsdp2 hsdp", "fsdp2 experts drawn", "fsdp2 from qwen3 bf16"),
    *("zero-0", "zero-0 bf16", "zero-1", "zero-3 bf16 in fp32", "zero-3 from mixtral"),
    "megatron from qwen3",
    *FOUR,
}
"""Others of their kind run in every test."""


def export_with_script(plan: ss.Plan, folder: Path) -> None:
    """``plan.export``, and for Megatron's CPU ranks, which it gives no train.py, what GPUs would get."""
    plan.export(folder)
    if not (folder / "train.py").exists():
        assert "Megatron-core calls CUDA" in (folder / "FILES.md").read_text()
        (folder / "config.json").write_text(json.dumps(build_config(plan)))
        for name in ("train.py", "megatron_model.py", "checkpoints.py"):
            shutil.copy(Path(ss.__file__).parent / "frameworks/megatron/files" / name, folder)
        shutil.copy(Path(ss.__file__).parent / "frameworks/formats/script_options.py", folder)


def make_plan(name: str) -> ss.Plan:
    framework = name.partition(" ")[0].partition("-")[0]
    return tiny_plan(framework, 4 if name in FOUR else 2, **{**TWO, **FOUR}[name])


def select_plan_names(num_ranks: int) -> list[str]:
    """Return the names of the plans that this test runs."""
    table = TWO if num_ranks == 2 else FOUR
    return [name for name in table if THOROUGH or name not in MORE]
