"""Reading of one file into the columns of its rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from shardscope.trace.files import TextStream, refuse_file
from shardscope.trace.loading.chunks import UNKNOWN_PHASE, Chunk, decode_chunk
from shardscope.trace.loading.document import read_document
from shardscope.trace.loading.events import MALFORMED
from shardscope.trace.loading.rank_columns import RankBuilder, RankColumns
from shardscope.trace.loading.splitting import FIX, READ_UP_TO_THERE, EventText, parse_text

NoteBytes = Callable[[int], None]
"""Called with the number of bytes of the file that were read so far."""
DecodeChunks = Callable[[Iterable[bytes]], Iterable[Chunk]]
"""Decodes chunks of text in order, perhaps in other processes."""
_NO_EVENTS = (MALFORMED, UNKNOWN_PHASE)
"""Oddities of entries that are no events."""


def decode_here(texts: Iterable[bytes]) -> Iterator[Chunk]:
    """Decode chunks in this process."""
    return map(decode_chunk, texts)


def read_rank(path: Path, note_bytes: NoteBytes, decode: DecodeChunks = decode_here) -> RankColumns:
    """Read one file. Raises ``ValueError`` if no event of it is readable and it is not an empty trace."""
    stream = TextStream(path)
    try:
        builder = RankBuilder(path)
        text = EventText(stream, builder.oddities)

        def iterate_texts() -> Iterator[bytes]:
            for chunk in text:
                note_bytes(stream.num_file_bytes)
                yield chunk

        for chunk in decode(iterate_texts()):
            builder.add_chunk(chunk)
    finally:
        stream.close()
    if stream.damage:
        builder.oddities[f"file that {stream.damage}{READ_UP_TO_THERE}"] += 1
    if not builder.num_events and (stream.damage or builder.oddities[MALFORMED]):
        # Nothing was salvaged: a small file is parsed as a whole, for an error with line and column.
        parse_text(stream, text.beginning)
    if not builder.num_events and not text.header and any(builder.oddities[one] for one in _NO_EVENTS):
        # A list of something else, such as samples to train on, must not count as a rank that did nothing.
        refuse_file(path, "is a list without events: it is not a profiler trace", FIX)
    return builder.finish(read_document(path, text.header, text.footer))
