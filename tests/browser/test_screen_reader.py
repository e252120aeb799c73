"""Tests of what a screen reader reads of the Studio, and of the results that it says by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import expect
from served import Lab
from studio_page import choose_tab, fill_input, open_fold, open_studio, wait_for_verdict
from tests.requirements import thorough

pytestmark = thorough()

LISTEN = """() => {
    window.heard = [];
    for (const place of document.querySelectorAll('.ss-studio [role=status].ss-off-screen')) {
        const hear = () => heard.push(place.textContent);
        new MutationObserver(hear).observe(place, { childList: true, subtree: true });
    }
}"""


@pytest.fixture(scope="module")
def page(lab: Lab, browser: Any) -> Iterator[Any]:
    """A Studio."""
    page = browser.new_page(viewport={"width": 1500, "height": 1400})
    open_studio(page, lab)
    yield page
    page.close()


def test_segments_say_of_what_they_are_a_choice_and_which_is_chosen(page: Any) -> None:
    group = page.get_by_role("group", name="Method")
    chosen, other = group.get_by_role("button", name="full"), group.get_by_role("button", name="QLoRA")
    expect(chosen).to_have_attribute("aria-pressed", "true")
    expect(other).to_have_attribute("aria-pressed", "false")
    other.click()
    expect(other).to_have_attribute("aria-pressed", "true")
    expect(chosen).to_have_attribute("aria-pressed", "false")
    chosen.click()
    expect(page.get_by_role("group", name="Memory", exact=True)).to_be_visible()


def test_a_button_that_opens_rows_has_a_name_without_signs_and_a_state(page: Any) -> None:
    more = page.locator(".ss-studio .ss-fold", has_text="Training").get_by_role(
        "button", name="More options", exact=True
    )
    expect(more).to_have_attribute("aria-expanded", "false")
    more.click()
    expect(more).to_have_attribute("aria-expanded", "true")
    more.click()
    expect(more).to_have_attribute("aria-expanded", "false")


def test_charts_and_pages_have_names(page: Any) -> None:
    for tab, name in (("Time", "Time of a step"), ("Memory", "Memory of a GPU")):
        choose_tab(page, tab)
        panel = page.get_by_role("tabpanel", name=tab)
        expect(panel.get_by_role("img", name=name)).to_be_visible()


def test_a_wrong_input_says_so(page: Any) -> None:
    box = page.locator(".ss-studio input[list]").first
    fill_input(page, "Model", "nonsense-7x")
    expect(box).to_have_attribute("aria-invalid", "true")
    assert "nonsense-7x" in box.get_attribute("aria-description")
    reason = page.locator(".ss-launch [data-said=launch]")
    expect(reason).to_contain_text("is off: Correct the input marked in red first.")
    fill_input(page, "Model", "llama-3.1-8b")
    expect(box).not_to_have_attribute("aria-invalid", "true")
    expect(reason).to_be_empty()


def test_only_the_wrong_one_of_two_inputs_says_so(page: Any) -> None:
    open_fold(page, "GPUs")
    nodes, count = (page.locator(f".ss-side input[title^='{title}']") for title in ("Number of", "GPUs, or"))
    nodes.fill("0")
    nodes.press("Enter")
    expect(nodes).to_have_attribute("aria-invalid", "true")
    assert count.get_attribute("aria-invalid") is None
    page.keyboard.press("Tab")  # The focused box has the colour of the focus.
    colors = [box.evaluate("box => getComputedStyle(box).borderTopColor") for box in (nodes, count)]
    assert colors[0] != colors[1], "one of the two is marked"
    nodes.fill("1")
    nodes.press("Enter")
    expect(nodes).not_to_have_attribute("aria-invalid", "true")


def test_a_new_verdict_is_said_once(page: Any) -> None:
    wait_for_verdict(page, "fits")
    page.wait_for_timeout(2000)
    page.evaluate(LISTEN)
    fill_input(page, "Model", "llama-3.1-70b")
    wait_for_verdict(page, "does not fit")
    page.wait_for_function("() => heard.length")
    page.wait_for_timeout(2000)
    assert page.evaluate("() => heard") == ["Does not fit: needs 278 GiB on each GPU, which has 79.1"]
