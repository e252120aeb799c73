"""The Studio where JupyterHub serves it: under a base URL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opened_notebook import SHOWN, STUDIO_CELLS, open_notebook, run_all_cells, write_notebook
from playwright.sync_api import expect
from served import running_lab
from tests.needs import thorough

pytestmark = thorough()


def test_studio_works_under_a_base_url(tmp_path: Path, browser: Any, offline: Any) -> None:
    failed: list[str] = []
    with running_lab(tmp_path, base_url="/user/ada/") as lab:
        assert lab.url.endswith("/user/ada")
        write_notebook(lab, "base.ipynb", *STUDIO_CELLS)
        page = open_notebook(lab, browser, "base.ipynb")
        offline(page)
        ours = lambda url: "shardscope" in url or url.startswith("blob:")  # noqa: E731
        page.on("requestfailed", lambda request: failed.append(request.url))
        page.on("response", lambda response: response.status >= 400 and failed.append(response.url))
        page.on("pageerror", lambda error: failed.append(str(error)))
        run_all_cells(page, 1)
        page.wait_for_selector(".ss-studio .js-plotly-plot .barlayer path", state="attached", timeout=SHOWN)
        expect(page.locator(".ss-studio .ss-verdict")).to_contain_text("GiB on each GPU", use_inner_text=True)
        # What JupyterLab itself asks for in vain (a workspace that is new, say) is none of ours.
        assert not [url for url in failed if ours(url) or "/user/ada/" not in url]
        page.close()
