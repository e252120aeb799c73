"""Pages of the site that are generated at build: API, command line, catalogue, errors and notebooks."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import os
import re
import shutil
import tempfile
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import NamedTuple, get_args, get_type_hints
from unittest.mock import patch

from refusals import REFUSALS, Refusal

import shardscope as ss
from shardscope.catalog import load_table
from shardscope.cli.main import build_parser
from shardscope.core.errors import FieldError
from shardscope.core.layout import Layout
from shardscope.frameworks.registry import frameworks, list_layout_names
from shardscope.prediction.support import SUPPORT, list_supported
from shardscope.training.tasks.text_task import TextTask

REPOSITORY = Path(__file__).parents[2]
TOOLKIT = REPOSITORY / "toolkit" / "shardscope"
PROJECT_PAGES = ("CHANGELOG", "CONTRIBUTING", "SECURITY")


MAPPINGS = {
    "gpus": "Mapping from the catalogue's names to :class:`~shardscope.core.cluster.Gpu`.",
    "models": "Mapping from the catalogue's names to :class:`~shardscope.Architecture`.",
    "puzzles": "Mapping from names to :class:`~shardscope.teach.Puzzle`, the easy ones first.",
}
"""Public names that are neither classes nor functions."""


class Topic(NamedTuple):
    """A page of the API reference, ``docs/reference/<name>.md``, which includes what is generated for it."""

    name: str
    packages: tuple[str, ...]
    """Packages of ``shardscope`` whose public names belong to the page."""
    results: tuple[str, ...] = ()
    """Classes that these names return, by their full name."""


FIELDS_OF_TASKS = tuple(field.name for field in fields(TextTask))
CONSTRUCTORS = tuple(list_layout_names())
MEMBERS = {
    "shardscope.Layout": (
        "framework",
        "title",
        *CONSTRUCTORS,
        "to_dict",
        "from_dict",
        "to_json",
        "from_json",
    ),
    "shardscope.training.tasks.text_task.TextTask": FIELDS_OF_TASKS,
    "shardscope.runs.launch.context.Context": (
        *("rank", "world_size", "device", "plan", "folder", "engine", "should_stop", "log", "log_memory"),
        *("memory_metrics", "profile", "commands", "record", "barrier"),
    ),
    "shardscope.training.engine.Engine": (
        *("seed", "fresh_weights", "max_grad_norm", "learning_rate", "weight_decay", "num_steps_done"),
        *("grad_norm", "data_rank", "num_data_ranks", "setup", "step", "evaluate", "set_learning_rate"),
        *("save", "load", "export", "memory"),
    ),
}
"""Classes with members that only Shardscope calls -> the others. Other classes are documented in full."""

TOPICS = (
    Topic(
        "plans",
        ("core", "catalog"),
        (
            "shardscope.core.cluster.Gpu",
            "shardscope.core.cluster.Link",
            "shardscope.core.finding.Finding",
            "shardscope.core.errors.FieldError",
            "shardscope.core.layout.Degrees",
            "shardscope.core.layer_parts.MixtureOfExperts",
            "shardscope.core.layer_parts.LatentAttention",
            "shardscope.memory.report.MemoryReport",
            "shardscope.memory.report.StageMemory",
            "shardscope.timing.report.StepReport",
            "shardscope.timing.report.Communication",
        ),
    ),
    Topic(
        "search",
        ("planner",),
        (
            "shardscope.planner.search.ranking.Ranking",
            "shardscope.planner.advice.advice.Advice",
            "shardscope.planner.repairs.repairs.Repair",
            "shardscope.planner.repairs.make_it_fit.Fit",
        ),
    ),
    Topic(
        "runs",
        ("runs", "training", "frameworks"),
        (
            "shardscope.training.tasks.text_task.TextTask",
            "shardscope.runs.launch.context.Context",
            "shardscope.training.engine.Engine",
            "shardscope.training.examples.preview.Preview",
            "shardscope.training.tasks.choices.Choices",
            "shardscope.training.tasks.choices.Choice",
            "shardscope.runs.explain.measured.MeasuredMemory",
            "shardscope.runs.explain.compare.Runs",
            "shardscope.runs.explain.compare.Comparison",
            "shardscope.records.nodes.RunNode",
            "shardscope.runs.sweep.Sweep",
            "shardscope.runs.trained.chat.Chat",
        ),
    ),
    Topic("traces", ("trace",), ("shardscope.trace.summary.summary.TraceSummary",)),
)


ROWS_OF_TRACES = {
    "breakdown": ("breakdown", "BreakdownRow"),
    "steps": ("breakdown", "StepRow"),
    "overlap": ("breakdown", "OverlapRow"),
    "idle": ("breakdown", "IdleRow"),
    "kernels": ("kernels", "KernelRow"),
    "collectives": ("collectives", "CollectiveRow"),
    "stragglers": ("stragglers", "StragglerRow"),
    "critical_path": ("critical_path", "PathRow"),
    "launches": ("launches", "LaunchRow"),
    "memory": ("memory", "MemoryRow"),
    "modules": ("modules", "ModuleRow"),
    "diff": ("diff", "DiffRow"),
    "compare": ("plan_comparison", "ComparisonRow"),
}
"""Method of ``Trace`` -> the class of its rows, in ``shardscope.trace.analysis``."""


def list_public_names(topic: Topic) -> list[str]:
    """Return the public names of ``shardscope`` on the page of ``topic``."""
    modules = ss._modules | {"runs": "runs"}
    return [name for name in ss.__all__ if modules[name].partition(".")[0] in topic.packages]


def list_widget_names() -> list[str]:
    """Return the public names of ``shardscope_widgets``, the Studio first."""
    names: list[str] = importlib.import_module("shardscope_widgets").__all__
    return sorted(names, key=lambda name: (name != "Studio", name))


def write_directives(module: str, names: Iterable[str], *, inherited: bool = False) -> str:
    """Return autodoc's directives of ``names`` in ``module``."""
    source = importlib.import_module(module)
    return "\n".join(_write_directive(module, name, getattr(source, name), inherited) for name in names)


def _write_directive(module: str, name: str, value: object, inherited: bool) -> str:
    if name in MAPPINGS:
        return f".. py:data:: {module}.{name}\n\n   {MAPPINGS[name]}\n"
    if not isinstance(value, type):
        return f".. autofunction:: {module}.{name}\n"
    options = f"   :members: {', '.join(MEMBERS.get(f'{module}.{name}', ()))}".rstrip() + "\n"
    if hooks := list_hooks(value):
        options += f"   :exclude-members: {', '.join(hooks)}\n"
    if inherited:
        options += "   :inherited-members: object\n"
    return f".. autoclass:: {module}.{name}\n{options}"


def list_hooks(owner: type) -> list[str]:
    """Return the members of a class whose docstring only refers to its base class, which calls them."""
    docstrings = {name: inspect.getdoc(member) or "" for name, member in vars(owner).items()}
    return [name for name, text in docstrings.items() if text.startswith("See :class:")]


def write_api(topic: Topic) -> str:
    """Return the directives of a topic: its public names, then the classes that they return."""
    parts = [write_directives("shardscope", list_public_names(topic))]
    for full_name in topic.results:
        module, _, name = full_name.rpartition(".")
        parts.append(write_directives(module, [name]))
    return _wrap_directives("\n".join(parts))


def write_widgets_api() -> str:
    """Return the directives of the widgets."""
    return _wrap_directives(write_directives("shardscope_widgets", list_widget_names()))


def write_teaching_api() -> str:
    """Return the directives of ``shardscope.teach``'s public names."""
    names: list[str] = importlib.import_module("shardscope.teach").__all__
    return _wrap_directives(write_directives("shardscope.teach", sorted(names)))


def _wrap_directives(directives: str) -> str:
    return f"````{{eval-rst}}\n{directives}\n````\n"


def write_table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table."""
    lines = [list(heads), *(list(row) for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join(
        f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines
    )


_URL = re.compile(r"https?://[^\s,;)]*[^\s,;).]")


def link_urls(text: str) -> str:
    """Return ``text`` with its addresses as links that show the host's name."""
    return _URL.sub(lambda found: f"[{found[0].split('/')[2]}]({found[0]})", text)


def write_models() -> str:
    """Return the page of the catalogue's models."""
    rows = (
        (
            f"`{name}`",
            f"{model.num_parameters / 1e9:,.3g}B",
            model.num_hidden_layers,
            model.hidden_size,
            model.model_type,
            link_urls(str(entry["source"])),
        )
        for name, entry in load_table("models").items()
        for model in (ss.models[name],)
    )
    return (
        "# Models\n\nThe catalogue, `ss.models`, as it is in `catalog/models.toml`. Parameters are counted "
        "from the shapes, tied weights once.\n\n"
        + write_table(("name", "parameters", "layers", "hidden size", "type", "source"), rows)
    )


def write_gpus() -> str:
    """Return the page of the catalogue's GPUs and links."""
    file = tomllib.loads((TOOLKIT / "catalog" / "gpus.toml").read_text(encoding="utf-8"))
    rows, sources = [], []
    for name, entry in file.items():
        flops = entry.get("peak_flops", {})
        half = max(flops.get("bf16", 0), flops.get("fp16", 0))
        price = entry.get("price_per_hour_usd")
        rows.append(
            (
                f"`{name}`",
                _scale(entry, "memory_bytes", 2**30),
                str(entry.get("usable_gib", "")),
                _scale(entry, "memory_bandwidth_bytes_per_second", 1e9),
                f"{half / 1e12:,.0f}" if half else "",
                f"{flops['fp8'] / 1e12:,.0f}" if "fp8" in flops else "",
                f"{price:.2f}" if price else "",
                entry.get("link", ""),
            )
        )
        keys = [key for key in entry if key == "source" or key.endswith("_source")]
        words = {"source": "datasheet", "usable_source": "usable memory", "host_source": "host"}
        if price:
            words["price_source"] = f"price of {entry['price_date']}"
        entries = [
            f"*{words.get(key, key.removesuffix('_source'))}*: {link_urls(entry[key])}" for key in keys
        ]
        sources.append(f"`{name}`\n: " + "\n\n  ".join(entries))
    links = load_table("links").items()
    return (
        "# GPUs and links\n\nThe catalogue, `ss.gpus`, as it is in `catalog/gpus.toml` and "
        "`catalog/links.toml`. Peaks are dense TFLOP/s of a datasheet; the share of them that kernels reach "
        "is in `catalog/efficiency.toml`.\n\n"
        "## GPUs\n\n"
        + write_table(
            (
                *("name", "memory GiB", "usable GiB", "GB/s", "16-bit TFLOP/s", "fp8 TFLOP/s", "USD/h"),
                "link",
            ),
            rows,
        )
        + "\n## Links\n\nBandwidth is one GPU's, one way.\n\n"
        + write_table(
            ("name", "GB/s", "latency µs", "source"),
            (
                (
                    f"`{name}`",
                    f"{entry['bandwidth_bytes_per_second'] / 1e9:,.1f}",  # type: ignore[operator]
                    f"{entry['latency_seconds'] * 1e6:.1f}",  # type: ignore[operator]
                    link_urls(str(entry["source"])),
                )
                for name, entry in links
            ),
        )
        + "\n## Sources of the GPUs\n\n"
        + "\n\n".join(sources)
        + "\n"
    )


def _scale(entry: Mapping[str, float], key: str, unit: float) -> str:
    """Return a figure in its unit, empty where the catalogue has none."""
    return f"{entry[key] / unit:,.0f}" if key in entry else ""


def write_command_line() -> str:
    """Return the page of the command line: ``--help`` of the program and of each command."""
    with patch.dict(os.environ, {"COLUMNS": "88", "NO_COLOR": "1"}):
        parser = build_parser()
        parts = [f"```text\n{parser.format_help()}```\n"]
        for name, command in _list_commands(parser):
            parts.append(f"## {name}\n\n```text\n{command.format_help()}```\n")
    return (
        "# Options of each command\n\nThe output of `shardscope --help` and of each command's. "
        "[The command line](../command_line.md) explains them.\n\n" + "\n".join(parts)
    )


def _list_commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def raise_refusal(refusal: Refusal) -> tuple[Exception, str]:
    """Return the error that the refusal's code raises, and its message; ``AssertionError`` without one."""
    folder = Path.cwd()
    with tempfile.TemporaryDirectory() as empty:
        os.chdir(empty)
        try:
            exec(compile(refusal.code, refusal.title, "exec"), {"ss": ss})
        except Exception as error:
            # The message of a KeyError is the representation of its argument.
            text = str(error.args[0] if isinstance(error, KeyError) else error)
            return error, text.replace(empty, "/home/you")
        finally:
            os.chdir(folder)
    raise AssertionError(f"nothing is refused any more: {refusal.title}")


def write_errors() -> str:
    """Return the page of errors: each kind of refusal, raised now."""
    parts = []
    for refusal in REFUSALS:
        error, words = raise_refusal(refusal)
        kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
        message = textwrap.fill(f"{kind}: {words}", 100, break_long_words=False, break_on_hyphens=False)
        code = f"```python\n{refusal.code}```\n\n```text\n{message}\n```\n"
        text = f"## {refusal.title}\n\n{refusal.text}\n\n{code}"
        if isinstance(error, FieldError) and error.changes:
            text += f"\nThe fix as data, `error.changes`: `{error.changes}`\n"
        parts.append(text)
    return (
        "# Errors\n\nWhat cannot run, or has no formula, raises an error when the object is made. "
        "`FieldError` is a `ValueError` that carries the field, the value, what is allowed and the nearest "
        "fix as attributes. Each message below was raised when this page was built.\n\n" + "\n".join(parts)
    )


def write_layout_options() -> str:
    """Return a table of the options of each framework's layout: default, values and meaning."""
    parts = []
    for name, framework in list_layout_names().items():
        options = list(_list_options(frameworks[framework].layout_class))
        if options:
            parts.append(
                f"### ss.Layout.{name}\n\n{write_table(('option', 'default', 'values', 'meaning'), options)}"
            )
    return "\n".join(parts)


def _list_options(layout_class: type[Layout]) -> Iterator[tuple[str, ...]]:
    """Yield name, default, values and docstring of each field of a layout."""
    docstrings, types = read_field_docstrings(layout_class), get_type_hints(layout_class)
    for field in fields(layout_class):
        default = f"{field.default:_}" if type(field.default) is int else repr(field.default)
        values = ", ".join(_list_values(types[field.name]))
        yield f"`{field.name}`", f"`{default}`", values, _to_markdown(docstrings[field.name])


def read_field_docstrings(owner: type) -> dict[str, str]:
    """Return the strings after the annotated fields of a class, by field, those of its bases included."""
    docstrings: dict[str, str] = {}
    # At run time a TypedDict's only base is dict; it has a record of the others.
    bases = getattr(owner, "__orig_bases__", owner.__bases__)
    for base in (*bases, owner):
        if not isinstance(base, type) or not base.__module__.startswith("shardscope."):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in pairwise(definition.body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                docstrings[field.target.id] = str(text.value.value)
    return docstrings


def _list_values(kind: object) -> Iterator[str]:
    """Yield the values of a field's type, as Markdown."""
    if parts := get_args(kind):
        for part in parts:
            yield from _list_values(part)
    elif isinstance(kind, type):
        yield {bool: "`True`, `False`", int: "a whole number", NoneType: "`None`"}[kind]
    else:
        yield f"`{kind!r}`"


def write_trace_columns() -> str:
    """Return a table of the columns that each analysis of a trace returns."""
    trace = ss.Trace.load(REPOSITORY / "tests" / "fixtures" / "trace_2_ranks", cache=False)
    rows = []
    for method, (module, name) in ROWS_OF_TRACES.items():
        row_class = getattr(importlib.import_module(f"shardscope.trace.analysis.{module}"), name)
        docstrings = read_field_docstrings(row_class)
        columns = [
            f"`{column}`" + (f": {_to_markdown(docstrings[column])}" if column in docstrings else "")
            for column in _list_columns(trace, method, row_class)
        ]
        rows.append((f"`{method}()`", "<br>".join(columns)))
    return write_table(("method", "columns of its data frame"), rows)


def _list_columns(trace: ss.Trace, method: str, row_class: type) -> Iterable[str]:
    if method == "compare":  # It needs a plan with a predicted step, and all keys of its rows are columns.
        return get_type_hints(row_class)
    table = trace.diff(trace) if method == "diff" else getattr(trace, method)()
    columns: tuple[str, ...] = table.columns
    return columns


def write_recipe_values() -> str:
    """Return a table of the recipe's values for which each framework's memory model has formulas."""
    names = list_layout_names()
    layout_classes = [frameworks[framework].layout_class for framework in names.values()]
    rows = (
        (
            f"`{field}`",
            *(
                ", ".join(f"`{value}`" for value in list_supported(layout_class, field)) or "none"
                for layout_class in layout_classes
            ),
        )
        for field in SUPPORT
    )
    return write_table(("field of `ss.Recipe`", *(f"`{name}`" for name in names)), rows)


def write_files_table(*folders: str) -> str:
    """Return a table of the modules in ``folders`` (globs in the toolkit) and their docstrings."""
    rows = []
    for folder in folders:
        for file in sorted(TOOLKIT.glob(folder)):
            docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            if file.name == "__init__.py" or not docstring:
                continue
            text = docstring.split("\n\n- ")[0]
            rows.append((f"`{file.relative_to(TOOLKIT)}`", _to_markdown(text)))
    return write_table(("file", "what it computes, and from which source"), rows)


def _to_markdown(docstring: str) -> str:
    """Return a docstring as one line of Markdown."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", " ".join(docstring.split()))
    return text.replace("``", "`").replace("*", chr(92) + "*")


def write_tutorial(notebook: Path) -> str:
    """Return a notebook as a page: with a title, and with links to the documentation as the site has it."""
    content = json.loads(notebook.read_text(encoding="utf-8"))
    texts = [cell for cell in content["cells"] if cell["cell_type"] == "markdown"]
    for cell in texts:
        cell["source"] = re.sub(r"\]\((?:\.\./)?docs/", "](../../", "".join(cell["source"]))
    if not any(cell["source"].startswith("# ") for cell in texts[:1]):
        title = notebook.stem.partition("_")[2].replace("_", " ").capitalize()
        cell = {"cell_type": "markdown", "id": "title", "metadata": {}, "source": f"# {title}"}
        content["cells"].insert(0, cell)
    return json.dumps(content)


def write_pages(folder: Path) -> None:
    """Write all generated pages into ``folder``, which is emptied before."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = {
        "models.md": write_models(),
        "gpus.md": write_gpus(),
        "command_line.md": write_command_line(),
        "errors.md": write_errors(),
        "parts/widgets.md": write_widgets_api(),
        "parts/teach.md": write_teaching_api(),
        **{f"parts/{topic.name}.md": write_api(topic) for topic in TOPICS},
        "parts/layout_options.md": write_layout_options(),
        "parts/recipe_values.md": write_recipe_values(),
        "parts/trace_columns.md": write_trace_columns(),
        "parts/memory_files.md": write_files_table(
            "memory/state/*.py",
            "memory/activations/*.py",
            "memory/activations/modules/*.py",
            "memory/overheads/*.py",
        ),
        **{
            f"parts/{name}_memory_files.md": write_files_table(f"frameworks/{name}/memory/*.py")
            for name in ("ddp", "fsdp2", "deepspeed", "megatron")
        },
        "parts/time_files.md": write_files_table(
            "timing/*.py", "frameworks/*/timing.py", "timing/calibration/*.py"
        ),
    }
    for name in PROJECT_PAGES:
        text = (REPOSITORY / f"{name}.md").read_text(encoding="utf-8")
        pages[f"project/{name}.md"] = re.sub(r"\]\(docs/", "](../../", text)
    for name, text in pages.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (folder / "tutorials").mkdir()
    for notebook in sorted((REPOSITORY / "notebooks").glob("*.ipynb")):
        (folder / "tutorials" / notebook.name).write_text(write_tutorial(notebook), encoding="utf-8")
