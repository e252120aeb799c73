"""Rows that say how fast a run was: which count, how they become plans, and how ranks are compared."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.accuracy import fitting
from tests.accuracy.__main__ import main
from tests.accuracy.document import parts, put
from tests.accuracy.fitting import calibration_rows, constants, fit, loss, restored
from tests.accuracy.rows import SHARED, read
from tests.accuracy.time_machines import timed_cluster
from tests.accuracy.time_mapping import timed
from tests.accuracy.time_rows import configurations, time_files
from tests.accuracy.time_scoring import score_time, spearman
from tests.accuracy.time_writing import HEADING, time_report
from tests.accuracy.uncalibrated import uncalibrated
from tests.accuracy.unmapped import UnmappedError

from shardscope.catalog import entries
from shardscope.prediction.pipeline import bubbles
from shardscope.timing.calibration.store import FOLDER_VARIABLE
from shardscope.timing.pipeline import Schedule


def row(**fields: Any) -> dict[str, Any]:
    """Llama 3.1 8B over two nodes of H100 with FSDP2, as a table would print it."""
    return {
        "id": "row-1",
        "source": "somebody",
        "model": "Llama-3.1-8B",
        "framework": "fsdp2",
        "gpu": "H100-SXM-80GB",
        "n_gpus": 16,
        "nodes": 2,
        "seq_len": 8192,
        "micro_batch": 1,
        "global_batch": 32,
        "precision": "bf16 mixed",
        "activation_checkpointing": "full",
        "tokens_per_s_per_gpu": 5000.0,
        "quality": "A",
        "role": "judge",
    } | fields


def test_tokens_a_second_are_compared_where_a_row_has_them() -> None:
    """A row's own step time may be of another batch than its plan's."""
    (scored,) = score_time([row(step_time_s=99.0)]).scored
    assert scored.measured == pytest.approx(32 * 8192 / 16 / 5000)
    assert scored.error == pytest.approx(scored.report.seconds / scored.measured - 1)
    (scored,) = score_time([row(tokens_per_s_per_gpu=None, step_time_s=3.0)]).scored
    assert scored.measured == 3.0


def test_mfu_and_tflops_are_never_read() -> None:
    assert configurations([row(tokens_per_s_per_gpu=None, mfu=40.0, tflops_per_gpu=400)]) == []
    with_them, without = (
        score_time([row(**more)]) for more in ({"mfu": 99.0, "tflops_per_gpu": 1.0}, dict[str, Any]())
    )
    assert with_them.scored[0].error == without.scored[0].error


@pytest.mark.parametrize("value", [0, -1, True, "fast", float("inf"), None])
def test_what_is_no_rate_does_not_count(value: object) -> None:
    assert configurations([row(tokens_per_s_per_gpu=value)]) == []


def test_grade_b_does_not_count() -> None:
    assert configurations([row(quality="B")]) == []


def test_a_configuration_that_comes_with_every_release_counts_once_by_its_median() -> None:
    summary = "NVIDIA Megatron-Bridge performance summary"
    again = [
        row(id=f"row-{number}", source=summary, tokens_per_s_per_gpu=rate, table=f"release {number}")
        for number, rate in enumerate((100.0, 300.0, 120.0))
    ]
    (one,) = configurations(again)
    assert one.measured["tokens_per_s_per_gpu"] == 120.0
    assert len(one.rows) == 3
    # Runs of others with the same keys are runs of their own.
    assert len(configurations([{**each, "source": "somebody"} for each in again])) == 3
    # Another batch is another configuration, and so is another role.
    other = [*again[:2], {**again[2], "global_batch": 64}]
    assert len(configurations(other)) == 2
    assert len(configurations([*again[:2], {**again[2], "role": "calibration"}])) == 2


def test_every_row_without_a_plan_is_counted_with_its_reason() -> None:
    score = score_time([row(), row(id="row-2", framework="colossalai"), row(id="row-3", model=None)])
    assert len(score.scored) == 1
    assert score.num_configurations == 3
    assert set(score.reasons) == {"ColossalAI is not modelled", "model not in the catalogue: not stated"}


def test_stages_that_do_not_come_out_even_take_as_long_as_the_fullest() -> None:
    deep = row(
        model="DeepSeek-V3",
        framework="megatron-bridge",
        gpu="GB200",
        n_gpus=256,
        nodes=None,
        pp=4,
        vpp=4,
        ep=64,
        global_batch=2048,
        seq_len=4096,
        precision="MXFP8",
    )
    found = timed(deep)
    assert found.plan.architecture.num_hidden_layers == 62
    assert any("as long as the fullest" in words for words in found.assumed)


def test_fp8_scalings_of_megatron_are_one_precision() -> None:
    megatron = {"framework": "megatron-bridge", "tp": 2, "activation_checkpointing": None}
    for said in ("FP8-CS", "MXFP8", "fp8 current scaling"):
        assert timed(row(precision=said, **megatron)).plan.recipe.precision == "fp8-mixed"
    with pytest.raises(UnmappedError, match="4-bit"):
        timed(row(precision="NVFP4", **megatron))


def test_a_batch_that_is_not_whole_is_rounded_to_whole_micro_batches() -> None:
    found = timed(row(micro_batch=3, global_batch=32))
    assert found.plan.recipe.global_batch_size == 48
    assert any("rounded" in words for words in found.assumed)


@pytest.mark.parametrize(("words", "schedule"), [("ZB-1p", "zb-h1"), ("ZB-2p", "zb-h2"), ("1F1B", None)])
def test_a_zero_bubble_row_has_the_bubble_that_its_plan_tells(words: str, schedule: Schedule | None) -> None:
    (row,) = [row for row in read(time_files()) if row["id"] == "zerobubble-0034"]
    (one,) = score_time([row | {"framework": f"megatron + {words}"}]).scored
    plan = one.mapped.plan
    assert one.mapped.schedule == schedule
    expected = plan.step().parts["bubble"] if schedule is None else bubbles(plan)[schedule]
    assert one.report.parts["bubble"] == expected
    others = {part: seconds for part, seconds in one.report.parts.items() if part != "bubble"}
    assert others == {part: seconds for part, seconds in plan.step().parts.items() if part != "bubble"}
    assert (plan.step().parts["bubble"] > expected) == (schedule is not None)


def test_megatron_overlaps_on_hopper_and_not_on_the_a100_of_2021() -> None:
    megatron = {"framework": "megatron", "tp": 2, "optimizer": "distributed adam"}
    for gpu, overlaps in (("H100-SXM-80GB", True), ("A100-80GB", False)):
        layout: Any = timed(row(gpu=gpu, **megatron)).plan.layout
        assert (layout.overlap_grad_reduce, layout.tp_comm_overlap) == (overlaps, overlaps)


def test_nvlink_joins_a_rack_of_gb200() -> None:
    cluster, _ = timed_cluster(row(gpu="GB200", n_gpus=256, nodes=None))
    assert (cluster.gpus_per_node, cluster.num_nodes) == (64, 4)
    cluster, _ = timed_cluster(row(gpu="GB300", n_gpus=72, nodes=None))
    assert cluster.gpus_per_node == 72
    assert cluster.gpu.peak_flops["fp8"] == 5000e12


@pytest.mark.parametrize(
    ("said", "gigabits"),
    [
        ("1600 Gbps RoCE node-node", 200),
        ("NVLink in node, 400Gb/s RDMA", 400),
        ("100 Gbit/s", 100),
        ("RoCE", 400),
    ],
)
def test_a_stated_network_is_taken_for_one_gpu(said: str, gigabits: float) -> None:
    cluster, _ = timed_cluster(row(interconnect=said))
    assert cluster.inter_node_link.bandwidth_bytes_per_second == pytest.approx(gigabits * 1e9 / 8)


@given(st.lists(st.floats(0.1, 1e6), min_size=5, max_size=30))
def test_ranks_agree_with_themselves_and_not_with_their_mirror(values: list[float]) -> None:
    if len(set(values)) > 1:
        assert spearman(values, values) == pytest.approx(1)
        assert spearman(values, [-value for value in values]) == pytest.approx(-1)
        # Only the order counts.
        assert spearman(values, [value**3 for value in values]) == pytest.approx(1)
    else:
        assert spearman(values, values) is None


def test_spearman_is_the_textbook_one() -> None:
    # 1 - 6 x sum(d^2) / (n (n^2 - 1)), with d = (0, 1, -1, 0, 0).
    assert spearman([1, 2, 3, 4, 5], [1, 3, 2, 4, 5]) == pytest.approx(0.9)


def test_each_kind_writes_its_own_part_of_the_document(tmp_path: Path) -> None:
    path = tmp_path / "accuracy.md"
    put("memory", "# Memory\n\nlast\n", path)
    put("time", f"{HEADING}\n\none\n", path)
    put("memory", "# Memory\n\nother\n", path)
    assert parts(path.read_text(encoding="utf-8")) == {
        "memory": "# Memory\n\nother\n",
        "time": f"{HEADING}\n\none\n",
    }
    assert path.read_text(encoding="utf-8") == f"# Memory\n\nother\n\n{HEADING}\n\none\n"


def test_the_command_scores_any_file_and_ends_with_the_closing_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row()) + "\n" + json.dumps(row(id="2", gpu="abacus")) + "\nno json\n")
    assert main(["--kind", "time", "--rows", str(path)]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1].startswith(
        "overall time: 1 sources, 1 of 2 rows, median of source medians "
    )
    assert "line 3" in printed.err


def test_a_gpu_that_was_never_calibrated_is_reported_apart() -> None:
    old = row(id="old", gpu="V100-SXM-32GB", precision="fp16 mixed", source="other")
    lines = time_report(score_time([row(), old])).splitlines()
    assert lines[-1].startswith("overall time: 1 sources, 1 of 1 rows")
    assert lines[-5].startswith("with them: 2 sources, 2 of 2 rows")
    assert lines[-7].startswith(
        "never calibrated, apart from the last line: v100-sxm-32gb, 1 sources, 1 rows"
    )


def test_nanotron_is_no_framework_of_ours_and_apart() -> None:
    rows = [one for one in read(time_files()) if str(one.get("id")) in ("nanotron-0008", "torchtitan-0001")]
    lines = time_report(score_time(rows)).splitlines()
    assert lines[-1].startswith("overall time: 1 sources, 1 of 1 rows")
    assert lines[-7].startswith("never calibrated, apart from the last line: nanotron, 1 sources, 1 rows")


def test_the_rows_of_the_project_are_those_of_the_wider_collection() -> None:
    if not SHARED.is_file():
        pytest.skip("the wider collection of measured rows is not here: run this beside ../shared/data")
    own = configurations(read(path for path in time_files() if path != SHARED))
    both = configurations(read(time_files()))
    assert [one.measured for one in own] == [one.measured for one in both]


def test_fitting_looks_at_calibration_rows_only_and_puts_constants_back() -> None:
    rows = calibration_rows()
    assert rows
    assert all(one.mapped.row["role"] == "calibration" for one in rows)
    assert not [one for one in rows if one.mapped.framework == "nanotron"]
    chosen = [one for one in constants() if str(one) in ("matrices.hopper.share", "matrices.ampere.share")]
    before = {one: one.value for one in constants()}
    some = rows[::20]
    with restored():
        for one in chosen:
            entries("efficiency")[one.table][one.name][one.key] = 0.4
        far = loss(some)
        found = fit(some, chosen, rounds=1)
        for one, value in found.items():
            entries("efficiency")[one.table][one.name][one.key] = value
        assert loss(some) < far
    assert {one: one.value for one in constants()} == before


def test_nanotron_deals_layers_by_cost_with_the_head_among_them() -> None:
    """1.34B: its head costs as much as four of its sixteen layers."""
    rows = [one for one in read(time_files()) if str(one.get("id")) == "nanotron-0008"]
    found = timed(rows[0]).plan
    assert found.stage_layers == (10, 6)
    deeper = replace(
        found, layout=replace(found.layout, pp=4), cluster=replace(found.cluster, gpus_per_node=4)
    )
    assert deeper.stage_layers == (5, 5, 5, 1)
    assert sum(deeper.stage_layers) == found.architecture.num_hidden_layers


def test_what_was_calibrated_here_says_nothing_of_others_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, "/calibrated/here")
    with uncalibrated():
        assert not [*Path(os.environ[FOLDER_VARIABLE]).iterdir()]
    assert os.environ[FOLDER_VARIABLE] == "/calibrated/here"
    monkeypatch.delenv(FOLDER_VARIABLE)
    with uncalibrated():
        assert FOLDER_VARIABLE in os.environ
    assert FOLDER_VARIABLE not in os.environ


def test_the_fit_says_what_it_found_and_on_how_many_rows(capsys: pytest.CaptureFixture[str]) -> None:
    fitting.main(["--rounds", "1", "--only", "matrices.ampere.share"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("1")
    assert [line for line in printed if line.startswith("matrices.ampere.share = ")]
    assert printed[-1].startswith("loss ")


def test_what_ran_beside_a_plan_is_told_from_what_the_product_says() -> None:
    """AutoGPTQ unpacks in plain operations; DeepEP sends a token to a node once, whatever experts it has."""
    wanted = {"qwen-0066": 1, "mbskill-0022": -1, "mbskill-0005": 0, "torchtitan-0001": 0}
    rows = [one for one in read(time_files()) if str(one.get("id")) in wanted]
    score = score_time(rows)
    assert len(score.scored) == len(wanted)
    for one in score.scored:
        sign = wanted[str(one.mapped.row["id"])]
        assert (one.beside > 0) - (one.beside < 0) == sign
        assert one.by_product.seconds == one.report.seconds
        assert one.seconds > 0
        # What a dispatcher saves is some of the expert parallelism's time.
        assert one.beside >= -one.report.parts["expert_parallel"]
