"""The charts of a run: which ones, their order, and their positions for a given width."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite, nan
from typing import TypeGuard

from shardscope.core.number_format import Scale
from shardscope_widgets.kit.numbers import Unit, format_short, format_three_digits


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart of one metric."""

    metric: str
    title: str
    by: str = "step"
    """Unit of the horizontal axis: "step" or "minute"."""
    from_zero: bool = False
    is_bounded: bool = False
    """Whether a few outliers, such as the first steps' time, are drawn at the top of the axis."""

    is_percent: bool = False
    exponents: str = "SI"
    """plotly's ``exponentformat`` of the axis: 12k, or 3e-4."""
    decimals: int | None = None
    """Number format in tables; None: three significant digits."""

    def format(self, value: object, scale: float) -> str:
        """Return ``value`` divided by ``scale`` as text; a dash for anything but a number."""
        if not is_number(value):
            return "–"
        if not isfinite(value):
            return str(value)
        if self.decimals is not None:
            return f"{value:,.{self.decimals}f}"
        shown = abs(value) / scale
        text = (
            format_short(shown)
            if shown >= 9995
            else format_three_digits(shown)
            if shown >= 0.1
            else f"{shown:.3g}"
        )
        return ("-" if value < 0 else "") + text

    def choose_unit(self, typical: float) -> tuple[str, float]:
        """Return the unit that suits a value of this magnitude, and the divisor of its values."""
        if self.metric.endswith("_bytes"):
            unit = Unit.for_bytes(typical)
            return unit.name, float(unit.num_bytes)
        if self.metric.endswith("_seconds"):
            scale = Scale.for_seconds(typical)
            return scale.unit, 1 / scale.factor
        return "", 1.0


TRAINING_PANELS = (
    Panel(metric="loss", title="loss", decimals=3),
    Panel(metric="tokens_per_second", title="tokens/s per rank", from_zero=True, is_bounded=True),
    Panel(metric="peak_memory_bytes", title="memory", from_zero=True),
    Panel(metric="step_seconds", title="step time", from_zero=True, is_bounded=True),
    Panel(metric="grad_norm", title="gradient norm"),
    Panel(metric="learning_rate", title="learning rate", exponents="e"),
)
"""Metrics logged by every task that trains the plan."""
SCRIPT_PANEL = Panel(metric="seconds_per_step", title="step time, s", from_zero=True, is_bounded=True)
"""Metric logged for an Accelerate script, between two of its optimizer steps."""
VALIDATION_PANEL = Panel(metric="validation_loss", title="validation loss", decimals=3)
"""Chart next to the loss, for a task with validation data."""
PREFERENCE_PANELS = (
    Panel(metric="reward_margin", title="reward margin", decimals=3),
    Panel(metric="reward_accuracy", title="reward accuracy", from_zero=True, decimals=2),
)
"""Metrics of training on preference pairs (DPO)."""
GPU_PANELS = (
    Panel(metric="utilisation_percent", title="GPU busy, %", by="minute", is_percent=True, decimals=0),
    Panel(metric="temperature_celsius", title="GPU temperature, °C", by="minute", from_zero=True, decimals=0),
    Panel(metric="power_watts", title="GPU power, W", by="minute", from_zero=True, decimals=0),
)
"""GPU metrics reported by NVML."""
MAX_OWN = 3
"""Maximum charts of metrics named by a user's function, in order of appearance."""
MAX_NAMES = 64
"""Maximum metrics read, in case a task logs a new name at every step."""
SLOTS = len(TRAINING_PANELS) + 2 + len(PREFERENCE_PANELS) + len(GPU_PANELS) + MAX_OWN
NOT_DRAWN = frozenset({
    *("step", "rank", "time", "memory_bytes", "rss_bytes", "tokens_per_second_all_ranks"),
    *("chosen_reward", "rejected_reward", "validation_chosen_reward", "validation_rejected_reward"),
    "validation_perplexity",
})  # fmt: skip
"""Metrics that are not drawn, because another chart shows the same or more."""
_KNOWN = {
    panel.metric: panel
    for panel in (
        TRAINING_PANELS[0],
        VALIDATION_PANEL,
        *TRAINING_PANELS[1:],
        SCRIPT_PANEL,
        *PREFERENCE_PANELS,
        *GPU_PANELS,
    )
}


def list_panels(metrics: Collection[str]) -> list[Panel]:
    """Return the charts of these metrics in a fixed order, the known ones first."""
    other = [
        Panel(metric=name, title=name, exponents="e")
        for name in metrics
        if name not in _KNOWN and name not in NOT_DRAWN
    ]
    known = [panel for panel in _KNOWN.values() if panel.metric in metrics]
    return [*known, *other[:MAX_OWN]]


def find_first_numbers(records: Iterable[Mapping[str, object]]) -> dict[str, float]:
    """Return every numeric metric of ``records``, with its first finite value if there is one."""
    numbers: dict[str, float] = {}
    for record in records:
        for name, value in record.items():
            if is_number(value) and not isfinite(numbers.get(name, nan)):
                numbers[name] = float(value)
    return numbers


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether ``value`` is a number that a chart can draw, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


CELL_PIXELS = 178
"""Height of a chart including its title and its axis."""
TITLE_PIXELS = 24
AXIS_PIXELS = 36
GAP_PIXELS = 52
"""Gap between charts in a row, for the tick labels of an axis."""
MARGIN_PIXELS = 50
ASSUMED_WIDTH = 836


@dataclass(frozen=True)
class Position:
    """The position of one chart, in fractions of the figure."""

    x: tuple[float, float]
    y: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The positions of all charts of one figure."""

    positions: tuple[Position, ...]
    height: int
    """Height in pixels."""


def arrange_grid(num_panels: int, width: int) -> Grid:
    """Arrange ``num_panels`` charts in a figure of ``width`` pixels, in one to three columns."""
    width = width or ASSUMED_WIDTH
    # A chart has at least 240 pixels: its title shares its line with the predicted value.
    most = 1 if width < 480 else 2 if width < 720 else 3
    # Four charts as two by two instead of three and one.
    columns = 2 if num_panels == 4 and most > 1 else min(most, max(1, num_panels))
    rows = max(1, -(-num_panels // columns))
    # plotly's domains are fractions of the figure without its margins.
    inner = max(100, width - MARGIN_PIXELS)
    gap = GAP_PIXELS / inner if columns > 1 else 0.0
    wide = (1 - gap * (columns - 1)) / columns
    height = rows * CELL_PIXELS
    positions = []
    for number in range(num_panels):
        row, column = divmod(number, columns)
        left = column * (wide + gap)
        top = 1 - (row * CELL_PIXELS + TITLE_PIXELS) / height
        bottom = 1 - ((row + 1) * CELL_PIXELS - AXIS_PIXELS) / height
        # Rounding may exceed the figure, and plotly rejects domains outside of 0 to 1.
        positions.append(Position((left, min(1.0, left + wide)), (max(0.0, bottom), top)))
    return Grid(positions=tuple(positions), height=height)
