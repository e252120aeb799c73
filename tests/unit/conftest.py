"""Fixtures of unit tests, and how their processes import megatron-core."""

from __future__ import annotations

import sys
from collections.abc import Sequence
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
