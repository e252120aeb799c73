"""Commands that start a plan's ranks: torchrun, alone and under Slurm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from shardscope.core.number_format import format_count
from shardscope.frameworks.formats.cluster_jobs import list_absent_jobs, render_cluster_jobs
from shardscope.frameworks.formats.exported import Absent, Exported, render_header
from shardscope.frameworks.formats.text import make_shell_safe

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

PORT = 29500
"""torchrun's own default."""

SHELL = "#!/usr/bin/env bash\n"
CHANGE_FOLDER = 'set -euo pipefail\ncd "$(dirname "${BASH_SOURCE[0]}")"\n'
FIND_HEAD_NODE = """\
# This script runs on the first node. Slurm has its address; others may not resolve its name.
HEAD_ADDRESS=$(scontrol show node --oneliner "$SLURMD_NODENAME" | grep -o 'NodeAddr=[^ ]*' | cut -d = -f 2)
# A port of this job's own, below those that systems give to clients.
PORT=$((20000 + SLURM_JOB_ID % 10000))
export HEAD_ADDRESS PORT
"""
PASS_ENVIRONMENT = """\
# At sites whose jobs start with --export=NONE, srun would pass none of this script's variables on.
unset SLURM_EXPORT_ENV
"""
INHERIT_CPUS = """\
# Since Slurm 22.05 srun does not inherit --cpus-per-task from sbatch.
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
"""
"""Line of a job for CPU ranks; a GPU job has the whole node."""
RELATIVE_PATHS = "Relative paths in its options start at this folder, wherever it is called."
SHARE_NODES = (
    "The job gets whole nodes. To share them, replace --exclusive and --mem=0 by --cpus-per-task and --mem, "
    "and pass --cpus-per-task to srun too."
)


def render_commands(plan: Plan, program: str, *, needs: str = "", environment: str = "") -> list[Exported]:
    """Return ``torchrun.sh`` and ``job.sbatch``, which run ``program`` (shell words) on every rank.

    ``needs`` is a comment on prerequisites; ``environment`` is shell lines that run before torchrun.
    """
    ranks = format_count(plan.world_size, "rank")
    return [
        Exported(
            name="torchrun.sh",
            what=_describe_start(plan),
            text=_render_torchrun(plan, program, needs, environment),
            is_command=True,
        ),
        Exported(
            name="job.sbatch",
            what=f"starts {ranks if plan.world_size == 1 else f'all {ranks}'} as a job of Slurm",
            text=_render_sbatch(plan, program, needs, environment),
        ),
    ]


def _describe_start(plan: Plan) -> str:
    """Return what ``torchrun.sh`` starts."""
    nodes, per_node = plan.cluster.num_nodes, plan.cluster.gpus_per_node
    if nodes == 1:
        return f"starts {format_count(plan.world_size, 'rank')}"
    return f"starts this node's {per_node} of {plan.world_size} ranks, when run on each of the {nodes} nodes"


def add_commands(
    plan: Plan,
    script: Exported | Absent,
    *more_files: Exported | Absent,
    packages: Sequence[str],
    other_inputs: Sequence[str] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
) -> list[Exported | Absent]:
    """Return the script, its other files, and the commands and jobs that run it.

    ``packages`` are what the script imports, as pip takes them; ``other_inputs`` are files of the export that
    it reads too; ``variables`` are defaults of environment variables. If the script is absent, the commands
    run the user's own, and there are no jobs.
    """
    environment = set_defaults(variables)
    if isinstance(script, Absent):
        program = '"${SCRIPT:?the script to run on every rank (this plan has no train.py, see FILES.md)}"'
        needs = "SCRIPT is the script that every rank runs."
        commands = render_commands(plan, program, needs=needs, environment=environment)
        return [*commands, script, *list_absent_jobs()]
    inputs = [file.name for file in (script, *more_files)] + list(other_inputs)
    return [
        *render_commands(plan, script.name, environment=environment),
        *render_cluster_jobs(plan, inputs, packages, variables),
        script,
        *more_files,
    ]


def set_defaults(variables: Mapping[str, str]) -> str:
    """Return shell lines that set environment variables, except those that the user has set."""
    return "".join(f"export {name}=${{{name}:-{value}}}\n" for name, value in variables.items())


def build_torchrun_arguments(plan: Plan) -> tuple[str, str]:
    """Return ``torchrun``'s arguments for the plan's nodes, and shell lines that must precede it."""
    # --standalone chooses a free port, so that two jobs on one machine do not meet.
    per_node = plan.cluster.gpus_per_node
    if plan.cluster.num_nodes == 1:
        return f"--standalone --nnodes 1 --nproc-per-node {per_node}", ""
    # The id tells jobs of different models apart that meet at one endpoint; torchrun's default is the same
    # for all ("none"). Two of one model would become one job of mixed ranks: the port tells them apart.
    endpoint = f'"$HEAD_NODE:${{MASTER_PORT:-{PORT}}}"'
    return (
        f"--nnodes {plan.cluster.num_nodes} --nproc-per-node {per_node} --rdzv-backend c10d "
        f"--rdzv-endpoint {endpoint} --rdzv-id {make_shell_safe(plan.architecture.name)}",
        f': "${{HEAD_NODE:?the name of one node; run this on all {plan.cluster.num_nodes} nodes}}"\n',
    )


def _render_torchrun(plan: Plan, program: str, needs: str, environment: str) -> str:
    # One torchrun on each node, which starts the node's ranks; HEAD_NODE is the meeting point of all.
    arguments, checks = build_torchrun_arguments(plan)
    nodes = plan.cluster.num_nodes
    each_node = (
        f"Run it on each of the {nodes} nodes; HEAD_NODE names one of them. Jobs with the same HEAD_NODE "
        "need a MASTER_PORT each."
        if nodes > 1
        else ""
    )
    sentences = [sentence for sentence in (each_node, needs, RELATIVE_PATHS) if sentence]
    return (
        SHELL
        + render_header(plan, *sentences)
        + CHANGE_FOLDER
        + checks
        + environment
        # exec: a signal to the script (Ctrl-C, a scheduler's) reaches torchrun, which stops its ranks.
        + f'exec torchrun {arguments} {program} "$@"\n'
    )


def _render_node_check(nodes: int) -> str:
    """Return lines that end the job on another number of nodes than the plan's, given to sbatch say.

    torchrun would wait for the others, or train once on each node.
    """
    return (
        f"if ((${{SLURM_JOB_NUM_NODES:-{nodes}}} != {nodes})); then\n"
        f'  echo "the plan needs --nodes={nodes}, and the job has $SLURM_JOB_NUM_NODES" >&2\n'
        "  exit 1\n"
        "fi\n"
    )


def _render_sbatch(plan: Plan, program: str, needs: str, environment: str) -> str:
    nodes, per_node = plan.cluster.num_nodes, plan.cluster.gpus_per_node
    options = [
        f"--job-name={make_shell_safe(plan.architecture.name)}",
        f"--nodes={nodes}",
        # One torchrun on each node, which starts the node's ranks itself.
        "--ntasks-per-node=1",
        # Slurm's usual default is one CPU for all ranks of a node; offloading needs the host's memory.
        *(
            [f"--gpus-per-node={per_node}", "--exclusive", "--mem=0"]
            if plan.on_gpu
            else [f"--cpus-per-task={per_node}"]
        ),
    ]
    # srun(1), --kill-on-bad-exit: otherwise the other nodes' ranks wait in a collective for those of a node
    # whose torchrun has failed, and the job keeps all nodes until its time limit.
    srun = "srun --kill-on-bad-exit=1" if nodes > 1 else "srun"
    sentences = [
        "Submit it from this folder, or with --chdir=FOLDER. Partition, account and time limit depend on the "
        "cluster: pass them to sbatch.",
        *([SHARE_NODES] if plan.on_gpu else []),
        *([needs] if needs else []),
    ]
    find_head, start = "", f"exec {srun} torchrun {build_torchrun_arguments(plan)[0]} {program}"
    if nodes > 1:
        find_head = FIND_HEAD_NODE
        # A shell on each node, because srun tells a task its node's number in an environment variable only.
        start = (
            "# srun runs one torchrun on each node, and ends all when one fails; rank 0 is on the first.\n"
            f"exec {srun} bash -c 'exec torchrun --nnodes {nodes} --nproc-per-node {per_node} \\\n"
            '  --node-rank "$SLURM_NODEID" --master-addr "$HEAD_ADDRESS" --master-port "$PORT" "$@"\' \\\n'
            f"  torchrun {program}"
        )
    return (
        SHELL
        + "".join(f"#SBATCH {option}\n" for option in options)
        + render_header(plan, *sentences)
        # No cd: Slurm runs a copy of the script from its spool directory, in the folder of sbatch or --chdir.
        + 'set -euo pipefail\n: "${SLURM_SUBMIT_DIR:?submit it with sbatch}"\n'
        + _render_node_check(nodes)
        + PASS_ENVIRONMENT
        + find_head
        + ("" if plan.on_gpu else INHERIT_CPUS)
        + environment
        + f'{start} "$@"\n'
    )
