"""Which engine runs a plan of DeepSpeed: stages, experts and parts of matrices have their own."""

from __future__ import annotations

from shardscope.frameworks.deepspeed.engine import DeepSpeedEngine
from shardscope.frameworks.deepspeed.experts_engine import ExpertsEngine
from shardscope.frameworks.deepspeed.pipeline_engine import PipelinedEngine
from shardscope.frameworks.deepspeed.tensor_engine import TensorEngine
from shardscope.frameworks.engine import Context


def engine_of(ctx: Context) -> DeepSpeedEngine:
    """The engine of a rank of ``ctx.plan``."""
    degrees = ctx.plan.degrees
    if degrees.pp > 1:
        return PipelinedEngine(ctx)
    if degrees.tp > 1:
        return TensorEngine(ctx)
    return ExpertsEngine(ctx) if degrees.ep > 1 else DeepSpeedEngine(ctx)
