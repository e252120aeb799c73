"""What forward leaves and backward needs on one stage of Megatron's pipeline, schedule and all.

Megatron's own schedules decide how many micro-batches of which model chunk are in flight, which of its
tensors travel between stages meanwhile; its head works on the padded vocabulary.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.frameworks.megatron.core_config import padded_vocab_size
from shardscope.frameworks.megatron.layout import MegatronLayout
from shardscope.memory.arithmetic import ceil_div
from shardscope.memory.logits import logits_per_token
from shardscope.memory.modules.megatron import (
    branches,
    core_attention,
    megatron_layer,
    megatron_selective,
    norm_statistics,
)
from shardscope.memory.modules.saved import Modules, Saved
from shardscope.memory.precision import FP32
from shardscope.memory.report import Term, no_bytes
from shardscope.memory.words import count, gib, kib

if TYPE_CHECKING:
    from shardscope.architecture import Architecture
    from shardscope.memory.stages import Stage
    from shardscope.plan import Plan


class Cuts(NamedTuple):
    """Into how many parts tensors are cut."""

    tp: int
    sequence: int
    """tp with sequence parallelism, else 1."""
    expert_tp: int
    ep: int


class Layer(NamedTuple):
    """Bytes for one token of one layer on one rank."""

    saved: int
    """All that stays until this layer's backward, recomputation considered."""
    working: int
    """What backward in this layer needs beside it, at its fullest."""
    ending: int
    """What the end of its forward needs beside it."""


class StageActivations(NamedTuple):
    """Activations and logits at the moments of a step."""

    forward: Term
    """At the end of forward, or while the head makes its logits."""
    head: Term
    """While the head goes backward."""
    first: Term
    """While backward is in its first layer, the last of the stage."""
    last: Term
    """While backward is in its last layer."""
    logits_forward: Term
    """Logits beside ``forward``."""
    logits_backward: Term
    """Logits beside ``head``."""


def stage_activations(plan: Plan, stage: Stage, modules: Modules) -> StageActivations:
    """Activations and logits of one stage at the moments of a step."""
    return _Stage(plan, stage, modules).step()


class _Stage:
    def __init__(self, plan: Plan, stage: Stage, modules: Modules) -> None:
        self.plan, self.stage, self.modules = plan, stage, modules
        self.arch, self.degrees = plan.architecture, plan.degrees
        layout = plan.layout
        assert isinstance(layout, MegatronLayout)
        recipe, tp = plan.recipe, plan.degrees.tp
        self.cuts = Cuts(tp, tp if layout.splits_sequence else 1, layout.expert_tp, plan.degrees.ep)
        self.tokens = recipe.micro_batch_size * ceil_div(recipe.seq_len, self.degrees.cp)
        self.stream: int = ceil_div(
            self.tokens * self.arch.hidden_size * self.modules.compute, self.cuts.sequence
        )

        self.in_flight = chunks_in_flight(plan, stage.number)
        self.chunk_layers = chunk_layers(plan, stage.number)
        self.layers: dict[tuple[bool, str], Layer] = {}

    def step(self) -> StageActivations:
        """Every moment of the step."""
        waiting, words = self._in_flight()
        angles, edges = self._angles(), self._edges()
        working, working_words = self._working()
        travelling = self._travelling()
        logits = self._logits()
        forward = waiting + angles + edges + 2 * travelling
        # A gradient for another micro-batch may have come already.
        arrived = self.stream if self._alternates() else 0
        ending = waiting + angles + 2 * travelling + self._ending() + arrived
        if ending > forward + logits[0].num_bytes:
            # The last layer's own forward needs more than the head, before there are logits.
            forward = ending
            logits = (no_bytes("the last layer's forward needs more than the logits after it"), logits[1])
        first = waiting + angles + travelling + working
        # When backward reaches the first layer, the other micro-batches still wait, and the embedding's
        # gradient comes: the layer's own activations have gone by then.
        last = waiting + angles + travelling + self.stream - self._newest()
        # In fp32 the logits' gradient is not cast, and so still there when that of the head's input comes.
        uncast = self.stream if self.modules.compute == FP32 else 0
        return StageActivations(
            forward=Term(forward, words),
            head=Term(waiting + angles + edges + travelling + uncast, words),
            first=Term(first, lambda: f"{working_words()} + {words()}"),
            last=Term(last, lambda: f"all but {gib(self._newest())} GiB, which have gone, of {words()}"),
            logits_forward=logits[0],
            logits_backward=logits[1],
        )

    # ---- what waits for backward

    def _in_flight(self) -> tuple[int, Any]:
        """Bytes of all micro-batches in flight, and their words."""
        chunks, layers, recipe = self.in_flight, self.chunk_layers, self.plan.recipe
        held, counted = 0, [0, 0]
        for times, (dense, moe) in zip(chunks, layers, strict=True):
            for is_moe, num_layers in ((False, dense), (True, moe)):
                if not num_layers:
                    continue
                counted[is_moe] += times * num_layers
                held += times * num_layers * self._layer(is_moe, recipe.recompute).saved
        kinds = [(bool(moe), number) for moe, number in enumerate(counted) if number]

        def words() -> str:
            parts = " + ".join(
                f"{count(number, 'layer')} in flight × {count(self.tokens, 'token')} × "
                f"{kib(self._layer(moe, recipe.recompute).saved)} KiB"
                for moe, number in kinds
            )
            return (
                f"{parts} ({' + '.join(map(str, chunks))} micro-batches of each model chunk, "
                f"recompute {recipe.recompute}) · megatron modules, Korthikanti et al. 2022, eq. 2, operator "
                "by operator"
            )

        return self.tokens * held, words

    def _layer(self, moe: bool, recompute: str) -> Layer:
        # Looked up once: what the cache compares is long.
        if (moe, recompute) not in self.layers:
            self.layers[moe, recompute] = layer(self.arch, moe, self.modules, recompute, self.cuts)
        return self.layers[moe, recompute]

    def _angles(self) -> int:
        """Rotary angles of a sequence, in fp32, which all layers and micro-batches share."""
        arch, latent = self.arch, self.arch.latent_attention
        if arch.position_embedding != "rope":
            return 0
        width = latent.qk_rope_head_dim if latent else arch.head_dim
        found: int = ceil_div(self.plan.recipe.seq_len, self.degrees.cp) * width * FP32
        return found

    def _edges(self) -> int:
        """Token ids, the final norm and the head's input."""
        arch = self.arch
        found: int = 0
        if self.stage.is_first:
            micro_batches = self.in_flight[0]
            mask = ceil_div(arch.hidden_size, self.cuts.sequence) if self.modules.dropout else 0
            found += micro_batches * self.tokens * (8 + mask)
        if self.stage.is_last:
            norm = 2 * arch.hidden_size * self.modules.compute + norm_statistics(arch)
            found += ceil_div(self.tokens * norm, self.cuts.sequence)
        return found

    def _travelling(self) -> int:
        """The next input or gradient that has come from another stage already (schedules.py)."""
        degrees = self.degrees
        if degrees.pp == 1:
            return 0
        if not self._alternates():
            return 0
        arrived = 2 if degrees.vpp > 1 else 0 if self.stage.is_first else 1
        return arrived * self.stream

    def _newest(self) -> int:
        """Bytes of the micro-batch whose backward runs, in the model chunk that goes first."""
        dense, moe = self.chunk_layers[-1]
        recompute = self.plan.recipe.recompute
        saved = dense * self._layer(False, recompute).saved if dense else 0
        saved += moe * self._layer(True, recompute).saved if moe else 0
        found: int = self.tokens * saved
        return found

    def _alternates(self) -> bool:
        """Whether backward begins before all micro-batches have gone forward."""
        degrees = self.degrees
        return degrees.pp > 1 and sum(self.in_flight) < self.plan.num_micro_batches * degrees.vpp

    # ---- what backward needs

    def _working(self) -> tuple[int, Any]:
        recompute = self.plan.recipe.recompute
        num_bytes: int = self.tokens * max(layer.working for layer in self._kinds())
        again = " and recomputed" if recompute == "full" else ""
        return num_bytes, lambda: f"{gib(num_bytes)} GiB gradients in flight{again} in one layer"

    def _ending(self) -> int:
        """Beside what is saved, at the end of the forward of the stage's last layer."""
        found: int = self.tokens * self._kinds()[-1].ending
        return found

    def _kinds(self) -> list[Layer]:
        """The stage's kinds of layer; those with experts come last."""
        dense = self.stage.num_layers - self.stage.num_moe_layers
        kinds = ((False, dense), (True, self.stage.num_moe_layers))
        return [self._layer(moe, self.plan.recipe.recompute) for moe, layers in kinds if layers]

    def _logits(self) -> tuple[Term, Term]:
        if not self.stage.is_last:
            nothing = no_bytes("only the last pipeline stage has the head")
            return nothing, nothing
        rows = padded_vocab_size(self.arch.vocab_size, self.degrees.tp) // self.degrees.tp
        each = logits_per_token(rows, "megatron", self.modules.compute)

        def words(num_bytes: int) -> str:
            return (
                f"{count(self.tokens, 'token')} × {rows:,} rows of the padded vocabulary × "
                f"{num_bytes // rows} bytes · vocab-parallel cross entropy: logits, fp32 softmax, gradient"
            )

        return (
            Term(self.tokens * each.forward, lambda: words(each.forward)),
            Term(self.tokens * each.backward, lambda: words(each.backward)),
        )


def chunk_layers(plan: Plan, number: int) -> tuple[tuple[int, int], ...]:
    """(dense layers, layers with routed experts) of each model chunk of a stage, first chunk first.

    Chunk c of stage s is the (c x pp + s)-th part of the model (transformer_layer.py,
    get_transformer_layer_offset).
    """
    arch, degrees, layout = plan.architecture, plan.degrees, plan.layout
    assert isinstance(layout, MegatronLayout)
    num_chunks = degrees.pp * degrees.vpp
    if degrees.pp == 1:
        return ((arch.num_hidden_layers - arch.num_moe_layers, arch.num_moe_layers),)
    embedding, loss = layout.counted_ends(arch.num_hidden_layers, degrees)
    each = (arch.num_hidden_layers + embedding + loss) // num_chunks
    found = []
    for chunk in range(degrees.vpp):
        place = chunk * degrees.pp + number
        start = place * each - (embedding if place else 0)
        stop = (place + 1) * each - embedding - (loss if place == num_chunks - 1 else 0)
        moe = sum(arch.is_moe_layer(index) for index in range(start, stop)) if arch.num_moe_layers else 0
        found.append((stop - start - moe, moe))
    return tuple(found)


def chunks_in_flight(plan: Plan, number: int) -> tuple[int, ...]:
    """Micro-batches of each model chunk that a stage holds when its first backward begins.

    1F1B warms up with pp - 1 - stage of them. Interleaving takes 2 (pp - 1 - stage) + (vpp - 1) pp, pp of one
    chunk before the next chunk's (schedules.py, get_pp_rank_microbatches and get_schedule_table).
    """
    pp, vpp, micro_batches = plan.degrees.pp, plan.degrees.vpp, plan.num_micro_batches
    if vpp == 1:
        return (min(pp - number, micro_batches),)
    held = min(2 * (pp - number - 1) + (vpp - 1) * pp + 1, micro_batches * vpp)
    rounds, rest = divmod(held, pp * vpp)
    return tuple(rounds * pp + min(pp, max(0, rest - chunk * pp)) for chunk in range(vpp))


@lru_cache(maxsize=4096)
def layer(arch: Architecture, moe: bool, modules: Modules, recompute: str, cuts: Cuts) -> Layer:
    """Bytes one token leaves in one layer, and what its backward needs beside them."""
    tensors = megatron_layer(arch, moe, modules)
    everything = _on_rank(tensors, arch, cuts)
    stream = ceil_div(arch.hidden_size * modules.compute, cuts.sequence)
    if moe:
        working, ending = _expert_working(arch, modules, cuts, stream)
    else:
        # What the MLP returns, and its sum with the residual stream.
        working, ending = _dense_working(arch, modules, cuts, stream), 2 * stream
    if modules.attention == "eager":
        scores = _on_rank(core_attention(arch, modules), arch, cuts)
        working = max(working, scores + stream)
    if recompute == "full":
        # The layer is played again; its input is what was kept, its output is new.
        again = everything + max(working, ending - stream)
        return Layer(stream, again, ending + _without_gradient(arch, moe, modules, cuts, stream))
    if recompute == "selective":
        kept = _on_rank(megatron_selective(arch, moe, modules), arch, cuts)
        return Layer(kept, max(working, everything - kept), ending)
    return Layer(everything, working, ending)


def _on_rank(tensors: list[Saved], arch: Architecture, cuts: Cuts) -> int:
    parts = {
        "tp": cuts.tp,
        "key_value_heads": min(cuts.tp, arch.num_key_value_heads),
        "sequence": cuts.sequence,
        "expert_tokens": ceil_div(cuts.tp, cuts.expert_tp),
        "whole": 1,
    }
    if arch.latent_attention is not None:
        parts["key_value_heads"] = cuts.tp
    found: int = sum(ceil_div(tensor.bytes_per_token, parts[tensor.cut_by]) for tensor in tensors)
    return found


def _dense_working(arch: Architecture, modules: Modules, cuts: Cuts, stream: int) -> int:
    """Backward in the MLP: the gradient of its product, then of its branches; what is done with goes."""
    inner: int = ceil_div(arch.intermediate_size * modules.compute, cuts.tp)
    # With sequence parallelism the gradient of the residual stream is gathered for the second product.
    gathered = arch.hidden_size * modules.compute if cuts.sequence > 1 else 0
    masked = stream if modules.dropout else 0
    return stream + masked + max(gathered + inner, branches(arch) * inner)


def _expert_working(arch: Architecture, modules: Modules, cuts: Cuts, stream: int) -> tuple[int, int]:
    """Backward in the experts, and the end of their forward: tokens return by way of several copies.

    Counted in rehearsals.
    """
    experts = arch.mixture_of_experts
    assert experts is not None
    rows = round(experts.num_experts_per_tok * modules.expert_load * arch.hidden_size * modules.compute)
    own: int = ceil_div(rows, cuts.sequence)
    gathered: int = ceil_div(rows, ceil_div(cuts.tp, cuts.expert_tp))
    inner = rows * experts.moe_intermediate_size // arch.hidden_size // cuts.tp
    # Copies before and after they are sorted by rank, scattered over tp, sent over ep, and put back in order.
    ending = 2 * gathered + own * (1 + (gathered > own) + (cuts.ep > 1))
    if cuts.ep * cuts.tp == 1:
        # All experts are here: nothing is sorted or sent.
        return stream + max(own + inner, branches(arch) * inner), own + stream
    return stream + max(2 * gathered, branches(arch) * inner), ending


def _without_gradient(arch: Architecture, moe: bool, modules: Modules, cuts: Cuts, stream: int) -> int:
    """What a forward that saves nothing needs at its fullest beside what every layer's end needs."""
    experts = arch.mixture_of_experts
    if moe and experts is not None:
        rows = round(experts.num_experts_per_tok * modules.expert_load * arch.hidden_size * modules.compute)
        found: int = ceil_div(rows, ceil_div(cuts.tp, cuts.expert_tp)) + stream
        return found
    inner: int = ceil_div(arch.intermediate_size * modules.compute, cuts.tp)
    return (branches(arch) + 1) * inner
