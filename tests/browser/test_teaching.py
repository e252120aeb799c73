"""Browser tests of the figures that teach: steps by keys and buttons, from disk and in JupyterLab."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opened_notebook import open_notebook, run_all_cells, write_notebook
from playwright.sync_api import expect
from served import Lab
from studio_page import SCREENSHOTS, use_theme
from tests.requirements import few, thorough

import shardscope as ss
from shardscope_widgets import RooflineView, ScheduleView, ShardingView

PLAN = ss.Plan(
    ss.models["llama-3.1-8b"],
    ss.Cluster.parse("8xh100-sxm-80gb"),
    ss.Recipe(global_batch_size=16, recompute="selective"),
    ss.Layout.megatron(pp=4),
)
FSDP2 = replace(PLAN, layout=ss.Layout.fsdp2())
EXPERTS = ss.Plan(
    ss.models["deepseek-v3"],
    ss.Cluster.parse("32x8xh100-sxm-80gb"),
    ss.Recipe(global_batch_size=256),
    ss.Layout.megatron(pp=16, ep=16),
)
MANY = ss.Plan(
    PLAN.architecture,
    ss.Cluster.parse("8x8xh100-sxm-80gb"),
    ss.Recipe(global_batch_size=64),
    ss.Layout.megatron(tp=2, pp=2),
)
VIEWS: dict[str, Callable[[], Any]] = {
    "schedule": lambda: ScheduleView(PLAN),
    "sharding": lambda: ShardingView(FSDP2),
    "sharding_of_many": lambda: ShardingView(MANY),
    "sharding_zero_1": lambda: ShardingView(replace(PLAN, layout=ss.Layout.zero(1))),
    "roofline": lambda: RooflineView(FSDP2),
    "roofline_of_experts": lambda: RooflineView(EXPERTS),
}
IMPORTS = "import shardscope as ss\nfrom shardscope_widgets import ScheduleView"
CELLS = (
    IMPORTS,
    "plan = ss.Plan(ss.models['llama-3.1-8b'], ss.Cluster.parse('8xh100-sxm-80gb'), "
    "ss.Recipe(global_batch_size=16, recompute='selective'), ss.Layout.megatron(pp=4))",
    "schedule = ScheduleView(plan)\nschedule",
)
NUM_STEPS = {
    "sharding": 3,
    "sharding_of_many": 1,
    "sharding_zero_1": 3,
    "roofline": 2,
    "roofline_of_experts": 2,
}
"""Steps that the screenshots go, if not six."""
LOOKS = {
    "light_1024": ("light", 1024),
    "dark_1024": ("dark", 1024),
    "light_480": ("light", 480),
    "dark_480": ("dark", 480),
}
"""Name -> colour scheme and width of the window."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of each view."""
    folder = tmp_path_factory.mktemp("pages")
    return {name: make().to_html(folder / f"{name}.html") for name, make in VIEWS.items()}


@pytest.fixture
def errors() -> Iterator[list[str]]:
    """Errors of pages; none may be left at the end of a test."""
    found: list[str] = []
    yield found
    assert not found


def open_page(browser: Any, path: Path, errors: list[str], scheme: str = "light", width: int = 1024) -> Any:
    """Open a page from disk, without a network."""
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, offline=True)
    page = context.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("requestfailed", lambda request: errors.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_selector(".js-plotly-plot path.point, .js-plotly-plot .points path", state="attached")
    return page


def test_page_from_disk_is_walked_through_by_keys(
    browser: Any, pages: dict[str, Path], errors: list[str]
) -> None:
    page = open_page(browser, pages["schedule"], errors)
    words, slider = page.locator(".ss-step-words"), page.get_by_role("slider", name="Step")
    expect(words).to_contain_text("stage 0 runs the forward of micro-batch 0")
    slider.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(words).to_contain_text("stage 0 runs the forward of micro-batch 2")
    page.keyboard.press("ArrowLeft")
    expect(words).to_contain_text("stage 0 runs the forward of micro-batch 1")
    page.keyboard.press("End")
    expect(words).to_contain_text("the step has ended")
    page.keyboard.press("Home")
    expect(slider).to_have_value("0")
    page.keyboard.press("Space")
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    expect(slider).not_to_have_value("0")
    page.keyboard.press("Space")
    expect(page.get_by_role("button", name="Play")).to_be_visible()
    in_flight = page.locator(".annotation-text").first
    page.keyboard.press("Home")
    expect(in_flight).to_contain_text("1 in flight")
    page.get_by_role("button", name="Next step").click()
    expect(in_flight).to_contain_text("2 in flight")
    page.context.close()


def test_sharding_and_roofline_are_walked_through_by_keys(
    browser: Any, pages: dict[str, Path], errors: list[str]
) -> None:
    page = open_page(browser, pages["sharding"], errors)
    words, slider = page.locator(".ss-step-words"), page.get_by_role("slider", name="Step")
    expect(words).to_contain_text("Each rank keeps 104")
    slider.focus()
    page.keyboard.press("ArrowRight")
    expect(words).to_contain_text("all-gather of 416")
    expect(page.locator(".annotation-text", has_text="all-gathered")).to_be_visible()
    page.keyboard.press("End")
    expect(words).to_contain_text("updates the weights")
    expect(page.locator(".annotation-text", has_text="all-gathered")).to_have_count(0)
    page.keyboard.press("Space")
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    page.context.close()
    page = open_page(browser, pages["roofline"], errors)
    words = page.locator(".ss-step-words")
    expect(words).to_contain_text("1 × 4,096")
    page.get_by_role("slider", name="Step").focus()
    page.keyboard.press("ArrowRight")
    expect(words).to_contain_text("2 × 4,096")
    page.context.close()


READABLE = """() => {
    const boxes = selector => [...document.querySelectorAll(selector)].map(e => e.getBoundingClientRect());
    const names = boxes(".annotation-text"), points = boxes(".points path.point");
    const holds = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
    const middle = p => ({
        left: (p.left + p.right) / 2, right: (p.left + p.right) / 2,
        top: (p.top + p.bottom) / 2, bottom: (p.top + p.bottom) / 2,
    });
    return names.every((name, i) => name.right <= innerWidth && name.left >= 0
        && !names.some((other, j) => j > i && holds(name, other))
        && !points.some(point => holds(name, middle(point))));
}"""
"""Whether each name of a roofline is inside of the window, and neither on another name nor on a point."""


@pytest.mark.parametrize(
    ("name", "width"),
    few(
        [(name, width) for name in ("roofline", "roofline_of_experts") for width in (360, 900)],
        [("roofline", 900), ("roofline_of_experts", 360)],
    ),
)
def test_names_of_a_roofline_are_readable(
    name: str, width: int, browser: Any, pages: dict[str, Path], errors: list[str]
) -> None:
    page = open_page(browser, pages[name], errors, width=width)
    for _ in range(4):
        page.wait_for_function(READABLE)
        page.get_by_role("button", name="Next step").click()
    page.context.close()


@pytest.mark.parametrize("width", few([700, 480, 1024], [700]))
@pytest.mark.parametrize("name", few(["sharding", "sharding_zero_1", "roofline"], ["sharding"]))
def test_chart_stands_still_while_its_words_change(
    name: str, width: int, browser: Any, pages: dict[str, Path], errors: list[str]
) -> None:
    page = open_page(browser, pages[name], errors, width=width)
    tops = []
    for _ in range(int(page.get_by_role("slider", name="Step").get_attribute("max")) + 1):
        tops.append(page.locator(".js-plotly-plot").bounding_box()["y"])
        page.get_by_role("button", name="Next step").click()
    assert len(tops) > 2 and len(set(tops)) == 1
    page.context.close()


@pytest.mark.parametrize(("name", "look"), few([(n, look) for n in VIEWS for look in LOOKS], []))
def test_pages_in_every_look(
    name: str, look: str, browser: Any, pages: dict[str, Path], errors: list[str]
) -> None:
    scheme, width = LOOKS[look]
    page = open_page(browser, pages[name], errors, scheme, width)
    for _ in range(NUM_STEPS.get(name, 6)):
        page.get_by_role("button", name="Next step").click()
    page.mouse.move(0, 0)
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"), "nothing is cut off"
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(SCREENSHOTS / f"teach_{name}_{look}.png"), full_page=True)
    page.context.close()


@thorough()
def test_views_step_in_a_notebook_and_keep_their_keys_from_jupyterlab(lab: Lab, browser: Any) -> None:
    write_notebook(lab, "teach.ipynb", *CELLS)
    page = open_notebook(lab, browser, "teach.ipynb", viewport={"width": 1024, "height": 900})
    run_all_cells(page, len(CELLS))
    view = page.locator(".ss-teach").last
    slider = view.get_by_role("slider", name="Step")
    slider.wait_for()
    slider.focus()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    words = view.locator(".ss-step-words")
    expect(words).to_contain_text("stage 0 runs the forward of micro-batch 2")
    cells = page.locator(".jp-Cell").count()
    for key in ("d", "d", "m", "a"):
        page.keyboard.press(key)
    assert page.locator(".jp-Cell").count() == cells
    view.get_by_role("button", name="GPipe").click()
    expect(view).to_contain_text("For comparison only")
    for theme, light in (("Dark", "false"), ("Light", "true")):
        use_theme(page, f"JupyterLab {theme}", light=light)
        view.scroll_into_view_if_needed()
        page.wait_for_timeout(500)
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=str(SCREENSHOTS / f"teach_notebook_{theme.lower()}.png"))
    page.close()
