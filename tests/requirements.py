"""Requirements of tests: a test whose package is missing is skipped with the command that installs it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
from packaging.version import Version

from shardscope.machine.host import multiplies_in_fp16

EXTRAS = {
    "accelerate": "train",
    "bitsandbytes": "qlora",
    "build": "test",
    "datasets": "train",
    "deepspeed": "deepspeed",
    "gguf": "train",
    "hatchling": "test",
    "huggingface_hub": "train",
    "jupyter_client": "lab",
    "kubeflow_trainer_api": "test",
    "megatron": "megatron",
    "peft": "train",
    "ray": "ray",
    "safetensors": "train",
    "submitit": "slurm",
    "tokenizers": "train",
    "torch": "train",
    "torchao": "test",
    "transformers": "train",
    "trl": "test",
    "voila": "test",
}
"""For each package, the smallest extra of pyproject.toml that installs it."""


def needs(module: str, minversion: str | None = None) -> Any:
    """Import and return ``module``. Skip the test, or at module level the whole file, if it is missing."""
    imported = pytest.importorskip(module, reason=explain_missing(module, minversion))
    if minversion is not None and Version(imported.__version__) < Version(minversion):
        pytest.skip(explain_missing(module, minversion), allow_module_level=True)
    return imported


def needs_installed(package: str) -> pytest.MarkDecorator:
    """Return a mark for tests whose subprocesses import ``package``; it is not imported here."""
    is_installed = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not is_installed, reason=explain_missing(package))


def skip_from_torch(release: str, difference: str) -> None:
    """Skip the running test with torch ``release`` or newer, which differs as ``difference`` says."""
    if Version(importlib.metadata.version("torch")) >= Version(release):
        pytest.skip(f"torch {release} {difference}; it runs with the pinned torch")


def skip_without(package: str) -> None:
    """Skip the running test if ``package`` is not installed."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(explain_missing(package))


LEVEL = os.environ.get("SHARDSCOPE_TESTS", "")
"""``""``: one case of each kind; ``"cluster"``: for tests/cluster one case of each kind of fault, framework
and engine; ``"all"``: every case."""
THOROUGH = LEVEL in ("cluster", "all")


def thorough() -> pytest.MarkDecorator:
    """Return a mark for cases that only `make test-all` runs; `make test` runs similar cases."""
    return pytest.mark.skipif(
        not THOROUGH, reason="one more of its kind; run it and all others: make test-all"
    )


def every_case() -> pytest.MarkDecorator:
    """Return a mark for cases that only `make test-all` runs; `make test-cluster` runs similar cases."""
    return pytest.mark.skipif(
        LEVEL != "all", reason="one more of its kind on a cluster; run it and all others: make test-all"
    )


def sample(number: int) -> pytest.MarkDecorator:
    """Return a mark for a parametrized test: `make test` runs ``number`` of its cases, `make test-all` all.

    The cases are spread evenly, the first among them.
    """
    return pytest.mark.sample(number)


def skip_unsampled(items: Iterable[pytest.Item]) -> None:
    """Mark the cases that :func:`sample` leaves to `make test-all` as skipped."""
    if THOROUGH:
        return
    cases: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample"):
            cases.setdefault((str(item.path), item.nodeid.partition("[")[0]), []).append(item)
    for items_of_one in cases.values():
        mark = items_of_one[0].get_closest_marker("sample")
        assert mark is not None
        step = max(1, -(-len(items_of_one) // mark.args[0]))
        for index, item in enumerate(items_of_one):
            if index % step:
                item.add_marker(thorough())


def examples(number: int) -> int:
    """Return hypothesis's ``max_examples``: ``number`` in `make test-all`, else an eighth, at least 5."""
    return number if THOROUGH else max(number // 8, 5)


def few(
    cases: Iterable[Any],
    kept: Collection[Any],
    mark_others: Callable[[], pytest.MarkDecorator] = thorough,
) -> list[Any]:
    """Return ``cases`` as pytest parameters: those that are not in ``kept`` have the mark, so that
    `make test` runs only ``kept``, and `make test-all` all."""
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    kept = [case if isinstance(case, tuple) else (case,) for case in kept]
    assert all(case in values for case in kept)
    return [pytest.param(*case, marks=[] if case in kept else mark_others()) for case in values]


def with_fp16_where_it_can_be(names: Iterable[str]) -> list[Any]:
    """Return ``names`` as pytest parameters, with those of fp16 skipped on processors without AVX512-FP16."""
    mark = pytest.mark.skipif(
        multiplies_in_fp16() is False,
        reason="DeepSpeed trains in fp16 on processors with AVX512-FP16 only: run it on one",
    )
    return [pytest.param(name, marks=[mark] if "fp16" in name else []) for name in names]


def explain_missing(module: str, minversion: str | None = None) -> str:
    """Return the reason of a skip if ``module`` is missing: the command that installs it."""
    package = module.partition(".")[0]
    version = f" {minversion} or newer" if minversion else ""
    return f'needs {package}{version}: pip install -U "shardscope[{EXTRAS[package]}]"'
