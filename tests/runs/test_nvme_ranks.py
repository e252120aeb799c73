"""ZeRO-3 on NVMe for real, two CPU ranks and their files: what rehearsal and formulas say, to the byte."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from ctypes.util import find_library
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import needs_installed

import shardscope as ss

pytestmark = [
    needs_installed("deepspeed"),
    pytest.mark.skipif(
        "SHARDSCOPE_NVME" not in os.environ,
        reason="DeepSpeed compiles async_io for minutes in a new environment: make test-nvme runs this",
    ),
    pytest.mark.skipif(
        not Path("/usr/include/libaio.h").exists() or find_library("aio") is None,
        reason="DeepSpeed's async_io needs libaio: apt install libaio-dev",
    ),
]
LAYOUTS: dict[str, Any] = {
    "optimizer": {"offload_optimizer": "nvme"},
    "both": {
        "offload_optimizer": "nvme",
        "offload_params": "nvme",
        "offload_params_max_in_cpu": 0,
        "stage3_prefetch_bucket_size": 0,
    },
}
FAILING = {
    "Not enough buffers 0 for swapping 1": {"offload_params_buffer_count": 5},
    "already assigned swap buffer id": {"stage3_prefetch_bucket_size": 50_000_000},
}


def plan(layers: int, options: dict[str, Any]) -> ss.Plan:
    """Embedding and feed-forward are large enough for files, attention is not."""
    arch = replace(
        ss.Architecture.of_size("2m"),
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=4100,
        vocab_size=8192,
        num_hidden_layers=layers,
        tie_word_embeddings=False,
    )
    recipe = ss.Recipe(seq_len=32, global_batch_size=2, precision="bf16-mixed")
    layout = ss.Layout.zero(
        3,
        **{
            "offload_params_buffer_size": 2_000_000,
            "offload_params_buffer_count": 20,
            "reduce_bucket_size": 1_000_000,
            "sub_group_size": 4_000_000,
            **options,
        },
    )
    return ss.Plan(arch, ss.Cluster.parse("2xcpu"), recipe, layout)


def train_both_ranks(a_plan: ss.Plan, folder: Path, **other: int) -> list[dict[str, int]]:
    """Return the output of both ranks; ``other`` replaces options of the plan's layout."""
    layout: Any = a_plan.layout
    options = [
        str(other.get("stage3_prefetch_bucket_size", layout.prefetched_elements)),
        str(other.get("offload_params_buffer_count", layout.num_params_buffers)),
    ]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    script = str(Path(__file__).with_name("nvme_ranks.py"))
    ranks = []
    for rank in range(2):
        environment = {
            **os.environ,
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_SIZE": "2",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
        }
        ranks.append(
            subprocess.Popen(
                [sys.executable, script, a_plan.to_json(), str(folder), *options],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        answers = []
        for rank in ranks:
            # The extension is compiled at first use, for minutes.
            out, problems = rank.communicate(timeout=600)
            assert rank.returncode == 0, problems[-3000:]
            answers.append(json.loads(next(x for x in reversed(out.splitlines()) if x.startswith("{"))))
        return answers
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.parametrize("name", LAYOUTS)
def test_nvme_files_of_real_ranks_equal_rehearsal_and_prediction(name: str, tmp_path: Path) -> None:
    from shardscope.frameworks.deepspeed.rehearsal.rehearse import rehearse

    a_plan = plan(2, LAYOUTS[name])
    # With GPUs DeepSpeed's own Adam runs on the host, which needs no room to work in.
    on_gpus = replace(a_plan, cluster=ss.Cluster.parse("2xh100-sxm-80gb"))
    (rehearsed,) = rehearse(on_gpus, lambda words, fraction: None)
    predicted = a_plan.memory()
    for rank in train_both_ranks(a_plan, tmp_path):
        assert rank["files"] == rehearsed.nvme_bytes == predicted.nvme_bytes > 0
        assert rank["host"] == predicted.host_bytes
        assert rehearsed.host_bytes == pytest.approx(rank["host"], rel=1e-3)
        assert rank["waiting"] == predicted.at("optimizer")["gradients"] > 0


@pytest.mark.parametrize("complaint", FAILING)
def test_plans_raise_where_deepspeed_asserts(complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="DeepSpeed") as refused:
        plan(2, {**LAYOUTS["both"], **FAILING[complaint]})
    (changed,) = FAILING[complaint]
    assert f"Nearest fix: {changed}=" in str(refused.value)
    with pytest.raises(AssertionError, match=complaint):
        train_both_ranks(plan(2, LAYOUTS["both"]), tmp_path, **FAILING[complaint])


@dataclass(frozen=True, kw_only=True)
class HasNoSpaceForCopies(ss.Pretrain):
    """Its rank 0 finds no space for copies of NVMe files, the only large ones of a checkpoint."""

    def __call__(self, ctx: Any) -> None:
        send = os.sendfile

        def send_if_space(target: int, source: int, *more: int) -> int:
            if ctx.rank == 0 and os.fstat(source).st_size > 200_000:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return send(target, source, *more)

        untyped: Any = os
        untyped.sendfile = send_if_space
        super().__call__(ctx)


def test_fault_23_a_run_goes_on_without_copies_of_nvme_files(tmp_path: Path) -> None:
    """Rank 0 had the error alone, and the run failed."""
    task = HasNoSpaceForCopies(num_steps=4, save_every=2, export=True)
    run = ss.launch(plan(2, LAYOUTS["optimizer"]), task, folder=tmp_path)
    assert run.wait(600) == "finished", run.error
    assert run.model is not None and not list((run.folder / "checkpoints").iterdir())
    assert "step-000004 could not be saved: No space left" in run.reason


def test_partitions_that_are_too_small_for_files_are_resumed(tmp_path: Path) -> None:
    """They had the weights from before the training, as norms have in every model."""
    architecture = replace(
        ss.Architecture.of_size("2m"),
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=128,
        num_hidden_layers=1,
    )
    small = replace(plan(1, LAYOUTS["optimizer"]), architecture=architecture)

    def train(**fields: Any) -> tuple[ss.Run, list[float]]:
        task = ss.Pretrain(schedule="constant", warmup=0, **fields)
        run = ss.launch(small, task, folder=tmp_path)
        assert run.wait(600) == "finished", run.error
        return run, [record["loss"] for record in run.metrics() if record["rank"] == 0]

    _, losses = train(num_steps=4)
    saved, _ = train(num_steps=2, save_checkpoint=True)
    assert not list(saved.folder.rglob("*.swp"))
    _, resumed = train(num_steps=4, resume=saved.folder)
    assert resumed == losses[2:]
