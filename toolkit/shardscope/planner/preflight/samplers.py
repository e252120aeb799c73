"""Samplers as a click writes them into a person's own code, where the text settles what they deal."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardscope.planner.preflight.bindings import is_dotted_name, only_value, scope_of
from shardscope.planner.preflight.edits import (
    Edit,
    imported,
    line_before,
    mended,
    replaced,
    with_keyword,
)
from shardscope.planner.preflight.script import Script, keywords

if TYPE_CHECKING:
    from shardscope.plan import Plan

SAMPLER = "DistributedSampler"
MODULE = "torch.utils.data.distributed"
WITHOUT_LENGTH = ("IterableDataset", "streaming", "WebDataset", "to_iterable_dataset")
"""Names that tell of data which no sampler can deal."""
GROUPS = ("init_process_group", "init_device_mesh", "init_distributed", "Accelerator", "PartialState")
"""Names that bring a process group up, which a sampler asks for its rank."""
OURS = "ctx"
"""What a task's function gets is up already."""
WALKED = ("enumerate", "tqdm", "iter")
"""Functions that a loop hands its loader to."""
OWN_SAMPLERS = ("sampler", "batch_sampler")


def dealt(script: Script, loaders: Sequence[ast.Call]) -> str | None:
    """The script with a sampler for each of ``loaders``, which shuffles as that loader did.

    None where ranks read other data than one each of all (the plan's ranks work together), where no process
    group is up for a sampler to ask, and where a loader's arguments do not say what it loads, and how.
    """
    plan = script.plan
    if plan is not None and plan.degrees.data_parallel != plan.world_size:
        return None
    if any(name in script.names for name in WITHOUT_LENGTH):
        return None
    if not all(_has_group(script, loader) for loader in loaders):
        return None
    local, imports = imported(script, loaders[0], MODULE, SAMPLER)
    edits = [_dealt(script, loader, local[SAMPLER]) for loader in loaders]
    found = [edit for edit in edits if edit is not None]
    return mended(script, *found, *imports) if len(found) == len(edits) else None


def _dealt(script: Script, loader: ast.Call, sampler: str) -> Edit | None:
    given = keywords(loader)
    is_said = len(given) == len(loader.keywords) and len(loader.args) <= 2
    has_own = any(name in given for name in OWN_SAMPLERS)
    dataset = given.get("dataset", loader.args[0] if loader.args else None)
    if not is_said or has_own or any(isinstance(one, ast.Starred) for one in loader.args):
        return None
    if dataset is None or not is_dotted_name(dataset):
        return None
    shuffle = given.get("shuffle")
    if shuffle is None:
        return with_keyword(script, loader, "sampler", f"{sampler}({ast.unparse(dataset)}, shuffle=False)")
    keyword = next(one for one in loader.keywords if one.arg == "shuffle")
    made = f"{sampler}({ast.unparse(dataset)}, shuffle={ast.unparse(shuffle)})"
    return replaced(script, keyword, f"sampler={made}")


def _has_group(script: Script, loader: ast.Call) -> bool:
    """Whether ranks know of each other where ``loader`` is made, as far as the text tells."""
    if any(isinstance(node, ast.arg) and node.arg == OURS for node in script.walk(ast.arg)):
        return True
    makers = [call for name in GROUPS for call in script.calls(name)]
    return any(
        scope_of(script, call) is not scope_of(script, loader) or call.lineno < loader.lineno
        for call in makers
    )


def deals_to_all(sampler: ast.Call) -> bool:
    """Whether it says that it deals to all ranks, or leaves that to the process group of all."""
    given = keywords(sampler).get("num_replicas", sampler.args[1] if len(sampler.args) > 1 else None)
    return given is None or _is_of_all(given, "world_size")


def among_data_parallel_ranks(script: Script, sampler: ast.Call, plan: Plan) -> str | None:
    """The script with the plan's own number of shares, by the rank that the sampler is given.

    Ranks lie tp, cp, data, pp, inner to outer. None where the sampler asks the process group for its rank, or
    is given anything but the rank among all.
    """
    rank = keywords(sampler).get("rank")
    if rank is None or len(sampler.args) != 1 or not _is_of_all(rank, "rank"):
        return None
    degrees = plan.degrees
    inner, shares = degrees.tp * degrees.cp, degrees.data_parallel
    return mended(
        script,
        with_keyword(script, sampler, "num_replicas", str(shares)),
        replaced(script, rank, f"{ast.unparse(rank)} // {inner} % {shares}"),
    )


def _is_of_all(given: ast.expr, name: str) -> bool:
    """``rank``, ``args.rank``, ``dist.get_rank()`` and ``os.environ["RANK"]``; no ``dp_rank``, no group's."""
    if isinstance(given, ast.Call) and ast.unparse(given.func) == "int" and len(given.args) == 1:
        given = given.args[0]
    if isinstance(given, ast.Subscript):
        return ast.unparse(given.slice) == repr(name.upper())
    if isinstance(given, ast.Call):
        asked = ast.unparse(given.func).rpartition(".")[2]
        return asked == f"get_{name}" and not given.args and not given.keywords
    return is_dotted_name(given) and ast.unparse(given).rpartition(".")[2] == name


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
