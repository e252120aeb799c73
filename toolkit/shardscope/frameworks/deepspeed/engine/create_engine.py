"""Choice of the DeepSpeed engine: ZeRO only, pipeline, expert or tensor parallel."""

from __future__ import annotations

from shardscope.frameworks.deepspeed.engine.engine import DeepSpeedEngine
from shardscope.frameworks.deepspeed.engine.experts import ExpertsEngine
from shardscope.frameworks.deepspeed.engine.pipeline import PipelinedEngine
from shardscope.frameworks.deepspeed.engine.tensor_parallel import TensorEngine
from shardscope.training.engine import Context


def create_engine(ctx: Context) -> DeepSpeedEngine:
    """Return the engine that runs ``ctx.plan`` on this rank."""
    degrees = ctx.plan.degrees
    if degrees.pp > 1:
        return PipelinedEngine(ctx)
    if degrees.tp > 1:
        return TensorEngine(ctx)
    return ExpertsEngine(ctx) if degrees.ep > 1 else DeepSpeedEngine(ctx)
