"""The log of a Slurm job's script: what it wrote before the nodes' processes wrote logs of their own."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

from shardscope.records.folder import SUBMISSION, RunFolder
from shardscope.records.json_files import read_tail_text

LOG_CHARACTERS = 20_000
QUOTED_LINES = 30
MAX_LINE = 300
"""Characters of a line that are quoted in a reason."""
EXIT_CODE = re.compile(r"srun: (?:error: \S+: tasks? [\d,-]+: (?:Exited with|Terminated|Killed)|Terminating)")
"""Lines with which srun ends the log of a failed step, after those of the node that name the cause."""
FAILED_SETUP = re.compile(r"^setup: exit code (\d+): (.+)$", re.MULTILINE)
WATCH_SETUP = (
    'trap \'case $BASH_SOURCE in "$0") '
    'echo "setup: exit code $?: $(sed -n "${LINENO}p" "$0")" >&2;; esac\' ERR'
)
"""Line of a job script after which bash reports each line that fails (bash(1), trap), also with ``set -e``.
Not by ``BASH_COMMAND``: of a function such as ``module`` that is its last command. Conditions, all but the
last command of a pipe, and the lines of a sourced file may fail, unless ``source`` itself does."""
END_OF_SETUP = "trap - ERR"
MISSING_PROGRAM = re.compile(r"execve\(\): (.+): No such file or directory")
MISSING_MODULE = re.compile(r"No module named '?([\w.]+)")


def watch_setup(lines: Sequence[str]) -> list[str]:
    """Return the lines of a job's setup with those by which a failed one is reported in its log."""
    # A trap of the user's own replaces this one, and must stay.
    if not lines or any("trap " in line for line in lines):
        return list(lines)
    return [WATCH_SETUP, *lines, END_OF_SETUP]


def describe_failed_setup(folder: RunFolder) -> str:
    """Return which lines of ``ss.Slurm(setup=)`` have failed, as a clause; empty if none has."""
    for path in _list_logs(folder):
        failed = FAILED_SETUP.findall(read_tail_text(path, LOG_CHARACTERS))
        # Each attempt of a job appends to the log.
        named = dict.fromkeys(f"{_shorten(line.strip())!r} (exit code {code})" for code, line in failed)
        if named:
            return f"ss.Slurm(setup=...) failed in {', '.join(named)}"
    return ""


def find_job_log(folder: RunFolder) -> Path | None:
    """Return the path of the job's log with errors, from the run folder on; None if it is empty."""
    return next((path.relative_to(folder.path) for path in _list_logs(folder)), None)


def read_job_log(folder: RunFolder) -> tuple[str, str]:
    """Return the line that most likely has the cause of a job's end, and the end of its log with its path.

    Both are empty if there is no log.
    """
    path = find_job_log(folder)
    if path is None:
        return "", ""
    lines = read_tail_text(folder.path / path, LOG_CHARACTERS).strip().splitlines()
    if not lines:  # Emptied since.
        return "", ""
    causes = [line for line in lines if line.strip() and not EXIT_CODE.match(line)] or lines
    # A failed line has written its own message before, which may end with general advice, as Lmod's does.
    own = [line for line in causes if not FAILED_SETUP.match(line)] or causes
    quoted = "\n".join(lines[-QUOTED_LINES:])
    return _shorten(own[-1]), f"The end of the job's log, {path} in the run folder:\n{quoted}"


def advise(line: str) -> str:
    """Return what to do about the line with the cause, as a sentence; empty if it names no Python."""
    if program := MISSING_PROGRAM.search(line):
        return f"The nodes do not have {program[1]}: name their Python in ss.Slurm(python=...)."
    if MISSING_MODULE.search(line):
        install = 'run pip install "shardscope[slurm]" with it, or name another one in ss.Slurm(python=...)'
        return f"The nodes' Python lacks that package: {install}."
    return ""


def _list_logs(folder: RunFolder) -> list[Path]:
    """Return the logs with errors that are not blank, that of the script and of node 0 first."""
    with contextlib.suppress(OSError):
        paths = sorted((folder.path / SUBMISSION).glob("*.err"))
        return [path for path in paths if read_tail_text(path, LOG_CHARACTERS).strip()]
    return []


def _shorten(line: str) -> str:
    return line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]}..."
