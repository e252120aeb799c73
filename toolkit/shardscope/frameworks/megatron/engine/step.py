"""One training step through Megatron-core's schedules: micro-batches and the mean loss over labels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardscope.core.errors import refuse
from shardscope.frameworks.megatron.engine.context_parallel import check_length, shard_sequences
from shardscope.training import micro_batches
from shardscope.training.generation import broadcast_tokens, run_stages
from shardscope.training.micro_batches import IGNORED_LABEL

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel

    from shardscope.core.plan import Plan
    from shardscope.training.accounting.memory_watch import MemoryWatch

TENSORS = {"input_ids", "labels"}
LossFunction = Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, object]]]
"""Returns the loss of a micro-batch from the model's output, and values to report."""


def forward_backward(
    chunks: list[DistributedDataParallel],
    batch: Mapping[str, torch.Tensor],
    num_micro_batches: int,
    device: torch.device,
    *,
    forward_only: bool = False,
) -> Callable[[], torch.Tensor]:
    """Run forward and backward of all micro-batches and reduce gradients. Return a function for the loss.

    ``forward_only`` evaluates: no backward, and micro-batches may have no labels.

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
    # Weights are computed before the first message between stages: all ranks raise together, or none does.
    if forward_only:
        micros, weights = micro_batches.split_for_evaluation(batch, num_micro_batches)
    else:
        micros = micro_batches.split_batch(batch, num_micro_batches)
        loss_weights = micro_batches.LossWeights(micros)
        weights = [loss_weights[index] for index in range(num_micro_batches)]

    # This rank's share of the loss, to which the last stage adds each micro-batch's.
    total = torch.zeros((), device=device)
    # The interleaved schedule expects lists of chunks and iterators, the others single ones.
    rows, length = micros[0]["input_ids"].shape
    interleaved = len(chunks) > 1
    get_forward_backward_func()(
        forward_step_func=_build_forward_step(micros, weights, total),
        data_iterator=[iter(range(num_micro_batches)) for _ in chunks]
        if interleaved
        else iter(range(num_micro_batches)),
        model=chunks if interleaved else chunks[0],
        num_microbatches=num_micro_batches,
        seq_length=length,
        decoder_seq_length=length,
        micro_batch_size=rows,
        forward_only=forward_only,
    )
    # Only the last stage has a loss: the same on tensor-parallel ranks, a share on context-parallel ranks.
    summing = dist.all_reduce(total, async_op=True)
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    # Ranks of the last stage whose shares add up to the same loss: all but the context-parallel ones.
    num_copies: float = dist.get_world_size() / (stages * parallel_state.get_context_parallel_world_size())

    def wait_for_loss() -> torch.Tensor:
        summing.wait()
        return total / num_copies

    return wait_for_loss


def _build_forward_step(
    micros: list[dict[str, torch.Tensor]], weights: list[float], total: torch.Tensor
) -> Callable[[Iterator[int], torch.nn.Module], tuple[torch.Tensor, LossFunction]]:
    """Return the function that megatron-core's schedules call once per micro-batch and chunk.

    It runs the chunk on the micro-batch of the next index, and returns the output and a loss function, which
    the schedule calls on the last stage, and which adds the loss to ``total``.
    """
    device = total.device

    def forward_step(indices: Iterator[int], model: torch.nn.Module) -> tuple[torch.Tensor, LossFunction]:
        index = next(indices)
        tokens = micros[index]["input_ids"].to(device, non_blocking=True)
        labels, is_labelled = _shift_labels(micros[index]["labels"].to(device, non_blocking=True))
        # Positions of the whole sequence, sharded with it: a rank has chunks from its front and its back.
        positions = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
        shard = shard_sequences(
            {"tokens": tokens, "positions": positions, "labels": labels, "is_labelled": is_labelled}
        )
        output = model(shard["tokens"], shard["positions"], None, labels=shard["labels"])

        def compute_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, object]]:
            # This rank's share of the mean: the schedule multiplies by the context-parallel ranks
            # (schedules.py, forward_step_calc_loss).
            mean = (losses.float() * shard["is_labelled"]).sum() / is_labelled.sum()
            weighted = mean * weights[index]
            total.add_(weighted.detach())
            # It also divides by the number of micro-batches, which the weights already include.
            return weighted * len(micros), {}

        return output, compute_loss

    return forward_step


def _shift_labels(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each position's target token, and whether it counts in the loss; both shaped like ``labels``.

    transformers shifts labels inside the loss, a ``GPTModel`` expects them shifted.
    """
    shifted = torch.full_like(labels, IGNORED_LABEL)
    shifted[:, :-1] = labels[:, 1:]
    is_labelled = shifted != IGNORED_LABEL
    # A valid token in the place of -100, which vocab-parallel cross entropy would use as an index.
    return shifted.masked_fill(~is_labelled, 0), is_labelled


def predict_next(
    chunks: list[DistributedDataParallel], plan: Plan, input_ids: torch.Tensor, last: torch.Tensor
) -> torch.Tensor:
    """Return the most likely token after position ``last`` of each row, the same on all stages."""
    from megatron.core import parallel_state

    degrees, device = plan.degrees, input_ids.device
    rows, width = input_ids.shape
    positions = torch.arange(width, device=device).expand_as(input_ids)
    shard = shard_sequences({"tokens": input_ids, "positions": positions})

    def run_chunk(chunk: DistributedDataParallel) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(states: torch.Tensor) -> torch.Tensor:
            # Rotary angles have the length of the input tensor, if there is one (core 0.16,
            # rotary_pos_embedding.py, get_rotary_seq_len): the chunk that embeds the tokens has none.
            chunk.module.set_input_tensor(None if states is input_ids else states)
            output: torch.Tensor = chunk(shard["tokens"], shard["positions"], None)
            return output

        return run

    stage = parallel_state.get_pipeline_model_parallel_rank()
    numbered = {stage + index * degrees.pp: run_chunk(chunk) for index, chunk in enumerate(chunks)}
    config = chunks[0].module.config
    # Megatron's order of dimensions; sequence parallelism shards the first.
    length = shard["tokens"].shape[1] // (degrees.tp if config.sequence_parallel else 1)
    hidden = torch.empty((length, rows, config.hidden_size), dtype=config.params_dtype, device=device)
    group = parallel_state.get_pipeline_model_parallel_group()
    logits = run_stages(numbered, degrees.pp * degrees.vpp, input_ids, hidden, group)
    tokens = None
    if logits is not None:
        tokens = _choose_tokens(logits, shard["positions"], last, plan.architecture.vocab_size)
    return broadcast_tokens(tokens, rows, device, group)


def _choose_tokens(
    logits: torch.Tensor, positions: torch.Tensor, last: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """Return the most likely tokens from this rank's shard of the sequence and of the vocabulary."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    is_last = positions == last[:, None]
    rows = torch.arange(len(last), device=logits.device)
    selected = gather_from_tensor_model_parallel_region(logits[rows, is_last.int().argmax(-1)])
    # Without the rows that pad the vocabulary to the tensor-parallel ranks.
    tokens: torch.Tensor = selected[:, :vocab_size].argmax(-1) * is_last.any(-1)
    # With context parallelism the position is on one rank of the group: the others add zero.
    dist.all_reduce(tokens, group=parallel_state.get_context_parallel_group())
    return tokens


@contextlib.contextmanager
def watch_phases(watch: MemoryWatch) -> Iterator[None]:
    """Record forward and backward of each micro-batch as phases of ``watch``, in any schedule."""
    from megatron.core.pipeline_parallel import schedules

    # Every schedule calls these two module-level functions, once per micro-batch and chunk.
    before = schedules.forward_step, schedules.backward_step
    schedules.forward_step = watch.phase("forward")(before[0])
    schedules.backward_step = watch.phase("backward")(before[1])
    try:
        yield
    finally:
        schedules.forward_step, schedules.backward_step = before
