"""tests/accuracy/own_code.py: each piece against what was published of it, or by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.accuracy.kinds import measured_bytes
from tests.accuracy.mapping import Mapped, mapped
from tests.accuracy.rows import MEASURED, Row, read
from tests.accuracy.scoring import predicted

from shardscope.memory.report import MemoryReport, Moment

TOKENS = 4096
ROWS = {str(row["id"]): row for row in read(sorted(MEASURED.glob("*.jsonl")))}


def tensors(moment: Moment) -> int:
    """Bytes that torch counts as allocated."""
    beside = ("runtime", "communication", "fragmentation")
    return sum(size for name, size in moment.components.items() if name not in beside)


def peak(row: Row) -> int:
    """The predicted peak of tensors."""
    return max(map(tensors, report(row).worst_stage.moments))


def report(row: Row) -> MemoryReport:
    return predicted(mapped(row))[0]


def measured(name: str) -> float:
    return float(ROWS[name]["peak_memory_gib"]) * 2**30


def test_fsdp1_keeps_each_layers_input_and_gradient_until_backward_ends() -> None:
    """Published: 774,432 bytes a token on two GPUs, 528,672 on one; the difference is 30 hidden states."""
    names = {"one": ("fms-0058", "fms-0059"), "two": ("fms-0062", "fms-0063")}
    apart = {"one": 4 * TOKENS, "two": 8 * TOKENS}
    published = {key: (measured(b) - measured(a)) / apart[key] for key, (a, b) in names.items()}
    ours = {key: (peak(ROWS[b]) - peak(ROWS[a])) / apart[key] for key, (a, b) in names.items()}
    assert published["two"] - published["one"] == pytest.approx(30 * 4096 * 2, rel=0.01)
    assert ours["two"] - ours["one"] == pytest.approx(30 * 4096 * 2, rel=0.07)
    assert ours["two"] == pytest.approx(published["two"], rel=0.02)


def test_trained_weights_have_no_such_hooks() -> None:
    assert mapped(ROWS["fms-0050"]).own_code == ()
    assert mapped(ROWS["fms-0063"]).own_code == ("fsdp1_hooks",)


def test_unsloths_loss_takes_eight_bytes_a_logit() -> None:
    """Published: 1,304,531 bytes a token: 32 layers' inputs, two more hidden states, and 8 x 128,256."""
    rows = [ROWS[name] for name in ("fms-0052", "fms-0053")]
    published = (measured("fms-0053") - measured("fms-0052")) / (4 * TOKENS)
    assert published == pytest.approx(34 * 4096 * 2 + 8 * 128_256, rel=0.001)
    assert (peak(rows[1]) - peak(rows[0])) / (4 * TOKENS) == pytest.approx(published, rel=0.001)


def test_four_bits_are_sharded_and_their_scales_are_not() -> None:
    """mem_torch_mem_alloc_in_bytes of refs/a100_80gb_liger.csv: what stays on 2 and on 4 GPUs."""
    at_rest = {
        name: report(ROWS[name]).worst_stage.at("rest").components["parameters"]
        for name in ("fms-0077", "fms-0080")
    }
    shard = at_rest["fms-0077"] - at_rest["fms-0080"]
    assert shard == pytest.approx(3_033_275_904 - 1_636_421_120, rel=0.01)
    # Whole on each rank: scales; adapters are not counted so.
    whole = at_rest["fms-0080"] - shard
    numel = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert whole == pytest.approx(numel / 64, rel=0.05)


def test_every_mistral_layer_caches_its_angles() -> None:
    """torch_mem_alloc_in_bytes of refs/a100_80gb.csv: 2 bytes a weight, adapters with moments, and these."""
    at_rest = report(ROWS["fms-0007"]).worst_stage.at("rest").components
    adapters = 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024))
    assert at_rest["parameters"] == pytest.approx(15_119_984_128 - 3 * 4 * adapters, rel=0.01)
    assert at_rest["parameters"] - mapped(ROWS["fms-0007"]).plan.memory().at("rest")["parameters"] == (
        32 * 32_768 * 128 * 2 * 2
    )


def test_bf16_optimizer_has_six_bytes_of_gradients() -> None:
    found = mapped(ROWS["bloom-0089"])
    plain = found.plan.memory().worst_stage.peak.components
    theirs = predicted(found)[0].worst_stage.peak.components
    assert theirs["gradients"] == plain["gradients"] * 3 // 2
    assert {name: theirs[name] for name in theirs if name != "gradients"} == {
        name: plain[name] for name in plain if name != "gradients"
    }
    fp16: Mapped = mapped({**ROWS["bloom-0089"], "precision": "fp16"})
    assert fp16.own_code == ()


def test_torchtitans_policy_keeps_four_of_seven_products_and_attentions_output() -> None:
    row = ROWS["torchtitan-0004"]
    found = mapped(row)
    kept = 2 * (4096 + 1024 + 14336 + 4096 + 4096) + 32 * 4
    full = replace(found.plan, recipe=replace(found.plan.recipe, recompute="full"))
    theirs: Any = predicted(found)[0].worst_stage.at("forward").components
    plain: Any = full.memory().worst_stage.at("forward").components
    assert theirs["activations"] - plain["activations"] == 31 * 2 * 8192 * kept
    # The product's own word for it keeps all products.
    assert found.plan.recipe.recompute == "selective"
    assert found.plan.memory().at("forward")["activations"] > theirs["activations"]
    # Reserved memory is never less than what tensors take.
    assert peak(row) < measured("torchtitan-0004")


def test_one_gpu_without_ddp_has_no_gradients_when_logits_are_there() -> None:
    """Published for three kernels alike: weights, gradients, moments, and what foreach adds in the step."""
    weights = 8_030_261_248 * 2
    for name in ("fms-0041", "fms-0045", "fms-0046"):
        assert "no_buckets" in mapped(ROWS[name]).own_code
        assert peak(ROWS[name]) == pytest.approx(measured(name), rel=0.001)
        assert peak(ROWS[name]) == pytest.approx(5 * weights, rel=0.001)
    fullest = max(report(ROWS["fms-0041"]).worst_stage.moments, key=lambda at: at.components["logits"])
    assert fullest.components["gradients"] == 0


def test_bridges_figures_are_decimal_gigabytes() -> None:
    """Its log divides by 1e9 and keeps five digits; pages that say GiB have the same digits."""
    assert measured_bytes(ROWS["mbskill-0022"]) == pytest.approx(62.166e9)
    assert measured_bytes(ROWS["mbskill-0001"]) == pytest.approx(36.618e9)


def test_precision_aware_steps_copy_the_experts_moments_to_fp32() -> None:
    """By hand: 2 + 2 + 6 bytes a weight, whose states are on all ranks but the experts', and 8 an expert's.

    Published: whatever is recomputed, 35.917 to 35.949 GB stay: no moment of the layers.
    """
    rows = [ROWS[f"mbskill-000{number}"] for number in (1, 2, 4, 5, 6)]
    moments = {moment.phase: moment for moment in report(rows[0]).worst_stage.moments}
    experts, rest = 26 * 64 // 8 * 3 * 2048 * 1408, 800_321_024
    assert moments["rest"].components["optimizer"] == 6 * (experts + rest // 4)
    assert moments["rest"].components["gradients"] == 2 * (experts + rest)
    copies = moments["optimizer"].components["optimizer"] - moments["rest"].components["optimizer"]
    assert copies == 8 * experts
    assert peak(rows[0]) == tensors(moments["optimizer"])
    floor = min(measured_bytes(row) for row in rows)
    assert all(measured_bytes(row) < 1.001 * floor for row in rows[2:])
    assert peak(rows[2]) == pytest.approx(floor, rel=0.04)


def test_the_report_of_a_plan_alone_is_left_as_it_is() -> None:
    found = mapped(ROWS["fms-0045"])
    assert predicted(found)[0].peak_bytes == found.plan.memory().peak_bytes
    changed = predicted(mapped(ROWS["fms-0063"]))[0]
    assert changed.low_bytes <= changed.peak_bytes <= changed.high_bytes
    assert sum(changed.components.values()) == changed.peak_bytes
