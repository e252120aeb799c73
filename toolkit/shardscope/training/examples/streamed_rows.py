"""Rows of a source that are read one after another, for data larger than memory and disk.

``datasets`` streams files and data sets of the Hub; no row is kept, and nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from shardscope.core.errors import FieldError, get_first_line, refuse
from shardscope.training.examples.file_rows import check_begins_in_utf8, check_is_utf8, describe_row
from shardscope.training.examples.folder_files import ARROW_STATE, LOADERS, list_files
from shardscope.training.examples.rows import (
    Row,
    check_json_lines,
    check_tables,
    describe_source,
    load_files,
    load_hub,
)

if TYPE_CHECKING:
    from datasets import IterableDataset

MAX_FIRST_ROWS = 2000
"""Rows at the beginning of a stream that previews and checks read."""
MAX_CHECKED_BYTES = 10**9
"""Largest JSONL or CSV file that is read again to find an unreadable line, which takes about ten seconds."""


@dataclass(frozen=True, kw_only=True)
class RowBlock:
    """Consecutive rows of a stream, by their number in it (see ``rows.Rows``)."""

    rows: list[Row]
    first: int = 0
    """Number of the first row."""
    step: int = 1
    """Difference of the numbers of two consecutive rows: 2 if two ranks take turns."""
    files: Sequence[Path] = ()
    """The files that the rows are read from, one after another; empty if it is not files."""

    @property
    def column_names(self) -> list[str]:
        """Columns of the first row."""
        return list(self.rows[0])

    @property
    def numbers(self) -> range:
        """Numbers of the rows."""
        return range(self.first, self.first + len(self.rows) * self.step, self.step)

    def describe_place(self, number: int) -> str:
        """Return the file and the line of a row, or its number, from 1."""
        return describe_row(self.files, number)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Row:
        return self.rows[(number - self.first) // self.step]


def open_stream(field: str, source: object) -> IterableDataset:
    """Return the rows of a file, a folder or a data set of the Hub as a stream.

    Raises ``ValueError`` naming ``field`` for other sources, and for those that cannot be opened.
    """
    from datasets import Dataset, IterableDataset

    check_streamable(field, source)
    try:
        if isinstance(source, str):
            stream = load_hub(field, source, streaming=True)
        else:
            assert isinstance(source, Path)
            if (source / ARROW_STATE).is_file():
                # Mapped into memory: its rows are read when they are needed.
                stream = Dataset.load_from_disk(str(source)).to_iterable_dataset()
            else:
                files = list_stream_files(field, source)
                for path in files:
                    check_begins_in_utf8(field, path)
                stream = load_files(field, files, streaming=True)
    except FieldError:
        raise
    except Exception as error:
        _refuse_unreadable(field, source, error, 0)
    assert isinstance(stream, IterableDataset)
    return stream


def list_stream_files(field: str, source: object) -> list[Path]:
    """Return the files of a stream in the order of its rows; empty if it does not read text or Parquet."""
    if not isinstance(source, Path) or (source / ARROW_STATE).is_file():
        return []
    return list_files(field, source) if source.is_dir() else [source]


def check_streamable(field: str, source: object) -> None:
    """Raise ``ValueError`` naming ``field`` for a source whose rows are in memory already."""
    if not isinstance(source, str | Path):
        allowed = (
            "a file, a folder or a data set's name on the Hub with streaming=True: its rows are in memory"
        )
        refuse(field, describe_source(source), allowed, {"streaming": False})


def read_first_rows(field: str, source: object) -> RowBlock:
    """Return the first rows of a stream. Raises ``ValueError`` naming ``field`` if there is none."""
    rows = list(islice(iterate_rows(field, source, iter(open_stream(field, source))), MAX_FIRST_ROWS))
    if not rows:
        refuse(field, describe_source(source), "data with at least one row", "a file that has rows")
    return RowBlock(rows=rows, files=list_stream_files(field, source))


def iterate_rows(field: str, source: object, iterator: Iterator[Row]) -> Iterator[Row]:
    """Yield the rows of ``iterator``. Raises ``ValueError`` naming ``field`` where ``datasets`` fails."""
    num_read = 0
    while True:
        try:
            row = next(iterator)
        except StopIteration:
            return
        except Exception as error:  # Whatever the parser or the network raised.
            _refuse_unreadable(field, source, error, num_read)
        num_read += 1
        yield row


def _refuse_unreadable(field: str, source: object, error: Exception, num_read: int) -> NoReturn:
    # Arrow's and pandas' messages have no line, so look for it.
    files = list_stream_files(field, source)
    for path in files:
        check_is_utf8(field, path)
    files = [path for path in files if path.stat().st_size <= MAX_CHECKED_BYTES]
    if files and LOADERS[files[0].suffix.lower()] == "json":
        check_json_lines(field, files)
    check_tables(field, files)
    reason = get_first_line(error.__cause__ or error).rstrip(".")
    allowed = f"readable data: after {num_read:,} rows, {reason}"
    refuse(field, describe_source(source), allowed, "a repaired file")
