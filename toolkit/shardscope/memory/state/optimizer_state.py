"""Optimizer state of all tensors trained on one rank of a stage: ``optimizers.py``, summed over tensors."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.number_format import format_count, format_gib
from shardscope.core.ops import ceil_div, map_distinct
from shardscope.families.parameter_shapes import find_first_layer
from shardscope.memory.report import Term, zero_term
from shardscope.memory.state.lora import Adapters, find_adapters
from shardscope.memory.state.optimizers import (
    ELEMENTWISE,
    TensorState,
    compute_constant_state,
    compute_tensor_state,
)
from shardscope.memory.state.stages import EMBEDDING_GROUPS, Stage, list_outer_tensors, list_rank_shapes

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.plan import Plan

SOURCES = {
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
    """Optimizer memory of one rank."""

    state: Term
    """State kept on the device."""
    working: Term
    """Temporaries of an update."""
    host_bytes: int
    """Bytes of managed memory, which moves to the host when the GPU is full."""


class _OptimizerKind(NamedTuple):
    """The optimizer, its library, and the bytes per trained element."""

    optimizer: str
    width: int
    """Bytes per trained element."""
    library: str


class _RankPart(NamedTuple):
    """The part of a model that one rank trains: plain numbers, or arrays of them."""

    tp: int
    ep: int
    num_shards: int
    is_first: bool
    is_last: bool
    num_layers: int
    num_moe_layers: int


def compute_optimizer_bytes(
    plan: Plan, stage: Stage, width: int, num_shards: int, library: str
) -> OptimizerBytes:
    """Return the optimizer memory of a rank that keeps 1/``num_shards`` of each tensor's rows, rounded up.

    ``width`` is the bytes per trained element; ``library`` the one whose 8-bit AdamW runs on such tensors.
    """
    name, trained = plan.recipe.optimizer, stage.trainable_shard
    degrees = plan.degrees
    part = _RankPart(
        degrees.tp,
        degrees.ep,
        num_shards,
        stage.is_first,
        stage.is_last,
        stage.num_layers,
        stage.num_moe_layers,
    )
    # AdamW, SGD and Lion: state by the number of elements, whatever the shapes.
    if name in ELEMENTWISE:
        state = ELEMENTWISE[name] * width * trained
        return OptimizerBytes(
            Term(state, lambda: f"{trained:,} × {ELEMENTWISE[name]} × {width} bytes · {SOURCES[name]}"),
            _compute_elementwise_working(plan, part, width, are_plain=library != "torchao"),
            0,
        )
    # Others: block scales, factored moments and thresholds depend on each tensor's shape.
    kind = _OptimizerKind(name, width, library)
    total = _sum_tensors(plan, part, kind)
    # CPU ranks have no managed memory: moments that would be paged are in the one memory that they have.
    paged = total.paged if plan.on_gpu else 0
    state = total.state + total.paged - paged + compute_constant_state(name, library)
    working = total.working
    if name == "adafactor":
        arch, adapters = plan.architecture, find_adapters(plan.architecture, plan.recipe)
        working = map_distinct(
            lambda *numbers: _compute_adafactor_working(arch, adapters, kind, _RankPart(*numbers)), *part
        )
    elif not plan.on_gpu and name != "muon":
        # What remains are paged moments, fetched to the GPU for the update.
        working = 0

    def explain() -> str:
        moved = (
            f"; {format_gib(paged)} GiB more in managed memory, on the host when the GPU is full"
            if paged
            else ""
        )
        return f"{format_count(trained, 'trained number')} tensor by tensor · {SOURCES[name]}{moved}"

    return OptimizerBytes(
        Term(state, explain),
        Term(working, lambda: f"{format_gib(working)} GiB while the largest tensor is updated"),
        paged,
    )


def _compute_elementwise_working(plan: Plan, part: _RankPart, width: int, *, are_plain: bool) -> Term:
    """Return temporaries of elementwise optimizers, such as the decayed gradient of SGD and Lion.

    It exists tensor by tensor; SGD on plain GPU tensors has all at once: ``torch._foreach_add`` is the
    default if tensors on a GPU ``are_plain``, not DTensors, even of one shard (``torch/optim/optimizer.py``,
    ``_default_to_fused_or_foreach``).
    """
    name = plan.recipe.optimizer
    if name == "adamw":
        return zero_term("fused AdamW updates in place")
    if name == "adamw_foreach":
        # All matrices' square roots at once (torch/optim/adam.py, _multi_tensor_adam); vectors are another
        # group.
        roots = _sum_tensors(plan, part, _OptimizerKind("matrices", width, "")).state
        return Term(roots, lambda: f"{format_gib(roots)} GiB roots of second moments, all at once (foreach)")
    largest = _sum_tensors(plan, part, _OptimizerKind(name, width, "")).working
    at_once = name == "sgd" and are_plain and plan.on_gpu
    if at_once:
        largest = _sum_tensors(plan, part, _OptimizerKind("matrices", width, "")).state

    def explain() -> str:
        if at_once:
            return f"{format_gib(largest)} GiB gradients with weight decay, all at once"
        return f"{format_gib(largest)} GiB gradient of the largest tensor, decayed"

    return Term(largest, explain)


def _sum_tensors(plan: Plan, part: _RankPart, kind: _OptimizerKind) -> TensorState:
    """Return the optimizer state of all tensors that train on a rank of the stage."""
    arch, adapters = plan.architecture, find_adapters(plan.architecture, plan.recipe)
    # Of an array of plans, each distinct part is computed once.
    total: TensorState = map_distinct(
        lambda *numbers: _compute_part_state(arch, adapters, kind, _RankPart(*numbers)), *part
    )
    return total


@lru_cache(maxsize=4096)
def _compute_part_state(
    arch: Architecture, adapters: Adapters | None, kind: _OptimizerKind, part: _RankPart
) -> TensorState:
    # State adds up over tensors; temporaries exist for one tensor at a time.
    state = paged = working = 0
    for moe, layers in _count_layers_by_kind(part):
        layer = _compute_layer_state(arch, adapters, moe, kind, part.tp, part.ep, part.num_shards)
        state, paged = state + layers * layer.state, paged + layers * layer.paged
        working = max(working, layer.working)
    if adapters is None:
        for group, rows, columns in list_outer_tensors(arch, part.tp, part.is_first, part.is_last):
            one = _compute_shard_state(kind, part.ep, part.num_shards, (1, rows, columns, group))
            state, paged, working = state + one.state, paged + one.paged, max(working, one.working)
    return TensorState(state, paged, working)


def _count_layers_by_kind(part: _RankPart) -> list[tuple[bool, int]]:
    kinds = ((False, part.num_layers - part.num_moe_layers), (True, part.num_moe_layers))
    return [(moe, layers) for moe, layers in kinds if layers]


@lru_cache(maxsize=4096)
def _compute_layer_state(
    arch: Architecture,
    adapters: Adapters | None,
    moe: bool,
    kind: _OptimizerKind,
    tp: int,
    ep: int,
    num_shards: int,
) -> TensorState:
    """Return the optimizer state of one decoder layer's trained tensors: its own, or its adapters."""
    tensors = [
        _compute_shard_state(kind, ep, num_shards, shape)
        for shape in _list_trained_shapes(arch, adapters, moe, tp, ep)
    ]
    return TensorState(
        sum(tensor.state for tensor in tensors),
        sum(tensor.paged for tensor in tensors),
        max(tensor.working for tensor in tensors),
    )


def _list_trained_shapes(
    arch: Architecture, adapters: Adapters | None, moe: bool, tp: int, ep: int
) -> list[tuple[int, int, int, str]]:
    """Return (copies, rows, columns, group) of each trained tensor of one decoder layer, in order."""
    if adapters is None:
        return [
            (shape.copies, shape.rows, shape.columns, shape.group)
            for shape in list_rank_shapes(arch, moe, tp, ep)
        ]
    targets, rank, use_dora = adapters
    # peft's lora_A, lora_B, and DoRA's lora_magnitude_vector.
    shapes = []
    for target, (out, inner) in arch.layer_linears(find_first_layer(arch, moe)):
        if target in targets:
            shapes += [(1, rank, inner, "adapter"), (1, out, rank, "adapter")]
            shapes += [(1, out, 1, "adapter")] * use_dora
    return shapes


@lru_cache(maxsize=4096)
def _compute_adafactor_working(
    arch: Architecture, adapters: Adapters | None, kind: _OptimizerKind, part: _RankPart
) -> int:
    """Return Adafactor's temporaries: an update is still alive while the next one is computed.

    Source: the loop in ``torch/optim/_adafactor.py``.
    """
    outer = [] if adapters else list_outer_tensors(arch, part.tp, part.is_first, part.is_last)
    sizes = {group: kind.width * rows * columns for group, rows, columns in outer if columns > 1}
    most = 0
    for moe, layers in _count_layers_by_kind(part):
        # Vectors are a separate group, after the matrices.
        inner = [
            _compute_shard_state(kind, part.ep, part.num_shards, shape).working
            for shape in _list_trained_shapes(arch, adapters, moe, part.tp, part.ep)
            if shape[2] > 1
        ]
        # The largest sum of two consecutive updates: inside of a layer, from one layer to the next, from the
        # embeddings to the first layer, and from the last layer to the head.
        following = inner[1:] + (inner[:1] if layers > 1 else [0])
        most = max(most, *(one + after for one, after in zip(inner, following, strict=True)))
        before = [sizes[group] for group in EMBEDDING_GROUPS if group in sizes]
        ahead = [one + after for one, after in zip(before, [*before[1:], inner[0]], strict=False)]
        most = max(most, *ahead, inner[-1] + sizes.get("lm_head", 0))
    return most


def _compute_shard_state(
    kind: _OptimizerKind, ep: int, num_shards: int, shape: tuple[int, int, int, str]
) -> TensorState:
    """Return one tensor's optimizer state; experts are sharded by their first dimension, the expert index."""
    copies, rows, columns, group = shape
    if group == "experts":
        copies = ceil_div(copies, max(1, num_shards // ep))
    else:
        rows = ceil_div(rows, num_shards)
    numel, width = copies * rows * columns, kind.width
    if kind.optimizer == "matrices":
        return TensorState(width * numel if columns > 1 else 0)
    if kind.optimizer in ("sgd", "lion"):
        # Weight decay is added out of place (sgd.py); Lion's update is a tensor of its own.
        return TensorState(width * numel, working=width * numel)
    return compute_tensor_state(
        kind.optimizer,
        rows,
        columns,
        width,
        copies=copies,
        hidden=columns > 1 and group not in ("experts", *EMBEDDING_GROUPS, "lm_head"),
        embedding=group == "embedding",
        library=kind.library,
    )
