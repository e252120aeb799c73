"""Samplers as a click writes them into a person's own code, where the text settles what they deal."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardscope.own_code.bindings import is_dotted_name, only_value, scope_of
from shardscope.own_code.edits import (
    Edit,
    imported,
    line_before,
    mended,
    replaced,
    unless_too_deep,
    with_keyword,
)
from shardscope.own_code.script import Script, keywords

if TYPE_CHECKING:
    from shardscope.plan import Plan

SAMPLER = "DistributedSampler"
MODULE = "torch.utils.data.distributed"
WITHOUT_LENGTH = ("IterableDataset", "streaming", "WebDataset", "to_iterable_dataset")
"""Names that tell of data which no sampler can deal."""
TOGETHER = (
    *("init_device_mesh", "DeviceMesh", "parallelize_module", "context_parallel", "PipelineStage"),
    *("broadcast", "broadcast_object_list", "new_group", "parallel_state", "mpu", "Accelerator", "prepare"),
)
"""Names that tell of ranks which may have to read the same, or of something else that deals."""
GROUPS = ("init_process_group", "init_distributed")
"""Names that bring a process group up, which a sampler asks for its rank."""
OURS = "ctx"
"""What a task's function gets is up already."""
WALKED = ("enumerate", "tqdm", "iter")
"""Functions that a loop hands its loader to."""
OF_TESTS = re.compile(r"(^|[._])(val|valid|validation|test|eval|dev)", re.IGNORECASE)
"""Names of what is measured with."""
OF_RANKS = re.compile(r"rank|master|(?<!__)main(?!__)|process", re.IGNORECASE)
"""What conditions say that are not true on all ranks."""
OWN_SAMPLERS = ("sampler", "batch_sampler")


@unless_too_deep
def dealt(script: Script, loaders: Sequence[ast.Call]) -> str | None:
    """The script with a sampler for each of ``loaders`` that shuffles: those that do not may be of a test.

    None where ranks may read other data than one each of all, where no process group is surely up for a
    sampler to ask, and where a loader's arguments do not say what it loads, and how.
    """
    plan = script.plan
    if plan is not None and plan.degrees.data_parallel != plan.world_size:
        return None
    if any(name in script.names for name in (*WITHOUT_LENGTH, *TOGETHER)):
        return None
    if any(getattr(node, "attr", "") == "dataset" for node in script.walk(ast.Attribute)):
        return None  # Its length may be what a mean is taken over.
    shuffled = [loader for loader in loaders if _shuffles(loader) and not _is_of_a_test(script, loader)]
    if any(_is_counted(script, one) or _is_of_some_ranks(script, one) for one in shuffled):
        return None
    if not shuffled or not all(_is_torchs(script, one) and _has_group(script, one) for one in shuffled):
        return None
    found: list[Edit] = []
    for loader in shuffled:
        local, imports = imported(script, loader, MODULE, SAMPLER)
        edit = _dealt(script, loader, local[SAMPLER])
        if edit is None:
            return None
        # One import at the top serves all of them.
        found += [*(one for one in imports if one not in found), edit]
    return mended(script, *found)


def _shuffles(loader: ast.Call) -> bool:
    shuffle = keywords(loader).get("shuffle")
    return shuffle is not None and not (isinstance(shuffle, ast.Constant) and not shuffle.value)


def _is_of_a_test(script: Script, loader: ast.Call) -> bool:
    """Whether it, or what it loads, is called so: each rank would see a part of what is measured."""
    names = [ast.unparse(one) for one in _datasets(loader)]
    for one in script.walk(ast.Assign):
        if isinstance(one, ast.Assign) and one.value is loader:
            names += map(ast.unparse, one.targets)
    return any(map(OF_TESTS.search, names))


def _is_counted(script: Script, loader: ast.Call) -> bool:
    """Whether the script takes the length of what it loads, which may say how many steps there are."""
    counted = [ast.unparse(one) for call in script.calls("len") for one in call.args]
    return any(ast.unparse(one) in counted for one in _datasets(loader))


def _is_of_some_ranks(script: Script, loader: ast.Call) -> bool:
    """Whether it is made on ranks alone that a condition names, who would load a part then."""
    return any(
        OF_RANKS.search(ast.unparse(one.test))  # type: ignore[attr-defined]
        for one in script.walk(ast.If, ast.IfExp)
        if loader in ast.walk(one)
    )


def _datasets(loader: ast.Call) -> list[ast.expr]:
    return [*loader.args[:1], *(one.value for one in loader.keywords if one.arg == "dataset")]


def _dealt(script: Script, loader: ast.Call, sampler: str) -> Edit | None:
    given = keywords(loader)
    is_said = len(given) == len(loader.keywords) and len(loader.args) <= 2
    has_own = any(name in given for name in OWN_SAMPLERS)
    dataset = given.get("dataset", loader.args[0] if loader.args else None)
    if not is_said or has_own or any(isinstance(one, ast.Starred) for one in loader.args):
        return None
    if dataset is None or not is_dotted_name(dataset):
        return None
    keyword = next(one for one in loader.keywords if one.arg == "shuffle")
    made = f"{sampler}({ast.unparse(dataset)}, shuffle={ast.unparse(keyword.value)})"
    return replaced(script, keyword, f"sampler={made}")


def _is_torchs(script: Script, loader: ast.Call) -> bool:
    """Whether that class is torch's own."""
    if isinstance(loader.func, ast.Name):
        module = script.modules.get(loader.func.id, "")
        return module.startswith("torch.utils.data") and loader.func.id not in script.defined
    return ast.unparse(loader.func) == "torch.utils.data.DataLoader"


def _has_group(script: Script, loader: ast.Call) -> bool:
    """Whether ranks know of each other where ``loader`` is made, whatever way the script goes there."""
    scope = scope_of(script, loader)
    if isinstance(scope, ast.FunctionDef) and not scope.decorator_list:
        first = scope.args.args[:1]
        if first and first[0].arg == OURS and not isinstance(scope_of(script, scope), ast.ClassDef):
            return True
    functions = [one for one in script.walk(ast.FunctionDef) if isinstance(one, ast.FunctionDef)]
    makers = {one.name for one in functions if any(called in GROUPS for _, called in _called_in(script, one))}
    return any(
        line < loader.lineno and called in {*GROUPS, *makers} for line, called in _called_in(script, scope)
    )


def _called_in(script: Script, scope: ast.AST | None) -> list[tuple[int, str]]:
    """Lines and names of what ``scope`` calls on the way through it, under no condition."""
    body: list[ast.stmt] = getattr(script.tree if scope is None else scope, "body", [])
    return [(one.lineno, script.called(one.value)) for one in body if isinstance(one, ast.Expr)]


def deals_to_all(script: Script, sampler: ast.Call) -> bool:
    """Whether it says that it deals to all ranks, or leaves that to the process group of all."""
    given = keywords(sampler).get("num_replicas", sampler.args[1] if len(sampler.args) > 1 else None)
    if given is None or _is_of_all(script, given, "world_size"):
        return True
    # Of a name that nothing in the text explains, what it says.
    is_open = isinstance(given, ast.Name) and only_value(script, given.id, sampler) is None
    return is_open and ast.unparse(given) == "world_size"


@unless_too_deep
def among_data_parallel_ranks(script: Script, sampler: ast.Call, plan: Plan) -> str | None:
    """The script with the plan's own number of shares, by the rank that the sampler is given.

    Ranks lie tp, cp, data, pp, inner to outer. None where the sampler asks the process group for its rank, or
    is given what may be another than the rank among all.
    """
    given = keywords(sampler)
    rank, shares_now = given.get("rank"), given.get("num_replicas")
    is_said = len(given) == len(sampler.keywords) and len(sampler.args) == 1
    if rank is None or not is_said or not _is_of_all(script, rank, "rank"):
        return None
    if shares_now is not None and not _is_of_all(script, shares_now, "world_size"):
        return None
    degrees = plan.degrees
    inner, shares = degrees.tp * degrees.cp, degrees.data_parallel
    return mended(
        script,
        with_keyword(script, sampler, "num_replicas", str(shares)),
        replaced(script, rank, f"{ast.unparse(rank)} // {inner} % {shares}"),
    )


def _is_of_all(script: Script, given: ast.expr, name: str) -> bool:
    """``dist.get_rank()``, ``int(os.environ["RANK"])``, ``ctx.rank`` of a task, or a name for one of them."""
    if ast.unparse(given) == f"{OURS}.{name}":
        return True
    if isinstance(given, ast.Name):
        value = only_value(script, given.id, given)
        return value is not None and not isinstance(value, ast.Name) and _is_of_all(script, value, name)
    if not isinstance(given, ast.Call):
        return False
    if ast.unparse(given.func) == "int" and len(given.args) == 1:
        return ast.unparse(given.args[0]) == f"os.environ[{name.upper()!r}]"
    asked = ast.unparse(given.func).rpartition(".")[2]
    return asked == f"get_{name}" and not given.args and not given.keywords


@unless_too_deep
def told_of_epochs(script: Script, sampler: ast.Call) -> str | None:
    """The script with ``set_epoch`` first in its loop over epochs; None where the text shows no such loop.

    Sampler and loader are made once and whatever happens, before that loop.
    """
    for walk in script.walk(ast.For):
        assert isinstance(walk, ast.For)
        loader = _walked(walk)
        if not isinstance(loader, ast.Name):
            continue
        made = only_value(script, loader.id, walk)
        if not isinstance(made, ast.Call) or script.called(made) != "DataLoader":
            continue
        own = keywords(made).get("sampler")
        name = f"{loader.id}.sampler"
        if isinstance(own, ast.Name):
            name, own = own.id, only_value(script, own.id, walk)
        epochs = _loop_around(script, walk)
        if own is sampler and epochs is not None and made.lineno < epochs.lineno:
            told = f"{name}.set_epoch({ast.unparse(epochs.target)})"
            return mended(script, line_before(script, epochs.body[0], told))
    return None


def _loop_around(script: Script, walk: ast.For) -> ast.For | None:
    """The innermost loop around that one, if it counts."""
    around = [
        one for one in script.walk(ast.For, ast.While) if one is not walk and walk in list(ast.walk(one))
    ]
    inner = max(around, key=lambda one: one.lineno, default=None)  # type: ignore[attr-defined]
    if not isinstance(inner, ast.For) or not isinstance(inner.target, ast.Name):
        return None
    is_same = scope_of(script, inner) is scope_of(script, walk)
    return inner if is_same and script.called(inner.iter) == "range" else None


def _walked(loop: ast.For) -> ast.expr:
    """What it is a loop over."""
    found = loop.iter
    while isinstance(found, ast.Call) and found.args and ast.unparse(found.func) in WALKED:
        found = found.args[0]
    return found
