"""Test of an input in clickable HTML: its text is sent with the click and is kept on errors."""

from __future__ import annotations

import json
from typing import Any

from playwright.sync_api import expect
from tests.browser.test_ignored_messages import RENDER_WIDGET

from shardscope_widgets.kit.clickable import Clickable

HTML = (
    "<input data-answer='a' aria-label='GiB'><button data-act='a'>Apply</button>"
    "<button data-act='b'>Other</button>"
)


def test_typed_text_is_sent_with_its_button_and_kept_on_errors(browser: Any) -> None:
    answers: list[tuple[str, str]] = []

    def reject_answer(act: str, typed: str) -> None:
        answers.append((act, typed))
        raise ValueError(f"{typed} is no number")

    pressed: list[str] = []
    widget = Clickable(pressed.append, on_answer=reject_answer)
    widget.value = HTML
    state = {name: value for name, value in widget.get_state().items() if not name.startswith("_")}
    page = browser.new_page()
    try:
        page.evaluate(RENDER_WIDGET, [str(widget._esm), json.loads(json.dumps(state, default=str))])
        page.evaluate("() => { model.sent = []; model.send = content => model.sent.push(content); }")
        page.get_by_label("GiB").fill("much")
        page.get_by_text("Apply").click()
        page.get_by_text("Other").click()
        page.get_by_label("GiB").press("Enter")
        sent = page.evaluate("model.sent")
        assert sent == [{"act": "a", "answer": "much"}, {"act": "b"}, {"act": "a", "answer": "much"}]
        for content in sent:
            widget._handle_custom_msg(content, [])
        assert answers == [("a", "much"), ("a", "much")] and pressed == ["b"]
        page.evaluate("error => model.set('error', error)", widget.error)
        expect(page.locator("[role=alert]")).to_have_text("much is no number", use_inner_text=True)
        assert page.get_by_label("GiB").input_value() == "much"
        assert page.evaluate("document.activeElement.dataset.answer") == "a", "it keeps the focus"
        page.evaluate("model.set('frozen', true)")
        assert page.get_by_label("GiB").is_disabled()
        page.evaluate("html => model.set('value', html)", HTML.replace("data-answer='a'", "data-answer='c'"))
        assert page.get_by_label("GiB").input_value() == "", "another input starts empty"
    finally:
        page.close()
