"""Examples as token ids, each with whether it bears loss, through the tokenizer's chat template."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from shardscope.training.examples.conversation import (
    add_start_ids,
    find_template,
    list_start_ids,
    render_conversation,
    report_template_errors,
)
from shardscope.training.examples.formats import Example, ExampleError, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LossOn: TypeAlias = Literal["completions", "all", "last"]
"""Tokens that bear loss: every turn of the assistant, every token, or the assistant's last turn."""
LOSS_ON: tuple[LossOn, ...] = ("completions", "all", "last")
MAX_CHARACTERS = 200_000
"""Characters of a text from which a preview estimates its number of tokens; tokenizing takes a tenth of a
second."""
MAX_TOKEN_CHARACTERS = 8
"""Characters of a token, at most, in the mean of a text."""
END_TOKENS = 64
"""Tokens at the end of a beginning that may differ from those of the whole text, the template's included."""
GENERATION_MARK = re.compile(r"\{%-?\s*generation\b")
"""Mark around the assistant's turns in a chat template, from which transformers makes a mask."""


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Token ids of one example."""

    ids: list[int]
    bears_loss: list[bool]
    """For each token, whether the model learns to predict it."""
    num_left_out: int = 0
    """Estimated number of tokens after these, of a text of which :class:`BeginningEncoder` read a part."""

    @property
    def length(self) -> int:
        """Number of tokens of the whole example."""
        return len(self.ids) + self.num_left_out

    def truncate(self, seq_len: int) -> Encoded:
        """Return the first ``seq_len`` tokens."""
        return Encoded(ids=self.ids[:seq_len], bears_loss=self.bears_loss[:seq_len])

    @property
    def num_loss_tokens(self) -> int:
        """Number of tokens that bear loss. The first one of a row never does: nothing precedes it."""
        return sum(self.bears_loss[1:]) + self.num_left_out


class Encoder:
    """Encoder of examples with one tokenizer.

    Masks come from the template's generation marks. A template without them is rendered up to each turn of
    the assistant, and again with that turn: the tokens in between are the completion. Raises ``ValueError``
    where the shorter rendering is no beginning of the longer one, as with templates that drop the reasoning
    of earlier turns.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, loss_on: LossOn) -> None:
        self._tokenizer, self._loss_on = tokenizer, loss_on
        self._template = find_template(tokenizer)
        self._eos = tokenizer.eos_token_id
        self._start_ids = list_start_ids(tokenizer)

    @property
    def has_template(self) -> bool:
        """Return whether the tokenizer has a chat template."""
        return self._template is not None

    def encode(self, example: Example) -> Encoded:
        """Return the tokens of ``example``, untruncated."""
        if not example.messages:
            ids = self._encode_plain(example.text)
            return Encoded(ids=ids, bears_loss=[True] * len(ids))
        return self.encode_messages(example.messages)

    def encode_pair(self, example: Example) -> tuple[Encoded, Encoded]:
        """Return the tokens of the chosen and of the rejected side of a preference pair, untruncated.

        Only answers bear loss. In two plain texts they begin at the first token that differs: what both have
        in common has the same probability, which the difference of the two does not depend on.
        """
        if example.messages:
            first = example.num_prompt_messages
            return self.encode_messages(example.messages, first), self.encode_messages(
                example.rejected, first
            )
        chosen, rejected = (self._encode_plain(text) for text in (example.text, example.rejected_text))
        pairs = zip(chosen, rejected, strict=False)
        start = next(
            (index for index, (one, other) in enumerate(pairs) if one != other),
            min(len(chosen), len(rejected)),
        )
        return _learn_from(chosen, start), _learn_from(rejected, start)

    def encode_messages(self, messages: Sequence[Message], first_turn: int = 0) -> Encoded:
        """Return the tokens of a conversation; turns before ``first_turn`` bear no loss."""
        if not self.has_template:
            return self._encode_without_template(messages)
        ids = self._render_messages(messages)
        if self._loss_on == "all":
            return Encoded(ids=ids, bears_loss=[True] * len(ids))
        assert self._template is not None
        if GENERATION_MARK.search(self._template) and self._loss_on == "completions":
            marks = self._read_generation_marks(messages)
            if first_turn:
                start = self._find_turn(messages, first_turn, ids)[0]
                marks[:start] = [False] * start
            return Encoded(ids=ids, bears_loss=marks)
        bears_loss = [False] * len(ids)
        for index in self._list_learned_turns(messages):
            if index < first_turn:
                continue
            start, end = self._find_turn(messages, index, ids)
            bears_loss[start:end] = [True] * (end - start)
        return Encoded(ids=ids, bears_loss=bears_loss)

    def _list_learned_turns(self, messages: Sequence[Message]) -> list[int]:
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        return turns[-1:] if self._loss_on == "last" else turns

    def _find_turn(self, messages: Sequence[Message], index: int, ids: list[int]) -> tuple[int, int]:
        """Return the token range of the assistant's turn ``index``: its text and its end-of-turn token."""
        prompt = self._render_messages(messages[:index], add_generation_prompt=True)
        with_turn = ids if index == len(messages) - 1 else self._render_messages(messages[: index + 1])
        if ids[: len(with_turn)] != with_turn or with_turn[: len(prompt)] != prompt:
            text = self._render_text(messages[:index], add_generation_prompt=True)
            if self._render_text(messages).startswith(text + messages[index]["content"]):
                # Such as a line break at the end of the prompt and one at the beginning of the answer.
                raise ExampleError(
                    f"the tokenizer joins the beginning of turn {index + 1} and the end of its prompt to one "
                    "token, which the model never sees when it generates",
                    "answers that begin without a line break or space, loss_on='all', or bad_rows='skip'",
                )
            raise ExampleError(
                f"the chat template changes earlier text when turn {index + 1} is added, so its completion "
                "has no fixed tokens",
                "loss_on='last' or 'all', or a template with {% generation %} marks",
            )
        # Templates write a line break after the end-of-turn token, which a generation never reaches.
        end = len(with_turn)
        if self._eos in with_turn[len(prompt) :]:
            end = len(with_turn) - with_turn[::-1].index(self._eos)
        return len(prompt), end

    def _read_generation_marks(self, messages: Sequence[Message]) -> list[bool]:
        with report_template_errors():
            rendered = self._tokenizer.apply_chat_template(
                list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
        assert not isinstance(rendered, str | list)
        return [bool(flag) for flag in rendered["assistant_masks"]]

    def _render_messages(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False
    ) -> list[int]:
        # The template has written the special tokens.
        return self._encode_text(self._render_text(messages, add_generation_prompt=add_generation_prompt))

    def _render_text(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        return render_conversation(self._tokenizer, messages, add_generation_prompt=add_generation_prompt)

    def _encode_without_template(self, messages: Sequence[Message]) -> Encoded:
        """Return a prompt and a completion in plain text, with the end token after the completion."""
        if [message["role"] for message in messages] != ["user", "assistant"]:
            raise ExampleError(
                "the tokenizer has no chat template, which messages need",
                "a chat_template.jinja in the weights folder, or rows of one prompt and one completion",
            )
        prompt, completion = (self._encode_text(message["content"]) for message in messages)
        prompt = add_start_ids(self._start_ids, prompt)
        completion = completion + self._list_end_ids()
        learns_prompt = self._loss_on == "all"
        return Encoded(
            ids=prompt + completion, bears_loss=[learns_prompt] * len(prompt) + [True] * len(completion)
        )

    def _encode_plain(self, text: str) -> list[int]:
        """Return the tokens of a text outside of a chat template, between its start and end tokens."""
        return add_start_ids(self._start_ids, self._encode_text(text)) + self._list_end_ids()

    def _encode_text(self, text: str) -> list[int]:
        encoded = self._tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)
        ids: list[int] = encoded["input_ids"]
        return ids

    def _list_end_ids(self) -> list[int]:
        return [] if self._eos is None else [self._eos]


class BeginningEncoder(Encoder):
    """Encoder that reads no more than the beginning of a long text at the end of an example, for previews.

    Tokens up to ``seq_len`` (None: of 200,000 characters) are those of the whole text; the number of the
    others is estimated. Preference pairs are read as a whole.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, loss_on: LossOn, seq_len: int | None) -> None:
        super().__init__(tokenizer, loss_on)
        self._min_tokens = (seq_len or 0) + END_TOKENS
        self._max_characters = max(MAX_CHARACTERS, MAX_TOKEN_CHARACTERS * self._min_tokens)
        self.num_estimated = 0
        """Number of examples whose length is estimated."""

    def encode(self, example: Example) -> Encoded:
        """See :class:`Encoder`."""
        text = example.messages[-1]["content"] if example.messages else example.text
        if len(text) <= self._max_characters:
            return super().encode(example)
        beginning = text[: self._max_characters]
        if example.messages:
            last: Message = {**example.messages[-1], "content": beginning}
            encoded = super().encode(replace(example, messages=(*example.messages[:-1], last)))
        else:
            encoded = super().encode(replace(example, text=beginning))
        # Tokens of many characters, as of spaces: the beginning may end within the sequence.
        if len(encoded.ids) < self._min_tokens:
            return super().encode(example)
        self.num_estimated += 1
        num_read = len(beginning) + sum(len(message["content"]) for message in example.messages[:-1])
        num_left_out = round((len(text) - len(beginning)) * len(encoded.ids) / num_read)
        return replace(encoded, num_left_out=num_left_out)


def _learn_from(ids: list[int], start: int) -> Encoded:
    """Return ``ids``, with loss on those from ``start``."""
    return Encoded(ids=ids, bears_loss=[index >= start for index in range(len(ids))])
