"""One unit for each decoder layer, as a click writes it into a script that has one for the whole model."""

from __future__ import annotations

import ast

from shardscope.architecture import MODEL_TYPES
from shardscope.frameworks.fsdp2.migrated import OPTIONS
from shardscope.frameworks.fsdp2.migrated_options import MODULE
from shardscope.frameworks.fsdp2.migrated_units import LAYER
from shardscope.own_code.bindings import only_value
from shardscope.own_code.edits import has_comment, imported, mended, replaced, unless_too_deep
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
READERS = (SHARD, "print", "get_model_state_dict", "get_state_dict", "get_optimizer_state_dict")
"""Functions that take a model of many units as they take one."""


@unless_too_deep
def by_layer(script: Script, call: ast.Call) -> str | None:
    """The script with each layer of a model of transformers sharded before the model is.

    None where the text does not settle that it is one whose layers are known, where the call is no statement
    of its own, where it is told something that may not hold for each layer, and where the script does
    anything with its model that one of many units does otherwise: read its weights, or set its units up.
    """
    statement = next(
        (one for one in script.walk(ast.Expr) if isinstance(one, ast.Expr) and one.value is call), None
    )
    given = keywords(call)
    if statement is None or len(given) < len(call.keywords) or not set(given) <= {*TAKEN, POLICY}:
        return None
    if not _is_torchs(script, call) or not _is_plain_policy(script, given.get(POLICY)):
        return None
    if len(call.args) != 1 or not isinstance(call.args[0], ast.Name) or not _is_known(script, call.args[0]):
        return None
    if has_comment(script, statement) or OPTIONS in script.text or LAYER in script.text:
        return None
    model, shard = ast.unparse(call.args[0]), ast.unparse(call.func)
    local, imports = imported(script, statement, LAYERS_MODULE, LAYERS_CLASS)
    options = ", ".join(f"{name}={ast.unparse(value)}" for name, value in given.items())
    passed = f", **{OPTIONS}" if options else ""
    lines = [
        *([f"{OPTIONS} = dict({options})"] if options else []),
        f"for {LAYER} in {model}.modules():",
        f"    if isinstance({LAYER}, {local[LAYERS_CLASS]}):",
        f"        {shard}({LAYER}{passed})",
        f"{shard}({model}{passed})",
    ]
    margin = "\n" + " " * statement.col_offset
    return mended(script, replaced(script, statement, margin.join(lines)), *imports)


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


def _is_known(script: Script, model: ast.Name) -> bool:
    """Whether a name stands for one model of a known family, and for nothing else, and is used plainly."""
    made = only_value(script, model.id, model)
    if not isinstance(made, ast.Call):
        return False
    is_method = isinstance(made.func, ast.Attribute) and made.func.attr in ("from_pretrained", "from_config")
    maker = made.func.value if isinstance(made.func, ast.Attribute) and is_method else made.func
    if not isinstance(maker, ast.Name) or script.modules.get(maker.id, "") != LIBRARY:
        return False
    # An Auto class may make anything, unless a plan says of what family it is.
    is_ours = script.plan is not None and script.plan.architecture.model_type in MODEL_TYPES
    auto = ["AutoModel"] if is_method and is_ours else []
    is_family = script.aliases[maker.id] in [f"{name}ForCausalLM" for name in (*FAMILIES, *auto)]
    is_own_code = any(keyword.arg in ("trust_remote_code", None) for keyword in made.keywords)
    uses = [one for one in script.walk(ast.Name) if getattr(one, "id", "") == model.id]
    plain = _plain_uses(script, model.id)
    return is_family and not is_own_code and all(id(one) in plain for one in uses)


def _plain_uses(script: Script, model: str) -> set[int]:
    """Names of a model where it is made, called, handed to the optimizer, or does what all models do."""
    plain: list[ast.AST] = []
    for node in script.walk(ast.Call, ast.Assign, ast.Attribute):
        if isinstance(node, ast.Assign):
            plain += node.targets
        elif isinstance(node, ast.Attribute):
            plain += [node.value] * (node.attr in PLAIN_USES and isinstance(node.ctx, ast.Load))
        elif isinstance(node, ast.Call):
            plain.append(node.func)
            plain += node.args[:1] * (script.called(node) in READERS)
            plain += _asked(script, node, model)
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
