"""Tests of signed checkpoint manifests, without torch: which checkpoints are this user's own."""

from __future__ import annotations

import json
import os
import shutil
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.saved_checkpoints import write_checkpoint

from shardscope import Cluster, Layout, Plan, Pretrain, Recipe, models
from shardscope.training.checkpoints.choice import (
    Choice,
    check_any_usable,
    choose_by_name,
    choose_for_rank,
    choose_for_resume,
)
from shardscope.training.checkpoints.manifest import (
    MANIFEST_FILE,
    UnsignedError,
    check_signed,
    key_path,
    read_key,
    read_run,
    sign_checkpoint,
)


@pytest.fixture(autouse=True)
def own_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set the folder of the signing key for this test."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return key_path()


def save_checkpoint(
    run: Path, name: str = "exp", created: float = 1.0, steps: int = 10, *, signed: bool = True
) -> Path:
    """Write a run folder with one checkpoint: metadata, a file of tensors and a DeepSpeed archive."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "run.json").write_text(json.dumps({"asked_name": name, "created": created}))
    path = run / "checkpoints" / f"step-{steps:06d}"
    (path / "zero").mkdir(parents=True)
    (path / ".metadata").write_bytes(b"metadata")
    (path / "__0_0.distcp").write_bytes(b"tensors" * 100)
    with zipfile.ZipFile(path / "zero" / "states.pt", "w") as archive:
        archive.writestr("archive/data.pkl", b"pickle")
        archive.writestr("archive/data/0", b"tensor")
    return write_checkpoint(path, {"num_steps_done": steps}, signed=signed)


def test_the_key_is_created_once_and_readable_by_its_user_only(tmp_path: Path, own_key: Path) -> None:
    save_checkpoint(tmp_path / "runs" / "a")
    assert own_key == tmp_path / "state" / "shardscope" / "checkpoint.key"
    assert stat.S_IMODE(own_key.stat().st_mode) == 0o600
    assert stat.S_IMODE(own_key.parent.stat().st_mode) == 0o700
    key = read_key()
    save_checkpoint(tmp_path / "runs" / "b")
    assert read_key() == key and len(key) == 32


def test_a_relative_state_folder_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    assert key_path() == Path.home() / ".local" / "state" / "shardscope" / "checkpoint.key"


def make_readable(key: Path) -> None:
    key.chmod(0o640)


def make_link(key: Path) -> None:
    key.rename(key.with_name("elsewhere"))
    key.symlink_to(key.with_name("elsewhere"))


def make_fifo(key: Path) -> None:
    key.unlink()
    os.mkfifo(key, 0o600)


def truncate(key: Path) -> None:
    key.write_bytes(b"short")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (make_readable, "has mode 0640, and others may have read it"),
        (make_link, "cannot be read"),
        (make_fifo, "cannot be read"),
        (truncate, "is damaged"),
        (Path.unlink, "has no key yet"),
    ],
)
def test_fault_50_a_key_that_others_may_know_proves_nothing(
    damage: Callable[[Path], None], words: str, tmp_path: Path, own_key: Path
) -> None:
    path = save_checkpoint(tmp_path / "runs" / "a")
    damage(own_key)
    with pytest.raises(UnsignedError, match=words) as refused:
        check_signed(path)
    assert str(own_key) in str(refused.value)


def test_fault_50_no_checkpoint_is_signed_with_a_key_that_others_may_know(
    tmp_path: Path, own_key: Path
) -> None:
    save_checkpoint(tmp_path / "runs" / "a")
    own_key.chmod(0o644)
    with pytest.raises(UnsignedError, match="has mode 0644"):
        save_checkpoint(tmp_path / "runs" / "b")


def change_metadata(path: Path) -> None:
    (path / ".metadata").write_bytes(b"METADATA")


def change_position(path: Path) -> None:
    (path / "position.json").write_text('{"num_steps_done": 99}')


def change_pickle(path: Path) -> None:
    file = path / "zero" / "states.pt"
    file.write_bytes(file.read_bytes().replace(b"pickle", b"evilpk"))


def move_pickle(path: Path) -> None:
    """Make the archive's directory name a tensor's bytes as its pickle."""
    file = path / "zero" / "states.pt"
    content = file.read_bytes()
    directory = content.index(b"PK\x01\x02")
    names = content[directory:].replace(b"archive/data.pkl", b"archive/DATA.PKL")
    file.write_bytes(content[:directory] + names)


def shorten_tensors(path: Path) -> None:
    (path / "__0_0.distcp").write_bytes(b"tensors")


def add_file(path: Path) -> None:
    """Add a file that DeepSpeed reads if the plan trains in bf16."""
    (path / "zero" / "bf16_states.pt").write_bytes(b"evil")


def link_folder(path: Path) -> None:
    shutil.copytree(path / "zero", path.parent / "zero")
    shutil.rmtree(path / "zero")
    (path / "zero").symlink_to(path.parent / "zero")


def replace_by_fifo(path: Path) -> None:
    (path / ".metadata").unlink()
    os.mkfifo(path / ".metadata")


def edit_manifest(path: Path) -> None:
    record = json.loads((path / MANIFEST_FILE).read_text())
    change_metadata(path)
    del record["files"][".metadata"]
    (path / MANIFEST_FILE).write_text(json.dumps(record))


def nest_manifest(path: Path) -> None:
    (path / MANIFEST_FILE).write_text("[" * 100_000)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_metadata, r"\.metadata was changed"),
        (change_position, r"position\.json was changed"),
        (change_pickle, r"zero/states\.pt was changed"),
        (move_pickle, r"zero/states\.pt was changed"),
        (shorten_tensors, r"__0_0\.distcp was changed"),
        (add_file, r"zero/bf16_states\.pt was added"),
        (link_folder, "zero was added"),
        (replace_by_fifo, r"\.metadata cannot be read"),
        (edit_manifest, "was not signed by this user's key"),
        (nest_manifest, "cannot be read"),
        (lambda path: (path / MANIFEST_FILE).unlink(), r"has no manifest\.json"),
    ],
)
def test_fault_50_a_changed_checkpoint_proves_nothing(
    change: Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    path = save_checkpoint(tmp_path / "runs" / "a")
    check_signed(path)
    change(path)
    with pytest.raises(UnsignedError, match=words):
        check_signed(path)


def test_fault_50_a_manifest_of_another_checkpoint_proves_nothing(tmp_path: Path) -> None:
    own = save_checkpoint(tmp_path / "runs" / "a")
    stranger = save_checkpoint(tmp_path / "runs" / "b", steps=90, signed=False)
    (stranger / ".metadata").write_bytes(b"evil")
    shutil.copy(own / MANIFEST_FILE, stranger)
    with pytest.raises(UnsignedError, match="was changed after it was saved"):
        check_signed(stranger)


def test_fault_50_an_old_checkpoint_in_a_newer_folder_is_not_used(tmp_path: Path) -> None:
    """Its files are the user's own, but it is not part of the newer run."""
    runs = tmp_path / "runs"
    save_checkpoint(runs / "other", name="other", created=1.0)
    newest = save_checkpoint(runs / "exp", created=2.0)
    copied = shutil.copytree(runs / "other", runs / "exp-9")
    (copied / "run.json").write_text(json.dumps({"asked_name": "exp", "created": 9.0}))
    choice = choose_by_name(runs, "exp")
    assert choice.checkpoint == newest
    assert "exp-9" in choice.notice and "another run" in choice.notice


def test_fault_50_checkpoints_that_this_user_did_not_save_are_named(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for number in range(5):
        save_checkpoint(runs / f"exp-{number}", created=float(number), signed=False)
    choice = choose_by_name(runs, "exp")
    assert choice.checkpoint is None and len(choice.skipped) == 5
    newest = runs / "exp-4" / "checkpoints" / "step-000010"
    with pytest.raises(
        ValueError, match=r"^Pretrain\.resume is True; allowed: .*exp-4.*has no manifest"
    ) as error:
        check_any_usable(choice, "Pretrain.resume")
    words = str(error.value)
    assert "and 2 more" in words and "another machine" in words
    assert f"Nearest fix: resume={str(newest)!r}, or resume=False" in words
    assert Pretrain(resume=newest).resume_from == newest, "who names it takes it"
    check_any_usable(Choice(checkpoint=None), "Pretrain.resume")

    own = save_checkpoint(runs / "exp-own", created=3.5)
    choice = choose_by_name(runs, "exp")
    assert (choice.checkpoint, [taken.path for taken in choice.skipped]) == (own, [newest])


def truncate(checkpoint: Path) -> None:
    """Cut a file, as a full disk or an interrupted copy does."""
    (checkpoint / "__0_0.distcp").write_bytes(b"")


def test_damaged_checkpoints_are_not_suggested_by_their_path(tmp_path: Path) -> None:
    """Their path raises ``ValueError``: the advice named it as what to trust."""
    runs = tmp_path / "runs"
    newest = save_checkpoint(runs / "exp")
    truncate(newest)
    choice = choose_by_name(runs, "exp")
    with pytest.raises(ValueError, match=r"__0_0\.distcp has 0 of the ") as error:
        check_any_usable(choice, "Pretrain.resume")
    words = str(error.value)
    assert words.endswith("Nearest fix: resume=False to start from the beginning.")
    assert "trust" not in words and "resume='" not in words

    # One of another machine that is complete loads by its path.
    unsigned = save_checkpoint(runs / "exp", steps=5, signed=False)
    choice = choose_by_name(runs, "exp")
    assert [skipped.path for skipped in choice.skipped] == [newest, unsigned]
    with pytest.raises(ValueError, match="If you trust step-000005") as error:
        check_any_usable(choice, "Pretrain.resume")
    assert f"Nearest fix: resume={str(unsigned)!r}, or resume=False" in str(error.value)


def test_fault_50_a_launch_warns_of_checkpoints_that_it_skips(tmp_path: Path) -> None:
    plan = Plan(models["gpt2"], Cluster.parse("2xcpu"), Recipe(seq_len=64, global_batch_size=2), Layout.ddp())
    save_checkpoint(tmp_path / "exp", created=1.0)
    save_checkpoint(tmp_path / "exp-2", created=2.0, signed=False)
    with pytest.warns(RuntimeWarning, match=r"Pretrain\.resume: not used: .*exp-2"):
        Pretrain(resume=True).check_launch(plan, tmp_path, "exp")
    shutil.rmtree(tmp_path / "exp")
    with pytest.raises(ValueError, match=r"Pretrain\.resume is True.*exp-2"):
        Pretrain(resume=True).check_launch(plan, tmp_path, "exp")


def test_fault_50_the_checkpoint_named_in_run_json_is_not_trusted(tmp_path: Path) -> None:
    stranger = save_checkpoint(tmp_path / "elsewhere", signed=False)
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"asked_name": "a", "created": 1.0}))
    asked = {"asked": {"resume": str(stranger)}}
    choice = choose_for_resume(run, asked)
    assert choice.checkpoint is None and choice.skipped[0].path == stranger
    sign_checkpoint(stranger, read_run(tmp_path / "elsewhere"), {}, {})
    assert choose_for_resume(run, asked).checkpoint == stranger
    assert choose_for_rank(run) == Choice(checkpoint=None)


def test_pickled_ranges_of_tensor_files_are_hashed(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "runs" / "a", signed=False)
    sign_checkpoint(path, read_run(tmp_path / "runs" / "a"), {"__0_0.distcp": [(7, 7)]}, {})
    content = bytearray((path / "__0_0.distcp").read_bytes())
    content[0:7] = b"TENSORS"
    (path / "__0_0.distcp").write_bytes(content)
    check_signed(path)
    content[7:14] = b"PICKLED"
    (path / "__0_0.distcp").write_bytes(content)
    with pytest.raises(UnsignedError, match=r"__0_0\.distcp was changed"):
        check_signed(path)


@pytest.mark.parametrize("damage", ["missing", "truncated", "empty position"])
def test_a_damaged_checkpoint_is_refused_before_ranks_start(damage: str, tmp_path: Path) -> None:
    """Also one that the user names, whoever signed it; the fix is the newest intact one of the same run."""
    plan = Plan(
        models["gpt2"], Cluster.parse("2xcpu"), Recipe(seq_len=512, global_batch_size=2), Layout.ddp()
    )
    run = tmp_path / "runs" / "a"
    older, path = save_checkpoint(run, steps=10), save_checkpoint(run, steps=20)
    key_path().unlink()
    Pretrain(resume=path).check(plan)
    if damage == "missing":
        (path / "__0_0.distcp").unlink()
    elif damage == "truncated":
        os.truncate(path / "__0_0.distcp", 7)
    else:
        os.truncate(path / "position.json", 0)
    name = "position.json" if damage == "empty position" else "__0_0.distcp"
    with pytest.raises(ValueError, match=rf"Pretrain\.resume.*{name}.*{older.name}"):
        Pretrain(resume=path).check(plan)
