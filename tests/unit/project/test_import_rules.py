"""Tests of the rules for imports and names in packages that CONTRIBUTING.md lists."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import shardscope as ss
from shardscope.families.registry import FAMILIES
from shardscope.frameworks.registry import frameworks

TOOLKIT = Path(ss.__file__).parent
ROOT = TOOLKIT.parents[1]
WIDGETS = ROOT / "widgets" / "shardscope_widgets"

DRAWING = {"shardscope_widgets", "ipywidgets", "plotly", "IPython", "anywidget"}
"""Packages that the toolkit never imports, not even inside a function."""

HEAVY = {
    "torch",
    "transformers",
    "accelerate",
    "deepspeed",
    "megatron",
    "pandas",
    "plotly",
    "ipywidgets",
    "IPython",
}
"""Packages that neither ``import shardscope`` nor planning imports."""

DESIGNED = {
    *(
        "Architecture",
        "Cluster",
        "Ray",
        "Recipe",
        "Layout",
        "Plan",
        "Finetune",
        "Pretrain",
        "Run",
        "Script",
        "Slurm",
    ),
    *("Trace", "calibrate", "example_model", "gpus", "launch", "merge", "models", "recommend", "runs"),
    *("search", "sweep"),
}
"""The public names. A new public name has to be added here."""

DESIGNED_WIDGETS = {
    *(
        "Studio",
        "AdviceView",
        "ChatView",
        "FinetuneView",
        "GuidedView",
        "MemoryView",
        "RankingView",
        "RunView",
    ),
    *("RooflineView", "ScheduleView", "ShardingView", "StepView", "TraceView"),
}

MAY_NAME_A_FRAMEWORK = {
    "core/layout.py": "Layout.ddp(), .fsdp2(), .zero() and .megatron() are the public constructors: each "
    "looks its framework up by name",
    "core/recipe.py": "Recipe.kernels: whose modules run is a choice of the recipe, and Megatron's are one; "
    "code that compares a value called kernels asks for that, not for the framework, and is let through",
    "runs/checks/fsdp1.py": "a guide from FSDP1 to FSDP2, whose table of names is in FSDP2's folder",
    "prediction/support.py": "the fix of a method that a framework lacks is Layout.fsdp2(), which has all",
    "training/preferences/settings.py": "the fix of a framework that trains no pairs is Layout.fsdp2()",
    "teach/exercises/choosing.py": "the answers to 'which layout' are the names of the public constructors",
    "export/reading.py": "Plan.from_deepspeed() and Plan.from_megatron() are public names",
}
"""Files outside frameworks/ in which a framework's name is an operand of code, and why."""

MAY_NAME_A_FAMILY = {
    "core/model_of_size.py": "Architecture.of_size() makes Llama-shaped models, which is its design",
    "frameworks/megatron/files/read_architecture.py": "the family that Megatron-LM's arguments are read as: "
    "their layers are Llama's",
    "frameworks/accelerate/limits.py": "words of Accelerate's own MODEL_CONFIGS_TO_MEGATRON_PARSERS",
}
"""Modules outside families/ in which a family's ``model_type`` is a string of code, and why."""

PLAN = """
import json, sys
import shardscope as ss
plan = ss.Plan(
    ss.models["llama-3.1-8b"],
    ss.Cluster.parse("8xh100-sxm-80gb"),
    ss.Recipe(global_batch_size=64, recompute="selective"),
    ss.Layout.fsdp2(),
)
report = plan.memory()
report.explain("activations")
ss.Plan.from_json(plan.to_json())
ss.Pretrain(num_steps=2)
ss.Run, ss.launch, ss.runs
"""


def list_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


@cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def list_imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the modules that a file imports anywhere, by statement or by ``import_module("...")``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, node.lineno
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.args[0].value, node.lineno


def run_python(code: str) -> Any:
    """Return the JSON that ``code`` prints in a new interpreter with the same ``sys.path``."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_toolkit_imports_no_user_interface_library() -> None:
    files = list_files(TOOLKIT)
    assert len(files) > 50
    violations = [
        f"{file.relative_to(TOOLKIT)}:{line} imports {module}"
        for file in files
        for module, line in list_imports(parse(file))
        if module.partition(".")[0] in DRAWING
    ]
    assert not violations, violations


@pytest.mark.parametrize("code", ["import json, sys, shardscope\n", PLAN], ids=["import", "planning"])
def test_fault_21_import_and_planning_load_no_heavy_library(code: str) -> None:
    loaded = run_python(code + "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))")
    assert "shardscope" in loaded
    assert not HEAVY & set(loaded)


def test_import_alone_loads_nothing_but_the_package() -> None:
    loaded = run_python(
        "import json, sys, shardscope\nprint(json.dumps(sorted(n for n in sys.modules if 'shardscope' in n)))"
    )
    assert loaded == ["shardscope", "shardscope.core", "shardscope.core.version", "shardscope.runs"]


def test_widgets_do_not_import_torch() -> None:
    loaded = run_python(
        "import json, sys\nfrom shardscope_widgets import Studio\nStudio()\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    assert "ipywidgets" in loaded
    assert not {"torch", "transformers", "accelerate"} & set(loaded)


def test_public_names_are_the_listed_ones() -> None:
    assert set(ss.__all__) == DESIGNED
    assert {name for name in ss.__all__ if not hasattr(ss, name)} == set()
    widgets = importlib.import_module("shardscope_widgets")
    assert set(widgets.__all__) == DESIGNED_WIDGETS


def test_unknown_attributes_raise_with_the_known_names() -> None:
    with pytest.raises(AttributeError, match="Architecture, Cluster"):
        _ = ss.Plann  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", ["shardscope", "shardscope_widgets"])
def test_public_names_have_docstrings(module: str) -> None:
    package = importlib.import_module(module)
    assert package.__doc__
    missing = [name for name in package.__all__ if not has_docstring(getattr(package, name))]
    for name in package.__all__:
        value = getattr(package, name)
        if inspect.isclass(value):
            missing += [f"{name}.{member}" for member in undocumented_members(value)]
    assert not missing, missing


def has_docstring(item: Any) -> bool:
    """Return whether a function or class has a docstring; the catalog's mappings have their class's."""
    return bool((inspect.getdoc(item) or "").strip())


def undocumented_members(cls: type) -> Iterator[str]:
    """Yield the public methods and properties that a class defines itself and that have no docstring."""
    for name, member in vars(cls).items():
        plain = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        is_code = inspect.isfunction(plain) or isinstance(plain, property)
        if not name.startswith("_") and is_code and not has_docstring(plain):
            yield name


def test_every_module_has_a_docstring() -> None:
    files = [*list_files(TOOLKIT), *list_files(WIDGETS)] if WIDGETS.is_dir() else list_files(TOOLKIT)
    undocumented = [str(file) for file in files if not ast.get_docstring(parse(file))]
    assert not undocumented, undocumented


def test_framework_names_occur_only_in_their_folders() -> None:
    """Adding a framework means adding a folder: no other code depends on the framework's name."""
    outside = [file for file in list_files(TOOLKIT) if "frameworks" not in file.relative_to(TOOLKIT).parts]
    if WIDGETS.is_dir():
        outside += list_files(WIDGETS)
    names_by_file: dict[str, list[str]] = {}
    for file in outside:
        lines = list(framework_names_in_code(parse(file)))
        if lines:
            root = TOOLKIT if file.is_relative_to(TOOLKIT) else WIDGETS
            names_by_file[str(file.relative_to(root))] = lines
    extra = {name: lines for name, lines in names_by_file.items() if name not in MAY_NAME_A_FRAMEWORK}
    assert not extra, f"a framework is named outside of its folder: {extra}"
    unused = set(MAY_NAME_A_FRAMEWORK) - set(names_by_file)
    assert not unused, f"these no longer name one; take them off the list: {unused}"


def test_family_names_occur_only_in_the_families_package() -> None:
    """Adding a family means adding a record: other code reads attributes of it, not the name."""
    names_by_file = {}
    for file in list_files(TOOLKIT):
        path = file.relative_to(TOOLKIT)
        lines = list(family_names_in_code(parse(file)))
        if lines and path.parts[0] != "families":
            names_by_file[str(path)] = lines
    extra = {name: lines for name, lines in names_by_file.items() if name not in MAY_NAME_A_FAMILY}
    assert not extra, f"a family is named outside of its record: {extra}"
    unused = set(MAY_NAME_A_FAMILY) - set(names_by_file)
    assert not unused, f"these no longer name one; take them off the list: {unused}"


def family_names_in_code(tree: ast.AST) -> Iterator[str]:
    """Yield the strings, except docstrings, that are a family's ``model_type``."""
    prose = find_prose(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in prose and node.value in FAMILIES:
            yield f"line {node.lineno}: {node.value!r}"


def find_prose(tree: ast.AST) -> set[int]:
    """Return the ids of docstrings and of strings that document the name before them."""
    return {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def framework_names_in_code(tree: ast.AST) -> Iterator[str]:
    """Yield the uses of a framework's name in code, and imports of its package; docstrings are ignored."""
    prose = find_prose(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and _get_name(node.left) == "kernels":
            prose |= {id(operand) for operand in node.comparators}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in prose and node.value in frameworks:
            yield f"line {node.lineno}: {node.value!r}"
        if isinstance(node, ast.ImportFrom | ast.Import):
            module = getattr(node, "module", None) or node.names[0].name
            if module.startswith("shardscope.frameworks.") and module.split(".")[2] in frameworks:
                yield f"line {node.lineno}: imports {module}"


def _get_name(operand: ast.expr) -> str:
    return str(getattr(operand, "attr", getattr(operand, "id", "")))


def test_only_registries_import_modules_by_name() -> None:
    """Import-linter does not see ``import_module("shardscope...")``, which could bypass the layers."""
    allowed = {"__init__.py", "frameworks/registry.py", "frameworks/engines.py"}
    violations = []
    for file in list_files(TOOLKIT):
        for node in ast.walk(parse(file)):
            if isinstance(node, ast.Call) and _get_name(node.func) in ("import_module", "__import__"):
                named = ast.unparse(node.args[0])
                if "shardscope" in named and str(file.relative_to(TOOLKIT)) not in allowed:
                    violations.append(f"{file.relative_to(TOOLKIT)}:{node.lineno} imports {named}")
    assert not violations, violations


def test_every_package_is_in_an_import_linter_layer() -> None:
    """A package without a layer could import anything."""
    layers = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    named = {name.strip() for layer in layers[0]["layers"] for name in layer.split(":")}
    modules = {
        ".".join(("shardscope", *file.relative_to(TOOLKIT).with_suffix("").parts))
        for file in list_files(TOOLKIT)
    }
    outside = {module for module in modules if not any(f"{module}.".startswith(f"{name}.") for name in named)}
    assert {module for module in outside if not module.endswith("__init__")} == set()


def test_no_tracked_file_is_ignored_by_git() -> None:
    """Git, the wheel and ruff would skip new files that match the same pattern."""
    if not (ROOT / ".git").exists():
        pytest.skip("no clone: run it in one, where git says what it ignores")
    command = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    assert subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout == ""


def test_no_package_has_over_twenty_modules() -> None:
    sizes = Counter(
        file.parent
        for root in (TOOLKIT, WIDGETS)
        for file in root.rglob("*.py")
        if file.name != "__init__.py"
    )
    full = {str(folder.relative_to(ROOT)): size for folder, size in sizes.items() if size > 20}
    assert not full, f"move modules of one topic into a sub-package of their own: {full}"


def test_test_files_have_names_of_their_own() -> None:
    # pytest imports them by their names alone: two of one name cannot be collected together.
    names = [file.name for file in (ROOT / "tests").rglob("test_*.py")]
    assert not [name for name, count in Counter(names).items() if count > 1]


def test_frameworks_do_not_import_each_other() -> None:
    violations = []
    for name in frameworks:
        for file in list_files(TOOLKIT / "frameworks" / name):
            for module, line in list_imports(parse(file)):
                parts = module.split(".")
                others = set(frameworks) - {name}
                if parts[:2] == ["shardscope", "frameworks"] and len(parts) > 2 and parts[2] in others:
                    violations.append(f"{file.relative_to(TOOLKIT)}:{line} imports {module}")
    assert not violations, violations


@pytest.mark.parametrize("missing", ["torch", "accelerate", "cloudpickle"])
def test_fault_21_launch_without_the_extra_raises_with_pip_install(
    missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name == missing else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    plan = ss.Plan(
        ss.Architecture.of_size("2m"), ss.Cluster.parse("2xcpu"), ss.Recipe(seq_len=64), ss.Layout.ddp()
    )
    with pytest.raises(ImportError) as caught:
        ss.launch(plan, ss.Pretrain(num_steps=1), folder=tmp_path)
    assert 'pip install "shardscope[train]"' in str(caught.value)
    assert missing in str(caught.value)
    assert not list(tmp_path.iterdir()), "a launch that raises creates no folder"


def test_the_checks_of_this_module_detect_violations() -> None:
    """The scans above find examples of what they forbid."""
    plotting = ast.parse('def f():\n    import plotly.graph_objects\n    import_module("IPython.display")\n')
    assert [module for module, _ in list_imports(plotting)] == ["plotly.graph_objects", "IPython.display"]
    branch = ast.parse('"""ddp"""\nif layout.framework == "megatron":\n    pass\n')
    assert list(framework_names_in_code(branch)) == ["line 2: 'megatron'"]
    assert not list(framework_names_in_code(ast.parse('x = recipe.kernels == "megatron"')))
    family = ast.parse('"""falcon"""\nif arch.model_type in ("olmo2", "llama-like"):\n    pass\n')
    assert list(family_names_in_code(family)) == ["line 2: 'olmo2'"]
    lazy: ModuleType = ss
    assert has_docstring(lazy.launch)
