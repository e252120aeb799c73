"""Whether a script gives each rank data of its own, in one of the many ways that there are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from shardscope.own_code.flow import Flow, key_of
from shardscope.own_code.ranks import Ranks
from shardscope.own_code.script import Script, keywords

LOADER = "DataLoader"
DEALERS = re.compile(
    r"\w*distributed\w*(sampler|readingservice)\w*|split\w*_by_node|sharding_filter|StreamingDataset"
    r"|prepare_data_?loaders?|setup_dataloaders?|auto_dataloader|scatter(_object_list)?|device_specific",
    re.IGNORECASE,
)
"""Names that, used anywhere, deal data: samplers, datasets' own ways, wrapped loaders, seeds of a rank."""
FRAMEWORKS = re.compile(r"Lightning(Data)?Module|\w*Trainer")
"""Classes that give the loader they are handed a sampler; one that the script defines is none of them."""
DATA = re.compile(r"data|loader|(^|_|\.)(dls?|iter)(_|$)", re.IGNORECASE)
"""Names that a person gives to a loader that comes from where the script does not show."""
BLIND_SAMPLERS = ("RandomSampler", "SequentialSampler", "WeightedRandomSampler", "SubsetRandomSampler")
SAMPLERS = ("sampler", "batch_sampler")
POSITIONS = (3, 4)
"""Where ``DataLoader`` takes them without a keyword."""
ABOUT_SPEED = (
    "batch_size",
    "num_workers",
    "pin_memory",
    "prefetch_factor",
    "persistent_workers",
    "drop_last",
)
PICKERS = re.compile(r"islice|a?range|\w*seed\w*", re.IGNORECASE)
"""Functions that, told a rank, pick from what all have, or draw otherwise than other ranks."""
PASSING = ("enumerate", "iter", "next", "zip", "tqdm", "cycle", "islice")
"""Functions whose result is the data that they are given."""
NOT_DATA = re.compile(r"device|gpu|cuda|group|mesh", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Dealing:
    """The ways to deal, each looked for by itself."""

    script: Script

    @cached_property
    def flow(self) -> Flow:
        """Where the script's values are from."""
        return Flow(script=self.script)

    @cached_property
    def ranks(self) -> Ranks:
        """Where it reads a rank."""
        return Ranks(flow=self.flow)

    @cached_property
    def is_found(self) -> bool:
        """Whether ranks get data of their own: one loader that does so speaks for all of the script's.

        An evaluation often has no sampler by choice, and the text does not say which loader is whose.
        """
        return (
            self._names_a_dealer()
            or bool(self.script.calls("shard"))
            or any(self._has_sampler(call) for call in self.script.calls(LOADER))
            or any(self._prepares_data(call) for call in self.script.calls("prepare"))
            or any(self._is_made_by_rank(call) for call in self.script.calls(LOADER))
            or any(self._picks(node) for node in self._telling)
        )

    def _has_sampler(self, loader: ast.Call) -> bool:
        """Whether ``loader`` has a sampler that may know its rank."""
        given = [value for name, value in keywords(loader).items() if name in SAMPLERS]
        given += [loader.args[place] for place in POSITIONS if len(loader.args) > place]
        if any(not self._is_blind(sampler) for sampler in given):
            return True
        handed_on = (keyword.value for keyword in loader.keywords if keyword.arg is None)
        return any(
            getattr(node, "arg", getattr(node, "value", None)) in SAMPLERS
            for value in handed_on
            for origin in self.ranks.behind(value)
            for node in ast.walk(origin)
            if isinstance(node, ast.keyword | ast.Constant)
        )

    def _is_blind(self, sampler: ast.expr) -> bool:
        """None, or one of torch's samplers that know nothing of ranks."""
        values = self.flow.origins.get(key_of(sampler)) or [sampler]
        return all(
            (isinstance(value, ast.Constant) and value.value is None)
            or self.script.called(value) in BLIND_SAMPLERS
            for value in values
        )

    @cached_property
    def _telling(self) -> list[ast.AST]:
        return [] if self.script.tree is None else list(self.ranks.telling(self.script.tree))

    def _names_a_dealer(self) -> bool:
        """One that is used: an import alone deals nothing."""
        for node in self.script.walk(ast.Name, ast.Attribute, ast.keyword):
            local = getattr(node, "arg", None) or key_of(node).removeprefix(".")
            name = self.script.aliases.get(local, local)
            if DEALERS.fullmatch(name) or (FRAMEWORKS.fullmatch(name) and local not in self.script.defined):
                return True
        return False

    def _prepares_data(self, prepare: ast.Call) -> bool:
        """``accelerator.prepare`` deals the loaders that it is given, and only these."""
        given = [*prepare.args, *(keyword.value for keyword in prepare.keywords)]
        return any(
            isinstance(value, ast.Starred)
            or bool(DATA.search(key_of(value)))
            or self._is_data(value, self._data)
            for value in given
        )

    def _is_made_by_rank(self, loader: ast.Call) -> bool:
        """Whether something that the loader's data are made from reads the rank, or is given who knows it."""
        given = [keyword for keyword in loader.keywords if keyword.arg not in ABOUT_SPEED]
        roots = [
            root
            for value in (*loader.args[:1], *loader.args[2:], *given)
            for root in self.ranks.behind(value)
        ]
        return self.ranks.reads(roots) or any(
            self._is_given_a_carrier(node) for root in (loader, *roots) for node in self.ranks.telling(root)
        )

    def _is_given_a_carrier(self, node: ast.AST) -> bool:
        """``build(args)`` of another module, where ``args.rank`` is known."""
        if not isinstance(node, ast.Call) or self.script.called(node) in self.flow.functions:
            return False
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        return any(isinstance(value, ast.Name) and value.id in self._carriers for value in given)

    @cached_property
    def _carriers(self) -> set[str]:
        """Variables that have the rank among their attributes."""
        return {
            node.value.id
            for node in self.script.walk(ast.Attribute)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and self.ranks.reads([node])
        } - set(self.script.aliases)

    def _picks(self, node: ast.AST) -> bool:
        """``ids[rank::world_size]``, ``i % world_size == rank``, ``share_of(batch, rank)``, a rank's seed."""
        if isinstance(node, ast.Subscript):
            is_text = isinstance(node.slice, ast.Constant)
            return not is_text and not NOT_DATA.search(key_of(node.value)) and self.ranks.reads([node.slice])
        if isinstance(node, ast.Compare):
            return self.ranks.reads([node])
        if not isinstance(node, ast.Call) or not self.ranks.reads([*node.args, *node.keywords]):
            return False
        name = self.script.called(node)
        if PICKERS.fullmatch(name):
            return True
        if name in self.flow.functions or not self.ranks.serves_data(node):
            return False
        given = [node.func, *node.args, *(keyword.value for keyword in node.keywords)]
        return any(self._is_data(value, self._data) for value in given)

    @cached_property
    def _data(self) -> set[str]:
        """Names of loaders and of what loops take from them."""
        return self.flow.grown(self._is_data)

    def _is_data(self, origin: ast.AST, known: set[str]) -> bool:
        return self.script.called(origin) == LOADER or any(key in known for key in _roots(origin))


def _roots(value: ast.AST) -> Iterator[str]:
    """Keys of what ``value`` is a part of, or is returned by."""
    waiting = [value]
    for node in waiting:
        yield key_of(node)
        if isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
            waiting.append(node.value)
        elif isinstance(node, ast.Tuple | ast.List):
            waiting += node.elts
        elif isinstance(node, ast.Call):
            waiting.append(node.func)
            waiting += node.args if key_of(node.func).removeprefix(".") in PASSING else ()
