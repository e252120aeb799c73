"""Low-rank adapters (Hu et al. 2021): which projections take one, and what it adds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardscope.architecture import Architecture
    from shardscope.recipe import Recipe


def adapter_targets(architecture: Architecture, recipe: Recipe) -> tuple[str, ...]:
    """The adapted projections: the recipe's, or all of attention's where it leaves them open."""
    if recipe.lora_targets:
        return recipe.lora_targets
    attention = {name.split(".")[-2] for group, name, _ in architecture.layer_shapes(0) if group == "attention"}
    return tuple(target for target, _ in architecture.layer_linears(0) if target in attention)


def adapter_parameters(architecture: Architecture, recipe: Recipe) -> int:
    """Trainable weights of all decoder layers: rank x (in + out) for each adapted projection."""
    targets = adapter_targets(architecture, recipe)
    moe_layers = architecture.num_moe_layers
    found = 0
    for moe, layers in ((False, architecture.num_hidden_layers - moe_layers), (True, moe_layers)):
        if layers:
            linears = architecture.layer_linears(first_layer(architecture, moe))
            found += layers * sum(
                recipe.adapter_rank * sum(shape) for target, shape in linears if target in targets
            )
    return found


def first_layer(architecture: Architecture, moe: bool) -> int:
    """Index of the first decoder layer with routed experts, or of the first without."""
    return next(i for i in range(architecture.num_hidden_layers) if architecture.is_moe_layer(i) == moe)
