"""Cut a step's batch into micro-batches, and weigh them so that every labelled token counts once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

IGNORED_LABEL = -100
"""What transformers and ``torch.nn.CrossEntropyLoss`` leave out of the mean."""


def split(batch: Mapping[str, torch.Tensor], num_micro_batches: int) -> list[dict[str, torch.Tensor]]:
    """``batch`` in ``num_micro_batches`` equal cuts along its first dimension.

    Raises ``ValueError`` if a tensor does not divide: dropping the rest would change the global batch in
    silence.
    """
    for name, tensor in batch.items():
        if tensor.shape[0] == 0 or tensor.shape[0] % num_micro_batches:
            raise ValueError(
                f"batch[{name!r}] has {tensor.shape[0]} rows; allowed: a positive multiple of the plan's "
                f"{num_micro_batches} micro-batches per step. Nearest fix: give this rank "
                f"num_micro_batches x micro_batch_size rows."
            )
    chunks = {name: tensor.chunk(num_micro_batches) for name, tensor in batch.items()}
    return [{name: parts[index] for name, parts in chunks.items()} for index in range(num_micro_batches)]


class LossWeights:
    """What each micro-batch's mean loss is multiplied with before ``backward``.

    A token here is one label: of text, of a class, of whatever ``labels`` holds. Without ``labels`` every
    micro-batch counts the same.

    Frameworks average gradients over ranks, so with tokens ``n_i`` here, ``N`` on all ``R`` ranks, the weight
    ``n_i * R / N`` makes the sum the mean over all N tokens, however unevenly ``-100`` falls
    (https://huggingface.co/blog/gradient_accumulation tells what equal weights do wrong).

    Counting starts when this is made and is waited for when the first weight is asked for, so that the first
    forward hides it: ranks that met here first would wait for the slowest twice a step.
    """

    def __init__(self, micro_batches: list[dict[str, torch.Tensor]]) -> None:
        self._counts = [
            int((_predicted(micro) != IGNORED_LABEL).sum()) for micro in micro_batches if "labels" in micro
        ]
        self._equal = 1 / len(micro_batches)
        # In host memory, where every run has gloo: a device would be waited for.
        self._totals = torch.tensor([sum(self._counts), self._counts.count(0)], dtype=torch.int64)
        self._counting = dist.all_reduce(self._totals, async_op=True) if self._counts else None

    def __getitem__(self, index: int) -> float:
        """The weight of one micro-batch. Raises ``ValueError`` on every rank if one anywhere has no label."""
        if not self._counts:
            return self._equal
        if self._counting is not None:
            self._counting.wait()
            self._counting = None
        num_tokens, num_empty = (int(total) for total in self._totals.tolist())
        if num_empty:
            # The mean over no token is NaN. Every rank raises, so none is left waiting in a collective.
            raise ValueError(
                f"Some micro-batches of this step have no labelled token (all are {IGNORED_LABEL}); "
                "allowed: at least one each. Nearest fix: drop such samples, or raise seq_len."
            )
        return float(self._counts[index] * dist.get_world_size() / num_tokens)


def _predicted(micro: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The labels that go into the model's loss, those of -100 among them."""
    labels, inputs = micro["labels"], micro.get("input_ids")
    if labels.ndim >= 2 and inputs is not None and inputs.shape == labels.shape:
        # The first label of a row has no token before it: a causal model predicts one less than it reads.
        return labels[..., 1:]
    return labels
