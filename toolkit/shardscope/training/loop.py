"""The training loop: batches, optimizer steps, metrics, checkpoints and commands."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from shardscope.core.number_format import format_count
from shardscope.machine.os_errors import find_disk_fix, is_disk_error
from shardscope.training.accounting.memory_watch import Snapshot
from shardscope.training.accounting.tensors import read_device_bytes
from shardscope.training.checkpoints.folders import (
    BEST,
    OWN_FOLDER,
    checkpoint_path,
    delete_older,
    list_resumable,
)
from shardscope.training.checkpoints.temporary_folder import delete_temporary, writes_folder
from shardscope.training.data.batches import Batches
from shardscope.training.optimizers.schedule import Schedule
from shardscope.training.recording import Recorder, RecordingRequest, read_request
from shardscope.training.samples import SampleGenerations
from shardscope.training.tasks.final_export import (
    BEST_EXPORT,
    NOT_SAVED,
    note_for_supervisor,
    save_when_possible,
)
from shardscope.training.validation import BestExport, Validation

if TYPE_CHECKING:
    from shardscope.training.engine import Engine, TrainingContext

SKIPPED_STEPS = 2
"""Steps skipped before profiling, if there are enough: the first ones allocate memory for the others."""
SNAPSHOT_STEPS = 3
"""Number of steps in a memory snapshot: the first two differ from all others."""
MAX_RECORDED_SAMPLES = 4096
"""Maximum number of sample indices in a run's record: enough to check the order, small for a long run."""


def train(
    ctx: TrainingContext,
    engine: Engine,
    batches: Batches,
    schedule: Schedule,
    *,
    log_every: int = 1,
    profile: bool = False,
    save_checkpoint: bool = False,
    save_every: int | None = None,
    keep_last: int | None = None,
    memory_snapshot: bool = False,
    validation: Validation | None = None,
    samples: SampleGenerations | None = None,
    exports: bool = False,
) -> bool:
    """Train from ``engine.num_steps_done`` to ``schedule.num_steps``. Return False if stopped by command.

    Between steps all ranks obey the same commands: "stop" returns, after a checkpoint if it requests one;
    "checkpoint" saves one and continues, as happens every ``save_every`` steps; "finish" makes the next step
    the last one; "profile" records the next steps, the first of them as a warmup. ``profile`` records a few
    steps without a command, at least one. Raises ``RuntimeError`` if two ranks would read the same sample in
    one step, and if loss or gradient are not finite, in which case the checkpoints from before are kept.

    A checkpoint that the disk does not take is left out. The last one is tried again for an hour, unless the
    weights are exported next (``exports``).
    """
    first = engine.num_steps_done
    check_ranks_read_different_samples(batches, first, ctx.device)
    seen: list[int] = []
    printed_steps = choose_printed_steps(first, schedule.num_steps)
    checkpoints = Checkpoints(ctx, engine, batches, save_every=save_every, keep_last=keep_last)
    checkpoints.validation = validation
    is_stopped = False
    # A resumed run may already have all of its steps.
    if first >= schedule.num_steps:
        done = format_count(first, "step")
        _print(f"nothing is left to train: num_steps is {schedule.num_steps:,}, after {done}")
    # Context managers, so that a recording in progress also ends when a step fails.
    with Recorder(ctx, engine.list_layers) as recorder, Snapshot(ctx) as snapshot:
        if memory_snapshot:
            snapshot.start(SNAPSHOT_STEPS)
        if validation is not None and first == 0:
            validation.run(ctx, engine)
        if samples is not None:
            # Of a resumed run too: its folder is a new one.
            samples.run(ctx, engine)
        # After these: a single recorded step would contain them, and a stop would wait for their end.
        if profile:
            recorder.start(
                RecordingRequest(shapes=True), num_left=schedule.num_steps - first, skip=SKIPPED_STEPS
            )
        for step in range(first, schedule.num_steps):
            # Obey commands before the step; all ranks get the same ones at the same step.
            commands = poll_commands(ctx)
            if commands.stop:
                is_stopped = True
                break
            checkpoints.is_requested |= commands.checkpoint
            checkpoints.save_if_due(step)
            # After one more step: before the first one an optimizer has no state to save.
            is_last = commands.finish
            if commands.memory_snapshot:
                snapshot.start(SNAPSHOT_STEPS)
            if commands.recording is not None:
                recorder.obey(commands.recording, num_left=schedule.num_steps - step)
            # Run the step and report it.
            result = _run_step(engine, batches, schedule, step)
            seen += batches.list_indices(step)
            if step % log_every == 0 or step == schedule.num_steps - 1:
                ctx.log(step=step, **collect_step_metrics(engine, result))
            if step in printed_steps:
                tokens = f"{result.num_tokens / result.seconds:,.0f} tokens/s"
                _print(f"step {step + 1:,} of {schedule.num_steps:,}: loss {result.loss:.4g}, {tokens}")
            # After the step is logged, so that the run's curves end with the NaN, and before any save: it
            # would be of weights that are no numbers, and delete older checkpoints.
            _stop_if_diverged(engine, result, step, checkpoints)
            recorder.count_step()
            snapshot.count_step()
            if validation is not None and (is_last or validation.is_due(step + 1, schedule.num_steps)):
                checkpoints.wait_for_best()
                if validation.run(ctx, engine):
                    checkpoints.begin_save(validation.best_checkpoint)
                    if exports and os.environ.get(OWN_FOLDER) == "1":
                        _export_best(engine, validation)
                if validation.is_exhausted and not is_last:
                    is_last = True
                    number = format_count(validation.num_without_improvement, "validation")
                    _print(f"stopped early: {number} without a lower loss than {validation.best_loss:.4g}")
            if samples is not None and (is_last or samples.is_due(step + 1, schedule.num_steps)):
                samples.run(ctx, engine)
            if is_last:
                break
    ctx.record("data", _describe_data(batches, first, engine.num_steps_done, seen))
    if is_stopped and ctx.stops_without_checkpoint:
        # The supervisor ends the ranks, and has only waited for the trace of a recording in progress.
        checkpoints.wait_and_prune()
        return False
    checkpoints.is_requested |= save_checkpoint or is_stopped
    checkpoints.save_last(exports=exports, is_stopped=is_stopped)
    return not is_stopped


def _export_best(engine: Engine, validation: Validation) -> None:
    """Export the best weights now: the ranks of nodes without a shared folder cannot load them later."""
    loss = validation.last_loss
    assert loss is not None
    # A checkpoint may be the best one only because the disk did not take one before, of which this is kept.
    if validation.best_export is not None and validation.best_export.loss <= loss:
        return
    try:
        engine.export(BEST_EXPORT)
    except OSError as error:
        if not is_disk_error(error):
            raise
        _print(f"warning: the best weights were not exported: {error.strerror}. The run goes on")
    else:
        validation.best_export = BestExport(loss, engine.num_steps_done)


class StepResult(NamedTuple):
    """Result of one training step on this rank."""

    loss: float
    learning_rate: float
    num_tokens: int
    seconds: float


def find_divergence(engine: Engine, result: StepResult) -> str:
    """Return which number of the step is not finite, the same on all ranks; empty if the weights are sound.

    An infinite gradient makes weights NaN in this step's update, of which the next step's loss would tell
    after a checkpoint. With fp16-mixed the loss scaler skips such an update.
    """
    is_scaled = engine.plan.recipe.precision == "fp16-mixed"
    if math.isnan(result.loss) or (math.isinf(result.loss) and not is_scaled):
        return "the loss"
    # Without clipping an engine may compute no norm.
    has_norm = engine.max_grad_norm is not None and not is_scaled
    return "the gradient" if has_norm and not math.isfinite(engine.grad_norm) else ""


def _stop_if_diverged(engine: Engine, result: StepResult, step: int, checkpoints: Checkpoints) -> None:
    """Raise ``RuntimeError`` with the newest checkpoint if loss or gradient of the step is not finite."""
    problem = find_divergence(engine, result)
    if problem:
        raise RuntimeError(
            f"{problem} of step {step + 1:,} is not finite. The run stops here, and nothing is saved of "
            f"these weights; {checkpoints.finish()}. A lower learning_rate usually helps"
        )


def _print(text: str) -> None:
    """Print a line to the rank's log at once: it is read while the run trains."""
    print(text, flush=True)


def _run_step(engine: Engine, batches: Batches, schedule: Schedule, step: int) -> StepResult:
    """Run one optimizer step on its batch; building the batch does not count as the step's time."""
    rate = schedule.learning_rate_at(step)
    engine.set_learning_rate(rate)
    batch = batches.build_batch(step)
    began = time.perf_counter()
    # engine.step returns the loss as a number, which synchronizes: the time covers the whole step.
    loss = engine.step(batch)
    seconds = time.perf_counter() - began
    return StepResult(loss, rate, int(batch["input_ids"].numel()), seconds)


class Checkpoints:
    """Checkpoints of one run: at most one in progress, and the latest ``keep_last`` kept (None: all)."""

    def __init__(
        self,
        ctx: TrainingContext,
        engine: Engine,
        batches: Batches,
        *,
        save_every: int | None,
        keep_last: int | None,
    ) -> None:
        self._ctx, self._engine, self._batches = ctx, engine, batches
        self._save_every, self._keep_last = save_every, keep_last
        self._first = engine.num_steps_done
        self._wait: Callable[[], None] | None = None
        self._path = ctx.folder
        self._name = ""
        self._not_saved: dict[bool, str] = {}
        """Why the best checkpoint (True) or the latest other one (False) is not saved."""
        self.is_requested = False
        """Whether a checkpoint was requested that is not begun yet."""
        self.validation: Validation | None = None
        """The validation whose best weights are saved."""

    def save_if_due(self, step: int) -> None:
        """Start to save before ``step``, every ``save_every`` steps or if requested."""
        is_due = self._save_every is not None and step % self._save_every == 0 and step > self._first
        # An optimizer has no state before its first step, so a checkpoint requested there comes after it.
        if is_due or (self.is_requested and step):
            self.begin_save()
            self.is_requested = False

    def save_last(self, *, exports: bool, is_stopped: bool) -> None:
        """Save at the end, with ``save_every`` or if requested, and wait for it.

        Unless the run ``exports`` its weights next, nothing else has them: wait until the disk takes them.
        """
        self.wait_and_prune()
        # save_every includes the last step, but not that of a resumed run without steps: it is saved already.
        is_due = self._save_every is not None and self._engine.num_steps_done > self._first
        if not is_due and not self.is_requested:
            return
        if exports and not is_stopped:
            self.begin_save()
            self.wait_and_prune()
        else:
            save_when_possible(self._ctx, self._save, is_stopped=is_stopped)

    def begin_save(self, path: Path | None = None) -> None:
        """Start to save the engine's state, asynchronously if the engine supports it.

        ``path`` defaults to the folder of the number of steps.
        """
        # Engines allow one save at a time (Engine.begin_save); older ones are deleted when it is complete.
        self.wait_and_prune()
        try:
            self._begin(path)
        except OSError as error:
            self._go_on_without(error)

    def _begin(self, path: Path | None = None) -> None:
        self._path = path or checkpoint_path(self._ctx.folder, self._engine.num_steps_done)
        self._engine.stream_positions = gather_positions(self._batches)
        self._wait = self._engine.begin_save(self._path)

    def _save(self) -> None:
        """Save now. Raises the disk's ``OSError``, on all ranks."""
        try:
            self._begin()
            self._finish_save()
        except OSError:
            delete_temporary(self._path)
            raise

    def finish(self) -> str:
        """Wait for the checkpoint in progress. Return which one is the newest, as a clause."""
        self.wait_and_prune()
        if not self._name:
            return "no checkpoint was saved before"
        return f"the newest checkpoint, from before it, is {self._name}"

    def wait_for_best(self) -> None:
        """Wait for the checkpoint in progress if it has the best weights, so that they count as saved."""
        if self._path.name == BEST:
            self.wait_and_prune()

    def wait_and_prune(self) -> None:
        """Wait for the checkpoint in progress, then delete older ones. Go on if the disk does not take it."""
        try:
            self._finish_save()
        except OSError as error:
            self._go_on_without(error)

    def _finish_save(self) -> None:
        wait, self._wait = self._wait, None
        if wait is None:
            return
        wait()
        self._name = str(self._path.relative_to(self._ctx.folder))
        _print(f"saved {self._name}")
        self._note(None)
        if self._keep_last is not None and writes_folder():
            delete_older(self._ctx.folder, self._keep_last, parts=self._ctx.rank != 0)

    def _go_on_without(self, error: OSError) -> None:
        """Delete what is written of a checkpoint that the disk did not take, and report it.

        Raises ``error`` if it is another one, which is the same on all ranks.
        """
        if not is_disk_error(error):
            raise error
        delete_temporary(self._path)
        if self._path.name == BEST and self.validation is not None:
            self.validation.forget_best()
            self._engine.validation_state = self.validation.describe_state()
        name = self._path.relative_to(self._ctx.folder)
        newest = next(reversed(list_resumable(self._ctx.folder)), None)
        kept = "no checkpoint is kept"
        if newest is not None:
            is_best = newest.name == BEST == self._path.name
            kept = f"{'the one before' if is_best else newest.relative_to(self._ctx.folder)} is kept"
        why = f"{name} could not be saved: {error.strerror}; {kept}"
        _print(f"warning: {why}. The run goes on. Nearest fix: {find_disk_fix(error)}")
        self._note(f"{why}. Nearest fix: {find_disk_fix(error)}")

    def _note(self, problem: str | None) -> None:
        """Report which of the best and the other checkpoints is not saved, if that has changed."""
        before = dict(self._not_saved)
        self._not_saved.pop(self._path.name == BEST, None)
        if problem is not None:
            self._not_saved[self._path.name == BEST] = problem
        if self._not_saved != before and self._ctx.rank == 0:
            note_for_supervisor(self._ctx.folder, NOT_SAVED, "; ".join(self._not_saved.values()))


def gather_positions(batches: Batches) -> list[object] | None:
    """Return the positions of all data ranks in streamed data; None if the data are not streamed."""
    position = batches.describe_position()
    if position is None:
        return None
    gathered: list[tuple[int, object] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (batches.rank, position))
    # Ranks that share their data, such as tensor-parallel ones, have equal positions.
    by_rank = dict(item for item in gathered if item is not None)
    return [by_rank[rank] for rank in range(batches.num_ranks)]


def choose_printed_steps(first: int, num_steps: int) -> frozenset[int]:
    """Return the steps that are printed to the log: the first one and the end of each tenth of the run."""
    tenths = (num_steps * tenth // 10 - 1 for tenth in range(1, 11))
    return frozenset(step for step in (first, *tenths) if first <= step < num_steps)


def check_ranks_read_different_samples(batches: Batches, step: int, device: torch.device) -> None:
    """Raise ``RuntimeError`` if different data-parallel ranks got the same samples.

    Data smaller than one global batch has to repeat, and is allowed.
    """
    # Gather (rank of the shares, sample indices of this step) of all ranks. Ranks that share their data, such
    # as tensor-parallel ones, have equal rows, which the dict by rank counts once.
    own_indices = torch.tensor([batches.rank, *batches.list_indices(step)], device=device)
    gathered = [torch.empty_like(own_indices) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own_indices)
    indices_by_rank = {int(row[0]): row[1:].tolist() for row in gathered}
    all_indices = [index for indices in indices_by_rank.values() for index in indices]
    if (
        len(all_indices) <= batches.num_samples
        and len(set(all_indices)) < len(all_indices)
        and not batches.spans_two_epochs(step)
    ):
        raise RuntimeError(
            f"{len(all_indices) - len(set(all_indices))} samples were assigned to more than one rank"
        )
    if len(indices_by_rank) != batches.num_ranks:
        raise RuntimeError(
            f"{batches.num_ranks} data-parallel ranks should each read their own samples, and "
            f"{len(indices_by_rank)} do"
        )


def _describe_data(batches: Batches, first: int, end: int, seen: list[int]) -> dict[str, object]:
    return {
        "num_tokens": batches.num_tokens,
        "num_samples": batches.num_samples,
        "share": batches.rank,
        "num_shares": batches.num_ranks,
        "first_step": first,
        "num_steps_done": end,
        "num_samples_seen": len(seen),
        "samples_seen": seen[:MAX_RECORDED_SAMPLES],
    }


# ---- Commands to a running training


@dataclass(frozen=True, kw_only=True)
class Commands:
    """Commands of one poll, the same on every rank."""

    stop: bool = False
    checkpoint: bool = False
    finish: bool = False
    """Whether to end the training with the next step, as a complete one."""
    recording: RecordingRequest | None = None
    """The steps to profile; None if not requested."""
    memory_snapshot: bool = False
    """Whether to record torch's allocation history over the next steps into the run folder."""


def poll_commands(ctx: TrainingContext) -> Commands:
    """Read the new commands since the last call. Call it once per step on every rank.

    Commands are ``{"command": "checkpoint"}``, ``{"command": "finish"}``, ``{"command": "memory_snapshot"}``
    and ``{"command": "profile", ...}`` with the fields of :func:`read_request`. Anything else is logged and
    ignored: a typo must not end a training run.
    """
    stop, commands = ctx.poll()
    checkpoint, finish, memory_snapshot = False, False, False
    recording = None
    for command in commands:
        try:
            match command["command"]:
                case "checkpoint":
                    checkpoint = True
                case "finish":
                    _print("ending the training early, by request")
                    finish = True
                case "memory_snapshot":
                    memory_snapshot = True
                case "profile":
                    recording = read_request(command)
                case name:
                    known = "'checkpoint', 'finish', 'memory_snapshot', 'profile', 'stop'"
                    raise ValueError(f"command is {name!r}; allowed: {known}.")
        except ValueError as error:
            _print(f"ignored a command: {error}")
    return Commands(
        stop=stop,
        checkpoint=checkpoint,
        finish=finish,
        recording=recording,
        memory_snapshot=memory_snapshot,
    )


# ---- Metrics of a training step, per rank


def collect_step_metrics(engine: Engine, result: StepResult) -> dict[str, float]:
    """Return names and values for ``ctx.log``.

    ``tokens_per_second`` is this rank's; steps are synchronous, so all ranks together process
    ``num_data_ranks`` times as many. ``memory_bytes`` and ``peak_memory_bytes`` come from the CUDA caching
    allocator. On CPU ranks, which have no such allocator, they are the bytes of parameters, gradients and
    optimizer, and ``rss_bytes`` is added.
    """
    metrics: dict[str, float] = {
        "loss": result.loss,
        "learning_rate": result.learning_rate,
        "grad_norm": engine.grad_norm,
        **engine.step_metrics,
        "step_seconds": result.seconds,
        "tokens_per_second": result.num_tokens / result.seconds,
        "tokens_per_second_all_ranks": result.num_tokens * engine.num_data_ranks / result.seconds,
    }
    device = read_device_bytes(engine.ctx.device)
    if "allocated" in device:
        metrics["memory_bytes"] = device["allocated"]
        metrics["peak_memory_bytes"] = device["max_allocated"]
    else:
        metrics["memory_bytes"] = sum(engine.bytes_after_step.values())
        metrics["peak_memory_bytes"] = engine.peak_tensor_bytes
        metrics["rss_bytes"] = device["rss"]
    return metrics
