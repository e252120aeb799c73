"""Tests of the ranking view without a browser: marks, order, pages, clicks and the search thread."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from html import escape
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from fake_runs import wait_until as wait_seconds
from hypothesis import given
from hypothesis import strategies as st
from shown_text import strip_tags
from tests.requirements import sample, thorough

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
from shardscope_widgets.plans.ranking_figure import SHOWN_OVER_CAPACITY
from shardscope_widgets.plans.ranking_rows import GRID, build_signs, choose_marks, sort_rows
from shardscope_widgets.plans.ranking_table import ROWS_ON_A_PAGE, describe_layout

GIB = 2**30
MODEL, GPUS, RECIPE = ss.models["llama-3.1-8b"], ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe()

# A search of all frameworks takes seconds.
wait_until = partial(wait_seconds, seconds=60)


@pytest.fixture(scope="module")
def ranking() -> Any:
    return ss.search(MODEL, GPUS, RECIPE)


def show_all_plans(ranking: Any, **options: Any) -> RankingView:
    view = RankingView(ranking, **options)
    view.room.value = 0
    return view


def read_row_indices(view: RankingView) -> list[int]:
    """Return the plan index of each table row, from top to bottom."""
    return [int(index) for index in re.findall(r"<tr data-act='apply:(\d+)'", view.table.value)]


# --------------------------------------------------------------------------------------------- chart


def test_every_framework_has_a_unique_colour_and_marker() -> None:
    signs = list(build_signs().values())
    for field in ("title", "colour", "symbol", "text"):
        assert len({getattr(sign, field) for sign in signs}) == len(signs)


def test_marks_are_at_the_memory_and_speed_of_their_plans(ranking: Any) -> None:
    view = RankingView(ranking)
    assert view.figure is not None
    shown: dict[str, set[tuple[float, float]]] = defaultdict(set)
    for trace in view.figure.data:
        shown[trace.name.partition(",")[0]] |= set(zip(trace.x, trace.y, strict=True))
    usable = ranking.cluster.usable_bytes_per_gpu
    for name, sign in build_signs().items():
        own = ranking.framework == name
        memory, speed = ranking.peak_bytes[own] / GIB, ranking.tokens_per_second_per_gpu[own]
        points = set(zip(memory.tolist(), speed.tolist(), strict=True))
        assert shown[sign.title] <= points
        near = memory * GIB <= SHOWN_OVER_CAPACITY * usable
        assert bool(shown[sign.title]) == bool(near.any())
    (capacity,) = view.figure.layout.shapes
    assert capacity.x0 == capacity.x1 == usable / GIB


def test_front_line_is_the_pareto_front_and_monotonic(ranking: Any) -> None:
    view = RankingView(ranking)
    assert view.figure is not None
    front = next(trace for trace in view.figure.data if trace.name == "front")
    assert list(front.x) == sorted(ranking.peak_bytes[ranking.pareto()] / GIB)
    assert list(front.y) == sorted(front.y)


def test_marks_of_a_million_plans_are_thinned_and_include_the_fastest() -> None:
    """There are no more marks than the chart can resolve, and the fastest plan is among them."""
    generator = np.random.default_rng(1)
    number = 1_000_000
    plans: Any = SimpleNamespace(
        peak_bytes=generator.integers(1, 100, number) * GIB,
        framework=np.array(["a", "b"])[generator.integers(0, 2, number)],
    )
    speed = generator.uniform(0, 1000, number)
    rows = np.argsort(-speed, kind="stable")
    started = time.perf_counter()
    marks = choose_marks(plans, speed, rows, (0.0, 100.0 * GIB), (0.0, 1000.0))
    assert time.perf_counter() - started < 5
    assert len(marks) <= 2 * GRID[0] * GRID[1]
    assert rows[0] in marks


# ------------------------------------------------------------ marks of plans that cannot be launched

SHORT_OF_HOST = replace(GPUS, host_memory_bytes=60 * GIB)


class Mark(NamedTuple):
    """A mark of the chart, as a user sees it."""

    row: int
    gib: float
    symbol: str
    tooltip: str


def read_marks(view: RankingView) -> list[Mark]:
    assert view.figure is not None
    return [
        Mark(row, gib, trace.marker.symbol, tooltip)
        for trace in view.figure.data
        if trace.customdata is not None
        for row, gib, tooltip in zip(trace.customdata, trace.x, trace.text, strict=True)
    ]


def read_crosses(view: RankingView) -> set[tuple[float, float]]:
    assert view.figure is not None
    trace = next(one for one in view.figure.data if one.name == "cannot be launched here")
    return set(zip(trace.x, trace.y, strict=True))


def test_plans_short_of_host_memory_have_hollow_marks_and_a_reason() -> None:
    ranking = ss.search(MODEL, SHORT_OF_HOST, RECIPE)
    usable = ranking.cluster.usable_bytes_per_gpu / GIB
    marks = read_marks(RankingView(ranking))
    lacking = [mark for mark in marks if mark.gib <= usable and not ranking.is_feasible[mark.row]]
    assert lacking
    for mark in marks:
        if not ranking.is_feasible[mark.row]:
            assert mark.symbol.endswith("-open") and "Does not fit" in mark.tooltip
            assert ("host memory" in mark.tooltip) or mark.gib > usable
        else:
            assert "Does not fit" not in mark.tooltip


def test_plans_that_cannot_be_launched_have_crossed_marks_and_a_reason(ranking: Any) -> None:
    view = RankingView(ranking)
    kinds = set()
    for mark in read_marks(view):
        refusal, fits = why_not_trained(ranking.plan(mark.row)), bool(ranking.is_feasible[mark.row])
        kinds.add((fits, refusal is None))
        assert mark.symbol.endswith("-open") == (not fits or refusal is not None)
        point = ranking.peak_bytes[mark.row] / GIB, ranking.tokens_per_second_per_gpu[mark.row]
        assert (point in read_crosses(view)) >= (fits and refusal is not None)
        assert ("Cannot be launched here" in mark.tooltip) == (refusal is not None)
    assert kinds >= {(True, True), (True, False), (False, True)}


def test_plans_with_unknown_host_memory_are_not_marked_as_fitting() -> None:
    ranking = ss.search(MODEL, ss.Cluster.parse("8xa10-24gb"), ss.Recipe(seq_len=1024))
    unknown = [mark for mark in read_marks(RankingView(ranking)) if not ranking.is_room_known[mark.row]]
    assert unknown
    assert all(mark.symbol.endswith("-open") for mark in unknown)
    assert all("not known" in mark.tooltip for mark in unknown if ranking.is_feasible[mark.row])


def test_tooltip_shows_layout_memory_and_throughput(ranking: Any) -> None:
    for mark in read_marks(RankingView(ranking))[::97]:
        plan, text = ranking.plan(mark.row), strip_tags(mark.tooltip)
        assert describe_layout(plan.layout) in text
        assert f"micro-batch {plan.recipe.micro_batch_size}, recompute {plan.recipe.recompute}" in text
        assert f"{format_gib(plan.memory().peak_bytes)} GiB" in text
        assert f"{format_short(plan.step().tokens_per_second_per_gpu)} tokens/s per GPU" in text
        assert max(map(len, mark.tooltip.split("<br>"))) < 60, "a tooltip line fits a chart 390 pixels wide"


def test_clicking_a_mark_applies_its_plan_unless_the_view_is_frozen(ranking: Any) -> None:
    applied: list[ss.Plan] = []
    view = show_all_plans(ranking, on_apply=applied.append)
    index, trace = next(
        (index, trace) for index, trace in enumerate(view.figure.data) if len(trace.customdata or ())
    )
    row = trace.customdata[3]
    click(view, index, 3, row)
    assert applied == [ranking.plan(row)] and view.plan == ranking.plan(row)
    assert read_current_mark(view) == [ranking.peak_bytes[row] / GIB]
    view.freeze(True)
    click(view, index, 3, row)
    assert len(applied) == 1, "a frozen view ignores clicks"


@sample(2)
@pytest.mark.parametrize("customdata", [None, "x", -1, 10**9, [1], {}])
def test_fault_44_click_on_a_removed_mark_is_ignored(ranking: Any, customdata: object) -> None:
    view = show_all_plans(ranking, on_apply=lambda _: pytest.fail("applied"))
    click(view, 0, 0, customdata)


def test_a_plan_whose_collectives_overlap_is_marked_at_its_row_without_overlap() -> None:
    """A search leaves these options at their defaults: of advice that turns them on no row was marked."""
    ranking = ss.search(MODEL, GPUS, RECIPE, frameworks=["megatron"])
    view, plain = show_all_plans(ranking), ranking.best
    overlapped = replace(plain, layout=replace(plain.layout, overlap_grad_reduce=True))  # type: ignore[call-arg]
    for plan, note in ((plain, "this plan"), (overlapped, "this plan without overlap")):
        view.mark(plan)
        marked = re.findall(r"<tr data-act='apply:(\d+)' class='ss-current'>", view.table.value)
        assert marked == [str(ranking.order[0])]
        assert f">{note}<" in view.table.value.replace(", ", "<")
        assert view.figure is not None
        ring = next(trace for trace in view.figure.data if trace.name == "this plan")
        assert list(ring.y) == pytest.approx([plan.step().tokens_per_second_per_gpu])


def test_the_current_plan_is_marked_in_the_chart_and_in_its_legend(ranking: Any) -> None:
    view = RankingView(ranking)
    assert view.figure is not None and "this plan" not in view.key.value
    view.mark(ranking.best)
    ring = next(trace for trace in view.figure.data if trace.name == "this plan")
    assert list(ring.x) == [ranking.best.memory().peak_bytes / GIB] and "this plan" in view.key.value
    view.mark(None)
    assert "this plan" not in view.key.value


def click(view: RankingView, trace: int, point: int, customdata: object) -> None:
    """Send the message with which the browser reports a click."""
    content = {"click": {"trace": trace, "point": point, "customdata": customdata}}
    view.figure._handle_custom_msg(content, [])  # type: ignore[union-attr]


def test_framework_colours_are_distinguishable_under_deuteranopia() -> None:
    """Also from the nine components. Deuteranopia is simulated as in Machado et al. 2009."""
    framework_colours = [sign.colour for sign in build_signs().values()]
    assert not set(framework_colours) & {*COMPONENT_COLOURS.values(), *RANK_COLOURS, *PART_COLOURS.values()}
    for vision in (lambda rgb: rgb, simulate_deuteranopia):
        for one, other in itertools.combinations(framework_colours, 2):
            assert compute_colour_distance(one, other, vision) > 0.12, (one, other)
    for one, other in itertools.product(framework_colours, COMPONENT_COLOURS.values()):
        assert compute_colour_distance(one, other, lambda rgb: rgb) > 0.1, (one, other)


def test_components_alike_under_deuteranopia_have_different_patterns() -> None:
    """In the memory and the time chart: green (optimizer) and brown (communication) look the same."""
    charts = (
        (COMPONENT_COLOURS, COMPONENT_PATTERNS),
        (PART_COLOURS, PART_PATTERNS),
    )
    for colours, patterns in charts:
        for (one, colour), (other, other_colour) in itertools.combinations(colours.items(), 2):
            alike = compute_colour_distance(colour, other_colour, simulate_deuteranopia) < 0.05
            assert not alike or patterns.get(one) != patterns.get(other), (one, other)


def simulate_deuteranopia(rgb: Any) -> Any:
    matrix = [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]
    return np.clip(np.array(matrix) @ rgb, 0, 1)


def compute_colour_distance(one: str, other: str, vision: Callable[[Any], Any]) -> float:
    """Return the distance in OKLab, where 0.02 is just visible."""
    return float(
        np.linalg.norm(
            convert_to_oklab(vision(convert_to_linear_rgb(one)))
            - convert_to_oklab(vision(convert_to_linear_rgb(other)))
        )
    )


def convert_to_linear_rgb(colour: str) -> Any:
    channels = np.array([int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def convert_to_oklab(rgb: Any) -> Any:
    cones = [[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]
    axes = [[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]
    return np.array(axes) @ np.cbrt(np.array(cones) @ rgb)


# --------------------------------------------------------------------------------------------- table


def test_table_lists_best_plans_first_with_memory_and_throughput(ranking: Any) -> None:
    view = show_all_plans(ranking)
    assert read_row_indices(view) == ranking.order[:ROWS_ON_A_PAGE].tolist()
    best, first = ranking.best, strip_tags(view.table.value.partition("<tbody>")[2].partition("</tr>")[0])
    assert describe_layout(best.layout) in first
    assert format_short(best.step().tokens_per_second_per_gpu) in first
    assert format_gib(best.memory().peak_bytes) in first
    assert f"{ranking.num_evaluated:,} plans evaluated" in strip_tags(view.caption.value)


@sample(1)
@pytest.mark.parametrize(
    "column", ["peak_bytes", "step_seconds", "headroom_bytes", "framework", "cost_per_token"]
)
def test_clicking_a_heading_sorts_and_a_second_click_reverses(ranking: Any, column: str) -> None:
    view = show_all_plans(ranking)
    values = getattr(ranking, column)
    for _ in range(2):
        view.table.press_button(f"sort:{column}")
        upwards = "aria-sort='ascending'" in view.table.value
        rows = sort_rows(ranking, column, upwards)
        sorted_values = values[rows].tolist()
        assert sorted_values == sorted(sorted_values, reverse=not upwards)
        assert sorted(rows.tolist()) == sorted(ranking.order.tolist())
        assert read_row_indices(view) == rows[:ROWS_ON_A_PAGE].tolist()
    assert "aria-sort='ascending'" in view.table.value or "aria-sort='descending'" in view.table.value


def test_plans_that_barely_fit_are_hidden_by_default(ranking: Any) -> None:
    """Plans above this share of GPU memory may run out of memory, as the Studio's headline says."""
    view = RankingView(ranking)
    usable = ranking.cluster.usable_bytes_per_gpu
    roomy = [row for row in ranking.order.tolist() if ranking.headroom_bytes[row] >= 0.2 * usable]
    assert 0 < len(roomy) < len(ranking.order)
    assert read_row_indices(view) == roomy[:ROWS_ON_A_PAGE]
    assert not ranking.plan(read_row_indices(view)[0]).memory().is_tight
    view.room.value = 0
    assert read_row_indices(view) == ranking.order[:ROWS_ON_A_PAGE].tolist()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.booleans())
def test_sort_keeps_ranking_order_for_equal_values(values: list[int], ascending: bool) -> None:
    ranking: Any = SimpleNamespace(order=np.arange(len(values))[::-1], peak_bytes=np.array(values))
    rows = sort_rows(ranking, "peak_bytes", ascending).tolist()
    keys = [(values[row] if ascending else -values[row], -row) for row in rows]
    assert keys == sorted(keys)


@thorough()
def test_table_pages_are_consecutive_and_stop_at_both_ends(ranking: Any) -> None:
    view = show_all_plans(ranking)
    view.table.press_button("page:-1")
    assert read_row_indices(view) == ranking.order[:ROWS_ON_A_PAGE].tolist(), (
        "there is no page before the first one"
    )
    view.table.press_button("page:1")
    assert read_row_indices(view) == ranking.order[ROWS_ON_A_PAGE : 2 * ROWS_ON_A_PAGE].tolist()
    seen = 2 * ROWS_ON_A_PAGE
    while seen < len(ranking.order):
        view.table.press_button("page:1")
        seen += ROWS_ON_A_PAGE
    last = read_row_indices(view)
    view.table.press_button("page:1")
    assert read_row_indices(view) == last and last[-1] == ranking.order[-1]


def test_a_degree_and_its_number_are_on_one_line(ranking: Any) -> None:
    table = show_all_plans(ranking).table.value
    assert re.search(r"(tp|pp)\N{NO-BREAK SPACE}\d", table) and not re.search(r"\b(tp|pp|cp|vpp) \d", table)


def test_clicking_a_row_applies_and_highlights_its_plan(ranking: Any) -> None:
    applied: list[ss.Plan] = []
    view = show_all_plans(ranking, on_apply=applied.append)
    third = read_row_indices(view)[2]
    view.table.press_button(f"apply:{third}")
    assert applied == [ranking.plan(third)] and view.plan == ranking.plan(third)
    current_rows = re.findall(r"<tr data-act='apply:(\d+)' class='ss-current'>", view.table.value)
    assert current_rows == [str(third)] and view.table.value.count("this plan") == 1
    assert view.figure is not None
    ring = next(trace for trace in view.figure.data if trace.name == "this plan")
    assert list(ring.x) == [ranking.peak_bytes[third] / GIB]
    assert list(ring.y) == pytest.approx([ranking.tokens_per_second_per_gpu[third]])


@sample(2)
@pytest.mark.parametrize(
    "act", ["apply:999999999", "apply:-1", "apply:x", "sort:__class__", "page:7", "", ":"]
)
def test_fault_44_unknown_table_action_is_ignored(ranking: Any, act: str) -> None:
    view = show_all_plans(ranking, on_apply=lambda _: pytest.fail("applied"))
    before = view.table.value
    view.table.press_button(act)
    assert view.table.value == before


def test_nearest_misses_are_listed_when_nothing_fits() -> None:
    ranking = ss.search(
        ss.models["llama-3.1-405b"], ss.Cluster.parse("rtx-4090-24gb"), RECIPE, ("ddp", "fsdp2")
    )
    assert not ranking.num_feasible and ranking.misses
    applied: list[ss.Plan] = []
    view = show_all_plans(ranking, on_apply=applied.append)
    text = strip_tags(view.table.value)
    assert text.startswith("Nothing fits")
    for miss in ranking.misses:
        assert " ".join(miss.text.split()) in text
    view.table.press_button(f"apply:{ranking.misses[0].index}")
    assert applied == [ranking.plan(ranking.misses[0].index)]


def test_indivisible_batch_size_offers_the_nearest_divisible_one() -> None:
    ranking = ss.search(ss.models["gpt2"], ss.Cluster.parse("13xh100-sxm-80gb"), ss.Recipe(seq_len=1024))
    assert not ranking.num_evaluated and ranking.alternative is not None
    applied: list[ss.Plan] = []
    view = show_all_plans(ranking, on_apply=applied.append)
    assert "With a global batch of 65" in strip_tags(view.table.value)
    view.table.press_button("alternative")
    assert applied == [ranking.alternative.best]


def test_excluded_framework_is_listed_with_its_reason() -> None:
    ranking = ss.search(ss.models["gpt2"], GPUS, ss.Recipe(seq_len=1024, optimizer="paged_adamw_8bit"))
    view = show_all_plans(ranking)
    for name, why in ranking.refused.items():
        assert f"{build_signs()[name].title} : {' '.join(why.split())}" in strip_tags(view.table.value)


@thorough()
def test_rows_that_cannot_be_launched_show_the_reason() -> None:
    recipe = ss.Recipe(seq_len=2048, global_batch_size=16, method="lora")
    ranking = ss.search(ss.models["llama-3.1-8b"], ss.Cluster.parse("2xrtx-4090-24gb"), recipe)
    view = show_all_plans(ranking)
    refusals = [why_not_trained(ranking.plan(row)) for row in read_row_indices(view)]
    assert None in refusals and any(refusals)
    assert view.table.value.count("cannot be launched here</span>") == sum(
        why is not None for why in refusals
    )
    assert escape(next(filter(None, refusals)), quote=True) in view.table.value


@thorough()
def test_plans_with_unknown_host_memory_are_noted_under_the_table() -> None:
    ranking = ss.search(MODEL, ss.Cluster.parse("8xa10-24gb"), ss.Recipe(seq_len=1024))
    assert ranking.unknown_memory
    assert ranking.unknown_memory in strip_tags(show_all_plans(ranking).table.value)


def test_table_keeps_ranking_order_until_sorted_by_speed(ranking: Any) -> None:
    view = show_all_plans(ranking)
    assert "aria-sort" not in view.table.value
    view.table.press_button("sort:tokens_per_second_per_gpu")
    assert "aria-sort='descending'" in view.table.value
    assert read_row_indices(view)[0] in np.flatnonzero(
        ranking.step_seconds == ranking.step_seconds[ranking.order].min()
    )


# ------------------------------------------------------------------------------------- in the Studio


def test_applying_a_row_reproduces_its_plan_in_the_inputs(ranking: Any) -> None:
    """The applied plan equals the row's plan, with experts, virtual stages and offload, to the byte."""
    studio = Studio()
    mixtral_ranking = ss.search(ss.models["mixtral-8x7b"], ss.Cluster.parse("2x8xh100-sxm-80gb"), RECIPE)
    for each_ranking in (ranking, mixtral_ranking):
        studio.architecture.name.value = each_ranking.architecture.name
        for index in each_ranking.order[:: max(1, len(each_ranking.order) // 15)].tolist():
            plan = each_ranking.plan(index)
            studio.apply(plan)
            assert studio.plan.degrees == plan.degrees, describe_layout(plan.layout)
            assert studio.plan.recipe == plan.recipe, describe_layout(plan.layout)
            assert studio.plan.memory().peak_bytes == plan.memory().peak_bytes, describe_layout(plan.layout)


def test_search_runs_in_a_thread_with_progress_and_can_be_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_continue = threading.Event()
    threads: list[threading.Thread] = []

    def search_endlessly(*_: Any, progress: Any, **__: Any) -> Any:
        threads.append(threading.current_thread())
        while not may_continue.wait(0.02):
            progress("1,234 of 9,999 plans", 0.5)
        raise AssertionError("never cancelled")

    monkeypatch.setattr(ss, "search", search_endlessly)
    page = PlansPage(on_apply=lambda _: None)
    page.mode.value = "search"
    page.set_plan(build_plan())
    assert wait_until(lambda: "1,234 of 9,999 plans" in page.search.words.value)
    assert threads[0] is not threading.main_thread()
    assert page.search.progress.value == 0.5 and page.search.button.disabled
    page.search.cancel.click()
    assert wait_until(lambda: "Cancelled" in page.search.words.value)
    assert wait_until(lambda: not page.search.is_busy) and not page.search.button.disabled
    assert page.ranking.ranking is None


def test_standalone_view_shows_progress_searches_again_and_cancels() -> None:
    view, rankings = RankingView(), []
    assert view.work.button.layout.display == "none", "there is no earlier search to repeat"
    view.search(MODEL, GPUS, ss.Recipe(), ["fsdp2"], on_found=lambda: rankings.append(view.ranking))
    assert view.work.progress.layout.display == view.work.cancel.layout.display == ""
    assert wait_until(lambda: rankings and not view.work.is_busy), view.work.words.value
    first = rankings[0]
    assert first is not None and set(first.to_frame()["framework"]) == {"fsdp2"} and view.figure is not None
    view.work.button.click()
    assert wait_until(lambda: len(rankings) == 2 and not view.work.is_busy)
    assert rankings[1].num_evaluated == first.num_evaluated and rankings[1] is not first
    view.work.button.click()
    view.work.cancel.click()
    assert wait_until(lambda: "Cancelled" in view.work.words.value) and view.ranking is rankings[1]


def test_closing_the_view_stops_its_search(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def search_endlessly(*_: Any, progress: Any, **__: Any) -> Any:
        try:
            while True:
                progress("1 of 2 plans", 0.5)
                time.sleep(0.01)
        finally:
            ended.set()

    monkeypatch.setattr(ss, "search", search_endlessly)
    view = RankingView()
    view.search(MODEL, GPUS, ss.Recipe())
    assert wait_until(lambda: view.work.progress.value == 0.5)
    view.close()
    assert ended.wait(10)


def read_current_mark(view: RankingView) -> list[float]:
    """Return the x coordinate of the ring around the current plan; empty if there is no ring."""
    assert view.figure is not None
    return list(next(trace for trace in view.figure.data if trace.name == "this plan").x)


def build_plan(**recipe: Any) -> ss.Plan:
    return ss.Plan(MODEL, GPUS, ss.Recipe(**recipe), ss.Layout.fsdp2())


def test_search_starts_on_first_view_and_not_on_input_changes(
    ranking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[ss.Recipe] = []

    def return_ranking(arch: Any, cluster: Any, recipe: Any, **_: Any) -> Any:
        requests.append(recipe)
        return ranking

    monkeypatch.setattr(ss, "search", return_ranking)
    applied: list[ss.Plan] = []
    page = PlansPage(on_apply=applied.append)
    page.mode.value = "search"
    assert not requests, "there is no plan to search for yet"
    page.set_plan(build_plan())
    assert wait_until(lambda: page.ranking.ranking is ranking and not page.search.is_busy)
    assert len(requests) == 1 and "ss-old" not in page.ranking._dom_classes
    assert read_current_mark(page.ranking)
    page.set_plan(build_plan(micro_batch_size=2, recompute="full"))
    assert "ss-old" not in page.ranking._dom_classes, "options that the search chooses do not outdate it"
    page.set_plan(build_plan(seq_len=2048))
    assert len(requests) == 1 and "ss-old" in page.ranking._dom_classes
    assert not read_current_mark(page.ranking), "a plan with other inputs is not marked in this chart"
    assert "Llama 3.1 8B on 8 GPUs" in page.about.value
    assert page.search.button.layout.display == "", "the search button is shown"
    act = f"apply:{ranking.order[0]}"
    page.ranking.table.press_button(act)
    assert not applied and page.ranking.room.disabled, "a frozen view ignores clicks"
    page.search.button.click()
    assert wait_until(lambda: len(requests) == 2 and not page.search.is_busy)
    assert requests[-1].seq_len == 2048 and "ss-old" not in page.ranking._dom_classes
    page.ranking.table.press_button(act)
    assert len(applied) == 1 and not page.ranking.room.disabled and not page.about.value
    assert page.search.button.layout.display == "none", "the ranking is current: there is no search to repeat"


def test_search_error_is_shown_escaped_on_the_plans_page(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_value_error(*_: Any, **__: Any) -> Any:
        raise ValueError("Gpu.peak_flops is <none>. Nearest fix: ss.calibrate().")

    monkeypatch.setattr(ss, "search", raise_value_error)
    page = PlansPage(on_apply=lambda _: None)
    page.mode.value = "search"
    page.set_plan(build_plan())
    assert wait_until(lambda: "ss.calibrate()" in page.search.words.value)
    assert "&lt;none&gt;" in page.search.words.value and "role='alert'" in page.search.words.value


def test_advice_is_computed_in_the_background() -> None:
    page = PlansPage(on_apply=lambda _: None)
    page.set_plan(build_plan())
    assert wait_until(lambda: page.advice.advice is not None and not page.ask.is_busy)
    advice = page.advice.advice
    assert advice is not None and advice.plan is not None
    assert advice.plan.architecture == MODEL


@pytest.mark.parametrize(
    "layout",
    [ss.Layout.fsdp2(offload="cpu"), ss.Layout.zero(stage=3, offload_optimizer="nvme", offload_params="cpu")],
)
def test_offload_has_one_wording_in_the_table_the_heading_and_the_pickers(layout: ss.Layout) -> None:
    assert layout.offloaded
    for words in layout.offloaded:
        assert words in describe_layout(layout) and words in layout.description
    assert "offload" not in describe_layout(layout)
    studio = Studio()
    studio.apply(replace(studio.plan, layout=layout))
    assert all(words in studio.layout_picker.answer for words in layout.offloaded)
    studio.close()


def test_rows_of_tight_plans_are_marked(ranking: Any) -> None:
    view = show_all_plans(ranking)
    for index in read_row_indices(view):
        row = view.table.value.partition(f"<tr data-act='apply:{index}'")[2].partition("</tr>")[0]
        assert ("Tight:" in row) == ranking.plan(index).memory().is_tight
    assert any(ranking.plan(index).memory().is_tight for index in read_row_indices(view))
