"""Result of a search: bytes and seconds of every plan as columns, and the best plans."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from shardscope.core.cluster import name_device
from shardscope.core.html_table import render_html_table
from shardscope.core.number_format import format_gib
from shardscope.frameworks.registry import why_not_trained
from shardscope.frameworks.search_grid import DEGREES, MICRO_BATCH_SIZE
from shardscope.memory.overheads.libraries import TIGHT_PERCENT
from shardscope.planner.search.memory_needs import Needs, find_fitting, list_rooms
from shardscope.planner.search.nearest_misses import (
    Miss,
    explain_no_plan,
    find_nearest_misses,
    list_nearest_misses,
    list_refusals,
)
from shardscope.planner.search.step_times import complete_step_seconds
from shardscope.timing.report import HOUR_SECONDS

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

    from shardscope.core.architecture import Architecture
    from shardscope.core.cluster import Cluster
    from shardscope.core.layout import Layout
    from shardscope.core.plan import Plan
    from shardscope.core.recipe import Recipe
    from shardscope.planner.search.candidates import Candidates

SHOWN_ROWS = 10
"""Rows of the table at the end of a notebook cell."""

AS_FAST = 1.01
"""Ratio of step times within which plans count as equally fast: less than a sixth of the median error of a
predicted step (6 %)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranking:
    """All plans that a search evaluated. Columns have one number for each plan, shape ``(num_evaluated,)``.

    :attr:`order` ranks the plans that fit by speed, with two exceptions. Predictions cannot distinguish plans
    within 1 % of the fastest (:data:`AS_FAST`): these are ordered by the fewest degrees above 1 and options
    (offload, recomputation), then the fewest chunks, then the most headroom. Plans that need host memory or
    NVMe of unknown size come after those that do not: :attr:`unknown_memory` reports their number.
    """

    architecture: Architecture
    cluster: Cluster
    recipe: Recipe
    seconds: float
    """Duration of the search."""
    peak_bytes: NDArray[np.int64]
    """Peak GPU memory of the worst rank, equal to ``plan.memory().peak_bytes``."""
    host_bytes: NDArray[np.int64]
    """Host memory on the node that needs most."""
    nvme_bytes: NDArray[np.int64]
    """NVMe on the node that needs most."""
    building_bytes: NDArray[np.int64]
    """Host memory of a node while its ranks build or load the model."""
    known_step_seconds: NDArray[np.float64]
    """Step seconds of the plans that fit, and of others that were read since; NaN of all others.

    :meth:`get_step_seconds` and :attr:`step_seconds` complete them.
    """
    headroom_wanted_bytes: int
    """Requested free bytes of each GPU."""
    refused: Mapping[str, str]
    """Frameworks without an evaluated plan, and the reason."""
    candidates: tuple[Candidates, ...]
    """Candidates of the rows, in the order of the columns."""

    alternative: Ranking | None = None
    """Ranking of a similar recipe if nothing fits: with the nearest global batch that divides evenly if no
    plan was evaluated, otherwise with the chunked loss."""

    @property
    def num_evaluated(self) -> int:
        """Return the number of plans whose memory was computed, and the step of those that fit."""
        return len(self.peak_bytes)

    @property
    def num_feasible(self) -> int:
        """Return the number of plans that fit with the requested headroom."""
        return int(self.is_feasible.sum())

    @cached_property
    def headroom_bytes(self) -> NDArray[np.int64]:
        """Return the free bytes on the worst rank's GPU; negative: the missing bytes."""
        return self.cluster.usable_bytes_per_gpu - self.peak_bytes

    @cached_property
    def step_seconds(self) -> NDArray[np.float64]:
        """Return the seconds of one optimizer step, equal to ``plan.step().seconds``.

        The first access computes those of the plans that do not fit, which takes as long as the search on
        thousands of GPUs; :meth:`get_step_seconds` computes only the requested ones.
        """
        return self.get_step_seconds(self._all_rows)

    @cached_property
    def tokens_per_second_per_gpu(self) -> NDArray[np.float64]:
        """Return the tokens of the global batch per second of the step and GPU."""
        return self.get_tokens_per_second_per_gpu(self._all_rows)

    @cached_property
    def cost_per_token(self) -> NDArray[np.float64] | None:
        """Return US dollars per token; None if no price is known."""
        return self.get_cost_per_token(self._all_rows)

    def get_step_seconds(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return :attr:`step_seconds` of some rows."""
        missing = rows[np.isnan(self.known_step_seconds[rows])]
        if len(missing):
            wanted = np.zeros(self.num_evaluated, bool)
            wanted[missing] = True
            complete_step_seconds(self.candidates, wanted, self.cluster, self.known_step_seconds)
        return self.known_step_seconds[rows]

    def get_tokens_per_second_per_gpu(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return :attr:`tokens_per_second_per_gpu` of some rows."""
        tokens = self.recipe.global_batch_size * self.recipe.seq_len
        return tokens / self.get_step_seconds(rows) / self.cluster.num_gpus

    def get_cost_per_token(self, rows: NDArray[np.int64]) -> NDArray[np.float64] | None:
        """Return :attr:`cost_per_token` of some rows; None if no price is known."""
        price = self.cluster.price_per_hour_usd
        if price is None:
            return None
        return price / HOUR_SECONDS / (self.get_tokens_per_second_per_gpu(rows) * self.cluster.num_gpus)

    @property
    def _all_rows(self) -> NDArray[np.int64]:
        return np.arange(self.num_evaluated)

    @cached_property
    def framework(self) -> NDArray[np.str_]:
        """Return the registry's framework name of each plan."""
        names = [candidate.layout.framework for candidate in self.candidates]
        return np.repeat(np.array(names, str), [candidate.num_plans for candidate in self.candidates])

    @cached_property
    def is_feasible(self) -> NDArray[np.bool_]:
        """Mask of the plans that fit, shape ``(num_evaluated,)``.

        They fit the GPUs with the requested headroom, and the host memory and NVMe of the nodes.
        :meth:`why_not_launched` reports whether a plan can be launched.
        """
        # Memory of unknown size cannot be short, so such plans count as feasible; order puts them last.
        return find_fitting(self.lacks)

    @cached_property
    def is_tight(self) -> NDArray[np.bool_]:
        """Mask of the plans that need over 80 % of the GPU's memory, shape ``(num_evaluated,)``.

        Of such runs some run out of memory: :data:`~shardscope.memory.overheads.libraries.TIGHT_PERCENT`.
        """
        is_tight: NDArray[np.bool_] = (
            100 * self.peak_bytes > TIGHT_PERCENT * self.cluster.usable_bytes_per_gpu
        )
        return is_tight

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """Return the rows of feasible plans: the simplest of those within 1 % of the fastest first, then by
        speed; plans that need memory of unknown size come last."""
        rows = self._by_speed
        if not len(rows):
            return rows
        # 1. Plans that need memory of unknown size go to the end, however fast they are.
        is_known = self.is_room_known[rows]
        rows = np.concatenate([rows[is_known], rows[~is_known]])
        # A plan that needs memory of unknown size never comes before one that does not.
        leading = rows[: int(is_known.sum()) or len(rows)]
        # 2. The plans within 1 % of the fastest, which a prediction cannot distinguish.
        fastest = self.get_step_seconds(rows[:1])[0]
        num = int(np.searchsorted(self.get_step_seconds(leading), AS_FAST * fastest, "right"))
        equally_fast = leading[:num]
        # 3. Simplest first: lexsort's last key is the primary one.
        keys = (
            -self.headroom_bytes[equally_fast],
            self.column("vpp")[equally_fast],
            self._num_turned_on(equally_fast),
        )
        return np.concatenate([equally_fast[np.lexsort(keys)], rows[num:]])

    @cached_property
    def is_room_known(self) -> NDArray[np.bool_]:
        """Return whether the cluster has the size of all memory that each plan needs in its steps.

        Building the model is left out: small plans of every framework need host memory before the first step,
        and would all come after those of a framework that does not.
        """
        is_known = np.ones(self.num_evaluated, bool)
        for needed in self._needs_of_unknown_size.values():
            is_known &= needed == 0
        return is_known

    @property
    def unknown_memory(self) -> str:
        """Return the text on plans that fit but need memory of unknown size, and why they come last; empty if
        there are none."""
        feasible = self.is_feasible
        num = int((feasible & ~self.is_room_known).sum())
        if not num:
            return ""
        # The smallest need of the feasible plans: below it, none of them can run.
        amounts = [
            f"{name} ({format_gib(int(needed[feasible & (needed > 0)].min()))} GiB a node at least)"
            for name, needed in self._needs_of_unknown_size.items()
            if (feasible & (needed > 0)).any()
        ]
        verb = "needs" if num == 1 else "need"
        last = "" if num == self.num_feasible else " They come after the others."
        return (
            f"{num:,} of the {self.num_feasible:,} plans that fit {verb} {' or '.join(amounts)}, and the "
            f"cluster does not state how much a node has: check that your nodes have it.{last}"
        )

    @property
    def best(self) -> Plan:
        """Return the first plan of :attr:`order`: the simplest of those within 1 % of the fastest that fits.

        Raises ``ValueError`` with the nearest misses if none fits.
        """
        # The error message lists the nearest misses, because an empty result alone is of no help.
        if not len(self.order):
            raise ValueError(explain_no_plan(self))
        return self.plan(int(self.order[0]))

    def plan(self, index: int) -> Plan:
        """Return the plan of a row, created and checked like any other. Raises ``IndexError`` for an invalid
        row."""
        self._check_row(index)
        place = bisect_right(self._starts, index) - 1
        return self.candidates[place].build_plan(self.cluster, int(index) - self._starts[place])

    def why_not(self, index: int) -> str:
        """Return why a plan cannot run: the memory that is short, or why it cannot be launched here; or "".

        ``32.0 GiB over the GPU's memory``, ``needs 1,240 GiB of host memory on each node, which has 1,000``.
        Raises ``IndexError`` for an invalid row.
        """
        self._check_row(index)
        # Missing memory first: whether an engine runs the plan matters only once it fits.
        short = [
            _describe_lack(name, int(lack[index]), self.rooms[name], name_device(self.cluster))
            for name, lack in self.lacks.items()
            if lack[index] > 0
        ]
        if short:
            return " and ".join(short)
        refusal = self.why_not_launched(index)
        return f"cannot be launched here: {refusal}" if refusal else ""

    def why_not_launched(self, index: int) -> str:
        """Return why no engine here runs a plan, whatever its memory; "" if one does.

        Raises ``IndexError`` for an invalid row.
        """
        # Cached, because it creates the plan and asks the engine's limits.
        if index not in self._launch_refusals:
            self._launch_refusals[index] = why_not_trained(self.plan(index)) or ""
        return self._launch_refusals[index]

    @cached_property
    def _launch_refusals(self) -> dict[int, str]:
        return {}

    def _check_row(self, index: int) -> None:
        if not 0 <= index < self.num_evaluated:
            raise IndexError(f"row {index} of {self.num_evaluated:,} plans")

    def pareto(self) -> NDArray[np.int64]:
        """Return the rows of the Pareto front of speed and memory among feasible plans, the fastest first."""
        rows = self._by_speed
        peaks = self.peak_bytes[rows]
        # By ascending time, a plan is on the front if it needs less memory than every faster one.
        least = np.minimum.accumulate(peaks)
        better = np.ones(len(rows), bool)
        better[1:] = peaks[1:] < least[:-1]
        return rows[better]

    @cached_property
    def misses(self) -> tuple[Miss, ...]:
        """Return the nearest misses, one of each framework first."""
        return find_nearest_misses(self)

    @cached_property
    def missing_share(self) -> NDArray[np.float64]:
        """Return the largest missing share of any kind of memory, relative to its size; 0 if the plan
        fits."""
        # Relative to the size, because plans may lack different kinds of memory.
        share = np.zeros(self.num_evaluated)
        for name, short in self.lacks.items():
            share = np.maximum(share, short / max(1, self.rooms[name]))
        return share

    @cached_property
    def total_missing_share(self) -> NDArray[np.float64]:
        """Return the sum of the missing shares of all kinds of memory; 0 if the plan fits."""
        share = np.zeros(self.num_evaluated)
        for name, short in self.lacks.items():
            share += np.maximum(0.0, short / max(1, self.rooms[name]))
        return share

    def to_frame(self, limit: int | None = None) -> pd.DataFrame:
        """Return a frame with a row for each plan, at most ``limit``: feasible ones as in :attr:`order`, then
        the nearest misses."""
        import pandas as pd

        rows = self.order[:limit]
        if limit is None or len(rows) < limit:
            # Fill the table with the nearest misses, so that a cluster that is too small has more than an
            # empty frame.
            wanted = self.num_evaluated if limit is None else limit - len(rows)
            rows = np.concatenate([rows, list_nearest_misses(self, wanted)])
        columns: dict[str, object] = {
            "framework": self.framework[rows],
            "layout": self.options(rows),
            "recompute": self.recompute[rows],
            MICRO_BATCH_SIZE: self.column(MICRO_BATCH_SIZE)[rows],
            **{name: self.column(name)[rows] for name in DEGREES},
            "tokens_per_second_per_gpu": self.get_tokens_per_second_per_gpu(rows),
            "step_seconds": self.get_step_seconds(rows),
            "peak_bytes": self.peak_bytes[rows],
            "headroom_bytes": self.headroom_bytes[rows],
            "host_bytes": self.host_bytes[rows],
            "nvme_bytes": self.nvme_bytes[rows],
            "building_bytes": self.building_bytes[rows],
            "missing_share": self.missing_share[rows],
            "feasible": self.is_feasible[rows],
            "is_room_known": self.is_room_known[rows],
        }
        cost_per_token = self.get_cost_per_token(rows)
        if cost_per_token is not None:
            columns["cost_per_token"] = cost_per_token
        return pd.DataFrame(columns, index=pd.Index(rows, name="plan"))

    def column(self, name: str) -> NDArray[np.int64]:
        """Return ``micro_batch_size`` or a degree (``tp``, ``pp``, ``vpp``, ``cp``, ``ep``, ``replicate``,
        ``data_parallel``) of each plan; 1 if the framework does not have it."""
        # Cached by name, because the order and the tables read the same few columns again.
        values = self._columns.get(name)
        if values is None:
            parts = [one.part.columns.get(name, np.ones(one.num_plans, np.int64)) for one in self.candidates]
            values = np.concatenate(parts) if parts else np.zeros(0, np.int64)
            self._columns[name] = values
        return values

    @cached_property
    def recompute(self) -> NDArray[np.str_]:
        """Return the recomputation of each plan."""
        return self._repeat_for_plans([candidate.recipe.recompute for candidate in self.candidates])

    def options(self, rows: NDArray[np.int64]) -> NDArray[np.str_]:
        """Return the text of the layouts' options besides degrees, for some rows."""
        return np.array([_describe_options(candidate.layout) for candidate in self.candidates], str)[
            self.owners(rows)
        ]

    @cached_property
    def _by_speed(self) -> NDArray[np.int64]:
        """Return the rows of feasible plans, the fastest first; of equally fast ones the fewest degrees, then
        the leanest."""
        rows = np.flatnonzero(self.is_feasible)
        if not len(rows):
            return rows
        seconds = self.get_step_seconds(rows)
        # Equal up to rounding errors of the arrays' order of summation counts as equally fast.
        relative_seconds = np.round(seconds / seconds.min(), 9)
        return rows[np.lexsort((self.peak_bytes[rows], self.num_degrees_above_one(rows), relative_seconds))]

    def num_degrees_above_one(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of degrees above 1 of some rows, except ``data_parallel``, which is derived."""
        above = [self.column(name)[rows] > 1 for name in DEGREES if name != "data_parallel"]
        num_degrees: NDArray[np.int64] = np.sum(above, axis=0, dtype=np.int64)
        return num_degrees

    def _num_turned_on(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of settings to choose and understand: degrees above 1, offload and
        recomputation."""
        extras = [_num_extras(candidate) for candidate in self.candidates]
        num_extras: NDArray[np.int64] = np.array(extras, np.int64)[self.owners(rows)]
        return self.num_degrees_above_one(rows) + num_extras

    @cached_property
    def _columns(self) -> dict[str, NDArray[np.int64]]:
        return {}

    @cached_property
    def _starts(self) -> list[int]:
        sizes = [candidate.num_plans for candidate in self.candidates]
        return [0, *np.cumsum(sizes[:-1], dtype=int).tolist()] if sizes else []

    @cached_property
    def rooms(self) -> dict[str, int]:
        """Return the available bytes of each kind of memory of known size."""
        return list_rooms(self.cluster, self.headroom_wanted_bytes)

    @cached_property
    def lacks(self) -> dict[str, NDArray[np.int64]]:
        """Return the missing bytes of each kind of memory of known size; 0 or less: none."""
        needs = Needs(self.peak_bytes, self.host_bytes, self.nvme_bytes, self.building_bytes)
        return needs.compute_lacks(self.rooms)

    @cached_property
    def _needs_of_unknown_size(self) -> dict[str, NDArray[np.int64]]:
        """Return the bytes that plans need in a step of the kinds of memory of unknown size."""
        needed = {"host memory": self.host_bytes, "NVMe": self.nvme_bytes}
        return {name: num_bytes for name, num_bytes in needed.items() if name not in self.rooms}

    def owners(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index in :attr:`candidates` of each row."""
        return np.searchsorted(np.array(self._starts), rows, side="right") - 1

    def _repeat_for_plans(self, values: list[str]) -> NDArray[np.str_]:
        return np.repeat(np.array(values, str), [candidate.num_plans for candidate in self.candidates])

    def _repr_html_(self) -> str:
        """Return the ten best plans as an HTML table."""
        notes = "".join(f"<p>{escape(note)}</p>" for note in self._list_notes())
        if not self.num_evaluated:
            return f"<p>No plan: {escape(self._headline)}.</p>{notes}"
        frame = self.to_frame(limit=SHOWN_ROWS)
        rows = [
            (
                line["framework"],
                line["layout"],
                line["recompute"],
                int(line[MICRO_BATCH_SIZE]),
                ", ".join(f"{name.replace('_', ' ')} {line[name]}" for name in DEGREES if line[name] > 1)
                or "one rank",
                float(line["tokens_per_second_per_gpu"]),
                float(line["step_seconds"]),
                round(float(line["peak_bytes"]) / 2**30, 1),
                # As in the command line's table.
                "no" if not line["feasible"] else "tight" if is_tight else "yes",
            )
            for (_, line), is_tight in zip(frame.iterrows(), self.is_tight[frame.index], strict=True)
        ]
        head = (
            "framework", "layout", "recompute", "micro-batch", "degrees", "tokens/s per GPU",
            "seconds per step", "peak GiB", "fits",
        )  # fmt: skip
        return render_html_table(head, rows, f"{self._headline}; the best {len(rows)}") + notes

    def __repr__(self) -> str:
        notes = "".join(f" {note}" for note in self._list_notes())
        return f"<Ranking: {self._headline}, {self.seconds:.2f} s.{notes}>"

    @property
    def _headline(self) -> str:
        if not self.num_evaluated:
            return f"no layout runs {self.architecture.name} with this recipe on {self.cluster}"
        return f"{self.num_feasible:,} of {self.num_evaluated:,} plans fit {self.cluster}"

    def _list_notes(self) -> list[str]:
        """Return the text on memory of unknown size, and why there is no plan if none was evaluated."""
        refusals = [] if self.num_evaluated else list_refusals(self)
        return [self.unknown_memory, *refusals] if self.unknown_memory else refusals


def _describe_lack(name: str, num_bytes: int, room_bytes: int, device: str) -> str:
    if name == "GPU memory":
        return f"{format_gib(num_bytes)} GiB over the {device}'s memory"
    of = "on NVMe" if name == "NVMe" else f"of {name}"
    if format_gib(room_bytes + num_bytes) == format_gib(room_bytes):  # Equal at the displayed precision.
        return (
            f"needs {format_gib(num_bytes)} GiB {of} more than the {format_gib(room_bytes)} GiB that "
            "each node has"
        )
    return (
        f"needs {format_gib(room_bytes + num_bytes)} GiB {of} on each node, which has "
        f"{format_gib(room_bytes)}"
    )


def _describe_options(layout: Layout) -> str:
    """Return the text of a layout's options besides degrees."""
    plain = type(layout)()
    changed = [
        f"{name}={getattr(layout, name)}"
        for name in layout.choices
        if name not in DEGREES and getattr(layout, name) != getattr(plain, name)
    ]
    return f"{layout.title}{' (' if changed else ''}{', '.join(changed)}{')' if changed else ''}"


def _num_extras(candidate: Candidates) -> int:
    """Return the number of offloaded kinds of state, plus one for recomputation."""
    names = [name for name in candidate.layout.choices if name.startswith("offload")]
    moved = sum(getattr(candidate.layout, name) is not None for name in names)
    return moved + (candidate.recipe.recompute != "none")


def concatenate_needs(needs: list[Needs], name: str) -> NDArray[np.int64]:
    """Return one kind of memory's bytes, over all plans."""
    return np.concatenate([getattr(one, name) for one in needs]) if needs else np.zeros(0, np.int64)
