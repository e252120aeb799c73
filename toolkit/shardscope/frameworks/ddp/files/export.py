"""Exported files of DDP plans: Accelerate's YAML, the Trainer's arguments, commands and train.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.frameworks.ddp.files import TRAINED_VALUES
from shardscope.frameworks.formats.accelerate_config import list_absent_files, render_accelerate_files
from shardscope.frameworks.formats.commands import add_commands
from shardscope.frameworks.formats.exported import Absent, Exported
from shardscope.frameworks.formats.train_file import PACKAGES, render_train_files
from shardscope.frameworks.formats.training_arguments import render_training_arguments

if TYPE_CHECKING:
    from shardscope.core.plan import Plan


def render_files(plan: Plan) -> list[Exported | Absent]:
    """Return the files that an export of a DDP plan writes in addition to its JSON."""
    one = plan.world_size == 1
    kind = "NO" if one else "MULTI_GPU" if plan.on_gpu else "MULTI_CPU"
    launch: list[Exported | Absent] = [
        *render_accelerate_files(
            plan, kind, {}, notes=("Each process is one replica: DistributedDataParallel.",)
        )
    ]
    # accelerate 1.15, commands/launch.py: launch_command has no launcher for CPU ranks. simple_launcher runs
    # the script once, or under mpirun if there is an MPI hostfile.
    if kind == "MULTI_CPU":
        why = "on CPUs accelerate launch starts one process, whatever num_processes is, unless under MPI."
        launch = [*list_absent_files(why)]
    packages = [*PACKAGES, "peft>=0.19"] if plan.recipe.method == "lora" else PACKAGES
    return [
        *launch,
        # The engine's 8-bit AdamW is bitsandbytes' (FSDP2's is torchao's, which can be sharded).
        render_training_arguments(plan, {}, eight_bit="adamw_bnb_8bit"),
        *add_commands(plan, *render_train_files(plan, TRAINED_VALUES), packages=packages),
    ]
