"""``python -m benchmarks``: one table of what Shardscope costs, each line beside its budget.

Training is compared in pairs of short turns, and a line shows the median of the pairwise ratios with the
interval in which it can be trusted: another load on the machine slows both sides of a pair, so the ratio
survives what seconds do not.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from statistics import median

from benchmarks import (
    many_ranks,
    many_runs,
    other_searcher,
    picker,
    planning,
    search,
    trace_analysis,
    trace_loading,
    training,
)
from benchmarks.spread import compute_spread

IMPORT_BUDGET_SECONDS = 0.3
MEMORY_BUDGET_MICROSECONDS = 200
TIME_BUDGET_MICROSECONDS = 200
SEARCH_BUDGET_SECONDS = 1.0
PLANS_BUDGET = 1_000_000
LIST_BUDGET_SECONDS = 2.0
LIST_BUDGET_BYTES = 100 * 2**20
REFRESH_BUDGET_SECONDS = 0.25
"""The time between two refreshes of a view."""
WATCH_BUDGET_BYTES = 200 * 2**20
ANALYSIS_BUDGET_SECONDS = 10.0
LOADING_BUDGET_RATIO = 5.0
REOPENING_BUDGET_SECONDS = 1.0
TRACE_BUDGET_BYTES = 500 * 10**6
FIRST_STEP_BUDGET = 1.3
TOKENS_BUDGET = 0.98


def print_row(
    name: str, value: str, budget: str = "", holds: bool | str | None = None, note: str = ""
) -> None:
    """Print one line of the table; ``holds`` is what is said of it where that is neither "ok" nor "OVER"."""
    verdict = "" if holds is None else "ok" if holds is True else holds or "OVER"
    print(f"{name:<48}{value:>12}  {budget:>9}  {verdict:<6} {note}".rstrip(), flush=True)


def measure_planner() -> None:
    """Measure importing and predicting."""
    seconds, heavy = planning.import_seconds()
    holds = seconds < IMPORT_BUDGET_SECONDS and not heavy
    note = f"brings {', '.join(heavy)}" if heavy else "no torch, pandas, plotly or transformers"
    print_row("import shardscope", f"{seconds:.3f} s", f"{IMPORT_BUDGET_SECONDS} s", holds, note)
    for name, (fresh, again) in planning.memory_microseconds().items():
        budget, holds = f"{MEMORY_BUDGET_MICROSECONDS} us", fresh < MEMORY_BUDGET_MICROSECONDS
        note = f"on a plan just made; asked again {again:.0f} us"
        if name == planning.STAGED:
            print_row(
                f"plan.memory()  {name}",
                f"{fresh:.0f} us",
                note=f"{note}; three stages, each as long as a plan",
            )
        else:
            print_row(f"plan.memory()  {name}", f"{fresh:.0f} us", budget, holds, note)
    for name, (fresh, again) in planning.step_microseconds().items():
        budget, holds = f"{TIME_BUDGET_MICROSECONDS} us", fresh < TIME_BUDGET_MICROSECONDS
        note = f"on a plan just made; asked again {again:.0f} us"
        if name == planning.STAGED:
            print_row(f"plan.step()    {name}", f"{fresh:.0f} us", note=f"{note}; three stages")
        else:
            print_row(f"plan.step()    {name}", f"{fresh:.0f} us", budget, holds, note)


def measure_search() -> None:
    """Measure the search of every plan for a large model on a large cluster."""
    found = search.measure()
    name = f"search  {search.MODEL}, 16,384 GPUs"
    note = f"{found.num_plans:,} plans, {found.num_feasible:,} fit; fresh process {found.first_seconds:.2f} s"
    budget = f"{SEARCH_BUDGET_SECONDS:g} s"
    holds = found.again_seconds < SEARCH_BUDGET_SECONDS
    print_row(name, f"{found.again_seconds:.2f} s", budget, holds, note)
    speed = found.plans_per_second
    note = f"by the processor's clock, {found.again_cpu_seconds:.2f} s"
    print_row("plans searched a second and core", f"{speed / 1e6:.2f} M", "1 M", speed >= PLANS_BUDGET, note)
    other = other_searcher.measure()
    if other is None:
        note = "not at hand: LLM_ANALYSIS_PYTHON names an interpreter that has it"
        print_row("the same asked of llm-analysis", "-", note=note)
        return
    rate = other.layouts_per_second
    answered = f"{other.num_answered:,} of {other.num_asked:,} layouts answered, one by one"
    note = f"{answered}; ours / its {speed / rate:,.0f}"
    print_row("the same asked of llm-analysis", f"{rate:,.0f}", note=note)


def measure_listing() -> None:
    """Measure the listing of thousands of runs."""
    with tempfile.TemporaryDirectory() as folder:
        first, again = many_runs.measure_listing(Path(folder))
    name = f"ss.runs() of {again.num_runs:,} runs, as a table"
    note = f"in a fresh process; the first time {first.seconds:.2f} s"
    holds = again.seconds < LIST_BUDGET_SECONDS
    print_row(name, f"{again.seconds:.2f} s", f"{LIST_BUDGET_SECONDS:g} s", holds, note)
    budget = f"{LIST_BUDGET_BYTES / 2**20:.0f} MiB"
    holds = first.resident_bytes < LIST_BUDGET_BYTES
    print_row("memory of that process", f"{first.resident_bytes / 2**20:.0f} MiB", budget, holds)


def measure_many_ranks() -> None:
    """Measure the view of a run whose ranks are a thousand and more."""
    for num_ranks in (many_ranks.NUM_RANKS, 4 * many_ranks.NUM_RANKS):
        with tempfile.TemporaryDirectory() as folder:
            found = many_ranks.measure_watching(Path(folder) / "run", num_ranks)
        name = f"view of a run of {num_ranks:,} ranks"
        note = f"of the processor, after a step of every rank; without news {found.idle_seconds:.3f} s"
        budget, holds = f"{REFRESH_BUDGET_SECONDS:g} s", found.refresh_seconds < REFRESH_BUDGET_SECONDS
        if num_ranks > many_ranks.NUM_RANKS:  # Shown: nobody has asked for a budget here.
            budget, holds = "", None
        print_row(f"{name}, a refresh", f"{found.refresh_seconds:.3f} s", budget, holds, note)
        note = f"opening it: {found.opening_seconds:.1f} s for {many_ranks.NUM_OLD_STEPS} steps"
        if budget:
            budget, holds = f"{WATCH_BUDGET_BYTES / 2**20:.0f} MiB", found.added_bytes < WATCH_BUDGET_BYTES
        print_row(f"{name}, memory", f"{found.added_bytes / 2**20:.0f} MiB", budget, holds, note)


def measure_traces() -> None:
    """Measure loading and analyzing a large trace, beside other readers of the same files."""
    with tempfile.TemporaryDirectory() as folder:
        found = trace_analysis.measure(Path(folder))
        modes: tuple[trace_loading.Mode, ...] = ("parse", "orjson", "hta", "load", "cache", "cache")
        parse, orjson, hta, load, _, again = (trace_loading.measure(Path(folder), mode) for mode in modes)
    name = f"trace of {found.num_slices / 1e6:.1f} M slices"
    for what, other, missing in (
        ("msgspec, parsed only", parse, ""),
        ("orjson, parsed only", orjson, "not installed: pip install orjson"),
        ("Holistic Trace Analysis", hta, "not installed: HTA_PYTHON names an interpreter that has it"),
    ):
        if other is None:
            print_row(f"{name}, {what}", "-", note=missing)
            continue
        note = f"of the processor, peak {other.peak_bytes / 1e6:,.0f} MB; {other.num_events:,} events"
        print_row(f"{name}, {what}", f"{other.processor_seconds:.1f} s", note=note)
    assert parse and load and again  # these need nothing that may be missing
    note = f"of the processor; {load.num_events / load.processor_seconds:,.0f} events/s"
    print_row(f"{name}, loaded", f"{load.processor_seconds:.1f} s", note=note)
    if hta is not None:
        # Both have read the same files: a faster one has more events in a second.
        ratio = hta.processor_seconds / load.processor_seconds
        print_row(f"{name}, events/s of ours / HTA", f"{ratio:.1f} x", note="by the processor's clock")
    ratio = load.processor_seconds / parse.processor_seconds
    note = f"{load.processor_seconds:.1f} s of the processor against {parse.processor_seconds:.1f} s"
    budget, holds = f"{LOADING_BUDGET_RATIO:g} x", ratio < LOADING_BUDGET_RATIO
    print_row(f"{name}, loaded / msgspec alone", f"{ratio:.1f} x", budget, holds, note)
    budget, holds = f"{TRACE_BUDGET_BYTES / 1e6:.0f} MB", load.peak_bytes < TRACE_BUDGET_BYTES
    print_row(f"{name}, peak memory", f"{load.peak_bytes / 1e6:.0f} MB", budget, holds, "all processes")
    seconds, budget = again.processor_seconds, f"{REOPENING_BUDGET_SECONDS:g} s"
    holds = seconds < REOPENING_BUDGET_SECONDS
    print_row(f"{name}, opened again", f"{seconds:.2f} s", budget, holds, "by the processor's clock")
    total = sum(found.analysis_seconds.values())
    note = ", ".join(f"{method} {seconds:.1f}" for method, seconds in found.analysis_seconds.items())
    budget, holds = f"{ANALYSIS_BUDGET_SECONDS:g} s", total < ANALYSIS_BUDGET_SECONDS
    print_row(f"{name}, analyzed", f"{total:.1f} s", budget, holds, note)


def measure_training(frameworks: list[str], num_starts: int, num_turns: int) -> None:
    """Measure launching and training, against the bare script of the same job."""
    for framework in frameworks:
        with tempfile.TemporaryDirectory() as folder:
            found = training.compare(framework, num_starts, num_turns, Path(folder))
        starts = [comparison.first_step_seconds for comparison in found]
        ratios = sorted(own / bare for own, bare in starts)
        ours, theirs = (median(seconds[side] for seconds in starts) for side in (0, 1))
        print_row(
            f"{framework}: launch to first step / bare torchrun",
            f"{median(ratios):.3f} x",
            f"{FIRST_STEP_BUDGET} x",
            median(ratios) <= FIRST_STEP_BUDGET,
            f"{ratios[0]:.3f} to {ratios[-1]:.3f} in {len(ratios)} starts; {ours:.2f} and {theirs:.2f} s",
        )
        turns = [pair for comparison in found for pair in comparison.turns]
        speed = compute_spread(bare.step_seconds / own.step_seconds for own, bare in turns)
        ours, theirs = (median(pair[side].step_seconds for pair in turns) for side in (0, 1))
        print_row(
            f"{framework}: steady tokens/s / bare torchrun",
            f"{speed.median:.3f} x",
            f"{TOKENS_BUDGET} x",
            speed.against(TOKENS_BUDGET),
            f"{speed.low:.3f} to {speed.high:.3f} of {speed.number} turns; {ours:.3f} and {theirs:.3f} s",
        )
        work = compute_spread(own.processor_seconds / bare.processor_seconds for own, bare in turns)
        ours, theirs = (median(pair[side].processor_seconds for pair in turns) for side in (0, 1))
        print_row(
            f"{framework}: processor time of a step / bare",
            f"{work.median:.3f} x",
            note=f"{work.low:.3f} to {work.high:.3f} of {work.number} turns; {ours:.3f} and {theirs:.3f} s",
        )


def measure_browser() -> None:
    """Measure from a picker to the redrawn chart, in a real JupyterLab."""
    times = picker.measure()
    budget = f"{picker.BUDGET_MS} ms"
    if times is None:
        print_row(
            "picker to redrawn chart, p90", "-", budget, None, "no Chromium here: apt-get install chromium"
        )
        return
    p90 = times["picker_to_redrawn_chart_p90_ms"]
    note = f"median {times['picker_to_redrawn_chart_median_ms']:.0f} ms of {picker.CHANGES} changes"
    print_row("picker to redrawn chart, p90", f"{p90:.0f} ms", budget, p90 < picker.BUDGET_MS, note)


def main() -> None:
    """Read the arguments and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--starts", type=int, default=3, help="starts of each framework (default 3)")
    parser.add_argument("--turns", type=int, default=20, help="turns of each side in a start (default 20)")
    names = list(training.LAYOUTS)
    parser.add_argument("--frameworks", nargs="*", default=names, choices=names)
    parts = {
        "planning": measure_planner,
        "search": measure_search,
        "runs": measure_listing,
        "ranks": measure_many_ranks,
        "traces": measure_traces,
        "browser": measure_browser,
        "training": lambda: measure_training(arguments.frameworks, arguments.starts, arguments.turns),
    }
    parser.add_argument("--only", nargs="*", default=list(parts), choices=list(parts), help="default: all")
    arguments = parser.parse_args()
    if min(arguments.starts, arguments.turns) < 1:
        parser.error("--starts and --turns must be at least 1")
    cores = os.cpu_count()
    print(
        f"{cores} cores, load {os.getloadavg()[0]:.1f}; OVER, UNDER: not within the budget; "
        "unsure: within the noise of it\n"
    )
    print_row("what", "measured", "budget")
    for name in arguments.only:
        parts[name]()


if __name__ == "__main__":
    main()
