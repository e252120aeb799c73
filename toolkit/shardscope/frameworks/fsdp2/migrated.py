"""A call of PyTorch's first FSDP as ``fully_shard`` has it, where every argument of it is understood."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import NamedTuple

from shardscope.frameworks.fsdp2.old_names import STRATEGIES
from shardscope.planner.preflight.bindings import is_dotted_name, only_value
from shardscope.planner.preflight.edits import has_comment, imported, mended, replaced
from shardscope.planner.preflight.script import Script, keywords

MODULE = "torch.distributed.fsdp"
NO_EFFECT = ("use_orig_params", "limit_all_gathers", "device_id", "backward_prefetch")
"""What FSDP2 always does, or has no choice of: parameters go to the devices of the mesh."""
LITERAL = ("sync_module_states", "forward_prefetch")
"""What can be left out where it is off: on, each takes more than a word elsewhere."""


OPTIONS, LAYER = "fsdp2_options", "fsdp2_layer"
"""Names for what all units take, parents and layers alike, as FSDP1's do, and for one of them."""


class _Option(NamedTuple):
    """A keyword of ``fully_shard``."""

    name: str
    value: str
    """Its value, or with :attr:`made_of` that class's arguments."""
    made_of: str = ""

    def written(self, local: Mapping[str, str]) -> str:
        """As code, with classes by the names that the script has for them."""
        return f"{self.name}={local.get(self.made_of, '')}{self.value}"


class _UnknownError(Exception):
    """An argument that the text does not settle."""


def with_fully_shard(script: Script, call: ast.Call) -> str | None:
    """The script with its layers and its model sharded in the place of ``model = FSDP(model, ...)``.

    None where wrapping is no class of layers, where an argument has no counterpart that the text settles, and
    where a comment among them would be lost.
    """
    assigned = [one for one in script.walk(ast.Assign) if isinstance(one, ast.Assign) and one.value is call]
    if len(script.calls("FullyShardedDataParallel")) != 1 or not assigned or len(assigned[0].targets) != 1:
        return None
    if has_comment(script, assigned[0]) or OPTIONS in script.text or LAYER in script.text:
        return None
    try:
        return _with_fully_shard(script, call, assigned[0])
    except _UnknownError:
        return None


def _with_fully_shard(script: Script, call: ast.Call, assigned: ast.Assign) -> str | None:
    given = keywords(call)
    if len(given) < len(call.keywords) or len(call.args) != 1 or not is_dotted_name(call.args[0]):
        raise _UnknownError
    classes = _classes(script, given.pop("auto_wrap_policy", None), call)
    if not set(given) <= set(_TRANSLATED):
        raise _UnknownError
    options = [option for name, value in given.items() if (option := _TRANSLATED[name](script, value))]
    classes_used = filter(None, (option.made_of for option in options))
    local, imports = imported(script, assigned, MODULE, "fully_shard", *classes_used)
    shard, model, to = local["fully_shard"], ast.unparse(call.args[0]), ast.unparse(assigned.targets[0])
    said = f"{OPTIONS} = dict({', '.join(option.written(local) for option in options)})"
    passed = f", **{OPTIONS}" if options else ""
    lines = [
        *([said] if options else []),
        f"for {LAYER} in [module for module in {model}.modules() if isinstance(module, {classes})]:",
        f"    {shard}({LAYER}{passed})",
        f"{to} = {shard}({model}{passed})",
    ]
    margin = "\n" + " " * assigned.col_offset
    return mended(script, replaced(script, assigned, margin.join(lines)), *imports)


def _classes(script: Script, policy: ast.expr | None, call: ast.Call) -> str:
    """The class of layers of a policy."""
    made = only_value(script, policy.id, call) if isinstance(policy, ast.Name) else policy
    if isinstance(made, ast.Call) and script.called(made) == "ModuleWrapPolicy" and len(made.args) == 1:
        found = made.args[0]
    elif isinstance(made, ast.Call) and script.called(made) == "partial":
        given = keywords(made)
        of_layers = (
            made.args and ast.unparse(made.args[0]).rpartition(".")[2] == "transformer_auto_wrap_policy"
        )
        if not of_layers or set(given) != {"transformer_layer_cls"}:
            raise _UnknownError
        found = given["transformer_layer_cls"]
    else:
        raise _UnknownError
    if not isinstance(found, ast.Set | ast.List | ast.Tuple) or len(found.elts) != 1:
        # Of several, one could be inside another, which has to be sharded first.
        raise _UnknownError
    if not is_dotted_name(found.elts[0]):
        raise _UnknownError
    return ast.unparse(found.elts[0])


def _made(script: Script, value: ast.expr) -> ast.expr:
    """What a name stands for where the text settles that; anything else is itself."""
    if not isinstance(value, ast.Name):
        return value
    found = only_value(script, value.id, value)
    if found is None:
        raise _UnknownError
    return found


def _strategy(_script: Script, value: ast.expr) -> _Option | None:
    found = STRATEGIES.get(ast.unparse(value).rpartition(".")[2]) if is_dotted_name(value) else None
    if found is None or found.is_hybrid or not found.shards:
        raise _UnknownError
    return None if found.reshards else _Option("reshard_after_forward", "False")


def _precision(script: Script, value: ast.expr) -> _Option | None:
    made = _made(script, value)
    if isinstance(made, ast.Constant) and made.value is None:
        return None
    if not isinstance(made, ast.Call) or script.called(made) != "MixedPrecision" or made.args:
        raise _UnknownError
    given = keywords(made)
    if len(given) < len(made.keywords):
        raise _UnknownError
    if not {"param_dtype"} <= set(given) <= {"param_dtype", "reduce_dtype", "buffer_dtype"}:
        raise _UnknownError
    # Buffers keep their type in FSDP2 (torch/distributed/fsdp/_fully_shard/_fsdp_api.py).
    kept = [f"{name}={ast.unparse(value)}" for name, value in given.items() if name != "buffer_dtype"]
    return _Option("mp_policy", f"({', '.join(kept)})", "MixedPrecisionPolicy")


def _offload(script: Script, value: ast.expr) -> _Option | None:
    made = _made(script, value)
    called = made.func if isinstance(made, ast.Call) else made
    text = ast.unparse(made).rpartition(".")[2] if is_dotted_name(called) else ast.unparse(made)
    if text in ("None", "CPUOffload()", "CPUOffload(offload_params=False)"):
        return None
    if text != "CPUOffload(offload_params=True)":
        raise _UnknownError
    return _Option("offload_policy", "()", "CPUOffloadPolicy")


def _off(_script: Script, value: ast.expr) -> _Option | None:
    if not isinstance(value, ast.Constant) or value.value:
        raise _UnknownError
    return None


def _nothing(_script: Script, _value: ast.expr) -> _Option | None:
    return None


_TRANSLATED: dict[str, Callable[[Script, ast.expr], _Option | None]] = {
    "sharding_strategy": _strategy,
    "mixed_precision": _precision,
    "cpu_offload": _offload,
    **dict.fromkeys(LITERAL, _off),
    **dict.fromkeys(NO_EFFECT, _nothing),
}
"""What each argument becomes; None: nothing has to be said."""
