"""The table of frameworks and abilities: what each can split, offload, compile or quantize.

Every layout class declares its abilities (``Layout.abilities`` and the ``supported_*`` tuples). Accelerate
has the abilities of the frameworks that it launches, as far as it can pass their options on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from html import escape
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.errors import check_choice
from shardscope.core.layout import Layout
from shardscope.frameworks.accelerate.plugin_fields import PLUGIN_FIELDS, TITLE
from shardscope.frameworks.registry import frameworks
from shardscope.prediction.support import list_supported

if TYPE_CHECKING:
    import pandas as pd

    from shardscope.frameworks.registry import Framework

FACTORIES = tuple(name for name, member in vars(Layout).items() if isinstance(member, staticmethod))
"""Names of the factory methods of ``Layout``, one for each framework."""

TITLES: Mapping[str, str] = MappingProxyType(
    {name: framework.title for name, framework in frameworks.items()} | {"accelerate": TITLE}
)
"""Framework name -> display name, for all frameworks of the registry and for Accelerate, which launches
them."""


class Cell(NamedTuple):
    """One ability of one framework."""

    supported: bool
    how: str
    """The code that requests the ability and its requirements, or the reason why it is not supported."""
    layout: Layout | None = None
    """A layout with the ability; None if there is none."""
    recipe: Mapping[str, str] = MappingProxyType({})
    """Recipe fields that request the ability, if a recipe and not the layout does."""


class Column(NamedTuple):
    """One ability."""

    title: str
    """Head of the table's column."""
    description: str
    """One-sentence explanation of the ability."""
    recipe: Mapping[str, str] = MappingProxyType({})
    """The recipe field that requests the ability; empty if the layout does."""


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """Table of abilities: one row for each framework, one column for each ability."""

    cells: Mapping[str, Mapping[str, Cell]]
    """Framework name -> ability name -> cell."""
    titles: Mapping[str, str]
    """Framework name -> display name."""
    ergonomics: Mapping[str, str]
    """Framework name -> short description of working with it."""

    def get_cell(self, framework: str, ability: str) -> Cell:
        """Return one cell. Raises ``ValueError`` for names that are not in the table."""
        row = self.cells[check_choice("framework", framework, self.cells)]
        return row[check_choice("ability", ability, row)]

    def to_frame(self) -> pd.DataFrame:
        """Return a frame with one row for each framework and one boolean column for each ability; the last
        column is ergonomics."""
        import pandas as pd

        rows = {
            self.titles[name]: {COLUMNS[key].title: cell.supported for key, cell in row.items()}
            | {"ergonomics": self.ergonomics[name]}
            for name, row in self.cells.items()
        }
        return pd.DataFrame.from_dict(rows, orient="index")

    def to_html(self) -> str:
        """Return the same table as plain HTML without scripts; each cell's title is the code that requests
        it."""
        head = "".join(
            f"<th title='{escape(c.description, True)}'>{escape(c.title)}</th>" for c in COLUMNS.values()
        )
        # Each cell has the code that requests the ability as its tooltip, so that the table is also a
        # reference.
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
def compute_abilities() -> Abilities:
    """Return the table of all frameworks of the registry and of Accelerate, which launches them."""
    cells = {
        name: {ability: _build_cell(framework, ability) for ability in COLUMNS}
        for name, framework in frameworks.items()
    }
    # After the others: what Accelerate has follows from the frameworks that it starts.
    cells["accelerate"] = {ability: _build_accelerate_cell(ability, cells) for ability in COLUMNS}
    return Abilities(
        cells=cells,
        titles=TITLES,
        ergonomics={name: _describe_ergonomics(framework) for name, framework in frameworks.items()}
        | {"accelerate": _describe_accelerate_ergonomics()},
    )


def format_layout(layout: Layout) -> str:
    """Return the code that creates this layout, without default values: ``Layout.zero(stage=2)``."""
    # Compare types: a framework's default layout may have other fields than the one to be printed.
    name = next(name for name in FACTORIES if type(getattr(Layout, name)()) is type(layout))
    plain = type(layout)()
    changed = [
        f"{field}={getattr(layout, field)!r}"
        for field in layout.__dataclass_fields__
        if getattr(layout, field) != getattr(plain, field)
    ]
    return f"Layout.{name}({', '.join(changed)})"


COLUMNS: dict[str, Column] = {
    "data": Column("data", "ranks see different sequences"),
    "zero_1": Column("ZeRO-1", "the optimizer state is sharded over data-parallel ranks"),
    "zero_2": Column("ZeRO-2", "gradients are sharded as well"),
    "zero_3": Column("ZeRO-3 / FSDP", "parameters are sharded as well, and all-gathered layer by layer"),
    "hybrid": Column("hybrid", "state is sharded inside a group, and groups are replicas (HSDP)"),
    "tensor": Column("tensor", "each matrix is sharded over ranks"),
    "sequence": Column(
        "sequence", "norms and residuals are split along the sequence within tensor-parallel ranks"
    ),
    "pipeline": Column("pipeline", "ranks hold different layers"),
    "interleaved": Column("interleaved", "each pipeline rank holds several chunks of layers"),
    "context": Column("context", "each sequence is split over ranks"),
    "expert": Column("expert", "ranks hold different experts"),
    "cpu_offload": Column("CPU offload", "training state lives in host memory"),
    "nvme_offload": Column("NVMe offload", "training state lives on NVMe drives"),
    "compile": Column("compile", "layers compiled by torch.compile", {"kernels": "compiled"}),
    "fp8": Column("fp8", "matrix products in 8 bits", {"precision": "fp8-mixed"}),
    "lora": Column("LoRA", "adapters over a frozen base", {"method": "lora"}),
    "qlora": Column("QLoRA", "adapters over a base in 4 bits", {"method": "qlora"}),
}
"""Abilities by name, in the order of the table's columns."""


def _build_cell(framework: Framework, ability: str) -> Cell:
    """Return whether ``framework`` declares the ability, with a layout that has it."""
    column = COLUMNS[ability]
    # A layout that really has the ability, rather than a flag: its constructor checks the combination.
    layout = _find_layout_with(framework, ability)
    if layout is None:
        return Cell(False, f"Shardscope plans none with {framework.title}")
    return Cell(True, _format_code(layout, column), layout, column.recipe)


def _find_layout_with(framework: Framework, ability: str) -> Layout | None:
    layout_class = framework.layout_class
    # An ability that a recipe requests needs no layout option: the layout class declares what it supports.
    for field, value in COLUMNS[ability].recipe.items():
        return layout_class() if value in list_supported(layout_class, field) else None
    options = layout_class.abilities.get(ability)
    return None if options is None else layout_class(**options)


def _format_code(layout: Layout, column: Column) -> str:
    fields = ", ".join(f"{field}={value!r}" for field, value in column.recipe.items())
    return f"{format_layout(layout)} with Recipe({fields})" if fields else format_layout(layout)


def _build_accelerate_cell(ability: str, cells: Mapping[str, Mapping[str, Cell]]) -> Cell:
    """Return the framework through which Accelerate supports an ability, with Accelerate's own options."""
    for name, fields in PLUGIN_FIELDS.items():
        layout = _find_layout_with(frameworks[name], ability)
        if layout is None:
            continue
        plain = type(layout)()
        # Accelerate supports an ability if its plugin has a field for every option that the layout needs.
        used = [f for f in layout.__dataclass_fields__ if getattr(layout, f) != getattr(plain, f)]
        if fields.keys() >= set(used):
            options = ", ".join(fields[field] for field in used)
            column = COLUMNS[ability]
            through = f"through {frameworks[name].title}" + (f": {options}" if options else "")
            return Cell(True, f"{through} ({_format_code(layout, column)})", layout, column.recipe)
    # Distinguish "none of its frameworks has it" from "its plugin cannot pass the option".
    have = [frameworks[name].title for name, row in cells.items() if row[ability].supported]
    why = f"no option passes it to {', '.join(have)}" if have else "nothing that it starts has it"
    return Cell(False, f"{TITLE}: {why}")


def _describe_ergonomics(framework: Framework) -> str:
    layout_class = framework.layout_class
    # Keeping the user's modules or rebuilding the model is what users notice first when they change
    # frameworks.
    keeps_modules = layout_class.default_kernels == "transformers"
    number = len(layout_class.choices)
    return "; ".join((
        "your modules as they are" if keeps_modules else f"the model in {framework.title}'s own modules",
        "nothing to choose" if not number else f"{number} choices",
        "trains here",
    ))  # fmt: skip


def _describe_accelerate_ergonomics() -> str:
    started = ", ".join(frameworks[name].title for name in PLUGIN_FIELDS)
    return f"one script for {started}; a configuration file chooses"
