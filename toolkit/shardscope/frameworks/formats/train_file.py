"""``train.py`` of an export: the framework's own ``files/train.py``, byte for byte, if it trains the plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import TYPE_CHECKING

from shardscope.core.errors import FieldError
from shardscope.families.registry import find_family
from shardscope.frameworks.formats.exported import Absent, Exported
from shardscope.frameworks.registry import frameworks
from shardscope.memory.activations.head import resolve_loss

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

SCRIPT_FILE = "train.py"
MODEL_FILE = "config.json"
CHECKPOINTS_FILE = "checkpoints.py"
"""Module that ``train.py`` imports, with which it continues after a failure."""
OPTIONS_FILE = "script_options.py"
"""Module that every framework's ``train.py`` imports; it lies beside this one."""
ATTENTION = {"flash": "flash_attention_2", "eager": "eager", "sdpa": "sdpa"}
"""``Recipe.attention`` as transformers' ``attn_implementation``."""
METADATA = frozenset(
    {"architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "_name_or_path"}
)
"""Config fields that do not describe the model."""
WITHOUT_ROUTER_LOSS = {"output_router_logits": False, "router_jitter_noise": 0.0}
"""Config values of experts as all engines train them: pipelines and Megatron-core have no auxiliary loss."""

PACKAGES = ("numpy", "tokenizers>=0.21", "torch>=2.12", "transformers>=5.16")
"""Imports of every ``train.py`` as pip takes them, in the versions of Shardscope's extras."""

TrainedValues = Mapping[str, tuple[object, ...]]
"""The field of a recipe or a layout, ``Recipe.method``, and its values that a ``train.py`` trains."""

FULL_TRAINING: TrainedValues = {
    "Recipe.method": ("full",),
    "Recipe.quantization": (None,),
    "Recipe.precision": ("bf16-mixed", "fp16-mixed", "bf16", "fp32"),
    "Recipe.optimizer": ("adamw", "adamw_foreach"),
    "Recipe.recompute": ("none", "full"),
    "Recipe.kernels": ("transformers",),
    "Recipe.loss": ("full",),
    "Recipe.packing": (False,),
    "Recipe.expert_capacity_factor": (None,),
}
"""Recipe values that every framework's ``train.py`` supports."""


def why_no_train_file(plan: Plan, trained: TrainedValues) -> str | None:
    """Return a sentence that names the first field of ``plan`` outside of ``trained``, or None."""
    # None means the engine's own choice: compare what it resolves to.
    effective = {"Recipe.kernels": plan.kernels, "Recipe.loss": resolve_loss(plan)}
    for field, values in trained.items():
        noun, _, name = field.partition(".")
        value = effective[field] if field in effective else getattr(getattr(plan, noun.lower()), name)
        if value not in values:
            listed = " or ".join(map(repr, values))
            why = f"{field} is {value!r}, and {SCRIPT_FILE} supports {listed}"
            refused = _find_refused_field(plan)
            if refused is None:
                return f"Only Shardscope's engine trains this: {why}."
            if refused != field:
                # The engine may train the field that comes first here, such as a quantized base.
                _, _, name = refused.partition(".")
                why += f"; {refused} is {getattr(plan.recipe, name, None)!r}, which the engine does not train"
            return f"Neither {SCRIPT_FILE} nor Shardscope's engine trains this: {why}."
    return None


def _find_refused_field(plan: Plan) -> str | None:
    """Return the field of the recipe that Shardscope's engine does not train, or None."""
    try:
        frameworks[plan.layout.framework].limits().check_plan(plan)
    except FieldError as refusal:
        # Other fields may be refused because this machine lacks a package, which the plan's machine may have.
        if refusal.field.startswith("Recipe."):
            return refusal.field
    return None


def render_train_files(plan: Plan, trained: TrainedValues) -> list[Exported | Absent]:
    """Return the framework's ``train.py`` and the ``config.json`` that it reads, or why there are none."""
    why = why_no_train_file(plan, trained)
    if why is not None:
        return [Absent(name=SCRIPT_FILE, why=why)]
    # An export works without transformers; only the script's model needs it.
    try:
        config = build_config(plan)
    except ModuleNotFoundError as missing:
        why = f'The model config needs transformers: pip install "shardscope[train]" ({missing}).'
        return [Absent(name=SCRIPT_FILE, why=why)]
    folder = resources.files(f"shardscope.frameworks.{plan.layout.framework}.files")
    what = "trains the plan with its framework and transformers, without Shardscope"
    resume = f"{what}; with --checkpoints FOLDER the same command continues after a failure"
    scripts = [
        (SCRIPT_FILE, resume, folder / SCRIPT_FILE),
        (
            CHECKPOINTS_FILE,
            f"the checkpoints of {SCRIPT_FILE}, which imports it",
            folder / CHECKPOINTS_FILE,
        ),
        (
            OPTIONS_FILE,
            f"options of {SCRIPT_FILE}, which imports it",
            resources.files("shardscope.frameworks.formats") / OPTIONS_FILE,
        ),
    ]
    return [
        *(
            Exported(name=name, what=what, text=source.read_text(encoding="utf-8"))
            for name, what, source in scripts
        ),
        Exported(
            name=MODEL_FILE,
            what=f"the model's transformers config, which {SCRIPT_FILE} reads",
            text=json.dumps(config, indent=2, ensure_ascii=False) + "\n",
        ),
    ]


def build_config(plan: Plan) -> dict[str, object]:
    """Return keyword arguments of ``AutoConfig.for_model``, as ``config.json`` holds them.

    Raises ``ModuleNotFoundError`` without transformers, whose config class lists the supported fields.
    """
    from shardscope.families.unknown import UnknownFamily
    from shardscope.training.model.model import DROPOUTS, config_values

    # A family without formulas has its original config.json, the others are built from their fields.
    arch, recipe = plan.architecture, plan.recipe
    if isinstance(arch, UnknownFamily):
        config = {name: value for name, value in json.loads(arch.config_json).items() if name not in METADATA}
    else:
        from transformers import AutoConfig

        # Only options that the family's config class has: names of dropouts differ between families.
        known = AutoConfig.for_model(arch.model_type)
        fixed = dict.fromkeys(DROPOUTS, recipe.dropout) | WITHOUT_ROUTER_LOSS
        config = {"model_type": arch.model_type, **config_values(arch)}
        config |= {name: value for name, value in fixed.items() if hasattr(known, name)}
    # An unset attention is transformers' choice, sdpa, which not every family has.
    attention = ATTENTION.get(recipe.attention or "")
    if attention is None and not find_family(arch).has_sdpa:
        attention = "eager"
    return config if attention is None else {**config, "attn_implementation": attention}
