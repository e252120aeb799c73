"""Commands that start a plan's ranks: torchrun, alone and under Slurm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.frameworks.formats.exported import Absent, Exported, header
from shardscope.frameworks.formats.text import word

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

PORT = 29500
"""torchrun's own default."""

SHELL = "#!/usr/bin/env bash\n"
HERE = 'set -euo pipefail\ncd "$(dirname "${BASH_SOURCE[0]}")"\n'


def commands(plan: Plan, program: str, *, needs: str = "", environment: str = "") -> list[Exported]:
    """Return ``torchrun.sh`` and ``job.sbatch``, which run ``program`` (shell words) on every rank.

    ``needs`` is a comment on prerequisites; ``environment`` is shell lines that run before torchrun.
    """
    return [
        Exported(
            name="torchrun.sh",
            what=f"starts {plan.world_size} ranks" + (", once on each node" if _nodes(plan) > 1 else ""),
            text=_torchrun(plan, program, needs, environment),
            is_command=True,
        ),
        Exported(
            name="job.sbatch",
            what="the same under Slurm",
            text=_sbatch(plan, program, needs, environment),
        ),
    ]


def started(
    plan: Plan, script: Exported | Absent, *others: Exported | Absent, environment: str = ""
) -> list[Exported | Absent]:
    """Return the script, its other files and the commands that run it (if absent: the user's own script)."""
    if isinstance(script, Exported):
        return [*commands(plan, script.name, environment=environment), script, *others]
    program = '"${SCRIPT:?the script to run on every rank, for this plan has no train.py: see FILES.md}"'
    return [*commands(plan, program, needs="SCRIPT names the script that every rank runs."), script]


def one_node_or_more(plan: Plan) -> tuple[str, str]:
    """Return ``torchrun``'s arguments for the plan's nodes, and shell lines that must precede it."""
    per_node = plan.cluster.gpus_per_node
    if _nodes(plan) == 1:
        return f"--standalone --nnodes 1 --nproc-per-node {per_node}", ""
    return (
        f"--nnodes {_nodes(plan)} --nproc-per-node {per_node} --rdzv-backend c10d "
        f'--rdzv-endpoint "$HEAD_NODE:{PORT}" --rdzv-id {word(plan.architecture.name)}',
        f': "${{HEAD_NODE:?run this on all {_nodes(plan)} nodes, with HEAD_NODE naming one of them}}"\n',
    )


def _torchrun(plan: Plan, program: str, needs: str, environment: str) -> str:
    arguments, before = one_node_or_more(plan)
    nodes = _nodes(plan)
    where = f"Run it on each of the {nodes} nodes, HEAD_NODE naming one of them." if nodes > 1 else ""
    said = [sentence for sentence in (where, needs) if sentence]
    return (
        f'{SHELL}{header(plan, *said)}{HERE}{before}{environment}exec torchrun {arguments} {program} "$@"\n'
    )


def _sbatch(plan: Plan, program: str, needs: str, environment: str) -> str:
    nodes, per_node = _nodes(plan), plan.cluster.gpus_per_node
    options = [
        f"--job-name={word(plan.architecture.name)}",
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        # Slurm's usual default is one CPU for all ranks of a node; offloading needs the host's memory.
        *(
            [f"--gpus-per-node={per_node}", "--exclusive", "--mem=0"]
            if plan.on_gpu
            else [f"--cpus-per-task={per_node}"]
        ),
    ]
    said = [
        "Submit it from this folder. Partition, account and time are the cluster's own: give them to sbatch.",
        *([needs] if needs else []),
    ]
    return (
        SHELL
        + "".join(f"#SBATCH {option}\n" for option in options)
        + header(plan, *said)
        + 'set -euo pipefail\ncd "${SLURM_SUBMIT_DIR:?submit it with sbatch}"\n'
        + 'HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
        + environment
        + f"exec srun torchrun --nnodes {nodes} --nproc-per-node {per_node} --rdzv-backend c10d "
        + f'--rdzv-endpoint "$HEAD_NODE:{PORT}" --rdzv-id "$SLURM_JOB_ID" {program} "$@"\n'
    )


def _nodes(plan: Plan) -> int:
    return plan.cluster.num_nodes
