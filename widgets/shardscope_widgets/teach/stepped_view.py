"""The base class of teaching figures that are walked through step by step, with a choice above them."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets as widgets

import shardscope as ss
from shardscope_widgets.kit import controls
from shardscope_widgets.teach.stepped_chart import SteppedChart
from shardscope_widgets.teach.teaching_view import TeachingView, write_heading

HEIGHT_WITHOUT_FIGURE = 10


class SteppedView(TeachingView):
    """A figure with a choice above it and its key and table ``below``; a changed choice draws it again."""

    def __init__(
        self,
        choice: widgets.Dropdown | widgets.ToggleButtons,
        figure: SteppedChart,
        *below: widgets.HTML,
        width: str = "auto",
    ) -> None:
        self.heading = controls.create_html()
        self.choice, self.figure, self._below = choice, figure, below
        # Its own layout: it is hidden where there is nothing to choose from.
        choice.layout = widgets.Layout(width=width)
        choice.observe(self._choose, "value")
        super().__init__(self.heading, choice, figure, *below)

    @property
    def step(self) -> int:
        """Index of the shown step; set it to go to another."""
        return int(self.figure.step)

    @step.setter
    def step(self, step: int) -> None:
        self.figure.step = step

    def _offer(self, options: Sequence[tuple[str, object]], value: object, notes: Sequence[str] = ()) -> None:
        """Set the choice without drawing; ``notes`` are its buttons' tooltips."""
        self.choice.unobserve(self._choose, "value")
        self.choice.options = options or [("", None)]
        self.choice.value = value if options else None
        self.choice.observe(self._choose, "value")
        if isinstance(self.choice, widgets.ToggleButtons):
            self.choice.tooltips = notes
        self.choice.layout.display = "" if len(options) > 1 else "none"

    def _draw_choice(self) -> None:
        """Draw :attr:`plan` as the choice says."""
        raise NotImplementedError

    def _refuse(self, plan: ss.Plan, why: str) -> None:
        """Show why there is no figure of ``plan``."""
        self.heading.value = write_heading(plan, [why])
        for part in self._below:
            part.value = ""
        self.figure.draw_steps(
            [{} for _ in self.figure.data], {"height": HEIGHT_WITHOUT_FIGURE, "showlegend": False}, []
        )

    def _choose(self, change: object) -> None:
        if self.plan is not None:
            self._draw_choice()
