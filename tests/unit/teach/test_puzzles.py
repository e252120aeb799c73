"""Tests of the layout puzzles: each is solved by its solution, and its start plan misses a target."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import needs, thorough

import shardscope as ss
from shardscope import teach
from shardscope.planner.cpu_trial import build_cpu_trial

FILE = Path(__file__).parents[3] / "notebooks" / "solutions" / "layout_puzzles.py"


def load_solutions() -> dict[str, tuple[ss.Layout, dict[str, Any]]]:
    spec = importlib.util.spec_from_file_location("layout_puzzle_solutions", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return dict(module.SOLUTIONS)


SOLUTIONS = load_solutions()


def solve(name: str) -> ss.Plan:
    layout, recipe = SOLUTIONS[name]
    plan = teach.puzzles[name].plan
    return replace(plan, layout=layout, recipe=replace(plan.recipe, **recipe))


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUPYTERHUB_USER", "ada")
    monkeypatch.delenv("SHARDSCOPE_ANSWERS", raising=False)


def test_ten_puzzles_in_three_levels() -> None:
    assert len(teach.puzzles) == 10 and list(SOLUTIONS) == list(teach.puzzles)
    levels = [puzzle.level for puzzle in teach.puzzles.values()]
    assert levels == sorted(levels) and set(levels) == {1, 2, 3}


def test_puzzles_are_displayed_as_a_table() -> None:
    assert teach.puzzles._repr_html_().count("<tr>") == 11
    shown = repr(teach.puzzles).splitlines()
    assert len(shown) == 10 and all(line.startswith("Puzzle ") for line in shown)
    # Each can be read alone.
    assert all(
        "Llama" in one.title or "Mixtral" in one.title or "Qwen" in one.title
        for one in teach.puzzles.values()
    )


@pytest.mark.parametrize("name", list(SOLUTIONS))
def test_hints_name_the_degrees_of_the_solution(name: str) -> None:
    degrees = solve(name).degrees
    hints = " ".join(teach.puzzles[name].hints)
    for degree in ("tp", "cp", "ep"):
        assert getattr(degrees, degree) == 1 or degree in hints, degree


@pytest.mark.parametrize("name", list(SOLUTIONS))
def test_every_puzzle_is_solvable_and_its_start_is_no_solution(name: str) -> None:
    puzzle = teach.puzzles[name]
    start = puzzle.check(puzzle.plan)
    assert start.correct is False and "not met" in start.text.lower() and "Hint:" in start.text
    assert start.text.startswith(("Not yet. Met: ", "Not yet. Not met: "))
    solved = puzzle.check(solve(name))
    assert solved.correct, solved.text
    (row,) = teach.leaderboard()
    assert row["learner"] == "ada" and row["tokens_per_second_per_gpu"] >= puzzle.min_tokens
    assert [one.solved for one in teach.progress()] == [(f"puzzle-{name}",)]


def test_a_name_that_is_no_puzzle_names_the_nearest_one() -> None:
    with pytest.raises(KeyError, match="no puzzle '8b-on-one'; nearest: '8b-on-one-node'; known: 8b-on-one"):
        teach.puzzles["8b-on-one"]
    assert teach.puzzles.get("8b-on-one") is None


def test_each_different_wrong_plan_reveals_the_next_hint() -> None:
    puzzle = teach.puzzles["70b-on-two-nodes"]
    shown = [
        puzzle.check(replace(puzzle.plan, recipe=replace(puzzle.plan.recipe, micro_batch_size=size))).text
        for size in (1, 2, 1)
    ]
    assert puzzle.hints[0] in shown[0] and puzzle.hints[1] in shown[1]
    assert shown[2] == shown[0], "repeating an answer repeats its hint"


def test_the_leaderboard_shows_what_the_layout_was_called_with() -> None:
    teach.puzzles["8b-on-one-node"].check(solve("8b-on-one-node"))
    (row,) = teach.leaderboard()
    assert row["layout"] == "Layout.zero(stage=3), micro_batch_size=1, recompute='none', method='full'"


def test_context_parallelism_alone_solves_level_2_and_not_level_3() -> None:
    layouts = [ss.Layout.fsdp2(cp=cp) for cp in (1, 2, 4, 8, 16)]
    assert any(teach.puzzles["long-context"].check(layout).correct for layout in layouts)
    assert not any(teach.puzzles["70b-book-length"].check(layout).correct for layout in layouts)


@pytest.mark.parametrize("answer", [None, 3, "fsdp2", [], object(), ss.Recipe(), ss.Layout.megatron(tp=3)])
def test_an_answer_of_a_wrong_type_gets_a_hint(answer: object) -> None:
    feedback = teach.puzzles["70b-on-two-nodes"].check(answer)
    assert feedback.correct is False and feedback.text.startswith("Not yet.")


def test_other_parts_of_the_plan_must_stay() -> None:
    plan = teach.puzzles["70b-on-two-nodes"].plan
    other = replace(plan, cluster=ss.Cluster.parse("8x8xh100-sxm-80gb"))
    assert "cluster must stay" in teach.puzzles["70b-on-two-nodes"].check(other).text


def test_no_answer_and_an_unknown_tier_are_explained() -> None:
    puzzle = teach.puzzles["long-context"]
    assert "under 83 GB and at least 2,000 tokens/s" in puzzle.check(...).text
    assert "choose out of" in puzzle.check(ss.Layout.megatron(cp=8), tier="real").text  # type: ignore[arg-type]


@pytest.mark.parametrize("name", list(SOLUTIONS))
def test_every_solution_has_a_run_of_its_kind_on_four_ranks(name: str) -> None:
    trial = build_cpu_trial(solve(name), 4, max_degree=2)
    degrees = trial.plan.degrees
    assert trial.plan.world_size == 4
    assert all(getattr(degrees, one) <= 2 for one in ("tp", "pp", "vpp", "cp", "ep"))


@thorough()
def test_run_tier_trains_on_four_ranks_and_names_the_cap() -> None:
    needs("torch")
    feedback = teach.puzzles["70b-on-two-nodes"].check(solve("70b-on-two-nodes"), tier="run")
    assert feedback.correct, feedback.text
    assert "4 CPU ranks, every degree at most 2" in feedback.text and "finished" in feedback.text


@thorough()
def test_rehearsal_tier_has_the_rehearsed_peak() -> None:
    needs("torch")
    feedback = teach.puzzles["8b-on-one-node"].check(ss.Layout.zero(stage=3), tier="rehearsal")
    assert feedback.correct is False, "the prediction has to be right first"
    feedback = teach.puzzles["8b-on-one-node"].check(solve("8b-on-one-node"), tier="rehearsal")
    assert feedback.correct, feedback.text
    assert "Rehearsed with the framework's own code" in feedback.text
