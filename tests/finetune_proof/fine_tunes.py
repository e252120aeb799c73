"""The fine-tunes of the test: plans, runs and measurements."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.finetune_proof.questions import DATA, Answers, ask_all

import shardscope as ss
from shardscope.runs.explain.measured import sum_predicted_tensors

SEQ_LEN = 64
LORA_RANK = 16
NUM_EPOCHS = 5
RUN_SECONDS = 3600.0
FIRST_STEPS = 3
"""Steps that are not timed: they allocate, and threads start."""


@dataclass(frozen=True, kw_only=True)
class FineTune:
    """One row of the document."""

    name: str
    layout: ss.Layout
    method: str
    learning_rate: float

    def plan(self, weights: Path) -> ss.Plan:
        """Return the plan on two CPU ranks, in fp32."""
        recipe = ss.Recipe(
            seq_len=SEQ_LEN,
            micro_batch_size=2,
            global_batch_size=4,
            precision="fp32",
            method=self.method,
            lora_rank=LORA_RANK if self.method == "lora" else None,
        )
        return ss.Plan(ss.Architecture.from_hf(weights), ss.Cluster.parse("2xcpu"), recipe, self.layout)


LORA_RATE, FULL_RATE = 1e-3, 3e-5
"""The recommended rates (``task.choices``). Full fine-tuning at 1e-4 forgot more: 38 of 40 and 16 of 24 after
6 epochs of 150 of these rows."""
FINE_TUNES = [
    FineTune(name="LoRA, DDP", layout=ss.Layout.ddp(), method="lora", learning_rate=LORA_RATE),
    FineTune(name="LoRA, FSDP2", layout=ss.Layout.fsdp2(), method="lora", learning_rate=LORA_RATE),
    FineTune(name="LoRA, ZeRO-2", layout=ss.Layout.zero(stage=2), method="lora", learning_rate=LORA_RATE),
    FineTune(name="full, FSDP2", layout=ss.Layout.fsdp2(), method="full", learning_rate=FULL_RATE),
]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Answers, duration and memory of one fine-tune."""

    fine_tune: FineTune
    answers: Answers
    num_steps: int
    first_loss: float
    last_loss: float
    train_seconds: float
    """From the launch to the end of the run, export included."""
    step_seconds: float
    predicted_step_seconds: float
    peak_bytes: int
    """Of the rank with the most, in tensors."""
    predicted_peak_bytes: int


def launch(fine_tune: FineTune, weights: Path, folder: Path) -> ss.Run:
    """Fine-tune to the end. Return its run; one that already ended in ``folder`` is not trained again."""
    name = fine_tune.name.lower().replace(", ", "-")
    if (folder / name).is_dir():
        run = ss.Run.attach(folder / name)
    else:
        task = ss.Finetune(
            weights, DATA, num_epochs=NUM_EPOCHS, learning_rate=fine_tune.learning_rate, export=True
        )
        run = ss.launch(fine_tune.plan(weights), task, folder=folder, name=name)
    status = run.wait(RUN_SECONDS)
    if status != "finished":
        run.stop()
        raise RuntimeError(f"{fine_tune.name} is {status}: {run.reason}\n{run.error or ''}")
    return run


def measure(fine_tune: FineTune, run: ss.Run) -> Outcome:
    """Ask the model, and compare the run with its plan's prediction."""
    lines = [line for line in run.metrics() if line.get("rank") == 0 and "loss" in line]
    seconds = [float(str(line["step_seconds"])) for line in lines[FIRST_STEPS:]]
    return Outcome(
        fine_tune=fine_tune,
        answers=ask_all(run),
        num_steps=len(lines),
        first_loss=float(str(lines[0]["loss"])),
        last_loss=float(str(lines[-1]["loss"])),
        train_seconds=float(str(run.history[-1]["time"])) - run.created,
        step_seconds=median(seconds),
        predicted_step_seconds=run.plan.step().seconds,
        peak_bytes=run.memory().tensor_bytes,
        predicted_peak_bytes=sum_predicted_tensors(run.plan.memory()),
    )
