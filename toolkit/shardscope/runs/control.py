"""Commands to a live run, appended to its control file: stop, finish, and those of ``ctx.commands()``."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from shardscope.records.folder import CERTAINLY_ENDED, RunFolder, explain_write_error
from shardscope.records.json_files import append_line
from shardscope.records.regular_files import NotRegularFileError
from shardscope.runs.backends.slurm_job import SlurmError, cancel_waiting, read_job_id
from shardscope.runs.stop_request import find_notebook

if TYPE_CHECKING:
    from shardscope.runs.run import Run

CANCEL_SECONDS = 2.0
"""Maximum time for which a stop waits for Slurm's answer: a notebook waits with it."""


def send_command(run: Run, command: str, /, **arguments: object) -> None:
    """Append ``command`` to the control file; see :meth:`Run.send`. Raises ``OSError``."""
    if run.status in CERTAINLY_ENDED:
        return
    try:
        append_line(RunFolder(run.folder).control, {"command": command, "time": time.time(), **arguments})
    except FileNotFoundError:
        return  # The folder was deleted in the meantime; the supervisor ends such a run by itself.
    except NotRegularFileError:
        raise
    except OSError as error:
        raise explain_write_error(run.folder, error) from error


def request_stop(run: Run, /, **arguments: object) -> None:
    """Send a stop command that names this notebook; cancel the run's Slurm job if it has not started.

    Raises ``OSError``.
    """
    notebook = find_notebook()
    send_command(run, "stop", **arguments, **({} if notebook is None else {"notebook": notebook}))
    job_id = read_job_id(RunFolder(run.folder))
    if job_id is not None and run.status == "queued":
        # A job that waits has no supervisor to read the command; one that has started keeps its own.
        # Not a daemon: a script may end at once, and scancel waits long for a controller that is down.
        cancelling = threading.Thread(target=_try_to_cancel, args=(job_id,))
        with contextlib.suppress(RuntimeError):  # The process limit is reached.
            cancelling.start()
            cancelling.join(CANCEL_SECONDS)


def _try_to_cancel(job_id: str) -> None:
    with contextlib.suppress(SlurmError):  # Attached from a machine without Slurm's commands.
        cancel_waiting(job_id)
