"""ZeRO's training state on one rank, as of DeepSpeed 0.19.

Source: ``deepspeed/runtime``, and Rajbhandari et al. 2020, section 5. Each stage and precision has its own
optimizer (``engine.py: _do_optimizer_sanity_check``), and a file here that is named after it: its flat
buffers and padding, buckets, all-gathers and the copies that each of them makes. Compared with DeepSpeed's
own engine in ``tests/unit/frameworks/deepspeed/test_deepspeed_memory.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.number_format import format_count
from shardscope.core.ops import all_true, ceil_div, where
from shardscope.core.precision import FP32
from shardscope.frameworks.deepspeed.layout import check_not_quantized, get_layout
from shardscope.frameworks.deepspeed.memory.element_counts import count_rank
from shardscope.frameworks.deepspeed.memory.fp16_optimizer import (
    compute_stage_0_state,
)
from shardscope.frameworks.deepspeed.memory.offload_config import offload_state
from shardscope.frameworks.deepspeed.memory.partition_parameters import (
    shards_tied_head,
)
from shardscope.frameworks.deepspeed.memory.pipeline import (
    PipelineBuffers,
    add_pipeline_buffers,
    compute_pipeline_buffers,
)
from shardscope.frameworks.deepspeed.memory.zero_optimizer_stage3 import (
    compute_stage_3_state,
)
from shardscope.frameworks.deepspeed.memory.zero_optimizer_stage_1_and_2 import (
    compute_pipeline_reduction_bytes,
    compute_stage_1_or_2_state,
)
from shardscope.memory.activations.head import compute_logits_terms, resolve_loss
from shardscope.memory.report import Term, choose_term
from shardscope.memory.state.stages import (
    Stage,
    StageShape,
    StageShapes,
    count_stage_weights,
    find_stage_shapes,
)

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.activations.stage_activations import TransformersActivations
    from shardscope.memory.state.training_state import TrainingState

counts_neighbours = True
branches_on_stages = True


def find_shapes(plan: Plan) -> StageShapes:
    """Return the stage shapes of DeepSpeed's pipeline module, or the one shape of the whole model."""
    return find_stage_shapes(plan.architecture, plan.stage_layers)


def count_weights(plan: Plan, shape: StageShape) -> Stage:
    """Return the weights of one stage."""
    return count_stage_weights(plan, shape)


def compute_training_state(plan: Plan, stage: Stage) -> TrainingState:
    """Return one rank's training state on the device, on the host and on NVMe, in bytes."""
    layout = get_layout(plan)
    check_not_quantized(layout)
    rank = count_rank(plan, stage)
    # PipelineEngine's receive buffers and outputs.
    is_pipelined = all_true(plan.degrees.pp > 1)
    pipeline = compute_pipeline_buffers(plan, stage) if is_pipelined else PipelineBuffers()
    # The optimizer of this ZeRO stage, its buckets and all-gathers.
    if layout.stage == 3:
        state = compute_stage_3_state(plan, stage, rank)
    elif layout.stage > 0:
        state = compute_stage_1_or_2_state(plan, stage, rank, pipeline.in_backward)
    else:
        state = compute_stage_0_state(plan, stage, rank, pipeline.in_backward)
    if layout.stage < 3:
        state = state._replace(find_logits=find_logits)
    if is_pipelined:
        state = add_pipeline_buffers(state, pipeline, compute_pipeline_reduction_bytes(plan, rank))
    # What offload_optimizer and offload_param move to the host or to NVMe.
    if layout.offload_optimizer or layout.offload_params:
        state = offload_state(plan, stage, state, rank)
    return state


def find_logits(step: TransformersActivations) -> tuple[Term, Term]:
    """Return the logits and loss at the end of forward, and at the start of backward. Bytes.

    AutoTP follows transformers' tensor-parallel plan: an untied head's logits are all-gathered, so that every
    rank has the whole vocabulary; a tied head stays sharded, and DeepSpeed's own loss uses sharded logits
    (``deepspeed/sequence/cross_entropy.py``, ``_VocabParallelCrossEntropy``).
    """
    plan, arch = step.plan, step.plan.architecture
    replicated = compute_logits_terms(
        plan, step.modules, step.tokens, step.stage.is_last, vocab=arch.vocab_size
    )
    if not shards_tied_head(arch) or resolve_loss(plan) != "full":
        return replicated
    tp, width = plan.degrees.tp, step.modules.compute
    vocab = ceil_div(arch.vocab_size, tp)
    # With several sequences, dropping each one's last logits makes a copy.
    shifted = where(plan.recipe.micro_batch_size > 1, width, 0)
    fp32_copy, gradient_cast = (FP32, width) if width < FP32 else (0, 0)
    # Forward: the fp32 copy, the logits minus their maximum and their exponential. Backward: the softmax, its
    # gradient and the gradient's cast.
    forward = width + shifted + fp32_copy + 2 * FP32
    backward = 2 * FP32 + gradient_cast + shifted

    def compute_sharded(bytes_per_logit: int) -> Term:
        return Term(
            step.stage.is_last * step.tokens * vocab * bytes_per_logit,
            lambda: (
                f"{format_count(step.tokens, 'token')} × {vocab:,} of the vocabulary × {bytes_per_logit} "
                "bytes · DeepSpeed's vocabulary-parallel cross entropy"
            ),
        )

    at_end, at_start = replicated
    return choose_term(tp > 1, compute_sharded(forward), at_end), choose_term(
        tp > 1, compute_sharded(backward), at_start
    )
