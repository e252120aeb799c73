"""``training_arguments.yaml``: the fields of a plan that transformers' ``TrainingArguments`` has."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from shardscope.frameworks.formats.exported import Exported, header
from shardscope.frameworks.formats.text import yaml_text
from shardscope.frameworks.formats.unsupported_fields import sentences, unsaid

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


def training_arguments(
    plan: Plan,
    sections: Mapping[str, Any],
    *,
    eight_bit: str | None = None,
    said: Collection[str] = (),
    layout: Collection[str] = (),
    notes: Collection[str] = (),
    checkpoints: bool = True,
) -> Exported:
    """Return keyword arguments as YAML for ``HfArgumentParser.parse_yaml_file``.

    ``eight_bit`` is the ``optim`` of 8-bit AdamW in this framework; ``checkpoints`` is False if a section of
    the framework's own configures recomputation.
    """
    recipe = plan.recipe
    carried = {"micro_batch_size", "global_batch_size", *said}
    values: dict[str, Any] = {
        "output_dir": "out",
        "per_device_train_batch_size": recipe.micro_batch_size,
        "gradient_accumulation_steps": plan.num_micro_batches,
        "use_cpu": not plan.on_gpu,
    }
    for precision, flag in (("bf16-mixed", "bf16"), ("fp16-mixed", "fp16")):
        values[flag] = recipe.precision == precision
        if values[flag]:
            carried.add("precision")
    optimizer = eight_bit if recipe.optimizer == "adamw_8bit" else OPTIMIZERS.get(recipe.optimizer)
    if optimizer is not None:
        values["optim"] = optimizer
        carried.add("optimizer")
    if checkpoints and recipe.recompute == "full" and recipe.recompute_interval == 1:
        values["gradient_checkpointing"] = True
        values["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    if recipe.recompute == "none" or "gradient_checkpointing" in values:
        carried.add("recompute")
    if recipe.kernels == "liger":
        values["use_liger_kernel"] = True
        carried.add("kernels")
    text = header(
        plan,
        "parser = HfArgumentParser(TrainingArguments); "
        f"(args,) = parser.parse_yaml_file({ARGUMENTS_FILE!r}, allow_extra_keys=False)",
        *notes,
        *sentences(unsaid(plan, carried, layout), "the script with the Trainer"),
        "Rates, steps and logging are yours to add: a plan holds none.",
    )
    return Exported(
        name=ARGUMENTS_FILE,
        what="keyword arguments of transformers.TrainingArguments",
        text=text + yaml_text({**values, **sections}),
    )
