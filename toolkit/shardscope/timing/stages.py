"""Seconds of one pipeline stage in one optimizer step, by part; numbers may be arrays of plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.ops import largest_element, maximum, minimum, where
from shardscope.memory.state.stages import count_recomputed_by_kind
from shardscope.timing.collective_sums import repeat_collectives, sum_collectives
from shardscope.timing.head import compute_end_seconds
from shardscope.timing.layers import LayerWork
from shardscope.timing.offload import compute_host_seconds
from shardscope.timing.rates import check_links
from shardscope.timing.report import PARTS
from shardscope.timing.update import compute_update_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardscope.core.plan import Plan
    from shardscope.memory.activations.modules.saved_tensors import Modules
    from shardscope.memory.state.stages import Stage
    from shardscope.timing.collective_sums import CollectiveCalls, CollectiveSums
    from shardscope.timing.rates import Rates
    from shardscope.timing.report import Part
    from shardscope.timing.traffic import OverlappedWith, TimingModel

_NO_SECONDS: dict[Part, float] = {part: 0.0 for part in PARTS if part != "bubble"}
PER_STEP_PARTS: tuple[Part, ...] = ("gradients", "gathers", "optimizer", "offload")
"""Parts that run once per step, for which a pipeline's first and last micro-batches do not wait."""
PER_MICRO_BATCH_PARTS = tuple(part for part in _NO_SECONDS if part not in PER_STEP_PARTS)
"""Parts that repeat on each stage with each micro-batch."""


class StageSeconds(NamedTuple):
    """Seconds of one stage, all micro-batches of one step."""

    parts: dict[Part, float]
    """Exposed seconds of every part but the bubble."""
    list_collectives: Callable[[], list[CollectiveCalls]]
    """Returns its collectives one by one."""
    sum_hidden_seconds: Callable[[], dict[Part, float]]
    """Returns their seconds overlapped with arithmetic, by part."""
    hidden_offload: float
    """Seconds of host link and NVMe transfers overlapped with arithmetic."""
    forward: float
    """Seconds of arithmetic and of activations' copies in the forward of one micro-batch."""
    copied: float
    """Seconds in which offloaded activations are copied there and back: a part of ``parts["offload"]``."""
    first_wait: float
    """Seconds of ``parts["gathers"]`` for which the first micro-batch waits on this stage; 0 if all stages
    all-gather their weights at once."""

    @property
    def busy(self) -> float:
        """The stage's busy seconds per step, pipeline bubbles excluded."""
        return sum(self.parts.values())

    @property
    def repeated(self) -> float:
        """The part of them that repeats with each micro-batch."""
        parts = self.parts
        return sum([parts[part] for part in PER_MICRO_BATCH_PARTS]) + self.copied


class _Overlappable(NamedTuple):
    """Seconds of arithmetic per step that can overlap with collectives.

    0 on CPU ranks: gloo's threads need the cores that compute.
    """

    forward: float = 0.0
    backward: float = 0.0
    last_backward: float = 0.0
    first_forward: float = 0.0
    attention: float = 0.0
    """Attention, recomputed too, and waits for kernel launches."""
    attention_forward: float = 0.0
    """The part of ``attention`` in ``forward``; the rest is in ``backward``."""
    edge_micro_batches: float = 1.0
    """Micro-batches whose arithmetic ``last_backward`` and ``first_forward`` are."""

    def add_copies(self, seconds: float, micro_batches: int) -> _Overlappable:
        """Return the same with ``seconds`` of copies in each forward and each backward."""
        return self._replace(
            forward=self.forward + micro_batches * seconds,
            backward=self.backward + micro_batches * seconds,
            last_backward=self.last_backward + self.edge_micro_batches * seconds,
            first_forward=self.first_forward + self.edge_micro_batches * seconds,
        )


def prepare_layers(plan: Plan, modules: Modules, rates: Rates, model: TimingModel) -> LayerWork:
    """Return the timing state shared by all stages of ``plan``; ``model`` is the framework's ``timing.py``.

    Raises ``ValueError`` naming an unknown figure.
    """
    check_links(plan.cluster, rates)
    return LayerWork(plan, modules, rates, model)


def compute_stage_seconds(work: LayerWork, stage: Stage) -> StageSeconds:
    """Return the seconds of one stage's step. Raise ``ValueError`` naming an unknown figure."""
    plan, rates = work.plan, work.rates
    micro_batches = plan.num_micro_batches
    # Arithmetic first: it bounds how many seconds of the collectives below can overlap.
    parts, arithmetic, dropped, forward = _compute_arithmetic(work, stage, micro_batches)
    # Copies of offloaded activations are operators of their layers (``training/model/recompute.py``).
    copying: float = 0.0
    running = arithmetic
    if plan.recipe.recompute == "offload":
        copying = dropped / rates.host.bytes_per_second
        running = arithmetic.add_copies(copying, micro_batches) if plan.on_gpu else arithmetic
    # Collectives of the training state differ by framework; those of parallel layers do not, and are the
    # same on every stage, so that ``work`` has them already.
    traffic = work.model.state_traffic(plan, stage)
    state = sum_collectives(traffic.transfers, work.call_seconds)
    repeated = [(calls.number(work, stage), calls.each) for calls in work.parallel]
    for number, collectives in repeated:
        state.add(number, collectives)
    exposed, shares = _split_exposed(state, running, micro_batches)
    for part, seconds in exposed.items():
        parts[part] = parts[part] + seconds
    # Local copies that stage collectives are memory-bound, and overlap with nothing.
    parts["gathers"] = parts["gathers"] + traffic.copied_for_gathers / work.memory
    parts["gradients"] = parts["gradients"] + traffic.copied_for_gradients / work.memory
    parts["optimizer"] = compute_update_seconds(plan, stage, traffic.updated, traffic.main_copies, rates)
    # Host transfers of the training state have a link of their own: they overlap with all arithmetic, and
    # with the collectives that it waits for.
    host = compute_host_seconds(
        plan,
        traffic,
        lambda: arithmetic.forward + _sum_exposed(state, shares, ("first_forward", "forward")),
        lambda: arithmetic.backward + _sum_exposed(state, shares, ("last_backward", "backward")),
        rates,
    )
    copied = 2 * micro_batches * copying
    parts["offload"] = host.exposed + copied
    return StageSeconds(
        parts,
        lambda: repeat_collectives([*repeated, (1, state)], shares),
        lambda: _sum_hidden(state.overlappable, shares),
        host.hidden,
        forward + copying,
        copied,
        traffic.first_micro_batch_waits * exposed.get("gathers", 0.0),
    )


def _compute_arithmetic(
    work: LayerWork, stage: Stage, micro_batches: int
) -> tuple[dict[Part, float], _Overlappable, float, float]:
    """Return the parts with arithmetic, what can overlap collectives, and of one micro-batch the offloaded
    bytes and the seconds of forward."""
    recipe = work.plan.recipe
    forward: float = 0.0
    matrices: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    recomputation: float = 0.0
    dropped: float = 0.0
    attention_forward: float = 0.0
    # Keys and values are exchanged while attention runs, also where it is recomputed, and while the GPU waits
    # for launches in between.
    exchanges_keys = largest_element(work.plan.degrees.cp) > 1
    repeats_core = recipe.recompute == "full" or work.repeats_core_attention
    waiting: float = 0.0
    waiting_forward: float = 0.0
    # Offloading sends the saved activations to the host and fetches them, in place of recomputing them.
    leaves = recipe.recompute == "offload"
    # Sums are ``a = a + b``, not ``a += b``: in place, numpy would write into an array that is shared.
    for moe, layers, recomputed in count_recomputed_by_kind(work.arch, stage, recipe.recompute_interval):
        layer = work.compute_layer(moe)
        matrices = matrices + layers * layer.both.matrices
        attention = attention + layers * layer.both.attention
        elementwise = elementwise + layers * layer.both.elementwise
        recomputation = recomputation + recomputed * layer.recomputation
        dropped = dropped + leaves * recomputed * layer.dropped_bytes
        forward = forward + layers * layer.forward
        attention_forward = attention_forward + layers * layer.forward_attention
        if exchanges_keys:
            waiting = waiting + layers * layer.both.waiting
            if repeats_core:
                waiting = waiting + recomputed * layer.forward_attention
            waiting_forward = waiting_forward + layers * layer.forward_waiting
    # Embedding, head and loss: nothing on inner stages.
    end = compute_end_seconds(work, stage)
    matrices = matrices + end.forward + end.backward
    elementwise = elementwise + end.lookup
    loss = end.loss + 0.0
    recomputation = recomputation + end.recomputation
    forward = forward + end.forward
    # Recomputation runs inside backward, so collectives of backward overlap with it too.
    backward = matrices + attention + elementwise + loss + recomputation - forward
    arithmetic = _Overlappable()
    if work.plan.on_gpu:
        # Interleaved, all chunks' backward has run once when the last micro-batch's has. A chunk's first
        # forward follows pp micro-batches of the chunk before it, and as many of the other chunks' backwards
        # follow its last backward.
        edge: float = 1
        if work.overlap.spans_chunks:
            pp, vpp = work.plan.degrees.pp, work.plan.degrees.vpp
            edge = where(vpp > 1, minimum(pp, micro_batches) * (vpp - 1) / vpp, 1)
        arithmetic = _Overlappable(
            micro_batches * forward,
            micro_batches * backward,
            edge * backward,
            edge * forward,
            micro_batches * (attention + waiting),
            micro_batches * (attention_forward + waiting_forward),
            edge,
        )
    parts = _NO_SECONDS | {
        "matrices": micro_batches * matrices,
        "attention": micro_batches * attention,
        "elementwise": micro_batches * elementwise,
        "loss": micro_batches * loss,
        "recomputation": micro_batches * recomputation,
    }
    return parts, arithmetic, dropped, forward


def _split_exposed(
    all_sent: CollectiveSums, arithmetic: _Overlappable, micro_batches: int
) -> tuple[dict[Part, float], dict[OverlappedWith, float]]:
    """Return each part's exposed communication seconds, and the overlapped shares by kind of arithmetic.

    Collectives that overlap with the same arithmetic share it in proportion to their seconds, e.g. the next
    layer's all-gather and the previous layer's reduce-scatter in FSDP2's backward.
    """
    sums: dict[OverlappedWith, float] = {}
    for (_, overlaps_with), seconds in all_sent.overlappable.items():
        # No sum starts at 0.0: adding it to a column would cost a pass over all plans.
        sums[overlaps_with] = sums[overlaps_with] + seconds if overlaps_with in sums else seconds
    shares = _compute_overlapped_shares(sums, arithmetic, micro_batches)
    left = all_sent.seconds.copy()
    for (part, overlaps_with), seconds in all_sent.overlappable.items():
        left[part] = left[part] - seconds * shares[overlaps_with]
    return left, shares


def _sum_exposed(
    all_sent: CollectiveSums, shares: dict[OverlappedWith, float], kinds: tuple[OverlappedWith, ...]
) -> float:
    """Return the exposed seconds of collectives that can overlap with these kinds of arithmetic."""
    exposed: float = 0.0
    for (_, overlaps_with), seconds in all_sent.overlappable.items():
        if overlaps_with in kinds:
            exposed = exposed + seconds * (1 - shares[overlaps_with])
    return exposed


def _sum_hidden(
    overlappable: dict[tuple[Part, OverlappedWith], float], shares: dict[OverlappedWith, float]
) -> dict[Part, float]:
    parts: dict[Part, float] = {}
    for (part, overlaps_with), seconds in overlappable.items():
        parts[part] = parts.get(part, 0.0) + seconds * shares[overlaps_with]
    return parts


def _compute_overlapped_shares(
    sums: dict[OverlappedWith, float], arithmetic: _Overlappable, micro_batches: int
) -> dict[OverlappedWith, float]:
    """Return the overlapped share by kind of arithmetic; no second of arithmetic overlaps twice.

    Attention is part of forward and backward, and the first and last micro-batch are part of all: overlap
    with the narrower kind is subtracted from the wider one.
    """
    # From the narrowest kind of arithmetic to the widest; forward and backward are the seconds in use.
    shares: dict[OverlappedWith, float] = {}
    forward: float = 0.0
    backward: float = 0.0

    def overlap(kind: OverlappedWith, covered: float) -> float:
        """Set the share of ``kind``, and return its overlapped seconds."""
        shares[kind] = _compute_share(sums[kind], getattr(arithmetic, kind), covered)
        return sums[kind] * shares[kind]

    if "attention" in sums:
        around = overlap("attention", 0.0)
        # Keys and values overlap attention in forward and backward in proportion to its seconds.
        forward = around * (
            arithmetic.attention_forward / where(arithmetic.attention > 0, arithmetic.attention, 1.0)
        )
        backward = around - forward
    # Of what is in use of all micro-batches, each has an even share.
    edge = arithmetic.edge_micro_batches / micro_batches
    if "first_forward" in sums:
        forward = forward + overlap("first_forward", forward * edge)
    if "last_backward" in sums:
        backward = backward + overlap("last_backward", backward * edge)
    if "forward" in sums:
        shares["forward"] = _compute_share(sums["forward"], arithmetic.forward, forward)
    if "backward" in sums:
        shares["backward"] = _compute_share(sums["backward"], arithmetic.backward, backward)
    return shares


def _compute_share(together: float, available: float, covered: float) -> float:
    """Return the share of ``together`` seconds that overlaps with ``available`` seconds of arithmetic.

    ``covered`` seconds of that arithmetic are already in use.
    """
    room = maximum(0.0, available - covered)
    # An array may have plans without such collectives: their quotient is 0 / 1, not 0 / 0.
    return minimum(1.0, room / where(together > 0, together, 1.0))
