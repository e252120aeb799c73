"""The predicted tier: a framework's training state, plus what all frameworks share, moment by moment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shardscope.memory import overheads
from shardscope.memory.activations import LayerActivations, Modules, layer_activations, modules_of
from shardscope.memory.arithmetic import ceil_div
from shardscope.memory.lora import first_layer
from shardscope.memory.logits import logits_per_token
from shardscope.memory.precision import widths
from shardscope.memory.report import Component, MemoryReport, Moment, Phase, StageMemory, Term, joined, no_bytes
from shardscope.memory.words import count, gib, kib

if TYPE_CHECKING:
    from shardscope.memory.stages import Stage
    from shardscope.memory.state import TrainingState
    from shardscope.plan import Plan


def predict(plan: Plan) -> MemoryReport:
    """The plan's memory, every pipeline stage, from closed formulas."""
    from shardscope.frameworks.registry import frameworks

    model = frameworks[plan.layout.framework].memory_model()
    on_gpu = plan.cluster.gpu.name != "cpu"
    shared = _Shared(plan, on_gpu)
    stages = tuple(
        shared.stage(stage, model.training_state(plan, stage)) for stage in model.stages(plan)
    )
    worst = max(stages, key=lambda stage: stage.peak_bytes)
    low, high = shared.band(worst)
    return MemoryReport(
        by_stage=stages,
        usable_bytes=plan.cluster.usable_bytes_per_gpu,
        low_bytes=low,
        high_bytes=high,
    )


class _Shared:
    """What does not depend on the framework, computed once for all stages of a plan."""

    def __init__(self, plan: Plan, on_gpu: bool) -> None:
        self.plan = plan
        self.on_gpu = on_gpu
        self.modules: Modules = modules_of(plan)
        degrees, recipe = plan.degrees, plan.recipe
        self.tokens = recipe.micro_batch_size * ceil_div(recipe.seq_len, degrees.cp)
        self.splits_sequence = plan.layout.splits_sequence
        self.accumulates = plan.num_micro_batches > 1
        self.runtime = overheads.runtime(on_gpu)

    def layer(self, moe: bool) -> LayerActivations:
        plan = self.plan
        return layer_activations(
            plan.architecture, moe, self.modules, plan.recipe.recompute, plan.degrees.tp, self.splits_sequence
        )

    def stage(self, stage: Stage, state: TrainingState) -> StageMemory:
        """All moments of one stage, in the order of a step."""
        full, last = self._activations(stage)
        logits_forward, logits_backward = self._logits(stage)
        communication = overheads.communication(state.group_sizes, self.on_gpu)
        always: dict[Component, Term] = {
            "parameters": state.parameters,
            "communication": Term(communication.point, lambda: _communication_words(state.group_sizes)),
            "runtime": Term(self.runtime.point, self._runtime_words),
        }
        resting: dict[Component, Term] = {**always, "optimizer": state.optimizer}
        if state.gradients_stay:
            resting["gradients"] = state.gradients
        none_yet = no_bytes("none before backward: freed after the last optimizer step")
        accumulated = state.gradients if self.accumulates or state.gradients_stay else none_yet
        forward: dict[Component, Term] = {**resting, "gradients": accumulated, "activations": full}
        backward: dict[Component, Term] = {**resting, "gradients": state.gradients, "activations": last}
        moments = (
            Moment.of("initialisation", 0.0, always),
            Moment.of("rest", 0.0, resting),
            self._with_gaps(
                "forward", 0.33, {**forward, "logits": logits_forward, "gather_buffers": state.gather_forward}
            ),
            self._with_gaps(
                "backward", 0.34, {**forward, "logits": logits_backward, "gather_buffers": state.gather_forward}
            ),
            self._with_gaps("backward", 0.97, {**backward, "gather_buffers": state.gather_backward}),
            Moment.of(
                "optimizer",
                0.98,
                {
                    **always,
                    "gradients": state.gradients,
                    "optimizer": joined(state.optimizer, state.optimizer_working),
                },
            ),
        )
        return StageMemory(
            stage=stage.index,
            num_layers=stage.num_layers,
            moments=moments,
            host_bytes=state.host_bytes,
            nvme_bytes=state.nvme_bytes,
        )

    def band(self, stage: StageMemory) -> tuple[int, int]:
        """The least and the most that library buffers and the allocator make of a stage's peak."""
        peak = stage.peak
        parts = peak.components
        tensors = stage.peak_bytes - parts["communication"] - parts["runtime"] - parts["fragmentation"]
        gaps = overheads.fragmentation(_churned(peak.components), self.on_gpu)
        scale = parts["communication"]
        low = tensors + self.runtime.low + scale // 4 + gaps.low
        high = tensors + self.runtime.high + 2 * scale + gaps.high
        return low, high

    def _with_gaps(self, phase: Phase, fraction: float, terms: dict[Component, Term]) -> Moment:
        churned = _churned({name: term.num_bytes for name, term in terms.items()})
        gaps = overheads.fragmentation(churned, self.on_gpu)

        def words() -> str:
            return (
                f"{overheads.FRAGMENTATION_PERCENT} % of the {gib(churned)} GiB that a step allocates and frees; "
                f"the band reaches to {overheads.FRAGMENTATION_HIGH_PERCENT} % (assumption, PyTorch caching allocator)"
            )

        return Moment.of(phase, fraction, {**terms, "fragmentation": Term(gaps.point, words)})

    def _activations(self, stage: Stage) -> tuple[Term, Term]:
        """Activations when fullest (end of forward), and when backward is in the stage's first layer."""
        plan, tokens = self.plan, self.tokens
        arch = plan.architecture
        moe_layers = round(stage.num_layers * arch.num_moe_layers / arch.num_hidden_layers)
        dense_layers = stage.num_layers - moe_layers
        dense = self.layer(False) if dense_layers else None
        moe = self.layer(True) if moe_layers else None
        one_micro_batch = tokens * (
            dense_layers * (dense.saved if dense else 0) + moe_layers * (moe.saved if moe else 0)
        )
        edges = tokens * self._edge_bytes(stage)
        num_layers, chunks = in_flight(plan, stage.index)
        chunk = ceil_div(one_micro_batch, num_layers)
        full = chunk * chunks + edges
        largest = max((kind for kind in (dense, moe) if kind), key=lambda kind: kind.saved + kind.working)
        # While backward is in a layer, that layer's own bytes are there beside its gradients; with several
        # micro-batches in flight the others wait.
        last = chunk * (chunks - 1) + tokens * (largest.saved + largest.working)
        weights = self._autocast_copies(stage)

        def words() -> str:
            parts = [
                f"{count(layers, 'layer')} × {count(tokens, 'token')} × ({_layer_words(kind, plan.recipe.recompute)})"
                for layers, kind in ((dense_layers, dense), (moe_layers, moe))
                if kind
            ]
            flight = f" × {chunks / num_layers:g} micro-batches in flight (1F1B)" if chunks != num_layers else ""
            casts = f" + {gib(weights)} GiB half-precision copies of weights (autocast)" if weights else ""
            return (
                " + ".join(parts)
                + flight
                + f" + {gib(edges)} GiB at the ends{casts} · {self.modules.kernels} modules, "
                + "Korthikanti et al. 2022, eq. 2, operator by operator"
            )

        def last_words() -> str:
            waiting = f"{gib(chunk * (chunks - 1))} GiB waiting micro-batches + " if chunks > 1 else ""
            return (
                f"{waiting}{count(tokens, 'token')} × ({kib(largest.saved)} KiB one layer's own + "
                f"{kib(largest.working)} KiB gradients in flight and recomputed)"
            )

        return Term(full + weights, words), Term(last, last_words)

    def _edge_bytes(self, stage: Stage) -> int:
        """Bytes a token leaves outside the decoder layers: token ids, and the final norm with the head's input."""
        arch, modules = self.plan.architecture, self.modules
        cut = self.plan.degrees.tp if self.splits_sequence else 1
        found = 8 if stage.is_first else 0
        if stage.is_last:
            found += ceil_div(arch.hidden_size * (4 + 2 * modules.compute) + 4, cut)
        return found

    def _autocast_copies(self, stage: Stage) -> int:
        """Half-precision copies of the matrices, which autocast keeps until backward has used them."""
        if not self.modules.autocast:
            return 0
        head = 0
        if stage.is_last:
            head = self.plan.architecture.embedding_parameters
        return (stage.layers + stage.experts + head) * self.modules.compute

    def _logits(self, stage: Stage) -> tuple[Term, Term]:
        plan = self.plan
        if not stage.is_last:
            nothing = no_bytes("only the last pipeline stage has the head")
            return nothing, nothing
        vocab = ceil_div(plan.architecture.vocab_size, plan.degrees.tp)
        per_token = logits_per_token(vocab, self.modules.kernels, self.modules.compute)
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

    def _runtime_words(self) -> str:
        if self.on_gpu:
            return "CUDA context and cuBLAS workspace, 300 to 700 MiB seen (pytorch#107667, #28113)"
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


def _churned(components: Mapping[str, int]) -> int:
    """Bytes that a step allocates and frees again."""
    return sum(components.get(name, 0) for name in ("activations", "logits", "gather_buffers"))


def _layer_words(layer: LayerActivations, recompute: str) -> str:
    if recompute == "none":
        return (
            f"{kib(layer.norms)} KiB norms and residuals + {kib(layer.attention)} KiB attention "
            f"+ {kib(layer.mlp)} KiB MLP"
        )
    kept = "layer input" if recompute == "full" else "matrix products and attention"
    return f"{kib(layer.saved)} KiB kept with {recompute} recomputation: {kept}"


def _communication_words(group_sizes: tuple[int, ...]) -> str:
    groups = [size for size in group_sizes if size > 1]
    if not groups:
        return "one rank needs no communicator"
    sizes = ", ".join(str(size) for size in groups)
    return f"{count(len(groups), 'communicator')} of {sizes} ranks, 544 or 688 MiB each (NVIDIA/nccl#964)"
