"""Log-probabilities of the reference model in full fine-tuning, computed with the initial weights and stored.

With adapters the reference is the model without them, and nothing is stored.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy
import torch
import torch.distributed as dist

from shardscope.core.errors import refuse
from shardscope.records.json_files import read_json, write_json
from shardscope.training.micro_batch_engine import MicroBatchEngine
from shardscope.training.preferences.pairs import PairBatches

if TYPE_CHECKING:
    from shardscope.training.data.batches import Batches
    from shardscope.training.engine import Engine
    from shardscope.training.examples.token_table import TokenTable
    from shardscope.training.preferences.pairs import FloatArray

REFERENCE_FILE = "reference.npy"
"""File next to a run's tokens, with the log-probability of each example's answer in fp32."""
REFERENCE_HASH = "reference.json"
"""File with the SHA-256 of the tokens that these log-probabilities belong to."""


def add_stored_reference(
    engine: Engine, batches: Batches, folder: Path, resumed: Path | None, field: str
) -> PairBatches:
    """Return ``batches`` with the log-probabilities under the initial weights, and store them in ``folder``.

    ``folder`` has the tokens of ``batches``. All ranks call this together. They compute the values or, if
    they have loaded the checkpoint ``resumed``, read those of its run. Raises ``ValueError`` naming ``field``
    if that run has none, or other data.
    """
    assert isinstance(engine, MicroBatchEngine) and isinstance(batches, PairBatches), "check_pair_plan()"
    if resumed is None:
        reference = compute_reference(engine, batches)
    else:
        reference = read_reference(resumed, folder.name, batches.table, field)
        # The folder that they read may be the one that rank 0 writes to.
        dist.barrier()
    if engine.ctx.rank == 0:
        partial = folder / f"partial-{REFERENCE_FILE}"
        numpy.save(partial, reference)
        partial.replace(folder / REFERENCE_FILE)
        write_json(folder / REFERENCE_HASH, {"sha256": hash_tokens(batches.table)})
    return replace(batches, reference=reference)


def compute_reference(engine: MicroBatchEngine, batches: PairBatches) -> FloatArray:
    """Return the log-probabilities of all examples of ``batches`` under the current weights."""
    in_order = replace(batches, in_order=True, reference=None)
    # In host memory, for which every run has gloo.
    values = torch.zeros(len(batches.table))
    for step in range(-(-batches.num_samples // (batches.rows * batches.num_ranks))):
        rows = engine.compute_log_probabilities(in_order.build_batch(step)).cpu()
        for row, example in in_order.list_examples(step):
            values[example] = rows[row]
    dist.all_reduce(values)
    reference: FloatArray = values.numpy()
    return reference


def read_reference(checkpoint: Path, name: str, table: TokenTable, field: str) -> FloatArray:
    """Return the log-probabilities that the run of ``checkpoint`` stored in its folder ``name`` of tokens.

    Raises ``ValueError`` naming ``field`` if there are none, or if they are not those of ``table``.
    """
    stored = checkpoint.parent.parent / name
    try:
        reference = numpy.load(stored / REFERENCE_FILE, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        allowed = (
            f"a checkpoint in the folder of its own DPO run: {stored} has no readable {REFERENCE_FILE}, the "
            "log-probabilities under the weights before the first step"
        )
        refuse(field, str(checkpoint), allowed, "resume=None, to start at step 0")
    if (read_json(stored / REFERENCE_HASH) or {}).get("sha256") != hash_tokens(table):
        allowed = "a checkpoint of a run on the same pairs, cut to the same length: the SHA-256 differs"
        refuse(field, str(checkpoint), allowed, "the data and the Recipe.seq_len of that run")
    is_sound = reference.shape == (len(table),) and reference.dtype == numpy.float32
    if not is_sound or not numpy.isfinite(reference).all():
        allowed = f"a run whose {name}/{REFERENCE_FILE} has one finite number for each row"
        refuse(field, str(checkpoint), allowed, "resume=None, to start at step 0")
    values: FloatArray = reference
    return values


def hash_tokens(table: TokenTable) -> str:
    """Return the SHA-256 of the tokens, their loss mask and their lengths."""
    digest = hashlib.sha256()
    for array in (table.offsets, table.ids, table.bears_loss):
        digest.update(numpy.ascontiguousarray(array).data)
    return digest.hexdigest()
