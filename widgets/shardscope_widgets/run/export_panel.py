"""The button that exports the plan: configurations, commands, and a script independent of Shardscope."""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha256
from html import escape
from pathlib import Path
from shlex import quote

import shardscope as ss
from shardscope.export.files import list_files
from shardscope.frameworks.formats.exported import Exported
from shardscope_widgets.kit.background_work import Progress, WorkPanel
from shardscope_widgets.kit.clickable import Clickable
from shardscope_widgets.kit.notice import WRONG_INPUT

FOLDER = "exports"
"""Parent folder of all exports, next to the notebook like ``runs``."""
TOOLTIP = (
    f"Write to {FOLDER}/ next to this notebook: files for Accelerate, DeepSpeed, transformers, Megatron-LM, "
    "torchrun, Slurm, Kubeflow, SkyPilot and Ray, and a script that trains without Shardscope"
)


class ExportPanel(WorkPanel):
    """A button that exports the latest offered plan and lists the files with their launch commands."""

    def __init__(self) -> None:
        self._plan: ss.Plan | None = None
        self.is_blocked = False
        """Whether an input is invalid: the files would be those of an earlier plan."""
        # The page copies the commands itself: no press reaches the kernel.
        super().__init__("Export configs and scripts", TOOLTIP, self._start_export, Clickable())

    def set_plan(self, plan: ss.Plan) -> None:
        """Set the plan to export; remove the file list of an earlier plan."""
        self._plan = plan
        if not self.is_busy:
            self.show_message("")

    def _start_export(self) -> None:
        plan = self._plan
        if plan is None or self.is_blocked:
            self.show_message(WRONG_INPUT)
            return
        folder = Path(FOLDER) / name_folder(plan)

        def export(progress: Progress) -> list[Exported]:
            progress("writing", 0.5)
            plan.export(folder)
            return list_files(plan)

        def show_files(files: list[Exported]) -> None:
            self.words.value = render_file_list(files, folder)

        self.start(export, show_files, lambda *_: None)


def name_folder(plan: ss.Plan) -> str:
    """Return a folder name unique to this plan: ``llama-3.1-8b-fsdp2-8xh100-sxm-80gb-1f0c2a``."""
    full_name = f"{plan.architecture.name}-{plan.layout.framework}-{plan.cluster}"
    # Limited because file systems allow 255 bytes; the hash keeps truncated names distinct.
    name = re.sub(r"[^a-z0-9.]+", "-", full_name.lower()).strip("-.")[:100]
    return f"{name}-{sha256(plan.to_json().encode()).hexdigest()[:6]}"


def render_file_list(files: Sequence[Exported], folder: Path) -> str:
    """Return the list as HTML, files that need no further values first; ``folder`` contains them."""
    rows = "".join(_render_file(file, folder) for file in sorted(files, key=_start_order))
    return (
        f"<div class='ss-files'><div class='ss-hint'>{len(files)} files in "
        f"<code>{escape(str(folder))}</code></div><ul>{rows}</ul></div>"
    )


def _start_order(file: Exported) -> tuple[bool, int]:
    return not file.start_command, len(file.inputs)


def _render_file(file: Exported, folder: Path) -> str:
    command = _render_command(file, folder)
    return f"<li><code>{escape(file.name)}</code><div>{escape(file.what)}{command}</div></li>"


def _render_command(file: Exported, folder: Path) -> str:
    if not file.start_command:
        return ""
    # The copied command includes the folder, because a terminal may be in any directory.
    command = escape(f"cd {quote(str(folder.absolute()))} && {file.start_command}", quote=True)
    label = escape(f"Copy the command that starts {file.name}", quote=True)
    open_values = [f"{'<...>' if name.isdigit() else name}: {line}" for name, line in file.inputs]
    return (
        f"<div class='ss-command'><code title='{command}'>{escape(file.start_command)}</code>"
        f"<button type='button' class='ss-act' data-copy='{command}' aria-label='{label}'>Copy</button></div>"
        + "".join(f"<div>{escape(line)}</div>" for line in open_values)
    )
