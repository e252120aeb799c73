"""Users without a home folder: services and containers whose user is in no list, without ``HOME``."""

from __future__ import annotations

import pwd
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardscope as ss
from shardscope.machine.user_folders import expand_home, find_cache_folder
from shardscope.timing.calibration import selection, store
from shardscope.timing.calibration.files import FOLDER_VARIABLE, NotStoredError
from shardscope.timing.calibration.finished_runs import find_residual
from shardscope.training.data.windows import read_shipped_tokens

CLUSTER = ss.Cluster.parse("2xcpu")


@pytest.fixture(autouse=True)
def _no_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def raise_unknown(*_: object) -> None:
        raise KeyError("uid not found")

    for name in ("HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", FOLDER_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", raise_unknown)
    monkeypatch.setattr(pwd, "getpwnam", raise_unknown)
    with pytest.raises(RuntimeError):
        Path.home()
    selection._find_calibration_folder.cache_clear()
    yield
    selection._find_calibration_folder.cache_clear()


def test_planning_and_search_need_no_home_folder() -> None:
    plan = ss.Plan(
        ss.models["llama-3.2-1b"], ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(), ss.Layout.ddp()
    )
    assert plan.step().seconds > 0 and isinstance(plan.findings(), list)
    assert find_residual(plan) is None
    assert store.find_calibration(CLUSTER) is None and store.find_traced_rates(CLUSTER) is None


def test_what_is_stored_names_the_variable() -> None:
    with pytest.raises(NotStoredError, match=r"no home folder.*set HOME, or SHARDSCOPE_DATA_HOME"):
        store.check_writable()
    with pytest.raises(FileNotFoundError, match=r"no home folder.*set HOME, or XDG_CACHE_HOME"):
        find_cache_folder()
    assert len(read_shipped_tokens()) > 1000


def test_paths_below_the_home_folder_are_missing_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert expand_home("~/x") == Path("~/x")
    for read in (ss.Plan.from_deepspeed, ss.Plan.from_megatron, ss.Architecture.from_hf):
        with pytest.raises(ValueError, match="~/x"):
            read("~/x.json")
    plan = ss.Plan(ss.Architecture.of_size("2m"), CLUSTER, ss.Recipe(seq_len=64), ss.Layout.ddp())
    with pytest.raises(ValueError, match="folder is '~/x'; allowed: a path; that user has no home folder"):
        plan.export("~/x")
    assert not list(tmp_path.iterdir())
