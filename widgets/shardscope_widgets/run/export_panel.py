"""The button that exports the plan: configurations, commands, and a script that needs no Shardscope."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path

import shardscope as ss
from shardscope.export.files import contents
from shardscope.frameworks.formats.exported import Exported
from shardscope_widgets.kit.background_work import Progress, WorkPanel
from shardscope_widgets.kit.clickable import Clickable, IgnoredError
from shardscope_widgets.run.export_files import listed

FOLDER = "exports"
"""Folder of all exports, beside the notebook like ``runs``."""
TOOLTIP = (
    f"Write to {FOLDER}/ beside this notebook: files for Accelerate, DeepSpeed, transformers, Megatron-LM, "
    "torchrun and Slurm, and a script that trains without Shardscope"
)


class ExportPanel(WorkPanel):
    """Exports the plan that was offered last, and lists the files with the commands that start them."""

    def __init__(self) -> None:
        self._plan: ss.Plan | None = None
        self.is_blocked = False
        """Whether an input is wrong: the files would be of an earlier plan."""
        super().__init__("Write files to train it elsewhere", TOOLTIP, self._export, Clickable(_press))

    def offer(self, plan: ss.Plan) -> None:
        """Export ``plan`` when the button is pressed; remove the list of an earlier plan's files."""
        self._plan = plan
        if not self.is_busy:
            self.say("")

    def _export(self) -> None:
        plan = self._plan
        if plan is None or self.is_blocked:
            self.say("Fix the input marked in red first.")
            return
        folder = Path(FOLDER) / folder_name(plan)

        def work(progress: Progress) -> list[Exported]:
            progress("writing", 0.5)
            plan.export(folder)
            return contents(plan)

        def show(files: list[Exported]) -> None:
            self.words.value = listed(files, folder)

        self.start(work, show, lambda *_: None)


def _press(act: str) -> None:
    raise IgnoredError(act)  # The page itself copies a command.


def folder_name(plan: ss.Plan) -> str:
    """Return ``llama-3.1-8b-fsdp2-8xh100-sxm-80gb-1f0c2a``: a folder name that only this plan has."""
    whole = f"{plan.architecture.name}-{plan.layout.framework}-{plan.cluster}"
    name = re.sub(r"[^a-z0-9.]+", "-", whole.lower()).strip("-.")[:100]
    return f"{name}-{sha256(plan.to_json().encode()).hexdigest()[:6]}"
