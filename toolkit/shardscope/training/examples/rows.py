"""Rows of a data source: a file, a folder, a name on the Hub, a ``datasets`` object or a pandas frame.

Imports no torch; ``datasets`` and pandas are imported on first use.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeAlias, cast

from shardscope.core.errors import FieldError, find_similar, get_first_line, refuse
from shardscope.core.number_format import join_list
from shardscope.machine.hub import HubProblem, find_hub_problem
from shardscope.machine.user_folders import expand_home, list_entries
from shardscope.training.examples.file_rows import (
    DELIMITERS,
    JSON_LINES,
    FileRows,
    check_header,
    check_is_utf8,
    check_table_rows,
    find_delimiter,
    find_extra_cell,
    find_half_pair,
    has_rows,
    has_wide_first_row,
    name_columns,
    read_header,
    split_header,
    write_readable_copies,
)
from shardscope.training.examples.folder_files import (
    ALLOWED,
    ARROW_STATE,
    LOADERS,
    README,
    TEXT_LOADER,
    list_files,
)

if TYPE_CHECKING:
    import pandas
    from datasets import Dataset

Row: TypeAlias = Mapping[str, object]
"""One row of a data source: column -> value."""

LOADING = threading.Lock()
"""Held while ``datasets`` loads: the form of a fine-tune reads in its thread while a cell reads the same, and
two threads delete each other's lock (tqdm 4, ``contrib/concurrent.py``, ``ensure_lock``)."""
HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")
"""Beginning of the escape of half a surrogate pair in JSON."""
UNNAMED = re.compile(r"Unnamed: \d+")
"""Names of columns whose header is empty (``file_rows.name_columns``)."""


def is_text(source: object) -> bool:
    """Return whether a data source is one text file, which is read as one long text."""
    return isinstance(source, Path) and source.is_file() and LOADERS.get(source.suffix.lower()) == TEXT_LOADER


class Rows(Protocol):
    """Rows by index, such as a ``datasets.Dataset``, which maps its file into memory."""

    @property
    def column_names(self) -> list[str]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Row: ...


def resolve_source(field: str, source: object) -> object:
    """Return ``source`` with its path made absolute, without reading it.

    Raises ``ValueError`` naming ``field`` if it is of no readable kind.
    """
    if isinstance(source, str | Path):
        path = expand_home(source)
        if os.path.exists(path):  # noqa: PTH110 - raises nothing for a long text
            # The kernel may change its working directory before the launch.
            path = path.absolute()
            if path.is_file() and path.suffix.lower() not in LOADERS:
                refuse(
                    field,
                    str(source),
                    f"{ALLOWED}: {path.suffix or 'no suffix'} is none of them",
                    "a .jsonl file",
                )
            return path
        if _is_hub_name(source):
            return str(source)
        similar = find_similar(path.name, [entry.name for entry in list_entries(path.parent)])
        fix = str(path.parent / similar) if similar else "the file's path"
        allowed = f"{ALLOWED}: there is no such file"
        refuse(field, str(source), allowed, fix, problem="There is no such file")
    # Rows that are open already: the form of a fine-tune keeps one object, which it compares by identity.
    is_open = _is_dataset(source) or isinstance(source, ListRows)
    if not (is_open or _is_frame(source) or _is_list_of_rows(source)):
        refuse(field, _name_unreadable(source), ALLOWED, _suggest_source(source))
    return source


def _name_unreadable(source: object) -> str:
    if not isinstance(source, list):
        return type(source).__name__
    for number, item in enumerate(source, start=1):
        if not isinstance(item, dict):
            return f"a list with {type(item).__name__} as item {number:,}"
    return "an empty list"


def _suggest_source(source: object) -> str:
    """Return the nearest fix for an object that is no data source."""
    name = type(source).__name__
    if name == "DatasetDict":
        return 'one of its splits, such as data["train"]'
    if name == "IterableDataset":
        return "the files or the name on the Hub that it reads, with streaming=True"
    if isinstance(source, Mapping):
        return "pandas.DataFrame(data)"
    if isinstance(source, list) and source and all(isinstance(item, str | Path) for item in source):
        are_files = all(Path(item).suffix.lower() in LOADERS for item in source)
        return "a folder with these files" if are_files else '[{"text": text} for text in data]'
    if isinstance(source, Iterator | tuple) and not isinstance(source, str):
        return "list(data)"
    return "a list of dicts only" if isinstance(source, list) and source else "a path"


def open_rows(field: str, source: object, *, skips_unreadable: bool = False) -> Rows:
    """Return the rows of a data source that :func:`resolve_source` has accepted.

    Files are read by ``datasets``, which keeps them in the user's Hugging Face cache as Arrow tables. Raises
    ``ValueError`` naming ``field`` for data that cannot be read, with the line of a JSONL file, and for data
    without a row. ``skips_unreadable``: lines of JSONL and CSV that cannot be read are rows without values,
    which are malformed like others.
    """
    if isinstance(source, Path):
        is_folder = source.is_dir()
        rows = (
            _read_folder(field, source, skips_unreadable)
            if is_folder
            else _read_files(field, [source], skips_unreadable)
        )
    elif isinstance(source, str):
        rows = cast(Rows, load_hub(field, source, streaming=False))
    elif _is_frame(source):
        rows = _read_frame(field, cast("pandas.DataFrame", source))
    elif isinstance(source, list):
        rows = ListRows(source)
    elif isinstance(source, ListRows):
        rows = source
    else:
        # All columns as Python objects, whatever ``set_format`` selected for another program.
        rows = cast(Rows, cast("Dataset", source).with_format(None))
    if not len(rows) or not rows.column_names:
        refuse(field, describe_source(source), "data with at least one row", "data that have rows")
    return rows


def describe_source(source: object) -> str:
    """Return a short name of a data source for messages."""
    if isinstance(source, str | Path):
        return str(source)
    num_rows = len(source) if hasattr(source, "__len__") else "unknown"
    kind = "list" if isinstance(source, ListRows) else type(source).__name__
    return f"a {kind} of {num_rows} rows"


# ---- Objects


class ListRows:
    """Rows of a list of dicts: the columns are those of all dicts, and each cell has the type that it has.

    An Arrow table would have the first dict's columns only, and could not be made of a column with text in
    one row and a number in another, which is one malformed row.
    """

    def __init__(self, rows: Sequence[Mapping[object, object]]) -> None:
        self._rows = rows
        # By their text: columns of a file are named so. Of keys such as 1 and "1", the first in a row counts.
        self._names: dict[str, list[object]] = {}
        for name in dict.fromkeys(name for row in rows for name in row):
            self._names.setdefault(str(name), []).append(name)
        self.column_names = list(self._names)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        row = self._rows[index]
        return {
            column: _simplify_cell(next((row[name] for name in names if name in row), None))
            for column, names in self._names.items()
        }


def _simplify_cell(value: object) -> object:
    """Return a cell as a file has it: None for pandas' missing values, a list for numpy's arrays."""
    to_list = getattr(value, "tolist", None)
    if callable(to_list):
        value = to_list()
    if type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float) and value != value):
        return None
    if isinstance(value, list):
        return [_simplify_cell(item) for item in value]
    if isinstance(value, dict):
        return {key: _simplify_cell(item) for key, item in value.items()}
    return value


def _read_frame(field: str, frame: pandas.DataFrame) -> Rows:
    from datasets import Dataset

    names = [str(name) for name in frame.columns]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        refuse(
            field,
            f"a DataFrame with two columns {twice!r}",
            "a frame whose columns have different names",
            "data.loc[:, ~data.columns.duplicated()], which keeps the first of them",
        )
    try:
        return cast(Rows, Dataset.from_pandas(frame, preserve_index=False))
    except Exception:  # pyarrow's, for a column of several types: its rows are malformed one by one.
        return ListRows(cast("list[Mapping[object, object]]", frame.to_dict("records")))


# ---- Kinds of sources


def _is_hub_name(source: str | Path) -> bool:
    # A mistyped path of a data file must not become a request to the Hub.
    return (
        isinstance(source, str)
        and source.count("/") == 1
        and not source.startswith((".", "/", "~"))
        and Path(source).suffix.lower() not in LOADERS
    )


def _is_frame(source: object) -> bool:
    # By name, so that a notebook without pandas or datasets does not import them.
    return type(source).__module__.partition(".")[0] == "pandas" and type(source).__name__ == "DataFrame"


def _is_dataset(source: object) -> bool:
    return type(source).__module__.partition(".")[0] == "datasets" and type(source).__name__ == "Dataset"


def _is_list_of_rows(source: object) -> bool:
    return isinstance(source, list) and bool(source) and all(isinstance(row, dict) for row in source)


# ---- Files


def _read_folder(field: str, folder: Path, skips_unreadable: bool) -> Rows:
    if (folder / ARROW_STATE).is_file():
        from datasets import Dataset

        return cast(Rows, Dataset.load_from_disk(str(folder)))
    return _read_files(field, list_files(field, folder), skips_unreadable)


def _read_files(field: str, files: list[Path], skips_unreadable: bool) -> Rows:
    for path in files:
        check_is_utf8(field, path)
        if path.suffix.lower() == ".json":
            _check_json_characters(field, path)
    try:
        return FileRows(cast(Rows, load_files(field, files, streaming=False)), files)
    except FieldError:
        raise
    except Exception as raised:  # DatasetGenerationError around whatever the parser raised.
        error = raised
        check_tables(field, files, skips_wide=skips_unreadable)
        if skips_unreadable and files[0].suffix.lower() in (*JSON_LINES, *DELIMITERS):
            with tempfile.TemporaryDirectory() as folder:
                copies = write_readable_copies(files, Path(folder))
                try:
                    return FileRows(cast(Rows, load_files(field, copies, streaming=False)), files)
                except Exception as copy_error:  # As above; messages name the user's files, not the copies.
                    error = copy_error
        if LOADERS[files[0].suffix.lower()] == "json":
            check_json_lines(field, files, skips_unreadable=skips_unreadable)
        reason = get_first_line(error.__cause__ or error).rstrip(".")
        refuse(field, str(files[0]), f"a readable {files[0].suffix} file: {reason}", "a repaired file")


def load_files(field: str, files: list[Path], *, streaming: bool) -> object:
    """Return the rows of files of one kind as a ``Dataset``, or as an ``IterableDataset`` if streamed."""
    import datasets

    # Those without a row would be errors of the parsers.
    first, files = files[0], [path for path in files if has_rows(path)]
    if not files:
        problem = "has no row" if first.stat().st_size else "is empty"
        refuse(field, str(first), f"data with at least one row: this file {problem}", "a file that has rows")
    loader, options = LOADERS[files[0].suffix.lower()], dict[str, object]()
    if loader == "csv":
        for path in files:
            check_header(field, path)
        options["delimiter"] = find_delimiter(files[0])
        extra_cells = {path: find_extra_cell(path) for path in files}
        kinds = set(extra_cells.values())
        if kinds & {"every", "some"} or any(has_wide_first_row(*each) for each in extra_cells.items()):
            # Callers name the line, as for rows of which pandas raises this.
            raise ValueError("the first row has more cells than the header")
        if kinds >= {"index", "end"}:
            raise ValueError(
                "some files begin rows with a number that has no column, others end them with a delimiter"
            )
        if "end" in kinds:
            # pandas would take the first column as an index, as it does with row numbers.
            options["index_col"] = False
        # As text: pandas would read the answer "2" as a number, and "007" as 7.
        options["features"] = datasets.Features(
            {name: datasets.Value("string") for name in read_header(files[0])}
        )
        # Only an empty cell is empty: "None" and "NA" are answers, too.
        options |= {"keep_default_na": False, "na_values": [""]}
    if loader == TEXT_LOADER:
        # One row a file: "line" would make a training example of each line.
        options["sample_by"] = "document"
        # Without the mark that Windows' editors put before a text.
        options["encoding"] = "utf-8-sig"
    datasets.disable_progress_bars()
    # ``datasets`` would log its own traceback before our error message.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    # Online, it would tell the Hub that a loader is used, and wait for seconds where there is no network.
    with LOADING, _offline_datasets():
        rows: object = datasets.load_dataset(
            loader, data_files=[str(path) for path in files], split="train", streaming=streaming, **options
        )
    return rows


def check_json_lines(field: str, files: list[Path], *, skips_unreadable: bool = False) -> None:
    """Raise ``ValueError`` with the first line that is no JSON object or has other types than those before.

    Called where ``datasets`` has failed: its message has no line number. ``skips_unreadable``: lines that are
    no JSON object are accepted, as they are left out.
    """
    first_columns: dict[str, None] = {}
    for path in files:
        kinds: dict[str, tuple[str, int]] = {}
        columns: dict[str, None] = {}
        for number, row in _iterate_json_lines(field, path, skips_unreadable):
            columns |= dict.fromkeys(row)
            for column, value in row.items():
                if value is None:
                    continue
                kind, first = kinds.setdefault(column, (_name_kind(value), number))
                if _name_kind(value) != kind:
                    allowed = (
                        f"one type per column; {column} is {kind} in line {first} and {_name_kind(value)} in "
                        f"line {number}"
                    )
                    refuse(field, str(path), allowed, f"make {column} {kind} in every line")
        if path == files[0]:
            first_columns = columns
        # ``datasets`` fills columns that are missing, and adds none.
        elif not first_columns.keys() >= columns.keys():
            _refuse_columns(field, files[0], path, list(first_columns), list(columns))


def _refuse_columns(
    field: str, first: Path, path: Path, first_columns: list[str], columns: list[str]
) -> NoReturn:
    allowed = (
        f"files with the same columns in a folder: {first.name} has {join_list(first_columns)}, and "
        f"{path.name} {join_list(columns)}"
    )
    missing = set(first_columns) - set(columns)
    if missing and all(UNNAMED.fullmatch(name) for name in missing):
        fix = f"remove the column without a name from {first.name}"
    else:
        fix = f"rename the columns of {path.name}"
    refuse(field, str(path), allowed, f"{fix}, or train on one of the files")


def check_tables(field: str, files: list[Path], *, skips_wide: bool = False) -> None:
    """Raise ``ValueError`` with the first line of CSV files that cannot be read, as ``check_json_lines``.

    ``skips_wide``: rows with more cells than the header are accepted, as they are left out.
    """
    tables = [path for path in files if path.suffix.lower() in DELIMITERS]
    for path in tables:
        # All are read with the delimiter of the first.
        first_delimiter, delimiter = find_delimiter(tables[0]), find_delimiter(path)
        first_columns, columns = (
            name_columns(split_header(each, first_delimiter)) for each in (tables[0], path)
        )
        if delimiter != first_delimiter and min(len(first_columns), len(split_header(path, delimiter))) > 1:
            allowed = (
                f"files with the same delimiter in a folder: {tables[0].name} has {first_delimiter!r}, and "
                f"{path.name} {delimiter!r}"
            )
            fix = f"save {path.name} with {first_delimiter!r} as its delimiter, or train on one of the files"
            refuse(field, str(path), allowed, fix)
        if not set(first_columns) <= set(columns):
            _refuse_columns(field, tables[0], path, first_columns, columns)
        check_table_rows(field, path, skips_wide=skips_wide)


def _iterate_json_lines(field: str, path: Path, skips_unreadable: bool) -> Iterator[tuple[int, Row]]:
    if path.suffix.lower() == ".json":
        return  # One value of any number of lines: the parser's own message names the place.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            allowed = f"a JSON object on each line; line {number} is {_shorten_line(line)}"
            try:
                row = json.loads(line.rstrip())
            except (ValueError, RecursionError) as error:
                if skips_unreadable:
                    continue
                # Its own text counts the line's end as a second line.
                if isinstance(error, json.JSONDecodeError):
                    reason = f"{error.msg}, at character {error.pos + 1:,}"
                else:
                    reason = str(error)
                refuse(field, str(path), f"{allowed} ({reason})", f"repair or remove line {number}")
            if not isinstance(row, dict):
                if skips_unreadable:
                    continue
                refuse(field, str(path), allowed, f"repair or remove line {number}")
            if (half := find_half_pair(line, row)) is not None:
                if skips_unreadable:
                    continue
                reason = f"{half} is one half of a character, such as an emoji that was cut"
                refuse(field, str(path), f"{allowed} ({reason})", f"remove {half} from line {number}")
            yield number, row


def _check_json_characters(field: str, path: Path) -> None:
    """Refuse a JSON file with half a character, which Arrow's parser would leave out silently."""
    content = path.read_bytes()
    if HALF_PAIR.search(content) is None:
        return
    try:
        half = find_half_pair(content, json.loads(content))
    except (ValueError, RecursionError):
        return
    if half is not None:
        reason = f"{half} is one half of a character, such as an emoji that was cut"
        refuse(field, str(path), f"JSON of whole characters ({reason})", f"remove {half}")


def _name_kind(value: object) -> str:
    names = {
        str: "text",
        bool: "true or false",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)


def _shorten_line(line: bytes) -> str:
    text = line.decode("utf-8", errors="replace").strip()
    return text if len(text) <= 80 else f"{text[:77]}..."


def load_hub(field: str, name: str, *, streaming: bool) -> object:
    """Return the rows of a data set of the Hub as a ``Dataset``, or as an ``IterableDataset`` if streamed."""
    import datasets

    problem = find_hub_problem(name, README, "dataset")
    is_offline = problem is not None and problem.is_unreachable
    try:
        with LOADING, _offline_datasets() if is_offline else nullcontext():
            # Without custom code: datasets 4 and later run none.
            rows: object = datasets.load_dataset(name, split="train", streaming=streaming)
    except Exception as error:  # A gated data set, files of no known format: each its own exception.
        text = str(error).strip().splitlines()
        problem = problem or HubProblem(
            text[0].rstrip(".") if text else type(error).__name__, "another data set"
        )
        allowed = (
            "a file or folder, or a data set of the Hub that this machine can read: there is no such file, "
            f"and {problem.reason}"
        )
        refuse(field, name, allowed, f"{problem.fix}, or a file on this machine")
    return rows


@contextmanager
def _offline_datasets() -> Iterator[None]:
    """Make ``datasets`` read files and its cache only, instead of repeating requests for 23 seconds.

    It is a setting of the process: enter with :data:`LOADING` held.
    """
    import datasets

    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before
