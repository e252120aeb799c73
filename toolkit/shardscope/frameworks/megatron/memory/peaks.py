"""Peak candidates of one Megatron pipeline stage: activations and logits in each phase of a step.

Megatron's schedules decide how many micro-batches of which model chunk are in flight, and which tensors are
being sent between stages meanwhile. The head works on the padded vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.number_format import format_count, format_kib
from shardscope.core.ops import ceil_div, group_equal, map_distinct, where
from shardscope.core.precision import FP32, HALF
from shardscope.frameworks.megatron.core_config import compute_padded_vocab_size
from shardscope.frameworks.megatron.fp8 import SOURCE, count_gradient_copies
from shardscope.frameworks.megatron.layout import get_layout
from shardscope.frameworks.megatron.memory.eager_attention import takes_plain_softmax
from shardscope.frameworks.megatron.memory.layer import Layer, ShardCounts, compute_layer
from shardscope.frameworks.megatron.memory.pipeline import compute_schedule_peaks
from shardscope.memory.activations.head import Logits, compute_logits_per_token
from shardscope.memory.activations.modules.megatron import compute_norm_statistics
from shardscope.memory.report import Term
from shardscope.memory.state.stages import count_layers_by_kind

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.plan import Plan
    from shardscope.memory.activations.modules.saved_tensors import Modules
    from shardscope.memory.state.stages import Stage


_NO_LAYER = Layer(0, 0, 0, 0)


class StageActivations(NamedTuple):
    """Activation and logit bytes of one stage in each phase of a step."""

    forward: Term
    """Activations at the end of forward, or while the head computes the logits."""
    head: Term
    """Activations during the head's backward."""
    first: Term
    """Activations during the backward of the stage's last layer, which comes first."""
    last: Term
    """Activations during the backward of the stage's first layer, which comes last."""
    logits_forward: Term
    """Logits at the same time as ``forward``."""
    logits_backward: Term
    """Logits at the same time as ``head``."""


def _compute_layer_of_counts(
    arch: Architecture, moe: bool, modules: Modules, recompute: str, *counts: int
) -> Layer:
    return compute_layer(arch, moe, modules, recompute, ShardCounts(*counts))


def compute_stage_activations(plan: Plan, stage: Stage, modules: Modules) -> StageActivations:
    """Compute the activations and logits of one stage in each phase of a step."""
    return _StageStep(plan, stage, modules).compute_phases()


class _StageStep:
    """One training step of a stage: layers, shards and micro-batches in flight, by phase."""

    def __init__(self, plan: Plan, stage: Stage, modules: Modules) -> None:
        self.plan, self.stage, self.modules = plan, stage, modules
        self.arch, self.degrees = plan.architecture, plan.degrees
        layout, recipe, tp = get_layout(plan), plan.recipe, plan.degrees.tp
        sequence = where(layout.splits_sequence, tp, 1)
        rows = recipe.micro_batch_size * (self.arch.num_attention_heads // tp)
        plain = where(takes_plain_softmax(modules, rows), rows, 0)
        batch = recipe.micro_batch_size
        self.shards = ShardCounts(
            tp, sequence, layout.expert_tp, plan.degrees.ep, plain, batch, count_gradient_copies(plan)
        )
        # Context parallelism: each rank has 1/cp of every sequence in all operators, attention's keys and
        # values included (megatron/core/utils.py, get_batch_on_this_cp_rank). Transformer Engine's buffers of
        # keys and values in transit are not counted: they never coexist with the MLP's tensors.
        self.tokens = group_equal(recipe.micro_batch_size * ceil_div(recipe.seq_len, self.degrees.cp))
        self.stream = ceil_div(self.tokens * self.arch.hidden_size * modules.compute, sequence)
        self.kinds = [(moe, self._compute_layer(moe)) for moe, _ in count_layers_by_kind(self.arch, stage)]
        of_kind = dict(self.kinds)
        self.in_flight = compute_schedule_peaks(
            plan, stage.number, of_kind.get(False, _NO_LAYER), of_kind.get(True, _NO_LAYER)
        )
        # Whether the first backward begins before the last forward.
        self.alternates = (self.degrees.pp > 1) & (
            self.in_flight.chunks < plan.num_micro_batches * self.degrees.vpp
        )

    def _compute_layer(self, moe: bool) -> Layer:
        arch, modules, recompute = self.arch, self.modules, self.plan.recipe.recompute
        return map_distinct(partial(_compute_layer_of_counts, arch, moe, modules, recompute), *self.shards)

    def compute_phases(self) -> StageActivations:
        """Compute all phases of the step."""
        tokens, in_flight, stream = self.tokens, self.in_flight, self.stream
        explain = self._explain_saved
        angles, edges, interleaved = (
            self._compute_rotary_angles(),
            self._compute_edges(),
            self.degrees.vpp > 1,
        )
        received = self._compute_received()
        logits, logits_backward = self._build_logits()
        # Interleaved: one gradient is sent while the next arrives. 1F1B: the next input has arrived too, and
        # each tensor is held twice while it is sent on. Another micro-batch's gradient may have arrived.
        moving = where(interleaved, self.alternates * stream, 2 * received)
        arrived = self.alternates * stream
        # On all stages but the first, an output and a gradient are in transit too after the first round
        # (seen in rehearsals from the middle stage on; one stage before the middle held neither).
        later = interleaved * (1 - self.stage.is_first) * (self.plan.num_micro_batches > self.degrees.pp)
        sent = 2 * later * arrived
        # Rotary angles live throughout. They are added last: in a batch of plans only they depend on cp.
        forward = tokens * in_flight.head + edges + moving
        ending = tokens * in_flight.forward + moving + arrived + sent
        # The last layer's forward may need more than the head and its logits.
        is_ending = ending > forward + logits[0]
        # At the end of the first layer's backward its own activations are freed. The other micro-batches are
        # still in flight, and the embedding's output gradient is allocated.
        last = (
            tokens * in_flight.last
            + received
            + where(self.stage.is_first, self._compute_embedding_gradient(), stream)
        )
        # In fp32 the logits' gradient is not cast, and so still alive when the head's input gradient comes.
        uncast = self.stream if self.modules.compute == FP32 and not self._casts_loss() else 0
        again = " and recomputed" if self.plan.recipe.recompute == "full" else ""
        return StageActivations(
            forward=Term(where(is_ending, ending, forward) + angles, explain),
            head=Term(
                tokens * in_flight.head + edges + where(interleaved, arrived, received) + uncast + angles,
                explain,
            ),
            first=Term(
                tokens * in_flight.backward + received + sent + angles,
                lambda: f"{explain()} + gradients in flight{again} in one layer",
            ),
            last=Term(last + angles, lambda: f"the other micro-batches' part of {explain()}"),
            logits_forward=Term(
                where(is_ending, 0, logits[0]),
                lambda: (
                    "the last layer's forward needs more than the logits after it"
                    if is_ending
                    else logits.explain()
                ),
            ),
            logits_backward=logits_backward,
        )

    # ---- tensors saved for backward

    def _explain_saved(self) -> str:
        """Explain the activations of all micro-batches in flight."""
        in_flight, recompute = self.in_flight, self.plan.recipe.recompute
        parts = " + ".join(
            f"{format_count(layers, 'layer')} in flight × {format_count(self.tokens, 'token')} × "
            f"{format_kib(layer.saved)} KiB"
            for is_moe, layer in self.kinds
            if (layers := in_flight.moe if is_moe else in_flight.dense)
        )
        eight = f"; products' inputs in 8 bits: {SOURCE}" if self.modules.eight_bit_inputs else ""
        batches = "1 micro-batch" if in_flight.chunks == 1 else f"{in_flight.chunks} micro-batches"
        return (
            f"{parts} ({batches} of a model chunk, recompute {recompute}) · megatron modules, Korthikanti et "
            f"al. 2022, table 2, operator by operator{eight}"
        )

    def _compute_rotary_angles(self) -> int:
        """Return the bytes of the fp32 rotary angles of a sequence.

        All micro-batches share them, and so do all layers of a chunk. Only layers with latent attention have
        their own (multi_latent_attention.py, ``rotary_pos_emb``).
        """
        arch, latent = self.arch, self.arch.latent_attention
        if arch.position_embedding != "rope":
            return 0
        width = latent.qk_rope_head_dim if latent else arch.head_dim
        length = ceil_div(self.plan.recipe.seq_len, self.degrees.cp)
        copies = self.stage.num_layers if latent else self.degrees.vpp
        return copies * length * width * FP32

    def _compute_embedding_gradient(self) -> int:
        """Return the bytes of the embedding's output gradient, all-gathered over the sequence."""
        return self.tokens * self.arch.hidden_size * self.modules.compute

    def _compute_edges(self) -> int:
        """Return the bytes of token ids and embedding dropout masks, the final norm and the head's input."""
        arch, stage = self.arch, self.stage
        mask = ceil_div(arch.hidden_size, self.shards.sequence) if self.modules.dropout else 0
        norm = 2 * arch.hidden_size * self.modules.compute + compute_norm_statistics(arch)
        return stage.is_first * self.in_flight.first * self.tokens * (8 + mask) + stage.is_last * ceil_div(
            self.tokens * norm, self.shards.sequence
        )

    def _compute_received(self) -> int:
        """Return the bytes of inputs and gradients received early from other stages (schedules.py)."""
        arrived = where(self.degrees.vpp > 1, 2, 1 - self.stage.is_first)
        return self.alternates * arrived * self.stream

    # ---- working memory of backward

    def _casts_loss(self) -> bool:
        """Return whether autograd casts the fused loss's gradient.

        The kernel computes it in bf16, and autograd casts it to the logits' dtype if that is another one
        (megatron/core/fusions/fused_cross_entropy.py).
        """
        recipe = self.plan.recipe
        casts = self.modules.compute == FP32 or recipe.precision == "fp16-mixed"
        return recipe.loss == "fused" and not self._overwrites_logits() and casts

    def _overwrites_logits(self) -> bool:
        """Return whether the loss writes its gradient over the logits, in their dtype.

        Transformer Engine's does (transformer_engine/pytorch/cross_entropy.py, triton/cross_entropy.py).
        """
        layout = get_layout(self.plan)
        return self.plan.recipe.loss == "fused" and layout.cross_entropy_fusion_impl == "te"

    def _build_logits(self) -> tuple[Term, Term]:
        """Return the terms of the logits at the end of forward and in the backward of the loss."""
        is_last, tokens = self.stage.is_last, self.tokens
        rows = compute_padded_vocab_size(self.arch.vocab_size, self.degrees.tp) // self.degrees.tp
        logits = compute_logits_per_token(rows, "megatron", self.modules.compute)
        if self._overwrites_logits():
            logits = Logits(rows * self.modules.compute, rows * self.modules.compute)
        elif self._casts_loss():
            logits = Logits(logits.forward, rows * (FP32 + HALF + self.modules.compute))

        def explain(num_bytes: int) -> str:
            if not is_last:
                return "only the last pipeline stage has the head"
            tensors = "logits, fp32 softmax, gradient"
            if self._overwrites_logits():
                tensors = "Transformer Engine's, whose gradient overwrites the logits"
            return (
                f"{format_count(tokens, 'token')} × {rows:,} rows of the padded vocabulary × "
                f"{num_bytes // rows} bytes · vocab-parallel cross entropy: {tensors}"
            )

        return (
            Term(is_last * tokens * logits.forward, lambda: explain(logits.forward)),
            Term(is_last * tokens * logits.backward, lambda: explain(logits.backward)),
        )
