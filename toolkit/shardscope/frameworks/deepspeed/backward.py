"""Backward, instant by instant: what stages reduce and gather beside what autograd still holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardscope.memory.backward import Peak
from shardscope.memory.report import Term
from shardscope.memory.words import count, gib

if TYPE_CHECKING:
    from shardscope.frameworks.deepspeed.buckets import Instant, Part
    from shardscope.memory.backward import Backward


def peaks(
    parts: Sequence[Part], shape: Backward, half: int, bucket: int, forward: int, waiting: int
) -> list[Peak]:
    """The instants that can be fullest.

    ``parts`` of backward in elements of ``half`` bytes; ``bucket`` bytes that are there from the first
    gradient on; ``forward`` bytes gathered when forward ends; ``waiting`` bytes of gradients left by
    micro-batches before.
    """
    head, *layers, embedding, end = parts
    num_layers = len(layers)
    full = shape.layers + shape.edges + shape.cast

    def peak(fraction: float, activations: int, words: str, instant: Instant, logits: bool = False) -> Peak:
        staging = bucket + half * instant.staging
        kept = max(waiting, 0) + half * instant.kept
        return Peak(
            fraction,
            Term(activations, lambda: f"{gib(activations)} GiB {words}"),
            Term(
                staging,
                lambda: (
                    f"{gib(bucket)} GiB bucket (reduce_bucket_size) + {instant.staging:,} elements × {half} "
                    "bytes gathered, waiting to be reduced, or copied for that"
                ),
            ),
            Term(kept, lambda: f"{instant.kept:,} elements × {half} bytes reduced or kept so far"),
            logits,
        )

    found = [
        Peak(
            0.34,
            Term(full, lambda: f"{gib(full)} GiB all that forward saved"),
            Term(forward, lambda: f"{gib(forward)} GiB gathered when forward ended"),
            Term(waiting, lambda: f"{gib(waiting)} GiB of micro-batches before"),
            logits=True,
        ),
        peak(0.35, full + shape.norm, "all that forward saved, and the final norm's gradients", head.peak),
    ]
    for done in sorted({0, min(1, num_layers - 1), num_layers - 1}):
        fraction = 0.36 + 0.6 * done / num_layers
        saved = shape.layers - done * shape.saved
        words = f"saved by {count(num_layers - done, 'layer')}, and gradients inside one"
        found.append(peak(fraction, saved + shape.inside, words, layers[done].base))
        left = max(0, saved - shape.saved) + 2 * shape.stream
        words = f"saved by {count(num_layers - done - 1, 'layer')}"
        found.append(peak(fraction + 0.01, left, words, layers[done].peak))
    found.append(peak(0.97, shape.stream, "the embedding's gradient", embedding.peak))
    found += [peak(0.975, 0, "all are used up", instant) for instant in (end.base, end.peak)]
    return found
