"""Exercises of notebook 06 (pipelines)."""

from __future__ import annotations

from shardscope.catalog import models
from shardscope.core.cluster import Cluster
from shardscope.core.layout import Layout
from shardscope.core.plan import Plan
from shardscope.core.recipe import Recipe
from shardscope.teach.answers import Condition, Mistake, Number, PlanGoal
from shardscope.teach.exercises.conditions import FITS
from shardscope.teach.exercises.exercise import Exercise

STAGES, CHUNKS, MICRO_BATCHES = 8, 4, 32
MAX_BUBBLE = 0.03
"""Largest share of the step in exercise 06-shrink-the-bubble."""


def compute_bubble_percent(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Return the bubble in percent of a stage's own time: (p - 1) / (v m) (Narayanan et al. 2021)."""
    return 100 * (stages - 1) / (chunks * micro_batches)


def count_in_flight(stage: int, stages: int, micro_batches: int) -> int:
    """Return the most micro-batches that a stage, counted from 0, holds under 1F1B."""
    return min(micro_batches, stages - stage)


def build_pipeline_plan() -> Plan:
    """Return the plan of exercise 06-shrink-the-bubble: 8 stages, 32 micro-batches of two sequences."""
    return Plan(
        models["llama-3.1-70b"],
        Cluster.parse("8x8xh100-sxm-80gb"),
        Recipe(seq_len=4096, micro_batch_size=2, global_batch_size=128),
        Layout.megatron(tp=4, pp=8),
    )


def find_bubble(plan: Plan) -> str | None:
    """Return the bubble's share of the step if it is too large, or None."""
    step = plan.step()
    share = step.parts["bubble"] / step.seconds
    return None if share < MAX_BUBBLE else f"it is {100 * share:.1f} %"


EXERCISES = (
    Exercise(
        name="06-bubble",
        asks='It is a number of percent, such as 12.5, or text with a unit, such as "12.5 %".',
        expected=Number(
            value=lambda: compute_bubble_percent(STAGES, MICRO_BATCHES, CHUNKS),
            unit="%",
            mistakes=(
                Mistake(
                    lambda: compute_bubble_percent(STAGES, MICRO_BATCHES),
                    "That is without chunks. Interleaving divides the bubble by their number.",
                ),
                Mistake(
                    lambda: 100 * STAGES / (CHUNKS * MICRO_BATCHES),
                    "A stage waits for the other stages: there are p - 1 of them.",
                ),
                Mistake(
                    lambda: 100 * (STAGES - 1) / (CHUNKS * MICRO_BATCHES + STAGES - 1),
                    "That is the share of the whole time, bubble included. The question is about "
                    "(p - 1) / (v m), the share of the work.",
                ),
                Mistake(
                    lambda: 100 * (CHUNKS * STAGES - 1) / MICRO_BATCHES,
                    "A stage has more chunks, but there are not more stages to wait for.",
                ),
            ),
        ),
        hints=(
            "Which numbers of the question are p, v and m?",
            "(p - 1) / (v m) with p = 8, v = 4 and m = 32.",
            "7 / 128, in percent.",
        ),
        why="7 / (4 x 32) = 5.5 % of a stage's own time, in place of 7 / 32 = 21.9 % with one chunk. The "
        "price: a micro-batch crosses from stage to stage 4 times as often (Narayanan et al. 2021, "
        "section 2.2).",
    ),
    Exercise(
        name="06-in-flight",
        asks="It is a whole number.",
        expected=Number(
            value=lambda: float(count_in_flight(2, STAGES, MICRO_BATCHES)),
            unit="",
            tolerance=1e-6,
            mistakes=(
                Mistake(lambda: 32.0, "That is GPipe: all forwards run before the first backward."),
                Mistake(lambda: 8.0, "That is stage 0. Stage 2 is nearer to the end of the model."),
                Mistake(lambda: 3.0, "Later stages hold fewer: count from the end of the pipeline."),
                Mistake(lambda: 7.0, "That is stage 1. Stages are counted from 0."),
                Mistake(lambda: 5.0, "5 forwards are the warm-up; one more runs before the first backward."),
            ),
        ),
        hints=(
            "When does a stage run its first backward? Until then it holds every micro-batch that it began.",
            "The last stage holds 1, the one before it 2, and so on.",
            "p - i with p = 8 and i = 2.",
        ),
        why="8 - 2 = 6, whatever the number of micro-batches: that is what 1F1B is for. GPipe would hold "
        "32 (Narayanan et al. 2019, section 3.2; 2021, section 2.2.1).",
    ),
    Exercise(
        name="06-shrink-the-bubble",
        asks="It is a Plan: replace(plan, layout=..., recipe=...) makes one.",
        expected=PlanGoal(
            start=build_pipeline_plan,
            may_change=("layout.vpp", "recipe.micro_batch_size"),
            conditions=(FITS, Condition("the bubble is under 3 % of the step", find_bubble)),
        ),
        hints=(
            "Two numbers below the fraction line make the bubble smaller: micro-batches and chunks.",
            "Smaller micro-batches are more of them, and chunks cost memory. 80 layers on 8 stages are 10 "
            "layers each: vpp may be 2, 5 or 10.",
            "replace(large, layout=replace(large.layout, vpp=5), recipe=replace(large.recipe, "
            "micro_batch_size=1)) is worth a try.",
        ),
        why="More micro-batches and more chunks divide the same p - 1. Micro-batches of one sequence also "
        "halve the activations, which pays for the chunks that are in flight.",
    ),
)
