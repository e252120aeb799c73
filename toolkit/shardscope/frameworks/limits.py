"""Limits shared by the plain PyTorch engines. Imports no torch: notebooks check them before a launch."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING

from shardscope.core.errors import refuse
from shardscope.families.registry import list_families_with

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.core.recipe import Recipe


def can_train_here() -> bool:
    """Return whether this machine has torch; without it, plans are made here for other machines.

    Limits of this machine (packages, compilers) count only then: a plan made on a laptop is not refused, and
    advice is the same there as on the machine that trains. A launch requires the ``train`` extra first.
    """
    return importlib.util.find_spec("torch") is not None


def is_missing(package: str) -> bool:
    """Return whether this machine trains, but does not have ``package``. Does not import it."""
    # find_spec and no import: these packages import torch.
    return can_train_here() and importlib.util.find_spec(package) is None


def check_adapters(recipe: Recipe) -> None:
    """Raise ``ValueError`` with the pip command if adapters need peft or bitsandbytes, which is missing."""
    if recipe.has_adapters and is_missing("peft"):
        refuse(
            "Recipe.method",
            recipe.method,
            "'full', or 'lora' with peft installed, which implements adapters",
            'pip install "shardscope[train]"',
        )
    # QLoRA sets the quantization by its method, "lora" by a field of its own: name the one that is set.
    if recipe.base_quantization and is_missing("bitsandbytes"):
        field = "method" if recipe.method == "qlora" else "quantization"
        refuse(
            f"Recipe.{field}",
            getattr(recipe, field),
            "'full', or 'lora' over an unquantized base, unless bitsandbytes is installed, which implements "
            "quantized linear layers",
            'pip install "shardscope[qlora]"',
        )


STAGED_FAMILIES = list_families_with("pipeline_stages")
"""Families whose models have ``model.embed_tokens``, ``model.layers``, ``model.norm`` and ``lm_head``, and
accept hidden states in place of the embedding's output."""


def check_staged(plan: Plan) -> None:
    """Raise ``ValueError`` for models that ``training/model/pipeline_stages.py`` cannot split in stages."""
    arch, recipe = plan.architecture, plan.recipe
    if arch.model_type not in STAGED_FAMILIES:
        refuse(
            "Architecture.model_type",
            arch.model_type,
            f"{', '.join(STAGED_FAMILIES)} with pp > 1: models of other families cannot be split into stages",
            {"pp": 1},
        )
    if recipe.method != "full":
        refuse("Recipe.method", recipe.method, "'full' with pp > 1: peft wraps the whole model", {"pp": 1})


TRAINED = {
    "method": ("full", "lora"),
    "quantization": (None,),
    "precision": ("bf16-mixed", "fp16-mixed", "bf16", "fp32"),
    "optimizer": ("adamw", "adamw_foreach", "sgd", "lion", "adafactor", "muon"),
    "kernels": (None, "transformers"),
    # "sdpa" is what None resolves to (training/model/model.py); the plan of a family without it is refused.
    "attention": (None, "sdpa"),
    "loss": (None, "full", "chunked"),
    "dropout": (0.0,),
    "lora_dropout": (0.0,),
}
"""Recipe values that the plain PyTorch engines train, by field. Other values can only be planned, so that a
run never differs from its plan. Expert imbalance is missing: a run measures it, it is not an option."""


QUANTIZED_TRAINED = {**TRAINED, "method": ("full", "lora", "qlora"), "quantization": (None, "nf4", "int8")}
"""``TRAINED``, with a base quantized by bitsandbytes under adapters."""

REHEARSED: Mapping[str, tuple[object, ...]] = {
    "method": ("full", "lora", "qlora"),
    "quantization": (None, "nf4", "int8"),
    "precision": ("bf16-mixed", "fp16-mixed", "bf16", "fp32"),
    "optimizer": (*("adamw", "adamw_foreach", "adamw_8bit", "adafactor", "sgd", "lion", "muon"),),
    "kernels": (None, "transformers"),
    "attention": (None, "eager", "sdpa"),
    "loss": (None, "full", "chunked"),
}
"""Recipe values that can be rehearsed, by field: more than ``TRAINED``, for fake tensors need no kernels."""

WHY_NOT_REHEARSED = {
    "precision": "torchao's casts to 8 bits read the values that they scale",
    "optimizer": "the driver moves pages between host and GPU, which no operator shows",
    "kernels": "Liger's and torch.compile's kernels need real tensors on a GPU",
    "attention": "FlashAttention's kernels run on a GPU only",
    "loss": "Liger's kernel runs on a GPU only",
}
"""Reasons why other values cannot be rehearsed on fake tensors, by field."""


def check_rehearsed(recipe: Recipe, eight_bit_library: str = "bitsandbytes") -> None:
    """Raise ``ValueError`` for the first field of ``recipe`` that cannot be rehearsed.

    Also raised if a required library is not installed; ``eight_bit_library`` implements the 8-bit AdamW.
    """
    # Fields first, then libraries: an install does not help if a value cannot be rehearsed.
    for field, values in REHEARSED.items():
        value = getattr(recipe, field)
        if value not in values:
            why = f"{_join_values(values)} in a rehearsal: {WHY_NOT_REHEARSED[field]}"
            refuse(f"Recipe.{field}", value, why, {field: values[0]})
    if recipe.base_quantization:
        _check_installed("method", recipe.method, "'full' or 'lora' over an unquantized base", "bitsandbytes")
    if recipe.optimizer == "adamw_8bit":
        _check_installed("optimizer", recipe.optimizer, "'adamw' or another", eight_bit_library)
    check_adapters(recipe)


def _check_installed(field: str, value: str, alternatives: str, library: str) -> None:
    """Raise ``ValueError`` unless ``library``, whose code the rehearsal would run, is installed."""
    if importlib.util.find_spec(library) is None:
        why = f"{alternatives} in a rehearsal without {library}, whose code it runs"
        refuse(f"Recipe.{field}", value, why, f"pip install {library}")


COMPILERS = ("g++", "clang++")
"""Compilers that torch.compile looks for to build CPU kernels, unless ``CXX`` names another."""


def check_compiler(plan: Plan) -> None:
    """Raise ``ValueError`` if layers are compiled for CPU ranks and there is no C++ compiler."""
    if plan.kernels != "compiled" or plan.on_gpu or not can_train_here():
        return
    # Inductor looks for it only when a kernel is built, in the middle of the first step (torch 2.13,
    # _inductor/cpp_builder.py, get_cpp_compiler).
    if not any(shutil.which(name) for name in (os.environ.get("CXX", ""), *COMPILERS)):
        refuse(
            "Recipe.kernels",
            "compiled",
            f"None or 'transformers' without a C++ compiler ({', '.join(COMPILERS)}), which torch.compile "
            "needs on CPU ranks",
            {"kernels": None},
        )


def check_recipe(recipe: Recipe, trained: Mapping[str, tuple[object, ...]] = TRAINED) -> None:
    """Raise ``ValueError`` for the first field of ``recipe`` that is not in ``trained``."""
    for field, values in trained.items():
        value = getattr(recipe, field)
        if value not in values:
            refuse(
                f"Recipe.{field}",
                value,
                f"{_join_values(values)} for this engine: others can only be planned",
                {field: values[0]},
            )
    check_adapters(recipe)


def _join_values(values: tuple[object, ...]) -> str:
    return ", ".join(map(repr, values))
