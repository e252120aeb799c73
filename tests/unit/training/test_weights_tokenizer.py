"""Tests of tokenizers in a weights folder: they must match the model, and files outside are not read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import needs
from tests.weights_folders import write_folder

import shardscope as ss
from shardscope.training.data.weights_tokenizer import describe_unused_rows


def make_plan(folder: Path, **recipe: Any) -> ss.Plan:
    arch = ss.Architecture.from_hf(str(folder))
    fields = {"seq_len": 32, "global_batch_size": 4, **recipe}
    return ss.Plan(arch, ss.Cluster.parse("2xcpu"), ss.Recipe(**fields), ss.Layout.ddp())


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"^Finetune\.weights is .*: it has none of tokenizer\.json"):
        ss.Finetune(weights=folder).check(make_plan(folder))


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", vocab_size=2040)
    words = r"last id of its tokenizer is 2047; allowed: at most 2,039: the model's embedding has 2,040 rows"
    with pytest.raises(ValueError, match=words):
        ss.Finetune(weights=folder).check(make_plan(folder))


@pytest.mark.parametrize(
    ("num_rows", "is_found"), [(2048, False), (2176, False), (3060, False), (4096, True), (32_000, True)]
)
def test_a_tokenizer_far_smaller_than_the_embedding_is_a_finding(
    tmp_path: Path, num_rows: int, is_found: bool
) -> None:
    needs("datasets")
    needs("transformers")
    folder = write_folder(tmp_path / "model", vocab_size=num_rows)
    task, plan = ss.Finetune(folder, [{"prompt": "Who?", "completion": "Ahab"}] * 4), make_plan(folder)
    task.check(plan)
    findings = [one for one in plan.findings(task) if one.name == "tokenizer-of-another-model"]
    shown = str(task.preview(seq_len=32))
    sentence = f"The tokenizer has 2,048 tokens and the model's embedding {num_rows:,} rows"
    assert bool(findings) == is_found == (sentence in shown)
    if findings:
        assert findings[0].severity == "warning" and sentence in findings[0].why
    assert not any(one.name == "tokenizer-of-another-model" for one in plan.findings(ss.Pretrain()))


def test_padded_embeddings_are_usual() -> None:
    usual = [(151_665, 152_064), (50_257, 50_257), (50_295, 51_200), (32_000, 32_064), (256, 1024)]
    assert not any(describe_unused_rows(*sizes) for sizes in usual)


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "tokenizer.json").write_text('{"model": {"type": "BPE"}}')
    with pytest.raises(ValueError, match=r"^Finetune\.weights/tokenizer\.json is .*; allowed: a tokenizer"):
        ss.Finetune(weights=folder).check(make_plan(folder))


# ---- what lies outside

Change = Callable[[Path, Path], object]


def link_outside(name: str) -> Change:
    """Replace ``name`` by a link to the file outside."""

    def change(folder: Path, outside: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(outside)

    return change


def change_config(**said: Any) -> Change:
    """Write tokenizer_config.json; ``{outside}`` in text is the file's path."""

    def change(folder: Path, outside: Path) -> None:
        text = json.dumps({"model_max_length": 64, **said}).replace("{outside}", str(outside))
        (folder / "tokenizer_config.json").write_text(text)

    return change


def combine_changes(*changes: Change) -> Change:
    def change(folder: Path, outside: Path) -> None:
        for one in changes:
            one(folder, outside)

    return change


OUT = "it links out of it"
LEADS_OUT: dict[str, tuple[Change, str]] = {
    "the tokenizer": (link_outside("tokenizer.json"), OUT),
    "what it says of itself": (link_outside("tokenizer_config.json"), OUT),
    "a chat template": (link_outside("chat_template.jinja"), OUT),
    "a chat template in its folder": (link_outside("additional_chat_templates/tools.jinja"), OUT),
    "the folder of chat templates": (
        lambda folder, outside: (folder / "additional_chat_templates").symlink_to(outside.parent),
        OUT,
    ),
    "a family's own file": (link_outside("tekken.json"), OUT),
    "a sentencepiece model of any name": (link_outside("some.model"), OUT),
    "a tokenizer of a later version": (
        combine_changes(
            link_outside("tokenizer.4.0.0.json"), change_config(fast_tokenizer_files=["tokenizer.4.0.0.json"])
        ),
        OUT,
    ),
    "another name": (
        change_config(fast_tokenizer_files=["tokenizer.4.0.0.json"]),
        r"fast_tokenizer_files is \['tokenizer\.4\.0\.0\.json'\]; allowed: none",
    ),
    "a path": (change_config(vocab_file="{outside}"), r"vocab_file is '.*; allowed: a file in"),
    "a path from the folder": (
        change_config(merges_file="../outside/x.json"),
        r"merges_file is .*; allowed: a file in",
    ),
    "a path for a vocabulary": (change_config(vocab="{outside}"), r"vocab is .*; allowed: none"),
    "arguments that are paths": (
        change_config(init_inputs=["{outside}"]),
        r"init_inputs is .*; allowed: none",
    ),
    "packed weights": (change_config(gguf_file="../outside/x.json"), r"gguf_file is .*; allowed: none"),
    "no JSON": (
        lambda folder, outside: (folder / "tokenizer_config.json").write_text("{"),
        "is 'not JSON: ",
    ),
    "a list": (lambda folder, outside: (folder / "tokenizer_config.json").write_text("[]"), "a JSON object"),
}


@pytest.mark.parametrize("what", LEADS_OUT)
def test_fault_32_a_tokenizer_with_files_outside_of_the_folder_is_refused(what: str, tmp_path: Path) -> None:
    folder, outside = write_folder(tmp_path / "model"), tmp_path / "outside" / "x.json"
    outside.parent.mkdir()
    outside.write_bytes((folder / "tokenizer.json").read_bytes())
    (outside.parent / "x.jinja").write_text("a secret")
    change, words = LEADS_OUT[what]
    change(folder, outside)
    with pytest.raises(ValueError, match=rf"^Finetune\.weights.*{words}.*Nearest fix: "):
        ss.Finetune(weights=folder).check(make_plan(folder))


def test_a_tokenizer_folder_with_all_usual_files_is_accepted(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    said = change_config(
        special_tokens_map_file="/somebody/elses/special_tokens_map.json",
        tokenizer_file=None,
        vocab_file="x" * 10_000,
        init_inputs=[],
        chat_template="{{ messages }}",
    )
    said(folder, tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (folder / "README.md").write_text("a model")
    # What no tokenizer reads may lie elsewhere: Git's files, runs, weights of another framework.
    for name in (".git", "runs", "pytorch_model.bin"):
        (tmp_path / f"other {name}").mkdir()
        (folder / name).symlink_to(tmp_path / f"other {name}")
    ss.Finetune(weights=folder).check(make_plan(folder))
