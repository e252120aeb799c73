"""Tests of ``.ci/check_dist.py``, which `make dist` runs: what must not be in a release is found."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[3] / ".ci" / "check_dist.py"
TRACKED = {"README.md", "toolkit/shardscope/a.py", "widgets/shardscope_widgets/b.py"}
WHEEL = {"shardscope/a.py", "shardscope_widgets/b.py", "shardscope-1.dist-info/METADATA"}
SDIST = TRACKED | {".gitignore", "PKG-INFO"}


@pytest.fixture(scope="module")
def check_dist() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_dist", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_missing_and_untracked_files_are_named(check_dist: ModuleType) -> None:
    assert check_dist.compare_with_tracked(SDIST, WHEEL, TRACKED) == []
    notes, model = "toolkit/shardscope/notes.txt", "shardscope/model.bin"
    wrong = check_dist.compare_with_tracked(SDIST - {"README.md"} | {notes}, WHEEL | {model}, TRACKED)
    assert wrong == [
        "the sdist lacks README.md",
        f"the sdist has {notes}, which git does not track",
        f"the wheel has {model}, which git does not track",
    ]


@pytest.mark.parametrize(
    "text",
    [
        f"token = 'hf_{'a' * 30}'",
        f"-----BEGIN {'RSA '}PRIVATE KEY-----",
        "index = 'https://user:secret@packages.example.org/simple'",
        "see /home/someone/shardscope",
        "index = 'https://packages.example.org/simple'",
    ],
)
def test_secrets_and_names_of_this_machine_are_found(check_dist: ModuleType, text: str) -> None:
    private = ("/home/someone/shardscope", "packages.example.org")
    assert check_dist.find_leaks({"a.py": text.encode()}, private)
    assert not check_dist.find_leaks({"a.py": b"url = 'https://pypi.org/simple'"}, private)


def test_hosts_of_package_indexes_are_private_and_public_ones_are_not(check_dist: ModuleType) -> None:
    variables = {
        "PIP_EXTRA_INDEX_URL": "https://wheels.example.org/simple https://download.pytorch.org/whl/cpu",
        "HTTPS_PROXY": "http://proxy.example.org:3128",
    }
    private = check_dist.find_private_texts(variables)
    assert {"wheels.example.org", "proxy.example.org"} <= set(private)
    assert not any("pytorch" in word or word == "localhost" for word in private)
    assert str(FILE.parents[1]) in private
