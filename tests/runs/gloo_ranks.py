"""Real gloo ranks with a stand-in for the launcher's context: what the engine tests run on."""

from __future__ import annotations

import json
import multiprocessing
import os
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardscope import Architecture, Cluster, Layout, Plan, Recipe

RANK_SECONDS = 90


def tiny_llama(*, tie_word_embeddings: bool = False) -> Architecture:
    """A Llama that trains in milliseconds."""
    return Architecture(
        name="tiny",
        model_type="llama",
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=2048,
        max_position_embeddings=256,
        tie_word_embeddings=tie_word_embeddings,
    )


def tiny_plan(
    framework: str,
    world_size: int,
    *,
    num_micro_batches: int = 1,
    micro_batch_size: int = 2,
    architecture: Architecture | None = None,
    layout: dict[str, Any] | None = None,
    **recipe: Any,
) -> Plan:
    """A plan of ``world_size`` CPU ranks, fp32 unless ``recipe`` says otherwise."""
    fields: dict[str, Any] = {
        "seq_len": 64,
        "micro_batch_size": micro_batch_size,
        "global_batch_size": micro_batch_size * num_micro_batches * world_size,
        "precision": "fp32",
        **recipe,
    }
    return Plan(
        architecture or tiny_llama(),
        Cluster.parse(f"{world_size}xcpu"),
        Recipe(**fields),
        getattr(Layout, framework)(**(layout or {})),
    )


@dataclass
class StandInContext:
    """The launcher's ``ctx``, keeping what it is given."""

    rank: int
    world_size: int
    plan: Any
    folder: Path
    device: Any = None
    engine: Any = None
    stop_at_look: int | None = None
    stops_without_checkpoint: bool = False
    num_looks: int = 0
    lines: list[dict[str, Any]] = field(default_factory=list)
    records: dict[str, Any] = field(default_factory=dict)

    def log(self, step: int | None = None, **metrics: Any) -> None:
        self.lines.append({"step": step, **metrics})

    def poll(self) -> tuple[bool, list[dict[str, Any]]]:
        self.num_looks += 1
        return self.num_looks == self.stop_at_look, []

    def record(self, name: str, mapping: Any) -> None:
        self.records[name] = json.loads(json.dumps(dict(mapping)))

    def profile(self, **_: int) -> Any:
        return nullcontext()


def on_ranks(world_size: int, plan: Any, body: Callable[[StandInContext], Any], folder: Path) -> list[Any]:
    """Run ``body(ctx)`` on ``world_size`` forked gloo ranks; their results (JSON) by rank.

    A rank that raises fails the call with its traceback; none outlives it.
    """
    # Imported before the fork, once for all ranks; the parent must not compute with torch threads.
    import torch.distributed.checkpoint
    import torch.distributed.fsdp  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    import shardscope.frameworks.ddp.engine.engine
    import shardscope.frameworks.fsdp2.engine.engine  # noqa: F401

    fork = multiprocessing.get_context("fork")
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("rank-*"):
        stale.unlink()
    store = folder / "rank-store"
    ranks = [
        fork.Process(target=_run_rank, args=(rank, world_size, plan, body, folder, store))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(RANK_SECONDS)
    ends = [
        "is alive" if process.is_alive() else f"ended with exit code {process.exitcode}" for process in ranks
    ]
    for process in ranks:
        if process.is_alive():
            process.kill()
            process.join()
    results = []
    failures = [path.read_text() for path in sorted(folder.glob("rank-*.failed"))]
    if failures:
        raise AssertionError("\n".join(failures))
    for rank in range(world_size):
        result = folder / f"rank-{rank}.json"
        if not result.exists():
            raise AssertionError(f"rank {rank} wrote nothing within {RANK_SECONDS} s and {ends[rank]}")
        results.append(json.loads(result.read_text()))
    return results


def _run_rank(rank: int, world_size: int, plan: Any, body: Any, folder: Path, store: Path) -> None:
    import torch
    import torch.distributed as dist

    from shardscope.runs.launch.rendezvous.gloo import use_one_thread

    use_one_thread()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    code = 0
    try:
        # A file store needs no port, so tests of several sessions cannot meet on one.
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        # A rank that refuses at once must not leave while another is still connecting to it.
        dist.barrier()
        from shardscope.frameworks.engines import get_engine_class

        ctx = StandInContext(
            rank=rank, world_size=world_size, plan=plan, folder=folder, device=torch.device("cpu")
        )
        ctx.engine = get_engine_class(plan)(ctx)
        result = body(ctx)
        (folder / f"rank-{rank}.json").write_text(json.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (folder / f"rank-{rank}.failed").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        code = 1
    # Past atexit handlers that belong to pytest's process.
    os._exit(code)
