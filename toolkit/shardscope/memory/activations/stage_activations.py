"""Activations of transformers' modules on one pipeline stage, in forward and backward.

Dense layers come before those with routed experts; every ``recompute_interval``-th layer of the stage is
recomputed, its first one included.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.number_format import format_count, format_gib, format_kib
from shardscope.core.ops import ceil_div, maximum, minimum, where
from shardscope.memory.activations.forward import (
    LayerActivations,
)
from shardscope.memory.activations.head import (
    compute_logits_terms,
)
from shardscope.memory.activations.largest_layer import LargestLayer, find_largest_layer
from shardscope.memory.activations.layer_order import LayerOrder, build_layer_order
from shardscope.memory.activations.modules.dora import compute_dora_vectors
from shardscope.memory.activations.weight_casts import compute_weight_casts, count_weight_casts
from shardscope.memory.report import Term
from shardscope.memory.state.quantization import find_largest_matrix
from shardscope.memory.state.stages import count_layers_by_kind, count_recomputed_by_kind

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.activations.modules.saved_tensors import Modules
    from shardscope.memory.activations.rank_activations import RankActivations
    from shardscope.memory.state.stages import Stage


class StageBackward(NamedTuple):
    """Bytes on one rank during backward, one micro-batch: a framework adds its own buffers and gradients."""

    modules: Modules
    """The modules that run."""
    saved_by_layers: int
    """Activations saved by all layers, and the token ids."""
    saved_by_head: int
    """Activations saved by the final norm and the head."""
    weight_casts: int
    """Autocast's half-precision copies of weights, kept by autograd."""
    unsaved_casts: int
    """Copies of the first layer's adapters that autograd does not keep, because no gradient reaches their
    input."""
    stream_gradient: int
    """Gradient of the residual stream."""
    in_final_norm: int
    """At the final norm's backward, on top of all saved activations."""
    logits: Term
    """Logits and their gradients at the backward of the loss."""
    explain_layers: Callable[[], str]
    """Returns the formula and source of the layers' saved activations."""
    layer_order: LayerOrder
    """The layers one by one, for frameworks that treat layers differently."""
    find_largest_layer: Callable[[bool | None], LargestLayer]
    """Returns the largest layer, for frameworks that use it for all layers; with or without a sliding window,
    or any (None)."""


class LayersOfKind(NamedTuple):
    """Layers of one kind on a stage, with the same recomputation."""

    num_layers: int
    activations: LayerActivations
    recompute: str


class TransformersActivations:
    """Activations of one stage's micro-batches, in forward and backward."""

    def __init__(self, rank: RankActivations, stage: Stage) -> None:
        self.rank, self.stage = rank, stage
        self.plan, self.modules, self.tokens = rank.plan, rank.modules, rank.tokens
        self.num_stream_shards = rank.num_stream_shards
        self.kinds = self.list_kinds(self.modules)
        self.num_chunks, self.chunks_in_flight = count_in_flight(self.plan, stage.number)
        # A micro-batch in flight keeps the saved tensors of one chunk of the stage's layers.
        saved = sum([kind.num_layers * kind.activations.saved for kind in self.kinds])
        self.saved_by_layers = ceil_div(self.tokens * saved, self.num_chunks) * self.chunks_in_flight
        if self.modules.uses_dora:
            self.saved_by_layers += sum(
                kind.num_layers * compute_dora_vectors(self.plan.architecture, self.modules, kind.recompute)
                for kind in self.kinds
            )
        """Bytes of all layers' activations, of all micro-batches in flight."""
        edges = rank.edges
        self.saved_before_layers = stage.is_first * edges.at_start + edges.masks
        """Bytes of one micro-batch."""
        self.saved_after_layers = stage.is_last * edges.after_layers
        """Bytes of one micro-batch."""
        self.unsaved_casts = stage.is_first * edges.unsaved_casts
        self.casts_after_forward, self.casts_in_backward = self._compute_weight_casts()

    # ---- The end of forward, and backward ----

    def compute_forward(self) -> Term:
        """Return the activations at the end of forward."""
        edges = self.saved_before_layers + self.saved_after_layers
        casts = self.casts_after_forward
        num_bytes = self.saved_by_layers + edges + casts + self.stage.is_last * self.rank.edges.output

        def explain() -> str:
            copies = (
                f"{format_gib(casts)} GiB half-precision copies of weights (autocast) + " if casts else ""
            )
            return f"{copies}{format_gib(edges)} GiB before and after the layers + {self.explain_layers()}"

        return Term(num_bytes, explain)

    def compute_logits(self) -> tuple[Term, Term]:
        """Return logits and loss at the end of forward and at the start of backward."""
        return compute_logits_terms(self.plan, self.modules, self.tokens, self.stage.is_last)

    def compute_backward(self, logits: Term) -> StageBackward:
        """Return the bytes that autograd holds during the stage's backward."""
        return StageBackward(
            modules=self.modules,
            saved_by_layers=self.saved_by_layers + self.saved_before_layers,
            saved_by_head=self.saved_after_layers,
            weight_casts=self.casts_in_backward,
            unsaved_casts=self.unsaved_casts,
            stream_gradient=self.rank.stream_gradient,
            in_final_norm=self.stage.is_last * self.rank.edges.in_final_norm,
            logits=logits,
            explain_layers=self.explain_layers,
            layer_order=build_layer_order(self),
            find_largest_layer=partial(find_largest_layer, self),
        )

    def explain_layers(self) -> str:
        """Return the formula and source of the layers' saved activations."""
        parts = " + ".join(
            f"{format_count(kind.num_layers, 'layer')} × {format_count(self.tokens, 'token')} × "
            f"({_explain_layer(kind)})"
            for kind in self.kinds
            if kind.num_layers
        )
        in_flight = self.chunks_in_flight / self.num_chunks
        schedule = "GPipe" if self.plan.layout.runs_all_forwards_first else "1F1B"
        micro_batches = f" × {in_flight:g} micro-batches in flight ({schedule})" if in_flight != 1 else ""
        return (
            f"{parts}{micro_batches} · {self.modules.kernels} modules, Korthikanti et al. 2022, table 2, "
            "operator by operator"
        )

    # ---- Layers ----

    def list_kinds(self, modules: Modules) -> list[LayersOfKind]:
        """Return the layers of each kind on the stage, recomputed or offloaded ones first.

        All layers count as if they ran ``modules``, which may be those of layers with a sliding window.
        """
        recompute, interval = self.plan.recipe.recompute, self.plan.recipe.recompute_interval
        # Without recomputation, or without an interval, all layers of a kind are alike.
        interval = 1 if recompute == "none" else interval
        by_kind = count_recomputed_by_kind(self.plan.architecture, self.stage, interval)
        kinds = [
            LayersOfKind(recomputed, self.rank.get_activations(moe, recompute, modules), recompute)
            for moe, _, recomputed in by_kind
        ]
        if interval > 1:
            kinds += [
                LayersOfKind(num_layers - recomputed, self.rank.get_activations(moe, "none", modules), "none")
                for moe, num_layers, recomputed in by_kind
            ]
        return kinds

    def compute_offloaded(self) -> int:
        """Return host bytes of offloaded activations, of all micro-batches in flight.

        Autocast's copies of weights, which autograd saves as well, are included.
        """
        arch, modules = self.plan.architecture, self.modules
        # training/model/recompute.py offloads all saved tensors but weights, which autocast's copies are not.
        offloaded = sum(kind.num_layers * kind.activations.offloaded for kind in self.kinds)
        casts = 0
        if modules.autocast:
            by_kind = zip(self.kinds, count_layers_by_kind(arch, self.stage), strict=False)
            casts = sum(
                kind.num_layers * compute_weight_casts(arch, moe, modules) for kind, (moe, _) in by_kind
            )
        return ceil_div(self.tokens * offloaded, self.num_chunks) * self.chunks_in_flight + casts

    def compute_dequantized(self) -> int:
        """Return bytes of the largest dequantized matrix, in the compute dtype (bitsandbytes, MatMul4Bit)."""
        if not self.modules.quantized:
            return 0
        return self.modules.compute * find_largest_matrix(self.plan.architecture, self.stage)

    # ---- Autocast's copies of weights ----

    def _compute_weight_casts(self) -> tuple[int, int]:
        """Return bytes of half-precision matrix copies at the end of forward and the start of backward.

        Autocast caches copies of trained weights until its context exits, and autograd keeps those it needs;
        recomputation frees them layer by layer. A frozen base is in half precision already.
        """
        modules = self.modules
        if not modules.autocast:
            return 0, 0
        arch = self.plan.architecture
        # The head is a trained matrix like those of the layers; a tied one is the embedding.
        head = modules.trained * arch.embedding_parameters
        after_forward = in_backward = self.stage.is_last * head * modules.compute
        by_kind = count_layers_by_kind(arch, self.stage)
        # The kinds after the recomputed ones are the same kinds, not recomputed.
        for kind, (moe, _) in zip(self.kinds, (*by_kind, *by_kind), strict=False):
            casts = kind.num_layers * compute_weight_casts(arch, moe, modules)
            copies, kept_copies = count_weight_casts(arch, modules, kind.recompute)
            after_forward, in_backward = after_forward + copies * casts, in_backward + kept_copies * casts
        return after_forward, in_backward - self.unsaved_casts


def count_in_flight(plan: Plan, stage: int) -> tuple[int, int]:
    """Return a stage's number of model chunks, and of the chunk activations that it holds at once.

    1F1B holds pp - stage micro-batches; interleaving more, in chunks of 1/vpp (Narayanan et al. 2021, section
    2.2; Megatron's warm-up count); GPipe all of a step's (Huang et al. 2019, section 2).
    """
    pp, vpp, micro_batches = plan.degrees.pp, plan.degrees.vpp, plan.num_micro_batches
    if plan.layout.runs_all_forwards_first:
        return vpp, where(pp > 1, micro_batches, 1)
    # Megatron-LM, schedules.py: 2 x (pp - rank - 1) + (vpp - 1) x pp warm-up chunks, and the one that runs.
    # torch (ScheduleInterleaved1F1B) has equal rounds of pp micro-batches or more in place of pp.
    plain = pp - stage
    round_size = micro_batches // maximum(1, micro_batches // pp)
    interleaved = 2 * (plain - 1) + (vpp - 1) * round_size + 1
    return vpp, minimum(where(vpp == 1, plain, interleaved), micro_batches * vpp)


def _explain_layer(kind: LayersOfKind) -> str:
    layer = kind.activations
    if kind.recompute == "none":
        return (
            f"{format_kib(layer.norms)} KiB norms and residuals + {format_kib(layer.attention)} KiB "
            f"attention + {format_kib(layer.mlp)} KiB MLP"
        )
    if kind.recompute == "offload":
        return f"{format_kib(layer.offloaded)} KiB in host memory"
    contents = "layer input" if kind.recompute == "full" else "matrix products and attention"
    return f"{format_kib(layer.saved)} KiB kept with {kind.recompute} recomputation: {contents}"
