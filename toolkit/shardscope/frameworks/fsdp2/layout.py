"""FSDP2 layout: its options, their checks and the parallel degrees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal, cast

from shardscope.core.errors import FieldError, check_choice, refuse
from shardscope.core.fixes import suggest_complete_fixes
from shardscope.core.layout import (
    Degrees,
    Layout,
    OptionValue,
    check_context,
    check_degrees,
    check_heads,
    check_layers,
    compute_remaining_ranks,
)
from shardscope.frameworks.fsdp2.old_names import STRATEGIES

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.cluster import Cluster
    from shardscope.core.plan import Plan
    from shardscope.core.recipe import Recipe


@suggest_complete_fixes
@dataclass(frozen=True, kw_only=True)
class Fsdp2Layout(Layout):
    """Layout of ``torch.distributed.fsdp.fully_shard``: one group per decoder layer and one for the root."""

    framework: ClassVar[str] = "fsdp2"
    title: ClassVar[str] = "FSDP2"
    supported_kernels: ClassVar[tuple[str, ...]] = ("transformers", "liger", "compiled")
    # adamw_8bit is torchao's: bitsandbytes does not support DTensor, and torch.optim.Adafactor raises for
    # sharded parameters. Muon is missing because DTensor decides how its whole matrices are all-gathered, and
    # there is no formula for that memory.
    supported_optimizers: ClassVar[tuple[str, ...]] = ("adamw", "adamw_foreach", "adamw_8bit", "sgd", "lion")
    supported_precisions: ClassVar[tuple[str, ...]] = (
        "bf16-mixed",
        "fp16-mixed",
        "fp8-mixed",
        "bf16",
        "fp32",
    )
    """Supported precisions. fp8-mixed is torchao's float8, which casts the inputs of each matmul."""
    supported_methods: ClassVar[tuple[str, ...]] = ("full", "lora", "qlora")
    supported_quantization: ClassVar[tuple[str, ...]] = ("nf4",)
    """Supported quantization. int8 is missing: bitsandbytes reads the scales from its parameter class
    (``Int8Params.CB``), and fully_shard replaces it by plain parameters."""
    joins_attention_by_heads: ClassVar[bool] = True
    """Whether ring attention concatenates partial outputs: torch replaces the later half of the output with
    ``torch.cat`` on all ranks but the last, where all queries attend to each shard of keys
    (``_partial_update``, torch 2.13)."""
    # With reshard_after_forward=False parameters are still sharded between steps, as in ZeRO-3.
    abilities: ClassVar[Mapping[str, Mapping[str, OptionValue]]] = MappingProxyType({
        "data": {},
        "zero_1": {},
        "zero_2": {},
        "zero_3": {},
        "hybrid": {"replicate": 2},
        "tensor": {"tp": 2},
        "sequence": {"tp": 2},
        "pipeline": {"pp": 2},
        "interleaved": {"pp": 2, "vpp": 2},
        "context": {"cp": 2},
        "cpu_offload": {"offload": "cpu"},
    })  # fmt: skip
    choices: ClassVar[Mapping[str, tuple[OptionValue, ...] | None]] = MappingProxyType({
        "replicate": None,
        "tp": None,
        "pp": None,
        "vpp": None,
        "pipeline_schedule": ("1F1B", "GPipe"),
        "cp": None,
        "reshard_after_forward": (True, False),
        "offload": (None, "cpu"),
    })  # fmt: skip

    shard: int | None = None
    """Sharding degree; ``None``: the world size divided by the product of the other degrees."""
    replicate: int = 1
    """Replicas of the sharded state (HSDP): gradients are all-reduced between them."""
    reshard_after_forward: bool | int = True
    """Whether a layer's all-gathered parameters are freed after forward; an int reshards them to that many
    ranks instead."""
    tp: int = 1
    """Tensor-parallel degree."""
    pp: int = 1
    """Pipeline stages."""
    vpp: int = 1
    """Model chunks per stage (interleaved schedule); needs pp > 1."""
    pipeline_schedule: Literal["1F1B", "GPipe"] = "1F1B"
    """Pipeline schedule, by torch's name. "GPipe" runs all forwards before the first backward, so the saved
    tensors of all micro-batches are alive at once; with vpp > 1 "1F1B" is ``ScheduleInterleaved1F1B``."""
    cp: int = 1
    """Context-parallel degree; its ranks take part in the sharding."""
    offload: Literal["cpu"] | None = None
    """Offload target: ``"cpu"`` keeps sharded parameters, gradients and optimizer state in host memory
    (CPUOffloadPolicy)."""

    def __post_init__(self) -> None:
        if self.shard is not None:
            check_degrees(self, "shard")
        check_degrees(self, "replicate", "tp", "pp", "vpp", "cp")
        if not isinstance(self.reshard_after_forward, bool):
            self._check_reshard()
        check_choice("Layout.offload", self.offload, (None, "cpu"))
        if self.vpp > 1 and self.pp == 1:
            refuse("Layout.vpp", self.vpp, "1 while pp=1", {"vpp": 1})
        check_choice("Layout.pipeline_schedule", self.pipeline_schedule, ("1F1B", "GPipe"))
        if self.runs_all_forwards_first and self.pp == 1:
            refuse("Layout.pipeline_schedule", "GPipe", "'1F1B' while pp=1", {"pipeline_schedule": "1F1B"})
        if self.runs_all_forwards_first and self.vpp > 1:
            refuse(
                "Layout.pipeline_schedule", "GPipe", "'1F1B' with vpp > 1: GPipe has no chunks", {"vpp": 1}
            )

    def _check_reshard(self) -> None:
        """Raise ``ValueError`` unless ``reshard_after_forward`` is a number of ranks from 2 on.

        For the name of an FSDP1 sharding strategy the error suggests FSDP2's equivalent option.
        """
        value = self.reshard_after_forward
        name = value.rpartition(".")[2].upper() if isinstance(value, str) else ""
        field, allowed = "Layout.reshard_after_forward", "True, False or a whole number of ranks from 2 on"
        if name in STRATEGIES:
            refuse(field, value, allowed, STRATEGIES[name].as_layout)
        try:
            check_degrees(self, "reshard_after_forward", low=2)
        except FieldError:
            refuse(field, value, allowed, {"reshard_after_forward": True})

    def compute_degrees(self, architecture: Architecture, cluster: Cluster, recipe: Recipe) -> Degrees:
        """Return the degrees, whose product is the number of GPUs; ``shard`` defaults to the remaining ranks.

        Raises ``ValueError`` for degrees that do not fit the cluster, the architecture or the recipe.
        """
        world = cluster.num_gpus
        check_heads(architecture, self.tp)
        check_layers(architecture, self.pp, self.vpp)
        check_context(recipe, self.cp)
        left = compute_remaining_ranks(world, replicate=self.replicate, tp=self.tp, pp=self.pp, cp=self.cp)
        shard = left if self.shard is None else self.shard
        if shard != left:
            refuse(
                "Layout.shard",
                shard,
                f"{left}, so that shard x replicate x tp x pp x cp = {world} ranks",
                {"shard": left},
            )
        reshard = self.reshard_after_forward
        if not isinstance(reshard, bool) and (shard * self.cp) % reshard:
            refuse(
                "Layout.reshard_after_forward",
                reshard,
                f"True, False or a divisor of the {shard * self.cp} sharding ranks",
                {"reshard_after_forward": True},
            )
        return self.fill_degrees(shard)

    def fill_degrees(self, left: int) -> Degrees:
        """Return the degrees with sharding over the ``left`` ranks that the other degrees do not use."""
        return Degrees(
            data_parallel=left * self.replicate,
            shard=left,
            replicate=self.replicate,
            tp=self.tp,
            pp=self.pp,
            vpp=self.vpp,
            cp=self.cp,
        )

    @property
    def supports_dora(self) -> bool:
        return self.offload is None

    def check_together(self, architecture: Architecture, recipe: Recipe, degrees: Degrees) -> None:
        """Raise ``ValueError`` for combinations of options that are not supported.

        These are the errors of torch.distributed.pipelining's schedules (torch 2.13, schedules.py), and the
        options whose memory with a quantized base was never measured.
        """
        # Imported here: the memory formulas import this module's base class.
        from shardscope.frameworks.fsdp2.memory.quantized import check_quantized

        check_quantized(recipe, self)
        self.check_schedule(recipe, degrees)

    def check_schedule(self, recipe: Recipe, degrees: Degrees) -> None:
        """Raise ``ValueError`` for a number of micro-batches that the pipeline schedule does not support."""
        if degrees.pp == 1:
            return
        per_step = recipe.micro_batch_size * degrees.data_parallel
        number = recipe.global_batch_size // per_step
        if degrees.vpp == 1 and number < degrees.pp:
            refuse(
                "Recipe.global_batch_size",
                recipe.global_batch_size,
                f"at least a micro-batch for each of pp={degrees.pp} stages ({self.pipeline_schedule})",
                {"global_batch_size": degrees.pp * per_step},
            )
        if degrees.vpp > 1 and number % max(1, number // degrees.pp):
            refuse(
                "Recipe.global_batch_size",
                recipe.global_batch_size,
                f"micro-batches in equal rounds of about pp={degrees.pp} (ScheduleInterleaved1F1B)",
                {"global_batch_size": -(-number // degrees.pp) * degrees.pp * per_step},
            )

    @property
    def runs_all_forwards_first(self) -> bool:  # type: ignore[override]
        """Return whether the schedule is GPipe, whose memory grows with a step's micro-batches."""
        return self.pipeline_schedule == "GPipe"

    @property
    def splits_sequence(self) -> bool:
        """Return whether activations are sharded along the sequence between tensor-parallel regions.

        True with tp > 1: norms are ``SequenceParallel``, as in PyTorch's own tensor-parallel plans.
        """
        return self.tp > 1

    @property
    def offloaded(self) -> tuple[str, ...]:
        """See :class:`Layout`."""
        return ("training state on CPU",) if self.offload == "cpu" else ()

    @property
    def description(self) -> str:
        """Display name: "FSDP2", with a note for HSDP and for CPU offloading."""
        notes = [*(["HSDP"] if self.replicate > 1 else []), *self.offloaded]
        return f"FSDP2 ({', '.join(notes)})" if notes else "FSDP2"


def get_layout(plan: Plan) -> Fsdp2Layout:
    """Return the plan's layout with its type; in a batch of plans it has columns in place of numbers."""
    return cast("Fsdp2Layout", plan.layout)


def get_reshard_after_forward(plan: Plan) -> bool | int:
    """Return the ``reshard_after_forward`` argument of ``fully_shard``: True if the int is the whole mesh."""
    reshard = get_layout(plan).reshard_after_forward
    num_shards = plan.degrees.shard * plan.degrees.cp
    return True if not isinstance(reshard, bool) and reshard == num_shards else reshard
