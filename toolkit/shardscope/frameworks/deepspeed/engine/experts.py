"""DeepSpeed engine with expert parallelism: experts distributed over the data-parallel ranks.

Rajbhandari et al. 2022, DeepSpeed-MoE; deepspeed/moe/layer.py, deepspeed/utils/groups.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn import Parameter

from shardscope.frameworks.deepspeed.engine import checkpointing
from shardscope.frameworks.deepspeed.engine.engine import DeepSpeedEngine
from shardscope.training.engine import BuildModel, BuildOptimizer
from shardscope.training.optimizers.gradients import clip_gradients
from shardscope.training.weights.pretrained import FullTensors

if TYPE_CHECKING:
    from shardscope.frameworks.deepspeed.engine.experts_module import MoeBlock


class ExpertsEngine(DeepSpeedEngine):
    """DeepSpeed engine with expert parallelism: each rank has some of every layer's experts."""

    @property
    def ep_rank(self) -> int:
        """Expert-parallel rank: every ``ep`` consecutive ranks together have all experts."""
        return int(self.ctx.rank % self.plan.degrees.ep)

    # ---- what is built

    def build_with_weights(self, build_model: BuildModel) -> torch.nn.Module:
        from shardscope.frameworks.deepspeed.engine.experts_module import replace_experts

        model = super().build_with_weights(build_model)
        replace_experts(model, ep=self.plan.degrees.ep, ep_rank=self.ep_rank)
        return model

    def create_optimizer(
        self, trained: list[Parameter], model: torch.nn.Module, build_optimizer: BuildOptimizer | None
    ) -> torch.optim.Optimizer:
        from shardscope.frameworks.deepspeed.engine.experts_module import separate_experts

        optimizer = super().create_optimizer(trained, model, build_optimizer)
        separate_experts(optimizer)
        return optimizer

    # ---- a step

    def clip_gradients(self) -> torch.Tensor:
        """Clip by the norm over all ranks, which have different experts and replicas of all other weights."""
        group = self._module.data_parallel_group
        return clip_gradients(
            self.model.parameters(), self.ctx.device, group, self.max_grad_norm, self._count_copies
        )

    def _count_copies(self, parameter: Parameter) -> int:
        ranks = int(self.plan.degrees.data_parallel)
        return ranks if getattr(parameter, "allreduce", True) else ranks // int(self.plan.degrees.ep)

    # ---- what leaves the run

    def full_tensors(self) -> FullTensors:
        """Yield the full tensors by transformers' names, with the experts of all ranks."""
        from shardscope.frameworks.deepspeed.engine.experts_module import MoeBlock

        main = self.recipe.precision != "bf16"
        gather = checkpointing.build_gather(self._module, main=main, device=self.ctx.device)
        is_first = self.ctx.rank == 0
        blocks = {name: block for name, block in self.model.named_modules() if isinstance(block, MoeBlock)}
        seen: set[str] = set()
        for name, parameter in self.model.named_parameters():
            block_name = next((prefix for prefix in blocks if name.startswith(f"{prefix}.")), None)
            if block_name is None:
                tensor = gather(parameter)
                yield name, tensor.cpu() if is_first else None
            elif block_name not in seen:
                seen.add(block_name)
                for leaf, tensor in self._gather_block(blocks[block_name], gather):
                    yield f"{block_name}.{leaf}", tensor.cpu() if is_first else None

    def _gather_block(
        self, block: MoeBlock, gather: Callable[[Parameter], torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the router's weight and the stacked matrices of all experts, as transformers names them."""
        yield "gate.weight", gather(block.router.get_parameter("weight"))
        group = block.moe.deepspeed_moe.ep_group
        for name in ("gate_up_proj", "down_proj"):
            stacked = torch.stack([gather(getattr(expert, name)) for expert in block.experts])
            shards = [torch.empty_like(stacked) for _ in range(self.plan.degrees.ep)]
            dist.all_gather(shards, stacked.contiguous(), group=group)
            yield f"experts.{name}", torch.cat(shards)

    # ---- what it is

    def _list_blocks(self) -> list[MoeBlock]:
        from shardscope.frameworks.deepspeed.engine.experts_module import MoeBlock

        return [module for module in self._module.module.modules() if isinstance(module, MoeBlock)]

    def read_back(self) -> dict[str, object]:
        record = super().read_back()
        ep, arch = int(self.plan.degrees.ep), self.plan.architecture
        blocks = self._list_blocks()
        if len(blocks) != arch.num_moe_layers:
            raise RuntimeError(
                f"the plan has {arch.num_moe_layers} MoE layers; DeepSpeed built {len(blocks)}"
            )
        for block in blocks:
            group = block.moe.deepspeed_moe.ep_group
            size, rank, count = dist.get_world_size(group), dist.get_rank(group), len(block.experts)
            if (size, rank, count) != (ep, self.ep_rank, len(block.numbers)):
                raise RuntimeError(
                    f"the plan's ep={ep} is {len(block.numbers)} experts on rank {self.ep_rank} of {ep}; "
                    f"DeepSpeed built {count} on rank {rank} of {size}"
                )
        return {**record, "ep": ep, "experts": list(blocks[0].numbers)}

    def describe_built(self, found: Mapping[str, object], where: str) -> str:
        numbers = ", ".join(map(str, self._list_blocks()[0].numbers))
        return (
            f"{super().describe_built(found, where)}; experts {numbers} of each layer on this rank, over "
            f"{found['ep']} ranks"
        )
