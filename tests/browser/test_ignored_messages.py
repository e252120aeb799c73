"""Test of the error that the page shows when a table or the tabs ignored a message."""

from __future__ import annotations

import json
from typing import Any

from playwright.sync_api import expect
from tests.requirements import thorough

from shardscope_widgets.kit.clickable import Clickable, IgnoredError
from shardscope_widgets.kit.tabs import Tabs

pytestmark = thorough()

RENDER_WIDGET = """async ([source, state]) => {
  const handlers = {};
  window.model = {
    get: name => state[name],
    set: (name, value) => { state[name] = value; (handlers[name] ?? []).forEach(each => each()); },
    on: (names, handler) => names.split(" ").forEach(
      name => (handlers[name.replace("change:", "")] ??= []).push(handler)),
    off: () => {}, send: () => {}, save_changes: () => {},
  };
  document.body.innerHTML = "<div id='here'></div>";
  const address = URL.createObjectURL(new Blob([source], {type: "text/javascript"}));
  const module = await import(address);
  module.default.render({model, el: document.getElementById("here")});
}"""


def ignore_action(act: str) -> None:
    raise IgnoredError(act)


def test_fault_44_ignored_message_is_reported_on_the_page(browser: Any) -> None:
    table = Clickable(ignore_action)
    table.value = "<button data-act='sort:x'>x</button>"
    tabs = Tabs(["Memory", "Time"])
    page = browser.new_page()
    try:
        for widget, wrong in ((table, {"act": "<b>rm</b>"}), (tabs, {"value": "<b>Nowhere</b>"})):
            state = {name: value for name, value in widget.get_state().items() if not name.startswith("_")}
            page.evaluate(RENDER_WIDGET, [str(widget._esm), json.loads(json.dumps(state, default=str))])
            expect(page.locator("[role=alert]")).to_have_count(0)
            if widget is table:
                widget._handle_custom_msg(wrong, [])
            else:
                widget.set_state(wrong)
            page.evaluate("error => model.set('error', error)", widget.error)
            alert = page.locator("[role=alert]")
            assert alert.inner_text() == widget.error and "<b>" in widget.error, "as text, never as HTML"
            page.evaluate("model.set('error', '')")
            expect(alert).to_have_count(0)
            assert page.locator("button").count() == (1 if widget is table else 2), (
                "the other elements are still there"
            )
    finally:
        page.close()
