"""A plotly figure widget whose views all draw the current state of the figure."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import anywidget
import traitlets
from ipywidgets import widget_serialization
from plotly.offline import get_plotlyjs
from plotly.serializers import custom_serializers

from shardscope_widgets.kit import controls
from shardscope_widgets.kit.delayed_import import delay_import
from shardscope_widgets.kit.front_end import front_end_text
from shardscope_widgets.kit.saved.chart_svg import draw_svg

# plotly imports nbformat only for ``figure.show()``. nbformat imports jsonschema, which builds grammars for a
# second: that was more than half of the time that this package took to import.
with delay_import("nbformat"):
    from plotly.graph_objects import FigureWidget

ClickListener = Callable[[int, int, object], None]
"""Called with the trace index, the point index in that trace, and the point's ``customdata``."""

PLOTLY_PROTOCOL = ("_py2js_", "_js2py_", "_widget_", "_last_")
"""Prefixes of the traits through which plotly sends changes to its own front end."""

POINTS = ("x", "y", "customdata", "text")

# plotly.js is not an ES module: it checks for CommonJS first, and always sets a global on the page,
# where another version of plotly may be loaded.
AS_MODULE = """
const module = {{ exports: {{}} }}, found = globalThis.Plotly;
{script}
if (found === undefined) delete globalThis.Plotly;
else globalThis.Plotly = found;
export default module.exports;
"""


@cache
def get_packed_plotly() -> bytes:
    """Return plotly.js as a compressed ES module."""
    # Without a time stamp in the archive, every kernel sends the same bytes.
    return gzip.compress(AS_MODULE.format(script=get_plotlyjs()).encode(), compresslevel=6, mtime=0)


class PlotlySource(anywidget.AnyWidget):
    """plotly.js, shared by all charts of a kernel: 5 MB of text, compressed to 1.5 MB."""

    _esm = "export default {};"
    packed = traitlets.Bytes().tag(sync=True)

    @traitlets.default("packed")
    def _pack_script(self) -> bytes:
        return get_packed_plotly()


@cache
def _shared_plotly() -> PlotlySource:
    return controls.mark_as_shared(PlotlySource())


def _current_figure(_: object, chart: Chart) -> object:
    """Return the current figure for serialization: on a change, for a new view, or after a page reload."""
    # Both attributes are missing while plotly's constructor runs.
    traces, layout = getattr(chart, "_data", []), getattr(chart, "_layout_obj", None)
    # Hidden traces are not drawn, so their points are not sent.
    in_sight = [
        {name: value for name, value in trace.items() if name not in POINTS}
        if trace.get("visible") is False
        else trace
        for trace in traces
    ]
    figure = {"data": in_sight, "layout": layout._props if layout is not None else {}}
    return custom_serializers["to_json"](figure, None)


class Chart(FigureWidget):
    """A FigureWidget with its own front end, which receives the whole figure at each change.

    Use it like any figure: set attributes in ``batch_update``, call ``add_traces``, or pass many properties
    to :meth:`redraw`. :meth:`on_click` reports clicks on marks from any view, :meth:`to_svg` draws the figure
    without a browser.
    """

    _esm = front_end_text("kit/front_end", "keys.js", "chart.js", "chart_export.js")
    _source = traitlets.Instance(PlotlySource).tag(sync=True, **widget_serialization)
    _figure = traitlets.Dict(help="Traces and layout, read when they are sent.").tag(
        sync=True, to_json=_current_figure
    )
    label = traitlets.Unicode(
        "Chart", help="What the chart shows, and where its numbers are, for screen readers."
    ).tag(sync=True)
    clickable = traitlets.Bool(False, help="Whether clicks are reported, and marks look so.").tag(sync=True)
    revision = traitlets.Int(0, help="Counts what was sent; observe it to follow the figure.")
    _drawn: traitlets.List[dict[str, object]] = traitlets.List(
        help="Properties as redraw last set them: the layout's, then each trace's."
    )

    @property
    def words(self) -> str:
        """Caption of the saved picture; may be empty."""
        return ""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._listeners: list[ClickListener] = []
        super().__init__(*args, **kwargs)
        # Clicks arrive as messages of our own front end: plotly's callbacks are fed by traits of its own.
        self.on_msg(self._handle_message)
        self._send_figure()  # ipywidgets opened the widget before plotly created the figure.

    @traitlets.default("_source")
    def _shared_source(self) -> PlotlySource:
        if _shared_plotly().comm is None:  # closed with all other widgets by Widget.close_all()
            _shared_plotly.cache_clear()
        return _shared_plotly()

    @traitlets.default("_drawn")
    def _default_drawn(self) -> list[dict[str, object]]:
        return [{} for _ in range(len(self.data) + 1)]

    @traitlets.default("keys")
    def _default_keys(self) -> list[str]:
        # Sent as well, plotly's own changes would travel to a front end that takes the whole figure.
        return [name for name in self.traits(sync=True) if not name.startswith(PLOTLY_PROTOCOL)]

    def _send_figure(self, *_: object, **__: object) -> None:
        """Send the whole figure, whichever part of it changed."""
        self.send_state("_figure")
        self.revision += 1

    # Each of these methods sends a change to plotly's own front end (plotly/basewidget.py).
    _send_relayout_msg = _send_restyle_msg = _send_update_msg = _send_animate_msg = _send_figure
    _send_addTraces_msg = _send_moveTraces_msg = _send_deleteTraces_msg = _send_figure  # noqa: N815

    def redraw(self, traces: Sequence[Mapping[str, object]], layout: Mapping[str, object]) -> None:
        """Set these properties of each trace and of the layout in one update.

        Only properties that differ from the last redraw are set: plotly takes 0.1 ms to validate each.
        """
        with self.batch_update():
            nodes = (self.layout, *self.data)
            for node, drawn, wanted in zip(nodes, self._drawn, (layout, *traces), strict=True):
                for name, value in wanted.items():
                    if name not in drawn or drawn[name] != value:
                        node[name] = drawn[name] = value

    def on_click(self, listener: ClickListener) -> None:
        """Call ``listener(trace_index, point_index, customdata)`` when a mark is clicked in any view."""
        self._listeners.append(listener)
        self.clickable = True

    def to_svg(self) -> str:
        """Return the current figure as one ``<svg>`` element, without a browser."""
        return draw_svg(self._data, self._layout_obj._props, label=self.label)

    def _handle_message(self, _: object, content: object, __: object) -> None:
        match content:
            case {"click": {"trace": int(trace), "point": int(point), "customdata": customdata}}:
                # A click sent before the figure changed may refer to a trace that no longer exists.
                if 0 <= trace < len(self.data):
                    for listener in self._listeners:
                        listener(trace, point, customdata)
