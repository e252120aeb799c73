"""``run.chat()``: a conversation with a run's model, which lives in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Generator
from typing import IO, TYPE_CHECKING

from shardscope.core.errors import check_flag, check_integer, check_number, refuse
from shardscope.machine.python_process import build_module_command
from shardscope.runs.trained.child_environment import build_child_environment
from shardscope.runs.trained.model_files import find_base, find_model

if TYPE_CHECKING:
    from types import TracebackType

    from shardscope.runs.run import Run

MAX_NEW_TOKENS = 100_000
MAX_TEMPERATURE = 10.0
MAX_OUTPUT = 2000
"""Characters of the process's output in an error message."""


class Chat:
    """A conversation with a model in a process of its own, which ends with ``close()`` or with this process.

    The texts are data: nothing in them is interpreted. May be used from several threads, one of which reads
    an answer. Also a context manager.
    """

    def __init__(
        self, run: Run, *, max_new_tokens: int = 256, temperature: float = 0.0, base: bool = False
    ) -> None:
        """Start the process; the model is loaded while the first answer is awaited. See :meth:`Run.chat`."""
        self._max_new_tokens = check_integer(
            "run.chat max_new_tokens", max_new_tokens, low=1, high=MAX_NEW_TOKENS
        )
        self._temperature = check_number("run.chat temperature", temperature, low=0.0, high=MAX_TEMPERATURE)
        find = find_base if check_flag("run.chat base", base) else find_model
        files = find(run, "run.chat run")
        self._messages: list[dict[str, str]] = []
        self._lock = threading.Lock()
        """Guards the fields and the requests."""
        self._reading = threading.Lock()
        """Held while a line of the process is read."""
        self._last_id = 0
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the process.
        self._process = subprocess.Popen(
            build_module_command("shardscope.runs.trained.chat_process", files.to_json(), str(os.getpid())),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=build_child_environment(),
            # Ctrl-C in the kernel ends the waiting for an answer, not the model.
            start_new_session=True,
        )
        self.pid = self._process.pid
        """Id of the process."""
        self._end = weakref.finalize(self, _end_process, self._process, self._errors)

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation so far: dicts of ``role`` ("user" or "assistant") and ``content``."""
        with self._lock:
            return [dict(message) for message in self._messages]

    @property
    def is_closed(self) -> bool:
        """Return whether the chat was closed."""
        return not self._end.alive

    def send(self, text: str) -> Generator[str, None, None]:
        """Add ``text`` to the conversation. Return an iterator over the answer, piece by piece.

        The request is sent at once; a previous answer that was not read to its end is stopped and forgotten.
        Leaving the iteration early stops this one, and the conversation keeps what was read. Raises
        ``ValueError`` for an empty text or a closed chat. Iterating raises ``RuntimeError`` if the model
        cannot be loaded or fails; the conversation is then as before.
        """
        if not isinstance(text, str) or not text:
            refuse("chat.send text", text, "a text of at least one character", "a text")
        if self.is_closed:
            refuse("chat.send chat", "closed", "an open chat", "run.chat()")
        with self._lock:
            if self._last_id:
                self._write_request({"stop": self._last_id})
            self._last_id += 1
            request = {
                "id": self._last_id,
                "messages": [*self._messages, {"role": "user", "content": text}],
                "max_new_tokens": self._max_new_tokens,
                "temperature": self._temperature,
            }
            self._write_request(request)
            return self._read_answer(self._last_id, text)

    def stop(self) -> None:
        """End the current answer early, from another thread: its iteration ends. No effect without one."""
        with self._lock:
            if self._last_id:
                self._write_request({"stop": self._last_id})

    def reset(self) -> None:
        """Forget the conversation, and stop the current answer."""
        with self._lock:
            self._messages = []
            if self._last_id:
                self._write_request({"stop": self._last_id})
                # Its reader must not add it to the new conversation.
                self._last_id += 1

    def close(self) -> None:
        """End the process. No effect if it has ended."""
        self._end()

    def __enter__(self) -> Chat:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Chat({'closed' if self.is_closed else f'process {self.pid}'}, {len(self.messages)} messages)"

    def _read_answer(self, identifier: int, text: str) -> Generator[str, None, None]:
        answer, is_complete, has_failed = "", False, False
        try:
            while not is_complete:
                # Not held while the caller uses a piece: it may send the next text before it reads on.
                with self._reading:
                    # A later request or a reset has stopped this answer; another reader gets the rest of the
                    # output.
                    if not self._is_current(identifier):
                        return
                    has_failed = True
                    record = self._read_record()
                    has_failed = False
                # Skip the rest of an earlier answer that was not read to its end.
                if record.get("id") != identifier:
                    continue
                if "error" in record:
                    has_failed = True
                    raise RuntimeError(f"The model gave no answer: {record['error']}.")
                is_complete = "done" in record
                if piece := str(record.get("text", "")):
                    answer += piece
                    yield piece
        finally:
            with self._lock:
                if identifier == self._last_id and not has_failed:
                    if not is_complete:
                        self._write_request({"stop": identifier})
                    self._messages += [
                        {"role": "user", "content": text},
                        {"role": "assistant", "content": answer},
                    ]

    def _is_current(self, identifier: int) -> bool:
        with self._lock:
            return identifier == self._last_id

    def _read_record(self) -> dict[str, object]:
        output = self._process.stdout
        assert output is not None
        # A file that another thread has closed raises ValueError.
        with contextlib.suppress(ValueError):
            line = output.readline()
            if line:
                return dict(json.loads(line))
        if self.is_closed:
            raise RuntimeError("The chat was closed before its answer was complete.")
        code = self._process.wait()
        self._errors.seek(0)
        end = self._errors.read()[-MAX_OUTPUT:].decode(errors="replace").strip()
        self.close()
        raise RuntimeError(f"The chat's process ended with exit code {code}:\n{end}")

    def _write_request(self, record: dict[str, object]) -> None:
        requests = self._process.stdin
        assert requests is not None
        # A process that has ended is reported where its answer is read.
        with contextlib.suppress(OSError, ValueError):
            requests.write(json.dumps(record).encode() + b"\n")
            requests.flush()


def _end_process(process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
    # Nothing has to be saved, and it may be in the middle of a long step.
    process.kill()
    process.wait()
    if process.stdin is not None:
        # Closing writes what a request has left in the buffer.
        with contextlib.suppress(OSError):
            process.stdin.close()
    # Not standard output, which another thread may be reading: its end is that of the process.
    errors.close()
