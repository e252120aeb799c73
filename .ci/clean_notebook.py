"""Using a notebook is no change in git: outputs and counts are left out of what git stores and compares.

``make lab`` turns two things on. A clean filter of git (``.gitattributes``) stores notebooks without outputs;
the file on disk keeps them, and so a page that is loaded anew finds its widgets. But git takes a file of
another size for a changed one, whatever its filter says: ``git status`` would name it, ``git pull`` refuse.
So, after each save, a file without a difference is added: that stages nothing and tells git its size.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

GIT_SECONDS = 10
KEPT = ("nbgrader", "tags")


def cleaned(text: str) -> str:
    """``text`` as it is stored; as it is where it is no notebook, such as one with conflicts of a merge."""
    try:
        notebook: dict[str, Any] = json.loads(text)
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                cell["execution_count"], cell["outputs"] = None, []
                # Tags and nbgrader's fields are the course's; all other metadata is of one session.
                kept = {key: cell["metadata"][key] for key in KEPT if key in cell["metadata"]}
                cell["metadata"] = kept
        metadata = notebook["metadata"]
        language = {"name": metadata.get("language_info", {}).get("name", "python")}
        notebook["metadata"] = {"kernelspec": metadata["kernelspec"], "language_info": language}
    except (ValueError, KeyError, TypeError, AttributeError):
        return text
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def tell_git(os_path: str, **_: object) -> None:
    """JupyterLab's hook after a save (``FileContentsManager.post_save_hook``). A save must not fail by it."""
    path = Path(os_path)
    if path.suffix != ".ipynb":
        return
    try:
        if _git(path, "diff", "--quiet", "--", path.name) == 0:
            _git(path, "add", "--update", "--", path.name)
    except (OSError, subprocess.SubprocessError):
        return


def _git(path: Path, *arguments: str) -> int:
    return subprocess.run(
        ["git", *arguments], check=False, cwd=path.parent, capture_output=True, timeout=GIT_SECONDS
    ).returncode


if __name__ == "__main__":
    sys.stdout.buffer.write(cleaned(sys.stdin.buffer.read().decode()).encode())
