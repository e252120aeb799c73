"""The ranking view without a browser: marks, order, pages, presses, and the search in its thread."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from html import escape, unescape
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.needs import thorough

import shardscope as ss
from shardscope.core.number_format import format_gib
from shardscope.frameworks.registry import why_not_trained
from shardscope_widgets import RankingView, Studio
from shardscope_widgets.kit.numbers import format_short
from shardscope_widgets.kit.theme import (
    COMPONENT_COLOURS,
    COMPONENT_PATTERNS,
    PART_COLOURS,
    PART_PATTERNS,
    RANK_COLOURS,
)
from shardscope_widgets.plans.page import PlansPage
from shardscope_widgets.plans.ranking_figure import SHOWN_OVER_CAPACITY, mark_current_plan
from shardscope_widgets.plans.ranking_rows import GRID, build_signs, choose_marks, sort_rows
from shardscope_widgets.plans.ranking_table import ROWS_ON_A_PAGE, describe_layout

GIB = 2**30
MODEL, GPUS, RECIPE = ss.models["llama-3.1-8b"], ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe()


@pytest.fixture(scope="module")
def found() -> Any:
    return ss.search(MODEL, GPUS, RECIPE)


def words(html: str) -> str:
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))).strip()


def showing_all(found: Any, **given: Any) -> RankingView:
    view = RankingView(found, **given)
    view.room.value = 0
    return view


def rows_of(view: RankingView) -> list[int]:
    """The plans of the table's rows, from top to bottom."""
    return [int(index) for index in re.findall(r"<tr data-act='apply:(\d+)'", view.table.value)]


def until(holds: Callable[[], bool], seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(holds())


# ------------------------------------------------------------------------------------------- chart


def test_every_framework_has_a_unique_colour_and_marker() -> None:
    found = list(build_signs().values())
    for field in ("title", "colour", "symbol", "text"):
        assert len({getattr(sign, field) for sign in found}) == len(found)


def test_marks_are_at_the_memory_and_speed_of_their_plans(found: Any) -> None:
    view = RankingView(found)
    assert view.figure is not None
    shown: dict[str, set[tuple[float, float]]] = defaultdict(set)
    for trace in view.figure.data:
        shown[trace.name.partition(",")[0]] |= set(zip(trace.x, trace.y, strict=True))
    usable = found.cluster.usable_bytes_per_gpu
    for name, sign in build_signs().items():
        own = found.framework == name
        memory, speed = found.peak_bytes[own] / GIB, found.tokens_per_second_per_gpu[own]
        places = set(zip(memory.tolist(), speed.tolist(), strict=True))
        assert shown[sign.title] <= places
        near = memory * GIB <= SHOWN_OVER_CAPACITY * usable
        assert bool(shown[sign.title]) == bool(near.any())
    (capacity,) = view.figure.layout.shapes
    assert capacity.x0 == capacity.x1 == usable / GIB


def test_front_line_is_the_pareto_front_and_monotonic(found: Any) -> None:
    view = RankingView(found)
    assert view.figure is not None
    front = next(trace for trace in view.figure.data if trace.name == "front")
    assert list(front.x) == sorted(found.peak_bytes[found.pareto()] / GIB)
    assert list(front.y) == sorted(front.y)


def test_marks_of_a_million_plans_are_thinned_and_include_the_fastest() -> None:
    """A million plans: no more marks than a chart can tell apart, and the fastest among them."""
    draw = np.random.default_rng(1)
    number = 1_000_000
    many: Any = SimpleNamespace(
        peak_bytes=draw.integers(1, 100, number) * GIB,
        tokens_per_second_per_gpu=draw.uniform(0, 1000, number),
        framework=np.array(["a", "b"])[draw.integers(0, 2, number)],
    )
    rows = np.argsort(-many.tokens_per_second_per_gpu, kind="stable")
    started = time.perf_counter()
    kept = choose_marks(many, rows, (0.0, 100.0 * GIB), (0.0, 1000.0))
    assert time.perf_counter() - started < 5
    assert len(kept) <= 2 * GRID[0] * GRID[1]
    assert rows[0] in kept


# ------------------------------------------------------------- plans that cannot be run, in the chart

SHORT_OF_HOST = replace(GPUS, host_memory_bytes=60 * GIB)


class Mark(NamedTuple):
    """A mark of the chart, as a user sees it."""

    row: int
    gib: float
    symbol: str
    tooltip: str


def marks_of(view: RankingView) -> list[Mark]:
    assert view.figure is not None
    return [
        Mark(row, gib, trace.marker.symbol, tooltip)
        for trace in view.figure.data
        if trace.customdata is not None
        for row, gib, tooltip in zip(trace.customdata, trace.x, trace.text, strict=True)
    ]


def crosses_of(view: RankingView) -> set[tuple[float, float]]:
    assert view.figure is not None
    trace = next(one for one in view.figure.data if one.name == "cannot be launched here")
    return set(zip(trace.x, trace.y, strict=True))


def test_plans_short_of_host_memory_have_hollow_marks_and_a_reason() -> None:
    ranking = ss.search(MODEL, SHORT_OF_HOST, RECIPE)
    usable = ranking.cluster.usable_bytes_per_gpu / GIB
    found = marks_of(RankingView(ranking))
    lacking = [mark for mark in found if mark.gib <= usable and not ranking.feasible[mark.row]]
    assert lacking
    for mark in found:
        if not ranking.feasible[mark.row]:
            assert mark.symbol.endswith("-open") and "Does not fit" in mark.tooltip
            assert ("host memory" in mark.tooltip) or mark.gib > usable
        else:
            assert "Does not fit" not in mark.tooltip


def test_plans_that_cannot_be_launched_have_crossed_marks_and_a_reason(found: Any) -> None:
    view = RankingView(found)
    kinds = set()
    for mark in marks_of(view):
        refusal, fits = why_not_trained(found.plan(mark.row)), bool(found.feasible[mark.row])
        kinds.add((fits, refusal is None))
        assert mark.symbol.endswith("-open") == (not fits or refusal is not None)
        place = found.peak_bytes[mark.row] / GIB, found.tokens_per_second_per_gpu[mark.row]
        assert (place in crosses_of(view)) >= (fits and refusal is not None)
        assert ("Cannot be launched here" in mark.tooltip) == (refusal is not None)
    assert kinds >= {(True, True), (True, False), (False, True)}


def test_plans_with_unknown_host_memory_are_not_marked_as_fitting() -> None:
    ranking = ss.search(MODEL, ss.Cluster.parse("8xa10-24gb"), ss.Recipe(seq_len=1024))
    unknown = [mark for mark in marks_of(RankingView(ranking)) if not ranking.is_room_known[mark.row]]
    assert unknown
    assert all(mark.symbol.endswith("-open") for mark in unknown)
    assert all("not known" in mark.tooltip for mark in unknown if ranking.feasible[mark.row])


def test_tooltip_shows_layout_memory_and_throughput(found: Any) -> None:
    for mark in marks_of(RankingView(found))[::97]:
        plan, told = found.plan(mark.row), words(mark.tooltip)
        assert describe_layout(plan.layout) in told
        assert f"micro-batch {plan.recipe.micro_batch_size}, recompute {plan.recipe.recompute}" in told
        assert f"{format_gib(plan.memory().peak_bytes)} GiB" in told
        assert f"{format_short(plan.step().tokens_per_second_per_gpu)} tokens/s per GPU" in told
        assert max(map(len, mark.tooltip.split("<br>"))) < 60, "a chart of 390 pixels has room for it"


def test_clicking_a_mark_applies_its_plan_unless_the_view_is_frozen(found: Any) -> None:
    applied: list[ss.Plan] = []
    view = showing_all(found, on_apply=applied.append)
    index, trace = next(
        (index, trace) for index, trace in enumerate(view.figure.data) if len(trace.customdata or ())
    )
    row = trace.customdata[3]
    click(view, index, 3, row)
    assert applied == [found.plan(row)] and view.plan == found.plan(row)
    assert marked(view) == [found.peak_bytes[row] / GIB]
    view.freeze(True)
    click(view, index, 3, row)
    assert len(applied) == 1, "what looks as if it cannot be pressed cannot"


@pytest.mark.parametrize("customdata", [None, "x", -1, 10**9, [1], {}])
def test_fault_44_click_on_a_removed_mark_is_ignored(found: Any, customdata: object) -> None:
    view = showing_all(found, on_apply=lambda _: pytest.fail("applied"))
    click(view, 0, 0, customdata)


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.65, 0.67, 0.7, 0.8, 0.9, 0.99])
def test_no_line_crosses_the_label_of_the_current_plan(found: Any, share: float) -> None:
    figure = RankingView(found).figure
    assert figure is not None
    assert not figure.layout.xaxis.showgrid and not figure.layout.yaxis.showgrid
    end, line = figure.layout.xaxis.range[1], figure.layout.shapes[0].x0
    x = share * end
    mark_current_plan(figure, (x * GIB, 5000.0))
    label = next(trace for trace in figure.data if trace.name == "this plan")
    assert label.text == ("this plan",)
    width = 0.2 * end
    low, high = {
        "middle right": (x, x + width),
        "middle left": (x - width, x),
        "top center": (x - width / 2, x + width / 2),
    }[label.textposition]
    assert low >= 0 and high <= 1.05 * end and not low < line < high


def click(view: RankingView, trace: int, point: int, customdata: object) -> None:
    """As the browser reports it."""
    content = {"click": {"trace": trace, "point": point, "customdata": customdata}}
    view.figure._handle_custom_msg(content, [])  # type: ignore[union-attr]


def test_framework_colours_are_distinguishable_under_deuteranopia() -> None:
    """From each other and from the nine components, also under deuteranopia (Machado et al. 2009)."""
    own = [sign.colour for sign in build_signs().values()]
    assert not set(own) & {*COMPONENT_COLOURS.values(), *RANK_COLOURS, *PART_COLOURS.values()}
    for seen in (lambda rgb: rgb, deuteranopic):
        for one, other in itertools.combinations(own, 2):
            assert distance(one, other, seen) > 0.12, (one, other)
    for one, other in itertools.product(own, COMPONENT_COLOURS.values()):
        assert distance(one, other, lambda rgb: rgb) > 0.1, (one, other)


def test_components_alike_under_deuteranopia_have_different_patterns() -> None:
    """In the chart of memory and in that of time: the optimizer's green is communication's brown."""
    charts = (
        (COMPONENT_COLOURS, COMPONENT_PATTERNS),
        (PART_COLOURS, PART_PATTERNS),
    )
    for colours, patterns in charts:
        for (one, colour), (other, another) in itertools.combinations(colours.items(), 2):
            alike = distance(colour, another, deuteranopic) < 0.05
            assert not alike or patterns.get(one) != patterns.get(other), (one, other)


def deuteranopic(rgb: Any) -> Any:
    matrix = [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]
    return np.clip(np.array(matrix) @ rgb, 0, 1)


def distance(one: str, other: str, seen: Callable[[Any], Any]) -> float:
    """In OKLab, where 0.02 is just visible."""
    return float(np.linalg.norm(oklab(seen(linear(one))) - oklab(seen(linear(other)))))


def linear(colour: str) -> Any:
    channels = np.array([int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def oklab(rgb: Any) -> Any:
    cones = [[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]
    axes = [[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]
    return np.array(axes) @ np.cbrt(np.array(cones) @ rgb)


# ------------------------------------------------------------------------------------------- table


def test_table_lists_best_plans_first_with_memory_and_throughput(found: Any) -> None:
    view = showing_all(found)
    assert rows_of(view) == found.order[:ROWS_ON_A_PAGE].tolist()
    best, first = found.best, words(view.table.value.partition("<tbody>")[2].partition("</tr>")[0])
    assert describe_layout(best.layout) in first
    assert format_short(best.step().tokens_per_second_per_gpu) in first
    assert format_gib(best.memory().peak_bytes) in first
    assert f"{found.num_evaluated:,} plans evaluated" in words(view.caption.value)


@pytest.mark.parametrize(
    "column", ["peak_bytes", "step_seconds", "headroom_bytes", "framework", "cost_per_token"]
)
def test_clicking_a_heading_sorts_and_a_second_click_reverses(found: Any, column: str) -> None:
    view = showing_all(found)
    values = getattr(found, column)
    for _ in range(2):
        view.table.press_button(f"sort:{column}")
        upwards = "aria-sort='ascending'" in view.table.value
        everything = sort_rows(found, column, upwards)
        told = values[everything].tolist()
        assert told == sorted(told, reverse=not upwards)
        assert sorted(everything.tolist()) == sorted(found.order.tolist())
        assert rows_of(view) == everything[:ROWS_ON_A_PAGE].tolist()
    assert "aria-sort='ascending'" in view.table.value or "aria-sort='descending'" in view.table.value


def test_plans_that_barely_fit_are_hidden_by_default(found: Any) -> None:
    """Over this share of the card some runs run out of memory, as the Studio's sentence says."""
    view = RankingView(found)
    usable = found.cluster.usable_bytes_per_gpu
    roomy = [row for row in found.order.tolist() if found.headroom_bytes[row] >= 0.2 * usable]
    assert 0 < len(roomy) < len(found.order)
    assert rows_of(view) == roomy[:ROWS_ON_A_PAGE]
    assert not found.plan(rows_of(view)[0]).memory().is_tight
    view.room.value = 0
    assert rows_of(view) == found.order[:ROWS_ON_A_PAGE].tolist()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.booleans())
def test_sort_keeps_ranking_order_for_equal_values(values: list[int], ascending: bool) -> None:
    some: Any = SimpleNamespace(order=np.arange(len(values))[::-1], key=np.array(values))
    found = sort_rows(some, "key", ascending).tolist()
    keys = [(values[row] if ascending else -values[row], -row) for row in found]
    assert keys == sorted(keys)


@thorough()
def test_table_pages_are_consecutive_and_stop_at_both_ends(found: Any) -> None:
    view = showing_all(found)
    view.table.press_button("page:-1")
    assert rows_of(view) == found.order[:ROWS_ON_A_PAGE].tolist(), "nothing is before the first page"
    view.table.press_button("page:1")
    assert rows_of(view) == found.order[ROWS_ON_A_PAGE : 2 * ROWS_ON_A_PAGE].tolist()
    seen = 2 * ROWS_ON_A_PAGE
    while seen < len(found.order):
        view.table.press_button("page:1")
        seen += ROWS_ON_A_PAGE
    last = rows_of(view)
    view.table.press_button("page:1")
    assert rows_of(view) == last and last[-1] == found.order[-1]


def test_clicking_a_row_applies_and_highlights_its_plan(found: Any) -> None:
    applied: list[ss.Plan] = []
    view = showing_all(found, on_apply=applied.append)
    third = rows_of(view)[2]
    view.table.press_button(f"apply:{third}")
    assert applied == [found.plan(third)] and view.plan == found.plan(third)
    marked = re.findall(r"<tr data-act='apply:(\d+)' class='ss-current'>", view.table.value)
    assert marked == [str(third)] and view.table.value.count("this plan") == 1
    assert view.figure is not None
    ring = next(trace for trace in view.figure.data if trace.name == "this plan")
    assert list(ring.x) == [found.peak_bytes[third] / GIB]
    assert list(ring.y) == pytest.approx([found.tokens_per_second_per_gpu[third]])


@pytest.mark.parametrize(
    "act", ["apply:999999999", "apply:-1", "apply:x", "sort:__class__", "page:7", "", ":"]
)
def test_fault_44_unknown_table_action_is_ignored(found: Any, act: str) -> None:
    view = showing_all(found, on_apply=lambda _: pytest.fail("applied"))
    before = view.table.value
    view.table.press_button(act)
    assert view.table.value == before


def test_nearest_misses_are_listed_when_nothing_fits() -> None:
    found = ss.search(
        ss.models["llama-3.1-405b"], ss.Cluster.parse("rtx-4090-24gb"), RECIPE, ("ddp", "fsdp2")
    )
    assert not found.num_feasible and found.misses
    applied: list[ss.Plan] = []
    view = showing_all(found, on_apply=applied.append)
    told = words(view.table.value)
    assert told.startswith("Nothing fits")
    for miss in found.misses:
        assert " ".join(miss.text.split()) in told
    view.table.press_button(f"apply:{found.misses[0].index}")
    assert applied == [found.plan(found.misses[0].index)]


def test_indivisible_batch_size_offers_the_nearest_divisible_one() -> None:
    found = ss.search(ss.models["gpt2"], ss.Cluster.parse("13xh100-sxm-80gb"), ss.Recipe(seq_len=1024))
    assert not found.num_evaluated and found.instead is not None
    applied: list[ss.Plan] = []
    view = showing_all(found, on_apply=applied.append)
    assert "With a global batch of 65" in words(view.table.value)
    view.table.press_button("instead")
    assert applied == [found.instead.best]


def test_excluded_framework_is_listed_with_its_reason() -> None:
    found = ss.search(ss.models["gpt2"], GPUS, ss.Recipe(seq_len=1024, optimizer="paged_adamw_8bit"))
    view = showing_all(found)
    for name, why in found.refused.items():
        assert f"{build_signs()[name].title} : {' '.join(why.split())}" in words(view.table.value)


def test_rows_that_cannot_be_launched_show_the_reason() -> None:
    recipe = ss.Recipe(seq_len=2048, global_batch_size=16, method="lora")
    found = ss.search(ss.models["llama-3.1-8b"], ss.Cluster.parse("2xrtx-4090-24gb"), recipe)
    view = showing_all(found)
    refused = [why_not_trained(found.plan(row)) for row in rows_of(view)]
    assert None in refused and any(refused)
    assert view.table.value.count("cannot be launched here</span>") == sum(why is not None for why in refused)
    assert escape(next(filter(None, refused)), quote=True) in view.table.value


def test_plans_with_unknown_host_memory_are_noted_under_the_table() -> None:
    found = ss.search(MODEL, ss.Cluster.parse("8xa10-24gb"), ss.Recipe(seq_len=1024))
    assert found.unsaid
    assert found.unsaid in words(showing_all(found).table.value)


def test_table_keeps_ranking_order_until_sorted_by_speed(found: Any) -> None:
    view = showing_all(found)
    assert "aria-sort" not in view.table.value
    view.table.press_button("sort:tokens_per_second_per_gpu")
    assert "aria-sort='descending'" in view.table.value
    assert rows_of(view)[0] in np.flatnonzero(found.step_seconds == found.step_seconds[found.order].min())


# ---------------------------------------------------------------------------------- in the Studio


def test_applying_a_row_reproduces_its_plan_in_the_inputs(found: Any) -> None:
    """Experts, chunks, offload and all: what is applied is the plan of the row, to the byte."""
    studio = Studio()
    mixture = ss.search(ss.models["mixtral-8x7b"], ss.Cluster.parse("2x8xh100-sxm-80gb"), RECIPE)
    for ranking in (found, mixture):
        studio.architecture.name.value = ranking.architecture.name
        for index in ranking.order[:: max(1, len(ranking.order) // 40)].tolist():
            plan = ranking.plan(index)
            studio.apply(plan)
            assert studio.plan.degrees == plan.degrees, describe_layout(plan.layout)
            assert studio.plan.recipe == plan.recipe, describe_layout(plan.layout)
            assert studio.plan.memory().peak_bytes == plan.memory().peak_bytes, describe_layout(plan.layout)


def test_search_runs_in_a_thread_with_progress_and_can_be_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goes_on = threading.Event()
    threads: list[threading.Thread] = []

    def endless(*_: Any, progress: Any, **__: Any) -> Any:
        threads.append(threading.current_thread())
        while not goes_on.wait(0.02):
            progress("1,234 of 9,999 plans", 0.5)
        raise AssertionError("never cancelled")

    monkeypatch.setattr(ss, "search", endless)
    page = PlansPage(on_apply=lambda _: None)
    page.mode.value = "search"
    page.set_plan(plan_of())
    assert until(lambda: page.search.progress.value == 0.5)
    assert threads[0] is not threading.main_thread()
    assert "1,234 of 9,999 plans" in page.search.words.value and page.search.button.disabled
    page.search.cancel.click()
    assert until(lambda: "Cancelled" in page.search.words.value)
    assert until(lambda: not page.search.button.disabled) and page.ranking.ranking is None


def test_standalone_view_shows_progress_searches_again_and_cancels() -> None:
    view, applied = RankingView(), []
    assert view.work.button.layout.display == "none", "nothing was asked that could be asked again"
    view.search(MODEL, GPUS, ss.Recipe(), ["fsdp2"], on_found=lambda: applied.append(view.ranking))
    assert view.work.progress.layout.display == view.work.cancel.layout.display == ""
    assert until(lambda: applied and not view.work.is_busy), view.work.words.value
    first = applied[0]
    assert first is not None and set(first.to_frame()["framework"]) == {"fsdp2"} and view.figure is not None
    view.work.button.click()
    assert until(lambda: len(applied) == 2 and not view.work.is_busy)
    assert applied[1].num_evaluated == first.num_evaluated and applied[1] is not first
    view.work.button.click()
    view.work.cancel.click()
    assert until(lambda: "Cancelled" in view.work.words.value) and view.ranking is applied[1]


def test_closing_the_view_stops_its_search(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def endless(*_: Any, progress: Any, **__: Any) -> Any:
        try:
            while True:
                progress("1 of 2 plans", 0.5)
                time.sleep(0.01)
        finally:
            ended.set()

    monkeypatch.setattr(ss, "search", endless)
    view = RankingView()
    view.search(MODEL, GPUS, ss.Recipe())
    assert until(lambda: view.work.progress.value == 0.5)
    view.close()
    assert ended.wait(10)


def marked(view: RankingView) -> list[float]:
    """Where the ring around the applied plan is; empty: nowhere."""
    assert view.figure is not None
    return list(next(trace for trace in view.figure.data if trace.name == "this plan").x)


def plan_of(**recipe: Any) -> ss.Plan:
    return ss.Plan(MODEL, GPUS, ss.Recipe(**recipe), ss.Layout.fsdp2())


def test_search_starts_on_first_view_and_not_on_input_changes(
    found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[ss.Recipe] = []

    def answered(arch: Any, cluster: Any, recipe: Any, **_: Any) -> Any:
        asked.append(recipe)
        return found

    monkeypatch.setattr(ss, "search", answered)
    applied: list[ss.Plan] = []
    page = PlansPage(on_apply=applied.append)
    page.mode.value = "search"
    assert not asked, "nothing is known yet to ask about"
    page.set_plan(plan_of())
    assert until(lambda: page.ranking.ranking is found and not page.search.is_busy)
    assert len(asked) == 1 and "ss-old" not in page.ranking._dom_classes
    assert marked(page.ranking)
    page.set_plan(plan_of(micro_batch_size=2, recompute="full"))
    assert "ss-old" not in page.ranking._dom_classes, "what a search chooses is no other question"
    page.set_plan(plan_of(seq_len=2048))
    assert len(asked) == 1 and "ss-old" in page.ranking._dom_classes
    assert not marked(page.ranking), "another question's plan has no place in this chart"
    assert "Llama 3.1 8B on 8 GPUs" in page.about.value
    assert page.search.button.layout.display == "", "and one button asks again"
    act = f"apply:{found.order[0]}"
    page.ranking.table.press_button(act)
    assert not applied and page.ranking.room.disabled, "what looks as if it cannot be pressed cannot"
    page.search.button.click()
    assert until(lambda: len(asked) == 2 and not page.search.is_busy)
    assert asked[-1].seq_len == 2048 and "ss-old" not in page.ranking._dom_classes
    page.ranking.table.press_button(act)
    assert len(applied) == 1 and not page.ranking.room.disabled and not page.about.value
    assert page.search.button.layout.display == "none", "there is nothing to ask again"


def test_search_error_is_shown_escaped_on_the_plans_page(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise ValueError("Gpu.peak_flops is <none>. Nearest fix: ss.calibrate().")

    monkeypatch.setattr(ss, "search", refused)
    page = PlansPage(on_apply=lambda _: None)
    page.mode.value = "search"
    page.set_plan(plan_of())
    assert until(lambda: "ss.calibrate()" in page.search.words.value)
    assert "&lt;none&gt;" in page.search.words.value and "role='alert'" in page.search.words.value


def test_advice_is_computed_in_the_background() -> None:
    page = PlansPage(on_apply=lambda _: None)
    page.set_plan(plan_of())
    assert until(lambda: page.advice.advice is not None and not page.ask.is_busy)
    advice = page.advice.advice
    assert advice is not None and advice.plan is not None
    assert advice.plan.architecture == MODEL
