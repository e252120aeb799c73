"""Files of npm packages that only tests use: fetched by npm into a temporary folder, never stored."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

AXE = "axe-core@4.10.3"
REVEAL = "reveal.js@4.6.1"
"""The version that nbconvert's slides template names."""

REQUIRE = "requirejs@2.3.6"
"""Loads reveal.js in nbconvert's slides."""


@cache
def fetch_package(package: str) -> Path:
    """Return the folder of an npm package. Skips the test where npm or the registry cannot be reached."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip(f"needs npm, which fetches {package}: apt-get install npm")
    folder = Path(tempfile.mkdtemp(prefix="shardscope-npm-"))
    command = [npm, "install", "--no-save", "--ignore-scripts", "--no-audit", "--no-fund", package]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm did not fetch {package} in two minutes; to run this: npm install {package}")
    if done.returncode:
        error = done.stderr.strip()[-200:]
        pytest.skip(f"npm could not fetch {package}, so run this where it can: {error}")
    return folder / "node_modules" / package.rpartition("@")[0]
