"""Layers of a pipeline stage in forward order: bytes by kind of layer, and the layers to search for the peak.

Dense layers come before those with routed experts; every ``recompute_interval``-th layer of the stage is
recomputed, its first one included.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.core.ops import ceil_div, map_distinct, maximum, minimum, where
from shardscope.memory.activations.float8 import compute_layer_working
from shardscope.memory.activations.forward import compute_weight_casts, count_weight_casts
from shardscope.memory.activations.modules.instants import LayerPeak, LayerPeaks, compute_layer_peaks
from shardscope.memory.state.stages import count_layers_by_kind

if TYPE_CHECKING:
    from shardscope.memory.activations.step import TransformersActivations


class LayerKind(NamedTuple):
    """Layers of one kind (dense or MoE, recomputed or not) on one rank. Bytes per layer and micro-batch."""

    moe: bool
    num_layers: Any
    """Number of layers of this kind on the stage; 0 if it has none."""
    lowest: Any
    """Index of the first layer of this kind."""
    highest: Any
    """Index of the last layer of this kind."""
    saved: Any
    """Bytes saved for backward by one layer."""
    forward: Any
    """Maximum bytes of one layer during its forward."""
    backward: tuple[LayerPeak, ...]
    """Peak candidates during the layer's backward; ``held`` are bytes."""
    casts: Any
    """Bytes of autocast's half-precision copies of its matrices, made again if the layer is recomputed."""
    casts_made: Any
    """Bytes of such copies alive after the layer's forward."""
    casts_kept: Any
    """Bytes of such copies that autograd keeps for backward."""
    weights: Any
    """Number of weights with gradients in one layer."""


class StageLayer(NamedTuple):
    """One layer of a stage, and the activations saved before it."""

    kind: LayerKind
    index: Any
    """Index in forward order, from 0."""
    before: Any
    """Bytes saved by the layers before it and by all other micro-batches in flight."""


class LayerOrder(NamedTuple):
    """The layers of one stage, in forward order."""

    num_layers: Any
    dense: Any
    """Number of layers without routed experts; they come first."""
    interval: int
    kinds: tuple[LayerKind, ...]

    def sum_before(self, index: Any, field: str) -> Any:
        """Return the sum of one :class:`LayerKind` field over all layers before ``index``."""
        if len(self.kinds) == 1:
            return index * getattr(self.kinds[0], field)
        dense = minimum(index, self.dense)
        found: Any = 0
        half = len(self.kinds) if self.interval == 1 else len(self.kinds) // 2
        for place, kind in enumerate(self.kinds):
            number = index - dense if kind.moe else dense
            if self.interval > 1:
                first = ceil_div(dense, self.interval)
                chosen = ceil_div(index, self.interval) - first if kind.moe else first
                number = chosen if place < half else number - chosen
            found = found + number * getattr(kind, field)
        return found

    def places(self, saved: Any, growth: Callable[[bool], Any]) -> list[StageLayer]:
        """Return, for each kind, the layers whose backward may be the stage's peak.

        These are the kind's last layer (no gradients wait for reduction yet), its first layer (its prefetch
        differs: nothing, or another module), and one end of the layers between: from layer to layer, saved
        activations are freed and ``growth(moe)`` bytes of gradients are added, so the peak is at one end.
        ``saved``: bytes saved by all layers and by other micro-batches in flight.
        """
        others = saved - self.sum_before(self.num_layers, "saved")
        found: list[StageLayer] = []
        seen: set[Any] = set()
        for kind in self.kinds:
            second = maximum(kind.highest - self.interval, kind.lowest)
            next_to_first = minimum(kind.lowest + self.interval, kind.highest)
            between = where(growth(kind.moe) > kind.saved, next_to_first, second)
            for index in (kind.highest, between, kind.lowest):
                if isinstance(kind.num_layers, int) and (not kind.num_layers or index in seen):
                    continue
                if isinstance(index, int):
                    seen.add(index)
                found.append(self._place(kind, index, others))
        return found

    def last_places(self, saved: Any) -> list[StageLayer]:
        """Return the last layer of each kind, where the forward of that kind has its peak."""
        others = saved - self.sum_before(self.num_layers, "saved")
        return [
            self._place(kind, kind.highest, others)
            for kind in self.kinds
            if not isinstance(kind.num_layers, int) or kind.num_layers
        ]

    def _place(self, kind: LayerKind, index: Any, others: Any) -> StageLayer:
        """Return one layer with the bytes saved before it.

        ``before`` is at least 0: the tensors that the first layer does not save under adapters may make it
        negative. For arrays of stages, a stage without this kind gets layer 0 with zero bytes, which another
        kind always exceeds.
        """
        if not isinstance(kind.num_layers, int):
            there = kind.num_layers > 0
            index, others = where(there, index, 0), where(there, others, 0)
            empty = [one._replace(held=there * one.held, done=there * one.done) for one in kind.backward]
            kind = kind._replace(
                saved=there * kind.saved,
                forward=there * kind.forward,
                backward=tuple(empty),
                casts=there * kind.casts,
                casts_made=there * kind.casts_made,
                casts_kept=there * kind.casts_kept,
                weights=there * kind.weights,
            )
        return StageLayer(kind, index, maximum(0, others + self.sum_before(index, "saved")))


def build_layer_order(step: TransformersActivations) -> LayerOrder:
    """Return the layers of one stage, with the bytes of each kind at its peak candidates."""
    plan, stage = step.plan, step.stage
    arch, recipe = plan.architecture, plan.recipe
    interval = recipe.recompute_interval if recipe.recompute != "none" else 1
    present = count_layers_by_kind(arch, stage)
    dense = stage.num_layers - stage.num_moe_layers
    ways = [recipe.recompute] if interval == 1 else [recipe.recompute, "none"]
    kinds: list[LayerKind] = []
    for recompute in ways:
        for moe, layers in present:
            low, high = (dense, stage.num_layers - 1) if moe else (0 * dense, dense - 1)
            kinds.append(_build_kind(step, moe, recompute, low, high, layers, interval))
    return LayerOrder(stage.num_layers, dense, interval, tuple(kinds))


def _build_kind(
    step: TransformersActivations, moe: bool, recompute: str, low: Any, high: Any, layers: Any, interval: int
) -> LayerKind:
    arch, modules, tokens = step.plan.architecture, step.modules, step.tokens
    if interval > 1:
        if recompute == "none":
            high = high - (high % interval == 0)
            low = low + (low % interval == 0)
        else:
            low, high = ceil_div(low, interval) * interval, high // interval * interval
        layers = maximum(0, where(high >= low, layers, 0))
    each = step.layer(moe, recompute)
    # int8 matmuls do not dequantize the matrix in forward, only in backward.
    extra = 0 if modules.int8_base else step.dequantised()
    few_bits = modules.compute * modules.quantized
    cut = step.cut
    of_one = partial(compute_layer_peaks, arch, moe, modules, recompute)
    instants: LayerPeaks = map_distinct(of_one, step.plan.degrees.tp, cut)
    backward = [
        LayerPeak(tokens * held + few_bits * whole, done, making, experts, products)
        for held, done, making, experts, products, whole in instants.backward
    ]
    if step.plan.recipe.precision == "fp8-mixed":
        stream = ceil_div(arch.hidden_size * modules.stream, cut)
        held = tokens * (each.saved + each.recomputed + stream) + compute_layer_working(arch, moe, tokens)
        backward.append(LayerPeak(held))
    casts = compute_weight_casts(arch, moe, modules)
    made, kept = count_weight_casts(modules, recompute)
    return LayerKind(
        moe=moe,
        num_layers=layers,
        lowest=low,
        highest=high,
        saved=tokens * each.saved,
        forward=tokens * instants.forward + extra,
        backward=tuple(backward),
        casts=casts,
        casts_made=made * casts,
        casts_kept=kept * casts,
        weights=instants.weights,
    )
