"""Checks of saving in a script: full state dicts instead of sharded ones, and a file written by all ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shardscope.core.finding import Finding
from shardscope.core.number_format import format_gib
from shardscope.core.precision import FP32
from shardscope.runs.checks.script import Script, find_line, flag_line, is_constant, read_keywords

SHARDED = (
    "torch.distributed.checkpoint.save(get_model_state_dict(model), ...): a sharded checkpoint, which loads "
    "over any number of ranks"
)
ON_RANK_0 = (
    "if dist.get_rank() == 0: around the save (code that all-gathers stays outside, for all ranks), or "
    "torch.distributed.checkpoint.save, which writes a file for each rank"
)
SAVING_MODULES = ("torch", "np", "numpy", "pickle", "joblib")
MAX_DEPTH = 5
"""Maximum number of enclosing functions that are followed to their call sites."""


def check_gathered_state(script: Script) -> Iterator[Finding]:
    """Find a full (unsharded) state dict, gathered on every rank or on rank 0 while the others wait."""
    # FSDP1: FULL_STATE_DICT gathers on every rank unless the configuration says rank0_only (default False,
    # torch/distributed/fsdp/api.py, FullStateDictConfig).
    configs = script.find_calls("FullStateDictConfig")
    on_one = bool(configs) and all(is_constant(read_keywords(one).get("rank0_only"), True) for one in configs)
    for line in script.uses.get("FULL_STATE_DICT", ()):
        yield _describe_full_state(script, line, "FULL_STATE_DICT", "rank0_only=True", on_one)
    # FSDP2: with cpu_offload only rank 0 keeps the full state dict (StateDictOptions in
    # torch/distributed/checkpoint/state_dict.py).
    for call in script.find_calls("StateDictOptions"):
        arguments = read_keywords(call)
        # broadcast_from_rank0 is for loading: rank 0 reads a full state dict and broadcasts it.
        is_load = is_constant(arguments.get("broadcast_from_rank0"), True)
        if is_constant(arguments.get("full_state_dict"), True) and not is_load:
            on_one = is_constant(arguments.get("cpu_offload"), True)
            yield _describe_full_state(
                script, call.lineno, "full_state_dict=True", "cpu_offload=True", on_one
            )


def _describe_full_state(script: Script, line: int, option: str, on_rank_0: str, on_one: bool) -> Finding:
    size, num_bytes, room = "the whole model", None, None
    if script.plan is not None:
        # Weights in fp32 and, if the optimizer is saved, Adam's two moments.
        saves_optimizer = any("optim" in name and "state_dict" in name for name in script.uses)
        bytes_per_parameter = FP32 * (3 if saves_optimizer else 1)
        num_bytes, room = (
            script.plan.architecture.num_parameters * bytes_per_parameter,
            script.plan.cluster.host_memory_bytes,
        )
        size = f"{format_gib(num_bytes)} GiB"
    # On every rank: as many copies in host memory as there are ranks on a node.
    number = None if num_bytes is None else num_bytes / 2**30
    if not on_one:
        why = f"{option} without {on_rank_0} all-gathers {size} on every rank."
        return flag_line(
            line, "checkpoint-gathered-on-every-rank", "danger", why, f"{on_rank_0}, or {SHARDED}", number
        )
    # On rank 0 only: a matter of time, unless the host's memory is too small.
    is_short = num_bytes is not None and room is not None and num_bytes > room
    why = f"{option} gathers {size} in the host memory of rank 0 while all others wait."
    severity = "danger" if is_short else "hint"
    return flag_line(line, "checkpoint-gathered-on-one-rank", severity, why, SHARDED, number)  # type: ignore[arg-type]


def check_every_rank_saves(script: Script) -> Iterator[Finding]:
    """Find a file that every rank writes to the same path."""
    for call in (
        script.find_calls("save", "save_pretrained", "save_file", "dump") if script.is_distributed else ()
    ):
        # Skip Accelerator.save and torch.distributed.checkpoint.save, which handle ranks themselves.
        if script.resolve_name(call.func) in ("save", "dump") and not _is_library_call(script, call):
            continue
        # transformers' save_pretrained has arguments that select the writing rank.
        knows_ranks = {"save_function", "is_main_process"} & set(read_keywords(call))
        if not knows_ranks and not script.reads_rank(*call.args) and not _is_on_one_rank(script, call):
            why = "every rank writes this file, at the same time and to the same path: it may end up damaged."
            yield flag_line(call.lineno, "every-rank-saves", "warning", why, ON_RANK_0)


def _is_on_one_rank(script: Script, node: ast.AST, depth: int = 0) -> bool:
    """Return whether ``node`` runs on one rank only.

    That is the case inside an ``if`` on the rank, after such an ``if`` that leaves the function, or if all
    calls of its function are such.
    """
    for one in script.walk_up(node):
        if isinstance(one, ast.If | ast.IfExp) and script.reads_rank(one.test):
            return True
        if not isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        # An early exit such as ``if rank != 0: return`` before the save.
        guards = [
            inner for inner in ast.walk(one) if isinstance(inner, ast.If) and script.reads_rank(inner.test)
        ]
        leaving = (ast.Return, ast.Continue, ast.Raise)
        if any(
            find_line(inner) < find_line(node) and isinstance(inner.body[-1], leaving) for inner in guards
        ):
            return True
        if script.reads_rank(*one.decorator_list) or depth == MAX_DEPTH:
            return depth < MAX_DEPTH
        calls = [call for call in script.find_calls(one.name) if not _is_library_call(script, call)]
        # A function with the rank as an argument may write one file per rank.
        guarded = [
            script.reads_rank(*call.args) or _is_on_one_rank(script, call, depth + 1) for call in calls
        ]
        return bool(guarded) and all(guarded)
    return False


def _is_library_call(script: Script, call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and script.resolve_name(call.func.value) in SAVING_MODULES
