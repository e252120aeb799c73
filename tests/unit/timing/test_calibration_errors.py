"""Tests of errors that ``ss.calibrate`` raises before it starts a process."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import pytest

import shardscope as ss
from shardscope.timing.calibration.files import NotStoredError


@pytest.fixture(autouse=True)
def forbid_new_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail_on_start(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", fail_on_start)
    monkeypatch.setenv("SHARDSCOPE_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize("seconds", [0, 4.9, 1e9, float("nan"), "60", True, None])
def test_seconds_out_of_range_are_rejected(seconds: Any) -> None:
    with pytest.raises(ValueError, match=r"calibrate\.seconds"):
        ss.calibrate(seconds=seconds)


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ("8xh100-sxm-80gb", "no GPU, only CPU ranks"),
        ("2x8xh100-sxm-80gb", "one node: this machine"),
        ("1000xcpu", "CPU ranks on"),
    ],
)
def test_a_cluster_that_is_not_this_machine_is_rejected(cluster: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"calibrate\.cluster") as error:
        ss.calibrate(ss.Cluster.parse(cluster))
    assert words in str(error.value) and "Cluster.parse(" in str(error.value)


@pytest.mark.parametrize("cluster", ["2xcpu", 2, {}])
def test_a_cluster_of_a_wrong_type_is_rejected(cluster: Any) -> None:
    with pytest.raises(ValueError, match=r"calibrate\.cluster"):
        ss.calibrate(cluster)


@pytest.mark.parametrize("missing", [("torch",), ("torch", "transformers")])
def test_without_torch_the_error_names_the_extra_to_install(
    missing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name in missing else real(name, *more)
    )
    with pytest.raises(ImportError, match=r'torch.*: pip install "shardscope\[train\]"'):
        ss.calibrate()
    assert not list(tmp_path.iterdir())


def test_a_read_only_folder_is_rejected_before_measuring(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotStoredError, match="cannot be kept"):
        ss.calibrate(ss.Cluster.parse("2xcpu"), folder=tmp_path / "file")
