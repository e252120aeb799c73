"""The optimizer over all tensors that one rank of a stage trains: :mod:`optimizers`, tensor by tensor."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from shardscope.memory.arithmetic import ceil_div
from shardscope.memory.lora import adapter_targets, first_layer
from shardscope.memory.optimizers import ELEMENTWISE, TensorState, constant_state, tensor_state
from shardscope.memory.report import Term, no_bytes
from shardscope.memory.stages import Stage, outer_shapes, rank_shapes
from shardscope.memory.words import count, gib

if TYPE_CHECKING:
    from shardscope.architecture import Architecture
    from shardscope.plan import Plan
    from shardscope.recipe import Recipe

WORDS = {
    "adamw": "two moments (Loshchilov & Hutter 2019)",
    "adamw_foreach": "two moments (Loshchilov & Hutter 2019)",
    "adamw_8bit": "two moments of 8 bits in blocks of 256 (Dettmers et al. 2022)",
    "paged_adamw": "two fp32 moments in managed memory (bitsandbytes)",
    "paged_adamw_8bit": "two moments of 8 bits in managed memory (bitsandbytes, Dettmers et al. 2022)",
    "adafactor": "second moments of rows and columns (Shazeer & Stern 2018, torch.optim.Adafactor)",
    "sgd": "one momentum",
    "lion": "one momentum (Chen et al. 2023)",
    "muon": "one momentum for hidden matrices, AdamW's two for the rest (Jordan et al. 2024)",
}


class OptimizerBytes(NamedTuple):
    """One rank's optimizer."""

    state: Term
    """What stays on the device."""
    working: Term
    """What an update needs beside it."""
    host_bytes: int
    """Managed memory that moves to the host when the GPU is full."""


class _Shards(NamedTuple):
    """How one framework cuts tensors and whose optimizers it runs."""

    optimizer: str
    width: int
    tp: int
    ep: int
    num_shards: int
    library: str


def optimizer_bytes(plan: Plan, stage: Stage, width: int, num_shards: int, library: str) -> OptimizerBytes:
    """The optimizer of a rank that keeps a ``num_shards``-th of each tensor's rows, rounded up.

    ``width`` is the bytes of one trained number; ``library`` whose 8-bit AdamW runs on such tensors.
    """
    recipe = plan.recipe
    name, trained = recipe.optimizer, stage.trainable_shard
    if name in ELEMENTWISE:
        state = ELEMENTWISE[name] * width * trained
        return OptimizerBytes(
            Term(state, lambda: f"{trained:,} × {ELEMENTWISE[name]} × {width} bytes · {WORDS[name]}"),
            _loop_working(plan, stage, width, num_shards),
            0,
        )
    shards = _Shards(name, width, plan.degrees.tp, plan.degrees.ep, num_shards, library)
    found = _sum(plan, stage, shards)
    paged = found.paged if plan.on_gpu else 0
    state = found.state + found.paged - paged + constant_state(name, library)
    if name == "adafactor":
        found = found._replace(working=_adafactor_working(plan, stage, shards))
    elif not plan.on_gpu and name != "muon":
        found = found._replace(working=0)

    def words() -> str:
        moved = (
            f"; {gib(paged)} GiB more in managed memory, on the host when the GPU is full" if paged else ""
        )
        return f"{count(trained, 'trained number')} tensor by tensor · {WORDS[name]}{moved}"

    return OptimizerBytes(
        Term(state, words),
        Term(found.working, lambda: f"{gib(found.working)} GiB while the largest tensor is updated"),
        paged,
    )


def _loop_working(plan: Plan, stage: Stage, width: int, num_shards: int) -> Term:
    """SGD and Lion make the decayed gradient, tensor by tensor; on whole GPU tensors SGD all at once.

    ``torch._foreach_add`` is torch's default where every tensor is a plain one on a GPU
    (``torch/optim/optimizer.py``, ``_default_to_fused_or_foreach``).
    """
    name = plan.recipe.optimizer
    if name == "adamw":
        return no_bytes("fused AdamW updates in place")
    if name == "adamw_foreach":
        # All matrices' roots at once (torch/optim/adam.py, _multi_tensor_adam); vectors are another group.
        shards = _Shards("matrices", width, plan.degrees.tp, plan.degrees.ep, num_shards, "")
        roots = _sum(plan, stage, shards).state
        return Term(roots, lambda: f"{gib(roots)} GiB roots of second moments, all at once (foreach)")
    if name == "sgd" and num_shards == 1 and plan.on_gpu:
        matrices = _sum(plan, stage, _Shards("matrices", width, plan.degrees.tp, plan.degrees.ep, 1, ""))
        return Term(
            matrices.state, lambda: f"{gib(matrices.state)} GiB gradients with weight decay, all at once"
        )
    largest = _sum(plan, stage, _Shards(name, width, plan.degrees.tp, plan.degrees.ep, num_shards, ""))
    return Term(
        largest.working, lambda: f"{gib(largest.working)} GiB gradient of the largest tensor, decayed"
    )


def _sum(plan: Plan, stage: Stage, shards: _Shards) -> TensorState:
    """All tensors that train on a rank of the stage."""
    arch, recipe = plan.architecture, plan.recipe
    state = paged = working = 0
    for moe, layers in ((False, stage.num_layers - stage.num_moe_layers), (True, stage.num_moe_layers)):
        if layers:
            adapted = recipe if stage.adapters else None
            layer = _layer(arch, adapted, moe, shards)
            state, paged = state + layers * layer.state, paged + layers * layer.paged
            working = max(working, layer.working)
    if not stage.adapters:
        for group, rows, columns in outer_shapes(plan, stage.is_first, stage.is_last):
            one = _tensor(shards, 1, rows, columns, group)
            state, paged, working = state + one.state, paged + one.paged, max(working, one.working)
    return TensorState(state, paged, working)


@lru_cache(maxsize=4096)
def _layer(arch: Architecture, adapted: Recipe | None, moe: bool, shards: _Shards) -> TensorState:
    """All trained tensors of one decoder layer: its own, or its adapters."""
    tensors = [_tensor(shards, *shape) for shape in _layer_shapes(arch, adapted, moe, shards)]
    return TensorState(
        sum(tensor.state for tensor in tensors),
        sum(tensor.paged for tensor in tensors),
        max(tensor.working for tensor in tensors),
    )


def _layer_shapes(
    arch: Architecture, adapted: Recipe | None, moe: bool, shards: _Shards
) -> list[tuple[int, int, int, str]]:
    """(copies, rows, columns, group) of each trained tensor of one decoder layer, in its order."""
    if adapted is None:
        return [
            (shape.copies, shape.rows, shape.columns, shape.group)
            for shape in rank_shapes(arch, moe, shards.tp, shards.ep)
        ]
    rank, targets = adapted.adapter_rank, adapter_targets(arch, adapted)
    found = []
    for target, (out, inner) in arch.layer_linears(first_layer(arch, moe)):
        if target in targets:
            found += [(1, rank, inner, "adapter"), (1, out, rank, "adapter")]
    return found


def _adafactor_working(plan: Plan, stage: Stage, shards: _Shards) -> int:
    """Its loop still holds the last tensor's update while it makes the next one's (``_adafactor.py``)."""
    adapted = plan.recipe if stage.adapters else None
    outer = [] if adapted else outer_shapes(plan, stage.is_first, stage.is_last)
    sizes = {group: shards.width * rows * columns for group, rows, columns in outer if columns > 1}
    most = 0
    for moe, layers in ((False, stage.num_layers - stage.num_moe_layers), (True, stage.num_moe_layers)):
        if not layers:
            continue
        # Vectors are a group of their own, after the matrices.
        inner = [
            _tensor(shards, *shape).working
            for shape in _layer_shapes(plan.architecture, adapted, moe, shards)
            if shape[2] > 1
        ]
        following = inner[1:] + (inner[:1] if layers > 1 else [0])
        most = max(most, *(one + after for one, after in zip(inner, following, strict=True)))
        most = max(most, sizes.get("embedding", 0) + inner[0], inner[-1] + sizes.get("lm_head", 0))
    return most


def _tensor(shards: _Shards, copies: int, rows: int, columns: int, group: str) -> TensorState:
    """One tensor's optimizer; experts are cut by their first dimension, the experts."""
    if group == "experts":
        copies = ceil_div(copies, max(1, shards.num_shards // shards.ep))
    else:
        rows = ceil_div(rows, shards.num_shards)
    numel, width = copies * rows * columns, shards.width
    if shards.optimizer == "matrices":
        return TensorState(width * numel if columns > 1 else 0)
    if shards.optimizer in ("sgd", "lion"):
        # Weight decay is added out of place (sgd.py); Lion's update is a tensor of its own.
        return TensorState(width * numel, working=width * numel)
    return tensor_state(
        shards.optimizer,
        rows,
        columns,
        width,
        copies=copies,
        hidden=columns > 1 and group not in ("experts", "embedding", "lm_head"),
        embedding=group == "embedding",
        library=shards.library,
    )
