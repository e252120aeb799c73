"""How to spread a model: a framework and its degrees. Each framework's own fields live in its folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import gcd, isqrt
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from shardscope.core.errors import known_keys, one_of, refuse, whole_number
from shardscope.core.fixes import as_it_is, known_arguments
from shardscope.core.serialization import JsonNoun

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.cluster import Cluster
    from shardscope.core.recipe import Recipe

MAX_DEGREE = 2**20


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """A layout's degrees once the cluster is known: their product is the world size."""

    data_parallel: int
    """Ranks (or groups of them) that see different sequences: ``shard * replicate``."""
    shard: int = 1
    """Ranks over which training state is split."""
    replicate: int = 1
    """Copies of that sharded state (HSDP)."""
    tp: int = 1
    """Tensor-parallel ranks that split each matrix."""
    pp: int = 1
    """Pipeline stages."""
    vpp: int = 1
    """Model chunks on each pipeline stage (interleaved schedule)."""
    cp: int = 1
    """Context-parallel ranks that split each sequence."""
    ep: int = 1
    """Ranks that share out the experts; taken from the data-parallel ranks."""


@dataclass(frozen=True, kw_only=True)
class Layout(JsonNoun):
    """A framework and its degrees; made by ``Layout.ddp()``, ``.fsdp2()``, ``.zero()``, ``.megatron()``.

    Degrees that are not given are derived from the cluster when the ``Plan`` is made.
    """

    framework: ClassVar[str] = ""
    """The registry's name: ``ddp``, ``fsdp2``, ``deepspeed`` or ``megatron``."""
    title: ClassVar[str] = ""
    """The name that people read."""
    default_kernels: ClassVar[str] = "transformers"
    """Whose modules run when ``Recipe.kernels`` is None."""
    # What the framework can run of a recipe, and the memory model has a formula for: prediction/support.py.
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
    """Whether experts can have room for so many tokens only; otherwise they are dropless."""
    on_cpu_ranks: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Fields whose other values need a library of GPUs, and what a tiny run on CPU ranks has instead."""
    runs_all_forwards_first: ClassVar[bool] = False
    """Whether a pipeline stage computes all micro-batches of a step before the first goes backward."""
    own_formulas: ClassVar[frozenset[str]] = frozenset()
    """Fields of the recipe for which this framework's memory model has a formula of its own."""
    joins_attention_by_heads: ClassVar[bool] = False
    """Whether cp > 1 leaves attention's output by heads, of which projections then keep a copy by tokens."""
    mixes_by_autocast: ClassVar[bool] = False
    """Mixed precision casts at each matrix product (torch.autocast) instead of once for a whole module."""

    abilities: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({"data": {}})
    """What this framework can split or offload (names of ``planner/abilities.py``) -> the options. What a
    recipe asks for is in the ``supported_*`` tuples."""
    choices: ClassVar[Mapping[str, tuple[Any, ...] | None]] = MappingProxyType({})
    """Fields that a person chooses, and their values; None: any degree that divides the world size."""

    def offered(self, architecture: Architecture, cluster: Cluster, recipe: Recipe) -> dict[str, list[Any]]:
        """For each field of :attr:`choices`, the values that can run with the fields before it as they are.

        Fields after it may have to give way: :meth:`fitted` says to what.
        """
        found: dict[str, list[Any]] = {}
        layout = type(self)()
        for field, values in self.choices.items():
            found[field] = [
                value
                for value in (divisors(cluster.num_gpus) if values is None else values)
                if layout._runs(field, value, architecture, cluster, recipe)
            ]
            layout = replace(layout, **{field: getattr(self, field)})
        return found

    def fitted(
        self, wanted: Mapping[str, Any], architecture: Architecture, cluster: Cluster, recipe: Recipe
    ) -> Layout:
        """A layout of this framework as near to ``wanted`` as can run, first fields first."""
        layout = type(self)()
        for field, values in self.choices.items():
            if field not in wanted:
                continue
            candidates: list[Any] = [wanted[field]]
            if values is None:
                lower = [value for value in divisors(cluster.num_gpus) if value < wanted[field]]
                candidates += reversed(lower)
            for value in candidates:
                if layout._runs(field, value, architecture, cluster, recipe):
                    layout = replace(layout, **{field: value})
                    break
        layout.degrees(architecture, cluster, recipe)
        return layout

    def _runs(self, field: str, value: Any, arch: Architecture, cluster: Cluster, recipe: Recipe) -> bool:
        try:
            with as_it_is():
                replace(self, **{field: value}).degrees(arch, cluster, recipe)
        except ValueError:
            return False
        return True

    def degrees(self, architecture: Architecture, cluster: Cluster, recipe: Recipe) -> Degrees:
        """All degrees on this cluster. Raises ``ValueError`` where they cannot run."""
        raise TypeError(f"{type(self).__name__} is not a layout of its own: use Layout.ddp(), .fsdp2(), ...")

    def spread(self, left: Any) -> Degrees:
        """All degrees, once ``left`` ranks are left to those that were not given; numbers or arrays."""
        raise TypeError(f"{type(self).__name__} is not a layout of its own: use Layout.ddp(), .fsdp2(), ...")

    def settled(self, architecture: Architecture, cluster: Cluster, recipe: Recipe) -> Layout:
        """This layout with numbers for options that were left open, where the framework needs them."""
        return self

    def stage_layers(self, architecture: Architecture, degrees: Degrees) -> list[int]:
        """Decoder layers on each pipeline stage, first to last."""
        return even_stages(architecture.num_hidden_layers, degrees.pp)

    def check_together(self, architecture: Architecture, recipe: Recipe, degrees: Degrees) -> None:
        """Raise ``ValueError`` for fields that the framework's own code refuses together, each fine alone."""

    @property
    def keeps_frozen_inputs(self) -> bool:
        """Whether projections without gradients of their own keep their inputs all the same."""
        return False

    @property
    def splits_sequence(self) -> bool:
        """Whether norms and residuals are split along the sequence within the tensor-parallel group."""
        return False

    @property
    def description(self) -> str:
        """The framework and what distinguishes this layout, as the Studio's sentence says it."""
        return self.title

    @staticmethod
    @known_arguments
    def ddp() -> Layout:
        """PyTorch DistributedDataParallel: every rank holds everything, gradients are averaged."""
        return _layout_class("ddp")()

    @staticmethod
    @known_arguments
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
        """PyTorch ``fully_shard``: parameters, gradients and optimizer sharded, gathered layer by layer."""
        return _layout_class("fsdp2")(
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
        """DeepSpeed ZeRO: stage 0 shards nothing, 1 the optimizer, 2 gradients too, 3 parameters too.

        ``options`` are its buckets, thresholds and types, and those of ZeRO++, in its own spelling
        (``reduce_bucket_size=...``, ``zero_hpz_partition_size=...``).
        """
        return _layout_class("deepspeed")(
            stage=stage,
            tp=tp,
            pp=pp,
            ep=ep,
            offload_optimizer=offload_optimizer,
            offload_params=offload_params,
            **options,
        )

    @staticmethod
    @known_arguments
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
        """Megatron-core: tensor, pipeline, context, expert parallel. ``sequence_parallel=None``: tp > 1.

        ``etp`` is the tensor-parallel degree inside an expert; None: ``tp``. The others are megatron-core's
        own options of the same names; ``grad_reduce_in_fp32=None``: unless weights are in fp16.
        """
        return _layout_class("megatron")(
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

    def to_dict(self) -> dict[str, Any]:
        """Every field, and the framework that gives them their meaning."""
        return {"framework": self.framework, **super().to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The layout that :meth:`to_dict` described, of whichever framework it names."""
        from shardscope.frameworks.registry import frameworks

        fields = dict(data)
        name = one_of("Layout.framework", fields.pop("framework", None), list(frameworks))
        layout_class = frameworks[name].layout_class
        known_keys("Layout", fields, layout_class.__dataclass_fields__)
        made: Any = layout_class(**fields)
        return made  # type: ignore[no-any-return]

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what :meth:`to_json` wrote, whichever framework it names."""
        from shardscope.core.serialization import from_text

        return from_text(text, "Layout", cls.from_dict)

    def to_json(self) -> str:
        """One JSON object; ``framework`` says whose fields these are."""
        import json

        from shardscope.core.serialization import FORMAT_VERSION

        return json.dumps({"shardscope": "Layout", "version": FORMAT_VERSION, **self.to_dict()}, indent=2)


def _layout_class(framework: str) -> Callable[..., Layout]:
    from shardscope.frameworks.registry import frameworks

    return frameworks[framework].layout_class


def check_degrees(layout: Layout, *fields: str, low: int = 1, high: int = MAX_DEGREE) -> None:
    """Refuse fields that are no parallel degree, 1 to 1,048,576; a numpy integer becomes Python's."""
    for field in fields:
        number = whole_number(f"Layout.{field}", getattr(layout, field), low=low, high=high)
        object.__setattr__(layout, field, number)


def left_over_ranks(world_size: int, **degrees: int) -> int:
    """The data-parallel degree that remains once the given degrees have taken their share."""
    taken = 1
    for value in degrees.values():
        taken *= value
    if world_size % taken:
        refuse(
            f"Layout {' x '.join(degrees)}",
            " x ".join(str(value) for value in degrees.values()) + f" = {taken}",
            f"a divisor of the world size, {world_size} GPUs",
            _shrink_to_divisor(world_size, degrees),
        )
    return world_size // taken


def check_heads(architecture: Architecture, tp: int, shares_key_value_heads: bool = False) -> None:
    """Refuse a tp that cannot split the heads (query and key/value heads alike) evenly.

    ``shares_key_value_heads``: several ranks may have the same key/value head.
    """
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(architecture, field)
        shares = shares_key_value_heads and field == "num_key_value_heads"
        if architecture.latent_attention is not None and field == "num_key_value_heads":
            continue
        if heads % tp and not (shares and tp % heads == 0):
            refuse(
                "Layout.tp",
                tp,
                f"a divisor {'or a multiple ' if shares else ''}of {architecture.name}'s {field}={heads}",
                {"tp": largest_divisor(heads, tp)},
            )


def check_layers(architecture: Architecture, pp: int, vpp: int = 1) -> None:
    """Refuse more pipeline chunks than there are layers."""
    layers = architecture.num_hidden_layers
    if pp * vpp > layers:
        refuse(
            "Layout.pp",
            pp if vpp == 1 else f"{pp} with vpp={vpp}",
            f"at most {layers} chunks, one for each layer of {architecture.name}",
            {"pp": max(1, layers // vpp)},
        )


def check_experts(architecture: Architecture, ep: int, data_parallel: int) -> None:
    """Refuse an ep without experts, or one that splits them or the data-parallel ranks unevenly."""
    if ep == 1:
        return
    experts = architecture.mixture_of_experts
    if experts is None:
        refuse("Layout.ep", ep, f"1, for {architecture.name} has no experts", {"ep": 1})
    if experts.num_experts % ep:
        refuse(
            "Layout.ep",
            ep,
            f"a divisor of {architecture.name}'s num_experts={experts.num_experts}",
            {"ep": largest_divisor(experts.num_experts, ep)},
        )
    if data_parallel % ep:
        refuse(
            "Layout.ep",
            ep,
            f"a divisor of the {data_parallel} data-parallel ranks",
            {"ep": largest_divisor(data_parallel, ep)},
        )


def check_context(recipe: Recipe, cp: int) -> None:
    """Refuse a cp that cannot give each rank two equal pieces (head and tail, for causal balance)."""
    if cp > 1 and recipe.seq_len % (2 * cp):
        shared = gcd(recipe.seq_len // 2, cp) if recipe.seq_len % 2 == 0 else 1
        longer = -(-recipe.seq_len // (2 * cp)) * 2 * cp
        refuse(
            "Layout.cp",
            cp,
            f"a degree whose double divides seq_len={recipe.seq_len}",
            {"cp": shared} if shared > 1 else {"seq_len": longer},
        )


def even_stages(num_layers: int, pp: int) -> list[int]:
    """Layers on each stage, as equal as they can be; the first stages take what is left over."""
    base, extra = divmod(num_layers, pp)
    return [base + (stage < extra) for stage in range(pp)]


def divisors(number: int) -> list[int]:
    """All divisors, in rising order."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def largest_divisor(number: int, at_most: int) -> int:
    """The largest divisor of ``number`` that is not above ``at_most``."""
    return next(d for d in range(min(number, at_most), 0, -1) if number % d == 0)


def _shrink_to_divisor(world_size: int, degrees: Mapping[str, int]) -> dict[str, int]:
    """Return the degrees, each reduced in turn to what still divides the world size."""
    room, fitted = world_size, {}
    for name, value in degrees.items():
        fitting = largest_divisor(room, value)
        room //= fitting
        fitted[name] = fitting
    return fitted
