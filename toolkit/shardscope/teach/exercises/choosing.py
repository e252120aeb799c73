"""Exercises of notebook 09 (choosing a layout, and reading a trace)."""

from __future__ import annotations

from shardscope.catalog import gpus, models
from shardscope.teach.answers import Choice, Mistake, Number
from shardscope.teach.exercises.exercise import Exercise

COMPUTE_MS, COMMUNICATION_MS, OVERLAPPED_MS, IDLE_MS = 600.0, 300.0, 220.0, 40.0
"""One rank's step in exercise 09-exposed-share: the parts of ``trace.breakdown()``."""
MEASURED_TOKENS = 5762
"""Tokens/s per H100 of Llama 3.1 8B with 8,192 tokens, FSDP2, measured (torchtitan, its published
benchmarks)."""
MEASURED_SEQ_LEN = 8192
SPARSE_FACTOR = 2
"""Datasheets print Tensor Core rates "with sparsity" twice as high as dense ones."""


def compute_exposed_ms() -> float:
    """Return the communication that no compute covers."""
    return COMMUNICATION_MS - OVERLAPPED_MS


def compute_step_ms() -> float:
    """Return a rank's step: compute, exposed communication and idle time."""
    return COMPUTE_MS + compute_exposed_ms() + IDLE_MS


def compute_utilization(causal: bool = True) -> float:
    """Return the model FLOPs utilization of the measured run, in percent (Chowdhery et al. 2022).

    ``causal=False`` counts attention to every key, as their formula does.
    """
    flops = models["llama-3.1-8b"].flops_per_token(MEASURED_SEQ_LEN, causal=causal) * MEASURED_TOKENS
    return float(100 * flops / gpus["h100-sxm-80gb"].peak_flops["bf16"])


def compute_utilization_without_attention() -> float:
    """Return the same by the rule of thumb of 6 FLOPs a parameter and token, in percent."""
    flops = 6 * models["llama-3.1-8b"].num_parameters * MEASURED_TOKENS
    return float(100 * flops / gpus["h100-sxm-80gb"].peak_flops["bf16"])


EXERCISES = (
    Exercise(
        name="09-simplest-layout",
        asks='It is one word: "ddp", "fsdp2", "zero-offload" or "megatron".',
        expected=Choice(
            right=frozenset({"ddp"}),
            wrong={
                "fsdp2": "It runs, and gathers weights in every micro-batch that one GPU could just keep: "
                "16 bytes x 1.24 billion are 20 GB.",
                "zero-offload": "It moves the optimizer to a slow place, although there is room for it on "
                "the GPU.",
                "megatron": "It is for models that are too large, or too slow, for what is simpler.",
            },
        ),
        hints=(
            "Ask the first question of the tree: does everything fit on one GPU?",
            "The training state is 16 bytes x 1.24 billion parameters; an H100 has 80 GB.",
            "20 GB of state leave 60 for activations: nothing has to be sharded.",
        ),
        why="20 GB of state fit on each GPU, so that only gradients have to travel: DDP. ss.recommend "
        "comes to the same plan, and its path has the numbers.",
    ),
    Exercise(
        name="09-exposed-share",
        asks="It is a number of percent.",
        expected=Number(
            value=lambda: 100 * compute_exposed_ms() / compute_step_ms(),
            unit="%",
            mistakes=(
                Mistake(
                    lambda: 100 * COMMUNICATION_MS / compute_step_ms(),
                    "That is all communication. 220 of its 300 ms are hidden already, and cannot be won "
                    "again.",
                ),
                Mistake(
                    lambda: 100 * compute_exposed_ms() / COMMUNICATION_MS,
                    "That is the exposed share of the communication. The question is about the step.",
                ),
                Mistake(
                    lambda: 100 * compute_exposed_ms() / (COMPUTE_MS + COMMUNICATION_MS + IDLE_MS),
                    "That step counts the overlapped 220 ms twice: they lie within the compute time.",
                ),
                Mistake(
                    lambda: 100 * compute_exposed_ms() / (compute_step_ms() - IDLE_MS),
                    "The idle time is missing in the step: the GPU waits in it, and the clock goes on.",
                ),
                Mistake(
                    lambda: 100 * compute_exposed_ms() / (compute_step_ms() - compute_exposed_ms()),
                    "That is the share of the shorter step, 640 ms. The question is about the share of "
                    "the step as it is.",
                ),
            ),
        ),
        hints=(
            "How long is the step: compute + exposed communication + idle time? And which part would go "
            "away?",
            "Exposed communication is what is not overlapped with compute: 300 - 220 = 80 ms.",
            "100 x 80 / (600 + 80 + 40).",
        ),
        why="80 of 720 ms, 11 %: more than that no overlap can win. A better kernel could win a part of "
        "600 ms: trace.breakdown() says where to begin.",
    ),
    Exercise(
        name="09-utilization",
        asks="It is a number of percent.",
        expected=Number(
            value=compute_utilization,
            unit="%",
            tolerance=0.03,
            mistakes=(
                Mistake(
                    lambda: compute_utilization() / SPARSE_FACTOR,
                    'That divides by the peak "with sparsity", which no dense training reaches: half of it '
                    "is the peak.",
                ),
                Mistake(
                    lambda: compute_utilization(causal=False),
                    "That counts attention to every key, as the formula 6 N + 12 L H Q T of the PaLM paper "
                    "does. A causal query sees half of them, and flops_per_token counts these alone.",
                ),
                Mistake(
                    compute_utilization_without_attention,
                    "That counts 6 FLOPs for each parameter and token. The scores of attention are missing, "
                    "which grow with the sequence: flops_per_token has them.",
                ),
            ),
        ),
        hints=(
            "Model FLOPs per second, divided by the GPU's dense peak.",
            'ss.models["llama-3.1-8b"].flops_per_token(8192) x 5762 are the model\'s FLOP/s; '
            'ss.gpus["h100-sxm-80gb"].peak_flops["bf16"] is the peak.',
            "100 x 5762 x flops_per_token / 989.5e12, which is between 25 and 35.",
        ),
        why="51.5e9 FLOPs a token x 5,762 are 297 TFLOP/s, 30 % of 989.5. Recomputed FLOPs do not count, "
        "and the peak is the dense one (Chowdhery et al. 2022, appendix B). With attention to every key, as "
        "that paper counts, it would be 34 %: compare MFU only where it is counted alike.",
    ),
)
