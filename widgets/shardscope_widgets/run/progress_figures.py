"""The figures of a run above its charts: steps, loss, tokens/s, time and the slowest rank.

Each is (figure, name, tooltip), as ``run_html.render_figures`` takes them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shardscope.records.clock_offsets import sum_seconds
from shardscope.records.nodes import RunNode
from shardscope.runs.watch.pace import RATES, RECENT_STEPS, Pace, SlowestRank
from shardscope_widgets.kit.numbers import format_short
from shardscope_widgets.run import run_html
from shardscope_widgets.run.panels import is_number

if TYPE_CHECKING:
    import shardscope as ss

KEEP_BEST, KEEP_MODEL = "Stop and keep the best", "Stop and keep the model"
ENDED_EARLY = (
    f"Training ended early: validations found no lower loss, or {KEEP_BEST} was pressed. The weights are "
    "those with the lowest validation loss"
)
ENDED_BY_REQUEST = f"{KEEP_MODEL} was pressed. The weights are those of the last step"
PLACEHOLDER = "–"


def describe_slowest(
    slowest: SlowestRank, pace: Pace, nodes: Sequence[RunNode]
) -> list[tuple[str, str, str]]:
    """Return the slowest rank, and the slowest node if nodes have several ranks."""
    node_of_rank = {rank: node.number for node in nodes for rank in node.ranks}
    if slowest.rank not in node_of_rank:
        return [run_html.describe_slowest_rank(slowest)]
    name = nodes[node_of_rank[slowest.rank]].name
    entries = [run_html.describe_slowest_rank(slowest, name)]
    node = pace.find_slowest_node(node_of_rank)
    if node is not None and len(nodes) < slowest.num_ranks:
        name = nodes[node.number].name
        entries.append(run_html.describe_slowest_node(node, name, len(nodes)))
    return entries


def list_step_figures(
    run: ss.Run, pace: Pace, latest: Mapping[str, object], status: str | None
) -> list[tuple[str, str, str]]:
    """Return steps, loss and tokens/s; ``latest`` has the newest values of rank 0.

    A training task's figures are known before its first step: dashes keep the layout from shifting.
    """
    is_known, total = run.trains_the_plan, run.num_steps
    done = 0 if pace.last_step is None else pace.last_step + 1
    entries = []
    if pace.last_step is not None or is_known:
        goal = f" of {total:,}" if total else ""
        noun = "step" if (total or done) == 1 else "steps"
        why = "Steps up to the last one that any rank has logged"
        if run.keeps_a_model and status == "finished" and done < (total or 0):
            noun, why = (
                ("steps, best kept", ENDED_EARLY)
                if run.keeps_best
                else ("steps, last kept", ENDED_BY_REQUEST)
            )
        entries.append((f"{done:,}{goal}", noun, why))
    loss = latest.get("loss")
    if is_number(loss) or is_known:
        entries.append((f"{loss:.3f}" if is_number(loss) else PLACEHOLDER, "loss", "Rank 0, last step"))
    rate, why = pace.tokens_per_second, f"Median of the last {RECENT_STEPS} steps"
    if rate is not None:
        whose = " in all" if rate[0] == RATES[0] else ", rank 0"
        entries.append((format_short(rate[1]), f"tokens/s{whose}", why))
    elif is_known:
        entries.append((PLACEHOLDER, "tokens/s in all", why))
    return entries


def list_time_figures(run: ss.Run, pace: Pace, has_ended: bool) -> list[tuple[str, str, str]]:
    """Return the remaining or the total time; nothing if neither is known."""
    total = run.num_steps
    if run.is_hanging:
        return [(PLACEHOLDER, "remaining", "Not known while no step is logged: see below the run's name")]
    left = pace.seconds_left(total, time.time()) if total and not has_ended else None
    if left is not None and pace.last_step == (total or 0) - 1:
        why = "All steps are done: samples, the last checkpoint and the model are written"
        return [("finishing", "all steps done", why)]
    if left is not None:
        why = "The remaining steps at the mean speed of the last ones, with validation and checkpoints"
        return [(f"about {run_html.format_duration(left)}", "remaining", why)]
    if has_ended:
        seconds = _find_duration(run)
        if seconds is None:
            return []
        return [(run_html.format_duration(seconds), "total time", "From launch to end")]
    return [(PLACEHOLDER, "remaining", "Known after some steps")] if run.trains_the_plan else []


def _find_duration(run: ss.Run) -> float | None:
    times = [record["time"] for record in run.history if is_number(record["time"])]
    return sum_seconds(times) if len(times) > 1 else None
