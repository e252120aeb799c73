"""Test of a fine-tune from one click in a real JupyterLab: inputs, training on CPU ranks, then the chat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from opened_notebook import TIMEOUT_MS, open_notebook, run_all_cells, write_notebook
from playwright.sync_api import expect
from served import Lab
from studio_page import SCREENSHOTS, use_theme
from tests.requirements import needs, thorough
from tests.weights_folders import write_chat_folder

needs("torch")
needs("datasets")
needs("peft")


NOTEBOOK = "one_click.ipynb"
NUM_ROWS = 50
TRAINING_MS = 300_000
IS_ABOVE_BUTTONS = """() => {
  const top = document.querySelector('.ss-finetune .ss-run-top'), whole = top.getBoundingClientRect();
  const heading = top.querySelector(':scope > .widget-html').getBoundingClientRect();
  return [...top.querySelectorAll('button')].map(button => button.getBoundingClientRect())
    .filter(place => place.width).every(place => place.top >= heading.bottom - 1
      && place.bottom <= whole.bottom + 1 && place.right <= whole.right + 1);
}"""
"""Whether a narrow run's buttons are below its heading, and none is cut."""


def write_model(folder: Path) -> None:
    """A small random Llama with a chat template."""
    from transformers import AutoConfig, AutoModelForCausalLM

    write_chat_folder(folder)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)


def take_pictures(page: Any, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    for theme, light in (("Light", "true"), ("Dark", "false")):
        use_theme(page, f"JupyterLab {theme}", light=light)
        page.locator("#jupyterlab-splash").wait_for(state="detached")
        page.wait_for_timeout(400)
        page.screenshot(path=str(SCREENSHOTS / f"finetune_{name}_{theme.lower()}.png"))


@thorough()
def test_one_click_fine_tunes_a_folder_and_opens_a_chat(lab: Lab, browser: Any) -> None:
    write_model(lab.folder / "llama")
    rows = [{"prompt": f"Who is number {n}?", "completion": " Captain Ahab."} for n in range(NUM_ROWS)]
    content = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    write_notebook(lab, NOTEBOOK, "from shardscope_widgets import FinetuneView\nview = FinetuneView()\nview")
    page = open_notebook(lab, browser, NOTEBOOK)
    run_all_cells(page, 1)
    view = page.locator(".ss-finetune")
    expect(view.locator(".ss-headline")).to_contain_text("Choose a model and a data file")
    button = view.get_by_role("button", name="Fine-tune", exact=True)
    expect(button).to_be_disabled()

    def fill(label: str, text: str) -> None:
        box = view.locator(".ss-row", has=page.get_by_text(label, exact=True)).locator("input[type=text]")
        box.fill(text)
        box.press("Enter")

    take_pictures(page, "empty")
    fill("Model", "nowhere")
    expect(view.locator(".ss-row [role=alert]")).to_contain_text("There is no such folder. Fix: ")
    fill("Model", "llama")
    # A file that is too large stays on the page: only its size is sent.
    file = view.locator("input[type=file]")
    file.set_input_files({"name": "big.jsonl", "mimeType": "text/plain", "buffer": bytes(9 * 2**20)})
    expect(view.locator(".ss-row [role=alert]")).to_contain_text("JupyterLab's file browser")
    file.set_input_files({"name": "questions.jsonl", "mimeType": "text/plain", "buffer": content})
    expect(view.locator(".ss-data")).to_contain_text(f"{NUM_ROWS} rows", timeout=TIMEOUT_MS)
    assert (lab.folder / "data" / "questions.jsonl").read_bytes() == content
    expect(view.locator(".ss-verdict")).to_contain_text("Fits: ")
    expect(view.locator(".ss-finetune-memory .main-svg").first).to_be_visible()
    view.locator(".ss-fold-line", has_text="Advanced").click()
    expect(view.locator(".ss-reason").first).to_contain_text("LoRA")
    take_pictures(page, "ready")
    view.locator(".ss-fold-line", has_text="Advanced").click()
    button.click()
    expect(view.locator(".ss-run")).to_be_visible(timeout=TIMEOUT_MS)
    expect(button).to_be_disabled()
    expect(view.get_by_role("button", name="Stop and keep the best")).to_be_visible()
    page.set_viewport_size({"width": 780, "height": 900})
    page.wait_for_function(f"({IS_ABOVE_BUTTONS})()")
    page.set_viewport_size({"width": 1500, "height": 1400})
    chat = view.locator(".ss-chat")
    expect(chat).to_be_visible(timeout=TRAINING_MS)
    expect(button).to_be_enabled()
    box = chat.locator("textarea")
    box.focus()
    assert box.evaluate("box => getComputedStyle(box).outlineOffset") == "-2px", "else its ring is cut"
    box.fill("Who is number 3?")
    box.press("Enter")
    expect(chat.get_by_role("button", name="Stop")).to_be_enabled()
    expect(chat.get_by_role("button", name="Stop")).to_be_disabled(timeout=TIMEOUT_MS)
    take_pictures(page, "chat")
    page.close()
