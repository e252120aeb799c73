"""Tests of the keyboard's focus in the Studio: a ring at every control, and what has it after a press."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opened_notebook import open_notebook, run_all_cells, write_notebook
from playwright.sync_api import expect
from served import Lab
from studio_page import choose_tab, fill_input, open_studio, use_theme, wait_for_verdict
from tests.requirements import thorough

pytestmark = thorough()

WITHOUT_RING = """() => {
    const one = document.activeElement;
    const style = getComputedStyle(one);
    const accent = document.createElement('i');
    accent.style.color = 'var(--ss-accent)';
    one.closest('.ss-root').append(accent);
    const wanted = getComputedStyle(accent).color;
    accent.remove();
    const isThick = style.outlineStyle === 'solid' && parseFloat(style.outlineWidth) >= 2;
    const name = one.getAttribute('aria-label') || one.innerText;
    return isThick && style.outlineColor === wanted ? null : `${one.localName} ${name}: ${style.outline}`;
}"""
IN_STUDIO = "() => document.activeElement.closest('.ss-studio') !== null"


@pytest.fixture
def page(lab: Lab, browser: Any) -> Iterator[Any]:
    """A Studio."""
    page = browser.new_page(viewport={"width": 1500, "height": 1400})
    open_studio(page, lab)
    yield page
    page.close()


def show_cell(lab: Lab, browser: Any, name: str, cell: str) -> Any:
    """Open a notebook of one cell, and run it."""
    write_notebook(lab, name, cell)
    page = open_notebook(lab, browser, name)
    run_all_cells(page, 1)
    return page


def press(page: Any, button: Any, key: str = "Enter") -> None:
    """Press a button with the keyboard, and wait until the kernel has answered."""
    button.wait_for()
    button.focus()
    page.keyboard.press(key)
    page.wait_for_timeout(1500)


def test_focus_ring_is_drawn_at_every_tab_stop(page: Any) -> None:
    for theme, light in (("Dark", "false"), ("Light", "true")):
        use_theme(page, f"JupyterLab {theme}", light=light)
        for tab in ("Memory", "Plans", "Fine-tune"):
            choose_tab(page, tab)
            page.wait_for_timeout(800)
            page.locator(".ss-studio .ss-fold-line").first.focus()
            page.keyboard.press("Tab")  # Without a key before, there is no ring.
            stops, missing = 0, []
            while page.evaluate(IN_STUDIO) and stops < 60:
                missing.append(page.evaluate(WITHOUT_RING))
                page.keyboard.press("Tab")
                stops += 1
            assert stops > 10
            assert [one for one in missing if one] == [], f"{theme} {tab}"


RING_OF_A_BOX = """() => {
    const box = document.querySelector('.ss-studio .widget-box .widget-box');
    box.tabIndex = -1;
    box.focus({focusVisible: true});
    return [box.matches(':focus-visible'), getComputedStyle(box).outlineOffset];
}"""


def test_focus_stays_in_the_studio_when_a_pressed_button_goes(page: Any) -> None:
    studio = page.locator(".ss-studio")
    fill_input(page, "Model", "llama-3.1-70b")
    wait_for_verdict(page, "does not fit")
    press(page, studio.locator(".ss-fit-button"))  # Disabled while it searches, and hidden after.
    wait_for_verdict(page, "fits")
    page.wait_for_timeout(500)
    assert page.evaluate(IN_STUDIO), "Make it fit"
    press(page, studio.get_by_role("button", name="Undo"))
    assert page.evaluate(IN_STUDIO), "Undo"
    fill_input(page, "Model", "llama-3.1-8b")
    wait_for_verdict(page, "fits")
    press(page, studio.get_by_role("button", name="Check memory without GPUs"))
    assert page.evaluate(IN_STUDIO), "Check memory"
    press(page, studio.get_by_role("button", name="Cancel", exact=True))
    assert page.evaluate(IN_STUDIO), "Cancel"
    press(page, studio.locator(".ss-memory button").filter(has_text="GiB,").last)
    assert page.evaluate(IN_STUDIO), "a change that frees memory"
    page.keyboard.press("Tab")
    assert page.evaluate(IN_STUDIO), "Tab goes on from there"


def test_ring_of_a_box_is_inside_of_it(page: Any) -> None:
    """A box gets the focus of a button that goes; the boxes around would cut off a ring outside of it."""
    page.keyboard.press("Tab")
    assert page.evaluate(RING_OF_A_BOX) == [True, "-2px"]


def test_focus_follows_a_button_that_is_written_anew(page: Any) -> None:
    choose_tab(page, "Plans")
    page.get_by_role("button", name="All layouts").click()
    page.locator(".ss-pager").wait_for()
    page.wait_for_timeout(1000)
    press(page, page.locator(".ss-pager button", has_text="Next"))
    assert page.evaluate("() => document.activeElement.innerText") == "Next"
    press(page, page.locator(".ss-pager button", has_text="Next"))
    assert "25 to 36" in page.locator(".ss-pager").inner_text(), "it can be pressed again"


def test_focus_that_the_user_gives_away_is_not_taken_back(page: Any) -> None:
    button = page.locator(".ss-memory").get_by_role("button", name="Pin for comparison")
    button.focus()
    page.locator(".jp-InputPrompt").first.click()
    button.evaluate("each => { each.style.display = 'none'; }")
    page.wait_for_timeout(500)
    assert not page.evaluate(IN_STUDIO)


TABLE = """import ipywidgets
from shardscope_widgets.kit.clickable import Clickable
from shardscope_widgets.kit.sheet import Sheet
pressed = ipywidgets.Label()
table = Clickable(lambda act: setattr(pressed, "value", act))
table.value = "<table data-roving>" + "".join(
    f"<tr data-act='{act}'><td><button data-act='{act}'>{act}</button></td></tr>" for act in ("one", "two")
) + "</table>"
view = ipywidgets.VBox([Sheet(), table, pressed])
view.add_class("ss-root")
view"""


def test_rows_of_a_table_are_one_stop_each_and_enter_presses_it(lab: Lab, browser: Any) -> None:
    page = show_cell(lab, browser, "rows.ipynb", TABLE)
    view = page.locator(".ss-root")
    first = view.get_by_role("button", name="one")
    expect(first).to_have_attribute("tabindex", "0")
    expect(view.locator("tr[tabindex]")).to_have_count(0)
    first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(view.locator(".widget-label").last).to_have_text("two")
    page.close()


REDRAWN = """import ipywidgets
from shardscope_widgets.kit.clickable import Clickable
from shardscope_widgets.kit.sheet import Sheet
rows, pressed = ["alpha", "beta", "gamma"], ipywidgets.Label()

def draw():
    table.value = "".join(
        f"<p><button data-act='{place}' aria-label='Apply {name}'>Apply</button>"
        f" <button data-act='stop {name}'>Stop</button></p>" for place, name in enumerate(rows)
    )

def press(act):
    pressed.value += act + ";"
    if act.startswith("stop "):
        rows.remove(act[5:])
    elif act == "2":
        rows.insert(0, rows.pop())
    else:
        rows.pop(int(act))
    draw()

table = Clickable(press)
draw()
view = ipywidgets.VBox([Sheet(), table, pressed])
view.add_class("ss-root")
view"""


def test_focus_stays_with_its_row_when_rows_move_or_go(lab: Lab, browser: Any) -> None:
    page = show_cell(lab, browser, "redrawn.ipynb", REDRAWN)
    view = page.locator(".ss-root")
    press(page, view.get_by_role("button", name="Apply gamma"))
    expect(view.get_by_role("button", name="Apply gamma")).to_be_focused()
    press(page, view.get_by_role("button", name="Apply gamma"))
    expect(view.locator("button")).to_have_count(4)
    assert page.evaluate("() => document.activeElement.localName") != "button", "no other row's button"
    press(page, view.get_by_role("button", name="Stop").first)
    expect(view.locator("button")).to_have_count(2)
    assert page.evaluate("() => document.activeElement.localName") != "button", "no other row's button"
    page.close()
