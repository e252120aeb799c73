"""Views without a kernel: pages of their own, exports of nbconvert, and Voila, without a network."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter, SlidesExporter
from served import find_free_port
from shown_views import VIEWS, WITH_CHARTS
from studio_page import SCREENSHOTS
from tests.npm_package import REQUIRE, REVEAL, fetch_package
from tests.requirements import few, skip_without, thorough

CELLS = (
    """import shardscope as ss
from shardscope_widgets import MemoryView, RooflineView, ScheduleView, ShardingView, StepView
recipe = ss.Recipe(global_batch_size=16, recompute="selective")
cluster = ss.Cluster.parse("8xh100-sxm-80gb")
plan = ss.Plan(ss.models["llama-3.1-8b"], cluster, recipe, ss.Layout.fsdp2())""",
    "MemoryView(plan)",
    "StepView(plan)",
    "ShardingView(plan)",
    "RooflineView(plan)",
    "ScheduleView(ss.Plan(plan.architecture, cluster, recipe, ss.Layout.megatron(pp=4)))",
)
NOT_LOADED = {"mathjax_url": "", "jquery_url": "", "mermaid_js_url": ""}
"""What nbconvert's templates load from other machines, and our views do not use."""
NUM_VIEWS = len(CELLS) - 1
SEEN_CHARTS = """() => [...document.querySelectorAll('svg[role=img], .js-plotly-plot .main-svg:first-child')]
    .filter(each => each.checkVisibility() && each.getBoundingClientRect().width > 200).length"""

CUT_TEXTS = """() => [...document.querySelectorAll('svg text')].filter(text => {
    const box = text.getBoundingClientRect(), all = text.ownerSVGElement.getBoundingClientRect()
    return box.width && all.width && (box.left < all.left - 1 || box.right > all.right + 1)
}).map(text => text.textContent)"""
NARROW = 350
"""CSS pixels beside the file browser in a window of 1280 at a zoom of 200 %."""


def save_screenshot(page: Any, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(SCREENSHOTS / f"{name}.png"), full_page=True)


@pytest.mark.parametrize("name", few(VIEWS, ["Studio"]))
def test_every_view_is_a_page_of_its_own(name: str, browser: Any, offline: Any, tmp_path: Path) -> None:
    view = VIEWS[name]()
    path = view.to_html(tmp_path / f"{name}.html")
    view.close()
    for scheme in ("light", "dark"):
        context = browser.new_context(
            viewport={"width": 1100, "height": 800}, color_scheme=scheme, offline=True
        )
        page = context.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error, errors=errors: errors.append(str(error)))
        offline(page)
        page.goto(path.as_uri())
        if name in WITH_CHARTS:
            page.wait_for_function(f"() => ({SEEN_CHARTS})() >= 1")
        assert len(page.inner_text("main")) > 10 and not errors
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"), "nothing is cut off"
        save_screenshot(page, f"page_{name}_{scheme}")
        page.set_viewport_size({"width": NARROW, "height": 800})
        page.wait_for_timeout(1000)
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"), "tables scroll"
        assert page.evaluate(CUT_TEXTS) == []
        save_screenshot(page, f"page_{name}_{scheme}_narrow")
        context.close()


def test_page_prints_on_white_with_its_figure(browser: Any, tmp_path: Path) -> None:
    path = VIEWS["ShardingView"]().to_html(tmp_path / "sharding.html")
    context = browser.new_context(viewport={"width": 1100, "height": 800}, color_scheme="dark")
    page = context.new_page()
    page.goto(path.as_uri())
    page.wait_for_function(f"() => ({SEEN_CHARTS})() >= 1")
    assert page.evaluate("() => getComputedStyle(document.body).backgroundColor") == "rgb(17, 21, 24)"
    page.emulate_media(media="print")
    assert page.evaluate("() => getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator(".ss-steps").is_hidden()
    # The page learns of the change from an event, which comes after the style.
    page.wait_for_function("() => document.body.dataset.jpThemeLight === 'true'")
    save_screenshot(page, "page_printed")
    context.close()


@pytest.fixture(scope="module")
def notebook() -> Any:
    """An executed notebook with the views, as JupyterLab saves it: without the state of widgets."""
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    for cell in cells:
        cell.metadata["slideshow"] = {"slide_type": "slide"}
    executed = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(executed, timeout=240, kernel_name="python3", store_widget_state=False).execute()
    return executed


def open_offline(browser: Any, path: Path, offline: Any, **options: Any) -> Any:
    page = browser.new_page(viewport={"width": 1200, "height": 900}, **options)
    offline(page)
    page.goto(path.as_uri())
    return page


@thorough()
def test_nbconvert_html_shows_every_figure(notebook: Any, browser: Any, offline: Any, tmp_path: Path) -> None:
    exporter = HTMLExporter(embed_images=True, require_js_url="", **NOT_LOADED)
    (tmp_path / "out.html").write_text(exporter.from_notebook_node(notebook)[0])
    for scheme in ("light", "dark"):
        page = open_offline(browser, tmp_path / "out.html", offline, color_scheme=scheme)
        page.wait_for_function(f"() => ({SEEN_CHARTS})() >= {NUM_VIEWS}")
        text = page.inner_text("body")
        assert "Each rank keeps" in text and "Error displaying widget" not in text
        save_screenshot(page, f"nbconvert_{scheme}")
        page.close()


@thorough()
def test_nbconvert_slides_show_a_figure_each(
    notebook: Any, browser: Any, offline: Any, tmp_path: Path
) -> None:
    shutil.copytree(fetch_package(REVEAL), tmp_path / "reveal.js")
    shutil.copy(fetch_package(REQUIRE) / "require.js", tmp_path)
    # The default theme asks for fonts of another machine.
    exporter = SlidesExporter(
        reveal_url_prefix="reveal.js",
        reveal_theme="white",
        require_js_url="require.js",
        font_awesome_url="",
        **NOT_LOADED,
    )
    (tmp_path / "slides.html").write_text(exporter.from_notebook_node(notebook)[0])
    page = open_offline(browser, tmp_path / "slides.html", offline)
    page.wait_for_selector(".reveal.ready .slides section.present")
    for number in range(NUM_VIEWS):
        page.keyboard.press("ArrowRight")
        page.wait_for_function(f"() => ({SEEN_CHARTS})() >= 1")
        page.wait_for_timeout(900)  # The transition of reveal.js.
        save_screenshot(page, f"slide_{number}")
    assert "Llama 3.1 8B" in page.locator("section.present").last.inner_text()
    page.close()


@contextmanager
def running_voila(folder: Path, name: str) -> Iterator[str]:
    """Serve one notebook by Voila on a loopback port, with its own settings."""
    port = find_free_port()
    environment = {
        **os.environ,
        **{f"JUPYTER_{kind}_DIR": str(folder / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")},
    }
    options = ["--no-browser", f"--port={port}", "--Voila.ip=127.0.0.1", "--VoilaConfiguration.theme=light"]
    with (folder / "voila.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "voila", *options, name],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}/"
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and server.poll() is None:
            try:
                urllib.request.urlopen(f"{url}voila/static/", timeout=5)
            except urllib.error.HTTPError:
                break
            except OSError:
                time.sleep(0.3)
        yield url
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(10)


@thorough()
def test_voila_shows_live_figures(browser: Any, tmp_path: Path) -> None:
    skip_without("voila")
    requests: list[str] = []
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    spec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata["kernelspec"] = spec
    nbformat.write(notebook, tmp_path / "views.ipynb")
    with running_voila(tmp_path, "views.ipynb") as url:
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.set_default_timeout(180_000)
        page.on("request", lambda request: requests.append(request.url))
        # Voila's own template asks for its icons, and works without them.
        page.route("**/fontawesome-free@*/**", lambda route: route.abort())
        page.goto(url)
        page.wait_for_function(f"() => ({SEEN_CHARTS})() >= {NUM_VIEWS}")
        view = page.locator(".ss-teach").first
        view.get_by_role("button", name="Next step").click()
        view.locator(".ss-step-words", has_text="all-gather of").wait_for()
        # A kernel answers: another layer is drawn.
        view.locator("select").select_option("layer 3")
        view.locator("p", has_text="Decoder layer 3 (of 0 to 31)").wait_for()
        save_screenshot(page, "voila")
        page.close()
    others = [one for one in requests if not one.startswith((url, "data:", "blob:"))]
    assert not [one for one in others if "fontawesome-free" not in one]
