"""What launching and training through Shardscope costs against torchrun of the plan's exported train.py.

Both sides are started, and then take turns of a few steps, one held while the other trains: of a machine that
others use, both have the same. Beside the time of a step stands what it took of all cores, of the job's every
process, which others disturb less.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path

import shardscope as ss
from benchmarks.side import TIMEOUT_SECONDS, Side, Turn
from shardscope.frameworks.formats.train_file import MODEL_FILE, SCRIPT_FILE, build_config
from shardscope.frameworks.megatron.files.export import MODEL_SCRIPT
from shardscope.machine.host import count_cores
from shardscope.machine.processes import find_free_port
from shardscope.records.folder import FINAL, RunFolder
from shardscope.records.json_files import read_json, read_lines
from shardscope.training.data.tokenizer import SHIPPED_TEXT, SHIPPED_TOKENIZER

LAYOUTS = {
    "ddp": ss.Layout.ddp,
    "fsdp2": ss.Layout.fsdp2,
    "deepspeed": ss.Layout.zero,
    "megatron": ss.Layout.megatron,
}
"""Each framework's plainest: of DeepSpeed ZeRO-3, of Megatron-core the distributed optimizer."""
NUM_RANKS = 2
WARM_STEPS = 5
"""Steps before the first turn: first allocations, DDP's bucket order, those whose memory is watched."""
TURN_STEPS = 2
LATE_STEPS = 3
"""Steps that a turn may take beyond these: that in which the side was held, and what ends before it is."""
CHECKED_STEPS = 5
"""After so few both sides have the same loss if they are one job. Of many the last are small and alike: a
head that was tied on one side only passed unseen."""
LEARNING_RATE = 1e-3
SAME_LOSS = 1e-3
"""Both are the same job if their losses differ by less then."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Of (Shardscope, bare), started once each."""

    first_step_seconds: tuple[float, float]
    """From asking for the run to the end of rank 0's first step."""
    turns: list[tuple[Turn, Turn]]
    """Turns that followed one another."""


def make_plan(framework: str) -> ss.Plan:
    """A Llama of 8 million parameters on two CPU ranks: enough that steps compute rather than wait."""
    recipe = ss.Recipe(
        seq_len=128,
        micro_batch_size=2,
        global_batch_size=2 * NUM_RANKS,
        precision="fp32",
        # Megatron-core's own attention, on both sides.
        attention="eager" if framework == "megatron" else None,
    )
    return ss.Plan(
        ss.Architecture.of_size("8m"), ss.Cluster.parse(f"{NUM_RANKS}xcpu"), recipe, LAYOUTS[framework]()
    )


@contextlib.contextmanager
def shardscope_side(plan: ss.Plan, num_steps: int, folder: Path) -> Iterator[tuple[Side, Path]]:
    """A launched run, and rank 0's metrics; ended if it has not by itself."""
    task = ss.Pretrain(num_steps=num_steps, learning_rate=LEARNING_RATE, warmup=0)
    run = ss.launch(plan, task, folder=folder)
    files = RunFolder(run.folder)

    def describe_failure() -> str:
        return f"the run is {run.status}: {run.reason}\n{run.error}"

    while (supervisor := (read_json(files.supervisor) or {}).get("pid")) is None:
        if run.status in FINAL:
            raise RuntimeError(describe_failure())
        time.sleep(0.01)
    side = Side(supervisor, files.events(0), is_over=lambda: run.status in FINAL, why=describe_failure)
    try:
        yield side, files.events(0)
    finally:
        side.go()
        if run.status not in FINAL:
            run.stop()
        run.wait(timeout=TIMEOUT_SECONDS)


@contextlib.contextmanager
def bare_side(plan: ss.Plan, num_steps: int, folder: Path) -> Iterator[tuple[Side, Path]]:
    """One torchrun of the exported script with as many threads as Shardscope gives ranks, and what it says.

    glibc's malloc is as it comes; ranks have it set (runs/launch/environment.py).
    """
    said, errors = folder / "bare.out", folder / "bare.err"
    script = export_script(plan, folder / "exported")
    options = {
        "--text": SHIPPED_TEXT,
        "--tokenizer": SHIPPED_TOKENIZER,
        "--steps": num_steps,
        "--learning-rate": LEARNING_RATE,
        "--warmup-steps": 0,
    }
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, count_cores() // NUM_RANKS)))
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with said.open("wb") as output, errors.open("wb") as error:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.one_session",
                f"--nproc-per-node={NUM_RANKS}",
                "--master-addr=127.0.0.1",
                f"--master-port={find_free_port()}",
                str(Path(__file__).parent / "exported_script.py"),
                str(script),
                *(str(word) for option in options.items() for word in option),
            ],
            env=environment,
            stdout=output,
            stderr=error,
            start_new_session=True,
        )
    side = Side(
        process.pid,
        said,
        is_over=lambda: process.poll() is not None,
        why=lambda: (
            f"the exported script ended with {process.returncode}:\n{errors.read_text(errors='replace')}"
        ),
    )
    try:
        yield side, said
    finally:
        side.go()
        if process.poll() is None:
            process.terminate()  # torchrun ends its ranks.
        process.wait()


def export_script(plan: ss.Plan, folder: Path) -> Path:
    """Export ``plan``; return its train.py, which for CPU ranks of Megatron-core is that of GPUs."""
    plan.export(folder)
    script = folder / SCRIPT_FILE
    if not script.exists():
        (folder / MODEL_FILE).write_text(json.dumps(build_config(plan)), encoding="utf-8")
        files = resources.files(f"shardscope.frameworks.{plan.layout.framework}.files")
        for name in (SCRIPT_FILE, MODEL_SCRIPT):
            (folder / name).write_text((files / name).read_text(encoding="utf-8"), encoding="utf-8")
    return script


Start = Callable[[ss.Plan, int, Path], contextlib.AbstractContextManager[tuple[Side, Path]]]
SIDES: tuple[Start, Start] = (shardscope_side, bare_side)


def compare(framework: str, num_starts: int, num_turns: int, folder: Path) -> list[Comparison]:
    """Start both sides ``num_starts`` times; each time they take ``num_turns`` turns.

    Before, each runs to its end once, which warms the disk cache too. Who goes first changes from turn to
    turn and from start to start. Raises ``RuntimeError`` if a side fails, or if they do not train the same
    thing.
    """
    plan = make_plan(framework)
    own, bare = (_last_loss(start, plan, folder) for start in SIDES)
    if abs(own - bare) > SAME_LOSS:
        raise RuntimeError(f"not the same job: a loss of {own} here, of {bare} bare")
    return [_compare(plan, number % 2 == 1, num_turns, folder) for number in range(num_starts)]


def _last_loss(start: Start, plan: ss.Plan, folder: Path) -> float:
    with start(plan, CHECKED_STEPS, folder) as (side, said):
        side.wait_for(CHECKED_STEPS)
        side.wait_for_end()
        loss: float = read_lines(said)[-1]["loss"]
        return loss


def _compare(plan: ss.Plan, bare_first: bool, num_turns: int, folder: Path) -> Comparison:
    num_steps = WARM_STEPS + (num_turns + 1) * (TURN_STEPS + LATE_STEPS)
    order = (1, 0) if bare_first else (0, 1)
    sides: dict[int, Side] = {}
    first_step: dict[int, float] = {}
    with contextlib.ExitStack() as stack:
        for number in order:
            asked = time.time()
            sides[number], _ = stack.enter_context(SIDES[number](plan, num_steps, folder))
            sides[number].wait_for(WARM_STEPS)
            sides[number].hold()
            first_step[number] = sides[number].ends[0] - asked
        turns = []
        for turn in range(num_turns):
            taken = {number: sides[number].take_turn(TURN_STEPS) for number in order[:: 1 - 2 * (turn % 2)]}
            turns.append((taken[0], taken[1]))
    return Comparison(first_step_seconds=(first_step[0], first_step[1]), turns=turns)
