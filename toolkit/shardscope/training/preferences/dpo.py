"""The DPO loss (Rafailov et al. 2023, arXiv:2305.18290, eq. 7) and its metrics, as an engine's objective."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from shardscope.training.micro_batches import IGNORED_LABEL
from shardscope.training.preferences.pairs import LABELS, REFERENCE

if TYPE_CHECKING:
    from shardscope.training.data.batches import Batches
    from shardscope.training.engine import Engine


class PairMetrics(NamedTuple):
    """Means over pairs. A reward is beta times the log-ratio of policy and reference (eq. 5)."""

    loss: float
    chosen_reward: float
    rejected_reward: float
    reward_accuracy: float
    """Share of pairs whose chosen answer has the higher reward."""

    @property
    def rewards(self) -> dict[str, float]:
        """The metrics other than the loss, by their names in ``run.metrics()``."""
        return {
            "reward_margin": self.chosen_reward - self.rejected_reward,
            "reward_accuracy": self.reward_accuracy,
            "chosen_reward": self.chosen_reward,
            "rejected_reward": self.rejected_reward,
        }


class Dpo:
    """DPO with a frozen reference, over micro-batches of :class:`PairBatches`.

    The reference's log-probabilities are in the batch, or come from the model without its adapters: the
    base, which they were added to. Dropout is off in the reference.
    """

    def __init__(self, beta: float) -> None:
        self.beta = beta
        self._sums: torch.Tensor | None = None

    def compute_loss(self, logits: torch.Tensor, micro: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean loss over the pairs of a micro-batch, and add its numbers to :meth:`take_metrics`.

        Pairs without labels, after the last one of the data, do not count.
        """
        log_ratios = sum_log_probabilities(logits, micro[LABELS]) - micro[REFERENCE]
        chosen, rejected = (self.beta * log_ratios).chunk(2)
        is_pair = (micro[LABELS] != IGNORED_LABEL).any(-1).chunk(2)[0]
        losses = -F.logsigmoid(chosen - rejected)
        numbers = torch.stack(
            [
                losses,
                chosen,
                rejected,
                (chosen > rejected).float(),
                torch.ones_like(losses),
            ]
        )
        sums = (numbers * is_pair).sum(-1)
        self._sums = sums.detach() if self._sums is None else self._sums + sums.detach()
        # At least 1: the last micro-batches of a validation may have no pair at all.
        return sums[0] / sums[-1].clamp(min=1)

    def take_metrics(self) -> PairMetrics:
        """Return the means over all pairs of all ranks since the last call. Called by all ranks together."""
        assert self._sums is not None, "compute_loss() comes first"
        sums, self._sums = self._sums, None
        dist.all_reduce(sums)
        *totals, num_pairs = sums.tolist()
        return PairMetrics(*(total / max(1.0, num_pairs) for total in totals))

    def validate(self, engine: Engine, batches: Batches) -> PairMetrics:
        """Return the means over all pairs of ``batches``. Called by all ranks together."""
        for step in range(-(-batches.num_samples // (batches.rows * batches.num_ranks))):
            engine.evaluate(batches.build_batch(step))
        return self.take_metrics()


def sum_log_probabilities(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each row's labels, summed over its tokens; labels of -100 are ignored.

    ``logits`` [rows, tokens, vocabulary] and ``labels`` [rows, tokens] are aligned, as in transformers'
    ``ForCausalLMLoss``, whose tensors are the same: logits, their fp32 copy and the log-softmax.
    """
    next_labels = F.pad(labels, (0, 1), value=IGNORED_LABEL)[..., 1:]
    logits = logits.float()  # Reuse the name, so that the logits before the cast are freed.
    losses = F.cross_entropy(
        logits.flatten(0, 1), next_labels.flatten(), ignore_index=IGNORED_LABEL, reduction="none"
    )
    return -losses.view(next_labels.shape).sum(-1)


@contextmanager
def disabled_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Make peft's layers compute their base alone inside.

    peft's own ``disable_adapter`` also sets ``requires_grad`` of the adapters to False (peft 0.21,
    tuners/tuners_utils.py, ``enable_adapters``). FSDP2 copies that to its all-gathered parameters when it
    creates them, in the first forward, and would never compute a gradient.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    assert layers, "a model with adapters has peft's layers"
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
