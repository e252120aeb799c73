"""Activations of transformers' modules that are the same on all pipeline stages of a plan."""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.ops import ceil_div, group_equal, map_distinct, where
from shardscope.families.parameter_names import list_attention_inputs
from shardscope.families.registry import find_family
from shardscope.memory.activations.forward import (
    LayerActivations,
    compute_document_mask,
    compute_kept_masks,
    compute_layer_activations,
    compute_unsaved_at_start,
)
from shardscope.memory.activations.head import (
    compute_final_norm,
    compute_final_norm_saved,
    compute_head_input,
    compute_norm_after_head,
    resolve_loss,
)
from shardscope.memory.activations.layer_bytes import LayerBytes, compute_layer_bytes
from shardscope.memory.activations.modules.attention import is_eager

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.plan import Plan
    from shardscope.memory.activations.modules.saved_tensors import Modules

TOKEN_ID_BYTES = 8
"""Bytes of a token's id, which the embedding saves for backward: int64."""


class EdgeActivations(NamedTuple):
    """Bytes outside of the layers, of one micro-batch on one rank; those at an edge are on its stage only."""

    at_start: int
    """Saved before the model's first layer: token ids, less what that layer need not save under adapters."""
    masks: int
    """Masks that the layers of a stage share."""
    after_layers: int
    """Saved by the final norm, and the head's input."""
    output: int
    """The final norm's output."""
    in_final_norm: int
    """At the final norm's backward, on top of all saved activations."""
    unsaved_casts: int
    """Copies of the first layer's adapters that autograd does not keep."""


class RankActivations:
    """Activations of one micro-batch on a rank of any stage: of one layer of each kind, and of both edges.

    Each is computed once for all stages.
    """

    def __init__(self, plan: Plan, modules: Modules) -> None:
        self.plan, self.modules = plan, modules
        degrees, recipe = plan.degrees, plan.recipe
        self.tokens = group_equal(recipe.micro_batch_size * ceil_div(recipe.seq_len, degrees.cp))
        self.num_stream_shards = where(plan.layout.splits_sequence, degrees.tp, 1)
        """Number of shards of the residual stream: tp with sequence parallelism."""
        row = plan.architecture.hidden_size * modules.stream
        self.stream_gradient = self.tokens * ceil_div(row, self.num_stream_shards)
        """Bytes of the gradient of the residual stream."""
        self._activations: dict[tuple[bool, str, bool | None], LayerActivations] = {}
        self._layers: dict[tuple[bool, str, bool | None], LayerBytes] = {}

    # ---- Layers ----

    def get_activations(self, moe: bool, recompute: str, modules: Modules) -> LayerActivations:
        """Return the activations of one layer of a kind, in bytes per token.

        ``modules`` are this rank's, or those with or without a sliding window.
        """
        key = moe, recompute, modules.windowed
        layer = self._activations.get(key)
        if layer is None:
            compute = partial(compute_layer_activations, self.plan.architecture, moe, modules, recompute)
            # torch's ring attention (cp > 1) concatenates the output of sequence chunks.
            joins = 0
            if self.plan.layout.joins_attention_by_heads:
                joins = where(self.plan.degrees.cp > 1, 1, 0)
            layer = map_distinct(compute, self.plan.degrees.tp, self.num_stream_shards, joins)
            self._activations[key] = layer
        return layer

    def get_layer(self, moe: bool, recompute: str, modules: Modules) -> LayerBytes:
        """Return the bytes of one layer of a kind; ``modules`` as for :meth:`get_activations`."""
        key = moe, recompute, modules.windowed
        layer = self._layers.get(key)
        if layer is None:
            activations = self.get_activations(moe, recompute, modules)
            layer = self._layers[key] = compute_layer_bytes(self, moe, recompute, modules, activations)
        return layer

    # ---- Before and after the layers ----

    @cached_property
    def edges(self) -> EdgeActivations:
        """Activations outside of the layers."""
        tokens = self.tokens
        at_start, masks = self._compute_before_layers()
        return EdgeActivations(
            at_start=tokens * at_start,
            masks=tokens * masks,
            after_layers=tokens * self._compute_after_layers(),
            output=tokens * self._compute_output(),
            in_final_norm=tokens * self._compute_in_final_norm(),
            unsaved_casts=self._compute_unsaved_casts(),
        )

    def _compute_before_layers(self) -> tuple[int, int]:
        """Return bytes per token saved before the model's first layer, and of masks that all layers share.

        The tensors that the first layer need not save under adapters are subtracted.
        """
        arch, modules, recipe = self.plan.architecture, self.modules, self.plan.recipe
        documents = compute_document_mask(arch, modules)
        if recipe.recompute != "none" or not recipe.has_adapters:
            masks = compute_kept_masks(arch, modules, recipe.recompute, recipe.recompute_interval)
            if not is_eager(arch, modules) and not find_family(arch).always_passes_mask:
                # Boolean window masks are the same for all sequences, and exist once.
                masks = ceil_div(masks, recipe.micro_batch_size)
            return TOKEN_ID_BYTES, masks + documents
        unsaved = map_distinct(
            lambda tp, num_shards: compute_unsaved_at_start(arch, modules, tp, num_shards),
            self.plan.degrees.tp,
            self.num_stream_shards,
        )
        return TOKEN_ID_BYTES - unsaved, documents

    def _compute_after_layers(self) -> int:
        """Return bytes per token saved by the final norm, and of the head's input."""
        arch, modules = self.plan.architecture, self.modules
        norm = ceil_div(compute_final_norm_saved(arch, modules), self.num_stream_shards)
        return norm + compute_head_input(arch, modules, resolve_loss(self.plan))

    def _compute_output(self) -> int:
        """Return bytes per token of the model's output, the final norm's, unless it is saved anyway."""
        modules = self.modules
        is_saved = modules.trained or modules.keeps_frozen_inputs
        is_alive = modules.kernels != "megatron" and (modules.autocast or not is_saved)
        return is_alive * self.plan.architecture.hidden_size * modules.normed

    def _compute_in_final_norm(self) -> int:
        """Return bytes per token at the final norm's backward, on top of all saved activations."""
        arch, modules, loss = self.plan.architecture, self.modules, resolve_loss(self.plan)
        sharded = ceil_div(compute_final_norm(arch, modules), self.num_stream_shards)
        if loss == "fused":
            return sharded
        unsharded = compute_norm_after_head(arch, modules, compute_head_input(arch, modules, loss))
        return where(self.num_stream_shards > 1, sharded, unsharded)

    def _compute_unsaved_casts(self) -> int:
        """Return bytes of first-layer adapter copies not kept by autograd: their input needs no gradient."""
        modules = self.modules
        if modules.trained or not modules.autocast or self.plan.recipe.recompute != "none":
            return 0
        return modules.compute * _count_first_adapters(self.plan.architecture, modules)


def _count_first_adapters(arch: Architecture, modules: Modules) -> int:
    """Return the number of weights in the adapters' first matrices that read the model's embeddings."""
    adapted = set(list_attention_inputs(arch)).intersection(modules.targets or ())
    return modules.adapter_rank * sum(inner for name, (_, inner) in arch.layer_linears(0) if name in adapted)
