"""Data sets of the Hub, served by a stand-in: their rows are read, and later from the cache."""

from __future__ import annotations

import json
from pathlib import Path

from tests.requirements import needs
from tests.stand_in_hub import Contents, run_python, serve
from tests.weights_folders import write_folder

needs("datasets")
needs("transformers")

NAME = "acme/questions"
CODE = """
import json, sys
import shardscope as ss
answers = []
for name in {names!r}:
    for streaming in (False, True):
        task = ss.Finetune({folder!r}, name, streaming=streaming, num_steps=2)
        try:
            preview = task.preview(2)
            text = "".join(preview.rows[1].tokens)
            answers.append([preview.num_rows, preview.format.name, text, preview.source])
        except ValueError as error:
            answers.append(str(error))
print("ANSWERS" + json.dumps(answers))
"""


def preview_rows(names: list[str], folder: Path, endpoint: str, home: Path) -> list[object]:
    """Return rows, format, and the second row of each data set, or its error: as a whole, then streamed."""
    done = run_python(CODE.format(names=names, folder=str(folder)), endpoint, home)
    assert done.returncode == 0, done.stderr
    answers: list[object] = json.loads(done.stdout.partition("ANSWERS")[2])
    return answers


def test_rows_of_a_data_set_are_read_and_kept_in_the_cache(tmp_path: Path) -> None:
    source = tmp_path / "questions"
    source.mkdir()
    rows = [{"prompt": f"Who is {number}?", "completion": f" Ahab {number}."} for number in range(6)]
    (source / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (source / "README.md").write_text("# Questions\n")
    folder, home = write_folder(tmp_path / "small"), tmp_path / "home"
    contents = Contents(data_sets={NAME: source}, gated=("acme/gated",))
    with serve(contents) as endpoint:
        whole, streamed, gated, _, absent, _ = preview_rows(
            [NAME, "acme/gated", "acme/absent"], folder, endpoint, home
        )
        assert whole == streamed == [6, "prompt-completion", "Who is 1? Ahab 1.", NAME]
        assert f"accept its terms on {endpoint}/datasets/acme/gated" in str(gated)
        assert "has no data set 'acme/absent' that this login may read" in str(absent)
    assert preview_rows([NAME], folder, "http://127.0.0.1:9", home) == [whole, whole]
    _, unread = preview_rows([NAME], folder, "http://127.0.0.1:9", tmp_path / "empty")
    assert "the Hub (http://127.0.0.1:9) cannot be reached" in str(unread)
