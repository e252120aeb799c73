"""Data loading rates that a plan needs, compared with the rates of usual storage and tokenizers."""

from __future__ import annotations

from collections.abc import Iterator

from shardscope.core.finding import Finding
from shardscope.planner.checks.case import Case
from shardscope.runs.checks.text import SHIPPED_TOKENS
from shardscope.training.tasks.pretrain import Pretrain

READS_PER_SECOND = 3_000
"""Reads a second of a cloud's usual volume: AWS gp3's baseline (docs.aws.amazon.com/ebs/latest/userguide/
general-purpose.html). Local flash has hundreds of thousands, a hard disk about a hundred."""
TOKENIZED_BYTES_PER_SECOND = 1e9 / 20
"""Tokenizer throughput of a whole server: "less than 20 seconds to tokenize a GB of text on a server's CPU"
(README of huggingface/tokenizers)."""
TEXT_BYTES_PER_TOKEN = 3.17
"""Bytes of English text per token with Llama 2's vocabulary; larger vocabularies have more, Llama 3's 3.94
(Grattafiori et al. 2024, section 3.2)."""

CHANGE = (
    "Tokenize before the run and keep the tokens in memory or on local flash, as Pretrain does; or "
    "num_workers=4 in the DataLoader"
)


def check_data_loading(case: Case) -> Iterator[Finding]:
    """Find a node whose ranks need more samples or text per second than usual storage or tokenizers deliver.

    Applies to the user's own function or script: ``Pretrain`` and ``Finetune`` have all tokens in memory
    before the first step. The rates are typical ones, because calibration does not measure storage.
    """
    if case.step is None or hasattr(case.task, "text"):
        return
    plan, recipe = case.plan, case.plan.recipe
    # The predicted step time, not a measured one: the check runs before the launch.
    rows_per_second = plan.num_micro_batches * recipe.micro_batch_size / case.step.seconds
    ranks = plan.cluster.gpus_per_node
    # Ranks that share a sequence (tensor, context and pipeline parallel) each read it.
    samples = ranks * rows_per_second
    text_bytes = samples * recipe.seq_len * TEXT_BYTES_PER_TOKEN
    if samples <= READS_PER_SECOND and text_bytes <= TOKENIZED_BYTES_PER_SECOND:
        return
    windows = SHIPPED_TOKENS // recipe.seq_len
    too_many = samples > READS_PER_SECOND
    limit = (
        f"a cloud's usual volume gives {READS_PER_SECOND:,} reads a second (AWS gp3's baseline), and a "
        "window of text is one"
        if too_many
        else f"a server tokenizes {TOKENIZED_BYTES_PER_SECOND / 1e6:.0f} MB of text a second (README of "
        "huggingface/tokenizers)"
    )
    yield Finding(
        name="data-loading",
        severity="hint" if case.task is None else "warning",
        why=f"The {ranks} ranks of a node take {samples:,.0f} sequences a second of {recipe.seq_len:,} "
        f"tokens: {samples * recipe.seq_len * 4 / 1e6:,.1f} MB/s of tokens in 4 bytes, or at least "
        f"{text_bytes / 1e6:,.1f} MB/s of English text; {limit}.",
        number=samples,
        change=CHANGE,
        # Without a task, suggest the built-in one that keeps all tokens in memory.
        task=Pretrain() if case.task is None and recipe.global_batch_size <= windows else None,
    )
