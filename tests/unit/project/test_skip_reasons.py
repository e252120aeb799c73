"""Tests of skip reasons: each says how to run the test and names an extra that installs the package."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest
from tests import requirements

TESTS = Path(__file__).parents[2]
PROJECT = tomllib.loads((TESTS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WITH = {
    "kubeflow_trainer_api": "kubeflow",
    "huggingface_hub": "transformers",
    "jupyter_client": "jupyterlab",
    "megatron": "megatron-core",
}
"""Modules that are part of another distribution or have another name than their distribution."""


def test_skip_reasons_say_how_to_run_the_test() -> None:
    problems = []
    for path in sorted(path for path in TESTS.rglob("*.py") if path.name != "requirements.py"):
        source = path.read_text(encoding="utf-8")
        for call in ast.walk(ast.parse(source)) if re.search(r"pytest.*(skip|xfail)", source) else ():
            name = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
            if name == "pytest.importorskip":
                problems.append(
                    f"{path}:{call.lineno}: use tests.requirements.needs(), which names the install command"
                )
            elif re.fullmatch(r"pytest\.(mark\.)?(skip|skipif|xfail)", name):
                reasons = [item.value for item in call.keywords if item.arg == "reason"] or call.args[:1]
                text = "".join(part.value for part in ast.walk(reasons[0]) if isinstance(part, ast.Constant))
                if not re.search(r"install|run|set ", text):
                    problems.append(f"{path}:{call.lineno}: {text!r}")
    assert not problems


@pytest.mark.parametrize("package", requirements.EXTRAS)
def test_the_extra_in_a_skip_reason_installs_the_package(package: str) -> None:
    distribution, extras = WITH.get(package, package), [requirements.EXTRAS[package]]
    for name in extras:
        for line in PROJECT["optional-dependencies"][name]:
            if nested := re.fullmatch(r"shardscope\[(.+)\]", line):
                extras += nested[1].split(",")
    lines = [line for name in extras for line in PROJECT["optional-dependencies"][name]]
    assert any(re.split(r"[>=<]", line)[0] == distribution for line in lines), lines


def test_needs_skips_with_the_missing_package_or_version(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("no_such_package", "packaging"):
        monkeypatch.setitem(requirements.EXTRAS, package, "test")
    with pytest.raises(pytest.skip.Exception, match="no_such_package: pip install"):
        requirements.needs("no_such_package.inside")
    with pytest.raises(pytest.skip.Exception, match="packaging 99"):
        requirements.needs("packaging", minversion="99.0")
