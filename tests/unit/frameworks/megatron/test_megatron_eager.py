"""Tests of megatron-core's eager attention by hand: saved bytes and peaks in units of the score matrix."""

from __future__ import annotations

from dataclasses import replace

import pytest
from random_plans import LLAMA

import shardscope as ss
from shardscope.frameworks.megatron.memory.eager_attention import compute_eager_attention, takes_plain_softmax
from shardscope.memory.activations.modules.megatron import copies_query, list_fused_projection, repeats_heads
from shardscope.memory.activations.modules.saved_tensors import Modules

GPT = ss.models["gpt-3-175b"]
SEQ = 2048
SCORES = GPT.num_attention_heads * SEQ
"""Elements of the scores of one token."""
OUTPUT = 2 * GPT.hidden_size


def make_modules(compute: int = 2, dropout: float = 0.0) -> Modules:
    return Modules("megatron", False, compute, SEQ, dropout=dropout, attention="eager")


def test_fused_softmax_saves_scores_and_probabilities() -> None:
    attention = compute_eager_attention(GPT, make_modules(), 1, 0)
    assert attention.saved == 2 * SCORES
    assert attention.forward == 4 * SCORES + 2 * OUTPUT
    assert attention.gradients == 2 * SCORES + 2 * OUTPUT
    dropped = compute_eager_attention(GPT, make_modules(dropout=0.1), 1, 0)
    # Korthikanti et al. 2022, eq. 1: 5 a s^2 b.
    assert dropped.saved == 5 * SCORES


@pytest.mark.parametrize("rows", [3, 96])
def test_torch_softmax_saves_fp32_scores_and_one_mask_per_call(rows: int) -> None:
    mask = SCORES // rows
    half, full = (compute_eager_attention(GPT, make_modules(compute), 1, rows) for compute in (2, 4))
    assert half.saved == 6 * SCORES + mask
    # The product, its fp32 copy, the softmax and its cast; and with few rows the mask while it is built.
    assert half.forward >= 12 * SCORES + mask
    assert half.gradients + half.saved == 12 * SCORES + mask + OUTPUT
    assert full.saved == 4 * SCORES + mask
    # Autograd's copies of a gradient that goes through a view.
    assert full.gradients + full.saved == 16 * SCORES + mask + 2 * OUTPUT
    # Dropout saves its own output instead of the cast.
    dropped = compute_eager_attention(GPT, make_modules(dropout=0.1), 1, rows)
    assert dropped.saved == 7 * SCORES + mask


def test_torch_softmax_runs_where_the_fused_kernel_does_not() -> None:
    assert not takes_plain_softmax(make_modules(), 96)
    assert takes_plain_softmax(make_modules(), 3) and takes_plain_softmax(make_modules(4), 96)
    assert takes_plain_softmax(make_modules()._replace(seq_len=8192), 96)
    assert not takes_plain_softmax(make_modules()._replace(attention=None, seq_len=8192), 96)


def test_key_value_heads_are_repeated_to_the_query_heads_of_a_rank() -> None:
    """32 heads of 8 groups: with tp 8 a rank has one group of four heads, with tp 32 one head."""
    grouped = replace(LLAMA, num_attention_heads=32, num_key_value_heads=8)
    assert [repeats_heads(grouped, tp) for tp in (1, 8, 16, 32)] == [True, True, True, False]
    assert [copies_query(grouped, tp) for tp in (1, 8, 16, 32)] == [True, False, False, False]
    # With more ranks than groups, the fused projection is all-gathered on every rank.
    assert [list_fused_projection(grouped, make_modules(), tp)[0].cut_by for tp in (8, 16)] == ["tp", "whole"]
