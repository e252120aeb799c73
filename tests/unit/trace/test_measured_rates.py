"""Tests of the speeds that a trace gives to the calibration, and of the predictions that use them."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from calibrations import LINK_BYTES_PER_SECOND, make_calibration
from tests.requirements import few
from trace_events import all_reduce, load_ranks, step

import shardscope as ss
from shardscope.timing.calibration.selection import select_rates
from shardscope.timing.calibration.store import find_traced_rates, remove_traced_rates, store_calibration
from shardscope.timing.calibration.traced import TracedCall, TracedRates, apply_traced_rates
from shardscope.timing.rates import look_up_rates
from shardscope.trace import Trace

RUNS = Path(__file__).parents[2] / "fixtures" / "traces_of_runs"
NODE = ss.Cluster.parse("8xh100-sxm-80gb")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDSCOPE_DATA_HOME", str(tmp_path / "data"))
    store_calibration(make_calibration("2xcpu"))
    return tmp_path / "data"


def read_parts(trace: Trace) -> dict[str, tuple[float | None, float | None]]:
    return {row["part"]: (row["predicted_seconds"], row["measured_seconds"]) for row in trace.compare()}


def create_rates(base: str, **fields: object) -> TracedRates:
    defaults = {"gpu": NODE.gpu.name, "base": base, "precision": "bf16", "matmul_speed": None}
    return TracedRates(**defaults | fields)


@pytest.mark.parametrize("framework", few(["ddp", "fsdp2", "megatron", "zero3"], ["fsdp2"]))
def test_measured_rates_move_the_prediction_to_the_measurement(framework: str) -> None:
    trace = Trace.load(RUNS / framework, cache=False)
    assert trace.plan is not None
    before = read_parts(trace)
    rates = trace.measured_rates()
    rates.store()
    after = read_parts(trace)
    # Matmuls have one rate, so their prediction is the measurement.
    predicted, measured = after["matrices"]
    assert predicted == pytest.approx(measured, rel=1e-3) and before["matrices"][0] != predicted
    assert after["step"][0] != before["step"][0]
    assert "trace" in trace.plan.step().calibration
    # Measured again: the same rates, not the same change once more.
    again = trace.measured_rates()
    assert again.matmul_speed == pytest.approx(rates.matmul_speed, rel=1e-6) and again.calls == rates.calls
    again.store()
    assert trace.plan.step().seconds == pytest.approx(after["step"][0], rel=1e-6)
    remove_traced_rates("cpu")
    assert read_parts(trace) == before


def test_a_new_calibration_replaces_what_a_trace_measured() -> None:
    trace = Trace.load(RUNS / "ddp", cache=False)
    assert trace.plan is not None
    before = trace.plan.step().seconds
    trace.measured_rates().store()
    assert find_traced_rates(trace.plan.cluster) is not None
    store_calibration(make_calibration("2xcpu", measured_at="2026-11-22T13:00:00+00:00"))
    assert find_traced_rates(trace.plan.cluster) is None
    assert trace.plan.step().seconds == pytest.approx(before)


def test_rates_name_axis_size_and_bandwidth() -> None:
    rates = Trace.load(RUNS / "megatron", cache=False).measured_rates()
    assert {call.axis for call in rates.calls} >= {"tp"} and all(call.num_ranks == 2 for call in rates.calls)
    assert "of tp" in str(rates) and "GB/s" in str(rates) and "times the predicted speed" in str(rates)
    assert TracedRates.from_json(rates.to_json()) == rates


def test_trace_without_a_plan_or_a_calibration_says_so(folder: Path) -> None:
    trace = Trace.load(RUNS.parent / "trace_2_ranks", cache=False)
    with pytest.raises(ValueError, match="belongs to no run"):
        trace.measured_rates()
    for file in (folder / "calibration").iterdir():
        file.unlink()
    with pytest.raises(ValueError, match=r"ss\.calibrate"):
        Trace.load(RUNS / "ddp", cache=False).measured_rates()


def test_recomputed_matmuls_keep_their_rate() -> None:
    trace = Trace.load(RUNS / "fsdp2", cache=False)
    assert trace.plan is not None
    plan = replace(trace.plan, recipe=replace(trace.plan.recipe, recompute="full"))
    rates = trace.measured_rates(plan)
    assert rates.matmul_speed is None and any("Recomputed" in note for note in rates.notes)


def test_ranks_that_were_not_recorded_may_be_the_last_ones(tmp_path: Path) -> None:
    """Two of four ranks wait for a third: their time was taken for that of the transfer."""
    named = {
        "Collective name": "allreduce",
        "In msg nelems": 2**20,
        "Out msg nelems": 2**20,
        "Group size": 4,
        "dtype": "BFloat16",
        "Process Group Name": "0",
        "Process Group Ranks": "[0, 1, 2, 3]",
    }
    ranks = {rank: [step(0, 0, 10**7), all_reduce(1000 * rank, 5 * 10**6, **named)] for rank in range(4)}
    plan = ss.Plan(
        ss.Architecture.of_size("350m"), ss.Cluster.parse("4xh100-sxm-80gb"), ss.Recipe(), ss.Layout.ddp()
    )
    (call,) = load_ranks(tmp_path / "all", ranks).measured_rates(plan).calls
    assert call.num_ranks == 4
    some = load_ranks(tmp_path / "some", {rank: ranks[rank] for rank in (0, 1)}, info={"world_size": 4})
    with pytest.raises(ValueError, match="not all ranks were recorded"):
        some.measured_rates(plan)


def test_matmuls_of_a_recording_without_steps_keep_their_rate(tmp_path: Path) -> None:
    """The predicted step was compared with all recorded ones: matmuls were several times too slow."""
    for file in (RUNS / "ddp" / "traces").glob("*.json.gz"):
        document = json.loads(gzip.decompress(file.read_bytes()))
        events = document["traceEvents"]
        document["traceEvents"] = [one for one in events if not one["name"].startswith("ProfilerStep")]
        (tmp_path / file.name.removesuffix(".gz")).write_text(json.dumps(document))
    rates = Trace.load(tmp_path, cache=False).measured_rates(Trace.load(RUNS / "ddp", cache=False).plan)
    assert rates.matmul_speed is None and any("No steps are marked" in note for note in rates.notes)


def test_known_rates_are_found_again() -> None:
    """Collectives that take exactly what a link of this speed takes give that link."""
    known = look_up_rates(NODE)
    calls = [
        TracedCall(
            axis="dp",
            collective="all_reduce",
            num_bytes=num_bytes,
            num_ranks=8,
            num_calls=4,
            seconds=2 * 7 / 8 * num_bytes / LINK_BYTES_PER_SECOND,
        )
        for num_bytes in (2**16, 2**20, 2**24, 2**28)
    ]
    rates = apply_traced_rates(known, create_rates(known.source, matmul_speed=0.5, calls=tuple(calls)))
    assert rates.get_matmul_rate("bf16").flops_per_second == pytest.approx(
        known.get_matmul_rate("bf16").flops_per_second / 2
    )
    assert rates.inside.bytes_per_second == pytest.approx(LINK_BYTES_PER_SECOND, rel=0.05)
    assert rates.collectives["all_reduce"].seconds(2**24, 1) == pytest.approx(calls[2].seconds)
    # Rates that were compared with other constants change nothing.
    assert apply_traced_rates(known, create_rates("another calibration", matmul_speed=0.5)) is known


def test_rates_of_a_node_are_used_for_gpus_without_a_calibration() -> None:
    plan = ss.Plan(ss.models["llama-3.1-8b"], NODE, ss.Recipe(), ss.Layout.fsdp2())
    before = plan.step().parts["matrices"]
    create_rates(select_rates(NODE).source, matmul_speed=0.5).store()
    assert plan.step().parts["matrices"] == pytest.approx(2 * before, rel=1e-6)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("matmul_speed", 0.0),
        ("matmul_speed", float("nan")),
        ("precision", "int4"),
        ("calls", ["x"]),
        ("gpu", ""),
    ],
)
def test_impossible_rates_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"TracedRates.{field}"):
        create_rates("a calibration", **{field: value})
