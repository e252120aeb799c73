"""Prompts of generations: a conversation as token ids, and the tokens that end an answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardscope.core.errors import get_first_line, refuse
from shardscope.training.examples.formats import ExampleError, Format, read_example
from shardscope.training.examples.rows import Rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


MAX_REPEATED_ROWS = 500
"""Rows in a row that repeat prompts, or have none, before only as many of the others are read."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt of sample generations."""

    text: str
    """The user's message; of a conversation with several, the first and the last. A number follows it if an
    earlier prompt has the same."""
    ids: tuple[int, ...]
    """Token ids of the conversation, up to where the answer begins."""


def find_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the tokenizer's chat template, of several the default one; None if it has none."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None


def list_start_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token that the tokenizer puts before a plain text, as Llama's and Gemma's do; or none.

    A chat template writes its own.
    """
    start = tokenizer.bos_token_id
    ids: list[int] = tokenizer("", verbose=False)["input_ids"]
    return [start] if isinstance(start, int) and ids[:1] == [start] else []


def add_start_ids(start_ids: list[int], ids: list[int]) -> list[int]:
    """Return ``ids`` after the start token, unless they begin with it.

    Texts that a template has rendered before may hold the token as text.
    """
    return ids if ids[:1] == start_ids else start_ids + ids


def render_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool
) -> str:
    """Return a conversation as the chat template writes it, special tokens included.

    Raises ``ValueError`` for one that the template refuses: Gemma's has no system message, and Mistral's
    takes turns of user and assistant only alternately.
    """
    with report_template_errors():
        rendered = tokenizer.apply_chat_template(
            [{"role": message["role"], "content": message["content"]} for message in messages],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    assert isinstance(rendered, str)
    return rendered


class ChatTemplateError(ExampleError):
    """A chat template that fails by a mistake of its own, not by a row that it has no form for."""

    def __init__(self, error: Exception) -> None:
        reason = f"{type(error).__name__}: {get_first_line(error).removesuffix('.')}"
        super().__init__(
            f"the tokenizer's chat template fails with {reason}",
            "a chat template without this error, which is chat_template.jinja in the weights folder, or "
            "chat_template in its tokenizer_config.json",
        )


@contextmanager
def report_template_errors() -> Iterator[None]:
    """Raise the errors of a chat template, which are no ``ValueError``, as one.

    Raises :class:`ChatTemplateError` for those that the template does not raise on purpose.
    """
    from jinja2 import TemplateError

    try:
        yield
    except TemplateError as error:
        # The function raise_exception of templates raises no subclass (transformers 5,
        # utils/chat_template_utils.py).
        if type(error) is not TemplateError:
            raise ChatTemplateError(error) from error
        raise ValueError(f"the model's chat template refuses the conversation: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
        # Expressions of a template raise Python's own errors, such as a sum of text and None.
        raise ChatTemplateError(error) from error


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]
) -> list[int]:
    """Return the token ids of a conversation, up to where the answer begins.

    Without a chat template it is one plain text, which the model continues, as in training.
    """
    start = list[int]()
    if find_template(tokenizer) is not None:
        # The template has written the special tokens.
        rendered = render_conversation(tokenizer, messages, add_generation_prompt=True)
    else:
        rendered = "".join(message["content"] for message in messages)
        start = list_start_ids(tokenizer)
    ids: list[int] = tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"]
    if not ids:
        raise ExampleError("the text has no tokens", "a longer text")
    return add_start_ids(start, ids)


def encode_prompts(
    field: str, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], seq_len: int
) -> tuple[Prompt, ...]:
    """Return each text as a user's message.

    Raises ``ValueError`` naming ``field`` for one that cannot be encoded, and for one of ``seq_len`` tokens
    or more, which leaves no room for an answer.
    """
    prompts = list[Prompt]()
    for text in texts:
        try:
            ids = tuple(encode_conversation(tokenizer, [{"role": "user", "content": text}]))
        except ValueError as error:
            fix = error.fix if isinstance(error, ExampleError) else "another prompt, or samples=()"
            refuse(field, text, f"prompts that the tokenizer can encode: {error}", fix, str(error))
        if len(ids) >= seq_len:
            shown = f"a prompt of {len(ids):,} tokens ({text[:40]!r}...)"
            refuse(field, shown, f"prompts shorter than the plan's seq_len={seq_len:,}", "a shorter prompt")
        prompts.append(Prompt(text=text, ids=ids))
    return tuple(prompts)


def decode_answer(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return the text of an answer, without special tokens."""
    text = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def find_end_ids(tokenizer: PreTrainedTokenizerBase, eos_token_id: object) -> list[int]:
    """Return the ids that end an answer: the tokenizer's, and those of a generation config."""
    ids = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    return sorted({id for id in (*ids, tokenizer.eos_token_id) if isinstance(id, int)})


def read_prompts(
    tokenizer: PreTrainedTokenizerBase, rows: Rows, format: Format, indices: Sequence[int], max_tokens: int
) -> Iterator[Prompt]:
    """Yield the prompt of each conversation: all before the assistant's last turn.

    Rows without one are left out, such as malformed ones, prompts of over ``max_tokens`` tokens, and those
    with the tokens of an earlier one. After :data:`MAX_REPEATED_ROWS` rows without a new prompt, once there
    is one, only as many of the others are read, evenly spaced. Each prompt has another text, by which samples
    are told apart. Raises ``ValueError`` if no conversation can be encoded.
    """
    seen_ids, texts = set[tuple[int, ...]](), set[str]()
    problem: ValueError | None = None
    num_rows_since = num_encoded = num_read = stride = 0
    while num_read < len(indices):
        index = indices[num_read]
        num_rows_since += 1
        if seen_ids and num_rows_since > MAX_REPEATED_ROWS and not stride:
            # Data are often sorted by their prompt, such as many answers to each.
            stride = max(1, (len(indices) - num_read) // MAX_REPEATED_ROWS)
        num_read += stride or 1
        try:
            messages = read_example(format, rows[index]).messages
            turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
            before = messages[: turns[-1]] if turns else ()
            questions = [message["content"] for message in before if message["role"] == "user"]
        except ValueError:
            continue
        if not questions:
            continue
        try:
            ids = tuple(encode_conversation(tokenizer, before))
        except ValueError as error:
            problem = problem or error
            continue
        num_encoded += 1
        if len(ids) <= max_tokens and ids not in seen_ids:
            # Many conversations end with the same words, such as "Are you sure?": alone they name none.
            question = questions[0] if len(questions) == 1 else f"{questions[0]} … {questions[-1]}"
            text = _distinguish_text(question, texts)
            seen_ids.add(ids)
            texts.add(text)
            num_rows_since = 0
            yield Prompt(text=text, ids=ids)
    if problem is not None and not num_encoded:
        raise problem


def _distinguish_text(question: str, texts: set[str]) -> str:
    """Return ``question``, with a number if it is among ``texts``: such as one about several documents."""
    text, number = question, 1
    while text in texts:
        number += 1
        text = f"{question} (conversation {number})"
    return text
