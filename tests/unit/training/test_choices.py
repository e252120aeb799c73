"""Recommended settings of a fine-tune: values, reasons, and that fields at None resolve to the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.requirements import needs
from tests.weights_folders import write_folder

import shardscope as ss
from shardscope.planner.checks.usual_rates import find_usual_rate
from shardscope.training.tasks.choices import recommend, recommend_epochs
from shardscope.training.tasks.recommended_rate import recommend_rate

needs("transformers")
needs("datasets")

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
ROWS = [
    {"prompt": "Who hunts the whale?", "completion": " Ahab." + " The ship." * (row % 5)} for row in range(60)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("weights") / "small", max_position_embeddings=512)


def build_plan(folder: Path, cluster: str = "2xcpu", **recipe: Any) -> ss.Plan:
    fields = {"seq_len": 512, "global_batch_size": 64, **recipe}
    arch, gpus = ss.Architecture.from_hf(folder), ss.Cluster.parse(cluster)
    return ss.Plan(arch, gpus, ss.Recipe(**fields), ss.Layout.fsdp2())


@pytest.mark.parametrize("rate", [0, 10.0, 1e-12])
def test_the_fix_of_an_unusual_rate_is_the_recommended_one(folder: Path, rate: float) -> None:
    """It was half of it, and a rate of 0 was not reported."""
    small = build_plan(folder, method="lora", seq_len=64, global_batch_size=4)
    plan = replace(small, architecture=ss.Architecture.of_size("125m"))
    task = ss.Finetune(folder, ROWS, learning_rate=rate)
    (finding,) = (each for each in plan.findings(task) if each.name.startswith("learning-rate"))
    assert isinstance(finding.task, ss.Finetune)
    assert finding.task.learning_rate == recommend_rate(plan, on_examples=True).value
    assert (rate == 0) == ("learns nothing" in finding.why)


@pytest.mark.parametrize("rate", [-1, float("nan")])
def test_the_fix_of_a_rate_that_is_none_is_not_a_run_that_learns_nothing(folder: Path, rate: float) -> None:
    with pytest.raises(ValueError, match=r"or None for the usual one\. Nearest fix: None\.$"):
        ss.Finetune(folder, ROWS, learning_rate=rate)


def test_choices_follow_the_data_the_machine_and_the_method(folder: Path) -> None:
    plan, task = build_plan(folder, method="lora"), ss.Finetune(folder, ROWS)
    choices = task.choices(plan)
    longest = max(task.preview().lengths)
    recipe = choices.plan.recipe
    assert recipe.precision == "fp32" and "3 to 4 times as long" in choices["precision"].why
    assert longest <= recipe.seq_len < longest + 8 and "padding" in choices["seq_len"].why
    assert recipe.lora_targets == ALL_LINEAR and choices["lora_targets"].current == ATTENTION
    # 60 rows in batches of 64 are one step an epoch; in batches of 4, three epochs are 45.
    assert choices.num_steps == 15 and recipe.global_batch_size == 4
    assert choices["num_epochs"].value == 14, "210 steps"
    # Two for each of the ranks.
    assert recipe.micro_batch_size == 2 and "by plan.memory()" in choices["micro_batch_size"].why
    assert all(choice.why.endswith(".") and choice.summary for choice in choices)
    assert choices["lora_rank"].is_current
    again = task.choices(choices.plan)
    assert [choice.name for choice in again if not choice.is_current] == [], "nothing is left to change"
    assert choices["seq_len"].summary == f"{recipe.seq_len} instead of 512"
    with pytest.raises(KeyError, match="known: precision, seq_len"):
        choices["rank"]


def test_fields_at_none_resolve_to_the_choices(folder: Path) -> None:
    rows = [*ROWS] * 20
    for method, rate in (("full", 3e-5), ("lora", 1e-3)):
        plan, task = build_plan(folder, method=method), ss.Finetune(folder, rows, validation=0.1)
        choices = task.choices(plan)
        schedule = task.build_schedule(plan, choices.num_steps)
        assert choices.num_steps == 203, "12 epochs of 1,080 of 1,200 rows"
        assert choices["learning_rate"].value == task.peak_rate(plan) == schedule.peak == rate
        assert choices["warmup"].value == schedule.warmup_steps == 7
        assert choices["schedule"].value == task.schedule == schedule.kind == "cosine"
        assert choices["num_epochs"].value == choices["num_epochs"].current == 12 and task.num_epochs is None
    other = replace(task, num_steps=7, learning_rate=3e-3, warmup=3, schedule="linear")
    choices = other.choices(plan)
    names = ("learning_rate", "schedule", "warmup", "num_epochs")
    assert [choices[name].current for name in names] == [3e-3, "linear", 3, "7 steps"]
    assert not any(choices[name].is_current for name in names)


def test_the_rate_grows_with_large_batches_and_falls_for_large_models() -> None:
    def rate(model: str, method: Any, batch: int) -> float:
        recipe = ss.Recipe(method=method, seq_len=4096, global_batch_size=batch)
        plan = ss.Plan(ss.models[model], ss.Cluster.parse("8xh100-sxm-80gb"), recipe, ss.Layout.fsdp2())
        return recommend_rate(plan, on_examples=True).value

    assert [rate("llama-3.1-8b", "full", batch) for batch in (8, 64, 256)] == [2e-5, 2e-5, 4e-5]
    assert [rate("llama-3.1-8b", "lora", batch) for batch in (8, 64, 256)] == [2e-4, 2e-4, 4e-4]
    assert rate("llama-3.1-70b", "lora", 64) == 1e-4 and rate("llama-3.1-70b", "full", 64) == 2e-5


@pytest.mark.parametrize("method", ["full", "lora"])
def test_small_models_learn_examples_at_higher_rates_which_no_check_warns_about(method: Any) -> None:
    for size in ("135m", "350m", "390m"):
        recipe = ss.Recipe(method=method, seq_len=72, global_batch_size=4)
        plan = ss.Plan(ss.Architecture.of_size(size), ss.Cluster.parse("2xcpu"), recipe, ss.Layout.ddp())
        on_text, on_examples = (recommend_rate(plan, on_examples=flag) for flag in (False, True))
        assert on_examples.value == (1e-3 if method == "lora" else 3e-5) > on_text.value
        assert "small models" in on_examples.why and "small models" not in on_text.why
        usual = find_usual_rate(plan, begins_from_weights=True)
        assert usual is not None and usual.allows(on_examples.value)


@pytest.fixture(scope="module")
def patient_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for long rows."""
    return write_folder(tmp_path_factory.mktemp("weights") / "long", max_position_embeddings=16_384)


def test_rows_that_all_lose_their_answers_have_choices(patient_folder: Path) -> None:
    """Regression: a division by zero, because none of them was an example at that length."""
    rows = [{"prompt": "Who hunts the whale? " * 40, "completion": " Ahab."}] * 60
    task = ss.Finetune(patient_folder, rows, bad_rows="skip_truncated")
    choices = task.choices(build_plan(patient_folder, seq_len=64))
    needed = max(task.preview().lengths)
    assert needed <= choices["seq_len"].value < needed + 8 and choices.num_steps is None
    assert task.choices(choices.plan).num_steps > 0


def test_long_answers_are_cut_on_cpu_ranks_and_long_prompts_are_not(patient_folder: Path) -> None:
    """A step of rows of 8,192 tokens takes minutes to hours there, and was recommended without a word."""
    answers = [{"prompt": "Who hunts the whale?", "completion": " Ahab sails." * 1500}] * 60
    prompts = [{"prompt": "Who hunts the whale? " * 800, "completion": " Ahab."}] * 60
    lengths = {}
    for name, rows in (("answers", answers), ("prompts", prompts)):
        task = ss.Finetune(patient_folder, rows, bad_rows="skip_truncated")
        for cluster in ("2xcpu", "2xa100-sxm-80gb"):
            choice = task.choices(build_plan(patient_folder, cluster))["seq_len"]
            assert ("minutes on CPU ranks" in choice.why) == (cluster == "2xcpu"), choice.why
            lengths[name, cluster] = choice.value
    assert lengths["answers", "2xcpu"] == 2048 < lengths["answers", "2xa100-sxm-80gb"]
    # Shorter rows would have no answer.
    assert lengths["prompts", "2xcpu"] == lengths["prompts", "2xa100-sxm-80gb"] > 2048


def test_numbers_of_numpys_become_pythons_in_all_fields(folder: Path) -> None:
    """The run folder left out "validate_every"; an integer or a float32 of numpy's was refused as epochs."""
    numbers = {
        "num_epochs": np.int64(2),
        "validation": np.float32(0.25),
        "validate_every": np.int64(3),
        "early_stopping": np.int64(4),
        "samples": np.int64(1),
        "sample_every": np.int64(5),
        "max_new_tokens": np.int64(6),
        "dpo_beta": np.float32(0.5),
    }
    task = ss.Finetune(folder, ROWS, **numbers)  # type: ignore[arg-type]
    for name, number in numbers.items():
        assert getattr(task, name) == number and type(getattr(task, name)) in (int, float), name


def test_few_examples_are_read_more_often() -> None:
    # 86 and 60 rows in batches of 4, then rows for more steps than usual.
    assert [recommend_epochs(steps).value for steps in (21.5, 15, 1, 0.1)] == [10, 14, 15, 15]
    assert "three passes would be 65 steps, 10 are 215" in recommend_epochs(21.5).why
    assert "three passes would be 1 step, 15 are 2" in recommend_epochs(0.1).why
    for steps in (None, 67, 10_000):
        assert recommend_epochs(steps).value == 3 and "Three passes" in recommend_epochs(steps).why


@pytest.mark.parametrize(
    ("cluster", "given", "best", "reason"),
    [
        ("2xv100-sxm-32gb", "bf16-mixed", "fp16-mixed", "loss scale"),
        ("1xt4-16gb", "fp32", "fp16-mixed", "Ampere"),
        ("8xh100-sxm-80gb", "fp16-mixed", "bf16-mixed", "no loss scale"),
        ("2xcpu", "bf16-mixed", "fp32", "CPU ranks"),
    ],
)
def test_the_precision_is_that_of_the_gpus(
    folder: Path, cluster: str, given: str, best: str, reason: str
) -> None:
    plan = build_plan(folder, cluster, precision=given)
    choices = recommend(ss.Finetune(folder, ROWS), plan, None)
    choice = choices["precision"]
    assert (choice.value, choice.current) == (best, given) and reason in choice.why
    assert choices.num_steps is None and choices["warmup"].value is None, "the rows were not counted"


def test_a_plan_on_known_gpus_has_a_duration_and_the_fastest_micro_batch_that_fits(folder: Path) -> None:
    task, llama = ss.Finetune(folder, num_steps=100), ss.models["llama-3.1-8b"]
    recipe = ss.Recipe(method="lora", seq_len=4096, global_batch_size=256)
    plan = ss.Plan(llama, ss.Cluster.parse("8xh100-sxm-80gb"), recipe, ss.Layout.fsdp2())
    choices = task.choices(plan)
    assert choices.seconds == pytest.approx(100 * plan.step().seconds)
    size = choices["micro_batch_size"].value
    best, memory = choices.plan, choices.plan.memory()
    assert memory.peak_bytes <= memory.usable_bytes
    for other in (1, 2, 4, 8, 16, 32):
        changed = replace(best, recipe=replace(best.recipe, micro_batch_size=other))
        if other != size and changed.memory().peak_bytes <= memory.usable_bytes:
            assert changed.step().tokens_per_second < 1.02 * best.step().tokens_per_second
    assert choices["num_steps"].value == 50 and choices["num_steps"].current == 100
