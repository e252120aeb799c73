"""Tests of the Plans tab in a real JupyterLab: visible advice, one Tab stop, marks that apply their plans."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from opened_notebook import open_notebook, run_all_cells, write_notebook
from playwright.sync_api import expect
from served import Lab
from studio_page import SCREENSHOTS, use_theme
from tests.requirements import thorough

pytestmark = thorough()

NAME = "plans.ipynb"
CELL = """
import ipywidgets
import shardscope as ss
from shardscope_widgets.checks.view import ChecksView
from shardscope_widgets.plans.page import PlansPage
from shardscope_widgets.plans.ranking_table import describe_layout

applied = ipywidgets.Label("none")
applied.add_class("applied")

def apply(plan):
    applied.value = f"{describe_layout(plan.layout)} / {plan.recipe.micro_batch_size} {plan.recipe.recompute}"
    page.set_plan(plan)

model, gpus = ss.models["llama-3.1-8b"], ss.Cluster.parse("8xh100-sxm-80gb")
plan = ss.Plan(model, gpus, ss.Recipe(), ss.Layout.ddp())
page = PlansPage(on_apply=apply)
page.set_plan(plan)
large = ss.Plan(ss.models["llama-3.1-70b"], gpus, ss.Recipe(micro_batch_size=4), ss.Layout.fsdp2())
checks = ChecksView(large)
shown = ipywidgets.VBox([page, applied, checks])
shown.add_class("shown")
shown
"""
VISIBLE_PIXELS = 500
"""Height of a tab of the Studio that is visible without scrolling."""
WIDTHS = (728, 600, 358)
"""Widths of the results in windows of 1,040 and 1,024 pixels, and on a phone of 390."""

OVERFLOWING = """() => {
    const root = document.querySelector('.shown');
    const edge = root.getBoundingClientRect().right + 1;
    return [...root.querySelectorAll('*')]
        .filter(each => !each.closest('.ss-scroll, svg, .ss-off-screen') && each.checkVisibility())
        .filter(each => { const box = each.getBoundingClientRect(); return box.width && box.right > edge; })
        .map(each => each.className || each.tagName);
}"""

# Cells whose number wraps.
WRAPPED_NUMBERS = r"""() => [...document.querySelectorAll('.ss-ranked td:not(:first-child)')]
    .filter(cell => /\d/.test(cell.innerText) && cell.checkVisibility())
    .filter(cell => {
        const range = document.createRange();
        range.selectNodeContents(cell);
        return new Set([...range.getClientRects()].map(line => Math.round(line.top))).size > 1;
    })
    .map(cell => cell.innerText)"""

LOWEST_EDGE = """selector => {
    const top = document.querySelector('.ss-plans').getBoundingClientRect().top;
    const bottoms = [...document.querySelectorAll(selector)].map(one => one.getBoundingClientRect().bottom);
    return Math.max(...bottoms) - top;
}"""

TAB_STOPS = """() => [...document.querySelectorAll('.ss-toggles [role=group] button')]
    .filter(button => button.tabIndex === 0).map(button => button.dataset.act)"""

# The position of a hollow (or filled) mark with no other such mark within four pixels.
UNCOVERED_MARK = """hollow => {
    const marks = [...document.querySelectorAll('.ss-ranking .scatterlayer path.point')]
        .map(mark => [mark, mark.getBoundingClientRect()])
        .map(([mark, box]) => [mark, box.x + box.width / 2, box.y + box.height / 2]);
    const isHollow = mark => ['fill', 'fillOpacity'].some(name =>
        ['none', '0'].includes(getComputedStyle(mark)[name]));
    const lone = marks.find(([mark, x, y]) => isHollow(mark) === hollow && marks.every(([other, ox, oy]) =>
        other === mark || Math.hypot(x - ox, y - oy) > 4 || isHollow(other)));
    return lone && [lone[1], lone[2]];
}"""


@pytest.fixture(scope="module")
def page(lab: Lab, browser: Any) -> Iterator[Any]:
    write_notebook(lab, NAME, CELL)
    page = open_notebook(lab, browser, NAME, viewport={"width": 1500, "height": 2200})
    run_all_cells(page, 1)
    page.locator(".ss-advised").wait_for()
    yield page
    page.close()


def test_advice_and_alternatives_are_visible_without_scrolling(page: Any) -> None:
    choose_mode(page, "Advice")
    expect(page.locator(".ss-advised")).to_have_count(1)
    expect(page.locator(".ss-plans .ss-act.ss-first:visible"), "one primary button").to_have_count(1)
    expect(page.locator(".ss-plans .ss-work button:visible"), "no button to search again").to_have_count(0)
    for width in WIDTHS[:2]:
        resize(page, width)
        assert page.evaluate(LOWEST_EDGE, ".ss-advised") < VISIBLE_PIXELS / 2
        assert page.evaluate(LOWEST_EDGE, ".ss-offers li") < VISIBLE_PIXELS
    expect(page.locator(".ss-path")).not_to_be_visible()
    page.locator("summary", has_text=re.compile(r"Why: \d+ decisions")).click()
    page.locator(".ss-path li.ss-taken").first.wait_for()
    page.locator("summary", has_text="Why:").click()


def test_adjacent_views_keep_their_styles(page: Any) -> None:
    """anywidget shares one style element per class: the last view's sheet once replaced the others."""
    choose_mode(page, "Advice")
    for selector in (".ss-advised", ".ss-findings li"):
        assert page.locator(selector).first.evaluate("one => getComputedStyle(one).display") == "grid"


def test_group_of_known_frameworks_is_one_tab_stop(page: Any) -> None:
    choose_mode(page, "Advice")
    group = page.get_by_role("group", name="Frameworks your team knows")
    expect(group.get_by_role("button")).to_have_count(5)
    assert page.evaluate(TAB_STOPS) == ["ddp"]
    group.get_by_role("button", name="DDP").focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("() => document.activeElement.dataset.act") == "fsdp2"
    assert page.evaluate(TAB_STOPS) == ["fsdp2"]
    page.keyboard.press("Tab")
    assert not page.evaluate("() => !!document.activeElement.closest('.ss-toggles')")


def test_mark_describes_its_plan_and_a_click_applies_it(page: Any) -> None:
    choose_mode(page, "All layouts")
    page.wait_for_selector(".ss-ranking .scatterlayer path.point", state="attached")
    resize(page, WIDTHS[0])
    for hollow, words in ((False, "GiB"), (True, "annot be launched|Does not fit")):
        x, y = page.evaluate(UNCOVERED_MARK, hollow)
        page.mouse.move(x, y)
        lines = page.locator(".ss-ranking .hoverlayer tspan.line")
        lines.first.wait_for()
        hover_text = " ".join(" ".join(lines.all_text_contents()).split())
        assert (
            re.search(words, hover_text) and "tokens/s per GPU" in hover_text and "micro-batch" in hover_text
        )
        before = page.locator(".applied").inner_text()
        page.mouse.click(x, y)
        page.wait_for_function("old => document.querySelector('.applied').innerText !== old", arg=before)
        name, _, rest = page.locator(".applied").inner_text().partition(" / ")
        batch, _, recompute = rest.partition(" ")
        assert (
            name.split(",")[0] in hover_text and f"micro-batch {batch}, recompute {recompute}" in hover_text
        )
        page.wait_for_function(
            "() => document.querySelector('.ss-ranking .js-plotly-plot').data.at(-1).x.length === 1"
        )
        page.mouse.move(0, 0)


def test_page_does_not_overflow_and_numbers_do_not_wrap(page: Any) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    for theme, light in (("Light", "true"), ("Dark", "false")):
        use_theme(page, f"JupyterLab {theme}", light=light)
        for name in ("Advice", "All layouts"):
            choose_mode(page, name)
            for width in WIDTHS:
                resize(page, width)
                page.wait_for_function(f"({OVERFLOWING})().length === 0")
                assert page.evaluate(WRAPPED_NUMBERS) == []
                picture = f"plans_{name.split()[0].lower()}_{width}_{theme.lower()}.png"
                page.locator(".shown").screenshot(path=str(SCREENSHOTS / picture))
    table = page.locator(".ss-ranked")
    scroller = page.locator(".ss-scroll:has(.ss-ranked)")
    assert table.evaluate("one => one.scrollWidth") > scroller.evaluate("one => one.clientWidth")
    assert scroller.evaluate("one => getComputedStyle(one).overflowX") == "auto"
    scroller.focus()
    assert page.evaluate("() => document.activeElement.matches('.ss-scroll')"), (
        "the table is scrolled by keyboard"
    )


def choose_mode(page: Any, name: str) -> None:
    page.locator(".ss-plans .ss-seg button", has_text=name).click()
    page.locator(".ss-advised" if name == "Advice" else ".ss-ranked tbody tr").first.wait_for()


def resize(page: Any, width: int) -> None:
    page.evaluate("w => { document.querySelector('.shown').style.width = w + 'px'; }", width)
    page.wait_for_timeout(600)  # Charts are resized a moment later.
