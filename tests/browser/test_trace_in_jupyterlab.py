"""Tests of the trace view in a real JupyterLab: it is drawn, and its keys do not reach the notebook."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from opened_notebook import choose_menu_item, open_notebook, write_notebook
from playwright.sync_api import TimeoutError, expect
from served import Lab
from studio_page import TIMEOUT_MS, use_theme
from tests.faults import includes_slow_tests
from tests.requirements import few, thorough

# The main job opens a trace as well.
pytestmark = thorough()

NOTEBOOK = "trace_view.ipynb"
FIXTURE = Path(__file__).parents[1] / "fixtures" / "trace_with_stacks"
OPENED_AT_ONCE = 10
SET_UP = f"""
import ipywidgets
from IPython.display import display
from shardscope.trace import Trace
from shardscope_widgets import TraceView

trace = Trace.load({str(FIXTURE)!r})


def views(count):
    return [TraceView(trace, height=200) for _ in range(count)]


def display_views(alone, boxed, hidden):
    display(*views(alone), ipywidgets.VBox(views(boxed)))
    display(ipywidgets.Tab([ipywidgets.HTML("first"), ipywidgets.VBox(views(hidden))], titles=["A", "B"]))
"""

BLACK_OR_UNREADABLE = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => ((v / 255 + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const contrast = (a, b) => {
    const [low, high] = [light(a), light(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  return [...document.querySelectorAll(".ss-trace")].map((root) => {
    const canvas = root.querySelector("canvas");
    if (!canvas.width || !(+canvas.dataset.slices > 0)) return "nothing drawn";
    const dpr = window.devicePixelRatio;
    const pixels = (x, y, w, h) => {
      const { data } = canvas.getContext("2d").getImageData(x * dpr, y * dpr, w * dpr, h * dpr);
      return Array.from({ length: data.length / 4 }, (_, i) => [...data.slice(4 * i, 4 * i + 3)]);
    };
    const page = parse(getComputedStyle(root).backgroundColor);
    const corner = pixels(4, 4, 1, 1)[0];
    if (contrast(corner, page) > 1.3) return `background ${corner} on a page of ${page}`;
    const best = (colours) => Math.max(...colours.map((colour) => contrast(colour, corner)));
    const ruler = best(pixels(172, 4, 40, 16));
    const names = best(pixels(24, 54, 60, 18));
    if (ruler < 3 || names < 3) return `text at contrast ${ruler.toFixed(1)} and ${names.toFixed(1)}`;
    return "";
  }).filter(Boolean);
}"""


@pytest.fixture(scope="module")
def page(lab: Lab, browser: Any) -> Iterator[Any]:
    """A notebook whose first cell, :data:`SET_UP`, has run."""
    write_notebook(lab, NOTEBOOK, SET_UP, "display_views(5, 3, 2)", "TraceView(trace, height=240)")
    # High enough for all cells: JupyterLab creates outputs when they come into view.
    page = open_notebook(lab, browser, NOTEBOOK, viewport={"width": 1300, "height": 5200})
    run_cell(page, 0)
    page.keyboard.press("Control+Shift+l")  # a launcher, in a tab of its own
    go_to_tab(page, NOTEBOOK)
    yield page
    page.close()


def read_prompt(page: Any, index: int) -> str:
    return str(page.locator(".jp-CodeCell .jp-InputPrompt").nth(index).text_content())


def run_cell(page: Any, index: int) -> None:
    """Run a cell and wait until its prompt has a new number."""
    before = read_prompt(page, index)
    page.locator(".jp-CodeCell").nth(index).locator(".cm-content").focus()
    page.keyboard.press("Control+Enter")
    page.wait_for_function(
        "([index, before]) => { const text = document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')[index]"
        ".textContent; return text !== before && /\\d/.test(text); }",
        arg=[index, before],
    )


def check_every_view_is_drawn(page: Any) -> None:
    page.wait_for_function(
        "count => [...document.querySelectorAll('.ss-trace canvas')]"
        ".filter(canvas => +canvas.dataset.slices > 0).length === count",
        arg=OPENED_AT_ONCE,
    )
    # A busy machine draws late; a black view stays black.
    with suppress(TimeoutError):
        page.wait_for_function(f"!({BLACK_OR_UNREADABLE})().length", polling=300)
    assert page.evaluate(BLACK_OR_UNREADABLE) == []


def go_to_tab(page: Any, name: str) -> None:
    """Show another document of JupyterLab, which hides the current one."""
    page.locator(".lm-DockPanel-tabBar .lm-TabBar-tab", has_text=name).click()


def show_hidden_tab(page: Any) -> None:
    page.locator(".widget-tab .lm-TabBar-tab, .jupyter-widget-TabPanel .lm-TabBar-tab").nth(1).click()


def test_fault_64_trace_view_never_opens_black(page: Any) -> None:
    """Open twenty views; with SHARDSCOPE_FAULTS=all a hundred."""
    themes = [("JupyterLab Dark", "false"), ("JupyterLab Light", "true")]
    for number in range(10 if includes_slow_tests() else 2):
        page.keyboard.press("Control+b")  # the side bar opens or closes just before
        run_cell(page, 1)
        if number % 2 == 0:
            show_hidden_tab(page)
            check_every_view_is_drawn(page)
            name, light = themes[number // 2 % 2]
            use_theme(page, name, light=light)
        else:
            # Opened in a hidden notebook, and shown under another theme.
            go_to_tab(page, "Launcher")
            name, light = themes[(number // 2 + 1) % 2]
            use_theme(page, name, light=light)
            go_to_tab(page, NOTEBOOK)
            show_hidden_tab(page)
        check_every_view_is_drawn(page)
        # Removed from the document and added again, as for a moved cell, while the theme changes.
        page.evaluate(
            "{ const node = document.querySelectorAll('.jp-CodeCell')[1].querySelector('.jp-OutputArea');"
            "window.away = [node, node.parentNode]; node.remove(); }"
        )
        name, light = themes[0] if light == "true" else themes[1]
        use_theme(page, name, light=light)
        page.evaluate("window.away[1].append(window.away[0])")
        check_every_view_is_drawn(page)
    clear_outputs(page)
    use_theme(page, "JupyterLab Light", light="true")


def clear_outputs(page: Any) -> None:
    choose_menu_item(page, "Edit", "Clear Outputs of All Cells")
    page.wait_for_function("document.querySelectorAll('.ss-trace').length === 0")


COMMANDS = [
    "m", "y", "r", "a", "b", "x", "c", "v", "z", "d", "d", "0", "0", "i", "i", "l", "o", "h", "j", "k",
    "s", "f", "1", "Shift+M", "Shift+V", "Shift+O", "Space", "ArrowUp", "ArrowDown",
    "Enter", "Shift+Enter", "Control+Enter", "Alt+Enter",
]  # fmt: skip
"""Keys of JupyterLab's command mode."""

NOTEBOOK_STATE = """() => ({
  cells: [...document.querySelectorAll('.jp-Notebook .jp-Cell')].map((cell) => cell.className
    .split(' ').filter((name) => /^jp-(Code|Markdown|Raw)Cell|^jp-mod-active/.test(name)).join(' ')),
  prompts: [...document.querySelectorAll('.jp-InputPrompt')].map((prompt) => prompt.textContent),
  dialogs: document.querySelectorAll('.jp-Dialog, .lm-CommandPalette-content').length,
  views: [...document.querySelectorAll('.ss-trace canvas')].map((canvas) => canvas.clientHeight > 0),
  outputs: document.querySelectorAll('.jp-OutputCollapser, .jp-OutputPlaceholder').length,
  numbers: document.querySelectorAll('.jp-Notebook .cm-lineNumbers').length,
  sidebar: !document.querySelector('#jp-left-stack')?.classList.contains('lm-mod-hidden'),
})"""


@pytest.mark.parametrize(
    "focused",
    few(
        [
            "canvas",
            ".ss-trace-rank",
            ".ss-trace-stack",
            ".ss-trace-fit",
            ".ss-trace-search",
            ".ss-trace summary",
        ],
        ["canvas", ".ss-trace-fit"],
    ),
)
def test_fault_62_keys_in_the_trace_do_not_change_the_notebook(page: Any, focused: str) -> None:
    show_single_view(page)
    node = page.locator(f".ss-trace {focused}" if focused[0] != "." or " " not in focused else focused).first
    node.focus()
    before = page.evaluate(NOTEBOOK_STATE)
    for key in COMMANDS:
        if focused == ".ss-trace-search" and key == "Enter":
            continue  # it goes to the next match, tested with the canvas
        node.focus()
        page.keyboard.press(key)
        assert page.evaluate(NOTEBOOK_STATE) == before, key
    page.wait_for_timeout(300)  # a dialog would open later
    assert page.evaluate(NOTEBOOK_STATE) == before
    assert page.evaluate("document.activeElement.closest('.ss-trace') !== null")


def show_single_view(page: Any) -> None:
    if page.locator(".ss-trace").count() != 1:
        clear_outputs(page)
        run_cell(page, 2)
    page.wait_for_function("+document.querySelector('.ss-trace canvas')?.dataset.slices > 0")
    page.locator(".ss-trace-fit").click()
    page.wait_for_function("+document.querySelector('.ss-trace canvas').dataset.t0 === 0")
    draw_two_frames(page)


def draw_two_frames(page: Any) -> None:
    """Wait until the page has drawn what it knows."""
    page.evaluate("new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)))")


def test_fault_62_escape_tab_and_save_reach_jupyterlab(lab: Lab, page: Any) -> None:
    show_single_view(page)
    page.evaluate("window.heard = []; document.addEventListener('keydown', (event) => heard.push(event.key))")
    page.locator(".ss-trace canvas").focus()
    for key in ("m", "w", "Escape", "Tab"):
        page.locator(".ss-trace canvas").focus()
        page.keyboard.press(key)
    assert page.evaluate("heard") == ["Escape", "Tab"]
    for focused in ("canvas", ".ss-trace-search"):
        before = (lab.folder / NOTEBOOK).stat().st_mtime_ns
        page.locator(f".ss-trace {focused}").focus()
        end = time.monotonic() + TIMEOUT_MS / 1000
        while (lab.folder / NOTEBOOK).stat().st_mtime_ns == before:
            assert time.monotonic() < end, f"Ctrl+S with the focus on {focused} saved nothing"
            page.keyboard.press("Control+s")  # JupyterLab ignores one while it is still saving
            page.wait_for_timeout(1000)


def test_fault_47_saved_notebook_has_an_svg_of_the_trace(lab: Lab, page: Any) -> None:
    show_single_view(page)
    choose_menu_item(page, "File", "Save Notebook")
    html, end = "", time.monotonic() + TIMEOUT_MS / 1000
    while not html and time.monotonic() < end:
        page.wait_for_timeout(200)
        with suppress(json.JSONDecodeError):  # it is being written
            outputs = json.loads((lab.folder / NOTEBOOK).read_text())["cells"][2]["outputs"]
            html = "".join("".join(output.get("data", {}).get("text/html", "")) for output in outputs)
    assert "<svg" in html and "stream 7" in html and "<table" in html and "<script" not in html


def test_key_hints_are_shown_only_while_the_canvas_has_the_focus(page: Any) -> None:
    """After a click on the canvas W zooms; the hint names the key then, and not before."""
    show_single_view(page)
    page.locator(".jp-CodeCell .cm-content").nth(0).focus()
    hint = page.locator(".ss-trace-details")
    assert " W " not in f" {hint.text_content()} " and "0 shows" not in hint.text_content()
    box = page.locator(".ss-trace canvas").bounding_box()
    page.mouse.click(box["x"] + box["width"] - 30, box["y"] + 12)  # on the ruler, where no slice is
    page.wait_for_function("document.querySelector('.ss-trace-details').textContent.includes('zoom')")
    assert "W and S" in hint.text_content()
    span = (
        "(() => { const { t0, t1 } = document.querySelector('.ss-trace canvas').dataset; return t1 - t0; })()"
    )
    before = page.evaluate(span)
    page.keyboard.press("w")
    page.wait_for_function(f"before => {span} < 0.9 * before", arg=before)
    page.keyboard.press("0")
    page.wait_for_function(f"before => Math.abs({span} / before - 1) < 1e-6", arg=before)
    expect(page.locator(".jp-Dialog")).to_have_count(0)


def test_a_trace_whose_kernel_runs_another_cell_says_that_it_waits(lab: Lab, browser: Any) -> None:
    """Regression: its tracks were empty without a reason, as after Run All Cells of a course notebook."""
    name = "busy_kernel.ipynb"
    write_notebook(lab, name, f"{SET_UP}\nTraceView(trace, height=200)", "import time; time.sleep(8)")
    page = open_notebook(lab, browser, name)
    choose_menu_item(page, "Run", "Run All Cells")
    waiting = page.locator(".ss-trace-waiting")
    expect(waiting).to_be_visible()
    expect(waiting).to_contain_text("kernel")
    assert not page.locator(".ss-trace canvas").evaluate("canvas => +canvas.dataset.slices")
    page.wait_for_function("+document.querySelector('.ss-trace canvas').dataset.slices > 0")
    expect(waiting).to_be_hidden()
    page.close()
