"""Runs of the rows: each is planned, launched and read back from its run folder."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from unittest import mock

from tests.cluster.two_node_ray import TwoNodeRay
from tests.cluster.two_node_slurm import TwoNodeSlurm, find_missing
from tests.parity import rank_training
from tests.parity.comparison import Curve, Outcome, compare
from tests.parity.table import Row

import shardscope as ss
from shardscope.frameworks.registry import why_not_trained

SECONDS_PER_ROW = 900
"""The first row that offloads waits for DeepSpeed's extensions to compile."""


class ReferenceRunError(RuntimeError):
    """The run of the single process did not finish, so there is nothing to compare with."""


def run_rows(
    rows: Sequence[Row],
    *,
    folder: Path,
    here: ss.Cluster | None = None,
    seed: int = 0,
    num_steps: int = rank_training.NUM_STEPS,
) -> Iterator[Outcome]:
    """Run ``rows`` one after another; each outcome as soon as it is known.

    ``here`` has this machine's GPUs; without, ranks are CPU ranks. Raises :class:`ReferenceRunError` if the
    single process, which comes first for each family of models and what is trained of it, does not finish.
    """
    references: dict[str, Curve] = {}
    targets: dict[str, ss.Slurm | ss.Ray] = {}
    with contextlib.ExitStack() as cluster:
        for row in rows:
            began = time.monotonic()
            name = row.reference.name
            if name not in references and not list_missing(row):
                references[name] = train_single_process(row.reference, folder, here, seed, num_steps)
                began = time.monotonic()
            reference = references.get(name)
            target: ss.Slurm | ss.Ray | None = None
            if row.num_nodes > 1 and not list_missing(row):
                if row.scheduler not in targets:
                    if row.scheduler == "slurm":
                        targets["slurm"] = cluster.enter_context(start_slurm())
                    else:
                        targets["ray"] = cluster.enter_context(start_ray())
                target = targets[row.scheduler]
            outcome = one_row(
                row, reference, folder=folder, here=here, seed=seed, num_steps=num_steps, target=target
            )
            yield dataclasses.replace(outcome, seconds=time.monotonic() - began)


@contextlib.contextmanager
def start_slurm() -> Iterator[ss.Slurm]:
    """Run a Slurm of two nodes on this machine, which this process's commands find."""
    if "SLURM_CONF" in os.environ:
        yield ss.Slurm()
        return
    slurm = TwoNodeSlurm()
    try:
        slurm.start()
        with mock.patch.dict(os.environ, slurm.environment):
            yield ss.Slurm()
    finally:
        slurm.stop()


@contextlib.contextmanager
def start_ray() -> Iterator[ss.Ray]:
    """Run a Ray of two nodes on this machine."""
    ray = TwoNodeRay()
    try:
        ray.start()
        yield ss.Ray(address=ray.address)
    finally:
        ray.stop()


def list_missing(row: Row) -> list[str]:
    """List the packages and programs that the row needs and that are not installed."""
    missing = [module for module in row.modules if importlib.util.find_spec(module) is None]
    needs_slurm = row.num_nodes > 1 and row.scheduler == "slurm"
    return [*missing, *([find_missing()] if needs_slurm and find_missing() else [])]


def train_single_process(row: Row, folder: Path, here: ss.Cluster | None, seed: int, num_steps: int) -> Curve:
    """Return the reference losses, from one rank of plain PyTorch."""
    run = ss.launch(
        row.plan(here), rank_training.SingleProcess(seed, num_steps), folder=folder, name=row.name
    )
    if run.wait(SECONDS_PER_ROW) != "finished":
        run.stop()
        raise ReferenceRunError(f"the single process is {run.status}: {run.reason}\n{run.error or ''}")
    return Curve.of(run.metrics(), 1)


def one_row(
    row: Row,
    reference: Curve | None,
    *,
    folder: Path,
    here: ss.Cluster | None,
    seed: int,
    num_steps: int,
    target: ss.Slurm | ss.Ray | None = None,
) -> Outcome:
    """Plan, launch on ``target``, wait, compare."""
    absent = list_missing(row)
    if absent or reference is None:
        return Outcome(row=row, verdict="not here", why=f"{', '.join(absent)} is not installed")
    try:
        plan = row.plan(here)
        refusal = why_not_trained(plan)
    except ValueError as error:
        refusal = str(error)
    stopped = "" if here and here.gpu.vendor != "cpu" else row.stopped_on_cpu
    if refusal is not None:
        return judge_refusal(row, refusal, stopped)
    if stopped:
        why = f"no longer refused on CPU ranks; the table says it is stopped by {stopped!r}"
        return Outcome(row=row, verdict="failed", why=why)
    name = row.name.replace("/", "-")
    run = ss.launch(plan, rank_training.Curve(seed, num_steps), folder=folder, name=name, on=target)
    if run.wait(SECONDS_PER_ROW) != "finished":
        run.stop()
        # Print the error: the run folder, and the ranks' logs with it, is deleted with the table.
        print(f"{row.name}: {run.error}", file=sys.stderr, flush=True)
        return Outcome(row=row, verdict="failed", why=f"the run is {run.status}: {run.reason}")
    records: Mapping[int, Mapping[str, object]] = run.engine_reports()
    return compare(row, plan, reference, Curve.of(run.metrics(), row.num_ranks), records)


def judge_refusal(row: Row, refusal: str, stopped: str) -> Outcome:
    """Judge a refusal: right if the table expects it, or if a package is missing here."""
    if stopped and stopped in refusal:
        return Outcome(row=row, verdict="refused", why=refusal)
    if not stopped and row.needs and any(word in refusal for word in row.needs):
        return Outcome(row=row, verdict="not here", why=refusal)
    return Outcome(row=row, verdict="failed", why=refusal)
