"""Tests of the folder that ``plan.export`` writes to and of the user's files, which it never overwrites."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shardscope as ss
from requirements import needs

needs("accelerate")  # which brings PyYAML
needs("transformers")  # which spells the config in train.py

CONFIGURATIONS = (
    *("accelerate_config.yaml", "ds_config.json", "megatron_arguments.txt"),
    *("training_arguments.yaml", "fsdp2_arguments.json"),
)


def build_small_plan(layout: Any, cluster: str = "2xcpu", **recipe: Any) -> ss.Plan:
    architecture = ss.Architecture.of_size("2m")
    return ss.Plan(
        architecture, ss.Cluster.parse(cluster), ss.Recipe(seq_len=64, global_batch_size=16, **recipe), layout
    )


def test_export_replaces_all_files_of_an_earlier_export(tmp_path: Path) -> None:
    build_small_plan(ss.Layout.fsdp2(), "8xh100-sxm-80gb").export(tmp_path)
    assert (tmp_path / "fsdp2_arguments.json").exists()
    (tmp_path / "notes.txt").write_text("mine")
    plan = build_small_plan(ss.Layout.zero(2), "8xh100-sxm-80gb")
    written = {path.name for path in plan.export(tmp_path)}
    assert {path.name for path in tmp_path.iterdir()} == written | {"notes.txt"}
    assert ss.Plan.from_deepspeed(tmp_path / "ds_config.json") == plan


@pytest.mark.parametrize("name", ["train.py", "accelerate_config.yaml", "job.sbatch", "FILES.md"])
def test_edited_exported_files_are_not_overwritten(name: str, tmp_path: Path) -> None:
    plan = build_small_plan(ss.Layout.ddp(), "8xh100-sxm-80gb")
    plan.export(tmp_path)
    (tmp_path / name).write_text("# mine\n")
    with pytest.raises(ValueError, match=name):
        plan.export(tmp_path)
    assert (tmp_path / name).read_text() == "# mine\n"


@pytest.mark.parametrize("name", [*CONFIGURATIONS, "plan.json", "torchrun.sh", "train.py", "FILES.md"])
def test_user_files_are_not_overwritten(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    layouts = {"ds_config.json": ss.Layout.zero(), "megatron_arguments.txt": ss.Layout.megatron()}
    with pytest.raises(ValueError, match=name):
        build_small_plan(layouts.get(name, ss.Layout.fsdp2()), "8xh100-sxm-80gb").export(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_link_to_nothing_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(ValueError, match="allowed: a folder"):
        build_small_plan(ss.Layout.ddp()).export(tmp_path / "link")


@pytest.mark.parametrize("folder", [None, 3, "", "a\0b"])
def test_rejects_invalid_folder_arguments(folder: Any) -> None:
    with pytest.raises(ValueError, match="folder"):
        build_small_plan(ss.Layout.ddp()).export(folder)


def test_rejects_a_file_as_folder(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(ValueError, match="folder"):
        build_small_plan(ss.Layout.ddp()).export(tmp_path / "x")


def test_binary_files_and_folders_named_like_exports_raise_value_error(tmp_path: Path) -> None:
    plan = build_small_plan(ss.Layout.ddp(), "8xh100-sxm-80gb")
    plan.export(tmp_path)
    script = tmp_path / "train.py"
    script.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"train\.py is as an export"):
        plan.export(tmp_path)
    (tmp_path / "FILES.md").write_text("mine")
    with pytest.raises(
        ValueError, match=r"FILES\.md and train\.py are as .* left them.*move these files away"
    ):
        plan.export(tmp_path)
    assert script.read_bytes() == b"\xff\xfe\x00"
    script.unlink()
    script.mkdir()
    for name in ("plan.json", None):
        with pytest.raises(ValueError, match=r"train\.py"):
            plan.export(tmp_path)
        if name:
            (tmp_path / name).rename(tmp_path.parent / name)
    assert script.is_dir()


def test_unreadable_plan_json_raises_value_error(tmp_path: Path) -> None:
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(ValueError, match=r"plan\.json is no plan"):
        build_small_plan(ss.Layout.ddp()).export(tmp_path)
    (tmp_path / "plan.json").rmdir()
    (tmp_path / "plan.json").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"plan\.json is no plan"):
        build_small_plan(ss.Layout.ddp()).export(tmp_path)
