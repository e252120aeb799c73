"""Tests of the Studio on a login node: a real Slurm of two nodes behind JupyterLab.

A partition is chosen in the GPU picker, the plan is launched there, trains on both nodes and finishes; a job
that waits is cancelled.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect
from served import Lab, running_lab
from studio_page import choose_tab, fill_input, open_fold, open_studio, save_screenshot, use_theme
from tests.cluster.two_node_slurm import INSTALL, TwoNodeSlurm, find_missing
from tests.requirements import skip_without, thorough

pytestmark = thorough()  # Each needs the page that the one before left.

RUN_TIMEOUT_MS = 300_000
HEAD = ".ss-head button.ss-main-button"


@pytest.fixture(scope="module")
def slurm(browser: Any) -> Iterator[TwoNodeSlurm]:
    """Two nodes without GPUs, on which plans for CPU ranks train."""
    missing = find_missing()
    if missing:
        pytest.skip(f"Slurm is not installed ({missing} missing): {INSTALL}")
    for package in ("torch", "submitit"):
        skip_without(package)
    slurm = TwoNodeSlurm(has_gpus=False)
    try:
        slurm.start()
        yield slurm
    finally:
        left = slurm.stop()
    assert left == []


@pytest.fixture(scope="module")
def login_node(slurm: TwoNodeSlurm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab whose kernels find Slurm's commands and the cluster."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in slurm.environment.items():
            patch.setitem(os.environ, name, value)
        with running_lab(tmp_path_factory.mktemp("login")) as lab:
            yield lab


@pytest.fixture(scope="module")
def page(login_node: Lab, browser: Any) -> Iterator[Any]:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    open_studio(page, login_node)
    yield page
    page.close()


def choose_partition(page: Any) -> None:
    """Choose the partition as the place of the GPUs, and a model that trains there in seconds."""
    page.locator(".ss-launch-target:not(.ss-off)").wait_for()
    row = open_fold(page, "GPUs").locator(".ss-row", has_text="Where").first
    menu = row.locator("select")
    texts = [text.replace("\xa0", " ") for text in menu.locator("option").all_inner_texts()]
    wanted = "Slurm: debug · 2 nodes without GPUs, 2 idle"
    assert texts[0] == "any" and texts[1].startswith("this machine") and texts[2] == wanted
    menu.select_option(index=2)
    expect(page.locator(".ss-head .ss-what")).to_contain_text("2 CPU ranks on 2 nodes", use_inner_text=True)
    for label, text in (("Model", "2m"), ("Sequence", "64"), ("Steps", "6")):
        fill_input(page, label, text)
    batch = open_fold(page, "Training").locator(".ss-row", has_text="Batch").first.locator("input").last
    batch.fill("4")
    batch.press("Enter")


def launch(page: Any) -> None:
    expect(page.locator(HEAD)).to_have_text("Launch on 2 CPU ranks", use_inner_text=True)
    page.wait_for_function(f"() => !document.querySelector('{HEAD}').disabled")
    page.locator(HEAD).click()
    page.locator(".ss-run .ss-run-target", has_text="Slurm: debug, job").wait_for()


def test_partition_is_chosen_launched_and_finished(page: Any, slurm: TwoNodeSlurm) -> None:
    choose_partition(page)
    save_screenshot(page, "slurm_gpus")
    assert page.locator(".ss-launch-target select").input_value() == "Slurm: debug"
    # An option that Slurm would not take is refused at its input; the text stays.
    page.locator(".ss-launch-target button").click()
    limit = page.locator(".ss-row", has_text="Time limit").first
    limit.locator("input").fill("soon")
    limit.locator("input").press("Enter")
    expect(limit.locator("[role=alert]")).to_contain_text("minutes from 1 on", use_inner_text=True)
    assert limit.locator("input").input_value() == "soon" and page.locator(HEAD).is_disabled()
    save_screenshot(page, "slurm_options")
    limit.locator("input").fill("20")
    limit.locator("input").press("Enter")
    launch(page)
    page.wait_for_selector(".ss-status[data-status=finished]", timeout=RUN_TIMEOUT_MS)
    table = page.locator(".ss-run .ss-latest")
    nodes = table.locator("th .ss-hint").all_inner_texts()
    # The free memory is this machine's, which is not where it trains.
    expect(page.locator(".ss-free")).to_be_hidden()
    assert sorted(nodes) == ["node1", "node2"]
    menu = page.locator(".ss-log-head select")
    menu.select_option(label=f"supervisor · {nodes[1]}")
    save_screenshot(page, "slurm_finished")
    menu.scroll_into_view_if_needed()
    save_screenshot(page, "slurm_logs")
    choose_tab(page, "Runs")
    page.get_by_role("button", name="Back to all runs").click()
    expect(page.locator(".ss-runs tbody")).to_contain_text("Slurm: debug, job", use_inner_text=True)
    assert slurm.wait_until_empty() == []


def test_more_nodes_than_the_partition_has_are_refused_with_the_fix(page: Any) -> None:
    nodes = open_fold(page, "GPUs").locator("input[title='Number of nodes']")
    nodes.fill("4")
    nodes.press("Enter")
    expect(page.locator(HEAD)).to_have_text("Launch on 4 CPU ranks", use_inner_text=True)
    page.locator(HEAD).click()
    notice = page.locator(".ss-notice [role=alert]")
    expect(notice).to_contain_text("nodes of partition debug: 2 nodes", use_inner_text=True)
    save_screenshot(page, "slurm_refused")
    page.get_by_role("button", name="Use 2 nodes").click()
    expect(page.locator(HEAD)).to_have_text("Launch on 2 CPU ranks", use_inner_text=True)


def test_job_that_waits_is_cancelled(page: Any, slurm: TwoNodeSlurm, tmp_path: Path) -> None:
    script = tmp_path / "other.sh"
    script.write_text("#!/bin/sh\nsleep 900\n")
    slurm.run("sbatch", "--nodes=2", "--time=20", f"--output={tmp_path}/out", str(script))
    try:
        launch(page)
        reason = page.locator(".ss-run-top .ss-hint", has_text="waits: Resources; estimated start")
        reason.wait_for()
        page.wait_for_selector(".ss-status[data-status=queued]")
        # Another job can be submitted meanwhile.
        assert page.locator(HEAD).is_enabled()
        save_screenshot(page, "slurm_queued")
        use_theme(page, "JupyterLab Dark", light="false")
        page.wait_for_timeout(800)
        save_screenshot(page, "slurm_queued_dark")
        page.locator(".ss-run-top").get_by_role("button", name="Cancel").click()
        page.wait_for_selector(".ss-status[data-status=stopped]", timeout=RUN_TIMEOUT_MS)
        expect(page.locator(".ss-run-top")).to_contain_text("before any rank started", use_inner_text=True)
    finally:
        for job in slurm.list_jobs():
            slurm.run("scancel", job.split()[0])
    assert slurm.wait_until_empty() == []
