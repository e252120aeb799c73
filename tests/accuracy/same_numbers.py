"""Every predicted number of some thousands of plans, stored to the last bit: refactoring changes none.

``python -m tests.accuracy.same_numbers --check`` (``make same-numbers``) computes them again, prints what
differs and exits with 1 if anything does. ``--write`` stores today's numbers of the same plans: for a change
that is meant to change numbers. ``--draw`` draws the plans anew (:mod:`frozen_plans`), then writes.

Stored in ``tests/fixtures/same_numbers``, gzipped lines of JSON: ``plans.jsonl.gz`` has the plans and the
questions of ``search`` and ``recommend``, ``numbers.jsonl.gz`` one line of answers for each. CPU ranks take
their speeds from the calibration in ``tests/fixtures/formats``, whatever was measured on this machine.

A number that stands in a report is stored as it is. Reports have more of them than fit into git: of each
pipeline stage, each kind of collective and each column of a ranking there is a fingerprint ("#" and 12 digits
of a SHA-256), which tells that they differ and where, not by how much.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import shardscope as ss
from shardscope.machine.host import count_cores
from shardscope.memory.report import PHASES, StageMemory
from shardscope.timing.calibration.files import FOLDER_VARIABLE, get_machine_name
from shardscope.timing.calibration.store import MachineRecord, store_calibration

FIXTURES = Path(__file__).parents[1] / "fixtures"
PLANS = FIXTURES / "same_numbers" / "plans.jsonl.gz"
NUMBERS = FIXTURES / "same_numbers" / "numbers.jsonl.gz"
CALIBRATION = FIXTURES / "formats" / "example-host--cpu.json"
SHOWN = 20
"""Differences that are printed; the others are counted."""
FINDINGS_EVERY, REPAIRS_EVERY = 30, 15
"""Of so many plans, one's findings are stored, and one's repairs; most fit and need none."""
ROUNDING = 1e-12
"""Relative difference that is accepted where ``sum`` rounds otherwise than where the numbers were stored."""

Row = dict[str, Any]


# --- What is stored of each answer -------------------------------------------------------------------------


def plan_numbers(plan: ss.Plan) -> Row:
    """Return the numbers of ``plan.memory()`` and ``plan.step()``; of a refusal, the field."""
    return {
        "memory": _or_refusal(lambda: _predict_memory(plan)),
        "step": _or_refusal(lambda: _predict_step(plan)),
    }


def _predict_memory(plan: ss.Plan) -> Row:
    report = plan.memory()
    fields = ("verdict", "peak_phase", "peak_bytes", "low_bytes", "high_bytes", "usable_bytes", "host_bytes")
    return {
        **{name: getattr(report, name) for name in fields},
        "nvme_bytes": report.nvme_bytes,
        "peak": _not_zero(report.components),
        "at": {phase: _not_zero(report.at(phase)) for phase in PHASES},
        "stages": [_fingerprint_stage(stage) for stage in report.by_stage],
    }


def _fingerprint_stage(stage: StageMemory) -> str:
    moments = [(one.phase, one.fraction, one.components) for one in stage.phases]
    return compute_fingerprint(
        [
            [stage.stage, stage.num_layers, stage.host_bytes, stage.nvme_bytes],
            [(phase, fraction, dict(parts)) for phase, fraction, parts in moments],
        ]
    )


def _predict_step(plan: ss.Plan) -> Row:
    report = plan.step()
    fields = (
        "seconds",
        "num_tokens",
        "model_flops",
        "model_flops_full_attention",
        "hardware_flops",
        "tokens_per_second_per_gpu",
        "tflops_per_gpu",
        "tflops_per_gpu_full_attention",
        "mfu",
        "cost_per_token",
        "joules_per_token",
    )
    return {
        **{name: getattr(report, name) for name in fields},
        "parts": _not_zero(report.parts),
        "hidden": _not_zero(report.hidden),
        "communication": [
            f"{one.part} {one.collective} {compute_fingerprint(list(one))}" for one in report.communication
        ],
    }


def search_numbers(arch: ss.Architecture, cluster: ss.Cluster, recipe: ss.Recipe) -> Row:
    """Return the best plan of a search, how many there are, and a fingerprint of each column of its frame."""
    ranking = ss.search(arch, cluster, recipe)
    frame = ranking.to_frame()
    # "layout" is a sentence for the reader.
    columns = {name: compute_fingerprint(frame[name].tolist()) for name in frame.columns if name != "layout"}
    alternative = ranking.alternative
    return {
        "best": ranking.best.to_dict() if ranking.num_feasible else None,
        "num_evaluated": ranking.num_evaluated,
        "num_feasible": ranking.num_feasible,
        "refused": sorted(ranking.refused),
        "rows": compute_fingerprint(frame.index.tolist()),
        "columns": columns,
        "instead": alternative.best.to_dict()
        if alternative is not None and alternative.num_feasible
        else None,
    }


def advice_numbers(arch: ss.Architecture, cluster: ss.Cluster, recipe: ss.Recipe) -> Row:
    """Return the plan that ``recommend`` advises, its alternatives, and which questions decided."""
    advice = ss.recommend(arch, cluster, recipe)
    return {
        "plan": advice.plan.to_dict() if advice.plan else None,
        "alternatives": [plan.to_dict() for plan, _ in advice.alternatives],
        "taken": [turn.taken for turn in advice.path],
    }


def finding_numbers(plan: ss.Plan) -> Row:
    """Return the names of a plan's findings in order, and each one's severity, number and changed plan."""
    findings = plan.findings()
    return {
        "names": [one.name for one in findings],
        **{
            one.name: [one.severity, one.number, one.plan and compute_fingerprint(one.plan.to_dict())]
            for one in findings
        },
    }


def repair_numbers(plan: ss.Plan) -> list[Row]:
    """Return the changed plan of each repair, the bytes that it saves and the seconds that it costs."""
    return [
        {
            "plan": compute_fingerprint(one.plan.to_dict()),
            "bytes_won": one.bytes_won,
            "seconds_lost": _format_number(one.seconds_lost),
        }
        for one in plan.repairs()
    ]


def compute_fingerprint(value: Any) -> str:
    """Return a short hash of the exact text of a nested value."""
    return "#" + sha256(_encode(value).encode()).hexdigest()[:12]


def _or_refusal(compute: Callable[[], Row]) -> Row:
    try:
        return compute()
    except ValueError as refusal:
        # Not its words: those may be improved.
        return {"refused": getattr(refusal, "field", type(refusal).__name__)}


def _not_zero(parts: Mapping[Any, Any]) -> Row:
    return {name: value for name, value in parts.items() if value}


def _format_number(value: float) -> float | str:
    return value if value == value else "nan"  # JSON has no NaN.


def _encode(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), default=lambda one: one.item())


# --- The stored files --------------------------------------------------------------------------------------


def read_lines(path: Path) -> list[Any]:
    """Return the JSON of each line of a gzipped file."""
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def write_lines(path: Path, rows: Iterable[Any]) -> None:
    """Write rows as gzipped lines of JSON; the same rows give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(_encode(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))


def store_plans() -> None:
    """Draw plans and questions and store them; each architecture and cluster once."""
    from tests.accuracy.frozen_plans import draw_plans, draw_questions

    plans = [plan.to_dict() for plan in draw_plans()]
    questions = [
        {
            "architecture": one.architecture.to_dict(),
            "cluster": one.cluster.to_dict(),
            "recipe": one.recipe.to_dict(),
        }
        for one in draw_questions()
    ]
    shared: dict[str, dict[str, int]] = {"architecture": {}, "cluster": {}}
    for row in (*plans, *questions):
        for noun, known in shared.items():
            row[noun] = known.setdefault(_encode(row[noun]), len(known))
    tables = {noun: [json.loads(text) for text in known] for noun, known in shared.items()}
    write_lines(PLANS, [tables, questions, *plans])


class Frozen:
    """The stored plans and questions, made again as nouns."""

    def __init__(self) -> None:
        tables, questions, *plans = read_lines(PLANS)
        self._architectures = [ss.Architecture.from_dict(data) for data in tables["architecture"]]
        self._clusters = [ss.Cluster.from_dict(data) for data in tables["cluster"]]
        self._plans, self._questions = plans, questions

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def num_questions(self) -> int:
        """Questions for ``search`` and ``recommend``."""
        return len(self._questions)

    def plan(self, index: int) -> ss.Plan:
        """Return a stored plan."""
        row = self._plans[index]
        return ss.Plan(*self._nouns(row), ss.Layout.from_dict(row["layout"]))

    def question(self, index: int) -> tuple[ss.Architecture, ss.Cluster, ss.Recipe]:
        """Return a stored question."""
        return self._nouns(self._questions[index])

    def _nouns(self, row: Row) -> tuple[ss.Architecture, ss.Cluster, ss.Recipe]:
        recipe = ss.Recipe.from_dict(row["recipe"])
        return self._architectures[row["architecture"]], self._clusters[row["cluster"]], recipe

    def jobs(self) -> list[tuple[str, int]]:
        """Return what is computed, (kind, index) each: the longest first, for processes share them."""
        questions = [(kind, i) for kind in ("search", "advice") for i in range(self.num_questions)]
        every = range(len(self))
        return [
            *questions,
            *(("repairs", i) for i in every if i % REPAIRS_EVERY == 0),
            *(("findings", i) for i in every if i % FINDINGS_EVERY == 0),
            *(("plan", i) for i in every),
        ]

    def name(self, kind: str, index: int) -> str:
        """Return what a difference is printed under."""
        if kind in ("search", "advice"):
            arch, cluster, recipe = self.question(index)
            return f"{kind} {index}: {arch.name} on {cluster}, {recipe.method}, {recipe.precision}"
        try:
            plan = self.plan(index)
        except ValueError as refusal:
            return f"{kind} {index}: {refusal}"
        recipe = plan.recipe
        return (
            f"{kind} {index}: {plan.architecture.name} on {plan.cluster}, {plan.layout.description}, "
            f"{recipe.method}, {recipe.precision}, recompute {recipe.recompute}"
        )

    def answer(self, kind: str, index: int) -> Any:
        """Compute the numbers of one job."""
        if kind == "plan":
            # A later version may refuse a stored plan when it is made.
            return _or_refusal(lambda: plan_numbers(self.plan(index)))
        if kind in ("search", "advice"):
            compute = {"search": search_numbers, "advice": advice_numbers}[kind]
            return _or_refusal(lambda: compute(*self.question(index)))
        if kind == "findings":
            return _or_refusal(lambda: finding_numbers(self.plan(index)))
        return _or_refusal(lambda: {"list": repair_numbers(self.plan(index))})


def compute(jobs: Sequence[tuple[str, int]]) -> Iterator[Any]:
    """Yield the numbers of each job as JSON holds them, from as many processes as there are cores."""
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(_compute_answer, jobs, chunksize=8)


_frozen: Frozen | None = None


def _compute_answer(job: tuple[str, int]) -> Any:
    global _frozen
    _frozen = _frozen or Frozen()
    return as_stored(_frozen.answer(*job))


def as_stored(answer: Any) -> Any:
    """Return an answer as JSON gives it back."""
    return json.loads(_encode(answer))


def use_stored_calibration(folder: Path) -> None:
    """Keep the stored calibration in ``folder`` as that of two CPU ranks of this machine."""
    record = MachineRecord.from_json(CALIBRATION.read_text(encoding="utf-8"))
    store_calibration(
        replace(record.calibrations[-1], machine=get_machine_name(), num_cores=count_cores()), folder
    )


# --- Comparing ---------------------------------------------------------------------------------------------


def sums_are_compensated() -> bool:
    """Return whether ``sum`` of floats rounds once, as from Python 3.12 on, and not at each addition."""
    return sum([0.1] * 10) == 1.0


def find_differences(before: Any, after: Any, is_exact: bool = True, path: str = "") -> Iterator[str]:
    """Yield a line for each place where two nested answers differ: its path, what it was, what it is."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in {**before, **after}:
            inside = f"{path}.{key}" if path else str(key)
            yield from find_differences(before.get(key), after.get(key), is_exact, inside)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from find_differences(one, other, is_exact, f"{path}[{index}]")
    elif not _are_same(before, after, is_exact):
        yield f"{path}: {_shorten(before)} before, {_shorten(after)} now"


def _are_same(before: Any, after: Any, is_exact: bool) -> bool:
    if is_exact or type(before) is not type(after):
        return _encode(before) == _encode(after)
    if isinstance(before, float):
        return abs(before - after) <= ROUNDING * abs(before)
    if isinstance(before, str) and "#" in before:
        return before.split("#")[0] == after.split("#")[0]
    return bool(before == after)


def _shorten(value: Any) -> str:
    text = "nothing" if value is None else _encode(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def check(jobs: Sequence[tuple[str, int]], stored: Sequence[Any], answers: Iterable[Any]) -> list[str]:
    """Return what differs, one text for each job whose answer is another than the stored one."""
    header, *before = stored
    is_exact = header["sums_are_compensated"] == sums_are_compensated()
    stored_answers = {(kind, index): answer for kind, index, answer in before}
    frozen = Frozen()
    results = []
    for job, answer in zip(jobs, answers, strict=True):
        if lines := list(find_differences(stored_answers[job], answer, is_exact)):
            results.append("\n    ".join([frozen.name(*job), *lines[:SHOWN]]))
    return results


def main() -> int:
    """Draw, write or check."""
    parser = argparse.ArgumentParser(prog="python -m tests.accuracy.same_numbers", description=__doc__)
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--check", action="store_true", help="compare with what is stored")
    chosen.add_argument("--write", action="store_true", help="store today's numbers of the stored plans")
    chosen.add_argument("--draw", action="store_true", help="draw the plans anew, then write")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER_VARIABLE] = folder
        use_stored_calibration(Path(folder))
        if arguments.draw:
            store_plans()
        jobs = Frozen().jobs()
        if not arguments.check:
            header = {"sums_are_compensated": sums_are_compensated()}
            rows = [[*job, answer] for job, answer in zip(jobs, compute(jobs), strict=True)]
            write_lines(NUMBERS, [header, *rows])
            print(f"Stored {len(jobs):,} answers.")
            return 0
        found = check(jobs, read_lines(NUMBERS), compute(jobs))
    for text in found[:SHOWN]:
        print(text)
    if found:
        print(
            f"{len(found):,} of {len(jobs):,} answers differ; the first {min(SHOWN, len(found))} are above."
        )
        return 1
    print(f"All {len(jobs):,} answers are the same.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
