"""Tests of script checks in the Checks tab: findings with file, line and suggested fix; unchanged files."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.requirements import needs

import shardscope as ss
from shardscope_widgets import Studio
from shardscope_widgets.checks.script import ScriptChecks
from shardscope_widgets.checks.user_code import write_imports_of

CONFIG = """compute_environment: LOCAL_MACHINE
fsdp_config:
  fsdp_version: 1   # old
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_use_orig_params: true
  fsdp_state_dict_type: FULL_STATE_DICT
num_processes: 8
"""
LOADER = "from torch.utils.data import DataLoader\nfor b in DataLoader(data):\n    b.backward()\n"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "accelerate.yaml"
    file.write_text(CONFIG)
    return file


def check_file(path: object, **options: object) -> ScriptChecks:
    view = ScriptChecks(**options)  # type: ignore[arg-type]
    view.path.value = str(path)
    return view


def test_each_finding_shows_file_line_and_suggested_fix(config: Path) -> None:
    view = check_file(config)
    assert len(view.findings) > 3
    for finding in view.findings:
        assert f"accelerate.yaml, line {finding.line}" in view.list.value
    assert view.list.value.count("Suggested fix:") == len(view.findings)


def test_script_checks_have_no_buttons_and_write_no_file(config: Path) -> None:
    view = check_file(config)
    assert "<button" not in view.list.value and "data-act" not in view.list.value
    assert config.read_text() == CONFIG
    assert [file.name for file in config.parent.iterdir()] == ["accelerate.yaml"]


def test_two_findings_of_one_line_are_both_listed(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        "import torch.distributed as dist\nfrom torch.utils.data import DataLoader\n"
        "dist.init_process_group()\na, b = DataLoader(x, shuffle=True), DataLoader(y, shuffle=on)\n"
    )
    assert check_file(file).list.value.count("train.py, line 4") == 2


@pytest.mark.parametrize(
    ("name", "text"), [("a.py", "%matplotlib inline\n"), ("a.py", "x = (\n"), ("a.ipynb", "{}")]
)
def test_unparsable_file_is_reported_as_not_checked(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert "Nothing was checked" in check_file(tmp_path / name).list.value


def test_findings_follow_the_current_plan(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(LOADER)
    studio = Studio()
    studio.tabs.value = "Checks"
    studio.script.path.value = str(file)
    assert "all 8 ranks" in studio.script.list.value
    studio.cluster.set_value(ss.Cluster.parse("4xh100-sxm-80gb"))
    assert "all 4 ranks" in studio.script.list.value


def test_unreadable_path_is_reported_with_the_closest_name(config: Path) -> None:
    view = ScriptChecks()
    for name, message in {
        str(config.with_name("acelerate.yaml")): f"No such file or directory. Closest name: {config}.",
        str(config.parent): "Is a directory",
        "no\0path": "null byte",
        "~nobody-of-this-name/train.py": "cannot be read",
    }.items():
        view.path.value = name
        assert message in view.error.value and not view.list.value
    config.write_bytes(b"\xff")
    view.path.value = str(config)
    assert "not a text file" in view.error.value
    config.write_bytes(b"#" * 2**21)
    view.path.value = ""
    assert not view.error.value
    view.path.value = str(config)
    assert "more than 1 MiB" in view.error.value


def test_file_names_are_html_escaped(tmp_path: Path) -> None:
    file = tmp_path / "<b>train.py"
    file.write_text(LOADER)
    view = check_file(file)
    assert view.findings and "<b>train" not in view.list.value
    view.path.value = "<img>"
    assert "<img>" not in view.error.value


OLD_STEP = """def train(ctx):
    from torch.optim import AdamW
    optimizer = AdamW(ctx.model.parameters(), lr=1e-4)
    for batch in ctx.batches:
        ctx.model(batch).backward()
        optimizer.step()
"""


def run_cell(source: str, name: str, tmp_path: Path) -> dict[str, object]:
    """Run ``source`` as a notebook cell and return its namespace."""
    file = tmp_path / "cell.py"
    file.write_text(source)
    namespace: dict[str, object] = {"__name__": "__main__"}
    exec(compile(source, str(file), "exec"), namespace)
    assert name in namespace
    return namespace


def test_notebook_function_is_checked_by_name(tmp_path: Path) -> None:
    plan = ss.Plan(
        ss.models["gpt2"],
        ss.Cluster.parse("8xh100-sxm-80gb"),
        ss.Recipe(seq_len=1024),
        ss.Layout.ddp(),
    )
    view = check_file("train", plan=plan, functions=run_cell(OLD_STEP, "train", tmp_path))
    assert not view.error.value
    assert "gradients-never-zeroed" in [finding.name for finding in view.findings]
    assert "train, line 6" in view.list.value


IMPORTED = """from collections import OrderedDict as Kept
import functools
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

"""
WRAPPED = """def train(ctx):
    model = ctx.build()
    for index, layer in enumerate(model.layers):
        model.layers[index] = FSDP(layer)
    model = FSDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for batch in ctx.batches:
        model(batch).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
"""


def test_notebook_imports_used_by_a_function_are_included(tmp_path: Path) -> None:
    needs("torch")
    functions = run_cell(IMPORTED + WRAPPED, "train", tmp_path)
    imports = write_imports_of(functions["train"])
    assert imports == "\nfrom torch.distributed.fsdp import FullyShardedDataParallel as FSDP\nimport torch\n"
    view = check_file("train", functions=functions)
    assert {"fsdp1", "fsdp1-clip-grad-norm"} <= {finding.name for finding in view.findings}
    assert max(finding.line or 0 for finding in view.findings) <= len(WRAPPED.splitlines())


def test_file_takes_precedence_over_a_function_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    functions = run_cell(OLD_STEP, "train", tmp_path)
    view = check_file("trian", functions=functions)
    assert "trian cannot be read" in view.error.value and "Closest name: train." in view.error.value
    # Not "<string>": from Python 3.13 on that is the program of `python -c`, which started this worker.
    functions["lost"] = eval(compile("lambda ctx: ctx", "<typed>", "eval"))
    view.path.value = "lost"
    assert "has no source text" in view.error.value
    view.path.value = "x" * 300
    assert "cannot be read" in view.error.value
    (tmp_path / "train").mkdir()
    view.path.value = "train"
    assert not view.error.value, "a folder does not take precedence over the function"
    (tmp_path / "train").rmdir()
    view.path.value = ""
    (tmp_path / "train").write_text("x = 1\n")
    view.path.value = "train"
    assert "No findings" in view.list.value and not view.error.value
