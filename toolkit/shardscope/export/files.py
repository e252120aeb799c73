"""``plan.export(folder)``: configuration files of a plan, which never overwrite the user's own files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.core.errors import Value, refuse
from shardscope.core.number_format import join_list
from shardscope.families.unknown import UnknownFamily
from shardscope.frameworks.engines import render_files
from shardscope.frameworks.formats.exported import PLAN_FILE, Absent, Exported, describe_plan
from shardscope.machine.user_folders import check_home
from shardscope.memory.state.lora import find_adapter_targets

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

LIST_FILE = "FILES.md"


def export(plan: Plan, folder: str | Path) -> list[Path]:
    """See :meth:`shardscope.core.plan.Plan.export`."""
    if not isinstance(folder, str | Path) or not str(folder) or "\0" in str(folder):
        refuse("folder", folder, "the path of a folder", Value("exported"))
    home = check_home("folder", folder, Value("exported"))
    # A link to nothing does not exist, and no folder can be made there.
    if (home.exists() or home.is_symlink()) and not home.is_dir():
        refuse("folder", str(folder), "a folder, or a path at which there is nothing yet", Value("exported"))
    files = list_files(plan)
    stale = _find_earlier_files(home, {file.name for file in files})
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


def list_files(plan: Plan) -> list[Exported]:
    """Return the files of ``plan``'s export: its JSON, its framework's own files, and a list of them."""
    if plan.recipe.has_adapters and isinstance(plan.architecture, UnknownFamily):
        # The scripts' own default is the attention of the first layer, as in families with formulas.
        targets = find_adapter_targets(plan.architecture, plan.recipe)
        plan = replace(plan, recipe=replace(plan.recipe, lora_targets=targets))
    framework_files: Sequence[Exported | Absent] = render_files(plan)
    plan_file = Exported(
        name=PLAN_FILE, what="the plan itself: ss.Plan.from_json takes its text", text=plan.to_json() + "\n"
    )
    files = [plan_file, *(file for file in framework_files if isinstance(file, Exported))]
    absent = [file for file in framework_files if isinstance(file, Absent)]
    return [*files, Exported(name=LIST_FILE, what="this list", text=_describe_files(plan, files, absent))]


def _describe_files(plan: Plan, files: Sequence[Exported], absent: Sequence[Absent]) -> str:
    lines = [f"# {describe_plan(plan)}", "", "Written by Shardscope.", ""]
    lines += [f"- `{file.name}`: {file.what}{_describe_start(file)}" for file in files]
    if absent:
        lines += ["", "There is none of these:", ""]
        lines += [f"- `{file.name}`: {file.why}" for file in absent]
    return "\n".join(lines) + "\n"


def _describe_start(file: Exported) -> str:
    return f": `{file.start_command}`" if file.start_command else ""


def _is_unchanged(home: Path, file: Exported) -> bool:
    try:
        return (home / file.name).read_bytes() == file.text.encode()
    except OSError:
        return False  # a folder of that name, or an unreadable file of another user


def _find_earlier_files(home: Path, names: set[str]) -> list[str]:
    """Return the names of unchanged files of an earlier export in ``home``.

    Raises ``ValueError`` if ``names``, which this export writes, would replace a file that the user wrote or
    changed.
    """
    from shardscope.core.plan import Plan  # it imports this module

    names_in_folder = {path.name for path in home.iterdir()} if home.is_dir() else set()
    if PLAN_FILE not in names_in_folder:
        conflicts = names_in_folder & names
        if conflicts:
            fix = f"an empty folder, such as {str(home / 'exported')!r}"
            allowed = (
                f"a folder without {', '.join(sorted(conflicts))}, which no export of Shardscope left there"
            )
            refuse("folder", str(home), allowed, fix)
        return []
    try:
        earlier_files = list_files(Plan.from_json((home / PLAN_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ValueError(f"{home / PLAN_FILE} is no plan, and would be replaced: {error}") from error
    changed = sorted(
        file.name for file in earlier_files if file.name in names_in_folder and not _is_unchanged(home, file)
    )
    changed += sorted((names_in_folder & names) - {file.name for file in earlier_files})
    if changed:
        if len(changed) == 1:
            state, fix = "is as an export of this version left it; there it differs", "move that file away"
        else:
            state = "are as an export of this version left them; there they differ"
            fix = "move these files away"
        refuse(
            "folder", str(home), f"a folder whose {join_list(changed)} {state}", f"another folder, or {fix}"
        )
    return [file.name for file in earlier_files if file.name in names_in_folder]
