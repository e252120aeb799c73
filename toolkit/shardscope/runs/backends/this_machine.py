"""Launch on this machine: its checks, and the supervisor of the run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.core.errors import Value, refuse
from shardscope.machine.detection import read_gpu_states, select_visible_devices
from shardscope.machine.host import count_cores
from shardscope.machine.processes import identify_machine, read_start_time
from shardscope.records.folder import TEMPORARY, RunFolder, Status
from shardscope.records.json_files import write_json
from shardscope.runs import runs
from shardscope.runs.launch.environment import add_toolkit_to_path
from shardscope.runs.launch.free_memory import check_free_host, check_free_memory, describe_runs_on_gpus
from shardscope.runs.launch.lease import hold_lease, start_leased_process, stop_supervisor
from shardscope.runs.launch.run_description import trains_the_plan

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.machine.detection import GpuState


class ThisMachine:
    """One launch on this machine, as a :class:`~shardscope.runs.backends.backend.Backend`."""

    subfolders: tuple[str, ...] = (TEMPORARY,)

    def __init__(self, *, outlives: bool, force: bool, gpu_positions: Sequence[int] | None) -> None:
        """``gpu_positions``: the GPUs in CUDA's order; None: the first ones."""
        self._outlives, self._force, self._gpu_positions = outlives, force, gpu_positions
        self._gpus: list[GpuState] = []
        self._warning = ""
        self._supervisor: subprocess.Popen[bytes] | None = None

    def check(self, plan: Plan, task: object, parent: Path) -> str:
        """Check that the plan fits this machine. Return a warning about too little free memory, or ""."""
        check_machine(plan)
        needs_peak = trains_the_plan(task) and not self._force
        if not plan.on_gpu:
            self._warning = check_free_host(plan, needs_peak=needs_peak)
            return self._warning
        # Compare the free memory with the predicted peak: other processes may hold the GPU.
        positions = range(plan.world_size) if self._gpu_positions is None else self._gpu_positions
        states = read_gpu_states()
        self._gpus = [states[position] for position in positions if position < len(states)]
        self._warning = "; ".join(_check_gpu_memory(plan, self._gpus, parent, needs_peak=needs_peak))
        return self._warning

    def describe(self, plan: Plan, created: object) -> dict[str, object]:
        """Return the GPUs of the run and this machine's identity."""
        return {"gpus": [gpu.index for gpu in self._gpus], "machine": identify_machine()}

    def describe_first_status(self) -> tuple[Status, str]:
        """Return "starting", with the warning."""
        return "starting", "; ".join(filter(None, ("the supervisor is starting", self._warning)))

    def start(self, folder: RunFolder, plan: Plan, description: Mapping[str, object]) -> None:
        """Start the supervisor. Raises ``OSError``."""
        self._supervisor = start_supervisor(folder, self._outlives, self._gpu_positions)

    def undo(self) -> None:
        """Stop the supervisor, and with it its ranks."""
        if self._supervisor is not None:
            stop_supervisor(self._supervisor)

    def close(self) -> None:
        """Nothing is open."""


def check_machine(plan: Plan) -> None:
    """Raise ``ValueError`` if this machine has not what the plan needs."""
    world_size, cluster = plan.world_size, plan.cluster
    if cluster.num_nodes > 1:  # A supervisor starts ranks only on its own machine.
        refuse(
            "plan.cluster.num_nodes",
            cluster.num_nodes,
            "1 (without on=, launch uses this machine only)",
            "on=ss.Slurm(...), or a plan for one node",
        )
    # CPU ranks run on every machine, also on one with GPUs, as a rehearsal.
    if cluster.gpu.name == "cpu":
        max_ranks = max_cpu_ranks()
        if world_size > max_ranks:
            refuse(
                "plan.world_size",
                world_size,
                f"1 to {max_ranks} CPU ranks on {count_cores()} cores here",
                Value(max_ranks),
            )
        return
    from shardscope.core.cluster import Cluster

    # The prediction is for one GPU type, so another type is an error, even if it has more memory.
    machine = Cluster.detect()
    description = f"{machine.gpus_per_node}x{machine.gpu.name}"
    if machine.gpu.name != cluster.gpu.name:
        if machine.gpu.name == "cpu":
            max_ranks, allowed = max_cpu_ranks(), "this machine: no GPU, only CPU ranks"
        else:
            max_ranks, allowed = machine.gpus_per_node, f"this machine: {description}"
        # The largest plan of the user's size that this machine can run.
        fix = f'cluster=Cluster.parse("{min(world_size, max_ranks)}x{machine.gpu.name}")'
        refuse("plan.cluster.gpu", cluster.gpu.name, allowed, fix)
    if world_size > machine.gpus_per_node:
        refuse(
            "plan.world_size",
            world_size,
            f"1 to {machine.gpus_per_node} (this machine is {description})",
            Value(machine.gpus_per_node),
        )


def max_cpu_ranks() -> int:
    """Return the maximum number of CPU ranks: ranks may share cores, but many more would never finish."""
    return max(16, 4 * count_cores())


def _check_gpu_memory(plan: Plan, gpus: Sequence[GpuState], parent: Path, *, needs_peak: bool) -> list[str]:
    """Return warnings about too little free GPU memory and the runs that hold it.

    Raises ``TooLittleFreeError`` if ``needs_peak`` and the predicted peak does not fit.
    """
    other_runs = describe_runs_on_gpus(runs(parent), gpus) if gpus else ""
    warning = check_free_memory(plan, gpus, needs_peak=needs_peak, other_runs=other_runs)
    return [text for text in (warning, other_runs) if text]


def start_supervisor(
    folder: RunFolder, outlive_kernel: bool, gpu_positions: Sequence[int] | None
) -> subprocess.Popen[bytes]:
    """Start the supervisor of a run. Raises ``OSError``; no process is left behind then."""
    environment = add_toolkit_to_path(dict(os.environ))
    if gpu_positions is not None:
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        environment["CUDA_VISIBLE_DEVICES"] = select_visible_devices(visible, gpu_positions)
    # A run that outlives its kernel has no lease.
    supervisor, write_end = start_leased_process(
        "shardscope.runs.launch.supervisor",
        folder,
        folder.supervisor_log,
        environment,
        has_lease=not outlive_kernel,
    )
    hold_lease(supervisor, write_end, folder)
    # Write the supervisor's record in its place: a handle must see its process even if it dies at once.
    try:
        if not folder.supervisor.exists():
            started = read_start_time(supervisor.pid)
            record = {"pid": supervisor.pid, "started": started, "machine": identify_machine()}
            write_json(folder.supervisor, record, as_is=("machine",))
    except BaseException:
        stop_supervisor(supervisor)
        raise
    return supervisor
