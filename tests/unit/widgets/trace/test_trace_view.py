"""Tests of the trace view's traits and messages, without a browser."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from shardscope.trace import Trace
from shardscope.trace.tile_encoding import TICKS_PER_PIXEL, decode_columns
from shardscope_widgets.trace import TraceView, saved_page
from shardscope_widgets.trace import view as trace_view

FIXTURE = Path(__file__).parents[3] / "fixtures" / "trace_2_ranks"


@pytest.fixture(scope="module")
def trace() -> Trace:
    return Trace.load(FIXTURE)


@pytest.fixture
def view(trace: Trace) -> TraceView:
    view = TraceView(trace)
    view.sent = []
    view.send = lambda content, buffers=None: view.sent.append((content, buffers))
    return view


def handle_message(view: TraceView, content: Any) -> None:
    view._handle_custom_msg(content, [])


def tile_request(view: TraceView, **changed: Any) -> dict[str, Any]:
    return {
        "type": "tile",
        "id": 1,
        "t0_ns": 0,
        "t1_ns": view.trace.duration_ns_total,
        "width": 800,
        "rows": list(range(view._tiler.num_rows)),
        "counters": [],
        "wants_path": False,
        **changed,
    }


def read_reply(view: TraceView) -> tuple[dict[str, Any], Any]:
    """Return the latest reply with a tile, and its columns."""
    reply, (data,) = view.sent[-1]
    return reply, decode_columns(reply["columns"], bytes(data))


def test_fault_48_front_end_loads_nothing_from_the_network(view: TraceView) -> None:
    assert "export default" in view._esm
    for text in (view._esm, view._css):
        assert "http://" not in text and "https://" not in text and "import " not in text.split("export")[-1]


def test_accepts_a_trace_or_a_path(trace: Trace) -> None:
    assert len(TraceView(FIXTURE).trace) == len(TraceView(str(FIXTURE)).trace) == len(trace)
    with pytest.raises(ValueError, match="Fix: "):
        TraceView("nowhere")


@pytest.mark.parametrize("height", [0, -1, 1e9, True, "tall", None, float("nan")])
def test_rejects_invalid_height(trace: Trace, height: Any) -> None:
    with pytest.raises(ValueError, match=r"TraceView\.height"):
        TraceView(trace, height=height)


def test_tile_is_sent_as_binary_columns(view: TraceView) -> None:
    handle_message(view, tile_request(view))
    reply, columns = read_reply(view)
    assert reply["type"] == "tile" and reply["id"] == 1
    assert reply["rows"] == list(range(view._tiler.num_rows))
    assert int(columns["count"].sum()) == len(view.trace)


def test_mark_of_several_slices_is_measured_and_picked(view: TraceView) -> None:
    row = int(np.diff(view._tiler.row_bounds).argmax())
    handle_message(view, tile_request(view, width=20, rows=[row]))
    _, columns = read_reply(view)
    largest = int(columns["count"].argmax())
    first = int(columns["row_slice"][0] + columns["count"][:largest].sum())
    count = int(columns["count"][largest])
    assert count > 1
    mine = slice(first, first + count)
    start, end = view.trace.start_ns[mine], view.trace.end_ns[mine]
    handle_message(view, {"type": "mark", "id": 2, "index": first, "count": count})
    assert view.sent[-1][0]["start_ns"] == int(start[0])
    assert view.sent[-1][0]["duration_ns"] == int(end[-1] - start[0])
    handle_message(view, {"type": "pick", "id": 3, "index": first, "count": count})
    assert view.selected is not None
    assert view.selected["index"] == first + int(view.trace.duration_ns[mine].argmax())


def test_answers_requests_for_names_and_totals(view: TraceView) -> None:
    handle_message(view, {"type": "names", "id": 2, "indices": [0, 1]})
    assert view.sent[-1][0]["names"] == view.trace.names[:2]
    handle_message(view, {"type": "totals", "id": 3, "t0_ns": 0, "t1_ns": view.trace.duration_ns_total})
    rows = view.sent[-1][0]["rows"]
    assert rows and rows[0]["self_seconds"] >= rows[-1]["self_seconds"]


def test_show_interval_moves_the_view_with_a_margin(view: TraceView) -> None:
    view.show_interval(0.001, 0.002, rank=1)
    assert view.viewport_seconds == pytest.approx((0.0009, 0.0021))
    track = view.trace.tracks[-1]
    view.show_interval(0.001, 0.001, rank=track.rank, track=track.name)
    start, end = view.viewport_seconds
    assert start < 0.001 < end
    for wrong in [
        {"rank": 7},
        {"rank": 0, "track": "stream 99"},
        {"track": 5},
        {"start_seconds": 0.003},
        {"end_seconds": float("nan")},
        {"start_seconds": None},
    ]:
        with pytest.raises(ValueError, match="show_interval"):
            view.show_interval(**{"start_seconds": 0.001, "end_seconds": 0.002, **wrong})
    assert view.viewport_seconds == (start, end)


def test_highlighted_path_comes_with_the_tiles(view: TraceView) -> None:
    path = view.trace.critical_path()
    view.highlight_path(path)
    handle_message(view, tile_request(view, width=16_000, rows=[0], wants_path=True))
    reply, columns = read_reply(view)
    tick = (reply["t1_ns"] - reply["t0_ns"]) // reply["width"] // TICKS_PER_PIXEL
    begin = reply["t0_ns"] - (reply["t1_ns"] - reply["t0_ns"]) + columns["path_gap"][0] * tick
    assert reply["has_path"] and begin / 1e9 == pytest.approx(path[0]["start_seconds"], abs=1e-6)
    assert float(columns["path_extent"].sum()) * tick / 1e9 == pytest.approx(path.seconds, rel=0.05)
    assert columns["path_is_slice"].any() and columns["path_row"].max() < view._tiler.num_rows
    view.highlight_path([{"index": 5}])
    handle_message(view, tile_request(view, wants_path=True))
    assert read_reply(view)[1]["path_row"].tolist() == [int(view._tiler.row[5])]
    view.highlight_path(None)
    handle_message(view, tile_request(view, wants_path=True))
    assert "path_row" not in read_reply(view)[1]
    for wrong in [{}, {"rank": 99, "start_seconds": 0, "seconds": 1}, {"rank": 0, "start_seconds": "0"}]:
        with pytest.raises(ValueError, match="Fix: "):
            view.highlight_path([wrong])


def test_selection_reads_back_and_clears(view: TraceView) -> None:
    handle_message(view, {"type": "select", "id": 1, "index": 5})
    assert view.selected is not None
    assert {"name", "category", "rank", "track", "start_seconds", "duration_seconds", "args"} <= set(
        view.selected
    )
    handle_message(view, {"type": "select", "id": 1, "index": None})
    assert view.selected is None


def test_search_counts_matches_and_visits_them_in_time_order(view: TraceView) -> None:
    view.search = "allreduce"
    view.search = "AddMM"
    assert view.num_matches == sum("addmm" in view.trace.names[i].lower() for i in view.trace.name_index)
    seen = []
    for _ in range(view.num_matches + 1):
        handle_message(view, {"type": "find", "id": 1, "direction": 1})
        seen.append((view.selected or {})["start_seconds"])
    assert seen[:-1] == sorted(seen[:-1]) and seen[-1] == seen[0]
    view.search = ""
    assert view.num_matches == 0


def test_viewport_must_be_two_ascending_times(view: TraceView) -> None:
    view.viewport_seconds = [0.001, 0.002]
    assert view.viewport_seconds == (0.001, 0.002)
    for bad in [(2, 1), (0, 0), (float("nan"), 1), "ab", 5, None, (0, 1, 2), (0, 1e30)]:
        with pytest.raises(ValueError, match="viewport_seconds"):
            view.viewport_seconds = bad
    assert view.viewport_seconds == (0.001, 0.002)


TILE = {
    "type": "tile",
    "id": 1,
    "t0_ns": 0,
    "t1_ns": 1000,
    "width": 800,
    "rows": [0],
    "counters": [],
    "wants_path": False,
}


@pytest.mark.parametrize(
    "content",
    [
        None,
        7,
        [],
        {},
        {"type": "rm"},
        {"type": ["tile"]},
        {"type": "tile"},
        {**TILE, "extra": 1},
        {**TILE, "t0_ns": 1000, "t1_ns": 0},
        {**TILE, "t0_ns": float("nan")},
        {**TILE, "t1_ns": 1e300},
        {**TILE, "t0_ns": "0"},
        {**TILE, "width": 10**9},
        {**TILE, "width": True},
        {**TILE, "id": "x"},
        {**TILE, "rows": [-1]},
        {**TILE, "rows": [10**6]},
        {**TILE, "rows": 5},
        {**TILE, "counters": [99]},
        {**TILE, "wants_path": "yes"},
        {"type": "mark", "id": 1, "index": None, "count": 1},
        {"type": "mark", "id": 1, "index": 0, "count": 10**9},
        {"type": "pick", "id": 1, "index": 0, "count": 0},
        {"type": "select", "id": 1, "index": -1},
        {"type": "select", "id": 1, "index": 10**9},
        {"type": "names", "id": 1, "indices": list(range(100_000))},
        {"type": "names", "id": 1, "indices": [0, "1"]},
        {"type": "names", "id": 1, "indices": "0" * 10**6},
        {"type": "find", "id": 1, "direction": 9},
        {"type": "area", "id": 1, "t0_ns": 0, "t1_ns": 1000, "tracks": [99]},
    ],
)
def test_fault_44_invalid_messages_are_reported_and_ignored(view: TraceView, content: Any) -> None:
    handle_message(view, content)
    assert view.error and len(view.error) < 400
    assert view.sent == [] and view.selected is None
    handle_message(view, tile_request(view))
    assert view.error == "" and len(view.sent) == 1


@pytest.mark.parametrize(
    "state",
    [
        {"viewport_seconds": [3, 1]},
        {"viewport_seconds": "all of it"},
        {"search": "x" * 10_000},
        {"search": 5},
        {"height": 10**9},
        {"_scene": {}},
        {"selected": {"name": "forged"}},
    ],
)
def test_fault_44_invalid_front_end_state_is_reported_and_ignored(
    view: TraceView, state: dict[str, Any]
) -> None:
    before = view.get_state(["viewport_seconds", "search", "height", "_scene", "selected"])
    view.set_state(state)
    assert view.error
    assert view.get_state(list(before)) == before


def test_front_end_can_set_viewport_and_search(view: TraceView) -> None:
    view.set_state({"viewport_seconds": [0.001, 0.004], "search": "mm", "_view_count": 1})
    assert view.viewport_seconds == (0.001, 0.004)
    assert view.num_matches > 0 and view.error == ""


def render_static_html(view: TraceView) -> str:
    shown = view._repr_mimebundle_()
    data = shown[0] if isinstance(shown, tuple) else shown
    assert data is not None and "application/vnd.jupyter.widget-view+json" in data
    return str(data["text/html"])


def test_fault_47_static_output_has_an_svg_and_a_table(view: TraceView) -> None:
    html = render_static_html(view)
    assert "<svg" in html and "<path" in html and "<table" in html
    assert "rank 0" in html and "rank 1" in html
    assert "<script" not in html and len(html) < 100_000
    ElementTree.fromstring(html[html.index("<svg") : html.index("</svg>") + 6])


def test_names_in_the_static_output_are_escaped(tmp_path: Path) -> None:
    name = "<script>alert(1)</script>'\"&"
    event = {"ph": "X", "cat": "op", "name": name, "pid": 1, "tid": name, "ts": 1.0, "dur": 9.0}
    (tmp_path / "rank-0.json").write_text(json.dumps({"traceEvents": [event]}))
    html = render_static_html(TraceView(tmp_path))
    assert "<script" not in html
    ElementTree.fromstring(html[html.index("<svg") : html.index("</svg>") + 6])


def test_static_output_of_a_large_trace_stays_small(tmp_path: Path) -> None:
    for rank in range(60):
        events = [
            {
                "ph": "X",
                "cat": "op",
                "name": f"op {i % 9}",
                "pid": 1,
                "tid": 1 + i % 5,
                "ts": i * 3.0,
                "dur": 2.0,
            }
            for i in range(1500)
        ]
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps({"traceEvents": events}))
    html = render_static_html(TraceView(tmp_path))
    assert len(html) < 100_000 and "more tracks" in html


def test_static_output_has_streams_and_omits_python_stacks() -> None:
    html = render_static_html(TraceView(FIXTURE.parent / "trace_with_stacks"))
    assert "stream 7" in html and "pt_autograd_0" in html and "Python stacks of" not in html
    assert "GPU idle" in html and len(html) < 100_000


def test_static_output_of_an_empty_trace_shows_zero_slices(tmp_path: Path) -> None:
    (tmp_path / "rank-0.json").write_text('{"traceEvents": []}')
    assert "0 slices" in render_static_html(TraceView(tmp_path))


def test_fault_43_closed_trace_views_are_garbage_collected(trace: Trace) -> None:
    alive = []
    for _ in range(100):
        view = TraceView(trace)
        alive.append(weakref.ref(view))
        view.close()
        del view
    gc.collect()
    assert sum(ref() is not None for ref in alive) <= 1


def test_a_closed_trace_view_leaves_no_widget_and_frees_its_trace_at_once() -> None:
    """Without the garbage collector, which may not run before many traces of gigabytes are there."""
    view = TraceView(FIXTURE)
    gc.collect()
    gc.disable()
    try:
        alive, layout = weakref.ref(view.trace), view.layout
        view.close()
        del view
        assert alive() is None and layout.comm is None
    finally:
        gc.enable()


def test_saved_page_is_one_file_with_escaped_text(tmp_path: Path) -> None:
    name = "</script><script>alert(1)</script>"
    event = {"ph": "X", "cat": "op", "name": name, "pid": 1, "tid": 1, "ts": 1.0, "dur": 9.0}
    (tmp_path / "rank-0.json").write_text(json.dumps({"traceEvents": [event]}))
    path = TraceView(tmp_path).to_html(tmp_path / "page.html")
    text = path.read_text()
    assert "alert(1)</script>" not in text and text.count("<script") == 2
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "") and "https://" not in text


def test_saved_page_of_a_large_trace_is_refused_with_a_part_that_fits(
    view: TraceView, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_page, "MAX_SLICES", len(view.trace) - 1)
    with pytest.raises(ValueError, match=r"Fix: .*end_seconds") as refusal:
        view.to_html(tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
    end = float(str(refusal.value).rsplit("end_seconds=", 1)[1].split(")")[0])
    assert view.to_html(tmp_path / "page.html", end_seconds=end).exists()
    with pytest.raises(ValueError, match="start_seconds"):
        view.to_html(tmp_path / "page.html", start_seconds="soon")


def test_tracks_of_a_page_of_a_part_count_the_slices_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = TraceView(FIXTURE)
    scenes: list[Any] = []
    monkeypatch.setattr(
        trace_view, "write_page", lambda path, state, *_, **__: scenes.append(state["_scene"])
    )
    view.to_html(tmp_path / "page.html", end_seconds=view.trace.duration_seconds / 2)
    (scene,) = scenes
    counts = [track["num_slices"] for track in scene["tracks"]]
    assert sum(counts) == scene["num_slices"] < len(view.trace)
    assert sum(track["num_slices"] for track in view._scene["tracks"]) == len(view.trace)
