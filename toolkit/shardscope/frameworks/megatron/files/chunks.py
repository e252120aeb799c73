"""Megatron-LM's older way to say how many model chunks a pipeline stage has: by the layers of one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.frameworks.formats.documents import Document

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture

CHUNK = "num-layers-per-virtual-pipeline-stage"
SAME = "num-virtual-stages-per-pipeline-rank"
"""The same in chunks, which Megatron-LM takes one of (megatron/training/arguments.py)."""


def chunks(document: Document, architecture: Architecture, pp: int) -> int:
    """Model chunks of a stage, by Megatron-LM's rule (validate_args): both divisions come out even.

    Ends that count as layers are in the sum that is cut.
    """
    if document.get(SAME) is not None:
        document.refuse((CHUNK,), f"nothing beside --{SAME}", "leave it out")
    size = document.number(CHUNK, low=1, high=2**20) or 1
    ends = ("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split")
    layers = architecture.num_hidden_layers + sum(bool(document.get(flag)) for flag in ends)
    per_stage = layers // pp
    if layers % pp or per_stage % size:
        allowed = f"a divisor of the {layers / pp:g} layers of a stage ({layers} over {pp})"
        document.refuse(
            (CHUNK,), allowed, "1" if layers % pp == 0 else "another pipeline-model-parallel-size"
        )
    return per_stage // size
