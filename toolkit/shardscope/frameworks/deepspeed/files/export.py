"""Exported files of DeepSpeed plans: its JSON, Accelerate's YAML, the Trainer's arguments and train.py."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING

from shardscope.frameworks.accelerate.limits import why_not_started
from shardscope.frameworks.deepspeed.config_fields import NOT_IN_CONFIG, list_config_fields
from shardscope.frameworks.deepspeed.files import TRAINED_VALUES
from shardscope.frameworks.deepspeed.files.config import NVME_FOLDER, build_deepspeed_config
from shardscope.frameworks.deepspeed.layout import get_layout
from shardscope.frameworks.deepspeed.limits import check_cpu_ranks
from shardscope.frameworks.formats.accelerate_config import list_absent_files, render_accelerate_files
from shardscope.frameworks.formats.commands import add_commands
from shardscope.frameworks.formats.comment_fields import find_missing_fields
from shardscope.frameworks.formats.exported import PLAN_FILE, Absent, Exported, describe_plan
from shardscope.frameworks.formats.train_file import PACKAGES, SCRIPT_FILE, render_train_files
from shardscope.frameworks.formats.training_arguments import ARGUMENTS_FILE, render_training_arguments

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

CONFIG_FILE = "ds_config.json"
OWN_KEY = "shardscope"
"""Key of what DeepSpeed's configuration has no keys for: its parser ignores unknown top-level keys."""
CLIPPED_TO = 1.0
"""Gradient norm to which engines and plain scripts clip, the default of ``TrainingArguments.max_grad_norm``.
Without the key DeepSpeed does not clip, whatever that argument says
(transformers/integrations/deepspeed.py)."""
ON_CPU = "on CPU ranks Accelerate's DeepSpeed plugin silently trains with DDP instead."


def render_files(plan: Plan) -> list[Exported | Absent]:
    """Return the files that an export of a DeepSpeed plan writes in addition to its JSON."""
    return [
        _render_config(plan),
        *_render_accelerate_files(plan),
        _render_training_arguments(plan),
        *add_commands(
            plan,
            *_render_script(plan),
            packages=(*PACKAGES, "deepspeed>=0.19"),
            other_inputs=[CONFIG_FILE],
        ),
    ]


def _render_script(plan: Plan) -> list[Exported | Absent]:
    """Return ``train.py`` and the files that it reads, or the reason that they are absent."""
    if not plan.on_gpu:
        try:
            check_cpu_ranks(get_layout(plan))
        except ValueError as refusal:
            return [Absent(name=SCRIPT_FILE, why=str(refusal))]
    return render_train_files(plan, TRAINED_VALUES)


def _list_fields_in_config(plan: Plan) -> set[str]:
    """Return the layout fields that the other files leave to the JSON, which they name."""
    return {field.name for field in fields(plan.layout)} - set(NOT_IN_CONFIG)


def _render_config(plan: Plan) -> Exported:
    """Return the JSON, with the fields that DeepSpeed has no keys for under :data:`OWN_KEY`."""
    layout = get_layout(plan)
    layout_fields = {field.name for field in fields(plan.layout)}
    recipe_fields = {field.name for field in fields(plan.recipe)}
    written_recipe_fields = {"micro_batch_size", "global_batch_size"}
    if plan.recipe.precision != "bf16":  # "bf16" and "bf16-mixed" have the same configuration.
        written_recipe_fields.add("precision")
    not_in_config = {
        "what": f"{describe_plan(plan)}. Written from the {PLAN_FILE} beside it.",
        "layout": {
            **{name: getattr(plan.layout, name) for name in NOT_IN_CONFIG},
            **dict(find_missing_fields(plan, recipe_fields, list_config_fields(plan))),
        },
        "recipe": dict(find_missing_fields(plan, written_recipe_fields, layout_fields)),
    }
    config = {OWN_KEY: not_in_config, **build_deepspeed_config(plan), "gradient_clipping": CLIPPED_TO}
    what = "deepspeed.initialize(config=...)"
    if "nvme" in (layout.offload_optimizer, layout.offload_params):
        what += f"; nvme_path, {NVME_FOLDER}, is to be a folder on drives of each node"
    return Exported(name=CONFIG_FILE, what=what, text=json.dumps(config, indent=2) + "\n")


def _render_accelerate_files(plan: Plan) -> list[Exported | Absent]:
    why = why_not_started(plan) if plan.on_gpu else ON_CPU
    if why is not None:
        return [*list_absent_files(why)]
    section: dict[str, object] = {
        "deepspeed_config_file": CONFIG_FILE,
        "zero3_init_flag": get_layout(plan).stage == 3,
    }
    if plan.cluster.num_nodes > 1:
        # "standard": one launcher per node, as the other frameworks' files; the default, pdsh, needs ssh
        # between the nodes.
        section["deepspeed_multinode_launcher"] = "standard"
    return [
        *render_accelerate_files(
            plan,
            "DEEPSPEED",
            {"deepspeed_config": section},
            recipe_fields=("micro_batch_size", "global_batch_size", "precision"),
            layout_fields=_list_fields_in_config(plan),
            notes=(f"Stage, offloading, batches and precision are in {CONFIG_FILE}.",),
            mixed_precision=False,
        )
    ]


def _render_training_arguments(plan: Plan) -> Exported | Absent:
    if not plan.on_gpu:
        return Absent(name=ARGUMENTS_FILE, why=ON_CPU)
    if plan.degrees.pp > 1:
        why = f"the Trainer has no pipeline engine, and the plan has pp={plan.degrees.pp}."
        return Absent(name=ARGUMENTS_FILE, why=why)
    # "bf16" must agree with ds_config.json (transformers/integrations/deepspeed.py, trainer_config_process).
    sections = {"deepspeed": CONFIG_FILE, "bf16": plan.recipe.precision in ("bf16", "bf16-mixed")}
    return render_training_arguments(
        plan, sections, recipe_fields=("precision",), layout_fields=_list_fields_in_config(plan)
    )
