"""``python -m tests.cluster.soak [--launches 50] [--seed N]``: launches with faults on a real Slurm
and a real Ray.

Afterwards each launch must have the right status and have left no job, actor, process, open port or pickled
task. Exits with 1 otherwise. The report goes to ``artifacts/soak_cluster``, with the folders of the
launches that failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from tests.cluster.soak.faults import FAULTS, Clusters, Fault, Launched, launch_choice
from tests.cluster.two_node_ray import TwoNodeRay
from tests.cluster.two_node_slurm import INSTALL, TwoNodeSlurm, find_missing
from tests.soak.residue import MARK, find_marked_processes, find_residue_in_folder

from shardscope.records.folder import FINAL
from shardscope.records.json_files import read_json
from shardscope.runs.run import Run

END_SECONDS = 240.0
"""Maximum time from the fault to the final status: a requeued job starts Python again, on a busy machine."""
PATIENCE_SECONDS = 60.0
"""Maximum time from the final status until nothing is left: the watcher of a kernel looks every 2 s."""
CHECKED = (
    "Checked after each launch: the status and its reason, that `squeue` is empty and Ray has no actor, no "
    "placement group and no CPU in use, that no process of the launch is left (by an environment mark), that "
    "nothing listens on the rendezvous port, and that the run folder has no pickled task and no partly "
    "written file. Seconds are from the fault to the moment when nothing is left; without a fault from the "
    "launch."
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of one launch."""

    number: int
    fault: Fault
    ended: str
    """``status: reason``."""
    seconds: float
    wrong: Sequence[str]


def run_launches(
    chosen: Sequence[tuple[int, Fault]], seed: int, clusters: Clusters, folder: Path, keep: Path
) -> Iterator[Outcome]:
    """Run one launch after another; copy the folders of those that leave something to ``keep``."""
    for number, fault in chosen:
        place = folder / f"launch-{number:03}"
        place.mkdir()
        mark = os.environ[MARK] = f"{os.getpid()}/{number}"
        outcome = _run_launch(number, fault, seed, clusters, place)
        os.environ.pop(MARK)
        if outcome.wrong:
            shutil.copytree(place, keep / place.name, dirs_exist_ok=True, symlinks=True)
            clusters.clear()
            for process in find_marked_processes(mark):
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        shutil.rmtree(place, ignore_errors=True)
        yield outcome


def _run_launch(number: int, fault: Fault, seed: int, clusters: Clusters, place: Path) -> Outcome:
    wrong: list[str] = []
    rng = random.Random(f"{seed}/{number}")
    launched = _launch(number, fault, seed, clusters, place)
    run = launched.run
    try:
        fault.inject(launched, rng)
        deadline = time.monotonic() + END_SECONDS
        while run.status not in FINAL and time.monotonic() < deadline:
            time.sleep(0.2)
    except AssertionError as error:
        wrong.append(f"the fault was not injected: {error}")
    if launched.kernel is not None:
        launched.kernel.kill()
        launched.kernel.wait()
    ended = f"{run.status}: {run.reason}"
    if not re.match(fault.expected, ended):
        wrong.append(f"it says {ended!r}, not {fault.expected!r}")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (left := _find_residue(run, clusters)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return Outcome(
        number=number,
        fault=fault,
        ended=ended,
        seconds=time.monotonic() - launched.clock_started,
        wrong=[*wrong, *left],
    )


def _launch(number: int, fault: Fault, seed: int, clusters: Clusters, place: Path) -> Launched:
    if not fault.has_kernel:
        return Launched(launch_choice(fault, random.Random(f"{seed}/{number}/task"), place), clusters)
    index = FAULTS.index(fault)
    code = (
        "import random, time; from pathlib import Path;"
        "from tests.cluster.soak.faults import FAULTS, launch_choice;"
        f"run = launch_choice(FAULTS[{index}], random.Random('{seed}/{number}/task'), Path({str(place)!r}));"
        "print(run.folder, flush=True); time.sleep(10_000)"
    )
    kernel = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert kernel.stdout is not None
    with kernel.stdout:
        where = kernel.stdout.readline().strip()
    return Launched(Run.attach(where), clusters, kernel)


def _find_residue(run: Run, clusters: Clusters) -> list[str]:
    left = clusters.list_left()
    for process in find_marked_processes(os.environ[MARK]):
        with contextlib.suppress(psutil.Error, ProcessLookupError):  # It may have ended since it was found.
            left.append(f"process {process.pid}: {' '.join(process.cmdline())[-200:]}")
    # Not whether the port can be bound: after a SIGKILL the kernel keeps it for a minute (TIME_WAIT).
    ports = {(read_json(path) or {}).get("port") for path in run.folder.rglob("rendezvous.json")}
    left += [
        f"process {entry.pid} listens on port {entry.laddr.port}"
        for entry in psutil.net_connections("tcp")
        if entry.status == psutil.CONN_LISTEN and entry.laddr.port in ports
    ]
    return left + find_residue_in_folder(run.folder)


@contextlib.contextmanager
def start_clusters() -> Iterator[Clusters]:
    """Start a Slurm and a Ray of two nodes each, whose commands and clients find them by the environment."""
    clusters = Clusters(TwoNodeSlurm(), TwoNodeRay())
    try:
        clusters.slurm.start()
        clusters.ray.start()
        os.environ |= {**clusters.slurm.environment, "RAY_ADDRESS": clusters.ray.address}
        yield clusters
    finally:
        left = [*clusters.slurm.stop(), *clusters.ray.stop()]
    if left:
        raise RuntimeError(f"left when the clusters ended: {left}")


def draw_faults(seed: int, launches: int, faults: Sequence[Fault]) -> list[tuple[int, Fault]]:
    """Return numbered faults in random order, each once before any is repeated."""
    shuffle, deck, chosen = random.Random(seed), [], []
    for number in range(1, launches + 1):
        deck = deck or shuffle.sample(list(faults), len(faults))
        chosen.append((number, deck.pop()))
    return chosen


def format_report(outcomes: Sequence[Outcome], *, seed: int, seconds: float) -> str:
    """Return the report in Markdown."""
    rows = []
    for fault in FAULTS:
        those = [outcome for outcome in outcomes if outcome.fault is fault]
        if those:
            ends = Counter(outcome.ended.partition(":")[0] for outcome in those)
            bad = sum(bool(outcome.wrong) for outcome in those)
            statuses = ", ".join(f"{status} {count}" for status, count in ends.most_common())
            times = [outcome.seconds for outcome in those]
            ends_text = statuses + f"; **{bad} wrong**" * bool(bad)
            rows.append(
                f"| {fault.on} | {fault.name} | {len(those)} | {ends_text} | "
                f"{statistics.median(times):.0f} | {max(times):.0f} |"
            )
    wrong = [
        f"- {outcome.number} ({outcome.fault.on}, {outcome.fault.name}): {text}"
        for outcome in outcomes
        for text in outcome.wrong
    ]
    bad = len({outcome.number for outcome in outcomes if outcome.wrong})
    verdict = f"{bad} left something or said something wrong" if bad else "left behind: nothing"
    lines = [
        f"# {len(outcomes)} launches on Slurm and Ray with faults: {verdict}",
        "",
        f"`python -m tests.cluster.soak --launches {len(outcomes)} --seed {seed}`, {seconds / 60:.0f} min on "
        f"{os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}. Two nodes "
        "of a real Slurm and two of a real Ray on one machine, CPU ranks over gloo.",
        "",
        CHECKED,
        "",
        "| on | fault | launches | how they ended | median, s | worst, s |\n|---|---|---:|---|---:|---:|",
        *rows,
        *(["", "## Left or wrong", "", *wrong] if wrong else []),
    ]
    return "\n".join([*lines, ""])


def main(arguments: list[str] | None = None) -> int:
    """Run the soak. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.soak", description=__doc__)
    parser.add_argument("--launches", type=int, default=50, help="how many (default 50)")
    parser.add_argument("--seed", type=int, default=0, help="seed of faults and times (default 0)")
    parser.add_argument("--only", type=int, metavar="N", help="only the N-th launch of that seed")
    parser.add_argument("--faults", nargs="+", metavar="WORD", help="only faults with one of these words")
    parser.add_argument("--report", type=Path, default=Path("artifacts/soak_cluster"), help="its folder")
    options = parser.parse_args(arguments)
    missing = find_missing()
    if missing:
        parser.error(f"Slurm is not installed ({missing} missing): {INSTALL}")
    faults = [
        fault
        for fault in FAULTS
        if not options.faults or any(word in f"{fault.on}: {fault.name}" for word in options.faults)
    ]
    if not faults or options.launches < 1:
        parser.error(
            f"--launches is 1 or more; faults: {', '.join(f'{fault.on}: {fault.name}' for fault in FAULTS)}"
        )
    chosen = draw_faults(options.seed, options.only or options.launches, faults)
    chosen = chosen[-1:] if options.only else chosen
    options.report.mkdir(parents=True, exist_ok=True)
    began, outcomes = time.monotonic(), []
    with (
        start_clusters() as clusters,
        tempfile.TemporaryDirectory(prefix="shardscope-soak-") as folder,
    ):
        for outcome in run_launches(chosen, options.seed, clusters, Path(folder), options.report.absolute()):
            outcomes.append(outcome)
            wrong = "".join(f"\n    LEFT OR WRONG: {text}" for text in outcome.wrong)
            name = f"{outcome.fault.on}: {outcome.fault.name}"
            print(
                f"{outcome.number:3} {name} · {outcome.ended[:120]} · {outcome.seconds:.0f} s{wrong}",
                flush=True,
            )
            # After each launch: the report is worth having if a later one is interrupted.
            text = format_report(outcomes, seed=options.seed, seconds=time.monotonic() - began)
            (options.report / "report.md").write_text(text, encoding="utf-8")
    print(f"\n{text}\nwrote {options.report / 'report.md'}")
    return int(any(outcome.wrong for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
