"""Tests of ``teach.check``: right and wrong answers, hints, units, and what is stored of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardscope as ss
from shardscope import teach
from shardscope.planner.claims.claim_plans import compute_training_state_gb
from shardscope.teach.attempts import find_file, find_learner
from shardscope.teach.exercises import (
    EXERCISES,
    choosing,
    context_and_experts,
    data_parallel,
    memory,
    offload_and_adapters,
    pipeline,
)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUPYTERHUB_USER", "ada")
    monkeypatch.delenv("SHARDSCOPE_ANSWERS", raising=False)


def test_hints_say_more_with_each_different_wrong_answer() -> None:
    name = "01-bytes-per-parameter"
    first, again, second = (teach.check(name, value) for value in (15, 15, 14))
    assert "Hint 1:" in first.text and "Hint 1:" in again.text and "Hint 2:" in second.text
    last = [teach.check(name, value) for value in (13, 11, 10)][-1]
    assert "the last hint" in last.text and last.num_wrong == 5
    assert teach.check(name, 16).correct


def test_hints_go_on_after_a_restart() -> None:
    code = "from shardscope import teach; print(teach.check('01-bytes-per-parameter', {}).text)"
    texts = [
        subprocess.run(
            [sys.executable, "-c", code.format(value)],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        ).stdout
        for value in (15, 14, 16, "...")
    ]
    assert "Hint 1" in texts[0] and "Hint 2" in texts[1] and texts[2].startswith("Right.")
    assert "You solved this one on" in texts[3] and "with 16" in texts[3]


@pytest.mark.parametrize(
    "answer",
    [
        *(
            None,
            True,
            [16],
            {},
            object(),
            "sixteen",
            "16 s",
            "16 parsecs",
            float("nan"),
            float("inf"),
            10**400,
        ),
        *(np.zeros(3), np.array([1.0, 2.0]), b"16", 16j, print, ss.Recipe(), "1" * 5000),
    ],
    ids=lambda answer: type(answer).__name__,
)
@pytest.mark.parametrize("name", list(EXERCISES))
def test_an_answer_of_a_wrong_type_or_unit_gets_a_hint_and_costs_none(name: str, answer: Any) -> None:
    feedback = teach.check(name, answer)
    assert feedback.correct is False
    assert feedback.text.startswith("Not yet.") and len(feedback.text) < 700
    assert "Hint" not in feedback.text and feedback.num_wrong == 0


class Hostile:
    """An object whose methods raise."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __float__(self) -> float:
        raise RuntimeError("no float")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("name", list(EXERCISES))
def test_a_hostile_object_gets_a_hint(name: str) -> None:
    assert teach.check(name, Hostile()).text.startswith("Not yet.")


@pytest.mark.parametrize("answer", [..., "", "  "])
def test_no_answer_asks_for_one_and_stores_nothing(answer: object) -> None:
    feedback = teach.check("01-state-of-8b", answer)
    assert feedback.correct is None and not feedback
    assert feedback.text.startswith("Write your answer in this cell")
    assert not find_file().exists()


def test_an_unknown_exercise_is_named() -> None:
    assert 'Did you mean "01-state-of-8b"?' in teach.check("01-state-of-8B", 1).text
    assert "no exercise" in teach.check(3, 1).text  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "answer",
    [128.5, "128.5 GB", "119.6 GiB", "1.285e11 bytes", "128,481 MB", "1,028e9 bits", np.float32(128.5)],
)
def test_numbers_may_have_units(answer: object) -> None:
    assert teach.check("01-state-of-8b", answer).correct


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("01-bytes-per-parameter", "128 bits"),
        ("01-bytes-per-parameter", "16 bytes per parameter"),
        ("01-bytes-per-parameter", "16 bytes/parameter"),
        ("01-state-of-8b", "128.5 gigabytes"),
        ("02-micro-batches", "8 micro-batches per replica"),
        ("02-recomputation-saves", "57×"),
        ("02-recomputation-saves", "57 times fewer"),
        ("04-all-gathers", "65 all-gathers"),
        ("05-stored-in-full", "norms, residuals"),
        ("05-stored-in-full", "norms, and residuals,"),
        ("05-stored-in-full", "norms/residuals"),
        ("05-stored-in-full", "Norms and residuals."),
        ("05-stored-in-full", ["norm", "the residuals"]),
        ("03-exposed-bucket", "the last one"),
        ("03-exposed-bucket", "Last bucket"),
        ("07-causal-balance", 1.9),
        ("08-lora-parameters", "6.8M"),
        ("08-lora-parameters", "6.8 million parameters"),
        ("08-qlora-weights", 35),
        ("02-micro-batches", "8 microbatches"),
        ("02-micro-batches", "8 micro batches"),
        ("08-lora-parameters", "6.8 million"),
        ("08-lora-parameters", 6.8e6),
    ],
)
def test_right_answers_may_be_written_in_other_ways(name: str, answer: object) -> None:
    assert teach.check(name, answer).correct


@pytest.mark.parametrize(
    ("name", "answer", "hint"),
    [
        ("01-bytes-per-parameter", "16,0", "decimal point"),
        ("01-state-of-8b", "128,5 GB", "decimal point"),
        ("02-recomputation-saves", "0,0175", "decimal point"),
        ("06-bubble", "5,47 %", "decimal point"),
        ("01-state-of-8b", "16*8.03", "without quotes"),
        ("02-recomputation-saves", "1/57", "without quotes"),
        ("04-all-gathers", "2 x 32 + 1", "without quotes"),
        ("06-bubble", "7/128", "without quotes"),
        ("07-causal-balance", "(1 - 49/64) / (1/8)", "without quotes"),
    ],
)
def test_how_to_write_a_number_is_said_and_costs_no_hint(name: str, answer: str, hint: str) -> None:
    feedback = teach.check(name, answer)
    assert feedback.correct is False and hint in feedback.text and feedback.num_wrong == 0


@pytest.mark.parametrize("answer", ["16 ms", "16 s", "16 m/s", "8 GB/s", "8 per hour"])
@pytest.mark.parametrize("name", ["01-bytes-per-parameter", "02-micro-batches"])
def test_a_unit_of_another_kind_is_no_number(name: str, answer: str) -> None:
    feedback = teach.check(name, answer)
    assert feedback.correct is False and feedback.num_wrong == 0


def test_an_unknown_word_is_named() -> None:
    text = teach.check("05-stored-in-full", ["biases", "residuals"]).text
    assert 'There is no "biases" here' in text and '"norms"' in text
    # Neither two of the words nor a denied one is an answer.
    denials = ("not the last", "neither the last", "next to last", "every bucket but the last", "last? no")
    for answer in (*denials, "the last or the first", "the last two"):
        feedback = teach.check("03-exposed-bucket", answer)
        assert "Choose out of" in feedback.text and feedback.num_wrong == 0
    feedback = teach.check("05-stored-in-full", "norms, everything but residuals")
    assert not feedback.correct and feedback.num_wrong == 0


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [
        ("05-stored-in-full", "norms", "right, but not all: 1 missing"),
        ("03-buckets", 237, "round up"),
        ("03-buckets", 237.7, "round up"),
        ("08-lora-parameters", 6.8, "millions"),
        ("09-exposed-share", 12.5, "640"),
        ("09-utilization", 28.06, "attention"),
        ("09-utilization", 33.7, "every key"),
    ],
)
def test_rounded_and_common_mistakes_get_their_own_hint(name: str, answer: float, words: str) -> None:
    assert words in teach.check(name, answer).text


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (119.66, "right in GiB"),
        (128.5e9, "The digits are right, the unit is not"),
        ("128.5 MB", "The digits are right, the unit is not"),
        ("128.5 GiB", "The digits are right, the unit is not"),
        (128.5 * 8, "bits"),
        (-128.5, "sign"),
        (100, "too small"),
        (0, "Hint 1"),
        (16.06, "weights alone"),
    ],
)
def test_wrong_numbers_get_the_hint_of_their_mistake(answer: object, words: str) -> None:
    assert words in teach.check("01-state-of-8b", answer).text


def test_right_answers_are_those_of_the_library() -> None:
    # Training state by plan.memory(): 16 bytes a parameter, whichever framework stores them.
    recipe = ss.Recipe(global_batch_size=8)
    for layout, ranks in ((ss.Layout.ddp(), 1), (ss.Layout.fsdp2(), 8), (ss.Layout.zero(stage=3), 8)):
        plan = ss.Plan(ss.models["llama-3.1-8b"], ss.Cluster.parse("8xh100-sxm-80gb"), recipe, layout)
        state = sum(compute_training_state_gb(plan).values()) * ranks
        assert teach.check("01-state-of-8b", state).correct, layout
    assert memory.compute_layer_activations() == 2048 * 12288 * 114
    assert memory.build_batch_plan().num_micro_batches == 8
    assert 5 * 96 * 2048 / 12288 == 80, "the paper's own number, section 5"


def test_answers_about_data_parallelism_are_those_of_the_formulas() -> None:
    assert data_parallel.compute_ring_bytes(16, 8) == 28
    assert data_parallel.count_buckets() == 238


def test_answers_about_context_and_experts_are_those_of_the_library() -> None:
    recipe = ss.Recipe(seq_len=131072, global_batch_size=8)
    plan = ss.Plan(
        ss.models["llama-3.1-8b"], ss.Cluster.parse("8xh100-sxm-80gb"), recipe, ss.Layout.megatron(cp=8)
    )
    sent = [one for one in plan.step().communication if one.part == "context_parallel"]
    # Forward's keys and values, of 32 layers and 8 micro-batches: a rank sends all but its own eighth.
    forward = sent[0].num_bytes / 32 / 8 * 7 / 8
    assert teach.check("07-ring-bytes", forward / 1e6).correct
    # Pairs of a query and a key that it sees, counted for a short sequence.
    pairs = [sum(range(first + 1, first + 257)) for first in range(0, 2048, 256)]
    assert pairs[-1] / np.mean(pairs) == pytest.approx(context_and_experts.compute_busiest_share(), rel=1e-3)
    mixtral = ss.Plan(
        ss.models["mixtral-8x7b"],
        ss.Cluster.parse("2x8xh100-sxm-80gb"),
        ss.Recipe(global_batch_size=64),
        ss.Layout.megatron(ep=8),
    )
    assert teach.check("07-expert-weights", mixtral.memory().at("rest")["parameters"] / 1e9).correct


def test_answers_about_adapters_are_those_of_the_library() -> None:
    start = offload_and_adapters.build_full_plan()
    recipe = replace(start.recipe, method="lora", lora_rank=16, lora_targets=("q_proj", "v_proj"))
    adapters = replace(start, recipe=recipe).memory().components["optimizer"] / 8
    assert teach.check("08-lora-parameters", adapters).correct
    model = ss.models["llama-3.1-70b"]
    cluster = ss.Cluster.parse("2xh100-sxm-80gb")
    qlora = ss.Plan(model, cluster, replace(recipe, method="qlora"), ss.Layout.ddp())
    lora = replace(qlora, recipe=recipe)
    saved = (lora.memory().components["parameters"] - qlora.memory().components["parameters"]) / 1e9
    layers = 2 * offload_and_adapters.count_layer_matrices() / 1e9
    assert teach.check("08-qlora-weights", layers - saved).correct


def test_plan_on_one_gaming_gpu_needs_qlora() -> None:
    start = offload_and_adapters.build_full_plan()
    offload = ss.Layout.zero(stage=3, offload_optimizer="cpu", offload_params="cpu")
    for layout, method, recompute, right in (
        (start.layout, "full", "none", False),
        (offload, "full", "full", False),
        (start.layout, "lora", "none", False),
        (start.layout, "lora", "full", False),
        (start.layout, "qlora", "none", True),
    ):
        recipe = replace(start.recipe, method=method, recompute=recompute)
        plan = replace(start, layout=layout, recipe=recipe)
        assert teach.check("08-one-gaming-gpu", plan).correct is right, (method, recompute)


def test_answers_about_choosing_are_those_of_the_library() -> None:
    recipe = ss.Recipe(seq_len=4096, micro_batch_size=2, global_batch_size=64)
    advice = ss.recommend(ss.models["llama-3.2-1b"], ss.Cluster.parse("8xh100-sxm-80gb"), recipe)
    assert advice.plan is not None and teach.check("09-simplest-layout", advice.plan.layout.framework).correct
    assert choosing.compute_step_ms() == 720
    assert 25 < choosing.compute_utilization() < 35, "the hint says so"
    assert "with sparsity" in teach.check("09-utilization", choosing.compute_utilization() / 2).text


def test_the_fastest_plan_of_notebook_09_is_what_its_text_says() -> None:
    recipe = ss.Recipe(seq_len=4096, global_batch_size=64)
    model, cluster = ss.models["llama-3.1-8b"], ss.Cluster.parse("8xh100-sxm-80gb")
    best, advised = ss.search(model, cluster, recipe).best, ss.recommend(model, cluster, recipe).plan
    degrees = best.degrees
    assert advised is not None and (degrees.tp, degrees.pp, degrees.cp) == (2, 1, 1)
    assert best.step().tokens_per_second > advised.step().tokens_per_second
    assert best.memory().verdict == "tight"


def test_the_last_hint_of_the_bubble_can_be_pasted_into_its_notebook() -> None:
    """There the plan of the exercise is ``large``, and ``plan`` is that of its first cell."""
    hint = EXERCISES["06-shrink-the-bubble"].hints[-1].removesuffix(" is worth a try.")
    answer = eval(hint, {"replace": replace, "large": pipeline.build_pipeline_plan()})
    assert teach.check("06-shrink-the-bubble", answer).correct


def test_plan_exercise_needs_both_changes() -> None:
    start = memory.build_long_plan()
    assert not teach.check("02-make-it-fit", start).correct
    for changes, right in (
        ({"recompute": "full"}, False),
        ({"micro_batch_size": 1}, False),
        ({"micro_batch_size": 2}, False),
        ({"recompute": "selective"}, False),
        ({"micro_batch_size": 2, "recompute": "selective"}, True),
    ):
        plan = replace(start, recipe=replace(start.recipe, **changes))
        assert teach.check("02-make-it-fit", plan).correct is right, changes
    other = replace(start, recipe=replace(start.recipe, seq_len=2048))
    assert "recipe.seq_len must stay" in teach.check("02-make-it-fit", other).text


def test_hints_go_on_with_plans_and_layouts_that_differ_in_one_option() -> None:
    start = memory.build_long_plan()
    plans = [
        replace(start, recipe=replace(start.recipe, recompute=name)) for name in ("none", "selective", "full")
    ]
    for number, plan in enumerate((plans[0], plans[0], *plans[1:])):
        assert f"Hint {max(1, number)}" in teach.check("02-make-it-fit", plan).text
    tried = teach.check("02-make-it-fit", ...).text
    assert "You tried Layout.fsdp2(), micro_batch_size=4, recompute='full', method='full' before" in tried
    for number, overlap in enumerate((None, False), start=1):
        layout = ss.Layout.zero(stage=2, overlap_comm=overlap)
        assert f"Hint {number}" in teach.check("04-slow-links", layout).text
    teach.check("04-slow-links", ss.Layout.zero(stage=2, overlap_comm=True))
    assert "with Layout.zero(stage=2, overlap_comm=True)." in teach.check("04-slow-links", ...).text


def test_learners_name_becomes_a_safe_file_name(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for user in ("ada", "../../etc/passwd", "a/b", "a b", "ä", ".hidden", "x" * 300, "\n"):
        monkeypatch.setenv("JUPYTERHUB_USER", user)
        assert find_file().resolve().parent == Path("answers").resolve()
        names.add(find_learner())
    assert len(names) == 8 and "ada" in names


def test_unwritable_folder_is_a_note_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "answers").write_text("a file, not a folder")
    feedback = teach.check("01-bytes-per-parameter", 16)
    assert feedback.correct and "not stored" in feedback.text


def test_damaged_lines_of_an_answers_file_are_left_out() -> None:
    teach.check("01-bytes-per-parameter", 15)
    with find_file().open("ab") as file:
        file.write(
            b'{"exercise": 3}\n\xff\xfe\n[]\n{"exercise": "x", "answer": "1", "correct": "yes", "time": 1}\n'
        )
    assert "Hint 2" in teach.check("01-bytes-per-parameter", 14).text
    (row,) = teach.progress()
    assert row.num_attempts == 2


def test_progress_of_all_learners_from_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for user, answers in (("ada", (15, 16)), ("bob", (1, 2, 3)), ("eve", (16,))):
        monkeypatch.setenv("JUPYTERHUB_USER", user)
        monkeypatch.setenv("SHARDSCOPE_ANSWERS", str(tmp_path / "shared"))
        for answer in answers:
            teach.check("01-bytes-per-parameter", answer)
    teach.check("03-exposed-bucket", "last")
    table = teach.progress(tmp_path / "shared")
    assert [(one.learner, len(one.solved), one.num_attempts) for one in table] == [
        ("eve", 2, 2),
        ("ada", 1, 2),
        ("bob", 0, 3),
    ]
    frame = table.to_frame()
    assert frame.loc["eve", "03"] == 1 and frame.loc["bob", "stuck at"] == "01-bytes-per-parameter"
    assert "<table" in table._repr_html_() and "bob: 0 solved, 3 attempts" in repr(table)
    with pytest.raises(NotADirectoryError, match="no folder"):
        teach.progress(tmp_path / "missing")
    # Learners may not list the folder: they get their own answers.
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert [one.learner for one in teach.progress()] == ["eve"]
    (tmp_path / "of_others").mkdir()
    with pytest.raises(PermissionError, match="cannot be listed"):
        teach.progress(tmp_path / "of_others")


def test_progress_finds_the_answers_of_all_homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for user in ("ada", "bob"):
        home = tmp_path / "homes" / user
        home.mkdir(parents=True)
        monkeypatch.chdir(home)
        monkeypatch.setenv("JUPYTERHUB_USER", user)
        teach.check("01-bytes-per-parameter", 16)
    assert [one.learner for one in teach.progress(tmp_path / "homes")] == ["ada", "bob"]


def test_an_attempt_is_one_json_line() -> None:
    teach.check("01-bytes-per-parameter", 15)
    (line,) = find_file().read_text().splitlines()
    record = json.loads(line)
    assert record["exercise"] == "01-bytes-per-parameter" and record["correct"] is False
    assert record["answer"] == "15" and find_file().stat().st_mode & 0o077 == 0


def test_feedback_is_escaped_in_html() -> None:
    shown = teach.check("03-exposed-bucket", "<script>alert(1)</script>")._repr_html_()
    assert "<script>" not in shown and "<b>Not yet.</b>" in shown


def test_teach_imports_no_torch() -> None:
    code = """
import sys
from shardscope import teach
teach.check("01-state-of-8b", 1)
print("torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.stdout.strip() == "False"
