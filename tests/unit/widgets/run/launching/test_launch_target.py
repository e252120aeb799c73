"""Tests of the choice of a scheduler's queue for GPUs and launches, with a ``scontrol`` that prints text.

tests/browser/test_slurm_launch.py does the same on a real Slurm.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from fake_runs import wait_until
from tests.requirements import needs_installed
from written_runs import write_run

import shardscope as ss
from shardscope.core.errors import FieldError, OverridableError, Value
from shardscope.runs.backends.nodes import Node, NodePool
from shardscope_widgets import Studio
from shardscope_widgets.pickers import ClusterPicker, schedulers
from shardscope_widgets.pickers.schedulers import JobOption, Queue, Scheduler, find_queues
from shardscope_widgets.run.launching import launch_button

pytestmark = needs_installed("torch")

PARTITIONS = """\
PartitionName=a100 Default=YES DefaultTime=00:30:00 MaxTime=UNLIMITED State=UP TotalNodes=2
PartitionName=h200 Default=NO DefaultTime=NONE MaxTime=7-00:00:00 State=UP TotalNodes=3
PartitionName=cpu Default=NO DefaultTime=NONE MaxTime=7-00:00:00 State=DRAIN TotalNodes=2
PartitionName=empty Default=NO State=UP TotalNodes=0
"""
NODE = (
    "NodeName={0} CPUTot=64 Gres={1} NodeAddr={0} NodeHostName={0} RealMemory=512000 State={2} "
    "Partitions={3}\n"
)
NODES = "".join(
    NODE.format(*node)
    for node in (
        ("n1", "gpu:a100:1", "IDLE", "a100"),
        ("n2", "gpu:a100:1", "IDLE+DRAIN", "a100"),
        ("n3", "gpu:h200:8(S:0-1)", "ALLOCATED", "h200"),
        ("n4", "gpu:h200:8(S:0-1)", "MIXED", "h200"),
        ("n5", "(null)", "IDLE+CLOUD+POWERED_DOWN", "h200,cpu"),
        ("n6", "(null)", "IDLE", "cpu"),
    )
)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a ``scontrol`` that prints three partitions; the working folder is an empty one."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("partition", PARTITIONS), ("node", NODES)):
        (commands / name).write_text(text)
    script = commands / "scontrol"
    script.write_text(f"#!/bin/sh\nexec cat {commands}/$2\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return commands


@pytest.fixture
def studio(slurm: Path) -> Iterator[Studio]:
    studio = Studio()
    wait_for_queue(studio, "Slurm: h200")
    yield studio
    studio.close()


def wait_for_queue(studio: Studio, name: str) -> None:
    """Wait until the search for queues, which has found one called ``name``, has shown it in both menus."""
    target, search = studio.launch.target.choice, studio._queues._request
    assert wait_until(lambda: name in target._options_values and not search.is_busy)


def read_notice(studio: Studio) -> str:
    return unescape(re.sub("<[^>]+>", "", studio.notice.value))


def catch_launches(monkeypatch: pytest.MonkeyPatch, error: Exception) -> list[dict[str, Any]]:
    """Make every launch fail with ``error``; return the list of the launches' arguments."""
    launches: list[dict[str, Any]] = []

    def launch(plan: ss.Plan, task: object, **arguments: Any) -> ss.Run:
        launches.append({"plan": plan, **arguments})
        raise error

    monkeypatch.setattr(launch_button.ss, "launch", launch, raising=False)
    return launches


def test_partitions_are_listed_with_what_is_idle(slurm: Path) -> None:
    assert {queue.label: queue.description for queue in find_queues()} == {
        "Slurm: a100": "1 node × 1 A100, 1 idle, 1 down",
        "Slurm: h200": "2 nodes × 8 H200, none idle, 1 other node",
        "Slurm: cpu": "2 nodes without GPUs, 2 idle, closed (DRAIN)",
    }


def test_an_inventory_has_no_node_that_is_down_and_can_have_only_idle_ones(slurm: Path) -> None:
    def count_nodes(partition: str, **arguments: Any) -> int:
        return ss.Slurm.inventory(partition, **arguments).num_nodes

    gpu = "a100-sxm-80gb"
    # n2 is drained, n3 and n4 are in use.
    assert count_nodes("a100", gpu=gpu) == 1 and count_nodes("h200") == 2
    assert count_nodes("a100", gpu=gpu, only_idle=True) == 1 and count_nodes("cpu", only_idle=True) == 2
    with pytest.raises(FieldError, match="none of the 2 nodes of partition h200 is idle") as refused:
        ss.Slurm.inventory("h200", only_idle=True)
    assert refused.value.field == "Slurm.inventory only_idle"
    text = (slurm / "node").read_text()
    (slurm / "node").write_text(text.replace("State=IDLE ", "State=DOWN+NOT_RESPONDING "))
    with pytest.raises(FieldError, match="neither down nor drained"):
        ss.Slurm.inventory("a100", gpu)


def test_slurm_that_does_not_answer_shows_nothing(slurm: Path) -> None:
    (slurm / "node").unlink()
    assert find_queues() == []
    picker = ClusterPicker()
    picker.offer_queues([])
    assert not picker.rows["where"].is_shown and picker.use_machine.layout.display is None


def test_a_partition_sets_the_cluster(slurm: Path) -> None:
    picker = ClusterPicker()
    picker.offer_queues(find_queues())
    assert picker.rows["where"].is_shown and picker.use_machine.layout.display == "none"
    picker.where.value = "Slurm: h200"
    assert str(picker.value) == "2x8xh200-sxm-141gb" and picker.place == "Slurm: h200"
    assert picker.value.host_memory_bytes == 512_000 * 2**20
    picker.where.value = "Slurm: cpu"
    assert str(picker.value) == "2x2xcpu" and "2 idle" in picker.idle.value
    picker.where.value = "this machine"
    assert picker.value == picker.machine


def test_an_ambiguous_gpu_type_is_asked_for(slurm: Path) -> None:
    picker = ClusterPicker()
    picker.offer_queues(find_queues())
    before = picker.value
    picker.where.value = "Slurm: a100"
    row = picker.rows["inventory"]
    assert picker.is_wrong and picker.value == before
    assert row.is_shown and "one of a100-sxm-40gb, a100-sxm-80gb" in row.message
    picker.count.value = "1"
    assert picker.is_wrong, "another input does not answer the question"
    picker.kind.value = "a100-sxm-80gb"
    assert not picker.is_wrong and str(picker.value) == "1xa100-sxm-80gb"
    # A choice that is refreshed stays; another GPU type is not this partition's.
    picker.offer_queues(find_queues())
    assert picker.place == picker.where.value == "Slurm: a100" and str(picker.value) == "1xa100-sxm-80gb"
    picker.nodes.value = "1"
    assert picker.place == "Slurm: a100"
    picker.type.value = "h100-sxm-80gb"
    assert picker.place == picker.where.value == "" and not row.is_shown


def test_launch_goes_where_the_gpus_are(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = catch_launches(monkeypatch, OSError("Slurm is away"))
    assert studio.launch.target.value is None and "tiny model" in studio.launch.button.description
    studio.cluster.where.value = "Slurm: h200"
    assert studio.launch.target.choice.value == "Slurm: h200"
    assert studio.launch.button.description == "Launch on 16 GPUs" and not studio.launch.button.disabled
    options = studio.launch.target.job
    assert options is not None
    options.boxes["time"].value, options.boxes["setup"].value = "2:00:00", "module load cuda\n\nulimit -l\n"
    studio.launch.button.click()
    assert wait_until(lambda: "Slurm is away" in read_notice(studio))
    assert launches[0]["plan"] == studio.plan and launches[0]["on"] == ss.Slurm(
        partition="h200", time="2:00:00", setup=["module load cuda", "ulimit -l"]
    )
    assert not studio.launch.button.disabled, "it can be tried again"
    studio.launch.target.choice.value = ""
    assert "tiny model" in studio.launch.button.description


def test_a_wrong_option_has_the_librarys_message_and_keeps_the_text(studio: Studio) -> None:
    studio.launch.target.choice.value = "Slurm: h200"
    options = studio.launch.target.job
    assert options is not None
    options.boxes["account"].value, options.boxes["time"].value = "physics", "soon"
    assert "Slurm.time is 'soon'; allowed: minutes" in options.rows["time"].message
    head = studio.folds["Run"].head
    assert studio.launch.button.disabled and head.expanded and head.wrong
    assert options.boxes["time"].value == "soon" and options.boxes["account"].value == "physics"
    options.boxes["time"].value = "90"
    assert not options.rows["time"].message and not studio.launch.button.disabled
    assert not head.wrong
    assert studio.launch.target.value == ss.Slurm(partition="h200", time="90", account="physics")


def test_a_refusal_has_its_fix_as_a_button(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = FieldError("plan.cluster.num_nodes", 3, "nodes of partition h200: 2 nodes", Value(2))
    catch_launches(monkeypatch, refusal)
    studio.cluster.where.value = "Slurm: h200"
    studio.cluster.nodes.value = "3"
    studio.recipe.global_batch.value = "96"
    studio.launch.button.click()
    assert wait_until(lambda: "nodes of partition h200: 2 nodes" in read_notice(studio))
    studio.notice.press_button("Use 2 nodes")
    assert str(studio.plan.cluster) == "2x8xh200-sxm-141gb" and not studio.is_wrong


def test_a_path_that_slurm_would_change_cannot_be_launched_anyway(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    catch_launches(monkeypatch, FieldError("launch.folder", "/a%j", "no '%j' on Slurm", "/a_j"))
    studio.cluster.where.value = "Slurm: h200"
    studio.launch.button.click()
    assert wait_until(lambda: "on Slurm" in read_notice(studio))
    assert "Launch anyway" not in studio.notice.value


def test_a_folder_that_nodes_may_not_see_can_be_launched_anyway(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = catch_launches(
        monkeypatch, OverridableError("launch.folder", "/x", "a shared folder", "folder=")
    )
    studio.cluster.where.value = "Slurm: h200"
    studio.launch.button.click()
    assert wait_until(lambda: "a shared folder" in read_notice(studio))
    studio.notice.press_button("Launch anyway")
    assert wait_until(lambda: len(launches) == 2) and launches[1]["force"] is True


def test_a_job_that_is_submitted_while_the_studio_is_closed_opens_no_view(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_closed = threading.Event()

    def launch(*_: object, **arguments: object) -> ss.Run:
        assert is_closed.wait(10)
        return ss.Run.attach(write_run("submitted", "running"))

    monkeypatch.setattr(launch_button.ss, "launch", launch, raising=False)
    studio.launch.target.choice.value = "Slurm: h200"
    before = set(threading.enumerate())
    studio.launch.button.click()
    studio.close()
    is_closed.set()
    assert wait_until(lambda: set(threading.enumerate()) <= before)
    assert studio.run is None and "runs" not in vars(studio)
    assert Path("runs/submitted/note.json").exists(), "the run goes on"


def test_another_engine_joins_by_one_entry(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    def list_queues(scheduler: Scheduler) -> list[Queue]:
        return [
            Queue(
                scheduler=scheduler,
                name="pool",
                description="2 nodes × 4 H100, 2 idle",
                gpu_candidates=["h100-sxm-80gb"],
                build_cluster=lambda gpu: ss.Cluster.parse("2x4xh100-sxm-80gb"),
            )
        ]

    engine = Scheduler(
        name="Other",
        is_present=lambda: True,
        list_queues=list_queues,
        options=(JobOption(field="address", label="Address", tooltip="Its address"),),
        build_target=lambda name, options: (name, dict(options)),
    )
    monkeypatch.setattr(schedulers, "SCHEDULERS", (*schedulers.SCHEDULERS, engine))
    studio.folds["GPUs"].head.expanded = True
    wait_for_queue(studio, "Other: pool")
    studio.cluster.where.value = "Other: pool"
    assert str(studio.plan.cluster) == "2x4xh100-sxm-80gb"
    assert studio.launch.target.job is not None
    studio.launch.target.job.boxes["address"].value = "here"
    assert studio.launch.target.value == ("pool", {"address": "here"})


def test_a_ray_cluster_is_one_queue_without_options(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_nodes = [Node(name, "10.0.0.2", name, 64, (("H100", 8),), 2**39) for name in ("n1", "n2")]

    class Connection(nullcontext["Connection"]):
        """A connected process, without a cluster."""

        def __init__(self, target: ss.Ray, *, inspects: bool) -> None:
            self.pool = NodePool("the Ray cluster", (Node("head", "10.0.0.1", "head", 0, ()), *gpu_nodes))
            super().__init__(self)

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(schedulers.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(schedulers.ray_submission, "RayConnection", Connection)
    studio.folds["GPUs"].head.expanded = True
    wait_for_queue(studio, "Ray")
    assert "Ray · 2 nodes × 8 H100" in studio.cluster.where._options_labels, "what is idle is not known"
    studio.cluster.where.value = "Ray"
    # Its H100 may be an SXM or a PCIe one.
    if studio.cluster.is_wrong:
        studio.cluster.kind.value = "h100-sxm-80gb"
    assert str(studio.plan.cluster) == "2x8xh100-sxm-80gb" and studio.launch.target.value == ss.Ray()
    assert "ss-off" in studio.launch.target.link._dom_classes
