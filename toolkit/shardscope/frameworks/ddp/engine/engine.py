"""DDP engine: ``torch.nn.parallel.DistributedDataParallel``, called directly."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shardscope.core.number_format import format_count, format_kib
from shardscope.frameworks.ddp.layout import DdpLayout
from shardscope.training.engine import BuildModel
from shardscope.training.micro_batch_engine import MIXED_TYPES
from shardscope.training.torch_engine import TorchEngine

BUCKET_CAP_MIB = 25
"""torch's default bucket size, set explicitly because the run's record states it."""


class DdpEngine(TorchEngine):
    """Engine with a replica on every rank, whose gradient all-reduce is overlapped with backward, in buckets.

    bf16-mixed and fp16-mixed are autocast over fp32 parameters: gradients are reduced in fp32.

    torch's ``static_graph`` is off. Under ``no_sync``, which gradient accumulation needs, it asserts in the
    first backward (torch 2.13, reducer.cpp; pytorch/pytorch#143580 and #187732). With one micro-batch per
    step it works but gains nothing: it avoids the search for unused parameters, which is off anyway, and its
    first backward keeps all gradients in addition to the buckets until the end.
    """

    framework = "ddp"

    def wrap(self, build_model: BuildModel) -> torch.nn.Module:
        self.model = self.build_on_host(build_model).to(self.ctx.device)
        device = self.ctx.device
        # DDP assigns parameters to buckets here: freezing one later does not shrink them.
        trained = (parameter for parameter in self.model.parameters() if parameter.requires_grad)
        self._bucket_bytes: int = sum(parameter.numel() * parameter.element_size() for parameter in trained)
        return DistributedDataParallel(
            self.model,
            # None on CPU ranks: DDP rejects device ids of modules in host memory.
            device_ids=[device] if device.type == "cuda" else None,
            # An explicit size is that of the first bucket, too, which is 1 MiB if none is given (torch 2.13,
            # distributed.py, first_bucket_bytes_cap).
            bucket_cap_mb=BUCKET_CAP_MIB,
            # Gradients are views into the buckets instead of copies.
            gradient_as_bucket_view=True,
        )

    def read_back(self) -> dict[str, object]:
        # Read DDP's own attributes, not the arguments that it got.
        module = self._module
        if not isinstance(module, DistributedDataParallel):
            raise RuntimeError(f"the plan says DDP, and the module is {type(module).__name__}")
        num_ranks = dist.get_world_size(module.process_group)
        if num_ranks != self.plan.world_size:
            raise RuntimeError(
                f"the plan says {self.plan.world_size} DDP ranks, and the module has {num_ranks}"
            )
        buckets = _read_bucket_bytes(module)
        return {
            "module": type(module).__name__,
            "data_parallel": num_ranks,
            "num_buckets": len(buckets),
            "bucket_bytes": buckets,
            "bucket_cap_bytes": int(module.bucket_bytes_cap),
            "gradient_as_bucket_view": bool(module.gradient_as_bucket_view),
            "static_graph": bool(module.static_graph),
            "find_unused_parameters": bool(module.find_unused_parameters),
            "autocast": str(self.autocast_dtype).removeprefix("torch.") if self.autocast_dtype else None,
        }

    def describe_built(self, record: Mapping[str, object], where: str) -> str:
        buckets = record["bucket_bytes"]
        assert isinstance(buckets, list), "read_back() lists them"
        num_bytes = sum(buckets)
        # Buckets of adapters may have a few KiB.
        size = f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{format_kib(num_bytes)} KiB"
        size += " in all" if len(buckets) > 1 else ""
        return (
            f"{DdpLayout.title}: {record['module']} over {format_count(self.plan.world_size, 'rank')} "
            f"{where}, {format_count(len(buckets), 'gradient bucket')} of {size}"
        )

    def gradient_sync(self, last: bool) -> AbstractContextManager[None]:
        module = self._module
        if last or not isinstance(module, DistributedDataParallel):
            return nullcontext()
        # The caller runs forward inside, too: DDP decides there whether backward reduces (no_sync's warning).
        no_sync: AbstractContextManager[None] = module.no_sync()
        return no_sync

    @property
    def shard_group(self) -> None:
        return None

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return MIXED_TYPES.get(self.recipe.precision)

    def gradient_bytes(self) -> int:
        """Return the bytes of all buckets: the reducer keeps them for the whole run."""
        return self.bucket_bytes

    @property
    def bucket_bytes(self) -> int:
        """Bytes of the reducer's buckets, the same as of all gradients."""
        return self._bucket_bytes


def _read_bucket_bytes(module: DistributedDataParallel) -> list[int]:
    """Return the bytes of each bucket; after the first step DDP rebuilds them in the order of gradients."""
    # DDP's only record of its buckets: a text with their sizes, separated by ", " (torch 2.13, logger.cpp).
    text = str(module._get_ddp_logging_data().get("bucket_sizes", ""))
    return [int(size) for size in text.replace(" ", "").split(",") if size]
