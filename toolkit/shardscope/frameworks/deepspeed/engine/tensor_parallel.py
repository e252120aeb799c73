"""DeepSpeed engine with tensor parallelism (AutoTP), with ZeRO over the data-parallel ranks.

AutoTP shards by the plan that transformers has for a model (deepspeed/runtime/engine.py,
``_apply_autotp_partitioning``).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from shardscope.frameworks.deepspeed.engine import checkpointing
from shardscope.frameworks.deepspeed.engine.engine import DeepSpeedEngine
from shardscope.training.engine import BuildModel
from shardscope.training.optimizers.gradients import clip_gradients
from shardscope.training.weights.pretrained import FullTensors


class TensorEngine(DeepSpeedEngine):
    """DeepSpeed engine with tensor parallelism (AutoTP): each rank has a shard of each matrix."""

    @property
    def data_rank(self) -> int:
        return int(self.ctx.rank // self.plan.degrees.tp)

    @property
    def num_data_ranks(self) -> int:
        return int(self.plan.degrees.data_parallel)

    # ---- what is built

    def _build_model(self, build_model: BuildModel) -> torch.nn.Module:
        model = super()._build_model(build_model)
        self._full_shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        return model

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """DeepSpeed's group of tensor-parallel ranks."""
        from deepspeed.utils import groups

        group: dist.ProcessGroup = groups.get_tensor_model_parallel_group()
        return group

    def _find_sharded_dim(self, name: str, parameter: torch.Tensor) -> int | None:
        """Return the dimension in which the parameter is sharded; None if every rank has the full tensor."""
        full_shape = self._full_shapes[name]
        dims = [dim for dim, size in enumerate(parameter.shape) if size != full_shape[dim]]
        return dims[0] if dims else None

    # ---- a step

    def clip_gradients(self) -> torch.Tensor:
        sharded = {
            id(parameter)
            for name, parameter in self.model.named_parameters()
            if self._find_sharded_dim(name, parameter) is not None
        }
        tp = int(self.plan.degrees.tp)

        def count_copies(parameter: torch.nn.Parameter) -> int:
            return 1 if id(parameter) in sharded else tp

        parameters, device = self.model.parameters(), self.ctx.device
        return clip_gradients(parameters, device, self.tp_group, self.max_grad_norm, count_copies)

    # ---- what leaves the run

    def full_tensors(self) -> FullTensors:
        """Yield the full tensors by transformers' names, with all-gathered matrices."""
        main = self.recipe.precision != "bf16"
        gather = checkpointing.build_gather(self._module, main=main, device=self.ctx.device)
        is_first = self.ctx.rank == 0
        for name, parameter in self.model.named_parameters():
            tensor, dim = gather(parameter), self._find_sharded_dim(name, parameter)
            if dim is not None:
                shards = [torch.empty_like(tensor) for _ in range(self.plan.degrees.tp)]
                dist.all_gather(shards, tensor.contiguous(), group=self.tp_group)
                tensor = torch.cat(shards, dim)
            yield name, tensor.cpu() if is_first else None

    # ---- what it is

    def read_back(self) -> dict[str, object]:
        record = super().read_back()
        tp, arch, rank = int(self.plan.degrees.tp), self.plan.architecture, self.ctx.rank
        ranks = dist.get_process_group_ranks(self.tp_group)
        first = rank // tp * tp
        if ranks != list(range(first, first + tp)):
            raise RuntimeError(
                f"the plan has tp={tp}; DeepSpeed's tensor-parallel ranks of {rank} are {ranks}"
            )
        parameters = dict(self.model.named_parameters())
        sharded = {name for name, p in parameters.items() if self._find_sharded_dim(name, p) is not None}
        full = [
            name for name in parameters if "proj" in name and name.endswith("weight") and name not in sharded
        ]
        if full:
            raise RuntimeError(
                f"the plan shards matrices over tp={tp} ranks, and DeepSpeed did not shard {len(full)}: "
                f"{', '.join(full[:3])}"
            )
        # All shards together must be the model.
        number = sum(p.numel() * (tp if name in sharded else 1) for name, p in parameters.items())
        if number != arch.num_parameters:
            raise RuntimeError(
                f"the shards have {number:,} weights, and the model has {arch.num_parameters:,}: "
                f"{sorted(sharded)}"
            )
        return {
            **record,
            "num_parameters": number,
            "tp": len(ranks),
            "tp_ranks": ranks,
            "num_tensors_cut_by_tp": len(sharded),
        }

    def describe_built(self, found: Mapping[str, object], where: str) -> str:
        return (
            f"{super().describe_built(found, where)}; AutoTP shards {found['num_tensors_cut_by_tp']} of "
            f"{found['num_parameter_tensors']} tensors over {found['tp']} ranks"
        )
