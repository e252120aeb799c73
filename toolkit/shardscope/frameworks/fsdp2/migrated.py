"""A call of PyTorch's first FSDP as ``fully_shard`` has it, where every argument of it is understood."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import NamedTuple

from shardscope.frameworks.fsdp2.migrated_state import by_function, gatherings, unread
from shardscope.frameworks.fsdp2.old_names import STRATEGIES
from shardscope.frameworks.fsdp2.old_uses import (
    CLIPPING,
    OLD_CLASS,
    are_plain,
    clipped_by_torch,
    norms_as_numbers,
)
from shardscope.own_code.bindings import is_dotted_name, means_the_same, only_value, scope_of
from shardscope.own_code.edits import (
    has_comment,
    imported,
    mended,
    replaced,
    unless_too_deep,
)
from shardscope.own_code.script import Script, keywords

MODULE = "torch.distributed.fsdp"
NO_EFFECT = ("use_orig_params", "limit_all_gathers", "backward_prefetch")
"""What FSDP2 always does, or has no choice of."""
LITERAL = ("sync_module_states", "forward_prefetch")
"""What can be left out where it is off: on, each takes more than a word elsewhere."""

OPTIONS, LAYER = "fsdp2_options", "fsdp2_layer"
"""Names for what all units take, parents and layers alike, as FSDP1's do, and for one of them."""
NESTED = ("Module", "Sequential", "ModuleList", "ModuleDict")
"""Classes that lie in one another, and that the model itself may be of."""
LISTED = "module"
"""The name for one of all modules where the layers are picked out."""


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


@unless_too_deep
def with_fully_shard(script: Script, call: ast.Call) -> str | None:
    """The script with its layers and its model sharded in the place of ``model = FSDP(model, ...)``.

    Its norms are clipped by torch's function then, as DTensors have them. None where wrapping is no class of
    layers, where an argument has no counterpart that the text settles, where a comment among them would be
    lost, and where the script does anything else with its model or its parameters that FSDP2 does otherwise.
    """
    if not are_plain(script, call):
        return None
    assigned = [one for one in script.walk(ast.Assign) if isinstance(one, ast.Assign) and one.value is call]
    if len(script.calls(OLD_CLASS)) != 1 or not assigned or len(assigned[0].targets) != 1:
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
    found = f"{LISTED} for {LISTED} in {model}.modules() if isinstance({LISTED}, {classes})"
    lines = [
        *([said] if options else []),
        # One that lies in another first.
        f"for {LAYER} in reversed([{found}]):",
        f"    {shard}({LAYER}{passed})",
        f"{to} = {shard}({model}{passed})",
    ]
    margin = "\n" + " " * assigned.col_offset
    clipped, told = clipped_by_torch(script, {to}), norms_as_numbers(script, to, assigned)
    if clipped is None or told is None:
        raise _UnknownError
    others = [*imports, *clipped, *told, *by_function(script, gatherings(script, OLD_CLASS))]
    policy = keywords(call).get("auto_wrap_policy")
    others += unread(script, policy) if isinstance(policy, ast.Name) else []
    return mended(script, replaced(script, assigned, margin.join(lines)), *others)


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
    kind = found.elts[0]
    is_moved = isinstance(policy, ast.Name)
    if not is_dotted_name(kind) or (is_moved and not means_the_same(script, kind, call)):
        raise _UnknownError
    text = ast.unparse(kind)
    # Where the layers are listed, a name of a class's own body is not seen, and this one is each layer's.
    if text.partition(".")[0] == LISTED or isinstance(scope_of(script, call), ast.ClassDef):
        raise _UnknownError
    if text.rpartition(".")[2] in NESTED:
        raise _UnknownError
    return text


def _made(script: Script, value: ast.expr) -> ast.expr:
    """What a name stands for where the text settles that, here as there; anything else is itself."""
    if not isinstance(value, ast.Name):
        return value
    found = only_value(script, value.id, value)
    is_changed = any(
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == value.id
        for node in script.walk(ast.Attribute)
    )
    given = keywords(found).values() if isinstance(found, ast.Call) else ()
    is_plain = all(isinstance(one, ast.Constant) or is_dotted_name(one) for one in given)
    if found is None or is_changed or not is_plain or not means_the_same(script, found, value):
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
    if any("BatchNorm" in name for name in script.names):
        raise _UnknownError  # FSDP1 leaves them in fp32.
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
    if CLIPPING in script.names:
        raise _UnknownError  # Ranks add their parts of a norm up on the CPU, for which there may be no group.
    return _Option("offload_policy", "()", "CPUOffloadPolicy")


def _device(script: Script, value: ast.expr) -> _Option | None:
    """FSDP2 takes the current device, which has to be that one."""
    if ast.unparse(value) != "torch.cuda.current_device()" and "set_device" not in script.names:
        raise _UnknownError
    return None


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
    "device_id": _device,
    **dict.fromkeys(LITERAL, _off),
    **dict.fromkeys(NO_EFFECT, _nothing),
}
"""What each argument becomes; None: nothing has to be said."""
