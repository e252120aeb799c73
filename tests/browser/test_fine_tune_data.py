"""Test of the data of a fine-tune in a real page: type a path, see the preview, shorten the sequences."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

from playwright.sync_api import expect
from served import Lab
from studio_page import choose_tab, fill_input, open_fold, open_studio, save_screenshot, use_theme
from test_one_screen import find_overflowing
from tests.requirements import needs, thorough
from tests.weights_folders import write_chat_folder

needs("datasets")
needs("transformers")

READ_TIMEOUT_MS = 120_000
"""The first read imports datasets and transformers."""
NUM_ROWS = 120
WORDS = ("the", "white", "whale", "swam", "past", "an", "old", "ship", "at", "night", "captain", "slept")


def write_questions(path: Path) -> None:
    chooser = random.Random(0)
    with path.open("w") as file:
        for number in range(NUM_ROWS):
            answer = " ".join(chooser.choices(WORDS, k=chooser.randint(4, 60)))
            row = {"question": f"What happened on day {number}?", "completion": f"{answer.capitalize()}."}
            file.write(json.dumps(row) + "\n")


@thorough()
def test_data_is_previewed_and_its_length_applied(lab: Lab, browser: Any, tmp_path: Path) -> None:
    folder = write_chat_folder(tmp_path / "chatty", max_position_embeddings=4096)
    write_questions(tmp_path / "questions.jsonl")
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    try:
        open_studio(page, lab)
        fill_input(page, "Model", str(folder))
        fold = open_fold(page, "Task")
        expect(fold.locator(".ss-row .widget-label", has_text="Data")).to_be_visible()
        box = fold.locator(".ss-row", has=page.get_by_text("Data", exact=True)).locator("input")
        box.fill(str(tmp_path / "questions.jsonl"))
        box.press("Enter")
        expect(fold.locator(".ss-data")).to_contain_text(
            f"{NUM_ROWS} rows, prompt-completion (prompt = question)",
            use_inner_text=True,
            timeout=READ_TIMEOUT_MS,
        )
        fold.get_by_role("button", name="Preview").click()
        page.locator(".ss-tabs [aria-selected=true]", has_text="Data").wait_for()
        expect(page.locator(".ss-preview mark").first).to_be_visible()
        assert page.locator(".ss-length-bars i").count() > 5
        expect(page.locator(".ss-lengths")).to_contain_text("4,096", use_inner_text=True)
        assert find_overflowing(page) == []
        save_screenshot(page, "data_before")

        shorten = fold.get_by_role("button", name="Use a sequence length of")
        assert "is padding" in shorten.get_attribute("title")
        wanted = shorten.inner_text().rpartition(" ")[2]
        shorten.click()
        expect(page.locator(".ss-lengths")).to_contain_text(f"sequence length {wanted}", use_inner_text=True)
        expect(shorten).to_have_count(0)
        length = open_fold(page, "Training").locator(".ss-row", has=page.get_by_text("Sequence")).first
        expect(length.locator("input")).to_have_value(wanted)
        expect(length.locator("input")).to_have_attribute("title", re.compile(f"Recommended: {wanted}\\. "))
        run = open_fold(page, "Run")
        epochs = run.locator(".ss-row", has=page.get_by_text("Epochs, learning rate")).locator("input")
        expect(epochs.filter(visible=True)).to_have_count(2)
        expect(epochs.filter(visible=True).first).to_have_attribute("title", re.compile("Recommended: 3"))
        # On CPU ranks, with two sequences a step.
        expect(run).to_contain_text("180 steps of 2 sequences", use_inner_text=True)
        run.scroll_into_view_if_needed()
        for theme, light in (("Light", "true"), ("Dark", "false")):
            use_theme(page, f"JupyterLab {theme}", light=light)
            page.locator("#jupyterlab-splash").wait_for(state="detached")
            save_screenshot(page, f"data_{theme}")
            assert find_overflowing(page) == []
        box.fill("")
        box.press("Enter")
        expect(page.locator(".ss-tabs button", has_text="Data")).to_have_count(0)
        choose_tab(page, "Memory")
    finally:
        page.close()
