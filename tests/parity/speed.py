"""Short runs of each framework, compared with their predictions: tokens/s and peak bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from tests.parity.machine import Machine

import shardscope as ss
from shardscope.frameworks.registry import why_not_trained

LAYOUTS = {
    "ddp": ss.Layout.ddp,
    "fsdp2": ss.Layout.fsdp2,
    "zero-3": lambda: ss.Layout.zero(stage=3),
    "megatron": ss.Layout.megatron,
}
NUM_STEPS = 30
NUM_STEPS_ON_CPU = 10
SECONDS = 600


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Measurements of one short run."""

    name: str
    run: ss.Run | None = None
    """None where it was refused."""
    why: str = ""
    """Of a run that was refused or did not finish."""
    tokens_per_second: float | None = None
    """Of all ranks; the median of the later half of the steps."""
    predicted_tokens_per_second: float | None = None
    measured_bytes: int | None = None
    """Tensors at the peak on the fullest rank."""
    predicted_bytes: int | None = None


def make_plan(name: str, machine: Machine) -> ss.Plan:
    """Return a plan of a 350M-parameter Llama on all GPUs, or of a 2M-parameter one on two CPU ranks."""
    cluster = machine.cluster
    if machine.on_gpus:
        per_rank, ranks = 4, cluster.num_gpus
        model, sizes = "350m", {"seq_len": 1024, "micro_batch_size": per_rank}
    else:
        per_rank, ranks = 2, 2
        model, sizes = "2m", {"seq_len": 64, "micro_batch_size": per_rank}
        cluster = replace(cluster, gpus_per_node=ranks)
    recipe = ss.Recipe(**sizes, global_batch_size=per_rank * ranks, precision="bf16-mixed")
    return ss.Plan(ss.Architecture.of_size(model), cluster, recipe, LAYOUTS[name]())


def measure_speeds(machine: Machine, folder: Path, names: tuple[str, ...] | None = None) -> Iterator[Speed]:
    """Yield the speed of each run as soon as it ends.

    ``names`` are keys of ``LAYOUTS``, by default all; on CPU ranks only one, whose speed does not matter.
    """
    for name in names or (tuple(LAYOUTS) if machine.on_gpus else ("fsdp2",)):
        try:
            plan = make_plan(name, machine)
            refusal = why_not_trained(plan)
        except ValueError as error:
            refusal = str(error)
        if refusal is not None:
            yield Speed(name=name, why=refusal)
            continue
        steps = NUM_STEPS if machine.on_gpus else NUM_STEPS_ON_CPU
        task = ss.Pretrain(num_steps=steps, learning_rate=3e-4)
        yield _read_speed(name, plan, ss.launch(plan, task, folder=folder, name=f"speed {name}"))


def _read_speed(name: str, plan: ss.Plan, run: ss.Run) -> Speed:
    if run.wait(SECONDS) != "finished":
        run.stop()
        return Speed(name=name, run=run, why=f"the run is {run.status}: {run.reason}")
    own = [line for line in run.metrics() if line["rank"] == 0 and "step_seconds" in line]
    later = own[len(own) // 2 :]
    memory = run.memory()
    try:
        step = plan.step()
        predicted = step.tokens_per_second_per_gpu * plan.world_size
    except ValueError:
        # Some rate of this machine is unknown; ss.calibrate() measures it.
        predicted = None
    return Speed(
        name=name,
        run=run,
        tokens_per_second=median(line["tokens_per_second_all_ranks"] for line in later),
        predicted_tokens_per_second=predicted,
        measured_bytes=memory.tensor_bytes or None,
        predicted_bytes=_predicted_bytes(memory),
    )


def _predicted_bytes(memory: object) -> int | None:
    error, measured = getattr(memory, "error", None), getattr(memory, "tensor_bytes", 0)
    return None if error is None else round(measured * (1 + error))
