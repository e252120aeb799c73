"""An accelerate configuration of PyTorch's first FSDP, told line by line what version 2 has instead."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from shardscope.frameworks.fsdp2.old_findings import gathered_state, strategy
from shardscope.frameworks.fsdp2.old_names import CONFIG, STRATEGIES
from shardscope.frameworks.fsdp2.wrapping import one_unit, too_fine
from shardscope.planner.preflight.finding import Finding
from shardscope.planner.preflight.script import Script

_LINE = re.compile(
    r"^(?P<before>\s*)(?P<key>fsdp_\w+)\s*:\s*['\"]?(?P<value>\w+)['\"]?(?P<after>\s*(?:#.*)?)$"
)
RESHARD = "fsdp_reshard_after_forward"
BY_LAYER = "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"
_BY_NUMBER = {str(number): name for number, name in enumerate(STRATEGIES, 1)}
_BY_NAME = {name.strip("_"): name for name in STRATEGIES}


def is_config(script: Script) -> bool:
    """Lines of ``fsdp_...: value`` are Python, too: annotations."""
    return any(_LINE.match(line) for line in script.source.splitlines())


def in_config(script: Script) -> Iterator[Finding]:
    """Accelerate's YAML: keys of version 1, strategies by name or by number, wrapping."""
    for line, text in enumerate(script.source.splitlines(), 1):
        match = _LINE.match(text)
        if match:
            key, value = match["key"], match["value"]
            yield from _of_key(script, line, key, value)
            yield from _of_wrapping(script, line, key, value)


def _of_key(script: Script, line: int, key: str, value: str) -> Iterator[Finding]:
    if key in ("fsdp_sharding_strategy", RESHARD):
        name = (_BY_NAME | _BY_NUMBER).get(value.upper())
        if name is not None:
            yield replace(strategy(name, line, script.plan), source=_resharding(script, key, name))
    elif key == "fsdp_version" and value == "1":
        yield Finding(
            name="fsdp1",
            severity="hint",
            why=f"Line {line}: fsdp_version 1 is PyTorch's first FSDP.",
            number=None,
            change="fsdp_version: 2 (`accelerate to-fsdp2` rewrites the file)",
            source=_rewritten(script, {key: "fsdp_version: 2"}),
            line=line,
        )
    elif key in CONFIG:
        new = CONFIG[key] if ": " in CONFIG[key] and not CONFIG[key].startswith("nothing") else None
        yield Finding(
            name=f"fsdp1-{key.removeprefix('fsdp_').replace('_', '-')}",
            severity="hint",
            why=f"Line {line}: {key} is FSDP1's.",
            number=None,
            change=CONFIG[key],
            source=_rewritten(script, {key: new if value.lower() == "true" else None}),
            line=line,
        )
    elif key == "fsdp_state_dict_type" and value.upper() == "FULL_STATE_DICT":
        sharded = _rewritten(script, {key: "fsdp_state_dict_type: SHARDED_STATE_DICT"})
        yield replace(gathered_state(script, line, with_optimizer=True), source=sharded)


def _of_wrapping(script: Script, line: int, key: str, value: str) -> Iterator[Finding]:
    """``NO_WRAP``, and a size that wraps too finely."""
    if key == "fsdp_auto_wrap_policy" and value.upper() == "NO_WRAP":
        yield replace(one_unit(script, line), source=_rewritten(script, {key: BY_LAYER}))
    if key == "fsdp_min_num_params" and value.isdigit():
        for finding in too_fine(script, line, int(value)):
            yield replace(finding, source=_rewritten(script, {key: None, "fsdp_auto_wrap_policy": BY_LAYER}))


def _resharding(script: Script, key: str, name: str) -> str | None:
    """With the strategy as version 2 says it; None of those that take a mesh, or another framework."""
    known = STRATEGIES[name]
    if known.is_hybrid or not known.shards:
        return None
    return _rewritten(script, {key: f"{RESHARD}: {str(known.reshards).lower()}"})


def _rewritten(script: Script, new: Mapping[str, str | None]) -> str:
    """The file with other lines in the place of those of some keys, as far from the margin, or with none.

    A line whose key another one has already is not written twice.
    """
    lines = script.source.splitlines(keepends=True)
    found = [_LINE.match(line.rstrip("\r\n")) for line in lines]
    keys = {match["key"] for match in found if match} - set(new)
    for number, match in enumerate(found):
        if match is None or match["key"] not in new:
            continue
        text, old = new[match["key"]], lines[number]
        ending = old[len(old.rstrip("\r\n")) :]
        is_needed = text is not None and text.partition(":")[0] not in keys
        lines[number] = f"{match['before']}{text}{match['after']}{ending}" if is_needed else ""
    return "".join(lines)
