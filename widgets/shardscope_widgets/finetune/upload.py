"""Button that uploads a data file into the notebook's folder ``data``, and the list of its files."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import anywidget
import traitlets

from shardscope.core.errors import refuse
from shardscope.training.examples.folder_files import LOADERS
from shardscope_widgets.kit.front_end import front_end_text

FOLDER = "data"
MAX_BYTES = 8 * 2**20
"""Jupyter's servers accept messages of 10 MB."""
MAX_NAME = 200
MAX_LISTED = 200
FIELD = "Finetune.data"


class UploadButton(anywidget.AnyWidget):
    """A button that uploads one file. ``on_file`` receives its path, ``on_error`` why it was refused."""

    _esm = front_end_text("kit/front_end", "keys.js") + front_end_text("finetune", "upload.js")
    suffixes = traitlets.List(traitlets.Unicode()).tag(sync=True)
    max_bytes = traitlets.Int(MAX_BYTES).tag(sync=True)
    tooltip_text = traitlets.Unicode().tag(sync=True)

    def __init__(
        self, on_file: Callable[[Path], None], on_error: Callable[[ValueError], None], **traits: object
    ) -> None:
        super().__init__(
            suffixes=list(LOADERS),
            tooltip_text=f"Upload a file of at most {MAX_BYTES // 2**20} MB into {FOLDER}/",
            **traits,
        )
        self.add_class("ss-upload")
        self._on_file, self._on_error = on_file, on_error
        self.on_msg(self._handle_message)

    def _handle_message(self, _: object, content: object, buffers: object) -> None:
        if not isinstance(content, dict) or not isinstance(name := content.get("name"), str):
            return
        try:
            data = bytes(buffers[0]) if isinstance(buffers, list) and buffers else None
            size = content.get("size")
            path = store_file(name, data, size if isinstance(size, int) else 0)
        except ValueError as error:
            self._on_error(error)
        else:
            self._on_file(path)


def store_file(name: str, data: bytes | None, size: int) -> Path:
    """Write an uploaded file into :data:`FOLDER` and return its relative path.

    ``data`` is None for a file that the page did not send, because of its ``size``. A file of that name with
    another content is kept, and the new one gets a number. Raises ``ValueError``.
    """
    if data is None or len(data) > MAX_BYTES:
        megabytes, most = max(size, len(data or b"")) / 2**20, MAX_BYTES // 2**20
        refuse(
            FIELD,
            name[:MAX_NAME],
            f"an upload of at most {most} MB",
            "drop it into JupyterLab's file browser, at the left, and type its path here",
            f"The file has {megabytes:,.1f} MB, and a direct upload at most {most}",
        )
    # Browsers send a bare name; another program may send a path.
    own = PurePosixPath(name.replace("\\", "/")).name
    path = Path(FOLDER) / own
    is_plain = own.isprintable() and 0 < len(own) <= MAX_NAME and not own.startswith(".")
    if not is_plain or path.suffix.lower() not in LOADERS:
        refuse(
            FIELD, name[:MAX_NAME], f"a file with one of the endings {', '.join(LOADERS)}", "a .jsonl file"
        )
    try:
        Path(FOLDER).mkdir(exist_ok=True)
        for number in itertools.count(2):
            try:
                with path.open("xb") as file:
                    file.write(data)
                return path
            except FileExistsError:
                if path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data:
                    return path
                path = Path(FOLDER) / f"{Path(own).stem}-{number}{Path(own).suffix}"
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror or error}.") from error
    raise AssertionError("count() does not end")


def list_data_files() -> list[str]:
    """Return the paths of data files here and in :data:`FOLDER`, at most :data:`MAX_LISTED`."""
    paths: list[str] = []
    for folder in (Path(FOLDER), Path()):
        try:
            paths += [str(path) for path in sorted(folder.iterdir()) if path.suffix.lower() in LOADERS]
        except OSError:
            continue
    return paths[:MAX_LISTED]
