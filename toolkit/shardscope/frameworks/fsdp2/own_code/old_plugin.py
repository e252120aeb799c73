"""Accelerate's plugin of PyTorch's first FSDP in a script, as its version 2 takes it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping

from shardscope.frameworks.fsdp2.old_names import REPLACED, STRATEGIES
from shardscope.frameworks.fsdp2.own_code.old_findings import of_fsdp1
from shardscope.frameworks.fsdp2.own_code.old_uses import OPTIMIZER, WITHOUT_DTENSORS
from shardscope.own_code.bindings import is_dotted_name
from shardscope.own_code.edits import has_comment, mended, replaced, unless_too_deep
from shardscope.own_code.script import Script, keywords
from shardscope.planner.preflight.finding import Finding

PLUGIN = "FullyShardedDataParallelPlugin"
VERSION, STATE, RESHARD = "fsdp_version", "state_dict_type", "reshard_after_forward"
STRATEGY = ("sharding_strategy", RESHARD)
OBSOLETE = ("use_orig_params", "backward_prefetch", "limit_all_gathers", "sync_module_states")
"""What version 2 does by itself, or has no choice of (accelerate/utils/dataclasses.py)."""
REFUSED = "forward_prefetch"
BY_SIZE = "size_based_wrap"
"""Of lists of modules version 2 makes units, too, which torch refuses (accelerate/utils/fsdp_utils.py)."""
ITS_OWN = {"no_sync", "module", "summon_full_params", "auto_wrap_policy", "optim_state_dict"}
"""Of a prepared model or of the plugin: version 2 has none of these, or takes them otherwise."""
MODEL = re.compile(r"model|net|llm")
"""Names of a model."""
AS_THEY_ARE = ("transformer_cls_names_to_wrap", "min_num_params", "activation_checkpointing")
LITERALS = ("auto_wrap_policy", "cpu_offload", "cpu_ram_efficient_loading", STATE)
"""What both versions take, if it is a word, a flag or a number, and no object of the first FSDP."""


def in_script(script: Script) -> Iterator[Finding]:
    """A plugin of version 1, and what version 2 has no use for."""
    for call in script.calls(PLUGIN)[:1]:
        given = keywords(call)
        is_first = _version(given) == 1
        source = of_version_2(script)
        if is_first:
            said = "says so" if VERSION in given else "left open is 1"
            yield Finding(
                name="fsdp1",
                severity="hint",
                why=f"Line {call.lineno}: this plugin is of PyTorch's first FSDP, for {VERSION} {said}.",
                number=None,
                change=f"{VERSION}=2",
                source=source,
                line=call.lineno,
            )
        for name in (*OBSOLETE, REFUSED):
            if name in given:
                yield of_fsdp1(name, given[name].lineno, REPLACED[name], source)


def _version(given: Mapping[str, ast.expr]) -> int | None:
    """Accelerate's default is 1 (accelerate/utils/dataclasses.py); None: not a literal."""
    version = given.get(VERSION)
    if version is None:
        return 1
    found = version.value if isinstance(version, ast.Constant) else None
    return found if isinstance(found, int) else None


@unless_too_deep
def of_version_2(script: Script) -> str | None:
    """The script whose plugin is of version 2.

    None where it has not one of them, where an argument has no counterpart, and where its accelerator does
    not prepare one model together with its optimizer, which version 2 asks for.
    """
    calls = script.calls(PLUGIN)
    if len(calls) != 1:
        return None
    call = calls[0]
    given = keywords(call)
    if call.args or len(given) < len(call.keywords):
        return None
    if has_comment(script, call) or not _prepares_together(script):
        return None
    version = _version(given)
    said = {VERSION: "2"}
    for name, value in given.items():
        written = _TRANSLATED.get(name, _unknown)(value, given)
        if written is None:
            return None
        if written == ast.unparse(value):
            written = ast.get_source_segment(script.text, value) or written  # in the person's own quotes
        said |= {RESHARD if name in STRATEGY else name: written} if written else {}
    if version == 1:
        # Left open, the first version gathers a checkpoint whole and the second does not.
        said.setdefault(STATE, '"FULL_STATE_DICT"')
    elif version != 2 or any(name in given for name in STRATEGY if name != RESHARD):
        return None
    words = [f"{name}={value}" for name, value in said.items()]
    return mended(script, replaced(script, call, f"{ast.unparse(call.func)}({_joined(call, words)})"))


def _joined(call: ast.Call, words: list[str]) -> str:
    """On one line, or a line each as the call was."""
    if call.end_lineno == call.lineno or not call.keywords:
        return ", ".join(words)
    margin = " " * call.keywords[0].col_offset
    return "".join(f"\n{margin}{word}," for word in words) + "\n" + " " * max(0, len(margin) - 4)


def _prepares_together(script: Script) -> bool:
    """Whether one call prepares one model with one optimizer, as their names say, and nothing else is done
    with what only FSDP1's model has."""
    calls = script.calls("prepare")
    if len(calls) != 1 or ITS_OWN & {getattr(one, "attr", "") for one in script.walk(ast.Attribute)}:
        return False
    roots = {name.partition(".")[0] for name in script.modules.values()} | set(script.aliases.values())
    named = [ast.unparse(one).lower() for one in calls[0].args]
    optimizers = [name for name in named if OPTIMIZER.search(name)]
    models = [name for name in named if MODEL.search(name) and name not in optimizers]
    return len(optimizers) == len(models) == 1 and not roots & set(WITHOUT_DTENSORS)


Written = Callable[[ast.expr, Mapping[str, ast.expr]], str | None]
"""An argument's value in version 2: "" is none at all, None that there is no such."""


def _unknown(_value: ast.expr, _given: Mapping[str, ast.expr]) -> str | None:
    return None


def _as_it_is(value: ast.expr, _given: Mapping[str, ast.expr]) -> str | None:
    return ast.unparse(value)


def _literal(value: ast.expr, _given: Mapping[str, ast.expr]) -> str | None:
    word = str(value.value).lower() if isinstance(value, ast.Constant) else BY_SIZE
    is_plain = word not in (BY_SIZE, "local_state_dict")
    return ast.unparse(value) if is_plain else None


def _strategy(value: ast.expr, given: Mapping[str, ast.expr]) -> str | None:
    word = value.value if isinstance(value, ast.Constant) else None
    if isinstance(word, bool):
        return repr(word) if _version(given) == 2 else None
    name = ast.unparse(value).rpartition(".")[2] if is_dotted_name(value) else str(word)
    found = STRATEGIES.get(name.upper())
    return None if found is None or found.is_hybrid or not found.shards else repr(found.reshards)


def _left_out(_value: ast.expr, _given: Mapping[str, ast.expr]) -> str | None:
    return ""


def _synchronised(value: ast.expr, given: Mapping[str, ast.expr]) -> str | None:
    """Off, or done by version 2 as it loads."""
    loads = given.get("cpu_ram_efficient_loading")
    is_off = isinstance(value, ast.Constant) and not value.value
    return "" if is_off or (isinstance(loads, ast.Constant) and loads.value is True) else None


def _off(value: ast.expr, _given: Mapping[str, ast.expr]) -> str | None:
    return "" if isinstance(value, ast.Constant) and not value.value else None


_TRANSLATED: dict[str, Written] = {
    VERSION: _left_out,
    **dict.fromkeys(STRATEGY, _strategy),
    **dict.fromkeys(OBSOLETE, _left_out),
    **dict.fromkeys(AS_THEY_ARE, _as_it_is),
    **dict.fromkeys(LITERALS, _literal),
    "sync_module_states": _synchronised,
    REFUSED: _off,
}
