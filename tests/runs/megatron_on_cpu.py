"""Run a script that calls Megatron-core on CPU ranks: ``torchrun megatron_on_cpu.py train.py --steps 8``."""

from __future__ import annotations

import runpy
import sys

from shardscope.frameworks.megatron.engine.real_cpu import cpu_ranks

if __name__ == "__main__":
    del sys.argv[0]
    with cpu_ranks():
        runpy.run_path(sys.argv[0], run_name="__main__")
