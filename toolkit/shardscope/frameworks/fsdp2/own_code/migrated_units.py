"""The layers that FSDP1's policy makes units of, as a loop of FSDP2's."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from shardscope.frameworks.fsdp2.own_code.migrated_options import UnknownError
from shardscope.own_code.bindings import is_dotted_name, means_the_same, only_value, scope_of, sees
from shardscope.own_code.script import Script, keywords

LAYER, SIZE = "fsdp2_layer", "fsdp2_size"
"""Names for one of the layers, and for its parameters that no unit inside of it has."""
NESTED = ("Module", "Sequential", "ModuleList", "ModuleDict")
"""Classes that lie in one another, and that the model itself may be of."""
LISTED = "module"
"""The name for one of all modules where the layers are picked out."""
SMALL_UNIT = 1_000_000
"""Parameters below which a unit's gather is a few hundred kilobytes a rank at most: its latency is all of
it."""
MOVES = ("to", "cuda", "train", "float", "bfloat16", "half")
"""Methods of a model that return it."""
OF_ATTENTION = "NonDynamicallyQuantizableLinear"
"""The layer inside of torch's MultiheadAttention, which reads its weights itself: a policy by size leaves it
alone, and nothing else is of that class."""


class Layers(Protocol):
    """What a policy makes units of."""

    @property
    def needs(self) -> tuple[tuple[str, str], ...]:
        """Modules and what the loop takes from them."""
        ...

    def loop(self, model: str, local: Mapping[str, str]) -> list[str]:
        """The head of a loop over the layers as :data:`LAYER`, those that lie in others first, and the margin
        of what is in it."""
        ...


class _OfClass(NamedTuple):
    name: str
    needs: tuple[tuple[str, str], ...] = ()

    def loop(self, model: str, _local: Mapping[str, str]) -> list[str]:
        # The model may be of that class itself.
        found = f"{LISTED} for {LISTED} in list({model}.modules())[1:] if isinstance({LISTED}, {self.name})"
        return [f"for {LAYER} in reversed([{found}]):", "    "]


class _BySize(NamedTuple):
    least: str
    needs: tuple[tuple[str, str], ...] = (
        ("torch.distributed.tensor", "DTensor"),
        ("torch.nn.modules.linear", "NonDynamicallyQuantizableLinear"),
    )

    def loop(self, model: str, local: Mapping[str, str]) -> list[str]:
        left = f"one.numel() for one in {LAYER}.parameters() if not isinstance(one, {local['DTensor']})"
        lists = f"(torch.nn.ModuleList, torch.nn.ModuleDict, {local[OF_ATTENTION]})"
        return [
            f"for {LAYER} in reversed(list({model}.modules())[1:]):",
            f"    {SIZE} = sum({left})",
            f"    if {SIZE} >= {self.least} and not isinstance({LAYER}, {lists}):",
            "        ",
        ]


def layers_of(script: Script, policy: ast.expr, call: ast.Call) -> Layers:
    """Those of a policy.

    Raises ``UnknownError`` where it is none of one class or of a size, and where a name that it has may mean
    another thing at the call.
    """
    made = only_value(script, policy.id, call) if isinstance(policy, ast.Name) else policy
    if not isinstance(made, ast.Call):
        raise UnknownError
    given = keywords(made)
    if script.called(made) == "ModuleWrapPolicy" and len(made.args) == 1:
        return _of_class(script, made.args[0], policy, call)
    function = ast.unparse(made.args[0]).rpartition(".")[2] if made.args else ""
    if script.called(made) == "partial" and len(made.args) == 1 and len(given) == len(made.keywords) == 1:
        if function == "transformer_auto_wrap_policy" and "transformer_layer_cls" in given:
            return _of_class(script, given["transformer_layer_cls"], policy, call)
        if function == "size_based_auto_wrap_policy" and "min_num_params" in given:
            return _by_size(script, given["min_num_params"], call)
    raise UnknownError


def _of_class(script: Script, classes: ast.expr, policy: ast.expr, call: ast.Call) -> Layers:
    if not isinstance(classes, ast.Set | ast.List | ast.Tuple) or len(classes.elts) != 1:
        # Of several, one could be inside another, which has to be sharded first.
        raise UnknownError
    kind = classes.elts[0]
    is_moved = isinstance(policy, ast.Name)
    if not is_dotted_name(kind) or (is_moved and not means_the_same(script, kind, call)):
        raise UnknownError
    text = ast.unparse(kind)
    # Where the layers are listed, a name of a class's own body is not seen, and this one is each layer's.
    if text.partition(".")[0] == LISTED or isinstance(scope_of(script, call), ast.ClassDef):
        raise UnknownError
    if text.rpartition(".")[2] in NESTED:
        raise UnknownError
    return _OfClass(text)


def _by_size(script: Script, least: ast.expr, call: ast.Call) -> Layers:
    """Modules of so many parameters beside those of units inside of them, as FSDP1 picks them.

    Only those of a model that the script defines, in which no weight is read beside its layer's forward: it
    may be another's, too, and two units would have it. Too small ones are for another click.
    """
    if not _number(least) >= SMALL_UNIT or not sees(script, "torch", call):
        raise UnknownError
    shared = [one for one in script.walk(ast.Attribute) if isinstance(one, ast.Attribute)]
    reads = any(one.attr in ("weight", "bias") for one in shared)
    if reads or not _is_its_own(script, call) or SIZE in script.text:
        raise UnknownError
    return _BySize(ast.get_source_segment(script.text, least) or ast.unparse(least))


def _number(value: ast.expr) -> float:
    """A literal, also as ``int(1e8)``; 0 where it is none."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "int" and len(value.args) == 1:
        value = value.args[0]
    found = value.value if isinstance(value, ast.Constant) else 0
    return found if isinstance(found, int | float) else 0


def _is_its_own(script: Script, call: ast.Call) -> bool:
    """Whether the model that is wrapped is of a class of the script."""
    model = ast.unparse(call.args[0])
    given = [
        one.value
        for one in script.walk(ast.Assign)
        if isinstance(one, ast.Assign) and one.value is not call and model in map(ast.unparse, one.targets)
    ]
    made = given[0] if len(given) == 1 else None
    while isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute) and made.func.attr in MOVES:
        made = made.func.value
    kinds = {one.name for one in script.walk(ast.ClassDef) if isinstance(one, ast.ClassDef)}
    return isinstance(made, ast.Call) and isinstance(made.func, ast.Name) and made.func.id in kinds
