"""Model folders of the Hugging Face Hub: found in its cache, or downloaded in a process of its own.

``python -m shardscope.training.weights.hub_folder org/name`` downloads one and prints its folder.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from shardscope.machine.hub import find_hub_problem
from shardscope.training.weights.example_models import Report, run_process
from shardscope.training.weights.weights_folder import CONFIG, WeightsFolder

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "README.md"]
"""What a fine-tune reads: no pickled weights, and no code."""
SUBFOLDERS = ["*/*"]


def is_hub_name(text: str) -> bool:
    """Return whether ``text`` has the form ``org/name``."""
    return HUB_NAME.fullmatch(text) is not None


def find_in_cache(repo_id: str) -> Path | None:
    """Return the folder of a model in the Hub's cache; None if it is not there, or not complete."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(repo_id, CONFIG)
    if not isinstance(config, str):
        return None
    try:
        return WeightsFolder.open(Path(config).parent, "weights").path
    except ValueError:
        return None


def download(repo_id: str, report: Report) -> Path:
    """Download a model into the Hub's cache and return its folder.

    Raises ``RuntimeError`` if the Hub does not serve it or the download fails.
    """
    report(f"looking for {repo_id} on the Hub", 0.02)
    problem = find_hub_problem(repo_id, CONFIG, "model")
    if problem is not None:
        raise RuntimeError(f"{repo_id} cannot be downloaded: {problem.reason}. Nearest fix: {problem.fix}.")
    command = [sys.executable, "-m", "shardscope.training.weights.hub_folder", repo_id]
    output = run_process(command, lambda: report(f"downloading {repo_id}", 0.1), HF_HUB_OFFLINE="0")
    return Path(output.strip().splitlines()[-1])


def main() -> None:
    """Download the model that the command line names."""
    from huggingface_hub import snapshot_download

    print(snapshot_download(sys.argv[1], allow_patterns=FILES, ignore_patterns=SUBFOLDERS))


if __name__ == "__main__":
    main()
