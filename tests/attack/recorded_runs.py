"""Real runs of two CPU ranks, recorded once and small enough to be copied thousands of times."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path

from tests.weights_folders import write_chat_folder

import shardscope as ss
from shardscope.machine.processes import identify_machine, read_start_time
from shardscope.records.folder import EXPORT, RunFolder

SECONDS = 180.0
MAX_EVENTS = 200
"""Maximum number of events of each rank's trace."""
MAX_WEIGHTS_BYTES = 4096
"""Maximum size of each file with tensors, which nothing that lists runs reads."""
NAMES = ("stopped", "failed", "living", "adapters", "weights")
"""Copies of them are damaged; the last two have exported a model: adapters over a base, and whole weights."""


def record_runs(folder: Path) -> None:
    """Launch a run that saves, profiles and is stopped, one that fails, and a fine-tune; derive the others.

    Existing ones are reused, so that one try of a seed can be repeated.
    """
    if all((folder / name / "run.json").is_file() for name in NAMES):
        return
    shutil.rmtree(folder, ignore_errors=True)
    plan = ss.Plan(
        ss.Architecture.of_size("2m"),
        ss.Cluster.parse("2xcpu"),
        ss.Recipe(seq_len=64, global_batch_size=2),
        ss.Layout.ddp(),
    )
    launched = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(launched, ignore_errors=True)
    # Beside the recorded runs, for a run names its base by its path.
    base = folder.with_name(f"{folder.name}-base")
    shutil.rmtree(base, ignore_errors=True)
    write_chat_folder(base, tie_word_embeddings=True)
    _record_run(plan, ss.Pretrain(num_steps=8, save_every=8, profile=True), launched, "stopped", "finished")
    _record_run(
        plan, ss.Pretrain(num_steps=8, text=_write_deleted_text(launched)), launched, "failed", "failed"
    )
    # Change the status to stopped after the last step: a finished run cannot be resumed.
    _replace_last_status(launched / "stopped", "stopped", "run.stop() was called")
    shutil.copytree(launched / "stopped", launched / "living")
    _replace_last_status(launched / "living", "running", "2 ranks at work")
    _record_finetune(base, launched)
    shutil.copytree(launched / "adapters", launched / "weights")
    _replace_export(launched / "weights", base)
    launched.rename(folder)


def make_living(path: Path) -> None:
    """Make this process the supervisor of the run in ``path``."""
    record = {"pid": os.getpid(), "started": read_start_time(os.getpid()), "machine": identify_machine()}
    RunFolder(path).supervisor.write_text(json.dumps(record) + "\n")


def _record_run(plan: ss.Plan, task: ss.Pretrain | ss.Finetune, folder: Path, name: str, status: str) -> None:
    run = ss.launch(plan, task, name=name, folder=folder)
    if isinstance(task, ss.Pretrain) and task.text is not None:
        task.text.unlink()
    ended = run.wait(SECONDS)
    if ended != status:
        raise RuntimeError(f"the run to record is {ended}, not {status}: {run.reason}\n{run.error}")
    _remove_large_files(run.folder)


def _record_finetune(base: Path, folder: Path) -> None:
    recipe = ss.Recipe(seq_len=32, global_batch_size=2, precision="fp32", method="lora", lora_rank=2)
    plan = ss.Plan(ss.Architecture.from_hf(base), ss.Cluster.parse("2xcpu"), recipe, ss.Layout.ddp())
    rows = [{"prompt": "Who hunts the whale?", "completion": "Captain Ahab does."}] * 4
    task = ss.Finetune(base, rows, num_steps=2, export=True, samples=1, max_new_tokens=4)
    _record_run(plan, task, folder, "adapters", "finished")


def _replace_export(path: Path, weights: Path) -> None:
    """Replace the exported adapters by a whole model."""
    shutil.rmtree(path / EXPORT)
    shutil.copytree(weights, path / EXPORT)


def _write_deleted_text(folder: Path) -> Path:
    """Write a text for a task, which is deleted before its ranks open it."""
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "text.txt"
    text.write_text("Call me Ishmael. " * 2000)
    return text


def _remove_large_files(path: Path) -> None:
    for trace in (path / "traces").glob("*.json.gz"):
        record = json.loads(gzip.decompress(trace.read_bytes()))
        record["traceEvents"] = record["traceEvents"][:MAX_EVENTS]
        trace.write_bytes(gzip.compress(json.dumps(record).encode()))
    # No call reads these files, so damage to them would test nothing.
    (path / "metrics.csv").unlink(missing_ok=True)
    shutil.rmtree(path / "tensorboard", ignore_errors=True)
    for file in path.rglob("*"):
        if file.name.startswith("random-rank-"):
            file.unlink()
        elif file.is_file() and file.stat().st_size > 2**18:
            os.truncate(file, MAX_WEIGHTS_BYTES)


def _replace_last_status(path: Path, status: str, reason: str) -> None:
    file = RunFolder(path).status
    *before, last = file.read_text().splitlines()
    record = {**json.loads(last), "status": status, "reason": reason}
    file.write_text("\n".join([*before, json.dumps(record)]) + "\n")
