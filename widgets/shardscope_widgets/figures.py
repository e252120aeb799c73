"""What both charts need of plotly's FigureWidget."""

from __future__ import annotations

import plotly.graph_objects as go


def survive_reload(figure: go.FigureWidget) -> go.FigureWidget:
    """Let a page that is loaded anew find the figure as it is now, not as it was made.

    plotly sends every change as a message and leaves the synchronised state as it was at construction
    (``BaseFigureWidget.__init__``), so that a reloaded page would draw an old picture. Here that state is the
    living one itself. Nothing is sent by this: it is read only when a page asks for all state.
    """
    figure._trait_values["_widget_data"] = figure._data
    figure._trait_values["_widget_layout"] = figure._layout_obj._props
    return figure
