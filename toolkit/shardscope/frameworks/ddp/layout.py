"""DDP's degrees: every rank is a data-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from shardscope.core.errors import refuse
from shardscope.core.fixes import checked
from shardscope.core.layout import Degrees, Layout

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.cluster import Cluster
    from shardscope.core.recipe import Recipe


@checked
@dataclass(frozen=True, kw_only=True)
class DdpLayout(Layout):
    """PyTorch DistributedDataParallel (Li et al. 2020)."""

    framework: ClassVar[str] = "ddp"
    title: ClassVar[str] = "DDP"
    mixes_by_autocast: ClassVar[bool] = True
    supported_kernels: ClassVar[tuple[str, ...]] = ("transformers", "liger", "compiled")
    supported_methods: ClassVar[tuple[str, ...]] = ("full", "lora", "qlora")
    supported_quantization: ClassVar[tuple[str, ...]] = ("nf4", "int8")
    """bitsandbytes' weights become no DTensors, so no other layout here has them."""
    supported_optimizers: ClassVar[tuple[str, ...]] = (
        *("adamw", "adamw_foreach", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"),
        *("adafactor", "sgd", "lion", "muon"),
    )
    """All: a replica's tensors are plain ones. 8-bit and paged are bitsandbytes'."""

    def degrees(self, architecture: Architecture, cluster: Cluster, recipe: Recipe) -> Degrees:
        """All ranks hold a replica."""
        return self.spread(cluster.num_gpus)

    def spread(self, left: Any) -> Degrees:
        """Every rank is a copy."""
        return Degrees(data_parallel=left, replicate=left)

    def check_together(self, architecture: Architecture, recipe: Recipe, degrees: Degrees) -> None:
        """bitsandbytes' int8 products take no part in autocast, and were counted in plain modules only."""
        # The formulas import this module's base.
        from shardscope.memory.state.quantization import check_kernels

        check_kernels(recipe)
        if recipe.base_quantization == "int8" and recipe.precision not in ("bf16", "fp32"):
            refuse(
                "Recipe.quantization",
                "int8",
                f"None or 'nf4' in {recipe.precision}, for what autocast makes of int8 was never counted; "
                "'int8' in 'bf16' or 'fp32'",
                {"precision": "bf16"},
            )
