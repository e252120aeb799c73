"""Runs without processes, as a view reads them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import shardscope as ss
from shardscope.records.nodes import RunNode
from shardscope.records.samples import Sample, read_samples
from shardscope.runs.explain.predicted_metrics import PredictedMetrics

PLAN = ss.Plan(
    ss.Architecture.of_size("2m"),
    ss.Cluster.parse("2xcpu"),
    ss.Recipe(seq_len=64, global_batch_size=2),
    ss.Layout.ddp(),
)

HOME = tempfile.TemporaryDirectory(prefix="shardscope-fake-runs-")


class FakeFollow:
    """New records of a list, each once."""

    is_behind = False
    num_read_bytes = 1
    num_skipped_bytes = 0

    def __init__(self, records: list[dict[str, Any]]) -> None:
        self.records, self.place = records, 0

    def read(self) -> list[dict[str, Any]]:
        new = self.records[self.place :]
        self.place += len(new)
        return new


class FakeRun:
    """A run without processes, with the interface that views use; its logs are real files."""

    # For isinstance, as a mock with a spec: views refuse what is not a run.
    __class__ = ss.Run  # type: ignore[assignment]
    name, reason, error, note = "fake", "because", None, ""
    world_size = 2
    trains_the_plan = False
    has_looked = is_hanging = False
    keeps_best = keeps_a_model = False
    num_steps: int | None = None
    prediction: PredictedMetrics | None = None
    task_fields: dict[str, Any] | None = None
    history: tuple[dict[str, Any], ...] = ()
    model: Path | None = None
    recorded_base: dict[str, Any] | None = None
    target = ""
    is_on_this_machine = True
    nodes: tuple[RunNode, ...] = ()
    attempts: tuple[dict[str, Any], ...] = ()

    def __init__(self, records: list[dict[str, Any]]) -> None:
        self.records = records
        self.gpu_readings: list[dict[str, Any]] = []
        self.recorded: dict[int, Any] = {}
        self.pressed_buttons: list[str] = []
        self.status = "running"
        self.folder = Path(tempfile.mkdtemp(dir=HOME.name))
        (self.folder / "logs").mkdir()
        self.plan = PLAN

    def write(self, text: str | bytes, rank: int = 0) -> None:
        data = text if isinstance(text, bytes) else text.encode()
        (self.folder / "logs" / f"rank-{rank}.log").write_bytes(data)

    def follow(self) -> FakeFollow:
        self.follower = FakeFollow(self.records)
        return self.follower

    def predicted_metrics(self) -> PredictedMetrics | None:
        return self.prediction

    def gpu_samples(self) -> list[dict[str, Any]]:
        return list(self.gpu_readings)

    def samples(self) -> list[Sample]:
        return read_samples(self.folder)

    def engine_reports(self) -> dict[int, Any]:
        return self.recorded

    @property
    def reads_stop_requests(self) -> bool:
        return self.trains_the_plan or self.has_looked

    def finish(self) -> None:
        self.pressed_buttons.append("Stop and keep the best")

    def press(self, button: str) -> None:
        self.pressed_buttons.append(button)
        self.status = "stopping" if button == "Save and stop" else "stopped"


def wait_until(holds: Callable[[], bool], seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()


def record(step: Any = 0, rank: Any = 0, **values: Any) -> dict[str, Any]:
    return {"step": step, "rank": rank, "time": 0.0, **values}
