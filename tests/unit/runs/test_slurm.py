"""``ss.Slurm`` and the parts of a launch on Slurm that need no Slurm."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import shlex
import shutil
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from traceback import format_exception
from typing import Any

import psutil
import pytest
from fake_runs import wait_until
from tests.requirements import needs, skip_without

import shardscope as ss
from shardscope.core.errors import FieldError
from shardscope.machine.processes import identify_machine
from shardscope.records.attempts import write_beginning
from shardscope.records.folder import NodeFolder, RunFolder
from shardscope.records.json_files import append_line, write_json
from shardscope.runs import control
from shardscope.runs.backends import end_notice, job_watch, node_process, nodes, slurm_job, slurm_submission
from shardscope.runs.backends.job_log import (
    advise,
    describe_failed_setup,
    find_job_log,
    read_job_log,
    watch_setup,
)
from shardscope.runs.backends.node_checks import describe_differences, describe_missing_gpus
from shardscope.runs.backends.node_process import find_address
from shardscope.runs.backends.nodes import Node
from shardscope.runs.backends.peers import Peers
from shardscope.runs.backends.slurm import parse_minutes
from shardscope.runs.backends.slurm_job import Job, clean_environment, parse_records
from shardscope.runs.backends.slurm_submission import Partition, build_parameters
from shardscope.runs.launch.rank import check_cuda_build
from shardscope.runs.launch.supervision.run_end import describe_node_logs

PARTITION = Partition("a100", 60, (Node("n1", "10.0.0.1", "n1", 64, (("a100", 8),)),) * 2)
JOB_LINE = (
    "JobId=7 JobName=x Priority=1 JobState=PENDING Reason=Resources Dependency=(null) ExitCode=0:0 "
    "StartTime=2026-11-27T14:05:00 EndTime=2026-11-27T15:05:00 NodeList= Command=/a b/c StdErr=/x\n"
)


def make_plan(cluster: str) -> ss.Plan:
    recipe = ss.Recipe(seq_len=64, global_batch_size=16)
    return ss.Plan(ss.Architecture.of_size("2m"), ss.Cluster.parse(cluster), recipe, ss.Layout.ddp())


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"partition": "a b"}, "Slurm.partition"),
        ({"partition": "a\n#SBATCH --uid=0"}, "Slurm.partition"),
        ({"account": 3}, "Slurm.account"),
        ({"constraint": "a; rm"}, "Slurm.constraint"),
        ({"time": 0}, "Slurm.time"),
        ({"time": "soon"}, "Slurm.time"),
        ({"time": True}, "Slurm.time"),
        ({"setup": "module load cuda"}, "Slurm.setup"),
        ({"setup": ["a\nb"]}, "Slurm.setup"),
        ({"setup": ["export HF_TOKEN=hf_" + "aB3" * 12]}, "Slurm.setup"),
        ({"python": ""}, "Slurm.python"),
        ({"extra": ["mem"]}, "Slurm.extra"),
        ({"extra": {"nodes": 3}}, "Slurm.extra"),
        ({"extra": {"ntasks_per_node": 3}}, "Slurm.extra"),
        ({"extra": {"qos": "high"}}, "Slurm.extra"),
        ({"extra": {"mem": 1.5}}, "Slurm.extra['mem']"),
        ({"extra": {"mem": "1\n2"}}, "Slurm.extra['mem']"),
        ({"extra": {"exclude": ["n1", "n2"]}}, "Slurm.extra['exclude']"),
        ({"extra": {"exclusive": False}}, "Slurm.extra['exclusive']"),
        ({"extra": {"gres": "lscratch:100,gpu:a100:2"}}, "Slurm.extra['gres']"),
        ({"extra": {"cpus_per_gpu": "all"}}, "Slurm.extra['cpus_per_gpu']"),
        # With these sbatch prints no id of a job, or only when the job has ended.
        ({"extra": {"parsable": True}}, "Slurm.extra"),
        ({"extra": {"test-only": True}}, "Slurm.extra"),
        ({"extra": {"wait": True}}, "Slurm.extra"),
    ],
)
def test_invalid_fields_raise(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldError) as refused:
        ss.Slurm(**fields)
    assert refused.value.field == field and "Nearest fix" in str(refused.value)
    assert "aB3" not in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "fix"),
    [
        ({"time": "2h"}, "120"),
        ({"time": "90 min"}, "90"),
        ({"time": timedelta(days=1)}, "1440"),
        ({"time": 90.5}, "91"),
        ({"time": "soon"}, "'1:00:00'"),
        ({"partition": ["a100", "h100"]}, "'a100,h100'"),
        ({"partition": "a100, h100"}, "'a100,h100'"),
        ({"partition": "a100,"}, "'a100'"),
        ({"account": ""}, "'main'"),
        ({"extra": {"--cpus-per-task": 4}}, "'cpus-per-task'"),
        ({"extra": {"--mem=4G": True}}, "'mem'"),
        ({"python": ""}, "leave it out"),
        ({"python": "srun\npython"}, "'srun python'"),
        ({"setup": ["a\nb"]}, "a line each, in a list"),
    ],
)
def test_the_nearest_fix_is_what_the_value_most_likely_means(fields: dict[str, Any], fix: str) -> None:
    with pytest.raises(FieldError) as refused:
        ss.Slurm(**fields)
    assert str(refused.value).endswith(f"Nearest fix: {fix}.")


def test_a_python_whose_path_is_not_quoted_has_the_quoted_one_as_fix(tmp_path: Path) -> None:
    """The job failed: the nodes had no /shared/my."""
    python = tmp_path / "my env's" / "python"
    write_command(python.parent, python.name, "")
    with pytest.raises(FieldError, match=r"Slurm\.python") as refused:
        ss.Slurm(python=str(python))
    fix = refused.value.fix_values
    assert fix is not None and shlex.split(str(fix["python"])) == [str(python)]
    assert ss.Slurm(python=str(fix["python"])).python == fix["python"]


def test_a_long_command_of_python_is_no_path() -> None:
    """The check for a file raised "File name too long"."""
    assert ss.Slurm(python=f"container run {'--env=A ' * 40}python")


def test_valid_fields_survive_pickling() -> None:
    target = ss.Slurm(
        partition="a100", time="1-12", setup=["module load cuda"], extra={"mem": "64G", "exclusive": True}
    )
    again = pickle.loads(pickle.dumps(target))
    assert again == target and dict(again.extra) == dict(target.extra) and hash(again) == hash(target)


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        *((5, 5), ("90", 90), ("30:30", 31), ("2:00:00", 120), ("1-12", 2160), ("1-00:30", 1470)),
        *(("0:0:1", 1), ("UNLIMITED", 0), ("infinite", 0)),
    ],
)
def test_time_limits_are_read_as_slurm_reads_them(text: int | str, minutes: int) -> None:
    assert parse_minutes(text) == minutes


@pytest.mark.parametrize(
    ("target", "default", "is_refused"),
    [
        (ss.Slurm(time=1), 60, True),
        (ss.Slurm(time=2), 60, False),
        (ss.Slurm(), 1, True),
        (ss.Slurm(), 0, False),
        (ss.Slurm(), None, False),
        (ss.Slurm(time="10:00", extra={"signal": "USR2@600"}), 60, True),
        (ss.Slurm(time="1:30", extra={"signal": "USR2@30"}), 60, False),
    ],
)
def test_a_time_limit_that_leaves_no_time_to_train_is_refused(
    target: ss.Slurm, default: int | None, is_refused: bool
) -> None:
    """Each of three attempts saved at once, and the run ended without a step."""
    partition = Partition("debug", default, PARTITION.nodes)
    with pytest.raises(FieldError, match=r"Slurm\.time") if is_refused else contextlib.nullcontext() as error:
        slurm_submission.check_time(target, partition)
    if error is not None:
        minutes = next(iter(error.value.fix_values.values()))
        slurm_submission.check_time(dataclasses.replace(target, time=minutes), partition)


def test_options_of_sbatch_are_named_with_their_place() -> None:
    """The fix was to leave them out, which is no request for memory."""
    untyped: Any = ss.Slurm
    with pytest.raises(FieldError, match=r"extra=\{'mem': \.\.\.\}"):
        untyped(partition="a100", mem="64G")
    with pytest.raises(FieldError, match="the plan's cluster"):
        untyped(gpus_per_node=8)
    for name, field in (("partitions", "partition"), ("queue", "partition"), ("timeout_min", "time")):
        with pytest.raises(FieldError, match=f"Nearest fix: '{field}'"):
            untyped(**{name: "1"})


def test_another_target_is_refused() -> None:
    for value in ("slurm", ss.Slurm, 3):
        with pytest.raises(FieldError, match=r"launch\.on"):
            ss.launch(make_plan("2xcpu"), print, on=value)  # type: ignore[arg-type]
    for retries in (-1, True, 1.5):
        with pytest.raises(FieldError, match=r"launch\.retries"):
            ss.launch(make_plan("2xcpu"), print, on=ss.Slurm(), retries=retries)  # type: ignore[arg-type]


def test_a_machine_without_slurm_or_submitit_is_told_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(slurm_submission.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ImportError, match=r"shardscope\[slurm\]"):
            slurm_submission.check_submission(make_plan("2xcpu"), ss.Slurm(), tmp_path, force=False)
    skip_without("submitit")
    with pytest.raises(FieldError, match="sbatch is not on PATH"):
        slurm_submission.check_submission(make_plan("2xcpu"), ss.Slurm(), tmp_path, force=False)


def test_importing_shardscope_imports_no_submitit() -> None:
    code = "import shardscope as ss, sys; ss.Slurm(); print({'submitit', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_lines_of_scontrol_are_parsed() -> None:
    (record,) = parse_records(JOB_LINE)
    assert record["Reason"] == "Resources" and record["Command"] == "/a b/c" and record["NodeList"] == ""


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu:8", (("", 8),)),
        ("gpu:a100:8(S:0-1),nvme:2", (("a100", 8),)),
        # Types that begin with a digit.
        ("gpu:4090:8", (("4090", 8),)),
        ("gpu:2080ti:4(S:0-1)", (("2080ti", 4),)),
        ("shard:16,gpu:h100:4,gpu:1g.10gb:7", (("h100", 4), ("1g.10gb", 7))),
        ("(null)", ()),
    ],
)
def test_gpus_of_a_node_are_read_as_slurm_writes_them(gres: str, gpus: tuple[tuple[str, int], ...]) -> None:
    record = {"NodeName": "n1", "Partitions": "main", "Gres": gres}
    (node,) = slurm_submission.select_nodes([record], "main")
    assert node.gpus == gpus


def test_slices_of_gpus_are_no_whole_gpus() -> None:
    """Seven slices beside four H100 counted as eleven H100, and the job asked for GPUs of any type."""
    mixed = Node("n1", "", "", 64, (("h100", 4), ("1g.10gb", 7)))
    pool = nodes.NodePool("partition gpu", (mixed,))
    with pytest.raises(FieldError, match=r"gpus_per_node is 8; allowed: 1 to 4 on 1 node"):
        nodes.check_nodes(make_plan("8xh100-sxm-80gb"), pool)
    nodes.check_nodes(make_plan("4xh100-sxm-80gb"), pool)
    assert str(nodes.build_cluster(pool, "h100-sxm-80gb", "gpu")) == "4xh100-sxm-80gb"
    slices = nodes.NodePool("partition mig", (Node("n2", "", "", 64, (("a100_1g.5gb", 7),)),))
    with pytest.raises(FieldError, match=r"plan\.cluster\.gpu is 'a100-sxm-40gb'"):
        nodes.check_nodes(make_plan("4xa100-sxm-40gb"), slices)
    with pytest.raises(FieldError, match=r"whole GPUs: .* 'a100_1g\.5gb' is a slice"):
        nodes.build_cluster(slices, None, "gpu")
    assert nodes.is_same_gpu("1g.10gb", "nvidia-a100-sxm4-80gb-mig-1g.10gb")


def test_fault_77_an_allocation_around_the_kernel_is_not_passed_on() -> None:
    environment = {"SLURM_NTASKS": "9", "SBATCH_QOS": "x", "SLURM_CONF": "/etc/slurm.conf", "HOME": "/h"}
    assert clean_environment(environment) == {"SLURM_CONF": "/etc/slurm.conf", "HOME": "/h"}


SBATCH_VARIABLES = {
    "SBATCH_ACCOUNT": "physics",
    "SBATCH_QOS": "high",
    "SBATCH_TIMELIMIT": "1:30:00",
    "SBATCH_RESERVATION": "school",
    "SBATCH_MEM_PER_NODE": "64G",
    "SBATCH_EXPORT": "NONE",
    "SBATCH_NODES": "7",
}


def submit_with_variables(
    monkeypatch: pytest.MonkeyPatch, commands: Path, target: ss.Slurm, folder: Path
) -> tuple[str, dict[str, Any]]:
    """Return the script that sbatch gets and its environment. sbatch lets the latter override the former."""
    for name, value in SBATCH_VARIABLES.items():
        monkeypatch.setenv(name, value)
    write_command(commands, "sbatch", f"cp $1 {commands}/job; env > {commands}/env; echo batch job 7\n")
    ss.launch(make_plan("2x1xcpu"), print, on=target, folder=folder, name="a", force=True)
    lines = (commands / "env").read_text().splitlines()
    passed = {name for name, _, _ in (line.partition("=") for line in lines) if name.startswith("SBATCH_")}
    assert not passed
    return (commands / "job").read_text(), json.loads((folder / "a" / "run.json").read_text())


def test_sbatch_variables_are_used_for_what_the_target_leaves_open(
    commands: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They were removed with the variables of an allocation: SBATCH_QOS and the like had no effect."""
    script, description = submit_with_variables(monkeypatch, commands, ss.Slurm(), tmp_path / "runs")
    for option in ("account=physics", "qos=high", "time=90", "reservation=school", "mem=64G", "nodes=2"):
        assert f"#SBATCH --{option}\n" in script
    # A resumed run is submitted with them from another environment, too.
    assert description["on"]["fields"]["account"] == "physics"


def test_fields_of_the_target_are_used_before_sbatch_variables(
    commands: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """sbatch took SBATCH_ACCOUNT even if ``ss.Slurm(account=)`` named another project."""
    extra = {"reservation": "exam", "mem_per_cpu": "2G"}
    target = ss.Slurm(account="chemistry", qos="low", time=5, extra=extra)
    script, _ = submit_with_variables(monkeypatch, commands, target, tmp_path / "runs")
    for option in ("account=chemistry", "qos=low", "time=5", "reservation=exam", "mem-per-cpu=2G"):
        assert f"#SBATCH --{option}\n" in script
    assert "--mem=" not in script and "physics" not in script


TWO_PARTITIONS = """
case $2 in
partition) echo PartitionName=small MaxTime=30:00 State=UP
    echo PartitionName=big Default=YES MaxTime=1:00:00 State=UP
    echo PartitionName=long DefaultTime=2:00:00 MaxTime=UNLIMITED State=UP ;;
node) for name in n1 n2 n3; do
    small=$([ $name = n1 ] && echo small,)
    echo NodeName=$name NodeAddr=127.0.0.1 NodeHostName=$name CPUTot=4 State=IDLE Partitions=${small}big,long
done ;;
esac
"""


def test_a_list_of_partitions_and_no_time_limit_are_taken_as_by_sbatch(
    commands: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both were refused. Of the list, ``small`` has one node, and the plan needs two."""
    write_command(commands, "scontrol", TWO_PARTITIONS)
    monkeypatch.setitem(SBATCH_VARIABLES, "SBATCH_PARTITION", "small,long,big")
    monkeypatch.setitem(SBATCH_VARIABLES, "SBATCH_TIMELIMIT", "UNLIMITED")
    script, description = submit_with_variables(monkeypatch, commands, ss.Slurm(), tmp_path / "runs")
    assert "#SBATCH --partition=long,big\n" in script and "#SBATCH --time=0\n" in script
    assert description["on"]["fields"]["partition"] == "small,long,big"
    # Without a time limit, the default of the partition in which the job starts: it was the shortest.
    monkeypatch.delenv("SBATCH_TIMELIMIT")
    monkeypatch.delitem(SBATCH_VARIABLES, "SBATCH_TIMELIMIT")
    script, _ = submit_with_variables(monkeypatch, commands, ss.Slurm(), tmp_path / "more")
    assert "--time=" not in script
    big = ss.Slurm(partition="small,big,big")
    script, _ = submit_with_variables(monkeypatch, commands, big, tmp_path / "third")
    assert "#SBATCH --partition=big\n" in script and "#SBATCH --time=60\n" in script
    with pytest.raises(FieldError, match=r"num_nodes is 2.*partition small"):
        ss.launch(make_plan("2x1xcpu"), print, on=ss.Slurm(partition="small"), force=True)
    with pytest.raises(FieldError, match=r"Slurm\.partition is 'bog'.*'big'"):
        ss.launch(make_plan("2x1xcpu"), print, on=ss.Slurm(partition="long,bog"), force=True)


def test_several_clusters_are_refused(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's id would mean another one there, which a stop of the run would cancel."""
    for clusters in ("cpu,gpu", "ALL"):
        monkeypatch.setenv("SLURM_CLUSTERS", clusters)
        with pytest.raises(FieldError, match=rf"SLURM_CLUSTERS is '{clusters}'.*one cluster"):
            ss.launch(make_plan("2x1xcpu"), print, on=ss.Slurm(), force=True)


def test_the_users_cluster_and_token_are_passed_on() -> None:
    """Sites with tokens refused the job, and one for another cluster was submitted to this one."""
    environment = {"SLURM_JWT": "daemon", "SLURM_CLUSTERS": "gpu", "SLURM_JOB_ID": "3"}
    assert clean_environment(environment) == {"SLURM_JWT": "daemon", "SLURM_CLUSTERS": "gpu"}


def test_commands_of_the_job_get_neither_token_nor_cluster(
    commands: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """sbatch passes both on: hours later, an expired token would refuse the requeue at the time limit."""
    monkeypatch.setenv("SLURM_JWT", "short-lived")
    monkeypatch.setenv("SLURM_CLUSTERS", "gpu")
    script, _ = submit_with_variables(monkeypatch, commands, ss.Slurm(setup=["env"]), tmp_path / "runs")
    assert "SLURM_JWT=short-lived\n" in (commands / "env").read_text()
    lines, _, _ = script.partition("# command\n")
    printed = subprocess.run(["bash", "-c", lines], capture_output=True, text=True, check=True).stdout
    assert "PATH=" in printed and "SLURM_JWT" not in printed and "SLURM_CLUSTERS" not in printed


def test_a_wrong_sbatch_variable_is_named(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_TIMELIMIT", "forever")
    with pytest.raises(FieldError, match=r"SBATCH_TIMELIMIT is 'forever'.*unset SBATCH_TIMELIMIT"):
        ss.launch(make_plan("2x1xcpu"), print, on=ss.Slurm(), force=True)


def test_a_job_whose_id_is_not_understood_is_cancelled(commands: Path, tmp_path: Path) -> None:
    """Such as by a site's own sbatch: the launch raised, and the job ran on without a run."""
    write_command(commands, "sbatch", "echo 7\n")
    with pytest.raises(FieldError, match=r"launch\.on"):
        ss.launch(make_plan("2x1xcpu"), print, on=ss.Slurm(), name="a", folder=tmp_path / "runs", force=True)
    assert (commands / "cancelled").read_text().startswith("--name=shardscope-a-")


def test_the_job_has_no_wckey_of_submitit(tmp_path: Path) -> None:
    """Sites that enforce wckeys refuse "submitit"."""
    skip_without("submitit")
    from submitit.slurm.slurm import _make_sbatch_string

    for extra in ({}, {"wckey": "ours"}):
        target, folder = ss.Slurm(extra=extra), RunFolder(tmp_path / "run")
        parameters: dict[str, Any] = build_parameters(
            folder, make_plan("2x4xa100-sxm-80gb"), target, PARTITION, starts_again=False
        )
        script = _make_sbatch_string(command="true", folder=tmp_path, **parameters)
        assert "submitit" not in script.partition("# command")[0].replace(str(tmp_path), "")
        assert ("#SBATCH --wckey=ours" in script) == bool(extra)


def test_a_torch_without_cuda_on_the_nodes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason was "module 'torch._C' has no attribute '_cuda_setDevice'"."""
    torch = needs("torch")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(RuntimeError, match=r"built without CUDA\. Fix: .*ss\.Slurm\(python="):
        check_cuda_build()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    check_cuda_build()


def test_parameters_follow_the_plan(tmp_path: Path) -> None:
    plan = make_plan("2x4xa100-sxm-80gb")
    target = ss.Slurm(qos="high", setup=["module load cuda"], extra={"mem": "64G"})
    folder = RunFolder(tmp_path / "my run")
    parameters = build_parameters(folder, plan, target, PARTITION, starts_again=False)
    assert parameters["nodes"] == 2 and parameters["ntasks_per_node"] == 1 and parameters["time"] == 60
    assert str(parameters["job_name"]).startswith("shardscope-my-run-") and parameters["qos"] == "high"
    again = build_parameters(folder, plan, target, PARTITION, starts_again=False)
    assert again["job_name"] != parameters["job_name"], "a job is cancelled by its name"
    additional = parameters["additional_parameters"]
    assert isinstance(additional, dict)
    # Half of the node's GPUs, so half of its cores.
    assert additional["gres"] == "gpu:a100:4" and additional["cpus-per-task"] == 32
    assert additional["no-requeue"] is True and additional["mem"] == "64G"


def test_cores_are_the_least_share_of_a_node_with_enough_gpus(tmp_path: Path) -> None:
    """Nodes with 64 cores and 8 GPUs, or 16 and 2, have 8 a GPU: 2 GPUs had 1 core, for another node's 4."""
    members = [Node(f"n{cpus}", "", "", cpus, (("a100", num),)) for cpus, num in ((64, 8), (16, 2), (4, 1))]
    both = Partition("large,small", None, tuple(members))
    plan = make_plan("2x2xa100-sxm-80gb")
    parameters = build_parameters(RunFolder(tmp_path), plan, ss.Slurm(), both, starts_again=False)
    assert parameters["srun_args"] == ["--cpus-per-task=16"] and parameters["time"] is None


def test_partitions_whose_gpus_have_another_name_are_left_out_if_there_are_other_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The job requested 4 GPUs of any type, and could start on nodes with V100."""
    skip_without("submitit")

    def make_partition(name: str, *kinds: str) -> Partition:
        members = (
            Node(f"{name}-{number}-{kind}", "", "", 64, ((kind, 4),)) for kind in kinds for number in (1, 2)
        )
        return Partition(name, 60, tuple(members))

    mixed, unnamed = make_partition("gpu", "a100", "v100"), make_partition("old", "")
    only = make_partition("new", "a100")
    plan = make_plan("2x4xa100-sxm-80gb")
    for partitions, name, gres in (
        ((mixed, unnamed, only), "gpu,new", "gpu:a100:4"),
        ((only, unnamed), "new,old", "gpu:4"),
        ((unnamed, mixed), "old", "gpu:4"),
    ):
        by_name = {one.name: one for one in partitions}
        monkeypatch.setattr(slurm_submission, "read_partition", by_name.__getitem__)
        monkeypatch.setattr(shutil, "which", str)
        target = ss.Slurm(partition=",".join(by_name))
        joined = slurm_submission.check_submission(plan, target, tmp_path, force=True)
        parameters = build_parameters(RunFolder(tmp_path), plan, target, joined, starts_again=False)
        assert joined.name == name and f"'gres': '{gres}'" in str(parameters["additional_parameters"])


def test_other_resources_and_cores_per_gpu_are_added_to_the_plans(tmp_path: Path) -> None:
    """Local disks were refused, and Slurm refused cores per GPU beside those per task."""
    plan, target = make_plan("2x4xa100-sxm-80gb"), ss.Slurm(extra={"gres": "lscratch:100", "cpus-per-gpu": 3})
    parameters = build_parameters(RunFolder(tmp_path), plan, target, PARTITION, starts_again=False)
    assert parameters["additional_parameters"] == {
        "no-requeue": True,
        "gres": "gpu:a100:4,lscratch:100",
        "cpus-per-task": 12,
    }
    assert parameters["srun_args"] == ["--cpus-per-task=12"]


@pytest.mark.parametrize(
    ("cluster", "field"),
    [
        ("3x8xa100-sxm-80gb", "plan.cluster.num_nodes"),
        ("2x8xh100-sxm-80gb", "plan.cluster.gpu"),
        ("2x16xa100-sxm-80gb", "plan.cluster.gpus_per_node"),
    ],
)
def test_a_plan_larger_than_the_partition_is_refused(cluster: str, field: str) -> None:
    recipe = ss.Recipe(seq_len=64, global_batch_size=96)
    plan = ss.Plan(ss.Architecture.of_size("2m"), ss.Cluster.parse(cluster), recipe, ss.Layout.ddp())
    with pytest.raises(FieldError) as refused:
        nodes.check_nodes(plan, PARTITION.pool)
    assert refused.value.field == field and "partition a100: 2 nodes with 8 a100 GPUs" in str(refused.value)


def test_fault_74_a_local_folder_is_refused_for_other_machines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(nodes, "find_file_system", lambda path: "ext4")
    with pytest.raises(FieldError, match=r"launch\.folder.*ext4"):
        nodes.check_folder(tmp_path, PARTITION.pool)
    monkeypatch.setattr(nodes, "find_file_system", lambda path: "nfs4")
    nodes.check_folder(tmp_path, PARTITION.pool)


def test_fault_74_a_node_without_the_folder_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(node_process, "VISIBLE_SECONDS", 0.1)
    monkeypatch.setenv("SLURM_NODEID", "1")
    with pytest.raises(FileNotFoundError, match="a run needs a shared folder"):
        node_process.run_node(str(tmp_path / "run"))


def test_this_machine_finds_its_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert find_address("127.0.0.1")[0] == "127.0.0.1"


def make_nodes(tmp_path: Path) -> tuple[NodeFolder, NodeFolder]:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    (folder.path / "nodes").mkdir()
    nodes = NodeFolder(folder.path, 0, 2), NodeFolder(folder.path, 1, 2)
    for node in nodes:
        node.create_own()
        write_json(node.supervisor, {"pid": 1})
        write_json(node.node_json, {"name": f"n{node.node}"})
    return nodes


def test_a_silent_node_is_lost_and_an_ended_one_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, second = make_nodes(tmp_path)
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    peers, others = Peers(first), Peers(second)
    for _ in range(20):
        peers.look()
        others.look()
        now[0] += 1
    assert peers.describe_lost() == "" and not peers.is_every_end_known()
    now[0] += 1
    peers.look()
    assert peers.describe_lost() == "node 1 (n1) is lost: no sign of it for 21 s"
    assert others.describe_lost() == "node 0 (n0) is lost: no sign of it for 21 s"
    write_json(second.ended, {"status": "failed", "reason": "rank 1 raised"})
    peers.look()
    assert peers.describe_lost() == "" and peers.is_every_end_known()
    failed = peers.find_failed()
    assert failed is not None and (failed.node, failed.status) == (1, "failed")


def test_a_node_is_not_lost_while_the_job_is_suspended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Slurm stops the processes on all nodes, and the first that runs again must not end the run."""
    first, _ = make_nodes(tmp_path)
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    peers = Peers(first)
    peers.look()
    now[0] += 3600
    peers.look()
    assert peers.describe_lost() == "" and not peers.is_every_end_known()
    for _ in range(21):
        now[0] += 1
        peers.look()
    assert "node 1 (n1) is lost" in peers.describe_lost()


def test_a_node_on_which_slurm_starts_no_process_is_lost_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The run folder is not visible there, so that its Slurm cannot open the logs."""
    first, second = make_nodes(tmp_path)
    second.supervisor.unlink()
    second.node_json.unlink()
    commands = tmp_path / "bin"
    write_command(commands, "scontrol", "echo n7; echo n9\n")
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    peers = Peers(first)
    (first.path / "slurm").mkdir()
    (first.path / "slurm" / "7_0_log.err").write_text(
        "module: command not found\nsrun: error: task 1 launch failed: Slurmd could not connect IO\n"
    )
    now[0] += 6
    peers.look()
    lost = peers.describe_lost()
    assert "node 1" in lost and "on n9" in lost and "Slurmd could not connect IO" in lost
    assert str(first.path) in lost and peers.is_every_end_known() and peers.list_lost_names() == ["n9"]
    # The error named nodes/<node>/supervisor.log, which such a node has not.
    assert describe_node_logs(first, peers.lost) == " Logs in the run folder: slurm/7_0_log.err."
    peers_folder = first.create_peer(1)
    peers_folder.own.mkdir(exist_ok=True)
    peers_folder.supervisor_log.write_text("")
    assert describe_node_logs(first, peers.lost) == " Logs in the run folder: nodes/1/supervisor.log."


def test_nodes_have_ranks_and_files_of_their_own(tmp_path: Path) -> None:
    first, second = make_nodes(tmp_path)
    assert first.select_ranks(8) == range(4) and second.select_ranks(8) == range(4, 8)
    own = ("supervisor", "supervisor_log", "exits", "launcher_error", "launcher_log", "temporary", "status")
    assert not {getattr(first, name) for name in own} & {getattr(second, name) for name in own}
    assert first.status == RunFolder(first.path).status and first.events(5) == second.events(5)


def write_queued_run(parent: Path) -> RunFolder:
    """Write the folder of a run whose job, number 7, has not started."""
    folder = RunFolder(parent / "run")
    folder.create()
    (folder.path / "nodes").mkdir()
    folder.set_status("queued", "being submitted")
    description = {
        "world_size": 2,
        "num_nodes": 2,
        "created": 1.0,
        "plan": json.loads(make_plan("2xcpu").to_json()),
    }
    write_json(folder.run_json, description)
    write_json(folder.job, {"job_id": "7"})
    return folder


def write_command(folder: Path, name: str, script: str, mode: int = 0o755) -> None:
    """Write a stand-in for a command of Slurm."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"#!/bin/sh\n" + script.encode("latin-1"))
    (folder / name).chmod(mode)


@pytest.mark.parametrize(
    ("job", "stops", "status", "text"),
    [
        (Job("PENDING", "Resources", "2026-11-27T14:05:00", "", False), [], "queued", "2026-11-27 14:05:00"),
        (Job("RUNNING", "", "", "n[1-2]", False), [], "starting", "n[1-2]"),
        (Job("CANCELLED", "", "", "", False), [], "stopped", "cancelled (scancel) job 7 before it started"),
        (Job("CANCELLED", "", "", "", False), [{"command": "stop"}], "stopped", "run.stop() was called"),
        (Job("FAILED", "", "", "", False), [], "failed", "ended as FAILED"),
        (Job("FAILED", "", "", "n7", False), [], "failed", "most likely its nodes (n7) do not see /"),
        (None, [], "failed", "not known to Slurm any more"),
    ],
)
def test_status_before_a_node_has_started(
    job: Job | None,
    stops: list[dict[str, object]],
    status: str,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    folder = write_queued_run(tmp_path)
    for stop in stops:
        append_line(folder.control, stop)
    monkeypatch.setattr(job_watch, "read_job", lambda job_id: job)
    monkeypatch.setattr(job_watch, "PATIENCE_SECONDS", 0.0)
    run = ss.Run.attach(folder.path)
    while run.reason == "job 7":  # Slurm is asked in a thread.
        pass
    assert run.status == status and text in run.reason


def test_a_job_that_has_just_ended_is_not_being_submitted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Until the files of its nodes would be visible, its run was "queued: being submitted"."""
    folder = write_queued_run(tmp_path)
    monkeypatch.setattr(job_watch, "read_job", lambda job_id: Job("CANCELLED", "", "", "n[1-2]", False))
    run = ss.Run.attach(folder.path)
    assert wait_until(lambda: "job 7 has ended (CANCELLED)" in run.reason)
    assert run.status == "stopping" and "submitted" not in run.reason
    # One that never had nodes has no files that may come.
    monkeypatch.setattr(job_watch, "read_job", lambda job_id: Job("CANCELLED", "", "", "", False))
    run = ss.Run.attach(folder.path)
    assert wait_until(lambda: run.status == "stopped")


def test_commands_that_read_the_status_once_report_the_end_of_a_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each began to wait for the nodes' files again: `shardscope runs` said "stopping" for good."""
    folder = write_queued_run(tmp_path)
    seen = folder.path / "slurm" / job_watch.END_SEEN
    seen.parent.mkdir()
    job = Job("FAILED", "", "", "n[1-2]", preempted=False)
    monkeypatch.setattr(job_watch, "read_job", lambda job_id: job)
    run = ss.Run.attach(folder.path)
    assert wait_until(lambda: run.status == "stopping")
    record = json.loads(seen.read_text())
    # Another attempt has its own end, and so has what another machine's clock stamped.
    for changed in ({"restarts": 1}, {"machine": "login2"}):
        write_json(seen, {**record, "time": record["time"] - 60, **changed})
        run = ss.Run.attach(folder.path)
        assert wait_until(lambda run=run: run.status == "stopping"), run.reason
    # A minute later, in another process.
    write_json(seen, {**record, "time": record["time"] - 60})
    run = ss.Run.attach(folder.path)
    assert wait_until(lambda: run.status == "failed") and "job 7 ended as FAILED" in run.reason


def test_the_reason_of_a_job_that_starts_is_not_that_of_its_submission(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After node 0 had recorded the beginning, the reason was "being submitted; job 7 has started"."""
    folder = write_queued_run(tmp_path)
    write_beginning(NodeFolder(folder.path, 0, 2), checkpoint=None, from_step=0, control_bytes=0)
    monkeypatch.setattr(job_watch, "read_job", lambda job_id: Job("RUNNING", "", "", "n[1-2]", False))
    run = ss.Run.attach(folder.path)
    assert wait_until(lambda: run.reason == "job 7 has started on n[1-2]")


def test_a_stop_that_slurm_has_not_heard_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its job waited on, and nothing said so."""
    folder = write_queued_run(tmp_path)
    monkeypatch.setattr(job_watch, "read_job", lambda job_id: Job("PENDING", "Resources", "", "", False))
    append_line(folder.control, {"command": "stop", "time": time.time() - 60})
    run = ss.Run.attach(folder.path)
    assert wait_until(lambda: "ends it when it starts, and run.stop() or scancel 7" in run.reason)
    assert run.status == "queued" and run.reason.startswith("job 7 waits: Resources; the stop")


def test_a_stop_does_not_wait_for_a_controller_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The notebook waited with it for 19 s."""
    answers, cancelled = threading.Event(), threading.Event()

    def cancel(job_id: str) -> None:
        answers.wait(60)
        cancelled.set()

    monkeypatch.setattr(control, "CANCEL_SECONDS", 0.1, raising=False)
    monkeypatch.setattr(control, "cancel_waiting", cancel)
    monkeypatch.setattr(job_watch, "read_job", lambda job_id: Job("PENDING", "Resources", "", "", False))
    run = ss.Run.attach(write_queued_run(tmp_path).path)
    assert wait_until(lambda: run.reason == "job 7 waits: Resources")
    run.stop()
    assert not cancelled.is_set()
    answers.set()
    assert cancelled.wait(10)


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("Resources", "job 7 waits: Resources"),
        ("JobHeldUser", "job 7 waits: JobHeldUser (it is held until you release it: scontrol release 7)"),
        ("PartitionTimeLimit", "another ss.Slurm(time=)"),
        ("ReqNodeNotAvail,_UnavailableNodes:n[1-2]", "ReqNodeNotAvail, UnavailableNodes:n[1-2] (sinfo -R"),
        ("launch_failed_requeued_held", "launch failed requeued held (a node could not start it"),
        ("job_requeued_in_held_state", "scontrol release 7"),
        ("PartitionConfig", "it may never start"),
        ("QOSMaxWallDurationPerJobLimit", "it may never start"),
        ("QOSMinGRES", "it may never start"),
        ("AssocMaxNodePerJobLimit", "number of nodes"),
        ("AssocGrpCPUMinutesLimit", "too little is left of the budget"),
        ("AssocGrpGRESRunMinutes", "it starts when other jobs"),
        ("QOSMaxJobsPerUserLimit", "it starts when other jobs"),
        ("AssocGrpGRES", "it starts when other jobs"),
        ("QOSMaxGRESPerUser", "or never if it alone"),
        ("MaxGRESPerAccount", "it starts when other jobs"),
        ("MaxGRESRunMinsPerUser", "it starts when other jobs"),
    ],
)
def test_a_reason_that_needs_somebody_to_act_has_advice(reason: str, text: str) -> None:
    state = job_watch.describe_live_job("7", Job("PENDING", reason, "", "", preempted=False))
    assert state["status"] == "queued" and text in str(state["reason"])
    assert ("(" in str(state["reason"])) == (reason != "Resources")


def test_a_suspended_job_is_named_and_its_run_is_not_ending(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = write_queued_run(tmp_path)
    folder.set_status("running", "2 ranks at work")
    node = NodeFolder(folder.path, 0, 2)
    node.create_own()
    # A process of this machine that is gone; on another machine a heartbeat that does not come.
    write_json(node.supervisor, {"pid": 2**30, "started": 1.0, "machine": identify_machine()})
    job = Job("SUSPENDED", "", "", "n[1-2]", preempted=False, requeues=True)
    monkeypatch.setattr(job_watch, "read_job", lambda job_id: job)
    run = ss.Run.attach(folder.path)
    assert wait_until(lambda: "suspended job 7" in run.reason)
    assert run.status == "running"


def test_slurm_is_asked_again_after_every_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder, commands = write_queued_run(tmp_path), tmp_path / "bin"
    monkeypatch.setenv("PATH", str(commands))
    monkeypatch.setattr(job_watch, "ASK_SECONDS", 0.0)
    # The process limit is reached, say: the command cannot be started.
    write_command(commands, "scontrol", "", mode=0o600)
    run = ss.Run.attach(folder.path)
    assert wait_until(lambda: "scontrol could not be started: Permission denied" in run.reason)
    assert run.status == "queued"
    # The administrator's comment is not in UTF-8.
    write_command(commands, "scontrol", f"echo '{JOB_LINE.strip()} Comment=M\xfcller'")
    assert wait_until(lambda: run.reason.startswith("job 7 waits: Resources"))

    # Any other error, which is not foreseen.
    def fail(job_id: str) -> None:
        raise LookupError

    monkeypatch.setattr("threading.excepthook", lambda arguments: None)
    monkeypatch.setattr(job_watch, "read_job", fail)
    assert wait_until(lambda: "its answer was not understood" in run.reason)
    assert run.status == "queued"
    monkeypatch.setattr(job_watch, "read_job", lambda job_id: Job("RUNNING", "", "", "node1", False))
    assert wait_until(lambda: run.reason == "job 7 has started on node1")


def test_the_reason_of_a_failed_job_is_the_cause_in_its_log(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    (folder.path / "slurm").mkdir(parents=True)
    log = folder.path / "slurm" / "7_0_log.err"
    # As of Slurm with a ss.Slurm(python=) that the nodes do not have.
    cause = "slurmstepd-node1: error: execve(): /opt/python: No such file or directory"
    code = "srun: error: node{0}: task {0}: Exited with exit code 2"
    text = f"{code.format(2)}\n{cause}\n{code.format(1)}\nsrun: Terminating StepId=7.0"
    log.write_text(f"{text}\n")
    # The line and the whole end: one line alone may be general advice, and the path was missing.
    assert read_job_log(folder) == (
        cause,
        f"The end of the job's log, slurm/7_0_log.err in the run folder:\n{text}",
    )
    log.write_text(f"{code.format(1)}\n")
    assert read_job_log(folder)[0] == code.format(1)
    for blank in ("", "\n"):
        log.write_text(blank)
        assert read_job_log(folder) == ("", "") and find_job_log(folder) is None


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("slurmstepd: error: execve(): /opt/python: No such file or directory", "ss.Slurm(python=...)"),
        (
            "/usr/bin/python3: Error while finding module specification for 'submitit.core._submit' "
            "(ModuleNotFoundError: No module named 'submitit')",
            'pip install "shardscope[slurm]"',
        ),
        ("slurmstepd: error: Detected 1 oom_kill event", ""),
    ],
)
def test_a_python_that_the_nodes_lack_has_a_fix(line: str, advice: str) -> None:
    assert advice in advise(line) and bool(advise(line)) == bool(advice)


@pytest.mark.parametrize("sets_e", [False, True])
def test_a_failed_line_of_the_setup_is_named(sets_e: bool, tmp_path: Path) -> None:
    """Without `set -e` the job went on, and nothing said that its module was not loaded."""
    folder = RunFolder(tmp_path / "run")
    (folder.path / "slurm").mkdir(parents=True)
    log, script = folder.path / "slurm" / "7_0_log.err", tmp_path / "job.sh"
    lines = [
        "module() { echo 'Unknown module: cuda/99' >&2; echo 'Try module spider' >&2; return 3; }",
        *(["set -e"] if sets_e else []),
        "if false; then echo; fi",
        # A command of a sourced file may fail, as a test of its own would.
        *([] if sets_e else [f"source {tmp_path}/environment.sh"]),
        "for name in cuda/99; do",
        '  module load "$name"',
        "done",
        "false || true",
    ]
    (tmp_path / "environment.sh").write_text("false\nexport READY=1\n")
    script.write_text("\n".join([*watch_setup(lines), "false", "echo started", ""]))
    with log.open("w") as errors:
        done = subprocess.run(
            ["bash", str(script)], check=False, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    assert done.stdout == ("" if sets_e else "started\n")
    assert describe_failed_setup(folder) == (
        "ss.Slurm(setup=...) failed in 'module load \"$name\"' (exit code 3)"
    )
    assert read_job_log(folder)[0] == "Try module spider"
    assert watch_setup([]) == [] and watch_setup(["trap 'echo' ERR"]) == ["trap 'echo' ERR"]


SCONTROL = """
case $2 in
partition) echo PartitionName=main Default=YES MaxTime=1:00:00 State=UP ;;
node) for name in n1 n2; do
    echo NodeName=$name NodeAddr=127.0.0.1 NodeHostName=$name CPUTot=4 State=IDLE Partitions=main
done ;;
esac
"""


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a folder on PATH with stand-ins for Slurm's commands; scancel writes its arguments there."""
    skip_without("submitit")
    folder = tmp_path / "bin"
    write_command(folder, "scontrol", SCONTROL)
    write_command(folder, "scancel", f"echo $@ >> {folder}/cancelled\n")
    write_command(folder, "sbatch", "")
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def _list_command_lines() -> list[list[str]]:
    return [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]


def test_a_job_is_not_submitted_after_a_launch_without_an_answer(
    commands: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_command(commands, "sbatch", f"touch {commands}/began\nsleep 60\ntouch {commands}/submitted\n")
    # In place of Python with submitit, whose import takes longer than this test.
    write_command(commands, "python", "sbatch\necho 7\n")
    monkeypatch.setattr(sys, "executable", str(commands / "python"))
    monkeypatch.setattr(slurm_submission, "SUBMIT_SECONDS", 2.0)
    with pytest.raises(OSError, match=r"^sbatch did not answer within 2 s$"):
        ss.launch(make_plan("2x1xcpu"), print, on=ss.Slurm(), name="a", folder=tmp_path / "runs", force=True)
    assert (commands / "cancelled").read_text().startswith("--name=shardscope-a-")
    assert not (tmp_path / "runs").exists()
    assert (commands / "began").exists() and not (commands / "submitted").exists()
    sbatch = str(commands / "sbatch")
    assert wait_until(lambda: not any(sbatch in line for line in _list_command_lines())), "it would submit"


@pytest.mark.parametrize(
    ("name", "parent", "field", "fix"),
    [
        ("lr 50%n keep", "runs", "launch.name", "'lr 50_n keep'"),
        ("100%%", "runs", "launch.name", "'100__'"),
        ("a", "of%2j", "launch.folder", "of_2j'"),
    ],
)
def test_a_path_that_slurm_would_replace_is_refused(
    name: str, parent: str, field: str, fix: str, commands: Path, tmp_path: Path
) -> None:
    """Its job would fail without a log, as the nodes cannot create one."""
    with pytest.raises(FieldError) as refused:
        ss.launch(make_plan("2x1xcpu"), print, on=ss.Slurm(), name=name, folder=tmp_path / parent, force=True)
    assert refused.value.field == field and f"{fix}." in str(refused.value)
    assert not (tmp_path / parent).exists()


def test_a_path_with_another_percent_sign_is_submitted(commands: Path, tmp_path: Path) -> None:
    write_command(commands, "sbatch", "echo Submitted batch job 7\n")
    run = ss.launch(
        make_plan("2x1xcpu"), print, on=ss.Slurm(), name="lr 50%", folder=tmp_path / "runs", force=True
    )
    assert "job 7" in run.target


@pytest.mark.parametrize(
    ("message", "causes"),
    [
        ("sbatch: error: No project given\nsbatch: error: Batch job submission failed: Unspecified error", 2),
        ("sbatch: unrecognized option '--memm=4G'\nTry \"sbatch --help\" for more information", 1),
    ],
)
def test_a_refused_job_raises_all_that_sbatch_names(
    message: str, causes: int, commands: Path, tmp_path: Path
) -> None:
    """The last line alone is general: a site's own check of a job names the cause before it."""
    (tmp_path / "message").write_text(message + "\n")
    write_command(commands, "sbatch", f"cat {tmp_path}/message >&2\nexit 1\n")
    with pytest.raises(FieldError) as refused:
        ss.launch(make_plan("2x1xcpu"), print, on=ss.Slurm(), folder=tmp_path / "runs", force=True)
    for line in message.splitlines()[:causes]:
        assert line.removeprefix("sbatch: ").removeprefix("error: ") in str(refused.value)
    assert "--help" not in str(refused.value) and "sbatch:" not in str(refused.value)


def test_an_id_that_cannot_be_written_raises_the_cause(
    commands: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not the error of cancelling the job, which is a note of it."""
    write_command(commands, "scancel", "echo no controller >&2; exit 1\n")
    # The disk is full, say.
    write_command(commands, "python", f"mkdir {tmp_path}/runs/a/job.json\necho 7\n")
    monkeypatch.setattr(sys, "executable", str(commands / "python"))
    with pytest.raises(OSError, match=r"job\.json is damaged") as failed:
        ss.launch(make_plan("2x1xcpu"), print, on=ss.Slurm(), name="a", folder=tmp_path / "runs", force=True)
    assert "Job 7 could not be cancelled: scancel: no controller" in "".join(format_exception(failed.value))


@pytest.mark.parametrize(
    ("kinds", "gpu", "expected"),
    [
        ([(("h200", 8),)] * 3, None, "3 h200-sxm-141gb 8"),
        ([(("a100", 4),)] * 2, "a100-sxm-80gb", "2 a100-sxm-80gb 4"),
        ([(("nvidia_a100_80gb", 4),)] * 2, None, "2 a100-sxm-80gb 4"),
        ([(("", 8),)] * 2, "h100-sxm-80gb", "2 h100-sxm-80gb 8"),
        ([(), (("h200", 8),), (("h200", 4),), (("h200", 4),)], None, "2 h200-sxm-141gb 4"),
        ([()] * 2, None, "2 cpu 2"),
        ([(("a100", 4),)] * 2, None, "a100-sxm-40gb, a100-sxm-80gb"),
        ([(("a100", 4),)] * 2, "h100-sxm-80gb", "a100-sxm-40gb, a100-sxm-80gb"),
        ([()] * 2, "h100-sxm-80gb", "no GPUs"),
    ],
)
def test_inventory_of_a_partition(
    kinds: list[Any], gpu: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = tuple(Node(f"n{i}", "", "", 64, gpus, 2**39) for i, gpus in enumerate(kinds))
    monkeypatch.setattr(slurm_submission, "read_partition", lambda name: Partition("main", 0, members))
    if "," in expected or expected == "no GPUs":
        with pytest.raises(FieldError, match=expected):
            ss.Slurm.inventory(gpu=gpu)
        return
    cluster = ss.Slurm.inventory(gpu=gpu)
    assert f"{cluster.num_nodes} {cluster.gpu.name} {cluster.gpus_per_node}" == expected
    assert cluster.host_memory_bytes == 2**39


def test_inventory_reads_the_partition_of_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An SBATCH_TIMELIMIT that only sbatch understands was refused here, too."""
    monkeypatch.setenv("SBATCH_PARTITION", "debug,main")
    monkeypatch.setenv("SBATCH_TIMELIMIT", "UNLIMITED")
    members = (Node("n0", "", "", 64, (("h200", 8),), 2**39),)
    of_name = {"debug": Partition("debug", 0, members)}
    monkeypatch.setattr(slurm_submission, "read_partition", of_name.__getitem__)
    assert ss.Slurm.inventory().gpus_per_node == 8


VERSIONS = {"python": "3.11.2", "torch": "2.13.0+cu128", "shardscope": "0.3.0", "accelerate": "1.14.0"}


@pytest.mark.parametrize(
    ("layout", "changed", "expected"),
    [
        ("fsdp2", {"python": "3.11.9", "torch": "2.13.1+cpu", "transformers": "4.1"}, ""),
        ("fsdp2", {"python": "3.12.1"}, "Python 3.12.1 on node 1 (b), Python 3.11.2 on node 0 (a)"),
        ("fsdp2", {"torch": "2.12.1"}, "install torch==2.13.0 on node 1 (b)"),
        ("fsdp2", {"shardscope": "0.3.1"}, "shardscope 0.3.1 on node 1 (b), shardscope 0.3.0"),
        ("fsdp2", {"accelerate": None}, "no accelerate on node 1 (b)"),
        ("fsdp2", {"deepspeed": "0.19.0"}, ""),
        ("zero", {"deepspeed": "0.19.0"}, "deepspeed 0.19.0 on node 1 (b), no deepspeed on node 0 (a)"),
    ],
)
def test_versions_of_nodes_are_compared(layout: str, changed: dict[str, object], expected: str) -> None:
    layouts = {"fsdp2": ss.Layout.fsdp2(), "zero": ss.Layout.zero(stage=3)}
    plan = json.loads(dataclasses.replace(make_plan("2x1xcpu"), layout=layouts[layout]).to_json())
    own = {name: version for name, version in {**VERSIONS, **changed}.items() if version is not None}
    text = describe_differences({"plan": plan}, VERSIONS, own, "node 0 (a)", "node 1 (b)")
    assert expected in text and bool(text) == bool(expected)


@pytest.mark.parametrize(
    ("visible", "num_ranks", "is_enough"),
    [
        (None, 8, True),
        ("0,1", 2, True),
        ("GPU-1a,GPU-2b,GPU-3c", 2, True),
        ("", 1, False),
        ("3,-1,2", 2, False),
    ],
)
def test_visible_gpus_of_a_node(visible: str | None, num_ranks: int, is_enough: bool) -> None:
    text = describe_missing_gpus(visible, num_ranks)
    assert (text == "") == is_enough and (is_enough or f"CUDA_VISIBLE_DEVICES={visible} shows" in text)


def test_the_time_limit_is_compared_with_the_controllers_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    # This node's clock is ten minutes behind.
    answers = {
        "job": JOB_LINE.replace("PENDING", "RUNNING"),
        "config": "Configuration data as of 2026-11-27T15:03:00\nKillWait = 30 sec\n",
    }
    for module in (slurm_job, end_notice):
        monkeypatch.setattr(module, "run_command", lambda *command: answers[command[2]], raising=False)
    now = slurm_job.parse_time("2026-11-27T14:53:00")
    monkeypatch.setattr(end_notice.time, "time", lambda: now)
    notice = end_notice.read_end_notice("7", 1, is_warning=True)
    assert (notice.kind, notice.seconds) == ("ending", 120 - end_notice.MARGIN_SECONDS)
