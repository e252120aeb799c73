"""What the FSDP2 engine runs of what can be planned: shards, copies, tensor-parallel parts and stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.frameworks.limits import TRAINED, check_compiler, check_recipe, check_staged
from shardscope.validation import refuse

if TYPE_CHECKING:
    from shardscope.plan import Plan


HOST_BUILD_BYTES = 2**30
"""Fresh models up to this size (in fp32) are built whole on each rank, with DDP's weights; larger ones on
meta. A model with weights of its own is built whole whatever its size."""

CUT_FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "granite", "starcoder2"),
)
"""Families whose projections are matrices of their own: a cut of a fused one would go across its parts."""

WHOLE_TRAINED = {**TRAINED, "kernels": (None, "transformers", "compiled")}
"""What is trained of a recipe without stages and tensor-parallel parts."""

PART_TRAINED = {**TRAINED, "loss": (None, "full")}
"""What is trained of a recipe where the model is in parts: vocabularies that are cut, and stages, have losses
of their own."""


def check_plan(plan: Plan) -> None:
    """Raise ``ValueError`` for what the engine cannot run."""
    degrees = plan.degrees
    if degrees.cp > 1:
        _refuse_context(plan)
    if degrees.tp > 1:
        check_parallel(plan)
    if degrees.pp > 1:
        check_pipeline(plan)
    check_recipe(plan.recipe, PART_TRAINED if degrees.tp > 1 or degrees.pp > 1 else WHOLE_TRAINED)
    check_compiler(plan)


def check_parallel(plan: Plan) -> None:
    """Raise ``ValueError`` for what is not cut into tensor-parallel parts here."""
    arch, tp = plan.architecture, plan.degrees.tp
    if arch.model_type not in CUT_FAMILIES:
        refuse(
            "Architecture.model_type",
            arch.model_type,
            f"{', '.join(CUT_FAMILIES)} with tp > 1: DTensor cuts projections, not fused ones, nor experts",
            "tp=1",
        )
    if plan.recipe.method != "full":
        refuse("Recipe.method", plan.recipe.method, "'full' with tp > 1: peft's adapters have no cut", "tp=1")
    if arch.intermediate_size % tp:
        refuse(
            "Layout.tp",
            tp,
            f"a divisor of {arch.name}'s intermediate_size={arch.intermediate_size}: DTensor multiplies "
            "equal parts",
            "tp=1",
        )


def check_pipeline(plan: Plan) -> None:
    """Raise ``ValueError`` for what is not cut into pipeline stages here."""
    recipe, degrees = plan.recipe, plan.degrees
    check_staged(plan)
    if recipe.seq_len % degrees.tp:
        refuse(
            "Recipe.seq_len",
            recipe.seq_len,
            f"a multiple of tp={degrees.tp} with pp > 1: stages send equal parts of the sequence",
            f"seq_len={max(1, recipe.seq_len // degrees.tp) * degrees.tp}",
        )


def _refuse_context(plan: Plan) -> None:
    """``torch.distributed.tensor.experimental.context_parallel`` (torch 2.13) and where it is not."""
    if plan.on_gpu:
        why = "no run of ours has shown that torch's context_parallel, an experiment, trains what is planned"
    else:
        why = (
            "torch's context_parallel passes keys around in CUDA's attention kernels (flash, efficient, "
            "cuDNN), and has none for CPU ranks"
        )
    refuse(
        "Layout.cp",
        plan.degrees.cp,
        f"1 to train with FSDP2: {why}. No engine here runs cp yet",
        "cp=1",
    )
