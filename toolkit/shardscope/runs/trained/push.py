"""``run.push_to_hub()``: the trained model as a repository of the Hugging Face Hub. Imports no torch."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from shardscope.core.errors import check_flag, get_first_line, refuse
from shardscope.records.folder import MERGED
from shardscope.runs.trained.model_card import README, write_model_card
from shardscope.runs.trained.model_files import refuse_without_model
from shardscope.training.weights.weights_folder import ADAPTER_CONFIG

if TYPE_CHECKING:
    from shardscope.runs.run import Run

SUFFIXES = (".json", ".safetensors", ".md", ".jinja", ".txt", ".model")
"""Files of weights, configs, tokenizers and chat templates. Others of a folder are not uploaded."""


def push_to_hub(run: Run, repo_id: str, *, private: bool = True, merged: bool = False) -> str:
    """Upload the model of ``run``. Return the repository's address. See :meth:`Run.push_to_hub`."""
    check_flag("run.push_to_hub private", private)
    is_merged = check_flag("run.push_to_hub merged", merged)
    folder = find_folder(run, "run.push_to_hub", is_merged=is_merged)
    files = list_files(folder)
    try:
        import huggingface_hub
        from huggingface_hub import CommitOperationAdd, HfApi
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        message = 'Pushing needs huggingface_hub: pip install "shardscope[train]".'
        raise ImportError(message) from None
    if not isinstance(repo_id, str):
        refuse("run.push_to_hub repo_id", repo_id, "a repository's name", "'your-name/your-model'")
    if huggingface_hub.get_token() is None:
        fix = "`hf auth login` in a terminal, or HF_TOKEN in the environment"
        refuse("run.push_to_hub token", "missing", "a token of the Hub that may write", fix)
    api = HfApi()
    try:
        repository = api.create_repo(repo_id, private=private, exist_ok=True)
        # An existing repository keeps its visibility, whatever was asked for.
        is_private = api.model_info(repository.repo_id).private is True
    except HFValidationError as error:
        refuse("run.push_to_hub repo_id", repo_id, str(error).splitlines()[0], "'your-name/your-model'")
    except Exception as error:
        _raise_for_hub(repo_id, error)
    if private and not is_private:
        allowed = "a private repository, or a new name: this one exists, and is public"
        refuse("run.push_to_hub repo_id", repository.repo_id, allowed, "another name, or private=False")
    if not (folder / README).exists():
        write_model_card(run, folder, is_merged=folder.name == MERGED)
        files.append(folder / README)
    additions = [CommitOperationAdd(path_in_repo=file.name, path_or_fileobj=file) for file in files]
    try:
        api.create_commit(repository.repo_id, additions, commit_message=f"Upload the model of {run.name}")
    except Exception as error:
        _raise_for_hub(repository.repo_id, error)
    return str(repository)


def find_folder(run: Run, function: str, *, is_merged: bool) -> Path:
    """Return the folder of the trained model, or of its adapters merged into their base.

    Raises ``ValueError`` naming ``function`` if there is none, or if the adapters have not been merged.
    """
    folder = run.model
    if folder is None:
        refuse_without_model(run, f"{function} run")
    if not is_merged or not (folder / ADAPTER_CONFIG).exists():
        return folder
    folder = run.folder / MERGED
    if folder.is_symlink() or not folder.is_dir():
        refuse(f"{function} run", run.name, "a run whose adapters are merged", "ss.merge(run) first")
    return folder


def list_files(folder: Path) -> list[Path]:
    """Return the files of a model's folder that are uploaded.

    Raises ``ValueError`` for a link among them: the folder may come from anybody, and a link may lead to a
    file of this user's that nobody else should read.
    """
    files = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and path.name[0] != ".")
    for file in files:
        if not stat.S_ISREG(file.lstat().st_mode):
            refuse("run.push_to_hub file", file.name, "regular files, no links", "a copy of the file itself")
    return files


def _raise_for_hub(repo_id: str, error: Exception) -> NoReturn:
    from huggingface_hub import constants

    detail = get_first_line(error)
    raise RuntimeError(
        f"The model was not pushed to {repo_id} on {constants.ENDPOINT}: {detail} Nearest fix: check the "
        "network, HF_ENDPOINT and HF_HUB_OFFLINE, and that the token may write there (`hf auth whoami`)."
    ) from error
