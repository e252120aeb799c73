"""Every public use of a run folder, by name, and what each must hold besides an answer."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

import anywidget
import ipywidgets as widgets
import torch
from tests.attack.mutations import TAG

import shardscope as ss
from shardscope.runs import runs
from shardscope.runs.explain.compare import Runs
from shardscope.runs.resume import why_not_resumable
from shardscope.runs.run import Run
from shardscope.runs.summaries import RunSummaries
from shardscope.runs.trained.loading import add_trained_adapters, load_weights
from shardscope.runs.trained.merge_process import merge_adapters
from shardscope.runs.trained.model_files import ModelFiles, find_model
from shardscope.runs.watch.free_memory import read_free_memory
from shardscope.training.data.weights_tokenizer import WeightsTokenizer
from shardscope_widgets import RunView
from shardscope_widgets.run.runs_view import RunsView

DRAW_SECONDS = 6.0
"""On a machine that has other things to do; how long the drawing took is judged apart."""
RUN_PROPERTIES = (
    *("name", "folder", "world_size", "is_on_this_machine", "gpus", "predicted_step_seconds", "num_steps"),
    *("trains_the_plan", "reads_stop_requests", "note"),
)
SUMMARY_PROPERTIES = (
    *("is_live", "plan", "last_metrics", "loss", "num_steps_done", "num_steps", "seconds", "has_trace"),
    *("failed_early", "why_not_resumable", "resumed_from", "status", "reason", "damage"),
)
GOOD = "good"
"""The run beside the damaged one, which every list has."""


class WrongError(Exception):
    """An answer that must not be given: another run is hidden, or HTML of the folder is in a view."""


@dataclass
class Use:
    """One damaged folder, and the handle on it, if it opens."""

    path: Path
    run: Run | None = None
    thread_errors: list[str] = field(default_factory=list)

    @property
    def parent(self) -> Path:
        return self.path.parent

    def note_thread_error(self, raised: threading.ExceptHookArgs) -> None:
        """For ``threading.excepthook``: a view that loses its thread shows nothing any more."""
        self.thread_errors.append(
            f"a thread raised {raised.exc_type.__name__}: {str(raised.exc_value)[:200]}"
        )


class _Parser(HTMLParser):
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == TAG or any(name.startswith("onxss") for name, _ in attrs):
            raise WrongError(f"HTML from the folder is in the page: {self.get_starttag_text()}"[:300])

    handle_startendtag = handle_starttag


def check_html(html: object) -> None:
    """Raise :class:`WrongError` if ``html`` has an element or attribute that a mutation put into a file."""
    if isinstance(html, str) and "xss" in html:
        parser = _Parser(convert_charrefs=False)
        parser.feed(html)
        parser.close()


def check_plain(text: str | None) -> None:
    """Raise :class:`WrongError` if ``text`` has a control character; progress bars keep their "\\r"."""
    odd = {letter for letter in text or "" if ord(letter) < 32 or 0x7F <= ord(letter) < 0xA0} - {*"\n\t\r"}
    if odd:
        raise WrongError(f"control characters: {sorted(odd)}")


# ---- a handle


def attach(use: Use) -> None:
    use.run = Run.attach(use.path)


def read_properties(run: Run) -> None:
    for name in RUN_PROPERTIES:
        getattr(run, name)
    repr(run)


def read_memory(run: Run) -> None:
    memory = run.memory()
    list(memory)
    for name in ("sentence", "error", "tensor_bytes"):
        getattr(memory, name)
    repr(memory)
    if hasattr(memory, "_repr_html_"):
        check_html(memory._repr_html_())


def read_trace(run: Run) -> None:
    trace = run.trace()
    repr(trace)
    if hasattr(trace, "_repr_html_"):
        check_html(trace._repr_html_())


def read_model(run: Run) -> None:
    repr(run.model)
    repr(run.recorded_base)


def open_chat(run: Run) -> None:
    """Open the chat; that its process loads is :func:`load_model`'s."""
    run.chat().close()


def open_chat_with_base(run: Run) -> None:
    run.chat(base=True).close()


def load_model(run: Run) -> None:
    """Load the model as the process of a chat does, here, where the libraries are imported already."""
    files = find_model(run, "run")
    with _as_in_a_process():
        WeightsTokenizer(files.weights_folder).load()
        model = load_weights(files, torch.float32)
        if files.adapters is not None:
            add_trained_adapters(model, files.adapters)


def merge_weights(use: Use) -> None:
    def merge_here(files: ModelFiles, folder: Path, report: object) -> None:
        with _as_in_a_process():
            merge_adapters(files, folder)
            return
        raise RuntimeError("merging failed")

    with mock.patch("shardscope.runs.trained.merge._run_process", merge_here):
        try:
            ss.merge(use.path)
        except RuntimeError:
            return


@contextmanager
def _as_in_a_process() -> Iterator[None]:
    """Suppress what a library raises, which ends its process; not a lack of memory, which ends others too."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        if "memory" in str(error):
            raise


def follow(run: Run) -> None:
    follow = run.follow()
    for _ in range(20):
        follow.read()
        if not follow.is_behind:
            return


def read_logs(run: Run) -> None:
    for rank in range(min(run.world_size, 4)):
        check_plain(run.logs(rank))


def read_samples(run: Run) -> None:
    for sample in run.samples():
        check_plain(sample["prompt"] + sample["text"])


# ---- lists


def list_runs(use: Use) -> None:
    found = runs(use.parent)
    _check_good(run for run in found if run.name == GOOD)
    check_html(found._repr_html_())
    found.to_frame()
    found.curves()


def compare(use: Use) -> None:
    found = runs(use.parent)
    if use.run is not None and use.path.name in [run.name for run in found]:
        comparison = found.compare(GOOD, use.path.name)
        check_html(comparison._repr_html_())
        comparison.to_frame()
        _ = comparison.task_differences
    check_html(Runs([run for run in found if run.name == GOOD])._repr_html_())


def summarize(use: Use) -> None:
    found = {summary.name: summary for summary in RunSummaries(use.parent).read()}
    if GOOD not in found:
        raise WrongError("another run is hidden")
    if use.path.name not in found and any(
        (use.path / name).is_file() for name in ("run.json", "status.jsonl")
    ):
        raise WrongError("the damaged run has no row")
    for summary in found.values():
        for name in SUMMARY_PROPERTIES:
            getattr(summary, name)
    if found[GOOD].loss is None or found[GOOD].status != "stopped":
        raise WrongError("the summary of another run is not its own")


def _check_good(found: Iterable[Run]) -> None:
    (good,) = list(found) or [None]
    if good is None:
        raise WrongError("another run is hidden")
    if good.status != "stopped" or len(good.metrics()) != 16:
        raise WrongError(f"another run is {good.status} with {len(good.metrics())} lines of metrics")


def pick_checkpoint(run: Run) -> None:
    """Pick the checkpoint as Resume in the Runs tab does."""
    why_not_resumable(run)


def check_resume(use: Use) -> None:
    """Resume by the good run's name, which the damaged run may claim."""
    plan = _good_plan(use)
    ss.Pretrain(num_steps=20, resume=True).check_launch(plan, use.parent, GOOD)


def resume_from_path(use: Use) -> None:
    ss.Pretrain(num_steps=20, resume=use.path).check(_good_plan(use))


def _good_plan(use: Use) -> ss.Plan:
    return Run.attach(use.parent / GOOD).plan


def list_free(use: Use) -> None:
    read_free_memory(use.parent)


# ---- views


def show_run(use: Use) -> None:
    assert use.run is not None
    with _render_view(lambda: RunView(use.run)) as view:
        deadline = time.monotonic() + DRAW_SECONDS
        while view._is_watching and not (view.status and view._sampled):
            if time.monotonic() > deadline:
                raise WrongError(f"the view was not drawn within {DRAW_SECONDS:.0f} s")
            time.sleep(0.01)
        if not view.status and not view.error.value:
            raise WrongError("the view shows neither a status nor an error")


def show_runs(use: Use) -> None:
    with _render_view(RunsView) as view:
        if f">{GOOD}<" not in view.table.value:
            raise WrongError("another run has no row in the Runs tab")
        good = next(summary.run for summary in view._rows.values() if summary.name == GOOD)
        if use.run is not None:
            view.compare(good, use.run)
            check_html(view.comparison.table.value)
            check_html(view.comparison.chart.to_svg())


@contextmanager
def _render_view(make: Callable[[], Any]) -> Any:
    view = make()
    try:
        yield view
        for part in _list_parts(view):
            # Those of ours set it as the HTML of an element.
            if isinstance(part, widgets.HTML | anywidget.AnyWidget):
                check_html(getattr(part, "value", None))
        check_html((view._repr_mimebundle_() or {}).get("text/html"))
    finally:
        view.close()


def _list_parts(view: Any) -> Iterable[Any]:
    yield view
    for child in getattr(view, "children", ()):
        yield from _list_parts(child)


# ---- what changes the run, last


def wait(run: Run) -> None:
    run.wait(timeout=0)
    asyncio.run(run.wait_async(timeout=0))


def _of_run(use_run: Callable[[Run], object]) -> Callable[[Use], None]:
    """A use of the handle, where there is one."""

    def call(use: Use) -> None:
        if use.run is not None:
            use_run(use.run)

    return call


CALLS: dict[str, Callable[[Use], None]] = {
    "Run.attach": attach,
    "run.status": _of_run(lambda run: run.status),
    "run.reason": _of_run(lambda run: check_plain(run.reason)),
    "run.error": _of_run(lambda run: check_plain(run.error)),
    "run.history": _of_run(lambda run: run.history),
    "properties of the run": _of_run(read_properties),
    "run.plan": _of_run(lambda run: run.plan),
    "run.predicted_metrics": _of_run(lambda run: run.predicted_metrics()),
    "run.metrics": _of_run(lambda run: run.metrics()),
    "run.follow": _of_run(follow),
    "run.logs": _of_run(read_logs),
    "run.gpu_samples": _of_run(lambda run: run.gpu_samples()),
    "run.samples": _of_run(read_samples),
    "run.engine_reports": _of_run(lambda run: run.engine_reports()),
    "run.memory": _of_run(read_memory),
    "run.memory().snapshot": _of_run(lambda run: run.memory().snapshot(0)),
    "run.trace": _of_run(read_trace),
    "run.model": _of_run(read_model),
    "run.model_card": _of_run(lambda run: check_plain(run.model_card())),
    "run.gguf_command": _of_run(lambda run: run.gguf_command()),
    "run.chat": _of_run(open_chat),
    "run.chat(base=True)": _of_run(open_chat_with_base),
    "the model of run.chat": _of_run(load_model),
    "ss.merge": merge_weights,
    "run._repr_html_": _of_run(lambda run: check_html(run._repr_html_())),
    "run.wait": _of_run(wait),
    "ss.runs": list_runs,
    "compare": compare,
    "RunSummaries": summarize,
    "read_free_memory": list_free,
    "resume in the Runs tab": _of_run(pick_checkpoint),
    "Pretrain(resume=True)": check_resume,
    "Pretrain(resume=folder)": resume_from_path,
    "RunView": lambda use: None if use.run is None else show_run(use),
    "RunsView": show_runs,
    "run.stop": _of_run(lambda run: run.stop()),
    "run.stop(checkpoint=True)": _of_run(lambda run: run.stop(checkpoint=True)),
}
"""In this order; a call after :func:`attach` uses its handle."""
