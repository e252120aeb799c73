"""The faults of the soak on Slurm and Ray, and the status that each run must have afterwards."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.cluster.runs import wait_for
from tests.cluster.two_node_ray import TwoNodeRay
from tests.cluster.two_node_slurm import TwoNodeSlurm
from tests.soak.residue import MARK

import shardscope as ss
from shardscope.records.folder import FINAL, NodeFolder, RunFolder
from shardscope.records.json_files import read_json
from shardscope.runs.run import Run

FOREVER = 1_000_000
START_SECONDS = 240.0
"""Maximum time from a launch to the first step of every rank, on a busy machine."""


class Steps:
    """``count`` steps of a twentieth of a second, in which the ranks wait for each other.

    Rank ``fails`` raises before step 3, in the first attempt only. A stop with a checkpoint ends the steps,
    and so does a second attempt.
    """

    def __init__(self, count: int = FOREVER, fails: int | None = None) -> None:
        self.count, self.fails = count, fails

    def __call__(self, ctx: object) -> None:
        import torch
        import torch.distributed as dist

        first = not (ctx.folder / "attempts" / "2").exists()
        for step in range(self.count if first else 5):
            if ctx.should_stop:
                return
            if first and step == 3 and ctx.rank == self.fails:
                raise LookupError("the soak's own")
            dist.all_reduce(torch.ones(1))
            ctx.log(loss=1.0 / (step + 1))
            time.sleep(0.05)


Engine = Literal["slurm", "ray"]


@dataclass(frozen=True)
class Clusters:
    """A Slurm and a Ray of two nodes each, on this machine."""

    slurm: TwoNodeSlurm
    ray: TwoNodeRay

    def list_left(self) -> list[str]:
        """Return what is in the queue of Slurm, and the actors, placement groups and CPUs that Ray uses."""
        return [f"in Slurm's queue: {job}" for job in self.slurm.list_jobs()] + [
            f"on Ray: {text}" for text in self.ray.list_left()
        ]

    def clear(self) -> None:
        """Cancel the jobs of Slurm: the next launch must not fail for what an earlier one has left."""
        jobs = [job.split()[0] for job in self.slurm.list_jobs()]
        if jobs:
            self.slurm.run("scancel", *jobs)


@dataclass
class Launched:
    """One run of the soak."""

    run: Run
    clusters: Clusters
    kernel: subprocess.Popen[str] | None = None
    """The process that launched it, if another one did."""
    clock_started: float = field(default_factory=time.monotonic)

    @property
    def job_id(self) -> str:
        return str((read_json(self.run.folder / "job.json") or {})["job_id"])

    def wait_for_steps(self, rng: random.Random) -> None:
        """Wait until every rank has logged a step, and up to two seconds more."""
        ranks = set(range(self.run.world_size))
        wait_for(
            lambda: {record["rank"] for record in self.run.metrics()} == ranks or self.run.status in FINAL,
            START_SECONDS,
        )
        assert self.run.status not in FINAL, (self.run.status, self.run.reason)
        time.sleep(rng.uniform(0, 2))

    def kill(self, who: str, number: int) -> None:
        """Kill -9 the ``rank`` with that number, or the ``supervisor`` or the ``launcher`` of that node."""
        folder = RunFolder(self.run.folder)
        if who == "rank":
            path = folder.rank(number)
        else:
            path = NodeFolder(folder.path, number, 2, folder.attempt).supervisor
        pid = (read_json(path) or {})["pid"]
        if who == "launcher":
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            pid = int(children[0])
        self.start_clock()
        os.kill(int(str(pid)), signal.SIGKILL)

    def kill_actor(self, name: str, node: int | None = None) -> None:
        """Kill -9 Ray's actor of a class; of several the one of that node."""
        actors = self.clusters.ray.find_actors(name)
        if node is not None:
            record = read_json(self.run.folder / "nodes" / str(node) / "node.json") or {}
            actors = [actor for actor in actors if actor.pid == record.get("actor_pid")]
        assert len(actors) == 1, actors
        self.start_clock()
        actors[0].kill()

    def start_clock(self) -> None:
        """Start the measurement of the time until nothing is left."""
        self.clock_started = time.monotonic()


Inject = Callable[[Launched, random.Random], None]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind of fault."""

    on: Engine = "slurm"
    name: str
    inject: Inject
    expected: str
    """Pattern of ``status: reason``."""
    make_task: Callable[[random.Random], object] = lambda _: Steps()
    options: Mapping[str, object] = field(default_factory=dict)
    """Further arguments of ``launch``."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """Options of sbatch."""
    has_kernel: bool = False
    """Whether another process launches it."""


def _do_nothing(launched: Launched, _: random.Random) -> None:
    launched.start_clock()


def _stop_at_any_time(launched: Launched, rng: random.Random) -> None:
    time.sleep(rng.uniform(0, 30))
    launched.start_clock()
    launched.run.stop()


def _stop_waiting(launched: Launched, rng: random.Random) -> None:
    time.sleep(rng.uniform(0, 5))
    launched.start_clock()
    launched.run.stop()


def _after_steps(act: Callable[[Launched], object]) -> Inject:
    def inject(launched: Launched, rng: random.Random) -> None:
        launched.wait_for_steps(rng)
        launched.start_clock()
        act(launched)

    return inject


def _scancel_at_any_time(launched: Launched, rng: random.Random) -> None:
    time.sleep(rng.uniform(0, 30))
    launched.start_clock()
    launched.clusters.slurm.run("scancel", launched.job_id)


def _kill(who: str) -> Inject:
    def inject(launched: Launched, rng: random.Random) -> None:
        launched.wait_for_steps(rng)
        launched.kill(who, rng.randrange(2))

    return inject


def _kill_actor(launched: Launched, rng: random.Random) -> None:
    launched.wait_for_steps(rng)
    launched.kill_actor("NodeActor", rng.randrange(2))


def _kill_kernel(launched: Launched) -> None:
    assert launched.kernel is not None
    launched.kernel.kill()
    launched.kernel.wait()


def _kill_kernel_at_once(launched: Launched, _: random.Random) -> None:
    launched.start_clock()
    _kill_kernel(launched)


def _make_few_steps(rng: random.Random) -> Steps:
    return Steps(rng.randrange(1, 10))


def _make_failing(rng: random.Random) -> Steps:
    return Steps(fails=rng.randrange(2))


RETURNED = r"finished: the task returned on every rank"
STOPPED = r"stopped: run\.stop\((checkpoint=True)?\) was called"
RANK_KILLED = r"failed: rank \d was killed by SIGKILL"
LAUNCHER_KILLED = r"failed: (rank \d|the launcher) was killed by SIGKILL"
LOST = r"(failed: node 1 \(node\d\) is lost|lost: )"
FAULTS = (
    Fault(name="none", inject=_do_nothing, expected=RETURNED, make_task=_make_few_steps),
    Fault(name="stop at any time", inject=_stop_at_any_time, expected=STOPPED),
    Fault(
        name="stop of a job that waits",
        inject=_stop_waiting,
        expected=STOPPED,
        extra={"begin": "now+1hour"},
    ),
    Fault(
        name="stop with a checkpoint",
        inject=_after_steps(lambda launched: launched.run.stop(checkpoint=True)),
        expected=STOPPED,
    ),
    Fault(
        name="scancel",
        inject=_after_steps(lambda launched: launched.clusters.slurm.run("scancel", launched.job_id)),
        expected=r"stopped: .*scancel",
    ),
    Fault(name="scancel at any time", inject=_scancel_at_any_time, expected=r"(stopped: .*scancel|lost: )"),
    Fault(name="rank killed", inject=_kill("rank"), expected=RANK_KILLED),
    Fault(name="launcher killed", inject=_kill("launcher"), expected=LAUNCHER_KILLED),
    Fault(name="node process killed", inject=_kill("supervisor"), expected=LOST),
    Fault(
        name="job step killed",
        inject=_after_steps(
            lambda launched: launched.clusters.slurm.run("scancel", "--signal=KILL", f"{launched.job_id}.0")
        ),
        expected=r"(failed|lost): ",
    ),
    Fault(
        name="a rank raises",
        inject=_do_nothing,
        expected=r"failed: rank \d raised LookupError",
        make_task=_make_failing,
    ),
    Fault(
        name="a rank raises, retries=1",
        inject=_do_nothing,
        expected=RETURNED,
        make_task=_make_failing,
        options={"retries": 1},
    ),
    Fault(
        name="requeue",
        inject=_after_steps(
            lambda launched: launched.clusters.slurm.run("scontrol", "requeue", launched.job_id)
        ),
        expected=RETURNED,
        options={"retries": 1},
    ),
    Fault(
        name="kernel killed",
        inject=_after_steps(_kill_kernel),
        expected="stopped: the kernel that launched it ended",
        options={"outlive_kernel": False},
        has_kernel=True,
    ),
    Fault(
        name="kernel killed while the job waits",
        inject=_kill_kernel_at_once,
        expected="stopped: the kernel that launched it ended",
        options={"outlive_kernel": False},
        extra={"begin": "now+1hour"},
        has_kernel=True,
    ),
    Fault(on="ray", name="none", inject=_do_nothing, expected=RETURNED, make_task=_make_few_steps),
    Fault(on="ray", name="stop at any time", inject=_stop_at_any_time, expected=STOPPED),
    Fault(
        on="ray",
        name="stop with a checkpoint",
        inject=_after_steps(lambda launched: launched.run.stop(checkpoint=True)),
        expected=STOPPED,
    ),
    Fault(on="ray", name="rank killed", inject=_kill("rank"), expected=RANK_KILLED),
    Fault(on="ray", name="launcher killed", inject=_kill("launcher"), expected=LAUNCHER_KILLED),
    Fault(
        on="ray", name="actor of a node killed", inject=_kill_actor, expected=r"failed: node \d .* is lost"
    ),
    Fault(
        on="ray",
        name="coordinator killed",
        inject=_after_steps(lambda launched: launched.kill_actor("Coordinator")),
        expected=r"(failed|lost): ",
    ),
    Fault(
        on="ray",
        name="a rank raises",
        inject=_do_nothing,
        expected=r"failed: rank \d raised LookupError",
        make_task=_make_failing,
    ),
    Fault(
        on="ray",
        name="kernel killed",
        inject=_after_steps(_kill_kernel),
        expected="stopped: the kernel that launched it ended",
        options={"outlive_kernel": False},
        has_kernel=True,
    ),
)


def launch_choice(fault: Fault, rng: random.Random, folder: Path) -> Run:
    """Launch the run of one fault on two nodes; Ray's address is in ``RAY_ADDRESS``."""
    recipe = ss.Recipe(seq_len=64, global_batch_size=2, precision="fp32")
    plan = ss.Plan(ss.Architecture.of_size("2m"), ss.Cluster.parse("2x1xcpu"), recipe, ss.Layout.ddp())
    # Slurm passes the mark on with the environment; Ray's workers have that of its daemons.
    on: ss.Slurm | ss.Ray = ss.Slurm(extra=dict(fault.extra))
    if fault.on == "ray":
        on = ss.Ray(runtime_env={"env_vars": {MARK: os.environ[MARK]}})
    return ss.launch(plan, fault.make_task(rng), folder=folder, name="run", on=on, **fault.options)
