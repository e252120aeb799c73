"""Greedy generation with the model as it trains, on all ranks together, without a key-value cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from shardscope.training.engine import Engine

WIDTH_STEP = 16
"""Rows are padded to a multiple of this, so that libraries meet few different shapes."""
NO_TOKEN = -1


def generate_greedily(
    engine: Engine, prompts: Sequence[Sequence[int]], max_new_tokens: int, end_ids: Collection[int]
) -> list[list[int]]:
    """Return the most likely continuation of each prompt, the same on all ranks, with its end token if any.

    Collective: all ranks pass the same prompts, of at most ``seq_len`` tokens. Data-parallel ranks share the
    prompts. A forward has at most the rows and tokens of one micro-batch, so that its memory is within that
    of a training step. A text ends with an end token, after ``max_new_tokens``, or at ``seq_len`` tokens.
    """
    num_ranks, micro_batch_size = engine.num_data_ranks, engine.plan.recipe.micro_batch_size
    # A rank without a prompt of its own takes part in the others' forwards: shards are all-gathered.
    num_own = math.ceil(len(prompts) / num_ranks)
    rows = min(micro_batch_size, num_own)
    own = list(range(engine.data_rank, len(prompts), num_ranks))
    answers = torch.full((len(prompts), max_new_tokens), NO_TOKEN)
    for first in range(0, num_own, rows):
        indices = own[first : first + rows]
        texts = _continue_texts(engine, [prompts[i] for i in indices], rows, max_new_tokens, end_ids)
        for index, text in zip(indices, texts, strict=True):
            answers[index, : len(text)] = torch.tensor(text, dtype=answers.dtype)
    # In host memory, for which every run has gloo. Ranks that share their data have the same tokens.
    dist.all_reduce(answers, op=dist.ReduceOp.MAX)
    return [[token for token in answer if token != NO_TOKEN] for answer in answers.tolist()]


def _continue_texts(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    num_rows: int,
    max_new_tokens: int,
    end_ids: Collection[int],
) -> list[list[int]]:
    """Return the new tokens of this rank's ``prompts``, of which other ranks may have others."""
    plan = engine.plan
    # Sequence parallelism and context parallelism split a sequence into equal parts.
    step = WIDTH_STEP * int(plan.degrees.tp * plan.degrees.cp)
    texts = [list(prompt) for prompt in prompts]
    is_active = [True] * len(texts)
    for _ in range(max_new_tokens):
        longest = max((len(text) for text in texts), default=1)
        state = torch.tensor([longest, any(is_active)], dtype=torch.int64)
        # Ranks take part until the last one has finished, with rows of the same width.
        dist.all_reduce(state, op=dist.ReduceOp.MAX)
        if not state[1]:
            break
        width = min(plan.recipe.seq_len, math.ceil(int(state[0]) / step) * step)
        # The padding is behind the text, where causal attention does not see it.
        input_ids = torch.zeros(num_rows, width, dtype=torch.int64)
        for row, text in zip(input_ids, texts, strict=False):
            row[: len(text)] = torch.tensor(text)
        last = torch.tensor([len(text) - 1 for text in texts] + [0] * (num_rows - len(texts)))
        tokens = engine.predict_next(input_ids, last).tolist()
        for index, text in enumerate(texts):
            if is_active[index]:
                text.append(tokens[index])
                is_active[index] = tokens[index] not in end_ids and len(text) < plan.recipe.seq_len
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def choose_tokens(logits: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Return the most likely token after position ``last`` of each row; logits are (rows, tokens, vocab)."""
    rows = torch.arange(len(last), device=logits.device)
    return logits[rows, last].argmax(-1)


# ---- Pipelines: one micro-batch through all stages, without a schedule


def run_stages(
    chunks: Mapping[int, Callable[[torch.Tensor], torch.Tensor]],
    num_chunks: int,
    input_ids: torch.Tensor,
    hidden: torch.Tensor,
    group: dist.ProcessGroup,
) -> torch.Tensor | None:
    """Run one micro-batch through the model chunks of all stages. Return the output on the last stage.

    ``chunks`` are this rank's, by their number among ``num_chunks``; chunk ``n`` is on stage ``n % pp`` of
    ``group``. ``hidden`` has shape and type of the hidden states between stages. A schedule would keep
    state of its own between steps; here stages wait for each other anyway.
    """
    num_stages, states = dist.get_world_size(group), input_ids
    for number in range(num_chunks):
        is_own = number in chunks
        if is_own:
            states = chunks[number](states)
        if number == num_chunks - 1:
            return states if is_own else None
        states = states.contiguous() if is_own else torch.empty_like(hidden)
        dist.broadcast(states, group=group, group_src=number % num_stages)
    return None


def broadcast_tokens(
    tokens: torch.Tensor | None, num_rows: int, device: torch.device, group: dist.ProcessGroup
) -> torch.Tensor:
    """Return the tokens that the last stage of ``group`` has chosen."""
    if tokens is None:
        tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    dist.broadcast(tokens, group=group, group_src=dist.get_world_size(group) - 1)
    return tokens
