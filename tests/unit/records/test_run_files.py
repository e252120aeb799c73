"""Tests of the files of a run folder: TensorBoard events, the CSV of metrics, and masked secrets."""

from __future__ import annotations

import csv
import errno
import math
import os
import re
import resource
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_runs import wait_until
from tensorboardX.proto.event_pb2 import Event

from shardscope.machine.processes import identify_machine
from shardscope.records import json_files, metrics_table, redaction
from shardscope.records.folder import RunFolder
from shardscope.records.json_files import (
    LineTail,
    SampledLines,
    append_line,
    delete_partial_files,
    encode,
    read_json,
    read_lines,
    write_json,
)
from shardscope.records.metrics_table import compute_curve, write_csv_in_pieces
from shardscope.records.redaction import LogCleaner, read_masked_size, redact
from shardscope.runs.launch.environment import build_launcher_environment
from shardscope.runs.launch.new_secrets import SecretReceiver
from shardscope.runs.run import Run
from shardscope.runs.tensorboard import ScalarFile

HF = "hf_" + "aB3" * 11


@pytest.mark.parametrize(
    "secret",
    [
        HF,
        "ghp_" + "x1" * 18,
        "sk-proj-" + "Zz9_" * 8,
        "AKIA" + "ABCD1234" * 2,
        "glpat-" + "a-B_" * 6,
        "value-of-the-users-key",
        "päss wörd (.*) 12",
    ],
)
def test_secrets_are_masked_with_their_length(
    secret: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "value-of-the-users-key")
    monkeypatch.setenv("db_password", "päss wörd (.*) 12")
    assert redact(f"before {secret} after") == f"before {'*' * len(secret)} after"
    assert secret.encode() not in encode({"nested": [{"text": f"x {secret}"}]})
    log = tmp_path / "log"
    log.write_text(f"before {secret} after\n")
    assert LogCleaner(log).clean() == 1
    assert log.read_bytes() == f"before {'*' * len(secret.encode())} after\n".encode()


def test_text_without_secrets_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_KEY", "/home/me/.ssh/id_rsa")
    monkeypatch.setenv("SHORT_TOKEN", "yes")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "parallelism")
    monkeypatch.setenv("KEYBOARD_LAYOUT", "querty-layout")
    plain = "/home/me/.ssh/id_rsa yes parallelism querty-layout https://host:443/x@y hf_hub risk-free task-1"
    assert redact(plain) == plain
    words = "/data/task-llama-3-1-8b-instruct-lora a clearer understanding_of_it"
    assert redact(words) == words
    key = "sk-" + "a1B2" * 6
    for before in ("\\n", "\x1b[32m", "\x1b[m", "key=", "my_"):  # None of these is part of a word.
        assert redact(f"{before}{key}") == before + "*" * len(key)
    assert redact("https://me:pass@host/x") == "https://*******@host/x"
    assert redact("Authorization: Bearer abc.def-ghi_jkl") == "Authorization: Bearer ***************"


def test_fields_written_as_is_are_not_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASSWORD", "workshop")
    record = {"sys_path": ["/home/me/workshop", Path("/x")], "task": "workshop"}
    write_json(tmp_path / "run.json", record, as_is=("sys_path", "machine"))
    assert read_json(tmp_path / "run.json") == {"sys_path": ["/home/me/workshop", "/x"], "task": "*" * 8}


def test_truncated_secret_is_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    cleaner = LogCleaner(log)
    log.write_text(HF[:25])  # Long enough to be one.
    assert cleaner.clean() == 1 and log.read_text() == "*" * 25
    for _ in range(3):  # Cleaning again finds nothing.
        assert cleaner.clean() == 0
    with log.open("a") as writer:
        writer.write(f"{HF[25:]}\n{HF}")
    assert cleaner.clean() == 2 and cleaner.clean() == 0
    assert set(log.read_text()) == {"*", "\n"}
    # Wherever a pass ends: within a secret that is longer than any overlap, and within known formats.
    big = "-s3cr3t" * 1000
    monkeypatch.setenv("BIG_SECRET", big)
    log.write_text(f"{'x' * 1000}{big}\n{HF} {HF}")
    for max_bytes in (900, 1010):
        cleaner = LogCleaner(log)
        while cleaner.offset < log.stat().st_size:
            cleaner.clean(max_bytes)
        list(cleaner.finish())
        assert set(log.read_text()[1000:]) == {"*", "\n", " "}
        log.write_text(f"{'x' * 1000}{big}\n{HF} {HF}")
    assert list(LogCleaner(log).finish())[-1] >= 3 and "3" not in log.read_text()


def test_secret_written_in_pieces_is_masked_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHORT_TOKEN", "abcdefgh12")  # A prefix of the next one.
    monkeypatch.setenv("LONG_TOKEN", "abcdefgh12-and-its-rest")
    bearer = "Bearer " + "k3y." * 3000  # Longer than the overlap of two passes.
    log = tmp_path / "log"
    cleaner = LogCleaner(log)
    with log.open("ab", buffering=0) as writer:
        for text in ("abcdefgh12-and-its-rest\n", f"{bearer}\n", f"{HF}\n"):
            for start in range(0, len(text), max(1, len(text) // 40)):
                writer.write(text[start : start + max(1, len(text) // 40)].encode())
                cleaner.clean()
        writer.write(b"abcdefgh12 ends here\n")
    assert cleaner.clean() == 1
    whole = log.read_text()
    expected = f"{'*' * 23}\nBearer {'*' * 12000}\n{'*' * len(HF)}\n{'*' * 10} ends here\n"
    assert whole == expected


def test_a_log_may_be_read_up_to_what_may_become_a_secret(tmp_path: Path) -> None:
    log = tmp_path / "log"
    cleaner = LogCleaner(log)
    key = f"-----BEGIN PRIVATE KEY-----\n{'MIIB' * 16}\n{'x' * 40}\n-----END PRIVATE KEY-----\n"

    def write(text: str) -> str:
        """Return what may be read after the next check."""
        with log.open("a") as writer:
            writer.write(text)
        cleaner.clean()
        return log.read_bytes()[: read_masked_size(log)].decode()

    assert write("one\n") == ""  # The first question: the cleaner did not know of it.
    assert write("") == "one\n"
    assert write("a bar\rof progress") == "one\na bar\r"
    assert write("") == "one\na bar\rof progress"
    assert write(f"\n{HF[:10]}") == "one\na bar\rof progress\n"
    assert write(f"{HF[10:]}\n") == f"one\na bar\rof progress\n{'*' * len(HF)}\n"
    before = log.read_bytes().decode()
    assert write(key[:80]) == write(key[80:120]) == before
    after = write(key[120:])
    assert after.encode() == log.read_bytes() and "MIIB" not in after
    with log.open("a") as writer:
        writer.write(f"end {HF}")
    list(cleaner.finish())
    assert log.read_bytes()[: read_masked_size(log)].decode() == f"{after}end {'*' * len(HF)}"


def test_secret_split_across_two_writes_is_masked(tmp_path: Path) -> None:
    log = tmp_path / "log"
    cleaner = LogCleaner(log)
    assert cleaner.clean() == 0
    with log.open("ab", buffering=0) as writer:  # Ranks append too, whatever else happens to the file.
        writer.write(b"\xff\xfe" + HF[:10].encode())
        assert cleaner.clean() == 0
        writer.write(HF[10:].encode() + b"\n")
        assert cleaner.clean() == 1
        writer.write(b"z" * 3_000_000 + f" {HF}\n".encode())
        assert cleaner.clean() == 1 and cleaner.clean() == 0
        writer.write(b"end\n")
    data = log.read_bytes()
    assert HF.encode() not in data and data.startswith(b"\xff\xfe***") and data.endswith(b"**\nend\n")
    assert len(data) == 2 + len(HF) + 1 + 3_000_000 + 1 + len(HF) + 1 + 4


def test_metrics_are_written_as_tensorboard_events(tmp_path: Path) -> None:
    """Lines without a step or a number produce no event; text and booleans are not numbers."""
    file = ScalarFile(tmp_path / "rank-0")
    file.append([{"step": 0, "time": 1.0, "text": "only"}, {"step": "x", "loss": 1.0}])
    assert not (tmp_path / "rank-0").exists()
    file.append([{"step": 300, "rank": 1, "time": 2.0, "loss": 2.5, "text": "x", "flag": True, "none": None}])
    file.append([{"step": 301, "time": 3.0, "loss": "NaN", "huge": 1e300, "integer": 10**400}])
    (path,) = (tmp_path / "rank-0").iterdir()
    data, events = path.read_bytes(), []
    while data:  # TFRecord: length, its checksum, an event, its checksum.
        (length,) = struct.unpack("<Q", data[:8])
        events.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    assert [event.step for event in events] == [0, 300, 301]
    assert events[0].file_version == "brain.Event:2"
    assert {value.tag: value.simple_value for value in events[1].summary.value} == {"loss": 2.5}
    values = {value.tag: value.simple_value for value in events[2].summary.value}
    assert math.isnan(values["loss"]) and values["huge"] == values["integer"] == math.inf


def test_metrics_are_written_as_csv(folder: RunFolder) -> None:
    assert list(write_csv_in_pieces(folder, 2, print)) and not folder.csv.exists()
    append_line(folder.events(0), {"step": 0, "rank": 0, "time": 1.5, "loss": float("nan")})
    append_line(
        folder.events(0), {"step": 1, "rank": 0, "time": 2.5, "loss": 2.0, "note": "=1+1", "a,b": 'q"'}
    )
    append_line(folder.events(1), {"step": 1, "rank": 1, "time": 2.5, "loss": 4.0})
    assert len(list(write_csv_in_pieces(folder, 2, print))) == 4  # Two ranks, twice.
    with folder.csv.open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows == [
        ["step", "rank", "time", "loss", "note", "a,b"],
        ["0", "0", "1.5", "nan", "", ""],
        ["1", "0", "2.5", "2.0", "'=1+1", 'q"'],
        ["1", "1", "2.5", "4.0", "", ""],
    ]
    assert folder.csv.stat().st_mode & 0o777 == 0o600
    records = read_lines(folder.events(0)) + read_lines(folder.events(1))
    assert compute_curve(records, "loss") == {1: 3.0} and compute_curve(records, "note") == {}


def test_a_full_disk_leaves_no_part_of_the_csv(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    append_line(folder.events(0), {"step": 0, "rank": 0, "time": 1.0, "loss": 2.0})

    def fail(*_: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(metrics_table, "_to_cell", fail)
    with pytest.raises(OSError, match="No space"):
        list(write_csv_in_pieces(folder, 1, print))
    assert not [path for path in folder.path.iterdir() if "metrics" in path.name]


def test_fault_61_csv_escapes_spreadsheet_formulas(folder: RunFolder) -> None:
    """Names of metrics are escaped as well as their values."""
    names = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", " =1", "\n=1", "＝1"]
    append_line(
        folder.events(0), {"step": 0, "rank": 0, "time": 1.0, "loss": -1.5, **dict.fromkeys(names, "x")}
    )
    append_line(folder.events(0), {"step": 1, "rank": 0, "time": 1.0, **{name: name for name in names}})
    assert list(write_csv_in_pieces(folder, 1, print))
    with folder.csv.open(newline="") as file:
        header, first, second = csv.reader(file)
    escaped = [f"'{name}" for name in names]
    assert header == ["step", "rank", "time", "loss", *escaped]
    assert first[3] == "-1.5", "a number is not escaped"
    assert second[4:] == escaped


def test_fault_60_csv_of_too_many_lines_is_sampled(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(2):
        for step in range(1000):
            append_line(folder.events(rank), {"step": step, "rank": rank, "time": 1.0})
    num_bytes = folder.events(0).stat().st_size + folder.events(1).stat().st_size
    monkeypatch.setattr(metrics_table, "MAX_BYTES", num_bytes // 4 + 1)
    monkeypatch.setattr(metrics_table, "PIECE_BYTES", 1000)
    messages: list[str] = []
    assert list(write_csv_in_pieces(folder, 2, messages.append))
    with folder.csv.open(newline="") as file:
        _, *rows = csv.reader(file)
    assert [row[:2] for row in rows] == [
        [str(step), str(rank)] for rank in range(2) for step in range(0, 1000, 4)
    ], "the same steps of each rank"
    assert len(messages) == 1 and "one of 4 lines of each rank" in messages[0]


def test_fault_60_lines_logged_too_fast_are_sampled(folder: RunFolder) -> None:
    """The supervisor reads one piece at a time, and skips to the latest lines if it is far behind."""
    lines = SampledLines(folder.events(0), piece_bytes=1000, max_behind_bytes=20_000)
    assert lines.read() == [] and not lines.is_behind
    with folder.events(0).open("ab") as file:
        file.write(b"".join(encode({"step": step}) for step in range(300)))
    steps = [record["step"] for record in lines.read()]
    while lines.is_behind:
        steps += [record["step"] for record in lines.read()]
    assert steps + [record["step"] for record in lines.read()] == list(range(300)), (
        "a short backlog is read completely"
    )
    assert lines.num_skipped_bytes == 0
    with folder.events(0).open("ab") as file:
        file.write(b"".join(encode({"step": step}) for step in range(300, 50_000)))
    steps = [record["step"] for record in lines.read()]
    assert 0 < len(steps) < 100 and steps[0] > 49_900 and steps == sorted(steps)
    assert lines.num_skipped_bytes > 600_000
    with folder.events(0).open("ab") as file:
        file.write(encode({"step": 50_000, "text": "x" * 5000}) + encode({"step": 50_001}))
    steps = [record["step"] for _ in range(10) for record in lines.read()]
    assert steps[-1] == 50_001, "a line longer than a piece does not block reading"


def test_fault_61_secrets_in_metric_names_are_masked(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "correct horse battery")
    append_line(folder.events(0), {"loss/correct horse battery": 1.0, "of": {HF: [HF]}})
    text = folder.events(0).read_text()
    assert "correct horse" not in text and HF not in text and '"loss/***' in text


def test_fault_61_secrets_set_during_the_run_are_masked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank sends new secrets to the supervisor, long ones in parts; earlier log lines are masked too."""
    monkeypatch.setattr(redaction, "_learned", set())
    receiver = SecretReceiver()
    long = "\n".join(f"line {number} of a key without a form" for number in range(50))
    code = (
        "import os, sys\nfrom shardscope.runs.launch.new_secrets import send_new_secrets\n"
        f"send_new_secrets({receiver.for_launcher})\nos.environ['LATE_TOKEN'] = 'set in mid run'\n"
        f"os.environ['OTHER_KEY'] = {long!r}\nos.environ['PLAIN'] = 'is no secret'\n"
        f"if not os.fork(): os.putenv('FORKED_SECRET', 'of a worker'); os._exit(0)\nos.wait()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, pass_fds=(receiver.for_launcher,), timeout=120)
    receiver.close_write_end()
    log = tmp_path / "log"
    log.write_text(f"set in mid run, of a worker, is no secret, {long}\n")
    assert LogCleaner(log, receiver.read_secrets).clean() > 3
    assert re.fullmatch(r"\*{14}, \*{11}, is no secret, \*+\n", log.read_text())
    assert redact("of a worker") == "*" * 11


def test_two_threads_that_replace_one_file_keep_it_complete(tmp_path: Path) -> None:
    path, barrier = tmp_path / "note.json", threading.Barrier(2)

    def write(writer: int) -> None:
        barrier.wait()
        for number in range(300):
            write_json(path, {"writer": writer, "number": number})

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(write, writer) for writer in range(2)]:
            done.result()
    assert (read_json(path) or {})["number"] == 299
    assert list(tmp_path.iterdir()) == [path]


def test_only_partial_files_of_ended_processes_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of another writer are complete soon."""
    folder = tmp_path / "run"
    folder.mkdir()
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom shardscope.records import json_files\n"
        "json_files.encode = lambda *_: sys.stdin.read() and os._exit(1)\n"
        "json_files.write_json(Path(sys.argv[1]), {})"
    )
    command = [sys.executable, "-c", code, str(folder / "note.json")]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as writer:
        assert wait_until(lambda: len(list(folder.iterdir())) == 1)
        delete_partial_files(tmp_path)
        assert len(list(folder.iterdir())) == 1
        writer.communicate(b"now killed")
    assert len(list(folder.iterdir())) == 1
    # Nobody here knows which processes another machine has.
    with monkeypatch.context() as patch:
        patch.setattr(json_files, "identify_machine", lambda: "another machine")
        delete_partial_files(tmp_path)
    assert len(list(folder.iterdir())) == 1
    delete_partial_files(tmp_path)
    assert not list(folder.iterdir())


def test_a_line_that_a_full_disk_cuts_raises_and_hides_no_later_one(folder: RunFolder) -> None:
    """A write of a part of a line returns its size, and no error."""
    folder.set_status("running", "1 rank at work")
    follower = LineTail(folder.status)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (folder.status.stat().st_size + 30, before[1]))
    try:
        with pytest.raises(OSError, match="No space left"):
            folder.set_status("finished", "the task returned on every rank")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [record["status"] for record in follower.read()] == ["running"]
    folder.set_status("finished", "the disk has space again")
    assert [record["status"] for record in follower.read()] == ["finished"]
    assert [record["status"] for record in read_lines(folder.status)] == ["running", "finished"]


def test_lost_run_dates_from_its_last_heartbeat(folder: RunFolder) -> None:
    write_json(folder.run_json, {"world_size": 1, "created": 1.0})
    append_line(folder.status, {"time": 1.0, "status": "running", "reason": "1 rank at work"})
    write_json(folder.supervisor, {"pid": 2**22 + 1, "started": 1.0, "machine": identify_machine()})
    os.utime(folder.supervisor, (77.0, 77.0))
    history = [(record["time"], record["status"]) for record in Run(folder).history]
    assert history == [(1.0, "running"), (77.0, "lost")]


def test_ranks_of_one_machine_use_the_loopback_interface_by_default() -> None:
    inherited = {"GLOO_SOCKET_IFNAME": "eth7", "MASTER_ADDR": "10.0.0.1"}
    environment = build_launcher_environment(inherited, 2, "cuda")
    assert "MASTER_ADDR" not in environment and environment["GLOO_SOCKET_IFNAME"] == "eth7"
    if sys.platform == "linux":
        assert environment["NCCL_SOCKET_IFNAME"] == "lo"
    assert not [name for name in environment if name.startswith("MALLOC_")], "tensors are on the GPU"


def test_cpu_ranks_keep_freed_memory_for_the_next_step_by_default() -> None:
    environment = build_launcher_environment({"MALLOC_TRIM_THRESHOLD_": "7"}, 2, "cpu")
    assert environment["MALLOC_TRIM_THRESHOLD_"] == "7"
    assert int(environment["MALLOC_MMAP_THRESHOLD_"]) == 32 << 20
    assert int(build_launcher_environment({}, 2, "cpu")["MALLOC_TRIM_THRESHOLD_"]) >= 1 << 30
