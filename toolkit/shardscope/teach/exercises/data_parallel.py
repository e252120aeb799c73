"""Exercises of notebooks 03 (data parallel and its buckets) and 04 (ZeRO and FSDP2)."""

from __future__ import annotations

from math import ceil

from shardscope.catalog import models
from shardscope.teach.answers import Choice, Mistake, Number
from shardscope.teach.exercises.exercise import Exercise

BUCKET_BYTES = 25 * 2**20
"""DistributedDataParallel's buckets: bucket_cap_mb's default (Li et al. 2020, section 3.2.2)."""


def count_gradient_bytes() -> int:
    """Return the bytes of GPT-2 XL's gradients in 32 bits."""
    return 4 * models["gpt2-xl"].num_parameters


def compute_ring_bytes(num_bytes: float, ranks: int) -> float:
    """Return what one rank sends in a ring all-reduce: 2 (N - 1) / N of it (Patarasu and Yuan 2009)."""
    return 2 * (ranks - 1) / ranks * num_bytes


def count_buckets() -> int:
    """Return the fewest buckets that hold GPT-2 XL's gradients."""
    return ceil(count_gradient_bytes() / BUCKET_BYTES)


EXERCISES = (
    Exercise(
        name="03-all-reduce-bytes",
        asks="It is a number of GB.",
        expected=Number(
            value=lambda: compute_ring_bytes(16.0, 8),
            unit="GB",
            tolerance=0.001,
            mistakes=(
                Mistake(lambda: 16.0, "That is one copy. A ring sends the vector almost twice."),
                Mistake(
                    lambda: 32.0,
                    "Nearly: a rank never sends the slice that it already has, hence (N - 1) / N.",
                ),
                Mistake(lambda: 14.0, "That is one of the two halves: reduce-scatter, then all-gather."),
                Mistake(
                    lambda: compute_ring_bytes(16.0, 8) * 8, "That is all ranks together. One is asked for."
                ),
            ),
        ),
        hints=(
            "An all-reduce is a reduce-scatter followed by an all-gather. Each sends (N - 1) / N of the "
            "vector.",
            "2 (N - 1) / N times the vector, with N = 8 and 16 GB.",
            "2 x 7 / 8 x 16.",
        ),
        why="2 x 7/8 x 16 = 28 GB. With more ranks it hardly grows, 2 x 16 GB at most: that is why rings "
        "scale "
        "(Patarasu and Yuan 2009).",
    ),
    Exercise(
        name="03-buckets",
        asks="It is a whole number of buckets.",
        expected=Number(
            value=lambda: float(count_buckets()),
            unit="",
            tolerance=1e-6,
            mistakes=(
                Mistake(
                    lambda: float(ceil(count_gradient_bytes() / 2 / BUCKET_BYTES)),
                    "That is for 16-bit gradients. These have 32 bits.",
                ),
                Mistake(
                    lambda: count_gradient_bytes() / BUCKET_BYTES,
                    "The last bucket is partly full, and is sent too: round up.",
                ),
            ),
        ),
        hints=(
            "Bytes of all gradients, divided by the bytes of a bucket, rounded up.",
            'The gradients have 4 x ss.models["gpt2-xl"].num_parameters bytes, a bucket 25 x 2**20.',
            "6,230 MB / 26.2 MB, rounded up.",
        ),
        why="4 x 1,557,611,200 / (25 x 2**20) = 237.7, rounded up: 238 (Li et al. 2020, section 3.2.2). DDP "
        "closes a "
        "bucket with the tensor that fills it, so that real buckets are a little larger.",
    ),
    Exercise(
        name="03-exposed-bucket",
        asks='It is one word: "first", "middle", "last" or "all".',
        expected=Choice(
            right=frozenset({"last"}),
            wrong={
                "first": "The first bucket is sent while nearly all of backward is still to come.",
                "middle": "While it is sent, the layers before it still compute their gradients.",
                "all": "Only without overlap. DDP sends a bucket as soon as it is full.",
            },
        ),
        hints=(
            "Backward runs from the last layer to the first. Which gradients are ready at its end?",
            "A bucket can be overlapped with the backward that is still to come after it is full.",
            "After which bucket does no backward come any more?",
        ),
        why="The last bucket has the gradients of the first layers: when it is full, backward is over, and "
        "nothing "
        "is left to overlap it with (Li et al. 2020, section 3.2.3).",
    ),
)
