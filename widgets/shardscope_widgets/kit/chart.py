"""What both charts need of plotly's FigureWidget."""

from __future__ import annotations

import gzip
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import anywidget
import plotly.graph_objects as go
import traitlets
from ipywidgets import widget_serialization

from shardscope_widgets.kit import controls
from shardscope_widgets.kit.front_end import front_end_text


class PlotlySource(anywidget.AnyWidget):
    """plotly's front end, once for all charts of a kernel: 5 MB of text, packed to 1.5 of bytes."""

    _esm = "export default {};"
    packed = traitlets.Bytes().tag(sync=True)

    @traitlets.default("packed")
    def _pack(self) -> bytes:
        return gzip.compress(str(go.FigureWidget._esm).encode(), compresslevel=6, mtime=0)


@cache
def _source() -> PlotlySource:
    return controls.keep(PlotlySource())


class Chart(go.FigureWidget):
    """A FigureWidget without a front end of its own (``front_end/chart.js`` says why)."""

    _esm = front_end_text("kit/front_end", "chart.js")
    _source = traitlets.Instance(PlotlySource).tag(sync=True, **widget_serialization)
    _drawn = traitlets.List(help="Properties as redraw last set them: the layout's, then each trace's.")

    @traitlets.default("_source")
    def _shared_source(self) -> PlotlySource:
        if _source().comm is None:  # closed with all widgets: Widget.close_all()
            _source.cache_clear()
        return _source()

    @traitlets.default("_drawn")
    def _nothing_drawn(self) -> list[dict[str, Any]]:
        return [{} for _ in range(len(self.data) + 1)]

    def redraw(self, traces: Sequence[Mapping[str, Any]], layout: Mapping[str, Any]) -> None:
        """Give each trace and the layout these properties, in one update.

        Only what differs from the last redraw reaches plotly, which takes a tenth of a millisecond for each
        property whether it changes or not.
        """
        with self.batch_update():
            nodes = (self.layout, *self.data)
            for node, drawn, wanted in zip(nodes, self._drawn, (layout, *traces), strict=True):
                for name, value in wanted.items():
                    if name not in drawn or drawn[name] != value:
                        node[name] = drawn[name] = value


def survive_reload(figure: Chart) -> Chart:
    """Let a page that is loaded anew find the figure as it is now, not as it was made.

    plotly sends every change as a message and leaves the synchronised state as it was at construction
    (``BaseFigureWidget.__init__``), so that a reloaded page would draw an old picture. Here that state is the
    living one itself. Nothing is sent by this: it is read only when a page asks for all state.
    """
    figure._trait_values["_widget_data"] = figure._data
    figure._trait_values["_widget_layout"] = figure._layout_obj._props
    return figure
