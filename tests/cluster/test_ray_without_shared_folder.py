"""``ss.launch(on=ss.Ray())`` on two nodes that share no file system with the notebook, nor with each other.

The nodes' processes are in mount namespaces of their own: the notebook's folder is empty there, and the
folder for the nodes' copies is another file system on each. So nothing can be read but through Ray.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.cluster.runs import wait_until_running
from tests.cluster.test_two_nodes import (
    FRAMEWORKS,
    STEPS,
    list_processes,
    losses,
    make_plan,
    train_until_stopped,
    wait_for,
)
from tests.cluster.test_two_ray_nodes import bounded, check_failed_launch, start_ray
from tests.cluster.two_node_ray import TwoNodeRay, find_why_not_covered
from tests.requirements import every_case, skip_without, thorough
from tests.weights_folders import LLAMA

import shardscope as ss
from shardscope.core.errors import FieldError
from shardscope.records.folder import FINAL
from shardscope.runs.run import Run
from shardscope.training.data.tokenizer import SHIPPED_TOKENIZER

__all__ = ["bounded"]


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the nodes do not see."""
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that is another one on each node."""
    return tmp_path_factory.mktemp("scratch")


@pytest.fixture(scope="module")
def cluster(notebook: Path, scratch: Path) -> Iterator[TwoNodeRay]:
    why_not = find_why_not_covered()
    if why_not:
        pytest.skip(f"nodes without a shared folder need mount namespaces; run it as root: {why_not}")
    with start_ray(hidden=notebook, scratch=scratch) as cluster:
        yield cluster


@pytest.fixture
def target(cluster: TwoNodeRay, scratch: Path, bounded: None) -> Iterator[ss.Ray]:
    yield ss.Ray(address=cluster.address, node_folder=str(scratch))
    assert cluster.wait_until_empty() == []


def find_pullers(run: Run) -> list[psutil.Process]:
    """Return the processes that receive the records of a run."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if "shardscope.runs.backends.ray.puller" in (process.info["cmdline"] or ())
        and str(run.folder) in process.info["cmdline"]
    ]


def kill_puller(run: Run) -> None:
    for process in find_pullers(run):
        process.kill()
    wait_for(lambda: not find_pullers(run), 10)


def wait_for_reason(run: Run, text: str) -> None:
    wait_for(lambda: text in run.reason, 40)


def wait_for_metrics(run: Run, num_before: int) -> None:
    wait_for(lambda: len(run.metrics()) > num_before, 60)


def log_much(ctx: object) -> None:
    """Log numbered steps and print numbered lines until a stop is requested; then write their sum."""
    import hashlib
    import time

    import torch
    import torch.distributed as dist

    printed, step = hashlib.sha256(), 0
    while not ctx.should_stop:
        dist.all_reduce(torch.ones(1))
        ctx.log(number=float(step))
        for _ in range(20):
            line = f"rank {ctx.rank} line {step} {'x' * 300}"
            print(line, flush=True)
            printed.update(line.encode())
        step += 1
        time.sleep(0.02)
    (ctx.folder / f"printed-{ctx.rank}.txt").write_text(f"{step} {printed.hexdigest()}")
    if ctx.rank == 1:
        (ctx.folder / "large.bin").write_bytes(bytes(2**26 + 1))


def assert_all_is_here(run: Run) -> None:
    """Check that each line that a rank has printed and logged is here once, in its order."""
    for rank in (0, 1):
        wait_for((run.folder / f"printed-{rank}.txt").exists, 30)
        num_steps, digest = (run.folder / f"printed-{rank}.txt").read_text().split()
        log = (run.folder / "logs" / f"rank-{rank}.log").read_text()
        lines = [line for line in log.splitlines() if line.startswith(f"rank {rank} line ")]
        assert len(lines) == 20 * int(num_steps) > 0
        assert hashlib.sha256("".join(lines).encode()).hexdigest() == digest
        numbers = [record["number"] for record in run.metrics() if record["rank"] == rank]
        assert numbers == list(range(int(num_steps)))


@pytest.mark.parametrize("name", ["ddp", pytest.param("fsdp2", marks=every_case())])
def test_losses_and_records_arrive(
    name: str,
    target: ss.Ray,
    notebook: Path,
    scratch: Path,
    train_here: Callable[[ss.Layout, int], list[float]],
) -> None:
    make_layout, package = FRAMEWORKS[name]
    skip_without(package)
    task = ss.Pretrain(num_steps=STEPS, save_every=2, profile=True)
    run = ss.launch(make_plan("2x1xcpu", make_layout()), task, folder=notebook, name=name, on=target)
    run.wait(360)
    across = losses(run)
    wait_for((run.folder / "received.json").exists, 60)
    assert across == pytest.approx(train_here(make_layout(), STEPS), abs=1e-5) and len(across) == STEPS
    assert "streamed from its nodes" in run.target
    # Records of both nodes are here, private as the folder.
    for rank in (0, 1):
        assert run.logs(rank)
        assert (run.folder / "nodes" / str(rank) / "supervisor.log").exists()
        assert (run.folder / "traces" / f"rank-{rank}.json.gz").stat().st_size > 0
    assert set(run.trace().steps().to_frame()["rank"]) == {0, 1}
    for folder in (run.folder, run.folder / "ray", run.folder / "nodes", run.folder / "nodes" / "1"):
        assert folder.stat().st_mode & 0o777 == 0o700
    wait_for(lambda: not (run.folder / "task.pkl").exists() and not find_pullers(run), 30)
    # Checkpoints are not: the run says where they are.
    assert not (run.folder / "checkpoints").exists()
    kept = {record["node"]: record for record in run.files_on_nodes}
    assert set(kept[0]["steps"].values()) >= {2} and kept[0]["folder"].startswith(str(scratch))
    assert any(name.startswith("checkpoints/") and size > 0 for name, size in kept[1]["files"].items())
    # The notebook's machine and the nodes really see different files.
    assert not Path(kept[0]["folder"]).exists()
    assert not list_processes(run.folder)


@thorough()
def test_retries_are_refused(target: ss.Ray, notebook: Path) -> None:
    with pytest.raises(FieldError) as refused:
        ss.launch(make_plan("2x1xcpu"), train_until_stopped, folder=notebook, on=target, name="no", retries=1)
    assert refused.value.field == "launch.retries" and "do not see the run folder" in str(refused.value)
    assert not (notebook / "no").exists()


@thorough()
def test_stop_with_checkpoint(target: ss.Ray, notebook: Path) -> None:
    run = ss.launch(make_plan("2x1xcpu"), train_until_stopped, folder=notebook, name="saved", on=target)
    wait_until_running(run)
    ss.Run.attach(run.folder).stop(checkpoint=True)
    assert run.wait(60) == "stopped", (run.status, run.reason)
    for rank in (0, 1):
        wait_for((run.folder / f"saved-{rank}").exists, 30)
        assert (run.folder / f"saved-{rank}").read_text() == "saved"
    steps = [
        max(int(record["step"]) for record in run.metrics() if record["rank"] == rank) for rank in (0, 1)
    ]
    assert steps[0] == steps[1]


@every_case()
def test_fault_85_the_process_that_receives_records_is_killed(target: ss.Ray, notebook: Path) -> None:
    run = ss.launch(make_plan("2x1xcpu"), log_much, folder=notebook, name="killed", on=target)
    wait_until_running(run)
    for _ in range(2):
        time.sleep(2)
        kill_puller(run)
        before = len(run.metrics())
        wait_for_reason(run, "nothing was received from the Ray cluster")
        assert run.status == "running" and len(run.metrics()) == before
        run = ss.Run.attach(run.folder)
        wait_for_metrics(run, before)
    # Killed once more, and the run ends meanwhile: what is missing stays on the cluster until it is fetched.
    run.stop(checkpoint=True)
    control = (run.folder / "control.jsonl").stat().st_size
    wait_for(lambda: run.status in FINAL or run.status == "stopping", 60)
    kill_puller(run)
    time.sleep(10)
    ss.Run.attach(run.folder)
    assert run.wait(60) == "stopped", (run.status, run.reason)
    wait_for((run.folder / "received.json").exists, 60)
    assert_all_is_here(run)
    assert (run.folder / "control.jsonl").stat().st_size == control
    # A file of the task's own that is too large stays on its node.
    (kept,) = run.files_on_nodes
    assert (kept["node"], kept["files"]) == (1, {"large.bin": 2**26 + 1})
    assert not (run.folder / "large.bin").exists()
    assert json.loads((run.folder / "job.json").read_text())["folder"] == "streamed"


@thorough()
def test_fault_61_a_launch_that_raises_after_ray_has_begun_the_run(
    target: ss.Ray, cluster: TwoNodeRay, notebook: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_failed_launch(target, notebook, cluster, monkeypatch)
    assert not list(scratch.rglob("run.json")), "no copy of the run folder is left"


@thorough()
def test_a_deleted_folder_stops_the_run_and_leaves_nothing(
    target: ss.Ray, cluster: TwoNodeRay, notebook: Path, scratch: Path
) -> None:
    run = ss.launch(make_plan("2x1xcpu"), log_much, folder=notebook, name="deleted", on=target)
    wait_until_running(run)
    shutil.rmtree(run.folder, ignore_errors=True)  # The puller may be writing.
    shutil.rmtree(run.folder, ignore_errors=True)
    wait_for(lambda: not find_pullers(run), 60)
    assert cluster.wait_until_empty() == []  # The coordinator's actor is gone, too.
    assert not run.folder.exists()
    for number in (0, 1):
        assert not list(cluster.look_into(number, scratch).glob("*/deleted"))


@every_case()
def test_the_best_weights_are_exported(
    cluster: TwoNodeRay, target: ss.Ray, notebook: Path, tmp_path: Path
) -> None:
    """Each node has a part of the best checkpoint, which none can load: the last weights were exported.

    Before, the run failed: only the first node had the tokens of the examples.
    """
    skip_without("datasets")
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**LLAMA, initializer_range=0.1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "weights")
    weights = Path(shutil.copy(SHIPPED_TOKENIZER, tmp_path / "weights" / "tokenizer.json")).parent
    recipe = ss.Recipe(seq_len=32, micro_batch_size=1, global_batch_size=4, precision="fp32")
    plan = ss.Plan(ss.Architecture.from_hf(weights), ss.Cluster.parse("2x1xcpu"), recipe, ss.Layout.fsdp2())
    rows = [{"prompt": f"Number {number}?", "completion": f" It is {number}."} for number in range(12)]
    options: dict[str, Any] = {"validation": rows[:4], "validate_every": 1, "early_stopping": 3}
    options |= {"learning_rate": 0.3, "warmup": 0, "export": True}
    run = ss.launch(
        plan, ss.Finetune(weights, rows[4:], num_steps=4, **options), folder=notebook, name="best", on=target
    )
    assert run.wait(200) == "finished", (run.status, run.reason, run.error)
    losses = [record["validation_loss"] for record in run.metrics() if "validation_loss" in record][1:]
    best = 1 + losses.index(min(losses))
    assert f"exporting the weights after {best} step" in run.logs(0)
    assert run.engine_reports()[0]["export"]["num_steps_done"] == best
    wait_for(lambda: any("export" in str(record) for record in run.files_on_nodes), 60)
