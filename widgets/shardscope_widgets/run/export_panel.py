"""The button that writes the plan as files: configurations, commands, a script that needs no Shardscope."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path

import shardscope as ss
from shardscope.export.files import Exported, contents
from shardscope_widgets.kit.background_work import Progress, WorkPanel
from shardscope_widgets.kit.clickable import Clickable, IgnoredError
from shardscope_widgets.run.export_files import listed

FOLDER = "exports"
"""Beside the notebook, as ``runs`` is."""
TOOLTIP = (
    f"Into {FOLDER}/ beside this notebook: files of Accelerate, DeepSpeed, transformers, Megatron-LM, "
    "torchrun and Slurm, and a script that trains without Shardscope"
)


class ExportPanel(WorkPanel):
    """Offers ``plan.export`` for the plan that was shown last; lists its files, and how they are started."""

    def __init__(self) -> None:
        self._plan: ss.Plan | None = None
        self.is_blocked = False
        """While an input is wrong: nobody asked for the last plan's files."""
        super().__init__("Write files to train it elsewhere", TOOLTIP, self._export, Clickable(_press))

    def offer(self, plan: ss.Plan) -> None:
        """Write ``plan`` when the button is pressed; the list of another plan's files goes."""
        self._plan = plan
        if not self.is_busy:
            self.say("")

    def _export(self) -> None:
        plan = self._plan
        if plan is None or self.is_blocked:
            self.say("Mend the input marked in red first.")
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
    raise IgnoredError(act)  # What is pressed there is copied by the page itself.


def folder_name(plan: ss.Plan) -> str:
    """``llama-3.1-8b-fsdp2-8xh100-sxm-80gb-1f0c2a``: every plan has a folder of its own."""
    whole = f"{plan.architecture.name}-{plan.layout.framework}-{plan.cluster}"
    name = re.sub(r"[^a-z0-9.]+", "-", whole.lower()).strip("-.")[:100]
    return f"{name}-{sha256(plan.to_json().encode()).hexdigest()[:6]}"
