"""Test of the main workflow: open the notebook, plan, train a tiny model, stop, train again, open a trace."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import expect
from served import Lab
from studio_page import (
    LAST_STEP,
    NOTEBOOK,
    SCREENSHOTS,
    TIMEOUT_MS,
    choose_tab,
    fill_input,
    open_fold,
    read_chart,
    save_screenshot,
    use_theme,
)
from tests.requirements import thorough

STEP_TIMEOUT_MS = 120_000
RUN_TIMEOUT_MS = 240_000
PARAMETERS_DIFFER = """before =>
    JSON.stringify(document.querySelector('.ss-memory .js-plotly-plot').data[0].x) !== before"""


def test_fault_26_27_48_plan_launch_stop_and_open_the_trace(lab: Lab, browser: Any, offline: Any) -> None:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.set_default_timeout(TIMEOUT_MS)
    offline(page)
    run_all_cells(page, lab)
    save_screenshot(page, "studio_first_cell")

    check_chart_and_verdict_follow_the_model(page)
    check_invalid_input_keeps_the_chart(page)
    make_plan_fit_and_undo(page)

    start_run(page, steps=4000)
    wait_for_step(page)
    save_screenshot(page, "run_under_way")
    page.get_by_role("button", name="Stop", exact=True).click()
    page.wait_for_selector(".ss-status[data-status=stopped]")
    expect(page.locator(".ss-run-top")).to_contain_text(
        f"Stop was pressed in {NOTEBOOK}", use_inner_text=True
    )
    assert wait_for_no_processes(lab.folder / "runs"), "a stopped run left processes behind"

    start_run(page, steps=24)
    page.wait_for_selector(".ss-status[data-status=finished]", timeout=RUN_TIMEOUT_MS)
    assert wait_for_no_processes(lab.folder / "runs"), "a finished run left processes behind"
    assert losses_fall(lab.folder / "runs")
    save_screenshot(page, "run_finished_light")

    check_page_is_unchanged_after_reload(page)
    choose_tab(page, "Trace")
    check_trace_has_slices(page)
    save_screenshot(page, "trace_light")

    use_theme(page, "JupyterLab Dark", light="false")
    for tab in ("Memory", "Runs", "Trace"):
        page.locator(".ss-tabs:not(.ss-analysis-tabs) button", has_text=tab).click()
        page.wait_for_timeout(800)
        page.locator(".ss-studio").scroll_into_view_if_needed()
        save_screenshot(page, f"{tab}_dark")
    page.close()


@thorough()
def test_memory_is_rehearsed_and_shown_over_one_step(lab: Lab, browser: Any, offline: Any) -> None:
    lab.restore()  # This is the README's picture: without the runs and the dark theme of the test above.
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.set_default_timeout(TIMEOUT_MS)
    offline(page)
    run_all_cells(page, lab)
    check_model_input_offers_all_models(page)
    check_memory_over_one_step(page)
    rehearse_memory(page)
    page.locator(".ss-tabs:not(.ss-analysis-tabs) button", has_text="Memory").focus()
    page.locator(".ss-studio").screenshot(path=str(SCREENSHOTS / "studio_light.png"))
    page.close()


def run_all_cells(page: Any, lab: Lab) -> None:
    page.goto(lab.notebook_url(NOTEBOOK))
    page.wait_for_selector(".jp-Notebook .jp-CodeCell")
    # Cells that are run before the kernel has answered make JupyterLab ask which kernel is meant.
    page.wait_for_function("() => /\\| Idle/.test(document.querySelector('#jp-main-statusbar')?.innerText)")
    page.keyboard.press("Control+b")
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_text("Run All Cells", exact=True).click()
    page.wait_for_selector(".ss-studio .ss-verdict")
    page.wait_for_selector(".ss-studio .ss-memory .barlayer path", state="attached")
    # The last cell has run when its prompt has a number.
    page.wait_for_function(
        "() => [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')]"
        ".every(prompt => /\\d/.test(prompt.textContent))"
    )
    expect(page.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.stderr']")).to_have_count(0)
    page.locator(".jp-Notebook .jp-Cell").first.scroll_into_view_if_needed()
    page.locator(".ss-studio").scroll_into_view_if_needed()


def check_chart_and_verdict_follow_the_model(page: Any) -> None:
    sentence, bars = page.locator(".ss-head").inner_text(), read_chart(page)
    assert "Llama 3.1 8B" in sentence and "Fits: " in sentence
    fill_input(page, "Model", "llama-3.1-70b")
    page.wait_for_selector(".ss-verdict[data-state='does not fit']")
    page.wait_for_function(PARAMETERS_DIFFER, arg=json.dumps(bars["parameters"]))
    after = read_chart(page)
    expect(page.locator(".ss-verdict")).to_contain_text("Does not fit: needs", use_inner_text=True)
    assert after["parameters"][0] > 8 * bars["parameters"][0]
    fill_input(page, "Model", "llama-3.1-8b")
    page.wait_for_selector(".ss-verdict[data-state=fits]")
    page.wait_for_function(f"before => !({PARAMETERS_DIFFER})(before)", arg=json.dumps(bars["parameters"]))
    assert read_chart(page) == bars


def check_invalid_input_keeps_the_chart(page: Any) -> None:
    before = page.locator(".ss-headline").inner_text(), read_chart(page)
    fill_input(page, "Sequence", "-5")
    error = page.locator(".ss-side .ss-error [role=alert]")
    error.wait_for()
    assert "Recipe.seq_len is -5; allowed: a whole number from 1 to" in error.get_attribute("title")
    assert page.locator(".ss-headline").inner_text() == before[0] and read_chart(page) == before[1]
    save_screenshot(page, "bad_input")
    page.locator(".ss-side .ss-error button").click()  # The fix is a button at the input.
    error.wait_for(state="detached")
    fill_input(page, "Sequence", "4096")
    boxes = [open_fold(page, "Training").locator(".ss-row", has_text=name) for name in ("Sequence", "Batch")]
    border = "box => getComputedStyle(box).borderTopColor"
    page.locator(".ss-fold-line").first.focus()
    colours = {box.first.locator("input").last.evaluate(border) for box in boxes}
    assert len(colours) == 1, "no input is marked any more"


def make_plan_fit_and_undo(page: Any) -> None:
    """The fix changes the inputs; the notice describes the change and can undo it."""
    fill_input(page, "Batch", "4")
    page.wait_for_selector(".ss-verdict[data-state='does not fit']")
    chips = page.locator(".ss-memory .ss-chip")
    chips.first.wait_for()
    expect(page.locator(".ss-head"), "no rate of a plan that cannot run").not_to_contain_text(
        "tokens/s", use_inner_text=True
    )
    save_screenshot(page, "does_not_fit")
    page.get_by_role("button", name="Make it fit").first.click()
    page.wait_for_selector(".ss-verdict:is([data-state=fits], [data-state=tight])")
    notice = page.locator(".ss-notice")
    expect(notice).to_contain_text("Made it fit", use_inner_text=True)
    notice.get_by_role("button", name="Undo").click()
    page.wait_for_selector(".ss-verdict[data-state='does not fit']")
    fill_input(page, "Batch", "1")
    page.wait_for_selector(".ss-verdict[data-state=fits]")


def check_model_input_offers_all_models(page: Any) -> None:
    """The input's text filters the list: a click empties the input, and leaving it restores the text."""
    box = page.locator(".ss-side input[list]")
    box.click()
    assert (box.input_value(), box.get_attribute("placeholder")) == ("", "llama-3.1-8b")
    assert page.locator(".ss-side datalist option").count() > 60
    box.press("Tab")
    assert box.input_value() == "llama-3.1-8b"
    expect(page.locator(".ss-side .ss-error [role=alert]")).to_have_count(0)
    fill_input(page, "Model", "qwen3-8b")
    page.wait_for_function("() => document.querySelector('.ss-head').innerText.includes('Qwen3 8B')")
    fill_input(page, "Model", "llama-3.1-8b")
    page.wait_for_function("() => document.querySelector('.ss-head').innerText.includes('Llama 3.1 8B')")


def rehearse_memory(page: Any) -> None:
    view = page.locator(".ss-studio .ss-memory")
    view.get_by_role("button", name="Check memory without GPUs").click()
    view.get_by_role("progressbar").or_(view.locator(".progress-bar")).first.wait_for()
    expect(view.get_by_role("button", name="Cancel")).to_be_visible()
    rows = "document.querySelector('.ss-memory .js-plotly-plot').data[0].y.join()"
    page.wait_for_function(f"() => {rows}.startsWith('predicted,rehearsed')", timeout=RUN_TIMEOUT_MS)


def check_memory_over_one_step(page: Any) -> None:
    view = page.locator(".ss-studio .ss-memory")
    view.get_by_role("button", name="Over one step").click()
    view.locator(".scatterlayer .fills path").first.wait_for(state="attached")
    view.locator(".barlayer path").first.wait_for(state="detached")
    expect(view.locator(".infolayer")).to_contain_text("79.1 GiB usable")
    view.get_by_role("button", name="At the peak").click()
    view.locator(".barlayer path").first.wait_for(state="attached")


def start_run(page: Any, steps: int) -> None:
    """Press the main button, which is visible wherever the Studio is scrolled."""
    fill_input(page, "Steps", str(steps))
    button = page.locator(".ss-head .ss-main-button")
    expect(button).to_have_text("Try a tiny model on 2 CPU ranks", use_inner_text=True)
    page.wait_for_function("() => !document.querySelector('.ss-head .ss-main-button').disabled")
    button.click()
    page.wait_for_selector(".ss-status[data-status=starting], .ss-status[data-status=running]")
    expect(page.locator(".ss-run .ss-note")).to_contain_text("Trial run", use_inner_text=True)


def wait_for_step(page: Any) -> None:
    page.wait_for_selector(".ss-status[data-status=running]", timeout=STEP_TIMEOUT_MS)
    page.wait_for_function(
        "() => [...document.querySelectorAll('.ss-run .ss-latest tbody tr')].length === 2",
        timeout=STEP_TIMEOUT_MS,
    )
    page.wait_for_function(f"() => {LAST_STEP} >= 2", timeout=STEP_TIMEOUT_MS)


def check_page_is_unchanged_after_reload(page: Any) -> None:
    page.locator(".ss-tabs:not(.ss-analysis-tabs) button", has_text="Memory").click()
    page.locator(".ss-studio .ss-memory .js-plotly-plot").wait_for()
    bars = read_chart(page)
    page.get_by_role("menuitem", name="File", exact=True).click()
    page.get_by_text("Save Notebook", exact=True).click()
    page.wait_for_timeout(1500)
    page.reload()
    page.wait_for_selector(".ss-studio .ss-verdict")
    page.wait_for_selector(".ss-status[data-status=finished]", state="attached")
    page.wait_for_selector(".ss-memory .barlayer path", state="attached")
    assert read_chart(page) == bars


def check_trace_has_slices(page: Any) -> None:
    canvas = page.locator(".ss-trace canvas").first
    canvas.wait_for()
    page.wait_for_function(
        "() => Number(document.querySelector('.ss-trace canvas[data-slices]')?.dataset.slices) > 100"
    )
    before = page.evaluate("() => ({...document.querySelector('.ss-trace canvas[data-slices]').dataset})")
    canvas.hover(position={"x": 500, "y": 60})
    page.mouse.wheel(0, -400)
    page.wait_for_function(
        "t1 => document.querySelector('.ss-trace canvas[data-slices]').dataset.t1 !== t1", arg=before["t1"]
    )
    page.get_by_placeholder("Search names").fill("gloo")
    page.wait_for_function(
        "() => Number(document.querySelector('.ss-trace canvas[data-slices]').dataset.matches) > 0"
    )


def wait_for_no_processes(runs: Path) -> bool:
    """Return whether all processes of the runs in ``runs`` end within ten seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not [
            p
            for p in psutil.process_iter(["cmdline"])
            if any(str(runs) in part for part in p.info["cmdline"] or [])
        ]:
            return True
        time.sleep(0.2)
    return False


def losses_fall(runs: Path) -> bool:
    newest = max(runs.iterdir(), key=lambda folder: folder.stat().st_mtime)
    for rank in (0, 1):
        lines = (newest / "events" / f"rank-{rank}.jsonl").read_text().splitlines()
        losses = [record["loss"] for record in map(json.loads, lines) if "loss" in record]
        if not (len(losses) == 24 and losses[-1] < losses[0] - 0.3):
            return False
    return True
