"""A trace as one HTML file that works from disk: the view's own front end, and all columns in the page."""

from __future__ import annotations

import base64
import json
import os
import struct
import zlib
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardscope.core.number_format import format_number
from shardscope.trace import Trace
from shardscope.trace.analysis.collectives import find_collectives
from shardscope.trace.counters import COUNTER_COLUMNS, INSTANT_COLUMNS, MarkTiler
from shardscope.trace.nesting import mark_recursive_calls
from shardscope.trace.path_marks import PATH_COLUMNS, PathMarks
from shardscope.trace.summary.summary import TraceSummary
from shardscope.trace.tiles import Column, Tiler, pack_columns
from shardscope_widgets.trace.picture import draw_picture

MAX_SLICES = 500_000
"""Maximum slices of a page: about 20 MB of file, and a second to open."""
MAX_ARGUMENT_BYTES = 128 * 1024**2
"""Maximum bytes of arguments before compression; with more, a page has none and says so."""
POINTS = 20_000
"""Width at which counters, instants and the path are reduced over the whole time."""

Int64s = npt.NDArray[np.int64]

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ margin: 16px; background: #ffffff; color: #1d2329; font: 13px/1.45 system-ui, sans-serif; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #111518; color: #e8ebee; }} }}
{css}
header {{ max-width: 1200px; margin: 0 3px 12px; }}
header h1 {{ margin: 0 0 4px; font-size: 16px; }}
header p {{ margin: 0 0 4px; }}
header ul {{ margin: 4px 0; padding-left: 18px; }}
header summary {{ cursor: pointer; }}
#trace .ss-trace-stage {{ height: max({height}px, 100vh - 362px) !important; }}
</style></head>
<body class="ss-root"><header><h1>{title}</h1>{header}</header>
<div id="trace">Opening the trace…</div>
<noscript>{picture}</noscript>
<script type="application/octet-stream" id="trace-data">{data}</script>
<script type="module">
{script}
</script></body></html>
"""


def choose_slices(trace: Trace, start_seconds: float | None, end_seconds: float | None) -> Int64s:
    """Return the slices of a page. Raises ``ValueError`` if they are more than :data:`MAX_SLICES`."""
    start = 0.0 if start_seconds is None else start_seconds * 1e9
    end = float("inf") if end_seconds is None else end_seconds * 1e9
    selected = np.flatnonzero((trace.end_ns >= start) & (trace.start_ns <= end))
    if len(selected) > MAX_SLICES:
        share = MAX_SLICES / len(selected)
        first = max(start, 0.0) / 1e9
        last = first + 0.9 * share * (min(end, trace.duration_ns_total) / 1e9 - first)
        raise ValueError(
            f"The page would have {len(selected):,} slices; allowed: up to {MAX_SLICES:,}. Fix: a part of "
            f"the trace, such as to_html(path, start_seconds={first:.4g}, end_seconds={last:.4g})."
        )
    return selected


def write_page(
    path: str | os.PathLike[str],
    state: dict[str, object],
    tiler: Tiler,
    marks: MarkTiler,
    highlighted: PathMarks | None,
    slices: Int64s,
    *,
    css: str,
    script: str,
    summary: TraceSummary,
    limits: Sequence[str],
) -> Path:
    """Write the page of these slices and return its path. ``state`` has the front end's traits.

    ``limits`` are sentences about what the page does not have.
    """
    trace = tiler.trace
    columns = _list_columns(tiler, slices)
    arguments = _list_arguments(trace, slices)
    columns |= arguments
    if len(slices) and not arguments["args_first"][1]:
        size = MAX_ARGUMENT_BYTES >> 20
        limits = [*limits, f"The arguments of slices are left out: they have more than {size} MiB."]
    span = (-1e15, 1e15)
    whole = (0.0, float(max(trace.duration_ns_total, 1)), POINTS)
    for prefix, kinds, cut in (
        ("counter", COUNTER_COLUMNS, marks.cut_counters(*whole)),
        ("instant", INSTANT_COLUMNS, marks.cut_instants(*span, 2**40)),
        ("path", PATH_COLUMNS, highlighted.cut(*whole) if highlighted is not None else None),
    ):
        packed = pack_columns(cut, kinds) if cut is not None else []
        for (name, kind), data in zip(kinds, packed, strict=False):
            columns[f"{prefix}_{name}"] = (kind, bytes(data))
    sizes = {"<f8": 8, "<u4": 4, "<i4": 4, "u1": 1}
    head = json.dumps(
        {
            "state": state,
            "names": [name[:400] for name in trace.names],
            "categories": trace.categories,
            "has_path": highlighted is not None,
            "columns": [(name, kind, len(data) // sizes[kind]) for name, (kind, data) in columns.items()],
        }
    ).encode()
    # Piece by piece: a page may have a hundred megabytes before compression.
    packer = zlib.compressobj(6, wbits=zlib.MAX_WBITS | 16)  # gzip
    pieces = [struct.pack("<I", len(head)), head, *(data for _, data in columns.values())]
    compressed = b"".join([*map(packer.compress, pieces), packer.flush()])
    packed_body = base64.b64encode(compressed).decode()
    ranks = "1 rank" if len(trace.ranks) == 1 else f"{len(trace.ranks):,} ranks"
    name = f"{trace.name}: " if trace.name else ""
    title = f"Trace of {name}{ranks}, {format_number(trace.duration_seconds)} s"
    target = Path(path)
    target.write_text(
        PAGE.format(
            title=escape(title),
            css=css,
            height=state["height"],
            header=_render_header(summary.sentences, limits),
            picture=draw_picture(tiler, summary),
            data=packed_body,
            script=script,
        ),
        encoding="utf-8",
    )
    return target


def _render_header(sentences: Sequence[str], limits: Sequence[str]) -> str:
    """Return what the page lacks, the first two sentences of the summary, and the others on demand."""
    lead, others = sentences[:2], sentences[2:]
    texts = [*limits, " ".join(lead)]
    header = "".join(f"<p>{escape(text)}</p>" for text in texts)
    if others:
        items = "".join(f"<li>{escape(sentence)}</li>" for sentence in others)
        header += f"<details><summary>What costs time in it</summary><ul>{items}</ul></details>"
    return header


def _list_columns(tiler: Tiler, slices: Int64s) -> dict[str, tuple[str, bytes]]:
    """Return type and bytes of each column of the slices; indices are those among them."""
    trace = tiler.trace
    place = np.full(len(trace) + 1, -1, np.int64)  # the last one, for index -1
    place[slices] = np.arange(len(slices))
    sources, targets = trace.flows
    sources, targets = place[sources], place[targets]
    has_both = (sources >= 0) & (targets >= 0)
    collectives = find_collectives(trace)
    call = np.full(len(trace), -1, np.int64)
    call[collectives.slices] = [row["call"] for row in collectives]
    columns: dict[str, tuple[str, Column]] = {
        "start": ("<f8", trace.start_ns[slices]),
        "duration": ("<f8", trace.duration_ns[slices]),
        "name": ("<u4", trace.name_index[slices]),
        "category": ("<u4", trace.category_index[slices]),
        "parent": ("<i4", place[trace.parents[slices]]),
        "launch": ("<i4", place[trace.activity.launches[slices]]),
        "call": ("<i4", call[slices]),
        "row_first": ("<u4", np.searchsorted(tiler.row[slices], np.arange(tiler.num_rows + 1))),
        "colour": ("u1", tiler.name_colour),
        "is_recursive": ("u1", mark_recursive_calls(trace.parents, trace.name_index)[slices]),
        "is_inside_category": ("u1", mark_recursive_calls(trace.parents, trace.category_index)[slices]),
        "flow_source": ("<i4", sources[has_both]),
        "flow_target": ("<i4", targets[has_both]),
    }
    return {name: (kind, values.astype(kind).tobytes()) for name, (kind, values) in columns.items()}


def _list_arguments(trace: Trace, slices: Int64s) -> dict[str, tuple[str, bytes]]:
    """Return the arguments' text and where each slice's begins; empty columns if they are too long."""
    texts = [b""] * len(slices)
    num_bytes = 0
    for position, text in trace.arguments.iterate(slices):
        num_bytes += len(text)
        if num_bytes > MAX_ARGUMENT_BYTES:
            return {"args_first": ("<u4", b""), "args": ("u1", b"")}
        texts[position] = text
    first = np.cumsum([0, *(len(text) for text in texts)]).astype("<u4")
    return {"args_first": ("<u4", first.tobytes()), "args": ("u1", b"".join(texts))}
