"""Check of a fine-tune's tokenizer against the rows of the model's embedding."""

from __future__ import annotations

from collections.abc import Iterator

from shardscope.core.finding import Finding
from shardscope.planner.checks.case import Case
from shardscope.training.data.weights_tokenizer import WeightsTokenizer, describe_unused_rows
from shardscope.training.tasks.finetune import Finetune


def check_vocabulary(case: Case) -> Iterator[Finding]:
    """Find a tokenizer that is much smaller than the embedding: most likely another model's.

    A tokenizer with ids beyond the embedding raises ``ValueError`` at the launch instead.
    """
    if not isinstance(case.task, Finetune):
        return
    num_tokens = WeightsTokenizer(case.task.folder).count_tokens()
    why = "" if num_tokens is None else describe_unused_rows(num_tokens, case.plan.architecture.vocab_size)
    if why:
        yield Finding(
            name="tokenizer-of-another-model",
            severity="warning",
            why=why,
            number=float(num_tokens or 0),
            change="the tokenizer files of the model in its folder",
        )
