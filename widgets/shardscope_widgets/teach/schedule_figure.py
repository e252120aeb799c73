"""The chart of a schedule: blocks of every stage over time and, below, the memory of each stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import plotly.graph_objects as go

from shardscope.core.number_format import Scale, format_gib
from shardscope.memory.report import COMPONENTS
from shardscope.prediction.schedule import Block, BlockKind, PipelineSchedule
from shardscope.timing.report import format_seconds
from shardscope_widgets.kit.numbers import Unit, format_three_digits
from shardscope_widgets.kit.theme import BLOCK_COLOURS, COMPONENT_COLOURS, COMPONENT_PATTERNS, FONT
from shardscope_widgets.teach.stepped_chart import Frame, SteppedChart

KINDS: tuple[BlockKind, ...] = ("bubble", "forward", "backward", "send", "communication", "update")
DONE = {
    "forward": "the forward of micro-batch {}",
    "backward": "the backward of micro-batch {}",
    "send": "a transfer of micro-batch {}",
    "communication": "exposed collectives",
    "update": "gradient reduction and the optimizer",
    "bubble": "nothing",
}
MAX_BLOCKS = 700
"""Blocks from which the middle of a step, whose micro-batches repeat, is left out of the picture."""
LEFT_PIXELS, RIGHT_PIXELS, AXIS_PIXELS, BOTTOM_PIXELS = 64, 128, 40, 22
VEIL = "rgba(127,127,127,0.28)"


class Gap(NamedTuple):
    """A span of the step that the picture leaves out, in seconds."""

    start: float
    end: float
    first: int
    """First micro-batch that is left out."""
    last: int


def create_schedule_figure() -> SteppedChart:
    """Return the chart with all traces and no data."""
    blocks = [
        go.Bar(
            name=kind,
            orientation="h",
            marker={
                "color": BLOCK_COLOURS[kind],
                "line": {"width": 0},
                "pattern": {
                    "shape": "/" if kind == "bubble" else "",
                    "size": 6,
                    "solidity": 0.2,
                    "fillmode": "replace",
                },
            },
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            hovertemplate="%{customdata}<extra></extra>",
        )
        for kind in KINDS
    ]
    memory = [
        go.Bar(
            name=name.replace("_", " "),
            orientation="h",
            xaxis="x2",
            yaxis="y2",
            marker={
                "color": COMPONENT_COLOURS[name],
                "line": {"width": 0},
                "pattern": {
                    "shape": COMPONENT_PATTERNS.get(name, ""),
                    "size": 6,
                    "solidity": 0.3,
                    "fillmode": "overlay",
                    "fgcolor": "rgba(255,255,255,0.75)",
                },
            },
            hovertemplate="%{customdata}<extra></extra>",
        )
        for name in COMPONENTS
    ]
    axis = {"fixedrange": True, "showgrid": False, "zeroline": False}
    # Between the names of the stages and the bars.
    gap = {"ticks": "outside", "ticklen": 6, "tickcolor": "rgba(0,0,0,0)"}
    figure = SteppedChart(
        [*blocks, *memory],
        layout={
            "barmode": "overlay",
            "bargap": 0.16,
            "autosize": True,
            "margin": {"l": LEFT_PIXELS, "r": RIGHT_PIXELS, "t": 4, "b": BOTTOM_PIXELS},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "showlegend": False,
            "font": FONT,
            "hovermode": "closest",
            "hoverlabel": {"align": "left"},
            "xaxis": {**axis, "anchor": "y"},
            # Level in a narrow chart too.
            "xaxis2": {**axis, "anchor": "y2", "tickangle": 0},
            "yaxis": {**axis, **gap, "anchor": "x"},
            "yaxis2": {**axis, **gap, "anchor": "x2"},
        },
    )
    figure.label = "The pipeline's schedule and memory, step by step. The table below has the peaks."
    figure._config = {"displayModeBar": False, "responsive": True}
    return figure


def draw_schedule(figure: SteppedChart, schedule: PipelineSchedule) -> None:
    """Draw ``schedule`` in ``figure``, at its first step; each drawn moment is a frame."""
    drawing = _Drawing(schedule)
    figure.draw_steps(drawing.build_traces(), drawing.build_layout(), drawing.build_frames())


def find_gap(schedule: PipelineSchedule) -> Gap | None:
    """Return the middle of a long step, where the same blocks repeat with other micro-batches; None if short.

    The picture keeps 2 pp micro-batches at both ends, so that warm-up and cool-down are whole.
    """
    kept, number = 2 * max(2, schedule.num_stages), schedule.num_micro_batches
    # GPipe's forwards and backwards are apart: there is no one middle.
    if len(schedule.blocks) <= MAX_BLOCKS or number < 2 * kept + 4 or schedule.schedule == "gpipe":
        return None
    starts = {
        block.micro_batch: block.start
        for block in schedule.get_stage(schedule.slowest_stage)
        if block.kind == "forward" and block.chunk == 0
    }
    return Gap(starts[kept], starts[number - kept], kept, number - kept - 1)


class _Drawing:
    """One schedule with its time scale, its rows and what is left out."""

    def __init__(self, schedule: PipelineSchedule) -> None:
        self.schedule, self.gap = schedule, find_gap(schedule)
        self.scale = Scale.for_seconds(schedule.seconds)
        self.row = max(10, min(26, 420 // schedule.num_stages))
        self.usable = schedule.plan.cluster.usable_bytes_per_gpu
        peaks = [stage.peak_bytes for stage in schedule.plan.memory().by_stage]
        self.unit = Unit.for_bytes(max(peaks))
        self.memory_range = max(*peaks, 1) * 1.02
        self.moments = [
            now for now in schedule.event_times if not self.gap or not self.gap.start < now < self.gap.end
        ]
        self.end = max(block.end for block in schedule.blocks)

    def place(self, seconds: float) -> float:
        """Return the position of a time on the axis, without the part that is left out."""
        gap = self.gap
        if gap and seconds > gap.start:
            seconds = max(gap.start, seconds - (gap.end - gap.start))
        return seconds * self.scale.factor

    def build_traces(self) -> list[dict[str, object]]:
        """Return one trace of blocks for each kind; frames draw the bars of memory."""
        traces: list[dict[str, object]] = []
        for kind in KINDS:
            blocks = [
                (block, start, end)
                for block in self.schedule.blocks
                if block.kind == kind
                for start, end in [(self.place(block.start), self.place(block.end))]
                if end > start
            ]
            traces.append(
                {
                    "y": [block.stage for block, *_ in blocks],
                    "base": [round(start, 8) for _, start, _ in blocks],
                    "x": [round(end - start, 8) for _, start, end in blocks],
                    "text": [
                        str(block.micro_batch) if self._is_numbered(block) else "" for block, *_ in blocks
                    ],
                    "customdata": [self._describe_block(block) for block, *_ in blocks],
                    "marker.color": self._list_colours([block for block, *_ in blocks], kind),
                }
            )
        return [*traces, *({} for _ in COMPONENTS)]

    def build_layout(self) -> dict[str, object]:
        """Return axes, and height by the number of stages."""
        rows = self.schedule.num_stages
        plot = self.row * rows
        total = 2 * plot + AXIS_PIXELS + (18 if self.gap else 0)
        labels = [f"stage {stage}" for stage in range(rows)] if rows > 1 else ["rank"]
        every = max(1, 13 // self.row)
        stages = {
            "range": [rows - 0.5, -0.5],
            "tickvals": list(range(rows))[::every],
            "ticktext": labels[::every],
        }
        half = plot / total
        ticks = self._build_ticks()
        return {
            "height": total + 4 + BOTTOM_PIXELS,
            "xaxis.range": [0, self.place(self.end) * 1.002],
            "xaxis.tickvals": [place for place, _ in ticks],
            "xaxis.ticktext": [text for _, text in ticks],
            "xaxis2.range": [0, self.memory_range / self.unit.num_bytes],
            "xaxis2.ticksuffix": f" {self.unit.name}",
            "xaxis2.nticks": 4,
            "yaxis.domain": [1 - half, 1],
            "yaxis2.domain": [0, half],
            **{f"{axis}.{name}": value for axis in ("yaxis", "yaxis2") for name, value in stages.items()},
        }

    def _build_ticks(self) -> list[tuple[float, str]]:
        """Return positions and labels of about six round times, those in the gap left out."""
        shown = self.place(self.end) / self.scale.factor
        rough, power = shown / 6, 1e-9
        while power * 10 <= rough:
            power *= 10
        spacing = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
        gap, ticks = self.gap, list[tuple[float, str]]()
        for number in range(int(self.end / spacing) + 1):
            seconds = number * spacing
            value, at = seconds * self.scale.factor, self.place(seconds)
            # The first label after the gap needs room beside the last one before it.
            is_clear = not ticks or at - ticks[-1][0] > 0.9 * spacing * self.scale.factor
            if is_clear and not (gap and gap.start <= seconds <= gap.end):
                ticks.append((at, f"{value:,.4g} {self.scale.unit}"))
        return ticks

    def build_frames(self) -> list[Frame]:
        """Return a frame for each moment: memory, a veil over what is to come, and a sentence."""
        return [self._build_frame(now) for now in self.moments]

    def _build_frame(self, now: float) -> Frame:
        schedule = self.schedule
        stages = range(schedule.num_stages)
        memory = [schedule.compute_memory(stage, now) for stage in stages]
        base = [0.0] * schedule.num_stages
        traces: dict[int, dict[str, object]] = {}
        for index, name in enumerate(COMPONENTS, len(KINDS)):
            sizes = [parts[name] / self.unit.num_bytes for parts in memory]
            traces[index] = {
                "y": list(stages),
                "base": [round(each, 3) for each in base],
                "x": [round(size, 3) for size in sizes],
                "customdata": [
                    f"{name.replace('_', ' ')}: {self.unit.format(parts[name])} {self.unit.name}"
                    for parts in memory
                ],
            }
            base = [below + size for below, size in zip(base, sizes, strict=True)]
        in_flight = [schedule.count_in_flight(stage, now) for stage in stages]
        totals = [sum(parts.values()) for parts in memory]
        notes = (
            [self._note(stage, in_flight[stage], totals[stage]) for stage in stages] if self.row >= 12 else []
        )
        return Frame(
            self._write_words(now, in_flight, totals),
            traces,
            {"shapes": self._build_shapes(now), "annotations": [*notes, *self._note_gap()]},
        )

    def _note(self, stage: int, in_flight: int, total: int) -> dict[str, object]:
        held = f"{in_flight} in flight, " if self.schedule.num_stages > 1 else ""
        return {
            "text": f"{held}{format_three_digits(total / self.unit.num_bytes)} {self.unit.name}",
            "x": 1,
            "xref": "paper",
            "xanchor": "left",
            "xshift": 6,
            "y": stage,
            "yref": "y2",
            "showarrow": False,
            "font": {"size": 11},
        }

    def _note_gap(self) -> list[dict[str, object]]:
        if not self.gap:
            return []
        text = f"… micro-batches {self.gap.first} to {self.gap.last} in the same way …"
        place = {"x": self.place(self.gap.start), "xref": "x", "y": 0, "yref": "y domain", "yanchor": "top"}
        return [{**place, "yshift": -14, "text": text, "showarrow": False, "font": {"size": 11}}]

    def _build_shapes(self, now: float) -> list[dict[str, object]]:
        at = self.place(now)
        end = self.place(self.end) * 1.002
        shapes: list[dict[str, object]] = [
            {
                "type": "rect",
                "xref": "x",
                "yref": "y domain",
                "x0": at,
                "x1": end,
                "y0": 0,
                "y1": 1,
                "fillcolor": VEIL,
                "line": {"width": 0},
            }
        ]
        lines = [(at, "solid", 2.0)]
        if self.gap:
            lines.append((self.place(self.gap.start), "dot", 1.5))
        shapes += [
            {
                "type": "line",
                "xref": "x",
                "yref": "y domain",
                "x0": x,
                "x1": x,
                "y0": 0,
                "y1": 1,
                "line": {"width": width, "dash": dash},
            }
            for x, dash, width in lines
        ]
        return shapes

    def _write_words(self, now: float, in_flight: Sequence[int], totals: Sequence[int]) -> str:
        schedule = self.schedule
        if schedule.find_block(schedule.slowest_stage, now) is None:
            return f"{format_seconds(now)}: the step has ended."
        doing: dict[str, list[int]] = {}
        for stage in range(schedule.num_stages):
            block = schedule.find_block(stage, now)
            text = DONE[block.kind].format(block.micro_batch) if block else DONE["bubble"]
            if block and block.kind in ("forward", "backward") and schedule.num_chunks > 1:
                text += f", chunk {block.chunk}"
            doing.setdefault(text, []).append(stage)
        if schedule.num_stages == 1:
            return (
                f"{format_seconds(now)}: the rank runs {', '.join(doing)}, with {format_gib(totals[0])} GiB."
            )
        waiting = doing.pop(DONE["bubble"], [])
        parts = [
            f"{_name_stages(stages)} {'runs' if len(stages) == 1 else 'run'} {text}"
            for text, stages in doing.items()
        ]
        if waiting:
            parts.append(f"{_name_stages(waiting)} {'waits' if len(waiting) == 1 else 'wait'}")
        return f"{format_seconds(now)}: {'; '.join(parts)}."

    def _is_numbered(self, block: Block) -> bool:
        return block.kind in ("forward", "backward")

    def _list_colours(self, blocks: Sequence[Block], kind: BlockKind) -> str | list[str]:
        """Return the colour of a kind, or one for each block: the first chunk is the palest."""
        colour, last = BLOCK_COLOURS[kind], self.schedule.num_chunks - 1
        if not last or kind not in ("forward", "backward"):
            return colour
        return [mix_with_white(colour, 0.6 * (1 - block.chunk / last)) for block in blocks]

    def _describe_block(self, block: Block) -> str:
        chunk = f", chunk {block.chunk}" if self.schedule.num_chunks > 1 and block.micro_batch >= 0 else ""
        number = f" of micro-batch {block.micro_batch}{chunk}" if block.micro_batch >= 0 else ""
        stage = f"stage {block.stage}: " if self.schedule.num_stages > 1 else ""
        span = f"{format_seconds(block.start)} to {format_seconds(block.end)}"
        return f"{stage}{block.kind}{number}<br>{format_seconds(block.seconds)}, {span}"


def mix_with_white(colour: str, share: float) -> str:
    """Return ``#rrggbb`` with this share of white."""
    parts = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def _name_stages(numbers: Sequence[int]) -> str:
    """Return ``stage 1``, or ``stages 1, 2 and 3``."""
    texts = [str(number) for number in numbers]
    joined = " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))
    return f"{'stage' if len(texts) == 1 else 'stages'} {joined}"
