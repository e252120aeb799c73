"""Commands of runs: ``launch``, ``runs``, ``attach``, ``stop``, ``logs`` and ``trace``."""

from __future__ import annotations

import argparse
import glob
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.cli.output import (
    discard_output,
    find_output_file,
    print_error,
    print_fields,
    print_json,
    print_table,
    print_text,
)
from shardscope.cli.plan_options import (
    FIELDS_METAVAR,
    add_plan_options,
    build_task,
    parse_value,
    read_plan,
)
from shardscope.cli.planning import Commands, add_command
from shardscope.core.errors import find_similar, refuse
from shardscope.machine.user_folders import expand_home
from shardscope.records.folder import FINAL, RECORDINGS, RunFolder
from shardscope.records.json_files import read_json

if TYPE_CHECKING:
    from shardscope.runs.backends.ray.target import Ray
    from shardscope.runs.backends.slurm import Slurm
    from shardscope.runs.run import Run

RUNS = "runs"
"""The folder of runs, as ``ss.launch`` has it."""
CHROME_FILE = "trace.json.gz"
POLL_SECONDS = 0.5
STOP_SECONDS = 2.0
"""Maximum time until the status of a run of this machine is "stopping"."""
SLURM_FIELDS = ("partition", "account", "qos", "time", "constraint", "python")
RAY_FIELDS = ("address", "runtime_env", "node_folder")
"""Fields of ``ss.Slurm`` and ``ss.Ray`` that are an option of the same name."""


def add_commands(commands: Commands) -> None:
    """Add the commands of this module."""
    _add_launch_command(commands)

    parser = add_command(
        commands,
        "runs",
        "list runs, oldest first",
        "  shardscope runs\n  shardscope runs /shared/runs --json",
    )
    parser.add_argument("folder", nargs="?", default=RUNS, help="folder of runs; default: runs")
    parser.set_defaults(run=list_runs)

    parser = _add_run_command(
        commands, "attach", "show a run, and wait for its end if asked", "my-run --wait"
    )
    parser.add_argument("--wait", action="store_true", help="print steps until the run ends")
    parser.set_defaults(run=attach_run)

    parser = _add_run_command(commands, "stop", "stop a run", "my-run --checkpoint --wait")
    parser.add_argument(
        "--checkpoint", action="store_true", help="finish the step and save a checkpoint first"
    )
    parser.add_argument("--wait", action="store_true", help="until it has ended")
    parser.set_defaults(run=stop_run)

    parser = _add_run_command(commands, "logs", "print the end of a rank's log", "my-run --rank 3")
    parser.add_argument("--rank", type=int, default=0, help="default: 0")
    parser.add_argument(
        "--bytes", type=int, default=2**16, metavar="N", help="at most so many; default: 65536"
    )
    parser.set_defaults(run=show_log)

    parser = add_command(
        commands,
        "trace",
        "summarize the trace of a run, or trace files",
        "  shardscope trace my-run\n  shardscope trace my-run --chrome trace.json.gz",
    )
    parser.add_argument("source", help="name or folder of a run, a trace file, or a folder of them")
    parser.add_argument(
        "--chrome", metavar="FILE", help="write one trace of all ranks to this file, for Perfetto"
    )
    parser.set_defaults(run=show_trace)


def _add_launch_command(commands: Commands) -> None:
    parser = add_command(
        commands,
        "launch",
        "launch a plan: here, on Slurm or on Ray",
        "  shardscope launch plan.json --task pretrain num_steps=100 --wait\n"
        "  shardscope launch --model 2m --cluster 2xcpu --recipe seq_len=64 global_batch_size=8\n"
        "  shardscope launch plan.json --task finetune weights=model data=data.jsonl export=true\n"
        "  shardscope launch plan.json --task script source=train.py\n"
        '  shardscope launch plan.json --on slurm --partition a100 --time 2:00:00 --setup "module load cuda"',
    )
    add_plan_options(parser)
    parser.add_argument(
        "--task",
        nargs="+",
        default=["pretrain"],
        metavar=("TASK", FIELDS_METAVAR),
        help="pretrain, finetune or script, with the fields of ss.Pretrain, ss.Finetune or ss.Script",
    )
    parser.add_argument("--name", help="name of the run; default: the time")
    parser.add_argument("--folder", default=RUNS, help="parent folder of the run; default: runs")
    parser.add_argument("--force", action="store_true", help="launch although memory may not suffice")
    parser.add_argument(
        "--retries",
        type=int,
        default=0,
        metavar="N",
        help="start again up to N times, from the last checkpoint, after a failed rank or a lost node",
    )
    parser.add_argument(
        "--wait",
        action="store_true",
        help="print steps until the run ends; Ctrl-C then ends a run of this machine",
    )
    _add_target_options(parser)
    parser.set_defaults(run=launch_run)


def _add_target_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--on`` and the fields of ``ss.Slurm`` and ``ss.Ray``, which :func:`_build_target` reads."""
    group = parser.add_argument_group("target")
    group.add_argument("--on", choices=("slurm", "ray"), help="default: this machine")
    for name in SLURM_FIELDS:
        group.add_argument(f"--{name}", help=f"ss.Slurm({name}=...)")
    group.add_argument(
        "--setup",
        action="append",
        default=[],
        metavar="LINE",
        help="shell line before Python; may be repeated",
    )
    group.add_argument(
        "--extra",
        nargs="+",
        default=[],
        metavar="OPTION=VALUE",
        help="other options of sbatch: mem=64G exclusive",
    )
    group.add_argument("--address", help="ss.Ray(address=...); default: RAY_ADDRESS, or this machine's Ray")
    group.add_argument("--runtime-env", metavar="JSON", help='ss.Ray(runtime_env=...): {"env_vars": {...}}')
    group.add_argument(
        "--node-folder", metavar="PATH", help="ss.Ray(node_folder=...): where nodes without --folder write"
    )


def _add_run_command(commands: Commands, name: str, summary: str, example: str) -> argparse.ArgumentParser:
    parser = add_command(commands, name, summary, f"  shardscope {name} {example}")
    parser.add_argument("source", metavar="run", help="its folder, or its name in ./runs")
    return parser


def launch_run(options: argparse.Namespace) -> int:
    """Launch a run, and wait for its end if asked."""
    import shardscope as ss

    if not options.folder:  # An empty variable of a script; the run would be in the current folder.
        refuse("--folder", options.folder, "the path of a folder", f"--folder {RUNS}")
    plan, task, target = read_plan(options), build_task(options.task), _build_target(options)
    # This process ends at once, unless it waits; a run on a cluster outlives it in any case. That is chosen
    # here, because by default ``launch`` prints it, for notebooks, on the standard output of --json.
    outlive = None if options.wait and target is None else True
    arguments = {"name": options.name, "folder": options.folder, "force": options.force, "on": target}
    run = ss.launch(plan, task, outlive_kernel=outlive, retries=options.retries, **arguments)
    if not options.wait:
        _print_run(run, options.json)
        return 0
    return _follow(run, options.json, outlives=outlive is True)


def _build_target(options: argparse.Namespace) -> Slurm | Ray | None:
    import shardscope as ss

    # Each option is a field of one of the two targets.
    fields = {"slurm": (*SLURM_FIELDS, "setup", "extra"), "ray": RAY_FIELDS}
    given = {name: value for names in fields.values() for name in names if (value := getattr(options, name))}
    for target, names in fields.items():
        for name in names:
            if name in given and options.on != target:
                option = f"--{name.replace('_', '-')}"
                refuse(option, given[name], f"nothing without --on {target}", f"--on {target} {option} ...")
    if "time" in given and str(given["time"]).isdecimal():
        given["time"] = int(given["time"])
    if options.extra:
        given["extra"] = _parse_sbatch_options(options.extra)
    if "runtime_env" in given:
        given["runtime_env"] = parse_value(given["runtime_env"])
    return {"slurm": ss.Slurm, "ray": ss.Ray}[options.on](**given) if options.on else None


def _parse_sbatch_options(words: Sequence[str]) -> dict[str, str | int | bool]:
    """Return ``["mem=64G", "exclusive"]`` as ``ss.Slurm(extra=...)``, which checks it.

    The text is sbatch's own, which has commas and brackets: ``nodelist=node[01-03,07]``.
    """
    fields: dict[str, str | int | bool] = {}
    for word in words:
        # sbatch spells its options with dashes, ss.Slurm(extra=...) as names of Python.
        name, has_value, text = word.partition("=")
        name = name.replace("-", "_")
        if name in fields:
            refuse("--extra", word, f"each option once; {name} is there twice", f"leave {word} out")
        flags = {"true": True, "false": False}
        value = flags.get(text.lower(), text) if has_value else True
        fields[name] = int(value) if isinstance(value, str) and value.isdecimal() else value
    return fields


def list_runs(options: argparse.Namespace) -> int:
    """Print the runs of a folder."""
    import shardscope as ss
    from shardscope.runs.summaries import describe_missing_folder

    records = ss.runs(options.folder).to_frame().to_dict("records")
    if options.json:
        print_json(records)
        if missing := describe_missing_folder(Path(options.folder)):
            print_error(f"No runs in {options.folder}{missing}.")
    elif not records:
        print_text(f"No runs in {options.folder}{describe_missing_folder(Path(options.folder))}.")
    else:
        columns = ("run", "status", "ranks", "steps", "loss", "step_seconds", "plan")
        head = (*columns[:-2], "step s", "plan")
        rows = [[_as_count(name, row[name]) for name in columns] for row in records]
        print_table(head, rows, wrap=("plan",))
    return 0


def _as_count(name: str, value: object) -> object:
    """Return a count as an integer: pandas makes a column with missing values one of floats."""
    if isinstance(value, float) and value.is_integer() and name in ("ranks", "steps"):
        return int(value)
    return value


def attach_run(options: argparse.Namespace) -> int:
    """Print a run, and wait for its end if asked."""
    run = _find_run(options.source)
    _name_later_run(run)
    if options.wait:
        return _follow(run, options.json)
    _print_run(run, options.json)
    return 0


def stop_run(options: argparse.Namespace) -> int:
    """Request the stop of a run."""
    from shardscope.runs.profiling_request import LIVE
    from shardscope.runs.waiting import wait_for

    run = _find_run(options.source)
    _name_later_run(run)
    run.stop(checkpoint=options.checkpoint)
    if options.wait:
        run.wait()
    else:
        # "running" right after a stop would look as if it had no effect.
        wait_for(lambda: run.status not in LIVE, STOP_SECONDS)
    _print_run(run, options.json)
    return 0


def _name_later_run(run: Run) -> None:
    """Print which live run was launched with the name of a run that has ended: its folder has a number."""
    from shardscope.runs.run import Run

    if run.status not in FINAL:
        return
    name = (read_json(RunFolder(run.folder).run_json) or {}).get("asked_name")
    if not isinstance(name, str):  # By default it is the time, which a later launch does not repeat.
        return
    for path in run.folder.parent.glob(f"{glob.escape(name)}*"):
        if path == run.folder or (read_json(RunFolder(path).run_json) or {}).get("asked_name") != name:
            continue
        with suppress(ValueError, OSError):  # A damaged run is none to name.
            later = Run.attach(path)
            if later.status not in FINAL:
                text = f"{run.name} has ended; {later.name}, launched with the same name, is {later.status}"
                print_error(text)


def show_log(options: argparse.Namespace) -> int:
    """Print the end of a rank's log."""
    text = _find_run(options.source).logs(options.rank, options.bytes)
    if options.json:
        print_json({"rank": options.rank, "text": text})
    else:
        sys.stdout.write(text)
    return 0


def show_trace(options: argparse.Namespace) -> int:
    """Print the summary of a trace."""
    import shardscope as ss

    # A run's recording is chosen by the run; other folders and files are traces.
    path = _find_path(options.source)
    chrome = _find_chrome_file(options.chrome, path)
    trace = ss.Run.attach(path).trace() if _is_run(path) else ss.Trace.load(path)
    written = None if chrome is None else trace.to_chrome(chrome)
    summary = trace.summary()
    if options.json:
        sentences = summary.to_frame().to_dict("records")
        for sentence, finding in zip(sentences, summary.findings, strict=True):
            sentence["rank"] = finding.rank  # a column with missing values has floats
        print_json(
            {
                "sentences": sentences,
                "ranks": list(summary.ranks),
                "notes": list(trace.notes),
                "chrome": written,
            }
        )
        return 0
    for text in summary.sentences:
        print_text(f"- {text}")
    if trace.notes:
        print_text(f"Notes from loading: {'; '.join(trace.notes)}.")
    if written:
        print(written)
    return 0


def _is_run(path: Path) -> bool:
    return RunFolder(path).run_json.exists()


def _find_chrome_file(text: str | None, source: Path) -> Path | None:
    """Return the path to write; None without ``--chrome``. Raises ``ValueError`` for a file of ``source``."""
    path = find_output_file("--chrome", text, CHROME_FILE)
    if path is not None and path.exists():
        # Of a run, only its recordings are read; a trace that was written into its folder may be replaced.
        folders = [RunFolder(source).traces, source / RECORDINGS] if _is_run(source) else [source]
        target = path.resolve()
        if any(folder.resolve() in (target, *target.parents) for folder in folders):
            allowed = f"another file than those that are read from {source}: it would be lost"
            refuse("--chrome", text, allowed, f"--chrome {CHROME_FILE}")
    return path


def _find_path(source: str) -> Path:
    """Return the path of a run or a trace: as given, or in the folder of runs."""
    path, named = expand_home(source), Path(RUNS, source)
    return named if not path.exists() and named.exists() else path


def _find_run(source: str) -> Run:
    """Attach to a run. Raises ``ValueError`` if there is none."""
    import shardscope as ss
    from shardscope.runs.summaries import find_run_folders

    path = _find_path(source)
    # An empty variable of a script would be the current folder.
    if not source or not path.exists():
        similar = find_similar(source, [folder.name for folder in find_run_folders(Path(RUNS))])
        allowed = f"the folder of a run, or its name in ./{RUNS}: it does not exist"
        refuse("run", source, allowed, similar or "`shardscope runs`, which lists them")
    return ss.Run.attach(path)


def _follow(run: Run, as_json: bool, *, outlives: bool = True) -> int:
    """Print status changes and steps until the run ends. Return the exit code.

    ``outlives``: whether the run goes on if this process ends.
    """
    try:
        status = _print_until_end(run, as_json)
        _print_run(run, as_json)
    except BrokenPipeError:
        # The reader, such as head, has enough. That is no success of a run that has not ended.
        discard_output()
        status = run.status
        if status not in FINAL:
            then = "no longer waited for" if outlives else "stopped with this command"
            print_error(f"{run.name} {status}: {then}, because the reader of the output ended")
            return 1
    if status == "finished":
        return 0
    print_error(
        f"{run.name} {status}: {run.reason}" + (f"\n{run.error}" if run.error and not as_json else "")
    )
    return 1


def _print_until_end(run: Run, as_json: bool) -> str:
    """Print status changes and steps until the run ends. Return its final status."""
    reader, status = run.follow(), ""
    while True:
        current = run.status
        if not as_json and current != status and current not in FINAL:
            print_text(f"{current}: {run.reason}" if run.reason else current, "  ")
            # A job may be queued for days: a pipe would show that with the first step.
            sys.stdout.flush()
        # One line for all steps since the last look, of rank 0 alone: the others log the same steps.
        steps = [one for one in reader.read() if _has_loss(one)]
        if steps and not as_json:
            print(_describe_step(run, steps[-1]), flush=True)
        status = current
        if status in FINAL and not reader.is_behind:
            return status
        time.sleep(POLL_SECONDS)


def _has_loss(record: Mapping[str, object]) -> bool:
    """Return whether a record of ``run.metrics()`` is a step of rank 0 with its loss.

    A user's own function may log anything under that name, such as None in steps without one.
    """
    loss = record.get("loss")
    return record.get("rank") == 0 and isinstance(loss, int | float) and not isinstance(loss, bool)


def _describe_step(run: Run, record: Mapping[str, object]) -> str:
    """Return a record of ``run.metrics()``, whose steps count from 0, as text with steps that are done."""
    return f"step {_count_done(record)} of {run.num_steps or '?'}, loss {record['loss']:.4f}"


def _count_done(record: Mapping[str, object]) -> int:
    step = record.get("step")
    return step + 1 if isinstance(step, int) else 0


def _print_run(run: Run, as_json: bool) -> None:
    last = next((one for one in reversed(run.metrics()) if _has_loss(one)), None)
    if as_json:
        numbers = {
            "num_steps_done": _count_done(last) if last else 0,
            "num_steps": run.num_steps,
            "loss": last and last["loss"],
        }
        ending = {"status": run.status, "reason": run.reason, "error": run.error}
        nodes = [node.name for node in run.nodes]
        where = {"folder": run.folder, "model": run.model, "target": run.target, "nodes": nodes}
        print_json(
            {
                "run": run.name,
                **where,
                "ranks": run.world_size,
                **ending,
                **numbers,
                "attempts": run.attempts,
                "files_on_nodes": run.files_on_nodes,
            }
        )
        return
    print_fields(
        {
            "run": run.name,
            "status": f"{run.status}: {run.reason}" if run.reason else run.status,
            "last": _describe_step(run, last) if last else None,
            "attempts": _describe_attempts(run),
            "target": run.target,
            "nodes": ", ".join(node.name for node in run.nodes),
            "ranks": run.world_size,
            "folder": run.folder,
            "model": run.model,
        }
    )


def _describe_attempts(run: Run) -> str:
    """Return how often the run was started, if more than once, and why the attempt before ended."""
    attempts = run.attempts
    if len(attempts) < 2:
        return ""
    before, latest = attempts[-2:]
    cause = before["reason"] or before["status"]
    return f"{len(attempts)}, the latest from step {latest['from_step']}; before: {cause}"
