"""Exercises of notebook 08 (offload, LoRA and QLoRA)."""

from __future__ import annotations

from shardscope.catalog import models
from shardscope.core.cluster import Cluster
from shardscope.core.layout import Layout
from shardscope.core.plan import Plan
from shardscope.core.recipe import Recipe
from shardscope.teach.answers import Condition, Mistake, Number, PlanGoal
from shardscope.teach.exercises.conditions import FITS
from shardscope.teach.exercises.exercise import GB, Exercise

RANK = 16
MIN_TOKENS = 2000
NF4_BITS = 4 + 8 / 64 + 32 / (64 * 256)
"""Bits of a weight in NF4: one 8-bit scale for 64 weights, and one 32-bit scale for 256 of those scales
(Dettmers et al. 2023, section 3, "Double Quantization")."""
NF4_BITS_SINGLE = 4 + 32 / 64
"""The same with 32-bit scales."""


def count_adapter_parameters(value_width: int | None = None) -> int:
    """Return the weights of rank-16 adapters on q_proj and v_proj of Llama 3.1 8B (Hu et al. 2021).

    Each is r (inputs + outputs): q_proj has 4,096 outputs, v_proj 8 heads of 128. ``value_width`` replaces
    the latter.
    """
    arch = models["llama-3.1-8b"]
    width = value_width or arch.num_key_value_heads * arch.head_dim
    outputs = arch.num_attention_heads * arch.head_dim + width
    return RANK * (2 * arch.hidden_size + outputs) * arch.num_hidden_layers


def count_layer_matrices() -> int:
    """Return the weights of Llama 3.1 70B that QLoRA quantizes: all of its layers, not embedding and head."""
    groups = models["llama-3.1-70b"].parameter_groups
    return groups["attention"] + groups["mlp"]


def build_full_plan() -> Plan:
    """Return the plan of exercise 08-one-gaming-gpu: all weights of an 8B model on one RTX 4090."""
    recipe = Recipe(seq_len=2048, global_batch_size=16)
    return Plan(models["llama-3.1-8b"], Cluster.parse("1xrtx-4090-24gb"), recipe, Layout.ddp())


def find_slowness(plan: Plan) -> str | None:
    """Return how slow the plan is predicted to be, or None if it is fast enough."""
    speed = plan.step().tokens_per_second_per_gpu
    return None if speed >= MIN_TOKENS else f"it has {speed:,.0f}"


EXERCISES = (
    Exercise(
        name="08-lora-parameters",
        asks="It is a number of parameters.",
        expected=Number(
            value=lambda: float(count_adapter_parameters()),
            unit="",
            tolerance=0.005,
            mistakes=(
                Mistake(
                    lambda: float(count_adapter_parameters(models["llama-3.1-8b"].hidden_size)),
                    "v_proj is smaller than q_proj: Llama 3.1 8B has 8 heads of values, and 32 of queries.",
                ),
                Mistake(
                    lambda: count_adapter_parameters() / models["llama-3.1-8b"].num_hidden_layers,
                    "That is one layer. The model has 32.",
                ),
                Mistake(
                    lambda: count_adapter_parameters() / 1e6,
                    "The number of millions is right. Expected are parameters: multiply by 1e6.",
                ),
            ),
        ),
        hints=(
            "A matrix of m x n gets two adapters: r x n and m x r. That is r (m + n) parameters.",
            "q_proj is 4096 x 4096. v_proj has 4096 inputs and 8 x 128 = 1024 outputs.",
            "16 x ((4096 + 4096) + (4096 + 1024)) in each of 32 layers.",
        ),
        why="16 x (8,192 + 5,120) x 32 = 6,815,744: 0.08 % of 8.03 billion. Gradients and optimizer state "
        "are kept for these alone (Hu et al. 2021, section 4.2).",
    ),
    Exercise(
        name="08-qlora-weights",
        asks='It is a number of GB (1e9 bytes), or text with a unit, such as "40 GiB".',
        expected=Number(
            value=lambda: NF4_BITS / 8 * count_layer_matrices() / GB,
            unit="GB",
            # 35 is 35.3, rounded.
            tolerance=0.01,
            mistakes=(
                Mistake(
                    lambda: count_layer_matrices() / 2 / GB,
                    "That is 4 bits a weight. The scales have to be stored too: 4.127 bits.",
                ),
                Mistake(
                    lambda: NF4_BITS_SINGLE / 8 * count_layer_matrices() / GB,
                    "That is with 32-bit scales. Double quantization stores them in 8 bits.",
                ),
                Mistake(
                    lambda: 2 * count_layer_matrices() / GB, "That is 16 bits a weight, as LoRA keeps them."
                ),
                Mistake(
                    lambda: NF4_BITS * count_layer_matrices() / GB,
                    "That is the number of gigabits: a byte has 8 bits.",
                ),
            ),
        ),
        hints=(
            "Multiply the weights by the bits of each, and divide by 8 bits a byte.",
            "4 bits, 8 bits for each 64 weights, and 32 bits for each 64 x 256: 4 + 0.125 + 0.002 bits.",
            "68.45e9 x 4.127 / 8 / 1e9.",
        ),
        why="68.45 billion x 4.127 bits = 35.3 GB instead of 136.9 in 16 bits. Embedding and head stay in 16 "
        "bits: 4.2 GB more (Dettmers et al. 2023, section 3).",
    ),
    Exercise(
        name="08-one-gaming-gpu",
        asks="It is a Plan: dataclasses.replace(plan, recipe=...) makes one.",
        expected=PlanGoal(
            start=build_full_plan,
            may_change=("layout", "recipe.method", "recipe.recompute"),
            conditions=(
                FITS,
                Condition(f"at least {MIN_TOKENS:,} tokens/s", find_slowness),
            ),
        ),
        hints=(
            'Layout.zero(stage=3, offload_optimizer="cpu", offload_params="cpu") fits, but a step waits for '
            "the host. Which method has hardly any state?",
            'With method="lora", the frozen 16-bit weights leave too little for activations, and '
            "recomputation costs speed. Can frozen weights be smaller?",
            'replace(plan, recipe=replace(plan.recipe, method="qlora")) is worth a try.',
        ),
        why="Full training fits with offload, at less than half of the speed asked for. LoRA has no state to "
        "offload, and QLoRA no 16-bit weights: 5.8 GB of weights instead of 16.1, so that activations need "
        "no recomputation.",
    ),
)
