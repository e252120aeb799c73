"""Tests of the summary, of diff and of the comparison with a plan, on traces with known answers."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_events import (
    Events,
    all_reduce,
    annotation,
    copy,
    cpu_events,
    gpu_events,
    kernel,
    launch,
    load_ranks,
    operator,
    step,
)

import shardscope as ss
from shardscope.timing.report import format_seconds
from shardscope.trace import Trace
from shardscope.trace.summary.suggestions import suggest_change


def load(folder: Path, ranks: dict[int, Events]) -> Trace:
    """Load ranks whose events are in microseconds here, because texts have no shorter unit."""
    for event in [event for events in ranks.values() for event in events]:
        event["ts"], event["dur"] = 1000 * event["ts"], 1000 * event["dur"]
    return load_ranks(folder, ranks)


def to_us(seconds: float) -> int:
    return round(seconds * 1e6)


ARGS = {
    "Collective name": "allreduce",
    "In msg nelems": 2**20,
    "Out msg nelems": 2**20,
    "Group size": 2,
    "dtype": "BFloat16",
    "Process Group Name": "1",
    "Process Group Ranks": "[0, 1]",
}


def make_step(number: int, start: int, gemm: int = 500, exposed: int = 200, idle: int = 100) -> Events:
    """Return a step: a matmul, an exposed all-reduce, and a gap until the next launch."""
    correlation = 10 * number
    end = start + gemm + exposed + idle
    return [
        step(number, start, end),
        launch(start, start + 1, correlation),
        kernel(start, start + gemm, "ampere_bf16_s16816gemm_bf16_128x128", correlation=correlation),
        launch(start + 2, start + 3, correlation + 1),
        all_reduce(start + gemm, start + gemm + exposed, correlation=correlation + 1, **ARGS),
    ]


def make_run(num_steps: int = 6, num_ranks: int = 2) -> dict[int, Events]:
    return {
        rank: [event for number in range(num_steps) for event in make_step(number, 800 * number)]
        for rank in range(num_ranks)
    }


PLAN = ss.Plan(
    ss.Architecture.of_size("1.3b"),
    ss.Cluster.parse("2xh100-sxm-80gb"),
    ss.Recipe(global_batch_size=16, recompute="full"),
    ss.Layout.megatron(tp=2),
)


def test_first_sentences_describe_the_recording_and_its_shares(tmp_path: Path) -> None:
    summary = load(tmp_path, make_run()).summary()
    size, shares, *_ = summary.sentences
    assert size == "2 ranks, 6 steps of 800 µs; 60 slices in 4.80 ms."
    assert shares == "GPU time of a step: 62 % compute, 25 % exposed communication, 12 % idle."


def test_causes_have_numbers_and_an_interval(tmp_path: Path) -> None:
    summary = load(tmp_path, make_run()).summary()
    exposed = next(finding for finding in summary.findings if finding.text.startswith("Exposed"))
    assert (
        "Exposed all-reduce: 200 µs (25 %) of a step, in 1 call of 2 MiB on average; 0 % of" in exposed.text
    )
    assert (exposed.rank, exposed.track, exposed.start_seconds) == (0, "stream 20", pytest.approx(500e-6))
    assert exposed.end_seconds == pytest.approx(700e-6)
    idle = next(finding for finding in summary.findings if "host-bound" in finding.text)
    # The last step ends with a gap, too: no work follows, for which nothing was queued either.
    assert "The GPU idles 100 µs (12 %) of a step" in idle.text and "gap is 100 µs on rank 0" in idle.text
    # Most costly first.
    texts = [finding.text for finding in summary.findings]
    assert texts.index(exposed.text) < texts.index(idle.text)
    assert any(text.startswith("Stragglers: none") for text in texts)


def make_uneven_run() -> dict[int, Events]:
    """Two ranks, whose first step takes 1000 µs: rank 1 computes for 300 µs and then waits for rank 0."""
    return {
        rank: [
            *make_step(0, 0, gemm=700 if rank == 0 else 300, exposed=200 if rank == 0 else 600),
            *make_step(1, 1000),
        ]
        for rank in range(2)
    }


def test_numbers_of_one_thing_are_equal_and_differing_ranks_are_named(tmp_path: Path) -> None:
    """A step's seconds are the slowest rank's everywhere; what ranks have on average has its range."""
    ranks = make_uneven_run()
    # Rank 1 begins late: its steps are shorter.
    ranks[1] = [event for event in ranks[1] if not event["name"].startswith("Profiler")]
    ranks[1] += [step(0, 100, 1000), step(1, 1000, 1800)]
    trace = load(tmp_path, ranks)
    summary, calls = trace.summary(), trace.collectives()
    (axis,) = {row["axis"] for row in calls}
    now = format_seconds(calls.what_if(axis).seconds)
    assert summary.sentences[0].startswith(f"2 ranks, 2 steps of {now};") and now == "900 µs"
    assert trace.diff(trace).text.startswith(f"A step takes {now} here and {now} in the other trace.")
    (exposed,) = [text for text in summary.sentences if text.startswith("Exposed")]
    assert "300 µs (33 %) of a step (mean of 2 ranks, 200 µs to 400 µs), in 1 call" in exposed
    kernels = next(text for text in summary.sentences if text.startswith("Matmul"))
    assert ", 1 call a step of " in kernels


def test_waiting_is_a_share_of_the_calls_of_which_it_is_known(tmp_path: Path) -> None:
    """Rank 1 stopped after one of four steps: what rank 0 waited for it in the others is unknown."""
    ranks = make_run(num_steps=4)
    ranks[1] = [event for event in ranks[1] if event["ts"] < 0.8]
    # Rank 1 enters its all-reduce 100 of 200 later.
    late = ranks[1][-1]
    late["ts"], late["dur"] = late["ts"] + 0.1, late["dur"] - 0.1
    (text,) = [s for s in load(tmp_path, ranks).summary().sentences if s.startswith("Exposed all-reduce")]
    assert "; 33 % of their time is waiting" in text
    # The last rank to arrive may be one of the two whose files are missing.
    some = load_ranks(tmp_path / "some", ranks, info={"world_size": 4}).summary().sentences
    assert any("; at least 33 % of their time is waiting" in text for text in some)


def test_a_rank_without_marks_has_the_steps_of_the_others(tmp_path: Path) -> None:
    """Its whole recording was taken for one step, and for the step of the job."""
    marked = load(tmp_path / "marked", make_run())
    ranks = make_run()
    ranks[1] = [event for event in ranks[1] if not event["name"].startswith("Profiler")]
    trace = load(tmp_path / "unmarked", ranks)
    assert trace.activity.steps_by_rank == marked.activity.steps_by_rank
    size = marked.summary().sentences[0].partition(";")[0]
    assert trace.summary().sentences[0].startswith(size)


def test_a_comparison_says_what_cannot_be_compared(tmp_path: Path) -> None:
    assert load(tmp_path / "same", make_run()).compare(PLAN).text.startswith("A step is predicted to take ")
    ranks = make_run(num_ranks=4)
    text = load(tmp_path / "ranks", ranks).compare(PLAN).text
    assert "and takes 800 µs" in text
    assert text.endswith("The plan is for 2 ranks, and the trace is of 4.")
    unmarked = {
        rank: [event for event in events if not event["name"].startswith("Profiler")]
        for rank, events in make_run().items()
    }
    text = load(tmp_path / "unmarked", unmarked).compare(PLAN).text
    assert "and the recording, in which no steps are marked, takes 4." in text and "The plan is" not in text


def test_a_late_rank_that_may_be_chance_is_explained(tmp_path: Path) -> None:
    trace = load(tmp_path, make_uneven_run())
    stragglers = trace.stragglers()
    assert not any(row["is_straggler"] for row in stragglers)
    assert "Rank 0 arrives 200 µs a step after the others (22 % of the step), but at 2 collectives" in (
        stragglers.text
    )
    assert "as late by chance in 100 % of recordings" in stragglers.text
    even = load(tmp_path / "even", make_run()).stragglers()
    assert even.text.startswith("Stragglers: none. At 6 collectives no rank is later than the others by 1 %")


def test_summary_of_a_run_suggests_a_changed_plan(tmp_path: Path) -> None:
    trace = load(tmp_path, make_run())
    trace.plan, trace.trains_the_plan = PLAN, True
    summary = trace.summary()
    exposed = next(
        finding for finding in summary.findings if finding.text.startswith("Exposed all-reduce of tp")
    )
    assert exposed.plan is not None and exposed.plan.degrees.tp == 1
    seconds = PLAN.step().seconds
    gain = seconds - exposed.plan.step().seconds
    assert (
        f"Change: tp=1 instead of 2, predicted to gain {format_seconds(gain)} of the predicted "
        f"{format_seconds(seconds)} of a step ({100 * gain / seconds:.0f} %)." in exposed.text
    )
    matmul = next(finding for finding in summary.findings if finding.text.startswith("Matmul kernels"))
    assert matmul.plan is not None and matmul.plan.recipe.recompute == "none"
    assert matmul.gain_seconds == pytest.approx(PLAN.step().seconds - matmul.plan.step().seconds)
    assert "Change: recompute='none' instead of 'full', predicted to gain" in matmul.text
    compared = next(text for text in summary.sentences if text.startswith("A step is predicted to take"))
    busiest = max(trace.breakdown(), key=lambda row: row["compute_seconds"])["rank"]
    assert f"on rank {busiest}," in compared
    assert list(summary.to_frame()["sentence"]) == list(summary.sentences)
    # The user's own function trains another model: the plan still tells axes, but neither parts nor changes.
    trace.trains_the_plan = False
    own = trace.summary()
    assert any("all-reduce of tp" in text for text in own.sentences)
    assert not any("predicted" in text for text in own.sentences)


def test_parameters_that_stay_gathered_help_all_gathers_only() -> None:
    sharded = ss.Plan(
        ss.models["llama-3.2-1b"],
        ss.Cluster.parse("8xl4-24gb"),
        ss.Recipe(precision="bf16-mixed", recompute="full"),
        ss.Layout.fsdp2(shard=8),
    )
    suggestion = suggest_change(sharded, "dp_all_gather")
    assert suggestion is not None and suggestion.text.startswith("keep parameters all-gathered")
    assert suggestion.plan.layout == replace(sharded.layout, reshard_after_forward=False)
    of_gradients = suggest_change(sharded, "dp")
    assert of_gradients is None or "gathered" not in of_gradients.text
    assert suggest_change(suggestion.plan, "dp_all_gather") is None


def test_suggested_plans_fit_and_are_faster() -> None:
    suggestion = suggest_change(PLAN, "tp")
    assert suggestion is not None and suggestion.plan.memory().fits
    assert suggestion.plan.step().seconds == pytest.approx(PLAN.step().seconds - suggestion.gain_seconds)
    assert suggest_change(suggestion.plan, "tp") is None  # nothing is left to halve
    # 8B parameters do not fit one GPU, so that is not suggested.
    large = ss.Plan(ss.models["llama-3.1-8b"], PLAN.cluster, PLAN.recipe, PLAN.layout)
    assert suggest_change(large, "tp") is None
    # Without a published figure there is no prediction, and so no suggestion.
    unknown = ss.Plan(
        PLAN.architecture, ss.Cluster.parse("2xv100-sxm-32gb"), ss.Recipe(precision="bf16"), ss.Layout.ddp()
    )
    assert suggest_change(unknown, "host") is None


def test_slow_steps_are_named_with_the_part_that_grew(tmp_path: Path) -> None:
    events = [event for number in range(6) for event in make_step(number, 800 * number)]
    events += make_step(6, 4800, exposed=900)
    events += [step(7, 6300, 6301)]
    summary = load(tmp_path, {0: events}).summary()
    (slow,) = (finding for finding in summary.findings if finding.text.startswith("Step "))
    assert slow.text == (
        "Step 6 of rank 0 took 1.50 ms, the median is 800 µs: 700 µs more exposed communication."
    )


def test_a_step_that_is_slow_on_several_ranks_has_one_sentence_and_many_are_counted(tmp_path: Path) -> None:
    starts = [2000 * number for number in range(17)]
    for number in (3, 6, 9, 12, 14):
        starts[number + 1 :] = [start + 1000 + number for start in starts[number + 1 :]]
    events = [step(number, a, b) for number, (a, b) in enumerate(pairwise(starts))]
    events += [kernel(start, start + 500) for start in starts[:-1]]
    trace = load(tmp_path, {rank: [dict(event) for event in events] for rank in range(3)})
    texts = trace.summary().sentences
    assert sum(text.startswith("Step ") for text in texts) == 3
    assert all("2 other ranks" in text for text in texts if text.startswith("Step "))
    assert any(text.startswith("2 more steps") for text in texts)


def test_without_marks_of_steps_figures_are_those_of_the_recording(tmp_path: Path) -> None:
    ranks = {
        rank: [event for event in events if event["cat"] != "user_annotation"]
        for rank, events in make_uneven_run().items()
    }
    trace = load(tmp_path, ranks)
    calls = trace.collectives()
    texts = [*trace.summary().sentences, calls.what_if("").text, trace.diff(trace).text]
    assert not any("a step" in text or "the step" in text for text in texts)
    assert any("2 calls of" in text for text in texts)


def test_ranks_with_different_numbers_of_steps_have_the_mean_of_a_step(tmp_path: Path) -> None:
    """Rank 1's profiler stopped two steps earlier: the figures of a step are the same."""
    ranks = {0: make_run(num_steps=6)[0], 1: make_run(num_steps=4)[1]}
    trace = load(tmp_path, ranks)
    (row,) = trace.collectives().sum_by_axis()
    assert (row["num_calls"], to_us(row["seconds"])) == (pytest.approx(1), 200)
    sentences = trace.summary().sentences
    assert sentences[0].startswith("2 ranks, 4 to 6 steps of 800 µs;")
    (matmul,) = (text for text in sentences if text.startswith("Matmul"))
    assert "500 µs (62 %) of a step" in matmul and ", 1 call a step of 500 µs each" in matmul


def test_work_outside_of_marked_steps_is_no_work_of_a_step(tmp_path: Path) -> None:
    """A recording begins and ends in the middle of a step, of which the profiler writes no mark."""
    ranks = make_run(num_steps=4)
    for events in ranks.values():
        events[:] = [event for event in events if event["name"] not in ("ProfilerStep#0", "ProfilerStep#3")]
    trace = load(tmp_path, ranks)
    sentences = trace.summary().sentences
    assert any("Exposed all-reduce: 200 µs (25 %) of a step, in 1 call" in text for text in sentences)
    assert any("500 µs (62 %) of a step" in text and ", 1 call a step" in text for text in sentences)
    assert any("The GPU idles 100 µs (12 %) of a step" in text for text in sentences)
    (axis,) = {row["axis"] for row in trace.collectives()}
    assert to_us(trace.collectives().what_if(axis).changed_seconds) == 600
    assert len(trace.collectives()) == 8


def test_time_between_operators_counts_without_marks_of_steps(tmp_path: Path) -> None:
    trace = load(tmp_path, {0: [operator(0, 200), operator(800, 1000)]})
    (cause,) = [row for row in trace.idle() if row["seconds"]]
    assert (cause["cause"], to_us(cause["seconds"])) == ("host-bound", 600)
    assert any("600 µs (60 %) of the recording" in text for text in trace.summary().sentences)


def test_time_in_the_request_of_a_collective_is_not_all_pythons(tmp_path: Path) -> None:
    """A thread that is 450 of 1,000 in ``c10d::allreduce_`` before gloo begins, and 250 in Python."""
    events = [
        step(0, 0, 1000),
        operator(0, 100),
        operator(200, 700, "c10d::allreduce_"),
        annotation(650, 750, "gloo:all_reduce", 200),
        operator(900, 1000),
    ]
    text = next(s for s in load(tmp_path, {0: events}).summary().sentences if s.startswith("Between"))
    assert "700 µs (70 %)" in text and "450 µs of it in operators of c10d" in text


def test_kernels_of_collectives_without_a_name_are_not_compute(tmp_path: Path) -> None:
    """RCCL has one kernel for all collectives, and NCCL's SendRecv does all-to-alls, too."""
    generic, exchange = "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_SendRecv"
    events = [
        step(0, 0, 1000),
        kernel(0, 100, "Cijk_Ailk_Bljk_BBS_BH_MT128x128x32"),
        kernel(100, 500, generic, 20, **{**ARGS, "Collective name": "_allgather_base"}),
        kernel(500, 700, generic, 20),
        kernel(700, 900, exchange, 20, **{**ARGS, "Collective name": "all_to_allv"}),
    ]
    trace = load(tmp_path, {0: events})
    kinds = {(row["kind"], to_us(row["total_seconds"])) for row in trace.kernels()}
    assert kinds == {("matmul", 100), ("all_gather", 400), ("communication", 200), ("all_to_all", 200)}
    assert {row["kind"] for row in trace.collectives()} == {"all_gather", "communication", "all_to_all"}
    assert "Matmul kernels take most compute" in str(trace.summary())


def test_the_costliest_kernel_has_its_class_and_an_ellipsis(tmp_path: Path) -> None:
    long = f"void split_embedding_backward<{', '.join(['float'] * 20)}>"
    small = [kernel(400 + 50 * n, 450 + 50 * n, f"volta_sgemm_{n}_nt") for n in range(10)]
    text = str(load(tmp_path, {0: [step(0, 0, 1000), kernel(0, 400, long), *small]}).summary())
    assert "take most compute, 500 µs (50 %) of a step; the costliest is volta_sgemm_0_nt, 1 call" in text
    assert f"The costliest of all kernels is {long[:59]}… (embedding), 400 µs (40 %) of a step." in text
    assert "volta_sgemm_0_nt: 50.0 µs in 1 call\n" in text


def test_data_loading_and_copies_have_sentences(tmp_path: Path) -> None:
    events = [
        step(0, 0, 1000),
        annotation(0, 600, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"),
        copy(600, 700, bytes=1_000_000),
        launch(690, 695, 1),
        kernel(700, 1000, "volta_sgemm_128x32_nt", correlation=1),
    ]
    text = str(load(tmp_path, {0: events}).summary())
    assert "The GPU idles 600 µs (60 %) of a step because the data loader has no batch yet" in text
    assert (
        "Exposed copies: 100 µs (10 %) of a step; the costliest is Memcpy HtoD (Pinned -> Device) at 10 GB/s"
        in text
    )
    assert "None of the time of matmuls, convolutions and attention is on tensor cores" in text


def test_a_copy_inside_a_fast_gpu_has_its_rate_without_an_exponent(tmp_path: Path) -> None:
    events = [step(0, 0, 1000), kernel(0, 500), copy(500, 1000, bytes=1_250_000_000)]
    assert "at 2,500 GB/s" in str(load(tmp_path, {0: events}).summary())


def test_idle_time_of_one_rank_has_the_range_of_ranks(tmp_path: Path) -> None:
    """The mean alone, 30 %, was that of no rank: one waited for its data, and the other did not."""
    ranks: dict[int, Events] = {}
    for rank in range(2):
        ranks[rank] = [step(0, 0, 1000), kernel(600 * rank, 1000)]
        ranks[rank] += [annotation(0, 600, "enumerate(DataLoader)#next")] if rank else []
    text = str(load(tmp_path, ranks).summary())
    assert "The GPU idles 300 µs (30 %) of a step (mean of 2 ranks, 0 s to 600 µs) because the data" in text


def test_kernels_that_copy_are_compute_and_copy_engines_are_not(tmp_path: Path) -> None:
    events = [
        step(0, 0, 1000),
        kernel(0, 400, "void at::native::CatArrayBatchedCopy<float>"),
        kernel(400, 500, "ampere_gemm"),
        copy(500, 900),
    ]
    text = str(load(tmp_path, {0: events}).summary())
    assert "GPU time of a step: 50 % compute, 40 % copies" in text
    assert "Copy kernels take most compute, 400 µs (40 %) of a step; the costliest is void at::nat" in text


def test_exposed_copies_are_those_of_copy_engines(tmp_path: Path) -> None:
    shapes = {"Input Dims": [[1000], [1000]], "Input type": ["float", "float"]}
    events = [
        step(0, 0, 1000),
        operator(0, 5, "aten::copy_", **shapes),
        launch(1, 3, 1),
        kernel(10, 600, "void at::native::direct_copy_kernel_cuda", correlation=1),
        copy(600, 900, bytes=300_000),
    ]
    text = str(load(tmp_path, {0: events}).summary())
    assert "Exposed copies: 300 µs (30 %) of a step; the costliest is Memcpy HtoD" in text


def test_a_rank_with_several_gpus_has_the_share_of_each(tmp_path: Path) -> None:
    def on_gpu(gpu: int, start: int, end: int) -> dict[str, object]:
        return kernel(start, end, "ampere_gemm") | {"pid": gpu}

    in_turn = [step(0, 0, 1000), *(on_gpu(gpu, 200 * gpu, 200 * gpu + 200) for gpu in range(4))]
    summary = load(tmp_path / "in_turn", {0: in_turn}).summary()
    # Pages have the first two sentences as their heading.
    assert summary.sentences[1] == (
        "GPU time of a step: 80 % compute, 20 % idle. Rank 0 has work on 4 GPUs: these shares count time in "
        "which any of them works; each alone is busy 20 % of a step."
    )
    assert "at a time" not in str(summary)
    together = [step(0, 0, 1000), on_gpu(0, 0, 500), on_gpu(1, 0, 400)]
    text = str(load(tmp_path / "together", {0: together}).summary())
    assert "busy 40 to 50 % of a step" in text
    assert "take most compute, 900 µs (90 %) of a step, added up over kernels that run at a time; the" in text


def test_devices_without_tensor_cores_get_no_sentence_about_them(tmp_path: Path) -> None:
    events = [step(0, 0, 1000), kernel(0, 1000, "Cijk_Ailk_Bljk_BBS_BH_MT128x128x32")]
    assert "tensor cores" not in str(load(tmp_path, {0: events}).summary())


@given(st.lists(st.one_of(gpu_events(), cpu_events()), min_size=1, max_size=2))
def test_any_trace_has_a_summary(ranks: list[Events]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trace = load(Path(folder), dict(enumerate(ranks)))
    summary = trace.summary()
    assert len(summary.sentences) >= 2 and "nan" not in str(summary)
    assert "<li>" in summary._repr_html_()
    for finding in summary.findings:
        if finding.start_seconds is not None:
            assert 0 <= finding.start_seconds <= finding.end_seconds <= trace.duration_seconds + 1e-9


def test_diff_is_per_step_and_rank(tmp_path: Path) -> None:
    """The other trace has twice the steps, one rank, and a matmul of 700 instead of 500."""
    here = load(tmp_path / "here", make_run(num_steps=5))
    slower = [event for number in range(10) for event in make_step(number, 1000 * number, gemm=700)]
    diff = here.diff(load(tmp_path / "there", {0: slower}))
    with pytest.raises(ValueError, match=r"diff\.other is .*ss\.Trace\.load\(path\)"):
        here.diff("there")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"compare\.plan is "):
        here.compare("there")  # type: ignore[arg-type]
    assert list(diff.to_frame().columns) == ["name", "kind", "seconds", "other_seconds", "difference_seconds"]
    first = diff[0]
    assert (first["name"], first["kind"]) == ("ampere_bf16_s16816gemm_bf16_128x128", "matmul")
    assert [to_us(first[key]) for key in ("seconds", "other_seconds", "difference_seconds")] == [
        500,
        700,
        200,
    ]
    by_kind = {row["kind"]: row for row in diff}
    assert to_us(by_kind["all_reduce"]["difference_seconds"]) == 0
    assert "gemm" in diff.text and "200 µs more" in diff.text


def test_kernels_of_other_hardware_are_compared_by_operator(tmp_path: Path) -> None:
    def make(name: str, length: int) -> Events:
        shape = [step(0, 0, 1000), operator(0, 50, "aten::mm"), launch(10, 20, 1)]
        return [*shape, kernel(100, 100 + length, name, correlation=1)]

    here = load(tmp_path / "v100", {0: make("volta_sgemm_128x32_nt", 800)})
    diff = here.diff(load(tmp_path / "a100", {0: make("ampere_sgemm_128x32_nt", 300)}))
    (row,) = (row for row in diff if row["kind"] == "matmul")
    assert (row["name"], to_us(row["seconds"]), to_us(row["other_seconds"])) == ("aten::mm", 800, 300)


@given(st.one_of(gpu_events(), cpu_events()))
def test_a_trace_does_not_differ_from_itself(events: Events) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trace = load(Path(folder), {0: events})
    diff = trace.diff(trace)
    assert all(row["difference_seconds"] == 0 for row in diff) and "No kernel" in diff.text


def test_parts_of_a_plan_beside_their_measurement(tmp_path: Path) -> None:
    """Matmul 500, attention 100, all-reduce of tp 200, optimizer 50, a copy of 30, idle 120 of 1,000."""
    events = [
        step(0, 0, 1000),
        kernel(0, 500, "ampere_bf16_s16816gemm"),
        kernel(500, 600, "void flash_fwd_kernel<Flash_fwd_kernel_traits>"),
        all_reduce(600, 800, **ARGS),
        kernel(800, 850, "void multi_tensor_apply_kernel<FusedAdamMathFunctor>"),
        copy(850, 880),
    ]
    result = load(tmp_path, {0: events, 1: [dict(event) for event in events]}).compare(PLAN)
    assert list(result.to_frame().columns) == ["part", "predicted_seconds", "measured_seconds"]
    measured = {row["part"]: row["measured_seconds"] for row in result}
    known = {part: to_us(seconds) for part, seconds in measured.items() if seconds}
    assert known == {
        "matrices": 500,
        "attention": 100,
        "tensor_parallel": 200,
        "optimizer": 50,
        "offload": 30,
        "idle": 120,
        "step": 1000,
    }
    predicted = PLAN.step()
    assert {row["part"]: row["predicted_seconds"] for row in result}["matrices"] == predicted.parts[
        "matrices"
    ]
    assert result[-1]["predicted_seconds"] == predicted.seconds
    assert measured["recomputation"] is None
    assert "Largest difference: matmuls, 500 µs where " in result.text
    # Rows keep the names of StepReport.parts; what is shown has the names of the charts.
    for shown in (repr(result), result._repr_html_(), predicted.to_html()):
        assert "matmuls" in shown and "matrices" not in shown


def test_a_bubble_that_is_predicted_is_no_difference_of_the_transfers(tmp_path: Path) -> None:
    """A stage that waits in a receive for as long as the plan's bubble does what the plan predicts."""
    recipe = replace(PLAN.recipe, recompute="none", global_batch_size=4)
    plan = replace(PLAN, recipe=recipe, layout=ss.Layout.megatron(pp=2, tp=1))
    parts = {part: max(round(1e6 * seconds), 0) for part, seconds in plan.step().parts.items()}
    extra = parts["bubble"] // 2
    assert extra > max(parts["pipeline_transfers"], parts["gradients"])
    names = {
        "matrices": "ampere_bf16_s16816gemm",
        "attention": "void flash_fwd_kernel<Flash_fwd_kernel_traits>",
        "optimizer": "void multi_tensor_apply_kernel<FusedAdamMathFunctor>",
        "elementwise": "vectorized_elementwise_kernel",
        "loss": "nll_loss_forward_reduce_cuda_kernel_2d",
    }
    events: Events = []
    now = 0
    for part, name in names.items():
        events.append(kernel(now, now + parts[part] + extra * (part == "matrices"), name))
        now += parts[part] + extra * (part == "matrices")
    stages = {**ARGS, "Collective name": "recv", "Process Group Description": "PIPELINE_MODEL_PARALLEL_GROUP"}
    wait = parts["bubble"] + parts["pipeline_transfers"]
    events.append(kernel(now, now + wait, "ncclDevKernel_SendRecv", 20, **stages))
    events.append(step(0, 0, now + wait))
    text = load(tmp_path, {0: events}).compare(plan).text
    assert "Largest difference: matmuls, " in text


def test_idle_time_that_is_less_than_half_of_the_difference_is_not_most_of_it(tmp_path: Path) -> None:
    events = [step(0, 0, 10_000_000), kernel(0, 4_000_000, "ampere_bf16_s16816gemm")]
    events.append(all_reduce(4_000_000, 5_900_000, **ARGS))
    text = load(tmp_path, {0: events, 1: [dict(event) for event in events]}).compare(PLAN).text
    assert "idle, which a plan does not predict" in text and "Most" not in text


def test_a_plan_is_compared_with_the_rank_that_computes_most_in_a_step(tmp_path: Path) -> None:
    """Rank 0 recorded four short steps, and rank 1 two long ones."""
    ranks = {0: make_run(num_steps=4, num_ranks=1)[0], 1: []}
    for number in range(2):
        ranks[1] += make_step(number, 800 * number, gemm=600, exposed=150, idle=50)
    comparison = load(tmp_path, ranks).compare(PLAN)
    assert "on rank 1, which computes most" in comparison.text
    assert [to_us(row["measured_seconds"] or 0) for row in comparison if row["part"] == "matrices"] == [600]


def test_kernels_inside_of_a_loss_are_the_loss(tmp_path: Path) -> None:
    """Megatron's loss consists of pointwise kernels; a fused loss has the output layer's matmul inside."""
    events = [
        step(0, 0, 1000),
        operator(0, 100, "_VocabParallelCrossEntropy"),
        launch(10, 20, 1),
        launch(30, 40, 2),
        kernel(100, 400, "vectorized_elementwise_kernel", correlation=1),
        kernel(400, 900, "ampere_bf16_s16816gemm", correlation=2),
    ]
    measured = {row["part"]: row["measured_seconds"] for row in load(tmp_path, {0: events}).compare(PLAN)}
    assert [to_us(measured[part] or 0) for part in ("loss", "matrices", "elementwise")] == [300, 500, 0]


@given(gpu_events())
def test_measured_parts_add_up_to_the_step(events: Events) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trace = load(Path(folder), {0: events})
    *parts, total = trace.compare(PLAN)
    assert sum(to_us(row["measured_seconds"] or 0) for row in parts) == pytest.approx(
        to_us(total["measured_seconds"] or 0), abs=len(parts)
    )
    assert all((row["measured_seconds"] or 0) >= 0 for row in parts)


def test_trace_without_a_run_requires_the_plan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Fix: trace.compare\(plan\)"):
        load(tmp_path, make_run()).compare()


def test_a_run_folder_brings_its_plan(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "traces"
    load(folder, make_run())
    record = '{"trains_the_plan": true, "plan": ' + PLAN.to_json() + "}"
    (tmp_path / "run" / "run.json").write_text(record)
    for source in (tmp_path / "run", folder, folder / "rank-0.json"):
        trace = Trace.load(source)
        assert trace.plan is not None and trace.plan.degrees.tp == 2 and trace.trains_the_plan
    (tmp_path / "run" / "run.json").write_text('{"plan": {"architecture": 3}}')
    assert Trace.load(folder).plan is None


def test_a_gpu_rank_without_its_gpu_is_not_called_a_cpu_rank(tmp_path: Path) -> None:
    """Recorded with ProfilerActivity.CPU only: launches, and none of what they launched."""
    text = load(tmp_path, {0: [step(0, 0, 100), operator(0, 90), launch(10, 20, 1)]}).summary().sentences[1]
    assert text.startswith(
        "The GPUs' work was not recorded; time of the CPU threads that launch it, of a step:"
    )


COLLECTIVE_OF_MANY = {"Collective name": "allreduce", "Process Group Name": "x", "Group size": "many"}
JUNK_GROUPS = {"pg_config": [1, {"pg_name": 3, "ranks": "all"}, {"ranks": [None]}]}
ODD_RECORDINGS: dict[str, tuple[dict[int, Events], dict[str, object]]] = {
    "one rank is empty": ({0: [], 1: [kernel(0, 10), all_reduce(2, 20)]}, {}),
    "steps without work": ({0: [step(0, 0, 10), step(1, 10, 20)]}, {}),
    "nothing has a length": ({0: [kernel(5, 5), all_reduce(5, 5), operator(0, 0)]}, {}),
    "groups are junk": ({0: [all_reduce(0, 10, **COLLECTIVE_OF_MANY)]}, {"info": JUNK_GROUPS}),
    "a collective's name is a number": ({0: [all_reduce(0, 10, **{"Collective name": 5})]}, {}),
    "a step has a number of thirty digits": ({0: [step(10**30, 0, 10), kernel(0, 5)]}, {}),
    "devices are junk": ({0: [kernel(0, 10)]}, {"deviceProperties": [{"id": "x"}, 3, {"id": 0, "name": 5}]}),
    "one correlation id for all": (
        {
            0: [launch(i, i + 1, 1) for i in range(9)]
            + [kernel(30 + i, 31 + i, correlation=1) for i in range(9)]
        },
        {},
    ),
    "slices are nested 900 deep": ({0: [operator(i, 2000 - i, "aten::x") for i in range(900)]}, {}),
    "a rank of 128 that the head does not have": ({77: [kernel(0, 10), all_reduce(10, 20, **ARGS)]}, {}),
}


@pytest.mark.parametrize("what", ODD_RECORDINGS)
def test_odd_recordings_have_every_table(tmp_path: Path, what: str) -> None:
    ranks, document = ODD_RECORDINGS[what]
    trace = load_ranks(tmp_path, ranks, **document)
    for name in (
        "breakdown", "steps", "overlap", "idle", "collectives", "stragglers", "kernels", "critical_path",
        "launches", "memory", "modules", "summary",
    ):  # fmt: skip
        frame = getattr(trace, name)().to_frame()
        assert len(frame.columns) > 1, name
    assert trace.diff(trace).to_frame()["difference_seconds"].abs().sum() == 0


def test_two_hundred_ranks_have_one_collective(tmp_path: Path) -> None:
    """Every rank arrives a nanosecond after the one before: the last one waits for no other."""
    args = ARGS | {"Group size": 200, "Process Group Ranks": str(list(range(200)))}
    ranks = {rank: [kernel(5, 50 + rank), all_reduce(50 + rank, 300, **args)] for rank in range(200)}
    trace = load_ranks(tmp_path, ranks)
    rows = trace.collectives()
    assert len({row["call"] for row in rows}) == 1
    assert [round(1e9 * (row["skew_seconds"] or 0)) for row in rows] == list(range(199, -1, -1))
    assert "200 ranks" in trace.summary().sentences[0]
