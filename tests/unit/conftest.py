"""Fixtures of unit tests, and how their processes import megatron-core."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

import pytest

from shardscope.records.folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run's folder with nothing in it yet."""
    made = RunFolder(tmp_path / "run")
    made.create()
    return made


@pytest.fixture(autouse=True)
def no_ray_of_this_machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide a Ray cluster that runs here, such as that of tests/cluster in another process, from widgets."""
    if "widgets" in request.path.parts:
        from shardscope_widgets.pickers import schedulers

        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setattr(schedulers, "RAY_ADDRESS_FILE", Path("/nonexistent"))


@pytest.fixture(autouse=True)
def no_loop_of_a_browser() -> Iterator[None]:
    """Hide the event loop of Playwright, which counts as running between browser tests of the same process.

    It calls nothing meanwhile: what a view asks it to do later would never be done, and keep the view alive.
    """
    loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    yield
    asyncio._set_running_loop(loop)


class _ImportAsRehearsals(MetaPathFinder):
    """Imports megatron-core as its rehearsals do, whichever test of a process is the first to want it.

    A rehearsal in the process of a test that imported it otherwise counts other bytes.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "megatron.core":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_import_the_rest(module: ModuleType) -> None:
            from shardscope.frameworks.megatron.rehearsal import rehearse

            with rehearse.REGIONS.in_place_of_compile():
                execute(module)
            rehearse.import_with_fused_regions()

        spec.loader.exec_module = execute_and_import_the_rest  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _ImportAsRehearsals())
