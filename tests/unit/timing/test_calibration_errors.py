"""What ``ss.calibrate`` refuses before any process starts."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import pytest

import shardscope as ss
from shardscope.timing.calibration.store import NotStoredError


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setenv("SHARDSCOPE_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize("seconds", [0, 4.9, 1e9, float("nan"), "60", True, None])
def test_seconds_have_a_range(seconds: Any) -> None:
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
def test_another_machine_is_refused(cluster: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"calibrate\.cluster") as refused:
        ss.calibrate(ss.Cluster.parse(cluster))
    assert words in str(refused.value) and "Cluster.parse(" in str(refused.value)


@pytest.mark.parametrize("cluster", ["2xcpu", 2, {}])
def test_what_is_no_cluster_is_refused(cluster: Any) -> None:
    with pytest.raises(ValueError, match=r"calibrate\.cluster"):
        ss.calibrate(cluster)


@pytest.mark.parametrize("missing", [("torch",), ("torch", "transformers")])
def test_without_torch_the_extra_is_named(
    missing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name in missing else real(name, *more)
    )
    with pytest.raises(ImportError, match=r'torch.*: pip install "shardscope\[train\]"'):
        ss.calibrate()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_refused_before_a_minute_is_spent(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotStoredError, match="cannot be kept"):
        ss.calibrate(ss.Cluster.parse("2xcpu"), folder=tmp_path / "file")
