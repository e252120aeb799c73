"""Launch on Slurm: the checks before a job is submitted, and its submission."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.errors import Value, find_nearest, refuse
from shardscope.machine.python_process import build_module_command
from shardscope.records.folder import SUBMISSION, RunFolder
from shardscope.records.json_files import write_json
from shardscope.runs.backends.job_log import watch_setup
from shardscope.runs.backends.nodes import (
    Node,
    NodePool,
    build_inventory,
    check_folder,
    check_nodes,
    is_same_gpu,
)
from shardscope.runs.backends.slurm import (
    ENVIRONMENT_OPTIONS,
    SIGNAL,
    SIGNAL_SECONDS,
    Slurm,
    parse_minutes,
    read_environment,
)
from shardscope.runs.backends.slurm_job import (
    SlurmError,
    cancel,
    clean_environment,
    parse_records,
    run_command,
)
from shardscope.runs.launch.environment import add_toolkit_to_path, remove_rank_variables

if TYPE_CHECKING:
    from shardscope.core.cluster import Cluster
    from shardscope.core.plan import Plan

SUBMIT_SECONDS = 120.0
SPARE_MINUTES = 4
"""Minutes of a suggested time limit before the ranks save: Slurm signals them up to a minute earlier."""
INVENTORY_FIELD = "Slurm.inventory"
LIST_SECONDS = 8.0
"""Maximum time of each of the two commands that list all partitions."""
IDLE_FLAGS = frozenset({"IDLE", "CLOUD", "DYNAMIC_NORM", "POWERED_DOWN", "POWERING_UP"})
"""Parts of the state of a node that takes a job at once, or after it was switched on (scontrol(1))."""
UNUSABLE_FLAGS = frozenset({
    *("DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "ERROR", "FUTURE", "INVAL", "UNKNOWN"),
    "NOT_RESPONDING",
})  # fmt: skip
"""Parts of the state of a node that starts no job until somebody has repaired or resumed it (scontrol(1))."""
GRES_GPU = re.compile(r"(?:^|,)gpu(?::([^:(,]+))?:(\d+)(?=[(,]|$)")
"""GPUs of a node in Slurm's spelling: ``gpu:a100:8(S:0-1)`` or ``gpu:8``. A type may begin with a digit:
``gpu:4090:8``, ``gpu:1g.10gb:7``."""

REFUSED = "FailedJobError: "
"""submitit's error if sbatch fails, before all that sbatch wrote."""
SBATCH_PREFIX = re.compile(r"^sbatch: (?:error: )?")
PATTERN = re.compile(r"%[0-9A-Za-z%]")
"""What Slurm may replace in the path of a log (sbatch(1), "filename pattern"), such as ``%n``."""


class Partition(NamedTuple):
    """A partition of the cluster."""

    name: str
    default_minutes: int | None
    """Minutes that a job without a time limit gets; 0: no limit; None: several partitions differ."""
    nodes: tuple[Node, ...]

    @property
    def pool(self) -> NodePool:
        """Its nodes."""
        return NodePool(f"partition {self.name}", self.nodes)


def check_submission(plan: Plan, target: Slurm, parent: Path, *, force: bool) -> Partition:
    """Check all that is known before a job is submitted. Return the partition.

    Of several partitions, those that have what the plan needs are returned as one. Raises ``ImportError``
    without submitit, ``ValueError`` if a partition does not exist, none has what the plan needs, or its nodes
    cannot see ``parent`` (not with ``force``), and ``SlurmError`` if Slurm cannot be asked.
    """
    if importlib.util.find_spec("submitit") is None:
        raise ImportError('Launching on Slurm needs submitit: pip install "shardscope[slurm]".')
    for command in ("sbatch", "scontrol", "scancel"):
        if shutil.which(command) is None:
            refuse(
                "launch.on",
                "ss.Slurm(...)",
                f"None (this machine): {command} is not on PATH, so no job can be submitted from here",
                "start the notebook on a login node of the cluster",
            )
    clusters = os.environ.get("SLURM_CLUSTERS", "")
    if "," in clusters or clusters.lower() == "all":
        # The id of the job would mean one of each cluster.
        refuse(
            "the environment variable SLURM_CLUSTERS", clusters, "one cluster", "export SLURM_CLUSTERS=<name>"
        )
    names = [None] if target.partition is None else list(dict.fromkeys(target.partition.split(",")))
    possible: list[Partition] = []
    problems: list[ValueError] = []
    for partition in map(read_partition, names):
        # sbatch takes a list of which some have too few nodes, and refuses a type of GPU that one has not.
        try:
            check_nodes(plan, partition.pool)
        except ValueError as problem:
            problems.append(problem)
        else:
            possible.append(partition)
    if not possible:
        raise problems[0]
    joined = _join_partitions(possible, plan.cluster.gpu.name)
    if not force:
        check_folder(parent, joined.pool)
    return joined


def check_time(target: Slurm, partition: Partition) -> None:
    """Raise ``ValueError`` if the time limit is over when the ranks are to save for it: none would train."""
    minutes = partition.default_minutes if target.time is None else parse_minutes(target.time)
    match = SIGNAL.fullmatch(str(target.extra.get("signal", "")))
    seconds = int(match[1]) if match else SIGNAL_SECONDS
    if minutes and 60 * minutes <= seconds:
        default = "" if target.time is not None else f"; partition {partition.name} has {minutes} by default"
        allowed = f"more than {seconds / 60:.3g} minutes: {seconds} s before its end the ranks save{default}"
        refuse("Slurm.time", target.time, allowed, Value(seconds // 60 + SPARE_MINUTES))


def _join_partitions(partitions: Sequence[Partition], gpu_name: str) -> Partition:
    """Return several partitions as one, whose job Slurm starts where it can begin first."""
    kinds = [{kind for node in one.nodes for kind, _ in node.gpus} for one in partitions]
    if gpu_name != "cpu" and not all(is_same_gpu(kind, gpu_name) for kind in set().union(*kinds)):
        # A job requests one type of GPU for all partitions. Without any, it could start on nodes with others.
        own = [{kind for kind in names if is_same_gpu(kind, gpu_name)} for names in kinds]
        partitions = [one for one, names in zip(partitions, own, strict=True) if names == own[0]]
    nodes = {node.name: node for partition in partitions for node in partition.nodes}
    defaults = {one.default_minutes for one in partitions}
    minutes = defaults.pop() if len(defaults) == 1 else None
    return Partition(",".join(one.name for one in partitions), minutes, tuple(nodes.values()))


def read_partition(name: str | None) -> Partition:
    """Return the partition ``name``, or the default one. Raises ``ValueError`` if it does not exist."""
    records = parse_records(run_command("scontrol", "show", "partition", "--oneliner"))
    names = [record["PartitionName"] for record in records]
    if name is None:
        chosen = next((record for record in records if record.get("Default") == "YES"), None)
        if chosen is None:
            fix = Value(names[0]) if names else "ask the cluster's administrator"
            refuse("Slurm.partition", None, f"{', '.join(names)}: the cluster has no default partition", fix)
    else:
        if name not in names:
            refuse("Slurm.partition", name, ", ".join(names), Value(find_nearest(name, names)))
        chosen = records[names.index(name)]
    limits = (chosen.get(key, "") for key in ("DefaultTime", "MaxTime"))
    minutes = next((parse_minutes(limit) for limit in limits if limit[:1].isdigit()), 0)
    records = parse_records(run_command("scontrol", "show", "node", "--oneliner"))
    return Partition(chosen["PartitionName"], minutes, select_nodes(records, chosen["PartitionName"]))


def list_partitions() -> list[tuple[Partition, str]]:
    """Return all partitions with nodes and the state of each. Raises ``SlurmError`` if Slurm does not answer.

    A state other than UP is why no job starts: DOWN, DRAIN, INACTIVE. Time limits are not read.
    """
    show = ("scontrol", "show")
    partitions = parse_records(run_command(*show, "partition", "--oneliner", seconds=LIST_SECONDS))
    nodes = parse_records(run_command(*show, "node", "--oneliner", seconds=LIST_SECONDS))
    named = [(record["PartitionName"], record.get("State", "UP")) for record in partitions]
    states = [(Partition(name, 0, select_nodes(nodes, name)), state) for name, state in named]
    return [(partition, state) for partition, state in states if partition.nodes]


def select_nodes(records: Iterable[Mapping[str, str]], partition_name: str) -> tuple[Node, ...]:
    """Return the nodes of a partition from the records of ``scontrol show node``."""
    nodes = []
    for record in records:
        if partition_name in record.get("Partitions", "").split(","):
            node_gpus = tuple((kind, int(count)) for kind, count in GRES_GPU.findall(record.get("Gres", "")))
            host = record.get("NodeHostName", "")
            cpus = int(record.get("CPUTot", "1"))
            memory = int(record.get("RealMemory", "0")) << 20  # scontrol(1): MiB.
            address = record.get("NodeAddr", host)
            flags = set(record.get("State", "").split("+"))
            is_idle = {"IDLE"} <= flags <= IDLE_FLAGS
            takes_jobs = not flags & UNUSABLE_FLAGS
            nodes.append(
                Node(record["NodeName"], address, host, cpus, node_gpus, memory, is_idle, takes_jobs)
            )
    return tuple(nodes)


def read_inventory(partition_name: str | None, gpu_name: str | None, *, only_idle: bool) -> Cluster:
    """Return the cluster of :meth:`Slurm.inventory`, which describes the arguments and the errors."""
    if partition_name is None:
        # Without the other variables: a wrong one is no reason to list no nodes.
        variable = "SBATCH_PARTITION"
        partition_name = read_environment(Slurm(), {variable: os.environ.get(variable, "")}).partition
        # Of several, the first: a job has nodes of one.
        partition_name = partition_name and partition_name.partition(",")[0]
    partition = read_partition(partition_name)
    if not partition.nodes:
        refuse("Slurm.partition", partition.name, "a partition with nodes", "another partition")
    return build_inventory(partition.pool, gpu_name, INVENTORY_FIELD, only_idle=only_idle)


def submit(folder: RunFolder, plan: Plan, target: Slurm, partition: Partition, *, starts_again: bool) -> str:
    """Submit the job of a run and write its id. Return the id.

    Raises ``ValueError`` if Slurm refuses it or would replace a part of its path, ``SlurmError`` if sbatch
    does not answer in time, and ``OSError`` if the folder cannot be written.
    """
    _check_path(folder.path)
    submission = folder.path / SUBMISSION
    submission.mkdir(mode=0o700)
    environment = remove_rank_variables(clean_environment(os.environ))
    with_toolkit = add_toolkit_to_path(environment)
    # Another Python has packages of its own, which this one's must not hide.
    nodes_environment = environment if target.python is not None else with_toolkit
    parameters = build_parameters(folder, plan, target, partition, starts_again=starts_again)
    request = {
        "pythonpath": nodes_environment.get("PYTHONPATH"),
        "folder": str(submission),
        "run": str(folder.path),
        "python": target.python,
        "parameters": parameters,
    }
    done = _run_submission(json.dumps(request), with_toolkit, str(parameters["job_name"]))
    lines = done.stdout.split()
    if done.returncode or not lines or not lines[-1].isdecimal():
        message = _find_message(done.stderr)
        # sbatch may have submitted it, such as a site's own, whose output submitit does not understand.
        if REFUSED not in done.stderr and (problem := _cancel_by_name(str(parameters["job_name"]))):
            message = f"{message}. {problem}"
        variables = [name for name in ENVIRONMENT_OPTIONS if os.environ.get(name)]
        refuse(
            "launch.on",
            f"partition {partition.name}",
            f"what Slurm accepts; it says: {message}",
            f"{' or '.join(('in ss.Slurm(...)', *variables))}, change what the message names",
        )
    job_id = lines[-1]
    try:
        write_json(folder.job, {"scheduler": "slurm", "job_id": job_id, "partition": partition.name})
    except OSError as error:
        # Without the id the job could be neither watched nor stopped.
        try:
            cancel(job_id)
        except SlurmError as problem:
            error.add_note(f"Job {job_id} could not be cancelled: {problem}")
        raise
    return job_id


def _check_path(path: Path) -> None:
    """Check that Slurm finds the run folder ``path``, which is part of the paths of the job's logs.

    submitit passes them to sbatch as patterns. It uses the same path for its own files, so a percent sign
    cannot be escaped by a second one.
    """
    for field, value in (("launch.name", path.name), ("launch.folder", str(path.parent))):
        match = PATTERN.search(value)
        if match is not None:
            allowed = f"no {match[0]!r} on Slurm, which replaces it in the paths of logs"
            refuse(field, value, allowed, Value(value.replace("%", "_")))


def _run_submission(
    request: str, environment: Mapping[str, str], job_name: str
) -> subprocess.CompletedProcess[str]:
    """Run ``submission_process.py``. Raises ``SlurmError`` if it takes too long, and then cancels the job."""
    command = build_module_command("shardscope.runs.backends.submission_process")
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(request, timeout=SUBMIT_SECONDS)
        except BaseException as error:
            # With its child sbatch, which would still submit the job.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            problem = _cancel_by_name(job_name)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            message = f"sbatch did not answer within {SUBMIT_SECONDS:.0f} s"
            raise SlurmError(f"{message}. {problem}" if problem else message) from error
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def _cancel_by_name(job_name: str) -> str:
    """Cancel a job whose id is not known, if Slurm has it. Return why that failed, empty if it did not."""
    try:
        run_command("scancel", f"--name={job_name}")
    except SlurmError as error:
        return f"If Slurm has the job nevertheless, cancel it: scancel --name={job_name}. {error}"
    return ""


def build_parameters(
    folder: RunFolder, plan: Plan, target: Slurm, partition: Partition, *, starts_again: bool
) -> dict[str, object]:
    """Return the parameters of submitit's ``SlurmExecutor`` for a run.

    ``starts_again``: after Slurm has ended the job, or a failure.
    """
    cluster = plan.cluster
    minutes = partition.default_minutes if target.time is None else parse_minutes(target.time)
    # sbatch(1): a limit of 0 requests no limit. Without any (None), a job gets the default of the partition
    # in which it starts (slurm 22.05, src/slurmctld/node_scheduler.c, select_nodes).
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", folder.path.name)
    parameters: dict[str, object] = {
        # Unique: a job whose id is not known yet is cancelled by its name.
        "job_name": f"shardscope-{name}-{secrets.token_hex(4)}",
        "partition": partition.name,
        "time": minutes,
        "nodes": cluster.num_nodes,
        "ntasks_per_node": 1,
        # sbatch passes them on to the job, whose commands ask its own cluster and need no token. One that
        # expired, by default after half an hour (jwt.html), would refuse the requeue at the time limit.
        "setup": ["unset SLURM_JWT SLURM_CLUSTERS", *watch_setup(target.setup)],
        # submitit's default is "submitit", which sites that enforce wckeys refuse.
        "wckey": None,
        **{
            name: value
            for name in ("account", "qos", "constraint")
            if (value := getattr(target, name)) is not None
        },
    }
    # Without the flag Slurm starts the job neither after a preemption nor on request. With it Slurm also
    # starts it again after a node has failed.
    additional: dict[str, object] = {"requeue" if starts_again else "no-requeue": True}
    if cluster.gpu.name == "cpu":
        num_cpus = min(cluster.gpus_per_node, *(node.num_cpus for node in partition.nodes))
    else:
        kinds = {
            kind for node in partition.nodes for kind, _ in node.gpus if is_same_gpu(kind, cluster.gpu.name)
        }
        kind = f"{kinds.pop()}:" if len(kinds) == 1 and all(kinds) else ""
        additional["gres"] = f"gpu:{kind}{cluster.gpus_per_node}"
        # A share of the node's cores, as large as the share of its GPUs: the least of the nodes with as many.
        counts = [(node.num_cpus, node.count_gpus(cluster.gpu.name)) for node in partition.nodes]
        shares = [cpus * cluster.gpus_per_node // num for cpus, num in counts if num >= cluster.gpus_per_node]
        num_cpus = max(1, min(shares))
    extra = {name.replace("_", "-"): value for name, value in target.extra.items()}
    if (per_gpu := extra.pop("cpus-per-gpu", None)) is not None:
        # sbatch takes one of the two, and the task has all GPUs of its node.
        num_cpus = int(per_gpu) * cluster.gpus_per_node
    additional["cpus-per-task"] = num_cpus
    if "gres" in extra and "gres" in additional:
        extra["gres"] = f"{additional['gres']},{extra['gres']}"
    parameters["additional_parameters"] = {**additional, **extra}
    # Since Slurm 22.05 srun does not inherit it from sbatch.
    parameters["srun_args"] = [f"--cpus-per-task={extra.get('cpus-per-task', num_cpus)}"]
    return parameters


def _find_message(output: str) -> str:
    """Return the lines of sbatch that name the cause, or the last line of Python's output."""
    # submitit raises an error of sbatch's whole output. The last line of it is often general, such as
    # "Unspecified error" after the line of a site's job_submit plugin.
    _, is_of_sbatch, message = output.rpartition(REFUSED)
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if not is_of_sbatch:
        lines = lines[-1:]
    causes = [SBATCH_PREFIX.sub("", line) for line in lines if not line.startswith("Try ")]
    return "; ".join(dict.fromkeys(causes))[-500:] or "nothing"
