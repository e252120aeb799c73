"""One row -> one Plan, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from tests.accuracy.adapters import with_adapters
from tests.accuracy.contradicted_rows import check_not_contradicted
from tests.accuracy.frameworks import Framework, find_framework, with_degrees
from tests.accuracy.layouts import read_layout
from tests.accuracy.machines import read_cluster
from tests.accuracy.megatron_options import megatron_options, with_options
from tests.accuracy.models import read_architecture
from tests.accuracy.own_code import OwnCode, own_code
from tests.accuracy.own_rows import read_plan
from tests.accuracy.recipes import read_recipe
from tests.accuracy.row_normalization import normalize_row
from tests.accuracy.rows import Row, read_number
from tests.accuracy.unmapped_rows import UnmappedError

import shardscope as ss
from shardscope.timing.pipeline import Schedule


class Mapped(NamedTuple):
    """A row and its plan."""

    row: Row
    plan: ss.Plan
    framework: str
    """As the report groups rows."""
    assumed: tuple[str, ...]
    """What the row leaves open and the plan had to say."""
    own_code: tuple[OwnCode, ...]
    """What ran that no plan says."""
    schedule: Schedule | None = None
    """A pipeline schedule that no engine of ours runs; None: the plan's own."""


def map_row(row: Row) -> Mapped:
    """Return the plan that the row describes. Raises ``UnmappedError`` with the reason if there is none."""
    return call_or_raise_unmapped(_map_checked_row, row)


def call_or_raise_unmapped(make: Callable[[Row], Mapped], row: Row) -> Mapped:
    """Return ``make(row)``; raise ``UnmappedError`` for every failure, so that the report counts it."""
    try:
        return make(row)
    except UnmappedError:
        raise
    except ValueError as error:
        raise UnmappedError(f"raises ValueError: {_shorten_error(error)}") from None
    except Exception as error:
        # A defect of ours or a row of another form: counted by name, so that others are scored all the same.
        raise UnmappedError(f"failed: {type(error).__name__}: {str(error)[:80]}") from error


def _map_checked_row(row: Row) -> Mapped:
    plan = read_plan(row)
    if plan is not None:
        return Mapped(row, plan, plan.layout.framework, (), ())
    row = with_degrees(with_adapters(normalize_row(row)))
    check_not_contradicted(row)
    kind = find_framework(row)
    row, options = megatron_options(row, kind)
    arch, about_model = read_architecture(row)
    machines, about_machines = read_cluster(row)
    spread, about_layout = read_layout(row, kind, arch.num_hidden_layers)
    what, about_recipe = read_recipe(row, kind, arch, data_parallel(row, kind, machines.num_gpus))
    what, spread = with_options(what, spread, options)
    what, about_type = stored_type(what, spread)
    plan, about_plan = _plan(arch, machines, what, spread)
    checked_data_parallel(row, plan)
    assumed = (*about_model, *about_machines, *about_layout, *about_recipe, *about_type, *about_plan)
    return Mapped(row, plan, kind.name, assumed, own_code(row, kind.name, plan.recipe))


def stored_type(what: ss.Recipe, spread: ss.Layout) -> tuple[ss.Recipe, list[str]]:
    """A packed base that FSDP shards is stored as numbers of the type that it computes in: here bf16."""
    if what.method == "qlora" and spread.framework == "fsdp2" and what.precision == "fp16-mixed":
        return replace(what, precision="bf16-mixed"), ["fp16 predicted as bf16, which has the same sizes"]
    return what, []


def _plan(
    arch: ss.Architecture, machines: ss.Cluster, what: ss.Recipe, spread: ss.Layout
) -> tuple[ss.Plan, list[str]]:
    """The plan; where the framework's model has no formula for a detail that weighs little, without it."""
    left_out: list[str] = []
    details: list[tuple[str, object]] = [("lora_dropout", 0.0), ("dropout", 0.0)]
    if what.recompute == "full":
        # Only one layer's scores are there at a time.
        details.append(("attention", None))
    while True:
        try:
            plan = ss.Plan(arch, machines, what, spread)
            plan.memory()
        except ValueError as error:
            field, default = next(
                (detail for detail in details if f"Recipe.{detail[0]} is" in str(error)), ("", None)
            )
            if not field or getattr(what, field) == default:
                raise UnmappedError(f"raises ValueError: {_shorten_error(error)}") from None
            left_out.append(f"without {field}={getattr(what, field)!r}, for which there is no formula")
            what = replace(what, **{field: default})
        else:
            return plan, left_out


def data_parallel(row: Row, kind: Framework, num_gpus: int) -> int:
    """Ranks that tp, pp and cp leave."""
    taken = 1
    for key in ("tp", "pp", "cp"):
        taken *= read_number(row, key) or 1
    if num_gpus % taken:
        raise UnmappedError("degrees do not divide the GPUs")
    return num_gpus // taken


def checked_data_parallel(row: Row, plan: ss.Plan) -> None:
    """Raises ``UnmappedError`` where the row states other data-parallel ranks than the plan has."""
    stated = read_number(row, "dp")
    # FSDP's tables count context-parallel ranks among those that shard, or not.
    if stated is not None and stated not in (
        plan.degrees.data_parallel,
        plan.degrees.data_parallel * plan.degrees.cp,
    ):
        raise UnmappedError("degrees contradict the number of GPUs")


def _shorten_error(error: ValueError) -> str:
    """Return ``Recipe.precision is 'fp8-mixed'`` of the whole error message."""
    return str(error).split("; allowed")[0][:90]
