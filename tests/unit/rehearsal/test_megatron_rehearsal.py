"""Megatron-core's own code on fake tensors: what was stored of it, and a few of those played again."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from functools import cache
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
def rows() -> tuple[Rehearsed, ...]:
    found, refused = read_rehearsals([FILE])
    assert not refused
    return tuple(found)


def tensors_of(moment: PhaseMemory) -> int:
    return sum(moment.components[name] for name in TENSOR_COMPONENTS)


def played(plan: Plan, *stages: int) -> list[RehearsedStage]:
    return rehearse(plan, lambda words, fraction: None, stages or None)


def test_predictions_agree_with_stored_rehearsals() -> None:
    assert len(rows()) >= 40
    worst = max(rows(), key=lambda row: abs(row.error))
    assert abs(worst.error) <= 0.01, in_words(worst)


@pytest.mark.parametrize("sample", SAMPLES)
def test_every_stored_stage_is_near_its_own_prediction(sample: str) -> None:
    for line in (STORED / f"{sample}.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        by_stage = Plan.from_dict(row["plan"]).memory().by_stage
        for stored in map(RehearsedStage.from_dict, row["stages"]):
            predicted = max(map(tensors_of, by_stage[stored.stage].phases))
            assert predicted == pytest.approx(stored.peak.num_bytes, rel=0.0125), (row["name"], stored.stage)


@pytest.mark.parametrize("sample", SAMPLES[1:])
def test_predictions_agree_with_samples_over_the_whole_space(sample: str) -> None:
    """Drawn by seeds of their own over every choice there is; what they showed was mended by its cause."""
    held_out, refused = read_rehearsals([STORED / f"{sample}.jsonl"])
    assert not refused and len(held_out) >= 30
    worst = max(held_out, key=lambda row: abs(row.error))
    assert abs(worst.error) <= 0.01, in_words(worst)


def test_weights_gradients_and_optimizer_are_exact() -> None:
    """No estimate: a few numbers of padding between parameters are all that may be missing."""
    for row in rows():
        for name in ("parameters", "gradients"):
            assert row.predicted[name] == pytest.approx(row.stored[name], rel=2e-3), in_words(row)


@pytest.mark.parametrize("place", few([0, 9, 18, 27], [9]))
def test_repeating_a_stored_rehearsal_gives_the_same_bytes(place: int) -> None:
    row = rows()[place]
    stages = played(row.plan)
    assert max(stage.peak.num_bytes for stage in stages) == pytest.approx(sum(row.stored.values()), rel=1e-3)
    assert [stage.num_layers for stage in stages] == list(row.plan.stage_layers)
    assert all({moment.phase for moment in stage.moments} == set(PHASES) for stage in stages)


@thorough()
def test_1f1b_holds_fewer_micro_batches_on_later_stages() -> None:
    arch = replace(ss.Architecture.of_size("1b"), num_hidden_layers=16)
    plan = Plan(arch, EIGHT, ss.Recipe(seq_len=2048, global_batch_size=16), ss.Layout.megatron(tp=2, pp=2))
    first, last = played(plan)
    kept = [
        max(moment.components["activations"] for moment in stage.moments if moment.phase == "forward")
        for stage in (first, last)
    ]
    assert kept[0] == pytest.approx(2 * kept[1], rel=0.1)


@thorough()
@pytest.mark.parametrize(("heads", "bytes_a_score"), few([(4, 2), (3, 6)], [(4, 2)]))
def test_eager_attention_takes_the_fused_softmax_where_megatron_does(heads: int, bytes_a_score: int) -> None:
    """It keeps half-precision probabilities; torch's, for other shapes, fp32 ones beside them.

    The fused kernel wants heads of a rank times sequences to be a multiple of four.
    """
    arch = replace(
        ss.Architecture.of_size("60m"),
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        hidden_size=64 * heads,
        head_dim=64,
    )

    def kept(attention: str | None) -> int:
        """At the end of forward."""
        recipe = ss.Recipe(seq_len=1024, attention=attention)
        (stage,) = played(Plan(arch, EIGHT, recipe, ss.Layout.megatron()))
        return [m.components["activations"] for m in stage.moments if m.phase == "forward"][-1]

    scores = arch.num_hidden_layers * heads * 1024**2
    assert (kept("eager") - kept(None)) / scores == pytest.approx(bytes_a_score, rel=0.15)


def test_latent_attention_has_no_eager_kind() -> None:
    plan = Plan(ss.models["deepseek-v2-lite"], EIGHT, ss.Recipe(attention="eager"), ss.Layout.megatron())
    with pytest.raises(ValueError, match=r"Recipe\.attention .*latent"):
        played(plan)


def test_context_parallelism_needs_transformer_engine() -> None:
    plan = Plan(ss.Architecture.of_size("60m"), EIGHT, ss.Recipe(), ss.Layout.megatron(cp=2))
    with pytest.raises(ValueError, match=r"Layout\.cp"):
        played(plan)


REFUSED = {("precision", "fp8-mixed")}
"""Of all that a recipe may choose with Megatron, what no rehearsal plays."""


FIELDS = ["precision", "optimizer", "loss", "attention", "recompute", "method"]


@pytest.mark.parametrize("field", few(FIELDS, ["loss"]))
def test_every_choice_of_a_recipe_is_rehearsed_or_refused_by_name(field: str) -> None:
    layout = ss.Layout.megatron(tp=2, distributed_optimizer=False)
    arch = replace(ss.Architecture.of_size("60m"), num_hidden_layers=1)
    values = list_supported(layout, field)
    assert len(values) >= (1 if field == "method" else 2)
    for value in values:
        recipe = ss.Recipe(seq_len=256, **{field: value})
        if (field, value) in REFUSED:
            with pytest.raises(ValueError, match=rf"Recipe\.{field} .*Transformer Engine"):
                played(Plan(arch, EIGHT, recipe, layout))
            continue
        (stage,) = played(Plan(arch, EIGHT, recipe, layout))
        predicted = max(map(tensors_of, Plan(arch, EIGHT, recipe, layout).memory().by_stage[0].phases))
        assert predicted == pytest.approx(stage.peak.num_bytes, rel=0.02), value


# ------------------------------------------------------------------------------------- the CPU stand-in


def test_only_the_rehearsal_imports_the_cpu_stand_in() -> None:
    importing = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            module = getattr(node, "module", None) or ""
            if module == "shardscope.frameworks.megatron.rehearsal.fake_device":
                importing.add(file.relative_to(PACKAGE).as_posix())
    assert importing == {"frameworks/megatron/rehearsal/rehearse.py"}


def test_the_cpu_stand_in_refuses_a_process_that_uses_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="uses CUDA"), fake_device.fake_device():
        pass


def test_the_cpu_stand_in_leaves_nothing_behind() -> None:
    from megatron.core.tensor_parallel import layers

    before = {name: getattr(torch.cuda, name) for name in ("current_device", "Stream", "synchronize")}
    adam, available = torch.optim.AdamW, layers._grad_accum_fusion_available
    with fake_device.fake_device():
        assert torch.empty(1, device="cuda").device.type == "cpu"
        assert torch.optim.AdamW is not adam
    assert all(getattr(torch.cuda, name) is was for name, was in before.items())
    assert torch.optim.AdamW is adam and layers._grad_accum_fusion_available is available
