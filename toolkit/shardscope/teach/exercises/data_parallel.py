"""Exercises of notebooks 03 (data parallel and its buckets) and 04 (ZeRO and FSDP2)."""

from __future__ import annotations

from math import ceil

from shardscope.catalog import models
from shardscope.core.cluster import Cluster
from shardscope.core.layout import Layout
from shardscope.core.plan import Plan
from shardscope.core.recipe import Recipe
from shardscope.planner.claims.memory_claims import MIXED
from shardscope.teach.answers import Choice, Mistake, Number, PlanGoal
from shardscope.teach.exercises.conditions import FITS, require_speed
from shardscope.teach.exercises.exercise import GB, Exercise

BUCKET_BYTES = 25 * 2**20
"""DistributedDataParallel's buckets: bucket_cap_mb's default (Li et al. 2020, section 3.2.2)."""


def count_gradient_bytes() -> int:
    """Return the bytes of GPT-2 XL's gradients in 32 bits."""
    return 4 * models["gpt2-xl"].num_parameters


def compute_ring_bytes(num_bytes: float, ranks: int) -> float:
    """Return what one rank sends in a ring all-reduce: 2 (N - 1) / N of it (Patarasu and Yuan 2009)."""
    return 2 * (ranks - 1) / ranks * num_bytes


def count_buckets() -> int:
    """Return the fewest buckets that hold GPT-2 XL's gradients."""
    return ceil(count_gradient_bytes() / BUCKET_BYTES)


def compute_zero_bytes(stage: int, parameters: float, ranks: int) -> float:
    """Return one rank's training state under a ZeRO stage (Rajbhandari et al. 2020, figure 1)."""
    total = sum(MIXED.values())
    # Bytes a parameter that the stage leaves whole: weights and gradients, weights, nothing.
    whole = {0: total, 1: MIXED["weights"] + MIXED["gradients"], 2: MIXED["weights"], 3: 0}[stage]
    return parameters * (whole + (total - whole) / ranks)


def count_all_gathers(num_layers: int) -> int:
    """Return FSDP2's all-gathers of one micro-batch: each layer twice, and the root group once."""
    return 2 * num_layers + 1


def build_slow_link_plan() -> Plan:
    """Return the plan of exercise 04-slow-links: 8 GPUs over PCIe, whose links are the limit."""
    recipe = Recipe(seq_len=4096, global_batch_size=64, recompute="full")
    return Plan(models["llama-3.1-8b"], Cluster.parse("8xl40s-48gb"), recipe, Layout.fsdp2())


EXERCISES = (
    Exercise(
        name="03-all-reduce-bytes",
        asks="It is a number of GB.",
        expected=Number(
            value=lambda: compute_ring_bytes(16.0, 8),
            unit="GB",
            tolerance=0.001,
            mistakes=(
                Mistake(lambda: 16.0, "That is one copy. A ring sends the vector almost twice."),
                Mistake(
                    lambda: 32.0,
                    "Nearly: a rank never sends the slice that it already has, hence (N - 1) / N.",
                ),
                Mistake(lambda: 14.0, "That is one of the two halves: reduce-scatter, then all-gather."),
                Mistake(
                    lambda: compute_ring_bytes(16.0, 8) * 8,
                    "That is all ranks together. The question is about one rank.",
                ),
            ),
        ),
        hints=(
            "An all-reduce is a reduce-scatter followed by an all-gather. Each sends (N - 1) / N of the "
            "vector.",
            "2 (N - 1) / N times the vector, with N = 8 and 16 GB.",
            "2 x 7 / 8 x 16.",
        ),
        why="2 x 7/8 x 16 = 28 GB. With more ranks it hardly grows, 2 x 16 GB at most: that is why rings "
        "scale "
        "(Patarasu and Yuan 2009).",
    ),
    Exercise(
        name="03-buckets",
        asks="It is a whole number of buckets.",
        expected=Number(
            value=lambda: float(count_buckets()),
            unit="",
            tolerance=1e-6,
            mistakes=(
                Mistake(
                    lambda: float(ceil(count_gradient_bytes() / 2 / BUCKET_BYTES)),
                    "That is for 16-bit gradients. These have 32 bits.",
                ),
                Mistake(
                    lambda: count_gradient_bytes() / BUCKET_BYTES,
                    "The last bucket is partly full, and is sent too: round up.",
                ),
            ),
        ),
        hints=(
            "Bytes of all gradients, divided by the bytes of a bucket, rounded up.",
            'The gradients have 4 x ss.models["gpt2-xl"].num_parameters bytes, a bucket 25 x 2**20.',
            "6,230 MB / 26.2 MB, rounded up.",
        ),
        why="4 x 1,557,611,200 / (25 x 2**20) = 237.7, rounded up: 238 (Li et al. 2020, section 3.2.2). DDP "
        "closes a "
        "bucket with the tensor that fills it, so that real buckets are a little larger.",
    ),
    Exercise(
        name="03-exposed-bucket",
        asks='It is one word: "first", "middle", "last" or "all".',
        expected=Choice(
            right=frozenset({"last"}),
            wrong={
                "first": "The first bucket is sent while nearly all of backward is still to come.",
                "middle": "While it is sent, the layers before it still compute their gradients.",
                "all": "Only without overlap. DDP sends a bucket as soon as it is full.",
            },
        ),
        hints=(
            "Backward runs from the last layer to the first. Which gradients are ready at its end?",
            "A bucket can be overlapped with the backward that is still to come after it is full.",
            "After which bucket does no backward come any more?",
        ),
        why="The last bucket has the gradients of the first layers: when it is full, backward is over, and "
        "nothing "
        "is left to overlap it with (Li et al. 2020, section 3.2.3).",
    ),
    Exercise(
        name="04-zero-2-bytes",
        asks="It is a number of GB (1e9 bytes).",
        expected=Number(
            value=lambda: compute_zero_bytes(2, 7.5e9, 64) / GB,
            unit="GB",
            mistakes=(
                Mistake(
                    lambda: compute_zero_bytes(1, 7.5e9, 64) / GB,
                    "That is ZeRO-1: its gradients are still whole.",
                ),
                Mistake(
                    lambda: compute_zero_bytes(3, 7.5e9, 64) / GB,
                    "That is ZeRO-3: it shards the weights too.",
                ),
                Mistake(lambda: 16 * 7.5, "That is without sharding."),
                Mistake(lambda: 2 * 7.5, "That is the whole part alone. The sharded part is missing."),
            ),
        ),
        hints=(
            "Look up the stage in the table. Which part is divided by the number of GPUs?",
            "2 bytes a parameter are whole, 14 are sharded: 2 x 7.5e9 + 14 x 7.5e9 / 64 bytes.",
            "15 GB and 1.64 GB.",
        ),
        why="2 x 7.5 + 14 x 7.5 / 64 = 16.6 GB, in place of 120 (Rajbhandari et al. 2020, figure 1).",
    ),
    Exercise(
        name="04-all-gathers",
        asks="It is a whole number.",
        expected=Number(
            value=lambda: float(count_all_gathers(models["llama-3.1-8b"].num_hidden_layers)),
            unit="",
            tolerance=1e-6,
            mistakes=(
                Mistake(lambda: 66.0, "The root group is all-gathered once: it stays whole until backward."),
                Mistake(lambda: 64.0, "That is all layers, twice. The root group is missing."),
                Mistake(lambda: 33.0, "That is forward alone. Its layers are freed after it."),
                Mistake(lambda: 32.0, "That is the layers in forward. Backward needs them too."),
                Mistake(lambda: 5.0, "That is the run's model, with 2 layers. This one has 32."),
            ),
        ),
        hints=(
            "Which groups are freed between forward and backward, and have to be all-gathered again?",
            "The trace above has 5 in a step, for 2 layers and the root group: 2 x 2 + 1.",
            "Each of 32 layers twice, and the root group once.",
        ),
        why="32 in forward, 32 in backward and 1 for the root group: 65 for each micro-batch. With "
        "reshard_after_forward=False the layers stay whole too, and 33 are enough.",
    ),
    Exercise(
        name="04-slow-links",
        asks="It is a Layout, or a Plan.",
        expected=PlanGoal(
            start=build_slow_link_plan,
            may_change=("layout",),
            conditions=(FITS, require_speed(1300)),
        ),
        hints=(
            "Where links are slow, send less. Which stages all-gather no weights in forward and backward?",
            "Try the stages of DeepSpeed: ss.Layout.zero(stage=...).",
            "Stage 1 does not fit, and stage 3 sends too much. Stage 2 waits for its reductions, unless "
            "overlap_comm=True.",
        ),
        why="8 L40S have PCIe and no NVLink, and micro-batches of one sequence leave little arithmetic to "
        "hide an all-gather behind. One way is ZeRO-2 with overlap_comm=True: it shards enough to fit, "
        "all-gathers no layer in forward and backward, and hides the all-reduce of its gradients, 2 elements "
        "a parameter after each micro-batch, behind backward. A pipeline is another: its stages send "
        "activations only (notebook 06). With NVLink, or larger micro-batches, stage 3 catches up.",
    ),
)
