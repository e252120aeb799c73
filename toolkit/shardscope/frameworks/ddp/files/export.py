"""Exported files of DDP plans: Accelerate's YAML, the Trainer's arguments, commands and train.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.frameworks.ddp.files import COVERED
from shardscope.frameworks.formats.accelerate_config import launched, none_of_it
from shardscope.frameworks.formats.commands import started
from shardscope.frameworks.formats.exported import Absent, Exported
from shardscope.frameworks.formats.train_file import train_files
from shardscope.frameworks.formats.training_arguments import training_arguments

if TYPE_CHECKING:
    from shardscope.core.plan import Plan


def files(plan: Plan) -> list[Exported | Absent]:
    """Return the files that an export of a DDP plan writes in addition to its JSON."""
    one = plan.world_size == 1
    kind = "NO" if one else "MULTI_GPU" if plan.on_gpu else "MULTI_CPU"
    launch: list[Exported | Absent] = [
        *launched(plan, kind, {}, notes=("Each process is one replica: DistributedDataParallel.",))
    ]
    if kind == "MULTI_CPU":
        why = "on CPUs accelerate launch starts one process, however many it is told, unless under MPI."
        launch = [*none_of_it(why)]
    return [
        *launch,
        training_arguments(plan, {}, eight_bit="adamw_bnb_8bit"),
        *started(plan, *train_files(plan, COVERED)),
    ]
