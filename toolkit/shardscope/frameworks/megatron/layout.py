"""Megatron-core layout: options, parallel degrees and pipeline split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, cast, get_args

from shardscope.core.errors import FieldError, check_choice, check_flag, refuse
from shardscope.core.fixes import suggest_complete_fixes
from shardscope.core.layout import (
    Degrees,
    Layout,
    OptionValue,
    check_context,
    check_degrees,
    check_experts,
    check_heads,
    check_layers,
    compute_remaining_ranks,
    list_divisors,
)
from shardscope.core.number_format import format_count
from shardscope.core.ops import group_equal, maximum, where
from shardscope.frameworks.megatron.families import check_family
from shardscope.frameworks.megatron.pipeline_split import can_split_pipeline, split_pipeline

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.cluster import Cluster
    from shardscope.core.plan import Plan
    from shardscope.core.recipe import Recipe


MomentType = Literal["fp32", "bf16", "fp16", "fp8"]
"""Dtypes of a moment in megatron-core's precision-aware optimizer."""


@suggest_complete_fixes
@dataclass(frozen=True, kw_only=True)
class MegatronLayout(Layout):
    """Megatron-core (Shoeybi et al. 2019, Narayanan et al. 2021, Korthikanti et al. 2022)."""

    framework: ClassVar[str] = "megatron"
    title: ClassVar[str] = "Megatron-core"
    default_kernels: ClassVar[str] = "megatron"
    supported_kernels: ClassVar[tuple[str, ...]] = ("megatron",)
    supported_methods: ClassVar[tuple[str, ...]] = ("full",)
    supported_optimizers: ClassVar[tuple[str, ...]] = ("adamw", "sgd")
    """megatron-core 0.16 raises for every other name (``optimizer/__init__.py``). Its Muon needs another
    package, ``emerging_optimizers``, and no distributed optimizer (``optimizer/muon.py``): no formula yet."""
    supported_precisions: ClassVar[tuple[str, ...]] = (
        "bf16-mixed",
        "fp16-mixed",
        "fp8-mixed",
        "bf16",
        "fp32",
    )
    supported_attention: ClassVar[tuple[str, ...]] = ("flash", "eager")
    supported_losses: ClassVar[tuple[str, ...]] = ("full", "fused")
    supports_expert_capacity: ClassVar[bool] = True
    own_formulas: ClassVar[frozenset[str]] = frozenset({"dropout", "expert_imbalance"})
    supported_recompute: ClassVar[tuple[str, ...]] = ("none", "selective", "full")
    supports_packing: ClassVar[bool] = False
    trains_pairs: ClassVar[bool] = False
    supports_recompute_interval: ClassVar[bool] = False
    """``recompute_num_layers`` counts layers of a chunk, or the first layers, not every n-th layer."""
    on_cpu_ranks: ClassVar[Mapping[str, OptionValue]] = MappingProxyType({
        "tp_comm_overlap": False,
        "use_precision_aware_optimizer": False,
        "exp_avg_dtype": "fp32",
        "exp_avg_sq_dtype": "fp32",
    })  # fmt: skip
    abilities: ClassVar[Mapping[str, Mapping[str, OptionValue]]] = MappingProxyType({
        "data": {},
        "zero_1": {"distributed_optimizer": True},
        "tensor": {"tp": 2},
        "sequence": {"tp": 2},  # sequence_parallel is on wherever tp > 1.
        "pipeline": {"pp": 2},
        "interleaved": {"pp": 2, "vpp": 2},
        "context": {"cp": 2},
        "expert": {"ep": 2},
    })  # fmt: skip
    choices: ClassVar[Mapping[str, tuple[OptionValue, ...] | None]] = MappingProxyType({
        "tp": None,
        "pp": None,
        "vpp": None,
        "cp": None,
        "ep": None,
        "etp": (None, 1),
        "sequence_parallel": (True, False),
        "distributed_optimizer": (True, False),
    })  # fmt: skip

    tp: int = 1
    """Tensor-parallel degree."""
    pp: int = 1
    """Pipeline stages."""
    vpp: int = 1
    """Model chunks a stage (interleaved schedule); needs pp > 1."""
    cp: int = 1
    """Context-parallel degree."""
    ep: int = 1
    """Ranks over which the experts are sharded; taken from data x context parallel."""
    etp: int | None = None
    """Tensor-parallel degree inside an expert; ``None``: ``tp``."""
    sequence_parallel: bool | None = None
    """Split norms and residuals along the sequence within tp; ``None``: whenever tp > 1."""
    distributed_optimizer: bool = True
    """Split the optimizer's state over the data-parallel ranks."""
    grad_reduce_in_fp32: bool | None = None
    """Accumulate and reduce gradients in fp32; ``None``: unless weights are fp16, as Megatron-LM does.
    ``False`` is its ``--grad-reduce-in-bf16``, which Megatron-Bridge's fast recipes choose."""
    use_precision_aware_optimizer: bool = False
    """Transformer Engine's Adam has the main weights and reads gradients in their own dtype. For bf16 weights
    it stores only the lower 16 bits of main weights (``store_param_remainders``)."""
    exp_avg_dtype: MomentType = "fp32"
    """Dtype of the first moment; a dtype other than fp32 needs ``use_precision_aware_optimizer``."""
    exp_avg_sq_dtype: MomentType = "fp32"
    """Dtype of the second moment."""
    cross_entropy_fusion_impl: Literal["native", "te"] = "native"
    """Kernel of a fused loss: Transformer Engine's writes the gradient over the logits."""
    overlap_grad_reduce: bool = False
    """Reduce gradients bucket by bucket during the last backward."""
    overlap_param_gather: bool = False
    """All-gather updated weights during the next forward; needs ``overlap_grad_reduce``. With ``pp`` and
    without ``vpp``, the first micro-batch waits for the all-gathers of all stages, one after another."""
    tp_comm_overlap: bool = False
    """Transformer Engine's user buffers: tensor-parallel collectives in chunks, overlapped with the
    matmuls next to them; needs sequence parallelism."""

    def __post_init__(self) -> None:
        check_degrees(self, "tp", "pp", "vpp", "cp", "ep")
        if self.etp is not None:
            check_degrees(self, "etp")
        check_flag("Layout.distributed_optimizer", self.distributed_optimizer)
        if self.sequence_parallel is not None:
            check_flag("Layout.sequence_parallel", self.sequence_parallel)
        self._check_optimizer()
        if self.sequence_parallel and self.tp == 1:
            refuse("Layout.sequence_parallel", True, "False or None while tp=1", {"sequence_parallel": None})
        if self.vpp > 1 and self.pp == 1:
            refuse("Layout.vpp", self.vpp, "1 while pp=1", {"vpp": 1})
        self._check_overlap()

    def _check_overlap(self) -> None:
        """Raise ``ValueError`` for overlap options that megatron-core asserts against.

        Source: model_parallel_config.py, distributed_data_parallel_config.py.
        """
        for name in ("overlap_grad_reduce", "overlap_param_gather", "tp_comm_overlap"):
            check_flag(f"Layout.{name}", getattr(self, name))
        if self.overlap_param_gather and not (self.overlap_grad_reduce and self.distributed_optimizer):
            refuse(
                "Layout.overlap_param_gather",
                True,
                "False unless overlap_grad_reduce=True and distributed_optimizer=True",
                {"overlap_grad_reduce": True},
            )
        if self.tp_comm_overlap and not self.splits_sequence:
            refuse(
                "Layout.tp_comm_overlap",
                True,
                "False without sequence parallelism (tp > 1)",
                {"tp_comm_overlap": False},
            )

    def _check_optimizer(self) -> None:
        """Raise ``ValueError`` where OptimizerConfig asserts (core/optimizer/optimizer_config.py)."""
        if self.grad_reduce_in_fp32 is not None:
            check_flag("Layout.grad_reduce_in_fp32", self.grad_reduce_in_fp32)
        check_flag("Layout.use_precision_aware_optimizer", self.use_precision_aware_optimizer)
        aware = self.use_precision_aware_optimizer
        if aware and not self.distributed_optimizer:
            refuse(
                "Layout.use_precision_aware_optimizer",
                True,
                "False without the distributed optimizer",
                {"distributed_optimizer": True},
            )
        check_choice("Layout.cross_entropy_fusion_impl", self.cross_entropy_fusion_impl, ("native", "te"))
        for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
            dtype = getattr(self, name)
            check_choice(f"Layout.{name}", dtype, get_args(MomentType))
            if dtype != "fp32" and not aware:
                refuse(
                    f"Layout.{name}",
                    dtype,
                    "'fp32' unless use_precision_aware_optimizer=True",
                    {"use_precision_aware_optimizer": True},
                )

    @property
    def splits_sequence(self) -> bool:
        """Return whether sequence parallelism is on."""
        return self.tp > 1 if self.sequence_parallel is None else self.sequence_parallel

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel degree inside an expert."""
        return self.tp if self.etp is None else self.etp

    def compute_degrees(self, architecture: Architecture, cluster: Cluster, recipe: Recipe) -> Degrees:
        """Return the degrees: data parallelism takes the ranks that tp, pp and cp leave.

        Raises ``ValueError`` for degrees that do not fit the model, the cluster or the recipe.
        """
        check_heads(architecture, self.tp, shares_key_value_heads=True)
        if self.pp * self.vpp > architecture.num_hidden_layers + 2:
            # Embedding and loss may count as a layer each, so the first and the last chunk may have no
            # decoder layer.
            check_layers(architecture, self.pp, self.vpp)
        check_context(recipe, self.cp)
        self.check_attention(cluster, recipe)
        data_parallel = compute_remaining_ranks(cluster.num_gpus, tp=self.tp, pp=self.pp, cp=self.cp)
        self._check_expert_tp(architecture)
        self._check_expert_ranks(architecture, data_parallel * self.cp * self.tp)
        self.check_sequence(architecture, recipe)
        degrees = self.fill_degrees(data_parallel)
        # Called for the error that it raises if the layers cannot be split.
        self.stage_layers(architecture, degrees)
        self.check_micro_batches(recipe, degrees)
        if recipe.precision == "fp8-mixed":
            self.check_fp8(architecture, cluster, recipe)
        return degrees

    def _check_expert_ranks(self, architecture: Architecture, ranks: int) -> None:
        """Raise ``ValueError`` for an ep that does not divide the ``ranks`` of a stage, divided by etp."""
        experts, left = architecture.mixture_of_experts, ranks // self.expert_tp
        is_split = experts is not None and experts.num_experts % self.ep == 0 and left % self.ep > 0
        # Experts are sliced over tp by default; whole ones leave the ranks of tp to ep.
        if is_split and ranks % self.ep == 0:
            is_default = ", which is tp by default" if self.etp is None else ""
            allowed = (
                f"a divisor of the {format_count(left, 'rank')} that etp={self.expert_tp} leaves{is_default}"
            )
            refuse("Layout.ep", self.ep, allowed, {"etp": 1})
        check_experts(architecture, self.ep, left)

    def fill_degrees(self, left: int) -> Degrees:
        """Return the degrees with ``left`` data-parallel ranks, which shard a distributed optimizer."""
        return Degrees(
            data_parallel=left,
            shard=left if self.distributed_optimizer else 1,
            replicate=1 if self.distributed_optimizer else left,
            tp=self.tp,
            pp=self.pp,
            vpp=self.vpp,
            cp=self.cp,
            ep=self.ep,
        )

    def check_together(self, architecture: Architecture, recipe: Recipe, degrees: Degrees) -> None:
        """Raise ``ValueError`` for combinations that megatron-core 0.16 asserts against.

        They concern families that it has no layers for, the distributed optimizer, megatron-core's own
        attention, and experts with biases.
        """
        check_family(architecture)
        if recipe.optimizer != "adamw" and self.distributed_optimizer:
            refuse(
                "Recipe.optimizer",
                recipe.optimizer,
                "'adamw' with distributed_optimizer=True (megatron-core's supports no other), 'sgd' without",
                {"optimizer": "adamw"},
            )
        if recipe.attention == "eager" and degrees.cp > 1:
            refuse(
                "Recipe.attention",
                "eager",
                f"None or 'flash' with cp={degrees.cp} (megatron-core's own attention asserts cp=1: "
                "dot_product_attention.py)",
                {"attention": None},
            )
        if self.use_precision_aware_optimizer:
            self._check_precision_aware(recipe)
        biases = architecture.attention_output_bias or architecture.mlp_bias
        if architecture.num_moe_layers and biases and self.expert_tp > 1:
            refuse(
                "Layout.etp",
                self.etp,
                f"1 with the biases of {architecture.name} (megatron-core's split experts have none)",
                {"etp": 1},
            )

    def _check_precision_aware(self, recipe: Recipe) -> None:
        if recipe.optimizer != "adamw":
            refuse(
                "Recipe.optimizer",
                recipe.optimizer,
                "'adamw' with use_precision_aware_optimizer=True",
                {"optimizer": "adamw"},
            )
        if recipe.precision not in ("bf16-mixed", "bf16", "fp16-mixed"):
            refuse(
                "Recipe.precision",
                recipe.precision,
                "'bf16-mixed', 'bf16' or 'fp16-mixed' with use_precision_aware_optimizer=True (with fp8 it "
                "depends on the scaling: no formula)",
                {"precision": "bf16-mixed"},
            )

    def stage_layers(self, architecture: Architecture, degrees: Degrees) -> list[int]:
        """Return the layers of each stage; see :func:`split_pipeline`.

        Raises ``ValueError`` if they cannot be split.
        """
        layers = architecture.num_hidden_layers
        if degrees.pp == 1:
            return [layers]
        try:
            return list(split_pipeline(layers, degrees.pp, degrees.vpp).stages)
        except LookupError:
            raise self._make_split_error(layers, degrees) from None

    def _make_split_error(self, layers: int, degrees: Degrees) -> FieldError:
        # Suggest the nearest pp and vpp that split the layers, with one of the two unchanged if possible. pp
        # must divide the ranks.
        pp, vpp = min(
            (
                (pp, vpp)
                for pp in list_divisors(degrees.pp * degrees.data_parallel)
                for vpp in range(1, layers + 1 if pp > 1 else 2)
                if can_split_pipeline(layers, pp, vpp)
            ),
            key=lambda degree_pair: (
                degree_pair[0] != degrees.pp and degree_pair[1] != degrees.vpp,
                abs(degree_pair[0] - degrees.pp),
                abs(degree_pair[1] - degrees.vpp),
            ),
        )
        suggested = {"pp": pp, "vpp": vpp}
        changed = {name: size for name, size in suggested.items() if size != getattr(degrees, name)}
        return FieldError(
            "Layout.pp",
            degrees.pp if degrees.vpp == 1 else f"{degrees.pp} with vpp={degrees.vpp}",
            f"stages that divide {layers} layers, or {layers + 1} or {layers + 2} "
            "with loss and embedding counted as a layer each, or, with vpp=1, equal stages between the first "
            "and the last one",
            changed,
        )

    def _check_expert_tp(self, architecture: Architecture) -> None:
        if self.etp is None:
            return
        if architecture.mixture_of_experts is None:
            refuse("Layout.etp", self.etp, f"None: {architecture.name} has no experts", {"etp": None})
        if self.tp % self.etp:
            refuse("Layout.etp", self.etp, f"a divisor of tp={self.tp}", {"etp": gcd(self.etp, self.tp)})

    def check_sequence(self, architecture: Architecture, recipe: Recipe) -> None:
        """Raise ``ValueError`` if the sequence cannot be sharded, or if experts need it sharded."""
        if self.tp > 1 and not self.splits_sequence and architecture.num_moe_layers:
            refuse(
                "Layout.sequence_parallel",
                False,
                "True or None with experts and tp > 1 (without it megatron-core's MoELayer does not train)",
                {"sequence_parallel": True},
            )
        tokens = recipe.seq_len // self.cp
        if self.splits_sequence and tokens % self.tp:
            divisor = gcd(tokens, self.tp)
            # The nearest fix: fewer ranks if they have a common divisor, else the next longer sequence.
            longer = -(-recipe.seq_len // (self.tp * self.cp)) * self.tp * self.cp
            refuse(
                "Layout.tp",
                self.tp,
                f"a divisor of the {tokens} tokens a rank sees (sequence parallel)",
                {"tp": divisor} if divisor > 1 else {"seq_len": longer},
            )

    def check_attention(self, cluster: Cluster, recipe: Recipe) -> None:
        """Raise ``ValueError`` for fused attention, or context parallelism, before Ampere and in fp32.

        Transformer Engine's kernels for both need sm80 and 16 bits
        (attention/dot_product_attention/utils.py, ``get_attention_backend``): without, it takes unfused
        operators, which have no context parallelism.
        """
        gpu, kernels = cluster.gpu, "attention, whose kernels for it need"
        if gpu.vendor == "cpu" or (gpu.has_flash_attention and recipe.precision != "fp32"):
            return
        if recipe.attention == "flash":
            where = "in fp32" if gpu.has_flash_attention else f"on {gpu.name}"
            needed = "computes in 16 bits" if gpu.has_flash_attention else "begins with Ampere"
            allowed = f"None or 'eager' {where}: FlashAttention {needed}"
            refuse("Recipe.attention", "flash", allowed, {"attention": None})
        if self.cp == 1:
            return
        if gpu.has_flash_attention:
            refuse(
                "Recipe.precision",
                "fp32",
                "'bf16-mixed', 'fp16-mixed', 'bf16' with cp > 1 and Megatron-core: its context parallelism "
                f"is Transformer Engine's {kernels} 16 bits; fsdp2 trains it in fp32",
                {"precision": "bf16-mixed"},
            )
        refuse(
            "Layout.cp",
            self.cp,
            f"1 with Megatron-core on {gpu.name}: its context parallelism is Transformer Engine's {kernels} "
            "Ampere (sm80) or newer; fsdp2 needs none of it",
            {"cp": 1},
        )

    def check_micro_batches(self, recipe: Recipe, degrees: Degrees) -> None:
        """Raise ``ValueError`` unless the interleaved schedule gets a multiple of pp micro-batches."""
        # 0 micro-batches: the global batch is too small, which the plan itself reports.
        per_step = recipe.micro_batch_size * degrees.data_parallel
        micro_batches = recipe.global_batch_size // per_step
        if degrees.vpp > 1 and micro_batches and micro_batches % degrees.pp:
            refuse(
                "Recipe.global_batch_size",
                recipe.global_batch_size,
                f"micro-batches in multiples of pp={degrees.pp} with the interleaved schedule",
                {"global_batch_size": -(-micro_batches // degrees.pp) * degrees.pp * per_step},
            )

    def check_fp8(self, architecture: Architecture, cluster: Cluster, recipe: Recipe) -> None:
        """Raise ``ValueError`` for token counts and widths that fp8 matmuls do not support."""
        # Imported here: fp8.py imports the memory formulas, and a module-level import would be circular.
        from shardscope.frameworks.megatron.fp8 import check_fp8

        parts = self.cp * (self.tp if self.splits_sequence else 1)
        tokens = recipe.micro_batch_size * (recipe.seq_len // parts)
        check_fp8(architecture, cluster, recipe, tokens, self.tp)

    @property
    def description(self) -> str:
        """Display name with the degrees above one."""
        named = [
            f"{name} {getattr(self, name)}" for name in ("tp", "pp", "cp", "ep") if getattr(self, name) > 1
        ]
        return "Megatron-core" + (f" ({', '.join(named)})" if named else "")


def get_layout(plan: Plan) -> MegatronLayout:
    """Return the plan's layout with its type; in a batch of plans it has columns in place of numbers."""
    return cast("MegatronLayout", plan.layout)


class Replicas(NamedTuple):
    """Ranks that reduce the same gradients; the distributed optimizer shards its state over them."""

    dense: int
    experts: int


def count_replicas(plan: Plan) -> Replicas:
    """Return the replicas of dense weights (data x context parallel ranks) and of experts.

    With ep > 1 an expert has fewer replicas than a dense weight: the other ranks have other experts. With
    ep 1 experts are in the dense weights' buffers (tensor_parallel/layers.py, "allreduce").
    """
    degrees, layout = plan.degrees, get_layout(plan)
    dense = group_equal(degrees.data_parallel * degrees.cp)
    fewer = maximum(1, dense * degrees.tp // (degrees.ep * layout.expert_tp))
    return Replicas(dense, where(degrees.ep > 1, fewer, dense))
