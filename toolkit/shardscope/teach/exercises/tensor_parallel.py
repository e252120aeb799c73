"""Exercises of notebook 05 (tensor and sequence parallel)."""

from __future__ import annotations

from shardscope.catalog import models
from shardscope.core.cluster import Cluster
from shardscope.core.layout import Layout
from shardscope.core.plan import Plan
from shardscope.core.precision import HALF
from shardscope.core.recipe import Recipe
from shardscope.teach.answers import Choice, Mistake, Number, PlanGoal
from shardscope.teach.exercises.conditions import FITS, require_speed
from shardscope.teach.exercises.exercise import Exercise

MB = 1e6
SEQ_LEN = 4096
ALL_REDUCES = 4
"""All-reduces of one layer, forward and backward (Shoeybi et al. 2019, figure 4)."""


def compute_all_reduced_bytes() -> float:
    """Return the bytes that one layer of Llama 3.1 70B all-reduces for a micro-batch of one sequence."""
    return ALL_REDUCES * HALF * SEQ_LEN * models["llama-3.1-70b"].hidden_size


def build_wide_plan() -> Plan:
    """Return the plan of exercise 05-inside-a-node: tensor parallelism across two nodes."""
    return Plan(
        models["llama-3.1-70b"],
        Cluster.parse("8x8xh100-sxm-80gb"),
        Recipe(seq_len=SEQ_LEN, global_batch_size=128),
        Layout.megatron(tp=16, sequence_parallel=False),
    )


EXERCISES = (
    Exercise(
        name="05-stored-in-full",
        asks="It is a list of words.",
        expected=Choice(
            right=frozenset({"norms", "residuals"}),
            wrong={
                "heads": "Attention heads are divided: each rank has its own, with their queries, keys and "
                "values.",
                "mlp": "The MLP's inner activations are divided: each rank makes those of its columns.",
            },
        ),
        hints=(
            "A column-sliced matrix makes a slice of its output. What lies outside of such a pair?",
            "The all-reduce gives every rank the whole sum. Which parts of the layer work on that sum?",
            "Two of the four: what comes before the first matrix of a pair and after the second.",
        ),
        why="Norms and residuals lie between the pairs of matrices, where each rank has the whole vector of "
        "every token: the 10 in 10 + 24/t. Sequence parallelism gives each rank its share of the tokens "
        "there (Korthikanti et al. 2022, section 4.2.2).",
    ),
    Exercise(
        name="05-all-reduce-bytes",
        asks='It is a number of MB (1e6 bytes), or text with a unit, such as "1.5 GB".',
        expected=Number(
            value=lambda: compute_all_reduced_bytes() / MB,
            unit="MB",
            mistakes=(
                Mistake(lambda: compute_all_reduced_bytes() / 4 / MB, "That is one all-reduce of the four."),
                Mistake(lambda: compute_all_reduced_bytes() / 2 / MB, "That is forward, or backward, alone."),
                Mistake(
                    lambda: compute_all_reduced_bytes() * 2 / MB,
                    "That is with 32-bit numbers. These have 16 bits, 2 bytes.",
                ),
                Mistake(
                    lambda: compute_all_reduced_bytes() * 2 * 7 / 8 / MB,
                    "That is what one rank sends in a ring. The question is the size of the vectors.",
                ),
                Mistake(
                    lambda: compute_all_reduced_bytes() / 8 / MB,
                    "The vectors are not sliced: every rank has all of h, whatever t is.",
                ),
            ),
        ),
        hints=(
            "How many all-reduces has a layer, forward and backward together? How large is each?",
            "Each has s x b x h numbers of 2 bytes, with s = 4096, b = 1 and h = 8192.",
            "4 x 2 x 4096 x 8192 bytes; divide by 1e6.",
        ),
        why="4 x 2 x 4096 x 8192 = 268 MB in one of 80 layers, for every sequence. It does not fall with t, "
        "while the arithmetic of a rank does: that is why tensor parallelism stays inside a node "
        "(Narayanan et al. 2021, section 3.2).",
    ),
    Exercise(
        name="05-inside-a-node",
        asks="It is a Layout, or a Plan.",
        expected=PlanGoal(
            start=build_wide_plan,
            may_change=("layout.tp", "layout.sequence_parallel"),
            conditions=(FITS, require_speed(750)),
        ),
        hints=(
            "How many GPUs has a node? A tensor-parallel group of more crosses its border.",
            "tp=8 stays inside a node, and needs more memory. What divides the activations further?",
            "ss.Layout.megatron(tp=8, sequence_parallel=True) is worth a try.",
        ),
        why="16 tensor-parallel ranks are two nodes, and every all-reduce waits for the links between them. "
        "8 stay inside NVLink; sequence parallelism then frees the memory that norms and residuals take.",
    ),
)
