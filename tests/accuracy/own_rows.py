"""Our own runs as rows of the published form, so that the scorer takes them; each has its whole plan too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.accuracy.measurement_kinds import GIB
from tests.accuracy.rows import Row

import shardscope as ss

SOURCE = "our own runs"


def own_rows(
    plan: ss.Plan,
    allocated_bytes: int,
    beside: Mapping[str, int],
    date: str,
    versions: Mapping[str, str],
    step_seconds: float | None = None,
) -> list[dict[str, Any]]:
    """One row for each way in which the run's fullest rank was measured.

    ``allocated_bytes`` is torch.cuda.max_memory_allocated(). ``beside`` are components of ``run.memory()``:
    with ``fragmentation`` there is a row of what the allocator reserved, with ``runtime`` one of the card.
    No names of hosts, users or paths.
    """
    sizes = {"allocated (torch.cuda peak)": allocated_bytes}
    if "fragmentation" in beside:
        sizes["reserved (torch.cuda peak)"] = allocated_bytes + beside["fragmentation"]
        if "runtime" in beside:
            sizes["nvidia-smi/device"] = sizes["reserved (torch.cuda peak)"] + beside["runtime"]
    common = _describe_configuration(plan) | {
        "date": date,
        "versions": dict(versions),
        "plan": plan.to_dict(),
    }
    if step_seconds is not None:
        common["step_time_s"] = step_seconds
    name = f"own-{date}-{plan.layout.framework}-{plan.architecture.name}-{plan.recipe.method}"
    name += f"-{plan.recipe.recompute}-{plan.recipe.micro_batch_size}x{plan.recipe.seq_len}"
    ids = {kind: f"{name}-{kind.partition(' ')[0].partition('/')[0]}" for kind in sizes}
    first, *again = ids.values()
    return [
        {
            "id": ids[kind],
            **common,
            "peak_memory_gib": size / GIB,
            "memory_kind": kind,
            **({"same_run": first} if ids[kind] in again else {}),
        }
        for kind, size in sizes.items()
    ]


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    """Adds ``rows`` to a file of rows, one line each; of one id the last stays."""
    kept = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    again = {row["id"] for row in rows}
    lines = [line for line in kept if line.strip() and json.loads(line).get("id") not in again]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join([*lines, *map(json.dumps, rows)]) + "\n", encoding="utf-8")


def read_plan(row: Row) -> ss.Plan | None:
    """Return the plan that our own rows have in full; None for others. ``ValueError`` if refused."""
    found = row.get("plan")
    return ss.Plan.from_dict(found) if row.get("source") == SOURCE and isinstance(found, Mapping) else None


def _describe_configuration(plan: ss.Plan) -> dict[str, Any]:
    recipe, degrees, gpu = plan.recipe, plan.degrees, plan.cluster.gpu
    rank = (recipe.lora_rank or 16) if recipe.has_adapters else None
    return {
        "source": SOURCE,
        "table": plan.layout.description,
        "model": plan.architecture.name,
        "n_params": plan.architecture.num_parameters,
        "gpu": gpu.name,
        "gpu_mem_gb": round(gpu.memory_bytes / GIB),
        "n_gpus": plan.world_size,
        "framework": plan.layout.framework,
        "dp": degrees.data_parallel,
        "tp": degrees.tp,
        "pp": degrees.pp,
        "cp": degrees.cp,
        "ep": degrees.ep,
        "seq_len": recipe.seq_len,
        "micro_batch": recipe.micro_batch_size,
        "global_batch": recipe.global_batch_size,
        "precision": recipe.precision,
        "optimizer": recipe.optimizer,
        "activation_checkpointing": recipe.recompute,
        "lora": {"rank": rank, "targets": list(recipe.lora_targets or ())} if rank else None,
        "quality": "A",
        "status": "ok",
        "role": "judge",
    }
