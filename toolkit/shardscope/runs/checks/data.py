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
    if any(_has_sampler(script, call) for call in loaders):
        return
    # Anything that may give ranks different data counts: a false alarm is worse than a miss.
    if _uses_sharding_library(script) or _selects_data_by_rank(script):
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
    values = [assigned.get(script.resolve_name(sampler), sampler) for sampler in samplers]
    # A sampler from anywhere else, such as the user's own class, may know the rank.
    blind_calls = script.find_calls(*BLIND_SAMPLERS)
    ignores_rank = [is_constant(value, None) or value in blind_calls for value in values]
    return any(keyword.arg is None for keyword in loader.keywords) or not all(ignores_rank)


def _uses_sharding_library(script: Script) -> bool:
    """Return whether a library's function or class gives each rank its share of the data."""
    # A function of that name in the script itself proves nothing.
    arguments = {node.arg for node in script.nodes if isinstance(node, ast.keyword) and node.arg}
    if any(SHARDING.fullmatch(name) for name in (arguments | set(script.uses)) - script.defined):
        return True
    # Accelerator.prepare wraps the loaders among its arguments; datasets' ``shard`` selects rows by rank.
    prepared = [ast.unparse(argument) for call in script.find_calls("prepare") for argument in call.args]
    return bool(script.find_calls("shard")) or not all(map(NOT_DATA.fullmatch, prepared))


def _selects_data_by_rank(script: Script) -> bool:
    """Return whether the script itself reads its rank in a place where it may select data."""
    names = _find_rank_variables(script)
    functions = [node for node in script.nodes if isinstance(node, ast.FunctionDef)]
    returning = {
        function.name
        for function in functions
        if any(isinstance(node, ast.Return) for node in ast.walk(function))
    }
    without_result = script.defined - returning
    for node in script.nodes:
        is_read = not isinstance(getattr(node, "ctx", None), ast.Store)
        is_rank = script.is_rank(node) or script.resolve_name(node) in names
        if is_rank and is_read and not _is_harmless(script, node, without_result):
            return True
    return False


def _find_rank_variables(script: Script) -> set[str]:
    """Return the names of variables that are computed from a rank, and of arguments that are one."""
    assigned = [(node, name) for node, name in _find_assignments(script) if not HARMLESS.fullmatch(name)]
    names = {name for node, name in assigned if script.reads_rank(node.value)}
    # Follow one more step: rank = dist.get_rank(); start = rank * share
    names |= {name for node, name in assigned if names & set(map(script.resolve_name, ast.walk(node.value)))}
    # torch.multiprocessing.spawn passes the rank first (torch/multiprocessing/spawn.py, _wrap).
    spawned = {script.resolve_name(call.args[0]) for call in script.find_calls("spawn") if call.args}
    for node in script.nodes:
        if isinstance(node, ast.FunctionDef) and node.name in spawned and node.args.args:
            names.add(node.args.args[0].arg)
    # ``self.rank = rank`` would make every use of ``self`` one of a rank.
    return names - {"self"}


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
    ancestors, child = list(script.walk_up(node)), node
    if any(getattr(ancestor, "arg", None) in ABOUT_SPEED for ancestor in ancestors):
        return True
    # The innermost call, index, comparison or statement around the rank decides.
    for ancestor in ancestors:
        if isinstance(ancestor, ast.Call) and child is not ancestor.func:
            name = script.resolve_name(ancestor.func)
            if name not in READING:
                return HARMLESS.fullmatch(name) is not None or name in without_result
        elif isinstance(ancestor, ast.Subscript) and child is ancestor.slice:
            # ``data[rank]`` selects; ``os.environ["RANK"]`` only reads the rank.
            if not isinstance(child, ast.Constant):
                return False
        elif isinstance(ancestor, ast.Compare):
            # ``rank == 0`` is harmless; ``index % 8 == rank`` and a choice between two values are not.
            computes = any(isinstance(part, ast.BinOp) for part in ast.walk(ancestor))
            return not computes and not any(isinstance(outer, ast.IfExp) for outer in ancestors)
        elif isinstance(ancestor, ast.stmt):
            return True
        child = ancestor
    return True


def check_sampler_over_all_ranks(script: Script) -> Iterator[Finding]:
    """Find a sampler that gives tensor-, context- or pipeline-parallel ranks different samples."""
    plan = script.plan
    if plan is None or plan.degrees.data_parallel == plan.world_size:
        return
    # Ranks of one replica (tensor, context, pipeline parallel) must read the same samples.
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
