"""Tests of opening plans from four kinds of files, of saving them, and of errors for all other files."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import shardscope as ss
from shardscope_widgets import Studio
from shardscope_widgets.pickers.open_plan import MAX_BYTES, OpenPlan

CURRENT = ss.Plan(
    ss.models["llama-3.2-1b"], ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(), ss.Layout.fsdp2()
)


class Opener:
    """An `OpenPlan` box, and the plans that it opened."""

    def __init__(self, current: ss.Plan = CURRENT) -> None:
        self.opened: list[ss.Plan] = []
        self.box = OpenPlan(on_open=self.opened.append, current=lambda: current)

    def open(self, path: Path | str) -> ss.Plan | None:
        before = len(self.opened)
        self.box.path.value = str(path)
        return self.opened[-1] if len(self.opened) > before else None

    def upload(self, name: str, content: bytes) -> ss.Plan | None:
        before = len(self.opened)
        self.box.upload.value = (
            {
                "name": name,
                "type": "",
                "size": len(content),
                "content": content,
                "last_modified": datetime(2026, 1, 1, tzinfo=UTC),
            },
        )
        return self.opened[-1] if len(self.opened) > before else None

    @property
    def message(self) -> str:
        return self.box.row.message


LAYOUTS = {
    "fsdp2": ss.Layout.fsdp2(),
    "ddp": ss.Layout.ddp(),
    "deepspeed": ss.Layout.zero(stage=2),
    "megatron": ss.Layout.megatron(tp=2, pp=2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_opens_every_file_that_an_export_writes(name: str, tmp_path: Path) -> None:
    arch = ss.models["llama-3.1-8b"]
    plan = ss.Plan(arch, CURRENT.cluster, ss.Recipe(seq_len=2048, recompute="full"), LAYOUTS[name])
    plan.export(tmp_path)
    files = {
        "deepspeed": ["accelerate_config.yaml", "ds_config.json"],
        "megatron": ["megatron_arguments.txt"],
    }
    config_files = files.get(name, ["accelerate_config.yaml"])
    for file in ("plan.json", *config_files):
        assert Opener().open(tmp_path / file) == plan, "missing settings come from the files beside it"
        if (name, file) == ("deepspeed", "accelerate_config.yaml"):
            continue  # It names ds_config.json, which an upload of one file does not bring along.
        uploaded = Opener(plan).upload(file, (tmp_path / file).read_bytes())
        assert uploaded is not None and uploaded.layout == plan.layout, (
            "missing settings come from the current plan"
        )


SCRIPT = """#!/bin/bash
# Runs the 8B model
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
TP=2
DISTRIBUTED_ARGS=(--nproc_per_node $GPUS_PER_NODE --nnodes 1 --master_port 6000)
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --kv-channels 128 --max-position-embeddings 131072
    --position-embedding-type rope --normalization RMSNorm --vocab-size 128256
    --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --seq-length 2048  # short
)
PARALLEL_ARGS="--tensor-model-parallel-size ${TP} --pipeline-model-parallel-size 2"
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL_ARGS[@]} $PARALLEL_ARGS \\
    --micro-batch-size 1 --global-batch-size 64 --bf16
"""


def test_opens_a_megatron_launch_script(tmp_path: Path) -> None:
    file = tmp_path / "train_8b.sh"
    file.write_text(SCRIPT)
    arch = ss.models["llama-3.1-8b"]
    opener = Opener(ss.Plan(arch, CURRENT.cluster, ss.Recipe(), ss.Layout.fsdp2()))
    plan = opener.open(file)
    assert plan is not None, opener.message
    assert (plan.layout.framework, plan.layout.tp, plan.layout.pp) == ("megatron", 2, 2)
    assert (plan.recipe.seq_len, plan.recipe.global_batch_size) == (2048, 64)


def test_megatron_script_of_another_model_is_opened_with_its_own(tmp_path: Path) -> None:
    """The current model was demanded of it: the message said to train 16 layers instead of 32."""
    file = tmp_path / "train_8b.sh"
    file.write_text(SCRIPT)
    plan = Opener().open(file)
    assert plan is not None and plan.architecture.num_hidden_layers == 32
    assert plan.architecture.num_parameters == ss.models["llama-3.1-8b"].num_parameters

    file.write_text(SCRIPT.replace("--seq-length 2048", "--seq-length 2048 --num-experts 8"))
    opener = Opener()
    assert opener.open(file) is None and 'ss.models["mixtral-8x7b"]' in opener.message


def test_saved_plan_can_be_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    opener = Opener()
    opener.box.save.click()
    (file,) = tmp_path.iterdir()
    assert file.name in opener.box.words.value
    # And once more: the same path in the box was no change, and nothing happened.
    for _ in range(2):
        assert opener.open(file.name) == CURRENT
        assert f"Opened {file.name}" in opener.box.words.value


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x80\x00\xff", ""),
        (b"{", "JSON"),
        (b"[]", ""),
        (b"{}", ""),
        (b"print('hello')", ""),
        (b"", ""),
        (b"a: [", ""),
        (b'{"shardscope": "Recipe", "version": 1}', ""),
        (b" " * (MAX_BYTES + 1), "MiB"),
    ],
    ids=[
        "binary",
        "cut off",
        "list",
        "empty object",
        "a program",
        "empty",
        "bad yaml",
        "recipe",
        "too large",
    ],
)
def test_invalid_file_is_reported_at_the_input(content: bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    opener = Opener()
    assert opener.open(file) is None and opener.message and words in opener.message
    other = Opener()
    assert other.upload("<b>file</b>", content) is None and other.message
    opener.box.path.value = ""
    assert not opener.message


@pytest.mark.parametrize("path", ["/nowhere/plan.json", "~nobody/plan.json", "."])
def test_path_that_is_not_a_file_is_reported_at_the_input(path: str) -> None:
    opener = Opener()
    assert opener.open(path) is None and opener.message


def test_studio_shows_the_opened_plan(tmp_path: Path) -> None:
    studio: Any = Studio()
    file = tmp_path / "mine.json"
    file.write_text(CURRENT.to_json())
    studio.open_plan.path.value = str(file)
    assert studio.plan == CURRENT and studio.architecture.name.value == "llama-3.2-1b"


def test_upload_clears_the_typed_path() -> None:
    opener = Opener()
    assert opener.open("no-such-plan.json") is None and opener.message
    assert opener.upload("mine.json", CURRENT.to_json().encode()) == CURRENT
    assert opener.box.path.value == "" and not opener.message
