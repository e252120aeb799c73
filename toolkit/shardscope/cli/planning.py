"""Commands that need no torch: ``plan``, ``search`` and ``export``."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from shardscope.cli.output import find_output_file, print_fields, print_json, print_table, print_text
from shardscope.cli.plan_options import (
    LAYOUTS,
    PLAN_FILE,
    add_plan_options,
    build_layout,
    read_parts,
    read_plan,
)
from shardscope.memory.overheads.libraries import TIGHT_PERCENT
from shardscope.records.json_files import partial_file

if TYPE_CHECKING:
    from shardscope.core.finding import Finding
    from shardscope.core.plan import Plan
    from shardscope.memory.report import MemoryReport
    from shardscope.planner.search.ranking import Ranking
    from shardscope.timing.report import StepReport

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

MAX_NAME_BYTES = 255
"""Longest file name of Linux's file systems."""
MEMORY_FIELDS = (
    *("verdict", "fits", "peak_phase", "peak_bytes", "low_bytes", "high_bytes", "usable_bytes"),
    *("host_bytes", "nvme_bytes", "components"),
)
STEP_FIELDS = (*("seconds", "tokens_per_second_per_gpu", "tflops_per_gpu", "mfu", "cost_per_token", "parts"),)
DEGREES = {"data_parallel": "dp", "tp": "tp", "pp": "pp", "vpp": "vpp", "cp": "cp", "ep": "ep"}


def add_command(commands: Commands, name: str, summary: str, examples: str) -> argparse.ArgumentParser:
    """Return the parser of a command, with ``--json``."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    # For the error message of an unknown option (``main.py``).
    parser.set_defaults(parser=parser)
    return parser


def add_commands(commands: Commands) -> None:
    """Add the commands of this module."""
    parser = add_command(
        commands,
        "plan",
        "predict memory and step time of a plan, and check it",
        "  shardscope plan --model llama-3.1-8b --cluster 8xh100-sxm-80gb --layout fsdp2\n"
        "  shardscope plan --model 7b --layout zero stage=3 --recipe seq_len=8192 --out plan.json\n"
        "  shardscope plan plan.json --cluster 2x8xh100-sxm-80gb --json",
    )
    add_plan_options(parser)
    parser.add_argument(
        "--out", metavar="FILE", help="write the plan to this file, or as plan.json into this folder"
    )
    parser.set_defaults(run=show_plan)

    parser = add_command(
        commands,
        "search",
        "rank all layouts by predicted speed",
        "  shardscope search --model llama-3.1-70b --cluster 4x8xh100-sxm-80gb\n"
        "  shardscope search --model 7b --cluster 8xa100-sxm-80gb --frameworks fsdp2 zero --out plan.json",
    )
    add_plan_options(parser, with_layout=False)
    parser.add_argument("--frameworks", nargs="+", metavar="NAME", help=f"among {LAYOUTS}; default: all")
    parser.add_argument(
        "--limit", type=_read_limit, default=10, metavar="N", help="rows to print; default: 10"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="write the best plan to this file, or as plan.json into this folder: the first one that is not "
        "tight, or the first of all if that is over a third faster",
    )
    parser.set_defaults(run=search_plans)

    parser = add_command(
        commands,
        "export",
        "write a plan as files of other tools, and as a script without Shardscope",
        "  shardscope export plan.json --folder exported\n  cd exported && sbatch job.sbatch --steps 100",
    )
    add_plan_options(parser)
    parser.add_argument("--folder", default="exported", help="default: exported")
    parser.set_defaults(run=export_plan)


def show_plan(options: argparse.Namespace) -> int:
    """Print a plan's predictions and findings."""
    plan, out = read_plan(options), find_output_file("--out", options.out, PLAN_FILE)
    memory, findings = plan.memory(), plan.findings()
    try:
        step, why_no_step = plan.step(), None
    except ValueError as error:  # A figure of the GPU is not known.
        step, why_no_step = None, str(error)
    _write_plan(plan, out)
    if options.json:
        print_json(
            {
                "plan": json.loads(plan.to_json()),
                "memory": {name: getattr(memory, name) for name in MEMORY_FIELDS},
                "step": step and {name: getattr(step, name) for name in STEP_FIELDS},
                "why_no_step": why_no_step,
                "findings": [
                    {"name": one.name, "severity": one.severity, "why": one.why, "change": one.change}
                    for one in findings
                ],
            }
        )
    else:
        _print_plan(plan, memory, step, why_no_step, findings)
    return 0


def _print_plan(
    plan: Plan,
    memory: MemoryReport,
    step: StepReport | None,
    why_no_step: str | None,
    findings: list[Finding],
) -> None:
    from shardscope.core.cluster import name_device
    from shardscope.core.number_format import format_gib, format_number, format_rate, format_share
    from shardscope.timing.report import format_part

    low, high = format_gib(memory.low_bytes), format_gib(memory.high_bytes)
    peak = (
        f"peak {format_gib(memory.peak_bytes)} of {format_gib(memory.usable_bytes)} GiB on the fullest rank"
    )
    phase = "at rest" if memory.peak_phase == "rest" else f"in {memory.peak_phase}"
    mfu = f", MFU {format_share(step.mfu)}" if step and step.mfu is not None else ""
    print_fields(
        {
            "plan": f"{plan.architecture.name} on {plan.cluster}, {plan.layout.full_description}",
            "memory": f"{memory.verdict}: {peak} ({low} to {high}), {phase}",
            "step": why_no_step
            if step is None
            else f"{format_number(step.seconds)} s, "
            f"{format_rate(step.tokens_per_second_per_gpu)} tokens/s per {name_device(plan.cluster)}{mfu}",
        }
    )
    print()
    rows = [(name, format_gib(value)) for name, value in memory.components.items() if value]
    print_table(("component", "GiB"), rows)
    if step:
        print()
        parts = [(format_part(name), value) for name, value in step.parts.items() if value]
        print_table(("part of a step", "seconds"), parts)
    for finding in findings:
        print()
        print_text(f"{finding.severity}: {finding.why}", "  ")
        print_text(f"  fix: {finding.change}", "  ")


def _read_limit(text: str) -> int:
    if not text.isdecimal() or text == "0":
        raise argparse.ArgumentTypeError(f"--limit is {text}; allowed: a whole number from 1")
    return int(text)


def search_plans(options: argparse.Namespace) -> int:
    """Print the best plans."""
    import shardscope as ss

    architecture, cluster, recipe = read_parts(options)
    # Before the search, which may take minutes.
    out = find_output_file("--out", options.out, PLAN_FILE)
    names = options.frameworks
    if names:
        # ss.search takes frameworks, of which a layout may have another name.
        names = [build_layout("--frameworks", name).framework for name in names]
    ranking = ss.search(architecture, cluster, recipe, names)
    number = _choose_plan(ranking)
    best = ranking.plan(int(ranking.order[number])) if ranking.num_feasible else None
    if out:
        _write_plan(best or ranking.best, out)  # Raises ValueError if none fits.
    if options.json:
        numbers = {name: getattr(ranking, name) for name in ("num_evaluated", "num_feasible", "seconds")}
        rows = ranking.to_frame(options.limit).to_dict("records")
        print_json({**numbers, "best": best and json.loads(best.to_json()), "plans": rows})
        return 0
    _print_ranking(ranking, options.limit, number)
    if best is not None:
        choice = _explain_choice(best, number)
        if options.out:
            print_text(f"{options.out} has plan {number + 1}{choice}.")
        elif choice:
            print_text(f"The best is plan {number + 1}{choice}.")
    return 0


def _choose_plan(ranking: Ranking) -> int:
    """Return the place in the order of the plan to write: the first that is not tight, as ``ss.recommend``
    prefers, unless the first of all is faster by more than recomputation could cost (``SAFE``)."""
    from shardscope.planner.advice.plan_evaluator import SAFE

    rows = ranking.order
    if not len(rows):
        return 0
    easy = ~ranking.is_tight[rows]
    # A plan that needs host memory of unknown size is no safer than a tight one.
    easy &= ranking.is_room_known[rows]
    easy &= ranking.get_step_seconds(rows) <= SAFE * ranking.get_step_seconds(rows[:1])
    return int(easy.argmax())  # 0 if there is none.


def _explain_choice(best: Plan, number: int) -> str:
    if number:
        return ", the first that is not tight: some runs of tight plans ran out of memory"
    if best.memory().is_tight:
        return "; it is tight: some such runs ran out of memory, and no other plan is nearly as fast"
    return ""


def _print_ranking(ranking: Ranking, limit: int, chosen: int) -> None:
    from shardscope.core.number_format import format_gib
    from shardscope.planner.search.nearest_misses import explain_no_plan
    from shardscope.planner.search.ranking import AS_FAST

    if not ranking.num_feasible:
        print_text(explain_no_plan(ranking))
        return
    print(f"{ranking.num_feasible:,} of {ranking.num_evaluated:,} plans fit {ranking.cluster}")
    shown = list(enumerate(ranking.to_frame(max(limit, chosen + 1)).to_dict("records"), 1))
    # The chosen plan has a row however many tight ones come before it.
    shown = shown[:limit] + shown[max(limit, chosen) : chosen + 1]
    rows = [
        (
            number,
            row["layout"],
            " ".join(f"{short}{row[name]}" for name, short in DEGREES.items() if row[name] > 1) or "-",
            row["recompute"],
            row["micro_batch_size"],
            row["tokens_per_second_per_gpu"],
            row["step_seconds"],
            format_gib(row["peak_bytes"])
            + _mark_memory(row["peak_bytes"], ranking.cluster.usable_bytes_per_gpu, fits=row["feasible"]),
        )
        for number, row in shown
    ]
    if ranking.num_feasible > 1:
        near = f"{100 * (AS_FAST - 1):.0f} %"
        print(f"Order: plans within {near} of the fastest by fewest settings, the others by speed.")
    if ranking.unknown_memory:
        print_text(ranking.unknown_memory)
    print()
    head = ("", "layout", "degrees", "recompute", "batch", "tok/s/GPU", "step s", "GiB")
    print_table(head, rows, wrap=("layout", "degrees"))


def _mark_memory(peak_bytes: int, usable_bytes: int, *, fits: bool) -> str:
    if not fits:
        return " no fit"
    return " tight" if 100 * peak_bytes > TIGHT_PERCENT * usable_bytes else ""


def export_plan(options: argparse.Namespace) -> int:
    """Export a plan and print its files."""
    paths = read_plan(options).export(options.folder)
    if options.json:
        print_json({"folder": Path(options.folder).absolute(), "files": [path.name for path in paths]})
        return 0
    for path in paths:
        print(path)
    print(f"{paths[-1].name} says what each of them is, and how it is started.")
    return 0


def _write_plan(plan: Plan, path: Path | None) -> None:
    """Replace ``path`` in one step, so that readers and a full disk never leave half a plan."""
    if path is None:
        return
    text, partial = plan.to_json() + "\n", partial_file(path)
    if not _may_be_replaced(path, partial):
        path.write_text(text, encoding="utf-8")
        return
    try:
        partial.write_text(text, encoding="utf-8")
        if path.exists():
            shutil.copymode(path, partial)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _may_be_replaced(path: Path, partial: Path) -> bool:
    """Return whether a new file can take the place of ``path`` without a difference to anybody.

    Not of a link, a device such as /dev/stdout, a file with several names, another user's or group's, or one
    that is read-only.
    """
    if len(os.fsencode(partial.name)) > MAX_NAME_BYTES or not os.access(path.parent, os.W_OK):
        return False
    try:
        status = path.lstat()
    except FileNotFoundError:
        return True
    # Windows has no owners.
    is_own = not hasattr(os, "geteuid") or (status.st_uid, status.st_gid) == (os.geteuid(), os.getegid())
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and is_own and os.access(path, os.W_OK)
