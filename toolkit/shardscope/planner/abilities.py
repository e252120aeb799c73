"""What each framework supports, read from its layout class: no cell of this table is typed.

A degree is supported where the class has its field, an offload where the field's choices have the place, a
precision where the class lists it. What is split over data-parallel ranks is what the memory model says falls
with their number. Accelerate has what the frameworks have that it starts, as far as it can hand it on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from html import escape
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.architecture import Architecture
from shardscope.cluster import Cluster
from shardscope.fixes import read_fix
from shardscope.frameworks.accelerate.carried import CARRIED, TITLE
from shardscope.frameworks.registry import frameworks
from shardscope.layout import Layout
from shardscope.memory.report import COMPONENTS
from shardscope.plan import Plan
from shardscope.planner.changes import OFFLOADS
from shardscope.recipe import Recipe
from shardscope.support import supported
from shardscope.validation import FieldError, one_of

if TYPE_CHECKING:
    import pandas as pd

    from shardscope.frameworks.registry import Framework

FACTORIES = tuple(name for name, member in vars(Layout).items() if isinstance(member, staticmethod))
"""How ``Layout`` spells each framework."""

TITLES: Mapping[str, str] = MappingProxyType(
    {name: framework.title for name, framework in frameworks.items()} | {"accelerate": TITLE}
)
"""Every framework of the registry, and Accelerate, which starts them -> the name that people read."""


class Cell(NamedTuple):
    """Whether a framework has an ability."""

    supported: bool
    how: str
    """The code that asks for it and what it needs besides, or why there is none."""
    layout: Layout | None = None
    """A layout that has it; None where none has."""
    recipe: Mapping[str, Any] = MappingProxyType({})
    """Fields of a recipe that ask for it, where it is not the layout that does."""


class Column(NamedTuple):
    """One ability."""

    title: str
    """As the table's head says it."""
    words: str
    """What it is, for somebody who reads it for the first time."""
    find: Callable[[Framework], Iterator[Layout]]
    """Layouts of a framework that have it, the plainest first."""
    recipe: Mapping[str, Any] = MappingProxyType({})
    """Fields of a recipe that ask for it."""


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """The table: a row a framework, a column an ability."""

    cells: Mapping[str, Mapping[str, Cell]]
    """Framework's name -> ability's name -> cell."""
    titles: Mapping[str, str]
    """Framework's name -> the name that people read."""
    ergonomics: Mapping[str, str]
    """Framework's name -> what working with it is like."""

    def cell(self, framework: str, ability: str) -> Cell:
        """One cell. Raises ``ValueError`` for names that are not in the table."""
        row = self.cells[one_of("framework", framework, self.cells)]
        return row[one_of("ability", ability, row)]

    def to_frame(self) -> pd.DataFrame:
        """One row a framework, one column an ability: True or False; the last column is ergonomics."""
        import pandas as pd

        rows = {
            self.titles[name]: {COLUMNS[key].title: cell.supported for key, cell in row.items()}
            | {"ergonomics": self.ergonomics[name]}
            for name, row in self.cells.items()
        }
        return pd.DataFrame.from_dict(rows, orient="index")

    def to_html(self) -> str:
        """The same as a plain table without scripts; what asks for an ability is each cell's title."""
        head = "".join(
            f"<th title='{escape(c.words, True)}'>{escape(c.title)}</th>" for c in COLUMNS.values()
        )
        rows = "".join(
            f"<tr><th scope='row' style='text-align:left'>{escape(self.titles[name])}</th>"
            + "".join(
                f"<td title='{escape(cell.how, True)}'>{'yes' if cell.supported else '–'}</td>"
                for cell in row.values()
            )
            + f"<td style='text-align:left'>{escape(self.ergonomics[name])}</td></tr>"
            for name, row in self.cells.items()
        )
        return (
            f"<table><thead><tr><th></th>{head}<th>ergonomics</th></tr></thead><tbody>{rows}</tbody></table>"
        )

    def _repr_html_(self) -> str:
        return self.to_html()


@cache
def abilities() -> Abilities:
    """The table of all frameworks of the registry, and of Accelerate, which starts them."""
    cells = {
        name: {key: _cell(framework, column) for key, column in COLUMNS.items()}
        for name, framework in frameworks.items()
    }
    cells["accelerate"] = {key: _handed_on(key, cells) for key in COLUMNS}
    return Abilities(
        cells=cells,
        titles=TITLES,
        ergonomics={name: _ergonomics(framework) for name, framework in frameworks.items()}
        | {"accelerate": _accelerate_ergonomics()},
    )


def code(layout: Layout) -> str:
    """``Layout.zero(stage=2)``: what makes this layout, without what is so by itself."""
    name = next(name for name in FACTORIES if type(getattr(Layout, name)()) is type(layout))
    plain = type(layout)()
    changed = [
        f"{field}={getattr(layout, field)!r}"
        for field in layout.__dataclass_fields__
        if getattr(layout, field) != getattr(plain, field)
    ]
    return f"Layout.{name}({', '.join(changed)})"


# ------------------------------------------------------------------------------------- how columns are found


def _with(**wanted: Any) -> Callable[[Framework], Iterator[Layout]]:
    """Layouts with these fields, where the class has them."""

    def find(framework: Framework) -> Iterator[Layout]:
        if wanted.keys() <= framework.layout_class.__dataclass_fields__.keys():
            yield _made(framework, wanted)

    return find


def _made(framework: Framework, wanted: Mapping[str, Any]) -> Layout:
    """A layout with the wanted fields, others as the class's own refusal says that they must be."""
    try:
        return framework.layout_class(**wanted)
    except FieldError as refusal:
        return framework.layout_class(**{**wanted, **(read_fix(refusal) or {})})


def _offloading(place: str) -> Callable[[Framework], Iterator[Layout]]:
    def find(framework: Framework) -> Iterator[Layout]:
        for field in OFFLOADS:
            if place in (framework.layout_class.choices.get(field) or ()):
                yield _made(framework, {field: place})

    return find


def _any_degree(framework: Framework) -> Iterator[Layout]:
    yield framework.layout_class()


def _sequence(framework: Framework) -> Iterator[Layout]:
    for layout in _with(tp=2)(framework):
        if layout.splits_sequence:
            yield layout


def _listed(title: str, words: str, **wanted: str) -> Column:
    """An ability that the recipe asks for: of every layout whose class lists the wanted value."""
    ((field, value),) = wanted.items()

    def find(framework: Framework) -> Iterator[Layout]:
        if value in supported(framework.layout_class, field):
            yield framework.layout_class()

    return Column(title, words, find, MappingProxyType(wanted))


def _splits(component: str) -> Callable[[Framework], Iterator[Layout]]:
    """Layouts with which each of two data-parallel ranks keeps less of a component than one alone does."""

    def find(framework: Framework) -> Iterator[Layout]:
        # Those that keep most first: what splits no more than it is asked for.
        for layout in sorted(_switched(framework), key=_kept_of_all):
            if 4 * _kept(layout, 2)[component] < 3 * _kept(layout, 1)[component]:
                yield layout

    return find


def _switched(framework: Framework) -> list[Layout]:
    """Layouts that differ in switches, not in degrees or offloads; the class's own defaults first."""
    choices = framework.layout_class.choices
    switches = {
        field: values
        for field, values in choices.items()
        if values and field not in OFFLOADS and None not in values
    }
    found = [framework.layout_class()]
    for values in product(*switches.values()):
        try:
            layout = framework.layout_class(**dict(zip(switches, values, strict=True)))
        except FieldError:
            continue
        if layout not in found:
            found.append(layout)
    return found


def _kept_of_all(layout: Layout) -> int:
    """Bytes of training state that stay on one of two ranks, as a negative number: most of them first."""
    kept = _kept(layout, 2)
    return -(kept["parameters"] + kept["gradients"] + kept["optimizer"])


@cache
def _kept(layout: Layout, ranks: int) -> Mapping[str, int]:
    """The most bytes of each component that one of some data-parallel ranks ever holds in a step."""
    plan = Plan(_DENSE, replace(_GPUS, gpus_per_node=ranks), Recipe(seq_len=512), layout)
    instants = [components for _, _, components in plan.memory().timeline]
    return {name: max(each[name] for each in instants) for name in COMPONENTS}


_DENSE = Architecture.of_size("350m")
_GPUS = Cluster.parse("2xh100-sxm-80gb")

COLUMNS: dict[str, Column] = {
    "data": Column("data", "ranks see different sequences", _any_degree),
    "zero_1": Column(
        "ZeRO-1", "the optimizer's state is split over data-parallel ranks", _splits("optimizer")
    ),
    "zero_2": Column("ZeRO-2", "gradients are split as well", _splits("gradients")),
    "zero_3": Column(
        "ZeRO-3 / FSDP", "weights are split as well, and gathered layer by layer", _splits("parameters")
    ),
    "hybrid": Column(
        "hybrid", "state is split inside a group, and groups are copies (HSDP)", _with(replicate=2)
    ),
    "tensor": Column("tensor", "each matrix is split over ranks", _with(tp=2)),
    "sequence": Column(
        "sequence", "norms and residuals are split along the sequence within tensor-parallel ranks", _sequence
    ),
    "pipeline": Column("pipeline", "ranks hold different layers", _with(pp=2)),
    "interleaved": Column(
        "interleaved", "each pipeline rank holds several chunks of layers", _with(pp=2, vpp=2)
    ),
    "context": Column("context", "each sequence is split over ranks", _with(cp=2)),
    "expert": Column("expert", "ranks hold different experts", _with(ep=2)),
    "cpu_offload": Column("CPU offload", "training state lives in host memory", _offloading("cpu")),
    "nvme_offload": Column("NVMe offload", "training state lives on NVMe drives", _offloading("nvme")),
    "compile": _listed("compile", "layers compiled by torch.compile", kernels="compiled"),
    "fp8": _listed("fp8", "matrix products in 8 bits", precision="fp8-mixed"),
    "lora": _listed("LoRA", "adapters over a frozen base", method="lora"),
    "qlora": _listed("QLoRA", "adapters over a base in 4 bits", method="qlora"),
}
"""Abilities by name, in the order of the table."""


def _cell(framework: Framework, column: Column) -> Cell:
    for layout in column.find(framework):
        return Cell(True, _asked(layout, column), layout, column.recipe)
    return Cell(False, f"Shardscope plans none with {framework.title}")


def _asked(layout: Layout, column: Column) -> str:
    fields = ", ".join(f"{field}={value!r}" for field, value in column.recipe.items())
    return f"{code(layout)} with Recipe({fields})" if fields else code(layout)


def _handed_on(key: str, cells: Mapping[str, Mapping[str, Cell]]) -> Cell:
    """What Accelerate has of an ability: through which framework, with which fields of its own."""
    for name, fields in CARRIED.items():
        column = COLUMNS[key]
        for layout in column.find(frameworks[name]):
            plain = type(layout)()
            used = [f for f in layout.__dataclass_fields__ if getattr(layout, f) != getattr(plain, f)]
            if fields.keys() >= set(used):
                named = ", ".join(fields[field] for field in used)
                through = f"through {frameworks[name].title}" + (f": {named}" if named else "")
                return Cell(True, f"{through} ({_asked(layout, column)})", layout, column.recipe)
    have = [frameworks[name].title for name, row in cells.items() if row[key].supported]
    why = f"it cannot say it to {', '.join(have)}" if have else "nothing that it starts has it"
    return Cell(False, f"{TITLE}: {why}")


def _ergonomics(framework: Framework) -> str:
    layout_class = framework.layout_class
    own = layout_class.default_kernels == "transformers"
    number = len(layout_class.choices)
    return "; ".join((
        "your modules as they are" if own else f"the model in {framework.title}'s own modules",
        "nothing to choose" if not number else f"{number} choices",
        "trains here",
    ))  # fmt: skip


def _accelerate_ergonomics() -> str:
    started = ", ".join(frameworks[name].title for name in CARRIED)
    return f"one script for {started}; a configuration file chooses"
