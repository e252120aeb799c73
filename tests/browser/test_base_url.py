"""Test of the Studio under a base URL, as JupyterHub serves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opened_notebook import STUDIO_CELLS, TIMEOUT_MS, open_notebook, run_all_cells, write_notebook
from playwright.sync_api import expect
from served import running_lab
from tests.requirements import thorough

pytestmark = thorough()


def test_studio_works_under_a_base_url(tmp_path: Path, browser: Any, offline: Any) -> None:
    failures: list[str] = []
    with running_lab(tmp_path, base_url="/user/ada/") as lab:
        assert lab.url.endswith("/user/ada")
        write_notebook(lab, "base.ipynb", *STUDIO_CELLS)
        page = open_notebook(lab, browser, "base.ipynb")
        offline(page)
        is_ours = lambda url: "shardscope" in url or url.startswith("blob:")  # noqa: E731
        page.on("requestfailed", lambda request: failures.append(request.url))
        page.on("response", lambda response: response.status >= 400 and failures.append(response.url))
        page.on("pageerror", lambda error: failures.append(str(error)))
        run_all_cells(page, 1)
        page.wait_for_selector(
            ".ss-studio .js-plotly-plot .barlayer path", state="attached", timeout=TIMEOUT_MS
        )
        expect(page.locator(".ss-studio .ss-verdict")).to_contain_text("GiB on each GPU", use_inner_text=True)
        # JupyterLab's own failed requests, for a new workspace for example, are not ours.
        assert not [url for url in failures if is_ours(url) or "/user/ada/" not in url]
        page.close()
