"""FSDP2 with context parallelism: torch's experimental ``context_parallel``, called directly.

Ranks of one context-parallel group read the same sequences, and each keeps a shard of every sequence. The
training state is sharded over these ranks too (torchtitan's ``dp_shard_cp``). Only attention needs the other
shards: torch's ring attention passes their keys and values around (Liu et al. 2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardscope.core.number_format import format_count
from shardscope.frameworks.fsdp2.engine.engine import Fsdp2Engine
from shardscope.frameworks.fsdp2.engine.ring import Ring
from shardscope.training.accounting.memory_watch import MemoryWatch
from shardscope.training.engine import BuildModel
from shardscope.training.generation import choose_tokens
from shardscope.training.micro_batches import IGNORED_LABEL

ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.05}
"""Relative tolerance between attention over the ring and over the whole sequence, by compute type: it allows
for another order of summation, and is far below the error of misplaced shards."""


class ContextParallelEngine(Fsdp2Engine):
    """FSDP2 engine with context parallelism: each rank computes a shard of each sequence."""

    cp_mesh: DeviceMesh
    """This rank's context-parallel group of consecutive ranks."""
    ring: Ring
    """Attention of the model."""
    _positions: torch.Tensor
    """This rank's positions in the sequence during a micro-batch."""
    _ring_is_verified = False
    """Whether a step has verified that attention runs through the ring."""

    def make_mesh(self) -> DeviceMesh:
        cp = self.plan.degrees.cp
        # A mesh of its own: fully_shard's mesh has one shard axis, in which cp ranks are consecutive.
        shape = (self.ctx.world_size // cp, cp)
        self.cp_mesh = init_device_mesh(self.ctx.device.type, shape, mesh_dim_names=("data", "cp"))["cp"]
        return super().make_mesh()

    def build_on_host(self, build_model: BuildModel) -> torch.nn.Module:
        model = super().build_on_host(build_model)
        self.ring = Ring(self.cp_mesh, self.ctx.device, repeats_keys=self._repeats_keys)
        self.ring.replace_attention(model)
        return model

    @property
    def _repeats_keys(self) -> bool:
        """Return whether keys and values are repeated for grouped-query attention.

        Of CUDA's fused kernels only flash attention, in half precision, computes grouped-query attention
        without it (torch, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
        """
        if self.ctx.device.type == "cpu":
            return False
        return self.recipe.precision == "fp32" or not self.plan.cluster.gpu.has_flash_attention

    # ---- reading back

    def read_back(self) -> dict[str, object]:
        record = super().read_back()
        cp, rank = self.plan.degrees.cp, self.ctx.rank
        group = dist.get_process_group_ranks(self.cp_mesh.get_group())
        first = rank // cp * cp
        if group != list(range(first, first + cp)):
            raise RuntimeError(f"the plan splits sequences over cp={cp} ranks, and rank {rank} is in {group}")
        # Keys that never left their rank would train without an error, only worse: compare with attention
        # over the whole sequence, with the model's heads and types, which select the kernel.
        arch, dtype = self.plan.architecture, self.compute_dtype
        deviation = self.ring.measure_deviation(
            arch.num_attention_heads, arch.num_key_value_heads, arch.head_dim, dtype
        )
        # Negated, so that NaN raises too.
        if not deviation < ROUNDING[dtype]:
            raise RuntimeError(
                f"the plan splits sequences over cp={cp} ranks, and attention over torch's ring differs by "
                f"{100 * deviation:.1f} % from attention over the whole sequence"
            )
        return {**record, "cp": len(group), "cp_ranks": group, "ring_attention_off_by": deviation}

    def describe_built(self, record: Mapping[str, object], where: str) -> str:
        return (
            f"{super().describe_built(record, where)}; each sequence sharded over "
            f"{format_count(self.plan.degrees.cp, 'rank')}, with torch's ring attention"
        )

    # ---- a step

    def _run_step(self, batch: Mapping[str, torch.Tensor], watch: MemoryWatch) -> float:
        _check_batch(batch, self.recipe.seq_len)
        loss = super()._run_step(batch, watch)
        # Code of the user's own model may compute attention without transformers' interface, and so within
        # the local shard only. More calls than layers are those of recomputation.
        expected = self.plan.architecture.num_hidden_layers * self.plan.num_micro_batches
        if not self._ring_is_verified and self.ring.num_calls < expected:
            raise RuntimeError(
                f"the plan splits sequences over ranks, and {self.ring.num_calls} of {expected} attention "
                "calls of the first step went through the ring"
            )
        self._ring_is_verified = True
        return loss

    @contextmanager
    def gradient_sync(self, last: bool) -> Iterator[None]:
        with super().gradient_sync(last), self.ring.shard_positions(self.recipe.seq_len) as self._positions:
            yield

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        # The first step verifies its own calls only.
        num_calls = self.ring.num_calls
        with super().evaluation(), self.ring.shard_positions(self.recipe.seq_len) as self._positions:
            yield
        self.ring.num_calls = num_calls

    def _evaluate(self, batch: Mapping[str, torch.Tensor]) -> float:
        _check_batch(batch, self.recipe.seq_len)
        return super()._evaluate(batch)

    def _predict_next(self, input_ids: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        positions = self._positions
        # The ring's positions are those of whole rows.
        input_ids = F.pad(input_ids, (0, self.recipe.seq_len - input_ids.shape[1]))
        logits = self._compute_logits(
            input_ids=input_ids[:, positions], position_ids=positions[None], use_cache=False
        )
        # A row's last position is on one rank of the group: the others add zero.
        is_last = positions == last[:, None]
        tokens = choose_tokens(logits, is_last.int().argmax(-1)) * is_last.any(-1)
        dist.all_reduce(tokens, group=self.cp_mesh.get_group())
        return tokens

    def _compute_loss(self, micro: dict[str, torch.Tensor]) -> torch.Tensor:
        positions, cp = self._positions, self.plan.degrees.cp
        # Shift the labels before sharding: the label after a shard's last token is in another shard.
        shifted = F.pad(micro["labels"], (0, 1), value=IGNORED_LABEL)[:, 1:]
        labels = shifted[:, positions]
        output = self._module(
            input_ids=micro["input_ids"][:, positions],
            # The two pieces of a sequence are not contiguous: rotary angles need the real positions.
            position_ids=positions[None],
            labels=labels,
            # transformers' loss functions take these as they are, and would shift ``labels`` (loss_utils.py).
            shift_labels=labels,
            # Each rank divides its shard's loss by the labels of the whole sequences.
            num_items_in_batch=(shifted != IGNORED_LABEL).sum(),
            use_cache=False,
        )
        # FSDP2 averages gradients over ranks, but the shards' losses must be summed.
        loss: torch.Tensor = output.loss * cp
        return loss


def _check_batch(batch: Mapping[str, torch.Tensor], seq_len: int) -> None:
    """Raise ``ValueError`` for a batch that cannot be sharded along the sequence."""
    if set(batch) != {"input_ids", "labels"}:
        raise ValueError(
            f"a batch has {', '.join(sorted(batch))}; allowed with cp > 1: input_ids and labels: ring "
            "attention supports no mask. Nearest fix: leave the others out, and label padding with -100."
        )
    shapes = {name: tuple(tensor.shape) for name, tensor in batch.items()}
    if any(len(shape) != 2 or shape[1] != seq_len for shape in shapes.values()):
        raise ValueError(
            f"a batch has {shapes}; allowed with cp > 1: rows of the plan's seq_len={seq_len} tokens, which "
            f"divide into equal parts. Nearest fix: pad or cut them to {seq_len}."
        )
