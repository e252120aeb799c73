"""FSDP2 really training: ``torch.distributed.fsdp.fully_shard``, called directly, layer by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from shardscope.frameworks.engine import BuildModel
from shardscope.frameworks.fsdp2.layout import Fsdp2Layout
from shardscope.frameworks.fsdp2.limits import HOST_BUILD_BYTES
from shardscope.frameworks.fsdp2.materialise import build_on_meta, check_has_weights, materialise
from shardscope.memory.words import count
from shardscope.training.gradients import local
from shardscope.training.recompute import decoder_layers
from shardscope.training.torch_engine import MIXED_TYPES, TorchEngine


class Fsdp2Engine(TorchEngine):
    """Parameters, gradients and optimizer state in shards (arXiv:2304.11277, per-parameter: torch's FSDP2).

    Gradients are reduce-scattered after every micro-batch, as torchtitan does: holding them back would hold
    whole gradients on every rank, which is what sharding is there to avoid. What accumulation does save is
    HSDP's all-reduce between replicas, taken once a step.
    """

    framework = "fsdp2"
    shards_parameters = True
    mesh: Any = None
    """The ranks by copy and shard; made when wrapping, unless there is one already."""

    def make_mesh(self) -> Any:
        """The plan's ranks as a device mesh; every rank of the world takes part."""
        names = ("replicate", "shard") if self.plan.degrees.replicate > 1 else ("shard",)
        return init_device_mesh(self.ctx.device.type, self._planned_mesh, mesh_dim_names=names)

    def wrap(self, build_model: BuildModel) -> torch.nn.Module:
        device = self.ctx.device
        if self.mesh is None:
            self.mesh = self.make_mesh()
        large = 4 * self.plan.architecture.num_parameters > HOST_BUILD_BYTES
        # What is quantised is quantised from numbers.
        self._on_meta = self.fresh_weights and large and not self.recipe.base_quantization
        build = build_on_meta if self._on_meta else (lambda make: make())
        model = build(lambda: self.build_on_host(build_model))
        if not self._on_meta:
            check_has_weights(model)
        self._shard(model)
        if self._on_meta:
            materialise(model, device=self._home, seed=self.seed, compute=device)
        self.model = model
        return model

    def _shard(self, model: torch.nn.Module) -> None:
        """Bottom-up: each decoder layer is one group of collectives, the rest is the root's."""
        kind = MIXED_TYPES.get(self.recipe.precision)
        offload = self.plan.layout.offload == "cpu"
        pinned = self.ctx.device.type == "cuda"
        options: dict[str, Any] = {
            "mesh": self.mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=torch.float32 if kind else None),
            "offload_policy": CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy(),
        }
        self._home = torch.device("cpu") if offload else self.ctx.device
        reshard = self.plan.layout.reshard_after_forward
        if not isinstance(reshard, bool) and reshard == self.plan.degrees.shard:
            # torch wants a smaller group than the whole one here; resharding to all ranks is what True means.
            reshard = True
        layers = decoder_layers(model)
        for layer in layers:
            fully_shard(layer, reshard_after_forward=reshard, **options)
        # The root is needed again as soon as backward starts, so torch's own rule (None) keeps it gathered.
        fully_shard(model, reshard_after_forward=None, **options)
        self._num_groups = len(layers) + 1

    def what_it_is(self) -> dict[str, Any]:
        parameters = dict(self.model.named_parameters())
        whole = [name for name, parameter in parameters.items() if not isinstance(parameter, DTensor)]
        if whole:
            raise RuntimeError(
                f"the plan says FSDP2, and {len(whole)} of {len(parameters)} parameters are not sharded "
                f"(not DTensors): {', '.join(whole[:3])}"
            )
        planned = self._planned_mesh
        for name, parameter in parameters.items():
            mesh = tuple(parameter.device_mesh.shape)
            if mesh != planned or not isinstance(parameter.placements[-1], Shard):
                raise RuntimeError(
                    f"the plan shards over a mesh of {planned}, and {name} is "
                    f"{parameter.placements} over {mesh}"
                )
        held = sum(local(parameter).numel() for parameter in parameters.values())
        total = sum(parameter.numel() for parameter in parameters.values())
        counted = torch.tensor(held, device=self.ctx.device)
        dist.all_reduce(counted, group=self.shard_group)
        if int(counted) != total:
            raise RuntimeError(f"the shards hold {int(counted):,} weights, and the model has {total:,}")
        placements = Counter(str(tuple(parameter.placements)) for parameter in parameters.values())
        return {
            "mesh_shape": list(self.mesh.shape),
            "mesh_axes": list(self.mesh.mesh_dim_names),
            "shard": int(self.mesh.shape[-1]),
            "replicate": int(self.mesh.shape[0]) if len(planned) == 2 else 1,
            "num_parameters": total,
            "num_sharded_tensors": len(parameters),
            "num_weights_here": held,
            "num_groups": self._num_groups,
            "placements": dict(placements),
            "sharded_names": sorted(parameters),
            "reshard_after_forward": self.plan.layout.reshard_after_forward,
            "offload": self.plan.layout.offload,
            "parameters_on": " and ".join(sorted({local(p).device.type for p in parameters.values()})),
            "built_on": "meta" if self._on_meta else "host",
        }

    def in_words(self, found: Mapping[str, Any], where: str) -> str:
        copies = f" in each of {found['replicate']} copies" if found["replicate"] > 1 else ""
        home = " and kept in host memory" if found["parameters_on"] != self.ctx.device.type else ""
        return (
            f"{Fsdp2Layout.title}: all {found['num_sharded_tensors']} parameter tensors are DTensors, "
            f"sharded over {count(found['shard'], 'rank')}{copies} {where}{home}"
        )

    def gathered_tensors(self) -> Iterator[torch.Tensor]:
        """Each group's all-gather outputs: FSDP2 empties and fills the same storages again and again."""
        for module in self.model.modules():
            if not isinstance(module, FSDPModule):
                continue
            state: Any = module._get_fsdp_state()
            # A list since torch 2.13, one group before.
            for group in getattr(state, "_fsdp_param_groups", [getattr(state, "_fsdp_param_group", None)]):
                for parameter in group.fsdp_params if group else ():
                    yield from parameter.all_gather_outputs

    @property
    def compute_dtype(self) -> torch.dtype:
        """What FSDP2 casts gathered parameters to, as its root module says."""
        policy: MixedPrecisionPolicy = self.model._get_fsdp_state()._mp_policy
        return policy.param_dtype or super().compute_dtype

    @property
    def _planned_mesh(self) -> tuple[int, ...]:
        degrees = self.plan.degrees
        return (degrees.replicate, degrees.shard) if degrees.replicate > 1 else (degrees.shard,)

    @contextmanager
    def reduce_on(self, last: bool) -> Iterator[None]:
        self.model.set_is_last_backward(last)
        if self.plan.degrees.replicate > 1:
            self.model.set_requires_all_reduce(last)
        yield

    @property
    def shard_group(self) -> Any:
        return self.mesh.get_group("shard")
