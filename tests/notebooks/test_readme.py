"""Tests of the README and the guides: the example runs, numbers match the reports, named files exist."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import cast

import pytest
from tests.fault_table import FAULTS
from tests.requirements import needs, thorough

import shardscope as ss

REPOSITORY = Path(__file__).parents[2]
NOT_IN_REPOSITORY = (
    *("config.json", "FILES.md", "artifacts/soak/report.md", "artifacts/soak_cluster/report.md"),
    *("shardscope_report.md", "pretrain_gpt.py", "convert_hf_to_gguf.py"),
    *("ray/state.json", "notebooks/answers/NAME.jsonl"),
)
"""Files of other projects, and files that runs or machines with a GPU write."""
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
GUIDES = ("installing", "planning", "launching", "cluster", "fine_tuning", "exports", "limits", "teaching")
PAGES = (
    *("README.md", *(f"docs/{guide}.md" for guide in GUIDES)),
    *("docs/command_line.md", "docs/workshop.md"),
    *(f"docs/how_to/{guide}.md" for guide in ("does_not_fit", "is_slow", "move_to_slurm")),
)
"""Pages for users. Others are written by commands, or are executed where the site is built."""
NOT_TENSORS = ("communication", "runtime", "fragmentation")
"""Components of a prediction that torch does not count as allocated."""


def read_page(page: str) -> str:
    return (REPOSITORY / page).read_text(encoding="utf-8")


def read_toolkit() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "toolkit").rglob("*.py"))


@thorough()
def test_python_example_runs_as_pasted(tmp_path: Path) -> None:
    needs("torch")
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in block.splitlines() if line]) == 10, "ten lines"
    completed = subprocess.run(
        [sys.executable, "-c", block],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert completed.returncode == 0, completed.stderr
    report, step, why, outcome, trace = completed.stdout.splitlines()
    assert "fits" in report
    assert "tokens/s per GPU" in step
    assert why.startswith("Start with ")
    status, losses = outcome.split(" ", 1)
    assert status == "finished"
    values = [float(loss) for loss in losses.strip("[]").split(",")]
    assert len(values) == 20
    assert values[-1] < values[0] - 0.5, "the loss falls"
    assert "2 ranks" in trace
    (run,) = (tmp_path / "runs").iterdir()
    assert {"run.json", "status.jsonl", "events", "logs", "traces", "what_it_was"} <= {
        entry.name for entry in run.iterdir()
    }


@pytest.mark.parametrize("page", ["docs/planning.md", "docs/teaching.md"])
def test_examples_of_the_planner_run_as_pasted(page: str) -> None:
    namespace: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", read_page(page), re.DOTALL):
        exec(compile(block, page, "exec"), namespace)
    if page == "docs/planning.md":
        plan = ss.Plan(
            ss.models["llama-3.1-8b"],
            cast("ss.Cluster", namespace["cluster"]),
            ss.Recipe(),
            ss.Layout.fsdp2(),
        )
        assert plan.memory().fits and plan.step().seconds > 0


@thorough()
def test_example_of_your_own_function_trains(tmp_path: Path) -> None:
    """The page leaves out the model and the batches; the rest of its block runs as pasted."""
    needs("transformers")
    (block,) = re.findall(r"```python\n(.*?)```", read_page("docs/launching.md"), re.DOTALL)
    program = f"""
import shardscope as ss

plan = ss.Plan(
    ss.Architecture.of_size("2m"), ss.Cluster.parse("2xcpu"),
    ss.Recipe(seq_len=16, micro_batch_size=2, global_batch_size=8), ss.Layout.fsdp2(),
)

def build_model():
    from shardscope.training.model.model import build_model

    return build_model(plan.architecture, 0.0)

def read_batches(rank, num_ranks):
    import torch

    for _ in range(3):
        tokens = torch.randint(0, 1000, (plan.recipe.global_batch_size // num_ranks, plan.recipe.seq_len))
        yield {{"input_ids": tokens, "labels": tokens}}

{block}
print(run.wait(), len([line["loss"] for line in run.metrics()]), (run.folder / "checkpoints/last").is_dir())
"""
    completed = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert completed.stdout.split() == ["finished", "6", "True"], completed.stderr


def test_readme_is_short_and_links_to_every_page() -> None:
    assert len(README.splitlines()) < 120
    for page in PAGES[1:]:
        if "/how_to/" not in page:
            assert f"]({page})" in README, f"the README does not link to {page}"


def test_every_pip_extra_is_documented() -> None:
    project = tomllib.loads(read_page("pyproject.toml"))["project"]
    page = read_page("docs/installing.md")
    for extra in project["optional-dependencies"]:
        assert f'pip install "shardscope[{extra}]"' in page


def test_every_environment_variable_is_documented() -> None:
    named = set(re.findall(r"SHARDSCOPE_[A-Z_]+", read_toolkit()))
    page = read_page("docs/launching.md")
    assert named and {name for name in named if f"| `{name}` |" not in page} == set()


def find_row(claim: str) -> str:
    """Return the only row of the README's table of proofs that begins with ``claim``."""
    (row,) = re.findall(rf"^\| {re.escape(claim)} \|.*$", README, re.MULTILINE)
    return str(row)


def match_report(pattern: str, text: str) -> tuple[str, ...]:
    """Return the groups of the first match of ``pattern`` in ``text``."""
    match = re.search(pattern, text)
    assert match, f"no report says {pattern}"
    return match.groups()


def test_readme_numbers_match_the_report_on_rehearsals() -> None:
    report = read_page("docs/accuracy.md")
    plans, within, worst = match_report(
        r"\| all \| (\d+) \| ([\d.]+ %) \| [\d.]+ % \| [\d.]+ % \| ([\d.]+ %)", report
    )
    row = find_row("predicted memory = tracked memory")
    assert f"{int(plans):,} stored rehearsals" in row and f"{within} within 1 %, worst {worst}" in row
    total, near, worst = match_report(
        r"The last one, .*?, (\d+) plans: (\d+) within 1 %, \d+ within 3 %, worst ([+-][\d.]+ %)", report
    )
    row = find_row("the same, for plans that no formula had seen")
    assert f"{total} random plans | {near} within 1 %, worst {worst}" in row


def test_readme_numbers_match_the_report_on_published_runs() -> None:
    memory, _, time = read_page("docs/accuracy.md").rpartition("## Against the goals")
    row = find_row("predicted memory = published")
    shares = []
    for kind in ("allocated and active: median of source medians", "reserved", "nvidia-smi"):
        rows, product, with_code = match_report(
            rf"\| {kind} \| (\d+) \| \d+ \| ([\d.]+ %)[^|]*\*\*missed\*\* \| ([\d.]+ %)", memory
        )
        assert re.search(rf"\b{rows} (allocated|reserved|of nvidia-smi)", row), rows
        assert re.search(rf"(error )?\b{re.escape(product)}", row), product
        shares.append(with_code)
    assert f"own code: {', '.join(shares)}" in row
    rows, right, caught, out = match_report(
        r"\| plan.memory\(\) alone \| (\d+) \| ([\d.]+ %) \| (\d+) of (\d+) \|", memory
    )
    row = find_row("fits or out of memory")
    assert f"{rows} published runs, {out} of which" in row and f"{right} right; {caught} of the {out}" in row
    rows, middle, ninth = match_report(
        r"\| judge \| (\d+) \| ([\d.]+ %): reached \| ([\d.]+ %): reached \|", time
    )
    row = find_row("predicted step time = published")
    assert f"{rows} published" in row and f"median of source medians {middle}, p90 {ninth}" in row


def test_readme_numbers_match_our_measured_runs() -> None:
    tensors: dict[str, list[float]] = {"cpu": [], "small": [], "real": []}
    steps = []
    for line in read_page("tests/measured/own.jsonl").splitlines():
        measured = json.loads(line)
        if not measured["memory_kind"].startswith("allocated"):
            continue
        plan = ss.Plan.from_dict(measured["plan"])
        parts = plan.memory().components.items()
        predicted = sum(size for name, size in parts if name not in NOT_TENSORS) / 2**30
        kind = "cpu" if measured["gpu"] == "cpu" else "real" if measured["n_params"] > 1e9 else "small"
        tensors[kind].append(100 * (predicted / measured["peak_memory_gib"] - 1))
        if kind == "real":
            steps.append(100 * (plan.step().seconds / measured["step_time_s"] - 1))
    row = find_row("predicted memory = measured on CPU ranks")
    assert f"| {len(tensors['cpu'])} DDP and FSDP2 runs" in row and "all within 1 %" in row
    assert max(map(abs, tensors["cpu"])) < 1
    row = find_row("predicted memory = measured on one H100")
    assert f"{len(tensors['real'])} runs (1 to 8" in row and f"{len(tensors['small'])} runs of 120M" in row
    assert "within 0.2 %" in row and max(map(abs, tensors["real"])) < 0.2
    assert f"up to {-min(tensors['small']):.1f} % too low" in row
    short, long = f"{-min(steps):.0f} % too short", f"{max(steps):.0f} % too long"
    assert f"between {short} and {long}" in find_row("predicted step time = measured on one H100")


def test_readme_numbers_match_the_reports_on_parity_and_faults() -> None:
    same, layouts = match_report(r"(\d+) of (\d+) rows equal the single process", read_page("docs/parity.md"))
    assert f"{same} of {layouts} layouts" in find_row("the engines train the plan")
    assert f"| {len(FAULTS)} kinds of faults" in find_row("a fault leaves nothing behind and is reported")


def test_readme_numbers_match_the_report_on_fine_tuning() -> None:
    rows = re.findall(r"\| (\d+) of 40 \| (\d+) of 24 \|", read_page("docs/finetune.md"))
    learned, kept = (min(map(int, column)) for column in zip(*rows, strict=True))
    row = find_row("a fine-tune learns, and forgets little")
    assert f"at least {learned} of 40" in row and f"{kept} of 24" in row and len(rows) == 4


@pytest.mark.parametrize("page", PAGES)
def test_public_names_in_the_pages_exist(page: str) -> None:
    for name in re.findall(r"\bss\.(\w+)", read_page(page)):
        assert hasattr(ss, name), f"{page} names ss.{name}"
    for module in re.findall(r"`(shardscope(?:\.\w+)+)`", read_page(page)):
        assert (REPOSITORY / "toolkit" / (module.replace(".", "/") + ".py")).exists(), (
            f"{page} names {module}"
        )


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_and_make_targets_exist(page: str) -> None:
    text = read_page(page)
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert ((REPOSITORY / page).parent / target).exists(), f"{page} links to {target}"
    for target in re.findall(r"`make ([\w-]+)`", text):
        assert re.search(rf"^{target}:", read_page("Makefile"), re.MULTILINE), f"{page} names make {target}"
    for target in re.findall(r"`pytest (tests/[\w/.]+)", text):
        assert (REPOSITORY / target).exists(), f"{page} names {target}"


def test_contributing_lists_packages_with_their_docstrings() -> None:
    """Rows are in import-linter's order, lowest layer first; each is the first paragraph of its docstring."""
    text = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    toolkit = REPOSITORY / "toolkit" / "shardscope"
    rows = dict(re.findall(r"^\| `toolkit/shardscope/(\w+)/` \| (.*) \|$", text, re.MULTILINE))
    assert set(rows) == {file.parent.name for file in toolkit.glob("*/__init__.py")}
    for name, words in rows.items():
        docstring = ast.get_docstring(ast.parse((toolkit / name / "__init__.py").read_text("utf-8"))) or ""
        first = " ".join(docstring.partition("\n\n")[0].split()).replace("``", "`")
        assert words == first, name
    contract = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    layers = "\n".join(reversed(contract["contracts"][0]["layers"]))
    lowest_first = re.findall(r"\bshardscope\.(\w+)(?=\s|$)", layers)
    whole = [name for name in rows if name != "frameworks"]  # Its modules are in several layers.
    assert whole == [name for name in lowest_first if name in whole]


def test_contributing_lists_every_folder_and_make_target() -> None:
    text = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for folder in {path.split("/")[0] for path in re.findall(r"\| `([\w/]+)/`", text)}:
        assert (REPOSITORY / folder).is_dir(), folder
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    (targets,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    for target in set(targets.split()) - {"browser"}:
        assert f"| `make {target}` |" in text, target


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md"])
def test_files_named_in_the_pages_exist(page: str) -> None:
    """Names are relative to the root or to a folder of the project, or the toolkit writes the file."""
    text, code = read_page(page), read_toolkit()
    folders = [
        REPOSITORY,
        *(REPOSITORY / folder for folder in ("toolkit/shardscope", "tests", "tests/unit", "docs")),
    ]
    for name in re.findall(r"`([\w./]+\.(?:py|toml|md|png|json|jsonl|ipynb|sh|sbatch|yaml|txt))`", text):
        exists = any((folder / name).exists() for folder in folders) or any(
            REPOSITORY.glob(f"[tw]*/**/{name}")
        )
        assert exists or name in NOT_IN_REPOSITORY or f'"{name}"' in code, f"{page} names {name}"
