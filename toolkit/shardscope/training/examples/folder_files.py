"""Data files of a folder: those to train on, and those that are not read."""

from __future__ import annotations

import re
from pathlib import Path

from shardscope.core.errors import refuse
from shardscope.core.number_format import join_list

TEXT_LOADER = "text"
LOADERS = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".txt": TEXT_LOADER,
    ".md": TEXT_LOADER,
}
"""File suffix -> builder of ``datasets.load_dataset``."""
README = "README.md"
ARROW_STATE = "state.json"
"""File that ``Dataset.save_to_disk`` writes into its folder."""
ARROW_SPLITS = "dataset_dict.json"
"""File that ``DatasetDict.save_to_disk`` writes into its folder, in which each split has one."""
TRAINING_NAME = re.compile(r"(?<![a-z])(train|training)(?![a-z])")
OTHER_NAME = re.compile(r"(?<![a-z])(validation|valid|val|dev|test|testing|eval|evaluation)(?![a-z])")
"""Words in file names by which ``datasets`` finds the splits of a folder (5.2, data_files.py)."""
MAX_NAMED_FILES = 4
"""Files that a message about a folder names."""
ALLOWED = (
    "a JSONL, JSON, CSV, TSV, Parquet or text file, a folder of one kind of them, a data set's name on the "
    "Hub, a datasets.Dataset, a pandas DataFrame, or a list of dicts"
)


def list_files(field: str, folder: Path) -> list[Path]:
    """Return the data files of a folder; where their names say train and test, only those for training.

    Raises ``ValueError`` if there is none, or more than one kind.
    """
    files = find_files(folder)
    is_split = (folder / ARROW_SPLITS).is_file()
    if not files or is_split:
        nested = sorted(path for path in folder.iterdir() if path.is_dir())
        nested = [path for path in nested if _has_data_files(path)]
        inner = min(nested, key=_is_other_split, default=None)
        problem = (
            "each split is a folder of its own in this one" if is_split else "this folder has no such file"
        )
        fix = "a folder of .jsonl files" if inner is None else str(inner)
        refuse(field, str(folder), f"{ALLOWED}: {problem}", fix)
    loaders = {LOADERS[path.suffix.lower()] for path in files}
    if len(loaders) > 1:
        suffixes = ", ".join(sorted({path.suffix for path in files}))
        refuse(field, str(folder), f"files of one kind in a folder: this one has {suffixes}", str(files[0]))
    return files


def find_files(folder: Path) -> list[Path]:
    """Return the files of a folder that are data for training, in order; all of them without splits."""
    files = _list_data_files(folder)
    return [path for path in files if not (_is_split(files) and _is_other_split(path))]


def describe_unread_files(source: object) -> str:
    """Return sentences about the data in a folder that are not read: files that are named as validation or
    test data, and those of subfolders. Empty if there are none."""
    if not isinstance(source, Path) or not source.is_dir() or (source / ARROW_STATE).is_file():
        return ""
    files, sentences = _list_data_files(source), list[str]()
    names = [path.name for path in files if _is_split(files) and _is_other_split(path)]
    if names:
        sentences.append(
            f"Not read, because a name like this means validation or test data: {_join_names(names)}. To "
            "train on such a file, give it another name."
        )
    folders = [path for path in sorted(source.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    if names := [f"{path.name}/" for path in folders if _has_data_files(path)]:
        sentences.append(
            f"Not read, because only the files of the folder itself are: {_join_names(names)}. To train on "
            f"those as well, move them into {source.name}."
        )
    return " ".join(sentences)


def _has_data_files(subfolder: Path) -> bool:
    """Return whether a subfolder has data files, ``state.json`` of an Arrow folder included.

    False if this user may not list it, as lost+found at the root of a disk.
    """
    try:
        return bool(_list_data_files(subfolder))
    except OSError:
        return False


def _join_names(names: list[str]) -> str:
    if len(names) > MAX_NAMED_FILES:
        names = [*names[: MAX_NAMED_FILES - 1], f"{len(names) - MAX_NAMED_FILES + 1} more"]
    return join_list(names)


def _list_data_files(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.iterdir()
        # The card of a data set is no text to train on. Hidden files belong to programs, such as "._a.csv",
        # which macOS writes beside a.csv on the disks of other systems.
        if path.suffix.lower() in LOADERS
        and path.name.lower() != README.lower()
        and not path.name.startswith(".")
        and path.is_file()
    )


def _is_split(files: list[Path]) -> bool:
    """Return whether a file is named as the training part of a data set."""
    return any(TRAINING_NAME.search(path.stem.lower()) for path in files)


def _is_other_split(path: Path) -> bool:
    """Return whether a file or folder is named as the validation or test part of a data set."""
    name = path.stem.lower()
    return bool(OTHER_NAME.search(name)) and not TRAINING_NAME.search(name)
