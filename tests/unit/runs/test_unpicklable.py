"""The error message of a launch names what in the task cannot be pickled."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest

from shardscope.runs.launch.packing import describe_task, pack


class Trainer:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def run(self, ctx: Any) -> None: ...


class Refuses:
    def __reduce__(self) -> tuple[Any, ...]:
        raise RuntimeError("not this")


def train(ctx: Any, lock: Any = None) -> None: ...


def closing_over(value: Any) -> Callable[[Any], Any]:
    def task(ctx: Any) -> Any:
        return value

    return task


def with_default() -> Callable[..., Any]:
    def task(ctx: Any, one: int = 1, *, lock: Any = threading.Lock()) -> None: ...  # noqa: B008

    return task


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Trainer(lock=threading.Lock()), "Trainer.lock, a _thread.lock,"),
        (lambda: Trainer(cfg={"tools": [threading.Lock()]}), "Trainer.cfg, a dict,"),
        (lambda: Trainer(lines=(i for i in ())).run, "Trainer.lines, a generator,"),
        (lambda: Trainer(part=Refuses()), f"Trainer.part, a {__name__}.Refuses,"),
        (
            lambda: functools.partial(train, lock=threading.Lock()),
            "the argument 'lock' of the partial of train, a _thread.lock,",
        ),
        (
            lambda: functools.partial(train, threading.Lock()),
            "the argument 0 of the partial of train, a _thread.lock,",
        ),
        (lambda: closing_over(threading.Lock()), "the outer variable 'value' of task, a _thread.lock,"),
        (with_default, "the default of 'lock' of task, a _thread.lock,"),
    ],
)
def test_the_value_that_cannot_be_pickled_is_named(make: Callable[[], Any], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"cannot be sent to the ranks: {named}")):
        pack(make(), None)


def test_a_global_of_a_function_in_a_notebook_is_named() -> None:
    cell: dict[str, Any] = {"__name__": "__main__", "lock": threading.Lock()}
    exec("def task(ctx): return lock", cell)
    with pytest.raises(ValueError, match=r": the global 'lock' that task uses, a _thread\.lock, can"):
        pack(cell["task"], None)


def test_a_task_is_described_by_its_qualified_name() -> None:
    assert describe_task(functools.lru_cache(train)) == describe_task(train) == f"{__name__}.train"
    assert describe_task(Trainer) == describe_task(Trainer()) == f"{__name__}.Trainer"
    assert describe_task(Trainer().run) == f"{__name__}.Trainer.run"
