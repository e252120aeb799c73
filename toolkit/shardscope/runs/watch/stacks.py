"""Where a rank stands: its Python stacks, asked of it from outside while it hangs in whatever it hangs in.

``faulthandler`` answers a signal from C, without the interpreter: a rank that waits in a collective, in the
driver or for the GIL tells as well. A rank that is stopped (SIGSTOP, a debugger) cannot.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
from pathlib import Path

STACK_SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR2)
"""Not SIGUSR1 or SIGUSR2 where there is a choice: Slurm and users' own scripts have those."""
MAX_BYTES = 256 * 1024

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
}
"""Parts of file names that say why a main thread may rightly take longer than a step."""
BUSY_FUNCTIONS = {
    "save_checkpoint": "at a checkpoint",
    "load_checkpoint": "at a checkpoint",
    "compile_fx_inner": "compiling",
    "codegen_and_compile": "compiling",
}
"""The same by function: DeepSpeed's checkpoints have no file of their own, and a graph that only runs has
torch/_inductor on its stack as well."""
ENGINE_FOLDERS = ("shardscope/frameworks/", "shardscope/training/")
ENGINE_FUNCTIONS = ("save", "load", "export")
"""Of an engine, whatever it calls meanwhile: what gathers weights one by one is in no file named above."""


def answer_with_stacks(path: Path) -> None:
    """From now on this process writes the stacks of all its threads to ``path`` at :data:`STACK_SIGNAL`.

    Raises ``OSError`` if ``path`` cannot be written.
    """
    # Never closed: the handler writes to the descriptor as long as the process lives.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    # faulthandler restores this when the interpreter ends; the default would kill the process.
    signal.signal(STACK_SIGNAL, signal.SIG_IGN)
    faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=True)


def main_thread(stacks: str) -> list[tuple[str, int, str]]:
    """(file, line, function) of the main thread, innermost first: of what was written last, its last thread.

    faulthandler goes through threads from the newest to the oldest (its docs; Python/traceback.c).
    """
    frames: list[tuple[str, int, str]] = []
    for line in stacks.splitlines():
        if _THREAD.match(line):
            frames = []
        elif found := _FRAME.match(line):
            frames.append((found["file"], int(found["line"]), found["function"]))
    return frames


def busy_with(stacks: str) -> str | None:
    """Why the main thread may take longer than a step: it is at a checkpoint, say. None: nothing tells."""
    for file, _, function in main_thread(stacks):
        if function in BUSY_FUNCTIONS:
            return BUSY_FUNCTIONS[function]
        for part, words in BUSY_WITH.items():
            if part in file:
                return words
        if function in ENGINE_FUNCTIONS and any(folder in file for folder in ENGINE_FOLDERS):
            return "at a checkpoint"
    return None


def place_in_words(stacks: str) -> str:
    """``all_reduce (distributed_c10d.py:3046), called from train (my.py:7)``; empty without a stack."""
    frames = main_thread(stacks)
    if not frames:
        return ""
    file, line, function = frames[0]
    words = f"{function} ({Path(file).name}:{line})"
    own = next((frame for frame in frames if not _is_library(frame[0])), None)
    if own is None or own is frames[0]:
        return words
    return f"{words}, called from {own[2]} ({Path(own[0]).name}:{own[1]})"


def _is_library(file: str) -> bool:
    return any(part in file for part in ("site-packages/", "dist-packages/", "/lib/python", "<frozen"))


def process_state(pid: int) -> str:
    """Linux's letter for what process ``pid`` does (R, S, D, T, t, Z; proc(5)); empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
