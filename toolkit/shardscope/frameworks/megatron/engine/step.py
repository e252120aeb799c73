"""One training step through Megatron-core's schedules: micro-batches and the mean loss over labels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardscope.core.errors import refuse
from shardscope.frameworks.megatron.engine.context_parallel import check_length, own_pieces
from shardscope.training import micro_batches
from shardscope.training.micro_batches import IGNORED_LABEL

if TYPE_CHECKING:
    from shardscope.training.accounting.memory_watch import MemoryWatch

TENSORS = {"input_ids", "labels"}


def forward_backward(
    chunks: list[Any], batch: Mapping[str, torch.Tensor], num_micro_batches: int, device: torch.device
) -> Callable[[], torch.Tensor]:
    """Run forward and backward of all micro-batches and reduce gradients. Return a function for the loss.

    The function waits for the loss over all ranks, whose all-reduce overlaps with the optimizer step.

    Raises ``ValueError`` for a batch whose tensors are not those of a causal language model.
    """
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    if set(batch) != TENSORS:
        refuse(
            "batch",
            ", ".join(sorted(batch)),
            "input_ids and labels, and no others: a GPTModel of Megatron-core reads no more",
            {"batch": {"input_ids": ..., "labels": ...}},
        )
    check_length(batch["input_ids"].shape[1])
    micros = micro_batches.split_batch(batch, num_micro_batches)
    counted = micro_batches.LossWeights(micros)
    # Computed before the first message between stages, so that all ranks raise together or none does.
    weights = [counted[index] for index in range(num_micro_batches)]
    total = torch.zeros((), device=device)

    def forward_step(indices: Iterator[int], model: Any) -> tuple[Any, Callable[[Any], Any]]:
        index = next(indices)
        tokens = micros[index]["input_ids"].to(device, non_blocking=True)
        labels, is_labelled = _next_tokens(micros[index]["labels"].to(device, non_blocking=True))
        positions = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
        whole = {"tokens": tokens, "positions": positions, "labels": labels, "is_labelled": is_labelled}
        own = own_pieces(whole)
        output = model(own["tokens"], own["positions"], None, labels=own["labels"])

        def loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
            # This rank's share of it: the schedule multiplies by the ranks that share a sequence.
            mean = (losses.float() * own["is_labelled"]).sum() / is_labelled.sum()
            part = mean * weights[index]
            total.add_(part.detach())
            # schedules.py divides by the number of micro-batches, which the weights already include.
            return part * num_micro_batches, {}

        return output, loss

    rows, length = micros[0]["input_ids"].shape
    interleaved = len(chunks) > 1
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(range(num_micro_batches)) for _ in chunks]
        if interleaved
        else iter(range(num_micro_batches)),
        model=chunks if interleaved else chunks[0],
        num_microbatches=num_micro_batches,
        seq_length=length,
        decoder_seq_length=length,
        micro_batch_size=rows,
        forward_only=False,
    )
    # Only the last stage has a loss: the same on tensor-parallel ranks, a share on context-parallel ranks.
    summing = dist.all_reduce(total, async_op=True)
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    copies = dist.get_world_size() / (stages * parallel_state.get_context_parallel_world_size())

    def loss_of_all() -> torch.Tensor:
        summing.wait()
        return total / copies

    return loss_of_all


def _next_tokens(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each position's target token, and whether it counts in the loss; both shaped like ``labels``."""
    shifted = torch.full_like(labels, IGNORED_LABEL)
    shifted[:, :-1] = labels[:, 1:]
    is_labelled = shifted != IGNORED_LABEL
    return shifted.masked_fill(~is_labelled, 0), is_labelled


@contextlib.contextmanager
def watched(watch: MemoryWatch) -> Iterator[None]:
    """Record forward and backward of each micro-batch as phases of ``watch``, in any schedule."""
    from megatron.core.pipeline_parallel import schedules

    def in_phase(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            watch.begin_phase(phase)
            found = function(*args, **kwargs)
            watch.end_phase(phase)
            return found

        return call

    before = schedules.forward_step, schedules.backward_step
    schedules.forward_step = in_phase("forward", before[0])
    schedules.backward_step = in_phase("backward", before[1])
    try:
        yield
    finally:
        schedules.forward_step, schedules.backward_step = before
