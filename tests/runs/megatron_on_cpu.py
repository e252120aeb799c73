"""Run a script that calls Megatron-core on CPU ranks: ``torchrun megatron_on_cpu.py train.py --steps 8``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from shardscope.frameworks.megatron.engine.cpu_ranks import cpu_ranks

if __name__ == "__main__":
    del sys.argv[0]
    # As ``python train.py`` does: the script imports the files beside it.
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    with cpu_ranks():
        runpy.run_path(sys.argv[0], run_name="__main__")
