"""Seconds of one pipeline stage in one optimizer step, by part; numbers may be arrays of plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.core.ops import ceil_div, maximum, minimum, where
from shardscope.memory.state.stages import count_layers_by_kind
from shardscope.timing.head import ends
from shardscope.timing.layers import LayerWork
from shardscope.timing.offload import host_seconds
from shardscope.timing.rates import check_links
from shardscope.timing.report import PARTS
from shardscope.timing.sent import sent, told
from shardscope.timing.update import update_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardscope.core.plan import Plan
    from shardscope.memory.activations.modules.saved import Modules
    from shardscope.memory.state.stages import Stage
    from shardscope.timing.rates import Rates
    from shardscope.timing.report import Part
    from shardscope.timing.sent import Sent, Told
    from shardscope.timing.traffic import Beneath, TimingModel

_NOTHING: dict[Part, Any] = {part: 0.0 for part in PARTS if part != "bubble"}
ONCE: tuple[Part, ...] = ("gradients", "gathers", "optimizer", "offload")
"""Parts that run once per step, for which a pipeline's first and last micro-batches do not wait."""
FLOWING = tuple(part for part in _NOTHING if part not in ONCE)
"""Parts that repeat on each stage with each micro-batch."""


class StageSeconds(NamedTuple):
    """Seconds of one stage, all micro-batches of one step."""

    parts: dict[Part, Any]
    """Exposed seconds of every part but the bubble."""
    find_told: Callable[[], list[Told]]
    """Returns its collectives one by one."""
    find_hidden: Callable[[], dict[Part, Any]]
    """Returns their seconds overlapped with arithmetic, by part."""
    hidden_offload: Any
    """Seconds of host link and NVMe transfers overlapped with arithmetic."""

    @property
    def busy(self) -> Any:
        """The stage's busy seconds per step, pipeline bubbles excluded."""
        return sum(self.parts.values())

    @property
    def flowing(self) -> Any:
        """The part of them that repeats with each micro-batch."""
        parts = self.parts
        return sum([parts[part] for part in FLOWING])


class _Cover(NamedTuple):
    """Seconds of arithmetic per step that can overlap with collectives.

    0 on CPU ranks: gloo's threads need the cores that compute.
    """

    forward: Any = 0.0
    backward: Any = 0.0
    last_backward: Any = 0.0
    first_forward: Any = 0.0
    attention: Any = 0.0
    attention_forward: Any = 0.0
    """The part of ``attention`` in ``forward``; the rest is in ``backward``."""


def work_of(plan: Plan, modules: Modules, rates: Rates, model: TimingModel) -> LayerWork:
    """Return the timing state shared by all stages of ``plan``; ``model`` is the framework's ``timing.py``.

    Raises ``ValueError`` naming an unknown figure.
    """
    check_links(plan.cluster, rates)
    return LayerWork(plan, modules, rates, model)


def seconds_of(work: LayerWork, stage: Stage) -> StageSeconds:
    """Return the seconds of one stage's step. Raise ``ValueError`` naming an unknown figure."""
    plan, rates = work.plan, work.rates
    micro_batches = plan.num_micro_batches
    parts, cover, dropped = _arithmetic(work, stage, micro_batches)
    traffic = work.model.state_traffic(plan, stage)
    state = sent(traffic.transfers, work.call_seconds)
    repeated = [(calls.number(work, stage), calls.each) for calls in work.parallel]
    for number, each in repeated:
        state.added(number, each)
    exposed, shares = _exposed(state, cover, micro_batches)
    for part, seconds in exposed.items():
        parts[part] = parts[part] + seconds
    parts["gathers"] = parts["gathers"] + traffic.copied_for_gathers / work.memory
    parts["gradients"] = parts["gradients"] + traffic.copied_for_gradients / work.memory
    parts["optimizer"] = update_seconds(plan, stage, traffic.updated, traffic.main_copies, rates)
    host = host_seconds(plan, traffic, dropped, cover.forward, cover.backward, rates)
    parts["offload"] = host.exposed
    return StageSeconds(
        parts,
        lambda: told([*repeated, (1, state)], shares),
        lambda: _hidden(state.free, shares),
        host.hidden,
    )


def _arithmetic(work: LayerWork, stage: Stage, micro_batches: Any) -> tuple[dict[Part, Any], _Cover, Any]:
    """Return all parts with arithmetic filled in, the cover of collectives, and offloaded bytes."""
    recipe = work.plan.recipe
    forward: Any = 0.0
    matrices: Any = 0.0
    attention: Any = 0.0
    elementwise: Any = 0.0
    again: Any = 0.0
    dropped: Any = 0.0
    attention_forward: Any = 0.0
    leaves = recipe.recompute == "offload"
    for moe, layers in count_layers_by_kind(work.arch, stage):
        each = work.layer(moe)
        matrices = matrices + layers * each.both.matrices
        attention = attention + layers * each.both.attention
        elementwise = elementwise + layers * each.both.elementwise
        chosen = ceil_div(layers, recipe.recompute_interval)
        again = again + chosen * each.again
        dropped = dropped + leaves * chosen * each.dropped_bytes
        forward = forward + layers * each.forward
        attention_forward = attention_forward + layers * each.forward_attention
    end = ends(work, stage)
    matrices = matrices + end.forward + end.backward
    elementwise = elementwise + end.lookup
    loss = end.loss + 0.0
    again = again + end.again
    forward = forward + end.forward
    backward = matrices + attention + elementwise + loss + again - forward
    cover = _Cover()
    if work.plan.on_gpu:
        cover = _Cover(
            micro_batches * forward,
            micro_batches * backward,
            # With interleaving, all chunks' backward has run once when the last micro-batch's has.
            backward,
            forward,
            micro_batches * attention,
            micro_batches * attention_forward,
        )
    found = _NOTHING | {
        "matrices": micro_batches * matrices,
        "attention": micro_batches * attention,
        "elementwise": micro_batches * elementwise,
        "loss": micro_batches * loss,
        "recomputation": micro_batches * again,
    }
    return found, cover, micro_batches * dropped


def _exposed(all_sent: Sent, cover: _Cover, micro_batches: Any) -> tuple[dict[Part, Any], dict[Beneath, Any]]:
    """Return each part's exposed communication seconds, and the overlapped shares by kind of arithmetic.

    Collectives that overlap with the same arithmetic share it in proportion to their seconds, e.g. the next
    layer's all-gather and the previous layer's reduce-scatter in FSDP2's backward.
    """
    sums: dict[Beneath, Any] = {}
    for (_, beneath), one in all_sent.free.items():
        sums[beneath] = sums[beneath] + one if beneath in sums else one
    shares = _shares(sums, cover, micro_batches)
    left = all_sent.seconds.copy()
    for (part, beneath), one in all_sent.free.items():
        left[part] = left[part] - one * shares[beneath]
    return left, shares


def _hidden(free: dict[tuple[Part, Beneath], Any], shares: dict[Beneath, Any]) -> dict[Part, Any]:
    found: dict[Part, Any] = {}
    for (part, beneath), one in free.items():
        found[part] = found.get(part, 0.0) + one * shares[beneath]
    return found


def _shares(sums: dict[Beneath, Any], cover: _Cover, micro_batches: Any) -> dict[Beneath, Any]:
    """Return the overlapped share by kind of arithmetic; no second of arithmetic overlaps twice.

    Attention is part of forward and backward, and the first and last micro-batch are part of all: overlap
    with the narrower kind is subtracted from the wider one.
    """
    shares: dict[Beneath, Any] = {}
    forward: Any = 0.0
    backward: Any = 0.0
    if "attention" in sums:
        around = _hide("attention", 0.0, sums, cover, shares)
        # Keys and values overlap attention in forward and backward in proportion to its seconds.
        forward = around * (cover.attention_forward / where(cover.attention > 0, cover.attention, 1.0))
        backward = around - forward
    if "first_forward" in sums:
        forward = forward + _hide("first_forward", forward / micro_batches, sums, cover, shares)
    if "last_backward" in sums:
        backward = backward + _hide("last_backward", backward / micro_batches, sums, cover, shares)
    if "forward" in sums:
        _hide("forward", forward, sums, cover, shares)
    if "backward" in sums:
        _hide("backward", backward, sums, cover, shares)
    return shares


def _hide(
    beneath: Beneath, covered: Any, sums: dict[Beneath, Any], cover: _Cover, shares: dict[Beneath, Any]
) -> Any:
    """Set the share of ``beneath`` and return its overlapped seconds.

    ``covered`` seconds of that arithmetic are already in use.
    """
    together = sums[beneath]
    room = maximum(0.0, getattr(cover, beneath) - covered)
    share = shares[beneath] = minimum(1.0, room / where(together > 0, together, 1.0))
    return share * together
