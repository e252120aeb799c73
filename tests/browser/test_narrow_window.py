"""Tests of the Studio in a small window beside JupyterLab's file browser, and on a phone."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opened_notebook import open_notebook, run_all_cells, write_notebook
from playwright.sync_api import expect
from served import Lab
from studio_page import SCREENSHOTS, choose, fill_input, open_fold, open_studio
from tests.requirements import thorough

pytestmark = thorough()

SEARCH_TIMEOUT_MS = 120_000
STORED_RUNS = Path(__file__).parents[1] / "fixtures" / "formats" / "stored_runs"

LEAST_GAP = """selector => {
  const places = [...document.querySelectorAll(selector)].map(tab => tab.getBoundingClientRect());
  return Math.min(...places.slice(1).map((place, index) => place.left - places[index].right));
}"""


@pytest.fixture
def page(lab: Lab, browser: Any, offline: Callable[[object], None]) -> Iterator[Any]:
    """The Studio in a window of 1024 by 768 with the file browser open, and three runs in its folder."""
    shutil.copytree(STORED_RUNS, lab.folder / "runs", dirs_exist_ok=True)
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.set_default_timeout(60_000)
    offline(page)
    open_studio(page, lab)
    page.set_viewport_size({"width": 1024, "height": 768})
    page.wait_for_timeout(1500)
    page.locator(".ss-studio").evaluate("studio => studio.scrollIntoView({ block: 'center' })")
    yield page
    page.close()


def test_inputs_and_results_fit_beside_the_file_browser(page: Any) -> None:
    expect(page.locator(".jp-FileBrowser")).to_be_visible()
    studio = page.locator(".ss-studio").bounding_box()
    side, main = (page.locator(f".ss-{name}").bounding_box() for name in ("side", "main"))
    assert main["x"] >= side["x"] + side["width"] - 1, "the results are beside the inputs, not below them"
    chart = page.locator(".ss-memory .js-plotly-plot").bounding_box()
    batch = open_fold(page, "Training").locator(".ss-row", has_text="Global batch").bounding_box()
    for box in (chart, batch):
        assert box["y"] + box["height"] <= 768 and box["x"] + box["width"] <= studio["x"] + studio["width"]
    assert batch["height"] < 40, "its text is on one line"
    expect(
        page.locator(".ss-tabs:not(.ss-analysis-tabs) button", has_text="Runs").locator("sup")
    ).to_have_text("3")
    for tab in page.locator(".ss-tabs:not(.ss-analysis-tabs) button").all():
        box = tab.bounding_box()
        assert box["x"] + box["width"] <= studio["x"] + studio["width"], tab.inner_text()
    assert page.evaluate(LEAST_GAP, ".ss-main > .ss-tabs button") >= 6, "a word space is 4 pixels"
    page.screenshot(path=str(SCREENSHOTS / "narrow_beside_the_file_browser.png"))


def test_the_verdict_is_never_cut(page: Any) -> None:
    page.locator(".jp-SideBar [title^='File Browser']").first.click()
    for width in (1024, 1150, 1280):
        page.set_viewport_size({"width": width, "height": 768})
        page.wait_for_timeout(1000)
        page.screenshot(path=str(SCREENSHOTS / f"verdict_at_{width}.png"))
        verdict = page.locator(".ss-head .ss-verdict")
        assert verdict.evaluate("element => element.scrollWidth <= element.clientWidth"), width


def test_no_text_of_the_head_is_cut_beside_the_file_browser(page: Any) -> None:
    """Also a long verdict: of adapters on a node whose host memory is not known."""
    check_head(page)
    choose(page, "Type", "rtx-4090-24gb")
    fill_input(page, "GPUs", "1")
    training = open_fold(page, "Training")
    training.get_by_text("LoRA", exact=True).click()
    training.locator(".ss-row", has=page.get_by_text("Recompute")).locator("select").select_option("full")
    choose(page, "Framework", "DeepSpeed ZeRO")
    page.wait_for_selector(".ss-verdict[data-state=unknown]")
    check_head(page)
    framework = open_fold(page, "Framework")
    for name, value in (("ZeRO stage", "3"), ("Offload optimizer", "CPU"), ("Offload parameters", "CPU")):
        framework.locator(".ss-row", has=page.get_by_text(name)).get_by_text(value, exact=True).click()
    expect(page.locator(".ss-what")).to_contain_text("optimizer on CPU)")
    check_head(page)


def check_head(page: Any) -> None:
    """Check that plan, verdict and numbers are whole, in windows from 1,000 pixels to a common laptop's."""
    for width in (1000, 1366, 1440):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(1000)
        for selector in (".ss-what", ".ss-verdict"):
            text = page.locator(f".ss-head {selector}")
            assert text.evaluate(
                """one => {
                    const text = document.createRange();
                    text.selectNodeContents(one);
                    const edge = document.querySelector('.ss-headline').getBoundingClientRect().right;
                    return text.getBoundingClientRect().right <= edge
                        && one.scrollWidth <= one.clientWidth && one.scrollHeight <= one.clientHeight;
                }"""
            ), (selector, width, text.inner_text())
        assert page.locator(".ss-rates > span").evaluate_all(
            """numbers => {
                const box = document.querySelector('.ss-rates').getBoundingClientRect();
                return numbers.map(number => number.getBoundingClientRect()).every(
                    number => number.top >= box.bottom || number.right <= box.right + 1);
            }"""
        ), width


def test_names_of_inputs_take_one_line_where_they_have_the_whole_width(page: Any) -> None:
    page.set_viewport_size({"width": 900, "height": 900})
    page.wait_for_timeout(1000)
    training = open_fold(page, "Training")
    heights = {
        name: training.locator(".ss-row > .widget-label", has_text=name).first.bounding_box()["height"]
        for name in ("Precision", "Micro-batch", "Global batch")
    }
    assert len(set(heights.values())) == 1, heights
    texts = training.locator(".ss-row > .widget-label:first-child").evaluate_all(
        """labels => labels.filter(label => label.checkVisibility()).map(label => {
            const text = document.createRange();
            text.selectNodeContents(label);
            return [label.innerText, text.getBoundingClientRect().height];
        })"""
    )
    assert all(height < 22 for _, height in texts), texts


def test_steps_and_learning_rate_share_a_line_beside_a_scroll_bar(page: Any) -> None:
    """The learning rate was on a line of its own, below the label."""
    open_fold(page, "Framework")
    fold = open_fold(page, "Run")
    side = page.locator(".ss-side")
    assert side.evaluate("side => side.scrollHeight > side.clientHeight"), "it has a scroll bar"
    steps, rate = (fold.locator(".ss-row input[type=text]").nth(index).bounding_box() for index in (0, 1))
    assert steps["y"] == rate["y"] and steps["x"] + steps["width"] < rate["x"]


def test_the_path_of_the_data_is_whole_where_the_form_has_half_of_the_width(lab: Lab, browser: Any) -> None:
    name = "narrow_form.ipynb"
    source = "from shardscope_widgets import FinetuneView"
    write_notebook(lab, name, f'{source}\nFinetuneView("", "data/zorblat.jsonl")')
    page = open_notebook(lab, browser, name, viewport={"width": 1000, "height": 900})
    page.locator(".jp-SideBar [title^='File Browser']").first.click()
    run_all_cells(page, 1)
    box = page.locator(".ss-finetune input[type=text]").nth(1)
    expect(box).to_have_value("data/zorblat.jsonl")
    top = page.locator(".ss-finetune-top")
    assert len(top.evaluate("top => getComputedStyle(top).gridTemplateColumns").split()) == 2
    assert box.evaluate("box => box.scrollWidth <= box.clientWidth")
    page.close()


def test_make_it_fit_asks_before_changing_the_framework(page: Any) -> None:
    fill_input(page, "Model", "llama-3.1-405b")
    nodes = open_fold(page, "GPUs").locator("input").nth(1)
    nodes.fill("8")
    nodes.press("Enter")
    page.wait_for_function("() => document.querySelector('.ss-what').title.includes('8 nodes of 8')")
    choose(page, "Framework", "Megatron-core")
    page.wait_for_function("() => document.querySelector('.ss-what').title.includes('Megatron')")
    page.wait_for_selector(".ss-verdict[data-state='does not fit']")
    page.locator(".jp-SideBar [title^='File Browser']").first.click()
    page.set_viewport_size({"width": 390, "height": 844})
    page.locator(".ss-fit-button").click()
    use = page.locator(".ss-notice button", has_text=re.compile("^Use "))
    use.wait_for(timeout=SEARCH_TIMEOUT_MS)
    assert page.locator(".ss-verdict[data-state='does not fit']").count(), "nothing has changed yet"
    page.screenshot(path=str(SCREENSHOTS / "make_it_fit_asks.png"))
    studio, box = page.locator(".ss-studio").bounding_box(), use.bounding_box()
    assert box["x"] + box["width"] <= studio["x"] + studio["width"], "the whole label can be read"
    use.click()
    page.wait_for_selector(".ss-verdict:is([data-state=fits], [data-state=tight])")
    page.locator(".ss-notice button", has_text="Undo").click()
    page.wait_for_selector(".ss-verdict[data-state='does not fit']")
