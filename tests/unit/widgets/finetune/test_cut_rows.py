"""The one-click view with rows that its sequence length cuts off before their completion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_runs import wait_until
from finetune_views import wait_until_read
from tests.requirements import needs
from tests.weights_folders import write_chat_folder

import shardscope as ss
from shardscope_widgets import FinetuneView

SHORT = [{"prompt": f"Who is {number}?", "completion": " Ahab."} for number in range(600)]
LONG = {"prompt": "whale " * 150, "completion": " Yes."}


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    needs("datasets")
    needs("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ss.Cluster, "detect", lambda: ss.Cluster.parse("2xcpu"))
    return write_chat_folder(tmp_path / "chatty", max_position_embeddings=256)


def write_rows(rows: list[dict[str, str]]) -> str:
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return "rows.jsonl"


@pytest.mark.usefixtures("weights")
def test_a_few_long_rows_are_left_out_and_counted() -> None:
    view: Any = FinetuneView("chatty", write_rows([*SHORT, LONG]))
    wait_until_read(view, lambda: view.plan is not None)
    assert view.plan.recipe.seq_len == 24 and view.task.bad_rows == "skip_truncated"
    summary = view.form.preview.summary
    assert wait_until(lambda: "Left out: 1 row without a token that bears loss" in summary.value, 60)
    assert "line 601 of rows.jsonl: seq_len=24 cuts off its completion" in summary.value
    assert "Not trained on: 1 row without" in view.form.data_panel.value
    assert not view.button.disabled
    view.close()


@pytest.mark.usefixtures("weights")
def test_a_large_share_of_tokens_that_is_cut_off_is_shown_without_opening_the_preview() -> None:
    rows = [{"prompt": f"Who is {number}?", "completion": " whale" * 500} for number in range(60)]
    view: Any = FinetuneView("chatty", write_rows(rows))
    wait_until_read(view, lambda: view.plan is not None)
    assert view.plan.recipe.seq_len == 256
    # 256 of the tokens of each row are kept.
    lengths = view.form.preview_of_data.lengths
    share = 100 * (1 - 256 * len(lengths) / sum(lengths))
    assert f"Not trained on: {share:.3g} % of all tokens" in view.form.data_panel.value
    view.close()


@pytest.mark.usefixtures("weights")
def test_data_that_are_all_cut_off_are_refused_at_their_input() -> None:
    view: Any = FinetuneView("chatty", write_rows([{**LONG, "prompt": "whale " * 600}] * 60))
    row = view.form.inputs.rows["data"]
    wait_until_read(view, lambda: row.message)
    assert "60 rows without a token that bears loss" in row.message
    assert view.plan is None and view.button.disabled
    view.close()


def test_the_length_follows_the_machine(weights: Path) -> None:
    """The 2,048 tokens for CPU ranks were still advised when a queue of GPUs was chosen, and the preview cut
    to them."""
    write_chat_folder(weights.parent / "patient", max_position_embeddings=16_384)
    rows = [{"prompt": f"Who is {number}?", "completion": " whale" * 3000} for number in range(60)]
    view: Any = FinetuneView("patient", write_rows(rows))

    def wait_for_length(vendor: str, *, is_long: bool) -> None:
        def is_ready() -> bool:
            plan = view.plan
            if plan is None or plan.cluster.gpu.vendor != vendor or view.form.data_panel.advice is not None:
                return False
            seq_len: int = plan.recipe.seq_len
            return (seq_len > 2048) == is_long and view.form.preview_of_data.seq_len == seq_len

        wait_until_read(view, is_ready)

    wait_for_length("cpu", is_long=False)
    view.form.set_machine(ss.Cluster.parse("a100-sxm-80gb"))
    wait_for_length("nvidia", is_long=True)
    view.form.set_machine(ss.Cluster.parse("2xcpu"))
    wait_for_length("cpu", is_long=False)
    # The user's own length stays, and what is said of it follows.
    view.form.settings.set_fields({"seq_len": 512})
    assert wait_until(lambda: "CPU ranks" in getattr(view.form.data_panel.advice, "why", ""), 60)
    view.form.set_machine(ss.Cluster.parse("a100-sxm-80gb"))
    assert wait_until(lambda: getattr(view.form.data_panel.advice, "seq_len", 0) > 2048, 60)
    assert "CPU ranks" not in view.form.data_panel.advice.why
    view.close()
