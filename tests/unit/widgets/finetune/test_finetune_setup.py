"""Tests of the plan that a fine-tune from one click gets on GPUs: the first layout that fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.weights_folders import write_chat_folder

import shardscope as ss
from shardscope.core.errors import FieldError
from shardscope_widgets.finetune.setup import Setup, build_first_plan, build_setup


def set_up(folder: Path, cluster: str, model: str, method: Any, **settings: object) -> Setup:
    """Return the setup of a fine-tune of ``model`` on a text."""
    weights = write_chat_folder(folder / "model")
    (folder / "text.txt").write_text("Call me Ishmael.")
    first = build_first_plan(weights, ss.Cluster.parse(cluster), method, settings, 2048)
    # The memory is that of the plan's model; a folder with weights of its size would fill the disk.
    first = replace(first, architecture=ss.models[model])
    return build_setup(ss.Finetune(weights, folder / "text.txt"), first, settings, None)


@pytest.mark.parametrize(
    ("cluster", "model", "method", "layout", "recompute"),
    [
        ("1xh100-sxm-80gb", "llama-3.1-8b", "lora", "DDP", "none"),
        ("1xh100-sxm-80gb", "llama-3.1-8b", "qlora", "DDP", "none"),
        ("8xh100-sxm-80gb", "llama-3.1-8b", "full", "FSDP2", "none"),
    ],
)
def test_the_first_layout_that_fits_is_taken(
    cluster: str, model: str, method: str, layout: str, recompute: str, tmp_path: Path
) -> None:
    setup = set_up(tmp_path, cluster, model, method)
    assert setup.plan.layout.description == layout and setup.plan.recipe.recompute == recompute
    assert setup.report.fits and setup.plan.recipe.precision == "bf16-mixed"


def test_a_model_that_fits_with_no_layout_is_an_error_of_the_method(tmp_path: Path) -> None:
    with pytest.raises(FieldError, match="a method whose memory fits") as caught:
        set_up(tmp_path, "1xh100-sxm-80gb", "llama-3.1-70b", "full")
    assert caught.value.field == "Recipe.method" and "GiB on each rank" in caught.value.problem
    assert caught.value.fix == "LoRA, or a smaller model"


def test_the_batch_divides_over_any_number_of_gpus(tmp_path: Path) -> None:
    setup = set_up(tmp_path, "6xh100-sxm-80gb", "llama-3.1-8b", "lora", lora_rank=64)
    assert setup.plan.recipe.global_batch_size == 30 and setup.plan.recipe.lora_rank == 64
