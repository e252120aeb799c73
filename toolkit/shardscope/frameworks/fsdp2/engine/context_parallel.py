"""FSDP2 with context parallelism: torch's experimental ``context_parallel``, called directly.

Ranks of one context-parallel group read the same sequences, and each keeps a shard of every sequence. The
training state is sharded over these ranks too (torchtitan's ``dp_shard_cp``). Only attention needs the other
shards: torch's ring attention passes their keys and values around (Liu et al. 2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.distributed.device_mesh import init_device_mesh

from shardscope.core.number_format import format_count
from shardscope.frameworks.fsdp2.engine.engine import Fsdp2Engine
from shardscope.frameworks.fsdp2.engine.ring import Ring
from shardscope.training.accounting.memory_watch import MemoryWatch
from shardscope.training.engine import BuildModel
from shardscope.training.micro_batches import IGNORED_LABEL

ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.05}
"""Relative tolerance between attention over the ring and over the whole sequence, by compute type: it allows
for another order of summation, and is far below the error of misplaced shards."""


class ContextParallelEngine(Fsdp2Engine):
    """FSDP2 engine with context parallelism: each rank computes a shard of each sequence."""

    cp_mesh: Any = None
    """This rank's context-parallel group of consecutive ranks."""
    _here: torch.Tensor
    """This rank's positions in the sequence during a micro-batch."""
    _is_seen = False
    """Whether a step has verified that attention runs through the ring."""

    def make_mesh(self) -> Any:
        cp = self.plan.degrees.cp
        shape = (self.ctx.world_size // cp, cp)
        self.cp_mesh = init_device_mesh(self.ctx.device.type, shape, mesh_dim_names=("data", "cp"))["cp"]
        return super().make_mesh()

    def build_on_host(self, build_model: BuildModel) -> torch.nn.Module:
        model = super().build_on_host(build_model)
        self.ring = Ring(self.cp_mesh, self.ctx.device, repeats_keys=self._repeats_keys)
        self.ring.take_over(model)
        return model

    @property
    def _repeats_keys(self) -> bool:
        """Whether keys and values are repeated for grouped-query attention.

        Of CUDA's fused kernels only flash attention, in half precision, supports it (torch's sdp_utils.cpp).
        """
        if self.ctx.device.type == "cpu":
            return False
        return self.recipe.precision == "fp32" or not self.plan.cluster.gpu.has_flash_attention

    # ---- what it is

    def read_back(self) -> dict[str, Any]:
        record = super().read_back()
        cp, rank = self.plan.degrees.cp, self.ctx.rank
        group = dist.get_process_group_ranks(self.cp_mesh.get_group())
        first = rank // cp * cp
        if group != list(range(first, first + cp)):
            raise RuntimeError(f"the plan splits sequences over cp={cp} ranks, and rank {rank} is in {group}")
        arch, kind = self.plan.architecture, self.compute_dtype
        apart = self.ring.distance_from_whole(
            arch.num_attention_heads, arch.num_key_value_heads, arch.head_dim, kind
        )
        if not apart < ROUNDING[kind]:
            raise RuntimeError(
                f"the plan splits sequences over cp={cp} ranks, and attention over torch's ring is "
                f"{apart:.1%} off what it is over the whole sequence"
            )
        return {**record, "cp": len(group), "cp_ranks": group, "ring_attention_off_by": apart}

    def describe_built(self, found: Mapping[str, Any], where: str) -> str:
        described = super().describe_built(found, where)
        return (
            f"{described}; each sequence in parts on {format_count(found['cp'], 'rank')}, attention in "
            "torch's ring"
        )

    # ---- a step

    def _run_step(self, batch: Mapping[str, torch.Tensor], watch: MemoryWatch) -> float:
        _check_batch(batch, self.recipe.seq_len)
        loss = super()._run_step(batch, watch)
        expected = self.plan.architecture.num_hidden_layers * self.plan.num_micro_batches
        if not self._is_seen and self.ring.num_calls < expected:
            raise RuntimeError(
                f"the plan splits sequences over ranks, and of {expected} attentions of the first step "
                f"{self.ring.num_calls} went through the ring"
            )
        self._is_seen = True
        return loss

    @contextmanager
    def gradient_sync(self, last: bool) -> Iterator[None]:
        with super().gradient_sync(last), self.ring.split(self.recipe.seq_len) as self._here:
            yield

    def _compute_loss(self, micro: dict[str, torch.Tensor]) -> torch.Tensor:
        here, cp = self._here, self.plan.degrees.cp
        # Shift the labels before sharding: the label after a shard's last token is in another shard.
        following = F.pad(micro["labels"], (0, 1), value=IGNORED_LABEL)[:, 1:]
        own = following[:, here]
        part = {
            "input_ids": micro["input_ids"][:, here],
            "position_ids": here[None],
            "labels": own,
            "shift_labels": own,
            # Each rank divides its shard's loss by the labels of the whole sequences.
            "num_items_in_batch": (following != IGNORED_LABEL).sum(),
            "use_cache": False,
        }
        # FSDP2 averages gradients over ranks, but the shards' losses must be summed.
        return super()._compute_loss(part) * cp


def _check_batch(batch: Mapping[str, torch.Tensor], seq_len: int) -> None:
    """Raise ``ValueError`` for a batch that cannot be sharded along the sequence."""
    others = sorted(set(batch) - {"input_ids", "labels"})
    if others or len(batch) != 2:
        raise ValueError(
            f"a batch has {', '.join(sorted(batch))}; allowed with cp > 1: input_ids and labels, for a ring "
            "takes no mask. Nearest fix: leave the others out, with -100 as the label of padding."
        )
    shapes = {name: tuple(tensor.shape) for name, tensor in batch.items()}
    if any(len(shape) != 2 or shape[1] != seq_len for shape in shapes.values()):
        raise ValueError(
            f"a batch has {shapes}; allowed with cp > 1: rows of the plan's seq_len={seq_len} tokens, which "
            f"divide into equal parts. Nearest fix: pad or cut them to {seq_len}."
        )
