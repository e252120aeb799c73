"""Model folders of the Hugging Face Hub: found in its cache, or downloaded in a process of its own.

``python -m shardscope.training.weights.hub_folder org/name`` downloads one and prints its folder.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from pathlib import Path

from shardscope.machine.hub import find_hub_problem
from shardscope.training.data.weights_tokenizer import WeightsTokenizer
from shardscope.training.weights.example_models import Report, run_process
from shardscope.training.weights.weights_folder import CONFIG, PICKLES, WeightsFolder

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "README.md"]
"""What a fine-tune reads: no pickled weights, and no code."""
NOT_READ = ["*/*", "consolidated*"]
"""Subfolders, and the weights once more in the format of Mistral's own library, beside model.safetensors."""
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


def is_hub_name(text: str) -> bool:
    """Return whether ``text`` has the form ``org/name``."""
    return HUB_NAME.fullmatch(text) is not None


def find_hub_name(folder: Path) -> str | None:
    """Return "org/name" of a model whose folder is in the Hub's cache; None for other folders."""
    # .../models--org--name/snapshots/<commit>
    for part in folder.parts:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    return None


def find_in_cache(repo_id: str) -> Path | None:
    """Return the folder of a model in the Hub's cache; None if it is not there, or not complete.

    A download that was interrupted has an index without all of its files, or no tokenizer.
    """
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(repo_id, CONFIG)
    if not isinstance(config, str):
        return None
    try:
        folder = WeightsFolder.open(Path(config).parent, "weights")
        is_complete = bool(folder.tensors) and WeightsTokenizer(folder).is_there()
    except ValueError:
        return None
    return folder.path if is_complete else None


def download(repo_id: str, report: Report) -> Path:
    """Download a model into the Hub's cache and return its folder.

    Raises ``RuntimeError`` if the Hub does not serve it, if the download fails, and if a fine-tune cannot use
    what it has, such as pickled weights.
    """
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    report(f"looking for {repo_id} on the Hub", 0.02)
    problem = find_hub_problem(repo_id, CONFIG, "model")
    if problem is not None:
        raise RuntimeError(f"{repo_id} cannot be downloaded: {problem.reason}. Nearest fix: {problem.fix}.")
    command = [sys.executable, "-m", "shardscope.training.weights.hub_folder", repo_id]
    blobs = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo_id, repo_type="model") / "blobs"

    def report_size() -> None:
        report(f"downloading {repo_id}: {_measure_folder(blobs) / 1e9:.2f} GB", 0.1)

    output = run_process(command, report_size, HF_HUB_OFFLINE="0")
    folder = Path(output.strip().splitlines()[-1])
    try:
        WeightsFolder.open(folder, "weights")
    except ValueError as error:
        raise RuntimeError(f"{repo_id} was downloaded, but cannot be fine-tuned: {error}") from error
    return folder


def _measure_folder(folder: Path) -> int:
    """Return the bytes of the files in ``folder``, which another process is writing."""
    total = 0
    for path in folder.iterdir() if folder.is_dir() else ():
        with suppress(OSError):  # Renamed when it is complete.
            total += path.stat().st_size
    return total


def find_weights_problem(files: list[str]) -> str:
    """Return why a repository of ``files`` has no weights that can be read, with a fix; empty if it has."""
    read = (name for name in files if "/" not in name and not name.startswith("consolidated"))
    if any(name.endswith(".safetensors") for name in read):
        return ""
    if any(name in PICKLES or name.endswith(PICKLE_SUFFIXES) for name in files):
        return (
            "only safetensors are read, and it has only pickles, which run code when they are opened. "
            "Nearest fix: a copy with safetensors, or, if trusted, save_pretrained(folder) by transformers"
        )
    return "it has no model.safetensors. Nearest fix: the repository of the model itself"


def main() -> None:
    """Download the model that the command line names, or exit with the reason in one line."""
    from huggingface_hub import HfApi, snapshot_download

    repo_id = sys.argv[1]
    try:
        problem = find_weights_problem(HfApi().list_repo_files(repo_id))
        if not problem:
            print(snapshot_download(repo_id, allow_patterns=FILES, ignore_patterns=NOT_READ))
    except Exception as error:
        # huggingface_hub wraps what happened in advice of several lines.
        cause = error.__cause__ or error
        problem = " ".join(str(cause).split()) or type(cause).__name__
    if problem:
        sys.exit(f"{repo_id} cannot be downloaded: {problem}.")


if __name__ == "__main__":
    main()
