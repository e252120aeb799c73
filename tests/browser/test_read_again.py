"""Enter in the path of a file reads the file again: people edit it beside the Studio."""

from __future__ import annotations

import json
from typing import Any

from playwright.sync_api import expect
from served import Lab
from studio_page import choose_tab, fill_input, open_fold, open_studio
from tests.requirements import thorough

pytestmark = thorough()

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
SYNTAX_ERROR = "def f(:\n"
LOADER = "from torch.utils.data import DataLoader\nfor batch in DataLoader(data):\n    batch.backward()\n"


def test_enter_reads_an_edited_model_and_script_again(lab: Lab, browser: Any, offline: Any) -> None:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    offline(page)
    open_studio(page, lab)
    config = lab.folder / "mine" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps({**CONFIG, "num_hidden_layers": 28}))
    fill_input(page, "Model", "mine")
    model = open_fold(page, "Model")
    expect(model).to_contain_text("28 layers")
    config.write_text(json.dumps({**CONFIG, "num_hidden_layers": 56}))
    model.locator("input").press("Enter")
    expect(model).to_contain_text("56 layers")

    choose_tab(page, "Checks")
    script = page.locator(".ss-script")
    (lab.folder / "mine.py").write_text(SYNTAX_ERROR)
    path = script.locator("input")
    path.fill("mine.py")
    path.press("Enter")
    expect(script).to_contain_text("Nothing was checked")
    (lab.folder / "mine.py").write_text(LOADER)
    path.press("Enter")
    expect(script).to_contain_text("mine.py, line")
    page.close()
