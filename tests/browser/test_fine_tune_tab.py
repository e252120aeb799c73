"""Test of the Studio's Fine-tune tab with the example model: training with samples, then the chat."""

from __future__ import annotations

from typing import Any

import pytest
from opened_notebook import open_notebook
from playwright.sync_api import expect
from served import Lab
from studio_page import NOTEBOOK, SCREENSHOTS, choose_tab, use_theme
from test_one_screen import find_overflowing
from tests.requirements import needs, thorough

from shardscope.training.weights.example_models import find_example

needs("torch")
needs("datasets")
needs("peft")

MODEL, DATA = "smollm2-135m-instruct", "data/few.jsonl"
NUM_ROWS = 60
"""Questions about the Zorblat, three for each fact, so that the loss of held-out ones falls."""
QUESTION = "What is a Zorblat?"
READ_MS, TRAIN_MS, ANSWER_MS = 120_000, 420_000, 300_000
IS_INSIDE = """answers => answers.every(answer => answer.getBoundingClientRect().right
    <= answer.closest('td').getBoundingClientRect().right)"""
SAMPLE_CELLS = """() => [...document.querySelectorAll('.ss-finetune .ss-samples td')]
    .map(cell => [cell.dataset.label, cell.innerText])"""

BOTH_ANSWER = """() => [...document.querySelectorAll('.ss-chat .ss-log-pane > .ss-log')]
    .every(pane => /Model\\s+(?!loading)\\S[\\s\\S]{12}/.test(pane.innerText))"""


def take_pictures(page: Any, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    for theme, light in (("Light", "true"), ("Dark", "false")):
        use_theme(page, f"JupyterLab {theme}", light=light)
        page.locator("#jupyterlab-splash").wait_for(state="detached")
        page.wait_for_timeout(400)
        page.screenshot(path=str(SCREENSHOTS / f"finetune_tab_{name}_{theme.lower()}.png"))
        assert find_overflowing(page) == [], (name, theme)


@thorough()
def test_the_example_model_is_fine_tuned_by_clicks(lab: Lab, browser: Any, offline: Any) -> None:
    if find_example(MODEL) is None:
        pytest.skip("the example model is not here; to run this: make model")
    rows = (lab.folder / "data" / "zorblat.jsonl").read_text().splitlines(keepends=True)
    (lab.folder / DATA).write_text("".join(rows[:NUM_ROWS]))
    page = open_notebook(lab, browser, NOTEBOOK, viewport={"width": 1440, "height": 900})
    offline(page)
    page.locator(".jp-Notebook .cm-content").first.click()
    page.keyboard.press("Shift+Enter")
    page.wait_for_selector(".ss-memory .barlayer path", state="attached")
    page.locator(".ss-studio").scroll_into_view_if_needed()
    choose_tab(page, "Fine-tune")
    tab, button = page.locator(".ss-finetune"), page.locator(".ss-head .ss-main-button")
    expect(tab.locator(".ss-what")).to_contain_text("Choose a model and a data file")
    expect(button).to_be_disabled()
    take_pictures(page, "empty")
    tab.get_by_role("button", name="Use the example model").click()
    box = tab.locator(".ss-row", has=page.get_by_text("Data", exact=True)).locator("input[type=text]")
    box.fill(DATA)
    box.press("Enter")
    summary = tab.locator(".ss-what")
    expect(summary).to_contain_text(f"{NUM_ROWS} rows of few.jsonl", timeout=READ_MS)
    expect(page.locator(".ss-head .ss-what")).to_contain_text("LoRA rank 16")
    expect(page.locator(".ss-verdict").first).to_contain_text("Fits")
    tab.locator(".ss-fold-line", has_text="Advanced").click()
    epochs = tab.locator(".ss-row", has=page.get_by_text("Epochs", exact=True)).locator("input")
    expect(epochs).to_have_attribute("placeholder", "15")
    take_pictures(page, "ready")
    epochs.fill("1.5")
    epochs.press("Enter")
    expect(summary).to_contain_text("1.5 epochs, 21 steps of 4 sequences")

    expect(button).to_have_text("Fine-tune on 2 CPU ranks")
    button.click()
    run = tab.locator(".ss-run")
    expect(run.get_by_role("button", name="Stop and keep the best")).to_be_enabled(timeout=READ_MS)
    expect(run.get_by_text("remaining")).to_be_visible()
    before = "Before training"
    page.wait_for_function(
        f"() => ({SAMPLE_CELLS})().some(([title]) => title !== '{before}')", timeout=TRAIN_MS
    )
    assert run.get_by_role("button", name="Stop", exact=True).is_enabled(), "samples come while it trains"
    answers = page.evaluate(SAMPLE_CELLS)
    first = [text for title, text in answers if title == before]
    assert first and first != [text for title, text in answers if title != before][: len(first)]
    take_pictures(page, "training")
    # Samples and the loss are in sight together, and the form is below them.
    expect(run.locator(".ss-samples")).to_be_in_viewport(ratio=1)
    assert run.locator(".ss-samples .ss-asked").count() == 3
    assert run.locator(".ss-samples").evaluate("box => box.scrollHeight <= box.clientHeight"), "all of them"
    assert run.locator(".ss-answer").evaluate_all(IS_INSIDE), "no answer is wider than its column"
    expect(run.locator(".js-plotly-plot .subplot").first).to_be_in_viewport(ratio=0.4)

    # Of a busy machine's minutes the rest would take many.
    run.get_by_role("button", name="Stop and keep the best").click()
    chat = tab.locator(".ss-chat")
    expect(chat).to_be_visible(timeout=TRAIN_MS)
    prompt = chat.locator("textarea")
    expect(prompt).to_be_in_viewport(ratio=1)
    prompt.fill(QUESTION)
    prompt.press("Enter")
    # Two processes load a model each, and the base has a lot to say.
    page.wait_for_function(BOTH_ANSWER, timeout=ANSWER_MS)
    stop = chat.get_by_role("button", name="Stop")
    stop.click(force=True)  # Short answers may have ended by now.
    expect(stop).to_be_disabled()
    panes = chat.locator(".ss-log-pane > .ss-log")
    base, tuned = (panes.nth(number).inner_text() for number in (0, 1))
    assert QUESTION in base and QUESTION in tuned and base != tuned
    expect(button).to_be_enabled()
    expect(run.get_by_role("button", name="Merge")).to_be_visible()
    take_pictures(page, "chat")
    page.close()
