"""``ss.sweep``: runs of one plan and task with other values, one after the other or side by side.

Each run is an ordinary one that outlives the kernel. The queue of those that wait is a thread of the kernel
and is stored nowhere: called again with the same name, ``ss.sweep`` finds the runs by their names, adopts
them, and launches the rest.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shardscope.core.errors import FieldError, check_flag, check_integer, refuse
from shardscope.core.html_table import SCROLL_BOX
from shardscope.machine.detection import read_gpu_states
from shardscope.planner.differences import find_differences
from shardscope.planner.verdict import assess_plan
from shardscope.records.folder import FINAL, RunFolder, checked_path
from shardscope.records.json_files import encode
from shardscope.records.json_values import parse_object
from shardscope.records.metrics_table import compute_curve
from shardscope.runs import runs
from shardscope.runs.backends.this_machine import max_cpu_ranks
from shardscope.runs.explain.compare import Runs
from shardscope.runs.launch.free_memory import TooLittleFreeError
from shardscope.runs.launch.launch import check_launch, start_run
from shardscope.runs.launch.launch_checks import MAX_NAME_LENGTH, check_name, check_plan
from shardscope.runs.launch.packing import pack
from shardscope.runs.launch.run_description import trains_the_plan
from shardscope.runs.run import Run
from shardscope.runs.stop_request import was_stopped_by_sweep
from shardscope.runs.summaries import summarize
from shardscope.runs.sweep_grid import (
    HASH_LENGTH,
    Combination,
    FieldValue,
    add_location,
    build_grid,
    format_value,
)
from shardscope.runs.task_fields import record_task_fields
from shardscope.runs.task_source import check_task
from shardscope.runs.totals import compute_totals, iterate_records
from shardscope.runs.trained.model_card import read_validation_losses
from shardscope.runs.waiting import wait_for
from shardscope.training.checkpoints.choice import choose_by_name, list_runs_by_name
from shardscope.training.tasks.resumed_checkpoint import DEFAULT_FOLDER
from shardscope.training.tasks.text_task import TextTask

if TYPE_CHECKING:
    import pandas as pd

    from shardscope.core.plan import Plan
    from shardscope.runs.launch.context import Context

POLL_SECONDS = 0.5
VALIDATION_LOSS = "validation_loss"


def sweep(
    plan: Plan,
    task: Callable[[Context], object],
    over: Mapping[str, Iterable[FieldValue]],
    at_once: int = 1,
    *,
    name: str | None = None,
    folder: str | os.PathLike[str] | None = None,
    force: bool = False,
) -> Sweep:
    """Launch a run for each combination of the values in ``over``, ``at_once`` at a time. Return at once.

    ``over`` maps fields of the plan's recipe or of the task to lists of values, such as
    ``{"learning_rate": [1e-4, 2e-4], "lora_rank": [8, 16]}``; ``Recipe.dropout`` names one that both have.
    Every combination is checked before the first run starts. Runs are named after the sweep and their
    values, lie in ``folder`` (default ``./runs``), and go on if the kernel ends; each takes free GPUs.

    Combinations that still wait are launched by the kernel. After a restart, the same call with the same
    ``name`` (default: the current time) continues: it keeps the runs that ended, adopts those under way, and
    launches the rest. Runs that were lost or that :meth:`Sweep.stop` stopped go on from their last
    checkpoint, or start again without one. Those that failed or were stopped one by one stay as they are,
    unless their folder is deleted.

    Raises ``ValueError`` for an unknown field, for a combination that the plan or task refuses or that does
    not fit into memory (unless ``force``), for more than 64 combinations, for more ``at_once`` than GPUs or
    CPU ranks allow, and for a ``name`` whose runs had another plan or task; and as :func:`shardscope.launch`
    does if the first run cannot be launched.
    """
    check_flag("sweep.force", force)
    parent = checked_path("sweep.folder", DEFAULT_FOLDER if folder is None else folder).absolute()
    name = time.strftime("sweep_%Y-%m-%d_%H-%M-%S") if name is None else name
    check_name("sweep.name", name, MAX_NAME_LENGTH - HASH_LENGTH - 1)
    check_plan(plan)
    check_task("launch.task", task)
    grid = build_grid(plan, task, over, name)
    for combination in grid:
        _check_combination(combination, parent, force=force)
    _check_at_once(plan, at_once)
    pack(grid[0].task, grid[0].plan)  # Raises ValueError for a task that cannot be pickled.
    entries = [_find_entry(combination, parent) for combination in grid]
    with _active_lock:
        active = _active.get(parent / name)
        if active is not None and active.status == "running":
            if [entry.combination.name for entry in active._entries] == [each.name for each in grid]:
                return active
            allowed = "the name of no sweep that this kernel still runs with other values"
            refuse("sweep.name", name, allowed, "sweep.wait(), or sweep.stop() of that sweep")
        created = Sweep(name, parent, entries, at_once=at_once, force=force)
        created._start_launching()
        _active[parent / name] = created
    return created


@dataclass(eq=False)
class _Entry:
    """One combination and its newest run."""

    combination: Combination
    run: Run | None = None
    is_waiting: bool = True
    problem: str = ""
    """Why its run could not be launched."""

    @property
    def is_live(self) -> bool:
        return self.run is not None and self.run.status not in FINAL

    @property
    def status(self) -> str:
        if self.problem:
            return "not launched"
        return "waiting" if self.is_waiting or self.run is None else self.run.status


class Sweep(Runs):
    """Runs of a sweep, in the order of its grid: a list that grows while they are launched.

    A notebook shows the table of all combinations. ``curves`` and ``compare`` are those of :func:`runs`.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        entries: Sequence[_Entry],
        *,
        at_once: int,
        force: bool,
    ) -> None:
        super().__init__()
        self.name = name
        """Name of the sweep, with which ``ss.sweep`` continues it."""
        self.folder = folder
        """The folder of the runs' folders."""
        self._entries = entries
        self._at_once, self._force = at_once, force
        self._is_stopped = False
        self._lock = threading.RLock()
        self._update_list()

    # ---- public methods

    @property
    def runs(self) -> Runs:
        """The runs launched so far, as :func:`shardscope.runs` lists them: predicted and measured."""
        return Runs(self)

    @property
    def status(self) -> Literal["running", "stopped", "finished"]:
        """``running`` while a run is active or waits; ``stopped`` after :meth:`stop`, else ``finished``.

        A single run may have failed: the table has the status of each.
        """
        waits = any(entry.is_waiting for entry in self._entries) and not self._is_stopped
        if waits or any(entry.is_live for entry in self._entries):
            return "running"
        return "stopped" if self._is_stopped else "finished"

    def wait(self, timeout: float | None = None) -> str:
        """Wait for the end of all runs, at most ``timeout`` seconds (None: no limit). Return the status.

        Ctrl-C ends only the wait. Raises ``ValueError`` for an invalid ``timeout``.
        """
        wait_for(lambda: self.status != "running", timeout)
        return self.status

    def stop(self) -> None:
        """Stop the runs under way and launch no more; return immediately.

        ``Pretrain`` and ``Finetune`` save a checkpoint first, from which ``ss.sweep`` with the same name goes
        on. ``sweep[0].stop()`` stops a single run instead, and the next one starts. Raises ``OSError`` if a
        run's folder cannot be written.
        """
        with self._lock:
            self._is_stopped = True
            live = [entry.run for entry in self._entries if entry.run is not None and entry.is_live]
        for run in live:
            run.send("stop", checkpoint=run.trains_the_plan, sweep=True)

    def best(self, metric: str = VALIDATION_LOSS) -> Run:
        """Return the finished run whose kept weights have the lowest ``metric``.

        These are the last ones, or with ``early_stopping`` those of the lowest validation loss. Without
        validation it is the last loss. ``Finetune(..., resume=best.folder)`` with a larger ``num_steps``
        continues from its last checkpoint, which ``save_checkpoint=True`` saves; ``best.model`` is its
        export. Raises ``ValueError`` if no run has finished, or if none logged a finite ``metric``.
        """
        finished = [
            (entry.run, entry.combination.task)
            for entry in self._entries
            if entry.run is not None and entry.status == "finished"
        ]
        if not finished:
            statuses = ", ".join(entry.status for entry in self._entries)
            raise ValueError(f"No run of the sweep {self.name} has finished: they are {statuses}.")
        for name in (metric, "loss") if metric == VALIDATION_LOSS else (metric,):
            values = {
                run: value for run, task in finished if (value := _read_kept(run, task, name)) is not None
            }
            if values:
                return min(values, key=lambda run: values[run])
        raise ValueError(f"No finished run of the sweep {self.name} logged {metric} as a finite number.")

    def to_frame(self) -> pd.DataFrame:
        """Return one row per combination, those that wait included.

        Columns: ``run``, ``status``, each swept field, last ``loss``, last and best validation loss,
        ``seconds``, and ``problem``: why it was not launched, or why it failed or was lost. ``sweep.runs``
        compares with predictions.
        """
        import pandas as pd

        return pd.DataFrame(self._make_rows())

    # ---- the queue

    def _start_launching(self) -> None:
        """Launch the first run, and the others from a thread. Raises the errors of the first launch."""
        first = next((entry for entry in self._entries if entry.is_waiting), None)
        if first is None:
            return
        if not any(entry.is_live for entry in self._entries):
            self._launch_run(first)
        threading.Thread(target=self._launch_all, name=f"shardscope-sweep-{self.name}", daemon=True).start()

    def _launch_all(self) -> None:
        while True:
            with self._lock:
                if self._is_stopped or not any(entry.is_waiting for entry in self._entries):
                    return
                try:
                    self._launch_next()
                except Exception as error:  # Shown in the table: a thread cannot raise to the user.
                    for entry in self._entries:
                        if entry.is_waiting:
                            entry.is_waiting, entry.problem = False, f"{type(error).__name__}: {error}"
            time.sleep(POLL_SECONDS)

    def _launch_next(self) -> None:
        """Launch waiting runs, up to ``at_once`` and as far as GPUs and memory are free."""
        for entry in self._entries:
            num_live = sum(other.is_live for other in self._entries)
            if not entry.is_waiting:
                continue
            if num_live >= self._at_once:
                return
            try:
                if not self._launch_run(entry):
                    return
            except TooLittleFreeError as error:
                # The other runs use the memory: wait until one ends, and run no more than these side by side.
                if num_live:
                    self._at_once = num_live
                    return
                entry.is_waiting, entry.problem = False, str(error)
            except (ValueError, OSError) as error:
                entry.is_waiting, entry.problem = False, str(error)

    def _launch_run(self, entry: _Entry) -> bool:
        """Launch the run of ``entry``; return False if too few GPUs are free."""
        combination = entry.combination
        positions = None
        if combination.plan.on_gpu:
            positions = self._find_free_gpus(combination.plan.world_size)
            if positions is None:
                return False
        task = combination.task
        # After an interruption, resume from the newest checkpoint of this user's runs of that name.
        if (
            entry.run is not None
            and isinstance(task, TextTask)
            and choose_by_name(self.folder, combination.name).checkpoint is not None
        ):
            task = replace(task, resume=True)
        entry.run = start_run(
            combination.plan,
            task,
            name=combination.name,
            outlive_kernel=True,
            folder=self.folder,
            force=self._force,
            gpu_positions=positions,
        )
        entry.is_waiting = False
        self._update_list()
        return True

    def _find_free_gpus(self, num_gpus: int) -> list[int] | None:
        """Return the positions of ``num_gpus`` GPUs that no run in this folder uses; None: too few."""
        busy = {
            index
            for run in runs(self.folder)
            if run.gpus and run.is_on_this_machine and run.status not in FINAL
            for index in run.gpus
        }
        free = [position for position, gpu in enumerate(read_gpu_states()) if gpu.index not in busy]
        return free[:num_gpus] if len(free) >= num_gpus else None

    def _update_list(self) -> None:
        self[:] = [entry.run for entry in self._entries if entry.run is not None]

    # ---- the table

    def _make_rows(self) -> list[dict[str, object]]:
        rows = []
        for entry in self._entries:
            run = entry.run
            losses = None if run is None else read_validation_losses(run)
            row: dict[str, object] = {
                "run": entry.combination.name if run is None else run.name,
                "status": entry.status,
            }
            # A field may be called as a column is: Recipe.loss.
            row |= {
                f"Recipe.{key}" if key in TABLE else key: value
                for key, value in entry.combination.values.items()
            }
            rows.append(
                row
                | {
                    "loss": None if run is None else compute_totals(run).loss,
                    VALIDATION_LOSS: None if losses is None else losses.last,
                    "best_validation_loss": None if losses is None else losses.best,
                    "seconds": None if run is None else summarize(run.folder, run).seconds,
                    "problem": entry.problem or _describe_end(run),
                }
            )
        return rows

    def _repr_html_(self) -> str:
        rows = self._make_rows()
        # The run's name repeats the values, and most tasks have no validation.
        unused = {
            name for name in ("validation_loss", "best_validation_loss") if not any(row[name] for row in rows)
        }
        columns = [name for name in rows[0] if name not in {"run", "problem"} | unused]
        head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in columns)
        lines = "".join(
            f"<tr title='{escape(str(row['run']), quote=True)}'>"
            + "".join(f"<td>{escape(_format_cell(name, row[name]))}</td>" for name in columns)
            + "</tr>"
            for row in rows
        )
        problems = "".join(f"<p>{escape(str(row['problem']))}</p>" for row in rows if row["problem"])
        return (
            f"<p>{escape(self._describe_statuses())}</p>"
            f"{SCROLL_BOX}<table style='table-layout:auto'>"
            f"<thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>{problems}"
        )

    def _describe_statuses(self) -> str:
        statuses = [entry.status for entry in self._entries]
        counts = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
        return f"Sweep {self.name}: {self.status}; {len(statuses)} runs: {counts}."

    def __repr__(self) -> str:
        return f"<{self._describe_statuses()}>"


_active: dict[Path, Sweep] = {}
"""Sweeps of this process by their folder and name."""
_active_lock = threading.Lock()
TABLE = ("run", "status", "loss", VALIDATION_LOSS, "best_validation_loss", "seconds", "problem")


def _describe_end(run: Run | None) -> str:
    """Return why a run has no result; empty for one that finished, was stopped or goes on."""
    return run.reason if run is not None and run.status in ("failed", "lost") else ""


def _format_cell(name: str, value: object) -> str:
    if name == "seconds" and isinstance(value, float):
        return f"{value:,.0f}"
    if name in ("loss", VALIDATION_LOSS, "best_validation_loss") and isinstance(value, float):
        return f"{value:.4g}"
    return "–" if value is None else format_value(value)  # type: ignore[arg-type]


def _read_kept(run: Run, task: object, metric: str) -> float | None:
    """Return ``metric`` of the weights that ``run`` kept; None if it logged no finite number."""
    value: float | None
    if metric == VALIDATION_LOSS:
        losses = read_validation_losses(run)
        keeps_best = getattr(task, "early_stopping", None) is not None
        value = losses and (losses.best if keeps_best else losses.last)
    elif metric == "loss":
        value = compute_totals(run).loss
    else:
        value = next(reversed(compute_curve(iterate_records(run), metric).values()), None)
    return value if value is not None and math.isfinite(value) else None


def _check_at_once(plan: Plan, at_once: int) -> None:
    num_ranks = len(read_gpu_states()) if plan.on_gpu else max_cpu_ranks()
    check_integer("sweep.at_once", at_once, low=1, high=max(1, num_ranks // plan.world_size))


def _check_combination(combination: Combination, parent: Path, *, force: bool) -> None:
    """Raise ``ValueError`` if the task cannot run the plan, or the plan does not fit into memory."""
    plan, task = combination.plan, combination.task
    try:
        check_launch(plan, task, parent, combination.name)
        if trains_the_plan(task) and not force:
            try:
                verdict = assess_plan(plan)
            except FieldError:  # An option without a memory formula: only the run can measure it.
                return
            if not verdict.runs:
                raise ValueError(f"the plan does not fit: {verdict.reason} force=True launches anyway.")
    except ValueError as error:
        raise add_location(error, combination.values) from error


def _find_entry(combination: Combination, parent: Path) -> _Entry:
    """Return the entry of ``combination``, with the newest run that was launched with its name.

    Raises ``ValueError`` if that run had another plan or task.
    """
    folder = next(iter(list_runs_by_name(parent, combination.name)), None)
    if folder is None:
        return _Entry(combination)
    run = Run(RunFolder(folder))
    if differences := _find_other_settings(run, combination):
        refuse(
            "sweep.name",
            combination.name,
            f"a name whose runs had the same plan and task; {run.name} had other ones: {differences}",
            "another name",
        )
    was_interrupted = was_stopped_by_sweep(RunFolder(folder))
    if was_interrupted and run.status not in FINAL:
        allowed = f"the name of no sweep that is being stopped, and {run.name} is {run.status}"
        refuse("sweep.name", combination.name, allowed, "sweep.wait() first")
    is_waiting = run.status == "lost" or (was_interrupted and run.status == "stopped")
    return _Entry(combination, run, is_waiting=is_waiting)


def _find_other_settings(run: Run, combination: Combination) -> str:
    """Return the settings in which a run differs from ``combination``; empty if there are none."""
    changes = [str(difference) for difference in find_differences(run.plan, combination.plan)]
    # As a run folder keeps them, so with secrets masked.
    wanted = parse_object(encode({"asked": record_task_fields(combination.task)})).get("asked")
    recorded = run.task_fields
    if not isinstance(wanted, dict) or recorded is None:
        return "; ".join(changes if (wanted is None) == (recorded is None) else [*changes, "another task"])
    # A run that was resumed has the checkpoint as its field, where the task had none.
    names = [name for name in {**wanted, **recorded} if name != "resume"]
    changes += [
        f"{name} {recorded.get(name)!r} → {wanted.get(name)!r}"
        for name in names
        if recorded.get(name) != wanted.get(name)
    ]
    return "; ".join(changes)
