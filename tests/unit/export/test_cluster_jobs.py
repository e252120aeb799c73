"""Exported jobs of Slurm, Kubeflow, SkyPilot and Ray: what they start, and whether their tools read them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.requirements import needs, thorough

import shardscope as ss
from shardscope.catalog import gpus
from shardscope.export.files import list_files
from shardscope.frameworks.formats.cluster_jobs import SKY_NAMES

needs("accelerate")  # which brings PyYAML
needs("transformers")  # which spells the config of train.py

ROOT = Path(__file__).parents[3]
JOBS = ("trainjob.yaml", "sky.yaml", "ray_job.sh")
LAYOUTS = {
    "ddp": ss.Layout.ddp(),
    "fsdp2": ss.Layout.fsdp2(),
    "zero": ss.Layout.zero(3),
    "megatron": ss.Layout.megatron(tp=2),
}
SKYPILOT = os.environ.get("SHARDSCOPE_SKYPILOT_PYTHON", sys.executable)
"""A Python with SkyPilot, which pins versions that other packages here contradict."""
READ_TASK = """
import sys, sky
task = sky.Task.from_yaml(sys.argv[1])
(resources,) = task.resources
print(task.num_nodes, resources.accelerators, resources.cpus, task.workdir)
"""


def build_plan(layout: Any, cluster: str = "2x8xh100-sxm-80gb") -> ss.Plan:
    recipe = ss.Recipe(seq_len=64, global_batch_size=16)
    return ss.Plan(ss.models["llama-3.2-1b"], ss.Cluster.parse(cluster), recipe, layout)


def write_program(folder: Path, name: str, text: str = 'printf "%s\\n" "$@"\n') -> None:
    """Write a stand-in of a program, which prints its arguments, into ``folder``."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/usr/bin/env bash\n{text}")
    (folder / name).chmod(0o755)


def run_bash(folder: Path, *arguments: str, **environment: str) -> list[str]:
    """Run bash with the stand-ins in ``folder/bin``; return the lines that it prints."""
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", *arguments],
        cwd=folder,
        env={"PATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("framework", LAYOUTS)
def test_the_sbatch_file_starts_torchrun_on_each_node(framework: str, tmp_path: Path) -> None:
    """It needs no name of a node to resolve, and each job has a port of its own."""
    build_plan(LAYOUTS[framework]).export(tmp_path)
    write_program(tmp_path / "bin", "torchrun")
    write_program(
        tmp_path / "bin", "scontrol", 'echo "NodeName=$4 Arch=x NodeAddr=10.0.0.7 NodeHostName=h"\n'
    )
    # srun starts the same command on each node, where the number of the node differs. Without the option a
    # torchrun that fails leaves those of the other nodes waiting.
    write_program(
        tmp_path / "bin",
        "srun",
        '[ "$1" = --kill-on-bad-exit=1 ] || exit 1; shift\nSLURM_NODEID=0 "$@"; SLURM_NODEID=1 "$@"\n',
    )
    variables = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "123456"}
    job = "train.sbatch" if framework == "megatron" else "job.sbatch"
    lines = run_bash(tmp_path, job, "--steps", "a b", **variables)
    first, second = lines[: len(lines) // 2], lines[len(lines) // 2 :]
    endpoint = ["--master-addr", "10.0.0.7", "--master-port", "23456"]
    expected = ["--nnodes", "2", "--nproc-per-node", "8", "--node-rank", "0", *endpoint]
    assert first == [*expected, "train.py", "--steps", "a b"]
    assert second == [*expected[:5], "1", *expected[6:], "train.py", "--steps", "a b"]


@pytest.mark.parametrize("cluster", ["2xcpu", "2x1xcpu"])
def test_the_sbatch_file_passes_its_environment_on_at_sites_that_export_none(
    cluster: str, tmp_path: Path
) -> None:
    """srun found no bash where jobs start with --export=NONE, and the ranks not their master's address."""
    build_plan(LAYOUTS["ddp"], cluster).export(tmp_path)
    write_program(tmp_path / "bin", "scontrol", 'echo "NodeAddr=10.0.0.7"\n')
    write_program(tmp_path / "bin", "srun", 'echo "${SLURM_EXPORT_ENV-all}"\n')
    variables = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "1"}
    lines = run_bash(tmp_path, "job.sbatch", SLURM_CPUS_PER_TASK="1", SLURM_EXPORT_ENV="NONE", **variables)
    assert lines == ["all"]


@pytest.mark.parametrize(("cluster", "nodes"), [("2x8xh100-sxm-80gb", "1"), ("8xh100-sxm-80gb", "2")])
def test_the_sbatch_file_ends_on_another_number_of_nodes(cluster: str, nodes: str, tmp_path: Path) -> None:
    """``sbatch --nodes=1`` waited for the other node, and ``--nodes=2`` trained the same plan twice."""
    build_plan(LAYOUTS["ddp"], cluster).export(tmp_path)
    variables = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": nodes}
    done = subprocess.run(
        ["bash", "job.sbatch"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and "the plan needs --nodes=" in done.stderr


def test_the_sbatch_file_stays_in_the_folder_of_chdir(tmp_path: Path) -> None:
    """It changed to the folder in which sbatch was called, which has no train.py."""
    build_plan(LAYOUTS["ddp"], "8xh100-sxm-80gb").export(tmp_path)
    write_program(tmp_path / "bin", "srun", "pwd\n")
    assert run_bash(tmp_path, "job.sbatch", SLURM_SUBMIT_DIR="/") == [str(tmp_path)]


def test_the_sbatch_file_of_one_node_opens_no_port_to_others(tmp_path: Path) -> None:
    build_plan(LAYOUTS["ddp"], "2xcpu").export(tmp_path)
    write_program(tmp_path / "bin", "srun", 'echo "$SRUN_CPUS_PER_TASK"; printf "%s\\n" "$@"\n')
    lines = run_bash(tmp_path, "job.sbatch", SLURM_SUBMIT_DIR=str(tmp_path), SLURM_CPUS_PER_TASK="2")
    assert lines[:3] == ["2", "torchrun", "--standalone"] and lines[-1] == "train.py"


@pytest.mark.parametrize("framework", LAYOUTS)
def test_the_train_job_installs_what_train_py_imports_and_starts_it(framework: str, tmp_path: Path) -> None:
    plan = build_plan(LAYOUTS[framework])
    plan.export(tmp_path)
    job = yaml.safe_load((tmp_path / "trainjob.yaml").read_text())
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": 8}
    write_program(tmp_path / "bin", "torchrun")
    write_program(tmp_path / "bin", "pip")
    printed = run_bash(tmp_path, *trainer["command"][1:], *trainer["args"])
    start = printed.index("/workspace/train/train.py")
    assert printed[start:] == ["/workspace/train/train.py", "--steps", "50"]
    installed = {re.split("[=>]", package)[0] for package in printed[1:start]}
    assert {"torch", "transformers", "tokenizers", "numpy"} <= installed
    own = {"zero": "deepspeed", "megatron": "megatron-core"}
    assert (own.get(framework, "torch")) in installed
    # The command that creates the ConfigMap names every file that the script reads, by its name there.
    started = {file.name: file.started_by for file in list_files(plan)}["trainjob.yaml"]
    mounted = {word.partition("=")[2] for word in shlex.split(started) if word.startswith("--from-file")}
    read = set(re.findall(r'HERE / "([\w.]+)"', (tmp_path / "train.py").read_text()))
    assert read | {"train.py"} <= mounted and all((tmp_path / name).exists() for name in mounted)
    pod = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
    volumes = pod["template"]["spec"]["template"]["spec"]["volumes"]
    assert volumes[0]["configMap"]["name"] == job["metadata"]["name"] and job["metadata"]["name"] in started


@pytest.mark.parametrize(("cluster", "is_noted"), [("2x8xmi300x-192gb", True), ("2x8xh100-sxm-80gb", False)])
def test_jobs_on_amd_gpus_name_the_torch_that_pip_does_not_install(
    cluster: str, is_noted: bool, tmp_path: Path
) -> None:
    build_plan(LAYOUTS["ddp"], cluster).export(tmp_path)
    for name in ("trainjob.yaml", "sky.yaml"):
        assert ("a torch for ROCm" in (tmp_path / name).read_text()) == is_noted


@thorough()
@pytest.mark.parametrize("cluster", ["2x8xh100-sxm-80gb", "8xmi300x-192gb", "2x1xcpu"])
def test_kubeflows_own_models_read_the_train_job(cluster: str) -> None:
    models = needs("kubeflow_trainer_api.models")
    text = next(file.text for file in list_files(build_plan(LAYOUTS["ddp"], cluster)) if file.name == JOBS[0])
    job = yaml.safe_load(text)
    # The models drop keys that they do not know, so they are compared with what was written.
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job


def test_the_sky_task_starts_torchrun_with_skypilots_addresses(tmp_path: Path) -> None:
    build_plan(LAYOUTS["megatron"]).export(tmp_path)
    task = yaml.safe_load((tmp_path / "sky.yaml").read_text())
    assert task["resources"] == {"accelerators": "H100:8"} and task["num_nodes"] == 2
    write_program(tmp_path / "bin", "torchrun", 'printf "%s\\n" "$CUDA_DEVICE_MAX_CONNECTIONS" "$@"\n')
    variables = {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    }
    lines = run_bash(tmp_path, "-c", task["run"], **task["envs"], **variables)
    assert lines[0] == "1"
    assert lines[lines.index("--node-rank") + 1] == "1"
    assert lines[lines.index("--master-addr") + 1] == "10.0.0.1"
    assert lines[-3:] == ["train.py", "--steps", "50"]


def test_options_of_the_sky_task_are_quoted_as_in_a_shell(tmp_path: Path) -> None:
    """A path with a space became two options."""
    build_plan(LAYOUTS["ddp"], "8xh100-sxm-80gb").export(tmp_path)
    command = yaml.safe_load((tmp_path / "sky.yaml").read_text())["run"]
    write_program(tmp_path / "bin", "torchrun")
    options = ["--text", '/data/Ärger "a" it\'s $HOME *.txt', "--steps", "3"]
    lines = run_bash(tmp_path, "-c", command, OPTIONS=shlex.join(options))
    assert lines[lines.index("train.py") + 1 :] == options
    # Nothing is trained with options that cannot be read.
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        env={"PATH": path, "OPTIONS": "--text it's.txt"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode and not done.stdout and "unexpected EOF" in done.stderr


@thorough()
@pytest.mark.parametrize(
    ("cluster", "read"),
    [("2x8xh100-sxm-80gb", "2 {'H100': 8} None ."), ("2x4xcpu", "2 None 4+ ."), ("8xl4-24gb", "1 {'L4': 8}")],
)
def test_skypilot_reads_its_task(cluster: str, read: str, tmp_path: Path) -> None:
    has_sky = [SKYPILOT, "-c", "import importlib.util, sys; sys.exit(not importlib.util.find_spec('sky'))"]
    if subprocess.run(has_sky, check=False).returncode:
        pytest.skip("set SHARDSCOPE_SKYPILOT_PYTHON to a Python with: pip install skypilot")
    build_plan(LAYOUTS["fsdp2"], cluster).export(tmp_path)
    done = subprocess.run(
        [SKYPILOT, "-c", READ_TASK, "sky.yaml"],
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(read)


def test_skypilot_names_are_those_of_catalogue_gpus() -> None:
    assert set(SKY_NAMES) <= set(gpus)
    (reason,) = [
        line
        for line in next(
            file.text
            for file in list_files(build_plan(LAYOUTS["ddp"], "8xmi355x-288gb"))
            if file.name == "FILES.md"
        ).splitlines()
        if line.startswith("- `sky.yaml`")
    ]
    assert "SkyPilot's name of mi355x-288gb is not known" in reason


def test_the_ray_command_submits_the_folder_and_the_ranks_environment(tmp_path: Path) -> None:
    build_plan(LAYOUTS["megatron"]).export(tmp_path)
    write_program(tmp_path / "bin", "ray")
    lines = run_bash(tmp_path, "ray_job.sh", "--steps", "3")
    assert lines[:4] == ["job", "submit", "--working-dir", "."]
    environment = json.loads(lines[lines.index("--runtime-env-json") + 1])
    assert environment == {"env_vars": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}
    assert lines[lines.index("--") :] == ["--", "python", "ray_nodes.py", "train.py", "--steps", "3"]
    compile((tmp_path / "ray_nodes.py").read_text(), "ray_nodes.py", "exec")


FAKE_RAY = """
init = lambda: None
get = lambda value: value
wait = lambda values: (values[:1], values[1:])

class Handle:
    def __init__(self, function):
        self.remote = function

def remote(node_class):
    def create():
        node = node_class()
        return type("Actor", (), {"find_endpoint": Handle(node.find_endpoint), "run": Handle(node.run)})
    handle = Handle(create)
    handle.options = lambda **_: handle
    return handle
"""
"""A Ray of one process, in place of the package."""


@pytest.mark.parametrize("join", [subprocess.list2cmdline, shlex.join])
def test_options_of_the_ray_job_reach_train_py_unchanged(join: Any, tmp_path: Path) -> None:
    """Before 2.56 Ray joined arguments as Windows does, and the job's shell replaced $ and quotes."""
    build_plan(LAYOUTS["ddp"], "2xcpu").export(tmp_path)
    write_program(tmp_path / "bin", "ray")
    options = ["--text", '/data/Ärger "a" it\'s $HOME 50%41 *.txt', "--steps", "3", "--save", ""]
    # macOS's od has two spaces between bytes.
    write_program(tmp_path / "bin", "od", f'{shutil.which("od")} "$@" | sed "s/ /  /g"\n')
    printed = run_bash(tmp_path, "ray_job.sh", *options)
    entrypoint = join(printed[printed.index("--") + 1 :])
    # In the job: a torchrun that prints its arguments, and a Ray of one process.
    for name, text in {
        "ray/__init__.py": FAKE_RAY,
        "ray/util/__init__.py": 'get_node_ip_address = lambda: "10.0.0.1"\n',
        "ray/util/placement_group.py": "class placement_group:\n    __init__ = lambda *_, **__: None\n"
        "    wait = lambda *_: True\n",
        "ray/util/scheduling_strategies.py": "PlacementGroupSchedulingStrategy = lambda **_: None\n",
        "torch/__init__.py": "",
        "torch/distributed/__init__.py": "",
        "torch/distributed/run.py": "import json, sys\nprint(json.dumps(sys.argv), flush=True)\n",
    }.items():
        (tmp_path / "modules" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "modules" / name).write_text(text)
    write_program(tmp_path / "bin", "python", f'exec {shlex.quote(sys.executable)} "$@"\n')
    (line,) = run_bash(tmp_path, "-c", entrypoint, PYTHONPATH=str(tmp_path / "modules"))
    arguments = json.loads(line)
    assert arguments[arguments.index("train.py") + 1 :] == options


@pytest.mark.parametrize("name", JOBS)
def test_jobs_name_where_their_results_are_kept(name: str) -> None:
    """Folders of pods, of SkyPilot's machines and of Ray's jobs are deleted, with checkpoints in them."""
    text = {file.name: file.text for file in list_files(build_plan(LAYOUTS["fsdp2"]))}[name]
    comment = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    assert "results have to go to storage that all nodes share" in comment
    assert "delete" in comment


def test_a_plan_without_train_py_has_no_jobs_for_it(tmp_path: Path) -> None:
    build_plan(ss.Layout.fsdp2(tp=2)).export(tmp_path)
    assert not {path.name for path in tmp_path.iterdir()} & {*JOBS, "train.py", "ray_nodes.py"}
    listed = (tmp_path / "FILES.md").read_text()
    assert all(f"- `{name}`: it runs train.py, which this plan does not have." in listed for name in JOBS)
    assert "Only Shardscope's engine trains this: Layout.tp is 2" in listed


def test_installed_versions_are_those_of_our_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {package for extra in project["optional-dependencies"].values() for package in extra}
    for layout in LAYOUTS.values():
        files = {file.name: file.text for file in list_files(build_plan(layout))}
        setup = shlex.split(yaml.safe_load(files["sky.yaml"])["setup"])[2:]
        assert {package for package in setup if package != "numpy"} <= wanted


def test_files_of_other_tools_import_nothing_of_ours() -> None:
    source = importlib.util.find_spec("shardscope.frameworks.formats.ray_nodes")
    assert source is not None and source.origin is not None
    assert "import shardscope" not in Path(source.origin).read_text()
