"""``ss.merge()``: a run's adapters merged into their base, as an ordinary Hugging Face folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.core.errors import refuse, warn_user
from shardscope.machine.python_process import build_module_command
from shardscope.machine.user_folders import expand_home
from shardscope.records.folder import EXPORT, MERGED, checked_path
from shardscope.runs.run import Run
from shardscope.runs.trained.child_environment import build_child_environment
from shardscope.runs.trained.model_card import write_model_card
from shardscope.runs.trained.model_files import find_model

if TYPE_CHECKING:
    from shardscope.runs.trained.model_files import ModelFiles

SPARE_BYTES = 50_000_000
"""Disk space for tokenizer, config and index, in addition to the weights."""
MAX_OUTPUT = 2000
REPORT_SECONDS = 0.2
PHASES = {"starting": 0.1, "loading the base": 0.3, "merging": 0.6, "writing": 0.7}
"""Phases that the process prints, and the fraction of the work before each, for a small model."""
Report = Callable[[str, float], None]
"""Receives the current phase, and the fraction of the work that is done."""


def merge(run_or_folder: Run | str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Merge the adapters that a run has trained into their base. Return the folder of the merged model.

    ``run_or_folder`` is a :class:`Run`, its folder, or the exported folder in it. The merged weights are
    safetensors in the base's type, with tokenizer and chat template; transformers opens the folder, and
    ``Finetune`` starts from it. It is ``out``, which must not exist, or ``merged`` in the run folder, where
    an older one is replaced. A run of full weights returns its export unchanged. Adapters over a quantized
    base are merged into the base as it is stored. Raises ``ValueError``, before anything is written, if the
    run has no exported weights, if its base is gone or has changed since, or if the disk is too small; and
    ``RuntimeError`` if merging fails.
    """
    return merge_with_progress(run_or_folder, out, lambda *_: None)


def merge_with_progress(
    run_or_folder: Run | str | os.PathLike[str], out: str | os.PathLike[str] | None, report: Report
) -> Path:
    """Merge as :func:`merge`, and call ``report(message, fraction)`` several times a second meanwhile.

    An error that it raises ends the merge, and nothing is left of it.
    """
    run = _find_run(run_or_folder)
    files = find_model(run, "merge run")
    if files.adapters is None:
        if out is not None:
            allowed = f"None: the run trained all weights, and {files.weights} is the whole model"
            refuse("merge.out", str(out), allowed, "out=None")
        return Path(files.weights)
    target = run.folder / MERGED if out is None else expand_home(checked_path("merge.out", out)).absolute()
    if out is not None and os.path.lexists(target):
        refuse("merge.out", str(target), "a path where nothing is yet", "another path")
    _check_space(files, target)
    target.parent.mkdir(parents=True, exist_ok=True)
    # On the same file system, for the rename at the end: the target is complete or not there.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as temporary:
        merged = Path(temporary, "merged")
        _run_process(files, merged, report)
        try:
            write_model_card(run, merged, is_merged=True)
        except ValueError as error:  # The weights are merged all the same.
            warn_user(f"The merged model has no model card: {error}")
        if target.is_symlink():
            target.unlink()
        elif target.exists():
            target.rename(Path(temporary, "old"))
        merged.rename(target)
    return target


def _find_run(run_or_folder: object) -> Run:
    if isinstance(run_or_folder, Run):
        return run_or_folder
    folder = expand_home(checked_path("merge run_or_folder", run_or_folder)).absolute()
    # The export alone does not say which base it belongs to; the run around it does.
    if folder.name == EXPORT and (folder.parent / "run.json").is_file():
        folder = folder.parent
    if not (folder / "run.json").is_file():
        allowed = "a run, its folder, or the exported folder in it, which knows the base of its adapters"
        if not folder.exists():
            allowed += ": there is no such folder"
        refuse("merge run_or_folder", str(folder), allowed, "run.folder")
    return Run.attach(folder)


def _check_space(files: ModelFiles, target: Path) -> None:
    """Raise ``ValueError`` if the disk of ``target`` has no room for the merged weights."""
    needed = files.num_bytes + SPARE_BYTES
    existing = next(parent for parent in target.parents if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        allowed = f"a folder on a disk with {needed / 1e9:.1f} GB free: this one has {free / 1e9:.1f} GB"
        refuse("merge.out", str(target), allowed, "free some space, or out= on another disk")


def _run_process(files: ModelFiles, folder: Path, report: Report) -> None:
    module = "shardscope.runs.trained.merge_process"
    arguments = [files.to_json(), str(folder), str(os.getpid())]
    # Without a GPU: a training that runs there needs its memory, and the sums are quick on the CPU.
    environment = {**build_child_environment(), "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            build_module_command(module, *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
        )
        try:
            _wait_for_end(process, report)
        except BaseException:  # Cancelled by ``report``, or Ctrl-C.
            process.kill()
            process.wait()
            raise
        if process.returncode != 0:
            errors.seek(0)
            output = errors.read()[-MAX_OUTPUT:].decode(errors="replace").strip()
            cause = output.rpartition("\n")[2] or "no output"
            raise RuntimeError(f"Merging ended with exit code {process.returncode}: {cause}\n{output}")


def _wait_for_end(process: subprocess.Popen[bytes], report: Report) -> None:
    """Wait for the end of the process, and report the phase that it has printed last."""
    phases = ["starting"]
    output = process.stdout
    assert output is not None

    def read_phases() -> None:
        with output:
            for line in output:
                if (phase := line.decode(errors="replace").strip()) in PHASES:
                    phases.append(phase)

    reader = threading.Thread(target=read_phases, daemon=True)
    reader.start()
    while True:
        report(phases[-1], PHASES[phases[-1]])
        try:
            process.wait(REPORT_SECONDS)
            break
        except subprocess.TimeoutExpired:
            continue
    reader.join()
