"""Disk space that a run's checkpoints and exported weights need, computed before it starts."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.errors import refuse
from shardscope.core.layout import Layout
from shardscope.core.number_format import format_count, join_list
from shardscope.core.plan import Plan

if TYPE_CHECKING:
    from shardscope.training.tasks.text_task import TextTask

SPARE_BYTES = 16 * 2**20
"""Metrics, logs, traces and the tokenizer."""


class WrittenBytes(NamedTuple):
    """Bytes that a run has on disk at most, at the same time."""

    export: int
    """Exported weights, or adapters; 0 without ``export``."""
    checkpoint: int
    """One checkpoint: trained weights and optimizer state."""
    num_checkpoints: int
    """Checkpoints that are complete or being written."""

    @property
    def total(self) -> int:
        return self.export + self.checkpoint * self.num_checkpoints


def check_disk_space(task: TextTask, plan: Plan, folder: Path) -> None:
    """Raise ``ValueError`` if the disk of ``folder`` has no room for what the run writes."""
    written = compute_written_bytes(task, plan)
    existing = next((path for path in (folder, *folder.absolute().parents) if path.exists()), None)
    if not written.total or existing is None:
        return
    free = shutil.disk_usage(existing).free
    needed = written.total + SPARE_BYTES
    if free >= needed:
        return
    parts = []
    if written.num_checkpoints:
        size = _format_bytes(written.checkpoint)
        parts.append(f"{format_count(written.num_checkpoints, 'checkpoint')} of {size}")
    if written.export:
        parts.append(f"{_format_bytes(written.export)} of exported weights")
    parts.append(f"{_format_bytes(SPARE_BYTES)} of metrics and logs")
    allowed = (
        f"a folder on a disk with {_format_bytes(needed)} free, for {join_list(parts)}: "
        f"this one has {_format_bytes(free)}"
    )
    fewer = ", or keep_last=1" if written.num_checkpoints > 2 else ""
    refuse("launch.folder", str(folder), allowed, f"free some space, or folder= on another disk{fewer}")


def _format_bytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def compute_written_bytes(task: TextTask, plan: Plan) -> WrittenBytes:
    """Return the bytes of a run's checkpoints and export; all 0 where they cannot be computed.

    Trained weights and optimizer state are those of a single rank of FSDP2, which has them whole.
    """
    early_stopping = getattr(task, "early_stopping", None) is not None
    kept = (task.keep_last or 1) if task.save_every else 0
    # One more while the next is being written; the best one of early stopping is apart.
    num_checkpoints = kept + early_stopping + bool(kept or early_stopping or task.save_checkpoint)
    try:
        one_rank = replace(plan.cluster, num_nodes=1, gpus_per_node=1)
        whole = Plan(plan.architecture, one_rank, plan.recipe, Layout.fsdp2())
        components = whole.memory().components
    except ValueError:  # Such as an optimizer that FSDP2 does not have.
        return WrittenBytes(0, 0, 0)
    # Of trained weights only, and as wide as these: mixed precision keeps, saves and exports them in fp32.
    weights = components["gradients"]
    return WrittenBytes(weights if task.export else 0, weights + components["optimizer"], num_checkpoints)
