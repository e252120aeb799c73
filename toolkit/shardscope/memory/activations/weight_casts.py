"""Autocast's half-precision copies of weights: how many bytes, and when they exist."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from shardscope.families.parameter_shapes import find_first_layer
from shardscope.families.registry import find_family

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.memory.activations.modules.saved_tensors import Modules


@lru_cache(maxsize=4096)
def compute_weight_casts(architecture: Architecture, moe: bool, modules: Modules) -> int:
    """Return the bytes of autocast's half-precision copies of one layer's trained matrices.

    Routed experts have none. With adapters, only the adapters are in fp32.
    """
    if not modules.autocast:
        return 0
    layer = find_first_layer(architecture, moe)
    if modules.targets is not None:
        linears = architecture.layer_linears(layer)
        adapted = sum(sum(shape) for target, shape in linears if target in modules.targets)
        return modules.adapter_rank * adapted * modules.compute
    matrices = architecture.layer_matrix_parameters(layer)
    return sum(count for group, count in matrices.items() if group != "experts") * modules.compute


def count_weight_casts(arch: Architecture, modules: Modules, recompute: str) -> tuple[int, int]:
    """Return how many sets of these copies exist after a layer's forward, and how many in backward.

    Autocast's cache keeps them until its context exits, and autograd keeps those it needs. On a CPU rank,
    "offload" to host is a second copy in the same memory.
    """
    copies_on_cpu = recompute == "offload" and not modules.on_gpu
    in_backward = int(recompute == "none" or copies_on_cpu)
    return (in_backward if _casts_views(arch, modules) else 1 + copies_on_cpu), in_backward


def compute_passing_cast(arch: Architecture, moe: bool, modules: Modules, recompute: str) -> int:
    """Return the bytes of the largest copy that a layer's forward makes and frees at once; 0 if all stay."""
    if not modules.autocast or not _casts_views(arch, modules):
        return 0
    if count_weight_casts(arch, modules, recompute)[0]:
        return 0
    linears = arch.layer_linears(find_first_layer(arch, moe))
    return modules.compute * max(rows * columns for _, (rows, columns) in linears)


def _casts_views(arch: Architecture, modules: Modules) -> bool:
    """Return whether matmuls take transposed views of weights, as Falcon's do.

    Autocast's cache has weights only, no views of them (aten/src/ATen/autocast_mode.cpp, cached_cast).
    """
    return find_family(arch).projections == "matmul" and modules.targets is None
