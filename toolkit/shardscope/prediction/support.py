"""Checks that a framework supports a recipe, by the lists of its layout class.

Every listed value has a formula in the memory model; other values raise ``ValueError``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.cluster import choose_mixed_precision
from shardscope.core.errors import Fix, find_nearest, find_similar, refuse
from shardscope.families.registry import find_family, list_families_with
from shardscope.memory.activations.forward import find_modules
from shardscope.memory.activations.head import resolve_loss
from shardscope.memory.activations.modules.attention import compute_saved_scores
from shardscope.memory.activations.modules.compiled_layers import COMPILED_FAMILIES
from shardscope.memory.activations.modules.dora import DORA_FAMILIES, has_known_dora
from shardscope.memory.activations.modules.liger import LIGER_FAMILIES

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.layout import Layout
    from shardscope.core.plan import Plan
    from shardscope.core.recipe import Recipe

SUPPORT = {
    "method": "supported_methods",
    "precision": "supported_precisions",
    "optimizer": "supported_optimizers",
    "recompute": "supported_recompute",
    "kernels": "supported_kernels",
    "attention": "supported_attention",
    "loss": "supported_losses",
    "quantization": "supported_quantization",
}
"""Recipe field -> attribute of a layout class that lists its supported values; None is always supported."""

LIKE = {"fp8-mixed": "bf16-mixed", "muon": "adamw", "adafactor": "adamw", "lion": "adamw"}
"""Values whose most similar name is of another kind (fp16-mixed, lion) -> the value to suggest where they are
not supported; every framework has it."""

DROPOUT_FAMILIES = list_families_with("dropout")
CHOOSABLE = list_families_with("attention_choice")
PACKABLE = list_families_with("document_masks")

FUSED_IN_EXPERTS = ("gate_proj", "up_proj", "down_proj")
"""Projection names that in peft also match routed experts (its ``transformers_weight_conversion.py``)."""


def check_targets(arch: Architecture, recipe: Recipe) -> None:
    """Raise ``ValueError`` for adapters of projections that the model lacks or that peft fuses in experts."""
    if not recipe.lora_targets:
        return
    # Not a check of ``Recipe``: the names depend on the architecture.
    known = {target for target, _ in arch.lora_shapes}
    for target in recipe.lora_targets:
        if target not in known:
            # Names of another model's projections are left out, misspelt ones are replaced.
            meant = {
                name if name in known else find_similar(name, sorted(known)): None
                for name in recipe.lora_targets
            }
            targets = tuple(filter(None, meant)) or None
            refuse(
                "Recipe.lora_targets",
                target,
                f"projections of {arch.name}: {', '.join(sorted(known)) or 'none'}",
                {"lora_targets": targets},
            )
        # peft 0.21.2, utils/transformers_weight_conversion.py, converts these names to the fused experts'
        # gate_up_proj and down_proj.
        if target in FUSED_IN_EXPERTS and arch.num_moe_layers:
            refuse(
                "Recipe.lora_targets",
                target,
                f"projections of attention with {arch.name}: peft adapts its fused experts along with that, "
                "each by a whole matrix of its size, for which there is no formula",
                {"lora_targets": None},
            )


def check_sequence(arch: Architecture, recipe: Recipe) -> None:
    """Raise ``ValueError`` for a sequence longer than the model's learned positions."""
    # Rotary and ALiBi positions are computed for any length; learned ones are rows of an embedding.
    limit = arch.max_position_embeddings
    if arch.position_embedding == "learned" and recipe.seq_len > limit:
        refuse(
            "Recipe.seq_len",
            recipe.seq_len,
            f"at most {limit}, the learned positions of {arch.name}",
            {"seq_len": limit},
        )


def list_supported(layout: Layout | type[Layout], field: str) -> tuple[object, ...]:
    """Return the values of a recipe field that ``layout`` supports; ``()`` for a field without a list."""
    values: tuple[object, ...] = getattr(layout, SUPPORT[field]) if field in SUPPORT else ()
    return values


def check_supported(plan: Plan) -> None:
    """Raise ``ValueError`` that names the first recipe field that the framework does not support."""
    # Single values first, so that the error names a value that the framework lacks, not a combination.
    for field in SUPPORT:
        value = getattr(plan.recipe, field)
        if value is not None and value not in list_supported(plan.layout, field):
            _refuse_unsupported(plan, field, value)
    _check_attention(plan)
    _check_float8(plan)
    _check_kernels(plan)
    _check_compiled(plan)
    _check_dropout(plan)
    _check_experts(plan)
    _check_interval(plan)
    _check_packing(plan)
    _check_dora(plan)
    plan.layout.check_together(plan.architecture, plan.recipe, plan.degrees)


def _refuse_unsupported(plan: Plan, field: str, value: object) -> None:
    values = list_supported(plan.layout, field)
    open_field = field in ("kernels", "attention", "loss", "quantization")
    allowed = ", ".join(map(repr, (None, *values) if open_field else values))
    fix: Fix
    # FSDP2 runs every method, and Megatron-core none but "full".
    if field == "method":
        fix = {"layout": "fsdp2"}
    else:
        nearest = LIKE.get(value) if isinstance(value, str) else None
        fix = {field: None if open_field else nearest or find_nearest(value, list(values))}
    refuse(f"Recipe.{field}", value, f"{allowed} with {plan.layout.title}", fix)


def _check_kernels(plan: Plan) -> None:
    """Check kernels: Liger's need a family with formulas, a GPU and an unsharded vocabulary."""
    recipe, arch = plan.recipe, plan.architecture
    # Megatron has fused kernels of its own, with formulas of their own.
    if plan.kernels == "megatron":
        return
    # The fused loss is Liger's kernel too, whatever the other modules are.
    uses_liger = recipe.kernels == "liger" or recipe.loss == "fused"
    field, value = ("kernels", "liger") if recipe.kernels == "liger" else ("loss", recipe.loss)
    if recipe.kernels == "liger" and (arch.model_type not in LIGER_FAMILIES or arch.num_moe_layers):
        refuse(
            "Recipe.kernels",
            "liger",
            f"None or 'transformers' with {arch.name} ({arch.model_type}): the memory model knows Liger's "
            f"kernels in {', '.join(LIGER_FAMILIES)}",
            {"kernels": None},
        )
    if uses_liger and not plan.on_gpu:
        refuse(f"Recipe.{field}", value, "None on CPU ranks: Liger's kernels need a GPU", {field: None})
    if resolve_loss(plan) != "full" and plan.degrees.tp > 1:
        refuse(
            f"Recipe.{field}",
            value,
            "the full loss with tp > 1, which cuts the vocabulary",
            {"loss": "full" if recipe.loss is None else None},
        )


def _check_compiled(plan: Plan) -> None:
    """Check that compiled layers have formulas: by family, recipe fields, degrees and head width."""
    recipe, arch = plan.recipe, plan.architecture
    if plan.kernels != "compiled":
        return
    if arch.model_type not in COMPILED_FAMILIES or arch.num_moe_layers:
        refuse(
            "Recipe.kernels",
            "compiled",
            f"None or 'transformers' with {arch.name} ({arch.model_type}): compiled layers are counted in "
            f"{', '.join(COMPILED_FAMILIES)}",
            {"kernels": None},
        )
    autocast = plan.layout.mixes_by_autocast and recipe.precision.endswith("mixed")
    # A minimum cut of the whole graph decides what is saved (torch 2.13, _functorch/partitioners.py), so each
    # value needs a formula of its own; these have one (``memory/activations/modules/compiled_layers.py``).
    counted: dict[str, tuple[object, ...]] = {
        "method": ("full", "lora"),
        "precision": ("bf16-mixed", "fp16-mixed", "bf16", "fp32"),
        # No formula covers the weight copies of autocast when a compiled graph is recomputed.
        "recompute": ("none",) if autocast else ("none", "full"),
        "attention": (None, "sdpa"),
        "dropout": (0.0,),
        "lora_dropout": (0.0,),
    }
    for field, values in counted.items():
        value = getattr(recipe, field)
        if value not in values:
            allowed = ", ".join(map(repr, values))
            refuse(f"Recipe.{field}", value, f"{allowed} with kernels='compiled'", {field: values[0]})
    for degree in ("tp", "cp"):
        if getattr(plan.degrees, degree) > 1:
            refuse(
                f"Layout.{degree}",
                getattr(plan.degrees, degree),
                "1 with kernels='compiled'",
                {degree: 1},
            )
    if plan.on_gpu and arch.head_dim % 8:
        refuse(
            "Recipe.kernels",
            "compiled",
            f"None with {arch.name}, whose heads are {arch.head_dim} wide: flash attention pads them to a "
            "multiple of 8",
            {"kernels": None},
        )
    grouped = arch.num_key_value_heads < arch.num_attention_heads
    if plan.on_gpu and grouped and recipe.precision == "fp32":
        refuse(
            "Recipe.precision",
            "fp32",
            f"half precision with kernels='compiled' and the grouped queries of {arch.name}, for which no "
            "fused attention takes fp32",
            {"precision": "bf16-mixed"},
        )


def _check_experts(plan: Plan) -> None:
    recipe, layout = plan.recipe, plan.layout
    dense = not plan.architecture.num_moe_layers
    if recipe.expert_imbalance != 1.0 and dense:
        refuse(
            "Recipe.expert_imbalance",
            recipe.expert_imbalance,
            f"1.0 with {plan.architecture.name}, which has no experts",
            {"expert_imbalance": 1.0},
        )
    if (
        recipe.expert_imbalance != 1.0
        and plan.degrees.ep > 1
        and "expert_imbalance" not in layout.own_formulas
    ):
        # Without ep each rank has all experts, and routing does not change its number of tokens.
        refuse(
            "Recipe.expert_imbalance",
            recipe.expert_imbalance,
            f"1.0 with ep={plan.degrees.ep} of {layout.title}, for which there is no formula",
            {"expert_imbalance": 1.0},
        )
    # megatron-core 0.16 only, transformer_config.py, moe_expert_capacity_factor: transformers' experts drop
    # no token.
    if recipe.expert_capacity_factor is not None and (dense or not layout.supports_expert_capacity):
        why = f"{plan.architecture.name} has no experts" if dense else f"{layout.title} is dropless"
        refuse(
            "Recipe.expert_capacity_factor",
            recipe.expert_capacity_factor,
            f"None: {why}",
            {"expert_capacity_factor": None},
        )


def _check_dropout(plan: Plan) -> None:
    """Check dropout by family: fused attention saves a seed, and only GPT-2's other masks have formulas."""
    if not plan.recipe.dropout or "dropout" in plan.layout.own_formulas:
        return
    family = plan.architecture.model_type
    if family not in DROPOUT_FAMILIES:
        refuse(
            "Recipe.dropout",
            plan.recipe.dropout,
            f"0.0 with {plan.architecture.name} ({family}): the memory model knows dropout in "
            f"{', '.join(DROPOUT_FAMILIES)}",
            {"dropout": 0.0},
        )


def _check_interval(plan: Plan) -> None:
    """Check the recompute interval: with alternating layers, memory depends on which kind is recomputed."""
    experts = plan.architecture.mixture_of_experts
    if plan.recipe.recompute_interval == 1:
        return
    if not plan.layout.supports_recompute_interval:
        refuse(
            "Recipe.recompute_interval",
            plan.recipe.recompute_interval,
            f"1 with {plan.layout.title}",
            {"recompute_interval": 1},
        )
    if experts is None:
        return
    if experts.decoder_sparse_step > 1 or experts.mlp_only_layers:
        refuse(
            "Recipe.recompute_interval",
            plan.recipe.recompute_interval,
            f"1 with {plan.architecture.name}, whose dense and expert layers alternate",
            {"recompute_interval": 1},
        )


def _check_packing(plan: Plan) -> None:
    """Check that attention can separate packed documents: by FlashAttention's offsets, or by SDPA's mask."""
    if not plan.recipe.packing:
        return
    if not plan.layout.supports_packing:
        refuse("Recipe.packing", True, f"False with {plan.layout.title}", {"packing": False})
    if plan.recipe.attention == "flash":
        return
    if reason := _find_mask_problem(plan):
        refuse("Recipe.packing", True, f"False with {reason}", {"packing": False})


def _find_mask_problem(plan: Plan) -> str | None:
    """Return why SDPA cannot be given a mask of packed documents, or None."""
    arch, recipe, degrees = plan.architecture, plan.recipe, plan.degrees
    if arch.model_type not in PACKABLE:
        return (
            f"{arch.name} ({arch.model_type}): a mask of documents is known to work with "
            f"{', '.join(PACKABLE)}"
        )
    if recipe.attention == "eager":
        return "attention='eager', whose scores with a mask have no formula"
    if arch.sliding_window_layers and arch.sliding_window and recipe.seq_len >= arch.sliding_window:
        # transformers passes a prepared mask to all layers, and no longer adds their window to it
        # (masking_utils.py, create_sliding_window_causal_mask).
        return (
            f"seq_len={recipe.seq_len} and the sliding window of {arch.name}, {arch.sliding_window} tokens, "
            "which a mask of documents would replace"
        )
    if degrees.pp > 1:
        return f"pp={degrees.pp}: stages pass on hidden states and no mask"
    if degrees.cp > 1:
        return f"cp={degrees.cp}: ring attention takes no mask"
    if degrees.tp > 1:
        return f"tp={degrees.tp}, for which a mask of documents has no formula"
    if plan.kernels == "compiled":
        return "kernels='compiled', whose saved tensors with a mask have no formula"
    if recipe.recompute == "offload":
        return "recompute='offload', which would copy the mask of documents to the host for each layer"
    return None


DORA_ALLOWED: dict[str, tuple[object, ...]] = {
    "kernels": (None, "transformers"),
    "attention": (None, "sdpa"),
    "recompute": ("none", "full"),
    "recompute_interval": (1,),
    "dropout": (0.0,),
    "lora_dropout": (0.0,),
    "packing": (False,),
}
"""Values of other fields for which DoRA has formulas (``memory/activations/modules/dora.py``)."""


def _check_dora(plan: Plan) -> None:
    """Check that DoRA's products in forward have formulas: by layout, family, and other fields."""
    arch, recipe = plan.architecture, plan.recipe
    if not recipe.use_dora:
        return
    reason = None
    if not plan.layout.supports_dora:
        reason = f"{plan.layout.description}: only DDP, and FSDP2 without offloading, have formulas"
    elif split := [name for name in ("tp", "pp", "cp") if getattr(plan.degrees, name) > 1]:
        reason = f"{split[0]} > 1, with which peft's DoRA was never run"
    elif not has_known_dora(arch):
        reason = f"{arch.name} ({arch.model_type}): its layers are known in {', '.join(DORA_FAMILIES)}"
    elif compute_saved_scores(arch, find_modules(plan)):
        reason = f"{arch.name} in {recipe.precision} here, whose attention stores its scores"
    else:
        for field, values in DORA_ALLOWED.items():
            if getattr(recipe, field) not in values:
                reason = f"{field}={getattr(recipe, field)!r}, for which there is no formula"
                break
    if reason:
        refuse("Recipe.use_dora", True, f"False with {reason}", {"use_dora": False})


def _check_attention(plan: Plan) -> None:
    attention, arch = plan.recipe.attention, plan.architecture
    if attention is None or plan.kernels == "megatron":
        return
    # transformers' default is SDPA where the family supports it (``_supports_sdpa``), else eager.
    own = "sdpa" if find_family(arch).has_sdpa else "eager"
    if attention != own and arch.model_type not in CHOOSABLE:
        refuse(
            "Recipe.attention",
            attention,
            f"None or {own!r} with {arch.name} ({arch.model_type}): others are counted in "
            f"{', '.join(CHOOSABLE)}",
            {"attention": None},
        )
    if attention == "flash" and not plan.on_gpu:
        refuse("Recipe.attention", "flash", "None, 'eager' or 'sdpa' on CPU ranks", {"attention": None})
    if attention == "flash" and not plan.cluster.gpu.has_flash_attention:
        allowed = f"None, 'eager' or 'sdpa' on {plan.cluster.gpu.name}: FlashAttention begins with Ampere"
        refuse("Recipe.attention", "flash", allowed, {"attention": None})
    # The FlashAttention package has kernels for fp16 and bf16 only (transformers 5.24, modeling_utils.py,
    # warns of other dtypes).
    if attention == "flash" and plan.recipe.precision == "fp32":
        refuse("Recipe.attention", "flash", "None, 'eager' or 'sdpa' in fp32", {"precision": "bf16-mixed"})
    if attention == "flash" and plan.recipe.recompute == "selective":
        refuse(
            "Recipe.attention",
            "flash",
            "None or 'sdpa' with selective recomputation, which keeps the outputs of PyTorch's own operators",
            {"attention": "sdpa"},
        )


def _check_float8(plan: Plan) -> None:
    """Check that fp8 matmuls run on a GPU with fp8 and on unsharded matrices."""
    if plan.recipe.precision != "fp8-mixed" or plan.kernels == "megatron":
        return
    if "fp8" not in plan.cluster.gpu.peak_flops:
        refuse(
            "Recipe.precision",
            "fp8-mixed",
            f"another on {plan.cluster.gpu.name}, which has no 8-bit floating point",
            {"precision": choose_mixed_precision(plan.cluster.gpu)},
        )
    if plan.degrees.tp > 1:
        refuse("Recipe.precision", "fp8-mixed", "another with tp > 1", {"precision": "bf16-mixed"})
