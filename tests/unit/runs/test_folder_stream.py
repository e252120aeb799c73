"""Copies of a run folder: nothing is lost or doubled, wherever the connection breaks."""

from __future__ import annotations

import errno
import functools
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from shardscope.machine.processes import read_start_time
from shardscope.records.folder import NodeFolder, RunFolder
from shardscope.records.redaction import LogCleaner
from shardscope.runs.backends import folder_stream
from shardscope.runs.backends.folder_stream import Chunk, FolderCopy, FolderSource, advance
from shardscope.runs.backends.ray import coordinator as ray_coordinator
from shardscope.runs.backends.ray import puller as ray_puller
from shardscope.runs.backends.ray import stream as ray_stream
from shardscope.runs.backends.ray.coordinator import Coordinator
from shardscope.runs.backends.ray.stream import FROM_KERNEL, NodeStream, StreamHub, create_copy, delete_copy
from shardscope.runs.backends.ray.watch import describe_lost_node


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_stream, "CHUNK_BYTES", 10)


def read_all(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }


def test_a_full_disk_delays_a_file_and_leaves_heartbeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    source, copy = FolderSource(here, lambda name: True), FolderCopy(there)
    (here / "supervisor.json").write_bytes(b"{}")
    (here / "rank-0.log").write_bytes(b"one ")
    copy.write(source.read(copy.list_received()))
    (here / "rank-0.log").write_bytes(b"one two three")
    os.utime(here / "supervisor.json", ns=(5, 5))
    heartbeat, lines = sorted(source.read(copy.list_received()), key=lambda chunk: chunk.name, reverse=True)
    write = os.pwrite

    def write_a_part(descriptor: int, data: memoryview, offset: int) -> int:
        if len(data) < 9:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:4], offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", write_a_part)
        copy.write([heartbeat])  # The time alone needs no space.
        with pytest.raises(OSError, match="No space left"):
            copy.write([lines])
    assert (there / "supervisor.json").stat().st_mtime_ns == 5
    assert (there / "rank-0.log").read_bytes() == b"one "
    copy.write(source.read(copy.list_received()))
    assert read_all(there) == read_all(here)


@pytest.mark.parametrize("seed", range(5))
def test_a_copy_is_equal_although_connections_break(seed: int, small_chunks: None, tmp_path: Path) -> None:
    chance = random.Random(seed)
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "events").mkdir(parents=True)
    (here / "traces").mkdir()
    there.mkdir()
    source, copy = FolderSource(here, lambda name: True), FolderCopy(there)
    for turn in range(60):
        with (here / "events" / f"rank-{turn % 2}.jsonl").open("ab") as file:
            file.write(b"%d " % turn * chance.randrange(9))
        if turn % 7 == 0:
            partial = here / "traces" / ".rank-0"
            partial.write_bytes(chance.randbytes(45))
            partial.replace(here / "traces" / "rank-0.json.gz")
        chunks = source.read(copy.list_received(), max_bytes=30)
        # The receiver is killed between two chunks, or within one, and a new one goes on.
        cut = chance.randrange(len(chunks) + 1)
        copy.write(chunks[:cut])
        if cut < len(chunks) and folder_stream.grows(chunks[cut].name):
            copy.write([chunks[cut]._replace(data=chunks[cut].data[: chance.randrange(10)])])
            # An answer that comes late is one that does not continue what is there.
            copy.write(chunks[:cut])
        if chance.random() < 0.5:
            copy = FolderCopy(there)
    while chunks := source.read(copy.list_received(), max_bytes=30):
        assert sum(len(chunk.data) for chunk in chunks) <= 40
        copy.write(chunks)
    assert read_all(there) == read_all(here)


@pytest.mark.parametrize("num_read", [1, 2])
def test_a_file_may_change_within_one_tick_of_the_clock(
    num_read: int, small_chunks: None, tmp_path: Path
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    source, copy, states = FolderSource(here, lambda name: True), FolderCopy(there), {}
    for text in ("x" * 20, "y" * 45, "z" * 8):
        (here / "result.json").write_text(text)
        os.utime(here / "result.json", ns=(5, 5))
        chunks = source.read(copy.list_received(), max_bytes=10 * num_read)
        copy.write(chunks)
        advance(states, chunks)
        assert states == copy.list_received()
    assert read_all(there) == read_all(here)


def test_an_end_follows_what_it_announces(small_chunks: None, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "nodes" / "1").mkdir(parents=True)
    (here / "logs").mkdir()
    there.mkdir()
    (here / "nodes" / "1" / "ended.json").write_text("{}")
    (here / "status.jsonl").write_text("{}\n")
    (here / "logs" / "rank-0.log").write_text("x" * 95)
    source, copy = FolderSource(here, lambda name: True), FolderCopy(there)
    while chunks := source.read(copy.list_received(), max_bytes=20):
        copy.write(chunks)
        if set(read_all(there)) & {"status.jsonl", "nodes/1/ended.json"}:
            assert (there / "logs" / "rank-0.log").stat().st_size == 95
    assert read_all(there) == read_all(here)


def test_a_heartbeat_is_the_time_of_a_file(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    (here / "supervisor.json").write_text("{}")
    source, copy = FolderSource(here, lambda name: True), FolderCopy(there)
    for seconds in (10, 20):
        os.utime(here / "supervisor.json", (seconds, seconds))
        copy.write(source.read(copy.list_received()))
        assert (there / "supervisor.json").stat().st_mtime == seconds
    assert source.read(copy.list_received()) == []


@pytest.mark.parametrize("name", ["../up.log", "/etc/up.log", "logs/../../up.log", "a//b.log", "."])
def test_no_file_outside_of_the_folder_is_written(name: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(ValueError, match="is no file of a run folder"):
        FolderCopy(tmp_path / "run").write([Chunk(name, 0, b"x", 1, 0)])
    assert [path.name for path in tmp_path.rglob("*")] == ["run"]


def test_what_only_the_kernel_writes_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "task.pkl").write_bytes(b"mine")
    copy = FolderCopy(tmp_path, lambda name: name not in FROM_KERNEL)
    copy.write([Chunk("task.pkl", 0, b"theirs", 6, 5)])
    assert (tmp_path / "task.pkl").read_bytes() == b"mine"


def test_weights_and_large_files_stay_and_the_node_records_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(folder_stream, "MAX_FILE_BYTES", 100)
    stream = NodeStream(1, "run", str(tmp_path / "scratch"))
    assert stream.path.name == "run" and stream.path.stat().st_mode & 0o777 == 0o700
    (stream.path / "nodes" / "1").mkdir()
    checkpoint = stream.path / "checkpoints" / "step-000010"
    checkpoint.mkdir(parents=True)
    (checkpoint / "weights").write_bytes(bytes(7))
    (checkpoint / "position.json").write_text('{"num_steps_done": 10}')
    (stream.path / "large.bin").write_bytes(bytes(101))
    (stream.path / "small.bin").write_bytes(bytes(99))
    (stream.path / "traces" / "rank-1.json.gz").write_bytes(bytes(1000))
    names = {chunk.name for chunk in stream.exchange({}, [])[0]}
    assert names == {"small.bin", "traces/rank-1.json.gz", "nodes/1/kept.json"}
    kept = (stream.path / "nodes" / "1" / "kept.json").read_text()
    assert '"steps": {"checkpoints/step-000010": 10}' in kept and '"large.bin": 101' in kept
    stream.close()
    assert checkpoint.exists()  # Deleted only if nothing stays.


@pytest.mark.parametrize("node", [0, 1])
def test_no_secret_is_sent_before_it_is_masked(node: int, tmp_path: Path) -> None:
    stream, copy = NodeStream(node, "run", str(tmp_path / "node")), FolderCopy(tmp_path / "notebook")
    part = NodeFolder(stream.path, node)
    part.create_own()
    secret, late = "a-secret-of-the-task", "hf_" + "aB3" * 12
    log, name = part.log(node), f"logs/rank-{node}.log"
    cleaner = LogCleaner(log, lambda: [secret])  # The supervisor's, with what a rank has set.
    me = {"pid": os.getpid(), "started": read_start_time(os.getpid())}
    part.supervisor.write_text(json.dumps(me))

    def exchange() -> dict[str, bytes]:
        while chunks := stream.exchange(copy.list_received(), [])[0]:
            copy.write(chunks)
        received = read_all(tmp_path / "notebook")
        assert not any(secret.encode() in data or late.encode() in data for data in received.values())
        return received

    (tmp_path / "notebook").mkdir()
    with log.open("ab", buffering=0) as writer:
        writer.write(f"step 1 {secret}\n".encode())
        assert exchange()[name] == b""
        cleaner.clean()
        cleaner.clean()
        first = f"step 1 {'*' * len(secret)}\n".encode()
        assert exchange()[name] == first
        writer.write(b"step 2\n")
        exchange()
        cleaner.clean()  # One check later, a user who follows the log has the line.
        assert exchange()[name] == first + b"step 2\n"
        # The ranks end, and the end of the log is not masked yet.
        writer.write(f"step 3 {late}".encode())
        for end in (part.ended, part.status):
            end.write_text('{"status": "finished"}\n')
        announced = "status.jsonl" if node == 0 else "nodes/1/ended.json"
        assert announced not in exchange()
        # The supervisor is killed: nobody else masks what is left.
        part.supervisor.write_text(json.dumps({**me, "started": 1.0}))
        received = exchange()
        assert received[name] == first + f"step 2\nstep 3 {'*' * len(late)}".encode()
        assert announced in received


def test_commands_reach_the_cluster_once(tmp_path: Path) -> None:
    hub = StreamHub(create_copy("run", str(tmp_path)))
    lines = b'{"command": "stop"}\n'
    command = Chunk("control.jsonl", 0, lines, len(lines), 0)
    assert hub.pull({}, command)[1] == len(lines)
    # That of a puller that was killed arrives after the next one has sent it again.
    assert hub.pull({}, command)[1] == len(lines)
    assert (hub.path / "control.jsonl").read_bytes() == lines
    delete_copy(hub.path)
    assert list(tmp_path.iterdir()) == []


def test_advance_is_what_a_copy_reports(small_chunks: None, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    (here / "a.log").write_text("x" * 35)
    (here / "b.json").write_text("y" * 25)
    source, copy, states = FolderSource(here, lambda name: True), FolderCopy(there), {}
    while chunks := source.read(copy.list_received(), max_bytes=15):
        copy.write(chunks)
        advance(states, chunks)
        assert states == copy.list_received()
    assert read_all(there) == read_all(here)


def test_attach_starts_no_process_for_a_shared_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(folder: RunFolder) -> None:
        raise AssertionError(folder)

    monkeypatch.setattr(ray_puller, "start_puller", fail)
    (tmp_path / "job.json").write_text('{"scheduler": "ray", "folder": "shared"}')
    ray_puller.continue_stream(RunFolder(tmp_path))


def test_a_cluster_that_no_puller_asks_stops_and_releases_its_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub = StreamHub(create_copy("run", str(tmp_path)))
    hub.stop_if_abandoned()
    assert not hub.is_released
    now = time.monotonic() + ray_stream.FIRST_PULL_SECONDS + 1
    monkeypatch.setattr(time, "monotonic", lambda: now)
    hub.stop_if_abandoned()
    assert hub.is_released and '"stop"' in (hub.path / "control.jsonl").read_text()
    hub.pull({}, None)  # It comes after all: it shall get everything.
    assert not hub.is_released


def call_directly(method: Callable[..., object]) -> SimpleNamespace:
    """Return a method as Ray's actors have it; ``get`` of :func:`stand_in_for_ray` calls it."""
    return SimpleNamespace(remote=lambda *arguments: partial(method, *arguments))


class ActorError(Exception):
    """In place of Ray's error for an actor that has ended."""


class UnavailableError(ActorError):
    """In place of Ray's error for an actor whose connection is broken; it may come back."""


def stand_in_for_ray(monkeypatch: pytest.MonkeyPatch, **functions: Callable[..., object]) -> None:
    """Replace Ray by a module in which the methods of an actor are called in this process."""
    ray, exceptions = ModuleType("ray"), ModuleType("ray.exceptions")
    vars(ray).update({"get": lambda call, timeout: call(), **functions})
    vars(exceptions).update(RayActorError=ActorError, ActorUnavailableError=UnavailableError)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.exceptions", exceptions)


def test_a_deleted_run_folder_stops_the_run_and_deletes_its_copies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    coordinator = Coordinator("/run", 1, {}, is_shared=False, node_folder=str(tmp_path / "scratch"))
    actor = SimpleNamespace(pull=call_directly(coordinator.pull), leave=call_directly(coordinator.leave))
    stand_in_for_ray(monkeypatch, init=lambda **_: None, get_actor=lambda name: actor)
    folder = RunFolder(tmp_path / "run")  # Deleted already.
    assert not coordinator._is_stopped()
    assert ray_puller.pull(folder, "auto", "shardscope-run") == 0
    assert coordinator._is_stopped()
    assert coordinator._hub is not None
    began = time.monotonic()
    coordinator._wait_for_puller(coordinator._hub)
    assert time.monotonic() - began < 30, "it may wait for a day"
    assert list((tmp_path / "scratch").iterdir()) == [] and not folder.path.exists()


def test_a_folder_that_is_deleted_during_a_write_still_stops_its_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.job.write_text('{"address": "auto", "job_id": "shardscope-run"}')
    connections: list[tuple[bool, list[str]]] = []

    def connect(command: list[str], **_: object) -> SimpleNamespace:
        connections.append((folder.path.exists(), command[-2:]))
        shutil.rmtree(folder.path, ignore_errors=True)
        return SimpleNamespace(returncode=2 - len(connections))

    monkeypatch.setattr(ray_puller, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(ray_puller.subprocess, "run", connect)
    ray_puller.keep_pulling(folder)
    assert connections == [(True, ["auto", "shardscope-run"]), (False, ["auto", "shardscope-run"])]


@pytest.mark.parametrize(
    "error",
    [TimeoutError("busy"), OSError(errno.ENOSPC, "full"), UnavailableError("away"), ActorError("gone")],
)
def test_only_the_end_of_an_actor_ends_the_last_exchanges(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    errors: list[Exception] = []

    def get(call: Callable[[], object], timeout: float) -> object:
        if errors:
            raise errors[0] if type(error) is ActorError else errors.pop()
        return call()

    stand_in_for_ray(monkeypatch, get=get)
    monkeypatch.setattr(ray_stream, "PAUSE_SECONDS", 0.05)
    hub = StreamHub(create_copy("run", str(tmp_path / "hub")))
    node = NodeStream(0, "run", str(tmp_path / "node"))
    actor = SimpleNamespace(
        prepare=call_directly(lambda *_: str(node.path)),
        begin=call_directly(node.begin),
        exchange=call_directly(node.exchange),
        close=SimpleNamespace(remote=node.close),
    )
    hub.begin(0, actor, "run", str(tmp_path / "node"))  # type: ignore[arg-type]
    errors += [error] * 5
    trace = random.Random(0).randbytes(9 * 2**20)
    (node.path / "traces" / "rank-0.json.gz").write_bytes(trace)
    (node.path / "status.jsonl").write_text('{"status": "finished"}\n')
    began = time.monotonic()
    hub.drain(0)
    assert time.monotonic() - began < 5
    received = read_all(hub.path)
    if type(error) is ActorError:
        assert "status.jsonl" not in received and node.path.exists()
    else:
        is_equal = received["traces/rank-0.json.gz"] == trace  # No diff of megabytes.
        assert is_equal and "status.jsonl" in received
        assert not node.path.exists()


@pytest.mark.parametrize("error", [UnavailableError("away"), ActorError("gone")])
def test_a_node_whose_connection_breaks_for_a_while_is_not_lost(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answers: list[Exception | tuple[int | None, str]] = [(None, ""), error, (None, ""), (0, "")]

    def poll() -> tuple[int | None, str]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    # One answer of a poll is for `wait`, as Ray keeps it: it is got twice.
    def remote() -> Callable[[], object]:
        return functools.cache(poll)

    stand_in_for_ray(
        monkeypatch, get=lambda call, timeout=None: call(), wait=lambda calls, **_: (calls, []), nodes=list
    )
    monkeypatch.setattr(ray_coordinator, "POLL_SECONDS", 0.01)
    folder = RunFolder(tmp_path / "run")
    folder.create()
    (folder.path / "ray").mkdir()
    coordinator = Coordinator(str(folder.path), 1, {})
    coordinator._nodes = {0: SimpleNamespace(poll=SimpleNamespace(remote=remote))}  # type: ignore[dict-item]
    coordinator._watch_nodes()
    assert ("gone" in describe_lost_node(folder, 0)) == (type(error) is ActorError)
    assert bool(answers) == (type(error) is ActorError)
