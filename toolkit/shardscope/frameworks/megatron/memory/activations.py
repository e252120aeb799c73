"""Activations and logits of one Megatron pipeline stage in each phase of a step.

Megatron's schedules decide how many micro-batches of which model chunk are in flight, and which tensors are
being sent between stages meanwhile. The head works on the padded vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.core.number_format import count, kib
from shardscope.core.ops import ceil_div, group_equal, map_distinct, where
from shardscope.core.precision import FP32, HALF
from shardscope.frameworks.megatron.core_config import padded_vocab_size
from shardscope.frameworks.megatron.fp8 import SOURCE, gradient_copies
from shardscope.frameworks.megatron.memory.eager import takes_plain_softmax
from shardscope.frameworks.megatron.memory.layer import Cuts, Layer, layer
from shardscope.frameworks.megatron.memory.schedule import fullest
from shardscope.memory.activations.head import Logits, compute_logits_per_token
from shardscope.memory.activations.modules.megatron import compute_norm_statistics
from shardscope.memory.report import Term
from shardscope.memory.state.stages import count_layers_by_kind

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.plan import Plan
    from shardscope.memory.activations.modules.saved import Modules
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


def _layer_of_cuts(arch: Architecture, moe: bool, modules: Modules, recompute: str, *cuts: int) -> Layer:
    return layer(arch, moe, modules, recompute, Cuts(*cuts))


def stage_activations(plan: Plan, stage: Stage, modules: Modules) -> StageActivations:
    """Compute the activations and logits of one stage in each phase of a step."""
    return _Stage(plan, stage, modules).step()


class _Stage:
    def __init__(self, plan: Plan, stage: Stage, modules: Modules) -> None:
        self.plan, self.stage, self.modules = plan, stage, modules
        self.arch, self.degrees = plan.architecture, plan.degrees
        layout: Any = plan.layout
        recipe, tp = plan.recipe, plan.degrees.tp
        sequence = where(layout.splits_sequence, tp, 1)
        rows = recipe.micro_batch_size * (self.arch.num_attention_heads // tp)
        plain = where(takes_plain_softmax(modules, rows), rows, 0)
        batch = recipe.micro_batch_size
        self.cuts = Cuts(tp, sequence, layout.expert_tp, plan.degrees.ep, plain, batch, gradient_copies(plan))
        # Context parallelism: each rank has 1/cp of every sequence in all operators, attention's keys and
        # values included (megatron/core/utils.py, get_batch_on_this_cp_rank). Transformer Engine's buffers of
        # keys and values in transit are not counted: they never coexist with the MLP's tensors.
        self.tokens: Any = group_equal(recipe.micro_batch_size * ceil_div(recipe.seq_len, self.degrees.cp))
        self.stream: Any = ceil_div(self.tokens * self.arch.hidden_size * modules.compute, sequence)
        self.kinds = [(moe, self._layer(moe)) for moe, _ in count_layers_by_kind(self.arch, stage)]
        of_kind = dict(self.kinds)
        self.held = fullest(plan, stage.number, of_kind.get(False, _NO_LAYER), of_kind.get(True, _NO_LAYER))
        # Whether the first backward begins before the last forward.
        self.alternates: Any = (self.degrees.pp > 1) & (
            self.held.chunks < plan.num_micro_batches * self.degrees.vpp
        )

    def _layer(self, moe: bool) -> Layer:
        arch, modules, recompute = self.arch, self.modules, self.plan.recipe.recompute
        found: Layer = map_distinct(partial(_layer_of_cuts, arch, moe, modules, recompute), *self.cuts)
        return found

    def step(self) -> StageActivations:
        """Compute all phases of the step."""
        tokens, held, stream, words = self.tokens, self.held, self.stream, self._words
        angles, edges, interleaved = self._angles(), self._edges(), self.degrees.vpp > 1
        travelling = self._travelling()
        logits, logits_backward = self._logits()
        # Interleaved: one gradient is sent while the next arrives. 1F1B: the next input has arrived too, and
        # each tensor is held twice while it is sent on. Another micro-batch's gradient may have arrived.
        moving = where(interleaved, self.alternates * stream, 2 * travelling)
        arrived = self.alternates * stream
        # On all stages but the first, an output and a gradient are in transit too after the first round
        # (seen in rehearsals from the middle stage on; one stage before the middle held neither).
        later = interleaved * (1 - self.stage.is_first) * (self.plan.num_micro_batches > self.degrees.pp)
        sent = 2 * later * arrived
        # Rotary angles live throughout. They are added last: in a batch of plans only they depend on cp.
        forward = tokens * held.head + edges + moving
        ending = tokens * held.forward + moving + arrived + sent
        # The last layer's forward may need more than the head and its logits.
        is_ending = ending > forward + logits[0]
        # At the end of the first layer's backward its own activations are freed. The other micro-batches are
        # still in flight, and the embedding's output gradient is allocated.
        last = tokens * held.last + travelling + where(self.stage.is_first, self._whole(), stream)
        # In fp32 the logits' gradient is not cast, and so still alive when the head's input gradient comes.
        uncast = self.stream if self.modules.compute == FP32 and not self._casts_loss() else 0
        again = " and recomputed" if self.plan.recipe.recompute == "full" else ""
        return StageActivations(
            forward=Term(where(is_ending, ending, forward) + angles, words),
            head=Term(
                tokens * held.head + edges + where(interleaved, arrived, travelling) + uncast + angles, words
            ),
            first=Term(
                tokens * held.backward + travelling + sent + angles,
                lambda: f"{words()} + gradients in flight{again} in one layer",
            ),
            last=Term(last + angles, lambda: f"the other micro-batches' share of {words()}"),
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

    def _words(self) -> str:
        """Explain the activations of all micro-batches in flight."""
        held, recompute = self.held, self.plan.recipe.recompute
        parts = " + ".join(
            f"{count(layers, 'layer')} in flight × {count(self.tokens, 'token')} × {kib(each.saved)} KiB"
            for is_moe, each in self.kinds
            if (layers := held.moe if is_moe else held.dense)
        )
        eight = f"; products' inputs in 8 bits: {SOURCE}" if self.modules.eight_bit_inputs else ""
        batches = "1 micro-batch" if held.chunks == 1 else f"{held.chunks} micro-batches"
        return (
            f"{parts} ({batches} of a model chunk, recompute {recompute}) · megatron modules, Korthikanti et "
            f"al. 2022, eq. 2, operator by operator{eight}"
        )

    def _angles(self) -> Any:
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

    def _whole(self) -> Any:
        """Return the bytes of the embedding's output gradient, all-gathered over the sequence."""
        return self.tokens * self.arch.hidden_size * self.modules.compute

    def _edges(self) -> Any:
        """Return the bytes of token ids and embedding dropout masks, the final norm and the head's input."""
        arch, stage = self.arch, self.stage
        mask = ceil_div(arch.hidden_size, self.cuts.sequence) if self.modules.dropout else 0
        norm = 2 * arch.hidden_size * self.modules.compute + compute_norm_statistics(arch)
        return stage.is_first * self.held.first * self.tokens * (8 + mask) + stage.is_last * ceil_div(
            self.tokens * norm, self.cuts.sequence
        )

    def _travelling(self) -> Any:
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
        layout: Any = self.plan.layout
        return self.plan.recipe.loss == "fused" and layout.cross_entropy_fusion_impl == "te"

    def _logits(self) -> tuple[Term, Term]:
        is_last, tokens = self.stage.is_last, self.tokens
        rows = padded_vocab_size(self.arch.vocab_size, self.degrees.tp) // self.degrees.tp
        each = compute_logits_per_token(rows, "megatron", self.modules.compute)
        if self._overwrites_logits():
            each = Logits(rows * self.modules.compute, rows * self.modules.compute)
        elif self._casts_loss():
            each = Logits(each.forward, rows * (FP32 + HALF + self.modules.compute))

        def words(num_bytes: int) -> str:
            if not is_last:
                return "only the last pipeline stage has the head"
            kept = "logits, fp32 softmax, gradient"
            if self._overwrites_logits():
                kept = "Transformer Engine's, whose gradient takes the logits' place"
            return (
                f"{count(tokens, 'token')} × {rows:,} rows of the padded vocabulary × "
                f"{num_bytes // rows} bytes · vocab-parallel cross entropy: {kept}"
            )

        return (
            Term(is_last * tokens * each.forward, lambda: words(each.forward)),
            Term(is_last * tokens * each.backward, lambda: words(each.backward)),
        )
