"""``Pretrain`` as a noun: made in a kernel without torch, refusing in words."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardscope.training.pretrain import Pretrain


def test_making_one_imports_no_torch() -> None:
    code = (
        "import sys; from shardscope.training.pretrain import Pretrain; import shardscope.frameworks.fsdp2; "
        "import shardscope.frameworks.ddp, shardscope.frameworks.engine; Pretrain(num_steps=3); "
        "heavy = {'torch', 'transformers', 'tokenizers'} & set(sys.modules); sys.exit(bool(heavy))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


@pytest.mark.parametrize(
    ("field", "value", "fix"),
    [
        ("num_steps", 0, "1"),
        ("num_steps", True, "1"),
        ("num_steps", "50", "50"),
        ("learning_rate", float("nan"), "10"),
        ("learning_rate", -1.0, "0"),
        ("learning_rate", float("inf"), "10"),
        ("warmup_steps", 51, "50"),
        ("weight_decay", 2.0, "1"),
        ("seed", -1, "0"),
        ("profile", 1, "True"),
        ("log_every", 0, "1"),
        ("save_checkpoint", "yes", "True"),
        ("text", "/no/such/file", "None"),
        ("text", 7, "None"),
        ("resume_from", "/no/such/folder", "None"),
    ],
)
def test_a_bad_value_is_refused_in_words(field: str, value: Any, fix: str) -> None:
    with pytest.raises(ValueError, match=rf"^Pretrain\.{field} is .*; allowed: .*Nearest fix: {fix}"):
        Pretrain(**{field: value})


def test_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("whale")
    monkeypatch.chdir(tmp_path)
    assert Pretrain(text="text.txt").text == tmp_path / "text.txt"  # type: ignore[arg-type]


def test_it_crosses_to_the_ranks() -> None:
    task = Pretrain(num_steps=7, learning_rate=1e-4)
    assert pickle.loads(pickle.dumps(task)) == task


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused() -> None:
    def plan(vocab_size: int, seq_len: int = 64) -> Any:
        return SimpleNamespace(
            architecture=SimpleNamespace(vocab_size=vocab_size), recipe=SimpleNamespace(seq_len=seq_len)
        )

    Pretrain().check(plan(2048))
    Pretrain().check(plan(128_256))
    with pytest.raises(ValueError, match=r"Architecture.vocab_size is 512; allowed: at least 2,048"):
        Pretrain().check(plan(512))
    with pytest.raises(ValueError, match=r"Recipe.seq_len is 1; allowed: at least 2"):
        Pretrain().check(plan(2048, seq_len=1))
