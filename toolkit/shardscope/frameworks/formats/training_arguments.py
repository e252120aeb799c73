"""``training_arguments.yaml``: the fields of a plan that transformers' ``TrainingArguments`` has."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from shardscope.frameworks.formats.comment_fields import find_missing_fields, render_comment_fields
from shardscope.frameworks.formats.exported import Exported, render_header
from shardscope.frameworks.formats.text import render_yaml

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

ARGUMENTS_FILE = "training_arguments.yaml"

OPTIMIZERS = {
    "adamw": "adamw_torch_fused",
    "adamw_foreach": "adamw_torch",
    "paged_adamw": "paged_adamw_32bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
    "lion": "lion_32bit",
}
"""``Recipe.optimizer`` -> ``optim`` (``OptimizerNames``). Without ``sgd`` and ``adafactor``: transformers'
``sgd`` has no momentum, and its ``adafactor`` is not PyTorch's."""


def render_training_arguments(
    plan: Plan,
    sections: Mapping[str, object],
    *,
    eight_bit: str | None = None,
    recipe_fields: Collection[str] = (),
    layout_fields: Collection[str] = (),
    notes: Collection[str] = (),
    checkpoints: bool = True,
) -> Exported:
    """Return keyword arguments as YAML for ``HfArgumentParser.parse_yaml_file``.

    ``eight_bit`` is the ``optim`` of 8-bit AdamW in this framework. ``recipe_fields`` and ``layout_fields``
    are the fields that ``sections`` contain. ``checkpoints`` is False if a section of the framework's own
    configures recomputation.
    """
    # TrainingArguments has the micro-batches of a rank; their product with the ranks is the global batch.
    recipe = plan.recipe
    contained = {"micro_batch_size", "global_batch_size", *recipe_fields}
    values: dict[str, object] = {
        "output_dir": "out",
        "per_device_train_batch_size": recipe.micro_batch_size,
        "gradient_accumulation_steps": plan.num_micro_batches,
        "use_cpu": not plan.on_gpu,
    }
    # Both flags off train in the dtype of the model, which the script loads.
    for precision, flag in (("bf16-mixed", "bf16"), ("fp16-mixed", "fp16")):
        values[flag] = recipe.precision == precision
        if values[flag]:
            contained.add("precision")
    optimizer = eight_bit if recipe.optimizer == "adamw_8bit" else OPTIMIZERS.get(recipe.optimizer)
    if optimizer is not None:
        values["optim"] = optimizer
        contained.add("optimizer")
    # transformers recomputes every layer, whole, or none. Non-reentrant, as Shardscope's engines.
    if checkpoints and recipe.recompute == "full" and recipe.recompute_interval == 1:
        values["gradient_checkpointing"] = True
        values["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    if recipe.recompute == "none" or "gradient_checkpointing" in values:
        contained.add("recompute")
    if recipe.kernels == "liger":
        values["use_liger_kernel"] = True
        contained.add("kernels")
    text = render_header(
        plan,
        "parser = HfArgumentParser(TrainingArguments); "
        f"(args,) = parser.parse_yaml_file({ARGUMENTS_FILE!r}, allow_extra_keys=False)",
        *notes,
        "Add learning rate, number of steps and logging yourself: a plan has none.",
    )
    text += render_comment_fields(
        find_missing_fields(plan, contained, layout_fields), "the script with the Trainer"
    )
    return Exported(
        name=ARGUMENTS_FILE,
        what="keyword arguments of transformers.TrainingArguments",
        text=text + render_yaml({**values, **sections}),
    )
