"""Activations of transformers' modules on one pipeline stage, from the end of forward through backward."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.core.number_format import count, gib, kib
from shardscope.core.ops import ceil_div, group_equal, map_distinct, maximum, minimum, where
from shardscope.families.parameter_names import attention_inputs
from shardscope.families.registry import family_of
from shardscope.memory.activations.backward import (
    LargestLayer,
    StageBackward,
    compute_final_norm,
    compute_layer_backward,
    compute_norm_after_head,
)
from shardscope.memory.activations.float8 import compute_layer_working
from shardscope.memory.activations.forward import (
    LayerActivations,
    compute_final_norm_saved,
    compute_head_input,
    compute_kept_masks,
    compute_layer_activations,
    compute_unsaved_at_start,
    compute_weight_casts,
    count_weight_casts,
)
from shardscope.memory.activations.head import compute_logits_terms, resolve_loss
from shardscope.memory.activations.modules.attention import is_eager
from shardscope.memory.layer_order import build_layer_order
from shardscope.memory.report import Term
from shardscope.memory.state.quantization import find_largest_matrix
from shardscope.memory.state.stages import count_layers_by_kind

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.plan import Plan
    from shardscope.memory.activations.modules.saved import Modules
    from shardscope.memory.state.stages import Stage


class LayersOfKind(NamedTuple):
    """Layers of one kind on a stage, with the same recomputation."""

    num_layers: int
    each: LayerActivations
    recompute: str


class TransformersActivations:
    """Activations of one stage's micro-batches, in forward and backward."""

    def __init__(self, plan: Plan, modules: Modules, stage: Stage) -> None:
        self.plan, self.modules, self.stage = plan, modules, stage
        degrees, recipe = plan.degrees, plan.recipe
        self.tokens: Any = group_equal(recipe.micro_batch_size * ceil_div(recipe.seq_len, degrees.cp))
        self.cut: Any = where(plan.layout.splits_sequence, degrees.tp, 1)
        """Number of shards of the residual stream."""
        self.kinds = self._kinds()
        self.num_chunks, self.chunks = count_in_flight(plan, stage.number)
        saved = sum([kind.num_layers * kind.each.saved for kind in self.kinds])
        self.saved = ceil_div(self.tokens * saved, self.num_chunks) * self.chunks
        """Bytes of all layers' activations, of all micro-batches in flight."""
        self.start = self.tokens * self._start_bytes()
        """Bytes that a micro-batch saves before the layers."""
        self.end = stage.is_last * self.tokens * self._end_bytes()
        """Bytes that a micro-batch saves after the layers."""

    def forward(self) -> Term:
        """Return the activations at the end of forward."""
        edges = self.start + self.end
        cast = self._autocast_copies()[0]
        num_bytes = self.saved + edges + cast + self._output()

        def words() -> str:
            casts = f"{gib(cast)} GiB half-precision copies of weights (autocast) + " if cast else ""
            return f"{casts}{gib(edges)} GiB at the ends + {self._explain_layers()}"

        return Term(num_bytes, words)

    def _explain_layers(self) -> str:
        parts = " + ".join(
            f"{count(kind.num_layers, 'layer')} × {count(self.tokens, 'token')} × ({_explain_layer(kind)})"
            for kind in self.kinds
            if kind.num_layers
        )
        held = self.chunks / self.num_chunks
        schedule = "GPipe" if self.plan.layout.runs_all_forwards_first else "1F1B"
        flight = f" × {held:g} micro-batches in flight ({schedule})" if held != 1 else ""
        return (
            f"{parts}{flight} · {self.modules.kernels} modules, Korthikanti et al. 2022, eq. 2, operator by "
            "operator"
        )

    def logits(self) -> tuple[Term, Term]:
        """Return logits and loss at the end of forward and at the start of backward."""
        return compute_logits_terms(self.plan, self.modules, self.tokens, self.stage.is_last)

    def backward(self, logits: Term) -> StageBackward:
        """Return the bytes that autograd holds during the stage's backward."""
        arch, stage, tokens = self.plan.architecture, self.stage, self.tokens
        return StageBackward(
            layers=self.saved + self.start,
            edges=self.end,
            cast=self._autocast_copies()[1],
            cast_unsaved=self._unsaved_copies(),
            stream=tokens * ceil_div(arch.hidden_size * self.modules.stream, self.cut),
            norm=stage.is_last * tokens * self._in_norm(),
            logits=logits,
            explain_layers=self._explain_layers,
            find_order=lambda: build_layer_order(self),
            find_fullest=self._fullest_layer,
        )

    def _fullest_layer(self) -> LargestLayer:
        arch, modules, stage, tokens = self.plan.architecture, self.modules, self.stage, self.tokens
        layer, tp = self._fullest(), self.plan.degrees.tp
        # Layers with experts come last, and so first in backward.
        own = compute_layer_backward(arch, count_layers_by_kind(arch, stage)[-1][0], modules)
        if 0 < arch.num_moe_layers < arch.num_hidden_layers:
            own = where(stage.num_moe_layers > 0, own, compute_layer_backward(arch, False, modules))
        dequantised, float8 = self.dequantised(), self._float8()

        def inside(num_bytes: Any) -> Any:
            # tp shards the stream only if the sequence is split.
            rest = ceil_div(num_bytes - own.stream, tp)
            return tokens * (ceil_div(own.stream, self.cut) + rest + layer.recomputed) + dequantised

        return LargestLayer(
            saved=tokens * layer.saved,
            inside=maximum(
                inside(own.inside),
                self._gathered(own.stream, layer.recomputed),
                (float8 > 0) * (tokens * (own.stream + layer.recomputed) + float8),
            ),
            later=inside(own.later),
            earlier=inside(own.earlier),
            core=where(own.core == 0, 0, inside(own.core)),
            recomputed=tokens * layer.recomputed,
            again=tokens * maximum(*(kind.each.recomputed for kind in self.kinds)),
        )

    def _gathered(self, stream: Any, recomputed: Any) -> Any:
        """Return bytes at a layer's last matmul with a split sequence.

        These are its all-gathered output gradient and its input's gradient.
        """
        arch, width, tp = self.plan.architecture, self.modules.compute, self.plan.degrees.tp
        whole = arch.hidden_size * width + ceil_div(arch.intermediate_size * width, tp)
        return (self.cut > 1) * self.tokens * (ceil_div(stream, self.cut) + whole + recomputed)

    def offloaded(self) -> int:
        """Return host bytes of offloaded activations, of all micro-batches in flight.

        Autocast's copies of weights, which autograd saves as well, are included.
        """
        arch, modules = self.plan.architecture, self.modules
        away = sum(kind.num_layers * kind.each.offloaded for kind in self.kinds)
        casts = 0
        if modules.autocast:
            moved = zip(self.kinds, count_layers_by_kind(arch, self.stage), strict=False)
            casts = sum(
                kind.num_layers * compute_weight_casts(arch, moe, modules) for kind, (moe, _) in moved
            )
        found: int = ceil_div(self.tokens * away, self.num_chunks) * self.chunks + casts
        return found

    def _kinds(self) -> list[LayersOfKind]:
        """Return the layers of each kind on the stage, recomputed or offloaded ones first.

        Every ``recompute_interval``-th layer of the stage is recomputed, its first one included; dense layers
        come before those with experts.
        """
        recompute, interval = self.plan.recipe.recompute, self.plan.recipe.recompute_interval
        present = count_layers_by_kind(self.plan.architecture, self.stage)
        if recompute == "none" or interval == 1:
            return [LayersOfKind(layers, self.layer(moe, recompute), recompute) for moe, layers in present]
        chosen, plain, before, chosen_before = [], [], 0, 0
        for moe, layers in present:
            before = before + layers
            recomputed = ceil_div(before, interval) - chosen_before
            chosen_before = chosen_before + recomputed
            chosen.append(LayersOfKind(recomputed, self.layer(moe, recompute), recompute))
            plain.append(LayersOfKind(layers - recomputed, self.layer(moe, "none"), "none"))
        return chosen + plain

    def layer(self, moe: bool, recompute: str) -> LayerActivations:
        """Return the activations of one layer of a kind."""
        arch, modules = self.plan.architecture, self.modules
        of_one = partial(compute_layer_activations, arch, moe, modules, recompute)
        in_parts = self.plan.layout.joins_attention_by_heads
        joins = where(self.plan.degrees.cp > 1, 1, 0) if in_parts else 0
        found: LayerActivations = map_distinct(of_one, self.plan.degrees.tp, self.cut, joins)
        return found

    def _fullest(self) -> LayerActivations:
        """Return the stage's layer with the most saved and recomputed activations."""
        fullest = self.kinds[0]
        for kind in self.kinds[1:]:
            more = kind.each.saved + kind.each.recomputed > fullest.each.saved + fullest.each.recomputed
            fullest = where((kind.num_layers > 0) & (more | (fullest.num_layers == 0)), kind, fullest)
        return fullest.each

    def _float8(self) -> Any:
        """Return bytes of casts to 8 bits during one matmul's backward."""
        if self.plan.recipe.precision != "fp8-mixed":
            return 0
        found: Any = 0
        for moe, layers in count_layers_by_kind(self.plan.architecture, self.stage):
            # Layers with experts come last, and so first in backward.
            found = where(layers > 0, compute_layer_working(self.plan.architecture, moe, self.tokens), found)
        return found

    def dequantised(self) -> Any:
        """Return bytes of the largest dequantized matrix, in the compute dtype (bitsandbytes, MatMul4Bit)."""
        if not self.modules.quantized:
            return 0
        return self.modules.compute * find_largest_matrix(self.plan.architecture, self.stage)

    def _start_bytes(self) -> Any:
        """Return bytes per token saved before the layers: its id, and the masks of recomputed layers.

        The tensors that the first layer need not save under adapters are subtracted.
        """
        arch, modules, recipe = self.plan.architecture, self.modules, self.plan.recipe
        if recipe.recompute != "none" or not recipe.has_adapters:
            masks: Any = compute_kept_masks(arch, modules, recipe.recompute, recipe.recompute_interval)
            if not is_eager(arch, modules) and not family_of(arch).always_passes_mask:
                # Boolean window masks are the same for all sequences, and exist once.
                masks = ceil_div(masks, recipe.micro_batch_size)
            return self.stage.is_first * 8 + masks
        unsaved = map_distinct(
            lambda tp, cut: compute_unsaved_at_start(arch, modules, tp, cut), self.plan.degrees.tp, self.cut
        )
        return self.stage.is_first * (8 - unsaved)

    def _unsaved_copies(self) -> Any:
        """Return bytes of first-layer adapter copies not kept by autograd: their input needs no gradient."""
        modules = self.modules
        if modules.trained or not modules.autocast or self.plan.recipe.recompute != "none":
            return 0
        return self.stage.is_first * modules.compute * _count_first_adapters(self.plan.architecture, modules)

    def _output(self) -> Any:
        """Return bytes of the final norm's output, returned by the model, unless it is saved anyway."""
        modules = self.modules
        saved = modules.trained or modules.keeps_frozen_inputs
        alive = modules.kernels != "megatron" and (modules.autocast or not saved)
        row = self.plan.architecture.hidden_size * modules.normed
        return self.stage.is_last * self.tokens * alive * row

    def _end_bytes(self) -> Any:
        """Return bytes per token saved after the layers: by the final norm, and the head's input."""
        arch, modules = self.plan.architecture, self.modules
        norm = ceil_div(compute_final_norm_saved(arch, modules), self.cut)
        return norm + compute_head_input(arch, modules, resolve_loss(self.plan))

    def _in_norm(self) -> Any:
        """Return bytes per token at the final norm's backward, on top of all saved activations."""
        arch, modules, loss = self.plan.architecture, self.modules, resolve_loss(self.plan)
        whole = compute_final_norm(arch, modules)
        if loss == "fused":
            return ceil_div(whole, self.cut)
        alone = compute_norm_after_head(arch, modules, compute_head_input(arch, modules, loss))
        return where(self.cut > 1, ceil_div(whole, self.cut), alone)

    def _autocast_copies(self) -> tuple[Any, Any]:
        """Return bytes of half-precision matrix copies at the end of forward and the start of backward.

        Autocast caches copies of trained weights until its context exits, and autograd keeps those it needs;
        recomputation frees them layer by layer. A frozen base is in half precision already.
        """
        modules = self.modules
        if not modules.autocast:
            return 0, 0
        arch = self.plan.architecture
        head = modules.trained * arch.embedding_parameters
        made = kept = self.stage.is_last * head * modules.compute
        present = count_layers_by_kind(arch, self.stage)
        # The kinds after the recomputed ones are the same kinds, not recomputed.
        for kind, (moe, _) in zip(self.kinds, (*present, *present), strict=False):
            casts = kind.num_layers * compute_weight_casts(arch, moe, modules)
            often, often_kept = count_weight_casts(modules, kind.recompute)
            made, kept = made + often * casts, kept + often_kept * casts
        return made, kept - self._unsaved_copies()


def _count_first_adapters(arch: Architecture, modules: Modules) -> int:
    """Return the number of weights in the adapters' first matrices that read the model's embeddings."""
    adapted = set(attention_inputs(arch)).intersection(modules.targets or ())
    return modules.adapter_rank * sum(inner for name, (_, inner) in arch.layer_linears(0) if name in adapted)


def count_in_flight(plan: Plan, stage: int) -> tuple[Any, Any]:
    """Return a stage's number of model chunks, and of the chunk activations that it holds at once.

    1F1B holds pp - stage micro-batches; interleaving more, in chunks of 1/vpp (Narayanan et al. 2021, section
    2.2; Megatron's warm-up count); GPipe all of a step's (Huang et al. 2019, section 2).
    """
    pp, vpp, micro_batches = plan.degrees.pp, plan.degrees.vpp, plan.num_micro_batches
    if plan.layout.runs_all_forwards_first:
        return vpp, where(pp > 1, micro_batches, 1)
    plain = pp - stage
    interleaved = 2 * (plain - 1) + (vpp - 1) * pp + 1
    return vpp, minimum(where(vpp == 1, plain, interleaved), micro_batches * vpp)


def _explain_layer(kind: LayersOfKind) -> str:
    layer = kind.each
    if kind.recompute == "none":
        return (
            f"{kib(layer.norms)} KiB norms and residuals + {kib(layer.attention)} KiB attention "
            f"+ {kib(layer.mlp)} KiB MLP"
        )
    if kind.recompute == "offload":
        return f"{kib(layer.offloaded)} KiB in host memory"
    kept = "layer input" if kind.recompute == "full" else "matrix products and attention"
    return f"{kib(layer.saved)} KiB kept with {kind.recompute} recomputation: {kept}"
