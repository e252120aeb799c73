"""Low-rank adapters (Hu et al. 2021): adapted projections and their weights."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.ops import ceil_div
from shardscope.families.parameter_shapes import find_first_layer
from shardscope.families.unknown import UnknownFamily

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.recipe import Recipe


class Adapters(NamedTuple):
    """Low-rank adapters of a recipe.

    Formulas take these, not the recipe: recipes that differ in nothing else share cached results.
    """

    targets: tuple[str, ...]
    """Names of the adapted projections."""
    rank: int
    """Columns of B and rows of A."""
    use_dora: bool
    """Whether each adapted matrix has a trained magnitude per row (Liu et al. 2024)."""


def find_adapters(architecture: Architecture, recipe: Recipe) -> Adapters | None:
    """Return the adapters that a recipe trains; None if it trains the weights."""
    if not recipe.has_adapters:
        return None
    return Adapters(find_adapter_targets(architecture, recipe), recipe.adapter_rank, recipe.use_dora)


def find_adapter_targets(architecture: Architecture, recipe: Recipe) -> tuple[str, ...]:
    """Return the adapted projections: the recipe's, or by default all of attention's.

    Which are attention's is unknown in a family without formulas: there, by default all of the layers'.
    """
    return recipe.lora_targets or _find_default_targets(architecture)


@lru_cache(maxsize=512)
def _find_default_targets(architecture: Architecture) -> tuple[str, ...]:
    if isinstance(architecture, UnknownFamily):
        return tuple(dict.fromkeys(target for target, _ in architecture.lora_shapes))
    # Of the first layer: attention's projections have the same names in all layers.
    attention = {
        name.split(".")[-2] for group, name, _ in architecture.layer_shapes(0) if group == "attention"
    }
    return tuple(target for target, _ in architecture.layer_linears(0) if target in attention)


def count_adapter_parameters(architecture: Architecture, recipe: Recipe) -> int:
    """Return the adapters' weights of all decoder layers: rank x (in + out) for each adapted projection."""
    adapters = find_adapters(architecture, recipe)
    if adapters is None:
        return 0
    moe_layers = architecture.num_moe_layers
    kinds = ((False, architecture.num_hidden_layers - moe_layers), (True, moe_layers))
    return sum(
        layers * count_layer_adapters(architecture, adapters, moe)[0] for moe, layers in kinds if layers
    )


@lru_cache(maxsize=4096)
def count_layer_adapters(
    architecture: Architecture, adapters: Adapters, moe: bool, num_shards: int = 1
) -> tuple[int, int]:
    """Return one layer's adapter weights, and the largest shard of them over ``num_shards`` ranks.

    A is (rank, in) and B is (out, rank); each is sharded by rows, rounded up, and so are DoRA's magnitudes.
    """
    targets, rank, use_dora = adapters
    numel = shard = 0
    for target, (out, inner) in architecture.layer_linears(find_first_layer(architecture, moe)):
        if target in targets:
            # With DoRA a magnitude for each row of the matrix.
            numel += rank * (inner + out) + use_dora * out
            # With fewer rows than ranks, A's shard is one row on some ranks and empty on the others.
            shard += ceil_div(rank, num_shards) * inner + ceil_div(out, num_shards) * (rank + use_dora)
    return numel, shard
