"""Resume: a run that was saved and stopped, or failed after saving, is continued to its last step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_helpers import seconds_until
from tests.requirements import needs, thorough

needs("torch")
needs("transformers")

from gloo_ranks import tiny_plan  # noqa: E402

from shardscope.runs.launch.launch import launch  # noqa: E402
from shardscope.runs.resume import resume_run, why_not_resumable  # noqa: E402
from shardscope.runs.run import Run  # noqa: E402
from shardscope.training.tasks.pretrain import Pretrain  # noqa: E402

pytestmark = pytest.mark.usefixtures("bounded_time", "nothing_left")


def read_steps(run: Run) -> list[int]:
    return [line["step"] for line in run.metrics() if line["rank"] == 0]


@thorough()
def test_a_saved_and_stopped_run_is_resumed_to_the_step_it_was_launched_for(tmp_path: Path) -> None:
    plan = tiny_plan("ddp", 2, num_micro_batches=1)
    run = launch(plan, Pretrain(num_steps=300, seed=3, learning_rate=2e-3), folder=tmp_path, name="first")
    seconds_until(lambda: len(read_steps(run)) > 3)
    assert "stop it first" in str(why_not_resumable(run))
    run.stop(checkpoint=True)
    assert run.wait(60) == "stopped", run.error
    done = read_steps(run)
    assert 3 < len(done) < 300

    # A handle that knows nothing but the folder, as the list of runs has.
    stopped = Run.attach(run.folder)
    assert why_not_resumable(stopped) is None
    again = resume_run(stopped)
    assert again.folder.parent == tmp_path and again.folder != run.folder and again.num_steps == 300
    assert again.wait(120) == "finished", again.error
    assert read_steps(again) == list(range(len(done), 300)), (
        "it does not continue where the first one stopped"
    )
    assert "steps done" in again.logs(0)

    assert "finished" in str(why_not_resumable(again))
    with pytest.raises(ValueError, match="larger num_steps"):
        resume_run(again)


def fails(ctx: Any) -> None:
    raise ValueError("on purpose")


def test_a_function_of_the_user_cannot_be_resumed_and_the_reason_is_given(plan: Any, tmp_path: Path) -> None:
    run = launch(plan, fails, folder=tmp_path)
    assert run.wait(60) == "failed"
    assert "your own code" in str(why_not_resumable(run))
    with pytest.raises(ValueError, match="launch it again from your notebook"):
        resume_run(run)


@thorough()
def test_a_resume_without_steps_left_or_with_other_data_says_so(tmp_path: Path) -> None:
    """It finished without a word, and trained on other text as if it were the same."""
    plan, text = tiny_plan("ddp", 2, num_micro_batches=1), tmp_path / "text.txt"
    text.write_text("Call me Ishmael. " * 500)
    runs = tmp_path / "runs"

    def train(num_steps: int) -> Run:
        task = Pretrain(num_steps=num_steps, text=text, save_checkpoint=True, resume=True)
        run = launch(plan, task, folder=runs, name="exp")
        assert run.wait(60) == "finished", run.error
        return run

    assert train(2).reason == "the task returned on every rank"
    text.write_text("Some years ago, never mind how long. " * 500)
    other = train(3)
    assert read_steps(other) == [2] and other.reason == "the task returned on every rank"
    assert "text.txt has changed (SHA-256 " in other.logs(0)

    fix = r"Pretrain\.num_steps is 2, .*has 3 steps already, .*num_steps=5, for 2 more"
    with pytest.warns(RuntimeWarning, match=fix) as warned:
        untrained = train(2)
    assert [warning.filename for warning in warned] == [__file__], "not a line of ours"
    assert read_steps(untrained) == [] and untrained.reason == (
        "the task returned on every rank; nothing was trained: num_steps=2 is the total with the steps "
        "before, and the checkpoint had 3 steps"
    )
    assert "has changed" not in untrained.logs(0)

    larger = tiny_plan("ddp", 2, num_micro_batches=2)
    with pytest.warns(RuntimeWarning, match=r"Pretrain\.resume: .*Nearest fix: global_batch_size=4"):
        Pretrain(num_steps=5, text=text, resume=other.folder).check_launch(larger, runs, None)
