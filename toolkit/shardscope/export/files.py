"""``plan.export(folder)``: configuration files of a plan, which never overwrite the user's own files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.core.errors import Value, refuse
from shardscope.frameworks.engines import render_files
from shardscope.frameworks.formats.exported import PLAN_FILE, Absent, Exported, describe_plan

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

LIST_FILE = "FILES.md"


def export(plan: Plan, folder: str | Path) -> list[Path]:
    """See :meth:`shardscope.core.plan.Plan.export`."""
    if not isinstance(folder, str | Path) or not str(folder) or "\0" in str(folder):
        refuse("folder", folder, "the path of a folder", Value("exported"))
    home = Path(folder).expanduser()
    if home.exists() and not home.is_dir():
        refuse("folder", str(folder), "a folder, or a path at which there is nothing yet", Value("exported"))
    files = contents(plan)
    stale = _earlier(home, {file.name for file in files})
    home.mkdir(parents=True, exist_ok=True)
    for old in stale:
        (home / old).unlink()
    written = []
    for file in files:
        path = home / file.name
        path.write_text(file.text, encoding="utf-8")
        if file.is_command:
            path.chmod(0o755)
        written.append(path)
    return written


def contents(plan: Plan) -> list[Exported]:
    """Return the files of ``plan``'s export: its JSON, its framework's own files, and a list of them."""
    found: Sequence[Exported | Absent] = render_files(plan)
    plan_file = Exported(
        name=PLAN_FILE, what="the plan itself: ss.Plan.from_json reads it", text=plan.to_json() + "\n"
    )
    files = [plan_file, *(file for file in found if isinstance(file, Exported))]
    absent = [file for file in found if isinstance(file, Absent)]
    return [*files, Exported(name=LIST_FILE, what="this list", text=_listed(plan, files, absent))]


def _listed(plan: Plan, files: Sequence[Exported], absent: Sequence[Absent]) -> str:
    lines = [f"# {describe_plan(plan)}", "", "Written by Shardscope.", ""]
    lines += [f"- `{file.name}`: {file.what}{_how_to_start(file)}" for file in files]
    if absent:
        lines += ["", "There is none of these:", ""]
        lines += [f"- `{file.name}`: {file.why}" for file in absent]
    return "\n".join(lines) + "\n"


def _how_to_start(file: Exported) -> str:
    return f": `{file.start_command}`" if file.start_command else ""


def _is_as_left(home: Path, file: Exported) -> bool:
    try:
        return (home / file.name).read_bytes() == file.text.encode()
    except OSError:
        return False  # a folder of that name, or an unreadable file of another user


def _earlier(home: Path, names: set[str]) -> list[str]:
    """Return the names of unchanged files of an earlier export in ``home``.

    Raises ``ValueError`` if ``names``, which this export writes, would replace a file that the user wrote or
    changed.
    """
    from shardscope.core.plan import Plan  # it imports this module

    there = {path.name for path in home.iterdir()} if home.is_dir() else set()
    if PLAN_FILE not in there:
        mine = there & names
        if mine:
            fix = f"an empty folder, such as {str(home / 'exported')!r}"
            allowed = f"a folder without {', '.join(sorted(mine))}, which no export of Shardscope left there"
            refuse("folder", str(home), allowed, fix)
        return []
    try:
        before = contents(Plan.from_json((home / PLAN_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ValueError(f"{home / PLAN_FILE} is no plan, and would be replaced: {error}") from error
    changed = sorted(file.name for file in before if file.name in there and not _is_as_left(home, file))
    changed += sorted((there & names) - {file.name for file in before})
    if changed:
        listed = ", ".join(changed)
        allowed = f"a folder whose {listed} is as an export of this version left it; there it differs"
        refuse("folder", str(home), allowed, "another folder, or move that file away")
    return [file.name for file in before if file.name in there]
