"""Tests of the table of framework abilities: plans accept what each cell says."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest

import shardscope as ss
from shardscope.core.errors import FieldError
from shardscope.frameworks.accelerate.plugin_fields import PLUGIN_FIELDS
from shardscope.frameworks.registry import frameworks
from shardscope.planner.abilities import COLUMNS, Cell, compute_abilities, format_layout

CLUSTER = ss.Cluster.parse("8xh100-sxm-80gb")
DENSE = ss.models["llama-3.1-8b"]
WITH_EXPERTS = ss.models["mixtral-8x7b"]
DEGREES = {
    "hybrid": "replicate",
    "tensor": "tp",
    "pipeline": "pp",
    "interleaved": "vpp",
    "context": "cp",
    "expert": "ep",
}
"""Abilities that are a degree, and which."""
OFFLOADS = {"cpu_offload": "cpu", "nvme_offload": "nvme"}
RECIPES: dict[str, dict[str, Any]] = {
    "compile": {"kernels": "compiled"},
    "fp8": {"precision": "fp8-mixed"},
    "lora": {"method": "lora"},
    "qlora": {"method": "qlora"},
}
EVERY = [(name, key) for name in (*frameworks, "accelerate") for key in COLUMNS]


def make_plan(key: str, layout: ss.Layout, recipe: dict[str, Any]) -> ss.Plan:
    arch = WITH_EXPERTS if key == "expert" else DENSE
    return ss.Plan(arch, CLUSTER, ss.Recipe(seq_len=2048, **recipe), layout)


@pytest.mark.parametrize(("framework", "key"), EVERY)
def test_plans_accept_the_abilities_of_the_table(framework: str, key: str) -> None:
    cell = compute_abilities().get_cell(framework, key)
    if not cell.supported:
        assert cell.layout is None
        if framework in frameworks:
            assert_nothing_has_it(framework, key)
        return
    assert cell.layout is not None
    plan = make_plan(key, cell.layout, dict(cell.recipe))
    if key in DEGREES:
        assert getattr(plan.degrees, DEGREES[key]) == 2
    if key == "data":
        assert plan.degrees.data_parallel == plan.world_size
    if key == "sequence":
        assert plan.layout.splits_sequence
    if key in OFFLOADS:
        report = plan.memory()
        assert (report.host_bytes if key == "cpu_offload" else report.nvme_bytes) > 0
    assert dict(cell.recipe) == RECIPES.get(key, {})


def assert_nothing_has_it(framework: str, key: str) -> None:
    """No layout of the class can be made, or planned, that has the ability."""
    layout_class = frameworks[framework].layout_class
    if key in RECIPES:
        with pytest.raises(FieldError):
            make_plan(key, layout_class(), RECIPES[key])
    elif key in DEGREES:
        with pytest.raises(ValueError, match="key"):
            layout_class(**{DEGREES[key]: 2})
    elif key == "sequence":
        widened = (
            layout_class(tp=2, **({"stage": 1} if framework == "deepspeed" else {}))
            if has_tp(framework)
            else None
        )
        assert widened is None or not widened.splits_sequence
    elif key in OFFLOADS:
        fields = [name for name in layout_class.__dataclass_fields__ if name.startswith("offload")]
        for name in {"offload", "offload_optimizer", "offload_params", *fields}:
            with pytest.raises(ValueError):
                layout_class(**{name: OFFLOADS[key]})
    else:
        assert key in ("zero_1", "zero_2", "zero_3")
        component = {"zero_1": "optimizer", "zero_2": "gradients", "zero_3": "parameters"}[key]
        one, eight = (
            ss.Plan(DENSE, ss.Cluster.parse(f"{n}xh100-sxm-80gb"), ss.Recipe(seq_len=2048), layout_class())
            for n in (1, 8)
        )
        held = [max(parts[component] for _, _, parts in p.memory().timeline) for p in (one, eight)]
        # A part of them is no half: reducer's buckets and padding may differ a little.
        assert held[1] > 0.9 * held[0]


def has_tp(framework: str) -> bool:
    return "tp" in frameworks[framework].layout_class.__dataclass_fields__


def test_well_known_abilities_of_each_framework() -> None:
    """The table by hand, once, for what nobody doubts."""
    table = compute_abilities()
    known: dict[str, set[str]] = {
        "ddp": {"data"},
        "fsdp2": {"data", "zero_1", "zero_2", "zero_3", "hybrid", "tensor", "context", "cpu_offload"},
        "deepspeed": {"data", "zero_1", "zero_2", "zero_3", "cpu_offload", "nvme_offload", "expert"},
        "megatron": {"data", "zero_1", "tensor", "sequence", "pipeline", "interleaved", "context", "expert"},
    }
    for name, keys in known.items():
        assert all(table.get_cell(name, key).supported for key in keys), name
    for name, key in (
        ("ddp", "zero_1"),
        ("fsdp2", "expert"),
        ("megatron", "zero_3"),
        ("deepspeed", "context"),
    ):
        assert not table.get_cell(name, key).supported


def test_each_zero_stage_is_a_separate_ability() -> None:
    table = compute_abilities()
    for stage in (1, 2, 3):
        layout: Any = table.get_cell("deepspeed", f"zero_{stage}").layout
        assert layout.stage == stage


def test_accelerate_has_no_ability_that_its_frameworks_lack() -> None:
    table = compute_abilities()
    for key in COLUMNS:
        if table.get_cell("accelerate", key).supported:
            assert any(table.get_cell(name, key).supported for name in PLUGIN_FIELDS), key


def test_the_code_of_a_cell_creates_its_layout() -> None:
    cells = [cell for row in compute_abilities().cells.values() for cell in row.values() if cell.layout]
    for cell in cells:
        assert eval(f"ss.{format_layout(cell.layout)}", {"ss": ss}) == cell.layout  # type: ignore[arg-type]


def test_accelerate_plugins_have_the_listed_fields() -> None:
    """Its source is parsed, because importing it would import torch."""
    spec = importlib.util.find_spec("accelerate")
    if spec is None or spec.origin is None:
        pytest.skip("accelerate is not installed")
    folder = Path(spec.origin).parent
    fields: set[str] = set()
    for file in (folder / "parallelism_config.py", folder / "utils" / "dataclasses.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                targets = [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
                fields |= {f"{node.name}.{target.id}" for target in targets if isinstance(target, ast.Name)}
    for name, carried in PLUGIN_FIELDS.items():
        assert set(carried.values()) <= fields, name
        assert carried.keys() <= frameworks[name].layout_class.__dataclass_fields__.keys(), name


def test_the_table_as_a_frame_and_as_html() -> None:
    frame = compute_abilities().to_frame()
    assert list(frame.index) == ["DDP", "FSDP2", "DeepSpeed ZeRO", "Megatron-core", "Accelerate"]
    assert frame.shape == (5, len(COLUMNS) + 1)
    assert frame["ergonomics"].str.len().min() > 10
    html = compute_abilities().to_html()
    assert "<script" not in html
    assert html.count("<tr>") == 6


def test_wrong_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="'fsdp2'"):
        compute_abilities().get_cell("fsdp", "tensor")
    with pytest.raises(ValueError, match="'tensor'"):
        compute_abilities().get_cell("fsdp2", "tensors")
    assert isinstance(compute_abilities().get_cell("ddp", "data"), Cell)
