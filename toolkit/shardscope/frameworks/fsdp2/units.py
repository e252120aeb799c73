"""Units of one decoder layer each, as a click writes them into a script that has one unit or thousands."""

from __future__ import annotations

import ast

from shardscope.frameworks.fsdp2.migrated import LAYER, MODULE, OPTIONS
from shardscope.planner.preflight.bindings import is_dotted_name, only_value
from shardscope.planner.preflight.edits import has_comment, imported, mended, replaced
from shardscope.planner.preflight.script import Script, keywords

SHARD = "fully_shard"
TAKEN = ("mesh", "reshard_after_forward", "mp_policy", "offload_policy")
"""What is said of the whole model and holds for each of its layers."""
LIBRARY = "transformers"
MAKERS = ("from_pretrained", "from_config")
LAYERS_MODULE, LAYERS_CLASS = "transformers.modeling_layers", "GradientCheckpointingLayer"
"""What every decoder layer of transformers is, and no part of one."""


def by_layer(script: Script, call: ast.Call) -> str | None:
    """The script with each layer of a model of transformers sharded before the model is.

    None where the text does not settle that it is one, where the call is no statement of its own, and where
    it is told something that may not hold for each layer.
    """
    statement = _statement(script, call)
    given = keywords(call)
    if statement is None or len(given) < len(call.keywords) or not set(given) <= set(TAKEN):
        return None
    if len(call.args) != 1 or not _is_of_library(script, call.args[0]) or not _is_torchs(script, call):
        return None
    if has_comment(script, statement) or OPTIONS in script.text or LAYER in script.text:
        return None
    model, shard = ast.unparse(call.args[0]), ast.unparse(call.func)
    local, imports = imported(script, statement, LAYERS_MODULE, LAYERS_CLASS)
    options = ", ".join(f"{name}={ast.unparse(value)}" for name, value in given.items())
    passed = f", **{OPTIONS}" if options else ""
    whole = f"{shard}({model}{passed})"
    if isinstance(statement, ast.Assign):
        whole = f"{ast.unparse(statement.targets[0])} = {whole}"
    lines = [
        *([f"{OPTIONS} = dict({options})"] if options else []),
        f"for {LAYER} in {model}.modules():",
        f"    if isinstance({LAYER}, {local[LAYERS_CLASS]}):",
        f"        {shard}({LAYER}{passed})",
        whole,
    ]
    margin = "\n" + " " * statement.col_offset
    return mended(script, replaced(script, statement, margin.join(lines)), *imports)


def of_layers(script: Script, size: ast.expr) -> str | None:
    """The script with units from the plan's smallest decoder layer on, where it had smaller ones."""
    if script.plan is None:
        return None
    arch = script.plan.architecture
    layers = (sum(arch.layer_parameters(index).values()) for index in range(arch.num_hidden_layers))
    return mended(script, replaced(script, size, f"{min(layers):_}"))


def _statement(script: Script, call: ast.Call) -> ast.Expr | ast.Assign | None:
    """What consists of that call alone: it, or a name that is given its result."""
    for one in script.walk(ast.Expr, ast.Assign):
        if isinstance(one, ast.Expr) and one.value is call:
            return one
        if isinstance(one, ast.Assign) and one.value is call and len(one.targets) == 1:
            return one if is_dotted_name(one.targets[0]) else None
    return None


def _is_torchs(script: Script, call: ast.Call) -> bool:
    """Whether that function is torch's own."""
    if not isinstance(call.func, ast.Name):
        return ast.unparse(call.func) == f"{MODULE}.{SHARD}"
    home = script.modules.get(call.func.id, "")
    return home.startswith("torch.distributed.") and call.func.id not in script.defined


def _is_of_library(script: Script, model: ast.expr) -> bool:
    """Whether a name stands for a model that transformers made, and for nothing else."""
    if not isinstance(model, ast.Name):
        return False
    made = only_value(script, model.id, model)
    if not isinstance(made, ast.Call):
        return False
    is_method = isinstance(made.func, ast.Attribute) and made.func.attr in MAKERS
    maker = made.func.value if isinstance(made.func, ast.Attribute) and is_method else made.func
    if not isinstance(maker, ast.Name) or script.modules.get(maker.id, "").partition(".")[0] != LIBRARY:
        return False
    # An Auto class makes models by its methods alone.
    return is_method or not script.aliases[maker.id].startswith("Auto")
