"""Wrap policies: a whole model as one unit gathers all of it at once, tiny units gather all the time."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from math import isfinite

from shardscope.frameworks.fsdp2.own_code.every_module import (
    is_inside_out,
    layers_of_everything,
    loop_over_everything,
)
from shardscope.frameworks.fsdp2.own_code.inner_units import wraps_inside
from shardscope.frameworks.fsdp2.own_code.migrated_units import SMALL_UNIT
from shardscope.frameworks.fsdp2.own_code.old_uses import OLD_CLASS
from shardscope.frameworks.fsdp2.own_code.own_names import full_name
from shardscope.frameworks.fsdp2.own_code.units import SHARD, by_layer
from shardscope.memory.precision import widths
from shardscope.memory.words import gib
from shardscope.own_code.bindings import bound
from shardscope.own_code.edits import mended, replaced, unless_too_deep
from shardscope.own_code.script import Script, keywords
from shardscope.planner.preflight.finding import Finding

WRAPS = (SHARD, OLD_CLASS)
BY_SIZE = "size_based_auto_wrap_policy"
UNIFORM = {
    *("requires_grad", "requires_grad_", "get_peft_model", "PeftModel", "LoraConfig", "BitsAndBytesConfig"),
    *("prepare_model_for_kbit_training", "LOCAL_STATE_DICT"),
}
"""Names of scripts in whose larger units FSDP1 may find weights of two kinds, which it refuses to flatten
together, or which load what smaller units saved."""


def in_script(script: Script, after: Script | None) -> Iterator[Finding]:
    """Calls that wrap, as far as the text tells: only once and only the model, or whatever there is.

    ``after`` is the script with FSDP1's calls as FSDP2 has them; None where that cannot be.
    """
    for name in WRAPS:
        calls = script.calls(name)
        if len(calls) == 1 and not script.is_repeated(calls[0]) and not wraps_inside(script, calls[0]):
            yield one_unit(script, calls[0].lineno, _by_layer(script, calls[0], after))
        for call in calls:
            if (loop := loop_over_everything(script, call)) is not None:
                yield _every_module(script, call, loop)
    for call in (*script.calls(BY_SIZE), *_partials(script)):
        number = _number(keywords(call).get("min_num_params"))
        if number is not None:
            yield from too_fine(script, call.lineno, number, _with_larger_units(script, call))


def _by_layer(script: Script, call: ast.Call, after: Script | None) -> str | None:
    """One unit for each layer; of FSDP1, once its call is FSDP2's."""
    if script.called(call) != OLD_CLASS:
        return by_layer(script, call)
    made = [] if after is None else after.calls(SHARD)
    return by_layer(after, made[0]) if after is not None and len(made) == 1 else None


def _partials(script: Script) -> list[ast.Call]:
    """``partial`` of the policy by size: other functions may have an argument of that name."""
    return [
        call
        for call in script.calls("partial")
        if call.args and script.aliases.get(_last(call.args[0]), _last(call.args[0])) == BY_SIZE
    ]


def _last(function: ast.expr) -> str:
    return ast.unparse(function).rpartition(".")[2]


def one_unit(script: Script, line: int, source: str | None = None) -> Finding:
    """All parameters are gathered before the first layer runs, and nothing runs beneath that."""
    number = None
    size = "the whole model is"
    if script.plan is not None:
        arch, width = script.plan.architecture, widths[script.plan.recipe.precision].compute
        layer = sum(arch.layer_parameters(arch.num_hidden_layers - 1).values())
        number = arch.num_parameters * width / 2**30
        size = f"all {gib(arch.num_parameters * width)} GiB of parameters are, instead of a layer's "
        size += f"{gib(layer * width)},"
    return Finding(
        name="whole-model-as-one-unit",
        severity="danger",
        why=f"Line {line}: only the model itself is wrapped, so that {size} gathered at once on each GPU, "
        "and no all-gather is overlapped with arithmetic.",
        number=number,
        change="fully_shard(layer) for each decoder layer, then fully_shard(model)",
        source=source,
        line=line,
    )


def too_fine(script: Script, line: int, num_parameters: int, source: str | None = None) -> Iterator[Finding]:
    """Units of fewer parameters than a gather is worth."""
    if num_parameters >= SMALL_UNIT:
        return
    layer = ""
    if script.plan is not None:
        arch = script.plan.architecture
        layer = f"; a decoder layer has {sum(arch.layer_parameters(arch.num_hidden_layers - 1).values()):,}"
    change = "One unit for each decoder layer"
    if source is not None:
        change = f"min_num_params={_worth_a_gather(script):_}"
        change = f"One unit for each decoder layer: {change}" if script.plan is not None else change
    yield Finding(
        name="wrapped-too-finely",
        severity="warning",
        why=f"Line {line}: units from {num_parameters:,} parameters on are gathered one by one{layer}: each "
        "gather has its latency.",
        number=float(num_parameters),
        change=change,
        source=source,
        line=line,
    )


def _worth_a_gather(script: Script) -> int | None:
    """Parameters of a unit: a decoder layer's, or without a plan as few as are worth it.

    None where layers are of several sizes, or smaller than that.
    """
    if script.plan is None:
        return SMALL_UNIT
    arch = script.plan.architecture
    sizes = {sum(arch.layer_parameters(index).values()) for index in range(arch.num_hidden_layers)}
    return min(sizes) if len(sizes) == 1 and min(sizes) >= SMALL_UNIT else None


@unless_too_deep
def _with_larger_units(script: Script, call: ast.Call) -> str | None:
    """The script whose policy by size makes larger units; None if the policy may be another's."""
    policy = call.args[0] if script.called(call) == "partial" else call.func
    root = policy
    while isinstance(root, ast.Attribute):
        root = root.value
    # The source of a function alone has no imports.
    is_anywhere = isinstance(root, ast.Name) and not bound(script, root.id)
    is_torchs = is_anywhere or full_name(script, policy).startswith("torch.distributed.")
    number = _worth_a_gather(script)
    if not is_torchs or number is None or UNIFORM & set(script.names):
        return None
    return mended(script, replaced(script, keywords(call)["min_num_params"], f"{number:_}"))


def _every_module(script: Script, call: ast.Call, loop: ast.For) -> Finding:
    number = None
    count = "every module"
    if script.plan is not None:
        arch = script.plan.architecture
        tensors = sum(len(arch.layer_shapes(index)) for index in range(arch.num_hidden_layers))
        number = float(tensors)
        count = f"every module, about {tensors:,} of them,"
    why = f"{count} is gathered by itself: each gather has its latency."
    is_fsdp2 = script.called(call) == SHARD
    if is_fsdp2 and not is_inside_out(loop):
        # Its weights are DTensors by then (torch/distributed/fsdp/_fully_shard/_fsdp_param.py).
        why = "the model comes before what is in it, and its unit takes all weights, so that the next call "
        why += f"fails; the other way round, {count} would be gathered by itself."
    return Finding(
        name="wrapped-too-finely",
        severity="warning",
        why=f"Line {call.lineno}: {why}",
        number=number,
        change="fully_shard(layer) for each decoder layer, then fully_shard(model)",
        source=layers_of_everything(script, call, loop) if is_fsdp2 else None,
        line=call.lineno,
    )


def _number(value: ast.expr | None) -> int | None:
    """A literal number, also as ``int(1e5)``."""
    if isinstance(value, ast.Call):
        is_cast = ast.unparse(value.func) in ("int", "float") and len(value.args) == 1
        value = value.args[0] if is_cast else None
    found = getattr(value, "value", None)
    is_number = isinstance(found, int | float) and not isinstance(found, bool) and isfinite(found)
    return int(found) if is_number else None  # type: ignore[arg-type]
