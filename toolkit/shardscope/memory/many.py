"""Many plans at once: the same formulas as ``plan.memory()``, over arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardscope.layout import Degrees
from shardscope.memory.activations import modules_of
from shardscope.memory.arithmetic import largest
from shardscope.memory.modules.attention import broadcasts_views
from shardscope.memory.moments import moments
from shardscope.memory.stages import StageShape

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardscope.plan import Plan

_SIZES = frozenset({"micro_batch_size", "global_batch_size"})
"""Fields of a recipe that may differ between plans which are computed together."""
_SPREAD = frozenset({*(field.name for field in fields(Degrees)), "sequence_parallel", "etp"})
"""Fields of a layout that may."""


def peak_bytes(plans: Sequence[Plan]) -> NDArray[np.int64]:
    """``plan.memory().peak_bytes`` of each plan, shape ``(len(plans),)``, to the byte.

    Plans that differ in degrees and batch sizes only are computed together: the more of them are alike
    otherwise, the less one costs. Raises ``ValueError`` for a plan without formulas, as :meth:`Plan.memory`.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, plan in enumerate(plans):
        groups.setdefault(_kind(plan), []).append(index)
    found = np.zeros(len(plans), np.int64)
    for indices in groups.values():
        found[indices] = _peaks([plans[index] for index in indices])
    return found


def _peaks(plans: list[Plan]) -> NDArray[np.int64]:
    """The peaks of plans of one kind: every kind of stage of each is a row."""
    from shardscope.frameworks.registry import frameworks

    model = frameworks[plans[0].layout.framework].memory_model()
    shapes = [model.shapes(plan).kinds for plan in plans]
    owners = np.repeat(np.arange(len(plans)), [len(kinds) for kinds in shapes])
    rows = np.array([shape for kinds in shapes for shape in kinds], np.int64).T
    columns: Any = Columns(plans, owners)
    stage = model.stage(columns, StageShape(*rows))
    state = model.training_state(columns, stage)
    totals = largest(*(moment.total for moment in moments(columns, modules_of(columns), stage, state)))
    starts = np.searchsorted(owners, np.arange(len(plans)))
    return np.maximum.reduceat(np.broadcast_to(totals, owners.shape), starts)


class Columns:
    """Several plans as formulas read one, and likewise their layouts, recipes and degrees.

    What is alike in all is that value, what differs an array with a number for each row.
    """

    def __init__(self, nouns: Sequence[Any], rows: NDArray[np.int64]) -> None:
        self._nouns, self._rows = nouns, rows

    def __getattr__(self, name: str) -> Any:
        values = [getattr(noun, name) for noun in self._nouns]
        first = values[0]
        found: Any = first
        if any(value is not first and value != first for value in values):
            if all(isinstance(value, int) for value in values):
                found = np.array(values, np.int64)[self._rows]
            elif is_dataclass(first):
                found = Columns(values, self._rows)
            else:
                raise TypeError(f"{name} differs between plans, and is no number: {first!r}")
        self.__dict__[name] = found
        return found


def _kind(plan: Plan) -> tuple[Any, ...]:
    """What plans must have in common to be computed together: whether there are pipeline stages, too.

    And whether an expanded key head is a view, which products in plain math save.
    """
    return (
        plan.architecture,
        plan.on_gpu,
        plan.cluster.usable_bytes_per_gpu,
        plan.cluster.gpu.name,
        plan.degrees.pp > 1,
        broadcasts_views(plan.architecture, plan.recipe.micro_batch_size),
        type(plan.layout),
        *(getattr(plan.layout, field.name) for field in fields(plan.layout) if field.name not in _SPREAD),
        *(getattr(plan.recipe, field.name) for field in fields(plan.recipe) if field.name not in _SIZES),
    )
