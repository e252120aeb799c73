"""An accelerate configuration of PyTorch's first FSDP, told line by line what version 2 has instead."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from shardscope.frameworks.fsdp2.old_names import CONFIG, STRATEGIES
from shardscope.frameworks.fsdp2.own_code.old_findings import gathered_state, of_fsdp1, strategy
from shardscope.frameworks.fsdp2.own_code.wrapping import one_unit, too_fine
from shardscope.own_code.script import Script
from shardscope.planner.preflight.finding import Finding

_LINE = re.compile(
    r"^(?P<before>\s*)(?P<key>fsdp_(?!config\b)\w+)\s*:\s*['\"]?(?P<value>\w+)['\"]?(?P<after>\s*(?:#.*)?)$"
)
RESHARD = "fsdp_reshard_after_forward"
BY_LAYER = "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"
VERSION, STATE = "fsdp_version", "fsdp_state_dict_type"
STRATEGY_KEYS = ("fsdp_sharding_strategy", RESHARD)
_KNOWN = {str(number): name for number, name in enumerate(STRATEGIES, 1)} | {
    name.strip("_"): name for name in STRATEGIES
}
"""Strategies by accelerate's number and name of each."""


def is_config(script: Script) -> bool:
    """Lines of ``fsdp_...: value`` are Python, too: annotations, with nothing else among them."""
    only_annotates = script.tree is None or all(isinstance(one, ast.AnnAssign) for one in script.tree.body)
    return only_annotates and any(_LINE.match(line) for line in script.source.splitlines())


def in_config(script: Script) -> Iterator[Finding]:
    """Accelerate's YAML: keys of version 1, strategies by name or by number, wrapping."""
    lines = [
        (line, match["key"], match["value"])
        for line, text in enumerate(script.source.splitlines(), 1)
        if (match := _matched(text))
    ]
    keys = {key: value for _, key, value in lines}
    if lines and VERSION not in keys:
        yield _first_version(script, lines[0][0], f"no {VERSION} is Accelerate's default, 1,", keys)
    for line, key, value in lines:
        yield from _of_key(script, line, key, value, keys)
        yield from _of_wrapping(script, line, key, value)


def _first_version(script: Script, line: int, words: str, keys: Mapping[str, str]) -> Finding:
    return Finding(
        name="fsdp1",
        severity="hint",
        why=f"Line {line}: {words} PyTorch's first FSDP.",
        number=None,
        change=f"{VERSION}: 2 (`accelerate to-fsdp2` rewrites the file)",
        source=_in_version_2(script, keys),
        line=line,
    )


def _of_key(script: Script, line: int, key: str, value: str, keys: Mapping[str, str]) -> Iterator[Finding]:
    if key in STRATEGY_KEYS:
        name = _KNOWN.get(value.upper())
        if name is not None:
            yield replace(strategy(name, line, script.plan), source=_in_version_2(script, keys))
    elif key == VERSION and value == "1":
        yield _first_version(script, line, f"{VERSION} 1 is", keys)
    elif key in CONFIG:
        new = CONFIG[key] if ": " in CONFIG[key] and not CONFIG[key].startswith("nothing") else None
        # The first version reads them: there they say what its defaults do not.
        is_read = keys.get(VERSION) != "2"
        source = None if is_read else _rewritten(script, {key: new if value.lower() == "true" else None})
        yield of_fsdp1(key, line, CONFIG[key], source)
    elif key == STATE and value.upper() == "FULL_STATE_DICT":
        sharded = _rewritten(script, {key: f"{STATE}: SHARDED_STATE_DICT"})
        yield replace(gathered_state(script, line, with_optimizer=True), source=sharded)


def _of_wrapping(script: Script, line: int, key: str, value: str) -> Iterator[Finding]:
    """``NO_WRAP``, and a size that wraps too finely."""
    if key == "fsdp_auto_wrap_policy" and value.upper() == "NO_WRAP":
        yield replace(one_unit(script, line), source=_rewritten(script, {key: BY_LAYER}))
    if key == "fsdp_min_num_params" and value.isdigit():
        for finding in too_fine(script, line, int(value)):
            yield replace(finding, source=_rewritten(script, {key: None, "fsdp_auto_wrap_policy": BY_LAYER}))


def _in_version_2(script: Script, keys: Mapping[str, str]) -> str | None:
    """Version and strategy at once, for each says something else without the other.

    None of a strategy that takes a mesh, or another framework, of one that is not understood, and of what
    version 2 refuses.
    """
    new: dict[str, str | None] = {VERSION: f"{VERSION}: 2"}
    said = [key for key in STRATEGY_KEYS if key in script.source]
    if len(said) > 1 or keys.get(STATE, "").upper() == "LOCAL_STATE_DICT":
        return None
    for key in said:
        name = _KNOWN.get(keys.get(key, "").upper())
        if name is None or STRATEGIES[name].is_hybrid or not STRATEGIES[name].shards:
            return None
        new[key] = f"{RESHARD}: {str(STRATEGIES[name].reshards).lower()}"
    # Left open, the first version gathers a checkpoint whole and the second does not.
    added = [f"{VERSION}: 2"] * (VERSION not in keys) + [f"{STATE}: FULL_STATE_DICT"] * (STATE not in keys)
    lines = _rewritten(script, new).splitlines(keepends=True)
    at, first = next((at, match) for at, line in enumerate(lines) if (match := _matched(line)))
    lines[at:at] = [f"{first['before']}{line}{_ending(lines[at]) or chr(10)}" for line in added]
    return "".join(lines)


def _rewritten(script: Script, new: Mapping[str, str | None]) -> str:
    """The file with other lines in the place of those of some keys, as far from the margin, or with none.

    A line whose key another one has already is not written twice.
    """
    lines = script.source.splitlines(keepends=True)
    found = [_matched(line) for line in lines]
    keys = {match["key"] for match in found if match} - set(new)
    for number, match in enumerate(found):
        if match is None or match["key"] not in new:
            continue
        text = new[match["key"]]
        is_needed = text is not None and text.partition(":")[0] not in keys
        line = f"{match['before']}{text}{match['after']}{_ending(lines[number])}"
        lines[number] = line if is_needed else ""
    return "".join(lines)


def _matched(line: str) -> re.Match[str] | None:
    return _LINE.match(line.rstrip("\r\n"))


def _ending(line: str) -> str:
    return line[len(line.rstrip("\r\n")) :]
