"""Exercises of notebooks 01 (what fills a GPU) and 02 (batch, sequence, recomputation)."""

from __future__ import annotations

from shardscope.catalog import models
from shardscope.core.cluster import Cluster
from shardscope.core.layout import Layout
from shardscope.core.plan import Plan
from shardscope.core.recipe import Recipe
from shardscope.planner.claims.memory_claims import MIXED
from shardscope.teach.answers import Condition, Mistake, Number, PlanGoal
from shardscope.teach.exercises.conditions import FITS
from shardscope.teach.exercises.exercise import GB, Exercise

BYTES_PER_PARAMETER = float(sum(MIXED.values()))
"""Mixed precision with Adam (Rajbhandari et al. 2020, section 3.1): 2 + 2 + 4 + 8."""


def count_8b_parameters() -> int:
    """Return the parameters of Llama 3.1 8B."""
    return models["llama-3.1-8b"].num_parameters


# GPT-3 175B as in Korthikanti et al. 2022, table 3: s = 2,048, b = 1, h = 12,288, a = 96.
SEQ_LEN, MICRO_BATCH, HIDDEN, HEADS = 2048, 1, 12288, 96


def compute_layer_activations(with_scores: bool = True) -> float:
    """Return bytes of one layer's activations: sbh (34 + 5 a s / h) (Korthikanti et al. 2022, equation 1)."""
    scores = 5 * HEADS * SEQ_LEN / HIDDEN if with_scores else 0
    return SEQ_LEN * MICRO_BATCH * HIDDEN * (34 + scores)


def compute_layer_input() -> float:
    """Return bytes of one layer's 16-bit input: 2 sbh, all that full recomputation keeps of a layer."""
    return 2.0 * SEQ_LEN * MICRO_BATCH * HIDDEN


def build_long_plan() -> Plan:
    """Return the plan of exercise 02-make-it-fit, which does not fit without recomputation."""
    recipe = Recipe(seq_len=4096, micro_batch_size=4, global_batch_size=64)
    return Plan(models["llama-3.1-8b"], Cluster.parse("8xh100-sxm-80gb"), recipe, Layout.fsdp2())


def build_batch_plan() -> Plan:
    """Return the plan of exercise 02-micro-batches: 8 nodes, tensor parallelism 2, 512 sequences a step."""
    recipe = Recipe(seq_len=4096, micro_batch_size=2, global_batch_size=512, recompute="full")
    return Plan(models["llama-3.1-8b"], Cluster.parse("8x8xh100-sxm-80gb"), recipe, Layout.fsdp2(tp=2))


def find_recomputed_forward(plan: Plan) -> str | None:
    """Return how the plan recomputes more than it needs, or None."""
    return (
        "full recomputation runs every forward twice; less is enough"
        if plan.recipe.recompute == "full"
        else None
    )


EXERCISES = (
    Exercise(
        name="01-bytes-per-parameter",
        asks="It is a number of bytes.",
        expected=Number(
            value=lambda: BYTES_PER_PARAMETER,
            unit="bytes",
            tolerance=0.001,
            mistakes=(
                Mistake(lambda: 12.0, "12 is a part of it: one of the lines of the table is missing."),
                Mistake(
                    lambda: 4.0, "4 bytes hold the 16-bit weight and its gradient. The optimizer has more."
                ),
                Mistake(lambda: 8.0, "8 bytes are Adam's two moments alone."),
                Mistake(lambda: 18.0, "18 counts the gradient in 32 bits. Here it has 16."),
            ),
        ),
        hints=(
            "Add up every line of the table: weight, gradient, main copy, two moments.",
            "A 16-bit number has 2 bytes, a 32-bit number has 4. Two numbers have 16 bits, three have 32.",
            "2 + 2 for weight and gradient, then three numbers of 4 bytes each.",
        ),
        why="2 + 2 + 4 + 4 + 4 = 16 bytes a parameter (Rajbhandari et al. 2020, section 3.1). FSDP2 and DDP "
        "keep "
        "no 16-bit copy and have 32-bit gradients: 4 + 4 + 4 + 4, the same 16.",
    ),
    Exercise(
        name="01-state-of-8b",
        asks='It is a number of GB (1e9 bytes), or text with a unit, such as "100 GiB".',
        expected=Number(
            value=lambda: BYTES_PER_PARAMETER * count_8b_parameters() / GB,
            unit="GB",
            tolerance=0.01,
            mistakes=(
                Mistake(lambda: 2 * count_8b_parameters() / GB, "That is the weights alone, for inference."),
                Mistake(
                    lambda: 12 * count_8b_parameters() / GB,
                    "12 bytes a parameter are the optimizer's part alone: weights and gradients are missing.",
                ),
            ),
        ),
        hints=(
            "Multiply the bytes of the first exercise by the number of parameters.",
            'The number of parameters is ss.models["llama-3.1-8b"].num_parameters; divide the product by '
            "1e9.",
            "16 x 8.03e9 / 1e9 = 16 x 8.03.",
        ),
        why="16 bytes x 8.03 billion = 128 GB, before the first activation: more than one H100 has, so that "
        "a full "
        "training of an 8B model needs more than one of them, or offloading.",
    ),
    Exercise(
        name="01-activations-of-a-layer",
        asks='It is a number of GB (1e9 bytes), or text with a unit, such as "900 MB".',
        expected=Number(
            value=lambda: compute_layer_activations() / GB,
            unit="GB",
            mistakes=(
                Mistake(
                    lambda: compute_layer_activations(with_scores=False) / GB,
                    "That is sbh x 34: the attention scores, 5 a s / h, are missing.",
                ),
                Mistake(
                    lambda: 96 * compute_layer_activations() / GB,
                    "That is all 96 layers. The question is one.",
                ),
            ),
        ),
        hints=(
            "Put the numbers into s b h (34 + 5 a s / h).",
            "s b h = 2048 x 1 x 12288 = 25.2 million, and 5 a s / h = 5 x 96 x 2048 / 12288 = 80.",
            "25.2e6 x (34 + 80) bytes; divide by 1e9.",
        ),
        why="25.2e6 x 114 = 2.87 GB for one of 96 layers, 275 GB for all: more than two thirds of it are "
        "attention "
        "scores (Korthikanti et al. 2022, equation 1), which FlashAttention does not store (Dao et al. "
        "2022).",
    ),
    Exercise(
        name="02-micro-batches",
        asks="It is a whole number.",
        expected=Number(
            value=lambda: float(build_batch_plan().num_micro_batches),
            unit="",
            tolerance=1e-6,
            mistakes=(
                Mistake(
                    lambda: 512 / (2 * 64),
                    "64 GPUs are 32 replicas here: two tensor-parallel ranks work on the same sequences.",
                ),
                Mistake(lambda: 512 / 32, "That is sequences for each replica. A micro-batch has two."),
                Mistake(lambda: 512 / 2, "That is for all replicas together. Each has its share."),
            ),
        ),
        hints=(
            "micro-batches = global batch / (micro-batch x data-parallel replicas).",
            "How many replicas do 64 GPUs make if every replica has 2 of them (tp = 2)?",
            "512 / (2 x 32).",
        ),
        why="64 GPUs / tp 2 = 32 replicas, and 512 / (2 x 32) = 8 micro-batches. plan.num_micro_batches has "
        "it.",
    ),
    Exercise(
        name="02-recomputation-saves",
        asks="It is a plain number: how many times fewer bytes.",
        expected=Number(
            value=lambda: compute_layer_activations() / compute_layer_input(),
            unit="",
            tolerance=0.005,
            mistakes=(
                Mistake(
                    lambda: compute_layer_activations(with_scores=False) / compute_layer_input(),
                    "That is without attention scores, 34 / 2; with them there are 34 + 80.",
                ),
                Mistake(
                    lambda: compute_layer_input() / compute_layer_activations(),
                    "The other way round: how many times fewer, a number above 1.",
                ),
            ),
        ),
        hints=(
            "Divide the bytes of a whole layer, s b h (34 + 5 a s / h), by the bytes of its input.",
            "The input has s x b x h numbers of 2 bytes: 2 s b h. The factor s b h drops out.",
            "(34 + 80) / 2.",
        ),
        why="114 / 2 = 57 times fewer bytes, for a second forward: about a third more FLOPs, as a backward "
        "costs "
        "two forwards (Korthikanti et al. 2022, table 2).",
    ),
    Exercise(
        name="02-make-it-fit",
        asks="It is a Plan: dataclasses.replace(plan, recipe=...) makes one.",
        expected=PlanGoal(
            start=build_long_plan,
            may_change=("recipe.recompute", "recipe.micro_batch_size"),
            conditions=(
                FITS,
                Condition("no full recomputation", find_recomputed_forward),
                Condition(
                    "micro-batches of at least 2 sequences",
                    lambda plan: (
                        None if plan.recipe.micro_batch_size > 1 else "the micro-batch is 1 sequence"
                    ),
                ),
            ),
        ),
        hints=(
            "Two fields may change: recompute and micro_batch_size. Print answer.memory() to see what it "
            "needs.",
            'Halving the micro-batch halves the activations. recompute="selective" saves a part of each '
            "layer.",
            'replace(plan, recipe=replace(plan.recipe, micro_batch_size=2, recompute="selective")) is worth '
            "a try.",
        ),
        why="The micro-batch sets how many tokens a layer holds at once, and recomputation how much of each "
        "token. "
        "The global batch, and with it the training, stays the same.",
    ),
)
