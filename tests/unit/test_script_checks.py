"""A script of one's own in the Checks tab: read, mended by clicks in a copy, never written itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.needs import needs
from tests.unit.test_fsdp1_mended import CONFIG, NEW_CONFIG

import shardscope as ss
from shardscope_widgets import Studio
from shardscope_widgets.checks.own_code import imports_behind
from shardscope_widgets.checks.script import ScriptChecks


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "accelerate.yaml"
    file.write_text(CONFIG)
    return file


def press_all(view: ScriptChecks) -> None:
    """Every button, the last first, as often as there is one."""
    while buttons := [one for one in view.checks.findings if one.source]:
        last = buttons[-1]
        view.checks.list.press(f"{last.name}:{last.line}")
        assert not view.checks.list.error


def test_clicks_mend_a_copy_and_leave_the_file(config: Path) -> None:
    view = ScriptChecks()
    view.path.value = str(config)
    assert view.checks.list.value.count("<button") == 4
    assert not view.changed.value
    press_all(view)
    assert (config.parent / "accelerate.mended.yaml").read_text() == NEW_CONFIG
    assert config.read_text() == CONFIG
    assert "Nothing to mend: no check has anything against this file." in view.checks.list.value
    assert "<span class='ss-removed'>-  fsdp_use_orig_params: true</span>" in view.changed.value
    assert "<span class='ss-added'>+  fsdp_reshard_after_forward: false</span>" in view.changed.value


def test_another_copy_is_not_overwritten(config: Path) -> None:
    (config.parent / "accelerate.mended.yaml").write_text("mine")
    view = ScriptChecks()
    view.path.value = str(config)
    press_all(view)
    assert (config.parent / "accelerate.mended.yaml").read_text() == "mine"
    assert (config.parent / "accelerate.mended-2.yaml").read_text() == NEW_CONFIG


def test_a_strategy_in_the_script_leaves_the_plan(config: Path) -> None:
    studio = Studio()
    studio.tabs.value = "Checks"
    studio.script.path.value = str(config)
    plan = studio.plan
    (found,) = [one for one in studio.script.checks.findings if one.name == "fsdp1-shard-grad-op"]
    studio.script.checks.list.press(f"{found.name}:{found.line}")
    assert studio.plan is plan
    assert "fsdp_reshard_after_forward: false" in (config.parent / "accelerate.mended.yaml").read_text()
    assert found.name not in [one.name for one in studio.script.checks.findings]


def test_a_copy_that_somebody_changed_is_not_overwritten(config: Path) -> None:
    view = ScriptChecks()
    view.path.value = str(config)
    first, second = (config.parent / f"accelerate.mended{end}.yaml" for end in ("", "-2"))
    view.checks.list.press("fsdp1:3")
    first.write_text("mine")
    press_all(view)
    assert first.read_text() == "mine"
    assert second.read_text() == NEW_CONFIG


def test_a_link_is_not_written_through(config: Path) -> None:
    (config.parent / "accelerate.mended.yaml").symlink_to(config.parent / "elsewhere")
    view = ScriptChecks()
    view.path.value = str(config)
    press_all(view)
    assert not (config.parent / "elsewhere").exists()
    assert (config.parent / "accelerate.mended-2.yaml").read_text() == NEW_CONFIG


def test_the_copy_is_beside_the_file_wherever_the_notebook_goes(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config.parent)
    view = ScriptChecks()
    view.path.value = config.name
    monkeypatch.chdir("/")
    press_all(view)
    assert (config.parent / "accelerate.mended.yaml").read_text() == NEW_CONFIG


def test_two_loaders_of_one_line_have_a_button_each(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        "import torch.distributed as dist\nfrom torch.utils.data import DataLoader\n"
        "dist.init_process_group()\na, b = DataLoader(x, shuffle=True), DataLoader(y, shuffle=on)\n"
    )
    view = ScriptChecks()
    view.path.value = str(file)
    assert view.checks.list.value.count("data-act='ranks-read-the-same-data:4'") == 1
    view.checks.list.press("ranks-read-the-same-data:4:1")
    mended = (tmp_path / "train.mended.py").read_text()
    assert "DataLoader(x, sampler=DistributedSampler(x, shuffle=True))" in mended
    assert "DataLoader(y, sampler=DistributedSampler(y, shuffle=on))" in mended


@pytest.mark.parametrize(
    ("name", "text"), [("a.py", "%matplotlib inline\n"), ("a.py", "x = (\n"), ("a.ipynb", "{}")]
)
def test_what_could_not_be_read_is_not_called_good(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    view = ScriptChecks()
    view.path.value = str(tmp_path / name)
    assert "Nothing was checked" in view.checks.list.value


def test_a_byte_order_mark_stays(config: Path) -> None:
    config.write_text("\ufeff" + CONFIG)
    view = ScriptChecks()
    view.path.value = str(config)
    press_all(view)
    assert (config.parent / "accelerate.mended.yaml").read_text() == "\ufeff" + NEW_CONFIG
    assert not (config.parent / "accelerate.mended-2.yaml").exists()


def test_findings_are_against_the_plan_on_the_bench(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("from torch.utils.data import DataLoader\nfor b in DataLoader(data):\n    b.backward()\n")
    studio = Studio()
    studio.tabs.value = "Checks"
    studio.script.path.value = str(file)
    assert "all 8 ranks" in studio.script.checks.list.value
    studio.cluster.fill(ss.Cluster.parse("4xh100-sxm-80gb"))
    assert "all 4 ranks" in studio.script.checks.list.value


def test_a_file_that_cannot_be_read_is_told_with_the_nearest(config: Path) -> None:
    view = ScriptChecks()
    for name, words in {
        str(config.with_name("acelerate.yaml")): f"No such file or directory. Nearest: {config}.",
        str(config.parent): "Is a directory",
        "no\0path": "null byte",
        "~nobody-of-this-name/train.py": "cannot be read",
    }.items():
        view.path.value = name
        assert words in view.words.value
        assert view.checks.layout.display == "none"
    config.write_bytes(b"\xff")
    view.path.value = str(config)
    assert "is no text" in view.words.value
    config.write_bytes(b"#" * 2**21)
    view.path.value = ""
    assert not view.words.value
    view.path.value = str(config)
    assert "more than 1 MiB" in view.words.value


def test_a_folder_that_takes_no_copy_is_told(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view = ScriptChecks()
    view.path.value = str(config)

    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "open", refuse)
    view.checks.list.press("fsdp1:3")
    assert "can be written: Read-only file system" in view.words.value
    assert not view.changed.value
    assert "fsdp1" in [one.name for one in view.checks.findings]


def test_what_no_click_can_mend_is_noted_in_the_copy(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("from torch.distributed.fsdp import fully_shard\nmodel = build()\nfully_shard(model)\n")
    view = ScriptChecks()
    view.path.value = str(file)
    assert ">Note</button>" in view.checks.list.value and ">Apply<" not in view.checks.list.value
    view.checks.list.press("whole-model-as-one-unit:3")
    assert not view.checks.list.error
    assert (tmp_path / "train.mended.py").read_text().splitlines()[2:] == [
        "# TODO: fully_shard(layer) for each decoder layer, then fully_shard(model) "
        "(shardscope: whole-model-as-one-unit)",
        "fully_shard(model)",
    ]
    # It is found as before, and cannot be noted twice.
    assert [one.line for one in view.checks.findings] == [4]
    assert "<button" not in view.checks.list.value
    view.checks.list.press("whole-model-as-one-unit:4")
    assert (tmp_path / "train.mended.py").read_text().count("TODO") == 1


OLD_STEP = """def train(ctx):
    from torch.optim import AdamW
    optimizer = AdamW(ctx.model.parameters(), lr=0.3)
    for batch in ctx.batches:
        ctx.model(batch).backward()
        optimizer.step()
"""


def defined(source: str, name: str, tmp_path: Path) -> dict[str, object]:
    """What a notebook's cell would have defined."""
    file = tmp_path / "cell.py"
    file.write_text(source)
    namespace: dict[str, object] = {"__name__": "__main__"}
    exec(compile(source, str(file), "exec"), namespace)
    assert name in namespace
    return namespace


def test_a_function_of_the_notebook_is_checked_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    functions = defined(OLD_STEP, "train", tmp_path)
    plan = ss.Plan(ss.models["gpt2"], ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(seq_len=1024),
                   ss.Layout.ddp())  # fmt: skip
    view = ScriptChecks(plan, functions=functions)
    view.path.value = "train"
    assert not view.words.value
    assert "learning-rate-against-batch" in [one.name for one in view.checks.findings]
    press_all(view)
    mended = (tmp_path / "train.mended.py").read_text()
    assert "lr=0.3" not in mended and "lr=" in mended and mended.startswith("def train(ctx):")
    compile(mended, "mended", "exec")
    assert "%load train.mended.py" in view.changed.value and "<code>train</code>" in view.changed.value


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


def test_what_a_function_reads_of_the_notebook_s_imports_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("torch")
    monkeypatch.chdir(tmp_path)
    functions = defined(IMPORTED + WRAPPED, "train", tmp_path)
    known = imports_behind(functions["train"])
    assert known == "\nfrom torch.distributed.fsdp import FullyShardedDataParallel as FSDP\nimport torch\n"
    view = ScriptChecks(functions=functions)
    view.path.value = "train"
    assert {"fsdp1", "fsdp1-clip-grad-norm"} <= {one.name for one in view.checks.findings}
    press_all(view)
    mended = (tmp_path / "train.mended.py").read_text()
    # Its own imports are where they are used: a cell may be run again without the others.
    assert mended.splitlines()[:5] == [
        "def train(ctx):",
        "    model = ctx.build()",
        "    from torch.distributed.fsdp import fully_shard",
        "    for index, layer in enumerate(model.layers):",
        "        model.layers[index] = fully_shard(layer)",
    ]
    assert "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)" in mended and "FSDP" not in mended


def test_a_file_of_that_name_goes_before_and_what_is_neither_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    functions = defined(OLD_STEP, "train", tmp_path)
    view = ScriptChecks(functions=functions)
    view.path.value = "trian"
    assert "trian cannot be read" in view.words.value and "Nearest: train." in view.words.value
    functions["lost"] = eval("lambda ctx: ctx")
    view.path.value = "lost"
    assert "whose text nobody has kept" in view.words.value
    view.path.value = "x" * 300
    assert "cannot be read" in view.words.value
    (tmp_path / "train").mkdir()
    view.path.value = "train"
    assert not view.words.value, "a folder is no script"
    (tmp_path / "train").rmdir()
    view.path.value = ""
    (tmp_path / "train").write_text("x = 1\n")
    view.path.value = "train"
    assert "Nothing to mend" in view.checks.list.value and not view.words.value
