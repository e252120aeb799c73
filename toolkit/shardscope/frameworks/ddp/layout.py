"""DDP's degrees: every rank is a data-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shardscope.layout import Degrees, Layout

if TYPE_CHECKING:
    from shardscope.architecture import Architecture
    from shardscope.cluster import Cluster
    from shardscope.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class DdpLayout(Layout):
    """PyTorch DistributedDataParallel (Li et al. 2020)."""

    framework: ClassVar[str] = "ddp"
    title: ClassVar[str] = "DDP"
    mixes_by_autocast: ClassVar[bool] = True
    supported_methods: ClassVar[tuple[str, ...]] = ("full", "lora", "qlora")
    supported_quantization: ClassVar[tuple[str, ...]] = ("nf4",)
    """bitsandbytes' weights become no DTensors, so no other layout here has them."""
    supported_optimizers: ClassVar[tuple[str, ...]] = (
        *("adamw", "adamw_foreach", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"),
        *("adafactor", "sgd", "lion", "muon"),
    )
    """All: a replica's tensors are plain ones. 8-bit and paged are bitsandbytes'."""

    def degrees(self, architecture: Architecture, cluster: Cluster, recipe: Recipe) -> Degrees:
        """All ranks hold a replica."""
        return Degrees(data_parallel=cluster.num_gpus, replicate=cluster.num_gpus)
