"""Split of a model's layers over pipeline stages and model chunks, by megatron-core's options."""

from __future__ import annotations

from typing import NamedTuple


class PipelineSplit(NamedTuple):
    """Megatron-core's options for the layers of stages (``transformer_config.py``), and their result."""

    embedding: int = 0
    """``account_for_embedding_in_pipeline_split``: 1 if the embedding counts as a layer."""
    loss: int = 0
    """``account_for_loss_in_pipeline_split``: 1 if the loss counts as a layer."""
    first: int | None = None
    """``num_layers_in_first_pipeline_stage``; None if it is not set."""
    last: int | None = None
    """``num_layers_in_last_pipeline_stage``; None if it is not set."""
    stages: tuple[int, ...] = ()
    """Number of layers of each stage."""


def split_pipeline(num_layers: int, pp: int, vpp: int) -> PipelineSplit:
    """Return a split in which no stage has more layers than an even share, rounded up.

    Embedding and loss count as layers if all chunks are equal then: 126 layers over 16 stages are 7, 14 x 8,
    7. Otherwise, without interleaving, the stages between the first and the last are equal: 61 layers over 16
    stages are 3, 14 x 4, 2, as in NVIDIA's recipes for DeepSeek-V3. Raises ``LookupError`` if neither is
    possible.
    """
    # The loss costs more than the embedding, so it is tried first.
    for embedding, loss in ((0, 0), (1, 1), (0, 1), (1, 0)):
        total = num_layers + embedding + loss
        if total % (pp * vpp) == 0 and total // pp > max(embedding, loss):
            stages = [total // pp] * pp
            stages[0] -= embedding
            stages[-1] -= loss
            return PipelineSplit(embedding, loss, stages=tuple(stages))
    # Fewer layers at the ends are tried first: they also have the embedding and the head.
    largest = -(-num_layers // pp)
    for middle in (largest, largest - 1) if vpp == 1 else ():
        at_ends = num_layers - middle * (pp - 2)
        first, last = -(-at_ends // 2), at_ends // 2
        if last >= 1 and first <= largest:
            return PipelineSplit(first=first, last=last, stages=(first, *[middle] * (pp - 2), last))
    raise LookupError(f"no split of {num_layers} layers over {pp} x {vpp} chunks")


def can_split_pipeline(num_layers: int, pp: int, vpp: int) -> bool:
    """Return whether the layers can be split over pp x vpp chunks."""
    try:
        split_pipeline(num_layers, pp, vpp)
    except LookupError:
        return False
    return True
