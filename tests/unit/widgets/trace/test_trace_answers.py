"""Tests of the Trace tab without a browser: opening, sentences, tables, and messages about missing
records."""

from __future__ import annotations

import gc
import gzip
import json
import math
import pickle
import re
import shutil
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from calibrations import make_calibration
from ipywidgets.widgets.widget import _instances
from tests.requirements import few
from tests.unit.trace.trace_events import all_reduce, kernel, launch, load_ranks, operator, step
from written_runs import write_run

import shardscope as ss
from shardscope.records.folder import RunFolder
from shardscope.timing.calibration.store import store_calibration
from shardscope.trace import Trace
from shardscope.trace.summary.summary import Sentence
from shardscope_widgets.kit.chart import Chart
from shardscope_widgets.kit.saved.static_picture import draw_picture
from shardscope_widgets.run.recording_panel import OPTIONS, TITLE
from shardscope_widgets.trace import TracePage, TraceView
from shardscope_widgets.trace.analyses import (
    describe_collectives,
    describe_critical_path,
    describe_idle,
    describe_modules,
    describe_steps,
    describe_stragglers,
)
from shardscope_widgets.trace.breakdown_figure import PARTS
from shardscope_widgets.trace.comparison_figure import PlanAgainstTrace
from shardscope_widgets.trace.difference import OtherRuns
from shardscope_widgets.trace.findings_list import FindingsList
from shardscope_widgets.trace.kernels_page import describe_kernels
from shardscope_widgets.trace.memory_figure import describe_memory
from shardscope_widgets.trace.page import TraceAnswers
from shardscope_widgets.trace.run_names import describe_differences

FIXTURES = Path(__file__).parents[3] / "fixtures"
RUNS = FIXTURES / "traces_of_runs"


def write_traced_run(parent: Path, framework: str = "fsdp2") -> ss.Run:
    """Write a finished run with a stored trace of its framework."""
    source = RUNS / framework
    plan = ss.Plan.from_json(json.dumps(json.loads((source / "run.json").read_text())["plan"]))
    folder = write_run("traced", parent=parent, plan=plan)
    shutil.copytree(source / "traces", folder / "traces", dirs_exist_ok=True)
    return ss.Run.attach(folder)


def wait_for(is_done: Callable[[], Any], seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := is_done():
            return found
        time.sleep(0.01)
    raise AssertionError("waited in vain")


def open_page(run: ss.Run, **options: Any) -> TraceAnswers:
    page = TracePage(240, **options)
    page.show_run(run)
    return wait_for(lambda: isinstance(page.children[0], TraceAnswers) and page.children[0])


def show_tab(answers: TraceAnswers, name: str) -> str:
    """Choose a tab and return its HTML when it is computed."""
    panel = answers.panel
    panel.tabs.value = name
    # The worker's thread shows text and table one after the other, of the earlier tab too.
    wait_for(
        lambda: panel.page is not None and read_panel(answers) == panel.page.text + "".join(panel.page.tables)
    )
    return read_panel(answers)


def read_panel(answers: TraceAnswers) -> str:
    return answers.panel.text.value + answers.panel.table.value


def show_all_tabs(answers: TraceAnswers) -> dict[str, str]:
    """Return tab -> HTML."""
    html = {}
    for name in answers.panel.tabs.names:
        html[name] = show_tab(answers, name)
    return html


def create_answers(path: Path) -> TraceAnswers:
    answers = TraceAnswers(TraceView(Trace.load(path, cache=False)), on_apply=lambda plan: None)
    answers.start()
    return answers


def write_trace(path: Path, events: list[dict[str, Any]]) -> Path:
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    return path


def test_run_is_opened_and_its_sentences_and_rows_move_the_view(tmp_path: Path) -> None:
    answers = open_page(write_traced_run(tmp_path))
    wait_for(lambda: "data-act='show:" in answers.findings.value)
    before = answers.view.viewport_seconds
    act = answers.findings.value.partition("data-act='show:")[2].partition("'")[0]
    answers.findings.press_button(f"show:{act}")
    shown = answers.view.viewport_seconds
    assert shown != before and shown[1] - shown[0] < before[1] - before[0]
    assert "all-gather of dp" in show_tab(answers, "Collectives")
    answers.panel.table.press_button("look:0")
    assert answers.view.viewport_seconds != shown
    for act in ("show:99", "show:x", "look:0"):
        answers.findings.press_button(act)
        assert "Ignored" in answers.findings.error
    answers.close()


@pytest.mark.parametrize("framework", few(["ddp", "fsdp2", "megatron", "zero3"], ["megatron"]))
def test_every_table_of_a_cpu_trace_has_rows_or_a_sentence(tmp_path: Path, framework: str) -> None:
    answers = open_page(write_traced_run(tmp_path, framework))
    html = show_all_tabs(answers)
    assert all(len(text) > 60 and "Traceback" not in text for text in html.values())
    for name in ("Time by rank", "Steps", "Kernels", "Collectives", "Idle", "Critical path"):
        assert "<table" in html[name], name
    assert "ss-error" not in "".join(html.values())
    # What such a trace lacks is a sentence, with what would record it.
    assert "stacks" in html["Modules"] and "<table" not in html["Modules"]
    answers.close()


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ({0: [1, 2], 1: [1, 2]}, "2 steps on each of 2 ranks took"),
        ({0: [1, 2], 1: [1]}, "3 steps on 2 ranks took"),
        ({0: [1]}, "1 step took"),
    ],
)
def test_steps_are_counted_by_rank(tmp_path: Path, numbers: dict[int, list[int]], text: str) -> None:
    ranks = {
        rank: [
            event
            for number in steps
            for event in (
                step(number, 1000 * number, 1000 * number + 900),
                operator(1000 * number, 1000 * number + 9),
            )
        ]
        for rank, steps in numbers.items()
    }
    (sentence,) = describe_steps(load_ranks(tmp_path, ranks)).sentences
    assert sentence.startswith(text)


@pytest.mark.parametrize("ground", [(255, 255, 255), (17, 17, 17)])
def test_bars_of_idle_time_recede_on_light_and_dark_pages(ground: tuple[int, int, int]) -> None:
    """A grey that is faint on white would be the brightest bar of JupyterLab's dark theme."""
    contrasts = {part.title: measure_contrast(part.colour, ground) for part in PARTS}
    work = min(contrasts[title] for title in ("compute", "exposed comm.", "copies"))
    for title in ("host-bound", "waiting", "other idle"):
        assert 1.2 < contrasts[title] < 0.6 * work, title


def measure_contrast(colour: str, ground: tuple[int, int, int]) -> float:
    """Return WCAG's contrast ratio of a bar and the page, which a translucent colour lets through."""
    *channels, alpha = (
        [float(value) for value in re.findall(r"[\d.]+", colour)]
        if colour.startswith("rgba")
        else [*(int(colour[at : at + 2], 16) for at in (1, 3, 5)), 1.0]
    )
    shown = [alpha * value + (1 - alpha) * below for value, below in zip(channels, ground, strict=True)]
    low, high = sorted(
        sum(
            weight * (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4)
            for weight, v in zip((0.2126, 0.7152, 0.0722), (value / 255 for value in values), strict=True)
        )
        for values in (shown, ground)
    )
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("blocks", "is_shown"), [(0.25, True), (2, False)])
def test_kernels_that_leave_multiprocessors_idle_have_a_column(
    tmp_path: Path, blocks: float, is_shown: bool
) -> None:
    events = [kernel(0, 1000, **{"blocks per SM": blocks})]
    (table,) = describe_kernels(load_ranks(tmp_path, {0: events})).tables
    assert ("SMs used" in table) == is_shown and ("25 %" in table) == is_shown


@pytest.mark.parametrize("gpu", ["NVIDIA A100-SXM4-80GB", "a GPU that nobody knows"])
def test_kernels_with_known_flops_are_drawn_under_the_roofline_of_a_known_gpu(
    tmp_path: Path, gpu: str
) -> None:
    shapes = {"Input Dims": [[64, 32], [32, 16]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
    events = [
        operator(10, 90, "aten::mm", **shapes),
        launch(20, 30, 1),
        kernel(1000, 2000, "ampere_bf16_s16816gemm_64x64", correlation=1),
    ]
    page = describe_kernels(load_ranks(tmp_path, {0: events}, deviceProperties=[{"id": 0, "name": gpu}]))
    if "A100" not in gpu:
        assert not page.figures
        return
    (figure,) = page.figures
    roof, point = figure.data
    assert point.x[0] == pytest.approx(math.log10(2 * 64 * 32 * 16 / (2 * (64 * 32 + 32 * 16 + 64 * 16))))
    assert max(roof.y) == pytest.approx(math.log10(312)) and point.y[0] < max(roof.y)
    assert any("100 % of the time of the kernels" in sentence for sentence in page.sentences)


def test_a_trace_is_compared_with_that_of_another_run_in_the_folder(tmp_path: Path) -> None:
    runs = [
        write_traced_run(tmp_path / name, framework) for name, framework in (("a", "fsdp2"), ("b", "ddp"))
    ]
    others = OtherRuns(runs[0].trace(), runs[0])
    assert not others.list_options()
    assert "No other run" in others.describe().text
    beside = runs[0].folder.parent / "other"
    shutil.copytree(runs[1].folder, beside)
    # The list and the comparison say what the other run is, and that it is not of the same work.
    assert list(others.list_options()) == [("other · tiny on 2 CPU ranks, DDP", "other")]
    assert not others.describe().tables
    others.name = "other"
    page = others.describe()
    assert "difference" in page.tables[0] and "the other" in page.tables[0]
    settings, difference = page.sentences
    assert "framework FSDP2 → DDP" in settings and "different models" not in settings
    assert difference == runs[0].trace().diff(runs[1].trace()).text


def test_another_framework_is_named_with_the_degrees_of_both(tmp_path: Path) -> None:
    here = write_traced_run(tmp_path / "here", "fsdp2").trace()
    there = write_traced_run(tmp_path / "there", "megatron").trace()
    here.plan = replace(here.plan, layout=ss.Layout.fsdp2(tp=2))
    assert "framework FSDP2 (tp 2) → Megatron-core (tp 2)" in describe_differences(here, there)


def test_the_title_names_the_run_of_the_trace(tmp_path: Path) -> None:
    """The Studio around it may show another plan, and the trace may be an earlier run's."""
    run = write_traced_run(tmp_path, "ddp")
    answers = open_page(run)
    title = re.sub("<[^>]+>", "", answers.title.value)
    assert re.fullmatch(r"Trace of traced, .*: tiny on 2 CPU ranks with DDP", title)
    answers.close()
    answers = create_answers(RUNS / "ddp" / "traces")
    assert "Trace of <b>ddp</b>: <b>tiny</b>" in answers.title.value
    answers.close()
    answers = create_answers(FIXTURES / "trace_2_ranks")
    assert "Trace of <b>trace_2_ranks</b>: 2 ranks, of no known plan" in answers.title.value
    page = answers.view.to_html(tmp_path / "page.html").read_text()
    assert "<h1>Trace of trace_2_ranks: 2 ranks, " in page
    answers.close()


def test_traces_of_different_models_are_compared_with_a_caution() -> None:
    trace, other = (Trace.load(RUNS / framework) for framework in ("ddp", "fsdp2"))
    assert trace.plan is not None and other.plan is not None
    other.plan = replace(
        other.plan,
        architecture=replace(other.plan.architecture, name="tiny gpt2-xl"),
        cluster=ss.Cluster.parse("1xcpu"),
        layout=ss.Layout.ddp(),
    )
    text = describe_differences(trace, other)
    assert "model tiny → tiny gpt2-xl; 2 CPU ranks → 1 CPU rank." in text
    assert "Times of different models are of different work." in text
    # A name says nothing where both models have it.
    other.plan = replace(trace.plan, architecture=replace(trace.plan.architecture, num_hidden_layers=2))
    first, second = (
        f"tiny of {plan.architecture.num_parameters:,} parameters" for plan in (trace.plan, other.plan)
    )
    assert f"model {first} → {second}." in describe_differences(trace, other)
    other.plan, other.world_size = None, 4
    assert describe_differences(trace, other) == "This trace is of 2 ranks, the other of 4 ranks."


@pytest.mark.parametrize(
    ("machine", "text"),
    [
        ("2xcpu", "for 2 CPU ranks of this machine: choose them under GPUs, press"),
        ("8xh100-sxm-80gb", "for 2 CPU ranks: only ss.calibrate() on such a machine"),
    ],
)
def test_a_plan_without_prediction_names_what_would_measure_it(
    machine: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Time tab has its button for plans of this machine only, whichever plan it shows now."""
    monkeypatch.setattr(ss.Cluster, "detect", lambda: ss.Cluster.parse(machine))
    sentences = PlanAgainstTrace(Trace.load(RUNS / "ddp")).describe().sentences
    assert sentences[0].startswith("No prediction: ") and text in sentences[1]


def test_sums_are_those_of_a_step_and_say_which_rank_decides(tmp_path: Path) -> None:
    """Rank 1 waits for rank 0 in two steps: what the mean rank would gain, the step would not."""
    args = {"Collective name": "allreduce", "Group size": 2, "In msg nelems": 8, "Out msg nelems": 8}
    ranks = {
        rank: [
            event
            for start in (0, 1_000_000)
            for event in (
                step(start, start, start + 1_000_000),
                launch(start, start + 1000, start),
                kernel(start, start + busy, "gemm", correlation=start),
                all_reduce(start + busy, start + 1_000_000, correlation=-1, **args),
            )
        ]
        for rank, busy in ((0, 900_000), (1, 500_000))
    }
    trace = load_ranks(tmp_path, ranks)
    collectives = describe_collectives(trace)
    assert collectives.sentences[0].endswith(
        "a step would take 900 µs instead of 1.00 ms. It is 300 µs of a step on average over ranks, but only "
        "100 µs on rank 0, for which the others wait."
    )
    path = describe_critical_path(trace)
    assert "takes 1.00 ms a step, 2.00 ms of 2 steps," in path.sentences[0]
    for page, column in (
        (path, "times a step"),
        (describe_kernels(trace), "calls a step"),
        (collectives, "calls a step"),
    ):
        assert column in page.tables[0] and "per step, " in page.tables[0]
    (table,) = describe_stragglers(trace).tables
    assert "chance</th>" in table and "100 %" in table


def test_hints_name_inputs_of_the_studio_first() -> None:
    trace = Trace.load(RUNS / "fsdp2" / "traces")
    pages = (describe_memory(trace, None), describe_modules(trace), OtherRuns(trace, None).describe())
    python = ("torch.profiler's profile_memory=True", "torch.profiler's with_stack=True", "trace.diff(")
    inputs = ('"memory"', '"stacks"', '"Record a trace"')
    for page, code, named in zip(pages, python, inputs, strict=True):
        assert page.sentences and not page.tables
        text = " ".join(page.sentences)
        assert named in text.partition(code)[0], "an input, before Python for traces from elsewhere"
    assert {"memory", "stacks"} < set(OPTIONS) and TITLE in " ".join(pages[0].sentences)


def test_units_are_in_headings_and_not_in_cells() -> None:
    trace = Trace.load(RUNS / "fsdp2" / "traces")
    for describe in (describe_kernels, describe_collectives, describe_idle, describe_critical_path):
        page = describe(trace)
        assert page.tables
        assert not re.findall(r"<td>[\d.,]+ (?:µs|ms|s|[KMG]iB|B)</td>", "".join(page.tables))


def test_tables_have_no_column_without_words_and_no_share_of_zero_for_some_time() -> None:
    trace = Trace.load(RUNS / "fsdp2" / "traces")
    assert not any(row["is_straggler"] for row in trace.stragglers())
    (table,) = describe_stragglers(trace).tables
    assert table.count("<th ") == 3
    assert any(0 < row["share"] < 0.0005 for row in trace.idle())
    (table,) = describe_idle(trace).tables
    assert "&lt; 0.1" in table and "0.0 %" not in table.replace("\N{NO-BREAK SPACE}", " ")


def test_trace_of_a_gpu_with_stacks_has_modules_and_no_plan() -> None:
    answers = create_answers(FIXTURES / "trace_with_stacks")
    html = show_all_tabs(answers)
    assert "Sequential_0" in html["Modules"] and "sm90_gemm" in html["Kernels"]
    answers.close()


@pytest.mark.parametrize(
    "events",
    [
        [],
        [{"ph": "X", "cat": "cpu_op", "name": "aten::<b>mm</b>", "pid": 1, "tid": 1, "ts": 1.0, "dur": 0}],
    ],
    ids=["empty", "one slice of no length"],
)
def test_almost_empty_trace_gives_sentences(tmp_path: Path, events: list[dict[str, Any]]) -> None:
    answers = create_answers(write_trace(tmp_path / "rank-0.json.gz", events))
    html = "".join(show_all_tabs(answers).values())
    assert "ss-error" not in html and "<b>mm" not in html
    wait_for(lambda: "1 rank" in answers.findings.value)
    answers.close()


def test_names_from_a_trace_are_escaped(tmp_path: Path) -> None:
    name = "aten::<img src=x onerror=alert(1)>'\""
    events = [
        {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": 10.0 * i, "dur": 5.0}
        for i in range(3)
    ]
    answers = create_answers(write_trace(tmp_path / "rank-0.json.gz", events))
    html = "".join(show_all_tabs(answers).values()) + answers.findings.value
    assert "&lt;img" in html and "<img" not in html
    answers.close()


def test_measured_rates_move_the_prediction_and_can_be_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDSCOPE_DATA_HOME", str(tmp_path / "data"))
    answers = open_page(write_traced_run(tmp_path))
    assert "Measure this machine" in show_tab(answers, "Plan against trace")
    assert answers.panel.rates_button.layout.display == "none"
    store_calibration(make_calibration("2xcpu"))
    changed: list[str] = []
    panel, plan = answers.panel, answers.view.trace.plan
    panel._on_rates = lambda: changed.append("rates")
    show_tab(answers, "Steps")
    before = show_tab(answers, "Plan against trace")
    assert plan is not None and "<table" in before
    wait_for(lambda: panel.rates_button.layout.display == "")
    seconds = plan.step().seconds
    panel.rates_button.click()
    wait_for(lambda: "measured rates move the prediction" in panel.text.value)
    assert plan.step().seconds != seconds and changed == ["rates"]
    (chart,) = [child for child in panel._body.children if isinstance(child, Chart)]
    assert list(chart.data[0].y) == ["before", "predicted", "measured"]
    wait_for(lambda: not panel.rates_button.disabled)
    panel.rates_button.click()
    wait_for(lambda: read_panel(answers) == before)
    assert plan.step().seconds == seconds
    answers.close()


def test_memory_snapshot_of_the_run_is_drawn_and_a_damaged_one_explained(tmp_path: Path) -> None:
    run = write_traced_run(tmp_path)
    frames = [{"filename": "/env/torch/optim/adam.py", "line": 99, "name": "step"}]
    events = [
        {"action": action, "addr": 1, "size": 4 * 2**20, "frames": frames, "stream": 0, "time_us": time_us}
        for action, time_us in (("alloc", 1_000), ("free_completed", 9_000))
    ]
    path = RunFolder(run.folder).memory_snapshot(0)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [events]}))
    answers = open_page(run)
    assert "memory snapshot of rank 0" in show_tab(answers, "Memory")
    wait_for(lambda: any(isinstance(child, Chart) for child in answers.panel._body.children))
    answers.close()
    path.write_bytes(b"no pickle")
    answers = open_page(run)
    assert "rank-0.pickle" in show_tab(answers, "Memory")
    answers.close()


def test_critical_path_is_drawn_and_removed(tmp_path: Path) -> None:
    answers = open_page(write_traced_run(tmp_path))
    view = answers.view
    show_tab(answers, "Critical path")
    wait_for(lambda: answers.panel.path_button.layout.display == "")
    answers.panel.path_button.click()
    assert view._path is not None and len(view._path.row) > 100
    answers.panel.path_button.click()
    assert view._path is None and view._path_number == 2
    answers.panel.tabs.value = "Steps"
    assert answers.panel.path_button.layout.display == "none"
    answers.close()


def test_changed_plan_of_a_sentence_is_applied() -> None:
    plan = ss.Plan(
        ss.models["llama-3.1-8b"], ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(), ss.Layout.fsdp2()
    )
    applied: list[ss.Plan] = []
    findings = FindingsList(lambda sentence: None, applied.append)
    many = [
        Sentence(text=f"Sentence {number}.", rank=0, start_seconds=0, end_seconds=1) for number in range(6)
    ]
    change = Sentence(text="Too many all-gathers.", plan=plan, gain_seconds=0.0123)
    findings.show_sentences([Sentence(text="8 ranks."), change, *many])
    assert "Apply this plan: predicted gain" in findings.value and "12.3" in findings.value
    findings.press_button("apply:1")
    assert applied == [plan]
    assert "Sentence 5" not in findings.value
    findings.press_button("all")
    assert "Sentence 5" in findings.value
    findings.press_button("apply:2")
    assert findings.error and len(applied) == 1


def test_run_without_a_trace_gives_its_reason(tmp_path: Path) -> None:
    page = TracePage(240)
    page.show_run(ss.Run.attach(write_run("untraced", parent=tmp_path)))
    opening = page.children[0]
    wait_for(lambda: "untraced" in opening.children[1].value)
    assert "Traceback" not in opening.children[1].value


def test_opening_another_trace_frees_the_one_before(tmp_path: Path) -> None:
    run, page = write_traced_run(tmp_path), TracePage(240)
    alive: list[weakref.ref[Trace]] = []
    num_widgets: list[int] = []
    for _ in range(3):
        page.show_run(run)
        wait_for(lambda: isinstance(page.children[0], TraceAnswers))
        wait_for(lambda: "<table" in page.children[0].panel.table.value)
        wait_for(lambda: "shardscope-work" not in [thread.name for thread in threading.enumerate()])
        alive.append(weakref.ref(page.children[0].view.trace))
        gc.collect()
        num_widgets.append(len(_instances))
    assert [trace() is not None for trace in alive] == [False, False, True]
    assert num_widgets[1] == num_widgets[2]


def test_opening_can_be_cancelled_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, started, load = write_traced_run(tmp_path), threading.Event(), Trace.load

    def load_slowly(source: Any, *, progress: Callable[[float], object], **options: Any) -> Trace:
        for number in range(2000):
            progress(number / 2000)
            started.set()
            time.sleep(0.01)
        raise AssertionError("not cancelled")

    monkeypatch.setattr(Trace, "load", load_slowly)
    page = TracePage(240)
    page.show_run(run)
    assert started.wait(30)
    opening = page.children[0].children[0]
    assert opening.progress.layout.display == "" and opening.button.layout.display == "none"
    opening.cancel.click()
    wait_for(lambda: opening.button.layout.display == "")
    monkeypatch.setattr(Trace, "load", load)
    opening.button.click()
    wait_for(lambda: isinstance(page.children[0], TraceAnswers))


def test_static_picture_of_an_unfinished_analysis_says_what_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kernel may be left that finishes it: the saved notebook does not say "Computing"."""
    may_finish = threading.Event()
    summarize, breakdown = Trace.summary, Trace.breakdown
    monkeypatch.setattr(Trace, "summary", lambda trace: may_finish.wait(60) and summarize(trace))
    answers = open_page(write_traced_run(tmp_path))
    wait_for(lambda: "Looking for what costs time" in answers.findings.value)
    html = draw_picture(answers)
    assert "Looking for" not in html and html.count("not finished when the notebook was saved") == 1
    assert f"2 ranks, {len(answers.view.trace):,} slices in " in html
    may_tabulate = threading.Event()
    monkeypatch.setattr(Trace, "breakdown", lambda trace: may_tabulate.wait(60) and breakdown(trace))
    answers.panel.tabs.value = "Steps"
    answers.panel.tabs.value = "Time by rank"
    assert "Computing" in answers.panel.text.value
    html = draw_picture(answers)
    assert "Computing" not in html
    assert '"Time by rank" was not computed when the notebook was saved: run the cell again.' in html
    may_tabulate.set()
    may_finish.set()
    wait_for(lambda: "<table" in answers.panel.table.value and "<li>" in answers.findings.value)
    assert "when the notebook was saved" not in draw_picture(answers)
    answers.close()


def test_static_picture_has_the_sentences_the_bars_and_the_table(tmp_path: Path) -> None:
    answers = open_page(write_traced_run(tmp_path))
    wait_for(lambda: "<table" in answers.panel.table.value and "<li>" in answers.findings.value)
    html = draw_picture(answers)
    assert "exposed comm." in html and "svg" in html and "<button" not in html and "of a step" in html
    answers.close()
