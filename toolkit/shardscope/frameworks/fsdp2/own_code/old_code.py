"""A script or configuration of PyTorch's first FSDP, told line by line what FSDP2 has instead."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace

from shardscope.frameworks.fsdp2.old_names import REPLACED, STRATEGIES
from shardscope.frameworks.fsdp2.own_code.migrated import with_fully_shard
from shardscope.frameworks.fsdp2.own_code.old_config import in_config, is_config
from shardscope.frameworks.fsdp2.own_code.old_findings import gathered_state, of_fsdp1, strategy
from shardscope.frameworks.fsdp2.own_code.old_plugin import in_script as plugin_in
from shardscope.frameworks.fsdp2.own_code.old_plugin import of_version_2
from shardscope.frameworks.fsdp2.own_code.old_uses import CLIPPING, OLD_CLASS, clipped_by_torch
from shardscope.frameworks.fsdp2.own_code.sharded_saves import written_in_parts
from shardscope.frameworks.fsdp2.own_code.wrapping import in_script as wrapping_in
from shardscope.own_code.edits import mended, replaced, unless_too_deep, with_keyword
from shardscope.own_code.script import Script, keywords
from shardscope.planner.preflight.finding import Finding

HALVES = ("bfloat16", "float16", "half")


def in_script(script: Script) -> Iterator[Finding]:
    """Everything of FSDP1 in Python code, or in the lines of an accelerate configuration."""
    if script.tree is None or is_config(script):
        yield from in_config(script)
        return
    after = _after(script)
    if OLD_CLASS in script.names:
        yield from _old_class(script, after)
        yield from _replaced(script, after)
    else:
        yield from plugin_in(script)
    yield from _strategies(script, after)
    yield from _whole_state(script, after)
    yield from _reductions(script)
    yield from wrapping_in(script, after)


def _after(script: Script) -> Script | None:
    """The script with the class's own calls as FSDP2 has them, or Accelerate's plugin as its version 2."""
    text = with_fully_shard(script) if script.calls(OLD_CLASS) else of_version_2(script)
    return None if text is None else Script(source=text, plan=script.plan)


def _old_class(script: Script, after: Script | None) -> Iterator[Finding]:
    for call in script.calls(OLD_CLASS)[:1]:
        yield Finding(
            name="fsdp1",
            severity="hint",
            why=f"Line {call.lineno}: {OLD_CLASS} is PyTorch's first FSDP, which flattens parameters; FSDP2 "
            "shards each by itself, so that frozen ones, adapters and tensor parallelism go with it.",
            number=None,
            change="fully_shard(model), from torch.distributed.fsdp",
            source=_text(after),
            line=call.lineno,
        )


def _replaced(script: Script, after: Script | None) -> Iterator[Finding]:
    """Arguments of the class, and names that only it has."""
    told: set[str] = set()
    for call in script.calls(OLD_CLASS):
        for name, value in keywords(call).items():
            if name in REPLACED and name not in told:
                told.add(name)
                yield _instead(script, name, value.lineno, _text(after))
    for name, line in script.names.items():
        if name in REPLACED and name not in told and _is_its_own(script, name):
            told.add(name)
            source = _text(after) if name == CLIPPING else _gone(after, name)
            yield _instead(script, name, min(_uses(script, name), default=line), source)
    if "BACKWARD_POST" in script.names:
        yield Finding(
            name="fsdp1-backward-post",
            severity="warning",
            why=f"Line {script.names['BACKWARD_POST']}: FSDP2 has no BACKWARD_POST, which gathered later and "
            "held less: it gathers the next layer before this one's gradients.",
            number=None,
            change="module.set_modules_to_backward_prefetch([]) where memory is short",
            source=_gone(after, "BACKWARD_POST"),
            line=script.names["BACKWARD_POST"],
        )


def _is_its_own(script: Script, name: str) -> bool:
    """Attributes and classes; a keyword of the same name may be another function's."""
    for node in script.walk(ast.Attribute):
        if node.attr == name:  # type: ignore[attr-defined]
            # torch.nn.utils.clip_grad_norm_ is what replaces the method.
            return "nn.utils" not in ast.unparse(node)
    # What is imported and no more may stay.
    return bool(_uses(script, name))


def _uses(script: Script, name: str) -> list[int]:
    """Lines where a name that was imported is used by itself."""
    names = (one for one in script.walk(ast.Name) if isinstance(one, ast.Name))
    return [one.lineno for one in names if script.aliases.get(one.id) == name]


def _text(after: Script | None) -> str | None:
    return None if after is None else after.source


def _gone(after: Script | None, name: str) -> str | None:
    """The text of ``after``, if it has no such name any more."""
    uses = () if after is None else after.walk(ast.Name, ast.Attribute)
    is_there = any(name in (getattr(one, "id", ""), getattr(one, "attr", "")) for one in uses)
    return None if is_there else _text(after)


def _instead(script: Script, name: str, line: int, source: str | None) -> Finding:
    return of_fsdp1(name, line, REPLACED[name], (_clipped(script) if name == CLIPPING else None) or source)


@unless_too_deep
def _clipped(script: Script) -> str | None:
    """The script with the norms of models of FSDP2 clipped by torch's function, as DTensors have them.

    Those of FSDP1 have their own method: each rank has a part of the norm only.
    """
    sharded = {
        ast.unparse(name)
        for one in script.walk(ast.Assign, ast.Expr)
        if isinstance(one, ast.Assign | ast.Expr) and script.called(one.value) == "fully_shard"
        for name in (one.targets if isinstance(one, ast.Assign) else one.value.args[:1])  # type: ignore[attr-defined]
    }
    edits = None if script.calls(OLD_CLASS) else clipped_by_torch(script, sharded)
    return mended(script, *edits) if edits else None


BY_TEXT = ("fsdp", "sharding_strategy", "reshard_after_forward")
"""Keywords that transformers and Accelerate take a strategy's name as text for: ``fsdp="full_shard
auto_wrap"``."""


def _strategies(script: Script, after: Script | None) -> Iterator[Finding]:
    """Strategies as members of the enumeration, or as text."""
    lines = {name: script.names[name] for name in STRATEGIES if name in script.names}
    sources = {name: _gone(after, name) for name in lines}
    for keyword in script.walk(ast.keyword):
        if not isinstance(keyword, ast.keyword) or keyword.arg not in BY_TEXT:
            continue
        for node in ast.walk(keyword.value):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            for word in text.upper().split():
                if word in STRATEGIES and word not in lines:
                    lines[word] = keyword.value.lineno
                    sources[word] = _resharding(script, keyword, word) or _gone_as_text(after, word)
    for name, line in lines.items():
        yield replace(strategy(name, line, script.plan), source=sources.get(name))


def _gone_as_text(after: Script | None, name: str) -> str | None:
    """The same where the name stood in quotes."""
    words = () if after is None else after.walk(ast.Constant)
    is_there = any(name in str(getattr(one, "value", "")).upper().split() for one in words)
    return None if is_there else _text(after)


@unless_too_deep
def _resharding(script: Script, keyword: ast.keyword, name: str) -> str | None:
    """The script with what version 2 of Accelerate's plugin takes in the place of a strategy's name."""
    known = STRATEGIES[name]
    plugin = next((call for call in script.walk(ast.Call) if keyword in getattr(call, "keywords", ())), None)
    version = keywords(plugin).get("fsdp_version") if isinstance(plugin, ast.Call) else None
    is_second = isinstance(version, ast.Constant) and version.value == 2
    is_bool = keyword.arg == "reshard_after_forward" and known.shards and not known.is_hybrid
    if not is_second or not is_bool or not isinstance(keyword.value, ast.Constant):
        return None
    return mended(script, replaced(script, keyword.value, str(known.reshards)))


def _whole_state(script: Script, after: Script | None) -> Iterator[Finding]:
    """A checkpoint gathered whole on one rank: in host memory, and over one file."""
    with_optimizer = any(name in script.names for name in ("optim_state_dict", "get_optimizer_state_dict"))
    line = script.names.get("FULL_STATE_DICT")
    if line is not None:
        source = None if after is None else written_in_parts(after)
        yield gathered_state(script, line, with_optimizer, source=source)
    for call in script.calls("StateDictOptions"):
        given = {name: ast.unparse(value) for name, value in keywords(call).items()}
        # Rank 0 reads a whole one to hand it out as well: that is no checkpoint.
        if given.get("full_state_dict") == "True" and given.get("broadcast_from_rank0", "False") == "False":
            source = written_in_parts(script)
            yield gathered_state(script, call.lineno, with_optimizer, "full_state_dict=True", source)
            return


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
            source=_reduced_in_fp32(script, call),
            line=call.lineno,
        )


@unless_too_deep
def _reduced_in_fp32(script: Script, policy: ast.Call) -> str | None:
    """The script with ``reduce_dtype`` beside a ``param_dtype`` that is one of torch's types."""
    compute = keywords(policy).get("param_dtype")
    if not isinstance(compute, ast.Attribute) or not isinstance(compute.value, ast.Name):
        return None
    types = compute.value.id
    has_more = len(keywords(policy)) < len(policy.keywords)
    if has_more or compute.attr not in HALVES or script.aliases.get(types) != "torch":
        return None
    return mended(script, with_keyword(script, policy, "reduce_dtype", f"{types}.float32"))
