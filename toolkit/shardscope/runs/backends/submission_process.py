"""Submission of one Slurm job through submitit, in a process of its own.

submitit reads and may change ``os.environ``, which must stay as it is in the kernel. ``slurm_submission.py``
runs ``python -m shardscope.runs.backends.submission_process`` with a JSON object on standard input.
"""

from __future__ import annotations

import json
import shlex
import sys


def main() -> None:
    """Submit the job and print its id."""
    from submitit import SlurmExecutor

    from shardscope.runs.backends.node_process import run_node
    from shardscope.runs.launch.environment import restore_python_path

    request = json.load(sys.stdin)
    # sbatch passes the environment on to the nodes.
    restore_python_path(request["pythonpath"])
    # -P: a signal.py in the notebook's folder must not shadow the standard library's.
    python = f"{request['python'] or shlex.quote(sys.executable)} -P"
    executor = SlurmExecutor(request["folder"], python=python)
    executor.update_parameters(**request["parameters"])
    print(executor.submit(run_node, request["run"]).job_id)


if __name__ == "__main__":
    main()
