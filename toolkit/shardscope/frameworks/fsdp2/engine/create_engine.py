"""Choice of the FSDP2 engine: the plain one, pipeline parallel or context parallel."""

from __future__ import annotations

from shardscope.frameworks.fsdp2.engine.engine import Fsdp2Engine
from shardscope.frameworks.fsdp2.engine.pipeline import PipelinedEngine
from shardscope.training.engine import Context


def create_engine(ctx: Context) -> Fsdp2Engine:
    """Return the engine that runs ``ctx.plan`` on this rank."""
    degrees = ctx.plan.degrees
    if degrees.cp > 1:
        # Imported here: it requires transformers, which the other engines do not import.
        from shardscope.frameworks.fsdp2.engine.context_parallel import ContextParallelEngine

        return ContextParallelEngine(ctx)
    return PipelinedEngine(ctx) if degrees.pp > 1 else Fsdp2Engine(ctx)
