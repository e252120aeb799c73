"""What somebody asked of a running training: to stop, to save a checkpoint, to record the next steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardscope.core.errors import whole_number

MAX_PROFILED_STEPS = 1000
"""A trace of more is gigabytes, held in the rank's memory until it is written."""


@dataclass(frozen=True, kw_only=True)
class Orders:
    """The commands of one look, the same on every rank."""

    stop: bool = False
    checkpoint: bool = False
    profile_steps: int = 0
    """Steps to record; 0: not asked."""
    memory_snapshot: bool = False
    """Keep torch's history of allocations over the next steps and write it into the run folder."""


def look(ctx: Any, profile_steps: int) -> Orders:
    """Read the commands that came since the last look; once a step, on every rank.

    ``{"command": "checkpoint"}``, ``{"command": "memory_snapshot"}``, and ``{"command": "profile", "steps":
    n}``, whose ``steps`` default to ``profile_steps``. Whatever else came is ignored with a line in the log:
    a slip must not end a training.
    """
    stop, commands = ctx.look()
    checkpoint, memory_snapshot, num_steps = False, False, 0
    for command in commands:
        try:
            match command["command"]:
                case "checkpoint":
                    checkpoint = True
                case "memory_snapshot":
                    memory_snapshot = True
                case "profile":
                    num_steps = _profile_steps(command, profile_steps)
                case name:
                    known = "'checkpoint', 'memory_snapshot', 'profile', 'stop'"
                    raise ValueError(f"command is {name!r}; allowed: {known}.")
        except ValueError as error:
            print(f"ignored a command: {error}", flush=True)
    return Orders(stop=stop, checkpoint=checkpoint, profile_steps=num_steps, memory_snapshot=memory_snapshot)


def _profile_steps(command: Mapping[str, Any], default: int) -> int:
    return whole_number("profile steps", command.get("steps", default), low=1, high=MAX_PROFILED_STEPS)
