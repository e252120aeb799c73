"""The exercise on DDP: gradients averaged by all-reduces of buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from shardscope.teach.rank_checks.collectives import Call, CollectiveCounter, describe_calls
from shardscope.teach.rank_checks.comparison import (
    all_near,
    average,
    build_layers,
    compute_gradients,
    is_near,
    list_names,
)
from shardscope.teach.rank_checks.learner import Learner, ProblemError

BUCKET_BYTES = 10_000
"""The 25,344 bytes of gradients are three buckets of at most so many bytes, the last one partly full."""


class AverageGradients(Protocol):
    """The learner's function."""

    def __call__(self, parameters: list[torch.nn.Parameter], bucket_bytes: int) -> object:
        """Average ``.grad`` of all parameters over the ranks."""


def check_bucketed_all_reduce(learner: Learner, answer: AverageGradients) -> str:
    """Compare gradients with those of one process on the whole batch, and count the all-reduces."""
    model = build_layers(seed=0)
    gradients = [compute_gradients(model, rank) for rank in range(learner.world_size)]
    expected, own = average(gradients), gradients[learner.rank]
    names = [name for name, _ in model.named_parameters()]
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, own, strict=True):
        parameter.grad = gradient.clone()
    with CollectiveCounter() as counter:
        learner.call(lambda: answer(parameters, BUCKET_BYTES))
    got = [parameter.grad for parameter in parameters]
    found = [gradient for gradient in got if gradient is not None]
    if len(found) < len(got):
        missing = [name for name, gradient in zip(names, got, strict=True) if gradient is None]
        raise ProblemError(f"The .grad of {list_names(missing)} is None afterwards; averages belong there.")
    _compare_gradients(names, found, expected, own, learner.world_size)
    _check_buckets(counter.calls, sum(gradient.numel() * gradient.element_size() for gradient in expected))
    _check_order(counter.first_sent, own, learner.world_size)
    return (
        f"The gradients on both ranks equal those of one process with the whole batch; your code made "
        f"{describe_calls(counter.calls)}."
    )


def _compare_gradients(
    names: Sequence[str],
    found: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    own: Sequence[torch.Tensor],
    ranks: int,
) -> None:
    """Raise :class:`ProblemError` with the cause of a difference, if it is a known one."""
    if all_near(found, expected):
        return
    if all_near(found, expected, ranks):
        raise ProblemError(
            f"Every gradient is {ranks} times too large: an all-reduce sums and does not average."
        )
    if all_near(found, expected, 1 / ranks):
        raise ProblemError(f"Every gradient is {ranks} times too small: it is divided twice.")
    if all_near(found, own):
        raise ProblemError(
            "Every rank still has its own gradients. Does the average come back from the bucket into "
            ".grad, and does an asynchronous all-reduce end before it is read (work.wait())?"
        )
    if all_near(found, own, 1 / ranks):
        raise ProblemError("The gradients are divided by the number of ranks, but not summed over them.")
    local = [name for name, one, mine in zip(names, found, own, strict=True) if is_near(one, mine)]
    if local:
        raise ProblemError(
            f"{list_names(local)}: still this rank's own gradient. Is the last bucket, which is not full, "
            "sent too?"
        )
    wrong = [name for name, one, right in zip(names, found, expected, strict=True) if not is_near(one, right)]
    raise ProblemError(
        f"Other gradients than those of one process: {list_names(wrong)}. Is each slice of a bucket "
        "copied to the parameter that it came from?"
    )


def _check_buckets(calls: Sequence[Call], num_bytes: int) -> None:
    """Raise :class:`ProblemError` unless the gradients were sent once, in a few buckets."""
    fewest = -(-num_bytes // BUCKET_BYTES)
    largest = max((call.num_bytes for call in calls), default=0)
    made = f"Right gradients, by {describe_calls(calls)}"
    if largest > BUCKET_BYTES:
        raise ProblemError(f"{made}. One of {largest:,} bytes is larger than a bucket of {BUCKET_BYTES:,}.")
    if len(calls) > fewest + 1:
        raise ProblemError(
            f"{made}. {num_bytes:,} bytes need {fewest} buckets of {BUCKET_BYTES:,}, not so many."
        )


def _check_order(first_sent: torch.Tensor | None, own: Sequence[torch.Tensor], ranks: int) -> None:
    """Raise :class:`ProblemError` if the first bucket has the first parameter and not the last one."""

    def is_sent(gradient: torch.Tensor) -> bool:
        # Some divide before the sum and some after it: both are right.
        return any(bool(torch.isin(one, sent).all()) for one in (gradient, gradient / ranks))

    if first_sent is None:
        return
    sent = first_sent
    if is_sent(own[0]) and not is_sent(own[-1]):
        raise ProblemError(
            "Right gradients, but the first bucket has the first parameter. Backward makes the gradient of "
            "the last parameter first: begin with it, as DDP does, which sends it while backward goes on."
        )
