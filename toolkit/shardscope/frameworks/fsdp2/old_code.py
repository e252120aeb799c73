"""A script or configuration of PyTorch's first FSDP, told line by line what FSDP2 has instead."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from shardscope.frameworks.fsdp2.old_names import CONFIG, REPLACED, STRATEGIES, translated
from shardscope.frameworks.fsdp2.wrapping import in_script as wrapping_in
from shardscope.memory.precision import FP32
from shardscope.memory.words import gib
from shardscope.planner.preflight.finding import Finding
from shardscope.planner.preflight.script import Script, keywords

if TYPE_CHECKING:
    from shardscope.plan import Plan

OLD_CLASS = "FullyShardedDataParallel"
MOMENTS = 2 * FP32


def in_script(script: Script) -> Iterator[Finding]:
    """Everything of FSDP1 in Python code, or in the lines of an accelerate configuration."""
    if script.tree is None or _is_config(script):
        yield from _in_config(script)
        return
    if OLD_CLASS in script.names:
        yield from _old_class(script)
        yield from _replaced(script)
    yield from _strategies(script)
    yield from _whole_state(script)
    yield from _reductions(script)
    yield from wrapping_in(script)


def _old_class(script: Script) -> Iterator[Finding]:
    for call in script.calls(OLD_CLASS)[:1]:
        yield Finding(
            name="fsdp1",
            severity="hint",
            why=f"Line {call.lineno}: {OLD_CLASS} is PyTorch's first FSDP, which flattens parameters; FSDP2 "
            "shards each by itself, so that frozen ones, adapters and tensor parallelism go with it.",
            number=None,
            change="fully_shard(model), from torch.distributed.fsdp",
            line=call.lineno,
        )


def _replaced(script: Script) -> Iterator[Finding]:
    """Arguments of the class, and names that only it has."""
    told: set[str] = set()
    for call in script.calls(OLD_CLASS):
        for name, value in keywords(call).items():
            if name in REPLACED and name not in told:
                told.add(name)
                yield _instead(name, value.lineno)
    for name, line in script.names.items():
        if name in REPLACED and name not in told and _is_its_own(script, name):
            told.add(name)
            yield _instead(name, line)
    if "BACKWARD_POST" in script.names:
        yield Finding(
            name="fsdp1-backward-post",
            severity="warning",
            why=f"Line {script.names['BACKWARD_POST']}: FSDP2 has no BACKWARD_POST, which gathered later and "
            "held less: it gathers the next layer before this one's gradients.",
            number=None,
            change="module.set_modules_to_backward_prefetch([]) where memory is short",
            line=script.names["BACKWARD_POST"],
        )


def _is_its_own(script: Script, name: str) -> bool:
    """Attributes and classes; a keyword of the same name may be another function's."""
    for node in script.walk(ast.Attribute):
        if node.attr == name:  # type: ignore[attr-defined]
            # torch.nn.utils.clip_grad_norm_ is what replaces the method.
            return "nn.utils" not in ast.unparse(node)
    return name in script.aliases.values() and name in REPLACED


def _instead(name: str, line: int) -> Finding:
    return Finding(
        name=f"fsdp1-{name.strip('_').replace('_', '-').lower()}",
        severity="hint",
        why=f"Line {line}: {name} is FSDP1's.",
        number=None,
        change=REPLACED[name],
        line=line,
    )


BY_TEXT = ("fsdp", "sharding_strategy", "reshard_after_forward")
"""Keywords that transformers and Accelerate take a strategy's name as text for: ``fsdp="full_shard
auto_wrap"``."""


def _strategies(script: Script) -> Iterator[Finding]:
    """Strategies as members of the enumeration, or as text."""
    lines = {name: script.names[name] for name in STRATEGIES if name in script.names}
    for keyword in script.walk(ast.keyword):
        if not isinstance(keyword, ast.keyword) or keyword.arg not in BY_TEXT:
            continue
        for node in ast.walk(keyword.value):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            for word in text.upper().split():
                if word in STRATEGIES:
                    lines.setdefault(word, keyword.value.lineno)
    for name, line in lines.items():
        yield _strategy(name, line, script.plan)


def _strategy(name: str, line: int, plan: Plan | None) -> Finding:
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


def _whole_state(script: Script) -> Iterator[Finding]:
    """A checkpoint gathered whole on one rank: in host memory, and over one file."""
    line = script.names.get("FULL_STATE_DICT")
    if line is not None:
        yield _gathered_state(script, line, "optim_state_dict" in script.names)


def _gathered_state(script: Script, line: int, with_optimizer: bool) -> Finding:
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
        why=f"Line {line}: FULL_STATE_DICT gathers {size} in the host memory of rank 0 while all others "
        "wait.",
        number=number,
        change="A sharded checkpoint: torch.distributed.checkpoint.save(get_model_state_dict(model), ...), "
        "which loads over any number of ranks",
        line=line,
    )


def _reductions(script: Script) -> Iterator[Finding]:
    """A policy that reduces gradients in what it computes in: FSDP1's and FSDP2's default."""
    for call in (*script.calls("MixedPrecision"), *script.calls("MixedPrecisionPolicy")):
        given = {name: ast.unparse(value) for name, value in keywords(call).items()}
        compute, reduce = (
            given.get("param_dtype", ""),
            given.get("reduce_dtype", given.get("param_dtype", "")),
        )
        if "float16" not in compute or "float16" not in reduce:
            continue
        ranks = None if script.plan is None else script.plan.degrees.data_parallel
        over = "" if ranks is None else f" over {ranks} ranks"
        yield Finding(
            name="policy-reduces-in-half-precision",
            severity="hint",
            why=f"Line {call.lineno}: gradients are summed{over} in {reduce.rpartition('.')[2]}, for "
            f"reduce_dtype {'says so' if 'reduce_dtype' in given else 'left open is param_dtype'}.",
            number=None if ranks is None else float(ranks),
            change="reduce_dtype=torch.float32",
            line=call.lineno,
        )


_LINE = re.compile(r"^\s*(fsdp_\w+)\s*:\s*['\"]?(\w+)['\"]?\s*(?:#.*)?$")


def _is_config(script: Script) -> bool:
    """Lines of ``fsdp_...: value`` are Python, too: annotations."""
    return any(_LINE.match(line) for line in script.source.splitlines())


def _in_config(script: Script) -> Iterator[Finding]:
    """Accelerate's YAML: keys of version 1, strategies by name or by number, wrapping."""
    for line, text in enumerate(script.source.splitlines(), 1):
        match = _LINE.match(text)
        if match:
            yield from _key(script, line, match[1], match[2])


def _key(script: Script, line: int, key: str, value: str) -> Iterator[Finding]:
    if key in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward"):
        names = list(STRATEGIES)
        known = {name.strip("_"): name for name in names} | {str(n): name for n, name in enumerate(names, 1)}
        if value.upper() in known:
            yield _strategy(known[value.upper()], line, script.plan)
    elif key == "fsdp_version" and value == "1":
        yield Finding(
            name="fsdp1",
            severity="hint",
            why=f"Line {line}: fsdp_version 1 is PyTorch's first FSDP.",
            number=None,
            change="fsdp_version: 2 (`accelerate to-fsdp2` rewrites the file)",
            line=line,
        )
    elif key in CONFIG:
        yield Finding(
            name=f"fsdp1-{key.removeprefix('fsdp_').replace('_', '-')}",
            severity="hint",
            why=f"Line {line}: {key} is FSDP1's.",
            number=None,
            change=CONFIG[key],
            line=line,
        )
    elif key == "fsdp_state_dict_type" and value.upper() == "FULL_STATE_DICT":
        yield _gathered_state(script, line, with_optimizer=True)
    yield from wrapping_in_config(script, line, key, value)


def wrapping_in_config(script: Script, line: int, key: str, value: str) -> Iterator[Finding]:
    """``NO_WRAP``, and a size that wraps too finely."""
    from shardscope.frameworks.fsdp2.wrapping import one_unit, too_fine

    if key == "fsdp_auto_wrap_policy" and value.upper() == "NO_WRAP":
        yield one_unit(script, line)
    if key == "fsdp_min_num_params" and value.isdigit():
        yield from too_fine(script, line, int(value))
