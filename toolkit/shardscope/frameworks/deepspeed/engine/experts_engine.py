"""DeepSpeed's MoE layers really training: experts spread over the data-parallel ranks, ZeRO over the rest.

(Rajbhandari et al. 2022, DeepSpeed-MoE; deepspeed/moe/layer.py, deepspeed/utils/groups.py.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Parameter

from shardscope.frameworks.deepspeed.engine import checkpointing
from shardscope.frameworks.deepspeed.engine.engine import DeepSpeedEngine
from shardscope.training.engine import BuildModel, BuildOptimizer
from shardscope.training.optimizers.gradients import clip_gradients
from shardscope.training.weights.pretrained import FullTensors


class ExpertsEngine(DeepSpeedEngine):
    """DeepSpeed engine with expert parallelism: each rank has some of every layer's experts."""

    @property
    def ep_rank(self) -> int:
        """Expert-parallel rank: every ``ep`` consecutive ranks together have all experts."""
        return int(self.ctx.rank % self.plan.degrees.ep)

    # ---- what is built

    def build_with_weights(self, build_model: BuildModel) -> torch.nn.Module:
        from shardscope.frameworks.deepspeed.engine.experts_module import spread_experts

        model = super().build_with_weights(build_model)
        spread_experts(model, ep=self.plan.degrees.ep, ep_rank=self.ep_rank)
        return model

    def create_optimizer(
        self, trained: list[Parameter], model: torch.nn.Module, build_optimizer: BuildOptimizer | None
    ) -> torch.optim.Optimizer:
        from shardscope.frameworks.deepspeed.engine.experts_module import expert_groups

        optimizer = super().create_optimizer(trained, model, build_optimizer)
        expert_groups(optimizer)
        return optimizer

    # ---- a step

    def clip_gradients(self) -> torch.Tensor:
        """Over all ranks: of experts each has others, of everything else all have the same."""
        group = self._module.data_parallel_group
        return clip_gradients(
            self.model.parameters(), self.ctx.device, group, self.max_grad_norm, self._copies
        )

    def _copies(self, parameter: Parameter) -> int:
        ranks = int(self.plan.degrees.data_parallel)
        return ranks if getattr(parameter, "allreduce", True) else ranks // int(self.plan.degrees.ep)

    # ---- what leaves the run

    def full_tensors(self) -> FullTensors:
        """Under transformers' names; a layer's experts are joined from the ranks that have them."""
        from shardscope.frameworks.deepspeed.engine.experts_module import MoeBlock

        main = self.recipe.precision != "bf16"
        gather = checkpointing.gathering(self._module, main=main, device=self.ctx.device)
        is_first = self.ctx.rank == 0
        blocks = {name: block for name, block in self.model.named_modules() if isinstance(block, MoeBlock)}
        seen: set[str] = set()
        for name, parameter in self.model.named_parameters():
            inside = next((prefix for prefix in blocks if name.startswith(f"{prefix}.")), None)
            if inside is None:
                whole = gather(parameter)
                yield name, whole.cpu() if is_first else None
            elif inside not in seen:
                seen.add(inside)
                for own_name, own in self._joined(blocks[inside], gather):
                    yield f"{inside}.{own_name}", own.cpu() if is_first else None

    def _joined(self, block: Any, gather: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield "gate.weight", gather(block.router.weight)
        group = block.moe.deepspeed_moe.ep_group
        for name in ("gate_up_proj", "down_proj"):
            here = torch.stack([gather(getattr(expert, name)) for expert in block.experts])
            parts = [torch.empty_like(here) for _ in range(self.plan.degrees.ep)]
            dist.all_gather(parts, here.contiguous(), group=group)
            yield f"experts.{name}", torch.cat(parts)

    # ---- what it is

    def read_back(self) -> dict[str, Any]:
        from shardscope.frameworks.deepspeed.engine.experts_module import MoeBlock

        found = super().read_back()
        ep, arch = int(self.plan.degrees.ep), self.plan.architecture
        blocks = [module for module in self._module.module.modules() if isinstance(module, MoeBlock)]
        if len(blocks) != arch.num_moe_layers:
            raise RuntimeError(f"the plan has {arch.num_moe_layers} MoE layers; DeepSpeed made {len(blocks)}")
        for block in blocks:
            group = block.moe.deepspeed_moe.ep_group
            made = (dist.get_world_size(group), dist.get_rank(group), len(block.experts))
            if made != (ep, self.ep_rank, len(block.numbers)):
                raise RuntimeError(
                    f"the plan's ep={ep} is {len(block.numbers)} experts on rank {self.ep_rank} of {ep}; "
                    f"DeepSpeed made {made[2]} on rank {made[1]} of {made[0]}"
                )
        return {**found, "ep": ep, "experts": list(blocks[0].numbers)}

    def describe_built(self, found_: Mapping[str, Any], where: str) -> str:
        numbers = ", ".join(map(str, found_["experts"]))
        return (
            f"{super().describe_built(found_, where)}; experts {numbers} of each layer on this rank, over "
            f"{found_['ep']} ranks"
        )
