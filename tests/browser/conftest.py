"""Fixtures of the browser tests; screenshots stay in ``artifacts/screenshots``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlparse

import pytest
from playwright.sync_api import expect
from served import CHROMIUM, Lab, running_chromium, running_lab
from studio_page import SHOWN


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Browser tests come last: playwright keeps an event loop running, in which asyncio.run() is refused.

    The longest file is the first of them: no worker is still busy with it when the others have finished.
    """
    items.sort(key=lambda item: ("browser" in item.path.parts, item.path.name != "test_main_job.py"))


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """The system's Chromium; without one the browser tests are skipped."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here; to run this: apt-get install chromium")
    expect.set_options(timeout=SHOWN)
    with running_chromium() as chromium:
        yield chromium


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory, browser: Any) -> Iterator[Lab]:
    """JupyterLab whose working folder holds a copy of the notebooks."""
    with running_lab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


@pytest.fixture
def offline() -> Iterator[Callable[[object], None]]:
    """Watches pages; the test fails if one of them asked for anything outside of this machine."""
    strayed: list[str] = []

    def watch(page: object) -> None:
        def note(request: object) -> None:
            address = urlparse(request.url)
            if address.scheme in ("http", "https", "ws", "wss") and address.hostname not in (
                "127.0.0.1",
                "localhost",
            ):
                strayed.append(request.url)

        page.on("request", note)
        page.on("websocket", note)

    yield watch
    assert not strayed, f"requests that left this machine: {strayed}"
