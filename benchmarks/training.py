"""What launching and training through Shardscope costs against a bare torchrun script of the same job.

Both sides train with AdamW; ours asks torch for its fused kernel, the script takes torch's default, as such
scripts do.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import shardscope as ss
from shardscope.runs.processes import free_port, num_cores
from shardscope.training.tokenizer import SHIPPED_TEXT, SHIPPED_TOKENIZER

LAYOUTS = {
    "ddp": ss.Layout.ddp,
    "fsdp2": ss.Layout.fsdp2,
    "deepspeed": ss.Layout.zero,
    "megatron": ss.Layout.megatron,
}
"""Each framework's plainest: of DeepSpeed ZeRO-3, of Megatron-core the distributed optimizer."""
NUM_RANKS = 2
WARM_STEPS = 5
"""Steps left out of the steady time: first allocations, DDP's bucket order."""
LEARNING_RATE = 1e-3
TIMEOUT_SECONDS = 600
SAME_LOSS = 1e-3
"""Both ran the same job if their last losses differ by less."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """One run of one side."""

    first_step_seconds: float
    """From asking for the run to the end of rank 0's first step."""
    step_seconds: float
    """Median time from the end of one step to the end of the next, everything between included."""
    fastest_step_seconds: float
    """The shortest of them: on a busy machine the one that others disturbed least."""
    last_loss: float


def make_plan(framework: str) -> ss.Plan:
    """A Llama of 8 million parameters on two CPU ranks: enough that steps compute rather than wait."""
    recipe = ss.Recipe(seq_len=128, micro_batch_size=2, global_batch_size=2 * NUM_RANKS, precision="fp32")
    return ss.Plan(
        ss.Architecture.of_size("8m"), ss.Cluster.parse(f"{NUM_RANKS}xcpu"), recipe, LAYOUTS[framework]()
    )


def run_shardscope(plan: ss.Plan, num_steps: int, folder: Path) -> Timing:
    """One launched run. Raises ``RuntimeError`` if it does not finish."""
    task = ss.Pretrain(num_steps=num_steps, learning_rate=LEARNING_RATE, warmup_steps=0)
    start = time.time()
    run = ss.launch(plan, task, folder=folder)
    if run.wait(timeout=TIMEOUT_SECONDS) != "finished":
        run.stop()
        raise RuntimeError(f"the run is {run.status}: {run.reason}\n{run.error}")
    own = [line for line in run.metrics() if line["rank"] == 0]
    return _timing(start, [line["time"] for line in own], own[-1]["loss"])


def run_bare(plan: ss.Plan, num_steps: int, folder: Path) -> Timing:
    """One torchrun of the bare script, in the environment that Shardscope gives its ranks."""
    arch, recipe = plan.architecture, plan.recipe
    kept = (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "vocab_size max_position_embeddings tie_word_embeddings"
    )
    config = {name: getattr(arch, name) for name in kept.split()}
    job = {
        "config": {**config, "use_cache": False, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0},
        "text": str(SHIPPED_TEXT),
        "tokenizer": str(SHIPPED_TOKENIZER),
        "seq_len": recipe.seq_len,
        "rows": recipe.micro_batch_size * plan.num_micro_batches,
        "num_steps": num_steps,
        "learning_rate": LEARNING_RATE,
    }
    job_file = folder / "job.json"
    job_file.write_text(json.dumps(job))
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, num_cores() // NUM_RANKS)))
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    start = time.time()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={NUM_RANKS}",
            "--master-addr=127.0.0.1",
            f"--master-port={free_port()}",
            str(Path(__file__).parent / f"bare_{plan.layout.framework}.py"),
            str(job_file),
        ],
        env=environment,
        check=False,  # Its last words are worth more than its exit code.
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    if done.returncode:
        raise RuntimeError(f"the bare script failed:\n{done.stderr}")
    said = json.loads(done.stdout.splitlines()[-1])
    return _timing(start, said["ends"], said["last_loss"])


def run_pairs(framework: str, num_pairs: int, num_steps: int, folder: Path) -> list[tuple[Timing, Timing]]:
    """(Shardscope, bare) run after one another, ``num_pairs`` times; a first of each warms the disk cache.

    Every second pair goes bare first, so that a machine that slows down favours neither.
    Raises ``RuntimeError`` if the two sides did not train the same thing.
    """
    plan = make_plan(framework)
    run_bare(plan, WARM_STEPS + 1, folder)
    run_shardscope(plan, WARM_STEPS + 1, folder)
    pairs = []
    for number in range(num_pairs):
        if number % 2:
            bare = run_bare(plan, num_steps, folder)
            own = run_shardscope(plan, num_steps, folder)
        else:
            own = run_shardscope(plan, num_steps, folder)
            bare = run_bare(plan, num_steps, folder)
        if abs(own.last_loss - bare.last_loss) > SAME_LOSS:
            raise RuntimeError(f"not the same job: last loss {own.last_loss} here, {bare.last_loss} bare")
        pairs.append((own, bare))
    return pairs


def _timing(start: float, ends: list[float], last_loss: float) -> Timing:
    steady = [later - earlier for earlier, later in itertools.pairwise(ends)][WARM_STEPS - 1 :]
    return Timing(
        first_step_seconds=ends[0] - start,
        step_seconds=median(steady),
        fastest_step_seconds=min(steady),
        last_loss=last_loss,
    )
