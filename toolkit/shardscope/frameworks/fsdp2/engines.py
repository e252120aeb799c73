"""Which engine runs a plan of FSDP2: with pipeline stages another one than without."""

from __future__ import annotations

from shardscope.frameworks.engine import Context
from shardscope.frameworks.fsdp2.engine import Fsdp2Engine
from shardscope.frameworks.fsdp2.pipeline_engine import PipelinedEngine


def engine_of(ctx: Context) -> Fsdp2Engine:
    """The engine of a rank of ``ctx.plan``."""
    return PipelinedEngine(ctx) if ctx.plan.degrees.pp > 1 else Fsdp2Engine(ctx)
