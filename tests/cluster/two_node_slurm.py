"""A real Slurm of two nodes on this machine: munged, slurmctld and two slurmd, in a folder of their own.

``node1`` and ``node2`` have one CPU and, unless a test wants none, one GPU each, which is ``/dev/null``; so
has ``node3``, which only the partition ``spare`` uses. Jobs of the partition ``urgent`` preempt others, which
Slurm then requeues.
Everything runs as this user, on free ports; only the processes that were started here are ended.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from tests.cluster.ports import find_free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel")
INSTALL = "sudo apt-get install slurm-wlm munge"
START_SECONDS = 60.0
END_SECONDS = 30.0
SYSTEM_PATH = os.pathsep.join((os.environ["PATH"], "/usr/sbin", "/usr/local/sbin"))
"""Debian has the daemons in /usr/sbin, which is not on every user's PATH."""

CONFIGURATION = """
ClusterName=shardscope
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={controller_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=10
KillWait=15
InactiveLimit=0
GresTypes=gpu
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=5,sched_interval=5
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port1} CPUs=1 RealMemory=4000 {gres}
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port2} CPUs=1 RealMemory=4000 {gres}
NodeName=node3 NodeHostname={host} NodeAddr=127.0.0.1 Port={port3} CPUs=1 RealMemory=4000 {gres}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=debug Nodes=node[1-2] Default=YES DefaultTime=30 MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=spare Nodes=node[1-3] DefaultTime=30 MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=node[1-2] DefaultTime=30 MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
NODES = ("node1", "node2", "node3")


def find_missing() -> str:
    """Return the programs that are not installed, as text; empty if all are."""
    return ", ".join(name for name in PROGRAMS if shutil.which(name, path=SYSTEM_PATH) is None)


class TwoNodeSlurm:
    """The cluster. ``environment`` has the variables with which Slurm's commands find it."""

    def __init__(self, *, has_gpus: bool = True) -> None:
        self._gres = "Gres=gpu:a100:1" if has_gpus else ""
        # A short path: a socket's has at most 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": SYSTEM_PATH}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start the daemons and wait until both nodes are idle. Raises ``RuntimeError``."""
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        ports = find_free_ports(4)
        text = CONFIGURATION.format(
            host=socket.gethostname().partition(".")[0],
            user=getpass.getuser(),
            folder=self.folder,
            controller_port=ports[0],
            port1=ports[1],
            port2=ports[2],
            gres=self._gres,
            port3=ports[3],
        )
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "gres.conf").write_text("Name=gpu Type=a100 File=/dev/null\n")
        # --force: a folder below /tmp, which others may write, is not what munge calls secure.
        self._start(
            "munged",
            *("--foreground", "--force", f"--socket={self.folder}/munge.socket", f"--key-file={key}"),
            *(f"--pid-file={self.folder}/munged.pid", f"--log-file={self.folder}/munged.log"),
            f"--seed-file={self.folder}/munged.seed",
        )
        self._wait((self.folder / "munge.socket").exists, "munged")
        self.start_controller()
        for node in NODES:
            (self.folder / f"spool-{node}").mkdir()
            self.start_node(node)
        self.wait_until_idle()

    def wait_until_idle(self) -> None:
        """Wait until all nodes take jobs. Raises ``RuntimeError``."""
        states = ("sinfo", "-h", "-N", "-p", "spare", "-o", "%T")
        self._wait(lambda: self.run(*states).split() == ["idle"] * len(NODES), "the nodes")

    def start_controller(self) -> None:
        """Start the controller, which reads the state of an earlier one."""
        self._start("slurmctld", "-D", "-f", self.environment["SLURM_CONF"])

    def stop_controller(self) -> None:
        """End the controller; the nodes and their jobs go on."""
        process = self._processes.pop("slurmctld")
        process.send_signal(signal.SIGTERM)
        process.wait(END_SECONDS)

    def submit(self, partition: str, command: str) -> str:
        """Submit a job that runs a command on both nodes of a partition. Return its id."""
        options = ("--parsable", f"--partition={partition}", "--nodes=2", f"--output={self.folder}/%j.out")
        return self.run("sbatch", *options, f"--wrap=srun {command}").strip()

    def start_node(self, node: str) -> None:
        """Start the daemon of a node."""
        self._start(node, "-D", "-N", node, "-f", self.environment["SLURM_CONF"], program="slurmd")

    def run(self, *command: str) -> str:
        """Return the output of a Slurm command, also if it fails."""
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=30,
            env={**os.environ, **self.environment},
        )
        return done.stdout

    def list_jobs(self) -> list[str]:
        """Return the jobs in the queue, those that are ending too."""
        return self.run("squeue", "-h", "-o", "%i %T").splitlines()

    def wait_until_empty(self, seconds: float = 45.0) -> list[str]:
        """Wait until no job is in the queue. Return those that are left after ``seconds``."""
        deadline = time.monotonic() + seconds
        while (jobs := self.list_jobs()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return jobs

    def kill_node(self, node: str) -> None:
        """Kill a node's daemon and everything below it, as a power failure does."""
        daemon = self._processes.pop(node)
        # Steps are children of init, whose environment names their node.
        for process in (psutil.Process(daemon.pid), *_find_steps(self.folder, node)):
            for victim in (process, *_list_children(process)):
                with contextlib.suppress(psutil.Error):
                    victim.kill()
        daemon.wait()

    def stop(self) -> list[str]:
        """Cancel what runs and end the daemons. Return the jobs that were left in the queue."""
        try:
            left = self.list_jobs()
            if left:
                self.run("scancel", *(job.split()[0] for job in left))
                self.wait_until_empty()
        finally:
            # The controller last but munge, without which the others cannot say goodbye.
            for name in (*NODES, "slurmctld", "munged"):
                process = self._processes.pop(name, None)
                if process is not None:
                    process.send_signal(signal.SIGTERM)
                    try:
                        process.wait(END_SECONDS)
                    except subprocess.TimeoutExpired:
                        process.kill()
                        process.wait()
            shutil.rmtree(self.folder, ignore_errors=True)
        return left

    def _start(self, name: str, *arguments: str, program: str = "") -> None:
        path = shutil.which(program or name, path=SYSTEM_PATH)
        assert path is not None
        with (self.folder / f"{name}.out").open("ab") as output:
            self._processes[name] = subprocess.Popen(
                [path, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )

    def _wait(self, is_up: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not is_up():
            if time.monotonic() > deadline:
                logs = [path.read_text(errors="replace")[-500:] for path in self.folder.glob("*.log")]
                raise RuntimeError(f"{what} did not start: {logs}")
            time.sleep(0.1)


def _find_steps(folder: Path, node: str) -> list[psutil.Process]:
    """Return the tasks of a node's steps: processes with its name and this cluster in their environment."""
    steps = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            environment = process.environ()
            if environment.get("SLURMD_NODENAME") == node and str(folder) in environment.get(
                "SLURM_CONF", ""
            ):
                steps.append(process)
                parent = process.parent()
                if parent is not None and parent.name().startswith("slurmstepd"):
                    steps.append(parent)
    return steps


def _list_children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []
