"""How many numbers the matrices of one layer have, in the groups in which they get gradients."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from shardscope.families.parameter_names import names_of
from shardscope.memory.state.stages import rank_shapes

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture


class Weights(NamedTuple):
    """Numbers of one layer's matrices on one rank, in the groups in which they get gradients."""

    down: int
    up: int
    """The largest of those that read the feed-forward's input."""
    feed_forward: int
    """All of the feed-forward, its norm included."""
    output: int
    query: int
    """The largest of those that read attention's input."""
    everything: int
    expert_down: int
    expert_up: int


@lru_cache(maxsize=4096)
def layer_weights(arch: Architecture, moe: bool, tp: int) -> Weights:
    """What :class:`Weights` names, of one layer after tp."""
    names = names_of(arch)
    shapes = rank_shapes(arch, moe, tp, 1)

    def numbers(*groups: str) -> int:
        return sum(s.copies * s.rows * s.columns for s in shapes if s.group in groups)

    def of(module: str, group: str) -> int:
        found = [s.copies * s.rows * s.columns for s in shapes if s.group == group and f".{module}" in s.name]
        return max(found, default=0)

    feed_forward = numbers("mlp", "experts", "shared_experts", "router")
    own = "shared_experts" if moe else "mlp"
    inputs = [s.rows * s.columns for s in shapes if s.group == own and f".{names.down}." not in s.name]
    attention = [
        s.rows * s.columns for s in shapes if s.group == "attention" and f".{names.output}." not in s.name
    ]
    return Weights(
        down=of(f"{names.down}.", own),
        up=max(inputs, default=0),
        feed_forward=feed_forward,
        output=of(f"{names.output}.", "attention"),
        query=max(attention, default=0),
        everything=sum(s.copies * s.rows * s.columns for s in shapes),
        expert_down=of("down_proj", "experts"),
        expert_up=of("gate_up_proj", "experts"),
    )
