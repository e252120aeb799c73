"""FSDP2 engine: ``torch.distributed.fsdp.fully_shard``, called directly on each layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
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
from shardscope.frameworks.fsdp2.engine.tensor_parallel import apply_tensor_parallel
from shardscope.frameworks.fsdp2.layout import Fsdp2Layout, get_layout, get_reshard_after_forward
from shardscope.training.engine import BuildModel
from shardscope.training.generation import choose_tokens
from shardscope.training.micro_batch_engine import MIXED_TYPES
from shardscope.training.model.lora import reset_magnitudes
from shardscope.training.model.meta_device import allocate_parameters, build_on_meta
from shardscope.training.model.recompute import list_decoder_layers
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
        # Outermost first: tensor-parallel ranks communicate most and are consecutive, so on one node.
        sizes = {name: getattr(self.plan.degrees, name) for name in ("pp", "replicate", "shard", "tp")}
        # Context-parallel ranks take part in the sharding (torchtitan's dp_shard_cp axis).
        sizes["shard"] = self.num_shards
        axes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
        mesh = init_device_mesh(self.ctx.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        self.tp_mesh = mesh["tp"] if "tp" in axes else None
        self.stage_mesh = mesh["pp"] if "pp" in axes else None
        # fully_shard reads a mesh of two axes as HSDP, and of one as FSDP: give it these axes only.
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
        # On meta if the weights come later: stored ones, or random ones of a model too large for one host.
        comes_later = self.weights is not None or self.initializes_shards
        # A quantized base needs real weights to quantize.
        self._on_meta = comes_later and not self.recipe.base_quantization
        if self._on_meta:
            model = build_on_meta(lambda: self.build_on_host(build_model))
        else:
            model = self.build_on_host(build_model)
            check_has_weights(model)
        # Sharding a model on meta creates DTensors on meta: memory is allocated for shards only.
        self._shard_model(model)
        if self._on_meta:
            self._load_shards(model)
        self.model = model
        return model

    def build_with_weights(self, build_model: BuildModel) -> torch.nn.Module:
        # A model on meta gets its weights after sharding.
        return build_model() if self._on_meta else super().build_with_weights(build_model)

    def _load_shards(self, model: torch.nn.Module) -> None:
        """Allocate the shards of ``model`` and write their initial weights."""
        weights, device = self.initial_weights_of(model, self.ctx.device), self.ctx.device
        materialize(model, weights, device=self._home, compute=device)
        fill_buffers(model, weights)
        reset_magnitudes(model)

    def _shard_model(self, model: torch.nn.Module) -> None:
        """Shard ``model`` bottom-up: one ``fully_shard`` group per decoder layer, and the root."""
        # Mixed precision: all-gathers in half precision, reduce-scatters in fp32. Without it (None) both
        # have the type of the parameters.
        compute_dtype = MIXED_TYPES.get(self.recipe.precision)
        reduce_dtype = torch.float32 if compute_dtype else None
        offload = get_layout(self.plan).offload == "cpu"
        # Copies between host and GPU overlap with compute only from pinned memory; CPU ranks have none.
        pinned = self.ctx.device.type == "cuda"
        shard_module = partial(
            fully_shard,
            mesh=self._get_mesh(),
            mp_policy=MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype),
            offload_policy=CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy(),
        )
        self._home = torch.device("cpu") if offload else self.ctx.device
        reshard = get_reshard_after_forward(self.plan)
        if self.tp_mesh is not None:
            # Before fully_shard, which shards the tensor-parallel shards further (torchtitan's order).
            apply_tensor_parallel(model, self.tp_mesh)
        self._num_groups = 0
        for root in self.list_roots(model):
            # Bottom-up: a group takes the parameters of its module that no group has yet.
            layers = list_decoder_layers(root)
            for layer in layers:
                shard_module(layer, reshard_after_forward=reshard)
            # Backward needs the root's parameters first: torch's default (None) keeps them all-gathered.
            shard_module(root, reshard_after_forward=None)
            self._num_groups += len(layers) + 1

    def list_roots(self, model: torch.nn.Module) -> list[torch.nn.Module]:
        """Return the modules to shard with a root group each: ``model``, or its pipeline chunks."""
        return [model]

    @property
    def roots(self) -> tuple[torch.nn.Module, ...]:
        """Modules with a root group: the model."""
        return (self.model,)

    def read_back(self) -> dict[str, object]:
        degrees, device, mesh = self.plan.degrees, self.ctx.device, self._get_mesh()
        parameters = dict(self.model.named_parameters())
        # Read the DTensors themselves, not the arguments that sharded them.
        inspection.check_sharded(parameters, self._planned_mesh, degrees.tp)
        # shard_group has this many ranks with the same shard: with tp and pp it is the whole world.
        holders = dist.get_world_size(self.shard_group) // (self.num_shards * degrees.pp)
        num_local, num_parameters = inspection.count_weights(
            parameters, self.shard_group, self.num_shards, holders, self.part_copies, device
        )
        layers = [layer for root in self.roots for layer in list_decoder_layers(root)]
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
                self.roots, parameters.values(), get_layout(self.plan).offload, device
            ),
            "prefetch": inspection.describe_prefetch(self.roots),
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
        replicas = f" in each of {record['replicate']} replicas" if self.plan.degrees.replicate > 1 else ""
        home = " in host memory" if record["parameters_on"] != self.ctx.device.type else ""
        by_tp = ""
        if "tp" in record:
            count, tp = record["num_tensors_cut_by_tp"], record["tp"]
            by_tp = f", {count} of them sharded over {tp} tensor-parallel ranks"
        return (
            f"{Fsdp2Layout.title}: all {record['num_sharded_tensors']} parameter tensors are DTensors, "
            f"sharded over {format_count(self.num_shards, 'rank')}{replicas} {where}{home}{by_tp}"
        )

    def gathered_tensors(self) -> Iterator[torch.Tensor]:
        """Each group's all-gather outputs: FSDP2 empties and fills the same storages again and again."""
        for module in (module for root in self.roots for module in root.modules()):
            for group in inspection.list_groups(module):
                for parameter in group.fsdp_params:
                    yield from parameter.all_gather_outputs

    @property
    def compute_dtype(self) -> torch.dtype:
        """Type of the all-gathered parameters, from the root module's mixed precision policy."""
        root = self.roots[0]
        assert isinstance(root, FSDPModule), "_shard_model() calls fully_shard on every root"
        return root._get_fsdp_state()._mp_policy.param_dtype or super().compute_dtype

    @property
    def _planned_mesh(self) -> tuple[int, ...]:
        degrees = self.plan.degrees
        return (degrees.replicate, self.num_shards) if degrees.replicate > 1 else (self.num_shards,)

    @contextmanager
    def gradient_sync(self, last: bool) -> Iterator[None]:
        assert isinstance(self.model, FSDPModule), "_shard_model() calls fully_shard on the model"
        # Only the last backward waits for the reduce-scatters and frees their inputs (torch 2.13,
        # _fully_shard/_fsdp_state.py, _root_post_backward_final_callback).
        self.model.set_is_last_backward(last)
        if self.plan.degrees.replicate > 1:
            self.model.set_requires_all_reduce(last)
        # The backward of a loss over a sharded vocabulary must run in this context, too.
        with loss_parallel() if self.tp_mesh is not None else nullcontext():
            yield

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        for root in self.roots:
            root.eval()
        with super().evaluation(), loss_parallel() if self.tp_mesh is not None else nullcontext():
            yield
        for root in self.roots:
            root.train()
            # A backward would free all-gathered parameters, and clear the order of groups in forward, by
            # which the next backward prefetches (torch 2.13, _fsdp_state.py).
            for module in root.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
                for group in inspection.list_groups(module):
                    group.comm_ctx.post_forward_order.clear()
                    group._post_forward_indices.clear()

    def _compute_loss(self, micro: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = super()._compute_loss(micro)
        # With a sharded vocabulary the loss is a DTensor, replicated on each rank.
        return loss.to_local() if isinstance(loss, DTensor) else loss

    def _predict_next(self, input_ids: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        if self.tp_mesh is None:
            return super()._predict_next(input_ids, last)
        return choose_tokens_of_shards(self._compute_logits(input_ids=input_ids, use_cache=False), last)

    @property
    def shard_group(self) -> ProcessGroup:
        """Ranks that one replica is sharded over; with tp or pp, all ranks."""
        if self.tp_mesh is None and self.stage_mesh is None:
            return self._get_mesh().get_group("shard")
        world = dist.group.WORLD
        assert world is not None, "the context's process group is initialized before the engine"
        return world

    def part_copies(self, parameter: torch.nn.Parameter) -> int:
        """Return how many ranks of ``shard_group`` have the same shard of ``parameter`` as this rank."""
        degrees = self.plan.degrees
        if self.tp_mesh is None and self.stage_mesh is None:
            return 1
        # In the whole world a shard is on every replica, and if tp does not shard it on all its ranks.
        num_ranks: int = degrees.replicate * degrees.tp
        return num_ranks // degrees.tp if inspection.is_tensor_parallel(parameter, degrees.tp) else num_ranks

    def clip_gradients(self) -> torch.Tensor:
        return gradients.clip_gradients(
            self._parameters,
            self.ctx.device,
            self.shard_group,
            self.max_grad_norm,
            # Without tp and pp the group has each shard once, and needs no division by copies.
            None if self.tp_mesh is None and self.stage_mesh is None else self.norm_copies,
        )

    def norm_copies(self, parameter: torch.nn.Parameter) -> int:
        """Return how many times a parameter's squared gradients are counted in the sum over ranks."""
        return self.part_copies(parameter)


def choose_tokens_of_shards(logits: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Return the same as :func:`choose_tokens` for logits whose vocabulary is sharded over the tp mesh."""
    if not isinstance(logits, DTensor):
        return choose_tokens(logits, last)
    # Selected before the all-gather: no rank has all logits of a micro-batch in training either.
    rows = torch.arange(len(last), device=last.device)
    vocab_size = logits.shape[-1]
    selected = DTensor.from_local(
        logits.to_local()[rows, last],
        logits.device_mesh,
        logits.placements if logits.placements[0].is_replicate() else [Shard(1)],
        run_check=False,
        shape=torch.Size((len(last), vocab_size)),
        stride=(vocab_size, 1),
    )
    return selected.full_tensor().argmax(-1)


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
