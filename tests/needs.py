"""What a test cannot do without: where it is missing, the test is skipped and says which line brings it."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from packaging.version import Version

EXTRAS = {
    "accelerate": "train",
    "bitsandbytes": "test",
    "build": "test",
    "deepspeed": "deepspeed",
    "hatchling": "test",
    "huggingface_hub": "train",
    "jupyter_client": "lab",
    "megatron": "megatron",
    "peft": "train",
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


def why(module: str, minversion: str | None = None) -> str:
    """What a skip says for want of ``module``."""
    package = module.partition(".")[0]
    version = f" {minversion} or newer" if minversion else ""
    return f'needs {package}{version}: pip install -U "shardscope[{EXTRAS[package]}]"'
