"""The button that writes the plan as files: configurations, commands, a script that needs no Shardscope."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path

import shardscope as ss
from shardscope_widgets.work_panel import Progress, WorkPanel

FOLDER = "exports"
"""Beside the notebook, as ``runs`` is."""
TOOLTIP = (
    f"Into {FOLDER}/ beside this notebook: files of Accelerate, DeepSpeed, transformers, Megatron-LM, "
    "torchrun and Slurm, and a script that trains without Shardscope"
)


class ExportPanel(WorkPanel):
    """Offers ``plan.export`` for the plan that was shown last; says where its files are."""

    def __init__(self) -> None:
        self._plan: ss.Plan | None = None
        self.is_blocked = False
        """While an input is wrong: nobody asked for the last plan's files."""
        super().__init__("Write files to train it elsewhere", TOOLTIP, self._export)

    def offer(self, plan: ss.Plan) -> None:
        """Write ``plan`` when the button is pressed; words of another plan's files go."""
        self._plan = plan
        if not self.is_busy:
            self.say("")

    def _export(self) -> None:
        plan = self._plan
        if plan is None or self.is_blocked:
            self.say("Mend the input marked in red first.")
            return
        folder = Path(FOLDER) / folder_name(plan)

        def work(progress: Progress) -> list[Path]:
            progress("writing", 0.5)
            return plan.export(folder)

        self.start(work, lambda _: None, lambda files, _: f"{len(files)} files in {folder}, FILES.md first")


def folder_name(plan: ss.Plan) -> str:
    """``llama-3.1-8b-fsdp2-8xh100-sxm-80gb-1f0c2a``: every plan has a folder of its own."""
    whole = f"{plan.architecture.name}-{plan.layout.framework}-{plan.cluster}"
    name = re.sub(r"[^a-z0-9.]+", "-", whole.lower()).strip("-.")[:100]
    return f"{name}-{sha256(plan.to_json().encode()).hexdigest()[:6]}"
