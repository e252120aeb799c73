"""The memory view's rows, toggle, pair and tiers, and the Studio's repairs: all without a browser."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

import shardscope as ss
from shardscope.planner.differences import differences
from shardscope.planner.repairs import in_words
from shardscope.rehearsal.extent import expected_seconds
from shardscope.runs.measured import measured_memory
from shardscope_widgets import MemoryView, Studio
from shardscope_widgets.kit.background_work import Takes, about
from shardscope_widgets.memory import view as memory_view

GIB = 2**30


def plan_of(
    model: str = "llama-3.1-8b",
    cluster: str = "8xh100-sxm-80gb",
    layout: ss.Layout | None = None,
    **recipe: Any,
) -> ss.Plan:
    layout = layout or ss.Layout.fsdp2()
    return ss.Plan(ss.models[model], ss.Cluster.parse(cluster), ss.Recipe(**recipe), layout)


def drawn(view: MemoryView) -> dict[str, dict[str, float]]:
    """Row -> component -> GiB, as the bars have it."""
    found: dict[str, dict[str, float]] = {}
    for trace in view.figure.data:
        if trace.type == "bar":
            for label, value in zip(trace.y, trace.x, strict=True):
                found.setdefault(label, {})[trace.name] = value
    return found


def words(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html)).strip()


def until(holds: Any, seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(holds())


def as_tier(plan: ss.Plan, tier: str) -> Any:
    return replace(plan.memory(), tier=tier)  # type: ignore[arg-type]


def test_every_tier_has_its_place_before_it_is_there() -> None:
    view = MemoryView(plan_of())
    assert list(view.figure.layout.yaxis.categoryarray) == ["predicted", "rehearsed", "measured"]
    assert list(drawn(view)) == ["predicted"]
    assert {a.text for a in view.figure.layout.annotations} >= {
        "not rehearsed yet",
        "no run of this plan yet",
    }


def test_a_rehearsal_stands_beside_its_own_plan_and_no_other() -> None:
    plan, other = plan_of(), plan_of(seq_len=2048)
    view = MemoryView(plan)
    height = view.figure.layout.height
    view.add(plan, as_tier(plan, "rehearsed"))
    assert list(drawn(view)) == ["predicted", "rehearsed"]
    assert view.figure.layout.height == height, "nothing below the chart moves"
    assert "rehearsed" in words(view.table.value)
    view.show(other)
    assert list(drawn(view)) == ["predicted"]
    view.show(plan)
    assert list(drawn(view)) == ["predicted", "rehearsed"]


def test_a_measurement_brings_its_error_in_words() -> None:
    plan = ss.Plan(
        ss.Architecture.of_size("2m"), ss.Cluster.parse("2xcpu"), ss.Recipe(seq_len=64), ss.Layout.fsdp2()
    )
    phases = {"rest": {"parameters": 4 * 2**20}, "forward": {"parameters": 4 * 2**20, "activations": 2**20}}
    view = MemoryView(plan)
    view.add(plan, measured_memory(plan, {0: {"memory": {"phases": phases}}}, []))
    assert drawn(view)["measured"]["activations"] == 2**20 / GIB
    assert "Measured 5 MiB of tensors at the peak (forward); predicted" in words(view.caption.value)
    # What a tier did not tell apart is a dash, not a nought.
    assert "–" in words(view.table.value)


def test_the_toggle_shows_one_step_on_the_same_place() -> None:
    plan = plan_of()
    view = MemoryView(plan)
    height = view.figure.layout.height
    view.mode.value = "step"
    shown = [trace for trace in view.figure.data if trace.visible]
    assert all(trace.type == "scatter" for trace in shown)
    assert view.figure.layout.height == height
    report = plan.memory()
    fullest = max(sum(parts.values()) for _, _, parts in report.timeline)
    areas = [trace.y for trace in shown]
    assert max(map(sum, zip(*areas, strict=True))) == pytest.approx(fullest / GIB)
    view.mode.value = "peak"
    assert all(trace.type == "bar" for trace in view.figure.data if trace.visible)


def test_stages_are_bars_and_the_worst_has_the_band() -> None:
    plan = plan_of("llama-3.1-70b", "4x8xh100-sxm-80gb", ss.Layout.megatron(tp=8, pp=4))
    view = MemoryView(plan)
    report = plan.memory()
    assert [sum(parts.values()) for parts in drawn(view).values()] == pytest.approx(
        [stage.peak_bytes / GIB for stage in report.by_stage]
    )
    row = report.worst_stage.stage
    ends = [(s.x0, s.x1) for s in view.figure.layout.shapes if s.y0 == s.y1 == row]
    assert ends == [(report.low_bytes / GIB, report.high_bytes / GIB)]


def test_offloaded_bytes_are_bars_of_their_own() -> None:
    plan = plan_of(layout=ss.Layout.fsdp2(offload="cpu"))
    view = MemoryView(plan)
    assert drawn(view)["host"]["host"] == plan.memory().host_bytes / GIB
    assert drawn(view)["predicted"]["host"] == 0
    said = r"host memory: ([\d.]+) of 2,048 GiB on each node, ([\d.]+) GiB a rank"
    found = re.search(said, words(view.caption.value))
    assert found and float(found[1]) == pytest.approx(8 * float(found[2]), rel=0.01)
    assert "host" not in drawn(MemoryView(plan_of()))


def test_a_pair_names_its_differences() -> None:
    before, after = plan_of(), plan_of(recompute="full", micro_batch_size=2)
    assert [str(found) for found in differences(before, after)] == [
        "micro batch size 1 → 2",
        "recompute none → full",
    ]
    assert differences(before, before) == []
    view = MemoryView(before, after)
    parts = drawn(view)
    assert list(parts) == ["A", "B"]
    assert sum(parts["A"].values()) == pytest.approx(before.memory().peak_bytes / GIB)
    assert sum(parts["B"].values()) == pytest.approx(after.memory().peak_bytes / GIB)
    text = words(view.caption.value)
    assert "B instead of A : micro batch size 1 → 2; recompute none → full" in text
    side = "less" if after.memory().peak_bytes < before.memory().peak_bytes else "more"
    assert f"GiB {side} at the peak" in text
    assert text.startswith("A : Llama 3.1 8B on 8 × H100 SXM 80 GB with FSDP2 , full training"), (
        "which is which"
    )
    view.keep.click()
    assert list(drawn(view)) == ["predicted"]


def test_whose_a_rehearsal_is_stands_at_it() -> None:
    """In the chart, in the table and beside the course: of A and of B alike."""
    before, after = plan_of(), plan_of(recompute="full")
    view = MemoryView(before, after)
    for plan in (before, after):
        view.add(plan, replace(plan.memory(), tier="rehearsed"))
    assert list(drawn(view)) == ["A", "A rehearsed", "B", "B rehearsed"]
    assert "GiB A A rehearsed B B rehearsed" in words(view.table.value)
    assert sum(drawn(view)["A rehearsed"].values()) == pytest.approx(before.memory().peak_bytes / GIB)
    view.mode.value = "step"
    notes = [note.text for note in view.figure.layout.annotations]
    assert "– – B rehearsed" in notes and "– · A" in notes
    view.keep.click()
    assert "– – rehearsed" in [note.text for note in view.figure.layout.annotations]


def test_another_framework_is_one_difference() -> None:
    found = differences(plan_of(), plan_of("llama-3.1-70b", layout=ss.Layout.zero(stage=2)))
    assert [str(one) for one in found] == [
        "model llama-3.1-8b → llama-3.1-70b",
        "framework FSDP2 → DeepSpeed ZeRO-2",
    ]


def test_what_follows_from_another_change_is_no_difference() -> None:
    before = plan_of(layout=ss.Layout.zero(3))
    after = plan_of(layout=ss.Layout.zero(3, offload_params="nvme"))
    assert after.layout.offload_params_buffer_count is not None  # type: ignore[attr-defined]
    for one, other in ((before, after), (after, before)):
        assert [difference.field for difference in differences(one, other)] == ["offload_params"]
    chosen = plan_of(layout=ss.Layout.zero(3, offload_params="nvme", offload_params_buffer_count=99))
    assert {difference.field for difference in differences(before, chosen)} == {
        "offload_params",
        "offload_params_buffer_count",
    }


def test_the_course_of_a_kept_plan_stays_on_the_axis_and_says_what_it_is() -> None:
    small, large = plan_of(), plan_of(micro_batch_size=4)
    view = MemoryView(large, small)
    view.mode.value = "step"
    view.show(small)
    line = next(trace for trace in view.figure.data if trace.name == "A")
    assert max(line.y) > small.memory().usable_bytes / 2**30, "else this tests nothing"
    assert view.figure.layout.yaxis2.range[1] > max(line.y)
    assert "– · A" in [note.text for note in view.figure.layout.annotations]


# ------------------------------------------------------------------------------------------ repairs


@pytest.fixture
def studio() -> Studio:
    return Studio()


def test_repairs_are_there_only_while_the_plan_does_not_fit(studio: Studio) -> None:
    assert studio.repairs.layout.display == "none" and not studio.repairs.buttons.children
    studio.recipe.micro.value = "2"
    assert not studio.plan.memory().fits
    told = [button.description for button in studio.repairs.buttons.children]
    assert told == in_words(studio.plan, studio.plan.repairs())[: len(told)] and told
    studio.recipe.micro.value = "1"
    assert studio.repairs.layout.display == "none"


SITUATIONS: list[dict[str, Any]] = [
    {"micro": "2"},
    {"micro": "4", "seq_len": "2048"},
    {"micro": "4", "seq_len": "8192", "framework": "deepspeed"},
    {"micro": "8", "framework": "megatron"},
    {"framework": "ddp"},
]


@pytest.mark.parametrize("situation", SITUATIONS, ids=str)
def test_a_repair_goes_through_the_inputs_and_nothing_else_changes(
    studio: Studio, situation: dict[str, Any]
) -> None:
    def set_up() -> None:
        studio.layout_picker.framework.value = situation.get("framework", "fsdp2")
        studio.architecture.name.value = situation.get("model", "llama-3.1-8b")
        studio.recipe.micro.value = situation.get("micro", "1")
        studio.recipe.seq_len.value = situation.get("seq_len", "4096")

    set_up()
    before = studio.plan
    repairs = before.repairs()[: len(studio.repairs.buttons.children)]
    assert repairs
    for index, repair in enumerate(repairs):
        studio.apply(before)
        assert studio.plan == before
        studio.repairs.buttons.children[index].click()
        assert studio.plan.degrees == repair.plan.degrees, repair.change
        assert with_rank(studio.plan.recipe) == with_rank(repair.plan.recipe), repair.change
        assert studio.plan.memory().peak_bytes == repair.plan.memory().peak_bytes, repair.change


def with_rank(recipe: ss.Recipe) -> ss.Recipe:
    """The recipe with the default rank written out, as the input shows it."""
    return replace(recipe, lora_rank=recipe.adapter_rank) if recipe.has_adapters else recipe


def test_what_has_no_input_is_kept_until_somebody_takes_it_back(studio: Studio) -> None:
    kept = replace(studio.plan, recipe=replace(studio.plan.recipe, optimizer="sgd"))
    studio.apply(kept)
    studio.recipe.seq_len.value = "2048"
    assert studio.plan.recipe.optimizer == "sgd"


# ---------------------------------------------------------------------------------------- rehearsing


def test_rehearsing_shows_how_far_it_is_and_then_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()

    def rehearse(self: ss.Plan, progress: Any = None, timeout: float = 0) -> Any:
        progress("forward", 0.5)
        assert goes_on.wait(10)
        progress("backward", 0.9)
        return as_tier(self, "rehearsed")

    monkeypatch.setattr(ss.Plan, "rehearse", rehearse, raising=False)
    view = MemoryView(plan_of())
    panel = view.rehearse
    assert panel.layout.display == ""
    expected = expected_seconds(view.plan)
    assert about(expected) == "about 40 s" and f"takes {about(expected)} on an idle" in panel.words.value
    panel.button.click()
    assert until(lambda: panel.progress.value == 0.5)
    assert panel.button.disabled and panel.cancel.layout.display == ""
    assert "forward" in panel.words.value
    goes_on.set()
    assert until(lambda: not panel.button.disabled)
    assert "rehearsed" in drawn(view)
    view.show(plan_of(seq_len=2048))
    assert "takes about 5 s" in panel.words.value, "as quick as the last one was here"


def test_what_ends_while_an_input_moves_does_not_bring_the_old_picture_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rehearsal's thread draws the old plan; meanwhile a person asks for another: that one stays."""
    old, new = plan_of(), plan_of(seq_len=2048)
    view = MemoryView(old)
    is_drawing, goes_on, real = threading.Event(), threading.Event(), memory_view.draw

    def slow(figure: Any, shown: Any, mode: Any) -> None:
        if threading.current_thread().name == "rehearsal":
            is_drawing.set()
            goes_on.wait(1)
        real(figure, shown, mode)

    monkeypatch.setattr(memory_view, "draw", slow)
    ends = threading.Thread(target=view.add, args=(old, as_tier(old, "rehearsed")), name="rehearsal")
    ends.start()
    assert is_drawing.wait(10)
    asks = threading.Thread(target=view.show, args=(new,))
    asks.start()
    asks.join(0.3)  # Long enough, were it not made to wait.
    goes_on.set()
    for thread in (ends, asks):
        thread.join(10)
    assert sum(drawn(view)["predicted"].values()) == pytest.approx(new.memory().peak_bytes / GIB)
    assert list(drawn(view)) == ["predicted"], "the rehearsal was the old plan's"


def test_what_is_done_says_how_long_the_rest_takes() -> None:
    takes = Takes(40)
    assert takes.words(4, 0.1) == "4 s of about 40 s", "it was only starting"
    assert takes.words(30, 0.3) == "30 s of about 2 minutes"
    assert takes.words(60, 0.3) == "60 s of about 2 minutes", "in the midst of a part nothing new is known"
    assert takes.words(70, 0.9) == "70 s of about 80 s"
    assert takes.words(90, 0.9) == "90 s", "it took longer, and nobody knows how much"
    assert Takes(None).words(12, 0.9) == "12 s"


def test_a_rehearsal_of_more_layers_and_micro_batches_is_expected_to_take_longer() -> None:
    def seconds(**recipe: Any) -> float:
        return expected_seconds(plan_of(**recipe))

    assert seconds(global_batch_size=8) < seconds(global_batch_size=16) < seconds(global_batch_size=24)
    assert seconds(global_batch_size=24) == seconds(global_batch_size=64), "more of them are not played"
    assert expected_seconds(plan_of("llama-3.1-70b")) > seconds()


def test_a_rehearsal_can_be_cancelled_and_may_fail_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    started = threading.Event()

    def endless(self: ss.Plan, progress: Any = None, timeout: float = 0) -> Any:
        while True:
            progress("forward", 0.1)
            started.set()
            time.sleep(0.02)

    monkeypatch.setattr(ss.Plan, "rehearse", endless, raising=False)
    view = MemoryView(plan_of())
    view.rehearse.button.click()
    assert started.wait(10)
    view.rehearse.cancel.click()
    assert until(lambda: "cancelled" in view.rehearse.words.value)
    assert until(lambda: not view.rehearse.button.disabled)

    def refused(self: ss.Plan, progress: Any = None, timeout: float = 0) -> Any:
        raise ValueError("Layout.pp is 2; allowed: <1>. Nearest fix: pp=1.")

    monkeypatch.setattr(ss.Plan, "rehearse", refused, raising=False)
    view.rehearse.button.click()
    assert until(lambda: "allowed: &lt;1&gt;" in view.rehearse.words.value)
    assert list(drawn(view)) == ["predicted"]
