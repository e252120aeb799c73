"""Options of the exported scripts that are refused before a model is built."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
from exported_scripts import import_script
from tests.requirements import needs

needs("transformers")

FRAMEWORKS = ("ddp", "fsdp2", "deepspeed", "megatron")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_text_that_cannot_be_read_is_named(framework: str, tmp_path: Path) -> None:
    script = import_script(framework)
    files = {"empty": b"", "blank": b" \n", "latin": "café".encode("latin-1"), "good": b"Call me Ishmael."}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    reasons = {
        "empty": "this one has none",
        "blank": "this one has none",
        "latin": "text in UTF-8: 'utf-8' codec can't decode byte 0xe9 in position 3",
        "missing": "No such file or directory",
        ".": "Is a directory",
    }
    for name, reason in reasons.items():
        path = str(tmp_path / name)
        with pytest.raises(SystemExit) as ended:
            script.check_options(Namespace(text=path, steps=1))
        assert str(ended.value).startswith(f"--text is {path!r}; allowed: a file with text in")
        assert reason in str(ended.value)
    script.check_options(Namespace(text=str(tmp_path / "good"), steps=1))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_training_has_at_least_one_step(framework: str) -> None:
    script = import_script(framework)
    with pytest.raises(SystemExit, match=r"--steps is 0; allowed: 1 or more. Nearest fix: --steps 1"):
        script.check_options(Namespace(text=script.__file__, steps=0))
