"""What is told alike of FSDP1 in code and in a configuration."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from shardscope.frameworks.fsdp2.old_names import STRATEGIES, translated
from shardscope.memory.precision import FP32
from shardscope.memory.words import gib
from shardscope.own_code.script import Script
from shardscope.planner.preflight.finding import Finding

if TYPE_CHECKING:
    from shardscope.plan import Plan

MOMENTS = 2 * FP32


_WORDS = re.compile(r"_|(?<=[a-z])(?=[A-Z])")
"""Between the words of a name: ``use_orig_params``, ``FullStateDictConfig``."""


def of_fsdp1(name: str, line: int, change: str, source: str | None) -> Finding:
    """An argument, a key or a name that FSDP2 has not, and what it has instead."""
    return Finding(
        name=f"fsdp1-{_WORDS.sub('-', name.removeprefix('fsdp_').strip('_')).lower()}",
        severity="hint",
        why=f"Line {line}: {name} is FSDP1's.",
        number=None,
        change=change,
        source=source,
        line=line,
    )


def strategy(name: str, line: int, plan: Plan | None) -> Finding:
    """What a strategy is called now, as a plan and its peak where there is a plan to change."""
    mended = number = None
    costs = ""
    if plan is not None:
        mended = _with_strategy(name, plan)
        if mended is not None:
            number = _peak(mended)
            costs = "" if number is None else f"; of this plan {gib(number)} GiB a GPU"
    return Finding(
        name=f"fsdp1-{name.strip('_').replace('_', '-').lower()}",
        severity="hint",
        why=f"Line {line}: {name} is FSDP1's name of {STRATEGIES[name].words}{costs}.",
        number=None if number is None else number / 2**30,
        change=STRATEGIES[name].words,
        plan=mended,
        line=line,
    )


def _with_strategy(name: str, plan: Plan) -> Plan | None:
    from shardscope.layout import Layout

    layout = translated(name, plan.cluster)
    try:
        return replace(plan, layout=Layout.ddp() if layout is None else layout)
    except ValueError:
        return None


def _peak(plan: Plan) -> int | None:
    try:
        return plan.memory().peak_bytes
    except ValueError:
        return None


def gathered_state(
    script: Script,
    line: int,
    with_optimizer: bool,
    words: str = "FULL_STATE_DICT",
    source: str | None = None,
) -> Finding:
    """A checkpoint that one rank gathers whole, and what that takes of its host."""
    number = None
    severity = "hint"
    size = "the whole model"
    if script.plan is not None:
        each = FP32 + (MOMENTS if with_optimizer else 0)
        number = script.plan.architecture.num_parameters * each / 2**30
        size = f"{gib(number * 2**30)} GiB"
        room = script.plan.cluster.host_memory_bytes
        severity = "danger" if room is not None and number * 2**30 > room else "hint"
    return Finding(
        name="checkpoint-gathered-on-one-rank",
        severity=severity,  # type: ignore[arg-type]
        why=f"Line {line}: {words} gathers {size} in the host memory of rank 0 while all others wait.",
        number=number,
        change="A sharded checkpoint: torch.distributed.checkpoint.save(get_model_state_dict(model), ...), "
        "which loads over any number of ranks (one file of it: python -m "
        "torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE)",
        source=source,
        line=line,
    )
