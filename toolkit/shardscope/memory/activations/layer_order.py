"""The layers of one pipeline stage, one by one in forward order, with the bytes of each kind.

Dense layers come before those with routed experts; every ``recompute_interval``-th layer of the stage is
recomputed, its first one included. Layers without a sliding window are spaced evenly between those with one;
a pipeline stage begins with the pattern's start.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.ops import ceil_div, is_array, map_distinct, maximum, minimum, where
from shardscope.memory.activations.modules.attention import find_window_layers, list_windows
from shardscope.memory.state.stages import count_layers_by_kind

if TYPE_CHECKING:
    from shardscope.memory.activations.modules.layer_forward import LayerPeak
    from shardscope.memory.activations.modules.saved_tensors import Modules
    from shardscope.memory.activations.stage_activations import TransformersActivations


class LayerPattern(NamedTuple):
    """The layers with or without a sliding window, recomputed or not, of a model that mixes windows."""

    num_layers: int
    """Number of layers of the model."""
    num_sliding: int
    """Number of these with a sliding window."""
    interval: int
    """Every ``interval``-th layer is recomputed."""
    windowed: bool
    is_recomputed: bool
    """Whether it is one of these; true for all layers if ``interval`` is 1."""

    def count_before(self, index: int) -> int:
        """Return the number of these layers before ``index``."""
        return map_distinct(lambda index: bisect_left(_list_indices(self), index), index)

    def find_next(self, index: int) -> int:
        """Return the first of these layers from ``index`` on; the number of layers if there is none."""

        def find(index: int) -> int:
            indices = _list_indices(self)
            number = bisect_left(indices, index)
            return indices[number] if number < len(indices) else self.num_layers

        return map_distinct(find, index)

    def find_previous(self, index: int) -> int:
        """Return the last of these layers up to ``index``; -1 if there is none."""

        def find(index: int) -> int:
            indices = _list_indices(self)
            number = bisect_right(indices, index)
            return indices[number - 1] if number else -1

        return map_distinct(find, index)


@lru_cache(maxsize=256)
def _list_indices(pattern: LayerPattern) -> tuple[int, ...]:
    windows = find_window_layers(pattern.num_layers, pattern.num_sliding)
    return tuple(
        index
        for index, windowed in enumerate(windows)
        if windowed == pattern.windowed and (index % pattern.interval == 0) == pattern.is_recomputed
    )


class LayerKind(NamedTuple):
    """Layers of one kind on one rank: dense or MoE, recomputed or not, with a sliding window or without.

    Bytes per layer and micro-batch.
    """

    moe: bool
    is_recomputed: bool
    """Whether it is one of every ``interval`` layers; true for all layers if the interval is 1."""
    pattern: LayerPattern | None
    """Which layers it has, if only some layers of the model have a window; else None."""
    num_layers: int
    """Number of layers of this kind on the stage; 0 if it has none."""
    first_index: int
    """Index of the first layer of this kind."""
    last_index: int
    """Index of the last layer of this kind."""
    saved: int
    """Bytes saved for backward by one layer."""
    forward: int
    """Maximum bytes of one layer during its forward."""
    backward: tuple[LayerPeak, ...]
    """Peak candidates during the layer's backward; their ``activations`` are bytes, not bytes per token."""
    recomputation: int
    """Maximum bytes while backward recomputes the layer; 0 if it does not. Among ``backward``, too."""
    casts: int
    """Bytes of autocast's half-precision copies of its matrices, made again if the layer is recomputed."""
    casts_after_forward: int
    """Bytes of such copies alive after the layer's forward."""
    casts_in_backward: int
    """Bytes of such copies that autograd keeps for backward."""
    weights: int
    """Number of weights with gradients in one layer."""


class StageLayer(NamedTuple):
    """One layer of a stage, and the activations saved before it."""

    kind: LayerKind
    position: int
    """Index in forward order, from 0."""
    saved_before: int
    """Bytes saved by the layers before it and by all other micro-batches in flight."""


class LayerOrder(NamedTuple):
    """The layers of one stage, in forward order."""

    num_layers: int
    num_dense: int
    """Number of layers without routed experts; they come first."""
    interval: int
    """Every ``interval``-th layer is recomputed."""
    kinds: tuple[LayerKind, ...]
    """Without an interval, at most one dense and one MoE kind; with it, these recomputed, then not. In a
    model that mixes windows, each of these with a window, then without."""

    def sum_before(self, index: int, get_value: Callable[[LayerKind], int]) -> int:
        """Return the sum of ``get_value`` over all layers before ``index``."""
        if len(self.kinds) == 1:
            return index * get_value(self.kinds[0])
        # Of the first ``index`` layers, dense ones come first.
        dense = minimum(index, self.num_dense)
        total = 0
        for kind in self.kinds:
            number = self._count_before(kind, dense)
            if kind.moe:
                number = self._count_before(kind, index) - number
            total = total + number * get_value(kind)
        return total

    def _count_before(self, kind: LayerKind, index: int) -> int:
        """Return how many of the first ``index`` layers are of this kind, be they dense or MoE."""
        if kind.pattern:
            return kind.pattern.count_before(index)
        if self.interval == 1:
            return index
        # Every interval-th layer is recomputed.
        recomputed = ceil_div(index, self.interval)
        return recomputed if kind.is_recomputed else index - recomputed

    def is_kind_at(self, kind: LayerKind, index: int) -> bool:
        """Return whether the layer at ``index`` is of this kind."""
        is_kind = ((index % self.interval == 0) == kind.is_recomputed) & (
            (index >= self.num_dense) == kind.moe
        )
        return is_kind & (kind.pattern.find_next(index) == index) if kind.pattern else is_kind

    def find_peak_layers(self, saved: int, compute_growth: Callable[[bool], int]) -> list[StageLayer]:
        """Return, for each kind, the layers whose backward may be the stage's peak.

        These are the kind's last layer (no gradients wait for reduction yet), its first layer (its prefetch
        differs: nothing, or another module), and one end of the layers between: from layer to layer, saved
        activations are freed and ``compute_growth(moe)`` bytes of gradients are added, so the peak is at one
        end. ``saved``: bytes saved by all layers and by other micro-batches in flight.
        """
        # What is saved besides these layers: before the first one, and by other micro-batches.
        other_saved = saved - self.sum_before(self.num_layers, _get_saved)
        layers: list[StageLayer] = []
        indices: set[int] = set()
        for kind in self.kinds:
            # Of one plan, absent kinds and repeated layers are skipped; arrays of plans keep them all.
            is_one_plan = not is_array(kind.num_layers)
            if is_one_plan and not kind.num_layers:
                continue
            for index in (kind.last_index, *self._list_between(kind, compute_growth), kind.first_index):
                if not is_array(index):
                    if is_one_plan and index in indices:
                        continue
                    indices.add(index)
                layers.append(self._build_layer(kind, index, other_saved))
        return layers

    def _list_between(self, kind: LayerKind, compute_growth: Callable[[bool], int]) -> tuple[int, ...]:
        """Return the end of the layers between the kind's first and last one; both ends if windows mix."""
        if kind.pattern:
            return (
                maximum(kind.pattern.find_previous(kind.last_index - 1), kind.first_index),
                minimum(kind.pattern.find_next(kind.first_index + 1), kind.last_index),
            )
        # Neighbours of a kind are ``interval`` layers apart.
        second_to_last = maximum(kind.last_index - self.interval, kind.first_index)
        second = minimum(kind.first_index + self.interval, kind.last_index)
        return (where(compute_growth(kind.moe) > kind.saved, second, second_to_last),)

    def find_last_layers(self, saved: int) -> list[StageLayer]:
        """Return the last layer of each kind, where the forward of that kind has its peak."""
        other_saved = saved - self.sum_before(self.num_layers, _get_saved)
        return [
            self._build_layer(kind, kind.last_index, other_saved)
            for kind in self.kinds
            if is_array(kind.num_layers) or kind.num_layers
        ]

    def _build_layer(self, kind: LayerKind, index: int, other_saved: int) -> StageLayer:
        """Return one layer with the bytes saved before it.

        They are at least 0: the tensors that the first layer does not save under adapters may make the sum
        negative. For arrays of stages, a stage without this kind gets layer 0 with zero bytes, which another
        kind always exceeds.
        """
        if is_array(kind.num_layers):
            exists = kind.num_layers > 0
            index, other_saved = where(exists, index, 0), where(exists, other_saved, 0)
            kind = kind._replace(
                saved=exists * kind.saved,
                forward=exists * kind.forward,
                backward=tuple(
                    peak._replace(
                        activations=exists * peak.activations,
                        weights_with_gradient=exists * peak.weights_with_gradient,
                    )
                    for peak in kind.backward
                ),
                casts=exists * kind.casts,
                casts_after_forward=exists * kind.casts_after_forward,
                casts_in_backward=exists * kind.casts_in_backward,
                weights=exists * kind.weights,
            )
        return StageLayer(kind, index, maximum(0, other_saved + self.sum_before(index, _get_saved)))


def _get_saved(kind: LayerKind) -> int:
    return kind.saved


def build_layer_order(activations: TransformersActivations) -> LayerOrder:
    """Return the layers of one stage, with the bytes of each kind at its peak candidates."""
    plan, stage, modules = activations.plan, activations.stage, activations.modules
    arch, recipe = plan.architecture, plan.recipe
    interval = recipe.recompute_interval if recipe.recompute != "none" else 1
    num_dense = stage.num_layers - stage.num_moe_layers
    # ``activations.kinds`` has the same order: the recomputed kinds come first.
    by_kind = count_layers_by_kind(arch, stage)
    kinds: list[LayerKind] = []
    for position, layers in enumerate(activations.kinds):
        moe, num_layers = by_kind[position % len(by_kind)]
        is_recomputed = position < len(by_kind)
        # 0 * num_dense is an array where num_dense is one.
        first, last = (num_dense, stage.num_layers - 1) if moe else (0 * num_dense, num_dense - 1)
        for run in [modules.with_window(windowed) for windowed in list_windows(arch, modules)]:
            pattern = None
            if run.windowed is not None:
                pattern = LayerPattern(
                    arch.num_hidden_layers, arch.sliding_window_layers, interval, run.windowed, is_recomputed
                )
            in_range = _find_range(pattern, interval, is_recomputed, num_layers, first, last)
            kinds.append(_build_kind(activations, run, moe, layers.recompute, pattern, *in_range))
    return LayerOrder(stage.num_layers, num_dense, interval, tuple(kinds))


def _find_range(
    pattern: LayerPattern | None, interval: int, is_recomputed: bool, num_layers: int, first: int, last: int
) -> tuple[bool, int, int, int]:
    """Return (is recomputed, number, first, last) of one kind's layers between ``first`` and ``last``."""
    if pattern:
        first, last = pattern.find_next(first), pattern.find_previous(last)
    elif interval > 1:
        # The nearest layers in this range that are recomputed, or that are not.
        if is_recomputed:
            first, last = ceil_div(first, interval) * interval, last // interval * interval
        else:
            last = last - (last % interval == 0)
            first = first + (first % interval == 0)
    else:
        return is_recomputed, num_layers, first, last
    return is_recomputed, maximum(0, where(last >= first, num_layers, 0)), first, last


def _build_kind(
    activations: TransformersActivations,
    modules: Modules,
    moe: bool,
    recompute: str,
    pattern: LayerPattern | None,
    is_recomputed: bool,
    num_layers: int,
    first: int,
    last: int,
) -> LayerKind:
    layer = activations.rank.get_layer(moe, recompute, modules)
    # int8 matmuls do not dequantize the matrix in forward, only in backward.
    dequantized = 0 if modules.int8_base else activations.compute_dequantized()
    return LayerKind(
        moe,
        is_recomputed,
        pattern,
        num_layers,
        first,
        last,
        layer.saved,
        layer.forward + dequantized,
        *layer[2:],
    )
