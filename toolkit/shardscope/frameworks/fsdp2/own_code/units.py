"""One unit for each decoder layer, as a click writes it into a script that has one for the whole model."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import NamedTuple

from shardscope.architecture import MODEL_TYPES
from shardscope.frameworks.fsdp2.own_code.migrated import OPTIONS
from shardscope.frameworks.fsdp2.own_code.migrated_options import MODULE
from shardscope.frameworks.fsdp2.own_code.migrated_units import LAYER
from shardscope.frameworks.fsdp2.own_code.own_layers import own_layers
from shardscope.frameworks.fsdp2.own_code.own_names import counted
from shardscope.own_code.bindings import only_value
from shardscope.own_code.edits import Edit, has_comment, imported, mended, replaced, unless_too_deep
from shardscope.own_code.script import Script, keywords

SHARD = "fully_shard"
TAKEN = ("mesh", "reshard_after_forward", "offload_policy")
"""What is said of the whole model and holds for each of its layers."""
POLICY, POLICY_CLASS = "mp_policy", "MixedPrecisionPolicy"
POLICY_TAKEN = {"param_dtype", "reduce_dtype"}
"""An output type that is the model's would be each layer's, too."""
LIBRARY = "transformers"
FAMILIES = ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe", "GPT2", "Gemma", "Gemma2")
"""Those whose decoder layers, and nothing else of them, are of the class below (transformers 5)."""
LAYERS_MODULE, LAYERS_CLASS = "transformers.modeling_layers", "GradientCheckpointingLayer"
PLAIN_USES = ("train", "eval", "to", "cuda", "zero_grad", "gradient_checkpointing_enable", "config")
"""What a model of many units does as one of a single unit does."""
ITSELF = ("to", "cuda", "train", "eval")
"""Methods that give the model itself."""
READERS = (SHARD, "print", "get_model_state_dict", "get_state_dict", "get_optimizer_state_dict")
"""Functions that take a model of many units as they take one."""


class Layers(NamedTuple):
    """How a script tells the layers of its model from its other modules."""

    kind: str
    """Their class, by the name that the script has for it."""
    imports: tuple[Edit, ...]
    """What brings that name in."""


@unless_too_deep
def by_layer(script: Script, call: ast.Call) -> str | None:
    """The script with each layer of its model sharded before the model is.

    None where the text does not settle which its layers are, where the call is no statement of its own, where
    it is told something that may not hold for each layer, and where the script does anything with its model
    that one of many units does otherwise: read its weights, or set its units up.
    """
    statement = next(
        (one for one in script.walk(ast.Expr) if isinstance(one, ast.Expr) and one.value is call), None
    )
    if statement is None or not holds_for_layers(script, call):
        return None
    if len(call.args) != 1 or not isinstance(call.args[0], ast.Name):
        return None
    if has_comment(script, statement) or OPTIONS in script.text or LAYER in script.text:
        return None
    layers = layers_of(script, call.args[0], statement, keywords(call))
    if layers is None:
        return None
    model, shard = ast.unparse(call.args[0]), ast.unparse(call.func)
    options = ", ".join(f"{name}={ast.unparse(value)}" for name, value in keywords(call).items())
    passed = f", **{OPTIONS}" if options else ""
    lines = [
        *([f"{OPTIONS} = dict({options})"] if options else []),
        f"for {LAYER} in {model}.modules():",
        f"    if isinstance({LAYER}, {layers.kind}):",
        f"        {shard}({LAYER}{passed})",
        f"{shard}({model}{passed})",
    ]
    margin = "\n" + " " * statement.col_offset
    return mended(script, replaced(script, statement, margin.join(lines)), *layers.imports)


def holds_for_layers(script: Script, call: ast.Call) -> bool:
    """Whether it is torch's function, told nothing but what a layer may be told as well as its model."""
    given = keywords(call)
    is_known = len(given) == len(call.keywords) and set(given) <= {*TAKEN, POLICY}
    return is_known and _is_torchs(script, call) and _is_plain_policy(script, given.get(POLICY))


def layers_of(
    script: Script, model: ast.Name, at: ast.stmt, given: Mapping[str, ast.expr], *others: ast.AST
) -> Layers | None:
    """The layers of the one model that a name stands for; ``others`` are uses of it that are known."""
    made = only_value(script, model.id, model)
    while isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute) and made.func.attr in ITSELF:
        made = made.func.value
    if not isinstance(made, ast.Call):
        return None
    if _is_known(script, made):
        local, imports = imported(script, at, LAYERS_MODULE, LAYERS_CLASS)
        found, methods = Layers(local[LAYERS_CLASS], imports), frozenset[str]()
    elif (own := own_layers(script, made.func)) is not None:
        # A unit casts what it is given, and a layer's may be given what the model's left as it was.
        if POLICY in given and ("autocast" in script.names or not own.takes_one):
            return None
        found, methods = Layers(own.kind, ()), own.methods
    else:
        return None
    plain = _plain_uses(script, model.id, methods) | {id(one) for one in others}
    uses = [one for one in script.walk(ast.Name) if getattr(one, "id", "") == model.id]
    return found if all(id(one) in plain for one in uses) else None


def _is_torchs(script: Script, call: ast.Call) -> bool:
    """Whether that function is torch's own ``fully_shard``."""
    if script.called(call) != SHARD:
        return False
    if not isinstance(call.func, ast.Name):
        return ast.unparse(call.func) == f"{MODULE}.{SHARD}"
    home = script.modules.get(call.func.id, "")
    return home.startswith("torch.distributed.") and call.func.id not in script.defined


def _is_plain_policy(script: Script, policy: ast.expr | None) -> bool:
    made = only_value(script, policy.id, policy) if isinstance(policy, ast.Name) else policy
    if policy is None:
        return True
    if not isinstance(made, ast.Call) or script.called(made) != POLICY_CLASS or made.args:
        return False
    return {keyword.arg for keyword in made.keywords} <= POLICY_TAKEN


def _is_known(script: Script, made: ast.Call) -> bool:
    """Whether a call makes a model of a family of transformers' whose layers are known."""
    is_method = isinstance(made.func, ast.Attribute) and made.func.attr in ("from_pretrained", "from_config")
    maker = made.func.value if isinstance(made.func, ast.Attribute) and is_method else made.func
    if not isinstance(maker, ast.Name) or script.modules.get(maker.id, "") != LIBRARY:
        return False
    # An Auto class may make anything, unless a plan says of what family it is.
    is_ours = script.plan is not None and script.plan.architecture.model_type in MODEL_TYPES
    auto = ["AutoModel"] if is_method and is_ours else []
    is_family = script.aliases[maker.id] in [f"{name}ForCausalLM" for name in (*FAMILIES, *auto)]
    return is_family and not any(keyword.arg in ("trust_remote_code", None) for keyword in made.keywords)


def _plain_uses(script: Script, model: str, methods: frozenset[str]) -> set[int]:
    """Names of a model where it is made, called, handed to the optimizer, or does what all models do."""
    plain: list[ast.AST] = []
    alone = [getattr(one.value, "func", None) for one in script.walk(ast.Expr) if isinstance(one, ast.Expr)]
    for node in script.walk(ast.Call, ast.Assign, ast.Attribute, ast.GeneratorExp, ast.ListComp):
        if isinstance(node, ast.Assign):
            plain += node.targets
        elif isinstance(node, ast.Attribute):
            is_plain = node.attr in (*PLAIN_USES, *methods) and isinstance(node.ctx, ast.Load)
            # What is given another name may be used by that in any way.
            is_plain = is_plain and (node.attr not in ITSELF or node in alone)
            plain += [node.value] * is_plain
        elif isinstance(node, ast.Call):
            plain.append(node.func)
            plain += node.args[:1] * (script.called(node) in READERS)
            plain += _asked(script, node, model)
        elif (owner := counted(node)) is not None:
            plain.append(owner)
    return {id(node) for node in plain}


def _asked(script: Script, call: ast.Call, model: str) -> list[ast.expr]:
    """The model in ``AdamW(model.parameters(), ...)``, and where its norms are clipped."""
    first = call.args[0] if call.args else None
    if first is None or ast.unparse(first) != f"{model}.parameters()":
        return []
    home = script.modules.get(getattr(call.func, "id", ""), "")
    is_optimizer = home.startswith("torch.optim") or ".optim." in f".{ast.unparse(call.func)}"
    if not is_optimizer and script.called(call) != "clip_grad_norm_":
        return []
    return [first.func.value]  # type: ignore[attr-defined]
