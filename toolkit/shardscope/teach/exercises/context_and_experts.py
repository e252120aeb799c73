"""Exercises of notebook 07 (context and expert parallel)."""

from __future__ import annotations

from shardscope.catalog import models
from shardscope.core.architecture import Architecture
from shardscope.teach.answers import Mistake, Number
from shardscope.teach.exercises.exercise import GB, Exercise

MB = 1e6
BYTES_16_BIT = 2
LONG_SEQ_LEN = 131_072
RANKS = 8
"""Context-parallel, or expert-parallel, ranks of all three exercises."""


def get_long_model() -> Architecture:
    """Return the model of the exercise on ring attention: Llama 3.1 8B, with 8 key/value heads of 128."""
    return models["llama-3.1-8b"]


def compute_ring_attention_bytes(key_value_width: int | None = None, copies: int = 2) -> float:
    """Return what one rank sends in one layer's forward: its keys and values, to all other ranks.

    2 (keys and values) x 2 bytes x s/N tokens x key/value width, N - 1 times (Liu et al. 2023, section 3).
    """
    arch = get_long_model()
    width = key_value_width or arch.num_key_value_heads * arch.head_dim
    return copies * BYTES_16_BIT * LONG_SEQ_LEN / RANKS * width * (RANKS - 1)


def compute_busiest_share(ranks: int = RANKS) -> float:
    """Return the last rank's work over the mean, if rank i has the i-th slice of a causal sequence: 2 - 1/N.

    Queries after position x of 1 have 1 - x² of all causal pairs, and 1 - (1 - 1/N)² is 2/N - 1/N².
    """
    return 2 - 1 / ranks


def get_expert_model() -> Architecture:
    """Return the model of the exercise on experts: Mixtral 8x7B."""
    return models["mixtral-8x7b"]


def compute_expert_weights_bytes(ranks: int = RANKS) -> float:
    """Return the 16-bit weights of one GPU: its share of the experts, and all of the rest."""
    arch = get_expert_model()
    experts = arch.parameter_groups["experts"]
    return BYTES_16_BIT * (arch.num_parameters - experts + experts / ranks)


EXERCISES = (
    Exercise(
        name="07-ring-bytes",
        asks='It is a number of MB (1e6 bytes), or text with a unit, such as "0.5 GB".',
        expected=Number(
            value=lambda: compute_ring_attention_bytes() / MB,
            unit="MB",
            tolerance=0.005,
            mistakes=(
                Mistake(
                    lambda: compute_ring_attention_bytes(copies=1) / MB,
                    "That is the keys alone. The values travel with them.",
                ),
                Mistake(
                    lambda: compute_ring_attention_bytes(get_long_model().hidden_size) / MB,
                    "That is for 32 heads. Llama 3.1 8B has 32 query heads, but 8 of keys and values.",
                ),
                Mistake(
                    lambda: compute_ring_attention_bytes() * RANKS / (RANKS - 1) / MB,
                    "Nearly: a rank does not send its own slice to itself, so N - 1 times, not N.",
                ),
                Mistake(
                    lambda: compute_ring_attention_bytes() / (RANKS - 1) / MB,
                    "That is one of the steps around the ring. There are N - 1.",
                ),
                Mistake(
                    lambda: compute_ring_attention_bytes() * RANKS / MB,
                    "A rank has s / 8 tokens, not all s of them.",
                ),
            ),
        ),
        hints=(
            "A rank's slice has s / 8 tokens, and each has a key and a value of 8 heads x 128 numbers.",
            "2 (keys and values) x 2 bytes x 131072 / 8 tokens x 1024 numbers are one slice; it goes around "
            "N - 1 steps.",
            "2 x 2 x 16384 x 1024 x 7 bytes; divide by 1e6.",
        ),
        why="2 x 2 bytes x 16,384 tokens x 1,024 x 7 steps = 470 MB for each layer, and more in backward. It "
        "grows with s, the arithmetic of attention with s squared: the longer the sequence, the better the "
        "ring hides (Liu et al. 2023, section 3).",
    ),
    Exercise(
        name="07-causal-balance",
        asks="It is a plain number: how many times the mean.",
        expected=Number(
            value=compute_busiest_share,
            unit="",
            # 1.9 is 1.875, rounded.
            tolerance=0.015,
            mistakes=(
                Mistake(
                    lambda: 1.0,
                    "That is what the order 0, 15 / 1, 14 / ... achieves. With plain slices, later queries "
                    "see more keys.",
                ),
                Mistake(lambda: 2.0, "Nearly: the limit for many ranks. For 8 it is a little less."),
                Mistake(
                    lambda: compute_busiest_share() / RANKS,
                    "That is the last rank's share of all work. Divide it by the mean share, 1 / 8.",
                ),
                Mistake(lambda: 15.0, "That compares the last rank with the first, not with the mean."),
            ),
        ),
        hints=(
            "A query sees all keys up to its own. Count the pairs of query and key in the last eighth.",
            "All pairs are half of a square. The first 7/8 of the queries have (7/8)² of them: the last "
            "eighth has the rest.",
            "(1 - (7/8)²) / (1/8).",
        ),
        why="(1 - 49/64) / (1/8) = 15/8 = 1.875: the seven other ranks wait for the last one. Giving each "
        "rank an early and a late slice of sixteen makes all equal (Grattafiori et al. 2024, section "
        "3.3.2); FSDP2 and Megatron-core do so.",
    ),
    Exercise(
        name="07-expert-weights",
        asks='It is a number of GB (1e9 bytes), or text with a unit, such as "10 GiB".',
        expected=Number(
            value=lambda: compute_expert_weights_bytes() / GB,
            unit="GB",
            tolerance=0.01,
            mistakes=(
                Mistake(
                    lambda: BYTES_16_BIT * get_expert_model().num_parameters / RANKS / GB,
                    "Only experts are spread: attention, embedding and head are on every GPU.",
                ),
                Mistake(
                    lambda: compute_expert_weights_bytes(1) / GB,
                    "That is the whole model. Each of 8 GPUs has one of 8 experts of a layer.",
                ),
                Mistake(
                    lambda: BYTES_16_BIT * get_expert_model().num_active_parameters / GB,
                    "That is what one token uses: two experts. A GPU stores one of eight.",
                ),
                Mistake(
                    lambda: BYTES_16_BIT * get_expert_model().parameter_groups["experts"] / RANKS / GB,
                    "That is the experts alone; each GPU has the rest of the model too.",
                ),
            ),
        ),
        hints=(
            'ss.models["mixtral-8x7b"].parameter_groups has the parameters of experts and of the rest.',
            "Experts are 45.1 of 46.7 billion. A GPU has an eighth of the first, and all that is left.",
            "2 bytes x (45.1 / 8 + 46.7 - 45.1) billion.",
        ),
        why="2 x (45.1 / 8 + 1.6) = 14.5 GB instead of 93.4: the same as plan.memory() has for Megatron with "
        "ep=8. Tokens travel to their experts and back in two all-to-alls a layer (Lepikhin et al. 2020, "
        "section 3).",
    ),
)
