"""The model card of a run: what it says, and that no text of a run folder gets out of its place in it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import needs
from tests.weights_folders import write_folder
from written_runs import PLAN, write_run

import shardscope as ss
from shardscope.records.folder import RunFolder
from shardscope.records.json_files import append_line, read_json, write_json
from shardscope.runs.trained.model_card import find_base_name, format_code, write_model_card

needs("huggingface_hub")

import yaml  # noqa: E402  # huggingface_hub depends on it.

DIGEST = "ab" * 32
HOSTILE = "x`</code><script>alert(1)</script>|\n\n# Owned\n[a](http://evil)\x1b[31m"


def write_finished_run(parent: Path, **changes: Any) -> ss.Run:
    """A finished run with validation, whose base has a licence and lies in a private folder."""
    base = write_folder(parent / "secret-place" / "whale-base")
    (base / "README.md").write_text("---\nlicense: 'apache-2.0'\nlanguage: en\n---\nText\n")
    task = ss.Pretrain(num_steps=20, export=True)
    folder = RunFolder(write_run("my-run", parent=parent, task=task))
    description = read_json(folder.run_json) | {
        "base": {"weights": str(base), "sample": "s"},
        "versions": {"torch": "2.13.0", "shardscope": "0.1.0"},
        **changes,
    }
    write_json(folder.run_json, description)
    source = {
        "name": "questions.jsonl",
        "sha256": DIGEST,
        "hashed": "file",
        "num_rows": 60,
        "num_tokens": 4321,
    }
    write_json(folder.engine_report(0), {"data_source": source, "data": {"num_steps_done": 20}})
    for step, loss in ((0, 8.0), (9, 2.0), (19, 3.0)):
        append_line(folder.events(0), {"step": step, "rank": 0, "time": 1.0, "validation_loss": loss})
    return ss.Run.attach(folder.path)


def read_front_matter(card: str) -> dict[str, Any]:
    matter: dict[str, Any] = yaml.safe_load(card.split("---\n")[1])
    return matter


def find_row(card: str, head: str) -> list[str]:
    """Return the cells of the one table row that begins with ``head``."""
    (row,) = (line for line in card.splitlines() if line.startswith(f"| {head} |"))
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_a_card_has_base_data_losses_predictions_and_versions(tmp_path: Path) -> None:
    card = write_finished_run(tmp_path).model_card()
    assert read_front_matter(card) == {
        "base_model": "whale-base",
        "base_model_relation": "finetune",
        "library_name": "transformers",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": ["shardscope"],
    }
    assert find_row(card, "training data")[1] == "`questions.jsonl`"
    assert find_row(card, "SHA-256")[1] == f"`{DIGEST}`"
    assert find_row(card, "rows")[1] == "60" and find_row(card, "tokens")[1] == "4,321"
    assert find_row(card, "validation, best: after 10 steps")[1:] == ["2", "7.389"]
    assert find_row(card, "validation, last")[1:] == ["3", "20.09"]
    assert find_row(card, "training, step 1")[1] == "7.65"
    # written_runs logs 0.25 s a step, and predicts 0.21.
    assert find_row(card, "step (median)")[1:] == ["0.21 s", "0.251 s", "−16.4 %"]
    assert find_row(card, "each rank: parameters, gradients and optimizer")[2] == "0.35 GiB"
    assert find_row(card, "`torch`")[1] == "`2.13.0`"
    assert find_row(card, "global_batch_size")[1] == "`2`"
    assert find_row(card, "`learning_rate`")[1] == "`0.001`"


def test_initial_weights_with_the_lowest_loss_are_those_after_0_steps(tmp_path: Path) -> None:
    run = write_finished_run(tmp_path)
    events = RunFolder(run.folder).events(0)
    lines = events.read_text().replace('"validation_loss": 8.0', '"validation_loss": 1.0')
    events.write_text(lines)
    assert find_row(run.model_card(), "validation, best: after 0 steps")[1] == "1"


def test_losses_that_are_no_numbers_have_no_perplexity_and_no_best(tmp_path: Path) -> None:
    run = write_finished_run(tmp_path)
    events = RunFolder(run.folder).events(0)
    events.write_text(re.sub(r'("validation_loss": )[\d.]+', r'\1"NaN"', events.read_text()))
    card = run.model_card()
    assert find_row(card, "validation, last")[1:] == ["nan", "nan"] and "validation, best" not in card


def test_a_card_counts_validation_examples_that_are_trained_on(tmp_path: Path) -> None:
    run = write_finished_run(tmp_path)
    path, label = RunFolder(run.folder).engine_report(0), "validation examples that are trained on as well"
    validation = {"name": "10 % of the rows", "num_examples": 7}
    for shared, card_has in (({}, False), ({"num_shared_examples": 2}, True)):
        source = {"name": "questions.jsonl", "validation": validation | shared}
        write_json(path, {"data_source": source, "data": {"num_steps_done": 20}})
        assert (f"| {label} | 2 |" in run.model_card()) == card_has
        assert card_has or label not in run.model_card()


def test_a_card_names_no_path_of_this_machine(tmp_path: Path) -> None:
    fields = {"resume": str(tmp_path / "secret-place" / "step-5"), "export": True, "data": "/home/me/q.jsonl"}
    card = write_finished_run(tmp_path, asked=fields).model_card()
    assert "secret-place" not in card and str(tmp_path) not in card and "/home" not in card
    assert find_row(card, "`resume`")[1] == "`step-5`"


def test_secrets_of_the_environment_are_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_finished_run(tmp_path, versions={"torch": "hunter2-hunter2"})
    monkeypatch.setenv("HF_TOKEN", "hunter2-hunter2")
    assert "hunter2" not in run.model_card()


def test_hostile_texts_stay_in_their_code_spans(tmp_path: Path) -> None:
    base = {"weights": f"/models/{HOSTILE}", "sample": "s"}
    run = write_finished_run(
        tmp_path, versions={HOSTILE: HOSTILE}, asked={"loss_on": HOSTILE, HOSTILE: HOSTILE}, base=base
    )
    report = {"data_source": {"name": HOSTILE, "sha256": HOSTILE, "num_rows": HOSTILE, "hashed": HOSTILE}}
    write_json(RunFolder(run.folder).engine_report(0), report)
    card = run.model_card()
    # The name is no repository's, so the front matter does not have it.
    assert "base_model" not in read_front_matter(card)
    outside = re.sub(r"`[^`\n]*`", "", card)
    assert "script" not in outside and "Owned" not in outside and "evil" not in outside
    assert "script" in card and "\x1b" not in card
    # Bars inside are escaped: no row has more cells than its table has columns.
    for row in (line for line in card.splitlines() if line.startswith("| `")):
        assert len(re.findall(r"(?<!\\)\|", row)) == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a`b", "`a'b`"),
        ("a\nb\t c", "`a b c`"),
        ("a|b", "`a\\|b`"),
        ("", "(empty)"),
        ("x" * 300, f"`{'x' * 200} …`"),
    ],
)
def test_a_code_span_cannot_be_left(text: str, expected: str) -> None:
    assert format_code(text) == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/a/smollm2", "smollm2"),
        ("/h/hub/models--org--name/snapshots/0123", "org/name"),
        ("/r/runs/first/merged", "first"),
        ("/r/runs/first/export", "first"),
    ],
)
def test_a_base_is_named_without_its_path(path: str, expected: str, tmp_path: Path) -> None:
    assert find_base_name(write_finished_run(tmp_path, base={"weights": path, "sample": "s"})) == expected


def test_a_licence_is_read_from_plain_values_only(tmp_path: Path) -> None:
    run = write_finished_run(tmp_path)
    readme = tmp_path / "secret-place" / "whale-base" / "README.md"
    for text, expected in (
        ("---\nlicense: other\nlicense_name: whale\n---\n", ("other", "whale")),
        ("---\nlicense: &a [*a, *a]\n---\n", (None, None)),
        ("license: mit\n", (None, None)),
        ("", (None, None)),
    ):
        readme.write_text(text)
        matter = read_front_matter(run.model_card())
        assert (matter.get("license"), matter.get("license_name")) == expected
    # A link out of the base's folder is not followed.
    (tmp_path / "other.md").write_text("---\nlicense: mit\n---\n")
    readme.unlink()
    readme.symlink_to(tmp_path / "other.md")
    assert "license" not in read_front_matter(run.model_card())
    # A pipe would block its reader.
    readme.unlink()
    os.mkfifo(readme)
    assert "license" not in read_front_matter(run.model_card())


def test_the_card_of_adapters_and_of_merged_adapters(tmp_path: Path) -> None:
    recipe = ss.Recipe(seq_len=64, global_batch_size=2, method="qlora")
    plan = ss.Plan(PLAN.architecture, ss.Cluster.parse("2xh100-sxm-80gb"), recipe, ss.Layout.ddp())
    run = write_finished_run(tmp_path, plan=json.loads(plan.to_json()))
    matter = read_front_matter(run.model_card())
    assert (matter["library_name"], matter["base_model_relation"]) == ("peft", "adapter")
    assert matter["tags"] == ["shardscope", "qlora"] and find_row(run.model_card(), "lora_rank")[1] == "`16`"
    write_model_card(run, tmp_path, is_merged=True)
    merged = (tmp_path / "README.md").read_text()
    matter = read_front_matter(merged)
    assert (matter["library_name"], matter["base_model_relation"]) == ("transformers", "finetune")
    assert "merged into the base as it is stored" in merged


def test_a_run_of_the_users_own_function_has_no_card(tmp_path: Path) -> None:
    run = ss.Run.attach(write_run("own", parent=tmp_path, is_own_task=True))
    with pytest.raises(ValueError, match=r"own function trained is unknown.*Finetune"):
        run.model_card()
