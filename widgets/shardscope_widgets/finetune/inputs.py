"""The first inputs of a fine-tune: model, data and method."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import ipywidgets as widgets

import shardscope as ss
from shardscope.core.errors import FieldError
from shardscope.training.examples.folder_files import LOADERS
from shardscope.training.examples.rows import describe_source, open_rows, resolve_source
from shardscope.training.weights.example_models import EXAMPLES, fetch_example, find_example
from shardscope.training.weights.hub_folder import download, is_hub_name
from shardscope_widgets.data.column_menus import ColumnMenus
from shardscope_widgets.data.data_panel import DataPanel
from shardscope_widgets.finetune.file_browser import (
    FileBrowser,
    has_data_files,
    is_model_folder,
    shorten_path,
)
from shardscope_widgets.finetune.setup import EXAMPLE
from shardscope_widgets.finetune.upload import FIELD, UploadButton, list_data_files
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.background_calls import call_in_loop, find_running_loop
from shardscope_widgets.kit.background_work import Progress, WorkPanel
from shardscope_widgets.pickers.base import Picker, Row

METHODS = {
    "lora": ("LoRA", "Small adapters added to the frozen weights"),
    "full": ("Full", "All weights; takes the most memory"),
    "qlora": ("QLoRA", "Adapters over weights in 4 bits; takes the least memory"),
}
"""Method -> label and tooltip."""
USE_EXAMPLE = "Use the example model"
EXAMPLE_TOOLTIP = f"{EXAMPLES[EXAMPLE].title}, licence {EXAMPLES[EXAMPLE].licence}"


class FinetuneInputs(Picker):
    """Model, data and method, as typed; an error about one of them is shown at its input.

    ``data`` is the initial value: a path, a name, or rows in memory, which the text then names.
    Raises ``ValueError`` for rows that cannot be read.
    """

    def __init__(self, machine: ss.Cluster, data_panel: DataPanel, data: object = "") -> None:
        self._rows: object = None
        self._rows_name = ""
        files = list_data_files()
        if not isinstance(data, str | Path):
            self._rows_name = describe_source(data)
            # A frame compares by its cells: a data set is compared, and read, as one object.
            self._rows = open_rows(FIELD, resolve_source(FIELD, data))
            files.insert(0, self._rows_name)
        self.weights = _create_combobox([EXAMPLE, *_list_model_folders()], "folder or Hub org/name")
        self.data = _create_combobox(files, ".jsonl, .csv, …")
        self.data.value = self._rows_name or str(data)
        self.data.tooltip = (
            "Chats, questions and answers, or texts: a file, a folder of files, or a data set of the Hub"
        )
        self.weights.tooltip = "Folder of a Hugging Face model, the example model, or a name on the Hub"
        self._qlora_note = controls.create_html(
            "QLoRA needs a GPU, which this machine does not have", "ss-hint"
        )
        self.method = controls.create_segments(_list_methods(has_gpu=True), "Method")
        self.set_has_gpu(machine.gpu.vendor != "cpu")
        self._loop: asyncio.AbstractEventLoop | None = None
        self.on_fetched: Callable[[], None] = self.read
        """Called when the model named in the input has been downloaded."""
        self.fetch = WorkPanel(USE_EXAMPLE, EXAMPLE_TOOLTIP, self._start_fetch)
        self.upload = UploadButton(self._use_file, self.show_plan_error, layout=controls.share_layout())
        self.model_browser = FileBrowser(
            "model folders", lambda path: self._pick(self.weights, path), picks_folder=is_model_folder
        )
        self.data_browser = FileBrowser(
            "data files",
            lambda path: self._pick(self.data, path),
            picks_folder=has_data_files,
            suffixes=tuple(LOADERS),
        )
        self.columns = ColumnMenus()
        browse_models = _create_browse_button(self.model_browser, self.weights, "the folder of a model")
        browse_data = _create_browse_button(self.data_browser, self.data, "a data file or a folder of them")
        data_row = Row("Data", self.data, browse_data, self.upload)
        rows = {
            "weights": Row("Model", self.weights, browse_models),
            "data": data_row,
            "method": Row("Method", self.method, self._qlora_note),
            **dict.fromkeys(("columns", "validation", "samples"), data_row),
        }
        super().__init__(rows)
        self.children = [
            rows["weights"],
            self.model_browser,
            self.fetch,
            self.fetch.words,
            data_row,
            self.data_browser,
            data_panel,
            self.columns,
            rows["method"],
        ]
        for box in (self.weights, self.data, self.method):
            box.observe(self.read, "value")
        self.read()

    @property
    def boxes(self) -> Mapping[str, widgets.ValueWidget]:
        """See :class:`Picker`."""
        return {"weights": self.weights, "data": self.data}

    def set_has_gpu(self, has_gpu: bool) -> None:
        """Offer the methods of GPUs, or of CPU ranks. The chosen one stays, if it is still offered."""
        methods, before = _list_methods(has_gpu=has_gpu), self.method.value
        if tuple(self.method.options) != tuple(methods):
            # Setting the options selects the first one.
            self.method.options = methods
            if before in dict(methods).values():
                self.method.value = before
        self.method.tooltips = [METHODS[name][1] for _, name in methods]
        controls.show_if(self._qlora_note, not has_gpu)

    def build_value(self) -> tuple[str, object, str]:
        """Return model, data and method as typed; for the name of rows in memory, the rows."""
        data = self.data.value.strip()
        is_rows = bool(data) and data == self._rows_name
        return self.weights.value.strip(), self._rows if is_rows else data, self.method.value

    def read(self, change: object = None) -> None:
        """Read the inputs, and offer to download the model that they name."""
        super().read(change)
        names = [Path(box.value.strip()).name for box in (self.weights, self.data)]
        self.answer = ", ".join(filter(None, [*names, METHODS[self.method.value][0]]))
        if not self.fetch.is_busy:
            name = self._find_hub_name()
            self.fetch.button.description = f"Download {name}" if name else USE_EXAMPLE
            self.fetch.button.tooltip = f"Download {name} from the Hub" if name else EXAMPLE_TOOLTIP
            text = self.weights.value.strip()
            needs_example = not text or (text == EXAMPLE and find_example(EXAMPLE) is None)
            self.fetch.show_button(bool(name) or needs_example)

    def changes_of(self, error: FieldError) -> dict[str, object]:
        """Return the fix (see :class:`Picker`), if each field that it changes has an input here."""
        changes = super().changes_of(error)
        return changes if all(name.rpartition(".")[2] in self.boxes for name in changes) else {}

    def _find_hub_name(self) -> str:
        text = self.weights.value.strip()
        return text if is_hub_name(text) and not Path(text).exists() else ""

    def _start_fetch(self) -> None:
        name = self._find_hub_name()
        self._loop = find_running_loop()

        def fetch(progress: Progress) -> None:
            if name:
                download(name, progress)
            elif find_example(EXAMPLE) is None:
                fetch_example(EXAMPLE, progress)

        # Inputs are set in the kernel's own thread, in which everything is drawn that follows.
        self.fetch.start(
            fetch,
            lambda _: call_in_loop(self._loop, lambda: self._use_weights(name or EXAMPLE)),
            lambda *_: "",
        )

    def _use_weights(self, text: str) -> None:
        if self.comm is None:  # Closed meanwhile.
            return
        if self.weights.value != text:
            self.weights.value = text
        else:
            self.on_fetched()

    def _pick(self, box: widgets.Combobox, path: Path) -> None:
        """Enter what was chosen from a browser."""
        box.value = shorten_path(path)

    def _use_file(self, path: Path) -> None:
        self.data.options = [*filter(None, [self._rows_name]), *list_data_files()]
        if self.data.value == str(path):
            self.clear_plan_errors()
        self.data.value = str(path)


def _list_methods(*, has_gpu: bool) -> list[tuple[str, str]]:
    """Return label and name of each method that can be trained."""
    return [(label, name) for name, (label, _) in METHODS.items() if name != "qlora" or has_gpu]


def _create_browse_button(browser: FileBrowser, box: widgets.Combobox, what: str) -> widgets.Button:
    """Return the button that opens and closes ``browser`` at the path in ``box``."""
    button = controls.create_button("Browse…", "ss-ghost", "ss-small", layout=controls.share_fixed_layout())
    button.tooltip = f"Choose {what} on the machine of this notebook"
    button.on_click(lambda _: browser.toggle(box.value.strip()))
    # The front end says by these classes whether what the button opens is open (kit/front_end/names.js).
    button.add_class("ss-expands")

    def show_open(_: object) -> None:
        controls.set_class(button, "ss-expanded", browser.is_open)

    browser.observe(show_open, "value")
    return button


def _create_combobox(options: list[str], placeholder: str) -> widgets.Combobox:
    return widgets.Combobox(
        layout=controls.share_filling_layout(),
        options=options,
        continuous_update=False,
        placeholder=placeholder,
    )


def _list_model_folders() -> list[str]:
    """Return the model folders in the notebook's own folder."""
    try:
        return sorted(path.parent.name for path in Path().glob("*/config.json"))[:50]
    except OSError:
        return []
