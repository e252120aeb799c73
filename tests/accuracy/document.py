"""docs/accuracy.md: a part for each kind of prediction, each written by its own kind."""

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
    """Write the part of ``kind`` anew and leave the other one as it is."""
    found = split_parts(path.read_text(encoding="utf-8")) if path.is_file() else dict.fromkeys(KINDS, "")
    found[kind] = report
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(part for part in found.values() if part), encoding="utf-8")
