"""Readers of other tools' files that return plans."""

from __future__ import annotations

from shardscope.frameworks.accelerate.read import read as from_accelerate
from shardscope.frameworks.deepspeed.files.read import read_plan as from_deepspeed
from shardscope.frameworks.megatron.files.read import read as from_megatron

__all__ = ["from_accelerate", "from_deepspeed", "from_megatron"]
