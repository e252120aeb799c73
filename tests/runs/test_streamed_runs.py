"""Streamed fine-tunes on two ranks: bounded memory, no table of tokens, and the next rows after a stop."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.requirements import needs, thorough

torch = needs("torch")
needs("transformers")
needs("datasets")

from finetuned_models import small_model  # noqa: E402
from test_finetune_examples import compute_loss  # noqa: E402

import shardscope as ss  # noqa: E402
from shardscope.training.examples.streamed_rows import open_stream  # noqa: E402

NUM_ROWS = 200_000
SEQ_LEN = 28

pytestmark = pytest.mark.usefixtures("bounded_time", "nothing_left")


def row(number: int) -> dict[str, str]:
    return {"prompt": f"What is number {number}?", "completion": f" It is {number * 7 % 1000}."}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    note = "x" * 800
    with path.open("w") as file:
        for number in range(NUM_ROWS):
            file.write(json.dumps({**row(number), "note": note}) + "\n")
    return path


def launch(folder: Path, data: Path, runs: Path, packing: bool = False, **options: Any) -> Any:
    recipe = ss.Recipe(
        seq_len=SEQ_LEN, micro_batch_size=2, global_batch_size=8, precision="fp32", packing=packing
    )
    plan = ss.Plan(ss.Architecture.from_hf(folder), ss.Cluster.parse("2xcpu"), recipe, ss.Layout.ddp())
    task = ss.Finetune(folder, data, streaming=True, **options)
    task.preview(seq_len=SEQ_LEN)
    return ss.launch(plan, task, folder=runs)


def losses_of(run: Any) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in run.metrics() if "loss" in line and line["rank"] == 0}


@thorough()
def test_two_ranks_stream_and_resume_with_the_next_rows(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cache = small_model(tmp_path, "llama"), tmp_path / "cache"
    monkeypatch.setenv("HF_DATASETS_CACHE", str(cache))
    size = source.stat().st_size
    assert size > 150e6
    kernel = psutil.Process(os.getpid())
    # Its libraries are imported before its memory is measured.
    ss.Finetune(folder, [row(1)]).preview()
    next(iter(open_stream("data", source)))
    before = kernel.memory_info().rss
    whole = launch(
        folder, source, tmp_path / "runs", num_steps=8, save_every=3, keep_last=9, learning_rate=1e-2
    )
    assert whole.wait(200) == "finished", whole.error
    assert kernel.memory_info().rss - before < size / 2
    # Neither an Arrow table of the rows nor one of their tokens is on disk.
    assert not list(whole.folder.rglob("*.npy")) and not list(cache.rglob("*.arrow"))
    assert sum(path.stat().st_size for path in whole.folder.rglob("*") if path.is_file()) < size / 2
    assert "a stream of rows, shuffled in blocks of 1,000" in whole.logs(0)
    losses = losses_of(whole)
    assert sorted(losses) == list(range(8))

    # The checkpoint after three of eight steps, as of a run that stopped there.
    again = launch(
        folder,
        source,
        tmp_path / "runs",
        num_steps=8,
        learning_rate=1e-2,
        resume=whole.folder / "checkpoints" / "step-000003",
    )
    assert again.wait(200) == "finished", again.error
    resumed = losses_of(again)
    assert sorted(resumed) == [3, 4, 5, 6, 7]
    assert resumed == pytest.approx({step: losses[step] for step in resumed}, abs=1e-5)
    assert "again, to skip them" not in again.logs(0)
    assert len({round(loss, 4) for loss in losses.values()}) == 8, "other rows have other losses"


@thorough()
def test_a_packed_stream_starts_with_the_loss_of_its_rows(source: Path, tmp_path: Path) -> None:
    """The stream is as long as one step, so the loss is that of all its rows."""
    from transformers import AutoTokenizer

    folder = small_model(tmp_path, "llama")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [row(number) for number in range(16)]
    data = tmp_path / "few.jsonl"
    data.write_text("".join(f"{json.dumps(one)}\n" for one in rows))
    tokens = [[tokenizer(one[part])["input_ids"] for part in ("prompt", "completion")] for one in rows]
    # Two rows fit into a window, and so the eight windows of a step hold all.
    lengths = [sum(map(len, one)) for one in tokens]
    assert min(lengths) > SEQ_LEN / 3 and max(lengths) <= SEQ_LEN / 2
    run = launch(folder, data, tmp_path / "runs", packing=True, num_steps=1, validation=data)
    assert run.wait(200) == "finished", run.error
    expected = compute_loss(folder, tokens)
    assert losses_of(run)[0] == pytest.approx(expected, abs=1e-4)
    assert "shuffled, packed in blocks" in run.logs(0)
