"""Whatever is skipped says why and what would run it, and no test takes another way around."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import needs

TESTS = Path(__file__).parents[1]
FILES = sorted(path for path in TESTS.rglob("*.py") if path.name != "needs.py")
PROJECT = tomllib.loads((TESTS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WITH = {"huggingface_hub": "transformers", "jupyter_client": "jupyterlab", "megatron": "megatron-core"}
"""Packages that come with another, or by another name."""


def calls(path: Path, *names: str) -> Iterator[ast.Call]:
    """Calls of ``pytest.<name>`` or ``pytest.mark.<name>`` in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names:
            yield node


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(TESTS).as_posix())
def test_every_skip_says_what_to_do(path: Path) -> None:
    assert not list(calls(path, "importorskip")), "tests.needs.needs() says which line brings the package"
    for call in calls(path, "skip", "skipif", "xfail"):
        if not isinstance(call.func, ast.Attribute) or "pytest" not in ast.unparse(call.func):
            continue
        said = [item.value for item in call.keywords if item.arg == "reason"] or call.args[:1]
        words = "".join(part.value for part in ast.walk(said[0]) if isinstance(part, ast.Constant))
        assert re.search(r"install|run|set ", words), f"line {call.lineno}: {words!r} does not say what to do"


@pytest.mark.parametrize("package", needs.EXTRAS)
def test_the_extra_that_is_named_brings_it(package: str) -> None:
    extra = needs.EXTRAS[package]
    assert f'pip install -U "shardscope[{extra}]"' in needs.why(package)
    wanted, reached = WITH.get(package, package), [extra]
    for name in reached:
        for line in PROJECT["optional-dependencies"][name]:
            if found := re.fullmatch(r"shardscope\[(.+)\]", line):
                reached += found[1].split(",")
    lines = [line for name in reached for line in PROJECT["optional-dependencies"][name]]
    assert any(re.split(r"[>=<]", line)[0] == wanted for line in lines), lines


def test_what_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("no_such_package", "json"):
        monkeypatch.setitem(needs.EXTRAS, package, "test")
    with pytest.raises(pytest.skip.Exception, match="needs no_such_package: pip install"):
        needs.needs("no_such_package.inside")
    with pytest.raises(pytest.skip.Exception, match="needs no_such_package: pip install"):
        needs.skip_without("no_such_package")
    with pytest.raises(pytest.skip.Exception, match=r"needs torch 99\.0 or newer: pip install"):
        needs.needs("torch", minversion="99.0")
    assert needs.needs("json").__name__ == "json"
