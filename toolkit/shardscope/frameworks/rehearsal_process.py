"""Rehearsal process: reads a plan from standard input and writes JSON lines to standard output."""

from __future__ import annotations

import json
import os
import sys
import traceback

GPU_KERNEL_PACKAGES = ("fla", "causal_conv1d", "mamba_ssm")
"""Packages that transformers imports if installed: linear attention, short convolutions and Mamba."""


def main() -> None:
    """Rehearse one plan. Every output line is an object with ``progress``, ``stages`` or ``error``."""
    from shardscope.machine.processes import die_with_parent

    # The parent passes its own process id: it may have died before this process started.
    die_with_parent(int(sys.argv[1]))
    # Redirect what libraries print to standard error, so that it does not mix with the JSON lines.
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def write_line(**line: object) -> None:
        output.write(json.dumps(line) + "\n")
        output.flush()

    try:
        from shardscope.core.plan import Plan

        plan = Plan.from_json(sys.stdin.read())
        # Imported after the plan is parsed: an invalid plan fails at once, and the import takes seconds.
        write_line(progress=["starting PyTorch", 0.02])
        import torch

        from shardscope.frameworks.engines import rehearse

        # Kernels of Triton and CUDA do not run on fake tensors; transformers has PyTorch code for them.
        sys.modules.update(dict.fromkeys(GPU_KERNEL_PACKAGES))  # type: ignore[arg-type]

        # Fake tensors compute nothing: more threads would only wait.
        torch.set_num_threads(1)
        stages = rehearse(plan, lambda text, fraction: write_line(progress=[text, fraction]))
        write_line(stages=[stage.to_dict() for stage in stages])
    except BaseException as problem:
        # A ValueError is a message for the user; the caller shows the traceback of anything else.
        is_refused = isinstance(problem, ValueError)
        message = str(problem) if is_refused else f"{type(problem).__name__}: {problem}"
        write_line(error=message, refused=is_refused, traceback=traceback.format_exc())
        raise SystemExit(1) from problem


if __name__ == "__main__":
    main()
