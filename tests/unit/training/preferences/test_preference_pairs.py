"""Tests of preference pairs: formats, which tokens bear loss, batches, previews and error messages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import needs
from tests.weights_folders import write_chat_folder, write_folder

import shardscope as ss
from shardscope.planner.checks.case import Case
from shardscope.planner.checks.learning_rate import check_learning_rate

needs("datasets")
transformers = needs("transformers")

from shardscope.training.data.tokenizer import SHIPPED_TOKENIZER  # noqa: E402
from shardscope.training.examples.encoding import Encoder  # noqa: E402
from shardscope.training.examples.formats import recognize_format  # noqa: E402
from shardscope.training.examples.preview import Preview, preview_examples  # noqa: E402
from shardscope.training.examples.rows import open_rows  # noqa: E402
from shardscope.training.examples.token_table import (  # noqa: E402
    RowCounts,
    TokenTable,
    build_table,
    iterate_encoded,
)
from shardscope.training.preferences.pairs import LABELS, PairBatches  # noqa: E402

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
PAIRS = [
    {"prompt": "Who?", "chosen": "Ahab", "rejected": "Nobody"},
    {"prompt": "Where?", "chosen": "At sea", "rejected": "At home"},
]


def ask(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


EARLIER = [ask("Call me"), answer("Ishmael"), ask("Where?")]
"""A dialogue whose first answer is part of the prompt."""


def create_tokenizer(template: str | None = CHATML) -> Any:
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(SHIPPED_TOKENIZER), eos_token="<|im_end|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = template
    return tokenizer


def preview_rows(rows: list[dict[str, Any]], tokenizer: Any = None, **options: Any) -> Preview:
    format = recognize_format("Finetune.data", list(rows[0]), options.pop("columns", None))
    chosen = {"num_shown": 5, "seq_len": None, "loss_on": "completions", "bad_rows": "refuse", **options}
    opened, tokenizer = open_rows("Finetune.data", rows), tokenizer or create_tokenizer()
    return preview_examples("Finetune.data", "rows", opened, format, tokenizer, **chosen)


def read_learned_text(row: Any) -> str:
    """Return the learned text of a preview's row; "|" separates learned pieces."""
    pieces = [
        token if bears_loss else "|" for token, bears_loss in zip(row.tokens, row.bears_loss, strict=True)
    ]
    return "|".join(part for part in "".join(pieces).split("|") if part)


# Two pairs of each format, with the learned text of the chosen and of the rejected side written by hand.
CASES: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "prompt column": (PAIRS, ["Ahab<|im_end|>", "Nobody<|im_end|>", "At sea<|im_end|>", "At home<|im_end|>"]),
    "prompt and answers as messages": (
        [
            {"prompt": [ask("Who?")], "chosen": [answer("Ahab")], "rejected": [answer("Nobody")]},
            {"prompt": EARLIER, "chosen": [answer("At sea")], "rejected": [answer("Ishmael")]},
        ],
        ["Ahab<|im_end|>", "Nobody<|im_end|>", "At sea<|im_end|>", "Ishmael<|im_end|>"],
    ),
    "implicit prompt in messages": (
        [
            {"chosen": [ask("Who?"), answer("Ahab")], "rejected": [ask("Who?"), answer("Nobody")]},
            {"chosen": [*EARLIER, answer("At sea")], "rejected": [*EARLIER, answer("Ishmael")]},
        ],
        ["Ahab<|im_end|>", "Nobody<|im_end|>", "At sea<|im_end|>", "Ishmael<|im_end|>"],
    ),
    "the prompt column repeats the conversations' prompt": (
        [
            {
                "prompt": "Who?",
                "chosen": [ask("Who?"), answer("Ahab")],
                "rejected": [ask("Who?"), answer("Nobody")],
            },
            {"prompt": "Where?", "chosen": [*EARLIER, answer("A")], "rejected": [*EARLIER, answer("B")]},
        ],
        ["Ahab<|im_end|>", "Nobody<|im_end|>", "A<|im_end|>", "B<|im_end|>"],
    ),
    "answers of several turns": (
        [
            {
                "prompt": "Who?",
                "chosen": [answer("Ahab"), ask("Sure?"), answer("Yes")],
                "rejected": [answer("Nobody")],
            },
            {
                "chosen": [ask("Who?"), answer("Ahab"), ask("Sure?"), answer("Yes")],
                "rejected": [ask("Who?"), answer("I"), ask("You?"), answer("No")],
            },
        ],
        [
            "Ahab<|im_end|>|Yes<|im_end|>",
            "Nobody<|im_end|>",
            "Ahab<|im_end|>|Yes<|im_end|>",
            "I<|im_end|>|No<|im_end|>",
        ],
    ),
    "implicit prompt in texts": (
        [
            {"chosen": "Human: Who? Assistant: Ahab", "rejected": "Human: Who? Assistant: Nobody"},
            {"chosen": "It is white", "rejected": "It is a fish"},
        ],
        [" Ahab<|im_end|>", " Nobody<|im_end|>", " white<|im_end|>", " a fish<|im_end|>"],
    ),
}


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["without marks", "with generation marks"])
@pytest.mark.parametrize("name", CASES)
def test_answers_after_the_prompt_bear_loss_on_both_sides(name: str, template: str) -> None:
    rows, expected = CASES[name]
    shown = [row for pair in rows for row in preview_rows([pair], create_tokenizer(template)).rows]
    assert [row.side for row in shown] == ["chosen", "rejected"] * len(rows)
    assert [read_learned_text(row) for row in shown] == expected


def test_both_sides_begin_with_the_templates_prompt() -> None:
    rows = preview_rows([{**PAIRS[0], "system": "Be brief"}]).rows
    start = (
        "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ["".join(row.tokens) for row in rows] == [
        f"{start}Ahab<|im_end|>\n",
        f"{start}Nobody<|im_end|>\n",
    ]


def test_other_columns_are_mapped_and_the_last_turn_can_bear_loss_alone() -> None:
    rows = [{"q": "Who?", "good": "Ahab", "bad": "Nobody"}]
    columns = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    assert [read_learned_text(row) for row in preview_rows(rows, columns=columns).rows] == [
        "Ahab<|im_end|>",
        "Nobody<|im_end|>",
    ]
    several = CASES["answers of several turns"][0][:1]
    assert [read_learned_text(row) for row in preview_rows(several, loss_on="last").rows] == [
        "Yes<|im_end|>",
        "Nobody<|im_end|>",
    ]


def test_without_a_template_prompt_and_answers_are_plain_text() -> None:
    rows = preview_rows([{"prompt": "Who? ", "chosen": "Ahab", "rejected": "I"}], create_tokenizer(None)).rows
    assert ["".join(row.tokens) for row in rows] == ["Who? Ahab<|im_end|>", "Who? I<|im_end|>"]
    assert [read_learned_text(row) for row in rows] == ["Ahab<|im_end|>", "I<|im_end|>"]


def test_a_preview_shows_both_sides_and_counts_pairs() -> None:
    shown = preview_rows([*PAIRS, *PAIRS], num_shown=3)
    assert len(shown.rows) == 6 and len(shown.lengths) == 8
    assert shown.counts.num_examples == shown.num_rows == 4
    assert shown.counts.num_tokens == sum(shown.lengths)
    assert "Packing" not in str(preview_rows(PAIRS, seq_len=256)), "pairs are not packed"
    assert "Row 2, rejected" in shown.to_html() and "At home<i>" in shown.to_html()


# ---- Bad input


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "Who?", "chosen": "Ahab", "rejected": "Ahab"}, "chosen and rejected are the same"),
        ({"prompt": "Who?", "chosen": "", "rejected": "Ahab"}, "chosen is empty"),
        ({"prompt": "Who?", "chosen": "Ahab", "rejected": None}, "rejected is missing"),
        ({"prompt": "", "chosen": "Ahab", "rejected": "I"}, "prompt is empty"),
    ],
)
def test_a_malformed_pair_is_refused_by_number_or_skipped(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f"row 3.*{reason}.*bad_rows='skip'"):
        preview_rows([*PAIRS, row])
    shown = preview_rows([*PAIRS, row], bad_rows="skip")
    assert shown.counts.num_bad_rows == 1 and f"row 3: {reason}" in str(shown)


@pytest.mark.parametrize(
    ("chosen", "rejected", "reason"),
    [
        ([ask("Who?"), answer("Ahab")], [ask("Where?"), answer("Ahab")], "different prompts"),
        ([ask("Who?"), answer("Ahab")], [ask("Who?"), answer(" ")], "rejected has no answer"),
        ([*EARLIER, answer("At sea")], EARLIER, "rejected has no answer after the prompt"),
        ([answer("Ahab")], [answer("I")], "starts with the assistant's turn"),
        ([ask("Who?"), answer("Ahab")], [answer("Nobody")], "different prompts"),
    ],
)
def test_conversations_that_are_not_a_pair_are_refused(chosen: Any, rejected: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=f"row 1.*{reason}"):
        preview_rows([{"chosen": chosen, "rejected": rejected}])


def test_pairs_whose_answers_are_cut_off_are_left_out_and_named() -> None:
    long = {"prompt": "whale " * 60, "chosen": "Yes", "rejected": "No"}
    same_start = {"prompt": "Who?", "chosen": "Ahab " * 30 + "A", "rejected": "Ahab " * 30 + "B"}
    shown = preview_rows([PAIRS[0], long, PAIRS[1], same_start], seq_len=32, bad_rows="skip")
    assert "Left out: 2 rows without" in str(shown)
    assert "(row 2: seq_len=32 cuts off what its answers differ in" in str(shown) and "; row 4: " in str(
        shown
    )
    assert [row.index for row in shown.rows] == [0, 0, 2, 2]
    assert shown.counts.num_examples == 2 and len(shown.lengths) == 8
    refused = preview_rows([PAIRS[0], long, same_start], seq_len=32)
    assert refused.refusal is not None and "2 rows without a token that bears loss" in str(refused.refusal)
    assert [(row.index, row.side) for row in refused.rows] == [
        (index, side) for index in range(3) for side in ("chosen", "rejected")
    ]
    with pytest.raises(ValueError, match=r"1 row without a token that bears loss.*Row 1: .*Recipe\(seq_len="):
        preview_rows([long], seq_len=32, bad_rows="skip")


# ---- Batches


def make_table(rows: list[dict[str, Any]]) -> TokenTable:
    counts, encoder = RowCounts(), Encoder(create_tokenizer(), "completions")
    format, opened = recognize_format("data", list(rows[0])), open_rows("data", rows)
    return build_table(
        iterate_encoded("data", opened, format, encoder, seq_len=24, bad_rows="refuse", counts=counts)
    )


def test_each_micro_batch_has_its_chosen_rows_first() -> None:
    torch = needs("torch")
    rows = [{"prompt": "?", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(7)]
    tokenizer = create_tokenizer()
    fields: dict[str, Any] = {"seq_len": 24, "padding_id": 0, "pairs_per_micro_batch": 2, "in_order": True}
    batches = PairBatches(table=make_table(rows), rows=4, rank=0, num_ranks=1, **fields)
    assert batches.num_samples == 7 and batches.steps_per_epoch == 7 / 4

    def read(step: int) -> list[str]:
        labels = batches.build_batch(step)[LABELS]
        return [tokenizer.decode([token for token in row.tolist() if token != -100]) for row in labels]

    def ends(*texts: str) -> list[str]:
        return [f"{text}<|im_end|>" if text else "" for text in texts]

    assert read(0) == ends("yes 0", "yes 1", "no 0", "no 1", "yes 2", "yes 3", "no 2", "no 3")
    # The last pair of the data is followed by an empty one.
    assert read(1) == ends("yes 4", "yes 5", "no 4", "no 5", "yes 6", "", "no 6", "")
    batch = replace(batches, reference=torch.arange(14.0).numpy()).build_batch(1)
    assert batch["reference"].tolist() == [8, 10, 9, 11, 12, 0, 13, 0]
    assert (batch["input_ids"] == batches.build_batch(1)["input_ids"]).all()


# ---- The task


HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
"""Heads that two tensor-parallel ranks could divide."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("weights") / "small", max_position_embeddings=512, **HEADS)


def build_plan(folder: Path, layout: Any = None, cluster: str = "2xcpu", **recipe: Any) -> ss.Plan:
    fields = {"seq_len": 32, "micro_batch_size": 2, "global_batch_size": 8, "precision": "fp32", **recipe}
    arch, gpus = ss.Architecture.from_hf(folder), ss.Cluster.parse(cluster)
    return ss.Plan(arch, gpus, ss.Recipe(**fields), layout or ss.Layout.fsdp2())


def test_the_objective_and_the_format_must_match(folder: Path) -> None:
    plan, answers = build_plan(folder), [{"prompt": "Who?", "completion": "Ahab"}]
    with pytest.raises(ValueError, match=r"one answer.*Nearest fix: objective=\'dpo\'") as error:
        ss.Finetune(folder, PAIRS).check(plan)
    assert error.value.changes == {"Finetune.objective": "dpo"}  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"preference pairs.*Nearest fix: objective='sft'"):
        ss.Finetune(folder, answers, objective="dpo").check(plan)
    with pytest.raises(ValueError, match=r"Finetune\.objective is 'dpo'.*Moby-Dick"):
        ss.Finetune(folder, objective="dpo")
    with pytest.raises(ValueError, match=r"Finetune\.objective is 'ppo'.*'sft', 'dpo'"):
        ss.Finetune(folder, PAIRS, objective="ppo")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Finetune\.loss_on is 'all'.*loss_on='completions'"):
        ss.Finetune(folder, PAIRS, objective="dpo", loss_on="all")
    with pytest.raises(ValueError, match=r"Finetune\.dpo_beta is 0"):
        ss.Finetune(folder, PAIRS, objective="dpo", dpo_beta=0.0)
    with pytest.raises(ValueError, match=r"Row 3: chosen and rejected are the same"):
        same = {"prompt": "Who?", "chosen": "Ahab", "rejected": "Ahab"}
        ss.Finetune(folder, [*PAIRS, same], objective="dpo").check(plan)
    # The objective fits the training data: only other validation data help.
    with pytest.raises(ValueError, match=r"validation is .*Nearest fix: rows like those of Finetune\.data"):
        ss.Finetune(folder, answers, validation=PAIRS).check(plan)
    ss.Finetune(folder, PAIRS, objective="dpo").check(plan)


@pytest.mark.parametrize(
    ("changes", "field", "fix"),
    [
        ({"micro_batch_size": 1}, r"Recipe\.micro_batch_size is 1", "micro_batch_size=2"),
        (
            {"micro_batch_size": 3, "global_batch_size": 6},
            r"Recipe\.micro_batch_size is 3",
            "micro_batch_size=4, global_batch_size=8",
        ),
        ({"loss": "chunked"}, r"Recipe\.loss is 'chunked'", "loss='full'"),
        ({"layout": ss.Layout.fsdp2(tp=2)}, r"Layout\.tp is 2", "tp=1"),
        ({"layout": ss.Layout.fsdp2(pp=2)}, r"Layout\.pp is 2", "pp=1"),
        ({"layout": ss.Layout.fsdp2(cp=2)}, r"Layout\.cp is 2", "cp=1"),
    ],
)
def test_a_plan_that_trains_no_pairs_is_refused(
    folder: Path, changes: dict[str, Any], field: str, fix: str
) -> None:
    plan = build_plan(folder, **changes)
    with pytest.raises(ValueError, match=rf"{field}; allowed.*Nearest fix: {fix}\.$"):
        ss.Finetune(folder, PAIRS, objective="dpo").check(plan)


def test_megatron_is_refused_with_the_frameworks_that_train_pairs(folder: Path) -> None:
    needs("megatron")
    plan = build_plan(folder, ss.Layout.megatron())
    with pytest.raises(ValueError, match=r"Layout\.framework is 'megatron'.*'fsdp2'.*Layout\.fsdp2\(\)"):
        ss.Finetune(folder, PAIRS, objective="dpo").check(plan)


def test_choices_of_pairs_have_even_batches_and_small_rates(folder: Path) -> None:
    plan = build_plan(folder, micro_batch_size=1, global_batch_size=64, method="lora")
    task = ss.Finetune(folder, PAIRS * 30, objective="dpo")
    choices = task.choices(plan)
    # 60 pairs are 120 sequences, 15 times in batches of 64; batches of 8 make 45 steps in 3 passes.
    assert choices.num_steps == 29 and choices.plan.recipe.global_batch_size == 8
    assert choices.plan.recipe.micro_batch_size % 2 == 0
    # Rows so short would be packed in a supervised fine-tune.
    assert choices["packing"].value is False and "sides of a preference pair" in choices["packing"].why
    # A twentieth of the supervised rate of a small model.
    assert choices["learning_rate"].value == task.peak_rate(plan) == 5e-5
    assert choices["dpo_beta"].is_current and "one more forward in each step" in choices["dpo_beta"].why
    task.check(choices.plan)
    full = task.choices(build_plan(folder))
    assert full["learning_rate"].value == 1.5e-6 and "before the first step" in full["dpo_beta"].why
    gpus, recipe = ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(seq_len=1024, global_batch_size=64)
    for method, rate in (("full", 1e-6), ("lora", 1e-5)):
        large = ss.Plan(ss.models["llama-3.1-8b"], gpus, replace(recipe, method=method), ss.Layout.fsdp2())
        assert task.peak_rate(large) == rate


def test_a_usual_rate_of_dpo_is_not_compared_with_those_of_supervised_runs() -> None:
    llama, gpus = ss.models["llama-3.1-8b"], ss.Cluster.parse("8xh100-sxm-80gb")
    plan = ss.Plan(llama, gpus, ss.Recipe(seq_len=4096, micro_batch_size=2), ss.Layout.fsdp2())

    @dataclass(frozen=True, kw_only=True)
    class Task:
        objective: str
        learning_rate: float = 1e-6
        weights: str = "folder"

    found = {
        objective: [
            finding.name for finding in check_learning_rate(Case(plan=plan, task=Task(objective=objective)))
        ]
        for objective in ("sft", "dpo")
    }
    assert found == {"sft": ["learning-rate-against-batch"], "dpo": []}


def test_the_predicted_duration_includes_the_reference(folder: Path) -> None:
    from shardscope.training.tasks.choices import estimate_length

    llama, gpus = ss.models["llama-3.1-8b"], ss.Cluster.parse("8xh100-sxm-80gb")
    for method, steps in (("lora", 10), ("full", 10)):
        recipe = ss.Recipe(method=method, seq_len=1024, micro_batch_size=2, global_batch_size=64)
        plan = ss.Plan(llama, gpus, recipe, ss.Layout.fsdp2())
        task = ss.Finetune(folder, PAIRS * 160, objective="dpo", num_steps=steps)
        seconds = estimate_length(task, plan, task.preview()).seconds
        alone = steps * plan.step().seconds
        # 320 pairs are ten batches of 64 sequences, so both have about ten forwards of the reference.
        assert seconds is not None and 1.2 * alone < seconds < 1.5 * alone


def test_a_preview_of_pairs_reports_the_cost_of_the_reference(tmp_path: Path) -> None:
    task = ss.Finetune(write_chat_folder(tmp_path / "model"), PAIRS, objective="dpo")
    assert "takes no memory" in task.preview().sentences[-1]
    recipe = ss.Recipe(seq_len=64, micro_batch_size=2, global_batch_size=8, method="lora")
    plan = ss.Plan(ss.models["llama-3.1-8b"], ss.Cluster.parse("1xh100-sxm-80gb"), recipe, ss.Layout.fsdp2())
    preview = task.preview(plan=plan)
    assert preview.seq_len == 64
    assert "one more forward in each step, about " in preview.cost and "no memory" in preview.cost
    full = replace(plan, recipe=replace(recipe, method="full"))
    assert "one forward over all pairs before the first step, about " in task.preview(plan=full).cost
    assert "by plan.step()" in task.preview(plan=full).cost
    assert not ss.Finetune(task.weights, [{"text": "a"}]).preview(plan=plan).cost


def test_a_task_takes_the_objective_of_its_data(tmp_path: Path) -> None:
    task = ss.Finetune(write_chat_folder(tmp_path / "model"), PAIRS)
    assert task.match_objective().objective == "dpo"
    assert replace(task, data=[{"text": "a"}], objective="sft").match_objective() == replace(
        task, data=[{"text": "a"}]
    )
    assert replace(task, data=None).match_objective().objective == "sft"
