"""What a test cannot do without: where it is missing, the test is skipped and says which line brings it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest
from packaging.version import Version

from shardscope.machine.host import multiplies_in_fp16

EXTRAS = {
    "accelerate": "train",
    "bitsandbytes": "qlora",
    "build": "test",
    "deepspeed": "deepspeed",
    "hatchling": "test",
    "huggingface_hub": "train",
    "jupyter_client": "lab",
    "megatron": "megatron",
    "peft": "train",
    "safetensors": "train",
    "tokenizers": "train",
    "torch": "train",
    "torchao": "test",
    "transformers": "train",
}
"""The smallest extra of pyproject.toml that brings each package."""


def needs(module: str, minversion: str | None = None) -> Any:
    """``module``, imported; without it the test is skipped, and at a file's top all of its tests."""
    found = pytest.importorskip(module, reason=why(module, minversion))
    if minversion is not None and Version(found.__version__) < Version(minversion):
        pytest.skip(why(module, minversion), allow_module_level=True)
    return found


def needs_installed(package: str) -> pytest.MarkDecorator:
    """A mark for tests whose own processes import ``package``; it is not imported here."""
    found = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not found, reason=why(package))


def skip_without(package: str) -> None:
    """The same from inside a test."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(why(package))


THOROUGH = os.environ.get("SHARDSCOPE_TESTS") == "all"


def thorough() -> pytest.MarkDecorator:
    """A mark for what only `make test-all` runs: others like it run in every test."""
    return pytest.mark.skipif(
        not THOROUGH, reason="one more of its kind; run it and all others: make test-all"
    )


def examples(number: int) -> int:
    """How many examples hypothesis draws of a law: all in `make test-all`, else an eighth of ``number``."""
    return number if THOROUGH else max(number // 8, 5)


def few(cases: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """``cases`` as parameters: ``kept`` run in every test, the others of their kind in `make test-all`."""
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    kept = [case if isinstance(case, tuple) else (case,) for case in kept]
    assert all(case in values for case in kept)
    return [pytest.param(*case, marks=[] if case in kept else thorough()) for case in values]


def with_fp16_where_it_can_be(names: Iterable[str]) -> list[Any]:
    """``names`` as parameters: those of fp16 need a processor on which DeepSpeed trains in it."""
    mark = pytest.mark.skipif(
        multiplies_in_fp16() is False,
        reason="DeepSpeed trains in fp16 on processors with AVX512-FP16 only: run it on one",
    )
    return [pytest.param(name, marks=[mark] if "fp16" in name else []) for name in names]


def why(module: str, minversion: str | None = None) -> str:
    """What a skip says for want of ``module``."""
    package = module.partition(".")[0]
    version = f" {minversion} or newer" if minversion else ""
    return f'needs {package}{version}: pip install -U "shardscope[{EXTRAS[package]}]"'
