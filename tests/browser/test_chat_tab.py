"""Test of a chat in a real JupyterLab: two answers side by side, in both themes; keys stay in the input."""

from __future__ import annotations

from typing import Any

from opened_notebook import KERNEL_IS_IDLE, TIMEOUT_MS, open_notebook, write_notebook
from playwright.sync_api import expect
from served import Lab
from studio_page import SCREENSHOTS, use_theme
from tests.requirements import thorough

NOTEBOOK = "chat.ipynb"
SOURCE = """import time
from pathlib import Path
import shardscope as ss
from shardscope_widgets import ChatView

class FakeChat:
    is_closed = False
    def __init__(self, words): self.words = words
    def send(self, text):
        for word in self.words.split(" "):
            time.sleep(0.02)
            yield word + " "
    def stop(self): pass
    def reset(self): pass
    def close(self): pass

class FakeRun:
    __class__ = ss.Run  # for isinstance
    name, model, folder, status = "lora-on-questions", Path("."), Path("."), "finished"
    recorded_base = {"weights": "/models/smollm2-135m-instruct"}
    def chat(self, base=False):
        return FakeChat("<b>bold</b> I am a helpful assistant. How can I help you today?" if base
                        else "The Pequod sails from Nantucket, under Captain Ahab.")

ChatView(FakeRun())"""
STATE = """() => [...document.querySelectorAll('.jp-Notebook .jp-Cell')].map(cell => [
    cell.querySelector('.jp-InputPrompt')?.innerText, cell.querySelector('.jp-Editor')?.innerText])"""


@thorough()
def test_a_chat_answers_side_by_side_and_keeps_its_keys(lab: Lab, browser: Any, offline: Any) -> None:
    write_notebook(lab, NOTEBOOK, "above = 1", SOURCE, "below = 1")
    page = open_notebook(lab, browser, NOTEBOOK)
    offline(page)
    page.locator(".jp-Notebook .cm-content").nth(1).click()
    page.keyboard.press("Control+Enter")
    box = page.locator(".ss-chat textarea")
    box.wait_for(timeout=TIMEOUT_MS)
    page.wait_for_function(KERNEL_IS_IDLE)
    before = page.evaluate(STATE)
    box.click()
    # Letters are commands of JupyterLab's, and Shift+Enter runs the cell: here they are text.
    page.keyboard.type("add my xb")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("<i>00</i> <3")
    expect(box).to_have_value("add my xb\n<i>00</i> <3")
    page.keyboard.press("Control+a")
    page.keyboard.type("Which ship is it?")
    page.keyboard.press("Enter")
    expect(box).to_have_value("")
    panes = page.locator(".ss-chat .ss-log-pane > .ss-log")
    expect(panes.nth(0)).to_contain_text("<b>bold</b> I am a helpful assistant. How can I help you today?")
    expect(panes.nth(1)).to_contain_text("under Captain Ahab.")
    box.click()
    page.keyboard.type("<script>alert(1)</script>")
    page.locator(".ss-chat button", has_text="Send").click()
    expect(panes.nth(1)).to_contain_text("<script>alert(1)</script>")
    expect(page.locator(".ss-chat button", has_text="Stop")).to_be_disabled()
    assert page.evaluate(STATE) == before
    left, right = (panes.nth(number).bounding_box() for number in (0, 1))
    assert left["y"] == right["y"] and left["x"] + left["width"] <= right["x"]
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    for theme, light in (("Light", "true"), ("Dark", "false")):
        use_theme(page, f"JupyterLab {theme}", light=light)
        page.wait_for_timeout(300)
        page.locator(".ss-chat").screenshot(path=str(SCREENSHOTS / f"chat_{theme.lower()}.png"))
    page.locator(".ss-chat button", has_text="Clear").click()
    expect(panes.nth(0)).to_have_text("")
    page.close()
