"""``train.py`` of an export: the framework's own ``files/train.py``, byte for byte, if it trains the plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any

from shardscope.families.registry import family_of
from shardscope.frameworks.formats.exported import Absent, Exported
from shardscope.memory.activations.head import loss_in_force

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

SCRIPT_FILE = "train.py"
MODEL_FILE = "config.json"
ATTENTION = {"flash": "flash_attention_2", "eager": "eager", "sdpa": "sdpa"}
"""``Recipe.attention`` as transformers' ``attn_implementation``."""
METADATA = frozenset(
    {"architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "_name_or_path"}
)
"""Config fields that do not describe the model."""
WITHOUT_ROUTER_LOSS = {"output_router_logits": False, "router_jitter_noise": 0.0}
"""Config values of experts as all engines train them: pipelines and Megatron-core have no auxiliary loss."""

Covered = Mapping[str, tuple[object, ...]]
"""The field of a recipe or a layout, ``Recipe.method``, and its values that a ``train.py`` trains."""

FULL_TRAINING: Covered = {
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


def why_none(plan: Plan, covered: Covered) -> str | None:
    """Return a sentence that names the first field of ``plan`` outside of ``covered``, or None."""
    in_force = {"Recipe.kernels": plan.kernels, "Recipe.loss": loss_in_force(plan)}
    for field, values in covered.items():
        noun, _, name = field.partition(".")
        value = in_force[field] if field in in_force else getattr(getattr(plan, noun.lower()), name)
        if value not in values:
            listed = " or ".join(map(repr, values))
            return (
                f"Only Shardscope's engine trains this: {field} is {value!r}, and {SCRIPT_FILE} has {listed}."
            )
    return None


def train_files(plan: Plan, covered: Covered) -> list[Exported | Absent]:
    """Return the framework's ``train.py`` and the ``config.json`` that it reads, or why there are none."""
    why = why_none(plan, covered)
    if why is not None:
        return [Absent(name=SCRIPT_FILE, why=why)]
    try:
        config = written_config(plan)
    except ModuleNotFoundError as missing:
        why = f'transformers spells the config of the model: pip install "shardscope[train]" ({missing})'
        return [Absent(name=SCRIPT_FILE, why=why)]
    folder = resources.files(f"shardscope.frameworks.{plan.layout.framework}.files")
    return [
        Exported(
            name=SCRIPT_FILE,
            what="trains the plan with its framework and transformers, without Shardscope",
            text=(folder / SCRIPT_FILE).read_text(encoding="utf-8"),
        ),
        Exported(
            name=MODEL_FILE,
            what=f"the model's transformers config, which {SCRIPT_FILE} reads",
            text=json.dumps(config, indent=2, ensure_ascii=False) + "\n",
        ),
    ]


def written_config(plan: Plan) -> dict[str, Any]:
    """Return keyword arguments of ``AutoConfig.for_model``, as ``config.json`` holds them.

    Raises ``ModuleNotFoundError`` without transformers, which spells them.
    """
    from shardscope.families.unknown import UnknownFamily
    from shardscope.training.model.model import DROPOUTS, config_values

    arch, recipe = plan.architecture, plan.recipe
    if isinstance(arch, UnknownFamily):
        config = {name: value for name, value in json.loads(arch.config_json).items() if name not in METADATA}
    else:
        from transformers import AutoConfig

        known = AutoConfig.for_model(arch.model_type)
        own = dict.fromkeys(DROPOUTS, recipe.dropout) | WITHOUT_ROUTER_LOSS
        config = {"model_type": arch.model_type, **config_values(arch)}
        config |= {name: value for name, value in own.items() if hasattr(known, name)}
    attention = ATTENTION.get(recipe.attention or "")
    if attention is None and not family_of(arch).has_sdpa:
        attention = "eager"
    return config if attention is None else {**config, "attn_implementation": attention}
