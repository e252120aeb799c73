"""Tests of predictions against stored rehearsals of Megatron-core; some of these are repeated."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tests.accuracy.rehearsal_samples import in_words
from tests.accuracy.rehearsals import STORED, Rehearsed, read_rehearsals
from tests.requirements import few, thorough

import shardscope as ss
from shardscope.core.plan import Plan
from shardscope.frameworks.megatron.rehearsal import fake_device
from shardscope.frameworks.megatron.rehearsal.rehearse import rehearse
from shardscope.memory.report import PHASES, PhaseMemory
from shardscope.prediction.support import list_supported
from shardscope.rehearsal.result import TENSOR_COMPONENTS, RehearsedStage

FILE = STORED / "megatron.jsonl"
SAMPLES = (
    "megatron",
    "megatron-held-out",
    "megatron-held-out-2",
    "megatron-pp-held-out-2",
    "megatron-held-out-3",
    "megatron-pp-held-out-3",
)
PACKAGE = Path(ss.__file__).parent
EIGHT = ss.Cluster.parse("8xh100-sxm-80gb")


@cache
def read_rows() -> tuple[Rehearsed, ...]:
    stored, rejected = read_rehearsals([FILE])
    assert not rejected
    return tuple(stored)


def sum_tensors(moment: PhaseMemory) -> int:
    return sum(moment.components[name] for name in TENSOR_COMPONENTS)


def rehearse_plan(plan: Plan, *stages: int) -> list[RehearsedStage]:
    return rehearse(plan, lambda words, fraction: None, stages or None)


def test_predictions_agree_with_stored_rehearsals() -> None:
    assert len(read_rows()) >= 40
    worst = max(read_rows(), key=lambda row: abs(row.error))
    assert abs(worst.error) <= 0.01, in_words(worst)


@pytest.mark.parametrize("sample", SAMPLES)
def test_predictions_agree_with_every_stored_stage(sample: str) -> None:
    for line in (STORED / f"{sample}.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        by_stage = Plan.from_dict(row["plan"]).memory().by_stage
        for stored in map(RehearsedStage.from_dict, row["stages"]):
            predicted = max(map(sum_tensors, by_stage[stored.stage].phases))
            assert predicted == pytest.approx(stored.peak.num_bytes, rel=0.0125), (row["name"], stored.stage)


@pytest.mark.parametrize("sample", SAMPLES[1:])
def test_predictions_agree_with_held_out_samples(sample: str) -> None:
    """The samples cover every option, each with its own seed; the errors they found were fixed."""
    held_out, rejected = read_rehearsals([STORED / f"{sample}.jsonl"])
    assert not rejected and len(held_out) >= 30
    worst = max(held_out, key=lambda row: abs(row.error))
    assert abs(worst.error) <= 0.01, in_words(worst)


def test_predicted_training_state_is_exact() -> None:
    """Only a few elements of padding between parameters may be missing."""
    for row in read_rows():
        for name in ("parameters", "gradients"):
            assert row.predicted[name] == pytest.approx(row.stored[name], rel=2e-3), in_words(row)


@pytest.mark.parametrize("index", few([0, 9, 18, 27], [9]))
def test_repeating_a_stored_rehearsal_gives_the_same_bytes(index: int) -> None:
    row = read_rows()[index]
    stages = rehearse_plan(row.plan)
    assert max(stage.peak.num_bytes for stage in stages) == pytest.approx(sum(row.stored.values()), rel=1e-3)
    assert [stage.num_layers for stage in stages] == list(row.plan.stage_layers)
    assert all({peak.phase for peak in stage.peaks} == set(PHASES) for stage in stages)


def test_latent_attention_without_compressed_queries_is_rehearsed_or_rejected() -> None:
    rows, _ = read_rehearsals([STORED / "megatron-held-out.jsonl"])
    row = next(row for row in rows if row.name == "megatron-held-out:35")
    latent = row.plan.architecture.latent_attention
    assert latent is not None and latent.q_lora_rank is None
    if find_spec("megatron.core.transformer.mla_qk_norm_config") is None:
        assert max(stage.peak.num_bytes for stage in rehearse_plan(row.plan)) == sum(row.stored.values())
    else:
        with pytest.raises(ValueError, match=r"q_lora_rank .*below 0\.19"):
            rehearse_plan(row.plan)


def test_first_and_last_stages_with_fewer_layers_are_those_of_megatron_core() -> None:
    arch = replace(ss.Architecture.of_size("1b"), num_hidden_layers=9)
    plan = Plan(arch, EIGHT, ss.Recipe(seq_len=512, global_batch_size=16), ss.Layout.megatron(tp=2, pp=4))
    rehearsed = rehearse_plan(plan)
    assert [stage.num_layers for stage in rehearsed] == list(plan.stage_layers) == [2, 3, 3, 1]
    for stage, predicted in zip(rehearsed, plan.memory().by_stage, strict=True):
        peak = max(map(sum_tensors, predicted.phases))
        assert peak == pytest.approx(max(one.num_bytes for one in stage.peaks), rel=1e-3)


@thorough()
def test_1f1b_holds_fewer_micro_batches_on_later_stages() -> None:
    arch = replace(ss.Architecture.of_size("1b"), num_hidden_layers=16)
    plan = Plan(arch, EIGHT, ss.Recipe(seq_len=2048, global_batch_size=16), ss.Layout.megatron(tp=2, pp=2))
    first, last = rehearse_plan(plan)
    activation_bytes = [
        max(peak.components["activations"] for peak in stage.peaks if peak.phase == "forward")
        for stage in (first, last)
    ]
    assert activation_bytes[0] == pytest.approx(2 * activation_bytes[1], rel=0.1)


@thorough()
@pytest.mark.parametrize(("heads", "bytes_a_score"), few([(4, 2), (3, 6)], [(4, 2)]))
def test_eager_attention_uses_the_fused_softmax_of_megatron(heads: int, bytes_a_score: int) -> None:
    """The fused softmax saves half-precision probabilities; torch's, for other shapes, also fp32 ones.

    The fused kernel requires a multiple of four for a rank's heads times sequences.
    """
    arch = replace(
        ss.Architecture.of_size("60m"),
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        hidden_size=64 * heads,
        head_dim=64,
    )

    def measure_saved_bytes(attention: str | None) -> int:
        """Return the activation bytes at the end of forward."""
        recipe = ss.Recipe(seq_len=1024, attention=attention)
        (stage,) = rehearse_plan(Plan(arch, EIGHT, recipe, ss.Layout.megatron()))
        return [m.components["activations"] for m in stage.peaks if m.phase == "forward"][-1]

    scores = arch.num_hidden_layers * heads * 1024**2
    assert (measure_saved_bytes("eager") - measure_saved_bytes(None)) / scores == pytest.approx(
        bytes_a_score, rel=0.15
    )


def test_eager_latent_attention_is_rejected() -> None:
    plan = Plan(ss.models["deepseek-v2-lite"], EIGHT, ss.Recipe(attention="eager"), ss.Layout.megatron())
    with pytest.raises(ValueError, match=r"Recipe\.attention .*latent"):
        rehearse_plan(plan)


def test_context_parallelism_is_rejected() -> None:
    plan = Plan(ss.Architecture.of_size("60m"), EIGHT, ss.Recipe(), ss.Layout.megatron(cp=2))
    with pytest.raises(ValueError, match=r"Layout\.cp"):
        rehearse_plan(plan)


NOT_REHEARSED = {("precision", "fp8-mixed")}
"""Recipe options of Megatron that rehearsals do not support."""


FIELDS = ["precision", "optimizer", "loss", "attention", "recompute", "method"]


@pytest.mark.parametrize("field", few(FIELDS, ["loss"]))
def test_every_recipe_option_is_rehearsed_or_rejected(field: str) -> None:
    layout = ss.Layout.megatron(tp=2, distributed_optimizer=False)
    arch = replace(ss.Architecture.of_size("60m"), num_hidden_layers=1)
    values = list_supported(layout, field)
    assert len(values) >= (1 if field == "method" else 2)
    for value in values:
        recipe = ss.Recipe(seq_len=256, **{field: value})
        if (field, value) in NOT_REHEARSED:
            with pytest.raises(ValueError, match=rf"Recipe\.{field} .*Transformer Engine"):
                rehearse_plan(Plan(arch, EIGHT, recipe, layout))
            continue
        (stage,) = rehearse_plan(Plan(arch, EIGHT, recipe, layout))
        predicted = max(map(sum_tensors, Plan(arch, EIGHT, recipe, layout).memory().by_stage[0].phases))
        assert predicted == pytest.approx(stage.peak.num_bytes, rel=0.02), value


# ------------------------------------------------------------------------------------- the CPU stand-in


def test_the_cpu_stand_in_rejects_a_process_that_uses_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="uses CUDA"), fake_device.fake_device():
        pass


def test_the_cpu_stand_in_restores_torch_and_megatron() -> None:
    from megatron.core.tensor_parallel import layers

    before = {name: getattr(torch.cuda, name) for name in ("current_device", "Stream", "synchronize")}
    adam, available = torch.optim.AdamW, layers._grad_accum_fusion_available
    with fake_device.fake_device():
        assert torch.empty(1, device="cuda").device.type == "cpu"
        assert torch.optim.AdamW is not adam
    assert all(getattr(torch.cuda, name) is was for name, was in before.items())
    assert torch.optim.AdamW is adam and layers._grad_accum_fusion_available is available
