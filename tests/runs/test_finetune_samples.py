"""Sample generations with other recipes: the training stays the same, and the texts are transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.requirements import needs, skip_without, thorough

needs("torch")
needs("transformers")
needs("datasets")

from finetuned_models import small_model  # noqa: E402
from test_finetune_examples import ROWS, SEQ_LEN  # noqa: E402
from test_validation import PROMPTS, generate, list_values  # noqa: E402

import shardscope as ss  # noqa: E402
from shardscope import Layout  # noqa: E402

LORA: dict[str, Any] = {"method": "lora", "lora_rank": 4}
VARIANTS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "ddp, lora": (Layout.ddp(), LORA),
    "fsdp2, lora": (Layout.fsdp2(), LORA),
    "deepspeed, lora": (Layout.zero(stage=2), LORA),
    "deepspeed, stage 3, lora": (Layout.zero(stage=3), LORA),
    "ddp, chunked": (Layout.ddp(), {"loss": "chunked"}),
    "fsdp2, chunked": (Layout.fsdp2(), {"loss": "chunked"}),
    "fsdp2, bf16": (Layout.fsdp2(pp=2), {"precision": "bf16-mixed"}),
    "ddp, bf16": (Layout.ddp(), {"precision": "bf16-mixed", "micro_batch_size": 2}),
    "deepspeed, bf16": (Layout.zero(stage=1, pp=2), {"precision": "bf16-mixed"}),
    "megatron, bf16": (Layout.megatron(pp=2), {"precision": "bf16-mixed"}),
    "megatron, tensor parallel": (Layout.megatron(tp=2), {}),
    "ddp, compiled": (Layout.ddp(), {"kernels": "compiled"}),
}

pytestmark = pytest.mark.usefixtures("bounded_time", "nothing_left")


@thorough()
@pytest.mark.parametrize("name", VARIANTS)
def test_samples_are_those_of_transformers_and_training_is_the_same(name: str, tmp_path: Path) -> None:
    skip_without(name.partition(",")[0] if name.startswith(("deepspeed", "megatron")) else "torch")
    folder, (layout, fields) = small_model(tmp_path, "llama"), VARIANTS[name]
    values = {"micro_batch_size": 1, "global_batch_size": 4, "precision": "fp32", **fields}
    plan = ss.Plan(
        ss.Architecture.from_hf(folder),
        ss.Cluster.parse("2xcpu"),
        ss.Recipe(seq_len=SEQ_LEN, **values),
        layout,
    )
    runs = []
    for options in ({}, {"samples": PROMPTS, "sample_every": 1, "max_new_tokens": 8}):
        task = ss.Finetune(folder, ROWS, num_steps=4, **options)
        runs.append(ss.launch(plan, task, folder=tmp_path / "runs"))
        assert runs[-1].wait(200) == "finished", runs[-1].error
    without, run = runs
    for metric in ("loss", "grad_norm"):
        assert list_values(run, metric) == pytest.approx(list_values(without, metric), rel=1e-6)
    assert run.samples()[-1]["step"] == 4 and not without.samples()
    if values["precision"] == "fp32":
        texts = [sample["text"] for sample in run.samples()[: len(PROMPTS)]]
        assert texts == generate(folder, PROMPTS, 8)
