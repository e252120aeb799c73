"""A chart that is walked through step by step, in the browser: slider, buttons, keys and playback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import traitlets

from shardscope_widgets.kit.chart import Chart
from shardscope_widgets.kit.front_end import front_end_text
from shardscope_widgets.kit.saved.chart_svg import draw_svg


@dataclass(frozen=True)
class Frame:
    """Changes of the figure in one step, and the step's caption."""

    words: str
    traces: Mapping[int, Mapping[str, object]] = field(default_factory=dict)
    """Whole properties by trace index, such as ``{3: {"x": [1, 2]}}``."""
    layout: Mapping[str, object] = field(default_factory=dict)
    """Whole properties of the layout, such as ``shapes``."""


class SteppedChart(Chart):
    """A chart with frames. Its front end merges the frame of :attr:`step` into the figure without the kernel.

    The same front end works in a page from disk (``kit/saved/saved_page.py``).
    """

    _esm = front_end_text("kit/front_end", "keys.js", "chart.js", "steps.js", "steps_export.js")
    step = traitlets.Int(0, help="Index of the shown step, from 0.").tag(sync=True)
    _frames: traitlets.List[dict[str, object]] = traitlets.List(help="Frames as JSON.").tag(sync=True)

    def draw_steps(
        self,
        traces: Sequence[Mapping[str, object]],
        layout: Mapping[str, object],
        frames: Sequence[Frame],
        step: int = 0,
    ) -> None:
        """Show a figure with these frames, at ``step``."""
        self._frames = [
            {
                "words": frame.words,
                "traces": {str(index): dict(properties) for index, properties in frame.traces.items()},
                "layout": dict(frame.layout),
            }
            for frame in frames
        ]
        self.step = step
        self.redraw(traces, layout)

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return len(self._frames)

    @property
    def words(self) -> str:
        """Caption of the shown step."""
        return str(self._frames[self.step]["words"]) if self._frames else ""

    def to_svg(self) -> str:
        """Return the figure at the shown step as one ``<svg>`` element, without a browser."""
        frame = self._frames[self.step] if self._frames else {}
        changes, layout = frame.get("traces", {}), frame.get("layout", {})
        assert isinstance(changes, dict) and isinstance(layout, dict)
        traces = [{**trace, **changes.get(str(index), {})} for index, trace in enumerate(self._data)]
        return draw_svg(traces, {**self._layout_obj._props, **layout}, label=self.label)

    @traitlets.validate("step")
    def _limit_step(self, proposal: traitlets.Bunch) -> int:
        return max(0, min(int(proposal["value"]), len(self._frames) - 1)) if self._frames else 0

    @traitlets.observe("step")
    def _note_step(self, _: object) -> None:
        self.revision += 1  # The saved picture shows the same step.
