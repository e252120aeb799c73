"""Tests of checked claims about frameworks: exact for bytes, within the stated range for times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest

import shardscope as ss
from shardscope.planner.claims import (
    CHECKED,
    Claim,
    Claims,
    Verdict,
    claims,
    memory_claims,
    speed_claims,
)


@pytest.fixture(scope="module")
def checked_claims() -> Claims:
    return claims()


def find_our_number(claim: Claim, what: str) -> float:
    return claim.get_number(what).computed


def test_every_claim_has_numbers_a_verdict_and_a_reason(checked_claims: Claims) -> None:
    assert len(checked_claims) == len(CHECKED) == 10
    assert len({claim.name for claim in checked_claims}) == 10
    for claim in checked_claims:
        assert claim.verdict in get_args(Verdict)
        assert claim.numbers and claim.statement and claim.why.endswith(".")
        assert "*" not in claim.statement + claim.why, "plain text, which nobody renders"
        assert len({number.name for number in claim.numbers}) == len(claim.numbers)


def test_the_claim_of_840_gb_is_corrected_to_1120_gb(checked_claims: Claims) -> None:
    claim = checked_claims.named("70b-needs-840-gb")
    assert claim.verdict == "wrong"
    assert find_our_number(claim, "training state of 70e9 parameters") == pytest.approx(1120)
    assert find_our_number(claim, "both moments") == pytest.approx(560)
    assert find_our_number(claim, "without the master") == pytest.approx(840)
    by_plan = find_our_number(claim, "Llama 3.1 70B over 64 GPUs, by plan.memory()")
    assert by_plan == pytest.approx(16 * ss.models["llama-3.1-70b"].num_parameters / 1e9, rel=0.005)


def test_four_gpus_need_282_gb_each(checked_claims: Claims) -> None:
    claim = checked_claims.named("four-96-gb-cards-train-70b")
    assert claim.verdict == "wrong"
    number = ss.models["llama-3.1-70b"].num_parameters
    assert find_our_number(claim, "training state a GPU with ZeRO-3") == pytest.approx(
        16 * number / 4 / 1e9, rel=0.002
    )
    assert find_our_number(claim, "training state a GPU with ZeRO-3") == pytest.approx(282, abs=1)
    assert find_our_number(claim, "weights a GPU with ZeRO-3") == pytest.approx(35.3, abs=0.1)
    assert find_our_number(claim, "gradients a GPU with ZeRO-3") == pytest.approx(35.3, abs=0.1)
    assert find_our_number(claim, "weights a GPU with ZeRO-2") == pytest.approx(141, abs=1)
    assert find_our_number(claim, "weights a GPU with ZeRO-2") > find_our_number(claim, "the GPU")


def test_savings_of_4x_and_8x_refer_to_the_whole_training_state(checked_claims: Claims) -> None:
    claim = checked_claims.named("zero-saves-4x-and-8x")
    assert claim.verdict == "half right"
    assert find_our_number(claim, "optimizer, stage 1 over 64 GPUs") == pytest.approx(64, rel=0.001)
    assert find_our_number(claim, "gradients, stage 2 over 64 GPUs") > 30
    # Rajbhandari et al. 2020, figure 1: 120, 31.4 and 16.6 GB of 7.5e9 parameters over 64 GPUs.
    assert find_our_number(claim, "all state, stage 1 over 64 GPUs") == pytest.approx(120 / 31.4, rel=0.01)
    assert find_our_number(claim, "all state, stage 2 over 64 GPUs") == pytest.approx(120 / 16.6, rel=0.02)
    assert find_our_number(claim, "all state, stage 1 over 1,024 GPUs") == pytest.approx(
        16 / (4 + 12 / 1024), rel=0.01
    )
    # A rank keeps the gradients of all tensors that its part touches, and whole.
    assert find_our_number(claim, "all state, stage 2 over 1,024 GPUs") == pytest.approx(
        16 / (2 + 14 / 1024), rel=0.03
    )


def test_lora_of_70b_fits_on_a_node(checked_claims: Claims) -> None:
    claim = checked_claims.named("70b-lora-fits-on-8xh100")
    assert claim.verdict == "right"
    usable = find_our_number(claim, "usable of a GPU")
    assert (
        find_our_number(claim, "peak a GPU, LoRA")
        < usable
        < find_our_number(claim, "peak a GPU, full training")
    )


def test_175b_fits_on_one_gpu_but_trains_too_slowly(checked_claims: Claims) -> None:
    claim = checked_claims.named("175b-on-one-gpu-with-nvme")
    assert claim.verdict == "right"
    assert find_our_number(claim, "peak on the GPU") < 80
    # bf16 weights, and in fp32 main weights, gradients and two moments: 18 bytes a parameter.
    number = ss.models["gpt-3-175b"].num_parameters
    assert find_our_number(claim, "NVMe") == pytest.approx(18 * number / 1e9, rel=0.001)
    assert find_our_number(claim, "GPT-3's 300e9 tokens") > 50


def test_the_cost_of_offload_falls_with_the_batch_size(checked_claims: Claims) -> None:
    claim = checked_claims.named("cpu-offload-halves-nvme-a-tenth")
    assert claim.verdict == "depends"
    for where, said in (("CPU", 2.0), ("NVMe", 10.0)):
        slower = [find_our_number(claim, f"{where}, {batch} sequences a step") for batch in (8, 64, 512)]
        assert slower == sorted(slower, reverse=True)
        assert slower[0] > said > slower[-1] > 1, "the claim is one point of the curve"


def test_fsdp2_is_not_5_times_as_fast_as_zero_3(checked_claims: Claims) -> None:
    claim = checked_claims.named("fsdp2-5x-zero-3")
    assert claim.verdict == "wrong"
    for number in claim.numbers:
        assert 0.5 < number.computed < 1.5, number


def test_fsdp2_exceeds_the_claimed_limit_of_200_tflops(checked_claims: Claims) -> None:
    claim = checked_claims.named("fsdp2-tops-out-at-200")
    assert claim.verdict == "wrong"
    assert find_our_number(claim, "FSDP2, Llama 3.1 8B, 8 H100") > 250
    assert find_our_number(claim, "FSDP2, Llama 3.1 70B, 64 H100") > 250
    assert 120 < find_our_number(claim, "FSDP2, Llama 3.1 8B, 8 A100") < 210
    # 5,762 tokens/s of torchtitan's own benchmark.
    assert find_our_number(claim, "FSDP2, Llama 3.1 8B, 8 H100 at 500 W, measured") == pytest.approx(
        297, abs=1
    )


def test_400_tflops_are_40_percent_of_the_peak(checked_claims: Claims) -> None:
    claim = checked_claims.named("400-is-near-the-peak")
    assert claim.verdict == "wrong"
    assert claim.numbers[0].computed == pytest.approx(40.4, abs=0.1)


def test_verdicts_follow_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With another tolerance, or another card, they are others."""
    monkeypatch.setattr("shardscope.planner.claims.claim.TOLERANCE", 20.0)
    for check in (
        memory_claims.check_70b_training_state,
        memory_claims.check_zero_savings,
        speed_claims.check_offload_slowdown,
        speed_claims.check_share_of_peak,
    ):
        assert check().verdict == "right", check
    roomy = replace(ss.gpus["h20-96gb"], memory_bytes=400 * 2**30, usable_bytes=390 * 2**30)
    build_plan = memory_claims.build_plan

    def on_roomy(*given: Any, **recipe: Any) -> ss.Plan:
        plan = build_plan(*given, **recipe)
        return replace(plan, cluster=replace(plan.cluster, gpu=roomy))

    monkeypatch.setattr(memory_claims, "build_plan", on_roomy)
    assert memory_claims.check_70b_on_four_gpus().verdict == "right"


def test_llama_405b_is_within_a_quarter_of_the_measurement(checked_claims: Claims) -> None:
    """The model is within a quarter of the measurement; beyond a tenth the claim states the error."""
    claim = checked_claims.named("llama-405b-at-400")
    assert find_our_number(claim, "8 x 16 x 128") == 16_384
    short, long = (
        claim.get_number("8,192 tokens, 16 micro-batches"),
        claim.get_number("131,072 tokens, cp 16"),
    )
    for number in (short, long):
        assert number.ratio is not None
        assert 0.75 < number.ratio < 1.25, number
        if abs(number.ratio - 1) > 0.1:
            assert claim.verdict == "depends" and f"({100 * (number.ratio - 1):+.0f} %)" in claim.why


def test_claims_are_shown_as_a_table(checked_claims: Claims) -> None:
    html = checked_claims.to_html()
    assert html.count("<tr>") == 11 and "<script" not in html
    frame = checked_claims.to_frame()
    assert len(frame) == sum(len(claim.numbers) for claim in checked_claims)
    assert checked_claims._repr_html_() == html
    with pytest.raises(LookupError, match="70b-needs-840-gb"):
        checked_claims.named("70b")
