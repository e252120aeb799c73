"""All-gather and reduce-scatter buffers of each ``fully_shard`` group: one per decoder layer, and the root.

Source: ``torch.distributed.fsdp._fully_shard`` (torch 2.13, ``_fsdp_collectives.py``,
``_fsdp_param_group.py``). An all-gather allocates its flat output in addition to the parameters that are
copied out of it, and its input if that is cast; a reduce-scatter allocates its input and its output. With
adapters under mixed precision only the adapters are cast: the frozen base is stored in the compute type
(``FSDPParam.init_dtype_attrs``). A group allows this because only its trainable parameters must have the same
type (``_init_mp_dtypes``).
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.core.ops import ceil_div, group_equal, map_distinct, minimum, where
from shardscope.core.precision import widths
from shardscope.families.parameter_shapes import find_first_layer
from shardscope.frameworks.fsdp2.memory.quantized import count_saved_elements
from shardscope.memory.state.lora import count_layer_adapters, find_adapter_targets
from shardscope.memory.state.stages import count_layer_shard, list_rank_shapes

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.plan import Plan
    from shardscope.core.recipe import Recipe
    from shardscope.memory.state.stages import Stage


class GroupBuffers(NamedTuple):
    """Buffer sizes of one decoder layer's group, in bytes."""

    parameters: Any
    """All-gathered parameters in the compute type, each tensor's rows padded to a multiple of the ranks."""
    staging: Any
    """Flat all-gather output, in addition to ``parameters``; 0 with one rank, which copies directly."""
    copying: Any
    """Temporary memory of an all-gather besides its output: its input if that is cast or copied from the
    host; with one rank, the casts of one tensor and the previous one."""
    kept: Any
    """All-gathered parameters that stay from forward to backward."""
    reduction: Any
    """Reduce-scatter input."""
    shard: Any
    """Reduce-scatter output: this rank's gradient shards."""
    gradient: Any
    """Unsharded gradients in the reduction type, without padding."""


_NOTHING = GroupBuffers(0, 0, 0, 0, 0, 0, 0)


class GroupSums(NamedTuple):
    """Sums over all layers before a given one, in bytes."""

    kept: Any
    """All-gathered parameters that stay from forward to backward."""
    shard: Any
    """This rank's gradient shards."""
    parameters: Any
    """All-gathered parameters."""
    gradient: Any
    """Unsharded gradients."""


class StageGroups(NamedTuple):
    """Buffer sizes of all groups of one pipeline stage, in bytes."""

    dense: GroupBuffers
    """Group of a layer without routed experts."""
    experts: GroupBuffers
    """Group of a layer with routed experts."""
    first_with_experts: Any
    """Index of the first layer with routed experts."""
    root: Any
    """Embedding, final norm and head, all-gathered from forward to the end of backward."""
    root_staging: Any
    head: Any
    """Gradient of the head's weight."""
    root_gradient: Any
    root_reduction: Any
    root_shard: Any
    embedding: Any
    """Unsharded gradient of the embedding with tp > 1, before it is sharded: DTensor's embedding backward
    does not support a vocabulary shard (torch, tensor/_ops/_embedding_ops.py)."""
    left_over: Any
    """Input of the previous micro-batch's last reduce-scatter, alive until the next reduce-scatter: the
    root's, or the first layer's if the root is frozen."""

    def at(self, index: Any) -> GroupBuffers:
        """Return the group of the layer at ``index``; all zeros for an index below 0."""
        if type(index) is int and type(self.first_with_experts) is int:
            if index < 0:
                return _NOTHING
            return self.experts if index >= self.first_with_experts else self.dense
        if self.experts is _NOTHING:
            there = (index >= 0) & (index < self.first_with_experts)
            return GroupBuffers(*(there * field for field in self.dense))
        found, there = where(index >= self.first_with_experts, self.experts, self.dense), index >= 0
        return GroupBuffers(*(there * field for field in found))

    def kept_before(self, index: Any) -> Any:
        """Return the bytes of all layers before ``index`` that stay all-gathered from forward to backward."""
        dense = minimum(index, self.first_with_experts)
        return dense * self.dense.kept + (index - dense) * self.experts.kept

    def shards_before(self, index: Any) -> Any:
        """Return this rank's gradient shards of all layers before ``index``. Bytes."""
        dense = minimum(index, self.first_with_experts)
        return dense * self.dense.shard + (index - dense) * self.experts.shard

    def before(self, index: Any) -> GroupSums:
        """Return the sums over all layers before ``index``."""
        dense = minimum(index, self.first_with_experts)
        experts = index - dense
        return GroupSums(
            dense * self.dense.kept + experts * self.experts.kept,
            dense * self.dense.shard + experts * self.experts.shard,
            dense * self.dense.parameters + experts * self.experts.parameters,
            dense * self.dense.gradient + experts * self.experts.gradient,
        )


def compute_groups(plan: Plan, stage: Stage) -> StageGroups:
    """Return the buffer sizes of all groups of ``stage``."""
    width = widths[plan.recipe.precision]
    ranks = group_equal(plan.degrees.shard * plan.degrees.cp)
    trains_edges = not plan.recipe.has_adapters
    root = width.compute * ranks * stage.edge_shard
    root_reduction = trains_edges * width.reduce * ranks * stage.edge_shard
    dense, experts = _compute_group(plan, False, ranks), _compute_group(plan, True, ranks)
    first_with_experts = stage.num_layers - stage.num_moe_layers
    last_reduction = root_reduction
    if not trains_edges:
        last_reduction = where(first_with_experts > 0, dense.reduction, experts.reduction)
    return StageGroups(
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


def _compute_group(plan: Plan, moe: bool, ranks: Any) -> GroupBuffers:
    layout: Any = plan.layout
    arch, degrees, recipe = plan.architecture, plan.degrees, plan.recipe
    if arch.num_moe_layers == (0 if moe else arch.num_hidden_layers):
        return _NOTHING
    width = widths[recipe.precision]
    weights: Any = map_distinct(partial(count_layer_shard, arch, moe), degrees.tp, degrees.ep, ranks)
    own = weights.dense_padded + weights.experts_padded
    whole = weights.dense + weights.experts
    if recipe.base_quantization is not None:
        own = own - map_distinct(partial(count_saved_elements, arch, moe, width.compute), ranks)
    adapters: Any = 0
    if recipe.has_adapters:
        adapters = map_distinct(partial(count_layer_adapters, arch, recipe, moe), ranks)[1]
        adapters = ceil_div(adapters, degrees.tp)
        whole = ceil_div(count_layer_adapters(arch, recipe, moe)[0], degrees.tp)
    parameters = width.compute * ranks * (own + adapters)
    casts = width.compute != width.original
    trained = adapters if recipe.has_adapters else own
    copied: Any = casts * width.compute * trained
    if layout.offload == "cpu":
        copied = width.compute * (own + adapters)
    alone: Any = 0
    if casts:
        adapted = recipe if recipe.has_adapters else None
        alone = width.compute * map_distinct(
            partial(_count_cast_elements, arch, adapted, moe), degrees.tp, degrees.ep
        )
    reshard = layout.reshard_after_forward
    kept: Any = 0
    if reshard is False:
        kept = parameters
    elif reshard is not True:
        kept = where(reshard == ranks, 0, parameters // reshard)
    return GroupBuffers(
        parameters=parameters,
        staging=where(ranks > 1, parameters, 0),
        copying=where(ranks > 1, copied, alone),
        kept=kept,
        reduction=width.reduce * ranks * trained,
        shard=width.original * trained,
        gradient=width.reduce * whole,
    )


@lru_cache(maxsize=1024)
def _count_cast_elements(arch: Architecture, adapted: Recipe | None, moe: bool, tp: int, ep: int) -> int:
    """Return the most temporary elements while a single rank casts a layer's parameters, tensor by tensor.

    Each cast is copied into a new parameter tensor, and freed once the next cast exists
    (``FSDPParamGroup.wait_for_unshard``). With adapters only the adapters are cast.
    """
    made = most = last = 0
    for size, is_cast in _list_tensors(arch, adapted, moe, tp, ep):
        cast = is_cast * size
        most = max(most, made + last + cast)
        made += size
        most = max(most, made + cast)
        last = cast
    return most - made


def _list_tensors(
    arch: Architecture, adapted: Recipe | None, moe: bool, tp: int, ep: int
) -> list[tuple[int, bool]]:
    """Return (elements, whether trainable) of a layer's tensors in order, adapters after their Linear."""
    found = []
    linears = dict(arch.layer_linears(find_first_layer(arch, moe)))
    targets = find_adapter_targets(arch, adapted) if adapted else ()
    for shape in list_rank_shapes(arch, moe, tp, ep):
        found.append((shape.copies * shape.rows * shape.columns, adapted is None))
        module, _, kind = shape.name.rpartition(".")
        target = module.rpartition(".")[2]
        if adapted and kind == "weight" and target in targets and target in linears:
            out, inner = linears[target]
            found += [(ceil_div(adapted.adapter_rank * size, tp), True) for size in (inner, out)]
    return found
