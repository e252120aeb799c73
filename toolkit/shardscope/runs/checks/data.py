"""Checks of distributed data loading: different samples on each data-parallel rank, reshuffled each epoch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from shardscope.core.finding import Finding
from shardscope.runs.checks.script import Script, flag_line, is_constant, read_keywords

LOADER, SAMPLER = "DataLoader", "DistributedSampler"
SHARDING = re.compile(
    r"\w*distributed\w*(sampler|readingservice)\w*|split\w*_by_node|sharding_filter|StreamingDataset"
    r"|prepare_data_?loaders?|setup_dataloaders?|auto_dataloader|scatter(_object_list)?|device_specific"
    r"|Lightning(Data)?Module|\w*Trainer",
    re.IGNORECASE,
)
"""Functions and classes that give each rank its share of the data, or wrap a loader so that it does."""
NOT_DATA = re.compile(r"\w*(model|net|optim|sched|crit|loss|accelerator)\w*|opt|lr", re.IGNORECASE)
"""Names of the arguments of ``accelerator.prepare`` that are not data loaders."""
HARMLESS = re.compile(
    r"\w*device\w*|to|cuda|\w*print\w*|info|debug|warning|error|log|tqdm|trange|save\w*|init_process_group"
    r"|\w*DataParallel|spawn|init|barrier",
    re.IGNORECASE,
)
"""Functions that take a rank without selecting data by it."""
READING = ("int", "str", "get", "getenv", "get_rank", "max", "min")
"""Functions in an expression that reads a rank."""
ABOUT_SPEED = ("num_workers", "pin_memory", "batch_size", "prefetch_factor")
SAMPLER_ARGUMENTS, SAMPLER_POSITIONS = ("sampler", "batch_sampler"), (3, 4)
"""Sampler arguments of DataLoader, by name and by position (torch/utils/data/dataloader.py)."""
BLIND_SAMPLERS = ("RandomSampler", "SequentialSampler", "WeightedRandomSampler", "SubsetRandomSampler")
"""torch's samplers that do not know the rank."""


def check_sampler(script: Script) -> Iterator[Finding]:
    """Find a DataLoader that gives all ranks the same samples."""
    plan, loaders = script.plan, script.find_calls(LOADER)
    if plan is not None and plan.degrees.data_parallel == 1:
        return
    # One loader with a sampler is enough: evaluation loaders often have none on purpose.
    if any(_has_sampler(script, call) for call in loaders) or _shards_data(script):
        return
    ranks = None if plan is None else plan.world_size
    readers = "all ranks" if ranks is None else f"all {ranks} ranks"
    for call in loaders:
        why = f"this DataLoader has no sampler that knows its rank: {readers} read the same samples."
        change = "sampler=DistributedSampler(dataset, num_replicas=..., rank=...)"
        yield flag_line(call.lineno, "ranks-read-the-same-data", "danger", why, change, ranks)


def _has_sampler(script: Script, loader: ast.Call) -> bool:
    """Return whether a loader has a sampler that may depend on the rank, or ``**kwargs`` that may."""
    samplers = [value for name, value in read_keywords(loader).items() if name in SAMPLER_ARGUMENTS]
    samplers += [loader.args[position] for position in SAMPLER_POSITIONS if len(loader.args) > position]
    assigned = {name: node.value for node, name in _find_assignments(script)}
    values = [assigned.get(script.resolve_name(one), one) for one in samplers]
    blind = [is_constant(one, None) or one in script.find_calls(*BLIND_SAMPLERS) for one in values]
    return any(keyword.arg is None for keyword in loader.keywords) or not all(blind)


def _shards_data(script: Script) -> bool:
    """Return whether ranks get different data in another way: a wrapped loader, or a selection by rank."""
    arguments = {node.arg for node in script.nodes if isinstance(node, ast.keyword) and node.arg}
    if any(SHARDING.fullmatch(name) for name in (arguments | set(script.uses)) - script.defined):
        return True
    prepared = [ast.unparse(one) for call in script.find_calls("prepare") for one in call.args]
    if script.find_calls("shard") or not all(map(NOT_DATA.fullmatch, prepared)):
        return True
    assigned = [(node, name) for node, name in _find_assignments(script) if not HARMLESS.fullmatch(name)]
    names = {name for node, name in assigned if script.reads_rank(node.value)}
    # Follow variables computed from a rank: rank = dist.get_rank(); start = rank * share
    names |= {name for node, name in assigned if names & set(map(script.resolve_name, ast.walk(node.value)))}
    # torch.multiprocessing.spawn passes the rank as the first argument.
    started = {script.resolve_name(call.args[0]) for call in script.find_calls("spawn") if call.args}
    functions = [node for node in script.nodes if isinstance(node, ast.FunctionDef)]
    names |= {one.args.args[0].arg for one in functions if one.name in started and one.args.args}
    returning = {one.name for one in functions if any(isinstance(node, ast.Return) for node in ast.walk(one))}
    return any(
        (script.is_rank(node) or script.resolve_name(node) in names - {"self"})
        and not isinstance(getattr(node, "ctx", None), ast.Store)
        and not _is_harmless(script, node, script.defined - returning)
        for node in script.nodes
    )


def _find_assignments(script: Script) -> Iterator[tuple[ast.Assign, str]]:
    """Yield each assignment with the names of its targets; for ``args.rank = ...`` also ``args``."""
    for node in script.nodes:
        if isinstance(node, ast.Assign):
            targets = (inner for target in node.targets for inner in ast.walk(target))
            yield from ((node, name) for name in map(script.resolve_name, targets) if name)


def _is_harmless(script: Script, node: ast.AST, without_result: set[str]) -> bool:
    """Return whether a read of the rank does not select data: it selects a device or a rank that prints.

    ``without_result`` are the script's functions and classes without a return value: they return no rank's
    data.
    """
    around, inside = list(script.walk_up(node)), node
    if any(getattr(one, "arg", None) in ABOUT_SPEED for one in around):
        return True
    for one in around:
        if isinstance(one, ast.Call) and inside is not one.func:
            name = script.resolve_name(one.func)
            if name not in READING:
                return HARMLESS.fullmatch(name) is not None or name in without_result
        elif isinstance(one, ast.Subscript) and inside is one.slice and not isinstance(inside, ast.Constant):
            return False
        elif isinstance(one, ast.Compare):
            # ``rank == 0`` is harmless; ``index % 8 == rank`` and a choice between two values are not.
            computes = any(isinstance(part, ast.BinOp) for part in ast.walk(one))
            return not computes and not any(isinstance(outer, ast.IfExp) for outer in around)
        elif isinstance(one, ast.stmt):
            return True
        inside = one
    return True


def check_sampler_over_all_ranks(script: Script) -> Iterator[Finding]:
    """Find a sampler that gives tensor-, context- or pipeline-parallel ranks different samples."""
    plan = script.plan
    if plan is None or plan.degrees.data_parallel == plan.world_size:
        return
    wanted = plan.degrees.data_parallel
    for call in script.find_calls(SAMPLER):
        by_position = call.args[1] if len(call.args) > 1 else None
        replicas = read_keywords(call).get("num_replicas", by_position)
        # The default is the world size (torch/utils/data/distributed.py).
        if replicas is not None and not re.search(
            r"world_?size|num_processes", ast.unparse(replicas), re.IGNORECASE
        ):
            continue
        why = (
            f"this sampler divides the data by {plan.world_size} ranks, and the plan has {wanted} "
            f"data-parallel ones: {plan.world_size // wanted} ranks of one replica would read different "
            "samples."
        )
        change = f"num_replicas={wanted}, rank=the rank among the data-parallel ranks"
        number = plan.world_size / wanted
        yield flag_line(call.lineno, "sampler-over-all-ranks", "danger", why, change, number)


def check_set_epoch(script: Script) -> Iterator[Finding]:
    """Find a shuffling DistributedSampler without ``set_epoch``, which repeats the first epoch's order."""
    for call in script.find_calls(SAMPLER)[:1]:
        if "set_epoch" not in script.uses and not is_constant(read_keywords(call).get("shuffle"), False):
            why = "set_epoch is never called: every epoch has the order of the first."
            change = "sampler.set_epoch(epoch) before each epoch"
            yield flag_line(call.lineno, "same-order-every-epoch", "hint", why, change)
