"""The layers of one pipeline stage, one by one in forward order, with the bytes of each kind.

Dense layers come before those with routed experts; every ``recompute_interval``-th layer of the stage is
recomputed, its first one included. Layers without a sliding window are spaced evenly between those with one;
a pipeline stage begins with the pattern's start.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.ops import ceil_div, is_array, map_distinct, maximum, minimum, where
from shardscope.memory.activations.float8 import compute_layer_working
from shardscope.memory.activations.forward import (
    compute_kept_for_recomputation,
)
from shardscope.memory.activations.modules.attention import find_window_layers, list_windows
from shardscope.memory.activations.modules.dora import compute_dora_peaks, compute_dora_vectors
from shardscope.memory.activations.modules.layer_forward import LayerPeak
from shardscope.memory.activations.modules.layer_peaks import compute_layer_peaks
from shardscope.memory.activations.weight_casts import (
    compute_passing_cast,
    compute_weight_casts,
    count_weight_casts,
)
from shardscope.memory.state.stages import count_layers_by_kind

if TYPE_CHECKING:
    from shardscope.memory.activations.modules.saved_tensors import Modules
    from shardscope.memory.activations.stage_activations import LayersOfKind, TransformersActivations


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
    windows = list_windows(arch, modules)
    kinds_by_window = [(activations.kinds, modules)]
    if len(windows) > 1:
        kinds_by_window = [
            (activations.list_kinds(run), run)
            for run in (modules._replace(windowed=windowed) for windowed in windows)
        ]
    # ``activations.kinds`` has the same order: the recomputed kinds come first.
    by_kind = count_layers_by_kind(arch, stage)
    kinds: list[LayerKind] = []
    for position in range(len(activations.kinds)):
        moe, num_layers = by_kind[position % len(by_kind)]
        is_recomputed = position < len(by_kind)
        # 0 * num_dense is an array where num_dense is one.
        first, last = (num_dense, stage.num_layers - 1) if moe else (0 * num_dense, num_dense - 1)
        for layers_of_kinds, run in kinds_by_window:
            pattern = None
            if run.windowed is not None:
                pattern = LayerPattern(
                    arch.num_hidden_layers, arch.sliding_window_layers, interval, run.windowed, is_recomputed
                )
            in_range = _find_range(pattern, interval, is_recomputed, num_layers, first, last)
            kinds.append(_build_kind(activations, run, moe, layers_of_kinds[position], pattern, *in_range))
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
    layers: LayersOfKind,
    pattern: LayerPattern | None,
    is_recomputed: bool,
    num_layers: int,
    first: int,
    last: int,
) -> LayerKind:
    plan, tokens = activations.plan, activations.tokens
    arch, num_stream_shards = plan.architecture, activations.num_stream_shards
    layer, recompute = layers.activations, layers.recompute
    peaks = map_distinct(
        partial(compute_layer_peaks, arch, moe, modules, recompute), plan.degrees.tp, num_stream_shards
    )
    # A quantized base's matrix is dequantized in its matmul's backward, whose weight count each peak has; and
    # an offloaded copy of autocast returns from the host for it.
    returns_casts = recompute == "offload" and modules.on_gpu and modules.autocast and modules.trained
    matrix_width = modules.compute * (modules.quantized or returns_casts)
    backward = [
        LayerPeak(
            tokens * activations + matrix_width * in_matmul,
            finished,
            matrix,
            experts,
            0 if returns_casts else casts,
        )
        for activations, finished, matrix, experts, casts, in_matmul in peaks.backward
    ]
    forward = tokens * peaks.forward
    if modules.uses_dora:
        stream = arch.hidden_size * modules.stream
        kept_inputs = compute_kept_for_recomputation(arch, moe, modules, recompute, stream)
        in_forward, in_backward = compute_dora_peaks(arch, modules, recompute, tokens, kept_inputs)
        forward = maximum(forward, in_forward)
        backward = [LayerPeak(num_bytes) for num_bytes in in_backward]
    # The casts to 8 bits inside of one Linear's backward are a candidate of their own.
    if plan.recipe.precision == "fp8-mixed":
        stream = ceil_div(arch.hidden_size * modules.stream, num_stream_shards)
        saved = tokens * (layer.saved + layer.recomputed + stream)
        backward.append(LayerPeak(saved + compute_layer_working(arch, moe, tokens)))
    casts = compute_weight_casts(arch, moe, modules)
    copies, kept_copies = count_weight_casts(arch, modules, recompute)
    # int8 matmuls do not dequantize the matrix in forward, only in backward.
    dequantized = 0 if modules.int8_base else activations.compute_dequantized()
    return LayerKind(
        moe=moe,
        is_recomputed=is_recomputed,
        pattern=pattern,
        num_layers=num_layers,
        first_index=first,
        last_index=last,
        saved=tokens * layer.saved + compute_dora_vectors(arch, modules, recompute),
        forward=forward + dequantized + compute_passing_cast(arch, moe, modules, recompute),
        backward=tuple(backward),
        # DoRA's own candidates have it among them.
        recomputation=0 if modules.uses_dora else tokens * peaks.recomputation,
        casts=0 if returns_casts else casts,
        casts_after_forward=copies * casts,
        casts_in_backward=kept_copies * casts,
        weights=peaks.weights,
    )
