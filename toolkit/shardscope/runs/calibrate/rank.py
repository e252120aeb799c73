"""Program of a measuring rank: settings are a JSON argument, results JSON lines on standard output.

``process.py`` starts it as ``python -m shardscope.runs.calibrate.rank <pid of the kernel> <settings>``.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import TypedDict


class Settings(TypedDict):
    """Settings of one rank, the program's JSON argument."""

    rank: int
    num_ranks: int
    device: str
    """"cpu" or "cuda"."""
    seconds: float
    timeout_seconds: float
    max_bytes: int
    """Maximum bytes of one measured call."""
    store: str
    """Path of the ranks' ``FileStore``."""


def main() -> None:
    """Measure together with the other ranks. Print lines with ``progress``, ``measured`` or ``error``."""
    from shardscope.machine.processes import die_with_parent

    die_with_parent(int(sys.argv[1]))
    settings: Settings = json.loads(sys.argv[2])
    # Redirect stdout to stderr: output of libraries must not mix with the JSON lines.
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def print_line(**line: object) -> None:
        output.write(json.dumps(line) + "\n")
        output.flush()

    try:
        print_line(progress=["starting PyTorch", 0.0])
        curves = _measure(settings, lambda title, fraction: print_line(progress=[title, fraction]))
        print_line(measured=curves)
    except BaseException as problem:
        print_line(error=f"{type(problem).__name__}: {problem}", traceback=traceback.format_exc())
        raise SystemExit(1) from problem
    output.close()
    os._exit(0)  # Interpreter shutdown with torch loaded costs up to a second.


def _measure(settings: Settings, progress: Callable[[str, float], None]) -> dict[str, object]:
    import torch
    import torch.distributed as dist

    from shardscope.runs.calibrate.curves import Curves

    rank, num_ranks = settings["rank"], settings["num_ranks"]
    if settings["device"] == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if num_ranks > 1:
        from shardscope.runs.launch.rendezvous.gloo import use_one_thread

        patience = timedelta(seconds=settings["timeout_seconds"])
        store = dist.FileStore(settings["store"])  # Not a TCPStore, to which other users could connect.
        store.set_timeout(patience)
        use_one_thread()  # As in a run, which these curves predict.
        # gloo as well: ranks exchange their times as small CPU tensors.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=patience)
    # Different inputs on each rank, as in training; the same in each calibration.
    torch.manual_seed(rank)
    curves = Curves(device, settings["seconds"], settings["max_bytes"], progress)
    measured = curves.measure()
    if dist.is_initialized():
        dist.destroy_process_group()
    return {
        **measured,
        "backend": "nccl" if device.type == "cuda" else "gloo",
        "torch_version": torch.__version__,
        "threads_per_rank": torch.get_num_threads(),
    }


if __name__ == "__main__":
    main()
