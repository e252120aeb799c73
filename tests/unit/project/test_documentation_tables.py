"""Tests of the documentation's tables of options, values, families and limits."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import shardscope as ss
from shardscope.core.recipe import CHOICES, OPEN_CHOICES
from shardscope.families.family import Support
from shardscope.families.registry import FAMILIES, list_families_with
from shardscope.frameworks.registry import frameworks, list_layout_names, why_not_trained
from shardscope.memory.activations.modules.compiled_layers import COMPILED_FAMILIES
from shardscope.memory.activations.modules.dora import DORA_FAMILIES
from shardscope.memory.activations.modules.liger import LIGER_FAMILIES

METHODS_OF_TRACE = inspect.getmembers(ss.Trace, inspect.isfunction)
SITE = Path(__file__).parents[3] / "docs" / "site"
LIMITS = (SITE.parent / "limits.md").read_text(encoding="utf-8")


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SITE))
    return importlib.import_module("generated_pages")


def test_every_option_of_every_layout_is_explained(pages: ModuleType) -> None:
    """``Layout.zero(**options)`` names most of its options nowhere else."""
    tables = pages.write_layout_options().split("### ")
    for name, framework in list_layout_names().items():
        options = [field.name for field in fields(frameworks[framework].layout_class)]
        table = "".join(one for one in tables if one.startswith(f"ss.Layout.{name}\n"))
        rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| `")]
        assert [row[0] for row in rows] == [f"| `{option}`" for option in options]
        assert all(len(row) == 4 and all(cell.strip(" |") for cell in row) for row in rows)
    assert "| `'fp32'` | `'fp32'`, `'bf16'`, `'fp16'`, `'fp8'` |" in pages.write_layout_options()


def test_every_value_of_the_recipe_is_listed(pages: ModuleType) -> None:
    rows = dict(line.split(" | ", 1) for line in pages.write_recipe_values().splitlines())
    for field, values in (CHOICES | OPEN_CHOICES).items():
        for value in values:
            assert f"`{value}`" in rows[f"| `{field}`"], (field, value)
    # The quantization of bitsandbytes is known under DDP and FSDP2 only.
    assert rows["| `quantization`"] == "`nf4`, `int8` | `nf4` | none | none |"


def test_the_page_of_plans_shows_both(pages: ModuleType) -> None:
    page = (SITE.parent / "reference" / "plans.md").read_text(encoding="utf-8")
    for part in ("layout_options", "recipe_values", "plans"):
        assert f"{{include}} ../generated/parts/{part}.md" in page


def read_families(start: str) -> tuple[str, ...]:
    """Return the families that the page of limits names after ``start``, up to the end of row or sentence."""
    families = LIMITS.partition("## Model families")[2].partition("\n## ")[0]
    (text,) = re.findall(rf"^{re.escape(start)}(.*?)(?:\. |\|\n)", families, re.MULTILINE | re.DOTALL)
    return tuple(re.findall(r"`([a-z]\w+)`", text))


def test_limits_name_the_families_that_have_formulas() -> None:
    start = "There are formulas for these families, by the `model_type` of their `config.json`:"
    assert read_families(start) == tuple(FAMILIES)
    not_planned = {*read_families("Megatron-core cannot be planned with")}
    assert not_planned == find_families_not_planned(ss.Layout.megatron())
    rows = {
        '`kernels="compiled"`': COMPILED_FAMILIES,
        '`kernels="liger"`': LIGER_FAMILIES,
        "`dropout` under DDP, FSDP2 and DeepSpeed": list_families_with("dropout"),
        "`attention` other than the default of the family": list_families_with("attention_choice"),
        "`use_dora`": DORA_FAMILIES,
    }
    for value, families in rows.items():
        assert read_families(f"| {value} |") == tuple(families), value


def find_families_not_planned(layout: ss.Layout) -> set[str]:
    """Return the families of the catalogue's models without a plan of ``layout``."""
    cluster, recipe = ss.Cluster.parse("h100-sxm-80gb"), ss.Recipe(seq_len=128)
    refused = set()
    for architecture in ss.models.values():
        try:
            ss.Plan(architecture, cluster, recipe, layout)
        except ValueError as error:
            assert str(error).startswith("Architecture.model_type is")
            refused.add(architecture.model_type)
    return refused


def test_limits_name_the_families_that_are_trained() -> None:
    rows: dict[str, Support] = {
        "FSDP2 and DeepSpeed with pipeline stages (`pp`)": "pipeline_stages",
        "FSDP2 with tensor parallelism (`tp`)": "fsdp2_tensor_parallel",
        "FSDP2 with context parallelism (`cp`)": "fsdp2_context_parallel",
        "DeepSpeed with tensor parallelism (`tp`, AutoTP)": "autotp_training",
        "DeepSpeed with expert parallelism (`ep`)": "deepspeed_moe",
        "Megatron-core": "megatron_weights",
    }
    for framework, support in rows.items():
        assert read_families(f"| {framework} |") == list_families_with(support), framework


LLAMA, MIXTRAL = ss.models["llama-3.1-8b"], ss.models["mixtral-8x7b"]
WINDOW = ss.models["mistral-7b"]


@pytest.mark.parametrize(
    ("layout", "architecture", "recipe"),
    [
        (ss.Layout.fsdp2(), LLAMA, {"dropout": 0.1}),
        (ss.Layout.fsdp2(), LLAMA, {"method": "lora", "lora_dropout": 0.1}),
        (ss.Layout.fsdp2(cp=2), WINDOW, {"seq_len": 8192}),
        (ss.Layout.zero(stage=1, tp=2, offload_optimizer="cpu"), LLAMA, {}),
        (ss.Layout.zero(stage=1, tp=2), LLAMA, {"recompute": "selective"}),
        (ss.Layout.zero(stage=1, tp=2), LLAMA, {"optimizer": "adafactor"}),
        (ss.Layout.zero(stage=1, tp=2, pp=2), LLAMA, {}),
        (ss.Layout.zero(stage=1, ep=2, pp=2), MIXTRAL, {}),
        (ss.Layout.zero(stage=1, ep=2), MIXTRAL, {"method": "lora"}),
        (ss.Layout.zero(stage=3), LLAMA, {"loss": "chunked"}),
        (ss.Layout.zero(stage=1, pp=2), LLAMA, {"loss": "chunked"}),
        (ss.Layout.zero(stage=0), LLAMA, {"precision": "fp16-mixed"}),
        (ss.Layout.zero(stage=0, tp=2), LLAMA, {}),
        (ss.Layout.zero(stage=0, pp=2), LLAMA, {}),
        (ss.Layout.zero(stage=0, ep=2), MIXTRAL, {}),
        (ss.Layout.megatron(use_precision_aware_optimizer=True), LLAMA, {}),
        (ss.Layout.megatron(tp=2, tp_comm_overlap=True), LLAMA, {}),
        (ss.Layout.megatron(ep=2), MIXTRAL, {"expert_capacity_factor": 1.5}),
        (ss.Layout.megatron(), WINDOW, {"seq_len": 8192}),
    ],
)
def test_plans_that_limits_call_not_trained_are_not(
    layout: ss.Layout, architecture: ss.Architecture, recipe: dict[str, Any]
) -> None:
    plan = ss.Plan(architecture, ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(**recipe), layout)
    assert why_not_trained(plan) is not None


def test_every_analysis_of_a_trace_has_its_columns(pages: ModuleType) -> None:
    rows = dict(line.strip("| \n").split(" | ", 1) for line in pages.write_trace_columns().splitlines()[2:])
    own_classes = ("Collectives", "Stragglers", "Kernels", "CriticalPath", "Diff", "PlanComparison")
    returned = {name: inspect.get_annotations(method).get("return", "") for name, method in METHODS_OF_TRACE}
    analyses = {name for name, kind in returned.items() if kind.startswith("Table[") or kind in own_classes}
    assert {*rows} == {f"`{name}()`" for name in analyses}
    assert rows["`stragglers()`"].startswith(
        "`rank`<br>`late_seconds`: Time per step by which it arrives after"
    )
    # Keys of the view only are left out.
    assert "start_seconds" not in rows["`breakdown()`"] and "`start_seconds`" in rows["`critical_path()`"]


@pytest.mark.parametrize("name", ["Finetune", "Pretrain"])
def test_every_field_of_a_task_is_explained(pages: ModuleType, name: str) -> None:
    """Autodoc shows the fields of a class, but not those of its bases."""
    (topic,) = (one for one in pages.TOPICS if one.name == "runs")
    shared = pages.MEMBERS["shardscope.training.tasks.text_task.TextTask"]
    assert f":members: {', '.join(shared)}" in pages.write_api(topic)
    task = getattr(ss, name)
    assert {field.name for field in fields(task)} <= {*shared, *vars(task)["__annotations__"]}


def test_members_chosen_for_the_reference_exist(pages: ModuleType) -> None:
    for full_name, members in pages.MEMBERS.items():
        module, _, name = full_name.rpartition(".")
        owner = getattr(importlib.import_module(module), name)
        source = inspect.getsource(owner)
        assert all(hasattr(owner, member) or f"self.{member} = " in source for member in members), full_name
