"""``python -m benchmarks``: one table of what Shardscope costs, each line beside its budget.

Training is compared in pairs run alternately, and a line shows the median of the pairwise ratios with their
range: another load on the machine slows both sides of a pair, so the ratio survives what seconds do not.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks import other_searcher, picker, planning, search, training

IMPORT_BUDGET_SECONDS = 0.3
MEMORY_BUDGET_MICROSECONDS = 200
TIME_BUDGET_MICROSECONDS = 200
SEARCH_BUDGET_SECONDS = 1.0
PLANS_BUDGET = 1_000_000
FIRST_STEP_BUDGET = 1.3
STEP_BUDGET = 1.02


def row(name: str, value: str, budget: str = "", holds: bool | None = None, note: str = "") -> None:
    """Print one line of the table."""
    verdict = "" if holds is None else "ok" if holds else "OVER"
    print(f"{name:<48}{value:>12}  {budget:>9}  {verdict:<5} {note}".rstrip(), flush=True)


def planner() -> None:
    """Importing and predicting."""
    seconds, heavy = planning.import_seconds()
    holds = seconds < IMPORT_BUDGET_SECONDS and not heavy
    note = f"brings {', '.join(heavy)}" if heavy else "no torch, pandas, plotly or transformers"
    row("import shardscope", f"{seconds:.3f} s", f"{IMPORT_BUDGET_SECONDS} s", holds, note)
    for name, (fresh, again) in planning.memory_microseconds().items():
        budget, holds = f"{MEMORY_BUDGET_MICROSECONDS} us", fresh < MEMORY_BUDGET_MICROSECONDS
        note = f"on a plan just made; asked again {again:.0f} us"
        if name == planning.STAGED:
            row(
                f"plan.memory()  {name}",
                f"{fresh:.0f} us",
                note=f"{note}; three stages, each as long as a plan",
            )
        else:
            row(f"plan.memory()  {name}", f"{fresh:.0f} us", budget, holds, note)
    for name, (fresh, again) in planning.step_microseconds().items():
        budget, holds = f"{TIME_BUDGET_MICROSECONDS} us", fresh < TIME_BUDGET_MICROSECONDS
        note = f"on a plan just made; asked again {again:.0f} us"
        if name == planning.STAGED:
            row(f"plan.step()    {name}", f"{fresh:.0f} us", note=f"{note}; three stages")
        else:
            row(f"plan.step()    {name}", f"{fresh:.0f} us", budget, holds, note)


def searcher() -> None:
    """Every plan for a large model on a large cluster."""
    found = search.measure()
    name = f"search  {search.MODEL}, 16,384 GPUs"
    note = f"{found.num_plans:,} plans, memory and step; in a fresh process {found.first_seconds:.2f} s"
    budget = f"{SEARCH_BUDGET_SECONDS:g} s"
    holds = found.again_seconds < SEARCH_BUDGET_SECONDS
    row(name, f"{found.again_seconds:.2f} s", budget, holds, note)
    speed = found.plans_per_second
    note = f"by the processor's clock, {found.again_cpu_seconds:.2f} s"
    row("plans searched a second and core", f"{speed / 1e6:.2f} M", "1 M", speed >= PLANS_BUDGET, note)
    other = other_searcher.measure()
    if other is None:
        note = "not at hand: LLM_ANALYSIS_PYTHON names an interpreter that has it"
        row("the same asked of llm-analysis", "-", note=note)
        return
    rate = other.layouts_per_second
    answered = f"{other.num_answered:,} of {other.num_asked:,} layouts answered, one by one"
    note = f"{answered}; ours / its {speed / rate:,.0f}"
    row("the same asked of llm-analysis", f"{rate:,.0f}", note=note)


def trainer(frameworks: list[str], num_pairs: int, num_steps: int) -> None:
    """Launching and training, against the bare script of the same job."""
    measures: dict[str, tuple[Callable[[training.Timing], float], float | None]] = {
        "launch to first step": (lambda timing: timing.first_step_seconds, FIRST_STEP_BUDGET),
        "steady step": (lambda timing: timing.step_seconds, STEP_BUDGET),
        "fastest step": (lambda timing: timing.fastest_step_seconds, None),
    }
    for framework in frameworks:
        with tempfile.TemporaryDirectory() as folder:
            pairs = training.run_pairs(framework, num_pairs, num_steps, Path(folder))
        for name, (read, budget) in measures.items():
            ratios = sorted(read(own) / read(bare) for own, bare in pairs)
            ours, theirs = (median(read(pair[side]) for pair in pairs) for side in (0, 1))
            row(
                f"{framework}: {name} / bare torchrun",
                f"{median(ratios):.3f} x",
                "" if budget is None else f"{budget} x",
                None if budget is None else median(ratios) <= budget,
                f"{ratios[0]:.3f} to {ratios[-1]:.3f} in {len(ratios)} pairs; {ours:.3f} and {theirs:.3f} s",
            )


def browser() -> None:
    """From a picker to the redrawn chart, in a real JupyterLab."""
    times = picker.measure()
    budget = f"{picker.BUDGET_MS} ms"
    if times is None:
        row("picker to redrawn chart, p90", "-", budget, None, "no Chromium here: apt-get install chromium")
        return
    p90 = times["picker_to_redrawn_chart_p90_ms"]
    note = f"median {times['picker_to_redrawn_chart_median_ms']:.0f} ms of {picker.CHANGES} changes"
    row("picker to redrawn chart, p90", f"{p90:.0f} ms", budget, p90 < picker.BUDGET_MS, note)


def main() -> None:
    """Read the arguments and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--pairs", type=int, default=3, help="pairs of runs for each framework (default 3)")
    parser.add_argument("--steps", type=int, default=25, help="steps in each run (default 25)")
    names = list(training.LAYOUTS)
    parser.add_argument("--frameworks", nargs="*", default=names, choices=names)
    arguments = parser.parse_args()
    if arguments.pairs < 1 or arguments.steps <= training.WARM_STEPS:
        parser.error(f"--pairs must be at least 1 and --steps more than {training.WARM_STEPS}")
    cores = os.cpu_count()
    print(f"{cores} cores, load {os.getloadavg()[0]:.1f}; OVER: more than the budget\n")
    row("what", "measured", "budget")
    planner()
    searcher()
    browser()
    trainer(arguments.frameworks, arguments.pairs, arguments.steps)


if __name__ == "__main__":
    main()
