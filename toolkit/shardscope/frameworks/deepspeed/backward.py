"""Backward, instant by instant: what stages reduce and gather beside what autograd still holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from shardscope.frameworks.deepspeed.buckets import Instant
from shardscope.memory.activations import modules_of, unsaved_at_start
from shardscope.memory.arithmetic import ceil_div
from shardscope.memory.backward import Peak, layer_backward
from shardscope.memory.head import loss_in_force
from shardscope.memory.modules.attention import scores_per_token
from shardscope.memory.precision import FP32
from shardscope.memory.report import Phase, Term
from shardscope.memory.words import count, gib
from shardscope.parameter_names import names_of

if TYPE_CHECKING:
    from shardscope.frameworks.deepspeed.buckets import Part
    from shardscope.memory.backward import Backward
    from shardscope.memory.stages import Stage
    from shardscope.plan import Plan


class Sizes(NamedTuple):
    """Bytes on one rank that only some of backward's instants need."""

    logits: int
    """The logits' gradient in the type of products; 0 where logits are never whole."""
    leaving: int
    """In a layer's first norm, the last of it: its input, gradients and the stream's."""
    drops: tuple[int, ...]
    """What is gone of a dense layer, against where its product is taken apart, as each matrix of its
    feed-forward has its gradient."""
    unsaved: int
    """What the very first layer under adapters does not save when it is computed again."""
    in_scores: bool
    """Whether a layer is fullest in attention, whose scores are tensors, and not in its feed-forward."""


def sizes_of(plan: Plan, stage: Stage) -> Sizes:
    """Operator by operator, as transformers' modules run."""
    arch, modules = plan.architecture, modules_of(plan)
    tokens = plan.recipe.micro_batch_size * plan.recipe.seq_len
    vocab = ceil_div(arch.vocab_size, plan.degrees.tp)
    whole = loss_in_force(plan) == "full"
    own = layer_backward(arch, False, modules)
    feed_forward, inner = own.inside - own.stream, arch.intermediate_size * modules.compute
    # Scores, where they are tensors, may outweigh the feed-forward.
    in_scores = scores_per_token(arch, modules) > 0 and feed_forward > (2 if arch.gated_mlp else 3) * inner
    if arch.gated_mlp:
        fused = names_of(arch).fused_gate_up is not None
        later = (2 * inner,) if fused else (inner, 3 * inner)
    else:
        later = (inner,)
    drops = tuple(ceil_div(tokens * (feed_forward + drop), plan.degrees.tp) for drop in (0, *later))
    stream = arch.hidden_size * modules.stream
    # Its input, and x^2's gradient in plain operations: of those four and what they start from.
    in_norm = 3 * stream
    if arch.norm == "rmsnorm" and modules.kernels == "transformers":
        in_norm = 6 * arch.hidden_size * FP32
    kept = stream if plan.recipe.recompute == "full" else 0
    recomputes = plan.recipe.recompute in ("full", "selective")
    return Sizes(
        logits=tokens * vocab * modules.compute * whole * stage.is_last,
        leaving=tokens * (stream + in_norm + kept),
        drops=drops,
        in_scores=in_scores,
        unsaved=tokens * unsaved_at_start(arch, modules, plan.degrees.tp, 1) if recomputes else 0,
    )


def peaks(
    parts: Sequence[Part],
    shape: Backward,
    half: int,
    sizes: Sizes,
    *,
    bucket: int = 0,
    first_hook: bool = True,
    trains_all: bool = True,
    forward: int = 0,
    waiting: int = 0,
    before: int | None = None,
    in_forward: Sequence[tuple[int, int]] = (),
) -> list[Peak]:
    """The instants that can be fullest.

    ``parts`` of backward are in elements of ``half`` bytes. ``bucket`` bytes are there from the first
    gradient on, which is that of the head if ``first_hook``, and comes after the last layer's
    feed-forward unless ``trains_all``; ``forward`` are gathered when forward ends;
    ``waiting`` are of gradients beside those in ``parts``, ``before`` of all gradients while the loss is
    differentiated. ``in_forward``: layers passed, and elements gathered there.
    """
    head, *layers, embedding, end = parts
    num_layers = len(layers)
    full = shape.layers + shape.edges + shape.cast

    there = waiting if before is None else before

    def peak(
        at: float,
        activations: int,
        words: str,
        instant: Instant,
        allocated: int = bucket,
        logits: Term | None = None,
        phase: Phase = "backward",
    ) -> Peak:
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
            logits,
            phase,
        )

    # Where everything is gathered the bucket is never given up; else it comes with the first gradient.
    already = bucket if forward else 0
    at_head = Term(sizes.logits, lambda: f"{gib(sizes.logits)} GiB, the gradient of the logits")
    found = [
        Peak(
            0.34,
            Term(full, lambda: f"{gib(full)} GiB all that forward saved"),
            Term(forward, lambda: f"{gib(forward)} GiB gathered when forward ended"),
            Term(there, lambda: f"{gib(there)} GiB of micro-batches before"),
            logits=shape.logits,
        ),
        peak(0.345, full, "all that forward saved", head.peak, already, at_head),
        peak(0.347, full, "all that forward saved", head.peak, bucket if first_hook else already),
        peak(
            0.35,
            full + shape.norm,
            "all that forward saved, and the final norm's gradients",
            head.base,
            bucket if first_hook else already,
        ),
    ]
    has_experts = shape.later != shape.inside
    for done in sorted({0, min(1, num_layers - 1), num_layers - 1}):
        fraction = 0.36 + 0.6 * done / num_layers
        part = layers[done]
        saved = _left(shape, num_layers, done)
        words = f"saved by {count(num_layers - done, 'layer')}, and gradients inside one"
        allocated = bucket if first_hook or done or trains_all else already
        inside = saved + max(shape.inside, shape.earlier) - (sizes.unsaved if done == num_layers - 1 else 0)
        base = part.middle if sizes.in_scores and part.middle else part.base
        found.append(peak(fraction, inside, words, base, allocated))
        if has_experts and trains_all:
            last = part.inner[-1] if part.inner else part.peak
            found.append(peak(fraction + 0.004, saved + shape.later, words, last))
        elif not has_experts and part.inner:
            pairs = zip(part.inner, sizes.drops, strict=False)
            drop, instant = max(
                ((drop, one) for one, drop in pairs), key=lambda pair: half * pair[1].total - pair[0]
            )
            found.append(peak(fraction + 0.004, saved + shape.inside - drop, words, instant))
        left = max(0, saved - shape.saved)
        words = f"saved by {count(num_layers - done - 1, 'layer')}"
        found.append(peak(fraction + 0.01, left + 2 * shape.stream, words, part.peak))
        following = layers[done + 1] if done + 1 < num_layers else embedding
        if trains_all or done + 1 < num_layers:
            words += ", and gradients inside one's first norm"
            found.append(peak(fraction + 0.012, left + sizes.leaving, words, following.base))
    found.append(peak(0.97, shape.stream, "the embedding's gradient", embedding.peak))
    found += [peak(0.975, 0, "all are used up", instant) for instant in (end.base, end.peak)]
    if in_forward:
        found.append(_gathering(in_forward, shape, half, num_layers, peak))
    return found


def _gathering(
    in_forward: Sequence[tuple[int, int]],
    shape: Backward,
    half: int,
    num_layers: int,
    peak: Callable[..., Peak],
) -> Peak:
    """Where gathers, and what layers before have saved, are most in forward."""
    done, elements = max(in_forward, key=lambda one: half * one[1] + shape.layers * one[0] // num_layers)
    saved, words = shape.layers * done // num_layers, "saved by layers before"
    return peak(0.02 + 0.3 * done / num_layers, saved, words, Instant(elements, 0), phase="forward")


def _left(shape: Backward, num_layers: int, done: int) -> int:
    """What layers still hold when backward has passed ``done`` of them, the fullest kind first."""
    left = shape.layers - done * shape.saved
    # Of two kinds of layers the fuller one is counted off for both; the mean is for what that overdraws.
    return left if left > 0 else shape.layers // num_layers * (num_layers - done)
