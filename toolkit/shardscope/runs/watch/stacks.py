"""Python stacks of a hanging rank, written by the rank on a signal.

``faulthandler`` handles the signal in C, without the interpreter, so it also works for a rank that waits in a
collective, in the driver or for the GIL. A stopped rank (SIGSTOP, a debugger) cannot answer.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
from pathlib import Path

# Windows has neither: runs are read there, but not launched.
STACK_SIGNAL: int = getattr(signal, "SIGRTMIN", getattr(signal, "SIGUSR2", signal.SIGTERM))
"""SIGRTMIN where it exists, because Slurm and users' scripts use SIGUSR1 and SIGUSR2."""
MAX_BYTES = 256 * 1024

# The formats of faulthandler (Python/traceback.c, _Py_DumpTracebackThreads).
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)$')

BUSY_WITH = {
    "torch/_dynamo/convert_frame": "compiling",
    "torch/utils/cpp_extension": "compiling",
    "triton/compiler/": "compiling",
    "torch/profiler/": "writing a trace",
    "torch/cuda/memory": "writing a memory snapshot",
    "torch/distributed/checkpoint/": "at a checkpoint",
    "torch/serialization": "at a checkpoint",
    "safetensors/": "at a checkpoint",
    "megatron/core/dist_checkpointing/": "at a checkpoint",
    "shardscope/training/checkpoints/": "at a checkpoint",
    "shardscope/training/weights/pretrained": "at a checkpoint",
    "shardscope/training/tasks/final_export": "at a checkpoint",
}
"""Parts of file names on a main thread's stack that explain a delay longer than a step."""
BUSY_FUNCTIONS = {
    "save_checkpoint": "at a checkpoint",
    "load_checkpoint": "at a checkpoint",
    "compile_fx_inner": "compiling",
    "codegen_and_compile": "compiling",
}
"""The same by function name: DeepSpeed's checkpoint code has no file of its own, and torch/_inductor is also
on the stack when a compiled graph merely runs."""
ENGINE_FOLDERS = ("shardscope/frameworks/", "shardscope/training/")
ENGINE_FUNCTIONS = ("save", "load", "export")
"""Methods of our engines that count as checkpointing: while they all-gather weights, the innermost frames are
in none of the files above."""


def install_stack_handler(path: Path) -> None:
    """Make this process write the stacks of all its threads to ``path`` on :data:`STACK_SIGNAL`.

    Raises ``OSError`` if ``path`` cannot be written.
    """
    # Never closed: the handler writes to the descriptor as long as the process lives.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    # faulthandler restores this handler at interpreter shutdown; the default would kill the process.
    signal.signal(STACK_SIGNAL, signal.SIG_IGN)
    faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=True)


def parse_main_thread(stacks: str) -> list[tuple[str, int, str]]:
    """Return (file, line, function) of the main thread, innermost first: the last thread of the last dump.

    faulthandler writes threads from the newest to the oldest (Python/traceback.c, _Py_DumpTracebackThreads).
    """
    frames: list[tuple[str, int, str]] = []
    for line in stacks.splitlines():
        if _THREAD.match(line):
            frames = []
        elif match := _FRAME.match(line):
            frames.append((match["file"], int(match["line"]), match["function"]))
    return frames


def find_delay_reason(stacks: str) -> str | None:
    """Return why the main thread may take longer than a step, such as "at a checkpoint"; None if unknown."""
    for file, _, function in parse_main_thread(stacks):
        if function in BUSY_FUNCTIONS:
            return BUSY_FUNCTIONS[function]
        for part, reason in BUSY_WITH.items():
            if part in file:
                return reason
        if function in ENGINE_FUNCTIONS and any(folder in file for folder in ENGINE_FOLDERS):
            return "at a checkpoint"
    return None


def waits_in_collective(stacks: str) -> bool:
    """Return whether the main thread is in a call of torch.distributed, where it waits for other ranks."""
    frames = parse_main_thread(stacks)
    return bool(frames) and "torch/distributed/" in frames[0][0]


def describe_position(stacks: str) -> str:
    """Describe the main thread's innermost frame and the user's frame that called it; "" without a stack.

    For example ``all_reduce (distributed_c10d.py:3046), called from train (my.py:7)``.
    """
    frames = parse_main_thread(stacks)
    if not frames:
        return ""
    file, line, function = frames[0]
    position = f"{function} ({Path(file).name}:{line})"
    caller = next((frame for frame in frames if not _is_library_file(frame[0])), None)
    if caller is None or caller is frames[0]:
        return position
    return f"{position}, called from {caller[2]} ({Path(caller[0]).name}:{caller[1]})"


def _is_library_file(file: str) -> bool:
    return any(part in file for part in ("site-packages/", "dist-packages/", "/lib/python", "<frozen"))


def read_process_state(pid: int) -> str:
    """Return Linux's state letter of process ``pid`` (R, S, D, T, t, Z; proc(5)); empty if unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
