"""DeepSpeed's AutoTP really training: matrices in parts on neighbouring ranks, ZeRO over the groups of them.

(deepspeed/runtime/engine.py, ``_apply_autotp_partitioning``, by the plan that transformers has for a family.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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

    def _model(self, build_model: BuildModel) -> torch.nn.Module:
        model = super()._model(build_model)
        self._whole = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        return model

    @property
    def tp_group(self) -> Any:
        """The ranks with the other parts of this rank's matrices, as DeepSpeed made them."""
        from deepspeed.utils import groups

        return groups.get_tensor_model_parallel_group()

    def _cut_along(self, name: str, parameter: torch.Tensor) -> int | None:
        """The dimension along which this rank has a part of it; None of what every rank has whole."""
        whole = self._whole[name]
        cut = [dim for dim, size in enumerate(parameter.shape) if size != whole[dim]]
        return cut[0] if cut else None

    # ---- a step

    def clip_gradients(self) -> torch.Tensor:
        cut = {
            id(parameter)
            for name, parameter in self.model.named_parameters()
            if self._cut_along(name, parameter) is not None
        }
        tp = int(self.plan.degrees.tp)

        def copies(parameter: torch.nn.Parameter) -> int:
            return 1 if id(parameter) in cut else tp

        parameters, device = self.model.parameters(), self.ctx.device
        return clip_gradients(parameters, device, self.tp_group, self.max_grad_norm, copies)

    # ---- what leaves the run

    def full_tensors(self) -> FullTensors:
        """Under transformers' names; parts of matrices are joined from the ranks that have them."""
        main = self.recipe.precision != "bf16"
        gather = checkpointing.gathering(self._module, main=main, device=self.ctx.device)
        is_first = self.ctx.rank == 0
        for name, parameter in self.model.named_parameters():
            own, dim = gather(parameter), self._cut_along(name, parameter)
            if dim is not None:
                parts = [torch.empty_like(own) for _ in range(self.plan.degrees.tp)]
                dist.all_gather(parts, own.contiguous(), group=self.tp_group)
                own = torch.cat(parts, dim)
            yield name, own.cpu() if is_first else None

    # ---- what it is

    def read_back(self) -> dict[str, Any]:
        found = super().read_back()
        tp, arch, rank = int(self.plan.degrees.tp), self.plan.architecture, self.ctx.rank
        ranks = dist.get_process_group_ranks(self.tp_group)
        first = rank // tp * tp
        if ranks != list(range(first, first + tp)):
            raise RuntimeError(f"the plan cuts matrices over tp={tp} ranks; DeepSpeed put {rank} in {ranks}")
        parameters = dict(self.model.named_parameters())
        cut = {name for name, parameter in parameters.items() if self._cut_along(name, parameter) is not None}
        whole = [
            name for name in parameters if "proj" in name and name.endswith("weight") and name not in cut
        ]
        if whole:
            raise RuntimeError(
                f"the plan cuts matrices over tp={tp} ranks, and DeepSpeed left {len(whole)} whole: "
                f"{', '.join(whole[:3])}"
            )
        number = sum(p.numel() * (tp if name in cut else 1) for name, p in parameters.items())
        if number != arch.num_parameters:
            raise RuntimeError(
                f"the parts hold {number:,} weights, and the model has {arch.num_parameters:,}: {sorted(cut)}"
            )
        return {
            **found,
            "num_parameters": number,
            "tp": len(ranks),
            "tp_ranks": ranks,
            "num_tensors_cut_by_tp": len(cut),
        }

    def describe_built(self, found_: Mapping[str, Any], where: str) -> str:
        return (
            f"{super().describe_built(found_, where)}; AutoTP has cut {found_['num_tensors_cut_by_tp']} of "
            f"{found_['num_parameter_tensors']} tensors over {found_['tp']} ranks"
        )
