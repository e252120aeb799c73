"""The tables of the leaderboard: their rows, measured figures and Shardscope's predictions."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tests.accuracy.catalog_predictions import ignore_calibrations
from tests.accuracy.measurement_kinds import GIB, find_kind, tensor_bytes
from tests.accuracy.rehearsals import read_rehearsals, stored_files
from tests.accuracy.rows import MEASURED, OWN, read, read_source
from tests.accuracy.scoring import Scored, score_memory
from tests.accuracy.time_rows import TIMES
from tests.accuracy.time_scoring import TimeScored, score_time
from tests.accuracy.uncalibrated_stacks import is_calibrated
from tests.leaderboard.plan_requests import describe_plan

import shardscope as ss

STATES = ("parameters", "gradients", "optimizer")
_VALIDATED = (
    "calculon's authors validated it on the rows of Korthikanti et al. 2022 (its `validation/seqsel`)."
)
SIMUMAX_RUNS = "docs/b200/b200_release_v1.2_summary.json"
"""Runs that SimuMax publishes, in its checkout."""
_SIMUMAX_MODELS = {
    "llama3-70b": "llama-3.1-70b",
    "llama3-405b": "llama-3.1-405b",
    "deepseekv2": "deepseek-v2",
    "deepseekv3": "deepseek-v3",
}
_SIMUMAX_KV_HEADS = {"llama3-405b": 16}
"""Its scripts run Llama-3.1-405B with 16 query groups, not the model's 8."""


class TableRow(NamedTuple):
    """One figure that was measured or rehearsed, and our prediction of it."""

    plan: str
    """The id of the plan's description."""
    group: str
    """Source or sample."""
    measured: float
    ours: float


class Table(NamedTuple):
    """Rows that are compared in one quantity (``adapters/protocol.py``)."""

    title: str
    text: str
    quantity: str
    rows: tuple[TableRow, ...]


Plans = dict[str, dict[str, Any]]
"""Descriptions of plans by their ids."""


def collect_tables() -> tuple[list[Table], Plans]:
    """Read every row that comes with the project, and SimuMax's runs where its checkout is named."""
    plans: Plans = {}
    published = [path for path in sorted(MEASURED.glob("*.jsonl")) if path != OWN]
    alone = [row for row in score_memory(read(published)).scored if not row.has_publisher_code]
    on_device = [row for row in alone if find_kind(row.mapped.row) == "nvidia-smi"]
    of_tensors = [row for row in alone if find_kind(row.mapped.row) != "nvidia-smi"]
    own = score_memory(read([OWN])).scored
    times = score_time(read([*published, *sorted(TIMES.glob("*.jsonl"))])).by_product.scored
    known = [row for row in times if is_calibrated(row.mapped)]
    tables = [
        Table(
            "Published peaks of tensors",
            "Rows of [accuracy.md](accuracy.md) without publisher's code, whose figure is torch's allocated "
            "bytes or of an unknown kind.",
            "tensors",
            _list_peaks("published", of_tensors, plans),
        ),
        Table(
            "Published peaks by nvidia-smi",
            "Rows of [accuracy.md](accuracy.md) without publisher's code, whose figure is nvidia-smi's: it "
            "includes CUDA contexts, communicators and the allocator's cache. If an estimator has no such "
            "figure, its tensors are compared.",
            "device",
            _list_peaks("published", on_device, plans),
        ),
        *_list_rehearsals(plans),
        Table(
            "Our own runs",
            "tests/measured/own.jsonl: tensors of real ranks; on CPUs, of tiny models of the catalogue's "
            "families.",
            "tensors",
            _list_peaks("own", [row for row in own if find_kind(row.mapped.row) == "allocated"], plans),
        ),
        Table(
            "Held-out published step times",
            f"Rows of role `judge`, on which Shardscope was not fitted. {_VALIDATED}",
            "seconds",
            _list_times([row for row in known if row.role == "judge"], plans),
        ),
        Table(
            "Published step times used for fitting",
            f"Rows of role `calibration`, on which Shardscope was fitted. {_VALIDATED}",
            "seconds",
            _list_times([row for row in known if row.role != "judge"], plans),
        ),
        Table(
            "Published step times of nanotron",
            "A framework that none of the estimators models: planned as Megatron-core.",
            "seconds",
            _list_times([row for row in times if not is_calibrated(row.mapped)], plans),
        ),
    ]
    if checkout := os.environ.get("SIMUMAX_CHECKOUT"):
        tables += _list_simumax_runs(Path(checkout), plans)
    return tables, plans


def _list_peaks(kind: str, scored: Iterable[Scored], plans: Plans) -> tuple[TableRow, ...]:
    rows = []
    for row in scored:
        name = f"{kind} {row.mapped.row['id']}"
        plans[name] = describe_plan(name, row.mapped.plan)
        rows.append(TableRow(name, read_source(row.mapped.row), row.measured, row.product.point))
    return tuple(rows)


def _list_times(scored: Iterable[TimeScored], plans: Plans) -> tuple[TableRow, ...]:
    rows = []
    for row in scored:
        name = f"time {row.mapped.row['id']}"
        plans[name] = describe_plan(name, row.mapped.plan, is_timed=True, schedule=row.mapped.schedule)
        rows.append(TableRow(name, row.source, row.measured, row.seconds))
    return tuple(rows)


def _list_rehearsals(plans: Plans) -> list[Table]:
    peaks, states = [], []
    stored = {
        f"{path.stem}:{row['name']}": row
        for path in stored_files()
        for row in map(json.loads, path.read_text(encoding="utf-8").splitlines())
    }
    for one in read_rehearsals(stored_files())[0]:
        name, group = f"rehearsal {one.name}", one.name.partition(":")[0].partition("-")[0]
        plans[name] = describe_plan(name, one.plan)
        peaks.append(TableRow(name, group, sum(one.stored.values()), sum(one.predicted.values())))
        if getattr(one.plan.layout, "offload_params", None):
            continue
        moments = [moment for stage in stored[one.name]["stages"] for moment in stage["moments"]]
        rehearsed = _sum_states((moment["phase"], moment["components"]) for moment in moments)
        phases = [phase for stage in one.plan.memory().by_stage for phase in stage.phases]
        states.append(
            TableRow(name, group, rehearsed, _sum_states((one.phase, one.components) for one in phases))
        )
    text = (
        "tests/fixtures/rehearsals: the framework's own code on fake tensors, with every allocation tracked."
    )
    of_states = (
        f"{text} Compared are {', '.join(STATES)} during the optimizer step, for estimators of model states. "
        "Plans with parameters on the host are left out: the GPU has almost none of their states."
    )
    return [
        Table("Peaks of stored rehearsals", text, "tensors", tuple(peaks)),
        Table("Model states of stored rehearsals", of_states, "states", tuple(states)),
    ]


def _sum_states(moments: Iterable[tuple[str, Mapping[Any, int]]]) -> int:
    """Return the most that model states take together in the optimizer's step, on the fullest stage."""
    sums = [sum(parts.get(name, 0) for name in STATES) for phase, parts in moments if phase == "optimizer"]
    return max(sums)


def _list_simumax_runs(checkout: Path, plans: Plans) -> list[Table]:
    """Read Megatron-LM's runs on eight B200 from SimuMax's checkout; none of its figures is copied."""
    peaks, times = [], []
    for run in json.loads((checkout / SIMUMAX_RUNS).read_text(encoding="utf-8"))["rows"]:
        plan, name = plan_simumax_run(run), f"simumax {run['case']}"
        plans[name] = describe_plan(name, plan, is_timed=True, transformer_engine="2.11.0")
        point = max(tensor_bytes(moment) for stage in plan.memory().by_stage for moment in stage.phases)
        peaks.append(TableRow(name, run["model"], run["real_alloc_gib"] * GIB, point))
        with ignore_calibrations():
            times.append(TableRow(name, run["model"], run["real_ms"] / 1000, plan.step().seconds))
    text = f"{SIMUMAX_RUNS} of its repository: runs on the machine that its system file was measured on."
    return [
        Table("SimuMax's own B200 runs: peaks of tensors", text, "tensors", tuple(peaks)),
        Table("SimuMax's own B200 runs: step times", text, "seconds", tuple(times)),
    ]


def plan_simumax_run(run: Mapping[str, Any]) -> ss.Plan:
    """Return the plan of one of SimuMax's runs.

    Its simu_tools/megatron_scripts say what all of them have in common: micro-batches of one sequence, the
    distributed optimizer, no overlap, Transformer Engine's fused cross entropy, one dense layer.
    """
    numbers = {key: int(value) for key, value in re.findall(r"_(tp|pp|cp|ep|seq|mbc)(\d+)", run["case"])}
    degrees = {key: numbers.get(key, 1) for key in ("tp", "pp", "cp", "ep")}
    arch = ss.models[_SIMUMAX_MODELS[run["model"]]]
    experts = arch.mixture_of_experts
    arch = replace(
        arch,
        num_hidden_layers=run["layer_num"],
        num_key_value_heads=_SIMUMAX_KV_HEADS.get(run["model"], arch.num_key_value_heads),
        mixture_of_experts=replace(experts, first_k_dense_replace=1) if experts else None,
    )
    replicas = 8 // (degrees["tp"] * degrees["pp"] * degrees["cp"])
    recipe = ss.Recipe(
        seq_len=numbers.get("seq", 4096), global_batch_size=numbers["mbc"] * replicas, loss="fused"
    )
    layout = ss.Layout.megatron(**degrees, cross_entropy_fusion_impl="te")
    return ss.Plan(arch, ss.Cluster.parse("8xb200-sxm-180gb"), recipe, layout)
