"""Files of an export, and reasons for absent ones."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardscope.frameworks.formats.text import format_comment

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

_REQUIRED_VARIABLE = re.compile(r"\$\{(\w+):\?([^}]*)\}")
"""Required shell variable ``${NAME:?message}``."""
PLAN_FILE = "plan.json"


@dataclass(frozen=True, kw_only=True)
class Exported:
    """One file of an export."""

    name: str
    what: str
    """Purpose of the file, one line."""
    text: str
    is_command: bool = False
    """Whether it is an executable shell script."""
    started_by: str = ""
    """Command that starts it, of a file that is no shell script."""

    @property
    def inputs(self) -> list[tuple[str, str]]:
        """Required variables (by name) and arguments (by number) of the script, with their descriptions."""
        # Slurm sets its own variables.
        variables: list[tuple[str, str]] = _REQUIRED_VARIABLE.findall(self.text)
        return [(name, text) for name, text in variables if not name.startswith("SLURM_")]

    @property
    def start_command(self) -> str:
        """Command that starts it in its folder, ``<...>`` for required inputs; empty if not executable."""
        if self.started_by:
            return self.started_by
        sbatch = self.name.endswith(".sbatch")
        if not (self.is_command or sbatch):
            return ""
        # Variables come before the command; ``$1`` and so on are its arguments.
        before = [f"{name}=<...>" for name, _ in self.inputs if not name.isdigit()]
        after = ["<...>" for name, _ in self.inputs if name.isdigit()]
        return " ".join([*before, f"sbatch {self.name}" if sbatch else f"./{self.name}", *after])


@dataclass(frozen=True, kw_only=True)
class Absent:
    """File that the plan's export lacks, with the reason."""

    name: str
    why: str


def render_header(plan: Plan, *sentences: str) -> str:
    """Return the comment at the top of a file: the plan, then ``sentences``."""
    return format_comment(
        (f"{describe_plan(plan)}. Written by Shardscope from the {PLAN_FILE} in this folder.", *sentences)
    )


def describe_plan(plan: Plan) -> str:
    """Return a description of the plan in one line."""
    return f"{plan.architecture.name} on {plan.cluster}, {plan.layout.full_description}"
