"""Fixtures of the browser tests; screenshots are saved in ``artifacts/screenshots``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlparse

import pytest
from playwright.sync_api import expect
from served import CHROMIUM, Lab, running_chromium, running_lab
from studio_page import TIMEOUT_MS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Browser tests come last: playwright keeps an event loop running, in which asyncio.run() is refused.

    Where workers share the tests, the longest file of the browser is one of the first (tests/conftest.py).
    """
    items.sort(key=lambda item: "browser" in item.path.parts)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """The system's Chromium; without one the browser tests are skipped."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here; to run this: apt-get install chromium")
    expect.set_options(timeout=TIMEOUT_MS)
    with running_chromium() as chromium:
        yield chromium


@pytest.fixture(scope="session")
def shared_lab(tmp_path_factory: pytest.TempPathFactory, browser: Any) -> Iterator[Lab]:
    """JupyterLab of all files of tests."""
    with running_lab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


@pytest.fixture(scope="module")
def lab(shared_lab: Lab) -> Lab:
    """JupyterLab as it was started: what tests of other files saved, set and left running is gone."""
    shared_lab.restore()
    return shared_lab


@pytest.fixture
def offline() -> Iterator[Callable[[object], None]]:
    """A function that watches a page; the test fails if the page sent a request to another machine."""
    external_urls: list[str] = []

    def watch(page: object) -> None:
        def record_request(request: object) -> None:
            address = urlparse(request.url)
            if address.scheme in ("http", "https", "ws", "wss") and address.hostname not in (
                "127.0.0.1",
                "localhost",
            ):
                external_urls.append(request.url)

        page.on("request", record_request)
        page.on("websocket", record_request)

    yield watch
    assert not external_urls, f"requests that left this machine: {external_urls}"
