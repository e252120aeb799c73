"""Run a training script on all nodes of a plan inside a Ray job: one torchrun on each node.

    ray job submit --working-dir . -- python ray_nodes.py train.py --steps 50

Shardscope's ``plan.export(folder)`` wrote this file, and the ``plan.json`` that it reads. It imports Ray and
nothing of Shardscope. A placement group reserves the plan's GPUs, on as many nodes as the plan has; Ray makes
only these visible. torchrun starts the ranks of its node, as everywhere else. Arguments may be
percent-encoded, as ray_job.sh does.
"""

from __future__ import annotations

import ctypes
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

RESERVE_SECONDS = 600
"""How long to wait for free nodes."""
PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that a process gets when its parent dies."""


class Node:
    """One node of the plan, as a Ray actor."""

    def find_endpoint(self) -> tuple[str, int]:
        """Return this node's address and a free port."""
        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def run(self, arguments: list[str]) -> int:
        """Run torchrun with ``arguments`` and return its exit status. Its output is the job's."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", *arguments]
        # Ray kills only this process when the job is stopped; with it torchrun ends, and stops its ranks.
        libc = ctypes.CDLL(None)
        started = subprocess.Popen(
            torchrun,
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),  # noqa: PLW1509 - one system call
        )
        return started.wait()


def main() -> None:
    """Start the nodes, and exit with the first failure."""
    plan = json.loads((Path(__file__).parent / "plan.json").read_text(encoding="utf-8"))
    cluster, script = plan["cluster"], [unquote(argument) for argument in sys.argv[1:]]
    num_nodes, per_node = cluster["num_nodes"], cluster["gpus_per_node"]
    on_gpu = cluster["gpu"]["vendor"] != "cpu"

    # Reserve all nodes at once, so that two jobs do not each hold half of what they need.
    ray.init()
    bundle = {"CPU": 1, "GPU": per_node} if on_gpu else {"CPU": per_node}
    group = placement_group([bundle] * num_nodes, strategy="STRICT_SPREAD")
    if not group.wait(RESERVE_SECONDS):
        raise SystemExit(f"no {num_nodes} nodes with {bundle} were free for {RESERVE_SECONDS} s")
    nodes = [
        ray.remote(Node)
        .options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=index
            ),
        )
        .remote()
        for index in range(num_nodes)
    ]

    # Rank 0 is on the first node, where the others meet it.
    address, port = ray.get(nodes[0].find_endpoint.remote())
    common = ["--nnodes", str(num_nodes), "--nproc-per-node", str(per_node)]
    meeting = ["--master-addr", address, "--master-port", str(port)]
    waiting = [
        node.run.remote([*common, "--node-rank", str(index), *meeting, *script])
        for index, node in enumerate(nodes)
    ]
    # The first failure ends the job, whose other nodes would wait for it.
    while waiting:
        done, waiting = ray.wait(waiting)
        status = ray.get(done[0])
        if status:
            raise SystemExit(status)


if __name__ == "__main__":
    main()
