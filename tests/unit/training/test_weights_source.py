"""Weights by a name: a folder, an example model, or a model of the Hub, served by a stand-in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import needs
from tests.stand_in_hub import COMMIT, Contents, run_python, serve
from tests.weights_folders import write_folder

import shardscope as ss
from shardscope.training.weights import weights_source

needs("huggingface_hub")

NAME = "acme/small-llama"
CODE = """
import json, sys
import shardscope as ss
answers = []
for name in sys.argv[1:] or {names!r}:
    try:
        task = ss.Finetune(name)
        recipe = ss.Recipe(seq_len=32, global_batch_size=4)
        architecture = ss.Architecture.from_hf(task.weights)
        plan = ss.Plan(architecture, ss.Cluster.parse("2xcpu"), recipe, ss.Layout.ddp())
        task.check(plan)
        answers.append(str(task.weights))
    except (ValueError, RuntimeError) as error:
        answers.append(f"{{type(error).__name__}} {{error}}")
print("ANSWERS" + json.dumps(answers))
"""


def make_tasks(names: list[str], endpoint: str, home: Path, **environment: str) -> tuple[list[str], str]:
    """Return the folder, or the error, of a task with each of ``names``, and what was printed before."""
    done = run_python(CODE.format(names=names), endpoint, home, **environment)
    assert done.returncode == 0, done.stderr
    printed, _, answers = done.stdout.partition("ANSWERS")
    return json.loads(answers), printed


def test_a_model_of_the_hub_is_downloaded_once_and_checked(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "small", shards=2)
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    contents = Contents(models={NAME: folder})
    with serve(contents) as endpoint:
        (first,), printed = make_tasks([NAME], endpoint, tmp_path / "home")
        snapshot = tmp_path / "home" / "hub" / "models--acme--small-llama" / "snapshots" / COMMIT
        assert first == str(snapshot)
        assert f"looking for {NAME} on the Hub\ndownloading {NAME}: " in printed
        assert not any(
            request.startswith("GET") and "pytorch_model" in request for request in contents.requests
        )
        contents.requests.clear()
        (second,), printed = make_tasks([NAME], endpoint, tmp_path / "home")
        assert second == first and not contents.requests and not printed
        # An interrupted download is completed.
        (snapshot / "model-00002-of-00002.safetensors").unlink()
        (third,), _ = make_tasks([NAME], endpoint, tmp_path / "home")
        assert third == first and contents.requests
    # Without the Hub, the cache is enough.
    (offline,), _ = make_tasks([NAME], "http://127.0.0.1:9", tmp_path / "home", HF_HUB_OFFLINE="1")
    assert offline == first


def test_models_that_cannot_be_read_are_refused_with_the_reason(tmp_path: Path) -> None:
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text("{}")
    (pickled / "pytorch_model.bin").write_bytes(b"a pickle")
    with serve(Contents(models={"acme/pickled": pickled}, gated=("acme/gated",))) as endpoint:
        names = ["acme/gated", "acme/absent", "acme/pickled"]
        (gated, absent, pickles), _ = make_tasks(names, endpoint, tmp_path / "home")
        (offline,), _ = make_tasks(["acme/absent"], endpoint, tmp_path / "home", HF_HUB_OFFLINE="1")
    for answer, name in zip((gated, absent, offline), ("gated", "absent", "absent"), strict=True):
        assert answer.startswith(f"FieldError Finetune.weights is 'acme/{name}'; allowed: a folder with")
        assert "there is no such folder, and " in answer and "or the path of a folder" in answer
    assert f"is gated. Nearest fix: accept its terms on {endpoint}/acme/gated, then" in gated
    assert f"the Hub ({endpoint}) has no model 'acme/absent' that this login may read" in absent
    assert "HF_HUB_OFFLINE is set" in offline
    assert pickles.startswith("RuntimeError acme/pickled cannot be downloaded: only safetensors are read")


def test_a_folder_takes_precedence_over_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_request(*_: Any) -> None:
        raise AssertionError("the Hub was asked")

    monkeypatch.setattr(weights_source, "find_hub_problem", refuse_request)
    monkeypatch.setattr(weights_source, "find_in_cache", refuse_request)
    folder = write_folder(tmp_path / "acme" / "small-llama")
    monkeypatch.chdir(tmp_path)
    assert ss.Finetune(NAME).weights == folder
    for name in ("./acme/other", "~/acme/other", "/acme/other", "acme/small/llama", "other"):
        with pytest.raises(ValueError, match="there is no such folder"):
            ss.Finetune(name)


def test_an_example_is_named_like_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    name = "smollm2-135m-instruct"
    folder = write_folder(tmp_path / "shardscope" / "models" / name)
    task = ss.Finetune(name)
    assert task.weights == folder
    with pytest.raises(ValueError, match=f"no such folder. Nearest fix: '{name}'"):
        ss.Finetune("smollm2-135m-instruc")

    def fail(name: str) -> Path:
        raise RuntimeError("no matching distribution\nand much more")

    monkeypatch.setattr(weights_source, "example_model", fail)
    with pytest.raises(ValueError, match=r"not be fetched: no matching distribution.*ss\.example_model"):
        ss.Finetune(name)
