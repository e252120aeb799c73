"""What of a task cannot be pickled is named by the way to it, and finding that runs nobody's code."""

from __future__ import annotations

import collections
import dataclasses
import functools
import queue
import re
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from shardscope.runs.packing import describe, pack

LOCKS = [threading.Lock()]
"""The class of every task below is pickled by reference: this module is imported on ranks as well."""


class Trainer:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def run(self, ctx: Any) -> None: ...


class Slotted(Trainer):
    __slots__ = ("before", "sock")


@dataclasses.dataclass
class Part:
    inner: Any


Pair = collections.namedtuple("Pair", "first second")


class KeepsLess:
    """Its state leaves out what could not be pickled, but for one thing."""

    def __init__(self) -> None:
        self.dropped, self.kept = threading.Lock(), {"lock": threading.Lock()}

    def __getstate__(self) -> dict[str, Any]:
        return {"kept": self.kept}


class Rebuilt:
    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ([threading.Lock()],)


class Refuses:
    def __reduce__(self) -> tuple[Any, ...]:
        raise RuntimeError("not this")


def train(ctx: Any, sock: Any = None) -> None: ...


def slotted() -> Slotted:
    made = Slotted()
    made.sock = threading.Lock()
    return made


def closing_over(value: Any) -> Callable[[Any], Any]:
    def inner() -> Any:
        return value

    def outer(ctx: Any) -> Any:
        return inner()

    return outer


def with_default() -> Callable[..., Any]:
    def task(ctx: Any, one: int = 1, *, lock: Any = LOCKS[0]) -> None: ...

    return task


def of_local_class() -> Any:
    class Local:
        lock = LOCKS[0]

    return Local()


def deep() -> list[Any]:
    made: list[Any] = [LOCKS[0]]
    for _ in range(100_000):
        made = [made]
    return made


def cycle() -> Trainer:
    made = Trainer()
    made.me, made.cfg = made, {"lock": LOCKS[0]}  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Trainer(cfg={"tools": [LOCKS[0]]}), "Trainer.cfg['tools'][0], a _thread.lock,"),
        (
            lambda: functools.partial(train, sock=LOCKS[0]),
            "the argument 'sock' of the partial of train, a _th",
        ),
        (
            lambda: functools.partial(train, LOCKS[0]),
            "the argument 0 of the partial of train, a _thread.lock,",
        ),
        (
            lambda: Trainer(hook=functools.partial(train, sock={"a": LOCKS[0]})),
            "['a'] of the argument 'sock' of the partial of train (Trainer.hook), a _thread.lock,",
        ),
        (
            lambda: Trainer(cfg={"worker": threading.Thread()}),
            "Trainer.cfg['worker'], a threading.Thread (its _started._cond._lock is a _thread.lock),",
        ),
        (lambda: Trainer(q=queue.Queue()), "Trainer.q.mutex, a _thread.lock,"),
        (lambda: Trainer(tools={1, LOCKS[0]}), "an element of Trainer.tools, a _thread.lock,"),
        (lambda: Trainer(tools={LOCKS[0]: 1}), "a key of Trainer.tools, a _thread.lock,"),
        (lambda: Trainer(part=slotted()), "Trainer.part.sock, a _thread.lock,"),
        (lambda: Trainer(part=Part([Part(LOCKS[0])])), "Trainer.part.inner[0].inner, a _thread.lock,"),
        (lambda: Trainer(pair=Pair(1, LOCKS[0])), "Trainer.pair.second, a _thread.lock,"),
        (
            lambda: Trainer(late=collections.OrderedDict(a=collections.deque([1, LOCKS[0]]))),
            "Trainer.late['a'][1], a _thread.lock,",
        ),
        (KeepsLess, "KeepsLess.kept['lock'], a _thread.lock,"),
        (lambda: Trainer(made=Rebuilt()), "something in Trainer.made, a _thread.lock,"),
        (lambda: Trainer(cfg=[Refuses()]), f"Trainer.cfg[0], a {__name__}.Refuses,"),
        (lambda: Trainer(cfg={"x": LOCKS[0]}).run, "Trainer.cfg['x'], a _thread.lock,"),
        (lambda: Trainer(hook=Trainer(x=LOCKS[0]).run), "Trainer.hook.__self__.x, a _thread.lock,"),
        (
            lambda: closing_over({"tools": LOCKS[0]}),
            "['tools'] of the outer variable 'value' of inner (the outer variable 'inner' of outer), a",
        ),
        (with_default, "the default of 'lock' of task, a _thread.lock,"),
        (of_local_class, "Local.lock, a _thread.lock,"),
        (lambda: Trainer(lines=(i for i in ())), "Trainer.lines, a generator,"),
        (cycle, "Trainer.cfg['lock'], a _thread.lock,"),
        (lambda: Trainer(big=list(range(1_000_000)), late=LOCKS[0]), "Trainer.late, a _thread.lock,"),
        (
            lambda: Trainer(rows=[[0] * 9 for _ in range(99_999)], late=LOCKS[0]),
            "Trainer.late, a _thread.lock,",
        ),
        (lambda: Trainer(deep=deep()), "something in Trainer.deep[0][0]"),
    ],
)
def test_what_cannot_be_pickled_is_named_by_the_way_to_it(make: Callable[[], Any], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"cannot be sent to the ranks: {named}")):
        pack(make(), None)


def test_a_global_of_a_function_in_a_notebook_is_named() -> None:
    cell: dict[str, Any] = {"__name__": "__main__", "lock": threading.Lock(), "tools": [threading.Lock()]}
    exec("def task(ctx): return [tools for _ in ctx]\nclass Loop:\n    def step(self): return lock", cell)
    with pytest.raises(
        ValueError, match=r": \[0\] of the global 'tools' that task uses, a _thread\.lock, can"
    ):
        pack(cell["task"], None)
    with pytest.raises(ValueError, match=r": the global 'lock' that Loop\.step uses, a _thread\.lock, can"):
        pack(cell["Loop"](), None)


def test_naming_runs_no_property_and_no_getattr() -> None:
    class Meddling(type):
        def __getattribute__(cls, name: str) -> Any:
            if name == "__qualname__":
                ran.append(name)
            return super().__getattribute__(name)

    class Watchful(metaclass=Meddling):
        def __init__(self) -> None:
            self.cfg = {Key(): [threading.Lock()]}

        @property
        def sock(self) -> Any:
            ran.append("sock")
            raise RuntimeError

        def __getattr__(self, name: str) -> Any:
            ran.append(name)
            raise AttributeError(name)

    class Key:
        def __repr__(self) -> str:
            ran.append("repr")
            raise RuntimeError

    ran: list[str] = []
    task = Watchful()
    assert describe(task).endswith(".Watchful") and not ran
    with pytest.raises(Exception, match="pickle"):
        __import__("cloudpickle").dumps((task, None))
    as_pickle = set(ran)
    ran.clear()
    with pytest.raises(ValueError, match=r"Watchful\.cfg\[a [\w.<>]*Key\]\[0\], a _thread\.lock, cannot"):
        pack(task, None)
    assert set(ran) <= as_pickle


def test_what_is_too_large_to_search_is_not_blamed_on_what_comes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules["shardscope.runs.unpicklable"], "MAX_OBJECTS", 2000)
    parts = [Part(i) for i in range(900)]
    with pytest.raises(
        ValueError, match=r"ranks: something in Trainer cannot be pickled \(TypeError: cannot pi"
    ):
        pack(Trainer(first=parts, late=LOCKS[0]), None)
    with pytest.raises(ValueError, match=r"ranks: something in Trainer\.first cannot be pickled"):
        pack(Trainer(first=[*parts, LOCKS[0]]), None)


def test_a_socket_in_a_task_is_named() -> None:
    with socket.socket() as sock, pytest.raises(ValueError, match=r"Trainer\.conn\[1\], a socket\.socket, "):
        pack(Trainer(conn=(1, sock)), None)


def test_a_wrapped_function_keeps_its_name() -> None:
    assert describe(functools.lru_cache(train)) == describe(train) == f"{__name__}.train"
    assert describe(Trainer) == describe(Trainer()) == f"{__name__}.Trainer"
    assert describe(Trainer().run) == f"{__name__}.Trainer.run" and describe(len) == "builtins.len"
    assert describe(functools.partial(train)) == "functools.partial"
