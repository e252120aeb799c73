"""Columns of one rank, joined from the chunks of its file: slices with tracks and rows, and marks."""

from __future__ import annotations

import mmap
from collections import Counter
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from shardscope.trace.argument_blocks import ArgumentBlocks
from shardscope.trace.files import refuse_file
from shardscope.trace.loading import chunks
from shardscope.trace.loading.chunks import ABSENT, Chunk, Int64s, Key, as_integers
from shardscope.trace.loading.document import Document
from shardscope.trace.loading.pairs import Columns, concatenate, narrow, pair_ends, select
from shardscope.trace.loading.tracks import RankTrack, TrackTexts, place_slices

MAX_EVENTS = 20_000_000
"""Maximum events of one file; 2 GiB of real JSON hold eight million."""
_FAR_NS = 24 * 3600 * 10**9

SLICE_COLUMNS = ("start_ns", "duration_ns", "name", "category", "track", "depth", "id", "row")
_MARK_PHASES = (
    chunks.FLOW_START,
    chunks.FLOW_STEP,
    chunks.FLOW_END,
    chunks.COUNTER,
    chunks.INSTANT,
    chunks.ASYNC_INSTANT,
)
_PLACED_COLUMNS = ("start_ns", "duration_ns", "name", "category", "key", "id", "row")
MARK_COLUMNS = ("start_ns", "name", "category", "key", "track", "phase", "id", "row")


class RankTexts(msgspec.Struct, kw_only=True):
    """Data of a rank besides its columns; JSON in caches."""

    document: Document
    names: list[str]
    categories: list[str]
    keys: list[Key]
    tracks: list[RankTrack]
    oddities: dict[str, int]
    """Messages about what was left out or corrected -> count."""
    block_events: list[int]
    block_bytes: list[int]


class RankColumns(msgspec.Struct, kw_only=True):
    """One rank before the ranks are put on one time axis."""

    path: Path
    texts: RankTexts
    slices: Columns
    """:data:`SLICE_COLUMNS`, sorted by track, row and start. ``start_ns`` is on the file's clock."""
    marks: Columns
    """:data:`MARK_COLUMNS` of flows, counters and instants, by time."""
    argument_bytes: bytes | memoryview

    def release(self) -> None:
        """Give the memory of a mapped file back to the system, which reads it again when it is used."""
        data = self.argument_bytes
        if isinstance(data, memoryview) and isinstance(data.obj, mmap.mmap):
            data.obj.madvise(mmap.MADV_DONTNEED)

    @property
    def arguments(self) -> ArgumentBlocks:
        """Arguments of all events by their row in the file."""
        return ArgumentBlocks(self.argument_bytes, self.texts.block_bytes, self.texts.block_events)


def get_rank(rank: RankColumns) -> int:
    """Return the number of a rank, which every one has after :func:`read_ranks`."""
    assert rank.texts.document.rank is not None
    return rank.texts.document.rank


class RankBuilder:
    """Builder of a rank's columns: adds chunk by chunk, then makes slices, tracks and rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.oddities: Counter[str] = Counter()
        self.num_events = 0
        self._names: dict[str, int] = {}
        self._categories: dict[str, int] = {}
        self._keys: dict[Key, int] = {}
        self._pieces: list[Columns] = []
        self._arguments: list[bytes] = []
        self._block_bytes: list[int] = []
        self._block_events: list[int] = []
        self._texts = TrackTexts()

    def add_chunk(self, chunk: Chunk) -> None:
        """Add the next chunk of the file. Raises ``ValueError`` above :data:`MAX_EVENTS`."""
        columns, texts = dict(chunk.columns), chunk.texts
        columns["name"] = _map_to_known(columns["name"], texts.names, self._names)
        columns["category"] = _map_to_known(columns["category"], texts.categories, self._categories)
        columns["key"] = _map_to_known(columns["key"], texts.keys, self._keys)
        num_events = len(columns["phase"])
        self._pieces.append(columns)
        self._arguments.append(chunk.arguments)
        self._block_bytes += chunk.block_bytes
        full, last = divmod(num_events, chunks.BLOCK_EVENTS)
        self._block_events += [chunks.BLOCK_EVENTS] * full + [last] * (last > 0)
        self.oddities.update(texts.oddities)
        self._texts.add(texts)
        self.num_events += num_events
        if self.num_events > MAX_EVENTS:
            refuse_file(self.path, f"holds more than {MAX_EVENTS:,} events", "record fewer steps")

    def finish(self, document: Document) -> RankColumns:
        """Return the columns of the rank."""
        events = concatenate(self._pieces)
        self._pieces = []
        events["row"] = as_integers(np.arange(len(events["phase"]), dtype=np.int32))
        names, categories, keys = list(self._names), list(self._categories), list(self._keys)
        # 1. Times on the wall clock, where the file has one. Events without a time have no place.
        start_ns = events["start_ns"]
        phase = events["phase"]
        is_present = self._find_present(start_ns, phase)
        if document.base_ns:
            start_ns[is_present] += document.base_ns
        # 2. Slices: complete events, and pairs of begin and end.
        slices = self._select_slices(events, is_present)
        slices = pair_ends(events, is_present, slices, keys, categories, self.oddities)
        marks = _select_marks(events, is_present)
        del events, start_ns, phase, is_present
        # 3. Tracks, and rows of slices that overlap.
        tracks, slices = place_slices(slices, names, categories, keys, self._texts, self.oddities)
        marks["track"] = _find_tracks_of_keys(keys, tracks)[marks["key"]]
        slices = {name: slices[name] for name in SLICE_COLUMNS}
        narrow(slices)
        narrow(marks)
        texts = RankTexts(
            document=document,
            names=names,
            categories=categories,
            keys=keys,
            tracks=tracks,
            oddities=dict(self.oddities),
            block_events=self._block_events,
            block_bytes=self._block_bytes,
        )
        return RankColumns(
            path=self.path, texts=texts, slices=slices, marks=marks, argument_bytes=b"".join(self._arguments)
        )

    def _find_present(self, start_ns: Int64s, phase: Int64s) -> npt.NDArray[np.bool_]:
        """Return a mask of events with a time within a day of the median slice."""
        is_slice = phase == chunks.SLICE
        is_present = start_ns != ABSENT
        known = start_ns[is_slice & is_present]
        far = np.zeros(len(start_ns), bool)
        if len(known):
            # Lower median: with two slices, one of them is kept.
            middle = (len(known) - 1) // 2
            far = is_present & (np.abs(start_ns - np.partition(known, middle)[middle]) > _FAR_NS)
        for kind, mask in (("slices", is_slice), ("other events", ~is_slice)):
            self._count_oddity(f"{kind} without a readable ts left out", mask & ~is_present)
            self._count_oddity(f"{kind} more than a day from the others left out", mask & far)
        return np.asarray(is_present & ~far, dtype=bool)

    def _select_slices(self, events: Columns, is_present: npt.NDArray[np.bool_]) -> Columns:
        """Return the complete events (ph X) of at most a day; missing and negative durations become 0."""
        keep = is_present & (events["phase"] == chunks.SLICE)
        duration = events["duration_ns"]
        absent, negative, huge = duration == ABSENT, (duration < 0) & (duration != ABSENT), duration > _FAR_NS
        # Slices without a usable duration are shown as points instead of being lost.
        self._count_oddity("slices without dur shown with no length", absent & keep)
        self._count_oddity("slices with a negative dur shown with no length", negative & keep)
        self._count_oddity("slices longer than a day left out", huge & keep)
        slices = select(events, np.flatnonzero(keep & ~huge), _PLACED_COLUMNS)
        np.maximum(slices["duration_ns"], 0, out=slices["duration_ns"])
        return slices

    def _count_oddity(self, what: str, mask: npt.NDArray[np.bool_]) -> None:
        if count := int(np.count_nonzero(mask)):
            self.oddities[what] += count


def _select_marks(events: Columns, is_present: npt.NDArray[np.bool_]) -> Columns:
    """Return flows, counters and instants by time, without their column ``track``."""
    rows = np.flatnonzero(is_present & np.isin(events["phase"], _MARK_PHASES))
    rows = rows[np.argsort(events["start_ns"][rows], kind="stable")]
    return select(events, rows, (name for name in MARK_COLUMNS if name != "track"))


def _find_tracks_of_keys(keys: list[Key], tracks: list[RankTrack]) -> Int64s:
    """Return the track of each thread or stream; -1 for those without slices."""
    track_of_key = np.full(len(keys), -1, np.int64)
    for position, track in enumerate(tracks):
        if track.kind in ("cpu", "gpu"):
            track_of_key[track.key] = position
    return track_of_key


Text = TypeVar("Text", str, Key)


def _map_to_known(index: Int64s, texts: list[Text], known: dict[Text, int]) -> Int64s:
    """Return indices into ``known``, to which new texts are added, in place of indices into ``texts``."""
    positions = [known.setdefault(text, len(known)) for text in texts]
    return as_integers(np.array(positions, np.int32)[index])
