"""Which engine runs a plan of FSDP2: pipeline stages, and sequences in parts, have engines of their own."""

from __future__ import annotations

from shardscope.frameworks.fsdp2.engine.engine import Fsdp2Engine
from shardscope.frameworks.fsdp2.engine.pipeline_engine import PipelinedEngine
from shardscope.training.engine import Context


def engine_of(ctx: Context) -> Fsdp2Engine:
    """The engine of a rank of ``ctx.plan``."""
    degrees = ctx.plan.degrees
    if degrees.cp > 1:
        # Imported where it is run: it asks for transformers, which other engines leave to the model.
        from shardscope.frameworks.fsdp2.engine.context_parallel import ContextParallelEngine

        return ContextParallelEngine(ctx)
    return PipelinedEngine(ctx) if degrees.pp > 1 else Fsdp2Engine(ctx)
