"""Test of the Time, Plans and Checks tabs: read, sort, apply a row, and see the inputs follow."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import expect
from served import Lab
from studio_page import NOTEBOOK, SCREENSHOTS, choose_tab, fill_input, open_fold, use_theme
from tests.requirements import thorough

pytestmark = thorough()

WIDTHS = (1180, 760, 582, 400, 320)
"""582 is the width in a window of 700 pixels, beside JupyterLab's side bar."""
SEARCH_TIMEOUT_MS = 120_000
"""Timeout of a search or of advice on a busy machine."""

# Elements that overflow the Studio on the right, except in boxes that scroll.
OVERFLOWING = """() => {
    const studio = document.querySelector('.ss-studio');
    const edge = studio.getBoundingClientRect().right + 1;
    return [...studio.querySelectorAll('*')]
        .filter(each => !each.closest('.ss-scroll, .ss-headline, .ss-tabs, svg, .ss-off-screen'))
        .filter(each => { const box = each.getBoundingClientRect(); return box.width && box.right > edge; })
        .map(each => each.className || each.tagName);
}"""


# Texts in rows of inputs that are cut off with an ellipsis.
CUT_OFF = """() => [...document.querySelectorAll('.ss-studio .ss-row *')]
    .filter(each => each.checkVisibility() && getComputedStyle(each).textOverflow === 'ellipsis'
        && each.scrollWidth > each.clientWidth + 1)
    .map(each => each.innerText)"""


SEARCH_IS_IDLE = "() => !document.querySelector('.ss-plans .ss-work button').disabled"


@pytest.fixture
def page(lab: Lab, browser: Any, offline: Any) -> Any:
    """The notebook with its first cell run, high enough for a whole page."""
    page = browser.new_page(viewport={"width": 1500, "height": 2600})
    page.set_default_timeout(60_000)
    offline(page)
    page.goto(lab.notebook_url(NOTEBOOK))
    page.wait_for_function("() => /\\| Idle/.test(document.querySelector('#jp-main-statusbar')?.innerText)")
    page.locator(".jp-Notebook .cm-content").first.click()
    page.keyboard.press("Shift+Enter")
    page.wait_for_selector(".ss-memory .barlayer path", state="attached")
    page.keyboard.press("Control+b")
    yield page
    page.close()


def test_fault_46_48_time_plans_and_checks_tabs_work_offline(page: Any) -> None:
    check_head_and_time_follow_the_model(page)
    type_token_budget(page)
    count_findings_and_fix_one(page)
    apply_advice(page)
    check_outdated_advice_is_disabled(page)
    toggle_known_framework(page)
    apply_row_of_all_layouts(page)
    move_through_tabs_by_keyboard(page)
    export_files_and_copy_command(page)
    for theme, light in (("Light", "true"), ("Dark", "false")):
        use_theme(page, f"JupyterLab {theme}", light=light)
        # A theme changes no widths: the dark one is for the screenshots.
        check_nothing_overflows(page, theme.lower(), WIDTHS if theme == "Light" else (1180, 400))


def check_head_and_time_follow_the_model(page: Any) -> None:
    choose_tab(page, "Time")
    page.wait_for_selector(".ss-step .barlayer path", state="attached")
    rates, bars = page.locator(".ss-rates").inner_text(), read_predicted_parts(page)
    assert "tokens/s per GPU" in rates and "per M tokens" in rates and bars["matrices"] > 0
    table = page.locator(".ss-step .ss-parts").last.inner_text()
    fill_input(page, "Model", "llama-3.1-70b")
    page.wait_for_function("before => document.querySelector('.ss-rates').innerText !== before", arg=rates)
    page.wait_for_function(
        "before => document.querySelector('.ss-step .js-plotly-plot').data[0].x[0] !== before",
        arg=bars["matrices"],
    )
    assert page.locator(".ss-step .ss-parts").last.inner_text() != table
    page.locator(".ss-step [data-opens=matrices] .ss-name").click()
    expect(page.locator(".ss-step [data-why=matrices]")).to_contain_text("TFLOP", use_inner_text=True)
    expect(page.locator(".ss-head"), "no rate of a plan that does not fit").not_to_contain_text(
        "tokens/s", use_inner_text=True
    )
    fill_input(page, "Model", "llama-3.1-8b")
    page.wait_for_selector(".ss-verdict[data-state=fits]")
    page.locator(".ss-step [data-opens='MFU, %'] .ss-name").click()
    expect(page.locator(".ss-step")).to_contain_text(
        "causal attention, no recomputation", use_inner_text=True
    )


def type_token_budget(page: Any) -> None:
    before = page.locator(".ss-budget").inner_text()
    box = page.locator(".ss-step .ss-row input")
    box.fill("15T")
    box.press("Enter")
    page.wait_for_function("before => document.querySelector('.ss-budget').innerText !== before", arg=before)
    expect(page.locator(".ss-budget")).to_contain_text("years", use_inner_text=True)
    box.fill("many")
    box.press("Enter")
    page.locator(".ss-step .ss-error [role=alert]").wait_for()
    box.fill("15B")
    box.press("Enter")
    page.locator(".ss-step .ss-error [role=alert]").wait_for(state="detached")


FINDINGS_ARE_STABLE = """() => {
    const tabs = [...document.querySelectorAll('.ss-tabs:not(.ss-analysis-tabs) button')];
    const tab = tabs.find(one => one.innerText.includes('Checks'));
    const counted = Number(tab.querySelector('sup')?.innerText);
    const listed = document.querySelectorAll('.ss-findings li').length;
    if (!listed || counted !== listed || window.listedBefore !== listed) {
        window.listedBefore = listed;
        window.listedSince = performance.now();
        return false;
    }
    return performance.now() - window.listedSince > 2000;
}"""
"""Whether the list has had as many findings as the tab counts for two seconds."""


def count_findings_and_fix_one(page: Any) -> None:
    fill_input(page, "Model", "llama-3.1-8b")
    fill_input(page, "Batch", "4")
    count = page.locator(".ss-tabs:not(.ss-analysis-tabs) button", has_text="Checks").locator("sup")
    choose_tab(page, "Checks")
    # The tab shows the previous plan's number until the new plan is checked.
    page.wait_for_function(FINDINGS_ARE_STABLE)
    num_findings = int(count.inner_text())
    expect(page.locator(".ss-findings li")).to_have_count(num_findings)
    expect(page.locator(".ss-findings li").first).to_contain_text("danger", use_inner_text=True)
    expect(count).to_have_attribute("class", "ss-is-danger")
    page.locator(".ss-findings button").first.click()
    page.wait_for_selector(".ss-verdict:is([data-state=fits], [data-state=tight])")
    page.wait_for_function(
        "before => document.querySelectorAll('.ss-findings li').length < before", arg=num_findings
    )


def apply_advice(page: Any) -> None:
    choose_tab(page, "Plans")
    page.locator(".ss-advised").wait_for(timeout=SEARCH_TIMEOUT_MS)
    summaries = {
        "Why:": ".ss-path li.ss-taken",
        "What can be planned with each framework": ".ss-matrix tbody tr",
    }
    for title, rows in summaries.items():
        # While the view is being replaced, the old one is still in the page for a moment.
        page.wait_for_function(
            "title => [...document.querySelectorAll('summary')].filter(e => e.innerText == title).length < 2",
            arg=title,
        )
        expect(page.locator(rows).first).not_to_be_visible()
        page.locator("summary", has_text=title).click()
        page.locator(rows).first.wait_for()
        page.locator("summary", has_text=title).click()
    # The plan on screen may be the advised one already.
    button = page.locator(".ss-advised button")
    if button.count():
        button.click()
    page.locator(".ss-advised", has_text="Keep the current plan").wait_for()
    page.wait_for_function("() => document.querySelector('.ss-head').innerText.includes('FSDP2')")


def check_outdated_advice_is_disabled(page: Any) -> None:
    """Check that outdated advice looks disabled, and is, until the input is restored."""
    again = page.get_by_role("button", name="Update advice")
    fill_input(page, "Sequence", "2048")
    page.locator(".ss-advice.ss-old .ss-frozen").wait_for()
    expect(page.locator(".ss-plans")).to_contain_text("before an input changed", use_inner_text=True)
    again.wait_for()
    fill_input(page, "Sequence", "4096")
    page.locator(".ss-advice.ss-old").wait_for(state="detached")
    again.wait_for(state="hidden")


def toggle_known_framework(page: Any) -> None:
    """Toggle a known framework by keyboard; the focus stays on the toggle."""
    page.wait_for_function(SEARCH_IS_IDLE)
    team = page.get_by_role("group", name="Frameworks your team knows")
    assert team.get_by_role("button").count() == 5 and team.get_by_role("button", pressed=True).count() == 0
    team.get_by_role("button", name="DeepSpeed").press("Space")
    page.locator(".ss-advised", has_text="Start with DeepSpeed").wait_for(timeout=SEARCH_TIMEOUT_MS)
    team.get_by_role("button", name="DeepSpeed", pressed=True).wait_for()
    assert page.evaluate("() => document.activeElement.matches('[data-act=deepspeed]:focus-visible')")
    page.wait_for_function(SEARCH_IS_IDLE)
    team.get_by_role("button", name="DeepSpeed").press("Space")
    page.locator(".ss-advised", has_text="FSDP2").wait_for(timeout=SEARCH_TIMEOUT_MS)


def export_files_and_copy_command(page: Any) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    open_fold(page, "Run")
    page.get_by_role("button", name="Export configs and scripts").click()
    page.locator(".ss-files li", has_text="train.py").first.wait_for(timeout=SEARCH_TIMEOUT_MS)
    button = page.get_by_role("button", name="Copy the command that starts").first
    button.click()
    page.locator(".ss-command button", has_text="Copied").wait_for()
    copied = page.evaluate("() => navigator.clipboard.readText()")
    assert re.match(r"cd /\S+/exports/\S+ && (\w+=<\.\.\.> )*\./\w+\.sh", copied)


def apply_row_of_all_layouts(page: Any) -> None:
    page.get_by_role("button", name="All layouts").click()
    page.locator(".ss-ranked tbody tr").first.wait_for(timeout=SEARCH_TIMEOUT_MS)
    page.wait_for_selector(".ss-ranking .scatterlayer path.point", state="attached")
    # The tab scrolls: nothing in it is squeezed into its height.
    box = page.locator(".ss-ranking .ss-chart").bounding_box()
    table = page.locator(".ss-ranked").bounding_box()
    assert box["height"] > 200 and table["y"] >= box["y"] + box["height"] - 1, "the chart is above its table"
    # Sorted by peak memory: the first row has another framework or micro-batch than the applied plan.
    page.locator(".ss-ranked th button", has_text="peak").click()
    page.locator(".ss-ranked th[aria-sort=ascending] button", has_text="peak").wait_for()
    peaks = [float(text) for text in page.locator(".ss-ranked tbody td:nth-child(6)").all_inner_texts()]
    assert peaks == sorted(peaks) and len(peaks) > 5
    head = page.locator(".ss-head").inner_text()
    row = page.locator(".ss-ranked tbody tr").first
    peak = row.locator("td").nth(5).inner_text()
    row.click()
    page.wait_for_function("before => document.querySelector('.ss-head').innerText !== before", arg=head)
    expect(page.locator(".ss-verdict")).to_contain_text(f"Fits: {peak} of", use_inner_text=True)
    page.locator(".ss-ranked tr.ss-current", has_text="this plan").wait_for()
    page.locator(".ss-pager button", has_text="Next").press("Enter")
    page.locator(".ss-pager", has_text="13 to 24").wait_for()
    assert page.evaluate("() => document.activeElement.dataset.act") == "page:1", "the focus stays there"


def move_through_tabs_by_keyboard(page: Any) -> None:
    chosen = page.locator(".ss-tabs:not(.ss-analysis-tabs) [aria-selected=true]")
    chosen.focus()
    page.keyboard.press("ArrowLeft")
    page.locator(".ss-tabs:not(.ss-analysis-tabs) [aria-selected=true]", has_text="Time").wait_for()
    page.locator(".ss-step").wait_for()
    page.keyboard.press("Home")
    page.locator(".ss-tabs:not(.ss-analysis-tabs) [aria-selected=true]", has_text="Memory").wait_for()


def check_nothing_overflows(page: Any, theme: str, widths: tuple[int, ...]) -> None:
    """Check each tab at each width, and save screenshots."""
    for tab in ("Time", "Plans", "Checks"):
        choose_tab(page, tab)
        for width in widths:
            page.evaluate("w => { document.querySelector('.ss-studio').style.width = w + 'px'; }", width)
            page.wait_for_timeout(500)
            for _ in range(40):  # A busy page resizes its charts late.
                if page.evaluate(OVERFLOWING) == []:
                    break
                page.wait_for_timeout(500)
            assert page.evaluate(OVERFLOWING) == [], (tab, width)
            assert page.evaluate(CUT_OFF) == [], (tab, width)
            SCREENSHOTS.mkdir(parents=True, exist_ok=True)
            picture = SCREENSHOTS / f"{tab.lower()}_{width}_{theme}.png"
            page.locator(".ss-studio").screenshot(path=str(picture))
        page.evaluate("() => { document.querySelector('.ss-studio').style.width = ''; }")


def read_predicted_parts(page: Any) -> dict[str, float]:
    """Return part -> length of the predicted bar, as plotly holds it in the browser."""
    return page.evaluate(
        """() => Object.fromEntries(
            document.querySelector('.ss-step .js-plotly-plot').data
                .filter(trace => trace.x.length)
                .map(trace => [trace.name, trace.x[0]]))"""
    )
