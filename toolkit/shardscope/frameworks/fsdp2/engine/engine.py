"""FSDP2 engine: ``torch.distributed.fsdp.fully_shard``, called directly on each layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.distributed.tensor.placement_types import _StridedShard

from shardscope.core.number_format import format_count
from shardscope.core.ops import ceil_div
from shardscope.frameworks.fsdp2.engine import inspection
from shardscope.frameworks.fsdp2.engine.tensor_parallel import parallelize
from shardscope.frameworks.fsdp2.layout import Fsdp2Layout, get_reshard_after_forward
from shardscope.training.engine import BuildModel
from shardscope.training.micro_batch_engine import MIXED_TYPES
from shardscope.training.model.on_meta import allocate_parameters, build_on_meta
from shardscope.training.model.recompute import decoder_layers
from shardscope.training.optimizers import gradients
from shardscope.training.optimizers.gradients import local_shard
from shardscope.training.torch_engine import TorchEngine
from shardscope.training.weights.initial_weights import InitialWeights, Region, fill_buffers


class Fsdp2Engine(TorchEngine):
    """Engine with sharded parameters, gradients and optimizer state (FSDP, arXiv:2304.11277; per parameter).

    Gradients are reduce-scattered after every micro-batch, as in torchtitan: delaying it would keep unsharded
    gradients on every rank, which sharding is meant to avoid. Gradient accumulation does save HSDP's
    all-reduce between replicas, which runs once a step.

    torch's implicit prefetching overlaps the next layer's all-gather with this layer's compute: in forward
    because it is issued on a separate stream, ahead of the device, in backward by the recorded order of
    forward. Setting the next layer with ``set_modules_to_forward_prefetch`` gives the same overlap, issued
    earlier by the host; setting more layers keeps more of them all-gathered than the plan predicts (torch,
    _fully_shard.py).
    """

    framework = "fsdp2"
    shards_parameters = True
    mesh: DeviceMesh | None = None
    """Device mesh of replicas and shards; created in :meth:`wrap` unless it is already set."""
    tp_mesh: DeviceMesh | None = None
    """This rank's tensor-parallel group; None with tp = 1."""
    stage_mesh: DeviceMesh | None = None
    """This rank's pipeline group, one rank per stage; None with pp = 1."""

    def make_mesh(self) -> DeviceMesh:
        """Create the plan's device mesh with tensor-parallel ranks innermost; all ranks must call it.

        Returns the replicate and shard axes; the other axes become ``tp_mesh`` and ``stage_mesh``.
        """
        sizes = {name: getattr(self.plan.degrees, name) for name in ("pp", "replicate", "shard", "tp")}
        sizes["shard"] = self.num_shards
        axes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
        mesh = init_device_mesh(self.ctx.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        self.tp_mesh = mesh["tp"] if "tp" in axes else None
        self.stage_mesh = mesh["pp"] if "pp" in axes else None
        data_axes = tuple(name for name in axes if name in ("replicate", "shard"))
        return mesh if data_axes == tuple(axes) else mesh[data_axes]

    def _get_mesh(self) -> DeviceMesh:
        assert self.mesh is not None, "wrap() creates the mesh"
        return self.mesh

    @property
    def data_rank(self) -> int:
        degrees = self.plan.degrees
        size: int = self.ctx.rank // (degrees.tp * degrees.cp) % self.num_data_ranks
        return size

    @property
    def num_data_ranks(self) -> int:
        size: int = self.plan.degrees.data_parallel
        return size

    @property
    def num_shards(self) -> int:
        """Number of ranks that one replica is sharded over, context-parallel ranks included."""
        size: int = self.plan.degrees.shard * self.plan.degrees.cp
        return size

    def wrap(self, build_model: BuildModel) -> torch.nn.Module:
        if self.mesh is None:
            self.mesh = self.make_mesh()
        none_yet = self.weights is not None or self.initializes_shards
        # A quantized base needs real weights to quantize.
        self._on_meta = none_yet and not self.recipe.base_quantization
        build = build_on_meta if self._on_meta else (lambda make: make())
        model = build(lambda: self.build_on_host(build_model))
        if not self._on_meta:
            check_has_weights(model)
        self._shard(model)
        if self._on_meta:
            self._fill(model)
        self.model = model
        return model

    def build_with_weights(self, build_model: BuildModel) -> torch.nn.Module:
        # A model on meta gets its weights after sharding.
        return build_model() if self._on_meta else super().build_with_weights(build_model)

    def _fill(self, model: torch.nn.Module) -> None:
        """Allocate the shards of ``model`` and write their initial weights."""
        weights, device = self.initial_weights_of(model, self.ctx.device), self.ctx.device
        materialize(model, weights, device=self._home, compute=device)
        fill_buffers(model, weights)

    def _shard(self, model: torch.nn.Module) -> None:
        """Shard ``model`` bottom-up: one ``fully_shard`` group per decoder layer, and the root."""
        kind = MIXED_TYPES.get(self.recipe.precision)
        offload = self.plan.layout.offload == "cpu"
        pinned = self.ctx.device.type == "cuda"
        options = {
            "mesh": self.mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=torch.float32 if kind else None),
            "offload_policy": CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy(),
        }
        self._home = torch.device("cpu") if offload else self.ctx.device
        reshard = get_reshard_after_forward(self.plan)
        if self.tp_mesh is not None:
            parallelize(model, self.tp_mesh)
        self._num_groups = 0
        for unit in self.units(model):
            layers = decoder_layers(unit)
            for layer in layers:
                fully_shard(layer, reshard_after_forward=reshard, **options)
            # Backward needs the root's parameters first: torch's default (None) keeps them all-gathered.
            fully_shard(unit, reshard_after_forward=None, **options)
            self._num_groups += len(layers) + 1

    def units(self, model: torch.nn.Module) -> list[torch.nn.Module]:
        """Return the modules with a root group each: ``model``, or its pipeline chunks."""
        return [model]

    @property
    def called(self) -> tuple[torch.nn.Module, ...]:
        """Modules with a root group: the model."""
        return (self.model,)

    def read_back(self) -> dict[str, object]:
        degrees, device, mesh = self.plan.degrees, self.ctx.device, self._get_mesh()
        parameters = dict(self.model.named_parameters())
        inspection.check_sharded(parameters, self._planned_mesh, degrees.tp)
        holders = dist.get_world_size(self.shard_group) // (self.num_shards * degrees.pp)
        num_local, num_parameters = inspection.count_weights(
            parameters, self.shard_group, self.num_shards, holders, self.part_copies, device
        )
        layers = [layer for unit in self.called for layer in decoder_layers(unit)]
        record: dict[str, object] = {
            "mesh_shape": list(mesh.shape),
            "mesh_axes": list(mesh.mesh_dim_names or ()),
            "shard": int(mesh.shape[-1]),
            "replicate": int(mesh.shape[0]) if len(self._planned_mesh) == 2 else 1,
            "num_parameters": num_parameters,
            "num_sharded_tensors": len(parameters),
            "num_weights_here": num_local,
            "num_groups": self._num_groups,
            "placements": inspection.count_placements(parameters),
            "sharded_names": sorted(parameters),
            "reshard_after_forward": inspection.check_resharding(
                layers, get_reshard_after_forward(self.plan)
            ),
            "offload": inspection.check_shard_device(
                self.called, parameters.values(), self.plan.layout.offload, device
            ),
            "prefetch": inspection.describe_prefetch(self.called),
            "parameters_on": " and ".join(sorted({local_shard(p).device.type for p in parameters.values()})),
            "built_on": "meta" if self._on_meta else "host",
        }
        if self.tp_mesh is not None:
            record["tp"] = int(self.tp_mesh.size())
            record["num_tensors_cut_by_tp"] = sum(
                inspection.is_tensor_parallel(parameter, degrees.tp) for parameter in parameters.values()
            )
        return record

    def describe_built(self, record: Mapping[str, object], where: str) -> str:
        copies = f" in each of {record['replicate']} copies" if self.plan.degrees.replicate > 1 else ""
        home = " and kept in host memory" if record["parameters_on"] != self.ctx.device.type else ""
        cut = ""
        if "tp" in record:
            cut = f", {record['num_tensors_cut_by_tp']} of them cut over {record['tp']} tensor-parallel ranks"
        return (
            f"{Fsdp2Layout.title}: all {record['num_sharded_tensors']} parameter tensors are DTensors, "
            f"sharded over {format_count(self.num_shards, 'rank')}{copies} {where}{home}{cut}"
        )

    def gathered_tensors(self) -> Iterator[torch.Tensor]:
        """Each group's all-gather outputs: FSDP2 empties and fills the same storages again and again."""
        for module in (one for unit in self.called for one in unit.modules()):
            for group in inspection.list_groups(module):
                for parameter in group.fsdp_params:
                    yield from parameter.all_gather_outputs

    @property
    def compute_dtype(self) -> torch.dtype:
        """Type of the all-gathered parameters, from the root module's mixed precision policy."""
        policy: MixedPrecisionPolicy = self.called[0]._get_fsdp_state()._mp_policy
        return policy.param_dtype or super().compute_dtype

    @property
    def _planned_mesh(self) -> tuple[int, ...]:
        degrees = self.plan.degrees
        return (degrees.replicate, self.num_shards) if degrees.replicate > 1 else (self.num_shards,)

    @contextmanager
    def gradient_sync(self, last: bool) -> Iterator[None]:
        self.model.set_is_last_backward(last)
        if self.plan.degrees.replicate > 1:
            self.model.set_requires_all_reduce(last)
        with loss_parallel() if self.tp_mesh is not None else nullcontext():
            yield

    def _compute_loss(self, micro: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = super()._compute_loss(micro)
        # With a sharded vocabulary the loss is a DTensor, replicated on each rank.
        return loss.to_local() if isinstance(loss, DTensor) else loss

    @property
    def shard_group(self) -> ProcessGroup:
        """Ranks that one replica is sharded over; with tp or pp, all ranks."""
        if self.tp_mesh is None and self.stage_mesh is None:
            return self._get_mesh().get_group("shard")
        return dist.group.WORLD

    def part_copies(self, parameter: torch.nn.Parameter) -> int:
        """Return how many ranks of ``shard_group`` have the same shard of ``parameter`` as this rank."""
        degrees = self.plan.degrees
        if self.tp_mesh is None and self.stage_mesh is None:
            return 1
        num_ranks: int = degrees.replicate * degrees.tp
        return num_ranks // degrees.tp if inspection.is_tensor_parallel(parameter, degrees.tp) else num_ranks

    def clip_gradients(self) -> torch.Tensor:
        return gradients.clip_gradients(
            self._parameters,
            self.ctx.device,
            self.shard_group,
            self.max_grad_norm,
            None if self.tp_mesh is None and self.stage_mesh is None else self.norm_copies,
        )

    def norm_copies(self, parameter: torch.nn.Parameter) -> int:
        """Return how many times a parameter's squared gradients are counted in the sum over ranks."""
        return self.part_copies(parameter)


# ---- Models too large to build whole on every rank: built on meta, sharded, initialized shard by shard


def check_has_weights(model: torch.nn.Module) -> None:
    """Raise ``ValueError`` if ``model`` has parameters on meta: they would train uninitialized memory."""
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty:
        raise ValueError(
            f"build_model gives {len(empty)} parameters on the meta device ({', '.join(empty[:3])}), which "
            "have no values; allowed: real weights. Nearest fix: build without torch.device('meta'), and set "
            "engine.fresh_weights = True before setup for a decoder from random weights."
        )


def materialize(
    model: torch.nn.Module, weights: InitialWeights, *, device: torch.device, compute: torch.device
) -> None:
    """Allocate every sharded parameter on ``device`` and write this rank's shard of ``weights`` to it.

    Buffers are allocated on ``compute``, where forward reads them. The initial model is the same for any
    number of ranks.
    """
    allocate_parameters(model, device, buffers_on=compute)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shard = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            weights.write(name, parameter.shape, compute_shard_region(parameter), shard)


def compute_shard_region(parameter: torch.Tensor) -> Region:
    """Return the index ranges of this rank's shard of ``parameter``, one range per dimension.

    ``Shard`` makes equal chunks, of which the last ones may be shorter or empty. A tensor that is not a
    ``DTensor`` is not sharded: its ranges are complete.
    """
    ranges = [range(size) for size in parameter.shape]
    if isinstance(parameter, DTensor):
        # The last mesh axis first: FSDP2 shards the tensor-parallel shard further (_StridedShard).
        for axis, placement in reversed(list(enumerate(parameter.placements))):
            if isinstance(placement, Shard | _StridedShard):
                full_range = ranges[placement.dim]
                chunk_size = ceil_div(len(full_range), parameter.device_mesh.size(axis))
                first = chunk_size * parameter.device_mesh.get_local_rank(axis)
                ranges[placement.dim] = full_range[first : first + chunk_size]
    return ranges
