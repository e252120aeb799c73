"""``accelerate_config.yaml`` and the command that launches the user's own script with it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from shardscope.frameworks.formats.commands import HERE, PORT, SHELL
from shardscope.frameworks.formats.exported import Absent, Exported, header
from shardscope.frameworks.formats.text import yaml_text
from shardscope.frameworks.formats.unsupported_fields import sentences, unsaid

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

CONFIG_FILE = "accelerate_config.yaml"
LAUNCH_FILE = "accelerate_launch.sh"
MIXED = {"bf16-mixed": "bf16", "fp16-mixed": "fp16", "fp8-mixed": "fp8", "bf16": "no", "fp32": "no"}
"""``Recipe.precision`` -> accelerate's ``mixed_precision``; ``no`` keeps the model's own type."""


def launched(
    plan: Plan,
    distributed_type: str,
    sections: Mapping[str, Any],
    *,
    said: Collection[str] = (),
    layout: Collection[str] = (),
    notes: Collection[str] = (),
    mixed_precision: bool = True,
) -> list[Exported]:
    """Return the YAML of ``accelerate launch`` (accelerate/commands/config/config_args.py) and the command.

    ``sections`` are the framework's own; ``said`` and ``layout`` are the recipe and layout fields that they
    contain; ``mixed_precision`` is False if another file sets it.
    """
    cluster, recipe = plan.cluster, plan.recipe
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": distributed_type,
        "num_machines": cluster.num_nodes,
        "num_processes": plan.world_size,
        "machine_rank": 0,
        "main_process_port": PORT,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": not plan.on_gpu,
        **sections,
    }
    carried = set(said)
    if mixed_precision:
        values["mixed_precision"] = MIXED[recipe.precision]
        if recipe.precision == "fp8-mixed":
            values["fp8_config"] = {"backend": "AO"}
        if recipe.precision.endswith("-mixed"):
            carried.add("precision")
    text = header(
        plan,
        *notes,
        *sentences(unsaid(plan, carried, layout), "the script that accelerate launches"),
        f"Each rank takes {plan.num_micro_batches} micro-batches of {recipe.micro_batch_size} to a step: "
        f"Accelerator(gradient_accumulation_steps={plan.num_micro_batches}).",
    )
    return [
        Exported(
            name=CONFIG_FILE, what="what accelerate launch --config_file reads", text=text + yaml_text(values)
        ),
        Exported(
            name=LAUNCH_FILE,
            what="accelerate launch of a script of your own that uses Accelerator or Trainer",
            text=_launch(plan),
            is_command=True,
        ),
    ]


def none_of_it(why: str) -> list[Absent]:
    """Return the same files as absent, for plans that accelerate would run differently."""
    return [Absent(name=CONFIG_FILE, why=why), Absent(name=LAUNCH_FILE, why=f"no {CONFIG_FILE}")]


def _launch(plan: Plan) -> str:
    several = plan.cluster.num_nodes > 1
    where = 'machines=(--machine_rank "$MACHINE_RANK" --main_process_ip "$HEAD_NODE")\n' if several else ""
    needed = (
        ': "${HEAD_NODE:?the name of the first node}" "${MACHINE_RANK:?the number of this node, from 0}"\n'
        if several
        else ""
    )
    note = "Run it on every node. " if several else ""
    return (
        SHELL
        + header(plan, f"{note}The first argument is your own script; the others are that script's.")
        + ': "${1:?name a script that uses Accelerator or Trainer}"\n'
        + 'script=$(realpath -e "$1") || exit\nshift\n'
        + HERE
        + needed
        + where
        + f"exec accelerate launch --config_file {CONFIG_FILE} "
        + ('"${machines[@]}" ' if several else "")
        + '"$script" "$@"\n'
    )
