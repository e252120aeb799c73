"""Batches of a training run: which samples a rank reads at a step, as a pure function of the step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    import numpy
    import torch


class Share(TypedDict):
    """Fields of :class:`Batches` that say which samples a rank reads."""

    rows: int
    rank: int
    num_ranks: int
    seed: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Batches(ABC):
    """Samples in a shuffled order, assigned to steps and ranks.

    Step ``s`` takes samples ``s * G .. (s + 1) * G - 1`` of an endless sequence of epochs (``G``: the global
    batch); each epoch has all samples, shuffled by ``seed`` and epoch. Rank ``r`` of ``num_ranks`` takes the
    r-th contiguous part. The global batch is therefore the same on 1 rank or 8, and a resumed run needs only
    its step.
    """

    rows: int
    """Number of samples per rank and optimizer step."""
    rank: int
    num_ranks: int
    seed: int = 0
    in_order: bool = False
    """Whether the samples are read once, in order, as for validation. Rows after the last one are empty."""

    @property
    @abstractmethod
    def num_samples(self) -> int:
        """Number of samples in one epoch."""

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Number of tokens of the data."""

    @property
    @abstractmethod
    def title(self) -> str:
        """Number and kind of the samples, for the log."""

    @abstractmethod
    def build_batch(self, step: int) -> dict[str, torch.Tensor]:
        """Return ``input_ids`` and ``labels``, int64, shape ``[rows, seq_len]``; the model shifts labels.

        All labels of an empty row are -100.
        """

    def describe_position(self) -> dict[str, object] | None:
        """Return the position in streamed data, as JSON; None if the step alone determines it."""
        return None

    @property
    def steps_per_epoch(self) -> float:
        """Number of steps that read each sample once."""
        return self.num_samples / (self.rows * self.num_ranks)

    def list_indices(self, step: int) -> list[int]:
        """Return the indices of the samples that this rank reads at ``step`` (from 0)."""
        first = (step * self.num_ranks + self.rank) * self.rows
        positions = range(first, first + self.rows)
        if self.in_order:
            return [position for position in positions if position < self.num_samples]
        return [self._find_sample(position) for position in positions]

    def spans_two_epochs(self, step: int) -> bool:
        """Return whether the step spans two epochs, in which case a sample may occur twice."""
        batch = self.rows * self.num_ranks
        return step * batch // self.num_samples != ((step + 1) * batch - 1) // self.num_samples

    def _find_sample(self, position: int) -> int:
        epoch, index = divmod(position, self.num_samples)
        return int(_shuffle_samples(self.num_samples, self.seed, epoch)[index])


def split_rows(num_rows: int, fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Return the indices of the rows for training and for validation, both in order.

    A ``fraction`` of the rows, drawn by ``seed``, is for validation; at least one row is for each.
    """
    num_validation = count_validation_rows(num_rows, fraction)
    # An order that no epoch has.
    drawn = _shuffle_samples(num_rows, seed, 2**31)[:num_validation].tolist()
    is_drawn = set(drawn)
    return [row for row in range(num_rows) if row not in is_drawn], sorted(drawn)


def count_validation_rows(num_rows: int, fraction: float) -> int:
    """Return how many of ``num_rows`` are for validation; at least one row is for training as well."""
    return min(max(1, round(num_rows * fraction)), num_rows - 1)


@lru_cache(maxsize=4)
def _shuffle_samples(
    num_samples: int, seed: int, epoch: int
) -> numpy.ndarray[tuple[int], numpy.dtype[numpy.int64]]:
    import numpy

    # Seeded by a sequence: seed + epoch would give the epochs of neighbouring seeds the same order.
    return numpy.random.default_rng([seed, epoch]).permutation(num_samples)
