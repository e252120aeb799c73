"""Run an exported train.py as a side of a comparison: ``torchrun exported_script.py train.py --steps 20``.

It prints a line for each step, of which this makes JSON with the time at which the step ended. Of Shardscope
it has what stands in for CUDA on Megatron-core's CPU ranks, and nothing else.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
import time
from pathlib import Path


class StepEnds(io.TextIOBase):
    """What is printed, as ``{"time": ..., "loss": ...}`` for each line of a step."""

    def __init__(self) -> None:
        self.output = sys.stdout

    def write(self, text: str) -> int:
        words = text.split()
        if words[:1] == ["step"]:
            line = json.dumps({"time": time.time(), "loss": float(words[3])})
            self.output.write(f"{line}\n")
            self.output.flush()
        return len(text)


def main() -> None:
    """Run the script that the first argument names, with the others."""
    del sys.argv[0]
    # As ``python train.py`` does: the script imports the files beside it.
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    on_device: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    with open(sys.argv[0], encoding="utf-8") as script:  # noqa: PTH123
        if "from megatron" in script.read():
            from shardscope.frameworks.megatron.engine.cpu_ranks import cpu_ranks

            on_device = cpu_ranks()
    with on_device, contextlib.redirect_stdout(StepEnds()):
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
