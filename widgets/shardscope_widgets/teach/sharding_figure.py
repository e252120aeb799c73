"""The chart of one layer's state: a row for each rank, with the parts that it holds in each phase."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from shardscope.core.number_format import format_count, join_list
from shardscope.prediction.layer_sharding import (
    KINDS,
    Exchange,
    Kind,
    LayerSharding,
    RankSlices,
    ShardingPhase,
)
from shardscope.timing.report import format_part
from shardscope_widgets.kit.numbers import format_size
from shardscope_widgets.kit.theme import BESIDE_COLOURS, COMPONENT_COLOURS, FONT
from shardscope_widgets.teach.stepped_chart import Frame, SteppedChart

TITLES = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer state"}
MOST_RANKS = 16
"""Rows; of more ranks, the first and the last are shown."""
LAST_RANKS = 4
ROW_PIXELS, TOP_PIXELS, BOTTOM_PIXELS, RIGHT_PIXELS = 20, 64, 40, 8
WHOLE_COLOUR = "rgba(127,127,127,0.24)"
PHASES = {
    "rest": "Between steps",
    "forward": "Forward of the layer",
    "between": "Between its forward and its backward",
    "backward": "Backward of the layer",
    "reduced": "Reduction of its gradients",
    "optimizer": "Optimizer step",
    "updated": "After the update",
}


def make_translucent(colour: str) -> str:
    """Return ``#rrggbb`` as the same colour at 35 % opacity, through which the page is seen."""
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.35)"


def create_sharding_figure() -> SteppedChart:
    """Return the chart with all traces and no data."""
    traces = []
    for number, kind in enumerate(KINDS):
        axes = {"xaxis": f"x{number + 1 if number else ''}", "yaxis": "y", "orientation": "h"}
        colour = COMPONENT_COLOURS[kind]
        hatched = {"shape": "/", "size": 6, "solidity": 0.25, "fillmode": "overlay", "fgcolor": colour}
        styles = (
            (f"{TITLES[kind]}, whole layer", {"color": WHOLE_COLOUR}),
            (
                f"{TITLES[kind]}, for a moment",
                {"color": make_translucent(colour), "pattern": hatched},
            ),
            (f"{TITLES[kind]}, kept", {"color": colour}),
        )
        traces += [
            go.Bar(
                name=name,
                marker={**marker, "line": {"width": 0}},
                hovertemplate="%{customdata}<extra></extra>",
                **axes,
            )
            for name, marker in styles
        ]
    axis = {"fixedrange": True, "showgrid": False, "zeroline": False}
    across = {**axis, "range": [0, 1], "tickvals": [0, 0.5, 1], "ticktext": ["0", "½", "1"]}
    figure = SteppedChart(
        traces,
        layout={
            "barmode": "overlay",
            "bargap": 0.25,
            "autosize": True,
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "showlegend": False,
            "font": FONT,
            "hovermode": "closest",
            "hoverlabel": {"align": "left"},
            "xaxis": {**across, "domain": [0, 0.3], "anchor": "y"},
            "xaxis2": {
                **across,
                "domain": [0.35, 0.65],
                "anchor": "y",
                "title": {"text": "share of the layer's weights", "standoff": 4},
            },
            "xaxis3": {**across, "domain": [0.7, 1], "anchor": "y"},
            "yaxis": {**axis, "anchor": "x"},
        },
    )
    figure.label = "One layer on each rank, step by step. The table below has the numbers."
    figure._config = {"displayModeBar": False, "responsive": True}
    return figure


def draw_sharding(figure: SteppedChart, shown: LayerSharding, step: int = 0) -> None:
    """Show one layer with a frame for each phase of a step."""
    drawing = _Drawing(shown)
    figure.draw_steps(drawing.build_traces(), drawing.build_layout(), drawing.build_frames(), step)


def describe_exchange(exchange: Exchange) -> str:
    """Return a collective as text: ``all-gather of 416 MiB over 8 ranks``."""
    name, size = exchange.collective.replace("_", "-"), format_size(exchange.num_bytes)
    if exchange.part == "pipeline_transfers":
        to = "from the stage's last layer on" if exchange.phase == "forward" else "from its first layer back"
        return f"{name} of {size} {to}"
    if exchange.collective == "send":
        return f"{name} of {size} around {exchange.ranks:,} ranks"
    return f"{name} of {size} over {exchange.ranks:,} ranks"


def format_times(times: float) -> str:
    """Return ``once``, ``twice`` or ``8 times``."""
    words = {1.0: "once", 2.0: "twice"}
    return words.get(float(times), f"{times:,.4g} times")


def format_own_bytes(slices: Sequence[RankSlices]) -> str:
    """Return the bytes that ranks keep: ``104 MiB``, or ``up to 1.2 GiB`` where ranks differ."""
    sizes = [one.own_bytes for one in slices]
    low, high = min(sizes), max(sizes)
    return format_size(high) if low == high else f"up to {format_size(high)}"


class _Drawing:
    """One layer with its rows."""

    def __init__(self, shown: LayerSharding) -> None:
        self.shown = shown
        number = len(shown.ranks)
        self.indices = list(range(number))
        if number > MOST_RANKS:
            first = MOST_RANKS - LAST_RANKS
            self.indices = [*range(first), *range(number - LAST_RANKS, number)]
        has_earlier, has_later = shown.stage > 0, shown.stage < shown.plan.degrees.pp - 1
        self.rows: list[int] = []
        """Row of each of ``indices``."""
        self.notes: list[tuple[int, str]] = []
        """Rows with words in place of a rank."""
        row = 0
        per_stage = number
        if has_earlier:
            self.notes.append((row, _describe_others(0, shown.stage - 1, per_stage)))
            row += 1
        for position, index in enumerate(self.indices):
            if position and index != self.indices[position - 1] + 1:
                hidden = (
                    f"{shown.ranks[self.indices[position - 1] + 1].rank:,} to {shown.ranks[index].rank - 1:,}"
                )
                self.notes.append((row, f"… ranks {hidden} in the same way"))
                row += 1
            self.rows.append(row)
            row += 1
        if has_later:
            self.notes.append((row, _describe_others(shown.stage + 1, shown.plan.degrees.pp - 1, per_stage)))
            row += 1
        self.num_rows = row

    def build_traces(self) -> list[dict[str, object]]:
        """Return the traces of the layer's outlines; frames draw the parts."""
        on_host = self.shown.host_bytes > 0 or self.shown.nvme_bytes > 0
        traces: list[dict[str, object]] = []
        for kind in KINDS:
            rest = self.shown.phases[-1].slices[kind] if kind != "gradients" else ()
            is_elsewhere = on_host and any(slices.own and not slices.own_bytes for slices in rest)
            whole: dict[str, object] = {
                "y": self.rows,
                "base": [0.0] * len(self.rows),
                "x": [1.0] * len(self.rows),
                "customdata": [self._name_rank(index) for index in self.indices],
            }
            own: dict[str, object] = {
                "marker.color": BESIDE_COLOURS["host"] if is_elsewhere else COMPONENT_COLOURS[kind]
            }
            traces += [whole, {}, own]
        return traces

    def build_layout(self) -> dict[str, object]:
        """Return axes, and height by the number of rows."""
        labels = [self._label_rank(index) for index in self.indices]
        left = 14 + 7 * max(map(len, labels))
        return {
            "height": self.num_rows * ROW_PIXELS + TOP_PIXELS + BOTTOM_PIXELS,
            "margin": {"l": left, "r": RIGHT_PIXELS, "t": TOP_PIXELS, "b": BOTTOM_PIXELS},
            "yaxis.range": [self.num_rows - 0.5, -0.5],
            "yaxis.tickvals": self.rows,
            "yaxis.ticktext": [f"{label} " for label in labels],
        }

    def build_frames(self) -> list[Frame]:
        """Return a frame for each phase."""
        return [
            Frame(
                _write_words(self.shown, phase),
                {
                    3 * number + 1 + is_own: self._draw_parts(phase, kind, bool(is_own))
                    for number, kind in enumerate(KINDS)
                    for is_own in (0, 1)
                },
                {"annotations": [*self._build_heads(phase), *self._build_notes()]},
            )
            for phase in self.shown.phases
        ]

    def _draw_parts(self, phase: ShardingPhase, kind: Kind, is_own: bool) -> dict[str, object]:
        rows, base, lengths, words = list[int](), list[float](), list[float](), list[str]()
        for index, row in zip(self.indices, self.rows, strict=True):
            slices = phase.slices[kind][index]
            for start, end in slices.own if is_own else slices.temporary:
                rows.append(row)
                base.append(round(start, 5))
                lengths.append(round(end - start, 5))
                words.append(
                    f"{self._name_rank(index)}<br>{_describe_slices(self.shown, phase, kind, slices)}"
                )
        return {"y": rows, "base": base, "x": lengths, "customdata": words}

    def _build_heads(self, phase: ShardingPhase) -> list[dict[str, object]]:
        heads: list[dict[str, object]] = []
        for number, kind in enumerate(KINDS):
            slices = phase.slices[kind]
            # The short name: three columns stand side by side in a narrow window.
            lines = [f"<b>{kind}</b>", *_describe_column(self.shown, phase, kind, slices)]
            heads += [
                {
                    "text": text,
                    "x": 0,
                    "xref": f"x{number + 1 if number else ''} domain",
                    "xanchor": "left",
                    "y": 1,
                    "yref": "paper",
                    "yanchor": "bottom",
                    "yshift": 34 - 15 * line,
                    "showarrow": False,
                    "font": {"size": 12 if line == 0 else 11},
                }
                for line, text in enumerate(lines)
                if text
            ]
        return heads

    def _build_notes(self) -> list[dict[str, object]]:
        place = {"x": 0, "xref": "paper", "xanchor": "left", "yref": "y", "showarrow": False}
        return [{**place, "y": row, "text": text, "font": {"size": 11}} for row, text in self.notes]

    def _label_rank(self, index: int) -> str:
        rank, degrees = self.shown.ranks[index], self.shown.plan.degrees
        is_mixed = 1 < degrees.tp < len(self.shown.ranks)
        return f"{rank.rank} · tp {rank.tensor}" if is_mixed else f"rank {rank.rank}"

    def _name_rank(self, index: int) -> str:
        rank, degrees = self.shown.ranks[index], self.shown.plan.degrees
        places = [f"rank {rank.rank}"]
        if degrees.pp > 1:
            places.append(f"stage {self.shown.stage}")
        if degrees.tp > 1:
            places.append(f"tp {rank.tensor}")
        if degrees.data_parallel * degrees.cp > 1:
            places.append(f"data-parallel {rank.data}")
        if degrees.replicate > 1 and degrees.shard > 1:
            places.append(f"replica {rank.data // (degrees.shard * degrees.cp)}")
        if self.shown.sharding.experts is not None:
            places.append(f"expert-parallel {rank.expert}")
        return ", ".join(places)


def _describe_others(first: int, last: int, per_stage: int) -> str:
    stages = f"stage {first}" if first == last else f"stages {first} to {last}"
    ranks = (first * per_stage, (last + 1) * per_stage - 1)
    which = f"rank {ranks[0]:,}" if ranks[0] == ranks[1] else f"ranks {ranks[0]:,} to {ranks[1]:,}"
    return f"{stages}, {which}: nothing of this layer"


def _describe_column(
    shown: LayerSharding, phase: ShardingPhase, kind: Kind, slices: Sequence[RankSlices]
) -> tuple[str, str]:
    """Return the two lines below a column's title: bytes that ranks keep, and bytes for a moment."""
    temporary = max(one.temporary_bytes for one in slices)
    on_host = any(one.own for one in slices) and not any(one.own_bytes for one in slices)
    if on_host and (shown.host_bytes or shown.nvme_bytes):
        kept = "in host memory" if not shown.nvme_bytes else "on NVMe or in host memory"
    elif not any(one.own_bytes for one in slices):
        kept = "" if temporary else "none"
    elif kind == "gradients" and shown.sharding.keeps_whole_buffer:
        kept = f"{format_own_bytes(slices)} buffer"
    else:
        # "up to 1.2 GiB kept" would not fit a narrow window.
        sizes = {one.own_bytes for one in slices}
        kept = f"{format_own_bytes(slices)}{' kept' if len(sizes) == 1 else ''}"
    if not temporary:
        return kept, ""
    moment = "all-gathered" if kind == "parameters" else "unreduced"
    return (
        (kept, f"+ {format_size(temporary)} {moment}") if kept else (f"{format_size(temporary)} {moment}", "")
    )


def _describe_slices(shown: LayerSharding, phase: ShardingPhase, kind: Kind, slices: RankSlices) -> str:
    """Return one rank's part as a tooltip."""
    kept, moment = _describe_column(shown, phase, kind, [slices])
    parts = ", ".join(f"{100 * start:.4g} to {100 * end:.4g} %" for start, end in slices.own)
    return f"{TITLES[kind]}: {'; '.join(filter(None, (kept, moment)))}" + (
        f"<br>its part: {parts}" if parts else ""
    )


def _write_words(shown: LayerSharding, phase: ShardingPhase) -> str:
    """Return what happens in a phase, and what is sent."""
    state = [one for one in phase.exchanges if one.part in ("gathers", "gradients")]
    sent = " and ".join(f"{describe_exchange(one)}, {format_times(one.times)} a step" for one in state)
    said = _SENTENCES[phase.name](shown, phase, sent)
    activations = [one for one in phase.exchanges if one not in state]
    if activations:
        calls = "; ".join(
            f"{format_part(one.part)}: {describe_exchange(one)}, {format_times(one.times)} a step"
            for one in activations
        )
        said += f" Activations are sent, too: {calls}."
    return f"{PHASES[phase.name]}. {said}"


def _say_rest(shown: LayerSharding, phase: ShardingPhase, _: str) -> str:
    kept = [
        f"{format_own_bytes(phase.slices[kind])} of {TITLES[kind]}"
        for kind in KINDS
        if any(slices.own_bytes for slices in phase.slices[kind])
    ]
    if not kept:
        return f"The state is outside of the GPU: {_describe_host(shown)}."
    on_host = f" In host memory: {_describe_host(shown)}." if shown.host_bytes or shown.nvme_bytes else ""
    buffer = ""
    if any(slices.own_bytes for slices in phase.slices["gradients"]):
        buffer = " The gradients' buffer is never freed."
    return f"Each rank keeps {join_list(kept)}.{buffer}{on_host}"


def _describe_host(shown: LayerSharding) -> str:
    text = f"{format_size(shown.host_bytes)} of this layer a rank"
    return text + (f", and {format_size(shown.nvme_bytes)} on NVMe" if shown.nvme_bytes else "")


def _say_forward(shown: LayerSharding, _: ShardingPhase, sent: str) -> str:
    if not shown.sharding.gathers_for_passes:
        return "Every rank computes with the parameters that it keeps; none are sent."
    return f"First an all-gather makes the layer whole on every rank ({sent or 'one rank: nothing is sent'})."


def _say_between(shown: LayerSharding, phase: ShardingPhase, _: str) -> str:
    temporary = max(slices.temporary_bytes for slices in phase.slices["parameters"])
    if not temporary:
        return "The all-gathered copy is freed: other layers use its memory meanwhile."
    return f"{format_size(temporary)} of the all-gathered copy stay on each rank until the layer's backward."


def _say_backward(shown: LayerSharding, phase: ShardingPhase, sent: str) -> str:
    unreduced = max(slices.temporary_bytes for slices in phase.slices["gradients"])
    said = ""
    if shown.sharding.gathers_for_passes:
        said = f"The layer is made whole again ({sent}). " if sent else "The layer is still whole. "
    size = f", {format_size(unreduced)}" if unreduced else ""
    return f"{said}Autograd makes the gradients of all weights on a rank{size}."


def _say_reduced(shown: LayerSharding, phase: ShardingPhase, sent: str) -> str:
    if not sent:
        return "No other rank has gradients of the same weights: nothing is reduced."
    kept = format_own_bytes(phase.slices["gradients"])
    if shown.sharding.keeps_whole_buffer:
        kept = "the sum in its own part of the buffer"
    return f"The gradients of all data-parallel ranks are summed ({sent}). Each rank keeps {kept}."


def _say_optimizer(shown: LayerSharding, _: ShardingPhase, __: str) -> str:
    where = " on the host" if shown.host_bytes else ""
    return (
        f"A rank updates the weights whose optimizer state it holds{where}, with its reduced gradients; "
        "nothing is sent."
    )


def _say_updated(_: LayerSharding, __: ShardingPhase, sent: str) -> str:
    return f"Ranks send each other the weights that they have updated ({sent}): parameters are whole again."


_SENTENCES = {
    "rest": _say_rest,
    "forward": _say_forward,
    "between": _say_between,
    "backward": _say_backward,
    "reduced": _say_reduced,
    "optimizer": _say_optimizer,
    "updated": _say_updated,
}


def describe_hidden_ranks(shown: LayerSharding) -> str:
    """Return a sentence about the ranks without a row; empty if all have one."""
    hidden = len(shown.ranks) - MOST_RANKS
    if hidden <= 0:
        return ""
    number = len(shown.ranks)
    return f"{format_count(hidden, 'rank')} of {number:,} have no row: they hold parts in the same way."
