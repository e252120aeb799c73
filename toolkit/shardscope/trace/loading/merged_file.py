"""Ranks of one Chrome trace that ``Trace.to_chrome`` has written, split again."""

from __future__ import annotations

import msgspec
import numpy as np

from shardscope.trace.loading.document import MergedRank
from shardscope.trace.loading.pairs import select
from shardscope.trace.loading.rank_columns import RankColumns
from shardscope.trace.loading.splitting import is_cut_off
from shardscope.trace.loading.tracks import RankTrack

_UNKNOWN = "tracks of a file of merged ranks that its header does not list: its ranks are shown as one"


def split_ranks(merged: RankColumns) -> list[RankColumns]:
    """Return the ranks of a file; of any other than a merged one, the rank that it is.

    In a merged file a process is a rank, and a thread one of its tracks, by the number that the header has.
    """
    known = {
        (one.document.rank, thread.number)
        for one in merged.texts.document.merged_ranks
        for thread in one.threads
    }
    if not known:
        return [merged]
    keys = [merged.texts.keys[track.key] for track in merged.texts.tracks]
    # Tracks of other processes, which somebody has added, or a thread whose slices made two tracks.
    if num_unknown := sum(key not in known for key in keys) + len(keys) - len(set(keys)):
        merged.texts.oddities[_UNKNOWN] = num_unknown
        return [merged]
    ranks = [_select_rank(merged, one) for one in merged.texts.document.merged_ranks]
    ranks[0].texts.oddities = merged.texts.oddities
    # The notes are those of one rank, and what the file lacks may be of any.
    if is_cut_off(merged.texts.oddities):
        for rank in ranks:
            rank.texts.document.is_cut_off = True
    return ranks


def _select_rank(merged: RankColumns, recorded: MergedRank) -> RankColumns:
    """Return the slices, marks and tracks of one rank, with the processes and threads that it had."""
    texts, rank = merged.texts, recorded.document.rank
    threads = {thread.number: thread for thread in recorded.threads}
    # Threads of another rank, or with another number, belong to no mark of this one.
    own_keys = [place for place, key in enumerate(texts.keys) if key[0] == rank and key[1] in threads]
    new_key = np.full(len(texts.keys), -1, np.int64)
    new_key[own_keys] = np.arange(len(own_keys))
    # 1. Tracks in the order of their numbers, and the slices of each, which lie together.
    positions = sorted(
        (place for place, track in enumerate(texts.tracks) if new_key[track.key] >= 0),
        key=lambda place: int(texts.keys[texts.tracks[place].key][1]),
    )
    bounds = np.searchsorted(merged.slices["track"], np.arange(len(texts.tracks) + 1))
    index = [np.arange(bounds[place], bounds[place + 1]) for place in positions]
    slices = select(merged.slices, np.concatenate([np.zeros(0, np.int64), *index]), tuple(merged.slices))
    slices["track"] = np.repeat(np.arange(len(positions)), [len(part) for part in index])
    tracks = []
    for place in positions:
        track = texts.tracks[place]
        thread = threads[int(texts.keys[track.key][1])]
        tracks.append(
            RankTrack(
                key=int(new_key[track.key]),
                kind=thread.kind,
                name=thread.name,
                num_rows=track.num_rows,
                num_slices=track.num_slices,
            )
        )
    # 2. Marks by their processes.
    marks = select(merged.marks, np.flatnonzero(new_key[merged.marks["key"]] >= 0), tuple(merged.marks))
    marks["key"] = new_key[marks["key"]]
    new_track = np.full(len(texts.tracks) + 1, -1, np.int64)  # The last entry is that of no track, -1.
    new_track[positions] = np.arange(len(positions))
    marks["track"] = new_track[marks["track"]]
    # 3. Only names that this rank uses: the recorded steps of a rank are found by them.
    used = np.unique(np.concatenate([slices["name"], marks["name"]]))
    for columns in (slices, marks):
        columns["name"] = np.searchsorted(used, columns["name"])
    own = [threads[int(texts.keys[place][1])] for place in own_keys]
    return RankColumns(
        path=merged.path,
        texts=msgspec.structs.replace(
            texts,
            document=recorded.document,
            names=[texts.names[name] for name in used.tolist()],
            categories=list(texts.categories),
            keys=[(thread.process, thread.thread) for thread in own],
            tracks=tracks,
            oddities={},
        ),
        slices=slices,
        marks=marks,
        argument_bytes=merged.argument_bytes,
    )
