"""Data loading: what a node must be fed so that no step waits for it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shardscope.own_code.dealing import LOADER
from shardscope.own_code.edits import mended, with_keyword
from shardscope.own_code.script import Script, keywords, source_of
from shardscope.planner.preflight.case import Case
from shardscope.planner.preflight.data import SHIPPED_TOKENS
from shardscope.planner.preflight.finding import Finding

READS_PER_SECOND = 3_000
"""Reads a second of a cloud's usual volume: AWS gp3's baseline (docs.aws.amazon.com/ebs/latest/userguide/
general-purpose.html). Local flash has hundreds of thousands, a disk that turns about a hundred."""
TOKENIZED_BYTES_PER_SECOND = 1e9 / 20
"""Of a whole server: "less than 20 seconds to tokenize a GB of text on a server's CPU" (README of
huggingface/tokenizers)."""
TEXT_BYTES_PER_TOKEN = 3.17
"""Of English, with Llama 2's vocabulary; larger ones have more to a token, Llama 3's 3.94 (Grattafiori et al.
2024, section 3.2)."""

WORKERS = 4
"""Processes of a DataLoader that has none (an assumption: enough to read and tokenize beside a step, and each
costs memory of the host)."""
IN_MEMORY = "Tokenize before the run and keep the tokens in memory or on local flash, as Pretrain does"
WORKERS_PLACE = 5
"""Of ``num_workers`` among a DataLoader's arguments (torch/utils/data/dataloader.py)."""


def starved(case: Case) -> Iterator[Finding]:
    """A node whose ranks take more samples or text a second than usual storage or tokenizers give.

    ``Pretrain`` and ``Finetune`` have all tokens in memory before the first step, and are left out; a
    function or script loads as it likes. Calibration measures no storage.
    """
    if case.step is None or hasattr(case.task, "text"):
        return
    plan, recipe = case.plan, case.plan.recipe
    rows_per_second = plan.num_micro_batches * recipe.micro_batch_size / case.step.seconds
    ranks = plan.cluster.gpus_per_node
    # Ranks that work on one sequence together each read it.
    samples = ranks * rows_per_second
    text_bytes = samples * recipe.seq_len * TEXT_BYTES_PER_TOKEN
    if samples <= READS_PER_SECOND and text_bytes <= TOKENIZED_BYTES_PER_SECOND:
        return
    from shardscope.training.pretrain import Pretrain  # it imports this package

    windows = SHIPPED_TOKENS // recipe.seq_len
    too_many = samples > READS_PER_SECOND
    source, line = _with_workers(case)
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
        change=IN_MEMORY if source is None else f"num_workers={WORKERS} in the DataLoader; or: {IN_MEMORY}",
        # What nobody has written yet can be what has all tokens in memory.
        task=Pretrain() if case.task is None and recipe.global_batch_size <= windows else None,
        source=source,
        line=line,
    )


def _with_workers(case: Case) -> tuple[str | None, int | None]:
    """A task's text whose DataLoaders read beside the step, and the line of the first that did not; where all
    do or there are none, its first line."""
    source = source_of(case.task)
    if source is None:
        return None, None
    script = Script(source=source, plan=case.plan)
    idle = [call for call in script.calls(LOADER) if _reads_in_the_step(call)]
    if not idle:
        return None, 1
    edits = [with_keyword(script, call, "num_workers", str(WORKERS)) for call in idle]
    can_share = all(_is_torchs(script, call) and _picks(call) for call in idle)
    return mended(script, *edits) if can_share else None, idle[0].lineno


def _reads_in_the_step(call: ast.Call) -> bool:
    """Whether a DataLoader has no worker; what its number is where that is no plain one is not known."""
    given = keywords(call).get("num_workers")
    if given is None:
        has_more = len(call.args) > WORKERS_PLACE or any(isinstance(one, ast.Starred) for one in call.args)
        return not has_more and all(one.arg for one in call.keywords)
    return isinstance(given, ast.Constant) and given.value == 0


def _is_torchs(script: Script, call: ast.Call) -> bool:
    if isinstance(call.func, ast.Name):
        return script.modules.get(call.func.id) == "torch.utils.data" and LOADER not in script.defined
    return ast.unparse(call.func) == f"torch.utils.data.{LOADER}"


def _picks(call: ast.Call) -> bool:
    """Whether it picks samples by number, which workers share. What can only be read from its beginning each
    of them would read whole; a DataLoader refuses to shuffle that, or to take a sampler for it."""
    given = keywords(call)
    shuffles = given.get("shuffle")
    return (isinstance(shuffles, ast.Constant) and shuffles.value is True) or any(
        name in given and not isinstance(given[name], ast.Constant) for name in ("sampler", "batch_sampler")
    )
