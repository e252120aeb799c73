"""Parallel layouts: a framework and its degrees. Framework-specific fields are in ``frameworks/``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, isqrt, prod
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from shardscope.core.errors import Value, check_choice, check_integer, check_keys, check_mapping, refuse
from shardscope.core.fixes import check_keywords, without_fix_search
from shardscope.core.serialization import Serializable, replace_fields

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.cluster import Cluster
    from shardscope.core.recipe import Recipe

OptionValue = bool | int | str | None
"""Value of a layout's field."""

MAX_DEGREE = 2**20

_DEGREES = ("tp", "pp", "cp", "ep", "vpp")
"""Fields that :attr:`Layout.full_description` names if they are above one."""


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """All degrees of a layout on a given cluster; their product is the world size."""

    data_parallel: int
    """Ranks (or groups of ranks) with different sequences: ``shard * replicate``."""
    shard: int = 1
    """Ranks over which the training state is sharded."""
    replicate: int = 1
    """Replicas of that sharded state (HSDP)."""
    tp: int = 1
    """Tensor-parallel ranks over which each matrix is sharded."""
    pp: int = 1
    """Pipeline stages."""
    vpp: int = 1
    """Virtual stages (model chunks) on each pipeline stage (interleaved schedule)."""
    cp: int = 1
    """Context-parallel ranks over which each sequence is sharded."""
    ep: int = 1
    """Expert-parallel ranks, a subset of the data-parallel ranks."""


@dataclass(frozen=True, kw_only=True)
class Layout(Serializable):
    """A framework and its degrees, from ``Layout.ddp()``, ``.fsdp2()``, ``.zero()`` or ``.megatron()``.

    Degrees that are not given are derived from the cluster when the ``Plan`` is created.
    """

    framework: ClassVar[str] = ""
    """The registry's name: ``ddp``, ``fsdp2``, ``deepspeed`` or ``megatron``."""
    title: ClassVar[str] = ""
    """Display name."""
    default_kernels: ClassVar[str] = "transformers"
    """Value in force when ``Recipe.kernels`` is None."""
    # Recipe values that the framework runs and the memory model has formulas for (prediction/support.py).
    supported_kernels: ClassVar[tuple[str, ...]] = ("transformers", "liger")
    supported_methods: ClassVar[tuple[str, ...]] = ("full", "lora")
    supported_precisions: ClassVar[tuple[str, ...]] = ("bf16-mixed", "fp16-mixed", "bf16", "fp32")
    supported_optimizers: ClassVar[tuple[str, ...]] = ("adamw", "sgd")
    supported_recompute: ClassVar[tuple[str, ...]] = ("none", "selective", "full", "offload")
    supported_attention: ClassVar[tuple[str, ...]] = ("eager", "sdpa", "flash")
    supported_losses: ClassVar[tuple[str, ...]] = ("full", "chunked", "fused")
    supported_quantization: ClassVar[tuple[str, ...]] = ()
    supports_packing: ClassVar[bool] = True
    supports_recompute_interval: ClassVar[bool] = True
    supports_expert_capacity: ClassVar[bool] = False
    """Whether experts may have a capacity factor; otherwise routing is dropless."""
    on_cpu_ranks: ClassVar[Mapping[str, OptionValue]] = MappingProxyType({})
    """Overrides for tiny runs on CPU ranks: fields whose other values need a GPU library -> CPU value."""
    runs_all_forwards_first: ClassVar[bool] = False
    """Whether a pipeline stage runs all forwards of a step before the first backward."""
    trains_pairs: ClassVar[bool] = True
    """Whether its engine trains preference pairs (DPO), whose loss it computes from the logits itself."""
    own_formulas: ClassVar[frozenset[str]] = frozenset()
    """Recipe fields with a framework-specific formula in the memory model."""
    joins_attention_by_heads: ClassVar[bool] = False
    """Whether cp > 1 returns attention's output by heads, so that projections save a copy by tokens."""
    mixes_by_autocast: ClassVar[bool] = False
    """Whether mixed precision casts at each matmul (torch.autocast) instead of once per module."""

    abilities: ClassVar[Mapping[str, Mapping[str, OptionValue]]] = MappingProxyType({"data": {}})
    """Abilities to shard or offload (keys of ``planner/abilities.py``) -> the layout options for each.
    Recipe values are in the ``supported_*`` tuples."""
    choices: ClassVar[Mapping[str, tuple[OptionValue, ...] | None]] = MappingProxyType({})
    """Fields that the user chooses -> their values; None: any divisor of the world size."""

    def list_valid_values(
        self, architecture: Architecture, cluster: Cluster, recipe: Recipe
    ) -> dict[str, list[OptionValue]]:
        """Return the valid values of each field of :attr:`choices`, given the values of earlier fields.

        Later fields may have to change for them; :meth:`find_nearest_valid` computes their values.
        """
        valid_values: dict[str, list[OptionValue]] = {}
        # Start with the defaults and set one field after the other, so that each field's values are those
        # that are valid together with the user's earlier choices.
        layout = type(self)()
        for field, values in self.choices.items():
            valid_values[field] = [
                value
                for value in (list_divisors(cluster.num_gpus) if values is None else values)
                if layout._is_valid_with(field, value, architecture, cluster, recipe)
            ]
            layout = replace_fields(layout, {field: getattr(self, field)})
        return valid_values

    def find_nearest_valid(
        self, wanted: Mapping[str, object], architecture: Architecture, cluster: Cluster, recipe: Recipe
    ) -> Layout:
        """Return the valid layout nearest to ``wanted``; earlier fields of :attr:`choices` have priority."""
        layout = type(self)()
        for field, values in self.choices.items():
            if field not in wanted:
                continue
            # If the wanted degree is invalid, fall back to the next smaller divisor of the world size.
            degree = wanted[field]
            candidates = [degree]
            if values is None and isinstance(degree, int):
                lower = [divisor for divisor in list_divisors(cluster.num_gpus) if divisor < degree]
                candidates += reversed(lower)
            for value in candidates:
                if layout._is_valid_with(field, value, architecture, cluster, recipe):
                    layout = replace_fields(layout, {field: value})
                    break
        # Raises ValueError if even the defaults are invalid on this cluster.
        layout.compute_degrees(architecture, cluster, recipe)
        return layout

    def _is_valid_with(
        self, field: str, value: object, architecture: Architecture, cluster: Cluster, recipe: Recipe
    ) -> bool:
        try:
            # Without the search for complete fixes, which would only cost time here.
            with without_fix_search():
                replace_fields(self, {field: value}).compute_degrees(architecture, cluster, recipe)
        except ValueError:
            return False
        return True

    def compute_degrees(self, architecture: Architecture, cluster: Cluster, recipe: Recipe) -> Degrees:
        """Return all degrees on this cluster. Raises ``ValueError`` for an invalid combination."""
        raise TypeError(f"{type(self).__name__} has no framework: use Layout.ddp(), .fsdp2(), ...")

    def fill_degrees(self, left: int) -> Degrees:
        """Return all degrees, where ``left`` ranks remain for those not given.

        Arithmetic that broadcasts: a search over many layouts passes an array of ranks.
        """
        raise TypeError(f"{type(self).__name__} has no framework: use Layout.ddp(), .fsdp2(), ...")

    def resolve_options(self, architecture: Architecture, cluster: Cluster, recipe: Recipe) -> Layout:
        """Return this layout with values for the open options that the framework needs."""
        return self

    def stage_layers(self, architecture: Architecture, degrees: Degrees) -> list[int]:
        """Return the number of decoder layers on each pipeline stage, first to last."""
        return split_layers_evenly(architecture.num_hidden_layers, degrees.pp)

    def check_together(self, architecture: Architecture, recipe: Recipe, degrees: Degrees) -> None:
        """Raise ``ValueError`` for combinations of valid fields that the framework's code rejects."""

    @property
    def supports_dora(self) -> bool:
        """Return whether peft's DoRA finds whole matrices in forward, and the memory model has formulas."""
        return False

    @property
    def keeps_frozen_inputs(self) -> bool:
        """Return whether frozen projections save their inputs although they need no weight gradient."""
        return False

    @property
    def splits_sequence(self) -> bool:
        """Return whether tensor-parallel ranks shard norms and residuals along the sequence."""
        return False

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel degree inside an expert: that of the other layers, in most frameworks."""
        tp: int = getattr(self, "tp", 1)
        return tp

    @property
    def offloaded(self) -> tuple[str, ...]:
        """Training state outside of the GPUs' memory, as text for the Studio: ``parameters on CPU``."""
        return ()

    @property
    def description(self) -> str:
        """The framework and this layout's distinctive options, as text for the Studio."""
        return self.title

    @property
    def full_description(self) -> str:
        """Return the description with all degrees above one, by which plans differ: ``FSDP2 (tp 8)``."""
        text = self.description
        degrees = [f"{name} {getattr(self, name, 1)}" for name in _DEGREES if getattr(self, name, 1) > 1]
        # Some descriptions have degrees already: "Megatron-core (tp 8, pp 2)".
        missing = [degree for degree in degrees if degree not in re.findall(r"[a-z]+ \d+", text)]
        if not missing:
            return text
        # Into the parentheses that there are, not into a second pair.
        more = ", ".join(missing)
        return f"{text[:-1]}, {more})" if text.endswith(")") else f"{text} ({more})"

    @staticmethod
    @check_keywords
    def ddp() -> Layout:
        """Create a layout for PyTorch DistributedDataParallel: full replicas, gradients all-reduced."""
        # The class is in ``frameworks/``, which imports this module: it is looked up in the registry at the
        # call.
        return _create_layout("ddp")

    @staticmethod
    @check_keywords
    def fsdp2(
        shard: int | None = None,
        replicate: int = 1,
        reshard_after_forward: bool | int = True,
        tp: int = 1,
        pp: int = 1,
        vpp: int = 1,
        cp: int = 1,
        offload: Literal["cpu"] | None = None,
        pipeline_schedule: Literal["1F1B", "GPipe"] = "1F1B",
    ) -> Layout:
        """Create a layout for PyTorch ``fully_shard``: sharded state, all-gathered layer by layer."""
        return _create_layout(
            "fsdp2",
            shard=shard,
            replicate=replicate,
            reshard_after_forward=reshard_after_forward,
            tp=tp,
            pp=pp,
            vpp=vpp,
            cp=cp,
            offload=offload,
            pipeline_schedule=pipeline_schedule,
        )

    @staticmethod
    def zero(
        stage: int = 3,
        tp: int = 1,
        pp: int = 1,
        ep: int = 1,
        offload_optimizer: Literal["cpu", "nvme"] | None = None,
        offload_params: Literal["cpu", "nvme"] | None = None,
        **options: int | bool | str | None,
    ) -> Layout:
        """Create a layout for DeepSpeed ZeRO.

        Stage 0 partitions nothing, 1 the optimizer states, 2 the gradients too, 3 the parameters too.
        ``options`` are buckets, thresholds and types, ZeRO++ included, in DeepSpeed's spelling
        (``reduce_bucket_size=...``, ``zero_hpz_partition_size=...``).
        """
        return _create_layout(
            "deepspeed",
            stage=stage,
            tp=tp,
            pp=pp,
            ep=ep,
            offload_optimizer=offload_optimizer,
            offload_params=offload_params,
            **options,
        )

    @staticmethod
    @check_keywords
    def megatron(
        tp: int = 1,
        pp: int = 1,
        vpp: int = 1,
        cp: int = 1,
        ep: int = 1,
        sequence_parallel: bool | None = None,
        distributed_optimizer: bool = True,
        etp: int | None = None,
        grad_reduce_in_fp32: bool | None = None,
        use_precision_aware_optimizer: bool = False,
        exp_avg_dtype: str = "fp32",
        exp_avg_sq_dtype: str = "fp32",
        cross_entropy_fusion_impl: str = "native",
        overlap_grad_reduce: bool = False,
        overlap_param_gather: bool = False,
        tp_comm_overlap: bool = False,
    ) -> Layout:
        """Create a layout for Megatron-core: tensor, pipeline, context and expert parallelism.

        ``sequence_parallel=None`` enables it if tp > 1. ``etp`` is the tensor-parallel degree inside an
        expert; None: ``tp``. ``grad_reduce_in_fp32=None`` enables it unless weights are in fp16. All other
        options have their meaning in megatron-core.
        """
        return _create_layout(
            "megatron",
            tp=tp,
            pp=pp,
            vpp=vpp,
            cp=cp,
            ep=ep,
            sequence_parallel=sequence_parallel,
            distributed_optimizer=distributed_optimizer,
            etp=etp,
            grad_reduce_in_fp32=grad_reduce_in_fp32,
            use_precision_aware_optimizer=use_precision_aware_optimizer,
            exp_avg_dtype=exp_avg_dtype,
            exp_avg_sq_dtype=exp_avg_sq_dtype,
            cross_entropy_fusion_impl=cross_entropy_fusion_impl,
            overlap_grad_reduce=overlap_grad_reduce,
            overlap_param_gather=overlap_param_gather,
            tp_comm_overlap=tp_comm_overlap,
        )

    def to_dict(self) -> dict[str, object]:
        """Return all fields and the name of the framework that they belong to."""
        # Field names repeat between frameworks, so a stored layout must name its class.
        return {"framework": self.framework, **super().to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Self:
        """Create the layout from :meth:`to_dict`'s output, of the framework that it names."""
        from shardscope.frameworks.registry import frameworks

        check_mapping("Layout", data)
        fields = dict(data)
        name = check_choice("Layout.framework", fields.pop("framework", None), list(frameworks))
        layout_class = frameworks[name].layout_class
        check_keys("Layout", fields, layout_class.__dataclass_fields__)
        layout = layout_class(**fields)
        if not isinstance(layout, cls):
            refuse("Layout.framework", name, repr(cls.framework), Value(cls.framework))
        return layout

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Create the layout from :meth:`to_json`'s output, of the framework that it names."""
        from shardscope.core.serialization import parse_text

        return parse_text(text, "Layout", cls.from_dict)

    def to_json(self) -> str:
        """Return one JSON object with the fields and ``framework``, the name of the framework."""
        import json

        from shardscope.core.serialization import FORMAT_VERSION

        return json.dumps({"shardscope": "Layout", "version": FORMAT_VERSION, **self.to_dict()}, indent=2)


def _create_layout(framework: str, **options: OptionValue) -> Layout:
    from shardscope.frameworks.registry import frameworks

    return frameworks[framework].layout_class(**options)


def check_degrees(layout: Layout, *fields: str, low: int = 1, high: int = MAX_DEGREE) -> None:
    """Raise ``ValueError`` for fields outside ``low..high``. Numpy integers become Python ints."""
    for field in fields:
        value, default = getattr(layout, field), getattr(type(layout), field)
        number = check_integer(f"Layout.{field}", value, low=low, high=high, default=default)
        object.__setattr__(layout, field, number)


def compute_remaining_ranks(world_size: int, **degrees: int) -> int:
    """Return the data-parallel degree: the world size divided by all given degrees.

    Raises ``ValueError`` if the degrees do not divide the world size.
    """
    product = prod(degrees.values())
    if world_size % product:
        refuse(
            f"Layout {' x '.join(degrees)}",
            " x ".join(str(value) for value in degrees.values()) + f" = {product}",
            f"a divisor of the world size, {world_size} ranks",
            _shrink_to_divisor(world_size, degrees),
        )
    return world_size // product


def check_heads(architecture: Architecture, tp: int, shares_key_value_heads: bool = False) -> None:
    """Raise ``ValueError`` for a tp that does not divide the numbers of query and key/value heads.

    ``shares_key_value_heads``: several ranks may hold the same key/value head.
    """
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(architecture, field)
        # megatron-core 0.16, transformer_config.py: num_query_groups must be a multiple or a divisor of the
        # tensor-parallel size; with fewer groups than ranks, several ranks hold the same one.
        shares = shares_key_value_heads and field == "num_key_value_heads"
        # Latent attention expands one compressed vector to keys and values of every query head.
        if architecture.latent_attention is not None and field == "num_key_value_heads":
            continue
        if heads % tp and not (shares and tp % heads == 0):
            refuse(
                "Layout.tp",
                tp,
                f"a divisor {'or a multiple ' if shares else ''}of {architecture.name}'s {field}={heads}",
                {"tp": find_largest_divisor(heads, tp)},
            )


def check_layers(architecture: Architecture, pp: int, vpp: int = 1) -> None:
    """Raise ``ValueError`` for more pipeline chunks (stages and virtual stages) than layers."""
    layers = architecture.num_hidden_layers
    if pp * vpp > layers:
        refuse(
            "Layout.pp",
            pp if vpp == 1 else f"{pp} with vpp={vpp}",
            f"at most {layers} chunks, one for each layer of {architecture.name}",
            {"pp": max(1, layers // vpp)},
        )


def check_experts(architecture: Architecture, ep: int, data_parallel: int) -> None:
    """Raise ``ValueError`` for an ep without experts, or one that does not divide experts and ranks."""
    if ep == 1:
        return
    experts = architecture.mixture_of_experts
    if experts is None:
        refuse("Layout.ep", ep, f"1, because {architecture.name} has no experts", {"ep": 1})
    if experts.num_experts % ep:
        refuse(
            "Layout.ep",
            ep,
            f"a divisor of {architecture.name}'s num_experts={experts.num_experts}",
            {"ep": find_largest_divisor(experts.num_experts, ep)},
        )
    # Expert-parallel groups partition the data-parallel ranks.
    if data_parallel % ep:
        refuse(
            "Layout.ep",
            ep,
            f"a divisor of the {data_parallel} data-parallel ranks",
            {"ep": find_largest_divisor(data_parallel, ep)},
        )


def check_context(recipe: Recipe, cp: int) -> None:
    """Raise ``ValueError`` unless 2 * cp divides seq_len.

    Each rank has two equal chunks, from the head and the tail of the sequence, to balance causal attention.
    """
    # torch 2.13, distributed/tensor/experimental/_context_parallel/_load_balancer.py, _HeadTailLoadBalancer;
    # megatron-core 0.16, core/utils.py, get_batch_on_this_cp_rank: both view the sequence as 2 * cp chunks.
    if cp > 1 and recipe.seq_len % (2 * cp):
        shared = gcd(recipe.seq_len // 2, cp) if recipe.seq_len % 2 == 0 else 1
        longer = -(-recipe.seq_len // (2 * cp)) * 2 * cp
        refuse(
            "Layout.cp",
            cp,
            f"a degree whose double divides seq_len={recipe.seq_len}",
            {"cp": shared} if shared > 1 else {"seq_len": longer},
        )


def split_layers_evenly(num_layers: int, pp: int) -> list[int]:
    """Return the layers on each stage, as even as possible; the first stages get the remainder."""
    base, extra = divmod(num_layers, pp)
    return [base + (stage < extra) for stage in range(pp)]


def list_divisors(number: int) -> list[int]:
    """Return all divisors in ascending order."""
    # Divisors come in pairs around the square root, which is its own partner if it is whole.
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def find_largest_divisor(number: int, at_most: int) -> int:
    """Return the largest divisor of ``number`` that is at most ``at_most``."""
    return next(d for d in range(min(number, at_most), 0, -1) if number % d == 0)


def _shrink_to_divisor(world_size: int, degrees: Mapping[str, int]) -> dict[str, int]:
    """Return the degrees, each reduced in turn to a divisor of the ranks that remain."""
    ranks_left, divisors = world_size, {}
    for name, value in degrees.items():
        divisors[name] = find_largest_divisor(ranks_left, value)
        ranks_left //= divisors[name]
    return divisors
