"""Tests of untrusted run folders: special files in every place, invalid values, and hostile text."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hostile_runs import plant_text, plant_text_everywhere, write_full_run
from ipywidgets import Widget
from tests.faults import includes_slow_tests
from tests.requirements import sample
from written_runs import PLAN, write_run

import shardscope as ss
from shardscope.records.log_search import LogSearch
from shardscope.runs.backends import this_machine
from shardscope.runs.resume import why_not_resumable
from shardscope.runs.summaries import RunSummaries
from shardscope.runs.watch.free_memory import read_free_memory
from shardscope_widgets.kit.saved.static_picture import TEXT_WIDGETS
from shardscope_widgets.run.runs_view import RunsView
from shardscope_widgets.run.view import RunView

HANG_SECONDS = 30.0
"""A call that has not returned by then blocks or reads without end; normally it takes 0.1 s."""
PRECIOUS = "a file of the user's\n"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class HangError(BaseException):
    """A call did not return in time. Not an `Exception`, so that no error handler catches it."""


@contextmanager
def time_limit() -> Iterator[None]:
    """Interrupt a call that hangs, also in a system call."""

    def raise_hang_error(*_: object) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, raise_hang_error)
    signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


NAMES = (
    *("run.json", "status.jsonl", "control.jsonl", "supervisor.json", "supervisor.log", "exits.jsonl"),
    *("cards.jsonl", "samples.jsonl", "note.json", "summary.json", "metrics.csv", "task.pkl"),
    *("events/rank-0.jsonl", "logs/rank-0.log", "logs/launcher.log", "errors/rank-1.json"),
    *("errors/launcher.json", "ranks/rank-0.json", "stacks/rank-0.txt", "what_it_was/rank-0.json"),
    *("traces/rank-0.json.gz", "memory_snapshots/rank-0.pickle"),
    *("events", "logs", "errors", "ranks", "what_it_was", "traces", "stacks", "memory_snapshots"),
)


def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def make_sparse_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10 * 2**30)


def make_sparse_file_after_a_line(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b'{"step": 1, "rank": 0}\n')
        file.truncate(10 * 2**30)


def bind_socket(path: Path) -> None:
    # A relative name: the path of a socket has 107 bytes at most.
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(before)


def text_writer(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(text) and None


LISTS = dict.fromkeys(
    ("status", "time", "reason", "rank", "step", "loss", "pid", "started", "code", "note"), ()
)
ODD = {"summary": [1], "traceback": {}, "monotonic": {}, "memory": 3, "engine": [], "plan": [], "asked": 1}
WRONG_TYPES = json.dumps({**LISTS, **ODD, "world_size": 2, "gpus": "x", "machine": 7, "predicted": 3}) + "\n"
NUMBERS = (
    *("time", "rank", "step", "loss", "pid", "started", "code", "monotonic", "num_steps", "step_seconds"),
    *("memory_bytes", "peak_memory_bytes", "looks_for_stop", "created", "tokens_per_second"),
)
OF_NUMBERS = (
    '{"status": "running", "world_size": 2, "utilisation_percent": [NUMBER, NUMBER], '
    + ", ".join(f'"{name}": NUMBER' for name in NUMBERS)
    + "}\n"
)
KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "link to /dev/zero": link_to("/dev/zero"),
    "link to a file": link_to("../../precious"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to nothing": link_to("nothing"),
    "folder": Path.mkdir,
    "socket": bind_socket,
    "sparse": make_sparse_file,
    "sparse after a line": make_sparse_file_after_a_line,
    "no JSON": text_writer("\x00nonsense\n{\n"),
    "list": text_writer("[1]\n"),
    "wrong types": text_writer(WRONG_TYPES),
    "huge integers": text_writer(OF_NUMBERS.replace("NUMBER", "1" + "0" * 400)),
    "large integers": text_writer(OF_NUMBERS.replace("NUMBER", "1" + "0" * 300)),
    "infinite": text_writer(OF_NUMBERS.replace("NUMBER", "1e999")),
    "negative": text_writer(OF_NUMBERS.replace("NUMBER", "-1")),
    "deep": text_writer('{"status": ' + "[" * 100_000 + "]" * 100_000 + "}\n"),
    "deep enough": text_writer('{"status": ' + "[" * 900 + "]" * 900 + "}\n"),
    "many digits": text_writer('{"status": "running", "time": ' + "9" * 2_000_000 + "}\n"),
}
if os.getuid() == 0:
    KINDS["device"] = lambda path: os.mknod(path, 0o20600, os.makedev(1, 5))  # /dev/zero itself


def plant_file(folder: Path, name: str, kind: str) -> None:
    path = folder / name
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    KINDS[kind](path)


def list_calls_on_run(run: ss.Run) -> Iterator[Callable[[], object]]:
    """Yield every public use of a run handle that was created before the folder was changed."""
    yield lambda: (run.status, run.reason, run.error, run.history, run.note, run.created, run.task_fields)
    yield lambda: (run.name, run.world_size, run.plan, run.gpus, run.num_steps, run.predicted_step_seconds)
    yield lambda: (run.is_on_this_machine, run.trains_the_plan, run.reads_stop_requests, repr(run))
    yield run.metrics
    yield lambda: (run.memory(), run.memory().to_html(), run.memory().error)
    yield lambda: run.memory().snapshot()
    yield run.engine_reports
    yield run.logs
    yield lambda: run.logs(1)
    yield run.gpu_samples
    yield run.samples
    yield run.predicted_metrics
    yield lambda: run.follow().read()
    yield run.trace
    yield lambda: ss.Trace.load(run.folder)
    yield lambda: run.wait(0)
    yield run._repr_html_
    yield lambda: why_not_resumable(run)
    yield lambda: LogSearch(run.folder / "logs" / "rank-0.log", "text").search_next()
    yield run.stop
    yield lambda: run.stop(checkpoint=True)
    yield lambda: run.press("Save and stop")
    yield lambda: setattr(run, "note", "a new one")


def list_calls_on_folder(path: Path) -> Iterator[Callable[[], object]]:
    """Yield every public use of a folder of runs, one of which is ``path``."""
    parent = path.parent
    yield lambda: ss.Run.attach(path)
    yield lambda: ss.runs(parent).compare("whole", path.name)._repr_html_()
    yield lambda: ss.runs(parent).compare("whole", path.name).to_frame()
    yield lambda: ss.runs(parent).curves("loss")
    yield lambda: read_free_memory(parent)


def call_within_limit(call: Callable[[], object]) -> None:
    with time_limit(), suppress(ValueError):
        call()


def read_every_field(summary: Any) -> None:
    names = ("plan", "last_metrics", "loss", "num_steps_done", "num_steps", "seconds", "has_trace", "is_live")
    for name in names:
        getattr(summary, name)
    assert summary.failed_early in (True, False)
    assert summary.why_not_resumable is None or isinstance(summary.why_not_resumable, str)
    assert summary.resumed_from is None or isinstance(summary.resumed_from, str)


def check_views(path: Path) -> None:
    """Check that the list shows both runs, and opens and compares them, whatever is in the folder."""
    view = RunsView()
    try:
        assert view.num_runs == 2 and "whole" in view.table.value and path.name in view.table.value
        runs = list(ss.runs(path.parent))
        for run in runs:
            run_view = RunView(run)
            try:
                run_view.refresh()
            finally:
                run_view.close()
        if len(runs) == 2:
            view.compare(*runs)
    finally:
        view.close()


def check_lists(path: Path) -> None:
    """Check that a damaged folder is one row in every list, and hides no other run."""
    with time_limit():
        for summary in RunSummaries(path.parent).read():
            read_every_field(summary)
        runs = ss.runs(path.parent)
        names = [run.name for run in runs] + [damaged.name for damaged in runs.damaged]
        assert sorted(names) == sorted(["whole", path.name])
        assert all(damaged.damage for damaged in runs.damaged)
        frame = runs.to_frame()
        assert sorted(frame["run"]) == sorted(names) and "whole" in runs._repr_html_()
        whole = frame[frame["run"] == "whole"].iloc[0]
        assert whole["status"] == "finished" and whole["loss"] > 0
        for name, status, plan in zip(frame["run"], frame["status"], frame["plan"], strict=True):
            assert status != "damaged" or ((name == path.name and " is " in plan) or "damaged" in plan), plan


def list_cases() -> list[tuple[str, str]]:
    """Return every kind of file under every name, or a sample that has each kind and each name."""
    all_cases = [(name, kind) for name in NAMES for kind in KINDS]
    return all_cases if includes_slow_tests() else all_cases[::17]


@sample(8)
@pytest.mark.parametrize(("name", "kind"), list_cases(), ids=lambda value: value.replace("/", "-"))
def test_fault_55_every_call_returns_for_any_kind_of_file(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(this_machine, "start_supervisor", lambda *_: None)
    Path("precious").write_text(PRECIOUS)
    write_run("whole", number=1)
    path = write_full_run("odd")
    run = ss.Run.attach(path)
    plant_file(path, name, kind)
    for call in list_calls_on_run(run):
        call_within_limit(call)
    plant_file(path, name, kind)  # Setting a note, or caching a summary, may have replaced it.
    for call in list_calls_on_folder(path):
        call_within_limit(call)
    check_lists(path)
    with time_limit():
        check_views(path)
    task = ss.Pretrain(num_steps=1)
    call_within_limit(lambda: ss.launch(PLAN, task, name="odd", force=True))
    with time_limit():
        assert ss.launch(PLAN, task, name="new", force=True).name == "new"
    assert Path("precious").read_text() == PRECIOUS


# ---------------------------------------------------------------------------- hostile text

EVIL = "<img src=x onerror=alert(1)>' onfocus='alert(2)' x=\" onblur=\"alert(3)\" </script></style></title>"


@pytest.mark.parametrize("place", ["traces/.shardscope-cache", "recordings/1/.shardscope-cache"])
def test_a_run_is_attached_after_its_traces_were_opened(place: str, tmp_path: Path) -> None:
    write_run("run", parent=tmp_path)
    (tmp_path / "run" / place).mkdir(parents=True)
    (tmp_path / "run" / "logs" / ".ipynb_checkpoints").mkdir(parents=True)
    assert ss.Run.attach(tmp_path / "run").status == "finished"
    (tmp_path / "run" / place).rmdir()
    (tmp_path / "run" / place).symlink_to(tmp_path)
    with pytest.raises(ValueError, match="is damaged"):
        ss.Run.attach(tmp_path / "run")


class Markup(HTMLParser):
    """A parser that collects elements and attributes that no view of ours writes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.violations: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        # The static image of a chart, for notebooks that are not trusted.
        is_chart = tag == "img" and (given.get("src") or "").startswith("data:image/svg+xml;base64,")
        if is_chart:
            self.violations += Markup(b64decode((given["src"] or "").partition(",")[2]).decode()).violations
        elif tag in ("img", "script", "iframe", "object", "embed", "a"):
            self.violations.append(tag)
        self.violations += [f"{tag} {name}" for name in given if name.startswith("on")]


def html_of_toolkit(path: Path) -> Iterator[tuple[str, object]]:
    """Yield all HTML that the toolkit writes about the runs beside ``path``, and about that run."""
    runs = ss.runs(path.parent)
    yield "runs", runs._repr_html_()
    for run in runs:
        yield run.name, run._repr_html_()
        yield "memory", run.memory().to_html()
        yield "compared", runs.compare("whole", run)._repr_html_()
        with suppress(ValueError):
            trace = run.trace()
            yield "trace", trace._repr_html_()
            yield "kernels", trace.summary()._repr_html_()
        with suppress(ValueError):
            yield "plan", run.plan._repr_html_()
            yield "plan's memory", run.plan.memory().to_html()


def html_of_views(path: Path) -> Iterator[tuple[str, object]]:
    """Yield all HTML of the widgets that show these runs, and of their static output."""
    view = RunsView()
    try:
        yield from html_of_widget("list", view)
        traces = re.findall(r"data-act='(trace:[^']*)'", view.table.value)
        runs = list(ss.runs(path.parent))
        for run in runs:
            view.open(run)
            for whose in (0, 1, "launcher", "supervisor"):
                view.run_view.logs.whose.value = whose
                for words in ("", "img"):
                    view.run_view.logs.words.value = words
                    view.run_view.refresh()
                    yield from html_of_widget("run", view)
            yield "charts", json.dumps(view.run_view.figure.widget.to_dict(), default=str).replace('\\"', "'")
            view.show_list()
        for act in traces:
            view.table.press_button(act)
            yield from html_of_widget("trace", view)
            view.show_list()
        if len(runs) == 2:
            view.compare(*runs)
            yield from html_of_widget("comparison", view)
    finally:
        view.close()


def list_widgets(view: Widget) -> list[Widget]:
    """Return the widget and all widgets that its traits refer to."""
    parts = [view]
    for widget in parts:
        for value in (getattr(widget, name) for name in widget.keys):
            for part in value if isinstance(value, list | tuple) else (value,):
                if isinstance(part, Widget) and part not in parts:
                    parts.append(part)
    return parts


def html_of_widget(name: str, view: Any) -> Iterator[tuple[str, object]]:
    for part in list_widgets(view):
        if isinstance(part, TEXT_WIDGETS):
            yield f"{name}, {type(part).__name__}", part.value
    yield f"{name}, static picture", view._repr_mimebundle_()["text/html"]


def assert_only_text(path: Path) -> None:
    all_html = ""
    for where, html in (*html_of_toolkit(path), *html_of_views(path)):
        assert isinstance(html, str)
        assert not Markup(html).violations, f"{where}: {Markup(html).violations} in {html}"
        all_html += html
    assert "&lt;img" in all_html, "the text was shown nowhere, so that the test proves nothing"


def list_fields(value: Any, prefix: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield (*prefix, key)
        yield from list_fields(child, (*prefix, key))


JSON_FILES = (
    *("run.json", "status.jsonl", "supervisor.json", "exits.jsonl", "cards.jsonl", "note.json"),
    *("events/rank-0.jsonl", "errors/rank-1.json", "errors/launcher.json", "ranks/rank-0.json"),
    *("what_it_was/rank-0.json", "summary.json", "samples.jsonl"),
)


@pytest.fixture(scope="module")
def example_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with every file, the cached summary included, beside an intact run."""
    parent = tmp_path_factory.mktemp("example") / "runs"
    write_run("whole", number=1, parent=parent)
    path = write_full_run("odd", "failed", parent=parent)
    ss.runs(parent).to_frame()
    return path


def copy_example(example: Path) -> Path:
    """Copy the example with its file times, by which a cached summary recognizes its files."""
    shutil.copytree(example.parent, "runs")
    return Path("runs") / example.name


@sample(3)
@pytest.mark.parametrize("name", JSON_FILES)
def test_fault_49_text_in_any_field_of_a_run_folder_is_escaped(name: str, example_runs: Path) -> None:
    record = json.loads((example_runs / name).read_text().splitlines()[0])
    paths = list(list_fields(record))
    # Each value, or its key; a sample takes one per file.
    step = 1 if includes_slow_tests() else len(paths)
    for index, field in enumerate(paths[::step]):
        path = copy_example(example_runs)
        # The name proves that a damaged folder is shown at all.
        path = path.rename(path.with_name("<img src=x onerror=alert(1)>"))
        plant_text(path, name, field, EVIL, is_key=index % 2 == 1)
        assert_only_text(path)
        shutil.rmtree("runs")


def test_fault_49_text_in_all_fields_of_a_run_folder_is_escaped(example_runs: Path) -> None:
    path = copy_example(example_runs)
    path = path.rename(path.with_name(EVIL.replace("/", "")))
    plant_text_everywhere(path, EVIL)
    assert_only_text(path)


@sample(2)
@pytest.mark.parametrize("status", [EVIL, "Finished", "", None, 3, ["finished"], {}, True])
def test_fault_49_unknown_status_marks_the_run_as_damaged(status: object) -> None:
    write_run("whole", number=1)
    path = write_run(EVIL.replace("/", ""))
    (path / "supervisor.json").unlink()
    with (path / "status.jsonl").open("a") as file:
        file.write(json.dumps({"time": 1.0, "status": status, "reason": ""}) + "\n")
    with pytest.raises(ValueError, match=r"status\.jsonl is damaged: its status is .*; allowed: failed, "):
        ss.Run.attach(path)
    assert [one.name for one in ss.runs().damaged] == [path.name]
    assert_only_text(path)


def test_fault_49_unknown_status_appended_later_is_ignored() -> None:
    path = write_run("odd", "running")
    run = ss.Run.attach(path)
    with (path / "status.jsonl").open("a") as file:
        file.write(json.dumps({"time": 1.0, "status": EVIL, "reason": EVIL}) + "\n")
    assert run.status == "running" and EVIL not in str(run.history)
