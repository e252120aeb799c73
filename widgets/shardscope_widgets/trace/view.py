"""The Python side of the trace view, which answers the front end's requests with binary tiles."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable

import anywidget
import numpy as np
import traitlets

from shardscope.core.errors import check_choice, check_integer, check_number
from shardscope.trace import Trace
from shardscope.trace.analysis.selection import SelectionContext, find_module
from shardscope.trace.chrome_export import iterate_chrome
from shardscope.trace.counters import MarkTiler
from shardscope.trace.path_marks import PathMarks
from shardscope.trace.tile_encoding import TileEncoder, TileRequest
from shardscope.trace.tiles import Tiler
from shardscope_widgets.kit.background_calls import BackgroundCalls, LatestRequest, find_running_loop
from shardscope_widgets.kit.front_end import front_end_text
from shardscope_widgets.kit.saved.saved_output import SavedOutput
from shardscope_widgets.trace.picture import draw_picture, draw_unfinished_picture
from shardscope_widgets.trace.requests import Request, RequestError, read_request
from shardscope_widgets.trace.saved_page import choose_slices, write_page

MAX_SEARCH_CHARACTERS = 500
MAX_NAME_CHARACTERS = 400
MAX_ARGS = 40
LEAST_MARGIN_SECONDS = 1e-7
MAX_ANALYSED_AT_ONCE = 100_000
"""Maximum slices that are analysed before the view is displayed: a quarter of a second."""
NOT_ANALYSED = (
    "The analysis of this trace was not finished when the notebook was saved. Run the cell again for its "
    "sentences and times."
)
MAX_DOWNLOAD_SLICES = 500_000
"""Maximum slices of a download: the kernel is busy for some seconds."""
PERFETTO_ORIGIN = "https://ui.perfetto.dev"
"""Opened when the user clicks, and only then; nothing is loaded from there into the notebook."""
PIECE_BYTES = 4 * 1024**2
_FOREIGN_TRAITS = frozenset(
    {"error", "height", "num_matches", "selected", "_path_number", "_revealed", "_scene"}
)


MimeBundle = tuple[dict[str, object], dict[str, object]]
"""Data and metadata of an output by MIME type."""
_MODULE_PARTS = (
    "types.js", "colours.js", "number_format.js", "layout.js", "tiles.js", "page.js", "state.js",
    "requests.js", "viewport.js", "folding.js", "tracks.js", "drawing.js", "slices.js", "counters.js",
    "path.js", "arrows.js", "area.js", "details.js", "perfetto.js", "pointer.js", "help.js",
    "keyboard.js", "search.js", "page_changes.js", "view.js",
)  # fmt: skip


class RefusedError(traitlets.TraitError, ValueError):
    """A ``ValueError`` that is also a traitlets error, so that traitlets restores the old value."""


class Interval(traitlets.TraitType[tuple[float, float], Sequence[float]]):
    """An interval of two times in seconds, the first earlier."""

    default_value = (0.0, 1.0)

    def validate(self, obj: object, value: object) -> tuple[float, float]:
        """Return ``value`` as two floats. Raises :class:`RefusedError`."""
        start = end = float("nan")
        if isinstance(value, Iterable):
            with suppress(TypeError, ValueError):
                start, end = (float(bound) for bound in value)
        if not -1e9 < start < end < 1e9:
            raise RefusedError(
                f"{type(obj).__name__}.{self.name} is {str(value)[:80]}; "
                "allowed: two times in seconds, ascending. Nearest fix: (0.0, 1.0)."
            )
        return start, end


@runtime_checkable
class HasTrace(Protocol):
    """A run, which may have recorded a trace."""

    def trace(self) -> Trace:
        """Return the trace. Raises ``ValueError`` if there is none."""


def _load_trace(source: object) -> Trace:
    """Return the trace given by ``source``: itself, a run's trace, or a path's. Raises ``ValueError``."""
    if isinstance(source, Trace):
        return source
    return source.trace() if isinstance(source, HasTrace) else Trace.load(source)


class TraceView(anywidget.AnyWidget):
    """All ranks of a trace on one time axis: threads and streams as tracks, calls nested below their callers.

    ``TraceView(trace)``, ``TraceView(run)`` or ``TraceView(path)``. Wheel or W/S zooms, drag or A/D pans, 0
    shows all, / searches, ? lists all keys. ``view.viewport_seconds``, ``view.selected`` and ``view.search``
    can be read; the first and last can be set. Raises ``ValueError`` if there is no readable trace.
    """

    _esm = "\n".join(
        [
            front_end_text("kit/front_end", "keys.js", "saved_picture.js"),
            front_end_text("trace/front_end", *_MODULE_PARTS),
        ]
    )
    _css = front_end_text("trace/front_end", "style.css")

    viewport_seconds = Interval().tag(
        sync=True,
        # A list, as in JSON: otherwise the front end's values would be echoed back to it while it pans.
        to_json=lambda value, widget: list(value),
        from_json=lambda value, widget: value,
    )
    """Visible interval, (from, to), in seconds from the trace's first slice."""
    search = traitlets.Unicode("").tag(sync=True)
    """Text that highlighted names contain, ignoring case."""
    selected = traitlets.Instance(dict, allow_none=True).tag(sync=True)
    """The clicked slice, or None: name, category, rank, track, start_seconds, duration_seconds, args, row,
    callers (innermost first), module, statistics of its name, connections to other slices."""
    num_matches = traitlets.Int(0).tag(sync=True)
    """Number of slices that match the search."""
    error = traitlets.Unicode("").tag(sync=True)
    """Error of the front end's latest request; empty if it succeeded."""
    height = traitlets.Int(480).tag(sync=True)
    """Maximum height of the drawing in pixels; it is as high as what it shows."""
    _scene = traitlets.Dict().tag(sync=True)
    _revealed = traitlets.Dict().tag(sync=True)
    """Rank and first row of the track that :meth:`show_interval` scrolled to last."""
    _path_number = traitlets.Int(0).tag(sync=True)
    """Counts the paths that were highlighted; tiles of an earlier one are requested again."""

    _saved: SavedOutput[TraceView] | None = None

    def __init__(self, trace: object, *, height: int = 480) -> None:
        self.trace = _load_trace(trace)
        self._tiler = Tiler(self.trace)
        self._mark_tiler = MarkTiler(self.trace)
        self._encoder = TileEncoder(self._tiler, self._mark_tiler)
        self._worker = BackgroundCalls("shardscope-trace")
        trace, tiler = self.trace, self._tiler
        self._pictures: LatestRequest[str, str] = LatestRequest(
            lambda _: draw_picture(tiler, trace.summary()), "shardscope-picture"
        )
        self._picture = ""
        """Static picture, for viewers without a kernel; empty until the trace is analysed."""
        # It is read in saved notebooks only, whose kernel may have ended before the analysis.
        self._note = NOT_ANALYSED
        """Sentence in place of the analysis."""
        self._match = np.zeros(len(self.trace), dtype=bool)
        self._chosen: int | None = None
        """The slice that :attr:`selected` has, or will have once the answers of the thread are shown."""
        self._span_ns = max(self.trace.duration_ns_total, 1000)
        self._path: PathMarks | None = None
        self._context = SelectionContext(self.trace)
        super().__init__(
            height=check_integer("TraceView.height", height, low=160, high=4000),
            viewport_seconds=(0.0, self._span_ns / 1e9),
            _scene=self._describe_trace(),
        )
        self.on_msg(self._handle_message)

    def show_interval(
        self, start_seconds: float, end_seconds: float, *, rank: int | None = None, track: str | None = None
    ) -> None:
        """Move the view to an interval, with a margin of a tenth of it on both sides.

        ``rank`` and ``track`` (a track's name, such as "stream 7") unfold that rank and track and scroll to
        it. Raises ``ValueError`` for times that are not finite or not ascending, and for a rank or track that
        is not in the trace.
        """
        start = check_number("show_interval.start_seconds", start_seconds, low=-1e6, high=1e6)
        end = check_number("show_interval.end_seconds", end_seconds, low=-1e6, high=1e6)
        if end < start:
            raise ValueError(
                f"show_interval.end_seconds is {end:g}, before start_seconds {start:g}. Fix: swap them."
            )
        revealed = self._find_track(rank, track)
        margin = max((end - start) / 10, LEAST_MARGIN_SECONDS)
        self.viewport_seconds = (start - margin, end + margin)
        if revealed:
            # Scroll again to where the user scrolled away from: an equal value would not be sent.
            self._revealed = {**revealed, "number": self._revealed.get("number", 0) + 1}

    def _find_track(self, rank: int | None, name: str | None) -> dict[str, int]:
        """Return rank and first row of a track, of a rank alone its number. Raises ``ValueError``."""
        if rank is not None:
            check_choice("show_interval.rank", rank, self.trace.ranks)
        if name is None:
            return {} if rank is None else {"rank": int(rank)}
        positions = {
            track.name: position
            for position, track in reversed(list(enumerate(self.trace.tracks)))
            if rank is None or track.rank == rank
        }
        position = positions[check_choice("show_interval.track", name, positions)]
        first_row = int(self._tiler.first_row_of_track[position])
        return {"rank": self.trace.tracks[position].rank, "first_row": first_row}

    def to_html(
        self,
        path: str | os.PathLike[str],
        *,
        start_seconds: float | None = None,
        end_seconds: float | None = None,
    ) -> Path:
        """Write one HTML file that shows the trace without Python or a network, and return its path.

        It has the slices that overlap the interval, by default all, with their arguments, up to 128 MiB of
        them; what is highlighted and searched for stays so. The sentences of ``trace.summary()`` are above
        them, and what the page does not have. A page of 100,000 slices has about 5 MB. Raises
        ``ValueError`` for more than 500,000 slices, with an interval that fits, and ``OSError`` if the file
        cannot be written.
        """
        bounds = [
            None if value is None else check_number(f"to_html.{name}", value, low=-1e6, high=1e6)
            for name, value in (("start_seconds", start_seconds), ("end_seconds", end_seconds))
        ]
        slices = choose_slices(self.trace, *bounds)
        counts = np.bincount(self.trace.track_index[slices], minlength=len(self.trace.tracks))
        state = self.get_state(["search", "num_matches", "height", "_path_number"])
        first, last = (bounds[0] or 0.0), bounds[1]
        whole = self._span_ns / 1e9
        state |= {
            "viewport_seconds": self.viewport_seconds if bounds == [None, None] else (first, last or whole),
            "selected": None,
            "error": "",
            "_revealed": {},
            "_scene": {
                **self._scene,
                "num_slices": len(slices),
                # The headers of ranks add these up.
                "tracks": [
                    {**track, "num_slices": count}
                    for track, count in zip(self._scene["tracks"], counts.tolist(), strict=True)
                ],
                "can_download": False,
                "perfetto": "",
            },
        }
        is_whole = len(slices) == len(self.trace)
        limits = [] if is_whole else [_describe_part(self.trace, len(slices), first, last)]
        return write_page(
            path,
            state,
            self._tiler,
            self._mark_tiler,
            self._path,
            slices,
            css=str(self._css),
            script="\n".join([str(self._esm), front_end_text("trace/front_end", "saved_trace.js")]),
            summary=self.trace.summary(),
            limits=limits,
        )

    def highlight_path(self, rows: Iterable[Mapping[str, object]] | None) -> None:
        """Outline the parts of a path, such as ``trace.critical_path()``, over the slices; None: of none.

        A row has ``rank``, ``track``, ``name``, ``start_seconds`` and ``seconds``, or ``index``, the number
        of a slice. Raises ``ValueError`` for rows that are not of this trace.
        """
        self._prepare_path(rows)()

    def _highlight_path_later(self, rows: Iterable[Mapping[str, object]] | None) -> None:
        """Do the same in the background, so that the kernel answers other messages meanwhile."""
        self._worker.run(partial(self._prepare_path, rows))

    def _prepare_path(self, rows: Iterable[Mapping[str, object]] | None) -> Callable[[], None]:
        path = None if rows is None else PathMarks.find(self.trace, rows)

        def show_path() -> None:
            self._path = path
            self._path_number += 1

        return show_path

    def _ipython_display_(self) -> None:
        """Display the view, and a static picture for readers without a kernel or without widgets.

        The sentences of a large trace are written in the background; its tracks are drawn at once.
        """
        if len(self.trace) <= MAX_ANALYSED_AT_ONCE or find_running_loop() is None:
            self._draw_picture()
        if self._saved is None:
            self._saved = SavedOutput(self, _get_picture, lambda view: [view])
        self._saved.display()
        if not self._picture:
            self._pictures.request("picture", self._receive_picture)

    def _receive_picture(self, result: str | Exception) -> None:
        if isinstance(result, Exception):
            self._note = f"No summary: {result}"
        else:
            self._picture = result
        if self._saved is not None:
            self._saved.redraw()

    def _repr_mimebundle_(self, **kwargs: dict[str, object]) -> MimeBundle | None:
        """Return the widget with its static picture, for front ends that request both at once."""
        shown = super()._repr_mimebundle_(**kwargs)
        bundle = shown[0] if isinstance(shown, tuple) else shown
        if bundle is not None:
            bundle["text/html"] = self._draw_picture()
        return shown

    def _draw_picture(self) -> str:
        self._picture = self._picture or draw_picture(self._tiler, self.trace.summary())
        return self._picture

    def close(self) -> None:
        """Close the view; the last picture remains in the notebook."""
        if self._saved is not None:
            self._saved.close()
        # Without this cycle the trace is freed with the last reference to the view: until Python looks for
        # cycles, by the number of objects and not by their size, traces of gigabytes could come together.
        self.on_msg(self._handle_message, remove=True)
        self.layout.close()
        super().close()

    def _describe_trace(self) -> dict[str, object]:
        first_row = self._tiler.first_row_of_track
        return {
            "span_ns": self._span_ns,
            "num_slices": len(self.trace),
            "can_download": len(self.trace) > 0,
            "download_limit": MAX_DOWNLOAD_SLICES,
            "perfetto": PERFETTO_ORIGIN,
            "counters": [
                {
                    "rank": counter.rank,
                    "name": counter.name[:MAX_NAME_CHARACTERS],
                    "is_bytes": counter.is_bytes,
                    "low": min(float(counter.value.min()), 0.0),
                    "high": float(counter.value.max()),
                }
                for counter in self._mark_tiler.counters
            ],
            "ranks": self.trace.ranks,
            "notes": self.trace.notes,
            "tracks": [
                {
                    "rank": track.rank,
                    "thread": str(track.thread),
                    "name": track.name,
                    "kind": track.kind,
                    "first_row": int(first_row[position]),
                    "num_rows": track.num_rows,
                    "num_slices": track.num_slices,
                }
                for position, track in enumerate(self.trace.tracks)
            ],
        }

    @traitlets.validate("search")
    def _check_search(self, proposal: Mapping[str, object]) -> str:
        text = str(proposal["value"])
        if len(text) > MAX_SEARCH_CHARACTERS:
            raise RefusedError(
                f"TraceView.search has {len(text):,} characters; allowed: up to {MAX_SEARCH_CHARACTERS}. "
                "Fix: search for a part of the name."
            )
        return text

    @traitlets.observe("search")
    def _find_matches(self, change: object) -> None:
        self._match = self._tiler.find_matches(self.search)
        self.num_matches = int(self._match.sum())

    def set_state(self, sync_data: dict[str, object]) -> None:
        """Apply a state sent by the front end. Show an error for an invalid value instead of raising."""
        accepted = {key: value for key, value in sync_data.items() if key not in _FOREIGN_TRAITS}
        if len(accepted) < len(sync_data):
            self.error = f"The view may not set {', '.join(sorted(set(sync_data) - set(accepted)))}."
        try:
            super().set_state(accepted)
        except (traitlets.TraitError, ValueError, TypeError) as refusal:
            self.error = str(refusal)[:400]

    def _handle_message(self, _: object, content: object, __: object) -> None:
        try:
            request = read_request(content, self.trace, self._span_ns, len(self._mark_tiler.counters))
        except RequestError as refusal:
            self.error = str(refusal)
            return
        if self.error:
            self.error = ""
        answers = {
            "tile": self._answer_tile,
            "mark": self._answer_mark,
            "names": self._answer_names,
        }
        if request.type in answers:
            answers[request.type](request)
            return
        # These read all slices, the first time for seconds: in a thread, in the order of the requests, so
        # that the kernel answers other messages meanwhile.
        slow_answers: dict[str, Callable[[Request], Callable[[], None]]] = {
            "totals": self._answer_totals,
            "select": self._answer_select,
            "pick": self._answer_pick,
            "find": self._answer_find,
            "area": self._answer_area,
            "download": self._answer_download,
        }
        self._worker.run(partial(slow_answers[request.type], request))

    def _answer_tile(self, request: Request) -> None:
        wanted = TileRequest(
            t0_ns=request.t0_ns,
            t1_ns=request.t1_ns,
            width=request.width,
            rows=request.rows,
            counters=request.counters,
            wants_path=request.wants_path,
        )
        tile = self._encoder.encode(wanted, self._path, self._match)
        reply = {
            "type": "tile",
            "id": request.id,
            "t0_ns": tile.t0_ns,
            "t1_ns": tile.t1_ns,
            "width": request.width,
            "search": self.search,
            "path": self._path_number,
            "has_path": tile.has_path or self._path is None,
            "tick_ns": tile.tick_ns,
            "rows": tile.rows,
            "counters": tile.counters,
            "columns": [list(column) for column in tile.columns],
        }
        self.send(reply, buffers=[memoryview(tile.data)])

    def _answer_mark(self, request: Request) -> None:
        """Send the exact times of a mark, whose tile may have rounded ones."""
        if request.index is None:
            return
        last = request.index + request.count - 1
        start = int(self.trace.start_ns[request.index])
        end = int(self.trace.start_ns[last]) + int(self.trace.duration_ns[last])
        times = {"start_ns": start, "duration_ns": end - start}
        self.send({"type": "mark", "id": request.id, "index": request.index, **times})

    def _answer_names(self, request: Request) -> None:
        names = self.trace.names
        texts = [names[index][:MAX_NAME_CHARACTERS] for index in request.indices]
        self.send({"type": "names", "id": request.id, "indices": request.indices, "names": texts})

    def _answer_totals(self, request: Request) -> Callable[[], None]:
        rows = self._tiler.sum_by_name(request.t0_ns, request.t1_ns)
        shown = [{**row, "name": row["name"][:MAX_NAME_CHARACTERS]} for row in rows]
        return partial(self.send, {"type": "totals", "id": request.id, "rows": shown})

    def _answer_area(self, request: Request) -> Callable[[], None]:
        sums = self._tiler.sum_area(request.t0_ns, request.t1_ns, request.tracks)
        names = [{**row, "name": row["name"][:MAX_NAME_CHARACTERS]} for row in sums.names]
        reply = {"type": "area", "id": request.id, "names": names, "categories": sums.categories}
        return partial(self.send, reply)

    def _answer_download(self, request: Request) -> Callable[[], None]:
        """Send one compressed Chrome trace of all ranks, which the front end gives to the browser."""
        if len(self.trace) > MAX_DOWNLOAD_SLICES:
            error = (
                f"A download has up to {MAX_DOWNLOAD_SLICES:,} slices; this trace has {len(self.trace):,}. "
                'Fix: trace.to_chrome("trace.json.gz").'
            )
            return partial(setattr, self, "error", error)
        packed = gzip.compress(b"".join(iterate_chrome(self.trace)), 6)
        pieces = [memoryview(packed)[i : i + PIECE_BYTES] for i in range(0, len(packed), PIECE_BYTES)]
        reply = {"type": "download", "id": request.id, "name": "trace.json.gz"}
        return partial(self.send, reply, buffers=pieces)

    def _answer_select(self, request: Request) -> Callable[[], None]:
        return self._select_slice(request.index)

    def _answer_pick(self, request: Request) -> Callable[[], None]:
        """Select the slice that names a mark of several."""
        first = request.index or 0
        return self._select_slice(self._tiler.choose_representative(first, request.count, self._match))

    def _answer_find(self, request: Request) -> Callable[[], None]:
        """Select the match after (or before) the selected slice in time, and bring it into view."""
        matches = np.flatnonzero(self._match)
        if not len(matches):
            return lambda: None
        matches = matches[np.argsort(self.trace.start_ns[matches], kind="stable")]
        # Continue from the selected match, or from the left edge of the view if none is selected.
        selected = np.flatnonzero(matches == self._chosen)
        if len(selected):
            position = (int(selected[0]) + request.direction) % len(matches)
        else:
            after = int(np.searchsorted(self.trace.start_ns[matches], self.viewport_seconds[0] * 1e9))
            position = (after if request.direction > 0 else after - 1) % len(matches)
        select = self._select_slice(int(matches[position]))

        def show_match() -> None:
            select()
            self.send({"type": "found", "id": request.id, "position": position + 1})

        return show_match

    def _select_slice(self, index: int | None) -> Callable[[], None]:
        """Return a call that sets ``selected`` to this slice; all that takes time is done before."""
        self._chosen = index
        if index is None:
            return partial(setattr, self, "selected", None)
        slice_ = self.trace.slice(index)
        # A profiler may record shapes and stacks of any length as arguments.
        args = dict(list(slice_["args"].items())[:MAX_ARGS])
        callers = self._context.find_callers(index)
        selected = {
            **slice_,
            "args": {key: _shorten_value(value) for key, value in args.items()},
            "row": int(self._tiler.row[index]),
            "callers": [name[:MAX_NAME_CHARACTERS] for name in callers],
            "module": find_module(callers, args),
            "statistics": self._context.measure_name(index),
            "connections": [
                {
                    "kind": connection["kind"],
                    "source": self._describe_end(connection["source"]),
                    "target": self._describe_end(connection["target"]),
                }
                for connection in self._context.find_connections(index)
            ],
        }
        return partial(setattr, self, "selected", selected)

    def _describe_end(self, index: int) -> dict[str, object]:
        """Return what the front end needs to draw and name one end of an arrow."""
        trace = self.trace
        track = trace.tracks[trace.track_index[index]]
        start = int(trace.start_ns[index])
        return {
            "index": index,
            "name": trace.names[trace.name_index[index]][:MAX_NAME_CHARACTERS],
            "rank": track.rank,
            "track": track.name,
            "row": int(self._tiler.row[index]),
            "start_ns": start,
            "end_ns": start + int(trace.duration_ns[index]),
        }


def _describe_part(trace: Trace, num_slices: int, start_seconds: float, end_seconds: float | None) -> str:
    """Return a sentence about a saved page that has a part of the slices."""
    end = trace.duration_seconds if end_seconds is None else end_seconds
    return (
        f"This page has {num_slices:,} of {len(trace):,} slices, those from {start_seconds:.6g} s to "
        f"{end:.6g} s. The sentences are about the whole trace."
    )


def _get_picture(view: TraceView) -> str:
    return view._picture or draw_unfinished_picture(view._tiler, view._note)


def _shorten_value(value: object) -> object:
    text = str(value)
    return value if len(text) <= 200 else text[:197] + "..."
