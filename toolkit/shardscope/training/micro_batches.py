"""Micro-batches of a step, and their loss weights, with which every labelled token counts the same."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

IGNORED_LABEL = -100
"""Label that transformers and ``torch.nn.CrossEntropyLoss`` ignore."""


def split_batch(batch: Mapping[str, torch.Tensor], num_micro_batches: int) -> list[dict[str, torch.Tensor]]:
    """Split ``batch`` into ``num_micro_batches`` equal parts along its first dimension.

    Raises ``ValueError`` if a tensor is not divisible: dropping rows would silently change the global batch.
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


def check_staged_batch(batch: Mapping[str, torch.Tensor]) -> None:
    """Raise ``ValueError`` for tensors that pipeline stages do not send to each other."""
    if set(batch) != {"input_ids", "labels"}:
        raise ValueError(
            f"batch has {', '.join(sorted(batch))}; allowed with pp > 1: input_ids and labels. Nearest fix: "
            "leave the others out, or pp=1."
        )


class LossWeights:
    """Factors of each micro-batch's mean loss before ``backward``.

    A token is one label (of text, of a class, ...). Without ``labels`` all micro-batches weigh the same.

    Frameworks average gradients over ranks. With ``n_i`` tokens in a micro-batch and ``N`` on all ``R``
    ranks, the weight ``n_i * R / N`` makes the sum the mean over all N tokens, however unevenly ``-100`` is
    distributed (https://huggingface.co/blog/gradient_accumulation shows the error of equal weights).

    The all-reduce of the counts starts in the constructor and is waited for at the first weight, so it
    overlaps with the first forward: a blocking one would make ranks wait for the slowest twice per step.
    """

    def __init__(self, micro_batches: list[dict[str, torch.Tensor]], *, allows_empty: bool = False) -> None:
        self._allows_empty = allows_empty
        self._counts = [count_labels(micro) for micro in micro_batches if "labels" in micro]
        self._equal = 1 / len(micro_batches)
        # In host memory, for which every run has gloo: a GPU tensor would need a synchronization.
        self._totals = torch.tensor([sum(self._counts), self._counts.count(0)], dtype=torch.int64)
        self._counting = dist.all_reduce(self._totals, async_op=True) if self._counts else None

    def __getitem__(self, index: int) -> float:
        """Return the weight of a micro-batch. Raises ``ValueError`` on all ranks if any has no label.

        With ``allows_empty`` one without a label weighs 0, unless there is no label at all.
        """
        if not self._counts:
            return self._equal
        if self._counting is not None:
            self._counting.wait()
            self._counting = None
        num_tokens, num_empty = (int(total) for total in self._totals.tolist())
        if num_empty and not (self._allows_empty and num_tokens):
            # The mean over no token is NaN. Every rank raises, so none is left waiting in a collective.
            raise ValueError(
                f"Some micro-batches of this step have no labelled token (all are {IGNORED_LABEL}); "
                "allowed: at least one each. Nearest fix: drop such samples, or raise seq_len."
            )
        return float(self._counts[index] * dist.get_world_size() / num_tokens)


def split_for_evaluation(
    batch: Mapping[str, torch.Tensor], num_micro_batches: int
) -> tuple[list[dict[str, torch.Tensor]], list[float]]:
    """Split ``batch`` like :func:`split_batch`. Return the micro-batches and their loss weights.

    Some may have no label, such as those after the last row of the data. They weigh 0 and get labels of 0,
    because the mean over no label is NaN.
    """
    micros = split_batch(batch, num_micro_batches)
    loss_weights = LossWeights(micros, allows_empty=True)
    weights = [loss_weights[index] for index in range(len(micros))]
    filled = [
        micro if weight else {**micro, "labels": torch.zeros_like(micro["labels"])}
        for micro, weight in zip(micros, weights, strict=True)
    ]
    return filled, weights


def count_labels(batch: Mapping[str, torch.Tensor]) -> int:
    """Return the number of labels in ``batch`` that bear loss."""
    return int((_select_predicted_labels(batch) != IGNORED_LABEL).sum())


def _select_predicted_labels(micro_batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the labels that the model's loss uses, including those of -100."""
    labels, inputs = micro_batch["labels"], micro_batch.get("input_ids")
    if labels.ndim >= 2 and inputs is not None and inputs.shape == labels.shape:
        # A causal model shifts labels: the first one of a row has no token before it.
        return labels[..., 1:]
    return labels
