"""Checks of the fields of ``Finetune``, when one is made and before a launch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from shardscope.core.errors import Value, check_choice, check_flag, check_integer, check_number, refuse
from shardscope.training.data.weights_tokenizer import WeightsTokenizer
from shardscope.training.examples.encoding import BeginningEncoder
from shardscope.training.examples.formats import Format, read_example
from shardscope.training.examples.rows import Row, Rows, describe_source, is_text, resolve_source
from shardscope.training.examples.streamed_rows import check_streamable
from shardscope.training.examples.token_table import (
    RowCounts,
    check_examples,
    check_row,
    iterate_encoded,
)
from shardscope.training.preferences.settings import OBJECTIVES
from shardscope.training.tasks.text_task import MAX_STEPS, name_field, resolve_text

if TYPE_CHECKING:
    from shardscope.training.tasks.finetune import Finetune
    from shardscope.training.tasks.finetune_rows import FinetuneRows

MAX_PROMPTS, MAX_PROMPT_LENGTH, MAX_NEW_TOKENS = 16, 10_000, 4096
"""Maximum number of sample prompts, of characters in each, and of tokens in an answer."""
MAX_CHECKED_ROWS = 1000
"""Rows whose format is checked before a launch; the others are checked when they are tokenized."""
MAX_LONG_PROMPTS, MAX_PROMPT_BYTES = 100, 4_000_000
"""Rows with a long prompt that are tokenized before a launch, and the bytes of their prompts, which take two
seconds or so; the others are tokenized by the ranks."""
TEMPLATE_TOKENS = 64
"""Tokens that a chat template may add before a completion, besides those of the messages."""


def resolve_data(field: str, value: object) -> object:
    """Return a data source, its path absolute. Raises ``ValueError`` naming ``field`` if it cannot be one."""
    source = resolve_source(field, value)
    return resolve_text(field, source) if is_text(source) else source


def check_objective(task: Finetune) -> None:
    """Raise ``ValueError`` if the data or other fields do not fit the objective."""
    field = name_field(task, "objective")
    check_choice(field, task.objective, OBJECTIVES)
    check_number(name_field(task, "dpo_beta"), task.dpo_beta, low=1e-6, high=10.0)
    if task.objective != "dpo":
        return
    if task.plain_text is not None:
        kind = "Moby-Dick" if task.data is None else "a text file"
        refuse(field, "dpo", f'"sft" for {kind}, which has no preference pairs', {"objective": "sft"})
    if task.loss_on == "all":
        allowed = '"completions" or "last" with objective="dpo": the prompt is the same on both sides'
        refuse(name_field(task, "loss_on"), "all", allowed, {"loss_on": "completions"})


def check_streaming(task: Finetune) -> None:
    """Raise ``ValueError`` if the task streams its data and that is not possible with its other fields."""
    field = name_field(task, "streaming")
    check_flag(field, task.streaming)
    if not task.streaming:
        return
    if task.plain_text is not None:
        allowed = "False with a text file, which is read as one long text"
        refuse(field, True, allowed, {"streaming": False})
    if task.objective == "dpo":
        allowed = 'False with objective="dpo": preference pairs are tokenized before training'
        refuse(field, True, allowed, {"streaming": False})
    check_streamable(name_field(task, "data"), task.data)
    if task.num_steps is None:
        allowed = "a number of steps with streaming=True: how many rows an epoch has is not known"
        refuse(name_field(task, "num_steps"), None, allowed, {"num_steps": 1000})
    if isinstance(task.validation, float):
        allowed = "another data source, or None with streaming=True: its rows are not counted"
        refuse(name_field(task, "validation"), task.validation, allowed, {"validation": None})


def check_validation(task: Finetune) -> object:
    """Return the field ``validation``, the path of a data source absolute. Raises ``ValueError``."""
    field, validation = name_field(task, "validation"), task.validation
    for name in ("validate_every", "early_stopping"):
        number = getattr(task, name)
        if number is None:
            continue
        check_integer(name_field(task, name), number, low=1, high=MAX_STEPS)
        if validation is None:
            refuse(name_field(task, name), number, "None without validation data", {"validation": 0.1})
    if validation is None:
        return None
    if isinstance(validation, int | float):
        if isinstance(validation, bool) or not 0 < validation < 0.5:
            allowed = "a fraction above 0 and below 0.5, a data source, or None"
            refuse(field, validation, allowed, {"validation": 0.1})
        return validation
    source = resolve_data(field, validation)
    if is_text(source) != (task.plain_text is not None):
        kind = "examples" if task.plain_text is None else "a text file"
        allowed = f"{kind}, as the training data are, or a fraction of them"
        refuse(field, describe_source(source), allowed, {"validation": 0.1})
    return source


def check_samples(task: Finetune) -> int | tuple[str, ...]:
    """Return the field ``samples``, a list as a tuple. Raises ``ValueError``."""
    field, prompts = name_field(task, "samples"), task.samples
    check_integer(name_field(task, "max_new_tokens"), task.max_new_tokens, low=1, high=MAX_NEW_TOKENS)
    if task.sample_every is not None:
        check_integer(name_field(task, "sample_every"), task.sample_every, low=1, high=MAX_STEPS)
        if not prompts:
            refuse(name_field(task, "sample_every"), task.sample_every, "None without samples", Value(None))
    if isinstance(prompts, int):
        check_integer(field, prompts, low=1, high=MAX_PROMPTS)
        if task.plain_text is not None:
            _refuse_number_of_prompts(task, "a text file")
        return prompts
    is_list = isinstance(prompts, Sequence) and not isinstance(prompts, str | bytes)
    texts = list(prompts) if is_list else []
    if not is_list or len(texts) > MAX_PROMPTS or not all(isinstance(text, str) for text in texts):
        value = f"a list of {len(texts)}" if len(texts) > MAX_PROMPTS else prompts
        allowed = f"a list of at most {MAX_PROMPTS} texts, or their number"
        refuse(field, value, allowed, {"samples": ["Who are you?"]})
    for text in texts:
        if not text.strip() or len(text) > MAX_PROMPT_LENGTH:
            shown = f"a text of {len(text):,} characters"
            allowed = f"texts of 1 to {MAX_PROMPT_LENGTH:,} characters"
            refuse(field, shown, allowed, {"samples": ["Who are you?"]})
    return tuple(texts)


def check_length(task: Finetune) -> None:
    """Raise ``ValueError`` if the number of epochs is out of range, or set besides a number of steps."""
    if task.num_epochs is None:
        return
    field = name_field(task, "num_epochs")
    check_number(field, task.num_epochs, low=0.01, high=1e6)
    if task.num_steps is not None:
        refuse(field, task.num_epochs, "None with num_steps", {"num_steps": None})


def check_rows(task: Finetune, rows: FinetuneRows) -> None:
    """Raise ``ValueError`` for data of no known format, and for a malformed row among the first ones."""
    has_source = task.validation is not None and not isinstance(task.validation, float)
    for name in ("data", "validation") if has_source else ("data",):
        opened = rows.open(name)
        format = rows.recognize_format(opened, name)
        if task.bad_rows != "skip":
            for index in range(min(len(opened), MAX_CHECKED_ROWS)):
                check_row(name_field(task, name), format, index, opened)
        if isinstance(task.samples, int) and format.name == "text":
            _refuse_number_of_prompts(task, "data of the format text")
        if isinstance(task.validation, float) and len(opened) < 2:
            allowed = "a data source, or None: one row cannot be split"
            refuse(name_field(task, "validation"), task.validation, allowed, {"validation": None})


def check_row_lengths(task: Finetune, rows: FinetuneRows, seq_len: int) -> None:
    """Raise ``ValueError`` if ``seq_len`` leaves nothing to learn in rows that the task does not leave out.

    Only rows are tokenized whose prompt may be too long, up to 100 of the first 1,000: without one,
    transformers is not imported.
    """
    has_source = task.validation is not None and not isinstance(task.validation, float)
    for name in ("data", "validation") if has_source else ("data",):
        opened = rows.open(name)
        format = rows.recognize_format(opened, name)
        indices = _find_long_prompts(task, format, opened, seq_len)
        if not indices:
            continue
        # The other rows count as examples: what is not known of them is no reason to refuse the data.
        num_others = len(opened) - len(indices)
        counts = RowCounts(num_rows=num_others, num_examples=num_others)
        encoder = BeginningEncoder(WeightsTokenizer(task.folder).load(), task.loss_on, seq_len)
        field = name_field(task, name)
        encoded = iterate_encoded(
            field,
            opened,
            format,
            encoder,
            seq_len=seq_len,
            bad_rows=task.bad_rows,
            counts=counts,
            indices=indices,
        )
        deque(encoded, maxlen=0)  # Only the counts are used.
        check_examples(field, counts, seq_len, task.bad_rows, rows.max_seq_len)


def _find_long_prompts(task: Finetune, format: Format, rows: Rows, seq_len: int) -> list[int]:
    """Return the indices of the first rows whose prompt may be longer than ``seq_len``."""
    indices, num_bytes = list[int](), 0
    for index in range(min(len(rows), MAX_CHECKED_ROWS)):
        prompt_bytes = _count_prompt_bytes(task, format, rows[index])
        if prompt_bytes + TEMPLATE_TOKENS >= seq_len:
            indices.append(index)
            num_bytes += prompt_bytes
        if len(indices) == MAX_LONG_PROMPTS or num_bytes > MAX_PROMPT_BYTES:
            break
    return indices


def _count_prompt_bytes(task: Finetune, format: Format, row: Row) -> int:
    """Return the bytes before the first text of a row that bears loss: an upper bound of its tokens.

    0 where all of the row bears loss, and for a malformed row, which is another error.
    """
    try:
        example = read_example(format, row)
    except ValueError:
        return 0
    if example.rejected_text:
        return max(len(example.text.encode()), len(example.rejected_text.encode()))
    turns = [place for place, message in enumerate(example.messages) if message["role"] == "assistant"]
    if not turns or task.loss_on == "all":
        return 0
    first = turns[-1] if task.loss_on == "last" or example.rejected else turns[0]
    return sum(len(message["content"].encode()) for message in example.messages[:first])


def _refuse_number_of_prompts(task: Finetune, data: str) -> NoReturn:
    allowed = f"a list of prompts: {data} has none to take"
    refuse(name_field(task, "samples"), task.samples, allowed, {"samples": ["Who are you?"]})
