"""What a person's own training code does badly, whatever the framework; each framework adds its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from shardscope.frameworks.registry import frameworks
from shardscope.own_code import samplers
from shardscope.own_code.dealing import LOADER, Dealing
from shardscope.own_code.script import MAX_CHARACTERS, Script, keywords, source_of
from shardscope.planner.preflight import scaling
from shardscope.planner.preflight.case import Case
from shardscope.planner.preflight.finding import SEVERITIES, Finding
from shardscope.planner.preflight.learning_rate import rate_in_script
from shardscope.planner.preflight.loading import starved
from shardscope.validation import refuse

if TYPE_CHECKING:
    from shardscope.plan import Plan


def findings_in(source: str, plan: Plan | None = None) -> list[Finding]:
    """What ``source``, a training script or the text of an accelerate configuration, does badly.

    It is read, never run. Each finding names its line and what replaces it; with ``plan`` also what that
    costs. Patterns of PyTorch's first FSDP are told with what FSDP2 has instead. The worst come first. Raises
    ``ValueError`` for what is no text, or is longer than a mebibyte.
    """
    if not isinstance(source, str) or len(source) > MAX_CHARACTERS:
        refuse("source", source, f"text of at most {MAX_CHARACTERS:,} characters", "Path(...).read_text()")
    script = Script(source=source, plan=plan)
    found = list(_in_script(script))
    if plan is not None:
        case = Case(plan=plan, task=_Text(source))
        found += rate_in_script(case)
        found += starved(case) if script.calls(LOADER) else ()
    return sorted(found, key=lambda one: (SEVERITIES.index(one.severity), one.line or 0))


class _Text:
    """Stands for what the text will run."""

    def __init__(self, source: str) -> None:
        self._source = source

    def source_text(self) -> str:
        """What the checks of a task read."""
        return self._source


def in_task(case: Case) -> Iterator[Finding]:
    """The same of a task that is a function."""
    source = source_of(case.task)
    if source is not None:
        yield from _in_script(Script(source=source, plan=case.plan))


def _in_script(script: Script) -> Iterator[Finding]:
    checks = [_shared_data, scaling.unscaled, *(one.habits().in_script for one in frameworks.values())]
    for check in checks:
        # What nests deeper than Python follows is not looked into.
        with suppress(RecursionError):
            yield from check(script)


def _shared_data(script: Script) -> Iterator[Finding]:
    """A DataLoader that deals every rank the same, or deals to ranks that must read the same."""
    ranks = None if script.plan is None else script.plan.world_size
    if ranks == 1:
        return
    works_together = script.plan is not None and script.plan.degrees.data_parallel == 1
    loaders = [] if works_together else script.calls(LOADER)
    if loaders and Dealing(script=script).is_found:
        loaders = []
    source = samplers.dealt(script, loaders) if loaders else None
    for call in loaders:
        times = "all ranks" if ranks is None else f"all {ranks} ranks"
        yield Finding(
            name="ranks-read-the-same-data",
            severity="danger",
            why=f"Line {call.lineno}: this DataLoader has no sampler that knows its rank, so that {times} "
            "read the same and the batch is one rank's.",
            number=None if ranks is None else float(ranks),
            change="sampler=DistributedSampler(dataset, num_replicas=..., rank=...)",
            source=source,
            line=call.lineno,
        )
    yield from _dealt_too_far(script)
    yield from _same_order(script)


def _dealt_too_far(script: Script) -> Iterator[Finding]:
    """Tensor, context and pipeline ranks work on one sequence together: they must be dealt the same."""
    plan = script.plan
    if plan is None or plan.degrees.data_parallel == plan.world_size:
        return
    for call in script.calls("DistributedSampler"):
        if not samplers.deals_to_all(script, call):
            continue
        shares, wanted = plan.world_size, plan.degrees.data_parallel
        yield Finding(
            name="sampler-over-all-ranks",
            severity="danger",
            why=f"Line {call.lineno}: this sampler deals to {shares} ranks, and the plan has {wanted} "
            f"data-parallel ones: {shares // wanted} ranks that work on one sequence would get different "
            "ones.",
            number=shares / wanted,
            change=f"num_replicas={wanted}, rank=the rank among data-parallel ranks",
            source=samplers.among_data_parallel_ranks(script, call, plan),
            line=call.lineno,
        )


def _same_order(script: Script) -> Iterator[Finding]:
    """A sampler that shuffles by its epoch, and is never told of one."""
    calls = script.calls("DistributedSampler")
    if not calls or "set_epoch" in script.names:
        return
    shuffle = keywords(calls[0]).get("shuffle")
    if isinstance(shuffle, ast.Constant) and shuffle.value is False:
        return
    yield Finding(
        name="same-order-every-epoch",
        severity="hint",
        why=f"Line {calls[0].lineno}: DistributedSampler shuffles by seed and epoch, and set_epoch is never "
        "called: every epoch has the first one's order.",
        number=None,
        change="sampler.set_epoch(epoch) before each epoch",
        source=samplers.told_of_epochs(script, calls[0]),
        line=calls[0].lineno,
    )
