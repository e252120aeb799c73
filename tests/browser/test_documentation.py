"""Tests of the documentation site that `make docs` has built, opened from disk with the network blocked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from playwright.sync_api import expect
from studio_page import SCREENSHOTS
from test_accessibility import find_violations
from tests.npm_package import AXE, fetch_package

SITE = Path(os.environ.get("SHARDSCOPE_DOCS", "artifacts/docs"))
pytestmark = pytest.mark.skipif(
    "SHARDSCOPE_DOCS" not in os.environ, reason="no documentation site is built; to run this: make docs"
)

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src"}
"""Elements that load their address when the page is opened, besides links to styles, fonts and icons."""
LOADED_RELATIONS = {"stylesheet", "preload", "modulepreload", "icon", "shortcut icon"}


class Page(HTMLParser):
    """The addresses and anchors of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.add(values["href"])
        if tag in LOADED and LOADED[tag] in values:
            self.loaded.add(values[LOADED[tag]])
        if tag == "link" and values.get("rel") in LOADED_RELATIONS:
            self.loaded.add(values["href"])


@pytest.fixture(scope="module")
def pages() -> dict[Path, Page]:
    # In _static is a template of the theme.
    files = [file for file in SITE.resolve().rglob("*.html") if "_static" not in file.parts]
    found = {file: Page(file.read_text(encoding="utf-8")) for file in files}
    assert len(found) > 30, f"{SITE} is no complete site"
    return found


@pytest.fixture
def errors() -> Iterator[list[str]]:
    """Errors of pages; none may be left at the end of a test."""
    found: list[str] = []
    yield found
    assert not found


def open_page(browser: Any, path: Path, errors: list[str], scheme: str = "light", width: int = 1280) -> Any:
    """Open a page from disk, without a network."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    page = context.new_page()
    page.on("pageerror", lambda error: errors.append(f"{path.name}: {error}"))
    page.on("requestfailed", lambda request: errors.append(f"{path.name} requests {request.url}"))
    page.goto(path.resolve().as_uri())
    return page


def test_internal_links_lead_to_pages_and_anchors_that_exist(pages: dict[Path, Page]) -> None:
    broken = []
    for file, page in pages.items():
        for link in page.links | page.loaded:
            address = urlsplit(link)
            if address.scheme or link in ("", "#"):
                continue
            target = (file.parent / unquote(address.path)).resolve() if address.path else file
            if not target.is_file():
                broken.append(f"{file.relative_to(SITE.resolve())} links to {link}, which does not exist")
            elif (
                address.fragment
                and target in pages
                and unquote(address.fragment) not in pages[target].anchors
            ):
                broken.append(f"{file.relative_to(SITE.resolve())} links to {link}: no such anchor")
    assert not broken, "\n".join(broken)


def test_no_page_loads_anything_from_another_machine(pages: dict[Path, Page]) -> None:
    remote = {
        f"{file.name} loads {address}"
        for file, page in pages.items()
        for address in page.loaded
        if urlsplit(address).scheme in ("http", "https") or address.startswith("//")
    }
    styles = [file for file in SITE.rglob("*.css") if "url(http" in file.read_text(encoding="utf-8")]
    assert not remote and not styles, (remote, styles)


def test_every_public_name_and_catalogue_entry_has_its_place(pages: dict[Path, Page]) -> None:
    import shardscope as ss
    import shardscope_widgets

    anchors = set().union(*(page.anchors for page in pages.values()))
    names = {f"shardscope.{name}" for name in ss.__all__}
    names |= {f"shardscope_widgets.{name}" for name in shardscope_widgets.__all__}
    assert names <= anchors, names - anchors
    catalogue = "".join(
        (SITE / "generated" / f"{name}.html").read_text(encoding="utf-8") for name in ("models", "gpus")
    )
    assert not [name for name in (*ss.models, *ss.gpus) if f">{name}<" not in catalogue and name != "cpu"]


@pytest.mark.parametrize(
    ("words", "title"),
    [
        ("gather buffers", "The memory model"),
        ("reshard_after_forward", "Plans"),
        ("scancel", "Several machines"),
    ],
)
def test_search_works_from_disk(browser: Any, errors: list[str], words: str, title: str) -> None:
    page = open_page(browser, SITE / "index.html", errors)
    page.keyboard.press("Control+k")
    field = page.locator("dialog input[type=search], .search-button__search-container input").first
    expect(field).to_be_focused()
    page.keyboard.type(words)
    page.keyboard.press("Enter")
    results = page.locator("ul.search li a")
    expect(results.filter(has_text=title).first).to_be_visible()
    page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "name", ["index", "explanation/memory_model", "reference/plans", "reference/widgets", "generated/gpus"]
)
def test_pages_look_right_from_disk(browser: Any, errors: list[str], name: str, scheme: str) -> None:
    page = open_page(browser, SITE / f"{name}.html", errors, scheme)
    expect(page.locator("article h1").first).to_be_visible()
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    # Nothing is wider than the window: wide tables scroll inside their own box.
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"docs_{name.replace('/', '_')}_{scheme}.png")
    page.context.close()


def test_every_page_opens_without_an_error(browser: Any, errors: list[str], pages: dict[Path, Page]) -> None:
    context = browser.new_context(viewport={"width": 480, "height": 900}, offline=True)
    page = context.new_page()
    page.on("pageerror", lambda error: errors.append(f"{page.url}: {error}"))
    page.on("requestfailed", lambda request: errors.append(f"{page.url} requests {request.url}"))
    wide = []
    for file in pages:
        page.goto(file.as_uri())
        if page.evaluate("document.documentElement.scrollWidth > window.innerWidth"):
            wide.append(file.name)
    context.close()
    assert not wide, f"wider than a window of 480 pixels: {wide}"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_have_no_serious_violation(browser: Any, pages: dict[Path, Page], scheme: str) -> None:
    fetch_package(AXE)
    found = []
    context = browser.new_context(
        viewport={"width": 1280, "height": 900}, color_scheme=scheme, offline=True, bypass_csp=True
    )
    page = context.new_page()
    for file in pages:
        page.goto(file.as_uri())
        found += [f"{file.relative_to(SITE.resolve())}: {one}" for one in find_violations(page, "html")]
    context.close()
    assert not found, "\n".join(found)
