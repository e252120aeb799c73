"""What all engines over plain PyTorch ask of a recipe. No torch here: a kernel asks before it launches."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING

from shardscope.core.errors import refuse
from shardscope.families.registry import families_with

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.core.recipe import Recipe


def check_adapters(recipe: Recipe) -> None:
    """Raise ``ValueError`` with the pip line if adapters are to be trained and peft is not installed."""
    if recipe.has_adapters and importlib.util.find_spec("peft") is None:
        refuse(
            "Recipe.method",
            recipe.method,
            "'full', or 'lora' once peft, through which adapters train, is installed",
            'pip install "shardscope[train]"',
        )
    if recipe.base_quantization and importlib.util.find_spec("bitsandbytes") is None:
        field = "method" if recipe.method == "qlora" else "quantization"
        refuse(
            f"Recipe.{field}",
            getattr(recipe, field),
            "'full' or 'lora' over an unquantised base, until bitsandbytes, whose Linears hold a base in few "
            "bits, is installed",
            'pip install "shardscope[qlora]"',
        )


STAGED_FAMILIES = families_with("pipeline_stages")
"""Families whose models are ``model.embed_tokens``, ``model.layers``, ``model.norm`` and ``lm_head``, and
take hidden states in the embedding's place."""


def check_staged(plan: Plan) -> None:
    """Raise ``ValueError`` for what :mod:`shardscope.training.model.parts` does not cut into stages."""
    arch, recipe = plan.architecture, plan.recipe
    if arch.model_type not in STAGED_FAMILIES:
        refuse(
            "Architecture.model_type",
            arch.model_type,
            f"{', '.join(STAGED_FAMILIES)} with pp > 1: others' models do not come apart in the same places",
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
    "attention": (None,),
    "loss": (None, "full", "chunked"),
    "dropout": (0.0,),
    "lora_dropout": (0.0,),
    "packing": (False,),
}
"""What the engines over plain PyTorch run of a recipe. What they do not is planned only, so that a run never
is another than its plan. How unevenly experts are loaded is what a run finds out, not what it is told."""


PACKED_TRAINED = {**TRAINED, "method": ("full", "lora", "qlora"), "quantization": (None, "nf4", "int8")}
"""The same where the base under adapters may be bitsandbytes'."""

REHEARSED: Mapping[str, tuple[object, ...]] = {
    "method": ("full", "lora", "qlora"),
    "quantization": (None, "nf4", "int8"),
    "precision": ("bf16-mixed", "fp16-mixed", "bf16", "fp32"),
    "optimizer": (*("adamw", "adamw_foreach", "adamw_8bit", "adafactor", "sgd", "lion", "muon"),),
    "kernels": (None, "transformers"),
    "attention": (None, "eager", "sdpa"),
    "loss": (None, "full", "chunked"),
    "packing": (False,),
}
"""What their code plays on fake tensors: more than they train, for a step of it needs no kernels."""

UNSEEN = {
    "precision": "torchao's casts to 8 bits read the numbers that they scale",
    "optimizer": "the driver moves pages between host and GPU, which no operator tells",
    "kernels": "Liger's and torch.compile's kernels are made for real tensors on a GPU",
    "attention": "FlashAttention's own kernels run on a GPU only",
    "loss": "Liger's kernel runs on a GPU only",
    "packing": "FlashAttention's own kernels run on a GPU only",
}
"""Why fake tensors do not carry the other values."""


def check_rehearsed(recipe: Recipe, eight_bit_library: str = "bitsandbytes") -> None:
    """Raise ``ValueError`` for the first field of ``recipe`` that their rehearsals do not play.

    Or play through a library that is not installed; ``eight_bit_library`` is whose 8-bit AdamW runs.
    """
    for field, values in REHEARSED.items():
        value = getattr(recipe, field)
        if value not in values:
            why = f"{_listed(values)} in a rehearsal: {UNSEEN[field]}"
            refuse(f"Recipe.{field}", value, why, {field: values[0]})
    if recipe.base_quantization:
        _check_installed("method", recipe.method, "'full' or 'lora' over an unquantised base", "bitsandbytes")
    if recipe.optimizer == "adamw_8bit":
        _check_installed("optimizer", recipe.optimizer, "'adamw' or another", eight_bit_library)
    check_adapters(recipe)


def _check_installed(field: str, value: str, others: str, library: str) -> None:
    if importlib.util.find_spec(library) is None:
        why = f"{others} in a rehearsal without {library}, whose code it would play"
        refuse(f"Recipe.{field}", value, why, f"pip install {library}")


COMPILERS = ("g++", "clang++")
"""What torch.compile looks for to make kernels for CPUs, unless ``CXX`` names another."""


def check_compiler(plan: Plan) -> None:
    """Raise ``ValueError`` if layers are to be compiled for CPU ranks, and there is no compiler."""
    if plan.kernels != "compiled" or plan.on_gpu:
        return
    if not any(shutil.which(name) for name in (os.environ.get("CXX", ""), *COMPILERS)):
        refuse(
            "Recipe.kernels",
            "compiled",
            f"None or 'transformers' without a C++ compiler ({', '.join(COMPILERS)}), which torch.compile "
            "needs on CPU ranks",
            {"kernels": None},
        )


def check_recipe(recipe: Recipe, trained: Mapping[str, tuple[object, ...]] = TRAINED) -> None:
    """Raise ``ValueError`` for the first field of ``recipe`` that these engines do not train yet."""
    for field, values in trained.items():
        value = getattr(recipe, field)
        if value not in values:
            refuse(
                f"Recipe.{field}",
                value,
                f"{_listed(values)} to train so: others can be planned, and this engine does not run them",
                {field: values[0]},
            )
    check_adapters(recipe)


def _listed(values: tuple[object, ...]) -> str:
    return ", ".join(map(repr, values))
