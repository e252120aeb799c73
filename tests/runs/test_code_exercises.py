"""Code exercises on two real gloo ranks: right answers, the usual wrong ones, and answers that never return.

Learners write in a notebook; here a cell's source is compiled under a name of its own, as IPython does.
"""

from __future__ import annotations

import linecache
import os
import re
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.requirements import few, needs, thorough

needs("torch")
needs("accelerate")

import shardscope as ss  # noqa: E402
from shardscope import teach  # noqa: E402
from shardscope.teach import two_ranks  # noqa: E402

SOLUTIONS = Path(__file__).parents[2] / "notebooks" / "solutions" / "30_write_it_yourself.py"
NAMES = {
    "30-bucketed-all-reduce": "average_gradients",
    "30-sharded-optimizer": "ShardedOptimizer",
    "30-one-layer-fsdp": "ShardedLinear",
}
"""What each exercise's cell defines."""
DDP, ZERO, FSDP = NAMES
cells = count()


def read_solutions() -> dict[str, str]:
    parts = re.split(r"^# %% (\S+)\n", SOLUTIONS.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


SOURCES = read_solutions()


def run_cell(source: str, name: str) -> Any:
    """Run a cell as IPython does: its source is in linecache, under a name that is no file."""
    file_name = f"<cell {next(cells)}>"
    linecache.cache[file_name] = (len(source), None, source.splitlines(keepends=True), file_name)
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, file_name, "exec"), scope)
    return scope[name]


def change(exercise: str, *changes: tuple[str, str]) -> Any:
    """Return the solution with some of its text replaced."""
    source = SOURCES[exercise]
    for before, after in changes:
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    return run_cell(source, NAMES[exercise])


@pytest.fixture(autouse=True)
def no_process_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUPYTERHUB_USER", "ada")
    monkeypatch.delenv("SHARDSCOPE_ANSWERS", raising=False)
    folders = tmp_path / "temporary"
    folders.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folders))
    before = psutil.Process().children()  # such as the browser of other tests
    yield
    deadline = time.monotonic() + 30
    while left := list_processes(folders, before):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    assert not list(folders.iterdir()), "a check left files"


def list_processes(folder: Path, before: list[psutil.Process]) -> list[psutil.Process]:
    """Return processes that the check started: children, and any that names its folder."""
    left = [child for child in psutil.Process().children() if child not in before]
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
            left += [process] if str(folder) in " ".join(process.info["cmdline"] or ()) else []
    return [one for one in left if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("exercise", few(NAMES, {"30-one-layer-fsdp"}))
def test_the_solution_equals_one_process(exercise: str) -> None:
    feedback = teach.check(exercise, run_cell(SOURCES[exercise], NAMES[exercise]))
    assert feedback.correct, feedback.text
    words = {
        DDP: "3 allreduce (25,344 bytes)",
        ZERO: "12 broadcast (25,344 bytes)",
        FSDP: "1 allgather (6,144",
    }
    assert words[exercise] in feedback.text
    assert "1 reduce_scatter (6,144 bytes)" in feedback.text or exercise != FSDP


def test_fsdp_by_functional_collectives_and_a_checkpoint_is_right() -> None:
    """torch's own operators make the second all-gather and the reduce-scatter by themselves."""
    source = """
import torch
from torch.distributed import group
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.utils.checkpoint import checkpoint
import torch.distributed as dist

class ShardedLinear(torch.nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.shape = linear.weight.shape
        slices = linear.weight.detach().flatten().chunk(dist.get_world_size())
        self.shard = torch.nn.Parameter(slices[dist.get_rank()].clone())
        self.shard.register_hook(lambda grad: grad / dist.get_world_size())

    def multiply(self, x, shard):
        whole = all_gather_tensor_autograd(shard, 0, group.WORLD)
        return x @ whole.view(self.shape).t()

    def forward(self, x):
        return checkpoint(self.multiply, x, self.shard, use_reentrant=False)
"""
    feedback = teach.check(FSDP, run_cell(source, NAMES[FSDP]))
    assert feedback.correct, feedback.text
    assert "backward 1 allgather (6,144 bytes), 1 reduce_scatter (6,144 bytes)" in feedback.text


WRONG = {
    "forgot to divide": (DDP, "2 times too large", ("        flat /= dist.get_world_size()\n", "")),
    "last bucket is not sent": (
        DDP,
        "still this rank's own gradient. Is the last bucket",
        ("        size += num_bytes\n    buckets.append(bucket)\n", "        size += num_bytes\n"),
    ),
    "not copied back": (DDP, "still has its own gradients", ("parameter.grad.copy_(", "torch.clone(")),
    "one message for each tensor": (DDP, "need 3 buckets", ("size + num_bytes > bucket_bytes", "True")),
    "one message for all": (DDP, "is larger than a bucket", ("size + num_bytes > bucket_bytes", "False")),
    "buckets begin with the first parameter": (
        DDP,
        "the first bucket has the first parameter",
        ("in reversed(parameters):", "in parameters:"),
    ),
    "one rank does not call": (
        DDP,
        "Rank 0 has returned from it; rank 1 is in line",
        ("    for bucket in buckets:\n", "    for bucket in buckets if dist.get_rank() else []:\n"),
    ),
    "raises on one rank": (
        DDP,
        "Rank 1 raised KeyError: 'mine' in line 7 of the cell",
        (
            "    for parameter in reversed(",
            "    {}['mine'] if dist.get_rank() else 0\n    for parameter in reversed(",
        ),
    ),
    "whole state on each rank": (
        ZERO,
        "holds 50,688 of 50,688 bytes of state",
        ("torch.optim.AdamW(own,", "torch.optim.AdamW(self.parameters,"),
    ),
    "shares of equally many tensors": (
        ZERO,
        "not equally many tensors",
        ("sizes[owner] += parameter.numel()", "sizes[owner] += 1"),
    ),
    "new values are not sent": (
        ZERO,
        "still has the old values of",
        ("dist.broadcast(parameter.data, src=owner)", "pass"),
    ),
    "another learning rate": (ZERO, "does it get lr=learning_rate", ("lr=learning_rate", "lr=1e-3")),
    "gradients are sent again": (
        ZERO,
        "gradients are averaged already",
        (
            "        self.optimizer.step()\n",
            "        self.optimizer.step()\n        for one in self.parameters:\n"
            "            dist.all_reduce(one.grad.clone())\n",
        ),
    ),
    "sum of the gradients": (
        FSDP,
        "The step is 2 times too large",
        ("grad_shard / dist.get_world_size(), None", "grad_shard, None"),
    ),
    "gradients of the own batch": (
        FSDP,
        "Each shard learns from its own rank's batch alone",
        (
            "dist.reduce_scatter_tensor(grad_shard, (grad.t() @ x).flatten())",
            "grad_shard.copy_((grad.t() @ x).flatten().chunk(2)[dist.get_rank()])",
        ),
    ),
    "whole weight is kept": (
        FSDP,
        "The whole weight is kept from forward to backward",
        (
            "        return x @ GatheredLinear.gather(shard, shape).t()\n",
            "        ctx.weight = GatheredLinear.gather(shard, shape)\n        return x @ ctx.weight.t()\n",
        ),
        ("weight = GatheredLinear.gather(shard, ctx.shape)", "weight = ctx.weight"),
    ),
    "a view of the whole weight": (
        FSDP,
        "keeps the whole weight alive",
        ("dist.get_rank()].clone()", "dist.get_rank()]"),
    ),
    "nothing is sharded": (
        FSDP,
        "have 1,536 weights; a shard of 1,536 over 2 ranks has 768",
        ("slices[dist.get_rank()].clone()", "linear.weight.detach().flatten()"),
    ),
}
FAST = "last bucket is not sent"
"""The one that `make test` runs: each takes a launch."""


@pytest.mark.parametrize(
    "title", [title if title == FAST else pytest.param(title, marks=thorough()) for title in WRONG]
)
def test_a_wrong_answer_is_explained(title: str) -> None:
    exercise, words, *changes = WRONG[title]
    feedback = teach.check(exercise, change(exercise, *changes))
    assert feedback.correct is False and words in feedback.text, feedback.text
    assert "Hint 1:" in feedback.text and "Traceback" not in feedback.text


@thorough()
def test_a_loop_without_an_end_is_stopped_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = run_cell(
        "def average_gradients(parameters, bucket_bytes):\n    while True:\n        pass\n", NAMES[DDP]
    )
    feedback = teach.check(DDP, answer)
    assert "did not return on every rank within 15 s" in feedback.text
    assert "line 2 of the cell" in feedback.text or "line 3 of the cell" in feedback.text


@thorough()
def test_a_rank_that_dies_is_a_hint() -> None:
    source = "def average_gradients(parameters, bucket_bytes):\n    import os\n\n    os._exit(3)\n"
    feedback = teach.check(DDP, run_cell(source, NAMES[DDP]))
    assert feedback.correct is False and "ended without an answer" in feedback.text


@thorough()
def test_an_interrupted_check_leaves_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(run: Any, timeout: float | None = None) -> str:
        monkeypatch.undo()
        monkeypatch.setenv("JUPYTERHUB_USER", "ada")
        raise KeyboardInterrupt

    monkeypatch.setattr(ss.Run, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        teach.check(DDP, run_cell(SOURCES[DDP], NAMES[DDP]))


@thorough()
def test_what_a_rank_prints_is_in_the_feedback() -> None:
    source = "def average_gradients(parameters, bucket_bytes):\n    print('sizes', len(parameters))\n"
    feedback = teach.check(DDP, run_cell(source, NAMES[DDP]))
    assert "Every rank still has its own gradients" in feedback.text
    assert "Rank 0 printed: sizes 12" in feedback.text


def test_wrong_kinds_start_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_ranks, "launch", None)

    class NoStep:
        def __init__(self, parameters: Any, learning_rate: float) -> None:
            self.parameters = parameters

    async def lazy(parameters: Any, bucket_bytes: int) -> None:
        print(parameters)

    cases: tuple[tuple[str, object, str], ...] = (
        (DDP, lambda parameters: 1, "cannot be called so"),
        (DDP, NoStep, "expected: a function"),
        (DDP, lazy, "would not run its body"),
        (ZERO, NoStep, "has no method step"),
        (ZERO, lambda parameters, learning_rate: 1, "expected: a class with a method step"),
        (FSDP, 3, "The answer is of type int"),
    )
    for exercise, answer, words in cases:
        feedback = teach.check(exercise, answer)
        assert words in feedback.text and "Hint" not in feedback.text, feedback.text


def test_a_cell_as_it_comes_is_no_answer() -> None:
    source = (
        "class ShardedOptimizer:\n    def __init__(self, a, b): ...\n\n    def step(self):\n        'Doc.'\n"
    )
    assert "Write your answer" in teach.check(ZERO, run_cell(source, NAMES[ZERO])).text
    source = "def average_gradients(parameters, bucket_bytes):\n    '''Doc.'''\n    ...\n"
    assert "Write your answer" in teach.check(DDP, run_cell(source, NAMES[DDP])).text
