"""``Run``: a handle on one run folder. Any number of handles, in any process, may exist at the same time."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.core.errors import check_flag, check_integer, refuse
from shardscope.machine.processes import identify_machine
from shardscope.records.attempts import read_attempts
from shardscope.records.folder import (
    EXPORT,
    FINAL,
    RunFolder,
)
from shardscope.records.folder_checks import (
    read_description,
)
from shardscope.records.follow import Follow
from shardscope.records.json_files import (
    LineTail,
    finite_or_special,
    read_json,
    read_tail_text,
    write_json,
)
from shardscope.records.json_values import is_int, parse_object
from shardscope.records.nodes import RunNode, describe_job, read_nodes
from shardscope.records.redaction import redact
from shardscope.records.regular_files import check_regular
from shardscope.records.samples import Sample, read_samples
from shardscope.records.terminal_text import plain_text
from shardscope.runs.backends.ray.stream import read_kept
from shardscope.runs.control import request_stop, send_command
from shardscope.runs.explain.failure import find_failures
from shardscope.runs.explain.failure_report import explain_failures
from shardscope.runs.run_status import RunStatus
from shardscope.runs.stop_request import Button, every_rank_reads_stops
from shardscope.runs.waiting import wait_for, wait_for_async
from shardscope.runs.watch.logged_memory import LoggedMemory, LoggedPeak

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.runs.explain.measured import MeasuredMemory
    from shardscope.runs.explain.predicted_metrics import PredictedMetrics
    from shardscope.runs.trained.chat import Chat
    from shardscope.trace import Trace


class Run:
    """One launched run. All of its data is read from its folder; it may be used from any thread."""

    def __init__(self, folder: RunFolder) -> None:
        """Open a run. Raises ``ValueError`` if ``run.json`` or ``status.jsonl`` is damaged."""
        if not isinstance(folder, RunFolder):
            refuse("folder", folder, "a run that is attached to", "ss.Run.attach(folder)")
        self._folder = folder
        self._lock = threading.Lock()
        # run.json stays unparsed: the parsed plans of thousands of listed runs would fill the memory.
        description = read_description(folder)
        self._run_json = description.data
        self._world_size: int = description.world_size
        self._created: float = description.created
        self._metrics: list[dict[str, object]] = []
        self._reads_stop_requests = False
        self._status = RunStatus(folder)

    @classmethod
    def attach(cls, folder: str | os.PathLike[str]) -> Run:
        """Return a full handle (``stop()`` included) on the run in ``folder``.

        ``folder`` may also be the parent of exactly one undamaged run. Raises ``ValueError`` if it holds no
        run or several, or if the run is damaged; the message then names the damaged file.
        """
        from shardscope.runs.attach import attach_run

        return attach_run(folder)

    @property
    def created(self) -> float:
        """Launch time in seconds since the epoch; 0 if it is not recorded."""
        return self._created

    @property
    def task_fields(self) -> dict[str, object] | None:
        """The recorded fields of a built-in task; None for the user's own function."""
        fields = self._description.get("asked")
        return fields if isinstance(fields, dict) else None

    @property
    def _description(self) -> dict[str, object]:
        return parse_object(self._run_json)

    @cached_property
    def _events(self) -> list[LineTail]:
        return [LineTail(self._folder.events(rank)) for rank in range(self._world_size)]

    @cached_property
    def _memory(self) -> LoggedMemory:
        return LoggedMemory(self._folder, self._world_size)

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._folder.path

    @property
    def model(self) -> Path | None:
        """The folder of the trained model, None before it is complete or if the task does not export.

        transformers opens it; after adapters were trained, peft does.
        """
        folder = self.folder / EXPORT
        # A plain folder of this run: a link would lead to files that another one wrote.
        return folder if folder.is_dir() and not folder.is_symlink() else None

    @property
    def recorded_base(self) -> dict[str, object] | None:
        """The initial weights: their folder ``weights`` and hash ``sample``, or the ``seed`` of random ones.

        None for the user's own function, and for runs of older versions.
        """
        base = self._description.get("base")
        return base if isinstance(base, dict) else None

    def chat(self, max_new_tokens: int = 256, temperature: float = 0.0, base: bool = False) -> Chat:
        """Start a conversation with :attr:`model`, in a process of its own, on a GPU if it has the memory.

        ``for text in chat.send("Who are you?"): print(text, end="")`` prints an answer while it is generated,
        at most ``max_new_tokens`` long; ``temperature`` 0 always takes the most likely token. The tokenizer's
        chat template is used; without one the model continues the text. With ``base`` it is the model that
        the run started from. Raises ``ValueError`` if there is no such model, or if its files have changed.
        """
        from shardscope.runs.trained.chat import Chat

        return Chat(self, max_new_tokens=max_new_tokens, temperature=temperature, base=base)

    def model_card(self) -> str:
        """Return the model card of the trained model: Markdown in the Hub's format.

        It has the plan, the data with their hash, hyperparameters, losses, predicted and measured memory and
        time, and versions; ``README.md`` in :attr:`model` has the same since the run finished. Raises
        ``ValueError`` for a run of the user's own function.
        """
        from shardscope.runs.trained.model_card import build_model_card

        return build_model_card(self)

    def push_to_hub(self, repo_id: str, private: bool = True, merged: bool = False) -> str:
        """Upload :attr:`model` to the Hugging Face Hub. Return the address of the repository.

        It is created if it does not exist. ``merged`` uploads the adapters merged into their base, by an
        earlier ``ss.merge(run)``. The login is that of ``hf auth login`` or HF_TOKEN, the Hub that of
        HF_ENDPOINT. Raises ``ValueError`` without a model or a token, and if ``private`` is wanted of a
        repository that is public; ``RuntimeError`` if the Hub refuses or cannot be reached.
        """
        from shardscope.runs.trained.push import push_to_hub

        return push_to_hub(self, repo_id, private=private, merged=merged)

    def gguf_command(self) -> str:
        """Return the command that makes a GGUF file of the model by llama.cpp, which was not tested.

        Raises ``ValueError`` without a model, and for adapters that are not merged: ``ss.merge(run)``.
        """
        from shardscope.runs.trained.gguf import NOT_TESTED, build_gguf_command

        return f"# {NOT_TESTED}\n{build_gguf_command(self)}"

    @property
    def name(self) -> str:
        """The folder's name."""
        return self._folder.path.name

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._world_size

    @cached_property
    def plan(self) -> Plan:
        """The :class:`shardscope.Plan` that was launched."""
        import json

        from shardscope.core.plan import Plan

        return Plan.from_json(json.dumps(self._description.get("plan")))

    @property
    def status(self) -> str:
        """Current status: queued, starting, running, stopping, finished, stopped, failed or lost."""
        return str(self._status.read()["status"])

    @property
    def reason(self) -> str:
        """Reason of the current status, one line."""
        return plain_text(str(self._status.read()["reason"] or ""))

    @property
    def is_hanging(self) -> bool:
        """Return whether the ranks of a running run make no progress; see :attr:`reason`."""
        state = self._status.read()
        return state["status"] == "running" and state.get("hangs") is True

    @property
    def error(self) -> str | None:
        """The traceback of the rank that failed first, or the end of its log if it left none."""
        # The supervisor stores the error with the final status. A lost run has none, but its ranks may have
        # written theirs.
        state = self._status.read()
        if "error" in state:
            return plain_text(str(state["error"]))
        if state["status"] in ("finished", "stopped"):
            return None
        failures = find_failures(self._folder, self._world_size)
        return plain_text(explain_failures(failures, self._description).text) if failures else None

    @property
    def files_on_nodes(self) -> list[dict[str, object]]:
        """Files that stay on the nodes of a Ray run whose nodes share no folder: a record for each node.

        ``host`` and ``folder`` are the node's, ``files`` the bytes of each checkpoint, exported model or
        large file in it, ``steps`` the number of steps of each complete checkpoint.
        """
        return read_kept(self._folder)

    @property
    def is_on_this_machine(self) -> bool:
        """Return whether the run was launched on this machine.

        A run on a shared file system may be another machine's.
        """
        return bool(self._description.get("machine") == identify_machine())

    @property
    def target(self) -> str:
        """Scheduler, queue and job, such as ``Slurm: a100, job 4711``; empty for a run of one machine."""
        return describe_job(self._folder) if self._folder.has_nodes else ""

    @property
    def nodes(self) -> list[RunNode]:
        """The nodes of a scheduler's run in order: number, name, ranks, folder. Empty for one machine.

        They are those of the latest attempt; :attr:`attempts` has the names of all.
        """
        return read_nodes(self._folder, self._description.get("num_nodes"), self._world_size)

    @property
    def gpus(self) -> list[int]:
        """Driver indices of the run's GPUs, in rank order; empty for CPU ranks."""
        indices = self._description.get("gpus")
        return [index for index in indices if isinstance(index, int)] if isinstance(indices, list) else []

    @property
    def history(self) -> list[dict[str, object]]:
        """All statuses so far, oldest first: dicts of time (seconds since the epoch), status, reason.

        The time of "lost" is the supervisor's last heartbeat, or None if there was none.
        """
        return self._status.read_history()

    @property
    def attempts(self) -> list[dict[str, object]]:
        """The attempts of this run, oldest first; empty for a run of this machine without ``retries``.

        A Slurm job that is preempted or reaches its time limit is started again, from the last checkpoint,
        and so is a failed run with ``launch(retries=)``. Dicts of attempt (from 1), nodes (their names),
        began and ended (seconds since the epoch; None while it runs), from_step (optimizer steps done before
        it), checkpoint (its path in the run folder; None: it started as the run was launched), status
        (stopped, failed, finished, or lost if it left no record of its end), reason, and after a failure
        error (the traceback), rank and node of the first one.
        """
        return read_attempts(self._folder)

    @property
    def predicted_step_seconds(self) -> float | None:
        """Seconds per step that ``plan.step()`` predicted at launch; None if it had no prediction."""
        predicted = self._description.get("predicted")
        seconds = predicted.get("step_seconds") if isinstance(predicted, dict) else None
        return float(seconds) if isinstance(seconds, int | float) else None

    @property
    def num_steps(self) -> int | None:
        """Total number of optimizer steps, including those before a resume; None if the task has no limit."""
        num_steps = self._description.get("num_steps")
        if num_steps is None and self.trains_the_plan:
            # Epochs are converted to steps by the ranks, which count the examples.
            training = (read_json(self._folder.engine_report(0)) or {}).get("training")
            num_steps = training.get("num_steps") if isinstance(training, dict) else None
        return num_steps if is_int(num_steps) and num_steps > 0 else None

    @property
    def trains_the_plan(self) -> bool:
        """Return whether the task is a built-in one.

        These train the plan's model, and save a checkpoint on a stop request.
        """
        return self._description.get("trains_the_plan") is True

    @property
    def reads_stop_requests(self) -> bool:
        """Return whether ``stop(checkpoint=True)`` has an effect.

        True for a built-in task, and for a function that has read ``ctx.should_stop`` on every rank.
        """
        # Once true it stays true, so the ranks' records need not be read again.
        if not self._reads_stop_requests:
            self._reads_stop_requests = self.trains_the_plan or every_rank_reads_stops(
                self._folder, self._world_size
            )
        return self._reads_stop_requests

    @property
    def note(self) -> str:
        """The user's note on this run. Setting it raises ``OSError`` on a write error."""
        note = (read_json(self._folder.note) or {}).get("note", "")
        return note if isinstance(note, str) else ""

    @note.setter
    def note(self, text: str) -> None:
        write_json(self._folder.note, {"note": text})

    def predicted_metrics(self) -> PredictedMetrics | None:
        """Return the predicted values of the logged metrics; None if the task may train another model."""
        from shardscope.runs.explain.predicted_metrics import predict_metrics

        try:
            plan = self.plan
        except ValueError:
            return None
        engine = (read_json(self._folder.engine_report(0)) or {}).get("engine")
        return predict_metrics(plan, self._description, engine)

    def gpu_samples(self) -> list[dict[str, float]]:
        """Return NVML samples of the run's GPUs: dicts of time, rank, gpu (driver index) and readings.

        The readings are ``utilisation_percent``, ``temperature_celsius``, ``power_watts`` and ``used_bytes``
        (all processes on the GPU, not only this run's). One sample a second; a long run is thinned to a few
        hundred. On a cluster one each five seconds, with the ``node``; the times are by the clock of node 0,
        and the samples are those of the latest attempt. Empty for CPU ranks.
        """
        from shardscope.runs.watch.gpu_monitor import read_gpu_samples

        return read_gpu_samples(self._folder, self.gpus)

    def samples(self) -> list[Sample]:
        """Return the model's answers to the task's ``samples``, oldest first.

        Dicts of step (optimizer steps before it; 0: the initial weights), prompt, text, and is_complete
        (False if the text was cut at the maximum number of tokens). Empty for a task without prompts.
        """
        return read_samples(self._folder.path)

    def follow(self) -> Follow:
        """Return a streaming reader of :meth:`metrics`, from the first record; it keeps nothing in memory."""
        return Follow(self._folder, self._world_size)

    def metrics(self) -> list[dict[str, object]]:
        """Return all logged metrics: dicts of step, rank, time (seconds since the epoch) and each metric.

        Records come in the order of reading, so the result of an earlier call is a prefix of a later one's;
        each rank's records are in the order of logging. A call reads only new lines from disk. Raises
        ``ValueError`` if an event file is not a regular file.
        """
        # A pipe or device in a file's place would block or never end.
        for rank in range(self._world_size):
            check_regular(self._folder.events(rank))
        with self._lock:
            for tail in self._events:
                for record in tail.read():
                    self._metrics.append({key: finite_or_special(value) for key, value in record.items()})
            return list(self._metrics)

    def memory(self) -> MeasuredMemory:
        """Return the measured memory: a ``MemoryReport`` with ``tier="measured"``, ``.error``, ``.sentence``.

        Iterating over it yields one dict per rank that logged memory: rank, step, time, memory_bytes (latest)
        and peak_memory_bytes (highest). It is empty if nothing was logged. ``.snapshot(rank)`` summarizes the
        memory snapshot of a rank, if one was requested.
        """
        # Imported lazily: it would slow down the supervisor's start.
        from shardscope.runs.explain.measured import build_measured_memory

        try:
            plan = self.plan
        except ValueError:
            plan = None
        snapshots = self._folder.memory_snapshots()
        return build_measured_memory(plan, self.engine_reports(), self._logged_memory(), snapshots)

    def _logged_memory(self) -> list[LoggedPeak]:
        with self._lock:
            return self._memory.read()

    def engine_reports(self) -> dict[int, dict[str, object]]:
        """Return what each rank's engine built (shards, stage, groups), by rank; empty until recorded."""
        records = {rank: read_json(self._folder.engine_report(rank)) for rank in range(self._world_size)}
        return {rank: record for rank, record in records.items() if record is not None}

    def logs(self, rank: int = 0, max_bytes: int = 64 * 1024) -> str:
        """Return the last ``max_bytes`` of the log of ``rank``, without terminal control sequences.

        Raises ``ValueError`` if the rank does not exist or its log is not a regular file.
        """
        rank = check_integer("run.logs rank", rank, low=0, high=self._world_size - 1)
        max_bytes = check_integer("run.logs max_bytes", max_bytes, low=1, high=2**31)
        check_regular(self._folder.log(rank))
        # Redact here too: the supervisor masks secrets in the file only some time after they are printed.
        return redact(plain_text(read_tail_text(self._folder.log(rank), max_bytes)))

    def profile(
        self,
        num_steps: int = 3,
        ranks: int | Sequence[int] | None = None,
        shapes: bool = False,
        stacks: bool = False,
        memory: bool = False,
        modules: bool = False,
    ) -> int:
        """Request a recording of the next steps of this run; return its number at once.

        After one more step the ranks record ``num_steps`` (1 to 1,000) with torch.profiler, all of them or
        only ``ranks``, and train on; :meth:`trace` then opens the recording. Each option records more, and
        slows the recorded steps down: the operators' input ``shapes``, Python ``stacks`` (which
        ``trace.modules()`` needs), each allocation (``memory``), and a range for each layer (``modules``).
        A run that waits in a queue records its first steps but one.
        For tasks that train the plan, and functions that read ``ctx.should_stop`` once a step. Raises
        ``ValueError`` if the run or its task cannot be recorded now, ``OSError`` if the folder cannot be
        written.
        """
        from shardscope.runs.profiling_request import request_recording

        return request_recording(
            self, num_steps, ranks, shapes=shapes, stacks=stacks, memory=memory, modules=modules
        )

    def trace(self, recording: int | None = None) -> Trace:
        """Load the :class:`shardscope.Trace` of all ranks that recorded.

        ``recording`` is the number that :meth:`profile` returned, or 0 for that of ``profile=True`` and
        ``ctx.profile()``; None: the newest one. Raises ``ValueError`` if it was not recorded, or not yet.
        """
        from shardscope.runs.profiling_request import find_recording
        from shardscope.trace import Trace

        return Trace.load(find_recording(self, recording))

    def stop(self, checkpoint: bool = False) -> None:
        """Request a stop and return immediately. ``run.wait()`` waits for the end.

        No effect on a run that has finished, was stopped or has failed. One that counts as lost reads the
        request if it turns out to be active. Ranks that record (:meth:`profile`) first finish their step and
        write the trace; a second request ends them at once. With ``checkpoint`` the ranks first finish their
        step and save, if their task reads ``ctx.should_stop``. Raises ``ValueError`` if the task is known
        never to read it, ``OSError`` if the folder cannot be written, and ``NotRegularFileError`` (a subclass
        of both) if ``control.jsonl`` is not a regular file.
        """
        if (
            check_flag("run.stop checkpoint", checkpoint)
            and self._description.get("saves_when_asked") is False
        ):
            task = str(self._description.get("task")).rpartition(".")[2]
            never = f"False: a {task} never reads ctx.should_stop, and saves by its own code"
            refuse("run.stop checkpoint", True, never, "run.stop()")
        request_stop(self, checkpoint=checkpoint)

    @property
    def keeps_a_model(self) -> bool:
        """Return whether :meth:`finish` exports a model: the best weights, or without early stopping the
        last."""
        return self.trains_the_plan and (self.task_fields or {}).get("export") is True

    @property
    def keeps_best(self) -> bool:
        """Return whether :meth:`finish` exports the weights of the lowest validation loss."""
        fields = self.task_fields or {}
        return fields.get("early_stopping") is not None and fields.get("export") is True

    def finish(self) -> None:
        """Request the end of the training after its next step, and return immediately.

        Unlike :meth:`stop` the run ends as a complete one, ``finished``: it is validated once more, and
        ``export`` writes the last weights, or with ``early_stopping`` the best ones. For ``ss.Pretrain`` and
        ``ss.Finetune``. Raises ``ValueError`` for other tasks, and ``OSError`` if the folder cannot be
        written.
        """
        if not self.trains_the_plan:
            refuse("run.finish", "a task of your own", "a Pretrain or a Finetune", "run.stop()")
        self.send("finish")

    def press(self, button: Button) -> None:
        """Request the stop of ``button`` on behalf of the user; the run's final reason names the button."""
        request_stop(self, checkpoint=button == "Save and stop", button=button)

    def send(self, command: str, **arguments: object) -> None:
        """Append a command for the supervisor or for ``ctx.commands()``.

        No effect on a run that has finished, was stopped or has failed. One that counts as lost gets the
        command too: on another machine it is only known to have been silent for half a minute.
        """
        send_command(self, command, **arguments)

    def wait(self, timeout: float | None = None) -> str:
        """Wait for the end of the run, at most ``timeout`` seconds (None: no limit). Return the status.

        Ctrl-C ends only the wait, not the run. Raises ``ValueError`` for an invalid ``timeout``.
        """
        wait_for(self._has_ended, timeout)
        return self.status

    async def wait_async(self, timeout: float | None = None) -> str:
        """Wait like :meth:`wait`, without blocking the kernel's event loop."""
        await wait_for_async(self._has_ended, timeout)
        return self.status

    def _has_ended(self) -> bool:
        return self.status in FINAL

    def _repr_html_(self) -> str:
        """Render the run's row of the run table, followed by the reason of its status."""
        from html import escape

        from shardscope.runs.explain.compare import Runs

        reason = f"<p>{escape(self.reason)}</p>" if self.reason else ""
        return Runs([self])._repr_html_() + reason

    def __repr__(self) -> str:
        return f"Run({self.name!r}, {self.status}, {str(self.folder)!r})"
