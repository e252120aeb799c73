"""Module call trees of decoder layers, in the order that DeepSpeed's ZeRO-3 hooks record.

ZeRO-3 prefetches at every module call, also of modules without parameters of their own
(``_register_deepspeed_module`` hooks all of them, deepspeed/runtime/zero/parameter_offload.py).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from shardscope.families.parameter_names import attention_inputs, names_of
from shardscope.families.registry import family_of
from shardscope.memory.state.lora import find_adapter_targets, find_first_layer
from shardscope.memory.state.stages import list_rank_shapes

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardscope.core.architecture import Architecture
    from shardscope.core.recipe import Recipe


class Call(NamedTuple):
    """Forward call of one module."""

    own: tuple[int, ...] = ()
    """Elements of its own tensors, in registration order."""
    calls: tuple[Call, ...] = ()
    """Calls of its submodules, in order."""
    trained: bool = True
    """Whether its own tensors get gradients."""
    viewed: tuple[int, ...] = ()
    """Indices into ``own`` of the tensors that autograd saves transposed views of: their all-gathered memory
    stays allocated as long as the view, even after the release."""
    goes_back: bool = True
    """Whether gradients pass through it."""
    feeds_forward: bool = False
    """Whether it is one of the feed-forward's large matrices."""
    in_attention: bool = False
    in_pairs: bool = False
    """Whether each matrix in ``own`` is followed by a vector, whose gradient comes after that matrix's."""
    is_leaf: bool = False
    """Whether it is all-gathered and released as one with its submodules (``DEFAULT_LEAF_MODULE_CLASSES``,
    deepspeed/runtime/zero/leaf_module_config.py); its gradients are reduced when all of them exist."""


NOTHING = Call()
"""Call of a module without parameters: an activation, a dropout or rotary embeddings."""


@lru_cache(maxsize=512)
def layer_calls(arch: Architecture, adapted: Recipe | None, moe: bool, is_first: bool) -> Call:
    """Return the call tree of one decoder layer.

    With frozen embeddings no gradient reaches the modules of the first layer (``is_first``) before its first
    adapter.
    """
    modules: dict[str, list[int]] = {}
    for shape in list_rank_shapes(arch, moe, 1, 1):
        modules.setdefault(shape.name.rpartition(".")[0], []).append(
            shape.copies * shape.rows * shape.columns
        )
    names = names_of(arch)
    make = _maker(arch, adapted, moe, modules, is_first)
    norms = [make(path) for path in modules if "." not in path and path != names.attention]
    attention = [
        make(path)._replace(in_attention=True) for path in modules if path.startswith(f"{names.attention}.")
    ]
    inner = [path for path in modules if path.startswith("mlp.")]
    if moe and family_of(arch).is_zero3_leaf:
        return _with_leaf(arch, adapted, norms, attention, [modules[path] for path in inner])
    shared = [path for path in inner if path.startswith(f"{names.shared_experts}.")]
    plain = [make(path) for path in inner if path not in shared]
    dropout = [NOTHING] * family_of(arch).has_dropout_modules
    if not moe:
        plain.insert(1, NOTHING)
    elif shared:
        gate, *others = (make(path) for path in shared)
        # DeepSeek calls its shared experts after the routed ones; Qwen's are modelled in the same order.
        plain.insert(2, Call((), (gate, NOTHING, *others)))
    begin, middle, end = around(arch, norms)
    own = tuple(modules.get(names.attention, ()))
    halves = Call(own, (*attention, *dropout), adapted is None), Call((), (*plain, *dropout))
    return Call((), (*begin, halves[0], *middle, halves[1], *end))


def _with_leaf(
    arch: Architecture,
    adapted: Recipe | None,
    norms: list[Call],
    attention: list[Call],
    inner: list[list[int]],
) -> Call:
    """Return the call tree of a layer whose feed-forward is a ZeRO-3 leaf, without hooks inside."""
    if family_of(arch).registers_router_last:
        # The router is registered after the experts, and so all-gathered after them.
        inner = [*inner[1:], *inner[:1]]
    own = tuple(size for sizes in inner for size in sizes)
    place = max(range(len(own)), key=own.__getitem__)
    leaf = Call(own, (), adapted is None, (place, place + 1), feeds_forward=True, is_leaf=True)
    begin, middle, end = around(arch, norms)
    return Call((), (*begin, Call((), tuple(attention)), *middle, leaf, *end))


def _maker(
    arch: Architecture, adapted: Recipe | None, moe: bool, modules: dict[str, list[int]], is_first: bool
) -> Callable[[str], Call]:
    """Return a function that creates the call of a module from its path, to be used in forward order.

    It keeps track of the first adapter, which gradients start from; attention and a parallel feed-forward
    that reads the same input have one each.
    """
    targets = find_adapter_targets(arch, adapted) if adapted else ()
    linears = dict(arch.layer_linears(find_first_layer(arch, moe)))
    inputs = attention_inputs(arch)
    waits = dict.fromkeys((False, True), adapted is not None and is_first)

    def make(path: str) -> Call:
        beside = arch.parallel_residual and path.startswith("mlp.")
        waiting = waits[beside]
        own, name = tuple(modules[path]), path.rpartition(".")[2]
        large = path.startswith("mlp.") and name not in ("gate", "router", "shared_expert_gate")
        if name == "experts":
            # gpt-oss stores its experts in the layout of the matmul; all others use a transposed view.
            in_pairs = family_of(arch).has_clamped_experts
            both = () if in_pairs else (0, 1)
            return Call(own, (NOTHING,), adapted is None, both, not waiting, large, in_pairs=in_pairs)
        # Falcon multiplies by a transposed view itself; other families use DeepSpeed's own linear function.
        viewed = (0,) if family_of(arch).projections == "matmul" and name in linears else ()
        if adapted is None or name not in targets:
            return Call(own, (), adapted is None, viewed, not waiting, large)
        out, inner = linears[name]
        reaches = not (waiting or (is_first and name in inputs))
        waits[beside] = False
        narrow, wide = (adapted.adapter_rank * inner,), (adapted.adapter_rank * out,)
        return Call((), (Call(own, (), False, viewed, reaches), NOTHING, Call(narrow), Call(wide)))

    return make


Norm = TypeVar("Norm")


def around(arch: Architecture, norms: list[Norm]) -> tuple[list[Norm], list[Norm], list[Norm]]:
    """Split ``norms``, in registration order: before attention, before and after the feed-forward."""
    before, between, behind = (
        [norms[place] for place in places if place < len(norms)] for places in family_of(arch).norm_placement
    )
    return before, between, behind
