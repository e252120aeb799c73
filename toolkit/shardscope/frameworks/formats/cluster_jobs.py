"""Jobs that run an exported ``train.py`` on clusters without Slurm: Kubeflow Trainer, SkyPilot and Ray."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING

from shardscope.frameworks.formats.exported import PLAN_FILE, Absent, Exported, render_header
from shardscope.frameworks.formats.text import make_shell_safe, render_yaml

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

TRAIN_JOB_FILE, SKY_FILE, RAY_FILE, RAY_PROGRAM = "trainjob.yaml", "sky.yaml", "ray_job.sh", "ray_nodes.py"
PORT = 29500
"""Port of the rendezvous where a job has the node, or the node's network address, for itself."""
GPU_RESOURCES = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu"}
"""Kubernetes's names of GPUs, by vendor: those of the vendors' device plugins."""
FOLDER = "/workspace/train"
"""Where the files are in a pod."""
ENCODE_ARGUMENTS = f"""\
# Before 2.56 Ray does not quote an argument for the job's shell; {RAY_PROGRAM} decodes it.
for argument in "$@"; do
  if [[ $argument == *[!A-Za-z0-9/._=:,@+-]* ]]; then
    argument=$(printf %s "$argument" | od -An -v -tx1 | tr -cd 0-9a-f | sed 's/../%&/g')
  fi
  # Not in an array: macOS's bash 3.2 takes an empty one for an error.
  shift
  set -- "$@" "$argument"
done
"""
"""Lines that percent-encode all bytes of an argument that a shell would change."""
SKY_NAMES = {
    "a10-24gb": "A10",
    "a100-sxm-40gb": "A100",
    "a100-sxm-80gb": "A100-80GB",
    "a10g-24gb": "A10G",
    "a40-48gb": "A40",
    "b200-sxm-180gb": "B200",
    "b300-sxm-288gb": "B300",
    "gb200-186gb": "GB200",
    "gh200-96gb": "GH200",
    "h100-nvl-94gb": "H100-NVL",
    "h100-sxm-80gb": "H100",
    "h200-sxm-141gb": "H200",
    "l4-24gb": "L4",
    "l40s-48gb": "L40S",
    "mi300x-192gb": "MI300X",
    "rtx-3090-24gb": "RTX3090",
    "rtx-4090-24gb": "RTX4090",
    "rtx-5090-32gb": "RTX5090",
    "rtx-6000-ada-48gb": "RTX6000-Ada",
    "rtx-pro-6000-blackwell-96gb": "RTXPRO6000",
    "t4-16gb": "T4",
    "v100-sxm-32gb": "V100-32GB",
}
"""SkyPilot's names of GPUs (``sky gpus list --all``)."""


def render_cluster_jobs(
    plan: Plan, files: Sequence[str], packages: Sequence[str], variables: Mapping[str, str]
) -> list[Exported | Absent]:
    """Return the jobs that run ``files[0]``, a script that reads the other files, on all nodes.

    ``packages`` are what the script imports, ``variables`` the defaults of its environment variables.
    """
    return [
        _render_train_job(plan, [*files, PLAN_FILE], packages, variables),
        _render_sky_task(plan, files[0], packages, variables),
        *_render_ray_job(plan, files[0], packages, variables),
    ]


def list_absent_jobs() -> list[Exported | Absent]:
    """Return the jobs as absent, for a plan without ``train.py``."""
    why = "it runs train.py, which this plan does not have."
    return [Absent(name=name, why=why) for name in (TRAIN_JOB_FILE, SKY_FILE, RAY_FILE)]


def _render_train_job(
    plan: Plan, files: Sequence[str], packages: Sequence[str], variables: Mapping[str, str]
) -> Exported:
    """Return a ``TrainJob`` of Kubeflow Trainer, which mounts the files from a ConfigMap."""
    name, per_node = _make_dns_label(plan.architecture.name), plan.cluster.gpus_per_node
    # The runtime's plugin tells torchrun nodes, ranks and rendezvous by PET_... variables (Kubeflow Trainer,
    # pkg/runtime/framework/plugins/torch).
    command = f'{_render_install(packages)} && exec torchrun {FOLDER}/{files[0]} "$@"'
    resource = GPU_RESOURCES[plan.cluster.gpu.vendor] if plan.on_gpu else "cpu"
    volumes: dict[str, dict[str, object]] = {
        "train": {"configMap": {"name": name}},
        # Kubernetes's default of 64 MiB is too small for NCCL's buffers between the ranks of a node.
        "shared-memory": {"emptyDir": {"medium": "Memory"}},
    }
    mounts = {"train": FOLDER, "shared-memory": "/dev/shm"}
    pod = {
        "containers": [
            {
                "name": "node",
                "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()],
            }
        ],
        "volumes": [{"name": name, **source} for name, source in volumes.items()],
    }
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "numNodes": plan.cluster.num_nodes,
                "numProcPerNode": per_node,
                "resourcesPerNode": {"requests": {resource: per_node}, "limits": {resource: per_node}},
                "command": ["bash", "-c", command, "train"],
                "args": ["--steps", "50"],
                **(
                    {"env": [{"name": key, "value": value} for key, value in variables.items()]}
                    if variables
                    else {}
                ),
            },
            "runtimePatches": [
                {
                    "manager": "shardscope.export/files",
                    "trainingRuntimeSpec": {
                        "template": {
                            "spec": {
                                "replicatedJobs": [
                                    {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
                                ]
                            }
                        }
                    },
                }
            ],
        },
    }
    header = render_header(
        plan,
        "It needs Kubeflow Trainer 2.2 or newer, with its runtime torch-distributed, and a ConfigMap "
        f"{name} of the files. args are options of {files[0]}.",
        *_list_torch_notes(plan, "the runtime's image"),
        _describe_storage("The pods and their disks are deleted"),
    )
    create = " ".join(f"--from-file={file}" for file in files)
    return Exported(
        name=TRAIN_JOB_FILE,
        what=f"runs {files[0]} under Kubeflow Trainer on Kubernetes",
        text=header + render_yaml(job),
        started_by=f"kubectl create configmap {name} {create} && kubectl create -f {TRAIN_JOB_FILE}",
    )


def _render_sky_task(
    plan: Plan, script: str, packages: Sequence[str], variables: Mapping[str, str]
) -> Exported | Absent:
    """Return a task of SkyPilot, which finds the machines in a cloud."""
    cluster = plan.cluster
    if plan.on_gpu and cluster.gpu.name not in SKY_NAMES:
        return Absent(name=SKY_FILE, why=f"SkyPilot's name of {cluster.gpu.name} is not known.")
    resources_per_node: dict[str, object] = (
        {"accelerators": f"{SKY_NAMES[cluster.gpu.name]}:{cluster.gpus_per_node}"}
        if plan.on_gpu
        else {"cpus": f"{cluster.gpus_per_node}+"}
    )
    arguments = f"--nproc-per-node {cluster.gpus_per_node}"
    if cluster.num_nodes > 1:
        arguments = (
            f'--nnodes "$SKYPILOT_NUM_NODES" {arguments} --node-rank "$SKYPILOT_NODE_RANK" \\\n'
            f"""  --master-addr "$(head -n 1 <<< "$SKYPILOT_NODE_IPS")" --master-port {PORT}"""
        )
    task = {
        "name": _make_dns_label(plan.architecture.name),
        "resources": resources_per_node,
        "num_nodes": cluster.num_nodes,
        "workdir": ".",
        "envs": {"OPTIONS": "--steps 50", **variables},
        "setup": f"{_render_install(packages)}\n",
        # Parsed as a command line, in which a path with a space is quoted; without a quote that ends, no run.
        "run": f'eval "options=($OPTIONS)" || exit\ntorchrun {arguments} {script} "${{options[@]}}"\n',
    }
    header = render_header(
        plan,
        f"SkyPilot's GPU names do not tell SXM from PCIe. OPTIONS are those of {script}, quoted as in a "
        """shell: --env "OPTIONS=--text '/data/my text.txt'".""",
        *_list_torch_notes(plan, "resources.image_id"),
        _describe_storage("Each machine has a disk of its own, and sky down deletes it"),
    )
    return Exported(
        name=SKY_FILE,
        what=f"runs {script} on machines that SkyPilot finds",
        text=header + render_yaml(task),
        started_by=f"sky launch {SKY_FILE}",
    )


def _render_ray_job(
    plan: Plan, script: str, packages: Sequence[str], variables: Mapping[str, str]
) -> list[Exported | Absent]:
    """Return the command that submits a Ray job, and the job's program."""
    environment = json.dumps({"env_vars": dict(variables)})
    options = f" --runtime-env-json {shlex.quote(environment)}" if variables else ""
    header = render_header(
        plan,
        "RAY_ADDRESS is the cluster's dashboard, such as http://127.0.0.1:8265. Ray uploads this folder. "
        f"The Python of its nodes needs {', '.join(packages)}.",
        _describe_storage("The job runs in copies of it, which Ray deletes"),
    )
    text = "#!/usr/bin/env bash\n" + header + 'set -euo pipefail\ncd "$(dirname "${BASH_SOURCE[0]}")"\n'
    program_and_options = f'python {RAY_PROGRAM} {script} "$@"'
    submit = f"{ENCODE_ARGUMENTS}exec ray job submit --working-dir .{options} -- {program_and_options}\n"
    program = resources.files("shardscope.frameworks.formats") / RAY_PROGRAM
    return [
        Exported(
            name=RAY_FILE,
            what=f"runs {script} as a job of a Ray cluster",
            text=text + submit,
            is_command=True,
        ),
        Exported(
            name=RAY_PROGRAM,
            what=f"the program of {RAY_FILE}: starts torchrun on each of the plan's nodes",
            text=program.read_text(encoding="utf-8"),
        ),
    ]


def _describe_storage(why: str) -> str:
    """Return as a comment where the job's program has to write."""
    return f"{why}: results have to go to storage that all nodes share, in options as an absolute path."


def _list_torch_notes(plan: Plan, image: str) -> list[str]:
    """Return as comments what the installation of packages does not do for the plan's GPUs."""
    if plan.cluster.gpu.vendor != "amd":
        return []
    return [f"PyPI's torch is for NVIDIA: {image} has to have a torch for ROCm, which pip then keeps."]


def _render_install(packages: Sequence[str]) -> str:
    return f"pip install {' '.join(shlex.quote(package) for package in packages)}"


def _make_dns_label(name: str) -> str:
    """Return a name that Kubernetes and SkyPilot accept (RFC 1035): train-llama-3-1-8b."""
    label = re.sub(r"[^a-z0-9]+", "-", make_shell_safe(name).lower())[:40]
    return f"train-{label.strip('-') or 'plan'}"
