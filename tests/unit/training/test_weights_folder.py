"""Tests of folders with a model's weights: incomplete or damaged ones are rejected before a launch."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.requirements import needs
from tests.weights_folders import (
    LLAMA,
    read_index,
    read_tensors,
    write_file,
    write_folder,
    write_header,
    write_index,
)

import shardscope as ss
from shardscope.training.weights.safetensors_header import read_header

FILE = "model.safetensors"
FIRST = "model-00001-of-00002.safetensors"
NORM = "model.norm.weight"


def make_plan(folder: Path, **recipe: Any) -> ss.Plan:
    arch = ss.Architecture.from_hf(str(folder))
    fields = {"seq_len": 32, "global_batch_size": 4, **recipe}
    return ss.Plan(arch, ss.Cluster.parse("2xcpu"), ss.Recipe(**fields), ss.Layout.ddp())


def test_a_complete_folder_is_accepted(tmp_path: Path) -> None:
    one, two = write_folder(tmp_path / "one"), write_folder(tmp_path / "two", shards=2)
    for folder in (one, two):
        task = ss.Finetune(weights=folder)
        task.check(make_plan(folder))
        assert pickle.loads(pickle.dumps(task)) == task
        assert len(task.folder.tensors) == len(read_tensors(LLAMA))
    (tmp_path / "link").symlink_to(two)
    assert ss.Finetune(weights=tmp_path / "link").weights == two


def test_checking_a_folder_imports_no_torch(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    code = (
        "import sys; import shardscope as ss; "
        f"plan = ss.Plan(ss.Architecture.from_hf({str(folder)!r}), ss.Cluster.parse('2xcpu'), "
        "ss.Recipe(seq_len=32), ss.Layout.ddp()); "
        f"ss.Finetune(weights={str(folder)!r}).check(plan); "
        "sys.exit(bool({'torch', 'transformers', 'safetensors'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


# ---- one file

HEADERS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", r"allowed: more bytes"),
    "cut off in its header": (lambda data: data[:100], r"allowed: at most the 92 bytes that the file has"),
    "cut off in its tensors": (lambda data: data[:-1], r"the file is truncated"),
    "with something behind it": (lambda data: data + b"\0", r"the file is longer than that"),
    "of a header of no length": (lambda data: bytes(8) + data[8:], r"a header of 2 to 100,000,000 bytes"),
    "of a header too long for the format": (
        lambda data: b"\xff" * 8 + data[8:],
        r"allowed: a header of 2 to 100,000,000 bytes",
    ),
    "of a header one byte longer than it is": (
        lambda data: (int.from_bytes(data[:8], "little") + 1).to_bytes(8, "little") + data[8:],
        r"a header that is not JSON",
    ),
    "a pickle by another name": (
        lambda data: pickle.dumps({"weight": [0.0] * 99}, protocol=4),
        r"allowed: (a header of|at most)",
    ),
}


@pytest.mark.parametrize("what", HEADERS)
def test_fault_32_a_damaged_file_is_refused(what: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    damage, words = HEADERS[what]
    (folder / FILE).write_bytes(damage((folder / FILE).read_bytes()))
    with pytest.raises(
        ValueError, match=rf"^Finetune\.weights/model\.safetensors is .*{words}.*Nearest fix: "
    ):
        ss.Finetune(weights=folder).check(make_plan(folder))


def make_entry(dtype: Any = "F32", shape: Any = (2, 2), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


ENTRIES: dict[str, tuple[Any, str]] = {
    "a list": ([], "tensors by their names"),
    "nothing of JSON": (b"{not json", "not JSON"),
    "nested too deeply": (b'{"a":' + b"[" * 200_000, "not JSON"),
    "a name twice": (b'{"a":1,"a":2}', "duplicate key"),
    "a tensor that is a number": ({"a": 1}, "an object of dtype, shape and data_offsets"),
    "a dtype nobody knows": (
        {"a": make_entry(dtype="F33")},
        "a dtype is 'F33'.*Nearest fix: save it as BF16",
    ),
    "a dtype that is none": ({"a": make_entry(dtype=None)}, "a dtype is None"),
    "a negative size": ({"a": make_entry(shape=[-2, -2])}, "whole numbers from 0"),
    "a size that is a fraction": ({"a": make_entry(shape=[2.0, 2])}, "whole numbers from 0"),
    "a huge shape": ({"a": make_entry(shape=[2**62, 2**62])}, "stored without gaps"),
    "offsets backwards": ({"a": make_entry(offsets=[16, 0])}, "begin and end"),
    "fewer bytes than the shape takes": ({"a": make_entry(offsets=[0, 12])}, "as many as 2x2 numbers of F32"),
    "bytes between tensors": ({"a": make_entry(), "b": make_entry(offsets=[20, 36])}, "bytes from 16 on"),
    "tensors over each other": ({"a": make_entry(), "b": make_entry(offsets=[8, 24])}, "bytes from 16 on"),
}


@pytest.mark.parametrize("what", ENTRIES)
def test_fault_32_an_invalid_header_is_refused(what: str, tmp_path: Path) -> None:
    library = needs("safetensors")
    header, words = ENTRIES[what]
    path = tmp_path / "some.safetensors"
    write_header(path, header, 36 if isinstance(header, dict) and "b" in header else 16)
    with pytest.raises(ValueError, match=f"(?s)^the file.*{words}"):
        read_header(path, "the file")
    with pytest.raises(Exception):  # noqa: B017 - its own class, and not for every fault the same
        library.safe_open(path, framework="np")


@given(st.binary(max_size=60), st.integers(0, 200), st.integers(0, 60))
def test_fault_32_any_bytes_are_refused_or_read_as_the_library_reads_them(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, where: int, cut: int
) -> None:
    library = needs("safetensors")
    path = tmp_path_factory.mktemp("noise") / "some.safetensors"
    write_file(path, {"a": ("F32", (2, 3)), "b": ("BF16", (4,))})
    data = path.read_bytes()
    path.write_bytes(data[:where] + noise + data[where + len(noise) : len(data) - cut])
    try:
        found = read_header(path, "the file")
    except ValueError:
        return
    with library.safe_open(path, framework="np") as opened:
        assert set(opened.keys()) == set(found)
        for name, tensor in found.items():
            assert tuple(opened.get_slice(name).get_shape()) == tensor.shape
            assert opened.get_slice(name).get_dtype() == tensor.dtype


def test_fault_32_41_a_path_that_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / FILE).unlink()
    os.mkfifo(folder / FILE)
    with pytest.raises(ValueError, match="allowed: a regular file"):
        ss.Finetune(weights=folder).check(make_plan(folder))
    (folder / FILE).unlink()
    (folder / FILE).mkdir()
    with pytest.raises(ValueError, match="allowed: a regular file"):
        ss.Finetune(weights=folder).check(make_plan(folder))


# ---- an index

INDICES: dict[str, tuple[Callable[[Path, dict[str, str]], object], str]] = {
    "points to a missing shard": (
        lambda folder, places: (folder / FIRST).unlink(),
        r"is 'model-00001-of-00002\.safetensors'; allowed: a file in .*: it is not there",
    ),
    "points above the folder": (
        lambda folder, places: {**places, NORM: f"../{FIRST}"},
        r"is '\.\./model.*names of files in the folder itself",
    ),
    "points through the folder and out": (
        lambda folder, places: {**places, NORM: f"x/../../{FIRST}"},
        r"names of files in the folder itself",
    ),
    "points to an absolute path": (
        lambda folder, places: {**places, NORM: "/etc/passwd"},
        r"is '/etc/passwd'; allowed: names of files in the folder itself",
    ),
    "points to a link out of the folder": (
        lambda folder, places: (
            (folder / FIRST).rename(folder.parent / FIRST)
            and (folder / FIRST).symlink_to(folder.parent / FIRST)
        ),
        r"it links out of it",
    ),
    "points to a link to nothing": (
        lambda folder, places: (folder / FIRST).unlink() or (folder / FIRST).symlink_to("nowhere"),
        r"it is a broken link",
    ),
    "points to a link in a circle": (
        lambda folder, places: (folder / FIRST).unlink() or (folder / FIRST).symlink_to(FIRST),
        r"it is a broken link",
    ),
    "points to a pickle": (
        lambda folder, places: (
            (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}, protocol=4) * 40)
            and {**places, NORM: "pytorch_model.bin"}
        ),
        r"/pytorch_model\.bin is .*a header of 2 to",
    ),
    "places a tensor in another file": (
        lambda folder, places: {
            **places,
            NORM: FIRST if places[NORM] != FIRST else FIRST.replace("1-", "2-"),
        },
        r"the tensors that model\.safetensors\.index\.json lists for it",
    ),
    "names a tensor that no file has": (
        lambda folder, places: {**places, "model.layers.9.x": FIRST},
        r"is 'model\.layers\.9\.x'; allowed: what model-00001-of-00002\.safetensors has",
    ),
    "names no files": (lambda folder, places: {}, r"weight_map: files by tensors' names"),
    "is no JSON": (
        lambda folder, places: (folder / f"{FILE}.index.json").write_text("{"),
        r"is 'not JSON",
    ),
    "is a list": (lambda folder, places: (folder / f"{FILE}.index.json").write_text("[]"), r"weight_map"),
    "places tensors in numbers": (lambda folder, places: {**places, NORM: 7}, r"weight_map"),
}


@pytest.mark.parametrize("what", INDICES)
def test_fault_32_an_index_with_wrong_files_is_refused(what: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", shards=2)
    change, words = INDICES[what]
    places = change(folder, read_index(folder))
    if isinstance(places, dict):
        write_index(folder, places)
    with pytest.raises(ValueError, match=rf"^Finetune\.weights.*{words}.*Nearest fix: "):
        ss.Finetune(weights=folder).check(make_plan(folder))


def test_fault_32_launching_starts_nothing(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", shards=2)
    task, plan = ss.Finetune(weights=folder), make_plan(folder)
    (folder / FIRST).write_bytes((folder / FIRST).read_bytes()[:-7])
    with pytest.raises(ValueError, match="the file is truncated"):
        ss.launch(plan, task, folder=tmp_path / "runs")
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


def test_links_of_the_hubs_cache_to_its_blobs_are_followed(tmp_path: Path) -> None:
    model = tmp_path / "models--org--name"
    snapshot = write_folder(model / "snapshots" / "abc", shards=2)
    (model / "blobs").mkdir()
    for number, file in enumerate(sorted(snapshot.iterdir())):
        blob = file.rename(model / "blobs" / f"{number}")
        file.symlink_to(Path("../../blobs") / blob.name)
    ss.Finetune(weights=snapshot).check(make_plan(snapshot))
    (snapshot / FIRST).unlink()
    (snapshot / FIRST).symlink_to("../../../outside.safetensors")
    write_file(tmp_path / "outside.safetensors", {})
    with pytest.raises(ValueError, match="it links out of it"):
        ss.Finetune(weights=snapshot).check(make_plan(snapshot))


# ---- against the plan's architecture

TENSORS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "one is missing": (
        lambda tensors: tensors.pop(NORM),
        r"is 'without model\.norm\.weight'; allowed: every tensor of model; the files lack 1\.",
    ),
    "a layer is missing": (
        lambda tensors: [tensors.pop(name) for name in list(tensors) if ".layers.1." in name],
        r"the files lack 9 \(then model\.layers\.1\.",
    ),
    "one has no place": (
        lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": ("F32", (32, 16))}),
        r"is 'model\.layers\.2\.mlp\.up_proj\.weight'; allowed: tensors of model: 1 are not part of it",
    ),
    "one has another shape": (
        lambda tensors: tensors.update({NORM: ("F32", (17,))}),
        r"shape of model\.norm\.weight is \(17,\); allowed: \(16,\)",
    ),
    "one is transposed": (
        lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.weight": ("F32", (16, 32))}),
        r"shape of model\.layers\.0\.mlp\.up_proj\.weight is \(16, 32\); allowed: \(32, 16\)",
    ),
    "one is packed": (
        lambda tensors: tensors.update({NORM: ("F8_E4M3", (16,))}),
        r"dtype of model\.norm\.weight is 'F8_E4M3'; allowed: F32, BF16, F16, F64",
    ),
}


@pytest.mark.parametrize("what", TENSORS)
def test_fault_32_weights_of_another_model_are_refused(what: str, tmp_path: Path) -> None:
    folder, tensors = write_folder(tmp_path / "model"), read_tensors(LLAMA)
    change, words = TENSORS[what]
    change(tensors)
    write_file(folder / FILE, tensors)
    with pytest.raises(ValueError, match=rf"^Finetune\.weights.*{words}.*Nearest fix: "):
        ss.Finetune(weights=folder).check(make_plan(folder))


def test_buffers_that_older_versions_stored_are_ignored(tmp_path: Path) -> None:
    tied = {**LLAMA, "tie_word_embeddings": True}
    folder = write_folder(tmp_path / "model", tie_word_embeddings=True)
    old = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", (4,)),
        "lm_head.weight": ("F32", (2048, 16)),
    }
    write_file(folder / FILE, {**read_tensors(tied), **old})
    ss.Finetune(weights=folder).check(make_plan(folder))
    # A tied head alone is the embedding, and a base model's names lack the causal one's prefix.
    own = read_tensors(tied)
    own["lm_head.weight"] = own.pop("model.embed_tokens.weight")
    write_file(folder / FILE, {name.removeprefix("model."): tensor for name, tensor in own.items()})
    ss.Finetune(weights=folder).check(make_plan(folder))


def test_a_plan_of_another_model_is_refused_with_the_folders_value(tmp_path: Path) -> None:
    folder, other = write_folder(tmp_path / "model"), write_folder(tmp_path / "wide", intermediate_size=48)
    with pytest.raises(
        ValueError, match=r"^Architecture\.intermediate_size is 48; allowed: 32, as model/conf.*"
    ):
        ss.Finetune(weights=folder).check(make_plan(other))


FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (lambda folder: folder.rename(folder.with_name("gone")), "there is no such folder"),
    "without config.json": (lambda folder: (folder / "config.json").unlink(), r"it has no config\.json"),
    "without weights": (lambda folder: (folder / FILE).unlink(), "it has no weights"),
    "of pickles alone": (
        lambda folder: (folder / FILE).rename(folder / "pytorch_model.bin"),
        "pickles, which run code when they are opened",
    ),
    "of adapters": (
        lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"),
        r"these are adapters.*ss\.merge\(run\).*merge_and_unload",
    ),
}


@pytest.mark.parametrize("what", FOLDERS)
def test_a_folder_that_is_no_model_is_refused_when_the_task_is_made(what: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    change, words = FOLDERS[what]
    change(folder)
    with pytest.raises(ValueError, match=rf"^Finetune\.weights is .*{words}"):
        ss.Finetune(weights=folder)


def test_what_is_no_path_is_refused_when_the_task_is_made() -> None:
    for value in (7, "", None):
        with pytest.raises(ValueError, match=r"^Finetune\.weights is .*; allowed: a folder"):
            ss.Finetune(weights=value)  # type: ignore[arg-type]


def test_packed_weights_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    config = {**LLAMA, "quantization_config": {"quant_method": "fp8"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"quantization_config is .*; allowed: none: packed weights"):
        ss.Finetune(weights=folder).check(make_plan(folder))


# ---- the task


def test_the_rate_is_that_of_the_method(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    task = ss.Finetune(weights=folder)
    assert task.peak_rate(make_plan(folder)) == 2e-5
    assert task.peak_rate(make_plan(folder, method="lora")) == 2e-4
    assert ss.Finetune(weights=folder, learning_rate=1e-6).peak_rate(make_plan(folder)) == 1e-6
    with pytest.raises(ValueError, match=r"^Finetune\.learning_rate is -1"):
        ss.Finetune(weights=folder, learning_rate=-1.0)
    with pytest.raises(ValueError, match=r"^Finetune\.num_steps is 0"):
        ss.Finetune(weights=folder, num_steps=0)


def test_a_mistyped_folder_has_the_one_with_a_similar_name_as_its_fix(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "llama-small")
    with pytest.raises(ValueError, match=rf"there is no such folder\. Nearest fix: {folder}\."):
        ss.Finetune(weights=tmp_path / "lama-small")
