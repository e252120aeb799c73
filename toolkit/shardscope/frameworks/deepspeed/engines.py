"""Which engine runs a plan of DeepSpeed: with pipeline stages another one than without."""

from __future__ import annotations

from shardscope.frameworks.deepspeed.engine import DeepSpeedEngine
from shardscope.frameworks.deepspeed.pipeline_engine import PipelinedEngine
from shardscope.frameworks.engine import Context


def engine_of(ctx: Context) -> DeepSpeedEngine:
    """The engine of a rank of ``ctx.plan``."""
    return PipelinedEngine(ctx) if ctx.plan.degrees.pp > 1 else DeepSpeedEngine(ctx)
