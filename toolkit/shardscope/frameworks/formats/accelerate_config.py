"""``accelerate_config.yaml`` and the command that launches the user's own script with it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from shardscope.frameworks.formats.commands import CHANGE_FOLDER, PORT, SHELL
from shardscope.frameworks.formats.comment_fields import find_missing_fields, render_comment_fields
from shardscope.frameworks.formats.exported import Absent, Exported, render_header
from shardscope.frameworks.formats.text import render_yaml

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

CONFIG_FILE = "accelerate_config.yaml"
LAUNCH_FILE = "accelerate_launch.sh"
MIXED = {"bf16-mixed": "bf16", "fp16-mixed": "fp16", "fp8-mixed": "fp8", "bf16": "no", "fp32": "no"}
"""``Recipe.precision`` -> accelerate's ``mixed_precision``; ``no`` keeps the model's own type."""


def render_accelerate_files(
    plan: Plan,
    distributed_type: str,
    sections: Mapping[str, object],
    *,
    recipe_fields: Collection[str] = (),
    layout_fields: Collection[str] = (),
    notes: Collection[str] = (),
    mixed_precision: bool = True,
) -> list[Exported]:
    """Return the YAML of ``accelerate launch`` (accelerate/commands/config/config_args.py) and the command.

    ``sections`` are the framework's own; ``recipe_fields`` and ``layout_fields`` are the fields that they
    contain; ``mixed_precision`` is False if another file sets it.
    """
    # The file is the same on all nodes: its machine_rank is a default that the launch script overrides.
    cluster, recipe = plan.cluster, plan.recipe
    values: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": distributed_type,
        "num_machines": cluster.num_nodes,
        "num_processes": plan.world_size,
        "machine_rank": 0,
        "main_process_port": PORT,
        # As accelerate's own questionnaire writes them (accelerate 1.15, commands/config/cluster.py).
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": not plan.on_gpu,
        **sections,
    }
    # "no" keeps the model's own dtype, so it expresses neither bf16 nor fp32.
    contained = set(recipe_fields)
    if mixed_precision:
        values["mixed_precision"] = MIXED[recipe.precision]
        if recipe.precision == "fp8-mixed":
            # Unless one is named, accelerate takes the first fp8 library that is installed (accelerator.py).
            # The engine's fp8 is torchao's.
            values["fp8_config"] = {"backend": "AO"}
        if recipe.precision.endswith("-mixed"):
            contained.add("precision")
    text = render_header(
        plan,
        *notes,
        f"Each rank runs {plan.num_micro_batches} micro-batches of {recipe.micro_batch_size} per step: "
        f"Accelerator(gradient_accumulation_steps={plan.num_micro_batches}).",
    )
    text += render_comment_fields(
        find_missing_fields(plan, contained, layout_fields), "the script that accelerate launches"
    )
    return [
        Exported(
            name=CONFIG_FILE,
            what="the configuration that accelerate launch --config_file reads",
            text=text + render_yaml(values),
        ),
        Exported(
            name=LAUNCH_FILE,
            what="accelerate launch for your own script that uses Accelerator or Trainer",
            text=_render_launch_script(plan),
            is_command=True,
        ),
    ]


def list_absent_files(why: str) -> list[Absent]:
    """Return the same files as absent, for plans that accelerate would run differently."""
    return [Absent(name=CONFIG_FILE, why=why), Absent(name=LAUNCH_FILE, why=f"no {CONFIG_FILE}")]


def _render_launch_script(plan: Plan) -> str:
    # Shell variables for what differs between nodes; the script fails at once if one is missing.
    has_nodes = plan.cluster.num_nodes > 1
    machines = (
        'machines=(--machine_rank "$MACHINE_RANK" --main_process_ip "$HEAD_NODE")\n' if has_nodes else ""
    )
    checks = (
        ': "${HEAD_NODE:?the name of the first node}" "${MACHINE_RANK:?the number of this node, from 0}"\n'
        if has_nodes
        else ""
    )
    note = "Run it on every node. " if has_nodes else ""
    shared = "the first" if has_nodes else "this"
    port = f"Jobs that share {shared} node need a MASTER_PORT each. " if plan.world_size > 1 else ""
    return (
        SHELL
        + render_header(
            plan, f"{note}{port}The first argument is your own script; further arguments are passed to it."
        )
        + ': "${1:?the path of a script that uses Accelerator or Trainer}"\n'
        # Resolved first: a relative path is the user's, and the next line changes to the export's folder.
        + 'script=$(realpath -e "$1") || exit\nshift\n'
        + CHANGE_FOLDER
        + checks
        + machines
        + f"exec accelerate launch --config_file {CONFIG_FILE} "
        + ('"${machines[@]}" ' if has_nodes else "")
        # As torchrun.sh has it, for jobs that share a node: the configuration's port is the same for all.
        + '${MASTER_PORT:+--main_process_port "$MASTER_PORT"} '
        + '"$script" "$@"\n'
    )
