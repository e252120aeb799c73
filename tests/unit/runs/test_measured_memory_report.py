"""The measured tier as a report: what ranks recorded under a prediction's names, and how far off that was."""

from __future__ import annotations

import re
from typing import Any

import pytest

import shardscope as ss
from shardscope.runs.explain.measured import (
    MeasuredMemory,
    build_measured_memory,
    sum_predicted_tensors,
)

MIB = 2**20


def make_plan(cluster: str = "2xcpu", layout: ss.Layout | None = None) -> ss.Plan:
    recipe = ss.Recipe(seq_len=128, global_batch_size=8)
    return ss.Plan(
        ss.Architecture.of_size("2m"), ss.Cluster.parse(cluster), recipe, layout or ss.Layout.fsdp2()
    )


def cpu_record(activations: int = 5 * MIB) -> dict[str, Any]:
    rest = {"parameters": 4 * MIB, "optimizer": 8 * MIB}
    return {
        "memory": {
            "device": "cpu",
            "step": 2,
            "rss_before_steps": 400 * MIB,
            "phases": {"rest": rest, "forward": {**rest, "activations": activations, "logits": 2 * MIB}},
        }
    }


def cuda_record() -> dict[str, Any]:
    rest = {"parameters": 4 * MIB, "optimizer": 8 * MIB}
    return {
        "memory": {
            "device": "cuda",
            "step": 2,
            "phases": {"rest": rest, "backward": {**rest, "activations": 20 * MIB}},
            "allocated_peaks": {"initialisation": 6 * MIB, "backward": 35 * MIB, "optimizer": 13 * MIB},
            "reserved": 40 * MIB,
            "outside_allocator": 500 * MIB,
            "total": 1000 * MIB,
        }
    }


def test_a_cpu_rank_reports_every_counted_component() -> None:
    report = build_measured_memory(make_plan(), {0: cpu_record(), 1: cpu_record(activations=6 * MIB)}, [])
    assert report.tier == "measured"
    assert report.peak_phase == "forward"
    assert report.components == {
        "parameters": 4 * MIB,
        "optimizer": 8 * MIB,
        "activations": 6 * MIB,
        "logits": 2 * MIB,
        "runtime": 396 * MIB,
    }
    assert sum(report.components.values()) == report.peak_bytes
    assert re.fullmatch(r"<MemoryReport measured: peak [\d.]+ of [\d.]+ GiB in forward, fits>", repr(report))
    assert report.tensor_bytes == 20 * MIB
    assert report.at("rest")["parameters"] == 4 * MIB
    assert "step 2" in report.explain("logits")
    assert "not measured separately" in report.explain("communication")
    with pytest.raises(ValueError, match="phase is 'optimizer'; allowed: what was measured: rest, forward"):
        report.at("optimizer")
    with pytest.raises(ValueError, match="component"):
        report.explain("everything")


def test_a_first_step_is_no_error_of_the_prediction() -> None:
    record = cpu_record()
    assert not build_measured_memory(make_plan(), {0: record}, []).lacks_optimizer
    for phase in record["memory"]["phases"].values():
        phase["optimizer"] = 0
    report = build_measured_memory(make_plan(), {0: record}, [])
    assert report.lacks_optimizer
    assert "first step, which begins without the optimizer's state" in report.sentence
    assert not build_measured_memory(make_plan("h100-sxm-80gb"), {0: cuda_record()}, []).lacks_optimizer


def test_a_gpu_rank_reports_unattributed_bytes_as_other() -> None:
    plan = make_plan("h100-sxm-80gb")
    report = build_measured_memory(plan, {0: cuda_record()}, [])
    assert report.peak_phase == "backward"
    assert report.components["other"] == 3 * MIB
    assert report.tensor_bytes == 35 * MIB
    assert report.components["fragmentation"] == 5 * MIB
    assert report.components["runtime"] == 500 * MIB
    assert "communication" not in report.components
    assert "communicators are part of runtime" in report.explain("communication")
    assert report.at("initialisation")["other"] == 6 * MIB
    assert report.fits and report.usable_bytes == plan.cluster.usable_bytes_per_gpu


def test_the_error_compares_tensors_only_in_one_sentence() -> None:
    plan = make_plan()
    predicted = sum_predicted_tensors(plan.memory())
    assert predicted == max(
        sum(v for n, v in parts.items() if n not in ("communication", "runtime", "fragmentation"))
        for phase, _, parts in plan.memory().timeline
        if phase != "initialisation"
    )
    report = build_measured_memory(plan, {0: cpu_record()}, [])
    assert report.error == pytest.approx(predicted / (19 * MIB) - 1)
    assert "19 MiB" in report.sentence and "(forward)" in report.sentence
    assert report.sentence.count(".") - report.sentence.count(" %") <= 3
    side = "above" if predicted > 19 * MIB else "below"
    assert report.sentence.endswith(f" % {side} it.")
    rest = predicted - 14 * MIB  # beside parameters, optimizer and logits
    hit = build_measured_memory(plan, {0: cpu_record(activations=rest)}, [])
    assert hit.error == 0 and hit.sentence.endswith(" MiB, the same to 0.1 %.")


def test_a_users_function_has_only_a_total() -> None:
    ranks = [{"rank": 0, "memory_bytes": 5, "peak_memory_bytes": 7 * MIB, "step": 3, "time": 0.0}]
    report = build_measured_memory(make_plan(), {}, ranks)
    assert report.components == {"other": 7 * MIB}
    assert "only a total is known" in report.explain("activations")
    assert " GiB (a total, of no known phase), fits" in repr(report)
    assert " GiB in forward, fits" in repr(build_measured_memory(make_plan(), {0: cpu_record()}, []))
    rest = {"memory": {"device": "cpu", "step": 2, "phases": {"rest": {"parameters": 4 * MIB}}}}
    assert " GiB at rest, fits" in repr(build_measured_memory(make_plan(), {0: rest}, []))
    assert [rank["peak_memory_bytes"] for rank in report] == [7 * MIB]


def test_resident_memory_of_cpu_ranks_is_not_compared_with_tensors() -> None:
    """Libraries are most of it: a script's run had "tensors" of 0.48 GiB, predicted 90 % below."""
    logged = [{"rank": 0, "memory_bytes": 5, "peak_memory_bytes": 480 * MIB, "step": 3, "time": 0.0}]
    report = build_measured_memory(make_plan(), {}, logged)
    assert report.peak_bytes == 480 * MIB and report.tensor_bytes == 0 and report.error is None
    assert "0.47 GiB of resident memory" in report.sentence and "%" not in report.sentence
    # On a GPU the same line has torch's allocated bytes.
    report = build_measured_memory(make_plan("2xh100-sxm-80gb"), {}, logged)
    assert report.tensor_bytes == 480 * MIB and report.error is not None
    assert build_measured_memory(make_plan(), {}, []).sentence == "No rank has recorded its memory yet."


@pytest.mark.parametrize(
    "record",
    [{}, {"memory": None}, {"memory": []}, {"memory": {"phases": 3}}, {"memory": {"phases": {"rest": 7}}}],
)
def test_malformed_memory_records_are_ignored(record: dict[str, Any]) -> None:
    report = build_measured_memory(make_plan(), {0: record}, [])
    assert isinstance(report, MeasuredMemory)
    assert list(report) == [] and report.peak_bytes == 0 and report.error is None
    assert report.sentence.startswith("No rank ")
    assert not any(value < 0 for value in report.components.values())


def test_negative_and_unknown_numbers_are_left_out() -> None:
    phases = {"rest": {"parameters": -1, "gradients": True, "luck": 4, "optimizer": 5}}
    report = build_measured_memory(make_plan(), {0: {"memory": {"phases": phases}}}, [])
    assert report.components == {"optimizer": 5}


def test_without_a_readable_plan_there_is_no_error() -> None:
    report = build_measured_memory(None, {0: cpu_record()}, [])
    assert report.error is None and "cannot be read" in report.sentence


def test_memory_is_reported_by_pipeline_stage() -> None:
    plan = ss.Plan(
        ss.Architecture.of_size("1b"),
        ss.Cluster.parse("4xh100-sxm-80gb"),
        ss.Recipe(),
        ss.Layout.megatron(pp=2),
    )
    records = {rank: cpu_record(activations=rank * MIB) for rank in range(4)}
    report = build_measured_memory(plan, records, [])
    assert [stage.components["activations"] for stage in report.by_stage] == [1 * MIB, 3 * MIB]
    assert report.worst_stage.stage == 1


def test_a_memory_snapshot_can_be_requested_from_an_active_run() -> None:
    class Context:
        def poll(self) -> tuple[bool, list[dict[str, Any]]]:
            return False, [{"command": "memory_snapshot"}]

    from shardscope.training.loop import poll_commands

    assert poll_commands(Context()).memory_snapshot
    with pytest.raises(ValueError, match=r"Pretrain\.memory_snapshot is 1; allowed"):
        ss.Pretrain(memory_snapshot=1)  # type: ignore[arg-type]
