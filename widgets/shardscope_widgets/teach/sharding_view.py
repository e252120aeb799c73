"""``ShardingView``: which rank holds which part of one layer's state, phase by phase of a step."""

from __future__ import annotations

from html import escape

import shardscope as ss
from shardscope.core.number_format import format_count
from shardscope.prediction.layer_sharding import KINDS, LayerSharding, choose_layer, shard_layer
from shardscope.timing.report import format_part
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.numbers import format_size
from shardscope_widgets.kit.theme import COMPONENT_COLOURS
from shardscope_widgets.teach.sharding_figure import (
    PHASES,
    TITLES,
    WHOLE_COLOUR,
    create_sharding_figure,
    describe_hidden_ranks,
    draw_sharding,
    make_translucent,
)
from shardscope_widgets.teach.stepped_view import SteppedView
from shardscope_widgets.teach.teaching_view import render_key, write_heading


class ShardingView(SteppedView):
    """Which rank holds which part of one layer's parameters, gradients and optimizer state during a step.

    ``layer`` is a decoder layer's index; by default one in the middle. Steps are the phases of one optimizer
    step: between steps, the layer's forward and backward, the reduction of its gradients and the optimizer
    step, each with the collectives that move the layer and their bytes. The arrow keys, Home, End and the
    space bar walk through them.

    Bytes are those that ``plan.memory()`` and ``plan.step()`` count for the layer. Rajbhandari et al. 2020
    ("ZeRO", section 5), Zhao et al. 2023 ("PyTorch FSDP"), Li et al. 2020 (DDP), Shoeybi et al. 2019
    (tensor parallelism) and each framework's source.
    """

    title = "Sharding of one layer"

    def __init__(self, plan: ss.Plan | None = None, *, layer: int | None = None) -> None:
        self.shown: LayerSharding | None = None
        self.key, self.table = controls.create_html(), controls.create_html()
        choice = controls.create_dropdown(options=[("", 0)], tooltip="Decoder layer")
        super().__init__(choice, create_sharding_figure(), self.key, self.table, width="120px")
        if plan is not None:
            self.show(plan, layer=layer)

    def show(self, plan: ss.Plan, *, layer: int | None = None) -> None:
        """Draw another plan. Raises ``ValueError`` for a layer that the model lacks."""
        self._check_shown(plan, ss.Plan)
        chosen = choose_layer(plan, layer)
        self.plan = plan
        self._offer(
            [(f"layer {index}", index) for index in range(plan.architecture.num_hidden_layers)], chosen
        )
        self._draw_choice()

    def _draw_choice(self) -> None:
        """Draw the chosen layer."""
        plan = self.plan
        assert plan is not None
        try:
            shown = self.shown = shard_layer(plan, self.choice.value)
        except ValueError as error:  # Memory of this model that has no formula.
            self.shown = None
            self._refuse(plan, f"The layer cannot be drawn: {error}")
            return
        self.heading.value = write_heading(plan, _write_sentences(shown))
        # The same phase of another layer, if the user has walked to one.
        draw_sharding(self.figure, shown, min(self.step, len(shown.phases) - 1))
        self.key.value = _render_key()
        self.table.value = _render_table(shown)


def _write_sentences(shown: LayerSharding) -> list[str]:
    plan, degrees = shown.plan, shown.plan.degrees
    experts = ", with routed experts," if shown.has_experts else ""
    last = plan.architecture.num_hidden_layers - 1
    first = f"Decoder layer {shown.layer} (of 0 to {last}){experts} has "
    first += f"{shown.num_weights:,} weights."
    if degrees.pp > 1:
        first += (
            f" It is on pipeline stage {shown.stage} of {degrees.pp}, on "
            f"{format_count(len(shown.ranks), 'rank')} of {plan.world_size:,}."
        )
    sentences = [f"{first} {describe_hidden_ranks(shown)}".strip()]
    cut = shown.sharding.cut
    if degrees.tp > 1:
        # Norms and small projections, which all tensor-parallel ranks have, are not drawn apart.
        first_cut = f"Tensor parallelism first cuts its matrices over {degrees.tp} ranks"
        cut = f"{first_cut} (norms are whole on each). {cut}"
    if shown.sharding.experts is not None:
        cut += f" Its experts are spread over {degrees.ep} expert-parallel ranks."
    sentences.append(f"{cut} ({shown.sharding.source})")
    if shown.unknown:
        sentences.append(f"Collectives of activations cannot be listed: {shown.unknown}")
    return sentences


def _render_key() -> str:
    kept = [(COMPONENT_COLOURS[kind], f"{TITLES[kind]} that a rank keeps", "") for kind in KINDS]
    blue = COMPONENT_COLOURS["parameters"]
    hatched = f"repeating-linear-gradient(135deg,{blue} 0 2px,{make_translucent(blue)} 2px 5px)"
    return render_key(
        [
            *kept,
            (hatched, "all-gathered for a moment, or not reduced yet", ""),
            (WHOLE_COLOUR, "the rest of the layer", ""),
        ]
    )


def _render_table(shown: LayerSharding) -> str:
    if not shown.exchanges:
        return "<p>No collective moves this layer.</p>"
    # Each size in its own unit, as the words above the figure have it.
    rows = "".join(
        f"<tr><th scope='row'>{escape(PHASES[one.phase])}</th>"
        f"<td class='ss-text'>{escape(format_part(one.part))}</td>"
        f"<td class='ss-text'>{one.collective.replace('_', '-')}</td><td>{one.ranks:,}</td>"
        f"<td>{format_size(one.num_bytes)}</td><td>{one.times:,.4g}</td></tr>"
        for one in shown.exchanges
    )
    return (
        "<div class='ss-scroll' tabindex='0' role='group' aria-label='Collectives of the layer'>"
        "<table class='ss-table'><thead><tr><th scope='col'>when</th>"
        "<th scope='col' class='ss-text'>what</th><th scope='col' class='ss-text'>collective</th>"
        "<th scope='col'>ranks</th><th scope='col'>size of a call</th>"
        f"<th scope='col'>calls a step</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )
