"""The static picture of a trace: HTML without scripts, for notebooks without a kernel."""

from __future__ import annotations

from collections import defaultdict
from html import escape

import numpy as np

from shardscope.trace.summary.summary import TraceSummary, describe_recording
from shardscope.trace.tiles import COMMUNICATION, FIRST_HUE, MUTED, NUM_HUES, Tiler
from shardscope_widgets.kit.theme import COMPONENT_COLOURS

FRAME = "font:13px/1.45 system-ui,sans-serif;max-width:960px"
WIDTH = 960
GUTTER = 150
ROW, THIN_ROW = 9, 4
HEADER = 20
GAP = 3
MAX_MARKS = 3_000
"""Maximum marks; at about 20 bytes each, 60 kB."""
MAX_ROWS = 200
MAX_TALL_ROWS = 60
MAX_DRAWN_AT_ONCE = 2_000_000
"""Maximum slices whose tracks are drawn before the analysis: a quarter of a second."""
# As in front_end/colours.js.
HUES = ("#77aadd", "#99ddff", "#44bb99", "#bbcc33", "#eedd88", "#ffaabb")
COLOURS = {
    MUTED: "#b4bac2",
    COMMUNICATION: COMPONENT_COLOURS["communication"],
    **{FIRST_HUE + number: HUES[number] for number in range(NUM_HUES)},
}


def draw_picture(tiler: Tiler, summary: TraceSummary) -> str:
    """Return sentences, the tracks over the whole span as SVG, and the table of ranks."""
    sentences = "".join(f"<li>{escape(sentence)}</li>" for sentence in summary.sentences)
    svg = _draw_tracks(tiler) if len(tiler.trace) else ""
    return f"<div style='{FRAME}'><ul>{sentences}</ul>{svg}{summary.render_rank_table()}</div>"


def draw_unfinished_picture(tiler: Tiler, note: str) -> str:
    """Return the picture of a trace that is not analysed: what was recorded, ``note``, and the tracks."""
    sentences = "".join(f"<li>{escape(text)}</li>" for text in (describe_recording(tiler.trace), note))
    svg = _draw_tracks(tiler) if 0 < len(tiler.trace) <= MAX_DRAWN_AT_ONCE else ""
    return f"<div style='{FRAME}'><ul>{sentences}</ul>{svg}</div>"


def _draw_tracks(tiler: Tiler) -> str:
    """Return every track except Python stacks, in rank order, up to :data:`MAX_ROWS` rows."""
    trace = tiler.trace
    top_of_row: dict[int, int] = {}
    texts: list[str] = []
    y, num_left_out, rank = 0, 0, None
    num_rows = sum(track.num_rows for track in trace.tracks if track.kind != "python")
    tall = ROW if num_rows <= MAX_TALL_ROWS else THIN_ROW
    for position, track in enumerate(trace.tracks):
        first = int(tiler.first_row_of_track[position])
        if track.kind == "python" or len(top_of_row) + track.num_rows > MAX_ROWS:
            num_left_out += 1
            continue
        if track.rank != rank:
            rank = track.rank
            texts.append(f"<text x='0' y='{y + 14}' font-weight='bold'>rank {rank}</text>")
            y += HEADER
        name = track.name if len(track.name) <= 22 else track.name[:21] + "…"
        texts.append(
            f"<text x='12' y='{y + 8}'>{escape(name)}<title>{escape(track.name[:200])}</title></text>"
        )
        for row in range(track.num_rows):
            top_of_row[first + row] = y + row * tall
        y += max(track.num_rows * tall, 11) + GAP
    if num_left_out:
        what = "1 more track" if num_left_out == 1 else f"{num_left_out:,} more tracks"
        texts.append(f"<text x='0' y='{y + 12}'>{what} in the live view</text>")
        y += HEADER
    duration = trace.duration_seconds
    texts.append(f"<text x='{GUTTER}' y='{y + 12}'>0</text>")
    end = f"{duration * 1e3:,.4g} ms" if duration < 1 else f"{duration:,.4g} s"
    texts.append(f"<text x='{WIDTH}' y='{y + 12}' text-anchor='end'>{end}</text>")
    marks = _draw_marks(tiler, top_of_row, tall - 1)
    label = f"Trace of {len(trace.ranks):,} ranks over {end}; the table below has the times"
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {y + HEADER}' role='img' "
        f"aria-label='{escape(label)}' style='width:100%;max-width:{WIDTH}px;height:auto' "
        f"font-family='sans-serif' font-size='11' fill='currentColor'>{''.join(texts)}{marks}</svg>"
    )


def _draw_marks(tiler: Tiler, top_of_row: dict[int, int], tall: int) -> str:
    """Return one path per colour. If there are too many marks, merge neighbours over more pixels."""
    span = max(tiler.trace.duration_ns_total, 1)
    rows = np.array(sorted(top_of_row), dtype=np.int64)
    width = WIDTH - GUTTER
    while True:
        columns = tiler.build_tile(0, span, width).columns
        bounds = columns["row_first"].astype(np.int64)
        if int((bounds[rows + 1] - bounds[rows]).sum()) <= MAX_MARKS or width < 20:
            break
        width //= 2
    scale = (WIDTH - GUTTER) / span
    paths: dict[int, list[str]] = defaultdict(list)
    num_left = MAX_MARKS
    for row in rows.tolist():
        first, last = int(bounds[row]), int(bounds[row + 1])
        last = min(last, first + num_left)
        num_left -= last - first
        y = top_of_row[row]
        for mark in range(first, last):
            x = GUTTER + float(columns["start"][mark]) * scale
            wide = max(float(columns["duration"][mark]) * scale, 0.5)
            paths[int(columns["colour"][mark])].append(f"M{x:.1f} {y}h{wide:.1f}v{tall}h-{wide:.1f}z")
    return "".join(
        f"<path fill='{COLOURS[colour]}' d='{''.join(parts)}'/>" for colour, parts in sorted(paths.items())
    )
