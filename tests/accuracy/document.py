"""docs/accuracy.md: one part for memory and one for time, each of which is written separately."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from tests.accuracy.rows import ROOT
from tests.accuracy.time_report import HEADING

Kind = Literal["memory", "time"]
KINDS: tuple[Kind, ...] = get_args(Kind)
DOCUMENT = ROOT / "docs" / "accuracy.md"


def split_parts(text: str) -> dict[Kind, str]:
    """Return the document's parts by kind; an empty text for a missing one."""
    memory, heading, time = text.partition(HEADING)
    return {"memory": memory.rstrip("\n") + "\n" if memory.strip() else "", "time": heading + time}


def replace_part(kind: Kind, report: str, path: Path = DOCUMENT) -> None:
    """Replace the part of ``kind`` and keep the other one."""
    parts = split_parts(path.read_text(encoding="utf-8")) if path.is_file() else dict.fromkeys(KINDS, "")
    parts[kind] = report
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(part for part in parts.values() if part), encoding="utf-8")
