"""The base class of figures that teach, their heading and their legend."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

import ipywidgets as widgets

import shardscope as ss
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.display_names import describe_plan, name_model
from shardscope_widgets.kit.sheet import Sheet
from shardscope_widgets.kit.view import View


class TeachingView(View):
    """A figure of a plan that is drawn in place when :meth:`show` receives another plan."""

    title = ""

    def __init__(self, *parts: widgets.Widget) -> None:
        self.plan: ss.Plan | None = None
        super().__init__([Sheet("memory", "teach"), *parts])
        controls.add_classes(self, "ss-root", "ss-view", "ss-teach")

    def show(self, plan: ss.Plan) -> None:
        """Draw another plan."""
        raise NotImplementedError

    @property
    def page_title(self) -> str:
        """Title of the page that :meth:`to_html` writes."""
        name = name_model(self.plan.architecture) if self.plan else ""
        return f"{self.title}: {name}" if name else self.title


def write_heading(plan: ss.Plan, sentences: Iterable[str]) -> str:
    """Return the plan in a sentence, and what the figure shows of it."""
    return f"<p>{describe_plan(plan)}</p>" + "".join(f"<p>{escape(one)}</p>" for one in sentences)


def render_key(entries: Iterable[tuple[str, str, str]]) -> str:
    """Return a legend of (CSS background, name, note)."""
    rows = "".join(
        f"<span class='ss-entry' title='{escape(note, quote=True)}'>"
        f"<i class='ss-swatch' style='background:{background}'></i>{escape(name)}</span>"
        for background, name, note in entries
    )
    return f"<div class='ss-key'>{rows}</div>"
