"""Peak candidates of an FSDP2 step: all-gathered groups and unreduced gradients, layer by layer.

Source: ``FSDPParamGroup`` (torch 2.13, _fully_shard/_fsdp_param_group.py and _fsdp_collectives.py), method by
method:

- ``wait_for_unshard``: copies the parameters out of the all-gather's flat output. In forward it frees the
  previous group's output, not its own, whose copy-out may overlap with the next all-gather; in backward its
  own.
- ``reshard``: frees a layer's parameters after its forward, as ``reshard_after_forward`` says.
- ``pre_backward``: waits for this layer's all-gather, then starts that of the layer before it in the model.
- ``post_backward``: frees the parameters, copies unsharded gradients into the reduce-scatter's input and then
  frees them. The input stays alive until the next layer's ``post_backward``.

The root group (embedding, final norm, head) is all-gathered from the start of forward to the end of backward.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from shardscope.core.number_format import format_gib
from shardscope.core.ops import maximum, pick_largest_row, where
from shardscope.core.precision import widths
from shardscope.frameworks.fsdp2.layout import get_layout
from shardscope.frameworks.fsdp2.memory import explanations
from shardscope.memory.report import Term, sum_parts
from shardscope.memory.state.training_state import PeakCandidate, PeakTerms

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.frameworks.fsdp2.memory.groups import GroupBuffers, StageGroups
    from shardscope.frameworks.fsdp2.memory.pipeline_buffers import PipelineBuffers
    from shardscope.memory.activations.layer_order import StageLayer
    from shardscope.memory.activations.stage_activations import StageBackward
    from shardscope.memory.report import Phase
    from shardscope.memory.state.stages import Stage


def compute_gathered_at_loss(
    plan: Plan, stage: Stage, groups: StageGroups, pipeline: PipelineBuffers | None
) -> Term:
    """Return all buffers of FSDP2's collectives between the last layer's forward and the loss's backward.

    ``pipeline``: the stage's buffers with pp > 1, which are allocated then, too; None without stages.
    """
    # The last layer's all-gather has no next one in forward that would free its flat output. Only the root's
    # post-forward does (torch 2.13, _fsdp_state.py, _post_forward). The model computes its loss inside of the
    # root, before that; a pipeline schedule computes it outside, after that.
    loss_is_in_root = plan.degrees.pp == 1
    last_output = loss_is_in_root * groups.last.all_gather_output
    # Parameters that reshard_after_forward leaves all-gathered: of all layers, for all had their forward.
    kept_parameters = groups.all_layers.kept_after_forward
    # No layer of this micro-batch has reduced yet: the last reduce-scatter is the previous micro-batch's.
    previous_input = groups.previous_reduce_scatter_input

    def explain() -> str:
        parts = [
            f"{format_gib(groups.root)} GiB root group (embedding, final norm, head)",
            f"{format_gib(last_output)} GiB last all-gather",
        ]
        if kept_parameters:
            reshard = get_layout(plan).reshard_after_forward
            parts.append(
                f"{format_gib(kept_parameters)} GiB layers kept after forward "
                f"(reshard_after_forward={reshard})"
            )
        if previous_input:
            parts.append(f"{format_gib(previous_input)} GiB reduce-scatter input of the previous micro-batch")
        return " + ".join(parts) + ("" if pipeline is None else pipeline.explain())

    in_pipeline = 0 if pipeline is None else pipeline.allocated
    return Term(groups.root + last_output + kept_parameters + previous_input + in_pipeline, explain)


class StepPeaks:
    """Peak candidates of the step's last micro-batch on one rank."""

    def __init__(
        self, plan: Plan, stage: Stage, backward: StageBackward, groups: StageGroups, trained: int
    ) -> None:
        """``trained``: bytes of this rank's gradient shards, 0 if they are offloaded."""
        self.stage, self.backward, self.groups, self.trained = stage, backward, groups, trained
        self.keeps_all_gathered = get_layout(plan).reshard_after_forward is False
        """Whether layers stay all-gathered until their backward is done."""
        self.accumulates = plan.num_micro_batches > 1
        self.allocates_output = self.accumulates | (trained == 0)
        """Whether a reduce-scatter's output is allocated besides the gradients: it is added to them, or moved
        to the host."""
        width = widths[plan.recipe.precision]
        self.compute, self.original = width.compute, width.original
        # Autograd holds a tied head's gradient until the embedding's exists: it is not yet in ``.grad``.
        is_tied = plan.architecture.tie_word_embeddings
        self.tied_head_gradient = groups.head_gradient if is_tied else 0
        self.head_gradient = 0 if is_tied else groups.head_gradient
        self.received, self.sent, self.unreduced = 0, 0, 0
        """Receive buffers, sent hidden states and unreduced gradients of a pipeline; 0 without stages."""
        # Sums over all layers of the stage, the root group excluded.
        self.all_layers = groups.all_layers
        self.no_gradients = self._sum_reduced(self.all_layers.gradient_shard)

    def list_candidates(self) -> list[PeakCandidate]:
        """Return the candidates.

        They cover the layers in forward, the loss, the final norm, the layers in backward, the embedding and
        the reduce-scatters.
        """
        order = self.backward.layer_order
        candidates: list[PeakCandidate] = []
        # Saved tensors only grow in forward, so the last layer of each kind has that kind's maximum.
        for layer in order.find_last_layers(self.backward.saved_by_layers):
            candidates += self._list_in_forward(layer)
        # The maximum inside of a layer is the same for all layers of a kind: compute it once.
        peaks: dict[int, tuple[int, int]] = {}
        for layer in order.find_peak_layers(self.backward.saved_by_layers, self._compute_growth):
            kind = id(layer.kind)
            if kind not in peaks:
                peaks[kind] = self._find_layer_peak(layer)
            candidates += self._list_in_backward(layer, *peaks[kind])
        return [*candidates, self._build_first(), *self._list_loss_and_norm(), *self._list_root()]

    # ---- Gradient shards ----

    def _compute_growth(self, moe: bool) -> int:
        """Return the bytes allocated minus the bytes freed by each layer whose backward is done."""
        group = self.groups.experts if moe else self.groups.dense
        # With accumulation the reduce-scatter's output is added to the shard of earlier micro-batches.
        return where(self.accumulates, 0, group.gradient_shard) - group.kept_after_forward

    def _sum_reduced(self, unreduced_shards: int) -> int:
        """Return the gradient shards that are reduced so far. Bytes.

        ``unreduced_shards`` is the size of the gradient shards of the layers that are not reduced yet.
        """
        # Offloaded gradients (trained == 0) are on the host as soon as they are reduced.
        reduced = (self.trained > 0) * (self.all_layers.gradient_shard - unreduced_shards)
        # In the last of several micro-batches all gradients exist since the first one.
        return where(self.accumulates, self.trained, reduced)

    # ---- Forward and loss ----

    def _build_first(self) -> PeakCandidate:
        """Return the candidate at the first layer's all-gather, where the root's output is not freed yet."""
        groups, first = self.groups, self.groups.first
        # In the order of explanations.FIRST_ALL_GATHER.gathered, as in all candidates below.
        gathered = (
            groups.root,
            groups.root_all_gather_output,
            self.received,
            groups.previous_reduce_scatter_input,
            first.parameters,
            first.all_gather_output,
        )
        # The embedding's output has the size of the residual stream's gradient.
        activations = (self.backward.stream_gradient,)
        return self._build_candidate(
            0.02, activations, gathered, self.no_gradients, explanations.FIRST_ALL_GATHER, phase="forward"
        )

    def _list_in_forward(self, layer: StageLayer) -> list[PeakCandidate]:
        """Return the candidates of one layer's forward: during its all-gather and during its compute."""
        groups, position = self.groups, layer.position
        group, previous, before = groups.get_layer(position)
        fraction = 0.02 + 0.3 * (position + 1) / self.stage.num_layers
        gathered = (
            groups.root,
            0,
            self.received,
            before.kept_after_forward,
            groups.previous_reduce_scatter_input,
            group.parameters,
            group.all_gather_output,
        )
        # The previous group's flat output is alive until this group's wait_for_unshard.
        previous_output = where(position > 0, previous.all_gather_output, groups.root_all_gather_output)
        # One rank has no all-gather output: it casts the parameters one by one.
        casts = (group.all_gather_output == 0) * group.all_gather_temporaries
        saved = (layer.saved_before, self.sent)
        return [
            # At the copy-out of this layer's parameters, then inside of its forward.
            self._build_candidate(
                fraction - 0.01,
                saved,
                (*gathered, previous_output, casts),
                self.no_gradients,
                explanations.BEFORE_FORWARD,
                phase="forward",
            ),
            self._build_candidate(
                fraction,
                (*saved, layer.kind.forward),
                gathered,
                self.no_gradients,
                explanations.IN_FORWARD,
                phase="forward",
            ),
        ]

    def _list_loss_and_norm(self) -> list[PeakCandidate]:
        """Return the candidates in the backward of the loss and of the final norm."""
        backward, groups = self.backward, self.groups
        saved = (backward.saved_by_layers, backward.saved_by_head, backward.weight_casts, 0)
        gathered = (
            groups.root,
            0,
            0,
            self.all_layers.kept_after_forward,
            groups.previous_reduce_scatter_input,
        )
        # The root's pre_backward, before the loss's backward, has started the last layer's all-gather.
        prefetched = self._get_last_output()
        in_norm = (*saved, backward.in_final_norm, self.tied_head_gradient)
        return [
            self._build_candidate(
                0.34,
                saved,
                (*gathered, prefetched),
                self.no_gradients,
                explanations.AT_LOSS,
                backward.logits,
            ),
            self._build_candidate(
                0.35,
                in_norm,
                (*gathered, self.head_gradient, prefetched),
                self.no_gradients,
                explanations.IN_NORM,
            ),
        ]

    def _get_last_output(self) -> int:
        """Return the output of the last layer's all-gather; 0 if the layer is all-gathered anyway."""
        if self.keeps_all_gathered:
            return 0
        return self.groups.last.all_gather_output

    # ---- Layers in backward ----

    def _list_in_backward(
        self, layer: StageLayer, peak_activations: int, weights_with_gradient: int
    ) -> list[PeakCandidate]:
        """Return the candidates of one layer's backward.

        They are before it starts, at its own maximum (:meth:`_find_layer_peak`), and after it with its
        gradients unsharded.
        """
        groups, backward, position = self.groups, self.backward, layer.position
        num_layers = self.stage.num_layers
        group, next_group, before = groups.get_layer(position)
        fraction = 0.36 + 0.6 * (num_layers - 1 - position) / num_layers
        saved = (layer.saved_before, self.tied_head_gradient, 0)
        around_layer = (groups.root, 0, 0, self.head_gradient, before.kept_after_forward, 0)
        # The reduce-scatter before this layer's is that of the layer after it; before the last layer's it is
        # the previous micro-batch's.
        previous_input = where(
            position + 1 < num_layers,
            groups.get_layer(position + 1).own.reduce_scatter_input,
            groups.previous_reduce_scatter_input,
        )
        with_layer = (*around_layer, group.parameters, previous_input)
        prefetched, pending = self._compute_all_gathers(group, next_group)
        unsharded = self.compute * layer.kind.weights
        # foreach_reduce has two maxima: the unsharded gradients with the reduce-scatter's input, into which
        # they are copied; then, when they are freed, its input with its output. Take the larger one.
        is_reduced = where(group.gradient_shard > unsharded, 1, 0)
        output = self.allocates_output * group.gradient_shard
        unreduced = before.gradient_shard
        before_reduction = self._sum_reduced(unreduced + group.gradient_shard)
        return [
            # At pre_backward's all-gathers.
            self._build_candidate(
                fraction - 0.005,
                (*saved, layer.kind.saved, backward.stream_gradient),
                (*with_layer, pending),
                before_reduction,
                explanations.BEFORE_LAYER,
            ),
            self._build_candidate(
                fraction,
                (*saved, peak_activations),
                (*with_layer, prefetched, self.compute * weights_with_gradient),
                before_reduction,
                explanations.IN_LAYER,
            ),
            # post_backward has freed this layer's parameters and the previous input.
            self._build_candidate(
                fraction + 0.01,
                (*saved, 2 * backward.stream_gradient),
                (
                    *around_layer,
                    prefetched,
                    group.reduce_scatter_input,
                    where(is_reduced > 0, output, unsharded),
                ),
                self._sum_reduced(unreduced + (1 - is_reduced) * group.gradient_shard),
                explanations.AFTER_LAYER,
            ),
        ]

    def _compute_all_gathers(self, group: GroupBuffers, next_group: GroupBuffers) -> tuple[int, int]:
        """Return the buffers of all-gathers in backward: prefetched during a layer's compute, pending before.

        ``next_group`` is the layer before, which backward prefetches.
        """
        if self.keeps_all_gathered:
            return 0, 0
        prefetched = next_group.all_gather_output
        # The larger of two all-gathers that pre_backward waits for or starts: this layer's output next to the
        # parameters copied out of it (those that were kept are freed after that), or the next one's input
        # and output (foreach_all_gather).
        casts = (group.all_gather_output == 0) * group.all_gather_temporaries
        pending = maximum(
            group.kept_after_forward + group.all_gather_output + casts,
            prefetched + (prefetched > 0) * next_group.all_gather_temporaries,
        )
        return prefetched, pending

    def _find_layer_peak(self, layer: StageLayer, adds_gradients: bool = True) -> tuple[int, int]:
        """Return (activation bytes, weights with new gradients) at the maximum of both in a layer's backward.

        Without ``adds_gradients`` only gradients being computed count: finished ones were added to the
        gradients of earlier micro-batches.
        """
        # Compare activations and gradients together: where activations are largest, few gradients may exist.
        rows = []
        for peak in layer.kind.backward:
            weights = peak.weights_with_gradient
            if adds_gradients is not True:
                weights = where(adds_gradients, weights, peak.current_matrix + peak.current_experts)
            rows.append((peak.activations + self.compute * weights, peak.activations, weights))
        _, activations, weights = pick_largest_row(rows)
        return activations, weights

    # ---- Embedding and root group ----

    def _list_root(self) -> list[PeakCandidate]:
        """Return the candidates at the embedding's gradient and at the root group's reduce-scatter."""
        backward, groups = self.backward, self.groups
        all_reduced = self._sum_reduced(0)
        # Autograd sums the gradients of a tied weight's two uses, head and embedding, into a new tensor.
        activations = (backward.stream_gradient, 2 * self.tied_head_gradient, groups.embedding_gradient, 0)
        first_input = groups.first.reduce_scatter_input
        output = groups.root_reduce_scatter_input + self.allocates_output * groups.root_gradient_shard
        # The loop variable in foreach_reduce still references the last gradient of its list.
        last_gradient = (groups.root_all_gather_output > 0) * self.head_gradient
        return [
            self._build_candidate(
                0.97,
                activations,
                (groups.root, groups.root_gradient, first_input, 0),
                all_reduced,
                explanations.IN_EMBEDDING,
            ),
            self._build_candidate(
                0.975,
                (0,),
                (groups.root_gradient + groups.root_reduce_scatter_input,),
                all_reduced,
                explanations.IN_ROOT,
            ),
            self._build_candidate(
                0.978, (0,), (output, last_gradient), self.trained, explanations.AFTER_ROOT
            ),
        ]

    # ---- One candidate ----

    def _build_candidate(
        self,
        fraction: float,
        activations: tuple[int, ...],
        gathered: tuple[int, ...],
        gradients: int,
        texts: explanations.Explanations,
        logits: Term | None = None,
        phase: Phase = "backward",
    ) -> PeakCandidate:
        """Return a peak candidate from its components in bytes, in the order of ``texts``."""
        return PeakCandidate(
            fraction,
            sum(activations),
            sum(gathered),
            gradients,
            partial(self._explain_candidate, activations, gathered, gradients, texts),
            logits,
            phase,
        )

    def _explain_candidate(
        self,
        activations: tuple[int, ...],
        gathered: tuple[int, ...],
        gradients: int,
        texts: explanations.Explanations,
    ) -> PeakTerms:
        def explain_gradients() -> str:
            if not gradients:
                return "none is reduced yet"
            numbers = f"{gradients // self.original:,} gradients of this rank × {self.original} bytes"
            return f"{numbers}, reduce-scattered by then"

        source = self.backward.explain_layers if texts.explains_layers else None
        return PeakTerms(
            sum_parts(*zip(activations, texts.activations, strict=True), source=source),
            sum_parts(*zip(gathered, texts.gathered, strict=True), source=lambda: explanations.SOURCE),
            Term(gradients, explain_gradients),
        )
