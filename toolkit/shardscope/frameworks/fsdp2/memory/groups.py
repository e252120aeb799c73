"""All-gather and reduce-scatter buffers of each ``fully_shard`` group: one per decoder layer, and the root.

Source: ``torch.distributed.fsdp._fully_shard`` (torch 2.13, ``_fsdp_collectives.py``,
``_fsdp_param_group.py``). An all-gather allocates its flat output in addition to the parameters that are
copied out of it, and its input if that is cast; a reduce-scatter allocates its input and its output. With
adapters under mixed precision only the adapters are cast: the frozen base is stored in the compute type
(``FSDPParam.init_dtype_attrs``). A group allows this because only its trainable parameters must have the same
type (``_init_mp_dtypes``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.ops import (
    all_true,
    any_true,
    cache_by_numbers,
    ceil_div,
    group_equal,
    is_array,
    map_distinct,
    minimum,
    where,
)
from shardscope.core.precision import widths
from shardscope.families.parameter_shapes import find_first_layer
from shardscope.frameworks.fsdp2.layout import get_layout
from shardscope.frameworks.fsdp2.memory.quantized import count_saved_elements
from shardscope.memory.state.lora import Adapters, count_layer_adapters, find_adapters
from shardscope.memory.state.stages import count_layer_shard, list_rank_shapes

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.plan import Plan
    from shardscope.memory.state.stages import Stage


class GroupBuffers(NamedTuple):
    """Buffer sizes of one decoder layer's group, in bytes."""

    parameters: int
    """All-gathered parameters in the compute type, each tensor's rows padded to a multiple of the ranks."""
    all_gather_output: int
    """Flat output, in addition to ``parameters``; 0 with one rank, which copies directly."""
    all_gather_temporaries: int
    """Temporary memory of an all-gather besides its output: its input if that is cast or copied from the
    host; with one rank, the casts of one tensor and the previous one."""
    kept_after_forward: int
    """All-gathered parameters that stay from forward to backward."""
    reduce_scatter_input: int
    gradient_shard: int
    """Reduce-scatter output: this rank's gradient shards."""
    unsharded_gradient: int
    """Unsharded gradients in the reduction type, without padding."""


_NO_GROUP = GroupBuffers(0, 0, 0, 0, 0, 0, 0)


class LayerSums(NamedTuple):
    """Sums of :class:`GroupBuffers` over several layers, in bytes."""

    parameters: int
    kept_after_forward: int
    gradient_shard: int
    unsharded_gradient: int


class LayerGroups(NamedTuple):
    """Groups around one layer: its own, that of the layer before it, and sums. Bytes."""

    own: GroupBuffers
    previous: GroupBuffers
    """Group of the layer before it in the model; zeros for the first layer."""
    before: LayerSums
    """Sums over all layers before it."""


@dataclass(eq=False)
class StageGroups:
    """Buffer sizes of all groups of one pipeline stage, in bytes; never changed, since plans share it."""

    dense: GroupBuffers
    """Group of a layer without routed experts."""
    experts: GroupBuffers
    """Group of a layer with routed experts."""
    first_with_experts: int
    """Position of the first layer with routed experts."""
    num_layers: int
    root: int
    """Embedding, final norm and head, all-gathered from forward to the end of backward."""
    root_all_gather_output: int
    head_gradient: int
    """Gradient of the head's weight, unsharded in the compute type."""
    root_gradient: int
    """Gradients of the root group, unsharded in the compute type."""
    root_reduce_scatter_input: int
    root_gradient_shard: int
    embedding_gradient: int
    """Unsharded gradient of the embedding with tp > 1, before it is sharded: DTensor's embedding backward
    does not support a vocabulary shard (torch, tensor/_ops/_embedding_ops.py)."""
    previous_reduce_scatter_input: int
    """Input of the previous micro-batch's last reduce-scatter, alive until the next reduce-scatter: the
    root's, or the first layer's if the root is frozen."""

    def __post_init__(self) -> None:
        self._layers: dict[int, LayerGroups] = {}
        self.all_layers = self._sum_before(self.num_layers)
        """Sums over all layers."""
        self.first = self._get_group(0)
        """Group of the first layer."""
        self.last = self._get_group(self.num_layers - 1)
        """Group of the last layer."""

    def get_layer(self, position: int) -> LayerGroups:
        """Return the groups around the layer at ``position``."""
        # Cached on this object, which frees the columns of a search with it; a column has no cache.
        is_one = not is_array(position)
        layer = self._layers.get(position) if is_one else None
        if layer is None:
            layer = LayerGroups(
                self._get_group(position), self._get_group(position - 1), self._sum_before(position)
            )
            if is_one:
                self._layers[position] = layer
        return layer

    def _get_group(self, position: int) -> GroupBuffers:
        """Return the group of the layer at ``position``; all zeros for a position below 0."""
        if self.experts is _NO_GROUP:
            exists, group = (position >= 0) & (position < self.first_with_experts), self.dense
        else:
            exists = position >= 0
            group = where(position >= self.first_with_experts, self.experts, self.dense)
        # By identity: for arrays the comparison gives an array, which has no single truth value.
        if exists is False:
            return _NO_GROUP
        if exists is True or all_true(exists):
            return group
        # Every entry is computed, and zeroed where there is no such layer.
        return GroupBuffers(*(exists * field for field in group))

    def _sum_before(self, position: int) -> LayerSums:
        """Return the sums over the groups of all layers before ``position``."""
        # Layers without routed experts come first, as in activations/stage_activations.py.
        dense = position if self.experts is _NO_GROUP else minimum(position, self.first_with_experts)
        one, other, rest = self.dense, self.experts, position - dense
        return LayerSums(
            dense * one.parameters + rest * other.parameters,
            dense * one.kept_after_forward + rest * other.kept_after_forward,
            dense * one.gradient_shard + rest * other.gradient_shard,
            dense * one.unsharded_gradient + rest * other.unsharded_gradient,
        )


class _GroupOptions(NamedTuple):
    """Options that the buffers of a layer's group depend on besides the degrees."""

    arch: Architecture
    precision: str
    base_quantization: str | None
    adapters: Adapters | None
    reshard_after_forward: bool | int
    offload: str | None


def compute_groups(plan: Plan, stage: Stage) -> StageGroups:
    """Return the buffer sizes of all groups of ``stage``."""
    layout, degrees, recipe = get_layout(plan), plan.degrees, plan.recipe
    options = _GroupOptions(
        plan.architecture,
        recipe.precision,
        recipe.base_quantization,
        find_adapters(plan.architecture, recipe),
        layout.reshard_after_forward,
        layout.offload,
    )
    # Lengths of sequences and sizes of micro-batches change nothing, so that many plans share the result.
    return _compute_stage_groups(
        options,
        degrees.tp,
        degrees.ep,
        group_equal(degrees.shard * degrees.cp),
        # A pipeline reduces once, after all micro-batches.
        (plan.num_micro_batches > 1) & (degrees.pp == 1),
        stage.is_first,
        stage.num_layers,
        stage.num_moe_layers,
        stage.head,
        stage.edges,
        stage.edge_shard,
    )


@cache_by_numbers
def _compute_stage_groups(
    options: _GroupOptions,
    tp: int,
    ep: int,
    ranks: int,
    reduces_each: bool,
    is_first: bool,
    num_layers: int,
    num_moe_layers: int,
    head: int,
    edges: int,
    edge_shard: int,
) -> StageGroups:
    """Return the groups of a stage; ``reduces_each``: whether each of several micro-batches reduces."""
    arch, width = options.arch, widths[options.precision]
    trains_root = options.adapters is None
    # Shards are padded, so the whole is the ranks' number of shards, a little more than the weights.
    root = width.compute * ranks * edge_shard
    # Gradients are cast to the reduction type when they are copied into this.
    root_reduce_scatter_input = trains_root * width.reduce * ranks * edge_shard
    dense, experts = (_compute_group(options, moe, tp, ep, ranks) for moe in (False, True))
    first_with_experts = num_layers - num_moe_layers
    # Groups without trained parameters have no reduce-scatter: under adapters the root has none, and the last
    # one of a backward is the first layer's.
    last_reduce_scatter_input = root_reduce_scatter_input
    if not trains_root:
        last_reduce_scatter_input = where(
            first_with_experts > 0, dense.reduce_scatter_input, experts.reduce_scatter_input
        )
    # Unsharded over tp, which is why it is not computed from the stage's weights on one rank.
    embedding_numel = arch.vocab_size * arch.hidden_size
    return StageGroups(
        dense=dense,
        experts=experts,
        first_with_experts=first_with_experts,
        num_layers=num_layers,
        root=root,
        root_all_gather_output=where(ranks > 1, root, 0),
        head_gradient=trains_root * width.compute * head,
        root_gradient=trains_root * width.compute * edges,
        root_reduce_scatter_input=root_reduce_scatter_input,
        root_gradient_shard=trains_root * width.original * edge_shard,
        embedding_gradient=(tp > 1) * is_first * (width.compute * embedding_numel),
        previous_reduce_scatter_input=where(reduces_each, last_reduce_scatter_input, 0),
    )


def _compute_group(options: _GroupOptions, moe: bool, tp: int, ep: int, ranks: int) -> GroupBuffers:
    """Return the buffers of one layer's group, dense or with routed experts; zeros if the model has none."""
    arch, adapters = options.arch, options.adapters
    if arch.num_moe_layers == (0 if moe else arch.num_hidden_layers):
        return _NO_GROUP
    width = widths[options.precision]

    # Elements of the layer on one rank: padded shards, and unsharded ones that get gradients.
    shard = map_distinct(partial(count_layer_shard, arch, moe), tp, ep, ranks)
    base = shard.dense_padded + shard.experts_padded
    adapter_shard, trained_unsharded = 0, shard.dense + shard.experts
    if options.base_quantization is not None:
        # Elements of the storage type, each of which packs several 4-bit weights.
        base = base - map_distinct(partial(count_saved_elements, arch, moe, width.compute), ranks)
    if adapters is not None:
        adapters_on_shard = map_distinct(partial(count_layer_adapters, arch, adapters, moe), ranks)[1]
        adapter_shard = ceil_div(adapters_on_shard, tp)
        trained_unsharded = ceil_div(count_layer_adapters(arch, adapters, moe)[0], tp)
    trained = base if adapters is None else adapter_shard
    parameters = width.compute * ranks * (base + adapter_shard)

    # An all-gather's input is a copy only if it is cast, or comes from the host.
    is_cast = width.compute != width.original
    all_gather_input = is_cast * width.compute * trained
    if options.offload == "cpu":
        all_gather_input = width.compute * (base + adapter_shard)
    # A group of one rank has no all-gather: wait_for_unshard casts and copies tensor by tensor.
    casts_on_one_rank = 0
    if is_cast and any_true(ranks == 1):
        count_casts = partial(_count_cast_elements, arch, adapters, moe)
        casts_on_one_rank = width.compute * map_distinct(count_casts, tp, ep)

    # reshard_after_forward: True frees all, False nothing, a number keeps 1/number of the parameters.
    reshard = options.reshard_after_forward
    kept_after_forward = 0
    if reshard is False:
        kept_after_forward = parameters
    elif reshard is not True:
        kept_after_forward = where(reshard == ranks, 0, parameters // reshard)
    return GroupBuffers(
        parameters=parameters,
        all_gather_output=where(ranks > 1, parameters, 0),
        all_gather_temporaries=where(ranks > 1, all_gather_input, casts_on_one_rank),
        kept_after_forward=kept_after_forward,
        reduce_scatter_input=width.reduce * ranks * trained,
        gradient_shard=width.original * trained,
        unsharded_gradient=width.reduce * trained_unsharded,
    )


@lru_cache(maxsize=1024)
def _count_cast_elements(arch: Architecture, adapters: Adapters | None, moe: bool, tp: int, ep: int) -> int:
    """Return the most temporary elements while a single rank casts a layer's parameters, tensor by tensor.

    Each cast is copied into a new parameter tensor, and freed once the next cast exists
    (``FSDPParamGroup.wait_for_unshard``). With adapters only the adapters are cast.
    """
    # Two maxima a tensor: its cast with the previous one, which the loop variable still references; and its
    # cast with the copy of it. The copies are the parameters themselves, which are counted elsewhere.
    copied = largest = previous_cast = 0
    for numel, is_trained in _list_tensors(arch, adapters, moe, tp, ep):
        cast_numel = is_trained * numel
        largest = max(largest, copied + previous_cast + cast_numel)
        copied += numel
        largest = max(largest, copied + cast_numel)
        previous_cast = cast_numel
    return largest - copied


def _list_tensors(
    arch: Architecture, adapters: Adapters | None, moe: bool, tp: int, ep: int
) -> list[tuple[int, bool]]:
    """Return (elements, whether trainable) of a layer's tensors in order, adapters after their Linear."""
    tensors = []
    linears = list(arch.layer_linears(find_first_layer(arch, moe)))
    targets = adapters.targets if adapters else ()
    for shape in list_rank_shapes(arch, moe, tp, ep):
        tensors.append((shape.copies * shape.rows * shape.columns, adapters is None))
        # peft adds lora_A and lora_B to the Linear, so they follow its weight in named_parameters().
        module, _, kind = shape.name.rpartition(".")
        target = module.rpartition(".")[2]
        # GPT-2 has two projections of one name, c_proj: in order, each name has the next shape.
        position = next((at for at, (name, _) in enumerate(linears) if name == target), None)
        if adapters and kind == "weight" and target in targets and position is not None:
            out, inner = linears.pop(position)[1]
            tensors += [(ceil_div(adapters.rank * size, tp), True) for size in (inner, out)]
            tensors += [(out, True)] * adapters.use_dora
    return tensors
