"""Many plans at once: the same formulas as ``plan.memory()``, over arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from shardscope.layout import Degrees
from shardscope.memory.activations import modules_of
from shardscope.memory.arithmetic import largest
from shardscope.memory.moments import moments
from shardscope.memory.stages import StageShape

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardscope.plan import Plan

_DEGREES = tuple(field.name for field in fields(Degrees))
_SIZES = frozenset({"micro_batch_size", "global_batch_size"})
"""Fields of a recipe that may differ between the rows of an array."""
_SPREAD = frozenset({*_DEGREES, "sequence_parallel", "etp"})
"""Fields of a layout that may."""
_FOLLOWING = ("splits_sequence", "expert_tp")
"""What a layout derives from these."""


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
    """Plans of one kind, as formulas read a plan: what is alike is a value, what differs an array."""

    def __init__(self, plans: Sequence[Plan], rows: NDArray[np.int64]) -> None:
        one = plans[0]

        def column(numbers: Sequence[int]) -> NDArray[np.int64]:
            return np.array(numbers, np.int64)[rows]

        self.architecture, self.cluster = one.architecture, one.cluster
        self.on_gpu, self.kernels = one.on_gpu, one.kernels
        degrees = {name: column([getattr(plan.degrees, name) for plan in plans]) for name in _DEGREES}
        following = {
            name: column([getattr(plan.layout, name) for plan in plans])
            for name in _FOLLOWING
            if hasattr(one.layout, name)
        }
        self.degrees = _Varied(one.degrees, degrees)
        self.layout = _Varied(one.layout, {**degrees, **following})
        self.recipe = _Varied(
            one.recipe, {name: column([getattr(plan.recipe, name) for plan in plans]) for name in _SIZES}
        )
        self.num_micro_batches = column([plan.num_micro_batches for plan in plans])


class _Varied:
    """A noun some of whose fields are columns."""

    def __init__(self, like: Any, columns: dict[str, NDArray[np.int64]]) -> None:
        self._like = like
        self.__dict__.update(columns)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._like, name)


def _kind(plan: Plan) -> tuple[Any, ...]:
    """What plans must have in common to be computed together."""
    return (
        plan.architecture,
        plan.on_gpu,
        plan.cluster.usable_bytes_per_gpu,
        type(plan.layout),
        *(getattr(plan.layout, field.name) for field in fields(plan.layout) if field.name not in _SPREAD),
        *(getattr(plan.recipe, field.name) for field in fields(plan.recipe) if field.name not in _SIZES),
    )
