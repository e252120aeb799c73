"""Tests of the target of a fine-tune from one click: this machine, or one node of a scheduler's queue."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_runs import FakeRun, record, wait_until
from finetune_views import wait_until_read
from test_finetune_view import files, show

import shardscope as ss
from shardscope.core.errors import FieldError, OverridableError, Value
from shardscope_widgets.finetune import finetune_view, launch_place
from shardscope_widgets.kit import background_calls
from shardscope_widgets.pickers.schedulers import JobOption, Queue, Scheduler

__all__ = ["files"]

OPTIONS = (JobOption(field="time", label="Time limit", tooltip="Minutes"),)


def build_a100(kind: str | None) -> ss.Cluster:
    if kind is None:
        raise FieldError("Slurm.inventory gpu", None, "one of two types", Value("a100-sxm-40gb"))
    return ss.Cluster.parse(f"2x4x{kind}")


@pytest.fixture
def queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """A partition of CPU nodes with one core, and one of GPUs whose name has two meanings."""
    scheduler = Scheduler(
        name="Slurm",
        is_present=lambda: True,
        list_queues=lambda _: [],
        options=OPTIONS,
        build_target=lambda partition, options: ss.Slurm(partition=partition, **options),
    )

    def make_queue(name: str, kinds: tuple[str, ...], build: Callable[[str | None], ss.Cluster]) -> Queue:
        return Queue(
            scheduler=scheduler, name=name, description="2 nodes", gpu_candidates=kinds, build_cluster=build
        )

    offered = [
        make_queue("cpu", ("cpu",), lambda _: ss.Cluster.parse("2x1xcpu")),
        make_queue("a100", ("a100-sxm-40gb", "a100-sxm-80gb"), build_a100),
    ]
    monkeypatch.setattr(launch_place, "SCHEDULERS", (scheduler,))
    monkeypatch.setattr(launch_place, "find_queues", lambda: offered)


def show_with_targets() -> Any:
    view = show()
    assert wait_until(lambda: len(view.place.target.choice.options) == 3)
    return view


def wait_for_plan(view: Any, cluster: str) -> None:
    wait_until_read(view, lambda: view.plan is not None and str(view.plan.cluster) == cluster)


def test_a_queue_sets_the_plan_and_the_target(
    files: Path, queues: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[dict[str, Any]] = []
    run: Any = FakeRun([record(step, loss=1.0) for step in range(3)])
    run.memory = lambda: SimpleNamespace(tensor_bytes=0)

    def launch(plan: ss.Plan, task: object, **more: Any) -> Any:
        launches.append({"plan": plan, **more})
        return run

    monkeypatch.setattr(finetune_view.ss, "launch", launch, raising=False)
    view = show_with_targets()
    assert "ss-off" in view.job._dom_classes and view.button.tooltip == "Train on this machine"
    view.place.target.choice.value = "Slurm: cpu"
    wait_for_plan(view, "1xcpu")  # One node, which has one core.
    assert "ss-off" not in view.job._dom_classes and view.button.tooltip == "Train on Slurm: cpu"
    assert view.job.head.answer == "defaults of Slurm"
    # A wrong option of the job is refused at its input.
    box = view.place.target.job.boxes["time"]
    box.value = "soon"
    assert view.button.disabled and view.job.head.wrong
    box.value = "20"
    assert not view.button.disabled and not view.job.head.wrong
    assert view.job.head.answer == "time limit 20"
    view.button.click()
    assert wait_until(lambda: view.run is run)
    assert launches[0]["on"] == ss.Slurm(partition="cpu", time="20") and launches[0]["plan"] == view.plan
    assert view.button.disabled, "a run is active"
    run.status = "finished"
    view.place.target.choice.value = ""
    wait_for_plan(view, "2xcpu")
    view.close()


def test_an_ambiguous_gpu_type_is_asked_for(files: Path, queues: None) -> None:
    view = show_with_targets()
    assert [label for label, _ in view.form.inputs.method.options] == ["LoRA", "Full"]
    view.place.target.choice.value = "Slurm: a100"
    assert view.plan is None and "Choose the type of the GPUs" in view.headline.value and view.button.disabled
    assert "ss-off" not in view.place._kind_line._dom_classes
    assert [label for label, _ in view.place.kind.options] == [
        "choose the type",
        "A100 SXM 40 GB",
        "A100 SXM 80 GB",
    ]
    view.place.kind.value = "a100-sxm-80gb"
    wait_for_plan(view, "4xa100-sxm-80gb")
    assert view.plan.recipe.precision == "bf16-mixed"
    # What needs a GPU is offered there, whatever this machine has.
    view.form.inputs.method.value = "qlora"
    wait_until_read(view, lambda: view.plan is not None and view.plan.recipe.method == "qlora")
    view.place.target.choice.value = ""
    wait_for_plan(view, "2xcpu")
    assert view.plan.recipe.method == "lora" and "ss-off" in view.place._kind_line._dom_classes
    view.close()


def test_why_a_scheduler_refuses_is_shown(files: Path, queues: None, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[dict[str, Any]] = []

    def launch(plan: ss.Plan, task: object, **more: Any) -> Any:
        launches.append(more)
        raise OverridableError(
            "launch.folder", "/tmp/runs", "a folder that the nodes see", Value("/home/runs")
        )

    monkeypatch.setattr(finetune_view.ss, "launch", launch, raising=False)
    view = show_with_targets()
    view.place.target.choice.value = "Slurm: cpu"
    wait_for_plan(view, "1xcpu")
    view.button.click()
    assert wait_until(lambda: "a folder that the nodes see" in view.notice.value and not view.button.disabled)
    assert "Launch anyway" in view.notice.value
    view.launch(force=True)
    assert wait_until(lambda: len(launches) == 2) and launches[1]["force"] is True
    view.close()


def test_a_job_submitted_while_the_view_is_closed_is_not_shown(
    files: Path, queues: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_answer, answers = threading.Event(), []

    def launch(*args: object, **more: object) -> Any:
        may_answer.wait(10)
        return FakeRun([])

    monkeypatch.setattr(finetune_view.ss, "launch", launch, raising=False)
    view = show_with_targets()
    view.place.target.choice.value = "Slurm: cpu"
    wait_for_plan(view, "1xcpu")
    # What the kernel's loop would run from here on.
    monkeypatch.setattr(background_calls, "call_in_loop", lambda loop, show: answers.append(show))
    view.button.click()
    view.close()
    may_answer.set()
    assert wait_until(lambda: bool(answers))
    answers[0]()
    assert view.run is None and view.outcome.run_view is None
