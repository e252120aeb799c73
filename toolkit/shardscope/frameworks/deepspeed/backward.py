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
    parts: Sequence[Part],
    shape: Backward,
    half: int,
    *,
    bucket: int = 0,
    first_hook: bool = True,
    trains_all: bool = True,
    forward: int = 0,
    waiting: int = 0,
    before: int | None = None,
) -> list[Peak]:
    """The instants that can be fullest.

    ``parts`` of backward are in elements of ``half`` bytes. ``bucket`` bytes are there from the first
    gradient on, which is that of the head if ``first_hook``, and comes after the last layer's
    feed-forward unless ``trains_all``; ``forward`` are gathered when forward ends;
    ``waiting`` are of gradients beside those in ``parts``, ``before`` of all gradients while the loss is
    differentiated.
    """
    head, *layers, embedding, end = parts
    num_layers = len(layers)
    full = shape.layers + shape.edges + shape.cast

    there = waiting if before is None else before

    def peak(at: float, activations: int, words: str, instant: Instant, allocated: int = bucket) -> Peak:
        staging = allocated + half * instant.staging
        kept = waiting + half * instant.kept
        return Peak(
            at,
            Term(activations, lambda: f"{gib(activations)} GiB {words}"),
            Term(
                staging,
                lambda: (
                    f"{gib(allocated)} GiB bucket (reduce_bucket_size) + {instant.staging:,} elements × "
                    f"{half} bytes gathered, waiting to be reduced, or copied for that"
                ),
            ),
            Term(kept, lambda: f"{instant.kept:,} elements × {half} bytes reduced or kept so far"),
        )

    found = [
        Peak(
            0.34,
            Term(full, lambda: f"{gib(full)} GiB all that forward saved"),
            Term(forward, lambda: f"{gib(forward)} GiB gathered when forward ended"),
            Term(there, lambda: f"{gib(there)} GiB of micro-batches before"),
            logits=shape.logits,
        ),
        peak(
            0.35,
            full + shape.norm,
            "all that forward saved, and the final norm's gradients",
            head.peak,
            bucket if first_hook else 0,
        ),
    ]
    for done in sorted({0, min(1, num_layers - 1), num_layers - 1}):
        fraction = 0.36 + 0.6 * done / num_layers
        saved = _left(shape, num_layers, done)
        words = f"saved by {count(num_layers - done, 'layer')}, and gradients inside one"
        allocated = bucket if first_hook or done or trains_all else 0
        found.append(peak(fraction, saved + shape.inside, words, layers[done].base, allocated))
        left = max(0, saved - shape.saved) + 2 * shape.stream
        words = f"saved by {count(num_layers - done - 1, 'layer')}"
        found.append(peak(fraction + 0.01, left, words, layers[done].peak))
    found.append(peak(0.97, shape.stream, "the embedding's gradient", embedding.peak))
    found += [peak(0.975, 0, "all are used up", instant) for instant in (end.base, end.peak)]
    return found


def _left(shape: Backward, num_layers: int, done: int) -> int:
    """What layers still hold when backward has passed ``done`` of them, the fullest kind first."""
    left = shape.layers - done * shape.saved
    # Of two kinds of layers the fuller one is counted off for both; the mean is for what that overdraws.
    return left if left > 0 else shape.layers // num_layers * (num_layers - done)
