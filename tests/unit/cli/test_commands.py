"""The program ``shardscope``: commands that start no ranks, error messages and exit codes."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
import subprocess
import sys
import tomllib
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from written_runs import write_run

import shardscope as ss
from shardscope.cli.main import build_parser, main
from shardscope.records.attempts import write_beginning, write_end
from shardscope.records.folder import NodeFolder, RunFolder
from shardscope.records.json_files import append_line, write_json

ROOT = Path(__file__).parents[3]
COMMANDS = ("plan", "search", "export", "launch", "runs", "attach", "stop", "logs", "trace")
WITHOUT_TORCH = """
import sys
for name in ("torch", "transformers", "pandas", "plotly"):
    sys.modules[name] = None
from shardscope.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def run(folder: Path, *arguments: str, code: int = 0, text: str = "") -> str:
    """Run the program's ``main`` in ``folder`` and check its exit code. Return its output, or the errors."""
    output, errors = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
        warnings.catch_warnings(),  # main() shows warnings in its own way
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        try:
            ended: object = main(list(arguments))
        except SystemExit as ending:  # of argparse
            ended = ending.code
    assert ended == code, output.getvalue() + errors.getvalue()
    if code == 2:
        assert output.getvalue() == ""
    return output.getvalue() if code == 0 else errors.getvalue()


def run_json(folder: Path, *arguments: str) -> Any:
    return json.loads(run(folder, *arguments, "--json"))


def assert_fits_in_80_columns(text: str) -> None:
    assert max(map(len, text.splitlines())) <= 80, text


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "shardscope", "--version"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout == f"shardscope {ss.__version__}\n"


def test_the_installed_command_is_this_program() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["shardscope"].partition(":")
    assert callable(getattr(import_module(module), name))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example_and_json(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ending:
        build_parser().parse_args([command, "--help"])
    shown = capsys.readouterr().out
    assert ending.value.code == 0 and f"  shardscope {command}" in shown and "--json" in shown


def test_planning_needs_neither_torch_nor_pandas(tmp_path: Path) -> None:
    for arguments in (
        ["--help"],
        ["plan", "--help"],
        ["plan", "--model", "7b", "--cluster", "8xh100-sxm-80gb"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_TORCH, *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr


def test_plan_prints_what_the_library_predicts(tmp_path: Path) -> None:
    arguments = ["plan", "--model", "llama-3.1-8b", "--cluster", "8xh100-sxm-80gb", "--out", "plan.json"]
    options = ["--layout", "zero", "stage=2", "--recipe", "seq_len=8192", "precision=bf16"]
    shown = run(tmp_path, *arguments, *options)
    assert_fits_in_80_columns(shown)
    plan = ss.Plan(
        ss.models["llama-3.1-8b"],
        ss.Cluster.parse("8xh100-sxm-80gb"),
        ss.Recipe(seq_len=8192, precision="bf16"),
        ss.Layout.zero(stage=2),
    )
    assert ss.Plan.from_json((tmp_path / "plan.json").read_text()) == plan
    assert plan.memory().verdict in shown and f"{plan.step().seconds:.3g} s" in shown
    assert f"MFU {100 * plan.step().mfu:.0f} %" in shown
    # A stored plan, changed, and read from standard input.
    read = run_json(tmp_path, "plan", "plan.json", "--cluster", "2x8xh100-sxm-80gb", "--layout", "fsdp2")
    larger = ss.Plan(plan.architecture, ss.Cluster.parse("2x8xh100-sxm-80gb"), plan.recipe, ss.Layout.fsdp2())
    assert ss.Plan.from_json(json.dumps(read["plan"])) == larger
    assert read["memory"]["peak_bytes"] == larger.memory().peak_bytes
    assert read["memory"]["components"] == dict(larger.memory().components)
    assert read["step"]["seconds"] == larger.step().seconds
    assert [one["name"] for one in read["findings"]] == [one.name for one in larger.findings()]
    piped = json.loads(run(tmp_path, "plan", "-", "--json", text=plan.to_json()))
    assert ss.Plan.from_json(json.dumps(piped["plan"])) == plan


def test_search_ranks_plans_and_writes_the_best(tmp_path: Path) -> None:
    arguments = ["search", "--model", "2m", "--cluster", "2xl4-24gb", "--frameworks", "ddp", "zero"]
    recipe = ["--recipe", "seq_len=64", "global_batch_size=8"]
    found = run_json(tmp_path, *arguments, *recipe, "--limit", "3", "--out", "best.json")
    ranking = ss.search(
        ss.Architecture.of_size("2m"),
        ss.Cluster.parse("2xl4-24gb"),
        ss.Recipe(seq_len=64, global_batch_size=8),
        ["ddp", "deepspeed"],
    )
    assert found["num_evaluated"] == ranking.num_evaluated and len(found["plans"]) == 3
    best = ss.Plan.from_json((tmp_path / "best.json").read_text())
    assert best == ranking.best == ss.Plan.from_json(json.dumps(found["best"]))
    shown = run(tmp_path, *arguments, *recipe)
    assert_fits_in_80_columns(shown)
    assert f"{ranking.num_feasible:,} of {ranking.num_evaluated:,} plans fit" in shown
    assert "within 1 % of the fastest by fewest settings, the others by speed" in shown


def test_search_writes_a_plan_that_is_not_tight_if_one_is_nearly_as_fast(tmp_path: Path) -> None:
    arguments = ["search", "--model", "7b", "--cluster", "8xa100-sxm-80gb", "--frameworks", "fsdp2"]
    shown = run(tmp_path, *arguments, "--limit", "1", "--out", "best.json")
    ranking = ss.search(
        ss.Architecture.of_size("7b"), ss.Cluster.parse("8xa100-sxm-80gb"), ss.Recipe(), ["fsdp2"]
    )
    assert ranking.best.memory().is_tight
    best = ss.Plan.from_json((tmp_path / "best.json").read_text())
    assert best.memory().verdict == "fits" and best.step().seconds < 4 / 3 * ranking.best.step().seconds
    number = list(ranking.order).index(
        next(row for row in ranking.order if not ranking.plan(int(row)).memory().is_tight)
    )
    assert best == ranking.plan(int(ranking.order[number]))
    # Its row is shown, too, and the text names it.
    assert any(line.startswith(f"{number + 1} ") for line in shown.splitlines())
    assert f"best.json has plan {number + 1}," in shown
    # A pipe gets the same plan.
    assert ss.Plan.from_json(json.dumps(run_json(tmp_path, *arguments)["best"])) == best


@pytest.mark.parametrize("limit", ["0", "-3", "many"])
def test_a_search_prints_at_least_one_row(tmp_path: Path, limit: str) -> None:
    arguments = ["search", "--model", "2m", "--cluster", "2xl4-24gb", f"--limit={limit}"]
    assert "a whole number from 1" in run(tmp_path, *arguments, code=2)


def test_export_writes_the_files_of_plan_export(tmp_path: Path) -> None:
    arguments = [
        "export",
        "--model",
        "2m",
        "--cluster",
        "2x1xcpu",
        "--recipe",
        "seq_len=64",
        "--layout",
        "ddp",
    ]
    files = run_json(tmp_path, *arguments, "--folder", "out")["files"]
    assert set(files) == {path.name for path in (tmp_path / "out").iterdir()} >= {"job.sbatch", "plan.json"}
    # An exported folder is a plan, too.
    assert "FILES.md" in run(tmp_path, "export", "out", "--folder", "again")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--model", "lama-3.1-8b"], "Nearest fix: llama-3.1-8b"),
        (["plan"], "--model llama-3.1-8b"),
        (["plan", "missing.json"], "the path of a plan.json"),
        (["plan", "llama-3.1-8b"], "Nearest fix: --model llama-3.1-8b --cluster"),
        (["plan", "--model", "2m", "--cluster", "8xh100"], "h100"),
        (
            ["plan", "--model", "2m", "--cluster", "2xcpu", "--recipe", "seq_length=3"],
            "Nearest fix: 'seq_len'",
        ),
        (["plan", "--model", "2m", "--cluster", "2xcpu", "--recipe", "seq_len"], "seq_len=..."),
        (["plan", "--model", "2m", "--cluster", "2xcpu", "--layout", "fsdp3"], "fsdp2"),
        (["plan", "--model", "2m", "--cluster", "2xcpu", "--layout", "zero", "stage=5"], "Layout.stage is 5"),
        (["launch", "--model", "2m", "--cluster", "2xcpu", "--task", "pretrain", "steps=3"], "'num_steps'"),
        (["launch", "--model", "2m", "--cluster", "2xcpu", "--task", "finetune"], "weights=VALUE"),
        (
            ["launch", "--model", "2m", "--cluster", "2xcpu", "--task", "finetune", "columns.prompt=q"],
            "Nearest fix: num_steps=100",
        ),
        (["launch", "--model", "2m", "--cluster", "2xcpu", "--partition", "a"], "nothing without --on slurm"),
        (["launch", "--model", "2m", "--on", "ray", "--qos", "a"], "nothing without --on slurm"),
        (["launch", "--model", "2m", "--cluster", "2xcpu", "--on", "pbs"], "invalid choice: 'pbs'"),
        (["plan", "--modle", "2m"], "Nearest fix: --model."),
        (["plan", "--gpus", "8"], "Nearest fix: shardscope plan --help."),
        (["plan", "--bogus"], "Nearest fix: shardscope plan --help."),
        (["plan", "one.json", "two.json"], "unrecognized arguments: two.json"),
        (["plan", "--model", "2m", "--layout", "zero", "stage=1", "stage=2"], "stage is there twice"),
        (["launch", "--model", "2m", "--cluster", "2xcpu", "--folder", ""], "fix: --folder runs"),
        (["attach", "missing"], "does not exist"),
        (["trace", "missing"], "missing"),
    ],
)
def test_wrong_values_end_with_2_and_the_librarys_message(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    assert message in run(tmp_path, *arguments, code=2)


def test_a_plan_file_of_another_encoding_is_named(tmp_path: Path) -> None:
    (tmp_path / "bin.json").write_bytes(b"\xff\xfe")
    assert "a plan.json in UTF-8" in run(tmp_path, "plan", "bin.json", code=2)


def run_shell(folder: Path, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``script``, in which ``$shardscope`` is the program, under bash."""
    program = f"{sys.executable} -m shardscope.cli.main"
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail\n{script}"],
        cwd=folder,
        env={**os.environ, "shardscope": program, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_errors_of_a_plan_file_name_it(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    assert "bad.json: Plan JSON, line 1" in run(tmp_path, "plan", "bad.json", code=2)
    assert "standard input: Plan JSON" in run(tmp_path, "plan", "-", code=2, text="[]")
    other = '{"train_batch_size": 8}'
    assert "fix: ss.Plan.from_deepspeed" in run(tmp_path, "plan", "-", code=2, text=other)
    output = run(tmp_path, "plan", "--model", "2m", "--cluster", "2xcpu", "--json")
    assert "Nearest fix: jq .plan." in run(tmp_path, "plan", "-", code=2, text=output)


def test_a_plan_file_after_an_option_of_several_words_is_named(tmp_path: Path) -> None:
    run(tmp_path, "plan", "--model", "2m", "--cluster", "2xcpu", "--out", "plan.json")
    for command, *option in (
        ("plan", "--recipe", "seq_len=64"),
        ("plan", "--layout", "ddp"),
        ("search", "--frameworks", "ddp"),
        ("launch", "--task", "pretrain"),
    ):
        wrong = run(tmp_path, command, *option, "plan.json", code=2)
        assert f"{option[0]} is 'plan.json'" in wrong and f"fix: plan.json before {option[0]}." in wrong


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("", "--out is ''; allowed: the path of a file"),
        ("no/plan.json", "Nearest fix: mkdir -p no."),
        ("~nobody-here/plan.json", "that user has no home folder. Nearest fix: --out plan.json."),
    ],
)
def test_an_out_file_that_cannot_be_written_is_named_first(out: str, message: str, tmp_path: Path) -> None:
    for command in ("plan", "search"):
        assert message in run(tmp_path, command, "--model", "2m", "--cluster", "2xcpu", "--out", out, code=2)
    assert not list(tmp_path.iterdir())


def test_an_out_file_is_replaced_at_once_and_kept_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = ["plan", "--model", "2m", "--cluster", "2xcpu", "--out"]
    out = tmp_path / "plan.json"
    assert main([*plan, str(out)]) == 0
    before = out.read_text()
    write_text = Path.write_text

    def write_half(self: Path, text: str, **options: Any) -> int:
        write_text(self, text[:100], **options)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", write_half)
        assert main([*plan, str(out), "--recipe", "seq_len=64"]) == 2
    assert out.read_text() == before and list(tmp_path.iterdir()) == [out]
    # A link remains one, and a device is written.
    (tmp_path / "link.json").symlink_to("plan.json")
    assert main([*plan, str(tmp_path / "link.json"), "--recipe", "seq_len=64"]) == 0
    assert (tmp_path / "link.json").is_symlink() and json.loads(out.read_text())["recipe"]["seq_len"] == 64
    assert main([*plan, "/dev/null"]) == 0 and not Path("/dev/null").is_file()


def test_an_out_file_keeps_its_mode_its_names_and_its_owner(tmp_path: Path) -> None:
    plan = ["plan", "--model", "2m", "--cluster", "2xcpu", "--out"]
    out = tmp_path / ("p" * 240)
    out.touch(mode=0o600)
    assert main([*plan, str(out)]) == 0 and out.stat().st_mode & 0o777 == 0o600
    own = tmp_path / "own.json"
    own.touch()
    own.chmod(0o640)  # touch() would give what the umask leaves of it.
    assert main([*plan, str(own)]) == 0 and own.stat().st_mode & 0o777 == 0o640
    (tmp_path / "other.json").hardlink_to(own)
    assert main([*plan, str(own), "--recipe", "seq_len=64"]) == 0
    assert own.samefile(tmp_path / "other.json")
    if os.geteuid():
        own.chmod(0o400)
        assert main([*plan, str(own)]) == 2
    else:  # Root may write any file; another user's stays theirs.
        os.chown(out, 65534, 65534)
        assert main([*plan, str(out)]) == 0 and out.stat().st_uid == 65534


def test_out_and_plan_expand_the_home_folder(tmp_path: Path) -> None:
    plan = "--model 2m --cluster 2xcpu --recipe seq_len=64 --out='~/p.json'"
    done = run_shell(tmp_path, f"$shardscope plan {plan} && $shardscope plan '~/p.json'", HOME=str(tmp_path))
    assert done.returncode == 0 and (tmp_path / "p.json").is_file(), done.stderr


def test_output_in_any_locale(tmp_path: Path) -> None:
    plan = json.loads(
        ss.Plan(
            ss.Architecture.of_size("2m"), ss.Cluster.parse("2xcpu"), ss.Recipe(seq_len=64), ss.Layout.ddp()
        ).to_json()
    )
    plan["architecture"]["name"] = "modèle"
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    for encoding in ("ascii", "latin-1", "utf-8"):
        done = run_shell(tmp_path, "$shardscope plan plan.json --json", PYTHONIOENCODING=encoding)
        assert json.loads(done.stdout)["plan"]["architecture"]["name"] == "modèle", done.stderr
    done = run_shell(tmp_path, "$shardscope plan plan.json", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "mod\\xe8le on 2xcpu" in done.stdout


@pytest.mark.parametrize(
    ("redirection", "code"),
    [("plan.json >&-", 0), ("no.json >&-", 2), ("no.json 2>&-", 2), ("no.json 2>/dev/full", 2)],
)
def test_closed_and_full_streams_keep_the_exit_code(redirection: str, code: int, tmp_path: Path) -> None:
    run(tmp_path, "plan", "--model", "2m", "--cluster", "2xcpu", "--out", "plan.json")
    done = run_shell(tmp_path, f"$shardscope plan {redirection}")
    # An error does not go to standard output instead, which --json keeps for its document.
    assert (done.returncode, done.stdout) == (code, "") and "Traceback" not in done.stderr


def test_runs_and_attach_show_runs_of_a_folder(tmp_path: Path) -> None:
    write_run("good", parent=tmp_path / "runs", num_done=20)
    write_run("bad", "failed", parent=tmp_path / "runs", number=1, reason="rank 1 failed")
    shown = run(tmp_path, "runs")
    assert_fits_in_80_columns(shown)
    assert [line.split()[:2] for line in shown.splitlines()[1:]] == [["good", "finished"], ["bad", "failed"]]
    assert [row["run"] for row in run_json(tmp_path, "runs", "runs")] == ["good", "bad"]
    assert run(tmp_path, "runs", "runs/good") == "No runs in runs/good.\n"
    missing = " ".join(run(tmp_path, "runs", "elsewhere").split())
    assert missing == f"No runs in elsewhere: {tmp_path / 'elsewhere'} does not exist."
    script = run_shell(tmp_path, "$shardscope runs elsewhere --json")
    assert json.loads(script.stdout) == [] and "elsewhere does not exist" in script.stderr
    attached = run_json(tmp_path, "attach", "good")
    assert (attached["status"], attached["num_steps_done"], attached["num_steps"]) == ("finished", 20, 40)
    assert "step 20 of 40, loss" in run(tmp_path, "attach", "runs/good", "--wait")


def test_attach_shows_where_a_run_is_and_why_an_attempt_ended(tmp_path: Path) -> None:
    path = write_run("one", parent=tmp_path / "runs", num_done=20)
    folder = RunFolder(path)
    description = json.loads(folder.run_json.read_text())
    write_json(folder.run_json, {**description, "num_nodes": 1, "scheduler": "slurm"})
    write_json(folder.job, {"scheduler": "slurm", "job_id": "4711", "partition": "a100"})
    (path / "nodes").mkdir()
    for attempt, step in ((1, 0), (2, 10)):
        node = NodeFolder(path, 0, 1, attempt)
        write_beginning(node, checkpoint=None, from_step=step, control_bytes=0)
        node.create_own()
        write_json(node.node_json, {"name": f"gpu{attempt}"}, as_is=("name",))
    write_end(NodeFolder(path, 0, 1, 1), "failed", "rank 1 failed")
    attached = run_json(tmp_path, "attach", "one")
    assert (attached["target"], attached["nodes"]) == ("Slurm: a100, job 4711", ["gpu2"])
    assert [record["from_step"] for record in attached["attempts"]] == [0, 10]
    shown = run(tmp_path, "attach", "one")
    assert "2, the latest from step 10; before: rank 1 failed" in shown
    assert "Slurm: a100, job 4711" in shown and "gpu2" in shown


def test_steps_without_a_number_as_loss_are_not_the_last(tmp_path: Path) -> None:
    events = RunFolder(write_run("own", parent=tmp_path / "runs", num_done=20)).events(0)
    for step, loss in ((20, None), (21, "unknown")):
        append_line(events, {"step": step, "rank": 0, "time": 1.0, "loss": loss})
    assert "step 20 of 40, loss" in run(tmp_path, "attach", "own", "--wait")
    assert run_json(tmp_path, "attach", "own")["num_steps_done"] == 20
    append_line(events, {"step": 22, "rank": 0, "time": 1.0, "loss": math.nan})
    assert "step 23 of 40, loss nan" in run(tmp_path, "attach", "own", "--wait")


def test_waiting_for_a_failed_run_ends_with_1_and_its_reason(tmp_path: Path) -> None:
    write_run("bad", "failed", parent=tmp_path / "runs", reason="rank 1 failed")
    assert "bad failed: rank 1 failed" in run(tmp_path, "attach", "bad", "--wait", code=1)
    typo = run(tmp_path, "attach", "badd", code=2)
    assert "its name in ./runs: it does not exist. Nearest fix: bad." in typo
    assert "rank 1 failed" in run(tmp_path, "attach", "bad")
    assert "run is ''; allowed: the folder of a run" in run(tmp_path, "attach", "", code=2)


def test_a_reader_that_has_enough_makes_no_success_of_a_run(tmp_path: Path) -> None:
    write_run("bad", "failed", parent=tmp_path / "runs", reason="rank 1 failed")
    write_run("live", "running", parent=tmp_path / "runs")
    write_run("good", parent=tmp_path / "runs", number=1)
    for name, code in (("bad", 1), ("live", 1), ("good", 0)):
        done = run_shell(tmp_path, f"$shardscope attach {name} --wait | true", PYTHONUNBUFFERED="1")
        assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
        if name == "live":
            assert "live running: no longer waited for" in done.stderr


def test_stop_sends_the_command_to_a_live_run(tmp_path: Path) -> None:
    folder = write_run("live", "running", parent=tmp_path / "runs")
    run(tmp_path, "stop", "live", "--checkpoint")
    (line,) = (folder / "control.jsonl").read_text().splitlines()
    sent = json.loads(line)
    assert (sent["command"], sent["checkpoint"]) == ("stop", True)


def test_stop_of_an_ended_run_names_the_live_one_with_its_name(tmp_path: Path) -> None:
    folder = write_run("lr", parent=tmp_path / "runs")
    second = write_run("lr-2", parent=tmp_path / "runs")
    later, other = (write_run(name, "running", parent=tmp_path / "runs") for name in ("lr-3", "lr-4"))
    for one in (second, later):
        description = json.loads((one / "run.json").read_text())
        (one / "run.json").write_text(json.dumps({**description, "asked_name": "lr"}))
    for name in ("lr", "lr-2"):
        done = run_shell(tmp_path, f"$shardscope stop {name}")
        assert done.returncode == 0 and "finished" in done.stdout
        assert done.stderr == f"{name} has ended; lr-3, launched with the same name, is running\n"
    assert not any((one / "control.jsonl").exists() for one in (folder, later, other))


def test_logs_print_the_end_of_a_ranks_log(tmp_path: Path) -> None:
    folder = write_run("good", parent=tmp_path / "runs")
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "logs" / "rank-1.log").write_text("first\nlast\n")
    assert run(tmp_path, "logs", "good", "--rank", "1").endswith("last\n")
    assert run_json(tmp_path, "logs", "good", "--rank", "1", "--bytes", "5") == {"rank": 1, "text": "last\n"}
    assert "rank" in run(tmp_path, "logs", "good", "--rank", "2", code=2)


def test_trace_prints_the_sentences_of_a_summary(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tests" / "fixtures" / "trace_2_ranks", tmp_path / "traces")
    shown = run(tmp_path, "trace", "traces", "--chrome", "all.json.gz")
    assert_fits_in_80_columns(shown)
    summary = ss.Trace.load(tmp_path / "traces").summary()
    words = " ".join(shown.split())
    assert all(sentence in words for sentence in summary.sentences) and (tmp_path / "all.json.gz").exists()
    sentences = run_json(tmp_path, "trace", "traces")["sentences"]
    assert [row["sentence"] for row in sentences] == list(summary.sentences)
    # 0.0 is no rank: 0.0 == 0, so the types are compared.
    assert {type(row["rank"]) for row in sentences} == {int, type(None)}


def test_trace_says_what_could_not_be_read(tmp_path: Path) -> None:
    recorded = (ROOT / "tests" / "fixtures" / "trace_2_ranks" / "rank-0.json.gz").read_bytes()
    (tmp_path / "cut.json.gz").write_bytes(recorded[: len(recorded) // 2])
    words = " ".join(run(tmp_path, "trace", "cut.json.gz").split())
    assert "Notes from loading: " in words and "truncated gzip file, read up to there" in words
    assert any("truncated" in note for note in run_json(tmp_path, "trace", "cut.json.gz")["notes"])


def test_a_trace_does_not_overwrite_what_it_was_read_from(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tests" / "fixtures" / "trace_2_ranks", tmp_path / "traces")
    recorded = tmp_path / "traces" / "rank-0.json.gz"
    before = recorded.read_bytes()
    for source in ("traces", "traces/rank-0.json.gz"):
        wrong = run(tmp_path, "trace", source, "--chrome", "traces/rank-0.json.gz", code=2)
        assert "Nearest fix: --chrome trace.json.gz" in wrong
    assert recorded.read_bytes() == before
    assert "mkdir -p no" in run(tmp_path, "trace", "traces", "--chrome", "no/trace.json", code=2)
    run(tmp_path, "trace", "traces", "--chrome", ".")
    run(tmp_path, "trace", "traces", "--chrome", "trace.json.gz")  # A file of its own may be replaced.


def test_a_reader_that_has_enough_ends_it_without_a_message(tmp_path: Path) -> None:
    command = f"{sys.executable} -m shardscope.cli.main plan --model 7b --cluster 8xh100-sxm-80gb --json"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | head -c 1"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "{", "")


@pytest.mark.parametrize(
    ("options", "chosen"), [(["--on", "slurm"], True), (["--on", "ray"], True), ([], None)]
)
def test_a_run_on_a_cluster_outlives_a_launch_that_waits(
    options: list[str], chosen: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardscope.cli import running

    launched: dict[str, Any] = {}
    monkeypatch.setattr(ss, "launch", lambda plan, task, **fields: launched.update(fields))
    monkeypatch.setattr(running, "_follow", lambda *_, **__: 0)
    plan = ["--model", "2m", "--cluster", "2x1xcpu", "--recipe", "seq_len=64"]
    parsed = build_parser().parse_args(["launch", *plan, "--wait", "--json", *options])
    assert parsed.run(parsed) == 0
    # None prints, for notebooks, that a Slurm run outlives its kernel: on the standard output of --json.
    assert launched["outlive_kernel"] is chosen


@pytest.mark.parametrize(
    ("options", "target"),
    [
        (
            [
                *("--on", "slurm", "--partition", "debug", "--time", "30", "--setup", "module load a"),
                *("--setup", "b", "--extra", "mem=4G", "cpus-per-task=2", "exclusive"),
                *("nodelist=node[01-03,07]", "begin=16:00", "mail-type=NONE"),
            ],
            ss.Slurm(
                partition="debug",
                time=30,
                setup=["module load a", "b"],
                extra={
                    "mem": "4G",
                    "cpus_per_task": 2,
                    "exclusive": True,
                    "nodelist": "node[01-03,07]",
                    "begin": "16:00",
                    "mail_type": "NONE",
                },
            ),
        ),
        (
            [
                *("--on", "ray", "--address", "10.0.0.1:6379", "--node-folder", "/scratch"),
                *("--runtime-env", '{"env_vars": {"A": "b"}}'),
            ],
            ss.Ray(address="10.0.0.1:6379", node_folder="/scratch", runtime_env={"env_vars": {"A": "b"}}),
        ),
        (["--on", "ray"], ss.Ray()),
        ([], None),
    ],
)
def test_options_of_a_target_reach_launch(
    options: list[str], target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardscope.cli import running

    launched: dict[str, Any] = {}
    monkeypatch.setattr(ss, "launch", lambda plan, task, **fields: launched.update(fields, task=task))
    monkeypatch.setattr(running, "_print_run", lambda *_: None)
    plan = ["--model", "2m", "--cluster", "2x1xcpu", "--recipe", "seq_len=64"]
    parsed = build_parser().parse_args(
        ["launch", *plan, "--task", "pretrain", "num_steps=3", "--name", "x", "--retries", "2", *options]
    )
    assert parsed.run(parsed) == 0
    assert launched["retries"] == 2
    assert launched["on"] == target and launched["name"] == "x" and launched["outlive_kernel"] is True
    assert launched["task"] == ss.Pretrain(num_steps=3)


@pytest.mark.parametrize(
    "words, fix",
    [
        (["--layout", "zero", "3"], "stage=3"),
        (["--layout", "ddp", "3"], "ddp alone, which has no fields"),
        (["--task", "finetune", "data=rows.csv"], "--task finetune weights=VALUE"),
        (["--task", "script"], "--task script source=VALUE"),
        (["--task", "script", "train.py"], "source=train.py"),
        (["--task", "finetune", "model"], "weights=model"),
        (["--task", "finetune", "weights=model", "rows.csv"], "data=rows.csv"),
        (["--task", "pretrain", "30"], "num_steps=100"),
    ],
)
def test_fixes_of_fields_are_fields_of_what_was_named(words: list[str], fix: str, tmp_path: Path) -> None:
    start = ["launch", "--model", "2m", "--cluster", "1xcpu"]
    assert f"Nearest fix: {fix}." in run(tmp_path, *start, *words, code=2)
