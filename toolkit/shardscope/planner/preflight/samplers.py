"""Samplers as a click writes them into a person's own code."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, NamedTuple

from shardscope.planner.preflight.edits import (
    imported,
    line_before,
    mended,
    replaced,
    scope_of,
    with_keyword,
)
from shardscope.planner.preflight.script import Script, keywords

if TYPE_CHECKING:
    from shardscope.plan import Plan

SAMPLER = "DistributedSampler"
MODULE = "torch.utils.data.distributed"
WITHOUT_LENGTH = ("IterableDataset", "streaming")
"""Names that tell of data which no sampler can deal."""
WALKED = ("enumerate", "tqdm", "iter")
"""Functions that a loop hands its loader to."""


def dealt(script: Script, loader: ast.Call) -> str | None:
    """The script with a sampler for that loader, which shuffles as the loader did.

    None where ranks read other data than one each of all (the plan's ranks work together), and where the
    loader's arguments do not say what it loads.
    """
    plan, given = script.plan, keywords(loader)
    if plan is not None and plan.degrees.data_parallel != plan.world_size:
        return None
    is_said = len(given) == len(loader.keywords) and len(loader.args) <= 2
    dataset = given.get("dataset", loader.args[0] if loader.args else None)
    if not is_said or not isinstance(dataset, ast.Name | ast.Attribute | ast.Subscript):
        return None
    if any(name in script.names for name in WITHOUT_LENGTH):
        return None
    shuffle = given.get("shuffle")
    shuffles = "False" if shuffle is None else ast.unparse(shuffle)
    local, imports = imported(script, MODULE, SAMPLER)
    sampler = f"{local[SAMPLER]}({ast.unparse(dataset)}, shuffle={shuffles})"
    if shuffle is None:
        return mended(script, with_keyword(script, loader, "sampler", sampler), *imports)
    keyword = next(one for one in loader.keywords if one.arg == "shuffle")
    return mended(script, replaced(script, keyword, f"sampler={sampler}"), *imports)


def among_data_parallel_ranks(script: Script, sampler: ast.Call, plan: Plan) -> str | None:
    """The script with the plan's own number of shares, by the rank that the sampler is given.

    Ranks lie tp, cp, data, pp, inner to outer. None where the sampler asks the process group for its rank.
    """
    rank = keywords(sampler).get("rank")
    if rank is None:
        return None
    degrees = plan.degrees
    inner, shares = degrees.tp * degrees.cp, degrees.data_parallel
    own = (
        ast.unparse(rank)
        if isinstance(rank, ast.Name | ast.Attribute | ast.Call)
        else f"({ast.unparse(rank)})"
    )
    return mended(
        script,
        with_keyword(script, sampler, "num_replicas", str(shares)),
        replaced(script, rank, f"{own} // {inner} % {shares}"),
    )


def told_of_epochs(script: Script, sampler: ast.Call) -> str | None:
    """The script with ``set_epoch`` first in its loop over epochs; None where the text shows no such loop."""
    found = _named(script, sampler)
    if found is None:
        return None
    for loop in script.walk(ast.For):
        assert isinstance(loop, ast.For)
        counts = isinstance(loop.target, ast.Name) and script.called(loop.iter) == "range"
        # A module's own names are seen from inside its functions, too.
        is_seen = found.scope is None or scope_of(script, loop) is found.scope
        if counts and is_seen and any(_walks(inner, found.loaders) for inner in ast.walk(loop)):
            told = f"{found.sampler}.set_epoch({ast.unparse(loop.target)})"
            return mended(script, line_before(script, loop.body[0], told))
    return None


class _Named(NamedTuple):
    sampler: str
    """What it is called, or how it is reached."""
    loaders: tuple[str, ...]
    """As the text has those that it is given to: by name, or made where they are walked."""
    scope: ast.AST | None
    """The function that has these names; None: the module."""


def _named(script: Script, sampler: ast.Call) -> _Named | None:
    names = {id(one.value): one for one in script.walk(ast.Assign) if isinstance(one, ast.Assign)}
    own = _name_of(names.get(id(sampler)))
    for loader in script.calls("DataLoader"):
        given = keywords(loader).get("sampler")
        if given is None:
            continue
        kept = names.get(id(loader))
        if own is not None and isinstance(given, ast.Name) and given.id == own:
            loaders = tuple(filter(None, (_name_of(kept), ast.unparse(loader))))
            return _Named(own, loaders, scope_of(script, names[id(sampler)]))
        name = _name_of(kept)
        if given is sampler and name is not None and kept is not None:
            return _Named(f"{name}.sampler", (name,), scope_of(script, kept))
    return None


def _name_of(assigned: ast.Assign | None) -> str | None:
    target = assigned.targets[0] if assigned is not None and len(assigned.targets) == 1 else None
    return target.id if isinstance(target, ast.Name) else None


def _walks(loop: ast.AST, loaders: tuple[str, ...]) -> bool:
    """Whether it is a loop over one of ``loaders``."""
    walked = loop.iter if isinstance(loop, ast.For) else None
    while isinstance(walked, ast.Call) and walked.args and ast.unparse(walked.func) in WALKED:
        walked = walked.args[0]
    return walked is not None and ast.unparse(walked) in loaders
