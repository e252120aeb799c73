"""The predicted tier: a framework's training state, plus what all frameworks share, moment by moment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from shardscope.memory import overheads
from shardscope.memory.activations import (
    LayerActivations,
    cast_weights,
    edge_activations,
    layer_activations,
    modules_of,
    unsaved_at_start,
)
from shardscope.memory.arithmetic import ceil_div
from shardscope.memory.backward import Backward, final_norm, layer_backward
from shardscope.memory.float8 import layer_working
from shardscope.memory.head import LOSS_CHUNK_TOKENS, chunked, fused, loss_in_force
from shardscope.memory.logits import logits_per_token
from shardscope.memory.quantization import largest_matrix
from shardscope.memory.report import (
    Component,
    MemoryReport,
    Moment,
    Phase,
    StageMemory,
    Term,
    joined,
    no_bytes,
)
from shardscope.memory.words import count, gib, kib

if TYPE_CHECKING:
    from shardscope.memory.stages import Stage
    from shardscope.memory.state import StepActivations, TrainingState
    from shardscope.plan import Plan

_CHURNED: tuple[Component, ...] = ("activations", "logits", "gather_buffers")


def predict(plan: Plan) -> MemoryReport:
    """The plan's memory, every pipeline stage, from closed formulas."""
    from shardscope.frameworks.registry import frameworks

    model = frameworks[plan.layout.framework].memory_model()
    shared = _Shared(plan)
    states: dict[tuple[int, ...], TrainingState] = {}
    by_stage: list[StageMemory] = []
    fullest: list[tuple[StageMemory, TrainingState]] = []
    shapes: list[tuple[int, ...]] = []
    for stage in model.stages(plan):
        # Everything but its number, by which stages differ in micro-batches in flight only.
        shape = stage[1:]
        is_new = shape not in states
        if is_new:
            states[shape] = model.training_state(plan, stage)
        by_stage.append(shared.stage(stage, states[shape]))
        if is_new and not any(_holds_at_least(other, shape) for other in shapes):
            # Of stages of one shape the first has most in flight, so none of the others holds more.
            fullest.append((by_stage[-1], states[shape]))
            shapes.append(shape)
    return MemoryReport(
        by_stage=tuple(by_stage),
        worst_stage=max((stage for stage, _ in fullest), key=lambda stage: stage.peak_bytes),
        usable_bytes=plan.cluster.usable_bytes_per_gpu,
        find_band=lambda: shared.band(fullest),
    )


def _holds_at_least(earlier: tuple[int, ...], later: tuple[int, ...]) -> bool:
    """Whether an earlier stage has no fewer layers and weights of any kind, nor lacks the head, than a later.

    It has no fewer micro-batches in flight either, so that the later one's peak need not be looked for.
    """
    return all(mine >= theirs for mine, theirs in zip(earlier, later, strict=True))


class _Activations(NamedTuple):
    """Activations when forward has ended, while the head, its first and its last layer go backward."""

    forward: Term
    head: Term
    first: Term
    last: Term


class _Shared:
    """What does not depend on the framework, computed once for all stages of a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.on_gpu = plan.on_gpu
        self.modules = modules_of(plan)
        degrees, recipe = plan.degrees, plan.recipe
        self.tokens = recipe.micro_batch_size * ceil_div(recipe.seq_len, degrees.cp)
        self.splits_sequence = plan.layout.splits_sequence
        self.accumulates = plan.num_micro_batches > 1
        self.runtime = overheads.runtime(plan.on_gpu)

    def layer(self, moe: bool, recompute: str) -> LayerActivations:
        plan = self.plan
        return layer_activations(
            plan.architecture, moe, self.modules, recompute, plan.degrees.tp, self.splits_sequence
        )

    def kinds(self, stage: Stage) -> list[tuple[int, LayerActivations, str]]:
        """Layers of each kind on the stage, what one leaves, and how it is recomputed."""
        recompute: str = self.plan.recipe.recompute
        plain = self._not_recomputed(stage) if recompute != "none" else []
        found = [
            (layers - untouched, self.layer(moe, recompute), recompute)
            for (moe, layers), (_, untouched) in zip(_kinds(stage), plain or _kinds(None), strict=True)
            if layers > untouched
        ]
        return found + [(layers, self.layer(moe, "none"), "none") for moe, layers in plain if layers]

    def _not_recomputed(self, stage: Stage) -> list[tuple[bool, int]]:
        """Layers of each kind that keep their activations although others are recomputed or offloaded.

        Every ``recompute_interval``-th layer of the stage is recomputed, its first one included; dense layers
        come before those with experts.
        """
        interval = self.plan.recipe.recompute_interval
        dense = stage.num_layers - stage.num_moe_layers
        chosen_dense = ceil_div(dense, interval)
        chosen_moe = ceil_div(stage.num_layers, interval) - chosen_dense
        return [(False, dense - chosen_dense), (True, stage.num_moe_layers - chosen_moe)]

    def stage(self, stage: Stage, state: TrainingState) -> StageMemory:
        """One stage, whose moments are computed when somebody looks."""
        return StageMemory(
            stage=stage.number,
            num_layers=stage.num_layers,
            find_moments=lambda: self.moments(stage, state),
            host_bytes=state.host_bytes + self._offloaded(stage),
            nvme_bytes=state.nvme_bytes,
        )

    def moments(self, stage: Stage, state: TrainingState) -> tuple[Moment, ...]:
        """All moments of one stage, in the order of a step."""
        activations: _Activations | StepActivations
        if state.find_activations is not None:
            activations = own = state.find_activations(stage.number, self.modules)
            logits_forward, logits_backward = own.logits_forward, own.logits_backward
        else:
            activations = self._activations(stage)
            logits_forward, logits_backward = self._logits(stage)
        communication = overheads.communication(state.group_sizes, self.on_gpu)
        always: dict[Component, Term] = {
            "parameters": state.parameters,
            "communication": Term(communication.point, lambda: _communication_words(state.group_sizes)),
            "runtime": Term(self.runtime.point, self._runtime_words),
        }
        if state.gradients_stay:
            always["gradients"] = state.gradients
        if state.gather_rest is not None:
            always["gather_buffers"] = state.gather_rest
        resting: dict[Component, Term] = {**always, "optimizer": state.optimizer}
        none_yet = no_bytes("none before backward: freed after the last optimizer step")
        accumulated = none_yet
        if self.accumulates:
            accumulated = state.gradients_waiting or state.gradients
        elif state.gradients_stay:
            accumulated = state.gradients
        busy: dict[Component, Term] = {**resting, "gradients": accumulated}
        forward: dict[Component, Term] = {**busy, "gather_buffers": state.gather_forward}
        backward: dict[Component, Term] = {**busy, "gather_buffers": state.gather_backward}
        first: dict[Component, Term] = {**busy, "gather_buffers": state.gather_layer or state.gather_backward}
        if state.find_backward is not None:
            middle = [
                self._with_gaps(phase, fraction, {**busy, **terms})
                for phase, fraction, terms in self._backward(stage, state, logits_backward)
            ]
        else:
            last: dict[Component, Term] = {**backward, "gradients": state.gradients}
            middle = [
                self._with_gaps(
                    "backward", 0.34, {**forward, "activations": activations.head, "logits": logits_backward}
                ),
                self._with_gaps("backward", 0.36, {**first, "activations": activations.first}),
                self._with_gaps("backward", 0.97, {**last, "activations": activations.last}),
            ]
        found = (
            Moment.of("initialisation", 0.0, {**always, **state.initialisation}),
            Moment.of("rest", 0.0, resting),
            self._with_gaps(
                "forward", 0.33, {**forward, "activations": activations.forward, "logits": logits_forward}
            ),
            *middle,
            Moment.of(
                "optimizer",
                0.98,
                {
                    **always,
                    "gradients": state.gradients_reduced or state.gradients,
                    "optimizer": joined(state.optimizer, state.optimizer_working),
                },
            ),
        )
        if state.find_backward is None:
            return found
        return tuple(sorted(found, key=lambda moment: moment.fraction))

    def band(self, stages: list[tuple[StageMemory, TrainingState]]) -> tuple[int, int]:
        """The peak if library buffers and the allocator take their least, and if they take their most.

        The peak may then be at another moment: what backward frees leaves gaps, the optimizer's step none.
        """
        low = high = 0
        for stage, state in stages:
            communication = overheads.communication(state.group_sizes, self.on_gpu)
            for moment in stage.moments:
                lost = moment.terms.get("fragmentation", no_bytes("this moment has no gaps")).num_bytes
                gaps = overheads.fragmentation(_churned(moment.terms), self.on_gpu)._replace(point=lost)
                bands = (communication, self.runtime, gaps)
                tensors = moment.total - sum(band.point for band in bands)
                low = max(low, tensors + sum(band.low for band in bands))
                high = max(high, tensors + sum(band.high for band in bands))
        return low, high

    def _with_gaps(self, phase: Phase, fraction: float, terms: dict[Component, Term]) -> Moment:
        """The moment of ``terms``, to which what the allocator loses is added."""
        churned = _churned(terms)
        lost = overheads.lost_to_gaps(churned) if self.on_gpu else 0

        def words() -> str:
            return (
                f"{overheads.FRAGMENTATION_PERCENT} % of the {gib(churned)} GiB that a step allocates and "
                f"frees; the band reaches to {overheads.FRAGMENTATION_HIGH_PERCENT} % (assumption, PyTorch "
                "caching allocator)"
            )

        terms["fragmentation"] = Term(lost, words)
        return Moment.of(phase, fraction, terms)

    def _backward(
        self, stage: Stage, state: TrainingState, logits: Term
    ) -> Iterator[tuple[Phase, float, dict[Component, Term]]]:
        """Backward's instants as the framework tells them, each with its own components."""
        if state.find_backward is None:
            return
        arch, tokens = self.plan.architecture, self.tokens
        kinds = self.kinds(stage)
        # Layers with experts come last, and so first in backward.
        has_experts = stage.num_moe_layers > 0
        layer = max((kind for _, kind, _ in kinds), key=lambda kind: kind.saved + kind.recomputed)
        own = layer_backward(arch, has_experts, self.modules)
        tp, cut = self.plan.degrees.tp, self.plan.degrees.tp if self.splits_sequence else 1
        num_chunks, chunks = in_flight(self.plan, stage.number)
        saved = ceil_div(tokens * sum(layers * kind.saved for layers, kind, _ in kinds), num_chunks) * chunks
        shape = Backward(
            layers=saved + tokens * self._start_bytes(stage),
            edges=tokens * (self._edge_bytes(stage) - self._start_bytes(stage)),
            cast=self._autocast_copies(stage)[1],
            saved=tokens * layer.saved,
            inside=max(
                tokens * (ceil_div(own.inside, tp) + layer.recomputed) + self._dequantised(stage),
                self._float8(has_experts)
                and tokens * (own.stream + layer.recomputed) + self._float8(has_experts),
            ),
            later=tokens * (ceil_div(own.later, tp) + layer.recomputed) + self._dequantised(stage),
            earlier=tokens * (ceil_div(own.earlier, tp) + layer.recomputed) + self._dequantised(stage),
            stream=tokens * ceil_div(own.stream, cut),
            norm=tokens * ceil_div(final_norm(arch, self.modules), cut) * stage.is_last,
        )
        for peak in state.find_backward(shape):
            terms: dict[Component, Term] = {
                "activations": peak.activations,
                "gather_buffers": peak.gather,
                "gradients": peak.gradients,
            }
            if peak.logits:
                terms["logits"] = logits
            yield peak.phase, peak.fraction, terms

    def _activations(self, stage: Stage) -> _Activations:
        """Activations at the moments of a step at which they can be fullest."""
        tokens = self.tokens
        kinds = self.kinds(stage)
        num_chunks, chunks = in_flight(self.plan, stage.number)
        chunk = ceil_div(tokens * sum(layers * layer.saved for layers, layer, _ in kinds), num_chunks)
        edges = tokens * self._edge_bytes(stage)
        full = chunk * chunks + edges
        busiest = max((layer for _, layer, _ in kinds), key=lambda layer: layer.saved + layer.working)
        working = tokens * busiest.working + self._dequantised(stage)
        first = full + self._first_working(stage, kinds) + self._dequantised(stage)
        # While backward is in the last of its layers, other micro-batches in flight still wait.
        waiting = chunk * (chunks - 1)
        cast, cast_again = self._autocast_copies(stage)

        def words() -> str:
            parts = " + ".join(
                f"{count(layers, 'layer')} × {count(tokens, 'token')} × ({_layer_words(layer, recompute)})"
                for layers, layer, recompute in kinds
            )
            flight = (
                f" × {chunks / num_chunks:g} micro-batches in flight (1F1B)" if chunks != num_chunks else ""
            )
            return (
                f"{parts}{flight} + {gib(edges)} GiB at the ends · {self.modules.kernels} modules, "
                "Korthikanti et al. 2022, eq. 2, operator by operator"
            )

        def with_casts(num_bytes: int) -> Term:
            casts = (
                f"{gib(num_bytes)} GiB half-precision copies of weights (autocast) + " if num_bytes else ""
            )
            return Term(full + num_bytes, lambda: casts + words())

        def last_words() -> str:
            others = f"{gib(waiting)} GiB waiting micro-batches + " if waiting else ""
            return (
                f"{others}{count(tokens, 'token')} × ({kib(busiest.saved)} KiB one layer's own + "
                f"{kib(busiest.working)} KiB gradients in flight and recomputed)"
            )

        return _Activations(
            forward=with_casts(cast),
            head=with_casts(cast_again),
            first=Term(
                first + cast_again,
                lambda: (
                    f"{gib(first - full)} GiB gradients in flight and recomputed in one layer + {words()}"
                ),
            ),
            last=Term(waiting + tokens * busiest.saved + working, last_words),
        )

    def _float8(self, moe: bool) -> int:
        """Casts to 8 bits while one product goes backward."""
        if self.plan.recipe.precision != "fp8-mixed":
            return 0
        return layer_working(self.plan.architecture, moe, self.tokens)

    def _dequantised(self, stage: Stage) -> int:
        """The largest quantised matrix made whole, in the type of products (bitsandbytes, MatMul4Bit)."""
        if not self.modules.quantized:
            return 0
        return self.modules.compute * largest_matrix(self.plan.architecture, stage)

    def _first_working(self, stage: Stage, kinds: list[tuple[int, LayerActivations, str]]) -> int:
        """The most that backward adds while nearly all activations are there.

        With an interval the stage's last layers may keep theirs: they are gone when a layer is recomputed.
        """
        interval = self.plan.recipe.recompute_interval
        if interval == 1:
            busiest = max((layer for _, layer, _ in kinds), key=lambda layer: layer.saved + layer.working)
            return int(self.tokens * busiest.working)
        tail = (stage.num_layers - 1) % interval
        plain = [layer for _, layer, how in kinds if how == "none"]
        gone = tail * max((layer.saved for layer in plain), default=0)
        most = max(layer.working - (gone if how != "none" else 0) for _, layer, how in kinds)
        return int(self.tokens * most)

    def _offloaded(self, stage: Stage) -> int:
        """Host bytes of the activations that wait there, of all micro-batches in flight."""
        if self.plan.recipe.recompute != "offload":
            return 0
        num_chunks, chunks = in_flight(self.plan, stage.number)
        away = sum(layers * layer.offloaded for layers, layer, _ in self.kinds(stage))
        found: int = ceil_div(self.tokens * away, num_chunks) * chunks
        return found

    def _start_bytes(self, stage: Stage) -> int:
        """Bytes a token leaves in front of the layers: its id, less what the first one need not save."""
        if not stage.is_first:
            return 0
        if self.plan.recipe.recompute != "none":
            return 8
        arch, degrees = self.plan.architecture, self.plan.degrees
        return 8 - unsaved_at_start(arch, self.modules, degrees.tp, self.splits_sequence)

    def _edge_bytes(self, stage: Stage) -> int:
        """Bytes a token leaves outside the layers: token ids, and the final norm with the head's input."""
        cut = self.plan.degrees.tp if self.splits_sequence else 1
        found = self._start_bytes(stage)
        if stage.is_last:
            found += ceil_div(
                edge_activations(self.plan.architecture, self.modules, loss_in_force(self.plan)), cut
            )
        return found

    def _autocast_copies(self, stage: Stage) -> tuple[int, int]:
        """Half-precision copies of matrices at the end of forward, and as backward starts.

        Autocast caches copies of trained weights until its block ends, and autograd holds all that it needs;
        recomputation gives them up layer by layer.
        """
        if not self.modules.autocast:
            return 0, 0
        arch, moe_layers = self.plan.architecture, stage.num_moe_layers
        dense, moe = (
            layers * cast_weights(arch, is_moe, self.modules) if layers else 0
            for is_moe, layers in ((False, stage.num_layers - moe_layers), (True, moe_layers))
        )
        head = arch.embedding_parameters * self.modules.compute if stage.is_last else 0
        everything = dense + moe + head
        if self.plan.recipe.recompute == "none":
            return everything, everything
        kept = head + sum(
            layers * cast_weights(arch, is_moe, self.modules)
            for is_moe, layers in self._not_recomputed(stage)
            if layers
        )
        return (everything if self.modules.trained else kept), kept

    def _logits(self, stage: Stage) -> tuple[Term, Term]:
        plan = self.plan
        if not stage.is_last:
            nothing = no_bytes("only the last pipeline stage has the head")
            return nothing, nothing
        vocab = ceil_div(plan.architecture.vocab_size, plan.degrees.tp)
        loss = loss_in_force(plan)
        if loss != "full":
            return self._sparing_head(loss, vocab)
        capped = plan.architecture.model_type == "gemma2"
        per_token = logits_per_token(vocab, self.modules.kernels, self.modules.compute, capped)
        tokens = self.tokens

        def words(each: int, when: str) -> str:
            return (
                f"{count(tokens, 'token')} × {vocab:,} vocabulary × {each // vocab} bytes {when} "
                f"· {self.modules.kernels} loss: logits, fp32 copies, gradient"
            )

        return (
            Term(tokens * per_token.forward, lambda: words(per_token.forward, "at the end of forward")),
            Term(tokens * per_token.backward, lambda: words(per_token.backward, "as backward starts")),
        )

    def _sparing_head(self, loss: str, vocab: int) -> tuple[Term, Term]:
        """The head's memory where logits never exist for all tokens at once."""
        formula = fused if loss == "fused" else chunked
        found = formula(self.tokens, vocab, self.plan.architecture.hidden_size, self.modules)
        source = {
            "fused": "gradients of the head's input and weight, and a chunk of logits (liger-kernel 0.8)",
            "chunked": f"logits of {LOSS_CHUNK_TOKENS:,} tokens at a time, computed again in backward",
        }[loss]

        def words() -> str:
            return f"{count(self.tokens, 'token')}, {vocab:,} vocabulary · {source}"

        return Term(found.forward, words), Term(found.backward, words)

    def _runtime_words(self) -> str:
        if self.on_gpu:
            return "CUDA context, kernels and cuBLAS workspace, 274 to 1,008 MiB seen (pytorch#86509, #28394)"
        return "resident Python, torch and transformers of one CPU rank, measured by our own runs"


def in_flight(plan: Plan, stage: int) -> tuple[int, int]:
    """(model chunks of a stage, chunk activations that it holds at once).

    1F1B holds pp - stage micro-batches; interleaving more, in chunks of a vpp-th (Narayanan et al. 2021,
    section 2.2; Megatron's warm-up count).
    """
    pp, vpp, micro_batches = plan.degrees.pp, plan.degrees.vpp, plan.num_micro_batches
    if pp == 1:
        return 1, 1
    if vpp == 1:
        return 1, min(pp - stage, micro_batches)
    return vpp, min(2 * (pp - stage - 1) + (vpp - 1) * pp + 1, micro_batches * vpp)


def _kinds(stage: Stage | None) -> list[tuple[bool, int]]:
    """(with experts, layers of that kind) of a stage; none of either for no stage."""
    if stage is None:
        return [(False, 0), (True, 0)]
    return [(False, stage.num_layers - stage.num_moe_layers), (True, stage.num_moe_layers)]


def _churned(terms: Mapping[Component, Term]) -> int:
    """Bytes that a step allocates and frees again."""
    churned = 0
    for name in _CHURNED:
        if name in terms:
            churned += terms[name][0]
    return churned


def _layer_words(layer: LayerActivations, recompute: str) -> str:
    if recompute == "none":
        return (
            f"{kib(layer.norms)} KiB norms and residuals + {kib(layer.attention)} KiB attention "
            f"+ {kib(layer.mlp)} KiB MLP"
        )
    if recompute == "offload":
        return f"{kib(layer.offloaded)} KiB in host memory"
    kept = "layer input" if recompute == "full" else "matrix products and attention"
    return f"{kib(layer.saved)} KiB kept with {recompute} recomputation: {kept}"


def _communication_words(group_sizes: tuple[int, ...]) -> str:
    groups = [size for size in group_sizes if size > 1]
    if not groups:
        return "one rank needs no communicator"
    sizes = ", ".join(str(size) for size in groups)
    world = " and one of all" if overheads.has_world_group(group_sizes) else ""
    return (
        f"{count(len(groups), 'communicator')} of {sizes} ranks{world}, 544 or 688 MiB each (NVIDIA/nccl#964)"
    )
