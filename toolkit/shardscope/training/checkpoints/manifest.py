"""Signed manifests of checkpoints: an HMAC-SHA256 that proves that this user's own launch saved them.

The key is ``$XDG_STATE_HOME/shardscope/checkpoint.key`` (``~/.local/state`` by default): 32 random bytes that
only this user can read. The manifest has the size of every file, and a SHA-256 of all non-tensor data:
pickles, position, random states. Gigabytes of tensors are not read. File ownership would prove nothing,
because a user owns the copy of a downloaded folder. Imports no torch.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from shardscope.records.folder import RunFolder
from shardscope.records.json_files import read_json
from shardscope.records.regular_files import open_to_read

MANIFEST_FILE = "manifest.json"
KEY_BYTES = 32
MAX_MANIFEST_BYTES = 64 * 2**20
"""Maximum size of a manifest: 200 bytes per file, for thousands of ranks with a few files each."""
TENSOR_SUFFIXES = frozenset({".distcp", ".swp"})
"""Files with only tensors, except for the pickled ranges passed to :func:`sign_checkpoint`."""
_PURPOSE = b"shardscope checkpoint manifest 1\n"
_RECORD_PURPOSE = b"shardscope record of a run 1\n"
_CHUNK_BYTES = 2**20

Ranges = Sequence[tuple[int, int]]
"""Ranges of a file: offset and length in bytes."""


class UnsignedError(Exception):
    """Error of a checkpoint without proof that this user's launch saved it. The message is a clause."""


@dataclass(frozen=True, kw_only=True)
class SignedRun:
    """The run that saved a checkpoint, as described by its ``run.json`` at that time."""

    name: str | None
    """The name that it was launched with."""
    created: float | None


def read_run(folder: Path) -> SignedRun:
    """Return the run in ``folder`` by its ``run.json``, which is not signed."""
    record = read_json(RunFolder(folder).run_json) or {}
    name, created = record.get("asked_name"), record.get("created")
    return SignedRun(
        name=name if isinstance(name, str) else None,
        created=created if isinstance(created, float) else None,
    )


# ---- the key


def key_path() -> Path:
    """Return the path of this user's key, by the XDG Base Directory Specification 0.8.

    Raises :class:`UnsignedError` if this user has no home folder.
    """
    base = os.environ.get("XDG_STATE_HOME", "")
    try:
        # By the specification a relative path in this variable is invalid and must be ignored.
        home = Path(base) if Path(base).is_absolute() else Path.home() / ".local" / "state"
    except RuntimeError:
        raise UnsignedError("this user has no home folder; set XDG_STATE_HOME") from None
    return home / "shardscope" / "checkpoint.key"


def read_key() -> bytes:
    """Read this user's key. Raises :class:`UnsignedError` if it is missing or readable by others."""
    path = key_path()
    try:
        # Another process may just be creating the key: retry for a second while it is empty.
        for _ in range(20):
            with open_to_read(path) as file:
                status = os.fstat(file.fileno())
                key = file.read(KEY_BYTES + 1)
            if key:
                break
            time.sleep(0.05)
    except FileNotFoundError:
        raise UnsignedError(f"this user has no key yet ({path})") from None
    except OSError as error:
        raise UnsignedError(f"the key {path} cannot be read: {error.strerror or error}") from error
    if status.st_uid != os.geteuid():
        raise UnsignedError(f"the key {path} belongs to user {status.st_uid}: delete it")
    if mode := stat.S_IMODE(status.st_mode) & 0o077:
        raise UnsignedError(
            f"the key {path} has mode {stat.S_IMODE(status.st_mode):04o}, and others may have read it "
            f"({mode:03o}): delete it, and the next checkpoint makes a new one of mode 0600"
        )
    if len(key) != KEY_BYTES:
        raise UnsignedError(f"the key {path} is damaged: it should have {KEY_BYTES} bytes. Delete it")
    return key


def read_or_create_key() -> bytes:
    """Read this user's key, or create one if there is none. Raises :class:`UnsignedError`."""
    path = key_path()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return read_key()
    except OSError as error:
        raise UnsignedError(f"the key {path} cannot be written: {error.strerror or error}") from error
    key = secrets.token_bytes(KEY_BYTES)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(key)
    # A key of fewer bytes, such as after a full disk, would make every later launch fail.
    except OSError as error:
        path.unlink(missing_ok=True)
        raise UnsignedError(f"the key {path} cannot be written: {error.strerror or error}") from error
    return key


# ---- manifests


def sign_checkpoint(
    folder: Path, run: SignedRun, pickled: Mapping[str, Ranges], added_files: Mapping[str, bytes]
) -> None:
    """Write the manifest of the checkpoint in ``folder``, including ``added_files`` (name: content).

    The added files are written after the manifest. ``pickled`` are the ranges of pickles in tensor files, by
    path in the checkpoint. Raises :class:`UnsignedError` if this user's key can be neither read nor created,
    ``OSError`` if a file cannot be read.
    """
    # First, so that a checkpoint that cannot be signed is not read.
    key = read_or_create_key()
    files: dict[str, object] = {
        name: {"bytes": len(content), "ranges": [[0, len(content)]], "sha256": _compute_sha256(content)}
        for name, content in added_files.items()
    }
    for name in _list_files(folder):
        if name in added_files or name == MANIFEST_FILE:
            continue
        with open_to_read(folder / name) as file:
            ranges = pickled.get(name, _find_hashed_ranges(folder / name, file))
            size = os.fstat(file.fileno()).st_size
            files[name] = {
                "bytes": size,
                "ranges": [*map(list, ranges)],
                "sha256": _hash_ranges(file, ranges),
            }
    record = {"version": 1, "run": {"name": run.name, "created": run.created}, "files": files}
    (folder / MANIFEST_FILE).write_text(
        json.dumps({**record, "hmac": _compute_hmac(key, record)}), encoding="utf-8"
    )


def check_signed(checkpoint: Path) -> SignedRun:
    """Return the run of this user that saved ``checkpoint``. Raises :class:`UnsignedError` without proof."""
    # Read the manifest and verify its HMAC with this user's key.
    try:
        with open_to_read(checkpoint / MANIFEST_FILE) as file:
            content = file.read(MAX_MANIFEST_BYTES)
        record: dict[str, object] = dict(json.loads(content))
        stored_hmac = str(record.pop("hmac"))
        expected_hmac = _compute_hmac(read_key(), record)
    except FileNotFoundError:
        raise UnsignedError(f"it has no {MANIFEST_FILE}") from None
    except (OSError, KeyError, TypeError, ValueError, RecursionError):
        raise UnsignedError(f"its {MANIFEST_FILE} cannot be read") from None
    # Use no other field of the manifest before this check; after it the content is trusted.
    if not hmac.compare_digest(stored_hmac.encode(errors="replace"), expected_hmac.encode()):
        raise UnsignedError(f"its {MANIFEST_FILE} was not signed by this user's key ({key_path()})")
    files, run = record["files"], record["run"]
    assert isinstance(files, dict) and isinstance(run, dict)
    # Reject added files: a framework might prefer one, or find it by a pattern.
    for name in _list_files(checkpoint):
        if name not in files and name != MANIFEST_FILE:
            raise UnsignedError(f"{name} was added after it was saved")
    # Reject missing and changed files.
    for name, entry in files.items():
        try:
            with open_to_read(checkpoint / name) as file:
                size = os.fstat(file.fileno()).st_size
                if size != entry["bytes"] or _hash_ranges(file, entry["ranges"]) != entry["sha256"]:
                    raise UnsignedError(f"{name} was changed after it was saved")
        except OSError as error:
            raise UnsignedError(f"{name} cannot be read: {error.strerror or error}") from error
    return SignedRun(name=run["name"], created=run["created"])


def find_damage(checkpoint: Path) -> str | None:
    """Return the first file that is missing or has fewer bytes than when it was saved, as a clause.

    Return None if there is none, or no manifest that can be read. Compares sizes only, without the key: for
    checkpoints that another user or machine saved.
    """
    record = read_json(checkpoint / MANIFEST_FILE) or {}
    files = record.get("files")
    for name, entry in files.items() if isinstance(files, dict) else ():
        saved_bytes = entry.get("bytes") if isinstance(entry, dict) else None
        # Names of a foreign manifest must not lead out of the checkpoint.
        if not isinstance(saved_bytes, int) or Path(name).is_absolute() or ".." in Path(name).parts:
            continue
        path = checkpoint / name
        if not path.is_file():
            return f"its file {name} is missing"
        if (size := path.stat().st_size) < saved_bytes:
            return f"its file {name} has {size:,} of the {saved_bytes:,} bytes that were saved"
    return None


def sign_record(record: Mapping[str, object]) -> str:
    """Return the HMAC of a record of a run that this user's later launches rely on.

    Raises :class:`UnsignedError` if this user's key can be neither read nor created.
    """
    return _compute_hmac(read_or_create_key(), record, _RECORD_PURPOSE)


def is_record_signed(record: Mapping[str, object], stored_hmac: object) -> bool:
    """Return whether :func:`sign_record` has returned ``stored_hmac`` for this record, with this user's key.

    Raises :class:`UnsignedError` if the key cannot be read.
    """
    expected = _compute_hmac(read_key(), record, _RECORD_PURPOSE)
    return hmac.compare_digest(str(stored_hmac).encode(errors="replace"), expected.encode())


def _list_files(folder: Path) -> list[str]:
    """Return the relative paths of all files in ``folder``, and of symbolic links to folders."""
    names = []
    for parent, folders, files in os.walk(folder):
        links = [name for name in folders if Path(parent, name).is_symlink()]
        names += [Path(parent, name).relative_to(folder).as_posix() for name in (*files, *links)]
    return sorted(names)


def _compute_hmac(key: bytes, record: object, purpose: bytes = _PURPOSE) -> str:
    content = json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
    return hmac.new(key, purpose + content, hashlib.sha256).hexdigest()


def _find_hashed_ranges(path: Path, file: BinaryIO) -> Ranges:
    """Return the non-tensor ranges of ``file``; the whole file if its format is unknown."""
    if path.suffix in TENSOR_SUFFIXES:
        return []
    size = os.fstat(file.fileno()).st_size
    if path.suffix != ".pt" or not zipfile.is_zipfile(file):
        return [(0, size)]
    # A torch.save archive has pickles as separate records, and tensors as the records in "data/". The central
    # directory is hashed too, so that no other record can replace a pickle.
    with zipfile.ZipFile(file) as archive:
        records = sorted(archive.infolist(), key=lambda record: record.header_offset)
        ends = [*(record.header_offset for record in records[1:]), archive.start_dir]
        return [
            *(
                (record.header_offset, end - record.header_offset)
                for record, end in zip(records, ends, strict=True)
                if "/data/" not in record.filename
            ),
            (archive.start_dir, size - archive.start_dir),
        ]


def _hash_ranges(file: BinaryIO, ranges: Ranges) -> str:
    digest = hashlib.sha256()
    for offset, length in ranges:
        file.seek(offset)
        left = length
        while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
            digest.update(chunk)
            left -= len(chunk)
    return digest.hexdigest()


def _compute_sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
