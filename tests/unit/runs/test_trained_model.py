"""Tests of what merging and chatting check before a process starts: the run, its export, and its base."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from tests.saved_checkpoints import write_checkpoint
from tests.weights_folders import write_file, write_folder
from written_runs import write_run

import shardscope as ss
from shardscope.runs.trained.child_environment import build_child_environment
from shardscope.runs.trained.model_files import find_base, find_model, parse_adapter_config
from shardscope.training.weights.base_sample import hash_base
from shardscope.training.weights.weights_folder import WeightsFolder

LORA_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
ADAPTER_CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "q_proj"]}


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write_full_run(parent: Path) -> ss.Run:
    """A finished run that exported whole weights."""
    folder = write_run("full", parent=parent, task=ss.Pretrain(num_steps=20, export=True))
    write_folder(folder / "export")
    edit_json(folder / "run.json", base={"seed": 0})
    return ss.Run.attach(folder)


def write_adapter_run(parent: Path, **config: object) -> ss.Run:
    """A finished run that exported adapters over ``parent/base``."""
    base = WeightsFolder.open(write_folder(parent / "base"), "base")
    folder = write_run("lora", parent=parent, task=ss.Pretrain(num_steps=20, export=True))
    (folder / "export").mkdir()
    (folder / "export" / "adapter_config.json").write_text(json.dumps({**ADAPTER_CONFIG, **config}))
    write_file(folder / "export" / "adapter_model.safetensors", {LORA_A: ("F32", (4, 16))})
    edit_json(folder / "run.json", base={"weights": str(base.path), "sample": hash_base(base)})
    return ss.Run.attach(folder)


def test_full_weights_are_their_own_merge(tmp_path: Path) -> None:
    run = write_full_run(tmp_path)
    before = {path: path.read_bytes() for path in run.model.iterdir()}
    assert ss.merge(run) == ss.merge(str(run.folder)) == ss.merge(run.folder / "export") == run.model
    assert {path: path.read_bytes() for path in run.model.iterdir()} == before
    assert not (run.folder / "merged").exists()
    with pytest.raises(ValueError, match=r"merge\.out is .*whole model.*out=None"):
        ss.merge(run, tmp_path / "out")
    with pytest.raises(ValueError, match="started from random weights"):
        run.chat(base=True)


def test_adapters_are_found_with_their_base(tmp_path: Path) -> None:
    run = write_adapter_run(tmp_path)
    files = find_model(run, "run")
    assert files.weights == find_base(run, "run").weights == str(tmp_path / "base")
    assert (files.adapters.rank, files.adapters.alpha, files.adapters.targets) == (4, 8, ["q_proj", "v_proj"])
    assert type(files).from_json(files.to_json()) == files


@pytest.mark.parametrize("use", ["merge", "chat"])
@pytest.mark.parametrize(
    ("status", "export", "expected"),
    [
        ("finished", False, r"launched without export=True.*Finetune\(weights, data, export=True\)"),
        (
            "stopped",
            True,
            r"this one is stopped, and weights are exported after the last step.*no checkpoint",
        ),
        ("failed", True, r"this one is failed"),
        ("running", True, r"this one is running.*run\.wait\(\) first"),
    ],
)
def test_a_run_without_a_model_is_refused(
    use: str, status: str, export: bool, expected: str, tmp_path: Path
) -> None:
    task = ss.Pretrain(num_steps=20, export=export)
    run = ss.Run.attach(write_run("none", status, parent=tmp_path, task=task))
    with pytest.raises(ValueError, match=expected):
        ss.merge(run) if use == "merge" else run.chat()


def test_a_stopped_run_with_a_checkpoint_is_resumed_by_its_folder(tmp_path: Path) -> None:
    """``resume=True`` would start at step 0: the run has no name that the next one could share."""
    task = ss.Pretrain(num_steps=20, export=True)
    run = ss.Run.attach(write_run("saved", "stopped", parent=tmp_path, task=task))
    write_checkpoint(run.folder / "checkpoints" / "step-000003", {"num_steps_done": 3})
    with pytest.raises(ValueError, match=f"resume='{run.folder}'"):
        run.chat()


def test_a_base_that_is_gone_or_has_changed_is_refused(tmp_path: Path) -> None:
    run = write_adapter_run(tmp_path)
    weights = tmp_path / "base" / "model.safetensors"
    content = weights.read_bytes()
    # Inside of the first 4 KiB of a tensor: further training would change every one.
    weights.write_bytes(content[:-64] + bytes([1]) + content[-63:])
    for use in (lambda: ss.merge(run), run.chat, lambda: run.chat(base=True)):
        with pytest.raises(ValueError, match="these have changed since"):
            use()
    weights.write_bytes(content[:-1])
    with pytest.raises(ValueError, match="truncated"):
        ss.merge(run)
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(ValueError, match=r"merge run base is '.*base'; allowed: .*it is gone"):
        ss.merge(run)
    edit_json(run.folder / "run.json", base=None)
    with pytest.raises(ValueError, match=r"did not.*merge_and_unload"):
        ss.merge(run.folder)


def test_a_base_with_adapters_in_its_folder_is_refused(tmp_path: Path) -> None:
    run = write_adapter_run(tmp_path)
    # transformers would open the model that this file names instead of the weights beside it.
    (tmp_path / "base" / "adapter_config.json").write_text('{"base_model_name_or_path": "org/other"}')
    with pytest.raises(ValueError, match=r"without adapter_config\.json"):
        run.chat(base=True)


def test_the_output_is_checked_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_adapter_run(tmp_path)
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=r"merge\.out is .*nothing is yet"):
        ss.merge(run, tmp_path / "out")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 10**12, 1000))
    with pytest.raises(ValueError, match=r"disk with 0\.1 GB free: this one has 0\.0 GB"):
        ss.merge(run, tmp_path / "new" / "merged")
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match=r"merge run_or_folder is .*knows the base of its adapters"):
        ss.merge(tmp_path / "base")
    with pytest.raises(ValueError, match=r"its adapters: there is no such folder\. Nearest"):
        ss.merge(tmp_path / "typo")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"r": "4"}, "r is '4'"),
        ({"target_modules": "all-linear"}, "target_modules is 'all-linear'"),
        ({"target_modules": []}, "target_modules"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"use_dora": 1}, "use_dora"),
    ],
)
def test_an_adapter_config_of_anything_but_lora_is_refused(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        parse_adapter_config(Path("export"), {**ADAPTER_CONFIG, **change}, "config")


def test_keys_that_name_code_are_not_read() -> None:
    config = {**ADAPTER_CONFIG, "megatron_core": "os", "auto_mapping": {"base_model_class": "x"}}
    read = [parse_adapter_config(Path("x"), keys, "config") for keys in (config, ADAPTER_CONFIG)]
    assert read[0] == read[1]


def test_only_safetensors_are_opened(tmp_path: Path) -> None:
    run = write_adapter_run(tmp_path)
    file = run.folder / "export" / "adapter_model.safetensors"
    file.rename(file.with_suffix(".bin"))
    with pytest.raises(ValueError, match="nothing else is opened"):
        ss.merge(run)
    file.symlink_to(file.with_suffix(".bin"))
    with pytest.raises(ValueError, match="nothing else is opened"):
        run.chat()


def test_sizes_in_a_config_that_the_tensors_do_not_have_are_refused(tmp_path: Path) -> None:
    """transformers and peft would allocate them: any amount of memory."""
    with pytest.raises(ValueError, match=r"r is 65536; allowed: the rank of the tensors .*: 4"):
        find_model(write_adapter_run(tmp_path / "lora", r=65_536), "run")
    run = write_full_run(tmp_path)
    edit_json(run.model / "config.json", num_hidden_layers=2_000)
    with pytest.raises(ValueError, match=r"every tensor of .*the files lack"):
        find_model(run, "run")


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ({"max_new_tokens": 0}, "run.chat max_new_tokens is 0"),
        ({"temperature": -1}, "run.chat temperature is -1"),
        ({"base": 1}, "run.chat base is 1"),
    ],
)
def test_bad_options_of_a_chat_are_refused(option: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=expected):
        write_full_run(tmp_path).chat(**option)


def test_threads_of_a_chat_wait_without_spinning_unless_the_user_says_so(monkeypatch: Any) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert build_child_environment()["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert build_child_environment()["OMP_WAIT_POLICY"] == "ACTIVE"
