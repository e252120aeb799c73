"""Seconds of one pipeline stage in one optimizer step, part by part; numbers may be arrays of plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.memory.arithmetic import ceil_div, largest, smallest, where
from shardscope.memory.stages import layers_by_kind
from shardscope.timing.collectives import seconds
from shardscope.timing.head import ends
from shardscope.timing.host import host_seconds
from shardscope.timing.layers import LayerWork
from shardscope.timing.parallel import parallel_transfers
from shardscope.timing.report import PARTS
from shardscope.timing.update import update_seconds

if TYPE_CHECKING:
    from shardscope.memory.modules.saved import Modules
    from shardscope.memory.stages import Stage
    from shardscope.plan import Plan
    from shardscope.timing.rates import Rates
    from shardscope.timing.report import Part
    from shardscope.timing.traffic import Beneath, Transfer

_ONCE: tuple[Part, ...] = ("gradients", "gathers", "optimizer", "offload")
"""Parts that a pipeline's first and last micro-batches do not wait for."""


class Told(NamedTuple):
    """One kind of collective with its time."""

    transfer: Transfer
    seconds: Any
    hidden: Any


class StageSeconds(NamedTuple):
    """One stage, all micro-batches of one step."""

    parts: dict[Part, Any]
    """Exposed seconds of every part but the bubble."""
    told: list[Told]
    """Its collectives."""
    hidden_offload: Any
    """Seconds of the host's and the drives' links beneath arithmetic."""

    @property
    def busy(self) -> Any:
        """The whole step of this stage, but for what it waits for others."""
        return sum(self.parts.values())

    @property
    def flowing(self) -> Any:
        """What of it passes from stage to stage, micro-batch by micro-batch."""
        return sum(found for part, found in self.parts.items() if part not in _ONCE)


class _Cover(NamedTuple):
    """Seconds of arithmetic in a step that collectives may run beneath."""

    forward: Any
    backward: Any
    last_backward: Any
    first_forward: Any
    attention: Any


def stage_seconds(plan: Plan, stage: Stage, modules: Modules, rates: Rates) -> StageSeconds:
    """One stage's step. Raises ``ValueError`` naming a figure that is not known."""
    from shardscope.frameworks.registry import frameworks

    model = frameworks[plan.layout.framework].timing_model()
    work = LayerWork(plan, modules, rates, model.overlap(plan))
    micro_batches = plan.num_micro_batches
    parts, cover, dropped = _arithmetic(work, stage, micro_batches)
    traffic = model.state_traffic(plan, stage)
    transfers = [*parallel_transfers(work, stage), *traffic.transfers]
    told = _exposed(transfers, cover, plan.cluster.gpus_per_node, rates)
    for one in told:
        part = one.transfer.part
        parts[part] = parts[part] + one.seconds - one.hidden
    parts["gathers"] = parts["gathers"] + traffic.copied_for_gathers / work.memory
    parts["gradients"] = parts["gradients"] + traffic.copied_for_gradients / work.memory
    parts["optimizer"] = update_seconds(plan, stage, traffic.updated, traffic.main_copies, rates)
    host = host_seconds(plan, traffic, dropped, cover.forward, cover.backward, rates)
    parts["offload"] = host.exposed
    return StageSeconds(parts, told, host.hidden)


def _arithmetic(work: LayerWork, stage: Stage, micro_batches: Any) -> tuple[dict[Part, Any], _Cover, Any]:
    """All parts, those of arithmetic filled; what covers collectives; bytes of activations that leave."""
    recipe = work.plan.recipe
    found: dict[Part, Any] = dict.fromkeys(PARTS, 0.0)
    del found["bubble"]
    forward: Any = 0.0
    again: Any = 0.0
    dropped: Any = 0.0
    operators: tuple[Part, ...] = ("matrices", "attention", "elementwise")
    for moe, layers in layers_by_kind(work.arch, stage):
        each = work.layer(moe)
        for part in operators:
            found[part] = found[part] + layers * (getattr(each.forward, part) + getattr(each.backward, part))
        chosen = ceil_div(layers, recipe.recompute_interval)
        again = again + chosen * each.again
        dropped = dropped + (recipe.recompute == "offload") * chosen * each.dropped_bytes
        forward = forward + layers * each.forward.seconds
    end = ends(work, stage)
    found["matrices"] = found["matrices"] + end.forward + end.backward
    found["elementwise"] = found["elementwise"] + end.lookup
    found["loss"] = end.loss + 0.0
    found["recomputation"] = again + end.again
    whole = sum(found.values())
    forward = forward + end.forward
    backward = whole - forward
    cover = _Cover(
        micro_batches * forward,
        micro_batches * backward,
        # Of interleaved chunks all have gone backward once when the last micro-batch has.
        backward,
        forward,
        micro_batches * found["attention"],
    )
    return {part: micro_batches * one for part, one in found.items()}, cover, micro_batches * dropped


def _exposed(transfers: list[Transfer], cover: _Cover, gpus_per_node: int, rates: Rates) -> list[Told]:
    """Each collective's seconds, and how many of them arithmetic covers.

    What runs beneath the same arithmetic shares it, each by its own length: of a layer's next gather and the
    last one's reduction in FSDP2's backward, say. A share that nothing covers is left of each.
    """
    took = [seconds(transfer, gpus_per_node, rates) for transfer in transfers]
    found: list[Told] = []
    sums: dict[Beneath, Any] = {}
    coverable = []
    for transfer, one in zip(transfers, took, strict=True):
        bare = 1 / transfer.num_messages if transfer.bare is None else transfer.bare
        free = 0.0 if transfer.beneath == "nothing" else one * (1 - bare)
        coverable.append(free)
        sums[transfer.beneath] = sums.get(transfer.beneath, 0.0) + free
    for transfer, one, free in zip(transfers, took, coverable, strict=True):
        if transfer.beneath == "nothing":
            found.append(Told(transfer, one, 0.0))
            continue
        together = sums[transfer.beneath]
        share = smallest(1.0, getattr(cover, transfer.beneath) / where(together > 0, together, 1.0))
        found.append(Told(transfer, one, largest(0.0, free * share)))
    return found
