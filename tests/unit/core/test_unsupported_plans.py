"""Tests of errors of ``plan.memory()`` for plans without formulas: the alternative they suggest works."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.in_process_rehearsal import rehearse_in_this_process
from tests.requirements import needs, thorough

import shardscope as ss
from shardscope.core.errors import FieldError
from shardscope.families.registry import FAMILIES
from shardscope.rehearsal.result import RehearsedPeak, RehearsedStage, build_report

TWO = ss.Cluster.parse("2xh100-sxm-80gb")
ALIBI = "falcon-rw-1b"


def build_plan(name: str, layout: ss.Layout, layers: int | None = None) -> ss.Plan:
    architecture = ss.models[name]
    if layers:
        architecture = replace(architecture, num_hidden_layers=layers)
    return ss.Plan(architecture, TWO, ss.Recipe(seq_len=512, global_batch_size=4), layout)


def get_memory_error(plan: ss.Plan) -> FieldError | None:
    try:
        plan.memory()
    except FieldError as error:
        return error
    return None


def test_suggested_fsdp2_layout_works_for_models_megatron_does_not_support() -> None:
    """What cannot run at all is refused when the plan is made, with a layout that works."""
    errors = {}
    for name in ss.models:
        try:
            plan = build_plan(name, ss.Layout.megatron())
        except FieldError as error:
            if error.field == "Architecture.model_type":
                errors[name] = error
            continue
        assert get_memory_error(plan) is None, name
    families = {ss.models[name].model_type for name in errors}
    other_layers = {name for name, family in FAMILIES.items() if family.unlike_megatron_core}
    assert other_layers and families >= other_layers and "falcon" in families
    for name, error in errors.items():
        assert "Nearest fix: layout=Layout.fsdp2()." in str(error), name
        fixed_error = get_memory_error(build_plan(name, ss.Layout.fsdp2()))
        assert fixed_error is None or "plan.rehearse()" in str(fixed_error), name


@pytest.mark.parametrize(
    "layout", [ss.Layout.ddp(), ss.Layout.fsdp2(), ss.Layout.zero(3)], ids=lambda layout: layout.framework
)
def test_rehearsals_need_no_activation_formula(layout: ss.Layout) -> None:
    plan = build_plan(ALIBI, layout)
    error = get_memory_error(plan)
    assert error is not None and "plan.rehearse()" in str(error)
    peaks = (RehearsedPeak(phase="forward", fraction=0.3, components={"activations": 10**9}),)
    report = build_report(plan, [RehearsedStage(stage=0, num_layers=24, peaks=peaks)])
    known = build_plan("llama-3.2-1b", layout).memory().components
    gaps = 30_000_000  # 3 % of what is allocated and freed
    assert report.peak_bytes == 10**9 + known["communication"] + known["runtime"] + gaps
    assert report.low_bytes < report.peak_bytes < report.high_bytes


def test_rehearsed_communication_and_runtime_equal_the_prediction() -> None:
    layout = ss.Layout.fsdp2(pp=2)
    recipe = ss.Recipe(seq_len=512, global_batch_size=8)
    plan = ss.Plan(ss.models["llama-3.2-1b"], ss.Cluster.parse("8xh100-sxm-80gb"), recipe, layout)
    predicted = plan.memory()
    peak = RehearsedPeak(phase="rest", fraction=0.0, components={"parameters": 1})
    stages = [RehearsedStage(stage=number, num_layers=8, peaks=(peak,)) for number in (0, 1)]
    for rehearsed, expected in zip(build_report(plan, stages).by_stage, predicted.by_stage, strict=True):
        for name in ("communication", "runtime"):
            assert rehearsed.components[name] == expected.components[name] > 0


@thorough()
@pytest.mark.parametrize("framework", ["ddp", "fsdp2"])
def test_the_rehearsal_that_an_error_suggests_runs(framework: str) -> None:
    layout = ss.Layout.ddp() if framework == "ddp" else ss.Layout.fsdp2()
    for module in ("torch", "transformers"):
        needs(module)
    plan = build_plan(ALIBI, layout, layers=2)
    # FSDP2's runs in a separate process, to which a family without formulas has to be passed.
    report = plan.rehearse(timeout=300) if layout.framework == "fsdp2" else rehearse_in_this_process(plan)
    assert report.tier == "rehearsed"
    assert report.components["activations"] > 0 and report.components["communication"] > 0
