"""Sample generations of a run: ``samples.jsonl``, one line per prompt and time."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TypedDict

from shardscope.records.folder import RunFolder
from shardscope.records.json_files import append_line, read_lines
from shardscope.records.json_values import is_int
from shardscope.records.terminal_text import plain_text


class Sample(TypedDict):
    """The model's answer to one prompt."""

    step: int
    """Number of optimizer steps before it; 0: the initial weights."""
    prompt: str
    text: str
    is_complete: bool
    """Whether the model ended the answer; if not, it was cut at the maximum number of tokens."""


def append_samples(folder: str | os.PathLike[str], samples: Iterable[Sample]) -> None:
    """Append ``samples`` to a run folder's file. Raises ``OSError``."""
    path = RunFolder(folder).samples
    for sample in samples:
        append_line(path, dict(sample))


def read_samples(folder: Path) -> list[Sample]:
    """Return the samples of a run folder, oldest first. Lines that are none are left out.

    A later attempt of a run answers the steps again that an earlier one has lost: the first answer counts.
    """
    samples: list[Sample] = []
    seen: set[tuple[int, str]] | None = set() if RunFolder(folder).attempt > 1 else None
    for line in read_lines(RunFolder(folder).samples):
        step, prompt, text = line.get("step"), line.get("prompt"), line.get("text")
        if not is_int(step) or step < 0 or not isinstance(prompt, str) or not isinstance(text, str):
            continue
        if seen is not None:
            if (step, prompt) in seen:
                continue
            seen.add((step, prompt))
        samples.append({
            "step": step,
            "prompt": plain_text(prompt),
            "text": plain_text(text),
            "is_complete": line.get("is_complete") is True,
        })  # fmt: skip
    return samples
