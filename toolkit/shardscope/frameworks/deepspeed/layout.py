"""DeepSpeed ZeRO layout: its options, their checks and the parallel degrees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal, cast

from shardscope.core.errors import check_choice, check_flag, refuse
from shardscope.core.fixes import suggest_complete_fixes
from shardscope.core.layout import (
    Degrees,
    Layout,
    OptionValue,
    check_degrees,
    check_experts,
    check_heads,
    check_layers,
    compute_remaining_ranks,
    find_largest_divisor,
)
from shardscope.core.ops import ceil_div
from shardscope.core.precision import FP32, widths
from shardscope.families.registry import find_family
from shardscope.families.unknown import UnknownFamily

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.cluster import Cluster
    from shardscope.core.plan import Plan
    from shardscope.core.recipe import Recipe

MAX_ELEMENTS = 2**53
"""Largest size of a bucket or buffer: integers up to here are exact in the doubles of JSON."""
MAX_PARAMS_BUFFERS = 2**14
"""Number of buffers at which the search for enough of them stops; more than any model's parameters need."""
_SIZES = {
    "reduce_bucket_size": 1,
    "allgather_bucket_size": 0,
    "sub_group_size": 1,
    "stage3_prefetch_bucket_size": 0,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "offload_optimizer_buffer_count": 4,
    "offload_params_buffer_count": 1,
    "offload_params_buffer_size": 1,
    "offload_params_max_in_cpu": 0,
}
"""Minimum of each option in elements or buffers: Adam's parameter, gradient and two moments need 4 buffers,
and a bucket of 0 elements would never be reduced."""
PREFETCH_BUCKET_SIZE = 50_000_000
"""DeepSpeed's default of ``stage3_prefetch_bucket_size`` (deepspeed/runtime/zero/config.py)."""
NUM_PARAMS_BUFFERS = 5
"""DeepSpeed's default of ``buffer_count`` in ``offload_param`` (deepspeed/runtime/zero/offload_config.py)."""
_OPTIONAL_SIZES = ("stage3_prefetch_bucket_size", "offload_params_buffer_count", "offload_params_buffer_size")


@lru_cache(maxsize=64)
def find_largest_tensor(architecture: Architecture) -> int:
    """Return the number of elements of a model's largest parameter tensor."""
    layers = map(architecture.layer_shapes, range(architecture.num_hidden_layers))
    return max(prod(shape) for shapes in (architecture.outer_shapes, *layers) for _, _, shape in shapes)


QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
"""Options of ZeRO++'s quantized communication (Wang et al. 2023)."""
NVME_VARIABLE = "SHARDSCOPE_NVME_FOLDER"
"""Environment variable with the folder on a fast disk that ranks swap to; default: the run's own folder."""
_NO_MICS = (
    "none: DeepSpeed 0.19 has removed MiCS (runtime/config.py), whose shards within groups of ranks are "
    "Layout.fsdp2(shard=..., replicate=...)"
)
REMOVED: Mapping[str, str] = MappingProxyType({
    "mics_shard_size": _NO_MICS,
    "mics_hierarchical_params_gather": _NO_MICS,
    "zeropp_loco_param": "none: DeepSpeed 0.19 has removed LoCo-Zero++ (runtime/config.py)",
})  # fmt: skip
"""Options of older DeepSpeed releases, with their replacements."""
_NOT_IN_LAYOUT: Mapping[str, str] = MappingProxyType({
    "nvme_path": "none: a folder belongs to a machine, not to a plan. Ranks swap in the run's folder, or in "
    f"the one that the environment variable {NVME_VARIABLE} names",
})  # fmt: skip


@suggest_complete_fixes
@dataclass(frozen=True, kw_only=True)
class ZeroLayout(Layout):
    """DeepSpeed ZeRO stages 0 to 3 (Rajbhandari et al. 2020), with offload (Ren et al. 2021)."""

    framework: ClassVar[str] = "deepspeed"
    title: ClassVar[str] = "DeepSpeed ZeRO"
    # Lion is DeepSpeed's own; 8-bit AdamW is bitsandbytes' and Adafactor torch's, as client optimizers over
    # flat buffers (zero_allow_untested_optimizer). Paged optimizers were never tested with these, and Muon,
    # whose state DeepSpeed partitions differently in each stage, has no formula.
    supported_optimizers: ClassVar[tuple[str, ...]] = ("adamw", "sgd", "adamw_8bit", "adafactor", "lion")
    # AutoTP and experts end at stage 2 here, pipelines at stage 1.
    abilities: ClassVar[Mapping[str, Mapping[str, OptionValue]]] = MappingProxyType({
        "data": {},
        "zero_1": {"stage": 1},
        "zero_2": {"stage": 2},
        "zero_3": {"stage": 3},
        "tensor": {"stage": 2, "tp": 2},
        "pipeline": {"stage": 1, "pp": 2},
        "expert": {"stage": 2, "ep": 2},
        "cpu_offload": {"offload_optimizer": "cpu"},
        "nvme_offload": {"offload_optimizer": "nvme"},
    })  # fmt: skip
    choices: ClassVar[Mapping[str, tuple[OptionValue, ...] | None]] = MappingProxyType({
        "stage": (0, 1, 2, 3),
        "tp": None,
        "pp": None,
        "ep": None,
        "offload_optimizer": (None, "cpu", "nvme"),
        "offload_params": (None, "cpu", "nvme"),
    })  # fmt: skip

    # Two ranks cannot form smaller groups (hpZ), and the quantization kernels are CUDA only.
    on_cpu_ranks: ClassVar[Mapping[str, OptionValue]] = MappingProxyType({
        "zero_hpz_partition_size": 1, **dict.fromkeys(QUANTIZED, False),
    })  # fmt: skip

    stage: int = 3
    """ZeRO stage: 0 shards nothing, 1 the optimizer state, 2 gradients too, 3 parameters too."""
    tp: int = 1
    """Tensor-parallel degree (AutoTP); stages 0 to 2."""
    pp: int = 1
    """Pipeline stages; DeepSpeed's pipeline works with stages 0 and 1."""
    ep: int = 1
    """Expert-parallel degree; stages 0 to 2, without tp."""
    offload_optimizer: Literal["cpu", "nvme"] | None = None
    """Offload target of the optimizer state; stages 1 to 3. NVMe files are in the run's folder, or in the one
    that the environment variable ``SHARDSCOPE_NVME_FOLDER`` names."""
    offload_params: Literal["cpu", "nvme"] | None = None
    """Offload target of the partitioned parameters; stage 3. NVMe files are where the optimizer's are."""
    reduce_bucket_size: int = 500_000_000
    """Elements of gradients that are reduced at once; stages 1 and 2 allocate a whole bucket in backward."""
    allgather_bucket_size: int = 500_000_000
    """Elements of updated weights that stages 1 and 2 all-gather at once, an even number; without effect,
    since torch all-gathers each parameter group in one call."""
    overlap_comm: bool | None = None
    """Whether reductions are overlapped with backward, with a second bucket in stages 1 and 2, where nothing
    overlaps with ``offload_optimizer``. ``None``: in stage 3 only."""
    contiguous_gradients: bool = True
    """Whether gradients are copied into the bucket as they are computed."""
    communication_data_type: Literal["fp32"] | None = None
    """Gradient reduction type. ``None``: the compute type; ``"fp32"``: the sum is rounded once, and twice the
    bytes of half precision are sent."""
    sub_group_size: int = 1_000_000_000
    """Elements that stage 3's optimizer updates at once: fp32 gradients exist for one sub-group at a time."""
    stage3_prefetch_bucket_size: int | None = None
    """Elements that stage 3 prefetches ahead of the running module. ``None``: DeepSpeed's default of
    50,000,000, or 0 where its reads from NVMe would fail with it."""
    stage3_param_persistence_threshold: int = 100_000
    """Largest parameter, in elements, that stage 3 never partitions and releases."""
    stage3_max_live_parameters: int = 1_000_000_000
    """All-gathered elements above which stage 3 does not prefetch."""
    stage3_max_reuse_distance: int = 1_000_000_000
    """Elements used before a parameter's next use, below which stage 3 does not release it."""
    pin_memory: bool = True
    """Whether offloading uses page-locked host buffers."""
    offload_optimizer_buffer_count: int = 4
    """``buffer_count`` of ``offload_optimizer`` on NVMe."""
    offload_params_buffer_count: int | None = None
    """``buffer_count`` of ``offload_param`` on NVMe. ``None``: DeepSpeed's default of 5, or the number of
    parameters that are all-gathered at once if larger, since each needs one."""
    offload_params_buffer_size: int | None = None
    """``buffer_size`` of ``offload_param`` on NVMe, in elements. ``None``: DeepSpeed's default of
    100,000,000, or a rank's partition of the largest tensor if larger: a smaller buffer fails."""
    offload_params_max_in_cpu: int = 1_000_000_000
    """``max_in_cpu`` of ``offload_param`` on NVMe, in elements."""
    zero_hpz_partition_size: int = 1
    """Ranks, usually of one node, that have a second copy of stage 3's weights partitioned over them, so that
    backward all-gathers within the node (ZeRO++'s hpZ, Wang et al. 2023)."""
    zero_quantized_weights: bool = False
    """Whether weights are sent in 8 bits (qwZ); CUDA only, and not predicted."""
    zero_quantized_nontrainable_weights: bool = False
    """Whether frozen weights are stored in 8 bits; CUDA only, and not predicted."""
    zero_quantized_gradients: bool = False
    """Whether gradients are sent in 4 bits (qgZ); CUDA only, and not predicted."""

    def __new__(cls, **options: object) -> ZeroLayout:
        """Create a layout. Raises ``ValueError`` for options removed from DeepSpeed, or set per machine."""
        for name, why in {**REMOVED, **_NOT_IN_LAYOUT}.items():
            if name in options:
                refuse(f"Layout.{name}", options[name], why, f"Layout.zero() without {name}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_degrees(self, "stage", low=0, high=3)
        check_degrees(self, "tp", "pp", "ep", "zero_hpz_partition_size")
        self._check_options()
        for field in ("offload_optimizer", "offload_params"):
            check_choice(f"Layout.{field}", getattr(self, field), (None, "cpu", "nvme"))
        if self.pp > 1 and self.stage > 1:
            refuse(
                "Layout.stage", self.stage, "0 or 1 with pp > 1 (DeepSpeed's pipeline engine)", {"stage": 1}
            )
        if self.pp > 1 and self.overlap_comm:
            why = "None or False with pp > 1: DeepSpeed reduces after backward, and turns it off"
            refuse("Layout.overlap_comm", True, why, {"overlap_comm": None})
        self._check_stage_3()
        check_zeropp(self)
        check_communication(self)
        if self.tp > 1 and self.ep > 1:
            refuse(
                "Layout.ep", self.ep, "1 with tp > 1 (DeepSpeed's AutoTP does not shard experts)", {"ep": 1}
            )
        if self.offload_optimizer and self.stage == 0:
            refuse("Layout.stage", self.stage, "1 to 3 with offload_optimizer", {"stage": 1})
        if self.offload_optimizer == "nvme" and self.stage < 3:
            refuse("Layout.offload_optimizer", "nvme", "None or 'cpu' below stage 3", {"stage": 3})
        if self.offload_params and self.stage < 3:
            refuse("Layout.offload_params", self.offload_params, "None below stage 3", {"stage": 3})

    def _check_options(self) -> None:
        """Raise ``ValueError`` outside of DeepSpeed's ranges (deepspeed/runtime/zero/config.py)."""
        for field, low in _SIZES.items():
            if field in _OPTIONAL_SIZES and getattr(self, field) is None:
                continue
            check_degrees(self, field, low=low, high=MAX_ELEMENTS)
        if self.allgather_bucket_size % 2:
            even = self.allgather_bucket_size + 1
            refuse(
                "Layout.allgather_bucket_size",
                self.allgather_bucket_size,
                "an even number (DeepSpeed aligns all-gathers to 4 bytes)",
                {"allgather_bucket_size": even},
            )
        check_flag("Layout.contiguous_gradients", self.contiguous_gradients)
        check_flag("Layout.pin_memory", self.pin_memory)
        for field in QUANTIZED:
            check_flag(f"Layout.{field}", getattr(self, field))
        check_choice("Layout.overlap_comm", self.overlap_comm, (None, True, False))

    def compute_degrees(self, architecture: Architecture, cluster: Cluster, recipe: Recipe) -> Degrees:
        """Return the degrees; the ranks that tp and pp leave are data parallel, and share the state."""
        check_heads(architecture, self.tp)
        self.check_auto_tp(architecture, recipe)
        check_layers(architecture, self.pp)
        if recipe.optimizer == "lion" and cluster.gpu.vendor == "cpu":
            refuse(
                "Recipe.optimizer",
                "lion",
                "another on CPU ranks: DeepSpeed's FusedLion needs a GPU",
                {"optimizer": "adamw"},
            )
        data_parallel = compute_remaining_ranks(cluster.num_gpus, tp=self.tp, pp=self.pp)
        check_experts(architecture, self.ep, data_parallel)
        if data_parallel % self.zero_hpz_partition_size:
            near = find_largest_divisor(data_parallel, self.zero_hpz_partition_size)
            refuse(
                "Layout.zero_hpz_partition_size",
                self.zero_hpz_partition_size,
                f"a divisor of the {data_parallel} ranks over which stage 3 partitions parameters",
                {"zero_hpz_partition_size": near},
            )
        if self.offload_params == "nvme" and not isinstance(architecture, UnknownFamily):
            self._check_params_buffers(architecture, recipe, data_parallel)
        return self.fill_degrees(data_parallel)

    def fill_degrees(self, left: int) -> Degrees:
        """Return the degrees with ``left`` data-parallel ranks, over which the stage partitions its state."""
        sharded = self.stage > 0
        return Degrees(
            data_parallel=left,
            shard=left if sharded else 1,
            replicate=1 if sharded else left,
            tp=self.tp,
            pp=self.pp,
            ep=self.ep,
        )

    @property
    def prefetched_elements(self) -> int:
        """:attr:`stage3_prefetch_bucket_size`, or its default."""
        size = self.stage3_prefetch_bucket_size
        return PREFETCH_BUCKET_SIZE if size is None else size

    @property
    def num_params_buffers(self) -> int:
        """:attr:`offload_params_buffer_count`, or its default."""
        count = self.offload_params_buffer_count
        return NUM_PARAMS_BUFFERS if count is None else count

    def resolve_options(self, architecture: Architecture, cluster: Cluster, recipe: Recipe) -> ZeroLayout:
        """Return the layout with its NVMe defaults set: enough buffers, and prefetching only if it works."""
        is_open = self.offload_params_buffer_count is None or self.stage3_prefetch_bucket_size is None
        if self.offload_params != "nvme" or not is_open or isinstance(architecture, UnknownFamily):
            return self
        from shardscope.frameworks.deepspeed.memory.element_counts import find_swap_failure

        ranks = compute_remaining_ranks(cluster.num_gpus, tp=self.tp, pp=self.pp)
        # Start with DeepSpeed's defaults; options that the user has set stay as they are.
        is_prefetch_open = self.stage3_prefetch_bucket_size is None
        is_count_open = self.offload_params_buffer_count is None
        layout = replace(
            self,
            stage3_prefetch_bucket_size=self.prefetched_elements,
            offload_params_buffer_count=self.num_params_buffers,
        )
        failure = find_swap_failure(architecture, recipe, layout, ranks)
        # No number of buffers avoids a second read of the same partition: only prefetching reads ahead.
        if failure == "read twice" and is_prefetch_open:
            layout = replace(layout, stage3_prefetch_bucket_size=0)
            failure = find_swap_failure(architecture, recipe, layout, ranks)
        # More buffers; without prefetching only if no number of buffers is enough with it.
        if failure is not None and is_count_open:
            layout = layout._with_buffers(architecture, recipe, ranks, prefetch=layout.prefetched_elements)
            if is_prefetch_open and find_swap_failure(architecture, recipe, layout, ranks):
                layout = self._with_buffers(architecture, recipe, ranks, prefetch=0)
        return layout

    def _with_buffers(
        self, architecture: Architecture, recipe: Recipe, ranks: int, *, prefetch: int
    ) -> ZeroLayout:
        """Return the layout with enough buffers, by doubling, for all parameters all-gathered at once."""
        from shardscope.frameworks.deepspeed.memory.element_counts import find_swap_failure

        count = self.num_params_buffers
        layout = replace(self, stage3_prefetch_bucket_size=prefetch, offload_params_buffer_count=count)
        while find_swap_failure(architecture, recipe, layout, ranks) and count < MAX_PARAMS_BUFFERS:
            count *= 2
            layout = replace(layout, offload_params_buffer_count=count)
        return layout

    def check_auto_tp(self, architecture: Architecture, recipe: Recipe) -> None:
        """Raise ``ValueError`` where AutoTP fails (deepspeed/module_inject/auto_tp.py,
        deepspeed/runtime/tensor_parallel)."""
        if self.tp == 1:
            return
        why = None
        if architecture.num_moe_layers:
            why = "it does not shard experts"
        elif find_family(architecture).projections == "conv1d":
            why = "it has no plan for GPT-2"
        elif recipe.method != "full":
            why = "it loses peft's adapters"
        if why:
            refuse("Layout.tp", self.tp, f"1 here (DeepSpeed's AutoTP: {why})", {"tp": 1})

    def check_together(self, architecture: Architecture, recipe: Recipe, degrees: Degrees) -> None:
        """Raise ``ValueError`` for combinations that DeepSpeed 0.19 rejects, or that no formula covers.

        DeepSpeed asserts contiguous gradients with experts in stage 2, and NVMe buffers that have room for a
        rank's partition of the largest tensor.
        """
        if recipe.optimizer not in ("adamw", "sgd"):
            self._check_optimizer(recipe)
        if self.ep > 1 and self.stage == 2 and not self.contiguous_gradients:
            refuse(
                "Layout.contiguous_gradients",
                False,
                "True with ep > 1 in stage 2 (DeepSpeed's own check)",
                {"contiguous_gradients": True},
            )
        size = self.offload_params_buffer_size
        if self.offload_params == "nvme" and size is not None:
            needed = ceil_div(find_largest_tensor(architecture), degrees.data_parallel)
            if size < needed:
                refuse(
                    "Layout.offload_params_buffer_size",
                    size,
                    f"None or at least {needed:,}, the partition of {architecture.name}'s largest tensor",
                    {"offload_params_buffer_size": needed},
                )

    def _check_params_buffers(self, architecture: Architecture, recipe: Recipe, ranks: int) -> None:
        """Raise ``ValueError`` if DeepSpeed's parameter swapper fails in the first step that prefetches."""
        from shardscope.frameworks.deepspeed.memory.element_counts import find_swap_failure

        failure = find_swap_failure(architecture, recipe, self, ranks)
        if failure is None:
            return
        # The suggested fix turns prefetching off, since then the fewest buffers are enough.
        without_prefetch = self._with_buffers(architecture, recipe, ranks, prefetch=0)
        fix = {"stage3_prefetch_bucket_size": 0}
        if without_prefetch.num_params_buffers > self.num_params_buffers:
            fix["offload_params_buffer_count"] = without_prefetch.num_params_buffers
        if failure == "read twice":
            why = "0 here: DeepSpeed would prefetch a tensor from NVMe twice, and asserts that it does not"
            refuse("Layout.stage3_prefetch_bucket_size", self.stage3_prefetch_bucket_size, why, fix)
        why = (
            "more here: each parameter that stays all-gathered, because it is used again within "
            f"stage3_max_reuse_distance={self.stage3_max_reuse_distance:,}, holds a buffer, and DeepSpeed "
            "asserts that there is a free one"
        )
        refuse("Layout.offload_params_buffer_count", self.offload_params_buffer_count, why, fix)

    def _check_optimizer(self, recipe: Recipe) -> None:
        if self.offload_optimizer:
            why = f"'adamw', 'sgd' with offload_optimizer={self.offload_optimizer!r}"
        elif self.stage == 0 and recipe.optimizer != "lion":
            why = "'adamw', 'sgd', 'lion' in stage 0, which has no flat buffers for other optimizers"
        else:
            return
        refuse("Recipe.optimizer", recipe.optimizer, why, {"optimizer": "adamw"})

    def _check_stage_3(self) -> None:
        for field, why in (
            ("tp", "DeepSpeed 0.19.8 has AutoTP with ZeRO-3, but plans have no formulas for it"),
            ("ep", "DeepSpeed's releases do not support its MoE layers with ZeRO-3"),
        ):
            if self.stage == 3 and getattr(self, field) > 1:
                needs_stage_3 = self.offload_params or self.offload_optimizer == "nvme"
                fix = {field: 1} if needs_stage_3 else {"stage": 2}
                refuse("Layout.stage", self.stage, f"0 to 2 with {field} > 1 ({why})", fix)

    @property
    def keeps_frozen_inputs(self) -> bool:
        """Return whether ``zero.Init`` replaces torch's ``linear`` (deepspeed/runtime/zero/linear.py)."""
        return self.stage == 3

    @property
    def offloaded(self) -> tuple[str, ...]:
        """See :class:`Layout`."""
        devices = {"cpu": "CPU", "nvme": "NVMe"}
        return tuple(
            f"{noun} on {devices[target]}"
            for noun, target in (("parameters", self.offload_params), ("optimizer", self.offload_optimizer))
            if target is not None
        )

    @property
    def description(self) -> str:
        """Display name: the stage and the offload targets."""
        notes = f" ({', '.join(self.offloaded)})" if self.offloaded else ""
        return f"DeepSpeed ZeRO-{self.stage}{notes}"


def get_layout(plan: Plan) -> ZeroLayout:
    """Return the plan's layout with its type; in a batch of plans it has columns in place of numbers."""
    return cast("ZeroLayout", plan.layout)


# ---- communication_data_type
#
# DeepSpeed 0.19 casts a half-precision bucket before the reduction and rounds the sum back once: in stage 0
# DeepSpeedEngine.allreduce_bucket (deepspeed/runtime/engine.py), in stages 1 and 2 allreduce_bucket
# (deepspeed/runtime/zero/stage_1_and_2.py). In stage 3 the bucket itself has that type
# (_setup_for_real_optimizer, deepspeed/runtime/zero/stage3.py), and the reduced partitions are rounded
# (__avg_scatter_grads).


def check_communication(layout: ZeroLayout) -> None:
    """Raise ``ValueError`` if ``communication_data_type`` is unknown, has no effect or has no formula."""
    check_choice("Layout.communication_data_type", layout.communication_data_type, (None, "fp32"))
    if layout.communication_data_type is None:
        return
    why = ""
    if layout.zero_quantized_gradients:
        why = "None with zero_quantized_gradients, which send 4 bits"
    elif layout.ep > 1 and layout.stage in (1, 2):
        why = "None with ep > 1 in stages 1 and 2: no formula counts the cast of the experts' own buckets"
    if why:
        refuse(
            "Layout.communication_data_type",
            layout.communication_data_type,
            why,
            {"communication_data_type": None},
        )


def casts_gradients(layout: ZeroLayout, recipe: Recipe) -> bool:
    """Return whether gradients are cast for the reduction: fp32 gradients are not."""
    return layout.communication_data_type == "fp32" and widths[recipe.precision].compute < FP32


def get_reduction_width(layout: ZeroLayout, recipe: Recipe) -> int:
    """Return the bytes of a gradient in the reduction type."""
    return FP32 if casts_gradients(layout, recipe) else widths[recipe.precision].compute


def get_cast_width(layout: ZeroLayout, recipe: Recipe) -> int:
    """Return the bytes of a cast gradient over those of an uncast one; 0 without a cast."""
    return FP32 // widths[recipe.precision].compute if casts_gradients(layout, recipe) else 0


# ---- ZeRO++ (Wang et al. 2023): secondary partitions within a node, and quantized communication

_NOT_COUNTED = "to be predicted: no formula counts the buffers of DeepSpeed's quantization kernels"


def check_not_quantized(layout: ZeroLayout, why: str = _NOT_COUNTED) -> None:
    """Raise ``ValueError`` with the reason ``why`` for quantized communication (ZeRO++)."""
    for field in QUANTIZED:
        if getattr(layout, field):
            refuse(f"Layout.{field}", True, f"False {why}", {field: False})


def check_zeropp(layout: ZeroLayout) -> None:
    """Raise ``ValueError`` for combinations of ZeRO++ options that are not supported."""
    size = layout.zero_hpz_partition_size
    if layout.stage < 3:
        for field, off in (("zero_hpz_partition_size", 1), *((field, False) for field in QUANTIZED)):
            value = getattr(layout, field)
            if value != off:
                refuse(f"Layout.{field}", value, f"{off} below stage 3: ZeRO++ needs stage 3", {field: off})
    if size > 1 and layout.offload_params:
        why = "1 with offload_params: no formula counts secondary partitions in host memory"
        refuse("Layout.zero_hpz_partition_size", size, why, {"zero_hpz_partition_size": 1})
