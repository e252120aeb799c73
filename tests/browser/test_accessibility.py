"""axe-core on the views: no serious or critical violation, light and dark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from opened_notebook import open_notebook, run_all_cells, write_notebook
from served import Lab
from shown_views import VIEWS
from studio_page import open_studio, use_theme
from tests.npm_package import AXE, fetch_package
from tests.requirements import few, thorough

RUN = """async (root) => {
  const found = await axe.run(root);
  if (found.passes.length < 5) return [`axe looked at nothing: ${found.passes.length} rules passed`];
  return found.violations.filter(each => ['serious', 'critical'].includes(each.impact)).map(
    each => `${each.impact} ${each.id}: ${each.help}: `
      + each.nodes.slice(0, 5).map(node => node.target.join(' ') + ' ' + node.html.slice(0, 160) + ' ['
      + node.any.concat(node.all).map(check => check.message).join('; ') + ']').join(' | '));
}"""
PAGES = [(name, scheme) for name in VIEWS for scheme in ("light", "dark")]
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


def find_violations(page: Any, root: str) -> list[str]:
    """Return the serious and critical violations inside of the elements that ``root`` selects."""
    page.add_script_tag(path=str(fetch_package(AXE) / "axe.min.js"))
    return page.evaluate(RUN, {"include": [[root]]})


@pytest.mark.parametrize(("name", "scheme"), few(PAGES, [("ShardingView", "light"), ("MemoryView", "dark")]))
def test_pages_have_no_serious_violation(name: str, scheme: str, browser: Any, tmp_path: Path) -> None:
    fetch_package(AXE)
    path = VIEWS[name]().to_html(tmp_path / "page.html")
    page = browser.new_page(viewport={"width": 1100, "height": 900}, color_scheme=scheme)
    page.goto(path.as_uri())
    page.wait_for_timeout(1500)  # Until charts are drawn.
    assert find_violations(page, "html") == []
    page.close()


@thorough()
def test_views_in_jupyterlab_have_no_serious_violation(lab: Lab, browser: Any) -> None:
    fetch_package(AXE)
    write_notebook(lab, "axe.ipynb", *CELLS)
    page = open_notebook(lab, browser, "axe.ipynb", viewport={"width": 1300, "height": 9000})
    run_all_cells(page, len(CELLS))
    page.wait_for_function("() => document.querySelectorAll('.ss-root .js-plotly-plot').length >= 5")
    for theme, light in (("Dark", "false"), ("Light", "true")):
        use_theme(page, f"JupyterLab {theme}", light=light)
        page.wait_for_timeout(1000)
        assert find_violations(page, ".jp-OutputArea-output .ss-root") == [], theme
    page.close()


@thorough()
def test_studio_has_no_serious_violation_on_any_tab(lab: Lab, browser: Any) -> None:
    fetch_package(AXE)
    page = browser.new_page(viewport={"width": 1500, "height": 2400})
    open_studio(page, lab)
    found: list[str] = []
    for theme, light in (("Dark", "false"), ("Light", "true")):
        use_theme(page, f"JupyterLab {theme}", light=light)
        for tab in page.locator(".ss-studio [role=tab]").all():
            tab.click()
            page.wait_for_timeout(800)
            found += [f"{theme} {tab.inner_text()}: {one}" for one in find_violations(page, ".ss-studio")]
    assert not found, "\n".join(dict.fromkeys(found))
    page.close()
