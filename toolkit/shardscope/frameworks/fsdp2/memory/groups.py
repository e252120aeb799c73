"""All-gather and reduce-scatter buffers of each ``fully_shard`` group: a decoder layer's, and the root's.

Read off ``torch.distributed.fsdp._fully_shard`` (torch 2.13, ``_fsdp_collectives.py``,
``_fsdp_param_group.py``): a gather has its whole output beside the parameters that are copied out of it, and
its input where that is cast; a reduction its input and its output. Under adapters of a mixed recipe only
these are cast: the frozen base is kept in the type that it is gathered in (``FSDPParam.init_dtype_attrs``),
which a group allows, for it asks one type of its trained parameters only (``_init_mp_dtypes``).
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.core.arrays.arithmetic import by_value, ceil_div, looked_up, smallest, where
from shardscope.core.precision import widths
from shardscope.frameworks.fsdp2.memory.quantized import numbers_saved
from shardscope.memory.state.lora import adapter_targets, first_layer, layer_adapters
from shardscope.memory.state.stages import layer_shard, rank_shapes

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.plan import Plan
    from shardscope.core.recipe import Recipe
    from shardscope.memory.state.stages import Stage


class Group(NamedTuple):
    """Bytes of one decoder layer's group."""

    parameters: Any
    """Gathered, in the compute type, every tensor's rows padded for all ranks."""
    staging: Any
    """The all-gather's output beside them; one rank alone copies without any."""
    copying: Any
    """What a gather needs beside its output: its input where that is cast, or comes from the host; of one
    rank alone the casts of one tensor and the one before."""
    kept: Any
    """Of the gathered parameters, what forward leaves for backward."""
    reduction: Any
    """The reduce-scatter's input."""
    shard: Any
    """Its output: one rank's part of the gradients."""
    gradient: Any
    """Whole gradients in the reduction type, of which no row is padded."""


_NOTHING = Group(0, 0, 0, 0, 0, 0, 0)


class Before(NamedTuple):
    """Bytes of all layers before one."""

    kept: Any
    """Gathered parameters that forward leaves for backward."""
    shard: Any
    """One rank's part of the gradients."""
    parameters: Any
    """All of their gathered parameters."""
    gradient: Any
    """All of their whole gradients."""


class Groups(NamedTuple):
    """All groups of one stage."""

    dense: Group
    """A layer without routed experts."""
    experts: Group
    """A layer with routed experts."""
    first_with_experts: Any
    """Index of the first layer that has them."""
    root: Any
    """Embedding, final norm and head, gathered from forward to the end of backward."""
    root_staging: Any
    head: Any
    """The gradient of the head's weight."""
    root_gradient: Any
    root_reduction: Any
    root_shard: Any
    embedding: Any
    """With tp the embedding's gradient is made whole, and then cut: DTensor's backward of it knows no cut of
    the vocabulary (torch, tensor/_ops/_embedding_ops.py)."""
    left_over: Any
    """The last reduce-scatter's input of the micro-batch before, held until the next one: the root's, or
    where that is frozen the first layer's."""

    def at(self, index: Any) -> Group:
        """The group of the layer at ``index``; nothing before the first layer."""
        if type(index) is int and type(self.first_with_experts) is int:
            if index < 0:
                return _NOTHING
            return self.experts if index >= self.first_with_experts else self.dense
        if self.experts is _NOTHING:
            there = (index >= 0) & (index < self.first_with_experts)
            return Group(*(there * field for field in self.dense))
        found, there = where(index >= self.first_with_experts, self.experts, self.dense), index >= 0
        return Group(*(there * field for field in found))

    def kept_before(self, index: Any) -> Any:
        """Gathered parameters of all layers before ``index`` that forward leaves for backward."""
        dense = smallest(index, self.first_with_experts)
        return dense * self.dense.kept + (index - dense) * self.experts.kept

    def shards_before(self, index: Any) -> Any:
        """One rank's part of the gradients of all layers before ``index``."""
        dense = smallest(index, self.first_with_experts)
        return dense * self.dense.shard + (index - dense) * self.experts.shard

    def before(self, index: Any) -> Before:
        """Sums over all layers before ``index``."""
        dense = smallest(index, self.first_with_experts)
        experts = index - dense
        return Before(
            dense * self.dense.kept + experts * self.experts.kept,
            dense * self.dense.shard + experts * self.experts.shard,
            dense * self.dense.parameters + experts * self.experts.parameters,
            dense * self.dense.gradient + experts * self.experts.gradient,
        )


def groups_of(plan: Plan, stage: Stage) -> Groups:
    """The groups of one stage."""
    width = widths[plan.recipe.precision]
    ranks = by_value(plan.degrees.shard * plan.degrees.cp)
    trains_edges = not plan.recipe.has_adapters
    root = width.compute * ranks * stage.edge_shard
    root_reduction = trains_edges * width.reduce * ranks * stage.edge_shard
    dense, experts = _group(plan, False, ranks), _group(plan, True, ranks)
    first_with_experts = stage.num_layers - stage.num_moe_layers
    last_reduction = root_reduction
    if not trains_edges:
        last_reduction = where(first_with_experts > 0, dense.reduction, experts.reduction)
    return Groups(
        dense=dense,
        experts=experts,
        first_with_experts=first_with_experts,
        root=root,
        root_staging=where(ranks > 1, root, 0),
        head=trains_edges * width.compute * stage.head,
        root_gradient=trains_edges * width.compute * stage.edges,
        root_reduction=root_reduction,
        root_shard=trains_edges * width.original * stage.edge_shard,
        embedding=(plan.degrees.tp > 1)
        * stage.is_first
        * (width.compute * plan.architecture.vocab_size * plan.architecture.hidden_size),
        left_over=where((plan.num_micro_batches > 1) & (plan.degrees.pp == 1), last_reduction, 0),
    )


def _group(plan: Plan, moe: bool, ranks: Any) -> Group:
    layout: Any = plan.layout
    arch, degrees, recipe = plan.architecture, plan.degrees, plan.recipe
    if arch.num_moe_layers == (0 if moe else arch.num_hidden_layers):
        return _NOTHING
    width = widths[recipe.precision]
    weights: Any = looked_up(partial(layer_shard, arch, moe), degrees.tp, degrees.ep, ranks)
    own = weights.dense_padded + weights.experts_padded
    whole = weights.dense + weights.experts
    if recipe.base_quantization is not None:
        own = own - looked_up(partial(numbers_saved, arch, moe, width.compute), ranks)
    adapters: Any = 0
    if recipe.has_adapters:
        adapters = looked_up(partial(layer_adapters, arch, recipe, moe), ranks)[1]
        adapters = ceil_div(adapters, degrees.tp)
        whole = ceil_div(layer_adapters(arch, recipe, moe)[0], degrees.tp)
    parameters = width.compute * ranks * (own + adapters)
    casts = width.compute != width.original
    trained = adapters if recipe.has_adapters else own
    copied: Any = casts * width.compute * trained
    if layout.offload == "cpu":
        copied = width.compute * (own + adapters)
    alone: Any = 0
    if casts:
        adapted = recipe if recipe.has_adapters else None
        alone = width.compute * looked_up(partial(_casts, arch, adapted, moe), degrees.tp, degrees.ep)
    reshard = layout.reshard_after_forward
    kept: Any = 0
    if reshard is False:
        kept = parameters
    elif reshard is not True:
        kept = where(reshard == ranks, 0, parameters // reshard)
    return Group(
        parameters=parameters,
        staging=where(ranks > 1, parameters, 0),
        copying=where(ranks > 1, copied, alone),
        kept=kept,
        reduction=width.reduce * ranks * trained,
        shard=width.original * trained,
        gradient=width.reduce * whole,
    )


@lru_cache(maxsize=1024)
def _casts(arch: Architecture, adapted: Recipe | None, moe: bool, tp: int, ep: int) -> int:
    """Numbers that one rank alone holds beside a layer's parameters while it casts them, tensor by tensor.

    The cast before goes when the next one is there, and each is copied into a tensor of its own
    (``FSDPParamGroup.wait_for_unshard``). Under adapters only these are cast.
    """
    made = most = last = 0
    for size, is_cast in _tensors(arch, adapted, moe, tp, ep):
        cast = is_cast * size
        most = max(most, made + last + cast)
        made += size
        most = max(most, made + cast)
        last = cast
    return most - made


def _tensors(
    arch: Architecture, adapted: Recipe | None, moe: bool, tp: int, ep: int
) -> list[tuple[int, bool]]:
    """(numbers, whether they are trained) of a layer's tensors in their order, adapters behind their own."""
    found = []
    linears = dict(arch.layer_linears(first_layer(arch, moe)))
    targets = adapter_targets(arch, adapted) if adapted else ()
    for shape in rank_shapes(arch, moe, tp, ep):
        found.append((shape.copies * shape.rows * shape.columns, adapted is None))
        module, _, kind = shape.name.rpartition(".")
        target = module.rpartition(".")[2]
        if adapted and kind == "weight" and target in targets and target in linears:
            out, inner = linears[target]
            found += [(ceil_div(adapted.adapter_rank * size, tp), True) for size in (inner, out)]
    return found
