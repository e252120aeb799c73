"""Check of one machine before a workshop: what the course needs, what is here, and a fix for what is missing.

``make workshop-check`` executes ``notebooks/91_workshop_check.ipynb``, which calls these functions in a real
kernel, and prints their tables.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import webbrowser
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path

from shardscope.core.number_format import format_gib
from shardscope.frameworks.registry import frameworks
from shardscope.machine.host import count_cores
from shardscope.machine.processes import explain_missing_linux
from shardscope.records.folder import FINAL
from shardscope.teach.attempts import find_folder

MIN_PYTHON = (3, 11)
MIN_CORES = 2
"""One for each rank of the course's runs."""
MIN_MEMORY_BYTES = 3 * 2**30
"""For two CPU ranks, their launcher and supervisor, and the notebook's kernel; each imports torch."""
MIN_DISK_BYTES = 2 * 2**30
"""For the run folders of a day, with their traces and checkpoints."""
MIN_SHARED_BYTES = 64 * 2**20
"""Docker's default of /dev/shm, through which data loaders and torch's shared tensors go."""
RUN_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that the course needs."""

    name: str
    ok: bool
    found: str
    """What is here."""
    fix: str = ""
    """What to do if it is not enough."""


@dataclass(frozen=True)
class CheckTable:
    """Results of several checks: a plain table, in a notebook an HTML table. It is true if all are ok."""

    checks: tuple[Check, ...]

    def __bool__(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def verdict(self) -> str:
        """Return one sentence."""
        missing = [check.name for check in self.checks if not check.ok]
        return f"To do: {', '.join(missing)}." if missing else "This machine is ready for the course."

    def __str__(self) -> str:
        width = max(len(check.name) for check in self.checks)
        lines = []
        for check in self.checks:
            lines.append(f"{'ok' if check.ok else 'FAILED':6}  {check.name:{width}}  {check.found}")
            if not check.ok:
                lines.append(f"{'':6}  {'':{width}}  fix: {check.fix}")
        return "\n".join([*lines, self.verdict])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{'ok' if check.ok else '<b>failed</b>'}</td><td>{escape(check.name)}</td>"
            f"<td style='text-align:left'>{escape(check.found)}"
            + ("" if check.ok else f"<br><b>fix:</b> {escape(check.fix)}")
            + "</td></tr>"
            for check in self.checks
        )
        return f"<table>{rows}</table><p role='status'><b>{escape(self.verdict)}</b></p>"


def check_machine(folder: str | os.PathLike[str] = ".") -> CheckTable:
    """Check versions, cores, memory, disk, ports, JupyterLab and browser. ``folder``: of the notebooks."""
    place = Path(folder)
    return CheckTable(
        (
            _check_system(),
            _check_python(),
            *_check_packages(),
            _check_jupyterlab(),
            _check_browser(),
            _check_cores(),
            _check_memory(),
            *_check_disk(place),
            _check_shared_memory(),
            _check_ports(),
        )
    )


def check_run(folder: str | os.PathLike[str] = "runs", num_steps: int = 3) -> CheckTable:
    """Train a tiny model on two CPU ranks, as the notebooks of the course do; it takes some ten seconds."""
    import shardscope as ss

    plan = ss.Plan(
        ss.Architecture.of_size("2m"),
        ss.Cluster.parse("2xcpu"),
        ss.Recipe(seq_len=64, micro_batch_size=2, global_batch_size=4, precision="fp32"),
        ss.Layout.ddp(),
    )
    name = "a run on two ranks"
    fix = "read run.error of the newest run: ss.runs()[-1].error"
    try:
        run = ss.launch(plan, ss.Pretrain(num_steps=num_steps), folder=folder)
        status = run.wait(RUN_SECONDS)
    except (ValueError, ImportError, OSError) as error:
        return CheckTable((Check(name=name, ok=False, found=str(error), fix="the checks above"),))
    if status == "finished":
        losses = [line["loss"] for line in run.metrics() if line["rank"] == 0]
        return CheckTable((Check(name=name, ok=True, found=f"{len(losses)} steps, loss {losses[-1]:.2f}"),))
    if status not in FINAL:  # It took longer than RUN_SECONDS.
        run.stop()
        fix = "close what else runs here, then try again"
    return CheckTable((Check(name=name, ok=False, found=f"{status}: {run.reason}", fix=fix),))


# ---- Each check ----


def _check_system() -> Check:
    reason = explain_missing_linux("The course")
    return Check(
        name="Linux",
        ok=reason is None,
        found=reason or f"{os.uname().sysname} {os.uname().release}",
        fix="WSL 2, or an account on a Linux server",
    )


def _check_python() -> Check:
    found = ".".join(map(str, sys.version_info[:3]))
    wanted = ".".join(map(str, MIN_PYTHON))
    return Check(
        name=f"Python {wanted} or newer",
        ok=sys.version_info[:2] >= MIN_PYTHON,
        found=found,
        fix=f"make env PYTHON=python{wanted}",
    )


def _check_packages() -> Iterator[Check]:
    """Yield one check for all packages, or one for each that is missing or too old."""
    names, wrong = [], []
    for name, wanted, is_new_enough in _list_requirements():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(Check(name=name, ok=False, found="not installed", fix=_describe_installation()))
            continue
        names.append(name)
        if not is_new_enough(found):
            fix = f'pip install "{name}{wanted}"'
            wrong.append(Check(name=name, ok=False, found=f"{found}, needs {wanted}", fix=fix))
    if wrong:
        yield from wrong
    else:
        torch, lab = importlib.metadata.version("torch"), importlib.metadata.version("jupyterlab")
        found = f"{len(names)} packages; torch {torch}, JupyterLab {lab}"
        yield Check(name="packages", ok=True, found=found)


def _list_extras() -> list[str]:
    """Return the extras that the course needs: notebooks 03 to 08 train with every framework."""
    provided = importlib.metadata.metadata("shardscope").get_all("Provides-Extra") or ()
    return ["train", *(name for name in frameworks if name in provided), "lab"]


def _describe_installation() -> str:
    return f'make env, in the clone; or pip install "shardscope[{",".join(_list_extras())}]"'


def _list_requirements() -> list[tuple[str, str, Callable[[str], bool]]]:
    """Return name, wanted versions, and a test of a version, of each package of the course's extras."""
    from packaging.requirements import Requirement

    listed = {}
    for text in importlib.metadata.requires("shardscope") or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if requirement.name == "shardscope":  # An extra that contains another one.
            continue
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *_list_extras())):
            listed[requirement.name] = requirement.specifier
    return [
        (name, str(wanted), partial(wanted.contains, prereleases=True))
        for name, wanted in sorted(listed.items())
    ]


def _check_jupyterlab() -> Check:
    """Check that JupyterLab's front end has the widgets: it needs both, in the environment that starts it."""
    extensions = Path(sys.prefix, "share", "jupyter", "labextensions")
    wanted = ("@jupyter-widgets/jupyterlab-manager", "anywidget")
    missing = [name for name in wanted if not (extensions / name / "package.json").is_file()]
    return Check(
        name="JupyterLab's widgets",
        ok=not missing,
        found=f"missing: {', '.join(missing)}" if missing else ", ".join(wanted),
        fix="where JupyterLab is: pip install --force-reinstall jupyterlab-widgets anywidget",
    )


def _check_browser() -> Check:
    """Report the browser. None is no failure: the page may be opened from another machine."""
    for program in ("chromium", "chromium-browser", "google-chrome", "firefox"):
        if shutil.which(program):
            return Check(name="browser", ok=True, found=program)
    try:
        return Check(name="browser", ok=True, found=getattr(webbrowser.get(), "name", "the system's"))
    except webbrowser.Error:
        found = "none here: open the address that JupyterLab prints in a browser of your laptop"
        return Check(name="browser", ok=True, found=found)


def _check_cores() -> Check:
    cores = count_cores()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return Check(
        name=f"{MIN_CORES} cores",
        ok=cores >= MIN_CORES,
        found=f"{cores}; load average {load:.1f}",
        fix="ask for 2 CPUs: docker run --cpus=2, sbatch --cpus-per-task=2",
    )


def _check_memory() -> Check:
    from shardscope.runs.watch.host_monitor import read_free_host_memory

    free, total = read_free_host_memory()
    return Check(
        name=f"{format_gib(MIN_MEMORY_BYTES)} GiB of free memory",
        ok=free >= MIN_MEMORY_BYTES,
        found=f"{format_gib(free)} of {format_gib(total)} GiB",
        fix="shut down other kernels (in JupyterLab: Running Terminals and Kernels) and close other programs",
    )


def _check_disk(folder: Path) -> Iterator[Check]:
    """Yield the checks of the folders that the notebooks write: runs and answers."""
    for name, place in (("runs", folder / "runs"), ("answers", folder / find_folder())):
        try:
            place.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=place):
                free = shutil.disk_usage(place).free
        except OSError as error:
            found = f"{place.absolute()} cannot be written: {error.strerror or error}"
            fix = "copy the notebooks into your home folder"
            if name == "answers" and os.environ.get("SHARDSCOPE_ANSWERS"):
                fix = "the instructor makes the folder of SHARDSCOPE_ANSWERS writable: chmod g+w"
            yield Check(name=f"folder of {name}", ok=False, found=found, fix=fix)
            continue
        yield Check(
            name=f"folder of {name}",
            ok=free >= MIN_DISK_BYTES,
            found=f"{format_gib(free)} GiB free in {place.absolute()}",
            fix=f"free {format_gib(MIN_DISK_BYTES)} GiB there, such as ended runs in notebooks/runs",
        )


def _check_shared_memory() -> Check:
    place = Path("/dev/shm")
    free = shutil.disk_usage(place).free if place.is_dir() else 0
    return Check(
        name="shared memory (/dev/shm)",
        ok=free >= MIN_SHARED_BYTES,
        found=f"{free / 2**20:,.0f} MiB free",
        fix="docker run --shm-size=1g, or delete what is left in /dev/shm",
    )


def _check_ports() -> Check:
    """Check that one process can connect to another on this machine, as ranks do and a browser does."""
    name = "ports of this machine"
    fix = "allow connections to 127.0.0.1 in the firewall or sandbox"
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(5.0)
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5.0):
                server.accept()[0].close()
    except OSError as error:
        return Check(name=name, ok=False, found=f"no connection to 127.0.0.1: {error}", fix=fix)
    return Check(name=name, ok=True, found="a connection to 127.0.0.1 was accepted")


# ---- The notebook, from the command line ----


def execute_notebook(notebook: Path) -> bool:
    """Execute ``notebook`` in a new kernel and print its tables. Return whether all of it is ok."""
    command = [
        sys.executable,
        "-m",
        "nbconvert",
        "--to",
        "notebook",
        "--execute",
        "--allow-errors",
        "--stdout",
    ]
    done = subprocess.run([*command, str(notebook)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["nbconvert printed no message"])[-1]
        check = Check(name="a notebook's kernel", ok=False, found=last, fix=_describe_installation())
        print(CheckTable((*check_machine(notebook.parent).checks, check)))
        return False
    all_ok = True
    for cell in json.loads(done.stdout)["cells"]:
        for output in cell.get("outputs", ()):
            if output["output_type"] == "error":
                all_ok = False
                print(f"FAILED  {output['ename']}: {output['evalue']}")
            text = "".join(output.get("data", {}).get("text/plain", ()))
            if text.startswith(("ok ", "FAILED")):
                all_ok = all_ok and "FAILED" not in text
                print(text)
    return all_ok


if __name__ == "__main__":
    sys.exit(0 if execute_notebook(Path(sys.argv[1])) else 1)
