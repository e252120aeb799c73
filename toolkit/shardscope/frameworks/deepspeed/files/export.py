"""Exported files of DeepSpeed plans: its JSON, Accelerate's YAML, the Trainer's arguments and train.py."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from shardscope.frameworks.accelerate.limits import why_not_started
from shardscope.frameworks.deepspeed.config_fields import NOT_IN_CONFIG, written
from shardscope.frameworks.deepspeed.files import TRAINED_VALUES
from shardscope.frameworks.deepspeed.files.config import NVME_FOLDER, deepspeed_config
from shardscope.frameworks.formats.accelerate_config import list_absent_files, render_accelerate_files
from shardscope.frameworks.formats.commands import add_commands
from shardscope.frameworks.formats.comment_fields import find_missing_fields
from shardscope.frameworks.formats.exported import PLAN_FILE, Absent, Exported, describe_plan
from shardscope.frameworks.formats.train_file import render_train_files
from shardscope.frameworks.formats.training_arguments import ARGUMENTS_FILE, render_training_arguments

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

CONFIG_FILE = "ds_config.json"
OWN_KEY = "shardscope"
"""DeepSpeed's parser leaves top-level keys alone that it does not know; JSON has no comments."""
CLIPPED_TO = 1.0
"""The norm that engines and plain scripts clip to, and ``TrainingArguments.max_grad_norm`` by itself: without
the key DeepSpeed clips nothing, whatever that argument says (transformers/integrations/deepspeed.py)."""


def render_files(plan: Plan) -> list[Exported | Absent]:
    """Return the files that an export of a DeepSpeed plan writes in addition to its JSON."""
    return [
        _config(plan),
        *_accelerate(plan),
        _trainer(plan),
        *add_commands(plan, *render_train_files(plan, TRAINED_VALUES)),
    ]


def _elsewhere(plan: Plan) -> set[str]:
    """Fields of the layout that are in the JSON, which the other files name."""
    return {field.name for field in fields(plan.layout)} - set(NOT_IN_CONFIG)


def _config(plan: Plan) -> Exported:
    layout: Any = plan.layout
    said = {"micro_batch_size", "global_batch_size"}
    if plan.recipe.precision != "bf16":  # one with bf16-mixed in DeepSpeed's words
        said.add("precision")
    everything = {field.name for field in fields(plan.layout)}
    own = {
        "what": f"{describe_plan(plan)}. Written from the {PLAN_FILE} beside it.",
        "layout": {
            **{name: getattr(plan.layout, name) for name in NOT_IN_CONFIG},
            **dict(find_missing_fields(plan, {field.name for field in fields(plan.recipe)}, written(plan))),
        },
        "not_said_here": dict(find_missing_fields(plan, said, everything)),
    }
    values = {OWN_KEY: own, **deepspeed_config(plan), "gradient_clipping": CLIPPED_TO}
    what = "deepspeed.initialize(config=...)"
    if "nvme" in (layout.offload_optimizer, layout.offload_params):
        what += f"; nvme_path, {NVME_FOLDER}, is to be a folder on drives of each node"
    return Exported(name=CONFIG_FILE, what=what, text=json.dumps(values, indent=2) + "\n")


ON_CPU = "on CPU ranks Accelerate's DeepSpeed plugin silently trains with DDP instead."


def _accelerate(plan: Plan) -> list[Exported | Absent]:
    why = why_not_started(plan)
    if why is not None:
        return [*list_absent_files(why)]
    layout: Any = plan.layout
    section: dict[str, Any] = {
        "deepspeed_config_file": CONFIG_FILE,
        "zero3_init_flag": layout.stage == 3,
    }
    if plan.cluster.num_nodes > 1:
        section["deepspeed_multinode_launcher"] = "standard"
    return [
        *render_accelerate_files(
            plan,
            "DEEPSPEED",
            {"deepspeed_config": section},
            recipe_fields=("micro_batch_size", "global_batch_size", "precision"),
            layout_fields=_elsewhere(plan),
            notes=(f"Stage, offloading, batches and precision are in {CONFIG_FILE}.",),
            mixed_precision=False,
        )
    ]


def _trainer(plan: Plan) -> Exported | Absent:
    if not plan.on_gpu:
        return Absent(name=ARGUMENTS_FILE, why=ON_CPU)
    if plan.degrees.pp > 1:
        why = f"the Trainer has no pipeline engine, and the plan has pp={plan.degrees.pp}."
        return Absent(name=ARGUMENTS_FILE, why=why)
    # Has to agree with ds_config.json (transformers/integrations/deepspeed.py, trainer_config_process).
    sections = {"deepspeed": CONFIG_FILE, "bf16": plan.recipe.precision in ("bf16", "bf16-mixed")}
    return render_training_arguments(
        plan, sections, recipe_fields=("precision",), layout_fields=_elsewhere(plan)
    )
