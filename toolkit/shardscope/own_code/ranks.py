"""Where a script reads the number of its rank, and for more than to say where it computes or who prints."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from shardscope.own_code.flow import Flow, key_of

RANK = re.compile(
    r"(?<!per)(?<!per_)(?<!lora_)(?<!low_)(?<!matrix_)(?<!re)(?<![cf])rank(?!s|ing|ed|er|_?0|_?zero)"
    r"|^gpu_?(id|idx|index)?$|(^|_)proc(ess)?_?(id|idx|index)$|^shard_?(id|idx|index)$|_coordinate$|_ordinal$",
    re.IGNORECASE,
)
"""Identifiers and environment variables that have a rank's number: ``rank``, ``get_rank``, ``LOCAL_RANK``,
``process_index``. No ``lora_rank``, no ``batch_per_rank``, no ``rank0_print``."""
RANKS = re.compile(
    r"world|ranks|gpus|per_node|n_?proc|device_count|replicas|size$|^(root|src|dst|master)", re.I
)
"""Identifiers of how many ranks there are, and of one among them: beside these a rank picks no data."""
PLAIN = ("int", "min", "max", "len", "get", "getenv", "environ", "abs")
"""Functions that make a number of a rank's number."""
ARITHMETIC = (
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Call, ast.keyword, ast.Name, ast.Attribute, ast.Constant),
    *(ast.Subscript, ast.operator, ast.unaryop, ast.boolop, ast.expr_context),
)
FOR_PEOPLE = (
    *("print", "pprint", "write", "getLogger", "log", "debug", "info", "warn", "warning", "error"),
    *("critical", "exception"),
)
"""Calls whose arguments a person reads."""
FOR_DEVICES = (
    *("set_device", "device", "to", "cuda", "tqdm", "trange"),
    *("init_process_group", "init_device_mesh", "new_group", "barrier"),
    *("DistributedDataParallel", "DDP", "FullyShardedDataParallel", "FSDP", "fully_shard"),
)
"""Calls that take a rank for a device, a group of processes or a line on the screen."""
DEVICE_KEYWORDS = ("device", "device_id", "device_ids", "output_device", "map_location", "pin_memory_device")
DEVICE_TEXT = re.compile(r"^(cuda|gpu|xpu|npu|hpu|mps)\b", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The rank numbers of one script."""

    flow: Flow

    def reads(self, roots: Iterable[ast.AST]) -> bool:
        """Whether a rank is read in one of ``roots``, other than for a device, for words or for who acts."""
        return any(self._is_rank(node) for root in roots for node in self.telling(root))

    def telling(self, root: ast.AST) -> Iterator[ast.AST]:
        """The nodes of ``root``, without those where a rank has nothing to do with data."""
        # A stack of its own: long sums are nested deeper than Python calls functions.
        waiting = [root]
        while waiting:
            node = waiting.pop()
            if not self._is_elsewhere(node):
                yield node
                waiting += self._parts(node)

    def behind(self, start: ast.AST) -> list[ast.AST]:
        """``start``, and everything that its values are made from, apart from those for devices and words."""
        found, seen = [start], set[str]()
        for origin in found:
            for key in {key_of(node) for node in self.telling(origin)} - seen - {""}:
                seen.add(key)
                found += self.flow.origins.get(key, ())
        return found

    def serves_data(self, call: ast.Call) -> bool:
        """Whether a call that is given a rank may be about data."""
        return self._name(call.func) not in (*FOR_PEOPLE, *FOR_DEVICES)

    @cached_property
    def aliases(self) -> set[str]:
        """Names that are given a rank's number, as it is or in a sum: ``first = rank * share``."""
        spawned = {self._first_parameter(call) for call in self.flow.script.calls("spawn")} - {""}
        return self.flow.grown(self._is_number, spawned)

    def _first_parameter(self, spawn: ast.Call) -> str:
        """``torch.multiprocessing.spawn`` calls its function with the rank first, whatever its name there."""
        for function in self.flow.functions.get(key_of(spawn.args[0]) if spawn.args else "", ()):
            for parameter in function.args.args[:1]:
                return parameter.arg
        return ""

    def _is_number(self, origin: ast.AST, aliases: set[str]) -> bool:
        """Arithmetic over a rank, with no function in it that could make something else of it."""
        nodes = list(ast.walk(origin)) if isinstance(origin, ast.expr) else []
        for node in nodes:
            if not isinstance(node, ARITHMETIC):
                return False
            if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Constant):
                return False
            if isinstance(node, ast.Call) and not self._keeps_number(node, aliases):
                return False
        return any(self._is_said(node) or key_of(node) in aliases for node in nodes)

    def _keeps_number(self, call: ast.Call, aliases: set[str]) -> bool:
        name = self._name(call.func)
        return name in PLAIN or key_of(call.func) in aliases or bool(RANK.search(name) or RANKS.search(name))

    def _is_rank(self, node: ast.AST) -> bool:
        return self._is_said(node) or (key_of(node) in self.aliases)

    def _is_said(self, node: ast.AST) -> bool:
        """By its own name, its keyword's, or the environment's."""
        if isinstance(node, ast.keyword):
            return bool(node.arg and RANK.search(node.arg)) and not isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Subscript):
            return _is_rank_text(node.slice)
        if isinstance(node, ast.Call) and self._name(node.func) in ("get", "getenv", "pop"):
            return any(_is_rank_text(argument) for argument in node.args[:1])
        return bool(RANK.search(self._name(node)))

    def _name(self, node: ast.AST) -> str:
        """The last part of a name, as it was imported."""
        name = key_of(node).removeprefix(".")
        return self.flow.script.aliases.get(name, name)

    def _is_elsewhere(self, node: ast.AST) -> bool:
        """Devices, words for a person, and conditions of who does something: ``rank == 0``."""
        if isinstance(node, ast.Call):
            written = isinstance(node.func, ast.Attribute) and _is_device_text(node.func.value)
            return written or self._name(node.func) in FOR_PEOPLE
        if isinstance(node, ast.keyword):
            return node.arg in DEVICE_KEYWORDS
        if isinstance(node, ast.JoinedStr):
            return any(_is_device_text(part) for part in node.values[:1])
        if isinstance(node, ast.BinOp):
            return _is_device_text(node.left)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return self._is_number(node.operand, self.aliases)
        return isinstance(node, ast.Compare) and not self._compares_with_others(node)

    def _parts(self, node: ast.AST) -> list[ast.AST]:
        """The children of ``node`` that may tell of data."""
        if isinstance(node, ast.Call) and self._name(node.func) in FOR_DEVICES:
            return [node.func, *(one for one in (*node.args, *node.keywords) if not self._is_words(one))]
        if isinstance(node, ast.IfExp):
            # Two values, by rank: other than a statement's, this condition gives ranks different things.
            return [node.body, node.orelse, *(part for part in ast.walk(node.test) if key_of(part))]
        parts = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.If | ast.While) and self._is_number(node.test, self.aliases):
            parts.remove(node.test)
        return parts

    def _is_words(self, given: ast.AST) -> bool:
        """A rank's number by itself, or in a text."""
        value = given.value if isinstance(given, ast.keyword) else given
        return isinstance(value, ast.JoinedStr) or self._is_number(value, self.aliases)

    def _compares_with_others(self, compare: ast.Compare) -> bool:
        """``i % world_size == rank``: with something that is neither a rank, nor of ranks, nor a constant."""
        nodes = list(ast.walk(compare))
        bases = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
        return any(
            not (self._is_rank(node) or RANKS.search(self._name(node)) or self._name(node) in PLAIN)
            for node in nodes
            if key_of(node) and id(node) not in bases
        )


def _is_rank_text(node: ast.AST) -> bool:
    """``os.environ["LOCAL_RANK"]``, ``SLURM_PROCID``."""
    text = node.value if isinstance(node, ast.Constant) else None
    return isinstance(text, str) and text.isidentifier() and bool(RANK.search(text))


def _is_device_text(node: ast.AST) -> bool:
    text = node.value if isinstance(node, ast.Constant) else None
    return isinstance(text, str) and bool(DEVICE_TEXT.match(text))
