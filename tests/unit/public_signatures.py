"""The signature of every public name, method and property, as text that a test compares with a stored file.

``python -m tests.unit.public_signatures --write`` stores today's, for a change that is meant.
Modules are left out: where a name is defined may change.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ForwardRef

import shardscope as ss
import shardscope_widgets
from shardscope import teach
from shardscope.runs.launch.context import Context
from shardscope.runs.sweep import Sweep
from shardscope.runs.trained.chat import Chat
from shardscope.training.tasks.choices import Choice, Choices

STORED = Path(__file__).parents[1] / "fixtures" / "formats" / "public_signatures.txt"
TRACE = STORED.parents[1] / "trace_2_ranks"
PACKAGES = ("shardscope", "shardscope_widgets")
MODULE = re.compile(r"\b(?:shardscope|shardscope_widgets|pathlib|collections\.abc|typing)\.(?:\w+\.)*(?=\w)")


def describe_interface() -> str:
    """Return one line for each public name and each public member of a class."""
    lines: list[str] = []
    for package in (ss, shardscope_widgets, teach):
        for name in sorted(package.__all__):
            prefix = "teach." if package is teach else ""
            lines += _describe(f"{prefix}{name}", getattr(package, name))
    for answer in (*_make_answers(), Chat, Choice, Choices, Context, Sweep):
        kind = answer if isinstance(answer, type) else type(answer)
        lines += _describe(kind.__name__, kind)
    return "\n".join(dict.fromkeys(lines)) + "\n"


def _make_answers() -> Iterator[Any]:
    """Yield one object of each class that public functions return."""
    plan = ss.Plan(
        ss.models["llama-3.1-8b"], ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(), ss.Layout.ddp()
    )
    memory = plan.memory()
    yield from (plan.cluster.gpu, plan.cluster.host_link, plan.degrees)
    yield from (memory, memory.by_stage[0], plan.step(), plan.step().communication[0])
    yield from (plan.findings()[0], plan.repairs()[0])
    yield ss.search(plan.architecture, plan.cluster, plan.recipe, ("ddp",))
    advice = ss.recommend(plan.architecture, plan.cluster, plan.recipe)
    yield from (advice, advice.path[0])
    trace = ss.Trace.load(TRACE)
    summary, collectives = trace.summary(), trace.collectives()
    yield from (summary, summary.findings[0], collectives, collectives.what_if(collectives[0]["axis"]))
    yield from (trace.kernels(), trace.stragglers(), trace.critical_path(), trace.diff(trace))


def _describe(name: str, value: Any) -> Iterator[str]:
    if not callable(value):
        yield f"{name}: {type(value).__name__}"
        return
    yield f"{name}{_format_signature(value)}"
    if not isinstance(value, type):
        return
    fields = getattr(value, "__dataclass_fields__", {})  # Those of __init__ are in its signature.
    own = [owner for owner in value.__mro__ if owner.__module__.split(".")[0] in PACKAGES]
    for member in sorted({key for owner in own for key in vars(owner) if not key.startswith("_")}):
        if member not in fields:
            yield _describe_member(f"{name}.{member}", inspect.getattr_static(value, member))


def _describe_member(name: str, member: Any) -> str:
    if isinstance(member, property):
        return f"{name} -> {_format_return(member.fget)}"
    if isinstance(member, functools.cached_property):
        return f"{name} -> {_format_return(member.func)}"
    if isinstance(member, staticmethod | classmethod):
        return f"{name}{_format_signature(member.__func__)}  [{type(member).__name__}]"
    return f"{name}{_format_signature(member)}" if inspect.isfunction(member) else name


def _format_signature(function: Any) -> str:
    signature = inspect.signature(function)
    parameters = []
    for one in signature.parameters.values():
        if inspect.isfunction(one.default):
            one = one.replace(default=_Words("..."))  # A function would be shown with its address.
        parameters.append(one.replace(annotation=_format_annotation(one.annotation)))
    returned = _format_annotation(signature.return_annotation)
    return str(signature.replace(parameters=parameters, return_annotation=returned))


class _Words:
    """Text that ``inspect`` shows without quotes."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _format_annotation(annotation: Any) -> Any:
    if annotation is inspect.Signature.empty:
        return annotation
    if isinstance(annotation, ForwardRef):
        annotation = annotation.__forward_arg__
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return _Words(MODULE.sub("", text))


def _format_return(function: Any) -> str:
    return repr(_format_annotation(inspect.signature(function).return_annotation))


def main() -> None:
    """Print the interface, or store it."""
    parser = argparse.ArgumentParser(prog="python -m tests.unit.public_signatures", description=__doc__)
    parser.add_argument("--write", action="store_true")
    text = describe_interface()
    if parser.parse_args().write:
        STORED.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
