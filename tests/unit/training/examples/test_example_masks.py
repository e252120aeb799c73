"""Tests of fine-tuning examples: formats, which tokens bear loss, previews and error messages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.requirements import needs

needs("datasets")
needs("transformers")

from shardscope.core.errors import FieldError  # noqa: E402
from shardscope.training.data.tokenizer import SHIPPED_TOKENIZER  # noqa: E402
from shardscope.training.examples import encoding, preview  # noqa: E402
from shardscope.training.examples.conversation import (  # noqa: E402
    encode_conversation,
    encode_prompts,
    read_prompts,
)
from shardscope.training.examples.encoding import Encoder  # noqa: E402
from shardscope.training.examples.formats import read_example, recognize_format  # noqa: E402
from shardscope.training.examples.preview import Preview, preview_examples  # noqa: E402
from shardscope.training.examples.rows import open_rows, resolve_source  # noqa: E402
from shardscope.training.examples.token_table import (  # noqa: E402
    RowCounts,
    build_table,
    check_examples,
    iterate_encoded,
)

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Qwen3 drops the reasoning of earlier turns in this way.
FORGETFUL = (
    "{% for m in messages %}{{ m['role'] + ':\n' }}{{ m['content'] if m['role'] == 'user' or loop.last }}"
    "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
)
TALK = [
    {"role": "user", "content": "Call me"},
    {"role": "assistant", "content": "Ishmael"},
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": "At sea"},
]


def create_tokenizer(template: str | None = CHATML) -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(SHIPPED_TOKENIZER), eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = template
    return tokenizer


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def preview_rows(rows: list[dict[str, Any]], tokenizer: Any = None, **options: Any) -> Preview:
    format = recognize_format("Finetune.data", list(rows[0]), options.pop("columns", None))
    chosen = {"num_shown": 5, "seq_len": None, "loss_on": "completions", "bad_rows": "refuse", **options}
    opened = open_rows("Finetune.data", rows)
    return preview_examples(
        "Finetune.data", "rows", opened, format, tokenizer or create_tokenizer(), **chosen
    )


def check_rows_left(rows: list[dict[str, Any]], template: str, bad_rows: Any) -> None:
    """Encode the rows as a launch does, which refuses data without a row that is left."""
    tokenizer, counts = create_tokenizer(template), RowCounts()
    opened, format = open_rows("Finetune.data", rows), recognize_format("Finetune.data", list(rows[0]))
    encoder = Encoder(tokenizer, "completions")
    for _ in iterate_encoded(
        "Finetune.data", opened, format, encoder, seq_len=64, bad_rows=bad_rows, counts=counts
    ):
        pass
    check_examples("Finetune.data", counts, 64, bad_rows, None)


def read_learned_text(row: Any) -> str:
    """Return the learned text of a preview's row; "|" separates learned pieces."""
    pieces = [
        token if bears_loss else "|" for token, bears_loss in zip(row.tokens, row.bears_loss, strict=True)
    ]
    return "|".join(part for part in "".join(pieces).split("|") if part)


# Two examples of each format, with the learned text written down by hand.
CASES: list[tuple[str, list[dict[str, Any]], list[str]]] = [
    ("text", [{"text": "Call me"}, {"text": "a whale"}], ["Call me<|im_end|>", "a whale<|im_end|>"]),
    (
        "prompt-completion",
        [{"question": "Who?", "answer": "Ahab"}, {"question": "Where?", "answer": "At sea"}],
        ["Ahab<|im_end|>", "At sea<|im_end|>"],
    ),
    (
        "instruction",
        [
            {"instruction": "Name it", "input": "a fish", "output": "Whale"},
            {"instruction": "Greet", "input": "", "output": "Ahoy"},
        ],
        ["Whale<|im_end|>", "Ahoy<|im_end|>"],
    ),
    (
        "messages",
        [{"messages": TALK}, {"messages": TALK[:2]}],
        ["Ishmael<|im_end|>|At sea<|im_end|>", "Ishmael<|im_end|>"],
    ),
    (
        "messages",
        [
            {"conversations": [{"from": "human", "value": "Call me"}, {"from": "gpt", "value": "Ishmael"}]},
            {"conversations": [{"from": "human", "value": "Where?"}, {"from": "gpt", "value": "At sea"}]},
        ],
        ["Ishmael<|im_end|>", "At sea<|im_end|>"],
    ),
    (
        "preference",
        [
            {"prompt": "Who?", "chosen": "Ahab", "rejected": "Nobody"},
            {"prompt": "Where?", "chosen": "At sea", "rejected": "At home"},
        ],
        ["Ahab<|im_end|>", "Nobody<|im_end|>", "At sea<|im_end|>", "At home<|im_end|>"],
    ),
]


@pytest.mark.parametrize(
    ("name", "rows", "expected"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_the_completion_and_its_end_token_bear_loss(
    name: str, rows: list[dict[str, Any]], expected: list[str]
) -> None:
    shown = preview_rows(rows)
    assert shown.format.name == name
    assert [read_learned_text(row) for row in shown.rows] == expected


def test_the_rest_of_a_row_is_the_templates_prompt() -> None:
    row = preview_rows([{"prompt": "Who?", "completion": "Ahab"}]).rows[0]
    assert "".join(row.tokens) == "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\nAhab<|im_end|>\n"


@pytest.mark.parametrize(
    ("loss_on", "expected"),
    [("completions", "Ishmael<|im_end|>|At sea<|im_end|>"), ("last", "At sea<|im_end|>")],
)
@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["without marks", "with generation marks"])
def test_generation_marks_and_prompt_lengths_give_the_same_mask(
    template: str, loss_on: str, expected: str
) -> None:
    shown = preview_rows([{"messages": TALK}], create_tokenizer(template), loss_on=loss_on)
    assert read_learned_text(shown.rows[0]) == expected


def test_every_token_bears_loss_if_requested() -> None:
    row = preview_rows([{"messages": TALK}], loss_on="all").rows[0]
    assert all(row.bears_loss)


def test_a_template_that_changes_earlier_turns_is_refused_with_a_fix() -> None:
    tokenizer = create_tokenizer(FORGETFUL)
    with pytest.raises(ValueError, match=r"row 1.*loss_on='last'"):
        preview_rows([{"messages": TALK}], tokenizer)
    assert (
        read_learned_text(preview_rows([{"messages": TALK}], tokenizer, loss_on="last").rows[0])
        == "At sea<|im_end|>"
    )


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["without marks", "with generation marks"])
def test_a_conversation_that_the_template_refuses_is_a_malformed_row(template: str) -> None:
    # As Gemma's template does, and Mistral's for other conversations.
    refusal = "{{ raise_exception('System role not supported') }}"
    strict = f"{{% if messages[0]['role'] == 'system' %}}{refusal}{{% endif %}}"
    tokenizer = create_tokenizer(strict + template)
    rows = [{"messages": TALK}, {"messages": [{"role": "system", "content": "Be brief."}, *TALK]}]
    with pytest.raises(ValueError, match=r"Row 2: .*System role not supported.*bad_rows='skip'"):
        preview_rows(rows, tokenizer)
    assert preview_rows(rows, tokenizer, bad_rows="skip").counts.num_examples == 1
    format = recognize_format("data", ["messages"])
    prompts = list(read_prompts(tokenizer, open_rows("data", rows), format, range(2), max_tokens=64))
    assert len(prompts) == 1


def test_rows_that_are_all_refused_by_the_template_are_reported_with_its_reason() -> None:
    """All rows with a system message, and Gemma's template: the error ended before the reason."""
    refusal = "{{ raise_exception('System role not supported') }}"
    strict = f"{{% if messages[0]['role'] == 'system' %}}{refusal}{{% endif %}}"
    rows = [{"system": "Be brief.", "prompt": "Who?", "completion": "Ahab"}] * 20
    with pytest.raises(ValueError, match=r"20 rows, all malformed.*Row 1, .*System role not supported"):
        check_rows_left(rows, strict + CHATML, "skip")


def test_rows_with_one_reason_are_named_together() -> None:
    """The error had the reason once for each of the first five rows."""
    rows = [{"prompt": "Who?", "completion": ""}] * 3 + [{"prompt": "", "completion": "Ahab"}]
    with pytest.raises(FieldError, match=r"Row 1, row 2 and row 3: .*; row 4: ") as caught:
        check_rows_left(rows, CHATML, "skip")
    assert str(caught.value).count("completion is empty") == 1


# Mistakes of a template, and the name of the error that Jinja or Python raises for each.
BROKEN_TEMPLATES = {
    "TemplateSyntaxError": "{% for m in messages %}{{ m['content'] }}",
    "UndefinedError": "{{ setings.style }}" + CHATML,
    "TypeError": "{{ messages[0]['content'] + 1 }}",
    "ZeroDivisionError": "{{ 1 / (messages | length - messages | length) }}",
    "OverflowError": "{{ range(10 ** 30) }}",
}


@pytest.mark.parametrize("bad_rows", ["refuse", "skip"])
@pytest.mark.parametrize("kind", BROKEN_TEMPLATES)
def test_a_template_with_a_mistake_is_the_cause_not_the_rows(kind: str, bad_rows: str) -> None:
    with pytest.raises(FieldError, match=f"chat template fails with {kind}") as caught:
        check_rows_left([{"messages": TALK}], BROKEN_TEMPLATES[kind], bad_rows)
    assert caught.value.field == "Finetune.data"
    assert "chat template" in caught.value.fix
    assert "repair row" not in str(caught.value) and "bad_rows" not in caught.value.fix


def test_a_template_that_fails_at_some_rows_offers_to_skip_them() -> None:
    template = (
        "{% if messages[0]['role'] == 'user' %}{{ messages[0]['content'].split('|')[1] + '' }}{% endif %}"
    )
    rows = [{"prompt": prompt, "completion": "Ahab"} for prompt in ("Book|Who?", "Who?")]
    with pytest.raises(FieldError, match=r"Row 2: .*chat template") as caught:
        check_rows_left(rows, template + CHATML, "refuse")
    assert "bad_rows='skip'" in str(caught.value.fix)


@pytest.mark.parametrize("kind", [*BROKEN_TEMPLATES, "refusal"])
def test_prompts_that_cannot_be_encoded_are_refused_with_field_and_fix(kind: str) -> None:
    refusal = "{{ raise_exception('No system message') }}"
    tokenizer = create_tokenizer(BROKEN_TEMPLATES.get(kind, refusal))
    with pytest.raises(
        FieldError, match=r"^Finetune.samples is 'Who\?'; .*chat template.*Nearest fix: "
    ) as caught:
        encode_prompts("Finetune.samples", tokenizer, ["Who?"], 64)
    assert ("No system message" if kind == "refusal" else kind) in str(caught.value)
    # Of the data, no row is too long for the sequence.
    rows: Any = [{"messages": TALK}]
    format = recognize_format("data", ["messages"])
    with pytest.raises(ValueError, match="chat template"):
        next(read_prompts(tokenizer, rows, format, range(1), max_tokens=64))


def test_a_prompt_without_a_token_has_one_fix() -> None:
    with pytest.raises(
        FieldError, match=r"^Finetune.samples is ''; .*no tokens. Nearest fix: a longer text.$"
    ):
        encode_prompts("Finetune.samples", create_tokenizer("{{ '' }}"), [""], 64)


def test_without_a_template_pairs_are_plain_text_and_messages_are_refused() -> None:
    tokenizer = create_tokenizer(None)
    row = preview_rows([{"prompt": "Who? ", "completion": "Ahab"}], tokenizer).rows[0]
    assert "".join(row.tokens) == "Who? Ahab<|im_end|>" and read_learned_text(row) == "Ahab<|im_end|>"
    assert "no chat template" in str(preview_rows([{"prompt": "Who? ", "completion": "Ahab"}], tokenizer))
    with pytest.raises(ValueError, match="no chat template"):
        preview_rows([{"messages": TALK}], tokenizer)


def test_the_default_of_several_templates_is_used() -> None:
    """Such as those of Command R and Hermes, in ``additional_chat_templates``."""
    tokenizer = create_tokenizer()
    tokenizer.chat_template = {"default": CHATML, "tool_use": MARKED}
    rows = [{"prompt": "Who?", "completion": "Ahab"}]
    assert preview_rows(rows, tokenizer).rows == preview_rows(rows).rows
    messages = [{"role": "user", "content": "Who?"}]
    assert encode_conversation(tokenizer, messages) == encode_conversation(create_tokenizer(), messages)


@pytest.mark.parametrize("starts", [False, True])
def test_a_plain_text_begins_as_the_tokenizer_begins_it(starts: bool) -> None:
    """Llama's and Gemma's put a token before each text; a chat template writes its own."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = create_tokenizer(None)
    tokenizer.bos_token = "<|im_start|>"
    if starts:
        special = [("<|im_start|>", tokenizer.bos_token_id)]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<|im_start|> $A", None, special)
    rows: list[dict[str, Any]]
    for rows in (
        [{"text": "Call me"}],
        [{"prompt": "Call me ", "completion": "Ishmael"}],
        [{"chosen": "Call me", "rejected": "Call you"}],
        [{"text": "<|im_start|>Call me"}],
    ):
        ids = preview_rows(rows, tokenizer).rows[0].ids
        is_rendered = "<|im_start|>" in str(rows)
        assert ids.count(tokenizer.bos_token_id) == (starts or is_rendered)
        assert (ids[0] == tokenizer.bos_token_id) == (starts or is_rendered)
    prompt = encode_conversation(tokenizer, [{"role": "user", "content": "Call me "}])
    assert prompt == tokenizer("Call me ")["input_ids"]


def test_an_answer_that_the_tokenizer_joins_with_its_prompt_is_refused_for_that_reason() -> None:
    """As SmolLM2's and Qwen's do with the template's line break and two more of the answer."""
    tokenizer = create_tokenizer(CHATML.replace("\n'", " '"))
    assert len(preview_rows([{"prompt": "Who?", "completion": "\nAhab"}], tokenizer).rows) == 1
    with pytest.raises(ValueError, match=r"row 1.*tokenizer joins.*bad_rows='skip'"):
        preview_rows([{"prompt": "Who?", "completion": "Ahab"}], tokenizer)


def test_a_character_of_several_tokens_is_shown_once() -> None:
    row = preview_rows([{"prompt": "?", "completion": "Ahab 🐋 ü"}]).rows[0]
    assert "Ahab 🐋 ü<|im_end|>" in "".join(row.tokens)


# ---- Truncation and rows without loss


LONG_PROMPT = {"prompt": "whale " * 60, "completion": "Yes"}


@pytest.mark.parametrize("bad_rows", ["skip", "skip_truncated"])
def test_truncation_is_counted_and_rows_without_loss_are_left_out(bad_rows: str) -> None:
    rows = [{"prompt": "Who?", "completion": "Ahab"}, LONG_PROMPT]
    full = preview_rows(rows)
    short = min(full.lengths)
    shown = preview_rows(rows, seq_len=short, bad_rows=bad_rows)
    assert shown.counts.num_truncated_rows == 1 == shown.counts.num_rows_without_loss
    assert shown.counts.num_truncated_tokens == max(full.lengths) - short
    assert len(shown.rows) == 1 and shown.refusal is None
    assert f"Left out: 1 row without a token that bears loss (row 2: seq_len={short} cuts off" in str(shown)


def test_a_preview_shows_the_rows_for_which_a_run_refuses_the_data() -> None:
    rows = [{"prompt": "Who?", "completion": "Ahab"}, LONG_PROMPT, {"prompt": "Why?", "completion": "No"}]
    full = preview_rows(rows)
    longest = -(-max(full.lengths) // 8) * 8
    start = full.rows[1].bears_loss.index(True) + 1
    shown = preview_rows(rows, seq_len=start - 1, max_seq_len=longest)
    assert shown.refusal is not None and shown.refusal.field == "Finetune.data"
    message = str(shown.refusal)
    assert f"Row 2: seq_len={start - 1} cuts off its completion, which begins at token {start}" in message
    assert f"Nearest fix: Recipe(seq_len={longest}), which keeps it, or Finetune(bad_rows='skip')" in message
    assert [row.index for row in shown.rows] == [0, 1, 2] and not any(shown.rows[1].bears_loss)
    assert "1 row without" in shown.sentences[1] and "row 2" in shown.to_html()
    # One more token is enough, and a shorter sequence than the completion's start is no fix.
    assert preview_rows(rows, seq_len=start).refusal is None
    unfixed = preview_rows(rows, seq_len=start - 2, max_seq_len=start - 1).refusal
    assert unfixed is not None and "Recipe(" not in str(unfixed) and "bad_rows='skip'" in str(unfixed)


def test_the_recommended_length_keeps_what_would_be_refused() -> None:
    rows = [{"prompt": "Who?", "completion": "Ahab"}] * 200 + [LONG_PROMPT]
    shown = preview_rows(rows, seq_len=48)
    advice = shown.recommend_length(512)
    assert advice is not None and "leave nothing to learn in 1 row" in advice.why
    better = preview_rows(rows, seq_len=advice.seq_len)
    assert better.refusal is None and better.recommend_length(512) is None
    # Where such rows are left out, one of 201 does not set the length.
    skipping = preview_rows(rows, seq_len=advice.seq_len, bad_rows="skip_truncated").recommend_length(512)
    assert skipping is not None and skipping.seq_len < 48


def test_rows_that_teach_nothing_at_any_length_do_not_set_the_recommended_one() -> None:
    usual = [{"prompt": "Who?", "completion": "Ahab"}] * 20
    rows = [*usual, *[{"prompt": "whale " * 900, "completion": "Ahab"}] * 5]
    shown = preview_rows(rows, seq_len=256, bad_rows="skip_truncated")
    expected = preview_rows(usual, seq_len=256)
    advice, alone = shown.recommend_length(512), expected.recommend_length(512)
    assert advice is not None and alone is not None and advice.seq_len == alone.seq_len
    # Nor are they packed.
    assert shown.compute_packing_gain(256) == expected.compute_packing_gain(256)
    windows = f"Packing makes {expected.count_windows(256)} window"
    assert windows in str(shown) and windows in str(expected)


def test_a_quantile_of_the_lengths_is_the_smallest_that_holds_its_share() -> None:
    lengths = [*range(1, 20), 900]
    shown = replace(preview_rows([{"prompt": "Who?", "completion": "Ahab"}]), lengths=lengths)
    assert [shown.length_at(share) for share in (0.5, 0.95, 1.0)] == [10, 19, 900]


def test_rows_that_never_bear_loss_are_refused_unless_all_bad_rows_are_skipped() -> None:
    unmarked = MARKED.replace("'assistant' %}{% generation", "'tool' %}{% generation")
    rows = [{"prompt": "Who?", "completion": "Ahab"}, {"prompt": "Where?", "completion": "At sea"}]
    for bad_rows in ("refuse", "skip_truncated"):
        shown = preview_rows(rows, create_tokenizer(unmarked), bad_rows=bad_rows)
        assert shown.refusal is not None
        assert "2 rows without a token that bears loss" in str(shown.refusal)
        assert "Row 1 and row 2: no token of it bears loss" in str(shown.refusal)
    with pytest.raises(ValueError, match="no token of it bears loss"):
        preview_rows(rows, create_tokenizer(unmarked), bad_rows="skip")


def test_data_whose_rows_are_all_cut_before_the_completion_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Nearest fix: Recipe\(seq_len=\d+\), which keeps all of them\."):
        preview_rows([LONG_PROMPT] * 7, seq_len=8, bad_rows="skip")
    message = str(preview_rows([LONG_PROMPT] * 7, seq_len=8).refusal)
    assert "7 rows without" in message and "row 5: " in message and "row 6" not in message
    assert "; and 2 more. Nearest fix" in message


@pytest.mark.parametrize(
    ("lengths", "seq_len", "expected", "reason"),
    [
        ([30, 40, 57], 4096, 64, "99 % of a row of 4,096 tokens is padding"),
        ([30, 40, 57], 64, None, ""),
        ([30, 40, 57], 80, 64, "47 % of a row of 80 tokens is padding"),
        ([60, 60, 62], 80, None, "25 % padding is no reason"),
        ([100, 100, 100], 64, 104, "cut off 36.0 %"),
        ([65] + [30] * 99, 64, 32, "hold all but 1.1 % of the data"),
        ([900] * 10, 64, 512, "hold all but 43.1 % of the data"),
        ([900] * 10, 512, None, "the model's maximum"),
        ([16] * 90 + [400] * 10, 64, 400, "400 tokens hold the longest row."),
    ],
)
def test_a_better_sequence_length_is_recommended(
    lengths: list[int], seq_len: int, expected: int | None, reason: str
) -> None:
    shown = replace(
        preview_rows([{"prompt": "Who?", "completion": "Ahab"}]), lengths=lengths, seq_len=seq_len
    )
    advice = shown.recommend_length(512)
    assert (advice.seq_len if advice else None) == expected
    if advice is not None:
        assert reason in advice.why
        assert replace(shown, seq_len=advice.seq_len).recommend_length(512) is None, "once is enough"


def test_a_preview_counts_as_training_does() -> None:
    rows = [{"prompt": f"{'whale ' * n}?", "completion": "Ahab"} for n in range(1, 30)]
    shown = preview_rows(rows, seq_len=24)
    format = recognize_format("data", list(rows[0]))
    counts = RowCounts()
    encoder = Encoder(create_tokenizer(), "completions")
    opened = open_rows("data", rows)
    table = build_table(
        iterate_encoded("data", opened, format, encoder, seq_len=24, bad_rows="refuse", counts=counts)
    )
    assert shown.counts == counts
    assert len(table) == counts.num_examples and len(table.ids) == counts.num_tokens


# ---- Long rows


class CountingTokenizer:
    """A tokenizer that counts the characters that it reads."""

    def __init__(self) -> None:
        self.tokenizer, self.num_characters = create_tokenizer(), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, text: str, **options: Any) -> Any:
        self.num_characters += len(text)
        return self.tokenizer(text, **options)


@pytest.mark.parametrize("kind", ["prompt-completion", "text", "messages"])
def test_a_row_of_megabytes_is_read_as_far_as_it_is_shown(kind: str) -> None:
    story = "Call me Ishmael, some years ago. " * 40_000

    def build_rows(text: str) -> list[dict[str, Any]]:
        turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": text}]
        return {
            "text": [{"text": text}],
            "messages": [{"messages": turns}],
            "prompt-completion": [{"prompt": "Who?", "completion": text}],
        }[kind]

    tokenizer = CountingTokenizer()
    shown = preview_rows(build_rows(story), tokenizer, seq_len=64)
    assert tokenizer.num_characters < 500_000 < len(story)
    # The same window as of a text that is read as a whole; and its length, to a few tokens of the template.
    usual = preview_rows(build_rows(story[:100_000]), seq_len=64)
    assert shown.rows == usual.rows and usual.num_estimated_rows == 0
    assert shown.num_estimated_rows == 1 and "estimated from its beginning" in str(shown)
    assert shown.lengths[0] == pytest.approx(usual.lengths[0] * len(story) / 100_000, rel=0.01)
    assert shown.counts.num_truncated_tokens == shown.lengths[0] - 64
    # Uncut, the tokens after the beginning are a number.
    uncut = preview_rows(build_rows(story))
    assert len(uncut.rows[0].ids) + uncut.rows[0].num_left_out == uncut.lengths[0] == shown.lengths[0]
    assert f"about {uncut.rows[0].num_left_out:,} more" in uncut.to_html()


def test_a_long_text_of_few_tokens_is_read_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "MAX_CHARACTERS", 1000)
    monkeypatch.setattr(encoding, "MAX_TOKEN_CHARACTERS", 1)
    shown = preview_rows([{"text": "whale " * 2000}], seq_len=1000)
    assert shown.num_estimated_rows == 0 and len(shown.rows[0].ids) == 1000 < shown.lengths[0]


def test_of_many_long_rows_fewer_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preview, "MAX_SAMPLED_CHARACTERS", 100_000)
    tokenizer = CountingTokenizer()
    shown = preview_rows([{"text": "whale " * 400}] * 100, tokenizer, seq_len=64)
    assert tokenizer.num_characters < 120_000 and shown.counts.num_rows >= 40
    assert [row.index for row in shown.rows] == [0, 1, 2, 3, 4]
    assert f"(measured on {shown.counts.num_rows} of them)" in shown.sentences[0]


# ---- Bad input


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "Who?", "completion": ""}, "completion is empty"),
        ({"prompt": None, "completion": "Ahab"}, "prompt is missing"),
    ],
)
def test_a_malformed_row_is_refused_by_number_or_skipped(row: dict[str, Any], reason: str) -> None:
    rows = [{"prompt": "Where?", "completion": "At sea"}, row]
    with pytest.raises(ValueError, match=f"row 2.*{reason}.*bad_rows='skip'"):
        preview_rows(rows)
    shown = preview_rows(rows, bad_rows="skip")
    assert shown.counts.num_bad_rows == 1 and reason in str(shown)


def test_an_error_of_data_says_what_is_wrong_with_them(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="prompt is int, neither text nor a list of messages"):
        preview_rows([{"prompt": 7, "completion": "Ahab"}])
    with pytest.raises(ValueError, match="data is 'an empty list'; allowed"):
        resolve_source("Finetune.data", [])
    with pytest.raises(ValueError, match="data is 'ndarray'; allowed"):
        resolve_source("Finetune.data", np.array(["a", "b"]))
    (tmp_path / "a.parquet").write_text("PAR1 and no more")
    with pytest.raises(ValueError, match=r"a readable \.parquet file: .*[^.]\. Nearest fix"):
        open_rows("Finetune.data", tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "empty"),
        ([{"role": "user", "content": "Who?"}], "no turn of the assistant"),
        ([{"role": "captain", "content": "Ahoy"}], "role 'captain'"),
        ([{"role": "assistant", "content": "Ahoy"}], "starts with the assistant"),
        # Learned without these, the answer would be another one.
        ([*TALK, {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}], "has tool_calls"),
        ([*TALK, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}], "has tool_calls"),
        ([*TALK, {"role": "assistant", "content": "x", "reasoning_content": "y"}], "has reasoning_content"),
        ([*TALK, {"role": "assistant", "content": "Wrong", "weight": 0}], "weight 0"),
        ([{"role": "user", "content": [{"type": "text", "text": "Who?"}]}, TALK[1]], "list as content"),
        ('[{"role": "user", "content": "Who?"}]', "messages is text"),
    ],
)
def test_a_conversation_without_answers_to_learn_is_refused(messages: list[Any], reason: str) -> None:
    format = recognize_format("data", ["messages"])
    with pytest.raises(ValueError, match=reason):
        read_example(format, {"messages": messages})


def test_keys_of_a_message_without_a_value_are_ignored() -> None:
    """Files in which only some messages have them are read with null in all others."""
    unused = {"tool_calls": None, "weight": None, "name": "Ishmael"}
    talk = [{**TALK[0], **unused, "weight": 0}, {**TALK[1], **unused, "weight": 1, "tool_calls": []}]
    row = {"messages": talk, "tools": None}
    assert read_example(recognize_format("data", list(row)), row).messages == tuple(TALK[:2])


@pytest.mark.parametrize("as_text", [True, False])
def test_tools_that_the_system_message_defines_are_accepted(as_text: bool) -> None:
    """As in Hermes' rows, whose definitions are in a column and in the system message."""
    parameters = {"type": "object", "properties": {"city": {"type": "string"}, "unused": None}}
    tools: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
    defined = {"role": "system", "content": f"You may call: {json.dumps(tools)}"}
    row: dict[str, Any] = {"tools": json.dumps(tools) if as_text else tools}
    format = recognize_format("data", ["messages", "tools"])
    assert len(read_example(format, {**row, "messages": [defined, *TALK[:2]]}).messages) == 3
    for content in ("Be brief.", "You may call get_weather of a city.", 'You may call "get_weather".'):
        system = {"role": "system", "content": content}
        with pytest.raises(ValueError, match="tools is not read"):
            read_example(format, {**row, "messages": [system, *TALK[:2]]})


def test_tools_beside_messages_are_refused_in_other_formats_a_column() -> None:
    row: dict[str, Any] = {"messages": TALK, "tools": [{"type": "function"}]}
    with pytest.raises(ValueError, match="tools is not read"):
        read_example(recognize_format("data", list(row)), row)
    row = {"prompt": "Fix it", "completion": "Done", "tools": "a hammer"}
    assert len(read_example(recognize_format("data", list(row)), row).messages) == 2


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TALK[:2]},
        {"conversations": [{"from": "human", "value": "Call me"}, {"from": "gpt", "value": "Ishmael"}]},
        {"prompt": TALK[:1], "completion": TALK[1:2]},
        {"prompt": "Call me", "completion": "Ishmael"},
    ],
    ids=["messages", "ShareGPT", "turns", "text"],
)
def test_a_system_column_begins_the_conversation(row: dict[str, Any]) -> None:
    row = {"system": "Be brief", **row}
    format = recognize_format("data", list(row))
    system = {"role": "system", "content": "Be brief"}
    assert read_example(format, row).messages == (system, *TALK[:2])
    own = {"role": "system", "content": "Be a whale"}
    if isinstance(row.get("messages"), list):
        assert read_example(format, {**row, "messages": [own, *TALK[:2]]}).messages == (own, *TALK[:2])


def test_a_system_column_is_found_as_other_columns_are() -> None:
    row = {"System Prompt": "unknown", " System ": "Be brief", "Prompt": "Call me", "Completion": "Ishmael"}
    shown = preview_rows([row])
    assert "Be brief" in "".join(shown.rows[0].tokens)
    assert shown.unread_columns == ("System Prompt",)


def test_columns_that_are_not_read_are_named() -> None:
    row = {"id": "7", "context": "The ship is the Pequod.", "question": "Which ship?", "answer": "Pequod"}
    assert "Columns that are not read: context." in preview_rows([row]).sentences
    assert preview_rows([{**row, "system": "Be brief"}]).unread_columns == ("context",)
    assert not preview_rows([{"messages": TALK, "tools": None}]).unread_columns


def test_unknown_columns_are_named_with_a_mapping() -> None:
    with pytest.raises(ValueError, match=r'columns=\{"prompt": "q", "completion": "a"\}'):
        recognize_format("Finetune.data", ["q", "a"])
    format = recognize_format("Finetune.data", ["q", "a"], {"prompt": "q", "completion": "a"})
    assert format.name == "prompt-completion"
    with pytest.raises(ValueError, match="columns is 'z'"):
        recognize_format("Finetune.data", ["q", "a"], {"prompt": "z", "completion": "a"})
    with pytest.raises(ValueError, match=r"role is 'question'.*Nearest fix: 'prompt'"):
        recognize_format("Finetune.data", ["q", "a"], {"question": "q", "completion": "a"})
    # The question would contain its answer.
    with pytest.raises(ValueError, match="a column of its own for each role"):
        roles = {"instruction": "q", "input": "a", "output": "a"}
        recognize_format("Finetune.data", ["q", "a"], roles)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        # A usual name of two roles is the one of the format that the other roles are of.
        ({"instruction": "q", "response": "a"}, {"instruction": "q", "output": "a"}),
        ({"prompt": "q", "response": "a"}, {"prompt": "q", "completion": "a"}),
        ({"instruction": "q", "answer": "a"}, {"instruction": "q", "output": "a"}),
        ({"prompt": "q", "completion": "q"}, {"prompt": "q", "completion": "a"}),
        ({"chosen": "a", "rejected": "a"}, {"chosen": "q", "rejected": "a"}),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, {"prompt": "q", "chosen": "a", "rejected": "b"}),
        ({"instruction": "q", "input": "a", "output": "a"}, {"instruction": "q", "output": "a"}),
        ({"prompt": "q"}, {"prompt": "q", "completion": "a"}),
    ],
)
def test_the_fix_of_a_mapping_is_one_of_the_same_format_and_accepted(
    columns: dict[str, str], expected: dict[str, str]
) -> None:
    names = ["q", "a", "b"] if len(columns) == 3 and "chosen" in columns else ["q", "a"]
    with pytest.raises(FieldError) as caught:
        recognize_format("Finetune.data", names, columns)
    fix = caught.value.fix
    if fix.startswith("columns="):
        fixed = json.loads(fix.removeprefix("columns="))
    else:
        # Another name of the role that the error is about.
        fixed = {
            fix.strip("'") if f"role is '{role}'" in str(caught.value) else role: column
            for role, column in columns.items()
        }
    assert fixed == expected
    recognize_format("Finetune.data", names, fixed)


def test_a_pair_whose_columns_are_one_in_the_data_needs_other_data() -> None:
    for columns in ({"chosen": "a", "rejected": "a"}, {"prompt": "q", "chosen": "a", "rejected": "a"}):
        with pytest.raises(
            FieldError, match=r"Nearest fix: data with a column of its own for each of .*rejected"
        ):
            recognize_format("Finetune.data", sorted({*columns.values()}), columns)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"text": "a"}\n{"text": \n', "line 2"),
        ('{"text": "a"}\n[1]\n', "line 2"),
        ("", "empty"),
    ],
)
def test_a_broken_file_is_refused_with_its_line(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=reason):
        open_rows("Finetune.data", path)


def test_files_folders_frames_and_datasets_have_the_same_rows(tmp_path: Path) -> None:
    import datasets
    import pandas

    rows = [{"prompt": "Who?", "completion": "Ahab"}, {"prompt": "Where?", "completion": 'At\nsea, "now"'}]
    frame = pandas.DataFrame(rows)
    (tmp_path / "folder").mkdir()
    write_lines(tmp_path / "folder" / "a.jsonl", rows[:1])
    write_lines(tmp_path / "folder" / "b.jsonl", rows[1:])
    frame.to_csv(tmp_path / "rows.csv", index=False)
    frame.to_csv(tmp_path / "rows.tsv", index=False, sep="\t")
    frame.to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    files = [
        tmp_path / name for name in ("folder", "rows.csv", "rows.tsv", "rows.parquet", "rows.json", "saved")
    ]
    for source in (*files, frame, rows, datasets.Dataset.from_list(rows)):
        opened = open_rows("data", resolve_source("data", source))
        assert [dict(opened[index]) for index in range(len(opened))] == rows, source


@pytest.mark.parametrize(
    ("source", "fix"),
    [
        ("rows.jsonI", "rows.jsonl"),
        ("absent/rows.jsonl", "the file's path"),
        (7, "a path"),
        ("rows.doc", "a .jsonl file"),
    ],
)
def test_an_unreadable_source_is_refused_with_the_nearest_fix(
    source: object, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("rows.jsonl", "rows.doc"):
        (tmp_path / name).write_text('{"text": "a"}\n')
    with pytest.raises(ValueError, match=f"Nearest fix: {fix}"):
        resolve_source("Finetune.data", source)


def test_html_of_a_preview_escapes_the_data() -> None:
    html = preview_rows([{"prompt": "<script>alert(1)</script>", "completion": "<b>Ahab</b>"}]).to_html()
    assert "<script>" not in html and "<b>" not in html and "&lt;b&gt;" in html


def test_html_marks_learned_tokens_and_shows_special_ones_and_line_breaks() -> None:
    row = preview_rows([{"prompt": "Who?", "completion": "Captain\nAhab"}])
    assert "<mark>Captain<i>↵</i>\nAhab<i>&lt;|im_end|&gt;</i></mark>\n</pre>" in row.to_html()
    assert "<i>&lt;|im_start|&gt;</i>user\nWho?<i>&lt;|im_end|&gt;</i>" in row.rows_to_html()


@pytest.mark.parametrize(
    ("row", "title"),
    [
        ({"prompt": "Who?", "completion": "Ahab"}, "prompt-completion"),
        ({"question": "Who?", "completion": "Ahab"}, "prompt-completion (prompt = question)"),
        ({"conversations": TALK}, "messages (messages = conversations)"),
    ],
)
def test_short_title_of_a_format_has_only_renamed_columns(row: dict[str, Any], title: str) -> None:
    assert preview_rows([row]).format.short_title == title
