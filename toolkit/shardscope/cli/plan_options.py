"""Options that describe a plan, a task or a target: ``--recipe seq_len=8192 precision=bf16``."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import shardscope as ss
from shardscope.core.errors import check_choice, check_keys, find_similar, refuse
from shardscope.frameworks.registry import list_layout_names
from shardscope.machine.user_folders import expand_home

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.cluster import Cluster
    from shardscope.core.layout import Layout
    from shardscope.core.plan import Plan
    from shardscope.core.recipe import Recipe
    from shardscope.runs.launch.context import Context

LAYOUTS = "ddp, fsdp2, zero, megatron"
"""Constructors of ``ss.Layout``, for help."""
TASKS = ("pretrain", "finetune", "script")
"""Classes of tasks, in lower case."""
WORDS: Mapping[str, object] = {"none": None, "true": True, "false": False}
PLAN_FILE = "plan.json"
FIELDS_METAVAR = "FIELD=VALUE"
FIELD_EXAMPLES = {"--recipe": "seq_len=4096", "--layout": "tp=2", "--task": "num_steps=100"}
"""Option -> one of its fields, for errors of words that are none."""
REQUIRED_FIELDS = {
    "weights": ("the folder of a Hugging Face model, a Hub id, or the name of an example model", "VALUE"),
    "source": ("the path of your script", "VALUE"),
}
"""Field of a task without a default -> what it may be, and a word for it, for errors of tasks without it."""


def add_plan_options(parser: argparse.ArgumentParser, *, with_layout: bool = True) -> None:
    """Add the options that :func:`read_plan` and :func:`read_parts` read."""
    group = parser.add_argument_group(
        "plan", "A plan.json (or its folder, or - for standard input), changed by the options after it."
    )
    group.add_argument("plan", nargs="?", help="plan.json, which --out and export write")
    group.add_argument(
        "--model", help="a catalogue name, a size (7b), a Hub id, or a folder with config.json"
    )
    group.add_argument(
        "--cluster", help='nodes x GPUs x type: "4x8xh100-sxm-80gb", "2xcpu"; default: this machine'
    )
    if with_layout:
        group.add_argument(
            "--layout",
            nargs="+",
            metavar=("FRAMEWORK", FIELDS_METAVAR),
            help=f"{LAYOUTS}, with its degrees: megatron tp=2 pp=2; default: fsdp2",
        )
    group.add_argument(
        "--recipe",
        nargs="+",
        default=[],
        metavar=FIELDS_METAVAR,
        help="fields of ss.Recipe: seq_len=8192 global_batch_size=64 precision=bf16",
    )


def read_plan(options: argparse.Namespace) -> Plan:
    """Return the plan that the options describe. Raises ``ValueError``."""
    stored = _read_stored_plan(options.plan) if options.plan else None
    architecture, cluster, recipe = read_parts(options, stored)
    if options.layout:
        name, *fields = options.layout
        layout = build_layout(
            "--layout", name, **parse_fields("--layout", fields, _find_layout_example(name))
        )
    else:
        layout = stored.layout if stored else ss.Layout.fsdp2()
    return ss.Plan(architecture, cluster, recipe, layout)


def read_parts(
    options: argparse.Namespace, stored: Plan | None = None
) -> tuple[Architecture, Cluster, Recipe]:
    """Return what a plan has without its layout. Raises ``ValueError``."""
    if stored is None and options.plan:
        stored = _read_stored_plan(options.plan)
    if options.model:
        architecture = find_architecture(options.model)
    elif stored:
        architecture = stored.architecture
    else:
        _check_swallowed_plan(options)
        refuse("--model", None, "a model, or the plan.json of one", "--model llama-3.1-8b")
    if options.cluster:
        cluster = ss.Cluster.parse(options.cluster)
    else:
        cluster = stored.cluster if stored else ss.Cluster.detect()
    changes = parse_fields("--recipe", options.recipe)
    check_keys("Recipe", changes, [field.name for field in dataclasses.fields(ss.Recipe)])
    recipe = stored.recipe if stored else ss.Recipe()
    values = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
    return architecture, cluster, ss.Recipe(**{**values, **changes})


def _check_swallowed_plan(options: argparse.Namespace) -> None:
    """Raise ``ValueError`` if an option of several words, such as ``--recipe``, has taken a plan's file."""
    for name in ("layout", "recipe", "frameworks", "task", "extra"):
        for word in getattr(options, name, None) or ():
            if "=" not in word and Path(word).is_file():
                refuse(f"--{name}", word, "no file", f"{word} before --{name}")


def find_architecture(name: str) -> Architecture:
    """Return the model of a catalogue name, a size, a path or a Hub id. Raises ``ValueError``."""
    if name in ss.models:
        return ss.models[name]
    if "/" in name or Path(name).exists():
        return ss.Architecture.from_hf(name)
    try:
        return ss.Architecture.of_size(name)
    except ValueError:
        # One message for all kinds of names; the catalogue has too many to list.
        similar = find_similar(name, list(ss.models))
        allowed = f"one of {len(ss.models)} names (ss.models), a size such as 7b, a Hub id, or a folder"
        refuse("--model", name, allowed, similar or "llama-3.1-8b")


def parse_fields(option: str, words: Sequence[str], example: str | None = None) -> dict[str, object]:
    """Return ``["tp=2", "offload=cpu"]`` as a mapping.

    Raises ``ValueError`` for other words, with ``example`` as the fix, or else the option's.
    """
    fields: dict[str, object] = {}
    for word in words:
        name, separator, text = word.partition("=")
        if not separator or not name.isidentifier():
            fix = f"{name}=..." if name.isidentifier() else example or FIELD_EXAMPLES[option]
            refuse(option, word, FIELDS_METAVAR, fix)
        if name in fields:
            refuse(option, word, f"each field once; {name} is there twice", f"leave {word} out")
        fields[name] = parse_value(text)
    return fields


def parse_value(text: str) -> object:
    """Return a number, a flag, None, a tuple ("a,b", "a,"), what JSON brackets hold, or the text itself."""
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    if text[:1] in ("[", "{"):
        try:
            return json.loads(text)
        except ValueError:
            return text
    if "," in text:
        return tuple(parse_value(item) for item in text.split(",") if item)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def build_task(words: Sequence[str]) -> Callable[[Context], object]:
    """Return the task of ``["pretrain", "num_steps=100"]``. Raises ``ValueError``."""
    name = check_choice("--task", words[0], TASKS)
    # By name, because each class imports what the others do not need.
    kind = getattr(ss, name.title())
    known = [field for field in dataclasses.fields(kind) if field.init]
    required = [
        field.name for field in known if field.default is field.default_factory is dataclasses.MISSING
    ]
    names = [field.name for field in known]
    given = {word.partition("=")[0] for word in words[1:]}
    missing = [field.name for field in known if not field.kw_only and field.name not in given]
    for word in words[1:]:
        # As in Python, where these fields are positional: script train.py, finetune my-model.
        if missing and "=" not in word and find_similar(word, names) is None:
            refuse("--task", word, FIELDS_METAVAR, f"{missing[0]}={word}")
    fields = parse_fields("--task", words[1:])
    check_keys(kind.__name__, fields, names)
    for field in required:
        if field not in fields:
            allowed, example = REQUIRED_FIELDS[field]
            refuse(f"{kind.__name__}.{field}", None, allowed, f"--task {name} {field}={example}")
    task: Callable[[Context], object] = kind(**fields)
    return task


def build_layout(option: str, name: str, **fields: object) -> Layout:
    """Return ``ss.Layout.<name>(**fields)``. Raises ``ValueError`` for other names than its constructors."""
    frameworks = list_layout_names()
    constructors = list(frameworks)
    if name not in frameworks and name in frameworks.values():
        # A framework may have another name than its layout.
        of_framework = constructors[list(frameworks.values()).index(name)]
        refuse(option, name, ", ".join(map(repr, constructors)), repr(of_framework))
    layout: Layout = getattr(ss.Layout, check_choice(option, name, constructors))(**fields)
    return layout


def _find_layout_example(name: str) -> str | None:
    """Return a field of the layout ``name``, for errors of words that are none; None: as other layouts."""
    if name not in list_layout_names():
        return None
    fields = inspect.signature(getattr(ss.Layout, name)).parameters
    if not fields:
        return f"{name} alone, which has no fields"
    return "stage=3" if "stage" in fields else None


def _read_stored_plan(name: str) -> Plan:
    """Read a plan's JSON. Raises ``ValueError`` or ``OSError``."""
    if name == "-":
        # A closed standard input is None.
        return _parse_plan("standard input", sys.stdin.buffer.read() if sys.stdin else b"")
    path = expand_home(name)
    path = path / PLAN_FILE if path.is_dir() else path
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        model = name if name in ss.models else "NAME"
        fix = f"--model {model} --cluster NAME"
        refuse("plan", name, f"the path of a {PLAN_FILE} or its folder", fix)
    return _parse_plan(str(path), content)


def _parse_plan(name: str, content: bytes) -> Plan:
    """Return the plan of a JSON text. Raises ``ValueError`` that begins with the file's name."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        allowed = f"a {PLAN_FILE} in UTF-8; byte {error.start} of this file is none"
        refuse("plan", name, allowed, "--out plan.json, which writes one")
    try:
        return ss.Plan.from_json(text)
    except ValueError as error:
        _refuse_other_json(name, text)
        raise ValueError(f"{name}: {error}") from error


def _refuse_other_json(name: str, text: str) -> None:
    """Raise ``ValueError`` for JSON with a plan in it, as ``--json`` prints, and for that of another tool."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return
    if not isinstance(document, dict) or isinstance(document.get("shardscope"), str):
        return
    for field in ("plan", "best"):
        stored = document.get(field)
        if isinstance(stored, dict) and stored.get("shardscope") == "Plan":
            allowed = f"a {PLAN_FILE}; the field {field!r} of this document is one"
            refuse("plan", name, allowed, f"jq .{field}")
    readers = "ss.Plan.from_deepspeed, from_accelerate or from_megatron in Python"
    refuse(
        "plan", name, f"a {PLAN_FILE}, which --out and export write", f"{readers}, for a file of another tool"
    )
