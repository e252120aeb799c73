"""DDP layout: every rank is a data-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shardscope.core.errors import refuse
from shardscope.core.fixes import suggest_complete_fixes
from shardscope.core.layout import Degrees, Layout

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.cluster import Cluster
    from shardscope.core.recipe import Recipe


@suggest_complete_fixes
@dataclass(frozen=True, kw_only=True)
class DdpLayout(Layout):
    """Layout of PyTorch DistributedDataParallel (Li et al. 2020)."""

    framework: ClassVar[str] = "ddp"
    title: ClassVar[str] = "DDP"
    mixes_by_autocast: ClassVar[bool] = True
    supported_kernels: ClassVar[tuple[str, ...]] = ("transformers", "liger", "compiled")
    supported_methods: ClassVar[tuple[str, ...]] = ("full", "lora", "qlora")
    supported_quantization: ClassVar[tuple[str, ...]] = ("nf4", "int8")
    """Supported quantization: bitsandbytes' int8 weights cannot be DTensors, so only DDP supports them."""
    supported_optimizers: ClassVar[tuple[str, ...]] = (
        *("adamw", "adamw_foreach", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"),
        *("adafactor", "sgd", "lion", "muon"),
    )
    """Supported optimizers: all, since replicas are plain tensors. 8-bit and paged ones are bitsandbytes'."""

    def compute_degrees(self, architecture: Architecture, cluster: Cluster, recipe: Recipe) -> Degrees:
        """Return the degrees: all ranks are data parallel, with a replica each."""
        return self.fill_degrees(cluster.num_gpus)

    def fill_degrees(self, left: int) -> Degrees:
        """Return the degrees with a replica on each of the ``left`` ranks."""
        return Degrees(data_parallel=left, replicate=left)

    @property
    def supports_dora(self) -> bool:
        return True

    def check_together(self, architecture: Architecture, recipe: Recipe, degrees: Degrees) -> None:
        """Raise ``ValueError`` for quantization with kernels or a precision that was never measured.

        bitsandbytes' int8 matmuls do not take part in autocast.
        """
        # Imported here: the memory formulas import this module's base class.
        from shardscope.memory.state.quantization import check_kernels

        check_kernels(recipe)
        if recipe.base_quantization == "int8" and recipe.precision not in ("bf16", "fp32"):
            refuse(
                "Recipe.quantization",
                "int8",
                f"None or 'nf4' in {recipe.precision}: the memory of int8 under autocast was never measured; "
                "'int8' in 'bf16' or 'fp32'",
                {"precision": "bf16"},
            )
