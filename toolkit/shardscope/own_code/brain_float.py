"""A script's fp16 as bf16, which has fp32's range and needs no loss scale."""

from __future__ import annotations

import ast
import re

from shardscope.own_code.bindings import is_dotted_name
from shardscope.own_code.edits import Edit, mended, renamed, replaced, unless_too_deep
from shardscope.own_code.exported import comes_after_training
from shardscope.own_code.script import Script, keywords

HALVES = ("float16", "half")
"""What torch calls fp16."""
TOLD_OTHERWISE = re.compile(r"fp16|float16|HalfTensor|bf16", re.IGNORECASE)
"""What texts and names have in them that say a type to something else, or bf16 already."""
SAYING = ("value", "id", "attr", "arg", "name")
"""Where nodes of the syntax have their text."""
NOT_FOR_BF16 = frozenset(
    {
        *("numpy", "asarray", "array", "frombuffer", "from_file", "memmap", "getattr", "Fabric"),
        *("view", "set_", "arange", "int16", "uint16", "save_pretrained", "push_to_hub", "save_file"),
        *("quantize", "quantize_dynamic", "export", "onnx", "no_grad", "inference_mode", "eval"),
    }
)
"""What has no bf16, reads stored numbers, chooses a type by itself, or runs models beside the trained one."""
TYPES = ("dtype", "torch_dtype")
MAKERS = ("from_pretrained", "from_config")
AUTOCAST = "autocast"
NO_MODEL = re.compile("Tokenizer|Processor|Config")
"""What is made as a model is, and is none."""


@unless_too_deep
def in_bf16(script: Script) -> str | None:
    """The script with torch's bf16 wherever it says torch's fp16.

    None on a GPU without bf16, where the text does not show that it is a model's own type, and where fp16 is
    also said in a way that this does not change, asked for, or of something that is no part of training.
    """
    if script.plan is None or "bf16" not in script.plan.cluster.gpu.peak_flops:
        return None
    if _is_said_otherwise(script) or NOT_FOR_BF16 & set(script.names) or "half" in script.defined:
        return None
    places = _places(script)
    said = [
        node for node in script.walk(ast.Attribute) if isinstance(node, ast.Attribute) and node.attr in HALVES
    ]
    if any(id(node) not in places or comes_after_training(script, node) for node in said):
        return None
    if not _is_of_a_model(script):
        return None
    edits: list[Edit] = [
        replaced(script, node, f"{ast.unparse(node.value)}.bfloat16")
        if _is_type(script, node)
        else renamed(script, node, "bfloat16")
        for node in said
    ]
    return mended(script, *edits)


def _places(script: Script) -> set[int]:
    """Where a model is told fp16, or something is made it: no table, no choice, and nothing that is saved."""
    found = {id(value) for call in _told(script) for value in _types(script, call)}
    for call in script.walk(ast.Call):
        assert isinstance(call, ast.Call)
        if script.called(call) == "to":
            found |= {id(one) for one in (*call.args, *_types(script, call)) if _is_type(script, one)}
        if _makes_half(script, call):
            found.add(id(call.func))
    inside = script.walk(ast.Dict, ast.IfExp, ast.Lambda, ast.ListComp, ast.DictComp, ast.GeneratorExp)
    apart = {id(node) for one in inside for node in ast.walk(one)}
    saved = {id(node) for call in script.calls("save") for node in ast.walk(call)}
    return found - apart - saved


def _told(script: Script) -> list[ast.Call]:
    """Calls that take the type which a model is made in, or computed in."""
    calls = (call for name in (*MAKERS, AUTOCAST) for call in script.calls(name))
    return [call for call in calls if not NO_MODEL.search(ast.unparse(call.func))]


def _types(script: Script, call: ast.Call) -> list[ast.expr]:
    """fp16 among the keywords of ``call``."""
    return [value for name, value in keywords(call).items() if name in TYPES and _is_type(script, value)]


def _is_type(script: Script, node: ast.expr) -> bool:
    """``torch.float16``."""
    if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
        return False
    return node.attr in HALVES and script.aliases.get(node.value.id) == "torch"


def _makes_half(script: Script, call: ast.Call) -> bool:
    """``x.half()`` of what is no module."""
    made = call.func
    if not isinstance(made, ast.Attribute) or made.attr != "half" or call.args or call.keywords:
        return False
    return ast.unparse(made.value) not in script.aliases


def _is_of_a_model(script: Script) -> bool:
    """Whether all models are made in fp16, or computed in it, or changed to it by name, a trained one too."""
    told = _told(script)
    if not all(_types(script, call) for call in told):
        return False
    trained = {
        ast.unparse(call.func.value)
        for call in script.calls("parameters")
        if isinstance(call.func, ast.Attribute)
    }
    is_computed = any(script.called(call) == AUTOCAST for call in told)
    is_made = bool(told) and (not trained or bool(_made(script, told) & trained))
    return is_computed or is_made or _is_changed(script, trained)


def _made(script: Script, makers: list[ast.Call]) -> set[str]:
    """What ``makers`` make, and what is made of that at once."""
    return {
        ast.unparse(target)
        for one in script.walk(ast.Assign)
        if isinstance(one, ast.Assign) and any(node in makers for node in ast.walk(one.value))
        for target in one.targets
    }


def _is_changed(script: Script, trained: set[str]) -> bool:
    return any(
        ast.unparse(call.func.value) in trained
        for call in (*script.calls("half"), *script.calls("to"))
        if isinstance(call.func, ast.Attribute)
        and is_dotted_name(call.func.value)
        and (_makes_half(script, call) or any(_is_type(script, one) for one in call.args))
    )


def _is_said_otherwise(script: Script) -> bool:
    """Whether fp16 is a text, an option, a name of its own, or what something is compared with."""
    if any(alias.name in HALVES for one in script.walk(ast.ImportFrom) for alias in one.names):  # type: ignore[attr-defined]
        return True
    for node in script.walk(ast.Constant, ast.Name, ast.Attribute, ast.keyword, ast.arg):
        said = next((text for name in SAYING if isinstance(text := getattr(node, name, None), str)), "")
        if said not in HALVES and TOLD_OTHERWISE.search(said):
            return True
        if isinstance(node, ast.Constant) and said in HALVES:
            return True
    return any(True for _ in script.walk(ast.Match)) or any(map(TOLD_OTHERWISE.search, script.defined))
