"""Build the environment that Binder builds from ``binder/``, and run the course's first notebook in it.

As repo2docker does: ``pip install -r binder/requirements.txt`` in the repository, then ``binder/postBuild``,
with the Python of ``binder/runtime.txt``, or this one where that is not installed. There is no torch, so the
cells that plan must run, and those that launch must say what is missing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
NOTEBOOKS = ("00_studio.ipynb", "01_what_fills_a_gpu.ipynb")


def run(command: list[str | Path], folder: Path, environment: Path) -> str:
    """Run ``command`` with the environment's programs first, and return what it prints. Exit if it fails."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    variables["PATH"] = f"{environment / 'bin'}{os.pathsep}{variables.get('PATH', '')}"
    done = subprocess.run(command, cwd=folder, env=variables, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def find_python(name: str) -> str:
    """Return the Python ``name``, such as "python3.12", or this one where that does not start."""
    path = shutil.which(name)
    # pyenv puts a program of every name on PATH, which fails for versions that it has not been told to use.
    starts = path and subprocess.run([path, "--version"], check=False, capture_output=True).returncode == 0
    return path if path and starts else sys.executable


def list_outcomes(executed: str) -> list[tuple[str, str]]:
    """Return the first line of each code cell that has one, and its error ("" without)."""
    outcomes = []
    for cell in json.loads(executed)["cells"]:
        if cell["cell_type"] == "code":
            errors = [output for output in cell["outputs"] if output["output_type"] == "error"]
            text = f"{errors[0]['ename']}: {errors[0]['evalue']}" if errors else ""
            outcomes.append(("".join(cell["source"]).partition("\n")[0], text))
    return outcomes


def main() -> int:
    """Return the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        environment, work = Path(folder, "environment"), Path(folder, "notebooks")
        wanted = (REPOSITORY / "binder" / "runtime.txt").read_text(encoding="utf-8").strip().replace("-", "")
        base = os.environ.get("BINDER_PYTHON") or find_python(wanted)
        subprocess.run([base, "-m", "venv", environment], check=True)
        print(run([environment / "bin" / "python", "--version"], Path(folder), environment).strip())
        python = environment / "bin" / "python"
        requirements = REPOSITORY / "binder" / "requirements.txt"
        run([python, "-m", "pip", "install", "--quiet", "-r", requirements], REPOSITORY, environment)
        run([REPOSITORY / "binder" / "postBuild"], REPOSITORY, environment)
        print(
            run(
                [python, "-c", "import jupyterlab; print('JupyterLab', jupyterlab.__version__)"],
                work.parent,
                environment,
            ).strip()
        )
        shutil.copytree(REPOSITORY / "notebooks", work)
        failed = False
        for name in NOTEBOOKS:
            command = [
                python,
                "-m",
                "nbconvert",
                "--to",
                "notebook",
                "--execute",
                "--allow-errors",
                "--stdout",
                name,
            ]
            for first_line, error in list_outcomes(run(command, work, environment)):
                # A cell that trains, and those that use its run.
                is_expected = (
                    not error or "shardscope[train]" in error or error.startswith("MissingCellError")
                )
                failed = failed or not is_expected
                print(
                    f"{name}: {'ok    ' if is_expected else 'FAILED'} {first_line}{error and ' -> ' + error}"
                )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
