"""Tests of the chart of a memory snapshot."""

from __future__ import annotations

import numpy as np

from shardscope.trace.memory_timeline import MemoryTimeline
from shardscope_widgets.memory.snapshot_figure import draw_snapshot

GIB = 2**30


def test_chart_shows_every_component_and_the_peak() -> None:
    sizes = {"before_history": [4, 4, 4], "activations": [0, 3, 0], "other": [0, 0, 1]}
    timeline = MemoryTimeline(
        num_bytes={name: np.array(values, np.int64) * GIB for name, values in sizes.items()},
        seconds=np.array([0.0, 0.5, 2.0]),
    )
    figure = draw_snapshot(timeline)
    assert [trace.name for trace in figure.data] == ["before the history", "activations", "other"]
    assert [list(trace.y) for trace in figure.data] == list(sizes.values())
    assert list(figure.data[0].x) == [0.0, 0.5, 2.0]
    (peak,) = figure.layout.annotations
    assert (peak.x, peak.y) == (0.5, 7.0) and peak.text.startswith("7.0")
    assert figure.layout.yaxis.title.text == "GiB" and figure.layout.xaxis.title.text == "seconds"


def test_chart_without_times_counts_events() -> None:
    timeline = MemoryTimeline(num_bytes={"other": np.array([0, GIB], np.int64)}, seconds=None)
    figure = draw_snapshot(timeline)
    assert list(figure.data[0].x) == [0, 1] and figure.layout.annotations[0].x == 1.0
