"""What an export is made of: files, and the words for those that a plan has none of."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardscope.frameworks.formats.text import comments

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

_ASKED = re.compile(r"\$\{(\w+):\?([^}]*)\}")
"""What a shell refuses to go on without, and the words with which it does."""
PLAN_FILE = "plan.json"


@dataclass(frozen=True, kw_only=True)
class Exported:
    """One file of an export."""

    name: str
    what: str
    """What it is for, as one line."""
    text: str
    is_command: bool = False
    """Whether it is a script that a shell runs."""

    @property
    def asks(self) -> list[tuple[str, str]]:
        """What its shell asks of whoever starts it: variables by name, arguments by number, and for what."""
        return [found for found in _ASKED.findall(self.text) if not found[0].startswith("SLURM_")]

    @property
    def start(self) -> str:
        """What starts it in its folder, ``<...>`` for what is asked; empty: something else reads it."""
        sbatch = self.name.endswith(".sbatch")
        if not (self.is_command or sbatch):
            return ""
        before = [f"{name}=<...>" for name, _ in self.asks if not name.isdigit()]
        after = ["<...>" for name, _ in self.asks if name.isdigit()]
        return " ".join([*before, f"sbatch {self.name}" if sbatch else f"./{self.name}", *after])


@dataclass(frozen=True, kw_only=True)
class Absent:
    """A file that a plan has none of, and why."""

    name: str
    why: str


def header(plan: Plan, *sentences: str) -> str:
    """The comment at the top of a file: whose it is, then ``sentences``."""
    return comments((f"{described(plan)}. Written by Shardscope from the {PLAN_FILE} beside it.", *sentences))


def described(plan: Plan) -> str:
    """The plan in one line."""
    return f"{plan.architecture.name} on {plan.cluster}, {plan.layout.description}"
