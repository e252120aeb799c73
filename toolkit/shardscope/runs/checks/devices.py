"""Checks of devices and ranks in a script: hard-coded ones, and a GPU that is never selected."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from shardscope.core.finding import Finding
from shardscope.runs.checks.script import Script, find_line, flag_line, is_constant, read_keywords

DEVICE = re.compile(r"(cuda|xpu):\d+")
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
RANK_ARGUMENTS = {
    "init_process_group": ("rank", "world_size"),
    "DistributedSampler": ("rank",),
}
CHOOSING = ("set_device", "set_device_index", "Accelerator", "Trainer", "initialize", "local_rank")
"""Names that select a rank's GPU: torch's functions, libraries, the launcher's variable."""
THIS_RANKS_DEVICE = 'torch.device("cuda", int(os.environ["LOCAL_RANK"]))'
THIS_RANK = 'dist.get_rank() and dist.get_world_size(), or int(os.environ["RANK"]), which torchrun sets'
SET_DEVICE = 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before init_process_group'


def check_fixed_device(script: Script) -> Iterator[Finding]:
    """Find a hard-coded GPU index, with which all ranks of a node share one GPU."""
    lines: dict[int, str] = {}
    for node in script.nodes if script.is_distributed else ():
        # Three ways to write the index: cuda(0) and set_device(0), device_ids=[0], or the text "cuda:0".
        numbers: list[ast.expr] = []
        if isinstance(node, ast.Call) and script.resolve_name(node.func) in ("cuda", "set_device"):
            numbers = node.args
        elif isinstance(node, ast.keyword) and node.arg == "device_ids" and isinstance(node.value, ast.List):
            numbers = node.value.elts
        named = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if DEVICE.fullmatch(named) or any(is_constant(number, *range(64)) for number in numbers[:1]):
            lines.setdefault(find_line(node), ast.unparse(node))
    for line, code in lines.items():
        why = (
            f"{code} is one GPU for all ranks of a node: they share its memory, and NCCL refuses two ranks "
            "on one GPU."
        )
        yield flag_line(line, "device-hard-coded", "danger", why, THIS_RANKS_DEVICE)


def check_fixed_rank(script: Script) -> Iterator[Finding]:
    """Find a hard-coded rank or world size, which ignores the launcher's values."""
    lines: dict[int, str] = {}
    for node in script.nodes:
        # As an argument, or as a launcher's variable: os.environ["RANK"] = "0".
        if isinstance(node, ast.Call):
            for name in RANK_ARGUMENTS.get(script.resolve_name(node.func), ()):
                value = read_keywords(node).get(name)
                if isinstance(value, ast.Constant) and type(value.value) is int and value.value >= 0:
                    lines[value.lineno] = f"{name}={value.value}"
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            for target in node.targets:
                is_variable = (
                    isinstance(target, ast.Subscript) and script.resolve_name(target.value) == "environ"
                )
                if is_variable and is_constant(target.slice, *RANK_VARIABLES):  # type: ignore[attr-defined]
                    lines[node.lineno] = ast.unparse(node)
    for line, code in lines.items():
        why = f"{code} is the same on every rank, whatever the launcher set."
        yield flag_line(line, "rank-hard-coded", "danger", why, THIS_RANK)


def check_set_device(script: Script) -> Iterator[Finding]:
    """Find CUDA ranks that never select a GPU, so that all ranks of a node use GPU 0."""
    for call in script.find_calls("init_process_group")[:1]:
        backend = read_keywords(call).get("backend", call.args[0] if call.args else None)
        # Silent if the ranks are CPU ranks, or if anything at all may select the GPU.
        named = "cuda" in script.uses or any(is_constant(node, "cuda") for node in script.nodes)
        placed = script.find_calls("cuda", "to", "device")
        if (
            is_constant(backend, "gloo", "mpi")
            or not (named or is_constant(backend, "nccl"))
            or "device_id" in read_keywords(call)
            or any(name in script.uses for name in CHOOSING)
            or any(script.reads_rank(*one.args, *one.keywords) for one in placed)
        ):
            return
        why = "a process group on GPUs, but no rank selects its GPU: all ranks of a node use GPU 0."
        yield flag_line(call.lineno, "device-never-set", "danger", why, SET_DEVICE)
